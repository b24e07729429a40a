"""Configurations from flat keys, as a file has them: ``clip_ratio`` for what is ``config.policy.clip_ratio`` in Python."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.schema import read_section

T = TypeVar("T")


def flat_config(schema: type[T], **knobs: Any) -> T:
    return read_section(schema, to_dict(knobs))


def with_knobs(config: T, **knobs: Any) -> T:
    """``config`` with other values of these keys."""
    return read_section(type(config), {**to_dict(config), **to_dict(knobs)})
