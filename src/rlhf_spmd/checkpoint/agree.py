"""Ranks succeed or fail together: outcomes travel as JSON over a group, and every rank raises the same error."""

from __future__ import annotations

import json
from typing import Any

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.parallel.collectives import Group

LABEL = "checkpoint"


def gather_json(group: Group, value: Any) -> list[Any] | None:
    """Every rank's value at group index 0, None elsewhere.

    Collective over the group: every rank of it must call, in program order.
    """
    parts = group.gather_bytes(json.dumps(value).encode(), LABEL)
    return None if parts is None else [json.loads(part) for part in parts]


def broadcast_json(group: Group, value: Any) -> Any:
    """Group index 0's value on every rank. Collective over the group: every rank of it must call, in program order."""
    payload = json.dumps(value).encode() if group.rank == 0 else None
    return json.loads(group.broadcast_bytes(payload, LABEL))


def broadcast_outcome(group: Group, value: Any, error: str | None) -> Any:
    """Group index 0's value, or its error raised as CheckpointError on every rank.

    Collective over the group: every rank of it must call, in program order.
    """
    value, error = broadcast_json(group, [value, error])
    if error:
        raise CheckpointError(error)
    return value


def first_error(group: Group, errors: list[str | None]) -> str | None:
    """The error of the lowest failing rank, named by its global rank, and how many more failed."""
    failed = [(group.ranks[i], error) for i, error in enumerate(errors) if error]
    if not failed:
        return None
    rank, error = failed[0]
    return f"rank {rank}: {error}" + (f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else "")
