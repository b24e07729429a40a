"""What a run would save, without a run: shards of every rank of a layout, a checkpoint of them; and one wrong bit in a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from checkpoints import save_checkpoint
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.models.file_forms import find_tensor
from rlhf_spmd.models.sharding import plan_params, tensor_shapes
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import StoredModel, read_spec
from rlhf_spmd.parallel.boxes import ParamShard, shard_rows, zero_rows
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout


def rank_shards(spec: ModelSpec, head: str, layout: Layout, index: int) -> dict[str, ParamShard]:
    pp, dp, _, tp = layout.coordinate(index)
    shards = plan_params(spec, head, pp, layout.pp, tp, layout.tp)
    if layout.zero:
        at, of = dp % layout.dp_shard, layout.dp_shard
        shards = {name: shard_rows(s, *zero_rows(s.shape[0], at, of)) for name, s in shards.items()}
    return shards


def flip_bit(path: Path, offset_from_end: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 4
    path.write_bytes(data)


def model_tensors(source: Path) -> dict[str, Tensor]:
    """The tensors of a model's directory as boxes have them."""
    spec = read_spec(source)
    with ExitStack() as stack:
        stored = StoredModel(source, spec, stack)
        return {name: find_tensor(stored, name, shape, False)[:] for name, shape in tensor_shapes(spec, "lm").items()}


def checkpoint_of(values: Mapping[str, Tensor], source: Path, run_dir: Path, head: str) -> Path:
    """The checkpoint that a run would write: one rank plays all four of a tp 2, pp 2 layout under different parameter names."""
    shards, tensors = {}, {}
    layout = Layout(pp=2, tp=2)
    for index in range(layout.size):
        for name, shard in rank_shards(read_spec(source), head, layout, index).items():
            tensor = torch.empty(shard.shape)
            for box in shard.boxes:
                tensor[box.local_slices] = values[box.name][box.global_slices]
            shards[f"{index}.{name}"], tensors[f"{index}.{name}"] = shard, tensor
    return save_checkpoint(run_dir, 1, {"actor": RoleState(shards, tensors)}, {}, solo())


def logits(model: torch.nn.Module) -> Tensor:
    """Of ten tokens, by a model of transformers."""
    with torch.no_grad():
        return model(torch.arange(1, 11)[None]).logits
