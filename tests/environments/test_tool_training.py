"""A step of GRPO on models that call tools, in templates of several styles: what is learnt, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_several import LETTERS

import tasks
from chat_styles import DEEPSEEK, GLM, QWEN3, STRICT_OSS
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.train import prepare
from tiers import tiers

SEEN: list[torch.Tensor] = []  # of each row that the loss got: log-probs of its tokens
BEGIN, SEP, END = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("call\u2581begin", "sep", "call\u2581end")
)  # DeepSeek's marks


class Style(NamedTuple):
    """``ends``: tokens that end a turn. ``call``: what the model writes. ``observed``: what follows a turn with so many calls."""

    template: str
    ends: tuple[str, ...]
    call: str
    observed: Callable[[int], str]
    more: tuple[str, ...] = ()


STYLES = {
    "qwen3": Style(
        QWEN3,
        ("<|im_end|>",),
        '<tool_call>{"name": "find", "arguments": {"query": "nile"}}</tool_call>',
        lambda n: "\n" + n * "<|im_start|>user\n6650 km<|im_end|>\n" + "<|im_start|>assistant\n",
    ),
    "glm": Style(  # the mark of the observation ends the turn; the model writes that of the first
        GLM,
        ("<|observation|>",),
        "\n<tool_call>find\n<arg_key>query</arg_key>\n<arg_value>nile</arg_value>\n</tool_call>",
        lambda n: (n * "<|observation|>\n6650 km").removeprefix("<|observation|>") + "<|assistant|>",
    ),
    "gpt-oss": Style(  # refuses results without calls
        STRICT_OSS,
        ("<|call|>", "<|return|>"),
        '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"query": "nile"}',
        lambda n: "<|start|>functions.find to=assistant<|message|>6650 km<|end|><|start|>assistant",  # one call in a message
        ("data.template_date=2026-01-31",),
    ),
    "deepseek": Style(  # goes on behind the results without a mark
        DEEPSEEK,
        ("<|eos|>",),
        f'{BEGIN}find{SEP}{{"query": "nile"}}{END}',
        lambda n: n * "<output>6650 km</output>",
        ("environment.args.format=deepseek_v31",),
    ),
}


def recorded(log_prob: torch.Tensor, advantages: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    SEEN.extend(log_prob.detach().clone().split(lengths.tolist()))
    return -log_prob * advantages


def noted(completion_ids: list[list[int]], prompts: list[Any], path: str) -> list[float]:
    """Writes down the tokens of responses."""
    with Path(path).open("a") as file:
        file.writelines(json.dumps(ids) + "\n" for ids in completion_ids)
    return [float(len(ids) % 3) for ids in completion_ids]


def model_of(style: Style, directory: Path) -> list[str]:
    """Writes a random model and its tokenizer, one token for a character, an end or a call. Returns the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = [*style.ends, style.call]
    words = [*special, *LETTERS]
    shape = json.loads((tasks.task() / "actor" / "config.json").read_text())
    sizes = {"vocab_size": len(words), "max_position_embeddings": 1024, "eos_token_id": list(range(len(style.ends)))}
    write_random_model(directory, {**shape, **sizes}, 3)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": style.ends[0], "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": style.template}))
    return words


@pytest.mark.parametrize("name", tiers([*STYLES], ["qwen3", "gpt-oss"]))
def test_what_is_learnt_is_what_the_model_drew(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    style, actor = STYLES[name], tmp_path / "actor"
    words = model_of(style, actor)
    drawn = [*range(len(style.ends) + 1), words.index("a"), words.index("b")]
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "How long?"}]}) + "\n")
    grpo = {"name": "grpo", "ppo_mini_batch_size": 1, "loss_mode": "test_tool_training:recorded"}
    config = tasks.other_task({**grpo, "ppo_max_token_len_per_gpu": 4000}, "actor")
    overrides = (
        *(f"models.actor.path={actor}", "models.actor.dtype=float64", "data.train_batch_size=1", "sampling.n=8"),
        *(f"data.path={tmp_path}/data.jsonl", "data.max_prompt_length=700", "data.max_response_length=200"),
        *("environment.cls=tools", "environment.args.tools=[test_several:find]", "environment.max_turns=3"),
        *(f"sampling.allowed_token_ids={drawn}", f"sampling.logit_bias={{0: 1.0, {len(style.ends)}: 1.5}}"),
        *("reward.function=test_tool_training:noted", f"reward.kwargs={{path: {tmp_path}/ids.jsonl}}", *style.more),
    )
    SEEN.clear()
    tasks.train_alone(tmp_path / "run", 1, *overrides, config=Path(config))
    responses = [json.loads(line) for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
    job = prepare(config, tasks.settings(tmp_path / "run", 1, *overrides), 1)
    prompt = job.training["prompts"].batch([0], [0])["prompt_ids"].rows()[0].tolist()
    tokenizer, model = load_tokenizer(actor), AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float64)
    expected, turns = list[torch.Tensor](), list[int]()
    for ids in responses:
        own, calls, at = list[int](), 0, 0
        turns.append(1)
        while at < len(ids):
            own.append(at)
            calls, at = calls + (ids[at] == len(style.ends)), at + 1
            if ids[at - 1] < len(style.ends) and at < len(ids):
                observed = tokenizer(style.observed(calls), add_special_tokens=False)["input_ids"]
                assert calls and ids[at : at + len(observed)] == observed, tokenizer.decode(ids)
                calls, at = 0, at + len(observed)
                turns[-1] += 1
        with torch.no_grad():
            log_probs = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        expected.append(torch.stack([log_probs[len(prompt) + i - 1, ids[i]] for i in own]))
    assert len(SEEN) == len(responses) == 8 and max(turns) == 3
    for row in expected:
        assert any(
            len(row) == len(other) and torch.allclose(row, other, rtol=0, atol=1e-6) for other in SEEN
        )  # rotary tables are float32
