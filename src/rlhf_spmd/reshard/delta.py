"""Weights for ranks that hold an earlier version: only elements whose bits have changed are sent. Pure.

A message has all elements, or only the changed ones with their positions, as a list (int32) or a mask (one bit per element): whichever
is smallest. Both ends know which from the number of changed elements, which the first step of a transfer sends. Bits are compared, not
values, so the receiver has exactly what the sender has: -0.0 after 0.0, and any nan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_spmd.reshard.bucketing import TransferMessage, TransferStep
from rlhf_spmd.reshard.plan import ParamSlice

HEADER = 0  # number of the step that sends the counts
SPREAD_BITS = 0x0102040810204080  # multiplied by eight bytes of 0 or 1 as one number: byte i becomes bit i of the highest byte

ParamSlices = tuple[ParamSlice, ...]


class Delta:
    """The state of repeated transfers by one plan, from the same sources into the same targets, whose values stay in between.

    ``sent``: the flat values that the receivers of each message hold. They cost a sender as many bytes as a full transfer sends, once
    for all receivers of equal parts. Before the first transfer, which sends everything, there are none, on all ranks alike.
    """

    def __init__(self) -> None:
        self.has_sent = False
        self.sent: dict[ParamSlices, Tensor] = {}

    def begin(self, steps: Sequence[TransferStep], sources: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Copy what the first transfer sends: the sources' values."""
        self.has_sent = True
        for message in (message for step in steps for message in step.messages if message.sends):
            if message.parts not in self.sent:
                self.sent[message.parts] = flat(sources, message.parts).to(dtype, copy=True)


class DeltaTransfer:
    """A transfer of changes, in place of ``steps``, each of which has at most one message per direction.

    ``sources``, ``targets``: the tensors by name, and while they are in flight the counts and encoded messages, under the names of
    :func:`_counts_name` and :func:`_message_name`. ``limit``: bytes that steps hold at a time. :class:`Transfer` calls
    ``before_step`` and ``after_step``.
    """

    def __init__(
        self,
        delta: Delta,
        steps: Sequence[TransferStep],
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        dtype: torch.dtype,
        limit: int,
    ) -> None:
        self.steps = steps
        self.num_steps = len(steps) + 1
        self.sources, self.targets = dict(sources), dict(targets)
        self._delta = delta
        self._dtype, self._limit = dtype, limit
        self._counts: dict[tuple[int, bool], int] = {}  # (step, whether it sends) -> elements of its message that have changed
        self._pairs: dict[tuple[bool, int], list[int]] = {}  # (sends, peer) -> steps; in the order of the steps on all ranks
        for number, step in enumerate(steps, 1):
            for message, (_, peer) in zip(step.messages, step.transfers, strict=True):
                self._pairs.setdefault((message.sends, peer), []).append(number)

    def step(self, number: int) -> TransferStep:
        if number == HEADER:
            messages = []
            for (sends, peer), numbers in self._pairs.items():
                messages.append(TransferMessage(sends, _flat_parts(_counts_name(peer), len(numbers)), None))
            transfers = [(i, peer) for i, (_, peer) in enumerate(self._pairs)]
            # nothing else starts before it has ended: until then the other sizes are unknown
            return TransferStep(messages, transfers, temporary_elements=self._limit + 1)
        step = self.steps[number - 1]
        if not step.messages:
            return step
        messages, transfers = [], []
        for message, (_, peer) in zip(step.messages, step.transfers, strict=True):
            if size := self._size(number, message):
                transfers.append((len(messages), peer))
                messages.append(TransferMessage(message.sends, _flat_parts(_message_name(number), size), None))
        return TransferStep(messages, transfers, temporary_elements=sum(message.numel for message in messages))

    def before_step(self, number: int) -> None:
        """Encode what a step sends, and allocate what it receives."""
        if number == HEADER:
            device = next((tensor.device for tensor in (*self.sources.values(), *self.targets.values())), None)
            for (sends, peer), numbers in self._pairs.items():
                if sends:
                    self.sources[_counts_name(peer)] = self._count_changes(numbers)
                    self._note_counts(sends, numbers, self.sources[_counts_name(peer)])
                else:
                    self.targets[_counts_name(peer)] = torch.zeros(len(numbers), dtype=torch.int64, device=device)
            return
        for message in self.steps[number - 1].messages:
            size = self._size(number, message)
            if size and message.sends:
                current, before = self._current(message.parts), self._delta.sent[message.parts]
                self.sources[_message_name(number)] = encode(current, before, self._counts[number, True])
            elif size:
                device = self.targets[message.parts[0].parameter].device
                self.targets[_message_name(number)] = torch.empty(size, dtype=torch.uint8, device=device)
        if number == len(self.steps):  # equal parts may go to several members: only now all messages are encoded
            for parts, sent_before in self._delta.sent.items():
                sent_before.copy_(self._current(parts))

    def after_step(self, number: int) -> None:
        """Decode what a step received into the targets."""
        if number == HEADER:
            for (sends, peer), numbers in self._pairs.items():
                if not sends:
                    self._note_counts(sends, numbers, self.targets[_counts_name(peer)])
            return
        for message in self.steps[number - 1].messages:
            if not self._size(number, message):
                continue
            if message.sends:
                del self.sources[_message_name(number)]
                continue
            values = flat(self.targets, message.parts).clone()
            apply_encoded(values, self.targets.pop(_message_name(number)), self._counts[number, False])
            for part, part_values in zip(message.parts, values.split([part.numel for part in message.parts]), strict=True):
                self.targets[part.parameter].detach()[part.slices].copy_(part_values.view(part.size))

    def _current(self, parts: ParamSlices) -> Tensor:
        """Return the sources' values of some parts, flat."""
        return flat(self.sources, parts).to(self._dtype)

    def _count_changes(self, numbers: Sequence[int]) -> Tensor:
        """Return for each of these steps how many elements of its message have changed."""
        sent = [next(message for message in self.steps[number - 1].messages if message.sends).parts for number in numbers]
        return torch.stack([differs(self._current(parts), self._delta.sent[parts]).sum() for parts in sent])

    def _note_counts(self, sends: bool, numbers: Sequence[int], counts: Tensor) -> None:
        self._counts |= zip([(number, sends) for number in numbers], counts.tolist(), strict=True)

    def _size(self, number: int, message: TransferMessage) -> int:
        """Return the bytes of an encoded message; 0 before the header has arrived."""
        changed = self._counts.get((number, message.sends), 0)
        return encoded_bytes(message.numel, changed, self._dtype.itemsize)[1]


def _counts_name(peer: int) -> str:
    return f"#{peer}"


def _message_name(number: int) -> str:
    return f"#step {number}"


def _flat_parts(name: str, size: int) -> ParamSlices:
    """Return the parts of a message that is one flat tensor."""
    return (ParamSlice(name, (0,), (size,)),)


def flat(tensors: Mapping[str, Tensor], parts: ParamSlices) -> Tensor:
    """Return the elements of some parts, one after the other; a view if they are contiguous."""
    pieces = [tensors[part.parameter].detach()[part.slices].reshape(-1) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return which elements of ``a`` have other bits in ``b``, bool. Both have the same dtype."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(bits) != b.view(bits)


def encoded_bytes(numel: int, changed: int, itemsize: int) -> tuple[str, int]:
    """Return the smallest encoding ("all", "list" or "mask") of ``numel`` elements with ``changed`` changes, and its bytes."""
    sizes = {"list": 4 * changed, "mask": -(-numel // 8)}
    form = min(sizes, key=lambda name: sizes[name])
    size = sizes[form] + itemsize * changed
    return (form, size) if size < itemsize * numel else ("all", itemsize * numel)


def encode(now: Tensor, before: Tensor, changed: int) -> Tensor:
    """Encode ``now`` for a receiver that has ``before``, both flat: uint8 [encoded_bytes], values first, then positions.

    The host does not wait here. It has waited for its own counts, once per transfer.
    """
    form, _ = encoded_bytes(len(now), changed, now.element_size())
    if form == "all":
        return now.contiguous().view(torch.uint8)
    mask = differs(now, before)
    index = mask.nonzero_static(size=changed).view(-1)
    where = index.int().view(torch.uint8) if form == "list" else pack_bits(mask)
    return torch.cat([now[index].view(torch.uint8), where])


def apply_encoded(values: Tensor, payload: Tensor, changed: int) -> None:
    """Update ``values``, flat, in place by the result of :func:`encode`."""
    form, _ = encoded_bytes(len(values), changed, values.element_size())
    if form == "all":
        values.copy_(payload.view(values.dtype))
        return
    size = changed * values.element_size()
    changed_values, where = payload[:size].view(values.dtype), payload[size:].clone()  # a copy, because it is aligned for int32
    if form == "list":
        values[where.view(torch.int32).long()] = changed_values
    else:
        values.masked_scatter_(unpack_bits(where, len(values)), changed_values)


def pack_bits(mask: Tensor) -> Tensor:
    """Return bool [n] as uint8 [ceil(n / 8)], the first element in the lowest bit."""
    padded = torch.zeros(-(-len(mask) // 8) * 8, dtype=torch.bool, device=mask.device)
    padded[: len(mask)] = mask
    return ((padded.view(torch.int64) * SPREAD_BITS) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, number: int) -> Tensor:
    """Return the inverse of :func:`pack_bits`: bool [number]."""
    positions = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> positions) & 1).view(-1)[:number].bool()
