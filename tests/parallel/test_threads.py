"""Several threads per rank: generation's log-probs stay a training forward's, and runs repeat bit for bit."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import tasks
from generators import SMALL, build_generator, num_unequal, ragged_requests, skip_unless_exact
from ranks import run_ranks
from rlhf_spmd import kernels
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.kernels import build, choose_ops, dispatch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.train import prepare
from small_models import CONFIGS, make_model
from tiers import tiers

CPU = torch.device("cpu")
FOUND = isinstance(choose_ops(torch.float32, CPU), kernels.CppOps)
needs_kernels = pytest.mark.skipif(not FOUND, reason="needs the C++ attention")


def most_threads(dtype: torch.dtype) -> int:
    """With torch's products in place of those in C++, as of bfloat16 on processors with AMX, one."""
    return 2 if choose_ops(dtype, CPU).is_batch_invariant(dtype, 2) else 1


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


FAMILIES = [name for name, config in CONFIGS.items() if not {"kv_lora_rank", "linear_num_key_heads"} & config.keys()]
SHORT = {
    *((name, "float32") for name in ("llama", "gemma2", "gemma4", "glm4-moe")),
    ("gpt-oss", "bfloat16"),
    ("qwen3", "bfloat16"),
}


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "case", tiers([(name, dtype) for name in FAMILIES for dtype in ("float32", "bfloat16")], SHORT), ids=str
)
def test_log_probs_are_a_training_forwards(tmp_path: Path, case: tuple[str, str]) -> None:
    """Of families whose sums over one token are those over many."""
    name, dtype = case[0], getattr(torch, case[1])
    requests = ragged_requests(samples=2, max_new_tokens=12, vocabulary=101)
    generator = build_generator(str(make_model(tmp_path, CONFIGS[name])), replace(SMALL, attention="cpp"), dtype)
    alone = generator.generate(requests, SamplingConfig(), 3, 5)
    torch.set_num_threads(most_threads(dtype))
    together = generator.generate(requests, SamplingConfig(), 3, 5)
    assert num_unequal(generator.decoder, requests, together, 1.0) == 0
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids and torch.equal(a.log_probs, b.log_probs)


@needs_kernels
@pytest.mark.parametrize("dtype", tiers(["float32", "bfloat16"], ["float32"]))
def test_a_run_repeats_bit_for_bit_and_takes_the_generators_log_probs(tmp_path: Path, dtype: str) -> None:
    threads = most_threads(getattr(torch, dtype))
    skip_unless_exact(choose_ops(getattr(torch, dtype), CPU), getattr(torch, dtype), threads)
    settings = [f"models.actor.dtype={dtype}", "models.actor.attention=cpp", f"run.threads={threads}"]
    settings += ["models.actor.generation.reuse_rollout_log_probs=true"]
    runs = []
    for name in ("first", "second"):
        process = tasks.start_program(1, tmp_path / name, tasks.settings(tmp_path / name, 2, *settings))
        output = tmp_path / name / "output.txt"
        assert tasks.finish(process, tmp_path / name) == 0, output.read_text()
        assert f"{threads} thread{'s' * (threads > 1)}" in output.read_text()
        runs.append(tasks.read_run(tmp_path / name))
    if dtype == "float32":
        tasks.assert_bit_equal(*runs)
    assert runs[0].log_prob_difference() == 0
    assert "timing_s/compute_log_prob" not in runs[0].raw[0]


def test_where_torch_computes_nothing_is_said_to_be_exact(tmp_path: Path) -> None:
    config = str(tasks.task() / "ppo.json")
    settings = tasks.settings(tmp_path, 1, "models.actor.attention=torch", "run.threads=2")
    ready = prepare(config, settings, 1)
    assert not exact_rollouts(ready.config, ready.roles)
    with pytest.raises(ValueError, match=r"reuse_rollout_log_probs=true: with run.threads=2 torch's products are not exact"):
        prepare(config, [*settings, "models.actor.generation.reuse_rollout_log_probs=true"], 1)
    if choose_ops(torch.float32, CPU, "torch").is_batch_invariant(torch.float32):
        ready = prepare(config, [*settings, "run.threads=1", "models.actor.generation.reuse_rollout_log_probs=true"], 1)
        assert exact_rollouts(ready.config, ready.roles)
    with mock.patch.object(dispatch, "_load", return_value=None):  # as without a compiler, auto is torch
        assert not choose_ops(torch.float32, CPU).is_batch_invariant(torch.float32, 2)
    with pytest.raises(ValueError, match=r"run.threads=0: must be at least 1"):
        prepare(config, [*settings, "run.threads=0"], 1)
    with pytest.raises(ValueError, match=r"run.threads=100000: must be at least 1 and at most 1024"):
        prepare(config, [*settings, "run.threads=100000"], 1)


# -- hosts with unlike processors


def train_on_unlike_hosts(world: World, overrides: list[str], name: str, value: object) -> None:
    """``name``: what asks the processor, which has another answer on rank 1."""
    with mock.patch(name, return_value=value) if world.rank == 1 else contextlib.nullcontext():
        tasks.train_here(world, str(tasks.task() / "ppo.json"), overrides)


def computes_log_probs(run_dir: Path) -> bool:
    """Whether the first step of a run had a forward pass for old log-probs."""
    return "timing_s/compute_log_prob" in json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])


@needs_kernels
@pytest.mark.parametrize(
    ("name", "value"),
    [("rlhf_spmd.preflight.exactness.exact_rollouts", False), ("rlhf_spmd.train.processor_kind", 12345)],
    ids=["inexact products", "other vectors"],
)
def test_unlike_hosts_take_no_log_probs_from_each_other(tmp_path: Path, name: str, value: object) -> None:
    skip_unless_exact(choose_ops(torch.float32, CPU), torch.float32)
    settings = tasks.settings(tmp_path, 1, "models.actor.attention=cpp")
    run_ranks(2, train_on_unlike_hosts, settings, name, value)
    assert computes_log_probs(tmp_path)


@pytest.mark.long
def test_a_rank_with_the_environment_of_another_processor(tmp_path: Path) -> None:
    """All products of the C++ kernels are exact, but rank 1's attention adds in vectors of 8 floats."""
    try:
        build.build("x86-64-v3")
    except ValueError as error:
        pytest.skip(str(error))
    code = """
        import os, runpy
        if os.environ["RANK"] == "1":
            os.environ.update({"RLHF_SPMD_TARGET": "x86-64-v3", "ATEN_CPU_CAPABILITY": "avx2"})
        runpy.run_module("rlhf_spmd.train", run_name="__main__", alter_sys=True)
    """
    script = tmp_path / "unlike.py"
    script.write_text(textwrap.dedent(code))
    settings = tasks.settings(tmp_path / "run", 1, "models.actor.attention=cpp")
    command = [sys.executable, "-m", "torch.distributed.run", *tasks.one_node(2), str(script)]
    command += ["--config", str(tasks.task() / "ppo.json"), *settings]
    done = subprocess.run(command, env=tasks.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert computes_log_probs(tmp_path / "run")
