"""The generator against transformers, against the training forward (bit for bit), and against itself in every layout.

Greedy tokens of every family are those of transformers: in every layout and page size, in tiny chunks, and in a cache that holds one
row and little else. ``test_layouts`` has the other options in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from generators import (
    MODELS,
    SMALL,
    alone,
    assert_same,
    build_generator,
    load,
    num_unequal,
    ragged_requests,
    skip_unless_exact,
    tokens_of,
    training_log_probs,
)
from generators import backend as backend  # a fixture, as the next
from generators import matmul_precision as matmul_precision
from ranks import run_ranks
from rlhf_spmd.generation import GenerationConfig, GenerationStats, Generator, Request, SamplingConfig, kv_cache
from rlhf_spmd.generation.kv_cache import KVCache, room_on_device, step_bytes
from rlhf_spmd.kernels import devices
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.stored import read_eos_ids
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS, make_model
from tiers import tiers

SAMPLED = SamplingConfig(temperature=1.0)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_random_model(root / name, config, seed=7)
    return {name: str(root / name) for name in MODELS}


def test_log_probs_are_bit_equal_to_a_training_forward(models: dict[str, str], matmul_precision: str) -> None:
    name = {"highest": "llama", "medium": "qwen2", "kernels": "qwen3"}[matmul_precision]
    generator, requests = build_generator(models[name]), ragged_requests()
    skip_unless_exact(generator.decoder.ops, torch.float32)
    for temperature in (1.0, 0.7):
        completions = generator.generate(requests, SamplingConfig(temperature=temperature, top_k=50, top_p=0.95), 3, 5)
        assert num_unequal(generator.decoder, requests, completions, temperature) == 0
        at_one = training_log_probs(generator.decoder, requests, completions, 1.0)
        assert all(torch.equal(c.log_probs_t1, reference) for c, reference in zip(completions, at_one, strict=True))
        assert (temperature == 1.0) == all(torch.equal(c.log_probs, c.log_probs_t1) for c in completions)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 100, "max_num_seqs": 256},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_seqs": 16, "num_pages": 30, "max_num_batched_tokens": 33},
        {"enable_prefix_caching": False, "num_pages": 25},
        {"enable_chunked_prefill": False, "num_pages": 40},
    ],
    ids=str,
)
@pytest.mark.usefixtures("backend")
def test_batching_paging_and_preemption_change_no_bit(models: dict[str, str], changes: dict[str, Any]) -> None:
    requests = ragged_requests()
    reference = build_generator(models["llama"], replace(SMALL, page_size=64)).generate(requests, SAMPLED, 3, 5)
    generator = build_generator(models["llama"], replace(SMALL, **changes))
    completions = generator.generate(requests, SAMPLED, 3, 5)
    exact = generator.decoder.ops.is_batch_invariant(torch.float32)
    assert_same(completions, reference, 0.0 if exact else 1e-5)
    assert not exact or num_unequal(generator.decoder, requests, completions, 1.0) == 0
    assert changes.get("num_pages", 40) == 40 or generator.stats.preemptions > 0


def test_ranks_of_a_host_share_its_memory(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its part of what is available, together ``gpu_memory_utilization`` of it, a container's limit kept."""
    generator = build_generator(models["llama"], replace(SMALL, gpu_memory_utilization=0.25))
    pages = generator._affordable(1)[1]
    generator.local_size = 4
    assert 0.9 * pages < 4 * generator._affordable(1)[1] < 1.1 * pages
    monkeypatch.setattr(devices, "container_bytes", lambda root: 1 << 30)
    page = KVCache.page_bytes(*generator._cache_shapes[0], SMALL.page_size, torch.float32)
    assert generator._affordable(1)[1] == (1 << 30) // 16 // page
    usual = build_generator(models["llama"], SMALL)
    assert usual._affordable(1)[1] == (1 << 29) // page


def test_a_gpu_s_cache_takes_what_its_share_leaves(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole memory, as vLLM counts, less what this process has there, and what a step works with; never more than is free."""
    assert room_on_device(0.9, 80.0, 16.0, 60.0, 2.0) == 54.0
    assert room_on_device(0.9, 80.0, 16.0, 30.0, 2.0) == 28.0, "another process is there"
    assert room_on_device(0.5, 80.0, 50.0, 25.0, 2.0) < 0
    generator = build_generator(models["llama"], replace(SMALL, gpu_memory_utilization=0.5))
    monkeypatch.setattr(devices, "_CPU", replace(devices._CPU, streams=True))
    sizes = {"total_bytes": 1 << 30, "allocated_bytes": 100 << 20, "free_bytes": 900 << 20}
    for name, size in sizes.items():
        monkeypatch.setattr(kv_cache, name, lambda *_, size=size: size)
    step = step_bytes(generator.config, generator.decoder)
    assert 4 * SMALL.max_num_batched_tokens * generator.decoder.spec.hidden_size < step < 100 << 20
    page = KVCache.page_bytes(*generator._cache_shapes[0], SMALL.page_size, torch.float32)
    assert generator._affordable(1)[1] == int((512 - 100) * (1 << 20) - step) // page


def test_a_step_has_rows_for_experts() -> None:
    """Of each choice of a token: the token, its expert's products, and the result."""
    spec = spec_from_config({**CONFIGS["qwen3-moe"], "num_experts_per_tok": 4}, "test")
    decoders = (
        Decoder(spec, "lm", 0, 1, Group("tp", (0, 1), 0), torch.float32, "meta", expert_parallel_generation=w)
        for w in (False, True)
    )
    tokens = 1 << 20
    sliced, unsliced = (step_bytes(replace(SMALL, max_num_batched_tokens=tokens), decoder) for decoder in decoders)
    size, inner = 4 * tokens * 4, spec.experts.intermediate_size
    assert sliced > size * (2 * spec.hidden_size + 3 * inner / 2) and unsliced - sliced == size * 3 * inner / 2


def test_fp64_draws_the_same_rows_and_bf16_runs(models: dict[str, str]) -> None:
    requests = ragged_requests(samples=2)
    fp32 = build_generator(models["qwen3"]).generate(requests, SAMPLED, 0, 0)
    fp64 = build_generator(models["qwen3"], dtype=torch.float64).generate(requests, SAMPLED, 0, 0)
    assert tokens_of(fp32) == tokens_of(fp64)
    for a, b in zip(fp32, fp64, strict=True):
        assert b.log_probs.dtype == torch.float64
        torch.testing.assert_close(a.log_probs.double(), b.log_probs, atol=2e-5, rtol=0)
    generator = build_generator(models["qwen3"], dtype=torch.bfloat16)
    bf16 = generator.generate(requests, SAMPLED, 0, 0)
    assert num_unequal(generator.decoder, requests, bf16, 1.0) == 0


def test_draws_depend_on_row_step_and_seed_alone(models: dict[str, str]) -> None:
    generator, requests = build_generator(models["qwen2"]), ragged_requests()
    together = generator.generate(requests, SAMPLED, 1, 2)
    assert_same(generator.generate(requests[::-1], SAMPLED, 1, 2)[::-1], together)
    assert_same(generator.generate(requests[4:5], SAMPLED, 1, 2), together[4:5])
    renamed = [replace(r, row_id=r.row_id + 1000) for r in requests]
    for rows, seed, step in ((requests, 1, 3), (requests, 2, 2), (renamed, 1, 2)):
        assert tokens_of(generator.generate(rows, SAMPLED, seed, step)) != tokens_of(together)


def test_stops_lengths_and_statistics(models: dict[str, str]) -> None:
    mesh = alone()[1]
    generator = Generator(load(models["llama"], mesh), mesh, SMALL, range(0, 20))  # many stop tokens: rows end early
    requests = ragged_requests()
    completions = generator.generate(requests, SAMPLED, 0, 0)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.log_probs) == len(completion.token_ids) <= request.max_new_tokens
        assert all(token >= 20 for token in completion.token_ids[:-1])
        stopped = completion.token_ids[-1] < 20
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == request.max_new_tokens
    stats = generator.stats
    assert stats.decode_tokens == sum(len(c.token_ids) for c in completions)
    distinct = {tuple(r.prompt_ids) for r in requests}
    assert stats.prefill_tokens <= sum(len(p) - 1 for p in distinct) and stats.hit_tokens > 0
    assert stats.preemptions == 0 and stats.steps > 0 and stats.seconds > 0
    ignoring = generator.generate(requests, replace(SAMPLED, ignore_eos=True), 0, 0)
    assert [len(c.token_ids) for c in ignoring] == [r.max_new_tokens for r in requests]
    assert all(b.token_ids[: len(a.token_ids)] == a.token_ids for a, b in zip(completions, ignoring, strict=True))
    assert generator.generate([], SAMPLED, 0, 0) == []


def test_bad_requests_are_refused(models: dict[str, str]) -> None:
    generator = build_generator(models["llama"], replace(SMALL, num_pages=2))
    row = Request(5, 0, [3], 4)
    for requests, message in (
        ([replace(row, prompt_ids=[])], "row 5: the prompt is empty"),
        ([replace(row, max_new_tokens=0)], "max_new_tokens=0"),
        ([replace(row, prompt_ids=[301])], r"prompt ids must lie in 0 \.\. 300"),
        ([row, row], "row ids must differ"),
        ([Request(5, 0, [3] * 10, 8)], r"num_pages=2: a row may have up to .* which need 3 pages of page_size=8"),
    ):
        with pytest.raises(ValueError, match=message):
            generator.generate(requests, SAMPLED, 0, 0)


NEW_TOKENS = 5
MIN_GAP = 5e-3  # between the two largest logits, which differ from transformers' by some 1e-5: no draw lies on the edge
LENGTHS = (66, 61, 70, 1, 3)  # the first are longer than every window, and across the end of a page of 64
PAGES = (1, 7, 64)
SHORT = ("llama", "qwen3-tied", "gemma2", "gemma4", "gpt-oss", "glm4-moe", "deepseek-v3", "qwen3-5")  # every field of ModelSpec
OTHERS = tuple(name for name in CONFIGS if name not in SHORT)
MOST_UNLIKE = ("gemma4", "glm4-moe", "deepseek-v3")


@dataclass(frozen=True)
class Expected:
    """``greedy[prompt]``: the tokens that transformers adds."""

    path: str
    greedy: dict[tuple[int, ...], list[int]]

    def requests(self) -> list[Request]:
        """Two rows of each prompt, of different limits."""
        prompts = list(self.greedy)
        return [Request(2 * i + j, i, p, NEW_TOKENS - 2 * j) for i, p in enumerate(prompts) for j in range(2)]

    def config(self, page_size: int, tight: bool) -> GenerationConfig:
        """``tight``: pages for one of the longest rows and little else."""
        longest = max(-(-(len(r.prompt_ids) + r.max_new_tokens - 1) // page_size) for r in self.requests())
        pages = longest * 8 // 7 if tight else None
        return GenerationConfig(page_size=page_size, num_pages=pages, max_num_seqs=24, max_num_batched_tokens=25)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: expect(make_model(root / name, CONFIGS[name])))


def expect(path: Path) -> Expected:
    """A prompt of each of LENGTHS, of those whose draws are far from ties."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(17)
    greedy: dict[tuple[int, ...], list[int]] = {}
    for length in LENGTHS:
        ids = torch.randint(3, model.config.vocab_size, (6, length), generator=generator)
        options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **options)
        largest = torch.stack(output.logits).topk(2).values
        clear = ((largest[..., 0] - largest[..., 1]).amin(0) > MIN_GAP).nonzero()[:, 0].tolist()
        assert clear, f"{path.name}: too many near-ties"
        new = output.sequences[clear[0], length:].tolist()
        greedy[tuple(ids[clear[0]].tolist())] = new[: new.index(2) + 1] if 2 in new else new
    return Expected(str(path), greedy)


def generate_families(
    world: World | None, layout: Layout, cases: Sequence[tuple[Expected, GenerationConfig]]
) -> list[GenerationStats]:
    """Checks the tokens of each case on this rank."""
    mesh = alone()[1] if world is None else build_mesh(world, list(range(world.size)), layout)
    stats = []
    for expected, config in cases:
        generator = Generator(load(expected.path, mesh), mesh, config, read_eos_ids(expected.path))
        requests = expected.requests()
        completions = generator.generate(requests, SamplingConfig(temperature=0.0), 0, 0)
        for request, completion in zip(requests, completions, strict=True):
            tokens = expected.greedy[tuple(request.prompt_ids)][: request.max_new_tokens]
            assert completion.token_ids == tokens, f"{Path(expected.path).name}, {layout}, {config}: row {request.row_id}"
        stats.append(generator.stats)
    return stats


@pytest.mark.parametrize("names", tiers([SHORT, OTHERS], [SHORT]), ids=["short", "others"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2)], ids=str)
def test_greedy_tokens_of_families_are_those_of_transformers(
    families: Callable[[str], Expected], layout: Layout, names: tuple[str, ...]
) -> None:
    """Page sizes take turns. A tight pool has room for one lane only, so two stages without tp get two lanes once more."""
    chosen = [families(name) for name in names if names != SHORT or layout.size < 4 or name in MOST_UNLIKE]
    cases = [(expected, expected.config(PAGES[(i + layout.pp) % 3], tight=True)) for i, expected in enumerate(chosen)]
    if layout == Layout(pp=2):
        cases += [(expected, expected.config(PAGES[i % 3], tight=False)) for i, expected in enumerate(chosen)]
    ranks = (
        [generate_families(None, layout, cases)]
        if layout.size == 1
        else run_ranks(layout.size, generate_families, layout, cases)
    )
    for stats in ranks:
        assert all(each.preemptions > 0 for each in stats[: len(chosen)]), [each.preemptions for each in stats]
        assert all(each.micro_batches == layout.pp for each in stats[len(chosen) :])
