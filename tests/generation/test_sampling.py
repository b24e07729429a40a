"""Draws are keyed by (seed, step, row, position) alone and distributed as the options say.

A row draws the same tokens beside rows with other settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generate_runs import ROWS, arguments, read_output, run_program_on_rank, write_rows
from generate_runs import model as model  # a fixture
from generators import (
    OVERRIDES,
    RULES,
    SMALL,
    alone,
    assert_same,
    build_generator,
    load,
    num_unequal,
    ragged_requests,
    row_of,
    tokens_of,
    transformers_greedy,
    with_overrides,
)
from ranks import run_ranks
from rlhf_spmd import generate as program
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, Request, SamplingConfig, StopStrings
from rlhf_spmd.generation.logit_rules import LogitRules
from rlhf_spmd.generation.sampler import (
    build_sampling_tensors,
    draw_rows,
    filter_weights,
    group_by_sampling,
    num_drawable_ids,
    row_keys,
    sample,
    uniform,
)
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.heads import local_logits
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from sampler_statistics import chi_square_z, draws, kept_weights

EOS = 2
OPTIONS = {
    "temperature": SamplingConfig(temperature=0.6),
    "top_k": SamplingConfig(top_k=4, temperature=2.0),
    "top_p": SamplingConfig(top_p=0.7),
    "min_p": SamplingConfig(min_p=0.1),
    "filters": SamplingConfig(temperature=1.3, top_k=8, top_p=0.8, min_p=0.05),
    "repetition": SamplingConfig(repetition_penalty=1.7),
    "frequency": SamplingConfig(frequency_penalty=0.9),
    "presence": SamplingConfig(presence_penalty=-1.1, temperature=0.8),
    "bias": SamplingConfig(logit_bias={3: 1.5, 7: -4.0, 11: 2.0}),
    "allowed": SamplingConfig(allowed_token_ids=list(range(0, 20, 2))),
    "forbidden": SamplingConfig(forbidden_token_ids=[3, 4, 5, 6, 11]),
    "minimum": SamplingConfig(min_response_length=9, stop_token_ids=[4, 5]),
    "all": replace(RULES, allowed_token_ids=list(range(1, 19)), min_response_length=9),
}


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


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    s, generator = OPTIONS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(20, generator=generator)
    prompt, drawn, ends = [1, 3, 4, 3], [3, 5, 7, 5, 5, 11], {0, *s.stop_token_ids}
    weights = kept_weights(rules_in_loops(logits.numpy(), prompt, drawn, s, ends), s)
    p, plain = weights / weights.sum(), logits.softmax(0).numpy()
    assert np.abs(p - plain).max() > 0.02
    number = 40_000
    tokens = torch.tensor([[*prompt, *drawn, 9, 9]])  # what lies behind a row's end does not count
    row = row_of(0, prompt, 1000, response=drawn, min_new_tokens=s.min_response_length)
    lines = torch.zeros(number, dtype=torch.int64)
    rules = LogitRules(s, ends, [row], 20, torch.device("cpu"))
    changed = rules.apply(logits.expand(number, -1), lines, lines + len(prompt) + len(drawn), tokens)
    counts = np.bincount(sample(changed, s, draws(number)).numpy(), minlength=20)
    assert counts[p == 0].sum() == 0
    assert chi_square_z(counts, p) < 4.0


FILTERS = [OPTIONS[name] for name in ("temperature", "top_k", "top_p", "min_p", "filters")]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(options: SamplingConfig) -> None:
    from transformers.generation import logits_process as hf

    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)) * 3
    kept = logits / options.temperature
    if options.min_p > 0:
        kept = hf.MinPLogitsWarper(options.min_p)(None, kept)
    if options.top_k > 0:
        kept = hf.TopKLogitsWarper(options.top_k)(None, kept)
    if options.top_p < 1:
        kept = hf.TopPLogitsWarper(options.top_p)(None, kept)
    scaled = logits / options.temperature
    weights = filter_weights((scaled - scaled.amax(-1, keepdim=True)).exp(), options)
    assert torch.equal(weights > 0, torch.isfinite(kept))


def test_nucleus_wider_than_the_first_try_and_with_ties() -> None:
    flat = filter_weights(torch.ones(2, 1000), SamplingConfig(top_p=0.5))
    assert (flat > 0).sum(-1).tolist() == [500, 500] and bool((flat[:, :500] > 0).all())
    steps = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1]])
    assert (filter_weights(steps, SamplingConfig(top_p=0.7)) > 0).tolist() == [[True, True, True, False, False]]
    assert (filter_weights(steps, SamplingConfig(top_k=2)) > 0).tolist() == [[True, True, True, True, False]]
    tiny = filter_weights(torch.tensor([[1.0, 0.2]]), SamplingConfig(top_p=1e-9))
    assert (tiny > 0).tolist() == [[True, False]]  # one token always stays


def test_greedy_and_extreme_draws() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    assert sample(logits, SamplingConfig(temperature=0.0), draws(2)).tolist() == [1, 0]
    peaked = torch.tensor([[-200.0, 0.0, -200.0]])  # fp32 weights 0, 1, 0
    for u in (0.0, 1 - 2.0**-53):
        assert sample(peaked, SamplingConfig(), torch.tensor([u], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_draws_from_broken_logits_lie_in_the_vocabulary(broken: float) -> None:
    largest = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(4, 300, dtype=dtype)
        logits[1], logits[2, 7] = broken, broken
        for options in (SamplingConfig(temperature=0.0), SamplingConfig(), *FILTERS):
            drawn = sample(logits, options, largest)
            assert int(drawn.min()) >= 0 and int(drawn.max()) < 300, options


def test_rows_whose_rules_leave_nothing_say_so(path: str) -> None:
    decoder, cpu = build_generator(path).decoder, torch.device("cpu")
    logits, samplings, kinds = torch.randn(3, 301), [SamplingConfig(), SamplingConfig(temperature=0.0)], np.array([1, 0, 1])
    settings, groups = build_sampling_tensors(samplings, kinds, cpu), group_by_sampling(samplings, kinds, cpu)
    scores = logits.index_fill(0, torch.tensor([1]), -torch.inf)
    _, _, log_probs = draw_rows(decoder.ops, scores, logits, settings, torch.arange(3), torch.arange(3), decoder, groups)
    assert log_probs.isnan().tolist() == [False, True, False]


PADDED = SamplingConfig(logprobs=3, max_response_length=12)
SAMPLERS = [PADDED, replace(PADDED, temperature=0.0), replace(PADDED, temperature=0.7, top_p=0.9), replace(PADDED, top_k=7)]
SAMPLERS += [replace(PADDED, logit_bias={250: 20.0}), replace(PADDED, repetition_penalty=1.3, min_p=0.01)]


class Ids(NamedTuple):
    """A tokenizer of as many ids."""

    size: int

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}


def draw_padded(world: World, path: str, layout: Layout) -> list[list[Any]]:
    """Ids, log-probs and the likeliest ids of rows whose tokenizer has 120 ids of the 301, of which the others are likelier."""
    mesh = build_mesh(world, range(world.size), layout) if world.size > 1 else alone()[1]
    decoder = load(path, mesh)
    first = decoder.vocab_range[0]
    decoder.head_weight.data[max(120 - first, 0) :] *= 3
    generator = Generator(decoder, mesh, SMALL, [2], decoding(Ids(120)))
    results, requests = [], [Request(i, i, [5 + i, 40], 12) for i in range(8)]
    for sampling in SAMPLERS:
        completions = generator.generate(requests, sampling, 3, 5)
        temperature = sampling.log_prob_temperature
        assert num_unequal(decoder, requests, completions, temperature) == 0
        assert all(done.top_log_probs is not None and int(done.top_log_probs[0].max()) < 120 for done in completions)
        results.append([done.token_ids for done in completions])
    assert max(map(max, (ids for drawn in results for ids in drawn))) < 120
    return results


def test_ids_that_the_tokenizer_lacks_are_not_drawn_on_any_rank(path: str) -> None:
    """Log-probs count them, as training does."""
    alone_drawn = draw_padded(alone()[0], path, Layout())
    assert run_ranks(2, draw_padded, path, Layout(tp=2)) == [alone_drawn] * 2
    sizes = (301, [2], None), (301, [200], Ids(120)), (100, [], Ids(120))
    assert [num_drawable_ids(size, ends, decoding(ids)) for size, ends, ids in sizes] == [301, 201, 100]


def numbers(seed: int, steps: Any, row_ids: Any, positions: Any) -> torch.Tensor:
    return uniform(row_keys(seed, torch.as_tensor(steps), torch.as_tensor(row_ids)), torch.as_tensor(positions))


def splitmix(seed: int, step: int, row_id: int, position: int) -> float:
    """The definition, in whole numbers modulo 2^64."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = seed & mask
    for counter in (step, row_id, position):
        state = mix(mix(state + golden & mask) ^ (counter + golden & mask))
    return float((state >> 11) * 2.0**-53)


def test_uniform_numbers_are_those_of_the_definition() -> None:
    random = np.random.default_rng(0)
    steps, rows, positions = (random.integers(0, 2**62, 1000) for _ in range(3))
    for seed in (0, 7, -3, 2**64 - 1):
        expected = [splitmix(seed, *map(int, key)) for key in zip(steps, rows, positions, strict=True)]
        assert numbers(seed, steps, rows, positions).tolist() == expected


def test_chunks_of_rows_do_not_change_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, options = torch.randn(33, 300), SamplingConfig(top_p=0.9, top_k=50)
    tokens = sample(logits, options, draws(33))
    monkeypatch.setattr("rlhf_spmd.generation.sampler.CHUNK_ELEMENTS", 1000)
    assert torch.equal(sample(logits, options, draws(33)), tokens)


def test_bad_settings_are_named() -> None:
    for config, message in (
        (SamplingConfig(n=0), r"sampling\.n=0"),
        (SamplingConfig(temperature=-1.0), r"sampling\.temperature=-1\.0"),
        (SamplingConfig(temperature=float("nan")), r"sampling\.temperature=nan"),
        (SamplingConfig(top_p=0.0), r"sampling\.top_p=0\.0"),
        (SamplingConfig(top_k=-2), r"sampling\.top_k=-2"),
        (SamplingConfig(min_p=1.5), r"sampling\.min_p=1\.5"),
        (SamplingConfig(max_response_length=0), r"sampling\.max_response_length=0"),
        (GenerationConfig(page_size=0), r"sampling\.page_size=0"),
        (GenerationConfig(num_pages=0), r"sampling\.num_pages=0"),
        (GenerationConfig(attention="flash"), r"attention='flash'.*auto, torch, cpp"),  # type: ignore[arg-type]
        (GenerationConfig(gpu_memory_utilization=0.0), r"gpu_memory_utilization=0\.0"),
        (GenerationConfig(steps_per_sync=0), r"steps_per_sync=0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_section(config, "sampling")


def redrawn(logits: np.ndarray, request: Request, number: int) -> list[int]:
    """The tokens of a row again from the training forward's logits, the rules in loops, and the inverse of the distribution."""
    tokens: list[int] = []
    for position in range(number):
        ruled = rules_in_loops(logits[position], request.prompt_ids, tokens, RULES, {EOS, 4})
        cumulative = np.cumsum(kept_weights(ruled.astype(np.float32), RULES))
        u = float(uniform(row_keys(3, torch.tensor(5), torch.tensor([request.row_id])), torch.tensor([position]))[0])
        tokens.append(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")))
    return tokens


def test_tokens_are_those_of_the_definition(path: str) -> None:
    """The likeliest tokens and log-probs at temperature 1 are those without the rules."""
    generator, requests = build_generator(path), ragged_requests(samples=2)
    decoder, completions = generator.decoder, generator.generate(requests, RULES, 3, 5)
    assert min(len(c.token_ids) for c in completions) >= 5 and {c.finish_reason for c in completions} == {"stop", "length"}
    for request, completion in zip(requests, completions, strict=True):
        ids, drawn = torch.tensor([*request.prompt_ids, *completion.token_ids]), torch.tensor(completion.token_ids)
        with torch.no_grad():
            logits = local_logits(decoder, decoder(ids, PackedAttention([len(ids)])))[len(request.prompt_ids) - 1 : -1]
        assert completion.token_ids == redrawn(logits.double().numpy(), request, len(drawn))
        assert completion.top_log_probs is not None
        likeliest, (top_ids, values) = logits.log_softmax(-1).topk(3), completion.top_log_probs
        assert torch.equal(top_ids, likeliest.indices)
        torch.testing.assert_close(values, likeliest.values, atol=1e-5, rtol=0)
        inside = (top_ids == drawn[:, None]).any(-1)
        same = values[inside][top_ids[inside] == drawn[inside, None]]
        assert torch.equal(same, completion.log_probs_t1[inside])  # the same bits


def test_greedy_with_rules_equals_transformers_generate(path: str) -> None:
    requests = ragged_requests(samples=1, max_new_tokens=40)
    prompts = [list(r.prompt_ids) for r in requests]
    s = SamplingConfig(temperature=0.0, repetition_penalty=1.3, min_response_length=8, forbidden_token_ids=[10, 11])
    options = {"repetition_penalty": 1.3, "min_new_tokens": 8, "suppress_tokens": [10, 11]}
    completions = build_generator(path).generate(requests, s, 0, 0)
    assert tokens_of(completions) == transformers_greedy(path, prompts, 40, **options)


MIXED_SAMPLING = SamplingConfig(temperature=0.8, logprobs=2, repetition_penalty=1.2)


def generate(path: str, requests: list[Request], sampling: SamplingConfig, **changes: Any) -> list[Completion]:
    return build_generator(path, replace(SMALL, **changes)).generate(requests, sampling, 3, 5)


def test_a_mixed_batch_is_the_batches_of_each_kind(path: str) -> None:
    requests = with_overrides(ragged_requests())
    expected: list[Completion] = []
    for kind in OVERRIDES:  # in a call whose settings are theirs
        alike = [replace(request, overrides=None) for request in requests if request.overrides == kind]
        expected += generate(path, alike, MIXED_SAMPLING if kind is None else MIXED_SAMPLING.with_overrides(kind))
    expected.sort(key=lambda completion: completion.row_id)
    for changes in ({}, {"num_pages": 20}, {"steps_per_sync": 4}):
        assert_same(generate(path, requests, MIXED_SAMPLING, **changes), expected)
    for request, completion in zip(requests, expected, strict=True):
        if request.overrides == SamplingOverrides(0.0):
            assert torch.equal(completion.log_probs, completion.log_probs_t1)  # at temperature 1
    with pytest.raises(ValueError, match=r"sampling of row 5\.top_p=0.0: must be above 0 and at most 1"):
        generate(path, [Request(5, 0, [3], 4, overrides=SamplingOverrides(top_p=0.0))], MIXED_SAMPLING)


# -- stop strings, and the program ``generate``


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


def test_the_program_stops_at_strings_and_writes_the_likeliest(model: Path, tmp_path: Path) -> None:
    """Also at a special token, and through stages that draw several tokens at once."""
    limits = [{"min_response_length": i, "max_response_length": max(i, 5) if i % 3 == 0 else 40} for i in range(24)]
    rows = write_rows(tmp_path / "in.jsonl", [row | limit for row, limit in zip(ROWS[:3] * 8, limits, strict=True)])
    common = [
        "sampling.max_response_length=40",
        "sampling.logprobs=2",
        "sampling.ignore_eos=true",
        f"sampling.allowed_token_ids={[0, EOS, *range(68, 94)]}",  # <unk>, </s>, a to z
    ]
    program.main(arguments(model, rows, tmp_path / "plain.jsonl", *common, "sampling.stop=['<unk>']"))
    plain = read_output(tmp_path / "plain.jsonl")
    texts = [row["text"][i + 1 : i + 3] for i, row in enumerate(plain)]  # from two tokens, which may end the row
    letters = next(text for text in texts if len(text) == 2 and "e" not in text)
    stops = [letters, "e", "<unk>"]
    common.append(f"sampling.stop=[{letters!r},'e','<unk>']")
    program.main(arguments(model, rows, tmp_path / "cut.jsonl", *common, "generation.steps_per_sync=4"))
    common.append("sampling.include_stop_str_in_output=true")
    run_ranks(2, run_program_on_rank, arguments(model, rows, tmp_path / "uncut.jsonl", *common, "layout.pp=2"))
    cut, uncut = (read_output(tmp_path / f"{name}.jsonl") for name in ("cut", "uncut"))
    endings = set()
    for i, (row, full, long) in enumerate(zip(cut, uncut, plain, strict=True)):
        assert long["response_ids"][: len(row["response_ids"])] == row["response_ids"] == full["response_ids"]
        assert [len(pairs) for pairs in row["top_log_probs"]] == [2] * len(row["response_ids"])
        assert "e" not in full["text"][i:-1] and 0 not in row["response_ids"][i:-1]
        if row["finish_reason"] == "stop":
            ending = full["text"].removeprefix(row["text"])
            assert len(row["response_ids"]) >= i and ending in stops
            endings.add(ending)
        else:
            assert len(row["response_ids"]) == limits[i]["max_response_length"]
    assert endings == set(stops) and any(EOS in row["response_ids"] for row in cut)


def test_a_rows_own_minimum_leaves_tokens_to_draw(model: Path, tmp_path: Path) -> None:
    """Otherwise a token that is not allowed would be drawn."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}, {"prompt_ids": [4], "min_response_length": 2}])
    with pytest.raises(ValueError, match="leave no token to draw"):
        program.prepare(None, arguments(model, rows, tmp_path / "o", "sampling.allowed_token_ids=[2]"), alone()[0].launch)
    mesh, only_end = alone()[1], SamplingConfig(allowed_token_ids=[EOS])
    generator, row = Generator(load(str(model), mesh), mesh, SMALL, [EOS]), Request(0, 0, [4], 3)
    assert generator.generate([row], only_end, 0, 0)[0].token_ids == [EOS]
    with pytest.raises(ValueError, match="leave no token to draw"):
        generator.generate([row, Request(1, 1, [4], 3, min_new_tokens=1)], only_end, 0, 0)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generator.generate([row], SamplingConfig(stop=["x"]), 0, 0)


def test_bad_options_are_named(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4]}])
    for override, message in (
        ("repetition_penalty=1e-39", r"sampling\.repetition_penalty=1e-39: must be at least 1e-06 and at most 1000000"),
        ("frequency_penalty=-1e39", r"sampling\.frequency_penalty=-1e\+39: must be at least -1000000000"),
        ("presence_penalty=.inf", r"sampling\.presence_penalty=inf"),
        ("logit_bias={5: 0, 3: 1e10}", r"sampling\.logit_bias\.3=10000000000.0: must be at least -1000000000"),
        ("logit_bias={300: 1}", r"sampling\.logit_bias: token id 300 must lie in 0 \.\. 199"),
        ("stop_token_ids=[-1]", r"sampling\.stop_token_ids\[0\]=-1: must be at least 0"),
        ("stop=['x</s>']", r"sampling\.stop: 'x</s>' contains the special token '</s>'.*its id 2 in sampling\.stop_token_ids"),
        ("logprobs=-1", r"sampling\.logprobs=-1"),
    ):
        argv = arguments(model, rows, tmp_path / "out.jsonl", "sampling.max_response_length=2", f"sampling.{override}")
        with pytest.raises(ValueError, match=message):
            program.prepare(None, argv, alone()[0].launch)
    with pytest.raises(ValueError, match=r"val_sampling\.logprobs=11: must be between 0 and 10, the ids that may be drawn"):
        SamplingConfig(logprobs=11).check_ids(12, 10, [], False, "val_sampling")
    with pytest.raises(
        ValueError, match=r"sampling\.stop_token_ids: token id 11 is never drawn: the tokenizer has ids up to 9"
    ):
        SamplingConfig(stop_token_ids=[11]).check_ids(12, 10, [], False, "sampling")
    with pytest.raises(ValueError, match="leave no token to draw"):
        SamplingConfig(allowed_token_ids=[11]).check_ids(12, 10, [], False, "sampling")
    with pytest.raises(ValueError, match="leave no token to draw"):
        SamplingConfig(allowed_token_ids=[EOS], min_response_length=1).check_ids(10, 10, [EOS], False, "sampling")


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 5}], ids=str)
def test_rows_of_a_wider_matrix_are_drawn_as_their_copies(settings: dict[str, Any]) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    draws = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
    narrow, sampling = logits[:, :37], SamplingConfig(**settings)
    assert torch.equal(sample(narrow, sampling, draws), sample(narrow.contiguous(), sampling, draws))
