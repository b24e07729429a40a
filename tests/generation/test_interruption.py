"""Under pressure, in groups, and interrupted: the tokens are those of one quiet call."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generators import MODELS, SMALL, alone, assert_same, generate_in_pieces, load, ragged_requests, training_log_probs
from generators import backend as backend  # a fixture
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.call import FinishedGroups
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS
from tiers import tiers

S = SamplingConfig(temperature=0.9)
PENALISED = replace(S, repetition_penalty=1.2, logprobs=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of other weights."""
    root = tmp_path_factory.mktemp("models")
    for seed in (7, 8):
        write_random_model(root / str(seed), {**MODELS["llama"], "max_position_embeddings": 1024}, seed)
    return [str(root / "7"), str(root / "8")]


@pytest.fixture
def path(paths: list[str]) -> str:
    return paths[0]


def build(path: str, **changes: Any) -> Generator:
    mesh = alone()[1]
    return Generator(load(path, mesh), mesh, replace(SMALL, **changes), {2})


def test_a_pool_of_a_twentieth_of_the_need_changes_no_token(path: str) -> None:
    requests = [Request(i, i // 2, [3 + i // 2, 5, 7 + i // 4], 37 + i % 5) for i in range(64)]
    need = sum(-(-(3 + r.max_new_tokens - 1) // 4) for r in requests)
    s = replace(S, ignore_eos=True)
    expected = build(path, page_size=4, max_num_seqs=64).generate(requests, s, 1, 2)
    tight = build(path, page_size=4, max_num_seqs=64, num_pages=need // 20)
    assert_same(tight.generate(requests, s, 1, 2), expected)
    assert tight.stats.num_pages <= 0.05 * need and tight.stats.preemptions > 20


@pytest.mark.parametrize("changes", [{"max_num_seqs": 4}, {"steps_per_sync": 3}], ids=str)
def test_whole_groups_leave_before_the_call_ends(path: str, changes: dict[str, Any]) -> None:
    requests, number = ragged_requests(num_prompts=7, samples=3), 4
    sent: list[list[Completion]] = []
    expected = {c.row_id: c for c in build(path, **changes).generate(requests, PENALISED, 1, 2)}
    groups = FinishedGroups(requests, number, sent.append)
    completions = build(path, **changes).generate(requests, PENALISED, 1, 2, finished_groups=groups)
    assert_same(completions, list(expected.values()))
    assert 1 < len(sent) < number
    ended = 0
    for portion in sent:
        assert_same(portion, [expected[c.row_id] for c in portion])
        counts = Counter(c.row_id // 3 for c in portion)  # rows of each group
        assert set(counts.values()) == {3}
        ended += len(counts)
    assert -(-7 * len(sent) // number) <= ended < 8  # groups that have ended when so many portions are due


@pytest.mark.parametrize(
    ("sampling", "limits", "changes"),
    [
        (S, GenerationLimits(tokens=40), {}),
        (PENALISED, GenerationLimits(fraction=0.3), {}),
        (PENALISED, GenerationLimits(tokens=1), {"num_pages": 24}),
        (S, GenerationLimits(steps=2), {"steps_per_sync": 6}),
    ],
    ids=str,
)
def test_interrupted_rows_come_out_as_if_never_interrupted(
    path: str, sampling: SamplingConfig, limits: GenerationLimits, changes: dict[str, Any]
) -> None:
    requests = ragged_requests(samples=2, max_new_tokens=14)
    expected = build(path).generate(requests, sampling, 3, 5)
    generator = build(path, **changes)
    generator.generate(requests, sampling, 3, 5)
    prefills = [generator.stats.prefill_tokens]
    for drop in (False, True):
        totals = Counter[str]()

        def count(it: Generator, drop: bool = drop, totals: Counter[str] = totals) -> None:
            totals.update(calls=1, prefill=it.stats.prefill_tokens, decode=it.stats.decode_tokens)
            if drop:
                it.before_training()

        assert_same(generate_in_pieces(generator, requests, sampling, limits, count), expected)
        assert totals["calls"] > 2 and totals["decode"] == sum(len(c.token_ids) for c in expected)
        prefills.append(totals["prefill"])
    once, with_pages, dropped = prefills
    assert "num_pages" in changes or dropped > with_pages >= once
    assert generator._micro_batches is None and not generator.kept


def test_tokens_follow_the_weights_of_their_version(paths: list[str]) -> None:
    generator, second = map(build, paths)
    requests = ragged_requests(samples=2, max_new_tokens=20)
    ended = generator.generate_until(requests, S, 3, 5, GenerationLimits(tokens=100), version=1)
    generator.decoder, first = second.decoder, generator.decoder
    ended += generator.generate_until([], S, 3, 5, GenerationLimits(), version=2)
    assert {v for c in ended for v in c.versions.tolist()} == {1, 2}
    by_id = {r.row_id: r for r in requests}
    asked = [by_id[c.row_id] for c in ended]
    log_probs = [training_log_probs(decoder, asked, ended, 0.9) for decoder in (first, second.decoder)]
    for old, new, completion in zip(*log_probs, ended, strict=True):
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert torch.equal(completion.log_probs, torch.where(completion.versions == 1, old, new))


def test_fractions_count_whole_groups(path: str) -> None:
    requests = [Request(i, i // 3, [3, 4, 5 + i // 3], 4 + 3 * (i // 3)) for i in range(12)]  # groups end in their order
    generator, s = build(path), replace(S, ignore_eos=True)
    for fraction, groups in ((0.25, [0]), (0.5, [1, 2]), (1.0, [3])):
        ended = generator.generate_until(requests, s, 0, 0, GenerationLimits(fraction=fraction), 1)
        assert sorted({c.row_id // 3 for c in ended}) == groups and len(ended) == 3 * len(groups)
        requests = []
    assert generator.generate_until([], s, 0, 0, GenerationLimits(), 1) == []
    for bad in ({"tokens": 0}, {"seconds": -1.0}, {"fraction": 1.5}):
        with pytest.raises(ValueError, match=r"limits\."):
            GenerationLimits(**bad)


def test_continued_rows_keep_the_step_they_began_with(path: str) -> None:
    generator = build(path)
    early, late = ragged_requests(samples=1), [replace(r, row_id=r.row_id + 100) for r in ragged_requests(samples=1)]
    expected = generator.generate(early, S, 3, 5) + generator.generate(late, S, 3, 6)
    completions = generator.generate_until(early, S, 3, 5, GenerationLimits(tokens=50), 1)
    completions += generator.generate_until(late, S, 3, 6, GenerationLimits(), 2)
    assert_same(sorted(completions, key=lambda c: c.row_id), expected)


def interrupt_by_the_clock(world: World, path: str, layout: Layout) -> list[Any]:
    """Ranks whose clocks disagree: each waits for its own time, the first rank's decides."""
    mesh = build_mesh(world, list(range(world.size)), layout)
    generator = Generator(load(path, mesh), mesh, SMALL, {2})
    requests = ragged_requests(samples=2)
    pieces = []
    while requests or generator.kept:
        until = GenerationLimits(seconds=0.05 * (1 + 3 * world.rank), fraction=0.9)
        ended = generator.generate_until(requests, S, 3, 5, until, 1, lambda: time.sleep(0.01))
        pieces.append([(c.row_id, c.token_ids) for c in ended])
        requests = []
    return pieces


@pytest.mark.parametrize("layout", tiers([Layout(tp=2), Layout(pp=2)], [Layout(tp=2)]), ids=str)
def test_all_ranks_of_a_replica_stop_at_the_same_step(path: str, layout: Layout) -> None:
    expected = build(path).generate(ragged_requests(samples=2), S, 3, 5)
    first, second = run_ranks(2, interrupt_by_the_clock, path, layout)
    assert first == second and len(first) > 2
    assert sorted(row for piece in first for row in piece) == [(c.row_id, c.token_ids) for c in expected]


def live_bytes() -> int:
    """Of all storages that a tensor that the garbage collector knows refers to."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({(s := t.untyped_storage())._cdata: s.nbytes() for t in tensors if t.device.type == "cpu"}.values())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "kv_cache"), [("torch", "offload"), ("cpp", "keep"), ("cpp", "offload")], indirect=["backend"]
)
def test_pages_wait_and_are_the_same_again(path: str, kv_cache: str) -> None:
    """No token is computed twice."""
    gc.collect()
    gc.freeze()  # what lives already is not looked at again and again
    requests = ragged_requests(samples=2, max_new_tokens=30)
    expected = build(path).generate(requests, PENALISED, 3, 5)
    generator = build(path, kv_cache=kv_cache, max_num_batched_tokens=50, num_pages=300)
    computed, before = 0, live_bytes()

    def wait(it: Generator) -> None:
        nonlocal computed
        computed += it.stats.prefill_tokens + it.stats.decode_tokens
        if it._micro_batches is None:
            return
        micro_batch, total = it._micro_batches.micro_batches[0], live_bytes()
        size, used = micro_batch.cache.pages.nbytes, len(micro_batch.scheduler.pages.used)
        it.before_training()
        freed = total - live_bytes()
        if kv_cache == "keep":
            assert freed == 0
        else:  # all of the pool but the pages of rows in flight, and what the torch attention gathers into
            assert size * (300 - used) // 300 - 8 * used <= freed and used < 150

    tolerance = 0.0 if generator.decoder.ops.is_batch_invariant(torch.float32) else 1e-5
    assert_same(generate_in_pieces(generator, requests, PENALISED, GenerationLimits(steps=4), wait), expected, tolerance)
    assert computed <= sum(len(each) for r, c in zip(requests, expected, strict=True) for each in (r.prompt_ids, c.token_ids))
    assert generator._micro_batches is None and live_bytes() < before + 100_000


@pytest.mark.parametrize("kv_cache", ["keep", "offload"])
def test_other_rows_have_the_memory_of_rows_that_wait(path: str, kv_cache: str) -> None:
    """A validation, say: the cache of the rows in flight may have taken all there is. They go on without a token computed twice."""
    requests, other = ragged_requests(samples=2, max_new_tokens=20), [Request(1000, 1000, [5, 6, 7], 8)]
    expected, others = build(path).generate(requests, S, 3, 5), build(path).generate(other, S, 3, 5)
    generator = build(path, kv_cache=kv_cache, num_pages=300)
    ended = generator.generate_until(requests, S, 3, 5, GenerationLimits(steps=4), 1)
    generator.before_training()
    assert generator._micro_batches is not None
    cache, sizes = generator._micro_batches.micro_batches[0].cache, list[int]()
    assert_same(generator.generate(other, S, 3, 5, lambda: sizes.append(cache.pages.nbytes)), others)
    assert sizes and not any(sizes)
    ended += generator.generate_until([], S, 3, 5, GenerationLimits(), 1)
    assert generator.stats.prefill_tokens == 0
    assert_same(sorted(ended, key=lambda row: row.row_id), expected)


@pytest.mark.parametrize("name", [None, "gemma4"])  # whose layers have pages of two shapes
def test_rows_go_on_from_what_older_weights_computed(paths: list[str], name: str | None, tmp_path: Path) -> None:
    """Under other weights: only the last token of a row is new to them, and rows of a prompt that begin later share nothing."""
    if name is not None:
        paths = [str(tmp_path / "first"), str(tmp_path / "second")]
        for seed, path in enumerate(paths):
            write_random_model(Path(path), {**CONFIGS[name], "initializer_range": 0.2}, seed)
    first, second = (build(path).decoder for path in paths)
    row = Request(0, 0, [5, 6, 7, 8, 9] * 5, 12)
    late = [replace(row, row_id=1), replace(row, row_id=2)]
    ended = {}
    for kv_cache in ("free", "keep", "offload"):
        generator = build(paths[0], kv_cache=kv_cache, num_pages=40)
        generator.decoder = first
        assert generator.generate_until([row], S, 3, 5, GenerationLimits(steps=4), 1) == []
        generator.before_training()
        generator.decoder = second
        ended[kv_cache] = sorted(generator.generate_until(late, S, 3, 5, GenerationLimits(), 2), key=lambda c: c.row_id)
        counts = generator.stats.prefill_tokens, generator.stats.hit_tokens
        # the early row computes its 25 + 4 tokens again, for the others too; or one of the others computes the prompt
        assert counts == ((28, 48) if kv_cache == "free" else (24, 24))
    assert_same(ended["offload"], ended["keep"])
    assert_same(ended["free"][1:], build(paths[1]).generate(late, S, 3, 5))
    assert_same(ended["keep"][1:], ended["free"][1:])
    old, new = ended["free"][0], ended["keep"][0]
    assert torch.equal(old.log_probs[:4], new.log_probs[:4]) and not torch.equal(old.log_probs[4:], new.log_probs[4:])
