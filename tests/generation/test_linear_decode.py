"""Models with linear attention in captured steps, and several tokens per look of the host; the launches of a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decode_loop import Frozen

from generators import SMALL, alone, build_generator, load, ragged_requests, tokens_of
from rlhf_spmd.generation import Completion, Generator, Request, SamplingConfig, config, model_runner
from rlhf_spmd.generation.graphs import Graphs
from rlhf_spmd.generation.model_runner import ModelRunner
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained
from small_models import CONFIGS, make_model

SAMPLED = SamplingConfig(temperature=0.8, top_k=40)
NARROW = 1e-3  # in float32, of log-probs between other orders of sums, with these weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("linear")
    return {
        name: str(make_model(root / name, {**CONFIGS[name], "vocab_size": 301, "num_hidden_layers": 4}))
        for name in ("qwen3-5", "qwen3-next")
    }


def generate(path: str, requests: list[Request], dtype: torch.dtype, **changes: Any) -> tuple[list[Completion], Generator]:
    decoder = load(path, alone()[1], dtype)
    generator = Generator(decoder, alone()[1], replace(SMALL, **changes), range(4))
    return generator.generate(requests, SAMPLED, 3, 5), generator


@pytest.mark.parametrize(
    "changes",
    [{"steps_per_sync": 8}, {"steps_per_sync": 5, "num_pages": 22}, {"steps_per_sync": 64, "max_num_seqs": 3}],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next"])
def test_several_tokens_per_look_change_nothing(models: dict[str, str], name: str, changes: dict[str, Any]) -> None:
    """Rows stop and reach their limits within windows; prompts of one token begin in one."""
    requests = ragged_requests()
    (wanted, stepwise), (found, generator) = (
        generate(models[name], requests, torch.float64, **options) for options in ({}, changes)
    )
    assert tokens_of(found) == tokens_of(wanted)
    assert max(float((a.log_probs - b.log_probs).abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-10
    assert generator.stats.steps < stepwise.stats.steps or len(changes) > 1
    assert (generator.stats.preemptions > 0) == ("num_pages" in changes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("changes", "least"),
    [({}, 0.9), ({"max_num_seqs": 3}, 0.99), ({"max_num_batched_tokens": 33}, 0.9), ({"num_pages": 22}, 0.9)],
    ids=str,
)
def test_shared_prompts_change_nothing(
    models: dict[str, str], changes: dict[str, Any], least: float, dtype: torch.dtype
) -> None:
    """Five rows of a prompt compute all but its last token once, also where they start one by one: ``least`` of what could be found
    is found."""
    requests, path = ragged_requests(samples=5), models["qwen3-next"]
    (wanted, alone_), (found, shared) = (
        generate(path, requests, dtype, **changes, enable_prefix_caching=sharing) for sharing in (False, True)
    )
    assert tokens_of(found) == tokens_of(wanted)
    difference = max(float((a.log_probs - b.log_probs).abs().max()) for a, b in zip(found, wanted, strict=True))
    assert difference < (1e-10 if dtype == torch.float64 else NARROW)
    most = sum(len(request.prompt_ids) - 1 for request in requests) * 4 / 5
    assert alone_.stats.hit_tokens == 0 and shared.stats.hit_tokens >= least * most
    assert shared.stats.prefill_tokens < alone_.stats.prefill_tokens


@pytest.mark.parametrize("changes", [{}, {"num_pages": 9, "max_num_seqs": 5}], ids=str)
def test_captured_steps_of_gpu_kernels(
    models: dict[str, str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the CPU's. A layer takes 13 launches at most, of which one is the linear attention; in place of graphs stand the
    launches of their first step, with every number that the host gave them. Padding changes no state."""
    gpu = pytest.importorskip("rlhf_spmd.kernels.gpu_ops", reason="triton is not installed: pip install 'rlhf_spmd[triton]'")
    if importlib.import_module("triton_device").DEVICE.type == "cuda":
        pytest.skip("compares with the CPU's numbers")
    steps: list[Any] = []

    def capture(self: Graphs, step: Callable[[], None]) -> Frozen:
        steps.append(step)
        step()
        return Frozen(step)

    path, requests = models["qwen3-5"], ragged_requests(num_prompts=3, samples=1, max_new_tokens=12)
    wanted = build_generator(path).generate(requests, SAMPLED, 3, 5)
    counted_launches, counts, decode_once = importlib.import_module("launches").counted_launches, [], ModelRunner._decode_once

    def counted(self: ModelRunner, *arguments: Any) -> None:
        with counted_launches() as launches:
            decode_once(self, *arguments)
        counts.append(launches)

    monkeypatch.setattr(ModelRunner, "_decode_once", counted)
    monkeypatch.setattr(Graphs, "_capture", capture)
    for module in (model_runner, config):
        monkeypatch.setattr(module, "capabilities", lambda device: replace(capabilities(device), graphs=True, streams=True))
    mesh = alone()[1]
    decoder = Decoder(read_spec(Path(path)), "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=gpu.GpuOps())
    load_pretrained(decoder, Path(path))
    generator = Generator(decoder, mesh, replace(SMALL, attention="triton", **changes), range(4))
    found = generator.generate(requests, SAMPLED, 3, 5)
    assert tokens_of(found) == tokens_of(wanted) and len(steps) > 1
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=NARROW, rtol=0)
    for launches in counts:
        assert launches.names.count("_mix_token") == decoder.num_linear and not launches.waits
        assert len(launches.names) <= 13 * len(decoder.layers) + 30, " ".join(launches.names)
