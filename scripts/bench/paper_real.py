"""The evaluations of ReaL (Mei et al. 2024, arXiv 2406.14088) by the planner's cost model, and reallocation on CPU ranks.

    python scripts/bench/paper_real.py gain --out gain.json
    python scripts/bench/paper_real.py search --out search.json                minutes
    python scripts/bench/paper_real.py reallocation --out reallocation.json    gloo ranks, 5 minutes

All parts but the last are arithmetic on one core. ReaL's cluster: hosts of 8 H100, 3.2 Tb/s between them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np

from measure import chosen, machine_facts, median, run_parts, run_program, save, table
from paper_real_calls import BEYOND, MINI_BATCHES, PROMPT, STEPS
from papers import limited, step_builder
from rlhf_spmd.planner.costs import Calibration, FormulaTimes
from rlhf_spmd.planner.machine import ClusterConfig
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.problem import CallNode, Option, Plan, Problem, Schedule, simulate
from rlhf_spmd.planner.search import NoPlanError, exact, mcmc
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload
from train import Work, settings_of, write_inputs

# A step of ReaL's


@dataclass(frozen=True)
class RealTimes(FormulaTimes):
    """Seconds of ReaL's calls; infinite where it has no such setting.

    It recomputes all layers, sums over tp by all-reduces, and shards no more than the optimizer.

    - graphs: decode steps are CUDA graphs, also across ranks
    - parts: parts in which a replica generates its rows one after the other; 0: as a search chooses
    """

    calibration: Calibration = field(default_factory=Calibration)
    graphs: bool = True
    parts: int = 0

    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of a forward pass over all rows."""
        return np.where(settings.zero <= 1, super().infer_seconds(shape, work, settings), math.inf)

    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of training."""
        is_real = (settings.zero <= 1) & (settings.checkpointing == 2) & (settings.sequence_parallel == 0)
        return np.where(is_real, super().train_seconds(shape, work, settings), math.inf)

    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
        """Return seconds of generating all responses."""
        settings = settings.set(graphs=int(self.graphs))
        if self.parts:
            settings = settings.set(max_num_seqs=np.maximum(work.rows // settings.dp // self.parts, 1))
        return super().generate_seconds(shape, work, settings, kv_bytes)


@dataclass(frozen=True)
class Step:
    """A step of ReaL's evaluations.

    - actor, critic: sizes of actor and reference, and of critic and reward model
    - prompts: of a step; GRPO generates eight responses to each
    - context: tokens of a row, 1,024 of them the prompt's
    """

    actor: str
    critic: str
    gpus: int
    prompts: int
    context: int = 2048
    algorithm: str = "ppo"

    def problem(self, graphs: bool = True, parts: int = 0) -> Problem:
        """Return the options of ReaL's calls, with micro-batches of several sizes. See :class:`RealTimes`."""
        roles = {"dpo": ("actor",), "ppo": ("actor", "critic", "reward")}.get(self.algorithm, ("actor", "reward"))
        models = {role: f"llama3 {self.actor if role == 'actor' else self.critic}" for role in roles}
        settings = [f"data.train_batch_size={self.prompts}"]
        if self.algorithm == "dpo":
            settings += [f"workload.prompt_length={PROMPT}", f"workload.response_lengths=[{self.context - PROMPT}]"]
        else:
            settings += [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={self.context - PROMPT}"]
            settings += [f"algorithm.ppo_mini_batch_size={self.prompts // MINI_BATCHES}", "reward.function=null"]
            settings += [f"sampling.n={8 if self.algorithm == 'grpo' else 1}"]
        if self.algorithm == "remax":
            settings += ["algorithm.use_kl_in_reward=true"]
        cluster = ClusterConfig(nodes=max(self.gpus // 8, 1), gpus_per_node=min(self.gpus, 8), gpu="h100")
        times = partial(RealTimes, graphs=graphs, parts=parts)
        by_budget = [
            step_builder(self.algorithm, models, cluster, settings, budget, times, real_calls).problem()
            for budget in (max(4096, self.context), 16384)
        ]
        same_calls = zip(*(problem.calls for problem in by_budget), strict=True)
        weights = by_budget[0].weights
        calls = tuple(
            replace(same[0], options=tuple(real_option(call, option, weights) for call in same for option in call.options))
            for same in same_calls
        )
        return limited(replace(by_budget[0], calls=calls), is_real)


def real_calls(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return ReaL's calls: generation returns the log-probs, rows share no prompts, and ReMax's greedy responses have calls of
    their own."""
    result: list[ModelCall] = []
    places: dict[int, list[int]] = {}  # of our calls among ReaL's
    for index, call in enumerate(calls):
        if call.name == "actor.compute_log_prob":
            continue
        after = [place for before in sorted(call.after) for place in places.get(before, ())]
        same_calls = [replace(call, work=replace(call.work, group=1))]
        if call.kind == "generate" and call.work.group == 2:  # sampled and greedy responses to the same prompts
            half = replace(call, work=replace(call.work, rows=call.work.rows // 2, group=1))
            same_calls = [half, replace(half, name="actor.generate_greedy")]
        elif call.kind == "infer":  # of all responses, or of the sampled or the greedy ones
            after = after[-1:] if call.shares_home else after[:1]
        places[index] = list(range(len(result), len(result) + len(same_calls)))
        result += [replace(same, after=frozenset(after)) for same in same_calls]
    return result


def kind_of(call: CallNode) -> Literal["generate", "train", "infer"]:
    """Return the kind of a call from its name."""
    return "generate" if ".generate" in call.name else "train" if ".update" in call.name else "infer"


def is_real(call: CallNode, option: Option) -> bool:
    """Return True if ReaL has such an option: optimizer states stay where they are."""
    return option.seconds < math.inf and not option.settings.optim_offload


def real_option(call: CallNode, option: Option, weights: Mapping[str, float]) -> Option:
    """Return the option with the memory that ReaL needs: it keeps fp32 gradients during the entire step (section 5.1)."""
    if kind_of(call) != "train":
        return option
    gradients = 2 * weights[call.role] / option.pp / option.tp
    call_bytes = tuple(max(amount - gradients, 0.0) for amount in option.call_bytes)
    return replace(option, resident=option.resident + gradients, call_bytes=call_bytes)


@dataclass(frozen=True)
class PlannedStep:
    """A plan and its schedule."""

    problem: Problem
    plan: Plan
    schedule: Schedule

    @property
    def seconds(self) -> float:
        """Return seconds of the step."""
        return self.schedule.seconds

    @property
    def options(self) -> list[Option]:
        """Return the option of each call."""
        return [call.options[choice.option] for call, choice in zip(self.problem.calls, self.plan, strict=True)]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return a row for each call."""
        rows = []
        for call, choice, option, span in zip(self.problem.calls, self.plan, self.options, self.schedule.spans, strict=True):
            row = {"call": call.name, "ranks": str(choice.rank_range), "pp": option.pp, "tp": option.tp}
            row |= {"dp": option.settings.dp, "start": round(span[0], 1), "seconds": round(span[1] - span[0], 1)}
            rows.append(row)
        return rows

    @property
    def static_share(self) -> float:
        """Return the share of all memory that gradients and optimizer states take, which ReaL calls static."""
        static = 0.0
        for call, option in zip(self.problem.calls, self.options, strict=True):
            if kind_of(call) == "train":
                weights = self.problem.weights[call.role] / option.pp / option.tp
                static += option.size * (option.resident - weights)
        return static / sum(self.problem.memory)


def searched(problem: Problem, limit: float = 20.0) -> PlannedStep:
    """Return the best plan. Raises NoPlanError."""
    plan = exact.search(problem, limit).plan
    return PlannedStep(problem, plan, simulate(problem, plan))


def heuristic(step: Step, graphs: bool = True, parts: int = 4, free: Iterable[str] = ()) -> PlannedStep:
    """Return REAL-Heuristic: one layout for all calls on all GPUs, tp in the host, the fewest stages that fit.

    - parts: those of table 5 are four; 0: a replica generates as many rows at once as fit
    - free: kinds of calls that have their best ranks and layout instead
    """
    problem = step.problem(graphs, 0 if "generate" in free else parts)
    for pp in (1, 2, 4, 8, 16):
        common = (step.gpus, min(step.gpus, 8), pp)

        def keep(call: CallNode, option: Option, common: tuple[int, int, int] = common) -> bool:
            return kind_of(call) in free or (option.size, option.tp, option.pp) == common

        try:
            return searched(limited(problem, keep))
        except ValueError:  # it does not fit, or a call has no such layout
            continue
    raise NoPlanError(f"one layout for all calls of {step} fits nowhere")


# Searched plans against one layout

SIZES = {"7B": (16, 512), "13B": (32, 1024), "34B": (64, 2048), "70B": (128, 4096)}  # actor: GPUs, prompts
PAPER_GAIN = {2048: 1.54, 8192: 1.81}


def gain(
    actors: Sequence[str] = tuple(SIZES), contexts: Sequence[int] = (2048, 8192), limit: float = 20.0, out: Path | None = None
) -> None:
    """The searched plan against one layout for all calls, by context (section 8.1, figure 8).

    ``heuristic``: rows in four parts, as in table 5; ``heuristic_at_once``: as many rows at once as fit. The critic is a 7B
    model. Tokens of a step stay the same.
    """
    rows = []
    for context in contexts:
        for actor in actors:
            gpus, prompts = SIZES[actor]
            rows.append(compared(Step(actor, "7B", gpus, prompts * 2048 // context, context), limit))
    print(table(rows, "actor gpus context heuristic heuristic_at_once searched gain gain_at_once"))
    means = []
    for context in contexts:
        same = [row for row in rows if row["context"] == context]
        means.append({"context": context, "paper": PAPER_GAIN.get(context)})
        means[-1] |= {name: mean(row[name] for row in same) for name in ("gain", "gain_at_once")}
    print(table(means, "context paper gain gain_at_once"))
    save({"bench": "paper_real_gain", "machine": machine_facts(), "rows": rows, "means": means}, out)


def compared(step: Step, limit: float) -> dict[str, Any]:
    """Return seconds of the searched plan and of one layout for all calls."""
    best = searched(step.problem(), limit)
    four, at_once = heuristic(step), heuristic(step, parts=0)
    row = {**asdict(step), "heuristic": four.seconds, "heuristic_at_once": at_once.seconds, "searched": best.seconds}
    row |= {"gain": four.seconds / best.seconds, "gain_at_once": at_once.seconds / best.seconds}
    return {**row, "plan": best.calls, "heuristic_plan": four.calls}


def algorithms(
    names: Sequence[str] = ("dpo", "grpo", "remax"),
    actor: str = "70B",
    gpus: int = 128,
    prompts: int = 512,
    limit: float = 20.0,
    out: Path | None = None,
) -> None:
    """The same for DPO, GRPO and ReMax, a 70B actor and a 7B reward model (section 8.3, figure 16)."""
    rows = [compared(Step(actor, "7B", gpus, prompts, algorithm=name), limit) for name in names]
    print(table(rows, "algorithm gpus heuristic heuristic_at_once searched gain gain_at_once"))
    means = {name: mean(row[name] for row in rows) for name in ("gain", "gain_at_once")}
    print(table([{"paper": 1.87, **means}], "paper gain gain_at_once"))
    save({"bench": "paper_real_algorithms", "machine": machine_facts(), "rows": rows, "means": means}, out)


def scaling(
    actors: Sequence[str] = ("7B", "34B", "70B"),
    gpus: Sequence[int] = (8, 16, 32, 64, 128),
    prompts: int = 512,
    limit: float = 20.0,
    out: Path | None = None,
) -> None:
    """Steps of the same work on more GPUs (section 8.4, figure 17).

    ``linear``: tokens/s of a GPU, as a share of those on the number of GPUs before; above 1 is super-linear. ``static_share``:
    share of all memory that gradients and optimizer states take; ReaL says that below 0.6 more GPUs pay less.
    """
    rows: list[dict[str, Any]] = []
    for actor in actors:
        before = 0.0
        for number in gpus:
            try:
                best = searched(Step(actor, "7B", number, prompts).problem(), limit)
            except NoPlanError:
                continue
            speed = prompts * 2048 / best.seconds / number
            row: dict[str, Any] = {"actor": actor, "gpus": number, "seconds": best.seconds, "tokens_per_s_per_gpu": speed}
            row |= {"static_share": best.static_share, "linear": speed / before if before else None, "plan": best.calls}
            before = speed
            rows.append(row)
    print(table(rows, "actor gpus seconds tokens_per_s_per_gpu static_share linear"))
    save({"bench": "paper_real_scaling", "machine": machine_facts(), "rows": rows}, out)


BREAKDOWN: dict[str, tuple[bool, tuple[str, ...]]] = {
    "one layout": (False, ()),
    "with CUDA graphs": (True, ()),
    "generation's own layout": (True, ("generate",)),
    "training's own layouts": (True, ("generate", "train")),
    "inference's own layouts": (True, ("generate", "train", "infer")),
}
PAPER_STEPS = {  # (actor, change)
    ("7B", "one layout"): STEPS["heuristic", False],
    ("7B", "with CUDA graphs"): STEPS["heuristic", True],
    ("7B", "inference's own layouts"): STEPS["searched", True],
}


def breakdown(actors: Sequence[str] = ("7B", "70B"), out: Path | None = None) -> None:
    """From one layout to the searched plan, one change after the other (section 8.2, figure 9). Calls with ranks of their own may
    run side by side."""
    rows = []
    for actor in actors:
        for name, (graphs, free) in BREAKDOWN.items():
            best = heuristic(Step(actor, "7B", *SIZES[actor]), graphs, free=free)
            row: dict[str, Any] = {"actor": actor, "change": name, "paper": PAPER_STEPS.get((actor, name))}
            row["ours"] = BEYOND * best.seconds
            for call in best.calls:
                kind = call["call"].partition(".")[2]
                row[kind] = call["seconds"]
            rows.append({**row, "plan": best.calls})
    print(table(rows, " ".join(["actor change paper ours", *(key for key in rows[0] if "_" in key)])))
    save({"bench": "paper_real_breakdown", "machine": machine_facts(), "rows": rows}, out)


# Searches

SEARCHED = {
    "one_host": Step("7B", "7B", 8, 512),
    "one_host_short": Step("7B", "7B", 8, 128),
    "7B": Step("7B", "7B", 16, 512),
    "34B": Step("34B", "7B", 64, 2048),
    "70B": Step("70B", "7B", 128, 4096),
    "70B_1024": Step("70B", "7B", 1024, 32768),
}


def search(
    cases: Sequence[str] = tuple(SEARCHED),
    exact_limit: float = 20.0,
    limits: Sequence[float] = (1.0, 5.0, 30.0, 150.0),
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Seconds of the searches, against ReaL's 150 s, 300 s at 1,024 GPUs, and 5 s to 95 % of the best on 8 (figures 13 to 15).

    - plans: decimal logarithm of the number of plans
    - exact_s, gap: seconds until ``exact`` proved its plan or reached its limit, and how far the plan may be above the optimum
    - mcmc: how far ReaL's walk is above ``exact``'s plan after so many seconds; it walks anew for each of the ``limits``, until
      it is within 5 %
    - walked: plans that it tried in the last walk, in a second
    """
    rows = []
    for name in chosen(cases, SEARCHED):
        step = SEARCHED[name]
        started = time.perf_counter()
        problem = step.problem()
        row: dict[str, Any] = {"case": name, "gpus": step.gpus, "tables_s": time.perf_counter() - started}
        row["plans"] = round(sum(math.log10(number_of_choices(call, problem)) for call in problem.calls))
        best = exact.search(problem, exact_limit)
        row |= {"step_s": best.seconds, "exact_s": best.search_seconds, "gap": best.seconds / best.lower_bound - 1}
        for limit in limits:
            try:
                walk = mcmc.search(problem, limit, seed)
            except NoPlanError:
                continue
            row |= {f"mcmc_{limit:g}": walk.seconds / best.seconds - 1, "walked": walk.evaluations / walk.search_seconds}
            if walk.seconds <= 1.05 * best.seconds:
                break
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    walks = " ".join(f"mcmc_{limit:g}" for limit in limits)
    print(table(rows, f"case gpus plans tables_s step_s exact_s gap {walks} walked"))
    save({"bench": "paper_real_search", "machine": machine_facts(), "rows": rows}, out)


def number_of_choices(call: CallNode, problem: Problem) -> int:
    """Return the number of (mesh, option) of a call, meshes as ReaL's: equal parts of the cluster; 1 if it is tied to another."""
    return 1 if call.shares_home else sum(problem.size // option.size for option in call.options)


# Reallocation on CPU ranks


def reallocation_settings(pp: int, tp: int) -> dict[str, dict[str, Any]]:
    """Return settings of PPO on ``pp * tp`` ranks for each case, from one layout for all calls to the layouts that ReaL finds."""
    ranks = pp * tp
    generation = {"models.actor.calls.generate_sequences.layout.dp": ranks}
    inference = {"models.critic.calls.compute_values.layout.dp": ranks, "models.reference.layout.dp": ranks}
    one_layout: dict[str, Any] = {}
    for role in ("actor", "critic", "reference"):
        one_layout |= {f"models.{role}.layout.pp": pp, f"models.{role}.layout.tp": tp}
    trainings = {key: value for key, value in one_layout.items() if "reference" not in key}
    halves = {"first": list(range(ranks // 2)), "second": list(range(ranks // 2, ranks)), "all": list(range(ranks))}
    side_by_side: dict[str, Any] = {"placement.pools": halves, **generation, **inference}
    for role, pool in {"actor": "first", "critic": "second", "reference": "all"}.items():
        side_by_side[f"models.{role}.pool"] = pool
    for role in ("actor", "critic"):
        halved = (pp // 2, tp) if pp > 1 else (1, tp // 2)
        side_by_side |= {f"models.{role}.layout.pp": halved[0], f"models.{role}.layout.tp": halved[1]}
    for call in ("actor.calls.generate_sequences", "critic.calls.compute_values"):
        side_by_side[f"models.{call}.pool"] = "all"
    return {
        "one layout": {**one_layout, "models.actor.generation.pp": pp, "models.actor.generation.tp": tp},
        "generation's own layout": {**one_layout, **generation},
        "inference's own layouts": {**trainings, **generation, **inference},
        "trainings side by side": side_by_side,
    }


def reallocation(
    model: Literal["tiny", "quickstart", "S", "M"] = "S",
    pp: int = 1,
    tp: int = 2,
    prompts: int = 32,
    prompt_length: int = 32,
    response_length: int = 128,
    steps: int = 6,
    settings: Sequence[str] = (),
    out: Path | None = None,
) -> None:
    """Seconds of PPO steps on gloo ranks: one layout for all calls, against weights that move to layouts of their own.

    In the first case all models are split by ``--pp`` and ``--tp`` over all ranks, as memory may demand it. Then generation,
    inference and training get their own layouts, one after the other. Models have random weights, and the log-probs are
    generation's, as ReaL's. Seconds are medians over the steps after the first.
    """
    work = Work(model, prompts, 1, prompt_length, response_length, 4, 8)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_inputs(root, work)
        for number, (case, layouts) in enumerate(reallocation_settings(pp, tp).items()):
            run = settings_of("ppo", root, work, steps) | {"algorithm.rollout_correction.bypass_mode": True, **layouts}
            metrics = run_program(root / f"run_{number}", pp * tp, run, *settings, stop_after=steps)[1:]
            seconds = {key: median([step[key] for step in metrics]) for key in metrics[-1] if key.startswith("timing_s/")}
            row: dict[str, Any] = {"case": case, **{key.removeprefix("timing_s/"): value for key, value in seconds.items()}}
            row["times_as_fast"] = rows[0]["step"] / row["step"] if rows else 1.0
            rows.append(row)
    phases = "generate_sequences compute_values compute_ref_log_prob update_critic update_actor reallocate"
    print(table(rows, f"case step times_as_fast {phases}"))
    report = {"bench": "paper_real_reallocation", "work": asdict(work), "pp": pp, "tp": tp, "machine": machine_facts()}
    save({**report, "rows": rows}, out)


if __name__ == "__main__":
    run_parts(gain, algorithms, scaling, breakdown, search, reallocation)
