"""Sampling options: against plain loops, against transformers, through ranks, and in the file that ``generate`` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generate_runs import CONFIG as PROGRAM_CONFIG
from generate_runs import ROWS, arguments, read_output, run_program_on_rank, write_rows, write_tokenizer
from generators import MODELS, SMALL, alone, load, ragged_requests, row_of, tokens_of, transformers_greedy
from ranks import run_ranks
from rlhf_spmd import generate as program
from rlhf_spmd.generation import Completion, Generator, Request, SamplingConfig, StopStrings
from rlhf_spmd.generation.logit_rules import LogitRules
from rlhf_spmd.generation.sampler import row_keys, sample, uniform
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import local_logits
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from sampler_statistics import chi_square_z, draws, exact_probabilities

EOS = 2
OPTIONS = {
    "repetition": SamplingConfig(repetition_penalty=1.7),
    "frequency": SamplingConfig(frequency_penalty=0.9),
    "presence": SamplingConfig(presence_penalty=-1.1, temperature=0.8),
    "bias": SamplingConfig(logit_bias={3: 1.5, 7: -4.0, 11: 2.0}),
    "allowed": SamplingConfig(allowed_token_ids=list(range(0, 20, 2))),
    "forbidden": SamplingConfig(forbidden_token_ids=[3, 4, 5, 6, 11]),
    "minimum": SamplingConfig(min_response_length=9, stop_token_ids=[4, 5]),
    "all": SamplingConfig(
        repetition_penalty=0.7,
        frequency_penalty=-0.3,
        presence_penalty=0.5,
        logit_bias={3: 1.5, 4: 2.0, 11: 2.0},
        allowed_token_ids=list(range(1, 19)),
        forbidden_token_ids=[8],
        min_response_length=9,
        stop_token_ids=[4],
        temperature=1.3,
        min_p=0.02,
        top_k=12,
        top_p=0.9,
    ),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(path, MODELS["qwen3"], seed=7)
    return str(path)


def rules_in_loops(
    logits: np.ndarray, prompt: Sequence[int], drawn: Sequence[int], s: SamplingConfig, ends: set[int]
) -> np.ndarray:
    """The rules of one row, written down from their definition: fp64, one token after the other."""
    out = logits.astype(np.float64).copy()
    for token in range(len(out)):
        out[token] += s.logit_bias.get(token, 0.0)
        if token in [*prompt, *drawn]:
            out[token] *= s.repetition_penalty if out[token] < 0 else 1 / s.repetition_penalty
        out[token] -= s.frequency_penalty * list(drawn).count(token) + s.presence_penalty * (token in drawn)
        kept_out = token in s.forbidden_token_ids or (s.allowed_token_ids is not None and token not in s.allowed_token_ids)
        if kept_out or (token in ends and len(drawn) < s.min_response_length):
            out[token] = -math.inf
    return out


def grown(index: int, prompt: Sequence[int], drawn: Sequence[int], min_new: int = 0) -> SequenceState:
    return row_of(index, prompt, 1000, response=drawn, min_new=min_new)


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    s, generator = OPTIONS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(20, generator=generator)
    prompt, drawn, ends = [1, 3, 4, 3], [3, 5, 7, 5, 5, 11], {0, *s.stop_token_ids}
    p = exact_probabilities(rules_in_loops(logits.numpy(), prompt, drawn, s, ends), s)
    assert np.abs(p - exact_probabilities(logits.numpy(), replace(s, min_p=0.0, top_k=0, top_p=1.0))).max() > 0.02
    number = 40_000
    tokens = torch.tensor([[*prompt, *drawn, 9, 9]])  # what lies behind a row's end does not count
    rules = LogitRules(s, ends, [grown(0, prompt, drawn, s.min_response_length)], 20, torch.device("cpu"))
    lines = torch.zeros(number, dtype=torch.int64)
    changed = rules.apply(logits.expand(number, -1), lines, lines + len(prompt) + len(drawn), tokens)
    counts = np.bincount(sample(changed, s, draws(number)).numpy(), minlength=20)
    assert counts[p == 0].sum() == 0
    assert chi_square_z(counts, p) < 4.0


def test_rules_equal_transformers_processors() -> None:
    from transformers.generation import logits_process as hf

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=generator) * 3
    tokens = torch.randint(0, 50, (6, 12), generator=generator)
    rows = [grown(i, [0] * 4, [0] * 8, min_new=9) for i in range(6)]
    s = SamplingConfig(repetition_penalty=1.3, logit_bias={4: 2.5, 9: -1.0}, forbidden_token_ids=[7, 8], min_response_length=9)
    wanted = hf.SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -1.0]])(tokens, logits)
    wanted = hf.RepetitionPenaltyLogitsProcessor(1.3)(tokens, wanted)
    wanted = hf.MinNewTokensLengthLogitsProcessor(4, 9, EOS)(tokens, wanted)
    wanted = hf.SuppressTokensLogitsProcessor([7, 8])(tokens, wanted)
    found = LogitRules(s, {EOS}, rows, 50, torch.device("cpu")).apply(logits, torch.arange(6), torch.full((6,), 12), tokens)
    assert torch.equal(found, wanted) and not torch.equal(found, logits)


def redrawn(
    decoder: Decoder, requests: Sequence[Request], completions: Sequence[Completion], s: SamplingConfig
) -> list[list[int]]:
    """Each token again from the training forward's logits, the rules in loops, and the inverse of the distribution."""
    out = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
        with torch.no_grad():
            logits = local_logits(decoder, decoder(ids, PackedAttention([len(ids)]))).double().numpy()
        drawn: list[int] = []
        for position in range(len(completion.token_ids)):
            ruled = rules_in_loops(logits[len(request.prompt_ids) + position - 1], request.prompt_ids, drawn, s, {EOS, 4})
            u = float(uniform(row_keys(3, torch.tensor(5), torch.tensor([request.row_id])), torch.tensor([position]))[0])
            drawn.append(int(np.searchsorted(np.cumsum(exact_probabilities(ruled, s)), u, side="right")))
        out.append(drawn)
    return out


MANY = replace(OPTIONS["all"], allowed_token_ids=None, min_response_length=5, frequency_penalty=0.4, logprobs=3)


def generate_with_options(world: World, path: str, layout: Layout, changes: dict[str, Any]) -> list[Any]:
    """(row id, token ids, log-probs, ids and log-probs of the likeliest) of this rank's rows, ``MANY`` applied."""
    mesh = build_mesh(world, list(range(world.size)), layout)
    generator = Generator(load(path, mesh), mesh, replace(SMALL, **changes), {EOS})
    requests = [r for r in ragged_requests(samples=2) if r.group_id % layout.dp == mesh.dp_rank]
    completions = generator.generate(requests, MANY, 3, 5)
    assert (generator.stats.preemptions > 0) == ("num_pages" in changes)
    return [
        (c.row_id, c.token_ids, c.log_probs_t1.tolist(), *(part.tolist() for part in c.top_log_probs or ()))
        for c in completions
    ]


def test_tokens_are_those_of_the_definition(qwen3: str) -> None:
    mesh = alone()[1]
    generator = Generator(load(qwen3, mesh), mesh, SMALL, {EOS})
    requests = ragged_requests(samples=2)
    completions = generator.generate(requests, MANY, 3, 5)
    assert tokens_of(completions) == redrawn(generator.decoder, requests, completions, MANY)
    assert min(len(c.token_ids) for c in completions) >= 5 and {c.finish_reason for c in completions} == {"stop", "length"}
    plain = generator.generate(requests, SamplingConfig(temperature=1.3), 3, 5)
    assert all(a != b for a, b in zip(tokens_of(plain), tokens_of(completions), strict=True))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tp=2), {}),
        (Layout(pp=2), {"num_pages": 20}),
        (Layout(dp=2), {}),
        (Layout(tp=2, dp=2), {"num_pages": 19, "page_size": 7}),
    ],
    ids=str,
)
def test_options_draw_the_same_rows_in_every_layout_and_under_preemption(
    qwen3: str, layout: Layout, changes: dict[str, Any]
) -> None:
    wanted = {row[0]: row for row in generate_with_options(alone()[0], qwen3, Layout(), {})}
    for found in run_ranks(layout.size, generate_with_options, qwen3, layout, changes):
        for row_id, token_ids, log_probs, top_ids, top_log_probs in found:
            assert token_ids == wanted[row_id][1] and top_ids == wanted[row_id][3]
            for mine, theirs in ((log_probs, wanted[row_id][2]), (top_log_probs, wanted[row_id][4])):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=2e-5, rtol=0)


def test_likeliest_tokens_and_log_probs_without_the_rules(qwen3: str) -> None:
    mesh = alone()[1]
    generator = Generator(load(qwen3, mesh), mesh, SMALL, {EOS})
    requests = ragged_requests(samples=1)
    for request, completion in zip(requests, generator.generate(requests, MANY, 3, 5), strict=True):
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
        with torch.no_grad():
            logits = local_logits(generator.decoder, generator.decoder(ids, PackedAttention([len(ids)])))
        wanted = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        assert completion.top_log_probs is not None
        top_ids, values = completion.top_log_probs
        assert torch.equal(top_ids, wanted.topk(3).indices)
        torch.testing.assert_close(values, wanted.topk(3).values, atol=1e-5, rtol=0)
        drawn = torch.tensor(completion.token_ids)
        inside = (top_ids == drawn[:, None]).any(-1)
        same = values[inside][top_ids[inside] == drawn[inside, None]]
        assert torch.equal(same, completion.log_probs_t1[inside])  # the same bits


def greedy_with_penalty(world: World, path: str, layout: Layout) -> list[list[int]]:
    mesh = build_mesh(world, list(range(world.size)), layout)
    requests = ragged_requests(samples=1, max_new_tokens=40)
    s = SamplingConfig(temperature=0.0, repetition_penalty=1.3, min_response_length=8, forbidden_token_ids=[10, 11])
    return tokens_of(Generator(load(path, mesh), mesh, SMALL, {EOS}).generate(requests, s, 0, 0))


def test_greedy_with_rules_equals_transformers_generate(qwen3: str) -> None:
    prompts = [list(r.prompt_ids) for r in ragged_requests(samples=1)]
    wanted = transformers_greedy(qwen3, prompts, 40, repetition_penalty=1.3, min_new_tokens=8, suppress_tokens=[10, 11])
    assert greedy_with_penalty(alone()[0], qwen3, Layout()) == wanted
    for found in run_ranks(2, greedy_with_penalty, qwen3, Layout(tp=2)):
        assert found == wanted


# -- stop strings


def byte_tokenizer() -> Any:
    """256 bytes and some merges, so that characters come in pieces and stop strings cross token borders."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "a"), ("\u0120", "a"), ("b", "\u0120a")]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges), "</s>"])}
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.add_special_tokens(["</s>"])
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


TOKENIZER = byte_tokenizer()
PIECES = [TOKENIZER.convert_tokens_to_ids(t) for t in ("a", "b", "ab", "aba", "\u0120a", "b\u0120a", "\u0120", "c", "</s>")]
PIECES += TOKENIZER.convert_tokens_to_ids(["\u00c3", "\u00a9"])  # the two bytes of é


def decode_bytes(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from(PIECES), max_size=40),
    stops=st.lists(st.sampled_from(["ba a", "é", "aé", "cc", " ", "b a b a", "éc"]), min_size=1, max_size=2),
    ignored=st.integers(0, 10),
)
def test_stop_strings_are_found_at_the_token_that_completes_them(ids: list[int], stops: list[str], ignored: int) -> None:
    def new_match(n: int) -> int | None:
        """Where in the first n tokens' text the first stop string begins that the first n - 1 tokens do not hold whole."""
        before, text = decode_bytes(ids[: n - 1]).rstrip("\ufffd"), decode_bytes(ids[:n])
        starts = [i for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > len(before)]
        return min(starts, default=None)

    watch = StopStrings(stops, decode_bytes)
    for n in range(ignored + 1, len(ids) + 1):
        start = new_match(n)
        assert watch.completed_by_last(ids[:n]) == (start is not None)
        assert watch.cut(ids[:n])[0] == decode_bytes(ids[:n])[:start]


def test_a_stop_string_is_found_across_tokens_without_text() -> None:
    b, nothing, a = TOKENIZER.convert_tokens_to_ids(["b", "</s>", "a"])
    watch = StopStrings(["ba"], decode_bytes)
    assert watch.completed_by_last([b, *[nothing] * 40, a]) and not watch.completed_by_last([a, *[nothing] * 40, a])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stop") / "llama"
    write_random_model(path, PROGRAM_CONFIG, seed=3)
    write_tokenizer(path)
    return path


def test_the_program_stops_at_strings_and_writes_the_likeliest(model: Path, tmp_path: Path) -> None:
    limits = [{"min_response_length": i, "max_response_length": max(i, 5) if i % 3 == 0 else 40} for i in range(24)]
    rows = write_rows(tmp_path / "in.jsonl", [{**row, **own} for row, own in zip(ROWS[:3] * 8, limits, strict=True)])
    common = [
        "sampling.max_response_length=40",
        "sampling.logprobs=2",
        f"sampling.allowed_token_ids={list(range(68, 94))}",
    ]  # a to z
    program.main(arguments(model, rows, tmp_path / "plain.jsonl", *common))
    plain = read_output(tmp_path / "plain.jsonl")
    stop = plain[1]["text"][2:4]  # two characters are two tokens here
    more = [*common, f"sampling.stop=[{stop!r},'e']"]
    program.main(arguments(model, rows, tmp_path / "one.jsonl", *more))
    run_ranks(2, run_program_on_rank, arguments(model, rows, tmp_path / "two.jsonl", *more, "layout.pp=2"))
    program.main(arguments(model, rows, tmp_path / "whole.jsonl", *more, "sampling.include_stop_str_in_output=true"))
    one, two, whole = (read_output(tmp_path / f"{name}.jsonl") for name in ("one", "two", "whole"))
    assert one == two and {row["finish_reason"] for row in one} == {"stop", "length"}
    for i, (row, full, long) in enumerate(zip(one, whole, plain, strict=True)):
        assert long["response_ids"][: len(row["response_ids"])] == row["response_ids"] == full["response_ids"]
        assert [len(pairs) for pairs in row["top_log_probs"]] == [2] * len(row["response_ids"])
        if row["finish_reason"] == "stop":
            assert len(row["response_ids"]) >= i
            end = stop if full["text"].endswith(stop) else "e"
            assert full["text"] == row["text"] + end
        assert "e" not in full["text"][i:-1]


def test_a_stop_text_may_be_a_special_token(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{**ROWS[i % 3], "min_response_length": 3} for i in range(12)])
    common = [
        "sampling.max_response_length=20",
        "sampling.ignore_eos=true",
        f"sampling.allowed_token_ids={[0, 2, *range(68, 94)]}",  # <unk>, </s>, a to z
        "sampling.logit_bias={0: 2, 2: 2}",
        "sampling.stop=['<unk>','q']",
    ]
    program.main(arguments(model, rows, tmp_path / "cut.jsonl", *common))
    more = [*common, "sampling.include_stop_str_in_output=true", "generation.steps_per_sync=4", "layout.tp=2"]
    run_ranks(2, run_program_on_rank, arguments(model, rows, tmp_path / "whole.jsonl", *more))
    cut, whole = read_output(tmp_path / "cut.jsonl"), read_output(tmp_path / "whole.jsonl")
    endings = set()
    for row, full in zip(cut, whole, strict=True):
        *before, last = row["response_ids"]
        assert full["response_ids"] == row["response_ids"] and 0 not in before
        if row["finish_reason"] == "stop":
            ending = {0: "<unk>", ord("q") - 29: "q"}[last]
            endings.add(ending)
            assert len(before) >= 2 and full["text"] == row["text"] + ending
    assert endings == {"<unk>", "q"} and any(2 in row["response_ids"] for row in cut)


def test_a_rows_own_minimum_leaves_tokens_to_draw(model: Path, tmp_path: Path) -> None:
    """Otherwise a token that is not allowed would be drawn."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}, {"prompt_ids": [4], "min_response_length": 2}])
    with pytest.raises(ValueError, match="leave no token to draw"):
        program.prepare(None, arguments(model, rows, tmp_path / "o", "sampling.allowed_token_ids=[2]"), alone()[0].launch)
    mesh, only_end = alone()[1], SamplingConfig(allowed_token_ids=[EOS])
    generator = Generator(load(str(model), mesh), mesh, SMALL, [EOS])
    assert generator.generate([Request(0, 0, [4], 3)], only_end, 0, 0)[0].token_ids == [EOS]
    with pytest.raises(ValueError, match="leave no token to draw"):
        generator.generate([Request(0, 0, [4], 3), Request(1, 1, [4], 3, min_new_tokens=1)], only_end, 0, 0)


def test_bad_options_are_named(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}])
    for override, message in (
        ("sampling.repetition_penalty=0", r"sampling\.repetition_penalty=0\.0: must be at least 1e-06 and at most 1000000"),
        ("sampling.repetition_penalty=1e-39", r"sampling\.repetition_penalty=1e-39: must be at least 1e-06"),
        ("sampling.frequency_penalty=-1e39", r"sampling\.frequency_penalty=-1e\+39: must be at least -1000000000"),
        ("sampling.logit_bias={5: 0, 3: 1e39}", r"sampling\.logit_bias=\{3: 1e\+39\}: must be between -1000000000"),
        (
            "sampling.stop=['x</s>']",
            r"sampling\.stop: 'x</s>' contains the special token '</s>'.*its id 2 in sampling\.stop_token_ids",
        ),
        ("sampling.presence_penalty=.inf", r"sampling\.presence_penalty=inf"),
        ("sampling.logit_bias={3: .inf}", r"sampling\.logit_bias=\{3: inf\}"),
        ("sampling.logit_bias={300: 1}", r"sampling\.logit_bias: token id 300 must lie in 0 \.\. 199"),
        ("sampling.stop_token_ids=[-1]", r"sampling\.stop_token_ids: token id -1"),
        ("sampling.stop=['']", "a stop string must not be empty"),
        ("sampling.logprobs=-1", r"sampling\.logprobs=-1"),
        ("sampling.allowed_token_ids=[]", "leave no token to draw"),
    ):
        with pytest.raises(ValueError, match=message):
            program.prepare(None, arguments(model, rows, tmp_path / "out.jsonl", override), alone()[0].launch)
    few = SamplingConfig(logprobs=11)
    with pytest.raises(ValueError, match=r"val_sampling\.logprobs=11: must be between 0 and 10, the model's vocabulary"):
        few.check_ids(10, [], False, "val_sampling")
    both = ["sampling.min_response_length=3", "sampling.max_response_length=2"]
    with pytest.raises(
        ValueError, match=r"min_response_length=3: must be at least 0 and at most sampling\.max_response_length=2"
    ):
        program.prepare(None, arguments(model, rows, tmp_path / "out.jsonl", *both), alone()[0].launch)
    with pytest.raises(ValueError, match="leave no token to draw"):
        SamplingConfig(allowed_token_ids=[EOS], min_response_length=1).check_ids(10, [EOS], False, "sampling")
    mesh = alone()[1]
    generator = Generator(load(str(model), mesh), mesh, SMALL, ())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generator.generate([Request(0, 0, [4], 3)], SamplingConfig(stop=["x"]), 0, 0)
