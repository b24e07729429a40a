"""Which GPU a rank takes, that no two have the same one, and what is set for CUDA, the allocator and NCCL before their first use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from places import ROOT
from ranks import run_ranks
from rlhf_spmd.kernels.devices import usual_settings
from rlhf_spmd.parallel.device_setup import choose_device, refuse_shared_gpus
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World, nccl_settings
from rlhf_spmd.process.launcher import rank_environment


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, local_rank, gpu in ((4, 0, 0), (4, 3, 3), (1, 0, 0), (1, 3, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert choose_device(Launch(local_rank, 4, local_rank, 4)) == torch.device("cuda", gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--nproc-per-node=4, but this node has 2 GPUs"):
        choose_device(Launch(3, 4, 3, 4))


def takes(world: World, gpus: list[str], local_size: int, key: str) -> str:
    launch, store = Launch(world.rank, world.size, world.rank % local_size, local_size), torch.distributed.PrefixStore
    try:
        refuse_shared_gpus(launch, store(key, world.store), gpus[world.rank])
    except ValueError as refused:
        return str(refused)
    return ""


def test_two_ranks_of_a_host_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all of its ranks, in one line; the same number on another host is another GPU."""
    assert run_ranks(2, takes, ["GPU-a", "GPU-b"], 2, "own") == ["", ""]
    lines = run_ranks(2, takes, ["GPU-a", "GPU-a"], 2, "shared")
    for line in lines:
        assert line.startswith("ranks 0, 1 of this host have the same GPU, GPU-a") and "\n" not in line
        assert "--gpus-per-task=1" in line
    assert run_ranks(2, takes, ["GPU-a", "GPU-a"], 1, "two hosts") == ["", ""]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ranks have the settings from their start."""
    usual = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
    assert usual_settings({}) == usual
    assert usual_settings(usual) == {}
    assert usual_settings({"PYTORCH_ALLOC_CONF": ""}).keys() == {"CUDA_DEVICE_MAX_CONNECTIONS"}, "set, to nothing"
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert usual_settings(own) == {"NCCL_GRAPH_REGISTER": "0"}
    assert usual_settings({"NCCL_GRAPH_REGISTER": "1"}) == {k: v for k, v in usual.items() if k != "NCCL_GRAPH_REGISTER"}
    for name in usual:
        monkeypatch.delenv(name, raising=False)
    assert usual.items() <= rank_environment(1, 2, 1234, "key").items()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert rank_environment(1, 2, 1234, "key")["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_programs_set_them_before_anything_asks_for_a_gpu() -> None:
    """``torch.cuda.is_available`` is the first that does: what it sees in the environment of a program."""
    script = (
        "import os, torch; seen = []\n"
        "torch.cuda.is_available = lambda: seen.append(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')) and False\n"
        "from rlhf_spmd.process.program import run_program\n"
        "run_program(lambda: 0, lambda context: None)\n"
        "assert seen and set(seen) == {'32'}, seen; assert os.environ['PYTORCH_ALLOC_CONF'] == 'expandable_segments:True'\n"
    )
    names = {*usual_settings({}), "PYTORCH_CUDA_ALLOC_CONF"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_nccl_s_watchdogs_come_after_the_error_board() -> None:
    """Its monitor ends a process without a name; the board, which names the culprit, waits for less than ``patience_s``."""
    for patience_s in (1260.0, 7260.5):
        (seconds,) = map(int, nccl_settings(patience_s).values())
        assert seconds > patience_s > 480
