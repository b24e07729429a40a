"""Roles: the same object on every rank, whose registered methods are calls of the dataflow.

``@register`` turns a worker's method into a call: on every rank it takes references and returns one; on the role's members the
body runs on the rows that the protocol gives them. Proxy and worker are one class, so go-to-definition lands on what runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_spmd.controller.pool import GroupShape, ResourcePool
from rlhf_spmd.controller.protocols import Members, Protocol
from rlhf_spmd.controller.reference import Reference

if TYPE_CHECKING:
    from rlhf_spmd.controller.controller import Controller


@dataclass(frozen=True)
class MethodSpec:
    """What ``@register`` declares. Input fields that end in ``?`` are sent if the reference has them, and outputs given, unless the
    role has no use for them (:attr:`Worker.unused`)."""

    name: str
    body: Callable[..., Any]
    protocol: Protocol
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    split_groups: bool
    lengths_of: str | None
    mini_batches: Callable[[Any], int] | None

    def given(self, role: Worker) -> tuple[str, ...]:
        """The outputs of this role's calls."""
        return tuple(name.removesuffix("?") for name in self.outputs if not (name.endswith("?") and name[:-1] in role.unused))

    def wanted(self, batch: Reference, call: str, role: Worker) -> list[str]:
        """The declared inputs that this reference has. Raises ValueError if a required one is missing."""
        names = []
        for name in self.inputs:
            optional, name = name.endswith("?"), name.removesuffix("?")
            if optional and name in role.unused:
                continue
            if name in batch:
                names.append(name)
            elif not optional:
                raise ValueError(f"{call} needs field {name!r}; the batch has {', '.join(sorted(batch.fields)) or 'none'}")
        return names


class Worker:
    """A role on a pool. Subclasses build their part of the model if :attr:`member`; elsewhere they are the description.

    ``twins``: method -> the same role on the pool and shape that calls of this method have for themselves. ``companions``:
    further methods that a method's twin serves, as theirs -> that method. ``unused``: optional fields (declared with ``?``) that
    this role neither takes nor gives, the same on every rank.
    """

    companions: ClassVar[Mapping[str, str]] = {}
    unused: frozenset[str] = frozenset()

    def __init__(self, controller: Controller, name: str, pool: ResourcePool, shape: GroupShape) -> None:
        assert shape.size == len(pool.ranks), f"{name}: layout of {shape.size} ranks on pool '{pool.name}' of {len(pool.ranks)}"
        self.controller = controller
        self.name = name
        self.pool = pool
        self.shape = shape
        self.twins: dict[str, Worker] = {}
        self.members: Callable[[Protocol], Members] = functools.cache(lambda protocol: Members(protocol, shape, pool))

    @property
    def member(self) -> bool:
        return self.controller.rank in self.pool.ranks

    def serving(self, method: str) -> Worker:
        """The worker that calls of ``method`` run on: this one or a twin."""
        return self.twins.get(self.companions.get(method, method), self)

    def enter(self, spec: MethodSpec, args: Sequence[Any]) -> None:
        """Before a call of this worker: called on every rank of the world, in program order. ``args``: those after the rows."""

    def leave(self) -> None:
        """After it, likewise."""


def register(
    protocol: Protocol,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    *,
    split_groups: bool = False,
    lengths_of: str | None = None,
    mini_batches: Callable[[Any], int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Reference]]:
    """Make a method of a :class:`Worker` a call.

    The body gets the batch of its rows with the declared ``inputs`` (ordered by row) and returns a Batch with the declared
    ``outputs`` for the same rows, or a JSON-able value for :meth:`Controller.get`, or both as a tuple.
    ``split_groups``: rows of one prompt group may lie on different ranks. ``lengths_of``: the output whose rows set new token
    counts. ``mini_batches(worker)``: the rows are cut into that many equal runs, each balanced over the ranks; the body gets
    one batch for each, as a list.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Reference]:
        spec = MethodSpec(body.__name__, body, protocol, inputs, outputs, split_groups, lengths_of, mini_batches)

        @functools.wraps(body)
        def call(self: Worker, batch: Reference | None = None, *args: Any, **kwargs: Any) -> Reference:
            return self.controller.call(self.serving(spec.name), spec, batch, args, kwargs, sys._getframe(1))

        call.spec = spec  # type: ignore[attr-defined]
        return call

    return decorate
