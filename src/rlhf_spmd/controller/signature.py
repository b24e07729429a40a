"""What a method takes and makes, as ``@register`` and the arguments of a call describe it: fields, kind, protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_spmd.controller.protocols import Protocol
from rlhf_spmd.data.batch import Batch

KINDS = ("generate", "infer", "train", "compute", "control")
PROMPT = "prompt_ids"  # the field that the rows of a group share
TOKENS = (PROMPT, "response_ids")


@dataclass(frozen=True)
class InputSpec:
    """The fields that a call takes from one of its references. A name that ends in ``?`` is optional.

    ``keep_groups``: all rows of a group go to the same member.
    """

    fields: tuple[str, ...] = ()
    keep_groups: bool = True

    @cached_property
    def _named(self) -> list[tuple[str, bool]]:
        """Return each field, and whether it is optional."""
        return [(name.removesuffix("?"), name.endswith("?")) for name in dict.fromkeys(self.fields)]

    def fields_to_take(self, available: Collection[str], call: str, ignored: frozenset[str]) -> list[str]:
        """Return the ``available`` fields, without optional ones in ``ignored``. Raises ValueError if one is missing."""
        names = []
        for name, optional in self._named:
            if name in available:
                if not (optional and name in ignored):
                    names.append(name)
            elif not optional:
                raise ValueError(f"{call} needs field {name!r}; the batch has {', '.join(sorted(available)) or 'none'}")
        return names


@dataclass(frozen=True)
class Signature:
    """What one call takes and makes: an :class:`InputSpec` for each reference, and the fields of its result.

    ``name`` identifies the call in traces and metrics. A train call makes one optimizer step per ``mini_batch_size`` groups (None:
    one step with all groups), ``epochs`` times over all rows.
    """

    name: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...] = ()
    mini_batch_size: int | None = None
    epochs: int = 1


@dataclass(frozen=True)
class MethodSpec:
    """What ``@register`` declares about a method; see there."""

    name: str
    body: Callable[..., Any]
    kind: str
    protocol: Protocol
    lengths_of: str | None
    tokens: tuple[str, ...]
    describe: Callable[..., Signature]  # (worker, *arguments after the batch) -> the signature of this call
    streams: bool = False
    report: Callable[[Any, Batch, Batch | None, list[Any]], Any] | None = None
