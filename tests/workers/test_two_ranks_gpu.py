"""Two ranks on one GPU, with nccl between them, against one rank on it: ZeRO by FSDP2, tensor slices, stages, lent weights.

Only with RLHF_SPMD_SHARED_GPU=1. nccl (2.30 or later) lets ranks share a GPU with NCCL_MULTI_RANK_GPU_ENABLE=1; without that variable
each rank says that it is on a host of its own, and nccl uses sockets. The GPU takes turns between the ranks, so that a collective takes
some 5 ms. Each layout has processes of its own: what hangs in a first launch or connection does so there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import expert_tasks
import tasks
from overrides import STEADY, layout, micro_batches
from places import ROOT
from rlhf_spmd.parallel.launch import SHARED_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ.get(SHARED_GPU) != "1", reason=f"only where {SHARED_GPU}=1 says that ranks may share a GPU"),
]

STEPS = 2
LIMIT_S = 60.0  # of a run, with what its processes import
ROLES = ("actor", "critic", "reference")
COMMON = (
    *(f"models.{role}.dtype=float32" for role in ROLES),
    *STEADY,
    "models.actor.generation.reuse_rollout_log_probs=false",  # as on GPUs anyway: a forward for the old log-probs
    f"run.timeout_s={LIMIT_S}",
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "pp2": (*(part for role in ("actor", "generation", "critic") for part in layout(role, pp=2)), *micro_batches(tokens=64)),
    "ep2": (*layout("actor", dp=2, ep=2, zero=1), *layout("critic", dp=2, ep=2, zero=2), *micro_batches(rows=2)),
    "cp2": (*layout("actor", cp=2), *layout("critic", cp=2), *micro_batches(rows=2)),
    "tp2": tuple(part for role in ("actor", "generation", "critic") for part in layout(role, tp=2)),  # with CUDA graphs
    "zero3 and zero1": (
        *layout("actor", dp=2, zero=3),
        *layout("critic", dp=2, zero=1),
        *layout("reference", dp=2, zero=3),
        *micro_batches(rows=2),
    ),
    "apart, weights lent": (
        "placement.pools={first: [0], last: [1], all: [0, 1]}",
        *(f"models.{role}.pool=first" for role in ("critic", "reference", "reward")),
        "models.actor.pool=last",
        "models.actor.calls.generate_sequences.pool=all",
        "models.actor.calls.compute_log_prob.pool=all",
        "models.actor.calls.compute_log_prob.layout.pp=2",
        "models.critic.calls.compute_values.pool=last",
    ),
}


class Ranks:
    """Processes that do one run."""

    def __init__(self, root: Path, size: int, overrides: Sequence[str], config: str) -> None:
        self.size, self.directory, self.output = size, root / "run", root / "output.txt"
        self.directory.mkdir(parents=True)
        orders = [(str(self.directory), tasks.settings(self.directory, STEPS, *COMMON, *overrides))]
        (root / "orders.json").write_text(json.dumps(orders))
        torchrun = ["-m", "torch.distributed.run", *tasks.one_node(size)] if size > 1 else []
        command = [sys.executable, *torchrun, str(ROOT / "tests" / "started" / "several_runs.py"), str(root / "orders.json")]
        variables = tasks.environment() | {"TASK": config}
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, text=True, start_new_session=True
            )

    def run(self) -> tasks.Run:
        """What it wrote, once all ranks have left: after EXIT_S they write their stacks and end."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        tracebacks = "".join(path.read_text() for path in self.directory.glob("ended_*"))
        assert code == 0 and not tracebacks, f"{tracebacks or f'exit code {code}'}\n{self.output.read_text()[-6000:]}"
        return tasks.read_run(self.directory)

    def close(self) -> None:
        """Ends the processes; the stacks of those that still run go to output.txt."""
        if self.process.poll() is None:
            for pid in tasks.ranks_of(self.process) if self.size > 1 else [self.process.pid]:
                os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)
            tasks.kill(self.process)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tasks.Run]:
    """The run of one rank with this configuration."""
    return cache(lambda config: Ranks(tmp_path_factory.mktemp("one"), 1, (), config).run())


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_what_one_does(tmp_path: Path, reference: Callable[[str], tasks.Run], name: str) -> None:
    """In float32, so sums in another order differ in the last bits: losses and all other metrics to 2e-3 of themselves, or of 0.1
    where they are smaller, weights to 1e-4 of their tensor's largest."""
    config = expert_tasks.config(tmp_path) if name == "ep2" else str(tasks.task() / "ppo.json")
    ranks = Ranks(tmp_path / "two", 2, LAYOUTS[name], config)
    one, run = reference(config), ranks.run()
    assert "without CUDA graphs" not in ranks.output.read_text()
    assert all(row["actor/grad_norm"] > 0 for row in one.metrics)
    assert run.responses == one.responses
    difference, where = tasks.worst_metric(one, run, floor=0.1)
    assert difference < 2e-3, where
    difference, where = tasks.worst_tensor(one, run)
    assert difference < 1e-4, where
