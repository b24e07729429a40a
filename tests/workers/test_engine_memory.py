"""Engines are built shard by shard: no rank holds or reads more than its part. Long work shows signs of life."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine_runs import LLAMA, build, cut, next_token_loss, rows_of
from live_memory import LiveMemory
from ranks import run_ranks
from rlhf_spmd.models import weights
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.reshard import Storages
from rlhf_spmd.workers.objective import MicroBatch
from rlhf_spmd.workers.train_engine import TrainEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    write_random_model(path, {**LLAMA, "num_hidden_layers": 12, "tie_word_embeddings": True}, seed=3)
    return str(path)


class CountedSlice:
    """safetensors' slice object that counts the elements read through it."""

    def __init__(self, stored: Any, count: Callable[[int], None]) -> None:
        self.stored, self.count = stored, count

    def __getitem__(self, key: Any) -> Tensor:
        part: Tensor = self.stored[key]
        self.count(part.numel())
        return part


def building(world: Any, path: str, layout: Layout, source: str) -> tuple[int, int, int, int]:
    """Peak and final bytes of building an engine, those of its shards, and the elements read from the file. ``source``: what gives
    the weights."""
    read: list[int] = []
    slices = weights.StoredModel.slices
    mesh, spec = build_mesh(world, range(layout.size), layout), read_spec(path)
    with (
        mock.patch.object(weights.StoredModel, "slices", lambda *args: CountedSlice(slices(*args), read.append)),
        LiveMemory() as memory,
    ):
        engine = TrainEngine(spec, path if source == "file" else None, "lm", mesh, None, **PLAIN)
    shards = sum(tensor.untyped_storage().nbytes() for tensor in engine.local_tensors().values())
    return memory.peak, memory.live, shards, sum(read)


PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
LAYOUT = Layout(dp=4, zero=3)
LARGEST = 2 * 24 * 16 * 4  # bytes of one fused matrix or layer's gathered tensor
WHOLE = 12 * (16 * (32 + 16 + 48 + 24) + 32) + 41 * 16 + 16  # parameters


@pytest.mark.parametrize("source", ["file", "seed"])
def test_no_rank_holds_or_reads_more_than_its_shards(model: str, source: str) -> None:
    results = run_ranks(4, building, model, LAYOUT, source)
    for peak, live, held, _ in results:
        assert held <= live <= held + 64  # and the rotary frequencies
        assert held <= 1.01 * WHOLE  # a quarter of the parameters, 4 bytes each, and FSDP's padding
        assert peak <= held + 2 * LARGEST
    assert sum(read for *_, read in results) == (WHOLE if source == "file" else 0)


def borrowing(world: Any, path: str, layout: Layout) -> tuple[int, int]:
    """Of an engine without weights of its own: the most bytes that its parameters had while it was built, and those of a loan."""
    sizes: list[int] = []
    free = Storages.free

    def noted_free(storages: Storages) -> None:
        sizes.append(storages.nbytes)
        free(storages)

    with mock.patch.object(Storages, "free", noted_free):
        mesh = build_mesh(world, range(layout.size), layout)
        engine = TrainEngine(read_spec(path), None, "lm", mesh, None, fill=False, **PLAIN)
    assert len(sizes) == len(engine.chunks[0].layers) + 1 and engine.storages.nbytes == 0
    engine.storages.allocate()
    assert all(tensor.isfinite().all() for tensor in engine.local_tensors().values())
    return max(sizes), engine.storages.nbytes


@pytest.mark.parametrize("layout", [LAYOUT, Layout(tp=2, pp=2)], ids=str)
def test_a_twin_has_one_layer_in_memory_at_a_time(model: str, layout: Layout) -> None:
    for peak, held in run_ranks(4, borrowing, model, layout):
        assert held > 0.95 * WHOLE and peak < held / 4


def signs(world: Any, path: str, layout: Layout) -> dict[str, list[int]]:
    """The count of signs of life, which the board watches, at each piece of work."""
    counts: dict[str, list[int]] = {}

    def note(kind: str) -> None:
        counts.setdefault(kind, []).append(RECORDER.sequence + RECORDER.ticks)

    def loss(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        note("forward and backward")
        return next_token_loss(decoder, hidden, batch)

    note("load")
    engine = build(world, path, layout)
    note("load")
    RECORDER.entries.clear()
    rows = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 3)
    engine.forward(rows, lambda *_: note("forward"))
    engine.forward_backward(rows, loss)
    known = {"connect", "all_gather:zero_parameters", "reduce_scatter:zero_gradients"}
    operations = {operation for _, operation, *_ in RECORDER.entries}
    assert operations <= known, "the engine takes the number of micro-batches as agreed"
    note("step")
    engine.optimizer_step()
    note("step")
    return counts


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=1)], ids=str)
def test_every_pass_is_a_sign_of_life(model: str, layout: Layout) -> None:
    minimum = {"load": 12 * 4, "forward": 1, "forward and backward": 2, "step": 1}
    for seen in run_ranks(layout.size, signs, model, layout):
        assert seen.keys() == minimum.keys()
        for kind, counts in seen.items():
            assert all(after - before >= minimum[kind] for before, after in pairwise(counts)), (kind, counts)
