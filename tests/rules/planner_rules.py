"""What breaks each rule of plans and placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.rules import check_rules, check_section
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.plan import PLAN_RULES, PROFILE_RULES, SearchConfig
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.planner.plan_file import PlacedCall
from rlhf_spmd.preflight.plan_stand_ins import WorkloadConfig

CALL = PlacedCall("0-3", dp=4)
DATA = DataConfig(path=str(Path(__file__)), max_prompt_length=100, max_response_length=50)
CASES = [
    (
        lambda: check_rules(
            PLAN_RULES, SimpleNamespace(plan=SearchConfig(), placement=PlacementConfig(), agent=AgentConfig(command="true"))
        ),
        "agent.max_rows=8: plans count one row for each sample; leave agent out, and give lengths of whole conversations in workload",
    ),
    (
        lambda: check_tree(PlacementConfig(strategy="auto", ratios={"actor": 0.5}), "placement"),
        "placement.strategy=auto: the planner chooses pools and ratios; leave placement.pools and placement.ratios out",
    ),
    (
        lambda: check_section(replace(CALL, tp=2), "calls.actor.update_actor"),
        "calls.actor.update_actor.ranks=0-3, calls.actor.update_actor.pp=1, calls.actor.update_actor.tp=2, "
        "calls.actor.update_actor.dp=4, calls.actor.update_actor.cp=1: pp * tp * dp * cp is not the number of ranks, 4; change one "
        "of them",
    ),
    (
        lambda: check_section(replace(CALL, ep=3), "calls"),
        "calls.ep=3, calls.dp=4, calls.cp=1: ranks that share the experts are some of dp * cp; let ep divide dp * cp",
    ),
    (
        lambda: check_section(WorkloadConfig(response_lengths=[30, 20]), "workload"),
        "workload.response_lengths=[30, 20]: quantiles ascend; sort them",
    ),
    (
        lambda: WorkloadConfig(prompt_length=200).workload(DATA, 1),
        "workload.prompt_length=200, data.max_prompt_length=100: no prompt is longer than the second; lower the first",
    ),
    (
        lambda: WorkloadConfig(response_lengths=[20, 60]).workload(DATA, 1),
        "workload.response_lengths=[20, 60], data.max_response_length=50: no response is longer than the second; lower the last of "
        "the first",
    ),
    (
        lambda: check_rules(
            PLAN_RULES,
            SimpleNamespace(plan=SearchConfig(fixed="config"), placement=PlacementConfig(strategy="auto"), agent=AgentConfig()),
        ),
        "plan.fixed=config, placement.strategy=auto: there is no placement of the configuration to evaluate; leave plan.fixed out",
    ),
    (
        lambda: check_rules(PROFILE_RULES, SimpleNamespace(plan=SearchConfig())),
        "plan.out=null: plan profile writes to it; name a file, as in plan.out=profile.json",
    ),
]
