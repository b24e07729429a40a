"""The planner's cost model against published measurements.

    python scripts/bench/planner.py estimator --out estimator.json    half a minute on one core

``estimator``: the calls of ReaL's tables 4 to 6 (arXiv 2406.14088; LLaMA-3 7B actor and critic on 2 nodes of 8 H100, 512 rows of 1,024
prompt and 1,024 response tokens, 8 mini-batches). Seconds of the paper, ours, and ours where the constants are fitted to all other
calls; the step, whose calls overlap as the devices of table 4 let them; then the errors without single terms, each fitted anew.

How ReaL's settings read here (its code, realhf/impl/model/backend): "#Micro-Batches" n of inference and generation are n calls one
after the other, each of which a pipeline cuts into pp micro-batches; of training n micro-batches, or with a pipeline 2 * pp * n.
Layers are recomputed, the optimizer is sharded (ZeRO 1), tp sums by all-reduces, and the head takes all tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from measure import save, table
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner.costs import Calibration, FormulaTimes
from rlhf_spmd.planner.machine import GPUS, Machine
from rlhf_spmd.planner.shapes import Workload, call_settings, shape_of

LLAMA_7B = ModelSpec("llama", 128256, 4096, 14336, 32, 32, 8, 128)
H100S = Machine(16, 8, GPUS["h100"], (GPUS["h100"].memory,) * 16, 50e9)
ROWS, PROMPT, RESPONSE, MINI_BATCHES = 512, 1024, 1024, 8
BEYOND = 1.07  # of a step: data transfer, reallocation and the master take 3 to 11 % beyond the calls in table 6
FITTED = ("memory", "launch", "call")


@dataclass(frozen=True)
class Call:
    """A line of table 4 or 5. ``split``: its #Micro-Batches. ``seconds``: of table 6."""

    plan: str
    name: str
    tp: int
    pp: int
    dp: int
    split: int
    seconds: float
    graphs: bool = False

    @property
    def head(self) -> str:
        return "value" if self.name[:3] in ("Rew", "Cri") else "lm"


REAL = (
    Call("searched", "ActorGen", 2, 2, 4, 1, 16.3, graphs=True),
    Call("searched", "ActorGen", 2, 2, 4, 1, 34.5),
    Call("searched", "RewInf", 2, 1, 4, 16, 6.0),
    Call("searched", "RefInf", 1, 2, 4, 16, 8.0),
    Call("searched", "CriticInf", 1, 2, 8, 8, 4.7),
    Call("searched", "CriticTrain", 4, 2, 1, 2, 28.1),
    Call("searched", "ActorTrain", 2, 4, 1, 2, 26.6),
    Call("heuristic", "ActorGen", 8, 1, 2, 4, 44.2, graphs=True),
    Call("heuristic", "ActorGen", 8, 1, 2, 4, 104.6),
    Call("heuristic", "RewInf", 8, 1, 2, 4, 7.3),
    Call("heuristic", "RefInf", 8, 1, 2, 4, 7.6),
    Call("heuristic", "CriticInf", 8, 1, 2, 4, 6.8),
    Call("heuristic", "CriticTrain", 8, 1, 2, 4, 24.3),
    Call("heuristic", "ActorTrain", 8, 1, 2, 4, 24.7),
)
STEPS = {("searched", True): 64.0, ("searched", False): 82.2, ("heuristic", True): 122.6, ("heuristic", False): 183.0}


def estimate(call: Call, calibration: Calibration, spec: ModelSpec = LLAMA_7B, machine: Machine = H100S) -> float:
    """Seconds of a call of ReaL's."""
    shape, layout = shape_of(spec, call.head), [(call.pp, call.tp, call.dp)]
    length, rows = PROMPT + RESPONSE, ROWS // call.dp // call.split  # of a replica's part
    if call.name.endswith("Train"):
        work, number = Workload(ROWS, 0, (length,), MINI_BATCHES), call.split * (2 * call.pp if call.pp > 1 else 1)
        tokens = ROWS // MINI_BATCHES // call.dp // number * length
        how = call_settings(layout, micro_tokens=[tokens], zero=[1], checkpointing=[2])
        return float(FormulaTimes(machine, calibration).train_seconds(shape, work, how)[0])
    if call.name.endswith("Inf"):
        part = Workload(ROWS // call.split, 0, (length,))
        how = call_settings(layout, micro_tokens=[rows // call.pp * length])
        alone = replace(calibration, call=0.0)
        return calibration.call + call.split * float(FormulaTimes(machine, alone).infer_seconds(shape, part, how)[0])
    work = Workload(ROWS, PROMPT, (RESPONSE,))
    how = call_settings(layout, micro_tokens=[rows // call.pp * PROMPT], max_num_seqs=[rows], graphs=[int(call.graphs)])
    return float(FormulaTimes(machine, calibration).generate_seconds(shape, work, how, math.inf)[0])


def step_seconds(seconds: Sequence[float], plan: str, graphs: bool) -> float:
    """Of the calls in the order of REAL. Of the searched plan the first two inferences, and the two trainings, are on a node each."""
    of = {call.name: s for call, s in zip(REAL, seconds, strict=True) if call.plan == plan and call.graphs in (graphs, False)}
    of["ActorGen"] = next(s for call, s in zip(REAL, seconds, strict=True) if (call.plan, call.graphs) == (plan, graphs))
    if plan == "heuristic":
        return sum(of.values())
    return of["ActorGen"] + max(of["RewInf"], of["RefInf"]) + of["CriticInf"] + max(of["CriticTrain"], of["ActorTrain"])


def fit(calls: Sequence[Call], fitted: Sequence[str], start: Calibration) -> Calibration:
    """The constants ``fitted`` for the least mean square of log(estimate / paper), by Nelder and Mead's simplex from ``start``."""

    def calibration(logs: np.ndarray) -> Calibration:
        return replace(start, **{name: float(x) for name, x in zip(fitted, np.exp(logs), strict=True)})

    def loss(logs: np.ndarray) -> float:
        tried = calibration(logs)
        return float(np.mean([math.log(estimate(call, tried) / call.seconds) ** 2 for call in calls]))

    first = np.log([getattr(start, name) for name in fitted])
    return calibration(simplex(loss, [first, *(first + step for step in 0.15 * np.eye(len(first)))]))


def simplex(loss: Callable[[np.ndarray], float], points: list[np.ndarray], steps: int = 50) -> np.ndarray:
    """Nelder and Mead 1965: where ``loss`` is least, from ``points``, one more than dimensions."""
    scored = [(loss(point), point) for point in points]
    for _ in range(steps if len(points) > 1 else 0):
        scored.sort(key=lambda item: item[0])
        worst, middle = scored[-1], np.mean([point for _, point in scored[:-1]], axis=0)

        def at(factor: float, middle: np.ndarray = middle, far: np.ndarray = worst[1]) -> tuple[float, np.ndarray]:
            point = middle + factor * (far - middle)
            return loss(point), point

        tried = at(-1.0)
        if tried[0] < scored[0][0]:
            tried = min(tried, at(-2.0), key=lambda item: item[0])
        elif tried[0] >= scored[-2][0]:
            tried = min(tried, at(0.5), key=lambda item: item[0])
        if tried[0] < worst[0]:
            scored[-1] = tried
        else:
            best = scored[0]
            nearer = [best[1] + 0.5 * (point - best[1]) for _, point in scored[1:]]
            scored = [best, *((loss(point), point) for point in nearer)]
    return min(scored, key=lambda item: item[0])[1]


def errors(calibration: Calibration) -> np.ndarray:
    return np.array([estimate(call, calibration) / call.seconds - 1 for call in REAL])


def left_out(fitted: Sequence[str], start: Calibration) -> np.ndarray:
    """The error of each call where the constants are fitted to all others."""
    found = []
    for call in REAL:
        others = [other for other in REAL if (other.plan, other.name) != (call.plan, call.name) or other.graphs != call.graphs]
        found.append(estimate(call, fit(others, fitted, start)) / call.seconds - 1)
    return np.array(found)


def without(term: str) -> Calibration:
    """The default with a term that costs nothing."""
    nothing = {"call": 1e-9, "launch": 1e-9, "kernels": 0.0}
    return replace(Calibration(), **{term: nothing.get(term, 1e9)})


def estimator() -> dict[str, Any]:
    default = Calibration()
    ours, apart = errors(default), left_out(FITTED, default)
    rows = [
        {**asdict(call), "ours": call.seconds * (1 + error), "error": error, "left_out": other}
        for call, error, other in zip(REAL, ours.tolist(), apart.tolist(), strict=True)
    ]
    steps = []
    for (plan, graphs), paper in STEPS.items():
        found = BEYOND * step_seconds([row["ours"] for row in rows], plan, graphs)
        steps.append({"plan": plan, "graphs": graphs, "seconds": paper, "ours": found, "error": found / paper - 1})
    terms = []
    cases = {"all terms": (FITTED, default), "matrix products fitted, too": ((*FITTED, "matrix"), default)}
    for term in ("call", "launch", "kernels", "memory", "link"):
        cases[f"without {term}"] = (tuple(name for name in FITTED if name != term), without(term))
    for name, (fitted, start) in cases.items():
        best, apart = fit(REAL, fitted, start), left_out(fitted, start)
        terms.append({"terms": name, "mean": float(abs(errors(best)).mean()), "left_out": float(abs(apart).mean())})
        terms[-1]["constants"] = {name: getattr(best, name) for name in fitted}
    return {"calls": rows, "steps": steps, "terms": terms, "calibration": asdict(default)}


def print_estimator(report: dict[str, Any]) -> None:
    cells = [
        (
            row["plan"],
            row["name"] + (", graphs" if row["graphs"] else ""),
            f"tp {row['tp']} pp {row['pp']} dp {row['dp']}, {row['split']}",
            f"{row['seconds']:.1f}",
            f"{row['ours']:.1f}",
            f"{row['error']:+.0%}",
            f"{row['left_out']:+.0%}",
        )
        for row in report["calls"]
    ]
    print(table(("plan", "call", "layout, micro-batches", "paper, s", "ours, s", "error", "left out"), cells, 3))
    wrong = [abs(row["error"]) for row in report["calls"]]
    near = sum(error <= 0.25 for error in wrong)
    print(f"\nmean error {np.mean(wrong):.1%}, {near} of {len(wrong)} within 25 %\n")
    steps = [
        (row["plan"], "yes" if row["graphs"] else "no", f"{row['seconds']:.1f}", f"{row['ours']:.1f}", f"{row['error']:+.0%}")
        for row in report["steps"]
    ]
    print(table(("step", "graphs", "paper, s", "ours, s", "error"), steps, 2))
    terms = [
        (
            row["terms"],
            ", ".join(f"{name} {value:.3g}" for name, value in row["constants"].items()),
            f"{row['mean']:.1%}",
            f"{row['left_out']:.1%}",
        )
        for row in report["terms"]
    ]
    print("\n" + table(("terms", "fitted", "mean error", "left out"), terms, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("estimator",))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = estimator()
    print_estimator(report)
    save(report, given.out)


if __name__ == "__main__":
    main()
