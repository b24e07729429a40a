"""A step's dataflow before there is a process group: the algorithm's own script, traced by a rank that is in no pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rlhf_spmd.controller import Controller, Graph
from rlhf_spmd.parallel.world import Launch, World, connect_store
from rlhf_spmd.runtime.roles import RolePlan, build_models
from rlhf_spmd.runtime.streams import Data
from rlhf_spmd.workers import Build


def trace_step(
    script: Callable[[Any, Data, int], Any],
    plans: Mapping[str, RolePlan],
    build: Callable[[Controller, World], Build],
    data: Callable[[Controller], Data],
    last: int,
) -> Graph:
    """The calls of step ``last``, or of the one before if it makes more different ones, on the pools of ``plans``, of any size.
    ``script(models, data, number)``; ``data``: streams of their own, so that those of the run stay where they are. Roles are
    descriptions, as on ranks outside their pools.

    The step before is traced first: a script may keep rows for the next one. Local: no communication, no weights, no device.
    """
    pools = [pool for plan in plans.values() for pool in (plan.pool, *(call.pool for call in plan.calls.values()))]
    size = 1 + max(pool.ranks[-1] for pool in pools)
    world = World(Launch(rank=size, size=size + 1), torch.device("cpu"), connect_store(Launch()), timeout_s=1.0)
    controller = Controller(world.all)
    models, rows = build_models(plans, build(controller, world)), data(controller)
    graphs = [rows.trace(partial(script, models, rows, number)) for number in (max(last - 1, 1), last)]
    return max(reversed(graphs), key=lambda graph: len({call.name for call in graph.nodes}))
