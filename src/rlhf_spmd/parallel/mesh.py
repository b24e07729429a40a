"""A model's ranks as a mesh: the groups of one layout on one pool. No global mesh: a role carries its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.world import World


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's view of a layout on a pool. On ranks outside the pool ``index`` is -1 and the groups are solo groups.

    pp_rank, dp_rank, tp_rank: coordinates. Groups: ``tp``, ``dp``, ``pp``, ``pp_back`` (the stages again, for what travels
    backwards); ``replica`` (the pp * tp ranks of one replica), ``pool`` (all ranks), ``ends`` (first and last stage of this
    (dp, tp): tied embeddings), ``ring`` and ``ring_back`` (the same two, for what travels between them where vpp > 1).
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

    def dp_device_mesh(self) -> DeviceMesh:
        """The data-parallel axis as a DeviceMesh, which FSDP2 takes. Members only; no communication."""
        assert self.dp.process_group is not None
        return DeviceMesh.from_group(self.dp.process_group, self.device_type, mesh_dim_names=("dp",))


def build_group(world: World, pool: Sequence[int], members: Callable[[int], list[int]], name: str, channel: str = "") -> Group:
    """All groups that ``members`` (pool index -> pool indices) makes on a pool; returns this rank's.

    ``channel`` is that of :meth:`World.group`.
    Collective over the world: every rank of it must call, in program order.
    """
    mine = None
    for ranks in sorted({tuple(pool[i] for i in members(index)) for index in range(len(pool))}):
        mine = world.group(ranks, name, channel) or mine
    return mine or solo(world.rank)


def build_mesh(world: World, pool: Sequence[int], layout: Layout | GenerationLayout) -> Mesh:
    """Collective over the world: every rank of it must call, in program order, members or not. ``pool`` ascends."""
    index = list(pool).index(world.rank) if world.rank in pool else -1
    pp_rank, dp_rank, tp_rank = layout.coordinate(index) if index >= 0 else (-1, -1, -1)

    def dp_group(i: int) -> list[int]:
        pp, _, tp = layout.coordinate(i)
        # ascending, so in a generation mesh regrouped from several stages dp.rank is not dp_rank
        return sorted(layout.index(pp, dp, tp) for dp in range(layout.dp))

    def ends(i: int) -> list[int]:
        stages = layout.pp_group(i)
        return [stages[0], stages[-1]] if len(stages) > 1 else stages

    around = isinstance(layout, Layout) and layout.vpp > 1
    return Mesh(
        layout=layout,
        index=index,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        tp_rank=tp_rank,
        tp=build_group(world, pool, layout.tp_group, "tp"),
        dp=build_group(world, pool, dp_group, "dp"),
        pp=build_group(world, pool, layout.pp_group, "pp"),
        pp_back=build_group(world, pool, layout.pp_group, "pp_back", channel="back" if layout.pp > 1 else ""),
        replica=build_group(world, pool, lambda i: sorted(layout.replica_group(i)), "replica"),
        pool=build_group(world, pool, lambda i: list(range(len(pool))), "pool"),
        ends=build_group(world, pool, ends, "ends"),
        ring=build_group(world, pool, ends, "ring", channel="ring" if around else ""),
        ring_back=build_group(world, pool, ends, "ring_back", channel="ring_back" if around else ""),
        device_type=world.device.type,
    )
