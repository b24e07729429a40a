"""A role's ranks as a mesh: the groups along the axes of its layout on its pool. No global mesh: a role carries its own.

To torch it is a ``DeviceMesh`` (:attr:`Mesh.device_mesh`), over the groups that are here (``from_group``). Its own constructor has
every rank of the world make the groups of every slice, whether it is in the pool or not (``new_group``, or on NCCL with a bound
device ``ncclCommSplit`` of the whole world), makes groups of one rank, connects all of them at once, and knows no second channel.
Here a rank makes the groups that it is in, when they first communicate, so ranks outside a pool have no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    pp_rank, dp_rank, tp_rank: coordinates. Groups: ``tp``, ``dp``, ``pp``, ``pp_back`` (the stages again, for what travels
    backwards); ``replica`` (the pp * tp ranks of one replica), ``pool`` (all ranks), ``ends`` (first and last stage of this
    (dp, tp): tied embeddings), ``ring`` and ``ring_back`` (the same two, for what travels between them where vpp > 1); the last
    three are solo on the stages between. Ranks of a group ascend, so in a generation mesh regrouped from several stages ``dp.rank``,
    the place in the group, is not ``dp_rank``, the coordinate.
    """

    layout: Layout | GenerationLayout
    index: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    tp: Group
    dp: Group
    pp: Group
    pp_back: Group
    replica: Group
    pool: Group
    ends: Group
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

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The axes that have more than one rank, by name. Members only. Collective over the pool, the first time: every rank of it
        must call, in program order."""
        shape = dict(zip(AXES, self.layout.ranks.shape, strict=True))
        groups = {
            axis: group.process_group for axis in AXES if shape[axis] > 1 and isinstance(group := getattr(self, axis), Group)
        }
        ranks = torch.tensor(self.pool.ranks)[torch.from_numpy(self.layout.ranks)].reshape([shape[axis] for axis in groups])
        return DeviceMesh.from_group([*groups.values()], self.device_type, ranks, mesh_dim_names=tuple(groups))


def build_mesh(world: World, pool: Sequence[int], layout: Layout | GenerationLayout) -> Mesh:
    """The mesh of a layout on the ranks of ``pool``, which ascend. Communicates nothing."""
    index = list(pool).index(world.rank) if world.rank in pool else -1

    def along(name: str, *axes: str, channel: str = "") -> Group:
        ranks = [pool[i] for i in layout.along(index, *axes)] if index >= 0 else []
        if name in ("ends", "ring", "ring_back"):
            ranks = sorted({*ranks[:1], *ranks[-1:]})
        return world.group(sorted(ranks), name, channel) or solo(world.rank)

    return Mesh(
        layout,
        index,
        *(layout.coordinate(index) if index >= 0 else (-1, -1, -1)),
        tp=along("tp", "tp"),
        dp=along("dp", "dp"),
        pp=along("pp", "pp"),
        pp_back=along("pp_back", "pp", channel="back"),
        replica=along("replica", "pp", "tp"),
        pool=along("pool", *AXES),
        ends=along("ends", "pp"),
        ring=along("ring", "pp", channel="ring"),
        ring_back=along("ring_back", "pp", channel="ring_back"),
        device_type=world.device.type,
    )
