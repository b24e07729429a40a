"""Roles: the same object on every rank, whose registered methods are calls of the dataflow.

``@register`` turns a worker's method into a call. On every rank the method takes references and returns one. On members of the role,
the ranks of its pool, the body runs on the rows that the protocol gives them. Proxy and worker are one class: a call's body
stands where the call is declared.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_spmd.controller.call import Role
from rlhf_spmd.controller.controller import Controller
from rlhf_spmd.controller.protocols import GroupShape, Protocol, ResourcePool
from rlhf_spmd.controller.reference import Reference
from rlhf_spmd.controller.signature import KINDS, TOKENS, InputSpec, MethodSpec, Signature
from rlhf_spmd.data.batch import Batch


class Worker(Role):
    """A role on a pool. Subclasses build their part of the model if :attr:`member`; on other ranks they only describe the role.

    ``method_workers``: method -> the worker that runs its calls on another pool (``models.<role>.calls``). Same on every rank.
    """

    def __init__(self, controller: Controller, name: str, pool: ResourcePool, shape: GroupShape) -> None:
        super().__init__(name, pool, shape, controller.speeds)
        self.controller = controller
        self.method_workers: dict[str, Worker] = {}

    @property
    def member(self) -> bool:
        return self.controller.rank in self.pool.ranks

    def worker_of(self, method: str) -> Worker:
        """Return the worker that runs calls of ``method``: this one, or the method's own."""
        return self.method_workers.get(method, self)

    def close(self) -> None:
        """End the processes that this role has started on this rank. Called once, at the end of the run. Local."""
        for worker in self.method_workers.values():
            worker.close()


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

    The body gets a batch of its rows with the declared ``inputs``, ordered by row id; a trailing ``?`` marks a field as optional.
    It returns a Batch with the declared ``outputs`` for the same rows, or a JSON value for :meth:`Controller.get`, or both as a
    tuple. The body of a train call gets a list instead: for each optimizer step one batch per reference. The body of a generate call
    may send rows before all have ended, by ``controller.rollout_streamer`` if that is not None (:attr:`Role.streams_rollouts`).

    - kind: "generate" (extends rows; may return only some of them), "infer" (row by row; does not change the role), "train"
      (changes weights), "compute" (no model) or "control" (no rows)
    - split_groups: rows of one group may go to different ranks
    - lengths_of: the output that is a new token field, such as the responses; its lengths balance the rows of later calls
    - tokens: the token fields whose lengths balance the rows over members, if a reference has them
    - describe(worker, *arguments): the :class:`Signature` of a call whose fields depend on its arguments
    - known(worker, reference): a reference to the result, if it exists already; None makes the call
    - streams: the body of an infer call may run several times, each time on some rows (whole groups unless ``split_groups``)
    - report(worker, batch, result, notes): the call's value, from all its rows, what the body made of them, and what each run of the
      body returned beside its rows
    """
    assert kind in KINDS, f"kind {kind!r}: allowed are {', '.join(KINDS)}"

    def decorate(body: Callable[..., Any]) -> Callable[..., Reference]:
        method = body.__name__
        input_spec = InputSpec(inputs, not split_groups)

        @functools.cache
        def signature(omitted: frozenset[str], mini_batch_size: int | None, epochs: int) -> Signature:
            fields = (name.removesuffix("?") for name in outputs if not (name.endswith("?") and name[:-1] in omitted))
            return Signature(method, (input_spec,), tuple(fields), mini_batch_size, epochs)

        def fixed(worker: Worker, *args: Any, mini_batch_size: int | None = None, epochs: int = 1, **kwargs: Any) -> Signature:
            return signature(worker.omitted_outputs, mini_batch_size, epochs)

        spec = MethodSpec(method, body, kind, protocol, lengths_of, tokens, describe or fixed, streams, report)

        @functools.wraps(body)
        def call(self: Worker, batch: Reference | Sequence[Any] | None = None, *args: Any, **kwargs: Any) -> Reference:
            existing_result = known(self, batch) if known is not None and isinstance(batch, Reference) else None
            if existing_result is not None:
                return existing_result
            return self.controller.call(self.worker_of(method), spec, batch, args, kwargs, sys._getframe(1))

        call.spec = spec  # type: ignore[attr-defined]
        return call

    return decorate
