"""The shards of a model on a training rank, and with which ranks it shares each of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard, zero_shards
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.zero import stage_of_zero

T = TypeVar("T")


def named_by_chunk(parts: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Return the chunks' dictionaries as one, by parameter name. With several chunks, names get the prefix ``chunks.<i>.``."""
    prefixes = [f"chunks.{i}." for i in range(len(parts))] if len(parts) > 1 else [""]
    return {prefix + name: x for prefix, part in zip(prefixes, parts, strict=True) for name, x in part.items()}


def chunk_shards(
    spec: ModelSpec, head: str, layout: Layout, pp_rank: int, tp_rank: int, lora: LoraConfig | None = None
) -> list[dict[str, ParamShard]]:
    """Return for each chunk of layers: parameter name -> shape and boxes on the rank at (pp_rank, tp_rank).

    That is before ZeRO cuts out the rank's rows and ep its experts.
    """
    num_stages = layout.pp * layout.vpp
    plan = partial(plan_params, lora=lora, expert_parallel_generation=layout.expert_parallel_generation)
    return [plan(spec, head, stage, num_stages, tp_rank, layout.tp) for stage in layout.stages(pp_rank)]


def rank_shards(
    spec: ModelSpec, head: str, layout: Layout, pp_rank: int, tp_rank: int, lora: LoraConfig | None = None
) -> dict[str, ParamShard]:
    """Return the :func:`chunk_shards` of all chunks by parameter name."""
    return named_by_chunk(chunk_shards(spec, head, layout, pp_rank, tp_rank, lora))


def zero_part(plan: Mapping[str, ParamShard], mesh: Mesh) -> dict[str, ParamShard]:
    """Return the plan, restricted to the rows that ZeRO and ep leave on this rank."""
    assert isinstance(mesh.layout, Layout)
    zero = (mesh.dp_shard.rank, mesh.dp_shard.size) if stage_of_zero(mesh.layout) else (0, 1)
    return zero_shards(plan, *zero, ep=(mesh.ep.rank, mesh.ep.size))


def replica_groups(
    grads: Mapping[str, Tensor], shards: Mapping[str, ParamShard], mesh: Mesh
) -> list[tuple[Group, dict[str, Tensor]]]:
    """Return the gradients, each beside the group whose ranks hold the same rows of it."""
    by_expert = {name for name in grads if shards[name].by_expert} if mesh.ep.size > 1 else set[str]()
    names_by_group = (mesh.dp_replicate, grads.keys() - by_expert), (mesh.ep_copies, by_expert)
    return [(group, {name: grad for name, grad in grads.items() if name in names}) for group, names in names_by_group if names]
