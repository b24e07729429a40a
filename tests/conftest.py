from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# the same examples in every run, and no judging of how long a busy machine takes for one
hypothesis.settings.register_profile(
    "steady", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to other ranks
if not os.path.exists("/dev/nvidiactl") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels on CPU tensors
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a shell's background job, and of all its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "helpers")]

FIGURES = Path(__file__).parent.parent / "docs" / "figures" / "tests.json"  # what files take, by scripts/results/test_costs.py


@pytest.fixture(autouse=True)
def as_on_a_rank() -> None:
    """The numerics of a CPU rank in the test process too, whatever the test before has left: results are compared bit by bit."""
    import torch

    from rlhf_spmd.parallel.device_setup import choose_cpu_matmul

    torch.set_num_threads(1)
    choose_cpu_matmul()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_for_the_next_file() -> Iterator[None]:
    """A program that fails in the test process leaves its process group behind, which a real one takes with it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        from rlhf_spmd.parallel.world import join_world

        join_world.cache_clear()
        distributed.destroy_process_group()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest begin first: else a worker has one of them left when the others have nothing more to do."""
    rows = json.loads(FIGURES.read_text())["rows"] if FIGURES.is_file() else []
    wall_s = {
        file: seconds
        for file, tier, seconds, *_ in rows
        if tier == ("short" if config.option.markexpr == "not long" else "long")
    }
    items.sort(key=lambda item: wall_s.get(str(item.path.relative_to(config.rootpath)), 0), reverse=True)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage need not go through it again and again."""
    gc.collect()
    gc.freeze()
