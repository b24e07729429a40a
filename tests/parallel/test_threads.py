"""Several threads per rank: generation's log-probs stay a training forward's, and runs repeat bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tasks
from generators import SMALL, build_generator, num_unequal, ragged_requests, skip_unless_exact
from places import ROOT
from rlhf_spmd import kernels
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.kernels import build, choose_ops
from rlhf_spmd.train import prepare
from rlhf_spmd.training.checks import exact_rollouts
from small_models import CONFIGS, make_model

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


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_a_training_forwards_for_every_family(tmp_path: Path, dtype: torch.dtype) -> None:
    requests = ragged_requests(samples=2, max_new_tokens=12, vocabulary=101)
    for name, config in CONFIGS.items():
        if {"kv_lora_rank", "linear_num_key_heads"} & config.keys():  # one token has other sums there than many
            continue
        generator = build_generator(str(make_model(tmp_path / name, config)), replace(SMALL, attention="cpp"), dtype)
        alone = generator.generate(requests, SamplingConfig(), 3, 5)
        torch.set_num_threads(most_threads(dtype))
        together = generator.generate(requests, SamplingConfig(), 3, 5)
        assert num_unequal(generator.decoder, requests, together, 1.0) == 0, name
        for a, b in zip(together, alone, strict=True):
            assert a.token_ids == b.token_ids and torch.equal(a.log_probs, b.log_probs), name


def run(directory: Path, *more: str) -> tuple[tasks.Run, str]:
    process = tasks.start_program(1, directory, tasks.settings(directory, 2, *more))
    output = directory / "output.txt"
    assert tasks.finish(process, directory) == 0, output.read_text()
    return tasks.read_run(directory), output.read_text()


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_repeats_bit_for_bit_and_takes_the_generators_log_probs(tmp_path: Path, dtype: str) -> None:
    threads = most_threads(getattr(torch, dtype))
    skip_unless_exact(choose_ops(getattr(torch, dtype), CPU), getattr(torch, dtype), threads)
    settings = (
        f"models.actor.dtype={dtype}",
        "models.actor.attention=cpp",
        "models.actor.generation.reuse_rollout_log_probs=true",
    )
    one, output = run(tmp_path / "one", *settings, f"run.threads={threads}")
    assert f"{threads} thread{'s' * (threads > 1)}" in output
    if dtype == "float32":
        tasks.assert_bit_equal(one, run(tmp_path / "other", *settings, f"run.threads={threads}")[0])
    assert one.log_prob_difference() == 0
    assert "timing_s/compute_log_prob" not in one.raw[0]


def test_where_torch_computes_nothing_is_said_to_be_exact(tmp_path: Path) -> None:
    config = str(tasks.task() / "ppo.json")
    settings = tasks.settings(tmp_path, 1, "models.actor.attention=torch", "run.threads=2")
    ready = prepare(config, settings, 1)
    assert not exact_rollouts(ready.config, ready.plans)
    with pytest.raises(
        ValueError, match=r"reuse_rollout_log_probs=true, but with run.threads=2 torch's products are not exact"
    ):
        prepare(config, [*settings, "models.actor.generation.reuse_rollout_log_probs=true"], 1)
    ready = prepare(config, [*settings, "run.threads=1", "models.actor.generation.reuse_rollout_log_probs=true"], 1)
    assert exact_rollouts(ready.config, ready.plans)
    with kernels.suspended():  # as without a compiler, auto is torch
        assert not choose_ops(torch.float32, CPU).is_batch_invariant(torch.float32, 2)
    with pytest.raises(ValueError, match=r"run.threads=0: must be at least 1"):
        prepare(config, [*settings, "run.threads=0"], 1)
    with pytest.raises(ValueError, match=r"run.threads=100000: must be at least 1 and at most 1024"):
        prepare(config, [*settings, "run.threads=100000"], 1)


@needs_kernels
def test_generate_has_the_same_bits_with_two_threads(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", CONFIGS["llama"])
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt_ids": [5 + i, 6, 7]}) + "\n" for i in range(20)))
    settings = [f"model.path={model}", f"data.path={tmp_path}/in.jsonl", "sampling.max_response_length=8"]
    for threads in (1, 2):
        command = [sys.executable, "-m", "rlhf_spmd.generate", *settings, f"out={tmp_path}/{threads}", f"threads={threads}"]
        done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True)
        assert done.returncode == 0 and f"{threads} thread{'s' * (threads > 1)}" in done.stderr, done.stderr
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text()


def test_hosts_with_unlike_processors_agree_on_what_is_exact(tmp_path: Path) -> None:
    """Rank 1's products are not exact, as on a processor with AVX2 alone: then old log-probs are computed on both."""
    limits = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    probe = "import torch; from rlhf_spmd import kernels; from rlhf_spmd.parallel import device_setup; "
    probe += "device_setup.choose_cpu_matmul(); "
    probe += "print(kernels.choose_ops(torch.float32, torch.device('cpu'), 'torch').is_batch_invariant(torch.float32))"
    limited = subprocess.run([sys.executable, "-c", probe], env=tasks.environment() | limits, capture_output=True, text=True)
    if limited.stdout.strip() != "False":
        pytest.skip("the environment does not change this processor's products")
    compares_log_probs(tmp_path, limits, "models.actor.attention=torch")


def test_hosts_with_unlike_vectors_take_no_log_probs_from_each_other(tmp_path: Path) -> None:
    """All products of the C++ kernels are exact, but rank 1's attention adds in vectors of 8 floats."""
    try:
        build.build("x86-64-v3")
    except ValueError as error:
        pytest.skip(str(error))
    compares_log_probs(tmp_path, {"RLHF_SPMD_TARGET": "x86-64-v3", "ATEN_CPU_CAPABILITY": "avx2"}, "models.actor.attention=cpp")


def compares_log_probs(tmp_path: Path, changes: dict[str, str], setting: str) -> None:
    """In a run of two ranks, where the environment of the second has ``changes``."""
    code = f"""
        import os, runpy, sys
        if os.environ["RANK"] == "1":
            os.environ.update({changes})
        runpy.run_module("rlhf_spmd.train", run_name="__main__", alter_sys=True)
    """
    script = tmp_path / "unlike.py"
    script.write_text(textwrap.dedent(code))
    settings = tasks.settings(tmp_path / "run", 1, setting)
    command = [sys.executable, "-m", "torch.distributed.run", *tasks.one_node(2), str(script)]
    command += ["--config", str(tasks.task() / "ppo.json"), *settings]
    done = subprocess.run(command, env=tasks.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "timing_s/compute_log_prob" in tasks.read_run(tmp_path / "run").raw[0]
