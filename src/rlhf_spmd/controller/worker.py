"""Roles: the same object on every rank, whose registered methods are calls of the dataflow.

``@register`` turns a worker's method into a call: on every rank it takes references and returns one; on the role's members the
body runs on the rows that the protocol gives them. Proxy and worker are one class, so go-to-definition lands on what runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_spmd.controller.pool import GroupShape, ResourcePool
from rlhf_spmd.controller.protocols import Protocol, ProtocolRanks
from rlhf_spmd.controller.reference import PROMPT, CallRecord, Reference
from rlhf_spmd.data.batch import Batch

if TYPE_CHECKING:
    from rlhf_spmd.controller.controller import Controller

KINDS = ("generate", "infer", "train", "arithmetic", "control")
TOKENS = (PROMPT, "response_ids")


@dataclass(frozen=True)
class Stream:
    """What a call takes of one of its references. Inputs that end in ``?`` are sent if the reference has them. ``keep_groups``:
    rows of one group go to one member."""

    inputs: tuple[str, ...] = ()
    keep_groups: bool = True

    @functools.cached_property
    def _named(self) -> list[tuple[str, bool]]:
        """Each input, and whether it is optional."""
        return [(name.removesuffix("?"), name.endswith("?")) for name in dict.fromkeys(self.inputs)]

    def wanted(self, batch: Reference, call: str, unused: frozenset[str]) -> list[str]:
        """The inputs that this reference has. Raises ValueError if a required one is missing."""
        names = []
        for name, optional in self._named:
            if name in batch.fields:
                if not (optional and name in unused):
                    names.append(name)
            elif not optional:
                raise ValueError(f"{call} needs field {name!r}; the batch has {', '.join(sorted(batch.fields)) or 'none'}")
        return names


@dataclass(frozen=True)
class Signature:
    """One call, as its method describes it from its arguments: a stream for each reference, and what comes out.

    ``name``: of the call, in traces and metrics. Of training: ``mini_batch_size`` groups per optimizer step (None: all), and
    ``epochs`` over them.
    """

    name: str
    streams: tuple[Stream, ...]
    outputs: tuple[str, ...] = ()
    mini_batch_size: int | None = None
    epochs: int = 1


@dataclass(frozen=True)
class MethodSpec:
    """What ``@register`` declares."""

    name: str
    body: Callable[..., Any]
    kind: str
    protocol: Protocol
    lengths_of: str | None
    tokens: tuple[str, ...]
    describe: Callable[..., Signature]  # (worker, *arguments after the batch) -> what this call is
    known: Callable[[Any, Reference], Reference | None] | None = None
    streams: bool = False
    report: Callable[[Any, Batch, Batch | None, list[Any]], Any] | None = None


class Worker:
    """A role on a pool. Subclasses build their part of the model if :attr:`member`; elsewhere they are the description.

    ``twins``: method -> the same role on the pool and shape that calls of this method have for themselves. ``unused``: optional
    fields (declared with ``?``) that this role does not take, and ``absent`` those that it does not give. ``lenders``: ranks that send
    it weights for each call. All are the same on every rank.
    """

    unused: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    prefetches = False  # whether :meth:`prefetch` does anything
    lenders: tuple[int, ...] = ()
    hands_out = False  # whether its generate calls give rows to ``controller.handing_out`` as they end

    def __init__(self, controller: Controller, name: str, pool: ResourcePool, shape: GroupShape) -> None:
        assert shape.size == len(pool.ranks), f"{name}: layout of {shape.size} ranks on pool '{pool.name}' of {len(pool.ranks)}"
        self.controller = controller
        self.name = name
        self.pool = pool
        self.shape = shape
        self.twins: dict[str, Worker] = {}
        self.members: Callable[[Protocol], ProtocolRanks] = functools.cache(
            lambda one: ProtocolRanks(one, shape, pool, controller.speeds)
        )

    @property
    def member(self) -> bool:
        return self.controller.rank in self.pool.ranks

    def serving(self, method: str) -> Worker:
        """The worker that calls of ``method`` run on: this one or a twin."""
        return self.twins.get(method, self)

    def prefetch(self) -> None:
        """The call before this worker's next one on this rank begins: on members, where the trace foresaw both."""

    def begins_early(self, method: str) -> bool:
        """Whether calls of this method can begin on whole groups while others are generated, on the rank that generates: they
        need no model. The same on every rank."""
        return False

    def begin(self, rows: Batch, ranks: int) -> None:
        """Whole groups of the next call that :meth:`begins_early`, of which this rank takes the share of so many ``ranks``. Between the
        steps of generation: to return at once, as :meth:`go_on`, which is called after each of them."""

    def go_on(self) -> None:
        """With what was begun."""

    def drop(self) -> None:
        """What was begun: its call does not come."""

    def enter(self, call: CallRecord) -> None:
        """Before a call of this worker: called on every rank of the world, in program order."""

    def leave(self, call: CallRecord) -> None:
        """After it, likewise."""


def register(
    protocol: Protocol,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    *,
    kind: str = "infer",
    split_groups: bool = False,
    lengths_of: str | None = None,
    tokens: tuple[str, ...] = TOKENS,
    describe: Callable[..., Signature] | None = None,
    known: Callable[[Any, Reference], Reference | None] | None = None,
    streams: bool = False,
    report: Callable[[Any, Batch, Batch | None, list[Any]], Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Reference]]:
    """Make a method of a :class:`Worker` a call.

    The body gets the batch of its rows with the declared ``inputs`` (ordered by row) and returns a Batch with the declared
    ``outputs`` for the same rows, or a JSON-able value for :meth:`Controller.get`, or both as a tuple.

    ``kind``: generate (makes rows longer; it may return some of its rows only), infer (row by row, no change to the role), train
    (changes weights), arithmetic (no model), control (no rows). The body of a train call gets a list, for each optimizer step
    one batch per reference. ``split_groups``: rows of one group may lie on different ranks. ``lengths_of``: the output whose
    rows set new token counts. ``tokens``: the token fields whose lengths balance the rows over members, where a reference has
    them. ``describe(worker, *arguments)``: the :class:`Signature` of a call whose fields follow from its arguments.

    ``streams``: the body of an infer call may run several times, on some of the rows each, whole groups unless ``split_groups``.
    ``report(worker, batch, made, noted)``: the call's value, from all its rows, what the body made of them, and of each run what it
    returned beside its rows. A generate call may give rows that have ended to ``controller.handing_out``, where that is not None
    (``Worker.hands_out``).
    """
    assert kind in KINDS, f"kind {kind!r}: allowed are {', '.join(KINDS)}"

    def decorate(body: Callable[..., Any]) -> Callable[..., Reference]:
        name = body.__name__
        stream = Stream(inputs, not split_groups)

        @functools.cache
        def given(absent: frozenset[str], mini_batch_size: int | None, epochs: int) -> Signature:
            made = (o.removesuffix("?") for o in outputs if not (o.endswith("?") and o[:-1] in absent))
            return Signature(name, (stream,), tuple(made), mini_batch_size, epochs)

        def fixed(worker: Worker, *args: Any, mini_batch_size: int | None = None, epochs: int = 1, **kwargs: Any) -> Signature:
            return given(worker.absent, mini_batch_size, epochs)

        spec = MethodSpec(name, body, kind, protocol, lengths_of, tokens, describe or fixed, known, streams, report)

        @functools.wraps(body)
        def call(self: Worker, batch: Reference | Sequence[Any] | None = None, *args: Any, **kwargs: Any) -> Reference:
            found = known(self, batch) if known is not None and isinstance(batch, Reference) else None
            if found is not None:
                return found
            return self.controller.call(self.serving(name), spec, batch, args, kwargs, sys._getframe(1))

        call.spec = spec  # type: ignore[attr-defined]
        return call

    return decorate
