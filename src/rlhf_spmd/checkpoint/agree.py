"""Ranks succeed or fail together: every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.parallel.collectives import Group

LABEL = "checkpoint"


def agree(group: Group, work: Callable[[], Any], decide: Callable[[list[Any]], Any] = lambda everyone: None) -> Any:
    """``work`` on every rank, and what group index 0 decides by the values of all, as JSON both, on every rank.

    Collective over the group: every rank of it must call, in program order. Where ``work`` or ``decide`` raises a CheckpointError,
    every rank does: of ranks whose work fails that of the lowest one, named by its global rank.
    """
    mine = error = value = None
    try:
        mine = work()
    except CheckpointError as failure:
        error = str(failure)
    outcomes = group.gather_json([error, mine], LABEL)
    if outcomes is not None:
        failed = [(rank, error) for rank, (error, _) in zip(group.ranks, outcomes, strict=True) if error]
        if failed:
            more = f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
            error = f"rank {failed[0][0]}: {failed[0][1]}{more}"
        else:
            try:
                value = decide([part for _, part in outcomes])
            except CheckpointError as failure:
                error = str(failure)
    value, error = group.broadcast_json([value, error], LABEL)
    if error:
        raise CheckpointError(error)
    return value
