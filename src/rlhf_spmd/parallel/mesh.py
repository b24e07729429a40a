"""A role's ranks as a mesh: the groups along the axes of its layout on its pool. There is no global mesh; each role has its own.

:attr:`Mesh.device_mesh` is torch's ``DeviceMesh`` over these groups (``from_group``). Torch's own constructor would have every rank of
the world make the groups of every slice, in the pool or not (``new_group``, or on NCCL with a bound device ``ncclCommSplit`` of the
whole world). It also makes groups of one rank, connects all groups at once, and has no second channel. Here a rank makes only its own
groups, when they first communicate, so ranks outside a pool take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.layout import AXES, GenerationLayout, Layout
from rlhf_spmd.parallel.world import World


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's view of a layout on a pool. On ranks outside the pool ``index`` is -1 and the groups are solo groups.

    ``pp_rank``, ``dp_rank``, ``cp_rank``, ``tp_rank``: coordinates. ``member``: True on ranks of the pool. Groups:

    - ``tp``; ``dp``; ``cp``, the ranks that share the tokens of the same rows.
    - ``copies``: the dp * cp ranks with the same stage and slice. In it ``dp_shard`` (ranks that share one copy of what ZeRO shards)
      and ``dp_replicate`` (ranks that hold the same part as this one); ``ep`` (ranks that share the experts) and ``ep_copies`` (ranks
      with the same experts).
    - ``pp``, and ``pp_back`` for what goes backwards between the stages.
    - ``replica``: the pp * tp ranks of one copy. ``pool``: all ranks.
    - ``first_last_group``: first and last stage of this (dp, tp), for tied embeddings; ``ring``, ``ring_back``: the same two ranks, for
      what goes between them if vpp > 1. These three are solo groups on the stages between.

    The ranks of a group ascend. So in a generation mesh regrouped from several stages, ``dp.rank``, the index in the group, may differ
    from ``dp_rank``, the coordinate.
    """

    layout: Layout | GenerationLayout
    index: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int
    tp: Group
    dp: Group
    cp: Group
    copies: Group
    dp_shard: Group
    dp_replicate: Group
    ep: Group
    ep_copies: Group
    pp: Group
    pp_back: Group
    replica: Group
    pool: Group
    first_last_group: Group
    ring: Group
    ring_back: Group
    device_type: str

    @property
    def member(self) -> bool:
        return self.index >= 0

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def copies_axis(self) -> str:
        """The name in :attr:`device_mesh` of the axis of all ranks with the same stage and slice."""
        return "dp" if self.cp.size == 1 else "copies"

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of the axes with more than one rank: ``pp``, :attr:`copies_axis`, ``tp``. If ZeRO shards over a part of the
        copies: ``dp_replicate``, ``dp_shard``.

        Collective over the pool, the first time: every rank of it must call, in program order.
        """
        pp, dp, cp, tp = self.layout.ranks.shape
        shard = self.layout.dp_shard
        shape = {"pp": pp, self.copies_axis: dp * cp, "tp": tp}
        if 1 < shard < dp * cp:
            shape = {"pp": pp, "dp_replicate": dp * cp // shard, "dp_shard": shard, "tp": tp}
        shape = {axis: size for axis, size in shape.items() if size > 1}
        groups = {axis: group.process_group for axis in shape if isinstance(group := getattr(self, axis), Group)}
        ranks = torch.tensor(self.pool.ranks)[torch.from_numpy(self.layout.ranks)].reshape(list(shape.values()))
        return DeviceMesh.from_group([*groups.values()], self.device_type, ranks, mesh_dim_names=tuple(groups))


def build_mesh(world: World, pool: Sequence[int], layout: Layout | GenerationLayout) -> Mesh:
    """Return the mesh of a layout on the ranks of ``pool``, which ascend. Communicates nothing."""
    index = list(pool).index(world.rank) if world.rank in pool else -1

    def group(name: str, members: Callable[[int], list[int]], channel: str = "") -> Group:
        ranks = [pool[i] for i in members(index)] if index >= 0 else []
        return world.group(sorted(ranks), name, channel) or solo(world.rank)

    def along(name: str, *axes: str, channel: str = "") -> Group:
        return group(name, lambda member: layout.along(member, *axes), channel)

    def first_last(name: str, channel: str = "") -> Group:
        return group(name, lambda member: sorted({(stages := layout.along(member, "pp"))[0], stages[-1]}), channel)

    return Mesh(
        layout,
        index,
        *(layout.coordinate(index) if index >= 0 else (-1, -1, -1, -1)),
        tp=along("tp", "tp"),
        dp=along("dp", "dp"),
        cp=along("cp", "cp"),
        copies=along("copies", "dp", "cp"),
        dp_shard=group("dp_shard", layout.shard_group),
        dp_replicate=group("dp_replicate", layout.same_shard_group),
        ep=group("ep", layout.ep_group),
        ep_copies=group("ep_copies", layout.expert_copies),
        pp=along("pp", "pp"),
        pp_back=along("pp_back", "pp", channel="back"),
        replica=along("replica", "pp", "tp"),
        pool=along("pool", *AXES),
        first_last_group=first_last("first_last"),
        ring=first_last("ring", "ring"),
        ring_back=first_last("ring_back", "ring_back"),
        device_type=world.device.type,
    )
