"""APP's evaluations (Xiao et al. 2023, arXiv 2312.11819, section VI): simulated by the planner's cost model, placements also for real.

    python scripts/bench/paper_app.py interleaving --out interleaving.json    also separation, heterogeneous, trlx, shared, lengths:
                                                                              arithmetic on one core, one to five minutes each
    python scripts/bench/paper_app.py placements --ranks 2 4 --out placements.json    real runs on gloo ranks

Llama models, all roles of a step of one size; hosts of 8 A100 (2 TiB of host memory) with 100 GB/s between hosts; prompts and responses
of 256 tokens; one mini-batch of one micro-batch; no CUDA graphs. Rows for each rank of the actor (``batch``): the paper's, as far as
its text tells, or those with most samples per second. Optimizers and frozen models are offloaded only where nothing fits without.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from measure import RunError, machine_facts, median, run_parts, run_program, save, table
from placed_step import FROZEN, GENERATE, ROLES, Limits, Ranks, Step, most_samples, problem_of, schedule_of
from rlhf_spmd.planner.problem import RankRange
from rlhf_spmd.planner.search import NoPlanError, exact
from train import Work, settings_of, write_inputs

# The paper's tables

ZERO2 = Limits(zero=2, frozen=0, generation=(0,))
SHARDS = Limits(generation=(3,))
HYBRID = Limits(generation=(0,), tp=("actor",))
SLICES = Limits(generation=(0,), tp=("actor", *FROZEN))
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
SIZES = ("7B", "13B", "33B", "65B")
LIMITS = dict(zip(SIZES, (ZERO2, Limits(), SHARDS, SHARDS), strict=True))
PAPER_BATCH = dict(zip(SIZES, (24, 24, 12, 12), strict=True))  # 24: told for 7B; 12: 33B's 400 s at 0.93 samples/s on 32 GPUs


@dataclass(frozen=True)
class Case:
    """A strategy: the best of its ``placements``. ``paper``: samples/s; 0: out of memory.

    ``batch``: rows for each rank of the actor in the paper; 0: as PAPER_BATCH; None: unknown.
    """

    strategy: str
    paper: float | None
    step: Step
    limits: Limits
    placements: Sequence[Ranks]
    batch: int | None = 0


def compare(bench: str, cases: Iterable[Case], batches: Sequence[int], out: Path | None) -> None:
    """Print and save samples/s of each case, and their ratios to the first case with the same model, GPUs and checkpointing."""
    rows: list[dict[str, Any]] = []
    first: dict[tuple[str, int, str], dict[str, Any]] = {}
    for case in cases:
        step = case.step
        row: dict[str, Any] = {"model": step.model, "gpus": step.gpus, "checkpointing": case.limits.checkpointing}
        row |= {"strategy": case.strategy, "paper": case.paper}
        known = [] if case.batch is None else [case.batch or PAPER_BATCH[step.model]]
        same = most_samples(step, case.limits, case.placements, known)
        best = most_samples(step, case.limits, case.placements, batches)
        row |= {
            "same_batch": same["samples_per_s"] if known else None,
            "ours": best["samples_per_s"],
            "same_peak_gib": same.get("peak_gib"),
            **best,
        }
        row |= {"same_seconds": same.get("seconds"), "same_generation_share": same.get("generation_share")}
        base = first.setdefault((step.model, step.gpus, case.limits.checkpointing), row)
        row |= {
            f"{key}_ratio": row[key] / base[key] if row[key] and base[key] else None for key in ("paper", "same_batch", "ours")
        }
        rows.append(row)
    columns = "model gpus checkpointing strategy paper same_batch ours paper_ratio same_batch_ratio ours_ratio"
    print(table(rows, f"{columns} same_seconds same_generation_share same_peak_gib batch generating offload"))
    save({"bench": f"paper_app_{bench}", "rows": rows}, out)


def searched_samples(step: Step) -> float:
    """Return samples per second of the plan that the planner finds for a step; 0 if none fits."""
    try:
        return step.rows / exact.search(problem_of(step), limit=20.0).seconds
    except NoPlanError:
        return 0.0


def on_all(gpus: int) -> Ranks:
    """Return flattening's ranks."""
    return dict.fromkeys(ROLES, RankRange(0, gpus))


def halves(gpus: int) -> tuple[RankRange, RankRange]:
    """Return the first and the second half of the ranks."""
    return RankRange(0, gpus // 2), RankRange(gpus // 2, gpus // 2)


def separations(gpus: int) -> list[Ranks]:
    """Return placements in which an eighth to three quarters of the ranks generate; frozen roles are there or where roles train."""
    placements: list[Ranks] = []
    for generating in (RankRange(0, gpus * eighths // 8) for eighths in (1, 2, 4, 6)):
        training = RankRange(generating.count, gpus - generating.count)
        trained = {GENERATE: generating, "actor": training, "critic": training}
        placements += [trained | dict.fromkeys(FROZEN, ranks) for ranks in (training, generating)]
    return placements


TABLE_1 = {  # (GPUs, strategy) -> samples/s of each of SIZES
    (8, "flattening"): (16.12, 7.32, 0.69, 0.0),
    (8, "interleave 1"): (17.35, 7.63, 0.69, 0.0),
    (16, "flattening"): (32.15, 15.35, 0.64, 0.14),
    (16, "interleave 1"): (34.70, 15.66, 0.64, 0.14),
    (16, "interleave 2"): (18.27, 8.27, 0.97, 0.24),
    (32, "flattening"): (61.95, 28.60, 0.93, 0.20),
    (32, "interleave 1"): (69.44, 28.54, 0.95, 0.20),
}


def interleaving(
    gpus: Sequence[int] = (8, 16, 32), models: Sequence[str] = SIZES, batches: Sequence[int] = BATCHES, out: Path | None = None
) -> None:
    """Table I: flattening against interleaving.

    7B trains with ZeRO-2, and each rank has all weights of frozen models; larger models have ZeRO-3. Interleave 1: reference and
    reward on half of the ranks each; "our order": as our script calls them. Interleave 2: actor and critic, too; generation runs on
    the actor's half, or on all ranks in tensor slices, as this product's ``interleave`` has it.
    """
    cases: list[Case] = []
    for model, number in product(models, gpus):
        first, second = halves(number)
        step = Step(model, number)
        limits = LIMITS[model]
        larger_batch = 36 if limits == ZERO2 else 0  # what the paper's interleaving has room for
        frozen = {**on_all(number), "reference": first, "reward": second}
        both = {"actor": first, "reward": first, "critic": second, "reference": second}
        spread = both | {GENERATE: RankRange(0, number)}
        published = {name: figures[SIZES.index(model)] for (size, name), figures in TABLE_1.items() if size == number}
        cases += [
            Case("flattening", published.get("flattening"), step, limits, [on_all(number)]),
            Case("interleave 1", published.get("interleave 1"), step, limits, [frozen], larger_batch),
            Case("interleave 1, our order", None, replace(step, reordered=False), limits, [frozen], larger_batch),
            Case("interleave 2", published.get("interleave 2"), step, limits, [both]),
            Case("interleave 2, all generate", None, step, replace(limits, generation=(0,), tp=("actor",)), [spread]),
        ]
    compare("interleaving", cases, batches, out)


TABLE_2 = {  # (model, GPUs) -> samples/s of DeepSpeed-Chat and of separation
    ("33B", 32): (0.93, 4.76),
    ("65B", 32): (0.20, 1.75),
    ("33B", 128): (2.11, 10.07),
    ("65B", 128): (0.55, 6.80),
}


def separation(
    gpus: Sequence[int] = (32, 128),
    models: Sequence[str] = SIZES[2:],
    batches: Sequence[int] = BATCHES[4:],
    out: Path | None = None,
) -> None:
    """Table II and figure 8: separation, one step ahead of training, against two kinds of flattening.

    The one gathers each layer for every token, as ZeRO-3 does where the model does not fit. The other, a hybrid engine, gathers
    before generation, into tensor slices inside hosts. So do separation's generation and frozen roles.
    """
    cases: list[Case] = []
    for model, number in product(models, gpus):
        step = Step(model, number)
        published = TABLE_2.get((model, number), (None, None))
        cases += [
            Case("flattening, gathers for each token", published[0], step, SHARDS, [on_all(number)]),
            Case("flattening, hybrid engine", None, step, HYBRID, [on_all(number)]),
            Case("separation", published[1], replace(step, ahead=1), SLICES, separations(number)),
        ]
    compare("separation", cases, batches, out)


def heterogeneous(model: str = "33B", batches: Sequence[int] = BATCHES, out: Path | None = None) -> None:
    """Table III: 8 A100 against 8 A100 and 8 V100 of 32 GB, of which the reference and the reward model have four each.

    Generation runs on all A100, or one step ahead on half of them; the paper gives it two. The paper's two hosts of four V100 are
    one of eight, since hosts must have as many ranks. V100 compute in fp16.
    """
    first, second = halves(8)
    step = Step(model, 8)
    mixed = replace(step, v100s=8)
    on_v100s = {"reference": RankRange(8, 4), "reward": RankRange(12, 4)}
    apart = {GENERATE: first, "actor": second, "critic": second, **on_v100s}
    cases = [
        Case("8 A100, gathers for each token", 0.69, step, SHARDS, [on_all(8)]),
        Case("8 A100, hybrid engine", None, step, HYBRID, [on_all(8)]),
        Case("and 8 V100, gathers for each token", None, mixed, replace(SHARDS, tp=FROZEN), [on_all(8) | on_v100s]),
        Case("and 8 V100, hybrid engine", None, mixed, SLICES, [on_all(8) | on_v100s]),
        Case("and 8 V100, separation", 0.79, replace(mixed, ahead=1), SLICES, [apart]),
    ]
    compare("heterogeneous", cases, batches, out)
    for name, sizes in (("8 A100", step), ("8 A100 and 8 V100", mixed)):
        best = max(searched_samples(replace(sizes, rows=8 * batch, budget=512 * batch)) for batch in batches)
        print(f"searched plan on {name}: {best:.4g} samples/s")


TABLES_4_5 = {  # (GPUs, gradient checkpointing, strategy) -> samples/s of 7B and 13B
    (8, "none", "trlX, alone"): (6.04, 2.84),
    (8, "none", "trlX, beside others"): (6.20, 2.20),
    (8, "none", "flattening"): (10.48, 2.9),
    (8, "full", "trlX, alone"): (5.92, 2.87),
    (8, "full", "trlX, beside others"): (6.21, 2.22),
    (8, "full", "flattening"): (25.58, 11.53),
    (8, "full", "interleaving"): (27.27, 11.76),
    (16, "full", "trlX, beside others"): (7.76, 3.23),
    (16, "full", "flattening"): (50.67, 22.26),
    (16, "full", "interleaving"): (54.71, 24.63),
    (32, "full", "trlX, beside others"): (8.87, 4.24),
    (32, "full", "flattening"): (102.13, 46.81),
    (32, "full", "interleaving"): (109.18, 46.16),
}


def trlx(
    gpus: Sequence[int] = (8, 16, 32),
    models: Sequence[str] = SIZES[:2],
    batches: Sequence[int] = BATCHES,
    out: Path | None = None,
) -> None:
    """Tables IV and V and figure 9: trlX's placements against others; actor and critic are one model.

    trlX's reward model has one GPU, alone or beside the actor and the reference. ``same_batch``: 35 rows with checkpointing (figure 9's
    72 s at 7.76 samples/s on 16 GPUs). Without checkpointing the paper has 8 GPUs.
    """
    cases: list[Case] = []
    for model, number, level in product(models, gpus, ("none", "full")):
        if level == "none" and number > 8:
            continue
        first, second = halves(number)
        on_last = {"reward": RankRange(number - 1, 1)}
        placements: dict[str, list[Ranks]] = {
            "trlX, beside others": [on_all(number) | on_last],
            "trlX, alone": [dict.fromkeys(ROLES, RankRange(0, number - 1)) | on_last],
            "flattening": [on_all(number)],
            "interleaving": [on_all(number) | {"reference": first, "reward": second}],
            "separation": separations(number),
        }
        for strategy, ranks in placements.items():
            limits = replace(LIMITS[model], checkpointing=level)
            step = Step(model, number, shared=True)
            if strategy == "separation":
                limits = replace(limits, generation=(0,), tp=SLICES.tp)
                step = replace(step, ahead=1)
            paper = TABLES_4_5.get((number, level, strategy), (None, None))[SIZES.index(model)]
            cases.append(Case(strategy, paper, step, limits, ranks, None if level == "none" else 35))
    compare("trlx", cases, batches, out)


# Beside the paper


def shared(
    models: Sequence[str] = SIZES[:2], batch: int = 8, batches: Sequence[int] = BATCHES, out: Path | None = None
) -> None:
    """AC-share: memory of the fullest of 8 GPUs with ``batch`` rows on each, two models or one for actor and critic, in flattening."""
    steps = [Step(model, 8, shared=is_shared) for model, is_shared in product(models, (False, True))]
    names = {False: "two models", True: "one model"}
    cases = [Case(names[step.shared], None, step, LIMITS[step.model], [on_all(8)], batch) for step in steps]
    compare("shared", cases, batches, out)


def lengths(
    models: Sequence[str] = ("7B", "33B"),
    gpus: int = 32,
    rows: int = 384,
    responses: Sequence[int] = (128, 512, 2048, 8192),
    shares: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 3 / 4),
    out: Path | None = None,
) -> None:
    """Seconds of a step by the length of responses in this product's placements, each call in its fastest layout.

    ``shares``: of the ranks that generate in ``separate``, as ``placement.ratios`` has them; ``ahead``: one step ahead. Micro-batches
    of 16,384 tokens; decode steps are CUDA graphs.
    """
    results: list[dict[str, Any]] = []
    first, second = halves(gpus)
    placements: dict[str, Ranks] = {
        "colocate": on_all(gpus),
        "interleave": {"actor": first, "reward": first, "critic": second, "reference": second, GENERATE: RankRange(0, gpus)},
    }
    for name, share in product(("separate", "ahead"), shares):
        generating = RankRange(0, int(gpus * share))
        training = RankRange(generating.count, gpus - generating.count)
        placements[f"{name}_{share:g}"] = dict.fromkeys(ROLES, training) | {GENERATE: generating}
    for model, response in product(models, responses):
        row: dict[str, Any] = {"model": model, "response": response}
        for name, ranks in placements.items():
            step = Step(
                model, gpus, 0, rows, 16384, ahead=int("ahead" in name), response=response, graphs=True, reordered=False
            )
            schedule = schedule_of(step, None, ranks)
            row[name] = schedule.seconds if schedule else None
        row["fastest"] = min((row[name], name) for name in placements if row[name])[1]
        results.append(row)
    print(table(results, " ".join(["model response", *placements, "fastest"])))
    save({"bench": "paper_app_lengths", "gpus": gpus, "rows_of_a_step": rows, "rows": results}, out)


# Real runs

SEPARATE = "placement.strategy=separate"
STRATEGIES: dict[str, tuple[str, ...]] = {
    "flattening": ("placement.strategy=colocate",),
    "interleave": ("placement.strategy=interleave",),
    "separate": (SEPARATE,),
    "ahead": (SEPARATE, "rollout.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true"),
}


def step_seconds(trace: Mapping[str, Any], warm: int = 2) -> float:
    """Return the median seconds between the ends of steps, over all ranks; the first ``warm`` steps do not count."""
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "compute":
            number = event["args"]["step"]
            ends[number] = max(ends.get(number, 0.0), (event["ts"] + event["dur"]) / 1e6)
    times = [ends[number] for number in sorted(ends)][warm - 1 :]
    return median([later - earlier for earlier, later in pairwise(times)])


def placements(
    ranks: Sequence[int] = (2, 4),
    model: str = "S",
    responses: Sequence[int] = (16, 64, 256),
    prompts: int = 32,
    steps: int = 8,
    strategies: Sequence[str] = tuple(STRATEGIES),
    out: Path | None = None,
) -> None:
    """Seconds of a step of the same PPO run on gloo ranks in APP's placements, by the length of responses.

    Models of shapes.py with random weights, prompts of 64 tokens with one response each, all of full length; the reward is a rule.
    ``times_as_fast``: against the first of ``strategies``.
    """
    rows: list[dict[str, Any]] = []
    for number, response in product(ranks, responses):
        base: float | None = None
        for strategy in strategies:
            row: dict[str, Any] = {"ranks": number, "response": response, "strategy": strategy}
            with tempfile.TemporaryDirectory() as name:
                root = Path(name)
                work = Work(model, prompts, 1, 64, response, 1, 0)
                write_inputs(root, work)
                settings = settings_of("ppo", root, work, steps) | {"run.save_freq": 0, "run.test_freq": 0}
                try:
                    run_program(root / "run", number, settings, *STRATEGIES[strategy])
                    row["seconds"] = step_seconds(json.loads((root / "run" / "trace.json").read_text(encoding="utf-8")))
                    base = base or row["seconds"]
                    row["times_as_fast"] = base / row["seconds"]
                except RunError as error:
                    row["error"] = str(error)[:200]
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows, "ranks response strategy seconds times_as_fast"))
    save({"bench": "paper_app_placements", "machine": machine_facts(), "model": model, "rows": rows}, out)


if __name__ == "__main__":
    run_parts(interleaving, separation, heterogeneous, trlx, shared, lengths, placements)
