"""Calls on several kinds of devices: seconds follow from the rows that the trainer deals to each replica."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rlhf_spmd.controller import MICRO_DP, THREE_D, GroupShape, ResourcePool
from rlhf_spmd.controller.protocols import ProtocolRanks, RankSpeeds
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.device_times import DeviceTimes, KindSpeeds, measured_speeds
from rlhf_spmd.planner.machine import ClusterConfig, Machine
from rlhf_spmd.planner.memory import RESERVE, RankMemory, RoleSettings
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile
from rlhf_spmd.planner.planning import ProblemBuilder
from rlhf_spmd.planner.problem import Choice, RankRange, extent_of, runs_of_equals, simulate
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload, call_settings, shape_of

SPEC = ModelSpec("llama", 128256, 4096, 14336, 32, 32, 8, 128)


@dataclass(frozen=True)
class LinearTimes:
    """A replica takes ``fixed`` seconds and ``per_row`` for each of its rows, twice as long when it generates."""

    fixed: float
    per_row: float

    def tp_sizes(self, shape: ModelShape) -> list[int]:
        return [1, 2, 4]

    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        return self.fixed + self.per_row * work.rows * work.row_share / settings.dp

    train_seconds = infer_seconds

    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
        return self.fixed + 2 * self.per_row * work.rows * work.row_share / settings.dp


def model_call(kind: str, rows: int = 960) -> ModelCall:
    return ModelCall(
        name=f"actor.{kind}",
        role="actor",
        method=kind,
        kind=kind,
        after=frozenset(),
        spec=SPEC,
        shape=shape_of(SPEC, "lm"),
        work=Workload(rows, 1024, (1024,)),
        settings=RoleSettings(trained=True),
        generation=GenerationConfig(),
        lora=LoraConfig(),
        num_dealt_units=rows,
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_call_takes_as_long_as_its_slowest_replica(seed: int) -> None:
    """Whose rows are those that the controller deals by the same speeds."""
    rng = random.Random(seed)
    pp, dp, tp = (rng.choice([1, 2, 3, 4]) for _ in range(3))
    size = pp * dp * tp
    kinds = tuple(sorted(rng.choices(range(rng.choice([1, 2, 3])), k=size), reverse=rng.random() < 0.5))
    times = [LinearTimes(rng.random(), rng.random()) for _ in range(3)]
    speeds = KindSpeeds(*(tuple(rng.sample([0.2, 0.4, 0.7, 1.0], k=3)) for _ in range(2)))
    for kind, protocol, of_kinds in (("train", THREE_D, speeds.compute), ("generate", MICRO_DP, speeds.generation)):
        call = model_call(kind)
        settings = call_settings([(1, 1, size), (pp, tp, dp)])
        extent = extent_of(runs_of_equals(kinds), RankRange(0, size))
        seconds = DeviceTimes(times, speeds).seconds(call, settings, extent, {})[1]
        pool = ResourcePool("all", tuple(range(size)))
        ranks = ProtocolRanks(protocol, GroupShape(Layout(pp, tp, dp)), pool, RankSpeeds([of_kinds[kind] for kind in kinds]))
        part_speeds = ranks.speeds or (1.0,) * ranks.num_parts
        expected = 0.0
        for part in range(ranks.num_parts):
            rows = call.work.rows * part_speeds[part] / sum(part_speeds)
            for rank in ranks.workers(part):  # all ranks of a replica wait for one another
                kind_times = times[kinds[rank]]
                expected = max(expected, kind_times.fixed + kind_times.per_row * rows * (2 if kind == "generate" else 1))
        assert seconds == pytest.approx(expected)
        works = DeviceTimes(times, speeds).works(call, settings, extent)
        largest = max(np.broadcast_to(work.row_share, 2)[1] for work in works.values())
        assert largest == pytest.approx(max(part_speeds) * ranks.num_parts / sum(part_speeds))


def fits_on_two_kinds(kind: str, memory: Sequence[float], speeds: tuple[float, float]) -> bool:
    """Whether a plan of one call fits on two ranks, one of each kind, with a replica each."""
    device = ClusterConfig().machine().device
    machine = Machine(2, 1, device, tuple(memory), 1e9, devices=(device, device), kinds=(0, 1))
    call = replace(model_call(kind, rows=40), home=True, settings=RoleSettings(trained=kind == "train"))
    placed = PlacedCall("0-1", dp=2, home=True, zero=3 * (kind == "train"), activation_checkpointing="full")
    placed = replace(placed, max_num_seqs=256, gpu_memory_utilization=0.9)
    file = PlanFile(2, 1, {}, {call.name: placed}, speeds=speeds)
    problem = ProblemBuilder([call], machine, [LinearTimes(0.0, 1.0)] * 2, budget=1 << 20, fixed=file).problem()
    return simulate(problem, (Choice(RankRange(0, 2), 0),)).fits


@pytest.mark.parametrize("kind", ["generate", "infer", "train"])
def test_each_rank_is_judged_by_its_own_rows_and_memory(kind: str) -> None:
    """Of 40 rows the fast rank has 32. A plan fits if and only if both ranks have enough, whichever has less memory."""
    zero = 3 * (kind == "train")
    settings = call_settings([(1, 1, 2)], micro_tokens=(1 << 20,), checkpointing=(2,), zero=(zero,))
    rank = RankMemory(shape_of(SPEC, "lm"), settings, RoleSettings(trained=kind == "train"), 0)
    needed = []
    for share in (1.6, 0.4):
        work = replace(model_call(kind, rows=40).work, row_share=share, largest_share=1.6)
        if kind == "generate":
            generation = rank.generate(work, GenerationConfig())
            parts = generation.parts | {"cache": generation.all_rows_bytes}
        else:
            parts = rank.train(work) if kind == "train" else rank.infer(work)
        amounts = (*rank.resident().values(), rank.communicators(), *parts.values())
        needed.append(RESERVE + float(sum(np.max(amount) for amount in amounts)))
    fast, slow = needed
    assert fast > 1.05 * slow
    for memory, expected in (
        ((1.01 * fast, 1.01 * slow), True),  # the faster has more memory
        ((1.01 * fast, 10 * slow), True),  # the slower has
        ((10 * fast, 0.99 * slow), False),
        ((0.99 * fast, 10 * slow), False),
    ):
        assert fits_on_two_kinds(kind, memory, (1.0, 0.25)) == expected, memory
        assert fits_on_two_kinds(kind, memory[::-1], (0.25, 1.0)) == expected, memory


def test_speeds_are_those_of_the_times() -> None:
    machine = Machine(16, 4, ClusterConfig().machine().device, (1e12,) * 16, 1e9)
    times = [LinearTimes(0.0, 2.0), LinearTimes(0.0, 1.0), LinearTimes(0.0, 8.0)]
    calls = [model_call("train"), model_call("infer")]
    assert measured_speeds(calls, machine, times, 16384) == KindSpeeds((0.5, 1.0, 0.125), (1.0, 1.0, 1.0))
    # 240 rows of a host on 4, 2 and 1 replicas: (120, 60, 300), (240, 120, 360) and (480, 240, 480) seconds; twice the rows' part for
    # generation
    slow_start = [*times[:2], LinearTimes(240.0, 1.0)]
    both_sorts = KindSpeeds((0.5, 1.0, 0.3444), (0.5, 1.0, 0.5))
    generate = model_call("generate")
    assert measured_speeds([*calls, generate], machine, slow_start, 16384) == both_sorts
    assert measured_speeds(calls, machine, times[:1], 16384) == KindSpeeds()


def test_rows_in_flight_are_those_of_a_host() -> None:
    """A host of a large cluster computes its part of the rows that go on, so its speed is that of decoding."""
    gpus = [ClusterConfig(nodes=32, gpu=name).machine() for name in ("h100", "a100")]
    times = [FormulaTimes(machine) for machine in gpus]
    call = model_call("generate", rows=4096)
    alone = measured_speeds([call], gpus[0], times, 16384).generation
    work = replace(call.work, in_flight=8192, recomputed=4096)
    in_flight = measured_speeds([replace(call, work=work)], gpus[0], times, 16384).generation
    assert 0.3 < in_flight[1] < alone[1] < 1.0 and in_flight[1] > 0.8 * alone[1]


def test_all_replicas_have_as_many_micro_batches_as_the_one_with_most_rows() -> None:
    settings = call_settings([(1, 1, 4)], micro_tokens=(4096,))
    work = replace(model_call("train").work, row_share=0.5, largest_share=2.0)
    count, tokens = work.micro_batches(960, settings)
    most, _ = replace(work, row_share=2.0).micro_batches(960, settings)
    alone, _ = replace(work, largest_share=0.5).micro_batches(960, settings)
    assert count == most == 4 * alone and count * tokens == 0.5 * 960 / 4 * 2048


@pytest.mark.parametrize(("group", "ratio"), [(1, 1.4), (1, 2.2), (4, 1.5), (8, 3.0)])
def test_rows_in_flight_take_the_steps_that_a_simulation_takes(group: int, ratio: float) -> None:
    """New groups begin when a step begins; it ends when as many have ended, and their rows are as many as planned."""
    lengths = (90.0, 150.0, 280.0, 512.0)
    ending = 400
    rng = np.random.default_rng(group)
    ages = np.zeros(0)
    limits = np.zeros(0)
    taken = []
    for _ in range(60):
        missing = round(ending * ratio) - len(ages)
        ages = np.concatenate([ages, np.zeros(missing)])
        limits = np.concatenate([limits, rng.choice(lengths, (missing, group)).max(axis=1)])
        steps = np.sort(limits - ages)[ending - 1]
        oldest = np.argsort(limits - ages, kind="stable")[ending:]
        ages = np.minimum(ages + max(steps, 0), limits)[oldest]
        limits = limits[oldest]
        taken.append(max(steps, 0))
    work = Workload(ending * group, 64, lengths, group=group, in_flight=round(ending * ratio) * group)
    (phase,) = work.decode_phases(call_settings([(1, 1, 1)]), 1e9)
    assert float(phase.steps[0]) == pytest.approx(np.mean(taken[10:]), rel=0.15)
