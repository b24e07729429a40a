"""Two torchrun agents with one rank each, on loopback: the same bits as two ranks on one node."""

import json
from pathlib import Path

import pytest

import tasks
from overrides import ACROSS_NODES
from ranks import run_ranks

STEPS = 2


@pytest.mark.long
def test_two_nodes_are_one_node_with_as_many_ranks(tmp_path: Path):
    apart = tmp_path / "two_nodes"
    tasks.task()
    where = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(tasks.free_port()))
    agents = [
        tasks.start_torchrun(apart, tasks.settings(apart, STEPS, *ACROSS_NODES), *where, "--node-rank", str(node))
        for node in range(2)
    ]
    together = tmp_path / "one_node"
    try:
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(together, STEPS, *ACROSS_NODES))
        assert [tasks.finish(agent, apart) for agent in agents] == [0, 0], (apart / "output.txt").read_text()[-4000:]
    finally:
        for agent in agents:
            tasks.kill(agent)
    assert json.loads((apart / "exit_status.json").read_text())["class"] == "done"
    tasks.assert_bit_equal(tasks.read_run(together), tasks.read_run(apart))


@pytest.mark.long
def test_hosts_with_different_numbers_of_ranks_are_refused(tmp_path: Path):
    """Each rank would derive other hosts, and so other placements and other senders of weights."""
    tasks.task()
    dealt = "data.train_batch_size=6", "algorithm.ppo_mini_batch_size=6"  # over three ranks
    where = "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(tasks.free_port())
    agents = [
        tasks.start_torchrun(
            tmp_path, tasks.settings(tmp_path, 1, *dealt), *where, "--nproc-per-node", str(2 - node), "--node-rank", str(node)
        )
        for node in range(2)
    ]
    try:
        assert all(tasks.finish(agent, tmp_path) != 0 for agent in agents)
    finally:
        for agent in agents:
            tasks.kill(agent)
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "config"
    assert "has another --nproc-per-node than" in (tmp_path / "output.txt").read_text()
