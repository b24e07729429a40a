"""The states of rows in flight in layers with linear attention: a fixed number of bytes per row and layer, beside the pages.

A row has a slot from its admission to its end or preemption (``Scheduler``). Its first token begins with zeros, whatever the slot
held, so slots need no clearing. A row that is preempted computes all of its tokens again, or begins with the state of its prompt
(``page_allocator.PromptStates``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.kernels import DeltaShape, DeltaStates, StateRows, delta_rule, on_device
from rlhf_spmd.kernels.flash_linear_attention import FlashLinearAttention
from rlhf_spmd.kernels.packing import Packing
from rlhf_spmd.kernels.pinned_memory import host_like
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.linear_attention import DeltaAttention


class RecurrentStates:
    """Holds the states of this stage's layers with linear attention (``kernels.linear_attention``), zeros at first.

    ``inputs`` [layers, slots, kernel - 1, C]: the convolution's last inputs. ``memory`` [layers, slots, H, G, K, D].
    """

    def __init__(self, decoder: Decoder, num_slots: int, device: torch.device) -> None:
        inputs, memory = _shapes(decoder)
        wide_dtype = torch.promote_types(decoder.dtype, torch.float32)
        self.num_slots = num_slots
        self.inputs = torch.zeros(decoder.num_linear, num_slots, *inputs, dtype=decoder.dtype, device=device)
        self.memory = torch.zeros(decoder.num_linear, num_slots, *memory, dtype=wide_dtype, device=device)
        self.kernels = decoder.ops.packed_delta
        self._on_host: list[Tensor] | None = None

    def of_step(self, work: Sequence[SequenceWork], positions: Tensor) -> DeltaAttention:
        """Return how the layers mix the tokens of ``work``, packed in this order, at ``positions`` [T]."""
        if all(item.num_tokens == 1 for item in work):
            slots = on_device(np.array([item.row.state_slot for item in work]), self.memory.device)
            return DecodeMixing(self, slots, positions)
        if self.kernels is not None:
            return PackedStepMixing(self, work, self.kernels)
        return StepMixing(self, work)

    def mix(
        self,
        layer: int,
        slots: Tensor,
        begins: Tensor,
        ends: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        weight: Tensor,
        shape: DeltaShape,
        valid: Tensor | None,
    ) -> Tensor:
        """Return :func:`~rlhf_spmd.kernels.delta_rule` of rows, and update their states.

        ``slots`` [B]: the rows' slots. ``begins`` [B]: True for rows that begin with zeros. ``ends`` [B]: the number of their tokens.
        ``tokens``: x, decay and rate.
        """
        inputs = self.inputs[layer].index_select(0, slots).masked_fill_(begins[:, None, None], 0)
        memory = self.memory[layer].index_select(0, slots).masked_fill_(begins[:, None, None, None, None], 0)
        out, seen, memory = delta_rule(*tokens, weight, shape, valid, DeltaStates(inputs, memory))
        last = ends[:, None] + torch.arange(inputs.shape[1], device=ends.device)  # the last inputs of each row
        last_inputs = seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))
        self.inputs[layer].index_copy_(0, slots, last_inputs)
        self.memory[layer].index_copy_(0, slots, memory)
        return out

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, destination); each source is read before any destination is written."""
        source, destination = on_device(np.array(copies, dtype=np.int64), self.memory.device).unbind(1)
        for layer in (*self.inputs, *self.memory):
            layer.index_copy_(0, destination, layer.index_select(0, source))

    def offload(self, used_pages: Sequence[int]) -> None:
        """Free the memory; the states of all slots wait in host memory."""
        self._on_host = [host_like(states).copy_(states) for states in (self.inputs, self.memory)]
        self.inputs, self.memory = (states.new_empty(0) for states in (self.inputs, self.memory))

    def reload(self) -> None:
        """Undo :meth:`offload`, if it was called."""
        if self._on_host is not None:
            self.inputs, self.memory = (states.to(self.memory.device) for states in self._on_host)
            self._on_host = None


def slot_bytes(decoder: Decoder) -> int:
    """Return the bytes of one row's states on this rank; 0 for models without linear attention."""
    if not decoder.num_linear:
        return 0
    inputs, memory = _shapes(decoder)
    wide_bytes = torch.promote_types(decoder.dtype, torch.float32).itemsize
    return decoder.num_linear * (math.prod(inputs) * decoder.dtype.itemsize + math.prod(memory) * wide_bytes)


def _shapes(decoder: Decoder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one row's ``inputs`` and ``memory`` in one layer."""
    shape = next(block.mixer.shape for block in decoder.layers if isinstance(block, Block) and block.mixer is not None)
    heads = shape.keys, shape.values // shape.keys
    return (shape.kernel - 1, shape.channels), (*heads, shape.key_dim, shape.value_dim)


class StepMixing:
    """Mixes the tokens of ``work``, in the order in which they are packed, from the rows' states on.

    Rows with about as many tokens are computed together.
    """

    def __init__(self, states: RecurrentStates, work: Sequence[SequenceWork]) -> None:
        self._states = states
        device = states.memory.device
        lengths = [item.num_tokens for item in work]
        self._packing = Packing(lengths, device)
        self._groups = list[tuple[Tensor, Tensor, Tensor]]()  # slots, begins and ends of each group
        order = sorted(range(len(work)), key=lambda i: lengths[i])  # as the groups have it
        for part in self._packing.padded_groups(1, math.inf):
            members = [work[i] for i in order[: part.num_sequences]]
            order = order[part.num_sequences :]
            rows = [(item.row.state_slot, item.start == 0, item.num_tokens) for item in members]
            slots, begins, ends = (on_device(np.array(column), device) for column in zip(*rows, strict=True))
            self._groups.append((slots, begins, ends))

    def mix(self, layer_index: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
        """x [T, C], ``decay`` and ``rate`` [T, value heads] -> [T, value heads, D]. Updates the rows' states."""
        outs = []
        for part, group in zip(self._packing.padded_groups(1, math.inf), self._groups, strict=True):
            valid = None if part.has_no_padding else part.valid[:, :, None]
            rows = part.gather(x), part.gather(decay), part.gather(rate)
            outs.append(part.without_padding(self._states.mix(layer_index, *group, rows, weight, shape, valid)))
        return torch.cat(outs).index_select(0, self._packing.group_positions(1, math.inf))


class PackedStepMixing:
    """Mixes as :class:`StepMixing` does, by kernels that take all sequences as they are packed."""

    def __init__(self, states: RecurrentStates, work: Sequence[SequenceWork], kernels: FlashLinearAttention) -> None:
        self._states = states
        self._kernels = kernels
        device = states.memory.device
        lengths = np.array([item.num_tokens for item in work])
        kept = states.inputs.shape[2]
        self._packing = Packing(lengths.tolist(), device)
        # the last inputs of each row, as an index of the inputs that the rows had before, followed by the new ones
        last = (lengths - kept)[:, None] + np.arange(kept)
        before = (np.arange(len(work)) * kept + kept)[:, None]
        new = (lengths.cumsum() - lengths + len(work) * kept)[:, None]
        self._last = on_device(np.where(last < 0, before + last, new + last).reshape(-1), device)
        self._slots = on_device(np.array([item.row.state_slot for item in work]), device)
        self._begins = on_device(np.array([item.start == 0 for item in work]), device)

    def mix(self, layer_index: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
        """Mix as :meth:`StepMixing.mix` does."""
        inputs, memory = self._states.inputs[layer_index], self._states.memory[layer_index]
        before = DeltaStates(
            inputs.index_select(0, self._slots).masked_fill_(self._begins[:, None, None], 0),
            memory.index_select(0, self._slots).masked_fill_(self._begins[:, None, None, None, None], 0),
        )
        out, after = self._kernels.mix(x, decay, rate, weight, shape, self._packing, before)
        assert after is not None
        last = torch.cat([before.inputs.flatten(0, 1), x]).index_select(0, self._last)
        inputs.index_copy_(0, self._slots, last.view_as(before.inputs))
        memory.index_copy_(0, self._slots, after)
        return out


class DecodeMixing:
    """Mixes one token of each row, at ``slots`` and ``positions`` [B], which the host does not read (:class:`StateRows`)."""

    def __init__(self, states: RecurrentStates, slots: Tensor, positions: Tensor) -> None:
        self._states, self._slots, self._positions = states, slots, positions

    def states_of(self, layer_index: int) -> StateRows:
        return StateRows(self._states.inputs[layer_index], self._states.memory[layer_index], self._slots, self._positions)

    def mix(self, layer_index: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
        """Mix as :meth:`StepMixing.mix` does, where each slot belongs to a row."""
        rows = (x[:, None], decay[:, None], rate[:, None])
        begins = self._positions == 0
        ends = torch.ones_like(self._slots)
        return self._states.mix(layer_index, self._slots, begins, ends, rows, weight, shape, None)[:, 0]
