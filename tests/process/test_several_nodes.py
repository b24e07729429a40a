"""Two torchrun agents with one rank each, on loopback: the same bits as two ranks on one node."""

import json
from pathlib import Path

import pytest

import tasks
from overrides import ACROSS_NODES
from ranks import run_ranks

pytestmark = pytest.mark.long


def run_on_two_nodes(run_dir: Path, overrides: list[str], *sizes: int) -> tuple[list[int], str]:
    """Exit codes of the agents, and the class in exit_status.json. ``sizes``: ranks of each node."""
    tasks.task()
    where = "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(tasks.free_port())
    ranks = [("--nproc-per-node", str(size), "--node-rank", str(node)) for node, size in enumerate(sizes)]
    agents = [tasks.start_torchrun(run_dir, overrides, *where, *more) for more in ranks]
    try:
        codes = [tasks.finish(agent, run_dir) for agent in agents]
    finally:
        for agent in agents:
            tasks.kill(agent)
    return codes, json.loads((run_dir / "exit_status.json").read_text())["class"]


def test_two_nodes_are_one_node_with_as_many_ranks(tmp_path: Path) -> None:
    apart, together = tmp_path / "two_nodes", tmp_path / "one_node"
    assert run_on_two_nodes(apart, tasks.settings(apart, 2, *ACROSS_NODES), 1, 1) == ([0, 0], "done")
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(together, 2, *ACROSS_NODES))
    tasks.assert_bit_equal(tasks.read_run(together), tasks.read_run(apart))


def test_hosts_with_different_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    """Each rank would derive other hosts, and so other placements and other senders of weights."""
    over_three = "data.train_batch_size=6", "algorithm.ppo_mini_batch_size=6"
    codes, error_class = run_on_two_nodes(tmp_path, tasks.settings(tmp_path, 1, *over_three), 2, 1)
    assert all(codes) and error_class == "config"
    assert "has another --nproc-per-node than" in (tmp_path / "output.txt").read_text()
