"""Rows move between replicas: the same tokens, with the work spread over all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tasks
from generate_runs import ROWS, arguments, read_output, run_program_on_rank, write_rows
from generators import MODELS, SMALL, alone, load
from hypothesis import given
from hypothesis import strategies as st
from overrides import layout as layout_of
from ranks import run_ranks

from rlhf_spmd.generation import Generator, Request, SamplingConfig
from rlhf_spmd.generation.balancing import plan_moves
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

SAMPLED = SamplingConfig(repetition_penalty=1.1, logprobs=2, ignore_eos=True)


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=7))
def test_moves_make_counts_equal_and_leave_small_differences_alone(counts: list[int]) -> None:
    after = list(counts)
    for source, target, number in plan_moves(counts):
        assert number > 0 and source != target
        after[source] -= number
        after[target] += number
    if 2 * min(counts) >= max(counts) or max(counts) - min(counts) < 2:
        assert after == counts
    else:
        assert max(after) - min(after) <= 1 and sum(after) == sum(counts)
        assert sum(abs(a - b) for a, b in zip(after, counts, strict=True)) == 2 * sum(n for *_, n in plan_moves(counts))


def requests_of(replica: int) -> list[Request]:
    """The first replica has nearly all of the work; the second, if there is one, two short rows."""
    prompts = [[3 + i, 5, 7 + i % 3] * (1 + i % 9) for i in range(14)]
    rows = [Request(i, i // 2, prompts[i // 2], 20 + i % 7) for i in range(14)]
    return rows[:12] if replica == 0 else [replace(row, max_new_tokens=3) for row in rows[12:]] if replica == 1 else []


def generate_skewed(world: World, path: str, layout: Layout, changes: dict[str, Any]) -> tuple[list[Any], int, int, int]:
    mesh = build_mesh(world, list(range(world.size)), layout)
    generator = Generator(load(path, mesh), mesh, replace(SMALL, **changes), {2})
    found = []
    for step in (0, 1):  # a second call starts from nothing
        for c in generator.generate(requests_of(mesh.dp_rank), SAMPLED, 3, step):
            assert c.top_log_probs is not None and len(c.versions) == len(c.token_ids) == len(c.top_log_probs[0])
            found.append((step, c.row_id, c.token_ids, c.log_probs.tolist()))
    stats = generator.stats
    assert stats.seconds >= stats.busy_seconds > 0
    return found, stats.decode_tokens, stats.moved_rows, stats.preemptions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(root, MODELS["qwen3"], seed=7)
    return root


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(dp=2), {"rebalance_steps": 4}),
        (Layout(dp=4), {"rebalance_steps": 3}),
        (Layout(dp=2), {"rebalance_steps": 6, "num_pages": 9, "page_size": 6}),
        (Layout(dp=2, pp=2), {"rebalance_steps": 5}),
        (Layout(dp=2, tp=2), {"rebalance_steps": 5}),
    ],
    ids=str,
)
def test_moved_rows_are_the_same_rows(path: Path, layout: Layout, changes: dict[str, Any]) -> None:
    mesh = alone()[1]
    generator = Generator(load(str(path), mesh), mesh, SMALL, {2})
    everything = [request for replica in range(layout.dp) for request in requests_of(replica)]
    wanted = {(s, c.row_id): c for s in (0, 1) for c in generator.generate(everything, SAMPLED, 3, s)}
    results = run_ranks(layout.size, generate_skewed, str(path), layout, changes)
    seen = set()
    for found, _, _, preemptions in results:
        for step, row_id, token_ids, log_probs in found:
            assert token_ids == wanted[step, row_id].token_ids
            assert log_probs == pytest.approx(wanted[step, row_id].log_probs.tolist(), abs=2e-5 if layout.tp > 1 else 0)
            seen.add((step, row_id))
        assert (preemptions > 0) >= ("num_pages" in changes and len(found) > 4)
    assert seen == set(wanted) and sum(moved for *_, moved, _ in results) > 0
    drawn = [tokens for _, tokens, _, _ in results]
    assert max(drawn) < 0.75 * sum(drawn) / (layout.size / layout.dp)  # without moves 0.98
    assert sum(drawn) == layout.size / layout.dp * sum(len(c.token_ids) for (s, _), c in wanted.items() if s == 1)


def test_the_programs_move_rows(path: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [row for row in ROWS if "prompt_ids" in row] * 5)
    common = ["sampling.max_response_length=30", "generation.max_num_seqs=4"]
    for name, more in (("one", []), ("two", ["layout.dp=2", "generation.rebalance_steps=2"])):
        argv = arguments(path, rows, tmp_path / f"{name}.jsonl", *common, *more)
        run_ranks(1 + (name == "two"), run_program_on_rank, argv)
    assert read_output(tmp_path / "one.jsonl") == read_output(tmp_path / "two.jsonl")

    runs = []
    for name, steps in (("fixed", 0), ("moving", 1)):
        more = (f"models.actor.generation.rebalance_steps={steps}", "models.actor.generation.max_num_seqs=4")
        settings = tasks.settings(tmp_path / name, 3, "sampling.logit_bias={0: 2.0}", *layout_of("actor", dp=2), *more)
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), settings)
        runs.append(tasks.read_run(tmp_path / name))
    assert runs[0].responses == runs[1].responses and runs[0].metrics == runs[1].metrics
    assert [sum(row["generation/moved_rows"] for row in run.raw) > 0 for run in runs] == [False, True]
    assert all(0 <= row["generation/idle_fraction"] < 1 for run in runs for row in run.raw)
    for row in runs[0].raw:
        assert row["generation/prefix_hit_rate"] > 0.2  # two samples of each prompt
        assert row["generation/prefix_hit_tokens"] < row["generation/prompt_tokens"]
        assert row["generation/draft_tokens"] == row["generation/stage_idle_fraction"] == 0
    events = json.loads((tmp_path / "moving" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "actor.generate_sequences" and event["ph"] == "X"]
    assert len(spans) == 2 * 3
    for span in spans:
        busy, idle = span["args"]["busy_seconds"], span["args"]["idle_seconds"]
        assert busy > 0 < idle and busy + idle < span["dur"] / 1e6
    fractions = [event["args"]["idle_fraction"] for event in events if event["name"] == "generation"]
    assert fractions == [pytest.approx(row["generation/idle_fraction"], abs=1e-4) for row in runs[1].raw]
