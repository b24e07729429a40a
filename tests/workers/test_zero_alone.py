"""FSDP2 on one rank, where it has nothing to do: its streams, hooks and buffers, on a GPU if there is one, and the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine_runs import CONFIGS, LENGTHS, STEADY, rows_of
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World, backend_of
from rlhf_spmd.parallel.zero import local_part
from rlhf_spmd.workers import train_engine as engine_module
from rlhf_spmd.workers.passes import Packed
from rlhf_spmd.workers.train_engine import TrainEngine

ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture
def world(device: str) -> Iterator[World]:
    """Of one rank, with a process group, which FSDP2 asks for."""
    assert not dist.is_initialized()
    store, where = dist.HashStore(), torch.device(device)
    dist.init_process_group(backend_of(where), store=store, rank=0, world_size=1)
    yield World(Launch(), where, store, 60.0)
    dist.destroy_process_group()


def loss_of(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, Mapping[str, Tensor]]:
    keep = torch.ones(len(batch.tokens), dtype=torch.bool, device=hidden.device)
    keep[(batch.lengths.cumsum(0) - 1).to(hidden.device)] = False
    log_probs, _ = token_log_probs(decoder, hidden[keep], batch.tokens.roll(-1)[keep])
    return -log_probs.sum() / sum(LENGTHS), {}


def train(world: World, path: Path, zero: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of three steps of two micro-batches, and the weights after them."""
    layout = Layout(zero=zero)
    mesh = build_mesh(world, [0], layout)
    options = {"dtype": torch.float32, "device": world.device, "total_updates": 5}
    engine = TrainEngine(read_spec(path), str(path), "lm", mesh, STEADY, **options)  # type: ignore[arg-type]
    assert bool(engine.zeros) == bool(zero)
    numbers = []
    for step in range(3):
        rows = rows_of(step, engine.spec.vocab_size)
        parts = [rows[i::2] for i in range(2)]
        batches = [Packed(torch.cat(part).to(world.device), torch.tensor([len(row) for row in part])) for part in parts]
        numbers.append(float(engine.forward_backward(batches, loss_of)["loss"]))
        numbers.append(engine.optimizer_step()["grad_norm"])
    return numbers, {name: local_part(tensor).cpu().clone() for name, tensor in engine.local_tensors().items()}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_one_rank_under_fsdp_trains_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World, stage: int
) -> None:
    """In float32: of one rank FSDP2 calls no reduction, which sums of half precision are taken from."""
    write_random_model(tmp_path / "model", CONFIGS["untied"], seed=3)
    plain = train(world, tmp_path / "model", 0)
    monkeypatch.setattr(engine_module, "stage_of_zero", lambda layout: layout.zero)
    alone = DeviceMesh(world.device.type, [0], mesh_dim_names=("dp",))
    monkeypatch.setattr(Mesh, "device_mesh", alone)
    numbers, weights = train(world, tmp_path / "model", stage)
    assert numbers == pytest.approx(plain[0], rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain[1][name], rtol=1e-6, atol=1e-6, msg=name)
