"""What breaks each rule of ``agents``."""

from __future__ import annotations

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.config.load import check_tree

CASES = [
    (
        lambda: check_tree(AgentConfig(run="agent.py:f", command="true"), "agent"),
        "agent.run=agent.py:f, agent.command=true, agent.external=null: each of them says what runs episodes; give one of them",
    ),
    (
        lambda: check_tree(AgentConfig(max_turns=3), "agent"),
        "agent.run=null, agent.command=null, agent.external=null: other keys of the section are set, and nothing says what runs "
        "episodes; give one of them",
    ),
]
