"""A batch: one row per sample, token fields packed, never padded.

A field is a tensor with one entry per row, or a :class:`Ragged`: all rows concatenated, with their lengths. Text and
small objects are ragged bytes (JSON), so a batch consists of tensors only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16  # bytes: tensors of a packed batch start at multiples, so the receiver can view them in place
MIN_SLICED_LENGTH = 32  # mean entries per row from which slices are faster than an index
_PADDING = torch.zeros(_ALIGN, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Ragged:
    """``values`` [sum(lengths), ...] and ``lengths`` int64 [rows]; ``lengths`` are on the CPU."""

    values: Tensor
    lengths: Tensor

    @cached_property
    def offsets(self) -> Tensor:
        """Return int64 [rows + 1]: row i is ``values[offsets[i] : offsets[i + 1]]``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def rows(self) -> list[Tensor]:
        return list(self.values.split(self.lengths.tolist()))

    def take(self, index: Tensor) -> Ragged:
        """Return the rows at ``index`` (int64 [n], on the CPU), in that order; a row may be taken more than once."""
        lengths = self.lengths[index]
        starts = self.offsets[:-1][index]
        if len(index) and int(lengths.sum()) >= MIN_SLICED_LENGTH * len(index):
            runs = zip(starts.tolist(), lengths.tolist(), strict=True)
            return Ragged(torch.cat([self.values[first : first + size] for first, size in runs]), lengths)
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        positions = (torch.repeat_interleave(starts, lengths) + within).to(self.values.device)
        return Ragged(self.values[positions], lengths)

    def masked(self, mask: Ragged) -> Ragged:
        """Return the entries where ``mask`` (bool, same lengths) is true."""
        return Ragged(self.values[mask.values.to(self.values.device)], mask.counts())

    def unmasked(self, mask: Ragged) -> Ragged:
        """Invert :meth:`masked`: put the entries where ``mask`` is true, and 0 elsewhere."""
        values = self.values.new_zeros(len(mask.values))
        values[mask.values.to(values.device)] = self.values
        return Ragged(values, mask.lengths)

    def counts(self) -> Tensor:
        """Return the number of true entries of each row of a mask, int64 [rows]."""
        cumulative = torch.cat([self.lengths.new_zeros(1), self.values.long().cumsum(0).cpu()])
        return cumulative[self.offsets].diff()


Field = Tensor | Ragged


def ragged(rows: Sequence[Tensor | Sequence[int]], dtype: torch.dtype | None = None) -> Ragged:
    """Concatenate rows of [length, ...]; ``dtype`` None keeps theirs."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
    return Ragged(values, torch.tensor([len(t) for t in tensors], dtype=torch.int64))


def encode_json(rows: Iterable[Any]) -> Ragged:
    """Return each row as UTF-8 JSON, uint8. Raises TypeError for values that JSON cannot hold."""
    return ragged([torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8) for row in rows], torch.uint8)


def decode_json(field: Ragged) -> list[Any]:
    """Invert :func:`encode_json`: return the value of each row."""
    return [json.loads(bytes(row.numpy())) for row in field.rows()]


@dataclass(frozen=True, eq=False)
class Batch:
    """``row_ids`` int64 [rows] are stable ids; rows of one prompt share a ``group_ids`` int64 [rows]. Both are on the CPU."""

    row_ids: Tensor
    group_ids: Tensor
    fields: Mapping[str, Field]

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, name: str) -> Any:
        """Return a field; the caller knows whether it is a Tensor or Ragged. Raises KeyError that lists the fields."""
        if name not in self.fields:
            raise KeyError(f"batch has no field {name!r}; it has {', '.join(sorted(self.fields))}")
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def select(self, names: Iterable[str]) -> Batch:
        return Batch(self.row_ids, self.group_ids, {name: self[name] for name in names})

    def union(self, other: Batch) -> Batch:
        """Return the fields of both; the rows must be the same in the same order."""
        if not torch.equal(self.row_ids, other.row_ids):
            raise ValueError(f"union of different rows: {self.row_ids.tolist()[:8]}... and {other.row_ids.tolist()[:8]}...")
        return Batch(self.row_ids, self.group_ids, {**self.fields, **other.fields})

    def with_fields(self, **fields: Field) -> Batch:
        """Return the same rows with only these fields, as a worker's method does."""
        return Batch(self.row_ids, self.group_ids, fields)

    def take(self, index: Tensor | np.ndarray | Sequence[int]) -> Batch:
        """Return rows by position, in that order."""
        index = torch.as_tensor(index, dtype=torch.int64)
        fields = {name: take_rows(field, index) for name, field in self.fields.items()}
        return Batch(self.row_ids[index], self.group_ids[index], fields)

    def reorder(self, row_ids: Tensor) -> Batch:
        """Return rows by id, in that order."""
        order = torch.argsort(self.row_ids)
        index = order[torch.searchsorted(self.row_ids[order], row_ids).clamp_(max=len(self) - 1)]
        assert torch.equal(self.row_ids[index], row_ids), f"reorder: ids that the batch of {len(self)} rows does not hold"
        return self.take(index)

    def repeat(self, n: int) -> Batch:
        """Return n rows for each row, side by side, with the same group id and the ids ``row_id * n + j``."""
        index = torch.arange(len(self)).repeat_interleave(n)
        repeated = self.take(index)
        ids = self.row_ids.repeat_interleave(n) * n + torch.arange(n).repeat(len(self))
        return Batch(ids, repeated.group_ids, repeated.fields)


def take_rows(field: Field, index: Tensor) -> Field:
    """Return the rows of a field at ``index`` (int64 [n], on the CPU), in that order."""
    return field.take(index) if isinstance(field, Ragged) else field[index.to(field.device)]


def concat(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of batches that have the same fields."""
    first = batches[0]
    fields = {name: concat_field([b[name] for b in batches]) for name in first.fields}
    return Batch(torch.cat([b.row_ids for b in batches]), torch.cat([b.group_ids for b in batches]), fields)


def concat_field(parts: Sequence[Any]) -> Any:
    """Concatenate one field: tensors, or Ragged ones."""
    if isinstance(parts[0], Ragged):
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))
    return torch.cat(list(parts))


def pack(batch: Batch) -> Tensor:
    """Serialise a batch, uint8 [bytes]: 8 bytes of length, a JSON header, then the tensors, aligned."""
    parts: list[Tensor] = [batch.row_ids, batch.group_ids]
    description = []
    for name, field in batch.fields.items():
        values = field.values if isinstance(field, Ragged) else field
        if isinstance(field, Ragged):
            parts.append(field.lengths)
        parts.append(values.detach().cpu().contiguous())
        description.append([name, isinstance(field, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape)])
    header = json.dumps([len(batch), description]).encode()
    flat = [torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8)]
    flat += [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat([piece for part in flat for piece in (part, _PADDING[: -len(part) % _ALIGN])])


def unpack(data: Tensor) -> Batch:
    """Return the batch of :func:`pack`; the tensors are views of ``data``."""
    header_size = int.from_bytes(bytes(data[:8].numpy()), "little")
    num_rows, description = json.loads(bytes(data[8 : 8 + header_size].numpy()))
    offset = _aligned(8 + header_size)

    def take(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal offset
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        piece = data[offset : offset + num_bytes].view(dtype).view(shape)
        offset = _aligned(offset + num_bytes)
        return piece

    row_ids = take(torch.int64, [num_rows])
    group_ids = take(torch.int64, [num_rows])
    fields: dict[str, Field] = {}
    for name, is_ragged, dtype_name, shape in description:
        lengths = take(torch.int64, [num_rows]) if is_ragged else None
        values = take(getattr(torch, dtype_name), shape)
        fields[name] = values if lengths is None else Ragged(values, lengths)
    return Batch(row_ids, group_ids, fields)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
