"""The experts that generated rows took, for updates that take the same ones.

Every forward pass writes its tokens' experts beside the pages, at the slots of their keys. Whatever shares, copies or keeps pages so
has them too. A row collects those of its tokens when it leaves its pages, and at the end of a call.

A token whose keys are computed again keeps the experts that it had first, because with these the tokens after it were drawn: after a
preemption or a move to another replica, and when a row goes on with other weights.

Shape legend: T tokens of a step, N pages, M mixtures of this stage, K experts of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.kernels import Ops, RoutingRule, on_device
from rlhf_spmd.kernels.devices import HostCopy
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.router_balance import mixture_numbers
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.collectives import Group


def no_experts(spec: ModelSpec) -> Tensor:
    """Return the experts of no token, [0, mixtures of the model, K]."""
    assert spec.experts is not None, f"models of {spec.family} have no experts"
    return torch.empty(0, len(mixture_numbers(spec)), spec.experts.experts_per_token, dtype=spec.experts.number_dtype)


class ExpertPages:
    """The experts that the tokens in the cache's pages took: ``values`` [N, page_size, M, K], uint8 or int16, zeros at first.

    ``columns``: the numbers of this stage's M mixtures among all mixtures of the model. ``none``: :func:`no_experts`.
    """

    def __init__(self, decoder: Decoder, num_pages: int, page_size: int, device: torch.device) -> None:
        self.none = no_experts(decoder.spec)
        numbers = mixture_numbers(decoder.spec)
        self.columns = [numbers[layer] for layer in decoder.layer_ids if layer in numbers]
        shape = num_pages, page_size, len(self.columns), self.none.shape[2]
        self.values = torch.zeros(shape, dtype=self.none.dtype, device=device)

    @staticmethod
    def token_bytes(decoder: Decoder) -> int:
        """Return the bytes of one token on this rank."""
        none = no_experts(decoder.spec)
        numbers = mixture_numbers(decoder.spec)
        return sum(layer in numbers for layer in decoder.layer_ids) * none.shape[2] * none.itemsize

    def of_step(self, cache_slots: Tensor) -> StepRouters:
        """Return what the routers of a forward pass choose through. ``cache_slots`` int64 [T]: the slots of its tokens."""
        return StepRouters(self.values.flatten(0, 1), cache_slots)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy pages, int64 [n] each. No page is both source and destination."""
        self.values[destination] = self.values[source]

    def of_row(self, row: SequenceState, first: int, last: int) -> Tensor:
        """Return the experts of the row's tokens ``first`` .. ``last`` - 1, [last - first, M, K], on the device."""
        size = self.values.shape[1]
        begin = first // size
        pages = on_device(torch.tensor(row.pages[begin : -(-last // size)]), self.values.device)
        return self.values.index_select(0, pages).flatten(0, 1)[first - begin * size : last - begin * size]

    def offload(self, used_pages: Sequence[int]) -> None:
        """Free the memory, also that of used pages: between two calls the rows have all experts themselves."""
        self._shape = self.values.shape
        self.values = self.values.new_empty(0)

    def reload(self) -> None:
        """Allocate the memory again, after :meth:`offload`."""
        self.values = self.values.new_zeros(self._shape)


class StepRouters:
    """The routers of one forward pass, and what they choose. ``values`` [slots of all pages, M, K]."""

    def __init__(self, values: Tensor, cache_slots: Tensor) -> None:
        self._values = values
        self._cache_slots = cache_slots
        self._chosen = list[Tensor]()

    def route(
        self, ops: Ops, layer: int, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return weights and experts as ``Ops.route`` does. Layers come in their order."""
        weights, chosen = ops.route(logits, score_bias, rule, dtype)
        self._chosen.append(chosen)
        return weights, chosen

    def write(self) -> None:
        """Write what the tokens have chosen to their slots: three launches for all layers. The rows behind them are padding."""
        if self._chosen:
            chosen = torch.stack(self._chosen, 1)[: len(self._cache_slots)]
            self._values.index_copy_(0, self._cache_slots, chosen.to(self._values.dtype))


class RowExperts:
    """The experts of a call's rows, on this stage: those that ``pages`` had when a row left them."""

    def __init__(self, pages: ExpertPages) -> None:
        self._pages = pages
        self._none = pages.none[:, pages.columns]
        self._collected: dict[SequenceState, list[Tensor]] = {}
        self._in_flight = deque[tuple[SequenceState, HostCopy]]()  # in pinned memory, which must be free for further copies
        self._num_collected: dict[SequenceState, int] = {}  # tokens, with those of earlier calls

    def collect(self, row: SequenceState) -> None:
        """Take from the pages the experts of the row's computed tokens, but for those that are taken already."""
        first = self._num_collected.get(row, 0 if row.experts is None else len(row.experts))
        if row.pages and row.num_computed > first:
            self._in_flight.append((row, HostCopy(self._pages.of_row(row, first, row.num_computed))))
            self._num_collected[row] = row.num_computed
        while self._in_flight and self._in_flight[0][1].has_ended:
            self._take()

    def _take(self) -> None:
        row, copy = self._in_flight.popleft()
        self._collected.setdefault(row, []).append(copy.values().clone())

    def forget(self, row: SequenceState) -> None:
        """Drop what is collected of a row that begins again."""
        self._new(row)  # what is on its way
        self._collected.pop(row, None)
        self._num_collected.pop(row, None)

    def of_ended(self, row: SequenceState) -> Tensor:
        """Return ``Completion.experts`` of an ended row of this call, where this stage has all mixtures."""
        return self._of_all_tokens(row, self._new(row))

    def finish(self, rows: Iterable[SequenceState], pp: Group) -> None:
        """Give each row the experts that this call has collected, of all mixtures.

        Collective over pp: every rank of it must call, in program order.
        """
        rows = list(rows)
        new = [self._new(row) for row in rows]
        counts = [len(experts) for experts in new]
        values = torch.cat([self._none, *new])
        if pp.size > 1 and len(values):
            local = values
            values = values.new_zeros(len(values), *self._pages.none.shape[1:])
            values[:, self._pages.columns] = local
            pp.all_reduce(values.view(torch.uint8), "generation:experts")
        for row, part in zip(rows, values.split(counts), strict=True):
            row.experts = self._of_all_tokens(row, part) if row.ended else _joined(row.experts, part)

    def _new(self, row: SequenceState) -> Tensor:
        while any(other is row for other, _ in self._in_flight):
            self._take()
        return torch.cat([self._none, *self._collected.get(row, ())])

    def _of_all_tokens(self, row: SequenceState, part: Tensor) -> Tensor:
        """Return one entry per token of the ended ``row``. The last token was never computed; it repeats the entry before it."""
        computed = _joined(row.experts, part)[: row.length - 1]
        last = computed[-1:] if len(computed) else torch.arange(part.shape[2], dtype=part.dtype).expand(1, *part.shape[1:])
        return torch.cat([computed, last.expand(row.length - len(computed), -1, -1)])


def _joined(before: Tensor | None, part: Tensor) -> Tensor:
    return part if before is None else torch.cat([before, part])
