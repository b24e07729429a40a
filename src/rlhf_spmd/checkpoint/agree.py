"""Ranks succeed or fail together: every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.parallel.collectives import Group

LABEL = "checkpoint"


def agree(group: Group, error: str | None, mine: Any, decide: Callable[[list[Any]], Any] = lambda everyone: None) -> Any:
    """What group index 0 decides by ``mine`` (JSON) of every rank, which is JSON too, on every rank. ``error``: why this rank failed.

    Collective over the group: every rank of it must call, in program order. Raises CheckpointError on every rank for the error of
    the lowest failing rank, named by its global rank, and else for one that ``decide`` raises.
    """
    outcomes, value = group.gather_json([error, mine], LABEL), None
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
