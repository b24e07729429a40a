"""A step of PPO in a placement, with the layouts that a system has: its fastest schedule and most samples per second. Simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from papers import limited, step_builder, with_generation_from_shards
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.machine import GIB, ClusterConfig, HostsConfig
from rlhf_spmd.planner.problem import SHARDING_OF_ZERO, CallNode, Option, Problem, RankRange, Schedule, simulate
from rlhf_spmd.planner.search.candidates import CandidateTables, greedy_choices, plan_of

PROMPT = RESPONSE = 256

GENERATE = "actor.generate_sequences"
FROZEN = ("reference", "reward")
ROLES = ("actor", "critic", *FROZEN)
Ranks = dict[str, RankRange]  # role, or role.call that runs elsewhere -> its ranks


@dataclass(frozen=True)
class Step:
    """A step of PPO.

    - model: size of every role's Llama
    - v100s: GPUs of further hosts
    - rows: of a step; budget: tokens of a micro-batch
    - shared: actor and critic are one model
    - ahead: ``max_staleness``
    - reordered: as in APP, the reference infers right behind the reward; in our script the trained roles do in between
    """

    model: str
    gpus: int
    v100s: int = 0
    rows: int = 0
    budget: int = 0
    shared: bool = False
    ahead: int = 0
    response: int = RESPONSE
    graphs: bool = False
    reordered: bool = True


@dataclass(frozen=True)
class Limits:
    """The layouts that a system has.

    - zero: ZeRO stage of trained roles; frozen: of roles that only infer
    - generation: 0: weights are gathered before generation; 3: a layer's weights are gathered whenever a token needs them
    - tp: roles that may cut matrices inside a host when they generate or infer
    - checkpointing: of trained roles
    """

    zero: int = 3
    frozen: int = 3
    generation: tuple[int, ...] = (0, 3)
    tp: tuple[str, ...] = ()
    checkpointing: str = "full"
    offload: bool = False

    def keep(self, call: CallNode, option: Option) -> bool:
        """Return True if the system has the option."""
        settings = option.settings
        is_cut = option.tp > 1
        if option.pp > 1 or (is_cut and call.role not in self.tp):
            return False
        if not self.offload and (settings.offload or settings.optim_offload):
            return False
        if call.name == GENERATE:
            return option.zero in self.generation
        if call.role in FROZEN:
            return option.zero == (0 if is_cut or option.size == 1 else self.frozen)
        # with one micro-batch, stages 1 and 2 cost the same, and the planner keeps one of them
        same_sharding = SHARDING_OF_ZERO[option.zero] == SHARDING_OF_ZERO[self.zero]
        return same_sharding and not is_cut and (not call.home or settings.activation_checkpointing == self.checkpointing)


@cache
def problem_of(step: Step) -> Problem:
    """Return the step's problem, in which generation may also use ZeRO-3's shards."""
    if step.reordered:
        return with_frozen_roles_in_turn(problem_of(replace(step, reordered=False)))
    a100s = HostsConfig(max(step.gpus // 8, 1), gpu="a100")
    v100s = [HostsConfig(step.v100s // 8, gpu="v100")] * (step.v100s > 0)
    cluster = ClusterConfig(network_gb_s=12.5, host_memory_gb=2048.0, groups=[a100s, *v100s])
    settings = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={step.response}", "sampling.n=1"]
    settings += [f"data.train_batch_size={step.rows}", f"algorithm.ppo_mini_batch_size={step.rows}", "reward.function=null"]
    settings += [
        f"models.actor.generation.enforce_eager={str(not step.graphs).lower()}",
        f"rollout.max_staleness={step.ahead}",
    ]
    settings += ["placement.strategy=separate"] * (step.ahead > 0)
    models = {role: f"llama {step.model}" for role in ROLES if not (step.shared and role == "critic")}
    builder = step_builder("ppo_shared" if step.shared else "ppo", models, cluster, settings, step.budget)
    machine = replace(cluster, groups=[a100s]).machine()
    return with_generation_from_shards(builder.problem(), builder.calls, machine, step.budget)


def with_frozen_roles_in_turn(problem: Problem) -> Problem:
    """Return the problem with the reference's call right behind the reward's."""
    order = list(range(len(problem.calls)))
    order.insert(problem.homes["reward"] + 1, order.pop(problem.homes["reference"]))
    calls = [replace(problem.calls[i], after=frozenset(map(order.index, problem.calls[i].after))) for i in order]
    return replace(problem, calls=tuple(calls), generating=frozenset(map(order.index, problem.generating)))


def schedule_of(step: Step, limits: Limits | None, ranks: Ranks) -> Schedule | None:
    """Return the fastest schedule of a step on these ranks; None if none fits."""
    problem = problem_of(step)
    if limits:
        if not all(any(limits.keep(call, option) for option in call.options) for call in problem.calls):
            return None
        problem = limited(problem, limits.keep)
    movable = {i: ranks.get(problem.calls[i].name, ranks[problem.calls[i].role]) for i in problem.movable}
    choices = greedy_choices(CandidateTables(problem), {role: ranks[role] for role in problem.homes}, movable)
    schedule = simulate(problem, plan_of(choices)) if choices else None
    return schedule if schedule and schedule.fits else None


def most_samples(step: Step, limits: Limits, placements: Sequence[Ranks], batches: Sequence[int]) -> dict[str, Any]:
    """Return the most samples per second over all batches and placements; with offloading if nothing fits without.

    - generation_share: of the seconds of all calls, those of calls that do not train
    - generating: ranks that generate
    """
    results: list[dict[str, Any]] = [{"samples_per_s": 0.0}]
    for offload, batch, ranks in product((False, True), batches, placements):
        if offload and results[0]["samples_per_s"] and not results[0]["offload"]:
            break
        rows = batch * ranks["actor"].count
        sized = replace(step, rows=rows, budget=batch * (PROMPT + step.response))
        schedule = schedule_of(sized, replace(limits, offload=offload), ranks)
        if schedule is None or rows / schedule.seconds <= results[0]["samples_per_s"]:
            continue
        spans = {call.name: end - start for call, (start, end) in zip(problem_of(sized).calls, schedule.spans, strict=True)}
        training = sum(seconds for name, seconds in spans.items() if ".update" in name)
        figures = {"samples_per_s": rows / schedule.seconds, "batch": batch, "seconds": schedule.seconds, "offload": offload}
        figures |= {
            "generation_share": 1 - training / sum(spans.values()),
            "peak_gib": (max(schedule.peaks) + memory.RESERVE) / GIB,
        }
        results[0] = figures | {"generating": ranks.get(GENERATE, ranks["actor"]).count}
    return results[0]
