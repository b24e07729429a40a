"""Checkpoints that are written at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.checkpoint.save import RoleState, prepare_checkpoint
from rlhf_spmd.parallel.collectives import Group


def save_checkpoint(
    run_dir: Path, step: int, roles: Mapping[str, RoleState], state: Mapping[str, Any], group: Group, *more: Any, **options: Any
) -> Path:
    return prepare_checkpoint(run_dir, step, roles, state, group, *more, **options).write(group)
