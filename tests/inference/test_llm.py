"""``LLM``: against transformers, against ``generate``, alone and on two ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tasks
from generate_runs import arguments, read_output, write_rows
from generate_runs import model as model  # a fixture
from generators import transformers_greedy
from ranks import Program, run_ranks
from rlhf_spmd import LLM, RequestOutput, SamplingParams, generate
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.generation import GenerationConfig
from rlhf_spmd.generation.sequence import NotFinite
from rlhf_spmd.inference.llm import generate_outputs
from rlhf_spmd.inference.loaded_model import ModelConfig
from rlhf_spmd.inference.outputs import OutputBuilder
from rlhf_spmd.inference.requests import EngineConfig, RequestProcessor, prepare_model
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.parallel.world import World

PROMPTS = ["abc abd", "x", "The quick brown fox", "aaaa bbbb cccc dddd eeee ffff"]
NUM_IDS = 98  # of the tokenizer; the model's vocabulary is larger
TALK = [{"role": "user", "content": "abd"}]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    yield LLM(model, seed=4, page_size=8, max_num_seqs=4)
    tasks.leave_world()


def contents(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(output) | {"request_id": None} for output in outputs]


def test_greedy_answers_are_those_of_transformers(llm: LLM, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == ids and [output.prompt for output in outputs] == PROMPTS
    for output, tokens in zip(outputs, transformers_greedy(str(model), ids, 20), strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == tokens and completion.text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert (completion.finish_reason, completion.stop_reason) == ("stop" if tokens[-1] == 2 else "length", None)
    (chat,) = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=9))
    assert chat.prompt == tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert [chat.outputs[0].token_ids] == transformers_greedy(str(model), [tokenizer(chat.prompt)["input_ids"]], 9)
    (by_ids,) = llm.generate(ids[0], SamplingParams(temperature=0, max_tokens=20))
    assert by_ids.outputs == outputs[0].outputs and by_ids.prompt is None


def test_log_probs_of_prompts_and_responses_are_those_of_transformers(llm: LLM, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    params = [
        SamplingParams(max_tokens=12, n=2, temperature=0.7, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3),
        SamplingParams(max_tokens=7, logprobs=0),
        SamplingParams(max_tokens=5, prompt_logprobs=0),
        SamplingParams(max_tokens=5),
    ]
    for output, asked in zip(llm.generate(PROMPTS, params), params, strict=True):
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            with torch.no_grad():
                table = reference(torch.tensor([prompt + completion.token_ids])).logits[0].log_softmax(-1)
            of_response = table[len(prompt) - 1 : -1]
            log_probs = of_response.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert completion.cumulative_logprob == pytest.approx(float(log_probs.sum()), abs=1e-4)
            check_entries(completion.logprobs, completion.token_ids, of_response, asked.logprobs)
        assert output.prompt_logprobs is None or output.prompt_logprobs[0] is None
        entries = output.prompt_logprobs and output.prompt_logprobs[1:]
        check_entries(entries, prompt[1:], table[: len(prompt) - 1], asked.prompt_logprobs)


def check_entries(entries: Any, tokens: list[int], table: torch.Tensor, likeliest: int | None) -> None:
    """None were asked for: there are none."""
    if likeliest is None:
        assert entries is None
        return
    for entry, token, row in zip(entries, tokens, table, strict=True):
        best = row[:NUM_IDS].topk(likeliest).indices.tolist()
        assert next(iter(entry)) == token and set(entry) == {token, *best}
        for other, log_prob in entry.items():
            assert log_prob.logprob == pytest.approx(float(row[other]), abs=2e-5)
            assert log_prob.rank == (best.index(other) + 1 if other in best else None)


def test_draws_are_those_of_generate_and_follow_a_seed_of_their_own(model: Path, llm: LLM, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    settings = ["sampling.n=3", "sampling.max_response_length=10", "sampling.seed=4", "sampling.temperature=0.8"]
    generate.main(arguments(model, rows, tmp_path / "out.jsonl", *settings))
    llm.processor._num_rows = 0  # as in a new one
    params = SamplingParams(n=3, max_tokens=10, temperature=0.8)
    outputs = llm.generate(PROMPTS, params)
    drawn = [row["response_ids"] for row in read_output(tmp_path / "out.jsonl")]
    assert [completion.token_ids for output in outputs for completion in output.outputs] == drawn
    assert contents(llm.generate(PROMPTS, params)) != contents(outputs)
    seeded = [SamplingParams(n=2, max_tokens=10, seed=seed) for seed in (7, 7, -3, 2**62)]
    together = contents(llm.generate(PROMPTS, seeded))
    assert together == [contents(llm.generate(*pair))[0] for pair in zip(PROMPTS, seeded, strict=True)]
    assert together[0]["outputs"][0]["token_ids"] != together[0]["outputs"][1]["token_ids"]
    assert contents(llm.generate(PROMPTS[0], dataclasses.replace(seeded[0], seed=8))) != together[:1]


def test_prompts_that_are_asked_differently_run_together(llm: LLM) -> None:
    base = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=list(range(3, 98)))
    (plain,) = llm.generate("abc", base)
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    assert len(text) == 24  # a character for each token, so that what follows stops where it says
    stop, token = text[9:12], ids[10]
    start, first = text.index(stop), ids.index(token)
    answers: list[tuple[dict[str, Any], tuple[str, str, Any]]] = [
        ({}, (text, "length", None)),
        ({"stop": stop}, (text[:start], "stop", stop)),
        ({"stop": [stop], "include_stop_str_in_output": True}, (text[: start + 3], "stop", stop)),
        ({"stop_token_ids": [token]}, (text[:first], "stop", token)),
        ({"stop_token_ids": [token], "include_stop_str_in_output": True}, (text[: first + 1], "stop", token)),
    ]
    others: list[dict[str, Any]] = [{"presence_penalty": 5.0}, {"max_tokens": None}, {"allowed_token_ids": [50, 51]}]
    params = [dataclasses.replace(base, **more) for more in (*(more for more, _ in answers), *others)]
    completions = [output.outputs[0] for output in llm.generate(["abc"] * len(params), params)]
    for completion, (_, answer) in zip(completions, answers, strict=False):
        assert (completion.text, completion.finish_reason, completion.stop_reason) == answer
    penalised, longest, limited = (completion.text for completion in completions[5:])
    assert penalised != text and set(limited) <= {chr(79), chr(80)}
    assert longest.startswith(text) and len(longest) + len("abc") <= 64


def test_special_tokens_and_the_end_of_text(llm: LLM) -> None:
    for more, answer in (
        ({}, ("", [2], "stop", None)),
        ({"ignore_eos": True, "skip_special_tokens": False}, ("</s></s></s>", [2, 2, 2], "length", None)),
        ({"ignore_eos": True}, ("", [2, 2, 2], "length", None)),
        ({"ignore_eos": True, "stop": "</s>"}, ("", [2], "stop", "</s>")),
    ):
        ((completion,),) = (o.outputs for o in llm.generate("abc", SamplingParams(max_tokens=3, logit_bias={2: 100.0}, **more)))
        assert (completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason) == answer
    (output,) = llm.generate("abc", SamplingParams(max_tokens=5, logit_bias={2: 100.0}, min_tokens=3))
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].token_ids[-1] == 2


def test_a_processor_says_what_is_drawn(llm: LLM) -> None:
    tokens, prefixes = [60, 61, 62, 2], []

    def follow(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        prefixes.append(list(ids))
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(tokens[len(ids)]), 0.0)

    plain = SamplingParams(seed=1)
    led, free = llm.generate(["abc", "abc"], [SamplingParams(logits_processors=[follow], seed=1), plain])
    assert led.outputs[0].token_ids == tokens and prefixes == [tokens[:i] for i in range(4)]
    assert free.outputs[0].token_ids != tokens and contents([free]) == contents(llm.generate("abc", plain))


def test_a_call_that_ended_early_leaves_nothing_behind(llm: LLM) -> None:
    """By an error in a processor, or by one that leaves nothing to draw."""

    def fail(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 3:
            raise RuntimeError("stopped")
        return logits

    before = contents(llm.generate(PROMPTS, SamplingParams(seed=1)))
    with pytest.raises(RuntimeError, match="stopped"):
        llm.generate(PROMPTS, SamplingParams(logits_processors=[fail]))
    for value in (math.nan, -math.inf):
        spoil = [lambda ids, logits, value=value: torch.full_like(logits, value) if len(ids) == 2 else logits]
        with pytest.raises(NotFinite, match="logits_processors"):
            llm.generate("abc", SamplingParams(logits_processors=spoil))
    assert contents(llm.generate(PROMPTS, SamplingParams(seed=1))) == before


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature=-1.0: must be 0 (greedy) or at least 0.001"),
        ({"temperature": 1e38}, "sampling_params.temperature=1e+38: must be 0 (greedy) or at least 0.001, at most 1"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_k": 2**31}, "sampling_params.top_k=2147483648: must be at most 2147483647, which 32 bits hold"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias.x='x' must be an integer"),
        ({"stop": [""]}, "sampling_params.stop=['']: a stop string must not be empty"),
        ({"logits_processors": max}, "logits_processors=<built-in function max> must be a list of functions"),
        (
            {"allowed_token_ids": []},
            "sampling_params.allowed_token_ids=[]: no token is left to draw; leave it out for all",
        ),
        ({"stop_token_ids": [-1]}, "sampling_params.stop_token_ids[0]=-1: must be at least 0"),
        ({"logit_bias": {-1: 2.0}}, "sampling_params.logit_bias.-1=-1: must be at least 0"),
    ],
)
def test_parameters_are_checked_where_they_are_made(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^\w") as refusal:
        SamplingParams(**params)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("a" * 60, {"min_tokens": 9}, "sampling_params.min_tokens=9: must be at most 4, the tokens that are left"),
        ("abc", {"stop_token_ids": [200]}, "sampling_params.stop_token_ids: token id 200 must lie in 0 .. 199"),
        ([[np.int64(5), 6]], {}, "prompt 0: 'prompt_token_ids' must be a non-empty list of token ids"),
        ("a" * 64, {}, "prompt 0 has 64 tokens, and a row may have 64"),
        ([[1, 200]], {}, "prompt 0: token id 200 in 'prompt_token_ids' must be less than the vocabulary size 200"),
        ([None], {}, "prompt 0: a prompt must be text or a list of chat messages, not NoneType"),
    ],
)
def test_what_cannot_be_is_said(llm: LLM, prompts: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^\w") as refusal:
        llm.generate(prompts, SamplingParams(**params))
    assert str(refusal.value).startswith(message)


def test_numbers_may_be_those_of_numpy(llm: LLM) -> None:
    plain = SamplingParams(n=2, temperature=0.5, seed=1, logit_bias={7: 1.0}, stop=["x", "y"])
    numbers = {"n": np.int64(2), "temperature": np.float32(0.5), "seed": np.int64(1), "logit_bias": {"7": np.float64(1)}}
    of_numpy = SamplingParams(**numbers, stop=("x", "y"))
    assert contents(llm.generate([np.array([5, 6])], of_numpy)) == contents(llm.generate([[5, 6]], plain))
    assert len(llm.generate([5], plain)) == 1  # one prompt of one token


def test_what_an_llm_cannot_be_is_said(llm: LLM, model: Path) -> None:
    for more, message in (
        ({"max_model_len": 65}, "max_model_len=65: the model's context is max_position_embeddings=64; lower it"),
        ({"tokenizer": "nowhere"}, "tokenizer directory 'nowhere' does not exist"),
        ({"pagesize": 8}, "unknown key 'generation.pagesize'; did you mean 'generation.page_size'?"),
        ({"tensor_parallel_size": 2}, "layout on all ranks"),
    ):
        with pytest.raises(ValueError, match=r"^\w") as refusal:
            LLM(model, **more)
        assert str(refusal.value).startswith(message), refusal.value
    for talk in ("hi", ["hi", "you"], [5]):
        with pytest.raises(ValueError, match=r"^a conversation is a list of messages"):
            llm.chat(talk)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompts are a NoneType: give a text, token ids"):
        llm.generate(None)
    with pytest.raises(ValueError, match="sampling_params are a dict: give SamplingParams"):
        llm.generate(["a"], {"n": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 of them for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)


MIXED = [
    SamplingParams(n=2, max_tokens=9, temperature=0.7, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=30, seed=3, top_p=0.9),
    SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.2, prompt_logprobs=0),
    SamplingParams(n=3, max_tokens=5),
]


def answer_on_rank(world: World, path: str, layout: LayoutConfig) -> Any:
    generation = GenerationConfig(page_size=8, max_num_seqs=4)
    config = EngineConfig(ModelConfig(path=path), layout=layout, generation=generation, seed=4)
    check_tree(config)
    processor = RequestProcessor(prepare_model(config, world.launch), world)
    builder = OutputBuilder(processor.engine.generator, processor.tokenizer)
    return contents(generate_outputs(processor, builder, processor.requests(processor.encode(PROMPTS), MIXED)))


@pytest.mark.parametrize("layout", [LayoutConfig(dp=2), LayoutConfig(tp=2)], ids=["dp2", "tp2"])
def test_two_ranks_answer_as_one_and_both_know_all(llm: LLM, model: Path, layout: LayoutConfig) -> None:
    llm.processor._num_rows = 0
    answers = rounded(contents(llm.generate(PROMPTS, MIXED)))
    assert run_ranks(2, answer_on_rank, str(model), layout) == [answers] * 2


def rounded(value: Any) -> Any:
    """Log-probs differ in their last digits between layouts."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def test_what_vllm_takes_is_taken(llm: LLM, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, tmp_path / "other")
    named = tmp_path / "other" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ ending }}"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"chat_template": template}))
    (tmp_path / "other" / "chat_template.jinja").write_text(template)
    other = LLM(model, tokenizer=tmp_path / "other", max_model_len=16, seed=None, page_size=8, max_num_seqs=4)
    greedy = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (short,) = other.generate("abc", greedy, use_tqdm=False)
    assert len(short.outputs[0].token_ids) == 13
    with pytest.raises(ValueError, match="prompt 0 has 16 tokens, and a row may have 16"):
        other.generate("a" * 16)
    (talk,) = other.chat(TALK, greedy, chat_template_kwargs={"ending": "!?"})
    assert talk.prompt == "abd!?" and other.chat(TALK, greedy)[0].prompt == "abd"
    with pytest.raises(ValueError, match=r"chat\.chat_template_kwargs\.tokenize is no variable"):
        other.chat(TALK, greedy, chat_template_kwargs={"tokenize": True})
    assert llm.chat(TALK)[0].prompt == "<|user|>abd<|assistant|>"
    of_tools = "{{ tools | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    assert llm.chat(TALK, tools=tools, chat_template=of_tools)[0].prompt == "2abd"
    with pytest.raises(ValueError, match="the chat template does not tell the model of tools"):
        llm.chat(TALK, tools=tools)
    assert "responses" not in capsys.readouterr().err  # a bar is for terminals


SCRIPT = """
import sys
from rlhf_spmd import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2)
(output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6))
sys.stdout.write(f"{output.outputs[0].token_ids}\\n")
"""


def test_a_script_on_two_ranks(llm: LLM, model: Path, tmp_path: Path) -> None:
    script, output = tmp_path / "ask.py", tmp_path / "output.txt"
    script.write_text(SCRIPT)
    program = Program(2, [str(model)], output, tasks.environment(), str(script))
    assert tasks.finish(program, tmp_path) == 0, output.read_text()
    ids = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert output.read_text().splitlines() == [str(ids)] * 2
