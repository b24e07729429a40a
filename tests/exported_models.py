"""What an exported directory computes in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_shards import rank_shards
from rlhf_spmd.checkpoint.save import RoleState, save_checkpoint
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout


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
    with torch.no_grad():
        return model(torch.arange(1, 11)[None]).logits
