"""What breaks each rule of ``agents``."""

from __future__ import annotations

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.config.load import check_tree

CASES = [
    (
        lambda: check_tree(AgentConfig(run="agent.py:f", command="true"), "agent"),
        "agent.run=agent.py:f, agent.command=true: both say what an episode runs; leave one of them out",
    ),
    (
        lambda: check_tree(AgentConfig(max_turns=3), "agent"),
        "agent.run=null, agent.command=null: other keys of the section are set, and nothing says what an episode runs; give one of "
        "them",
    ),
]
