"""HybridFlow's evaluations (arXiv 2409.19256v2, section 8) beside the planner's simulation. Pure arithmetic on one core.

    python scripts/bench/paper_hybridflow.py end_to_end --out end_to_end.json      about four minutes
    python scripts/bench/paper_hybridflow.py crossover --out crossover.json
    python scripts/bench/paper_hybridflow.py transition --out transition.json
    python scripts/bench/paper_hybridflow.py generation_tp --out generation_tp.json
    python scripts/bench/paper_hybridflow.py mapping --out mapping.json
    python scripts/bench/reshard.py --out reshard.json      transitions on ranks

The paper's setting: hosts of 8 A100-80GB, 200 Gb/s between hosts, 1,024 prompts, 1,024 + 1,024 tokens, 8 mini-batches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from measure import chosen, line, run_parts, save, table
from papers import SHAPES, fastest_plan_in_groups, fastest_plan_on, limited, step_builder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.machine import ClusterConfig
from rlhf_spmd.planner.problem import CallNode, Option, Plan, Problem, simulate
from rlhf_spmd.planner.search import NoPlanError, exact
from rlhf_spmd.planner.search import enumerate as partitions
from rlhf_spmd.planner.search.candidates import CandidateTables
from rlhf_spmd.planner.shapes import ModelShape, Workload, call_settings, shape_of

PROMPTS = 1024
PROMPT = 1024
RESPONSE = 1024
BUDGET = 16384  # tokens of a micro-batch
NETWORK = 3.125  # GB/s of a GPU: its part of the host's 200 Gb/s
SIZES = ("7B", "13B", "34B", "70B")
ALGORITHMS = {  # algorithm -> its roles with a model of their own, and settings
    "ppo": (("critic", "reward"), []),
    "remax": (
        ("reward",),
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=fixed", "algorithm.kl_ctrl.kl_coef=0.001"],
    ),
    "safe_rlhf": (("critic", "reward", "cost", "cost_critic"), []),
}
GENERATE = "actor.generate_sequences"
EAGER = "models.actor.generation.enforce_eager=true"


def cluster_of(gpus: int, network: float = NETWORK) -> ClusterConfig:
    """Return ``gpus`` A100, 8 a host."""
    return ClusterConfig(nodes=max(gpus // 8, 1), gpus_per_node=min(gpus, 8), gpu="a100", network_gb_s=network)


def paper_problem(
    algorithm: str, models: Mapping[str, str], gpus: int, *settings: str, network: float = NETWORK, prompts: int = PROMPTS
) -> Problem:
    """Return a step of the paper's setting, without offloading, as there. ``models``: role -> size.

    On 96 GPUs the step has 1,056 prompts: the trainer deals prompts evenly to generation's replicas, and a replica gets as many of
    1,056 as the fullest one would get of 1,024.
    """
    if gpus % 3 == 0:
        prompts = -(-prompts // gpus) * gpus
    lengths = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"]
    batches = [f"data.train_batch_size={prompts}", f"algorithm.ppo_mini_batch_size={prompts // 8}", "sampling.n=1"]
    rest = [f"algorithm.ppo_max_token_len_per_gpu={BUDGET}", "reward.function=null", *ALGORITHMS[algorithm][1], *settings]
    sizes = {role: f"llama {size}" for role, size in models.items()}
    builder = step_builder(algorithm, sizes, cluster_of(gpus, network), [*lengths, *batches, *rest], BUDGET)
    return limited(builder.problem(), lambda _, option: not (option.settings.offload or option.settings.optim_offload))


def call_seconds(problem: Problem, plan: Plan) -> dict[str, float]:
    """Return call -> its seconds, transfers of weights included."""
    spans = simulate(problem, plan).spans
    return {call.name: round(end - start, 2) for call, (start, end) in zip(problem.calls, spans, strict=True)}


def describe(problem: Problem, plan: Plan) -> dict[str, str]:
    """Return call -> its ranks and layout as p-t-d."""
    texts = {}
    for call, choice in zip(problem.calls, plan, strict=True):
        placed = call.options[choice.option].settings
        texts[call.name] = f"{choice.rank_range}: {placed.pp}-{placed.tp}-{placed.dp} zero {placed.zero}"
    return texts


# Systems, each as a placement and an engine


def with_generation(problem: Problem, seconds: Callable[[Option], float]) -> Problem:
    """Return the problem with other seconds of generation."""
    calls = [
        replace(call, options=tuple(replace(option, seconds=seconds(option)) for option in call.options))
        if call.name == GENERATE
        else call
        for call in problem.calls
    ]
    return replace(problem, calls=tuple(calls))


def with_full_copies(problem: Problem) -> Problem:
    """Return the problem with ranks that receive the entire actor before they generate, not only their slice."""
    rate = problem.link if problem.size <= problem.local_size else problem.network
    beyond_slice = problem.weights["actor"] / rate
    return with_generation(problem, lambda option: option.seconds + beyond_slice * (1 - 1 / (option.pp * option.tp)))


def zero_3(call: CallNode, option: Option) -> bool:
    """Return True for training and inference with ZeRO-3, and generation with tp in a host."""
    placed = option.settings
    if call.name == GENERATE:
        return option.pp == 1
    return option.pp == option.tp == 1 and option.zero == (3 if placed.dp > 1 else 0)


def hybridflow(problem: Problem) -> Plan | None:
    """HybridFlow: the placement of its search (``enumerate``), then the fastest layouts there."""
    try:
        placed = partitions.search(problem).plan
    except NoPlanError:
        return None
    homes = {role: placed[index].rank_range for role, index in problem.homes.items()}
    movable = {index: homes[problem.calls[index].role] for index in problem.movable}
    return fastest_plan_on(CandidateTables(problem), homes, movable)


def deepspeed_chat(problem: Problem) -> tuple[Problem, Plan | None]:
    """DeepSpeed-Chat: all roles on all ranks; ZeRO-3; all ranks gather the actor to generate; no CUDA graphs."""
    problem = with_full_copies(limited(problem, zero_3))
    return problem, fastest_plan_in_groups(problem, [tuple(problem.homes)])


def openrlhf(problem: Problem) -> tuple[Problem, Plan | None]:
    """OpenRLHF: each role on ranks of its own, a second copy of the actor that generates; ZeRO-3."""
    problem = with_full_copies(limited(problem, zero_3))
    return problem, fastest_plan_in_groups(problem, [(GENERATE,), *((role,) for role in problem.homes)])


def nemo_aligner(problem: Problem) -> tuple[Problem, Plan | None]:
    """NeMo-Aligner: actor and reference | critic and reward; 3D parallelism; generation in the training layout; no CUDA graphs."""
    judges = tuple(role for role in problem.homes if role not in ("actor", "reference"))
    calls = [call for call in problem.calls if call.name in (GENERATE, "actor.update_actor")]
    layouts = set.intersection(*({(option.pp, option.tp) for option in call.options} for call in calls))
    best: tuple[float, Problem, Plan | None] = (inf, problem, None)
    for layout in sorted(layouts):

        def keeps(call: CallNode, option: Option, layout: tuple[int, int] = layout) -> bool:
            return option.zero <= 1 and (call.role != "actor" or (option.pp, option.tp) == layout)

        same = limited(problem, keeps)
        plan = fastest_plan_in_groups(same, [("actor", "reference"), judges])
        if plan:
            best = min(best, (simulate(same, plan).seconds, same, plan), key=lambda each: each[0])
    return best[1:]


def without_cache(problem: Problem, size: str) -> Problem:
    """Return the problem with generation that has no KV cache, as the paper says of NeMo-Aligner."""
    return with_generation(problem, lambda option: recomputed_seconds(size, problem.size, option))


def recomputed_seconds(size: str, gpus: int, option: Option) -> float:
    """Return seconds of generation without a KV cache: as many forward passes as tokens, over rows of the average length."""
    settings = call_settings([(option.pp, option.tp, option.settings.dp)], micro_tokens=[BUDGET])
    work = Workload(PROMPTS, PROMPT + RESPONSE / 2 - 1, (1.0,))
    return float(RESPONSE * FormulaTimes(cluster_of(gpus).machine()).infer_seconds(shape(size), work, settings)[0])


def shape(size: str) -> ModelShape:
    """Return the sizes of Llama."""
    hidden, inner, num_layers, heads, kv_heads, vocab = SHAPES[f"llama {size}"]
    return shape_of(ModelSpec("llama", vocab, hidden, inner, num_layers, heads, kv_heads, hidden // heads), "lm")


PUBLISHED: dict[str, tuple[float, float]] = {
    "deepspeed_chat": (3.67, 7.84),
    "openrlhf": (3.25, 5.93),
    "nemo_aligner": (12.52, 20.57),
}  # PPO: mean, largest


def end_to_end(
    algorithms: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    gpus: Sequence[int] = (8, 16, 32, 64, 128),
    out: Path | None = None,
) -> None:
    """Figures 9 to 11 and the strong scaling of section 8.2: seconds of a step of HybridFlow and of the three baselines.

    Strong scaling, as there: throughput on the most GPUs over that on the fewest, divided by the ratio of the GPUs; the mean over
    algorithms and models.
    """
    columns = "algorithm model gpus hybridflow deepspeed_chat openrlhf nemo_aligner nemo_no_cache tokens_per_s"
    print(table([], columns))
    rows: list[dict[str, Any]] = []
    for algorithm, size, number in product(chosen(algorithms, ALGORITHMS), chosen(models, SIZES), gpus):
        sizes = dict.fromkeys(("actor", *ALGORITHMS[algorithm][0]), size)
        problem = paper_problem(algorithm, sizes, number)
        eager = paper_problem(algorithm, sizes, number, EAGER)
        plan = hybridflow(problem)
        if plan is None:
            continue
        cases: dict[str, tuple[Problem, Plan | None]]
        cases = {"hybridflow": (problem, plan), "deepspeed_chat": deepspeed_chat(eager), "openrlhf": openrlhf(problem)}
        if algorithm != "remax":  # NeMo-Aligner has no ReMax
            cases |= {"nemo_aligner": nemo_aligner(eager), "nemo_no_cache": nemo_aligner(without_cache(eager, size))}
        row: dict[str, Any] = {"algorithm": algorithm, "model": size, "gpus": number}
        fitting = {name: (step, best) for name, (step, best) in cases.items() if best}
        row |= {name: simulate(*case).seconds for name, case in fitting.items()}
        row["tokens_per_s"] = PROMPTS * (PROMPT + RESPONSE) / row["hybridflow"]
        row["plans"] = {name: describe(*case) for name, case in fitting.items()}
        row["calls"] = {name: call_seconds(*case) for name, case in fitting.items()}
        rows.append(row)
        print(line(row, columns), flush=True)
    gains = []
    for name in ("deepspeed_chat", "openrlhf", "nemo_aligner", "nemo_no_cache"):
        for algorithm in (*chosen(algorithms, ALGORITHMS), "all"):
            those = [row for row in rows if algorithm in ("all", row["algorithm"]) and row.get(name)]
            ratios = [row[name] / row["hybridflow"] for row in those]
            paper = PUBLISHED.get(name, PUBLISHED["nemo_aligner"]) if algorithm == "ppo" else (None, None)
            if ratios:
                gain = {"baseline": name, "algorithm": algorithm, "least": min(ratios), "mean": mean(ratios)}
                gains.append({**gain, "most": max(ratios), "paper_mean": paper[0], "paper_most": paper[1]})
    print("", table(gains, "baseline algorithm least mean most paper_mean paper_most"), sep="\n")
    efficiencies = scaling(rows)
    for name in ("hybridflow", *PUBLISHED):
        shares = [row[name] for row in efficiencies if row.get(name)]
        if shares:
            print(f"strong scaling of {name}: {mean(shares):.1%}, mean of {len(shares)}")
    save({"bench": "paper_hybridflow_end_to_end", "rows": rows, "gains": gains, "scaling": efficiencies}, out)


def scaling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the strong scaling of each algorithm, model and system from its fewest to its most GPUs."""
    efficiencies = []
    for algorithm, size in dict.fromkeys((row["algorithm"], row["model"]) for row in rows):
        efficiency: dict[str, Any] = {"algorithm": algorithm, "model": size}
        for name in ("hybridflow", *PUBLISHED):
            steps = {r["gpus"]: r[name] for r in rows if (r["algorithm"], r["model"]) == (algorithm, size) and r.get(name)}
            if len(steps) > 1:
                fewest, most = min(steps), max(steps)
                efficiency[name] = steps[fewest] / steps[most] / (most / fewest)
        efficiencies.append(efficiency)
    return efficiencies


# Placements

PLACEMENTS: dict[str, list[tuple[str, ...]]] = {
    "colocate": [("actor", "reference", "critic", "reward")],
    "split": [("actor", "reference"), ("critic", "reward")],
    "apart": [("actor", "reference", "reward"), ("critic",)],
    "standalone": [("actor",), ("reference",), ("critic",), ("reward",)],
}
# (actor, critic and reward): GPUs -> the fastest placement of figures 12 and 13 and their text
FASTEST = {
    ("13B", "13B"): {16: "colocate", 32: "colocate", 64: "colocate", 96: "split", 128: "standalone"},
    ("34B", "34B"): {64: "colocate", 96: "split", 128: "split"},
    ("13B", "70B"): {64: "colocate", 96: "split", 128: "apart"},
}


def crossover(gpus: Sequence[int] = (16, 32, 64, 96, 128), network: float = NETWORK, out: Path | None = None) -> None:
    """Section 8.3: PPO with all roles together, in two sets (two ways), or each alone, on the best numbers of ranks and in the best
    layouts. ``network``: GB/s of a GPU between hosts. Seconds of the calls are printed where the paper has another order."""
    rows: list[dict[str, Any]] = []
    for (actor, critic), cases in FASTEST.items():
        for number in (number for number in cases if number in gpus):
            problem = paper_problem("ppo", {"actor": actor, "critic": critic, "reward": critic}, number, network=network)
            plans = {name: fastest_plan_in_groups(problem, groups) for name, groups in PLACEMENTS.items()}
            row: dict[str, Any] = {"actor": actor, "critic": critic, "gpus": number}
            row |= {name: simulate(problem, plan).seconds if plan else inf for name, plan in plans.items()}
            row |= {"paper": cases[number], "ours": min(plans, key=lambda name: row[name])}
            row["above"] = row[cases[number]] / row[row["ours"]] - 1
            row["calls"] = {name: call_seconds(problem, plan) for name, plan in plans.items() if plan}
            row["plans"] = {name: describe(problem, plan) for name, plan in plans.items() if plan}
            rows.append(row)
    print(table(rows, " ".join(["actor critic gpus", *PLACEMENTS, "paper ours above"])))
    for row in rows:
        if row["paper"] != row["ours"]:
            seconds = {name: row["calls"][row[name]] for name in ("paper", "ours")}
            print(f"{row['actor']} + {row['critic']} on {row['gpus']}: {json.dumps(seconds)}", file=sys.stderr)
    print(f"\n{sum(row['paper'] == row['ours'] for row in rows)} of {len(rows)} as published")
    save({"bench": "paper_hybridflow_crossover", "network": network, "rows": rows}, out)


# Transitions

LAYOUTS = {"7B": (1, 8, 2), "13B": (1, 8, 4), "34B": (4, 8, 8), "70B": (8, 8, 8)}  # of figure 14: p, t, t_g; p_g is 1


def transition(gpus: Sequence[int] = (8, 16, 32, 64, 128), out: Path | None = None) -> None:
    """Figure 14: seconds from training to generation by the formulas of table 2 with the layouts of the figure.

    A rank receives at the link's rate in a host, and at its part of the network where its group has several hosts. OpenRLHF sends
    each generating rank the entire actor; its copy is on hosts of its own.
    """
    rows = []
    for size, (stages, tp, generation_tp) in LAYOUTS.items():
        weights = 2 * shape(size).params
        for number in (number for number in gpus if number >= stages * tp):
            machine = cluster_of(number).machine()
            replica = stages * tp

            def seconds(share: float, ranks: int, machine: Any = machine, weights: float = weights) -> float:
                rate = machine.device.link if ranks <= machine.local_size else machine.network
                return weights * share / rate

            row: dict[str, Any] = {"model": size, "layout": f"{stages}-{tp} -> 1-{generation_tp}", "gpus": number}
            row["full_gather"] = seconds((number - 1) / number, number)
            row["naive_groups"] = seconds((replica - 1) / replica, replica)
            row["zero_redundancy"] = seconds((replica - generation_tp) / (generation_tp * replica), replica)
            row["openrlhf"] = seconds(1.0, number)
            row |= {f"less_than_{name}": 1 - row["zero_redundancy"] / row[name] for name in ("full_gather", "openrlhf")}
            rows.append(row)
    print(table(rows, "model layout gpus full_gather naive_groups openrlhf zero_redundancy less_than_full_gather"))
    less = [row[name] for row in rows for name in ("less_than_full_gather", "less_than_openrlhf")]
    print(f"\nless time: mean {mean(less):.1%}, most {max(less):.1%}; the paper has 55.2 % and 89.1 %")
    save({"bench": "paper_hybridflow_transition", "rows": rows, "mean": mean(less), "most": max(less)}, out)


def generation_tp(models: Sequence[str] = ("7B", "13B"), out: Path | None = None) -> None:
    """Figure 15: transition and generation on 16 GPUs, training 1-8-2, all roles together, by the tp of generation.

    The transition is that of table 2, in a host. Here ZeRO-1 shards the weights, too, over both hosts, and the models would not fit
    without it: ``zero_1_s`` is the transition from there.
    """
    rows = []
    for size in models:
        problem = paper_problem("ppo", dict.fromkeys(("actor", "critic", "reward"), size), 16)
        for tp in (1, 2, 4, 8):

            def keeps(call: CallNode, option: Option, tp: int = tp) -> bool:
                if call.name == GENERATE:
                    return (option.pp, option.tp) == (1, tp)
                is_trained = call.role in ("actor", "critic")
                return not is_trained or (option.size == 16 and (option.pp, option.tp) == (1, 8) and option.zero <= 1)

            kept = limited(problem, keeps)
            plan = fastest_plan_in_groups(kept, PLACEMENTS["colocate"])
            row: dict[str, Any] = {"model": size, "tp": tp}
            if plan:
                index = [call.name for call in kept.calls].index(GENERATE)
                option = kept.calls[index].options[plan[index].option]
                resharding = kept.weights["actor"] * (1 / tp - 1 / 8) / kept.link
                row |= {"transition_s": resharding, "generation_s": option.seconds, "whole_s": resharding + option.seconds}
                row |= {"zero_1_s": call_seconds(kept, plan)[GENERATE] - option.seconds}
                row |= {"rows_in_flight": option.settings.max_num_seqs, "cache_gb": option.cache / 1e9}
            rows.append(row)
    print(table(rows, "model tp transition_s generation_s whole_s zero_1_s rows_in_flight cache_gb"))
    best = {}
    for size in models:
        seconds = {row["tp"]: row["whole_s"] for row in rows if row["model"] == size and "whole_s" in row}
        best[size] = min(seconds, key=lambda tp: seconds[tp])
        print(f"{size}: tp {best[size]} is fastest, {1 - seconds[best[size]] / seconds[8]:.1%} less than tp 8")
    save({"bench": "paper_hybridflow_generation_tp", "rows": rows, "best": best}, out)


# The search

SCALED = ((16, "7B"), (32, "13B"), (64, "34B"), (128, "70B"), (256, "70B"), (512, "70B"), (1024, "70B"))


def mapping(gpus: Sequence[int] | None = None, limit: float = 60.0, out: Path | None = None) -> None:
    """Section 8.5: seconds to map PPO, models and GPUs scaled together, with HybridFlow's algorithm (``enumerate``) and with
    ``exact``. ``limit``: seconds for each. 8 prompts a GPU beyond 128 GPUs."""
    columns = "gpus model options options_s enumerate_s exact_s enumerate_step exact_step gap"
    print(table([], columns))
    rows = []
    for number, size in ((number, size) for number, size in SCALED if gpus is None or number in gpus):
        begin = time.perf_counter()
        sizes = dict.fromkeys(("actor", "critic", "reward"), size)
        problem = paper_problem("ppo", sizes, number, prompts=max(PROMPTS, 8 * number))
        row: dict[str, Any] = {"gpus": number, "model": size, "options": sum(len(call.options) for call in problem.calls)}
        row["options_s"] = time.perf_counter() - begin
        results = {"enumerate": partitions.search(problem, limit), "exact": exact.search(problem, limit)}
        for name, result in results.items():
            row |= {f"{name}_s": result.search_seconds, f"{name}_step": result.seconds}
        row["gap"] = results["exact"].seconds / results["exact"].lower_bound - 1
        rows.append(row)
        print(line(row, columns), flush=True)
    save({"bench": "paper_hybridflow_mapping", "rows": rows}, out)


if __name__ == "__main__":
    run_parts(end_to_end, crossover, transition, generation_tp, mapping)
