"""Two ranks on one GPU, with nccl between them, against one rank on it: ZeRO by FSDP2, tensor slices, stages, lent weights.

Only with RLHF_SPMD_SHARED_GPU=1. nccl (2.30 or later) lets ranks share a GPU with NCCL_MULTI_RANK_GPU_ENABLE=1; without that variable
each rank says that it is on a host of its own, and nccl uses sockets. The GPU takes turns between the ranks, so that a collective takes
some 5 ms, and one process runs all layouts, so that it imports once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

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
LIMIT_S = 60.0  # of a run, from the end of the one before it; of the first with what a process imports
ROLES = ("actor", "critic", "reference")
COMMON = (
    *(f"models.{role}.dtype=float32" for role in ROLES),
    *STEADY,
    "models.actor.generation.reuse_rollout_log_probs=false",  # as on GPUs anyway: a forward for the old log-probs
    f"run.timeout_s={LIMIT_S}",
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "zero3 and zero1": (
        *layout("actor", dp=2, zero=3),
        *layout("critic", dp=2, zero=1),
        *layout("reference", dp=2, zero=3),
        *micro_batches(rows=2),
    ),
    "tp2": tuple(part for role in ("actor", "generation", "critic") for part in layout(role, tp=2)),
    "pp2": (*(part for role in ("actor", "generation", "critic") for part in layout(role, pp=2)), *micro_batches(tokens=64)),
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
    """Processes that do ``runs`` in their order; the first failure ends them."""

    def __init__(self, root: Path, size: int, runs: Mapping[str, Sequence[str]]) -> None:
        self.size = size
        self.directories = {name: root / str(number) for number, name in enumerate(runs)}
        self.output = root / "output.txt"
        for directory in self.directories.values():
            directory.mkdir(parents=True)
        orders = [(str(where), tasks.settings(where, STEPS, *COMMON, *runs[name])) for name, where in self.directories.items()]
        (root / "orders.json").write_text(json.dumps(orders))
        torchrun = ["-m", "torch.distributed.run", *tasks.one_node(size)] if size > 1 else []
        command = [sys.executable, *torchrun, str(ROOT / "tests" / "started" / "several_runs.py"), str(root / "orders.json")]
        variables = tasks.environment() | {"TASK": str(tasks.task() / "ppo.json")}
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                command, env=variables, stdout=output, stderr=output, text=True, start_new_session=True
            )

    def run(self, name: str) -> tasks.Run:
        """What it wrote, once all ranks have ended it."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            alive = self.process.poll() is None and time.monotonic() < deadline  # looked at before what the ranks have written
            tracebacks = [path.read_text() for path in self.directories[name].glob("ended_*")]
            if len(tracebacks) == self.size and not any(tracebacks):
                return tasks.read_run(self.directories[name])
            if not alive or any(tracebacks):
                self.close()
                raise AssertionError(f"{name}: {''.join(tracebacks) or 'not finished'}\n{self.output.read_text()[-6000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the processes; the stacks of those that still run go to output.txt."""
        if self.process.poll() is None:
            for pid in tasks.ranks_of(self.process) if self.size > 1 else [self.process.pid]:
                os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)
            tasks.kill(self.process)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    root = tmp_path_factory.mktemp("shared_gpu")
    processes = {1: Ranks(root / "1", 1, {"one rank": ()}), 2: Ranks(root / "2", 2, LAYOUTS)}
    yield processes
    for each in processes.values():
        each.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_what_one_does(ranks: dict[int, Ranks], name: str) -> None:
    """In float32, so sums in another order differ in the last bits: losses and all other metrics to 2e-3 of themselves, or of 0.1
    where they are smaller, weights to 1e-4 of their tensor's largest."""
    run, reference = ranks[2].run(name), ranks[1].run("one rank")
    assert all(row["actor/grad_norm"] > 0 for row in reference.metrics)
    assert run.responses == reference.responses
    difference, where = tasks.worst_metric(reference, run, floor=0.1)
    assert difference < 2e-3, where
    difference, where = tasks.worst_tensor(reference, run)
    assert difference < 1e-4, where
