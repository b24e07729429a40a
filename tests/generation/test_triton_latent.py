"""Latent attention in Triton against float64 and against torch's paged attention; on GPUs its kernels are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from generators import row_of
from places import ROOT
from rlhf_spmd.generation import triton_attention
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.paged_attention import PagedAttention
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.generation.triton_attention import TritonAttention
from rlhf_spmd.kernels import AttentionRule, Ops, PageTarget, triton_paged_attention
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.latent_heads import LatentKeys, latent_heads
from triton_device import DEVICE

RULE = AttentionRule(0.1)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged_attention, "SPLIT_KEYS", 64)


@dataclass
class Rows:
    """Rows whose queries [positions, heads, C + E] and keys [positions, C + E] are known in full; values are the keys' first ``rank``
    elements."""

    queries: list[Tensor]
    keys: list[Tensor]
    rank: int

    @classmethod
    def draw(cls, lengths: Sequence[int], heads: int, rank: int, rope: int, dtype: torch.dtype = torch.float32) -> Rows:
        generator = torch.Generator().manual_seed(sum(lengths) + rank)

        def some(*shape: int) -> list[Tensor]:
            return [torch.randn(n, *shape, generator=generator).to(DEVICE, dtype) for n in lengths]

        return cls(some(heads, rank + rope), some(rank + rope), rank)

    def cache(self, num_pages: int, page_size: int, name: str = "triton") -> KVCache:
        dtype, width = self.keys[0].dtype, self.keys[0].shape[1]
        backend = build_backend(name, dtype, DEVICE)
        cache = KVCache(2, 1, width, num_pages, page_size, dtype, DEVICE, backend, value_dim=self.rank)
        if name == "triton":
            cache.pages.fill_(torch.nan)  # what is not written must not be used
        return cache

    def fill(self, cache: KVCache, row: int, held: Sequence[int], count: int) -> None:
        """Write the first ``count`` keys of ``row`` to the pages that it holds."""
        past = torch.arange(count)
        slots = torch.tensor(held)[past // cache.page_size] * cache.page_size + past % cache.page_size
        cache.pages[1].view(-1, cache.head_dim)[slots.to(DEVICE)] = self.keys[row][:count]

    def attend(self, chunks: Sequence[tuple[int, int, int]], page_size: int, name: str = "triton") -> list[Tensor]:
        """What one step gives for each chunk (row, first position, tokens); what comes before lies in the pages already."""
        needed = [-(-(start + count) // page_size) for _, start, count in chunks]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        cache, work = self.cache(len(order), page_size, name), []
        for (row, start, count), pages in zip(chunks, needed, strict=True):
            held = [order.pop() for _ in range(pages)]
            work.append(SequenceWork(row_of(row, [0], 9998, pages=held), start, count, True))
            self.fill(cache, row, held, start + count if name == "triton" else start)
        q, keys = (
            torch.cat([x[row][start : start + count] for row, start, count in chunks]) for x in (self.queries, self.keys)
        )
        if name == "triton":
            context = TritonAttention.for_step(work, cache, q.shape[1])
            out = context.attend_written(1, q, RULE)
            assert not context.arrived.any(), "counters are clear for the next layer"
        else:
            out = PagedAttention(work, cache, q.shape[1]).attend(1, q, keys[:, None], keys[:, None], RULE)[..., : self.rank]
        return list(out.split([count for *_, count in chunks]))

    def decode(self, starts: Sequence[int], page_size: int) -> Tensor:
        """What one step gives for a token of each row, by device tensors alone."""
        pages = [start // page_size + 1 for start in starts]
        cache, order = self.cache(sum(pages) + 1, page_size), torch.randperm(sum(pages)) + 1
        table = torch.zeros(len(starts), max(pages) + 2, dtype=torch.int32, device=DEVICE)
        for row, (start, held) in enumerate(zip(starts, order.split(pages), strict=True)):
            table[row, : len(held)] = held
            self.fill(cache, row, held.tolist(), start + 1)
        q = torch.stack([rows[start] for rows, start in zip(self.queries, starts, strict=True)])
        context = TritonAttention.decoding(torch.tensor(starts, device=DEVICE), table, cache, q.shape[1])
        out = context.attend_written(1, q, RULE)
        assert torch.equal(context.attend_written(1, q, RULE), out), "the next layer finds clear counters"
        return out

    def expected(self, row: int, start: int, count: int) -> Tensor:
        q, keys = self.queries[row][start : start + count].double(), self.keys[row].double()
        scores = torch.einsum("qhd,kd->hqk", q, keys) * RULE.scale
        seen = torch.arange(start, start + count, device=DEVICE)[:, None] >= torch.arange(len(keys), device=DEVICE)
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), keys[:, : self.rank])


LENGTHS = [1, 7, 64, 65, 130, 203]
CHUNKS = [(0, 0, 1), (1, 0, 7), (2, 63, 1), (3, 40, 25), (4, 129, 1), (5, 190, 1), (4, 60, 17)]
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("page_size", "heads", "rank", "rope", "dtype", "tolerance"),
    [
        (16, 4, 16, 6, torch.float32, 1e-5),
        (5, 3, 24, 10, torch.float32, 1e-5),
        (64, 20, 16, 4, torch.float32, 1e-5),  # tiles of some of a token's heads
        (1, 1, 40, 2, torch.float32, 1e-5),
        (64, 40, 32, 8, BF16, 2e-2),
        (16, 3, 24, 16, torch.float16, 3e-3),
    ],
    ids=str,
)
def test_ragged_work_equals_float64(
    page_size: int, heads: int, rank: int, rope: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Single tokens, and chunks of prompts of which a part lies in the pages."""
    rows = Rows.draw(LENGTHS, heads, rank, rope, dtype)
    for chunk, found in zip(CHUNKS, rows.attend(CHUNKS, page_size), strict=True):
        assert found.dtype == dtype and found.shape[2] == rank
        torch.testing.assert_close(found.double(), rows.expected(*chunk), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 2e-2)], ids=str)
def test_the_sizes_of_deepseek(dtype: torch.dtype, tolerance: float) -> None:
    """A token of each of two rows, and a chunk of one: 512 + 64 elements, in pages of 64 tokens."""
    rows = Rows.draw([70, 131], 16, 512, 64, dtype)
    chunks = [(0, 69, 1), (1, 126, 5)]
    for chunk, found, torchs in zip(chunks, rows.attend(chunks, 64), rows.attend(chunks, 64, "torch"), strict=True):
        torch.testing.assert_close(found.double(), rows.expected(*chunk), atol=tolerance, rtol=0)
        torch.testing.assert_close(found, torchs, atol=2 * tolerance, rtol=0)
    decoded = rows.decode([69, 130], 64)
    for row, start in enumerate((69, 130)):
        torch.testing.assert_close(decoded[row : row + 1].double(), rows.expected(row, start, 1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("heads", [3, 20])
def test_programs_that_share_a_row_change_no_bit(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, starts, found = Rows.draw(LENGTHS, heads, 24, 6), [0, 5, 63, 64, 129, 202], []
    for programs, page_size in ((1, 16), (24, 5), (512, 64)):
        monkeypatch.setattr(triton_attention, "LATENT_PROGRAMS", programs)
        found.append(rows.decode(starts, page_size))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for row, start in enumerate(starts):
        torch.testing.assert_close(found[0][row : row + 1].double(), rows.expected(row, start, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "interleaved"), [((3, 5, 24, 10), False), ((40, 16, 24, 6), True), ((2, 128, 512, 64), True)], ids=str
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 4e-2)], ids=str)
def test_keys_and_queries_equal_float64(
    sizes: tuple[int, int, int, int], interleaved: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Of five rows, one of which is padding: of this one no key is written."""
    (heads, nope, rank, rope), tokens, written = sizes, 5, 4
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    q, made, weight = some(tokens, heads, nope + rope), some(tokens, rank + rope), some(rank)
    to_keys = (some(heads, nope + 3, rank) / nope**0.5)[:, :nope]  # beside the matrices that make values
    angle = some(tokens, 1, rope // 2)
    keys = LatentKeys(weight, 1e-6, to_keys, angle.cos(), angle.sin(), interleaved)
    cos, sin = keys.cos.double(), keys.sin.double()
    wide = LatentKeys(weight.double(), 1e-6, to_keys.double(), cos, sin, interleaved)
    expected, entries = latent_heads(Ops(), q.double(), made.double(), wide)
    slots = torch.tensor([17, 3, 40, 0], device=DEVICE)
    for ops in (GpuOps(), Ops()):
        pages = torch.full((1, 1, 3, 16 * (rank + rope)), torch.nan, dtype=dtype, device=DEVICE)
        found = ops.latent_to_pages(q, made, keys, PageTarget(pages, slots))
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        lines = pages.view(-1, rank + rope)
        torch.testing.assert_close(lines[slots].double(), entries[:written], atol=tolerance, rtol=tolerance)
        assert lines.isnan().all(1).sum() == len(lines) - written


# registers of a thread that Triton 3.6 and its ptxas gave for sm_90, see tests/started/compile_latent.py
REGISTERS = {
    "bf16": {"attend_singles": 230, "attend_singles, 128 heads": 223, "attend_chunks": 255, "attend_chunks, 128 heads": 255},
    "fp32": {"attend_singles": 107, "attend_singles, 128 heads": 107, "attend_chunks": 100, "attend_chunks, 128 heads": 100},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu(dtype: str, tmp_path: Path) -> None:
    """At DeepSeek's sizes nothing spills, a multiprocessor's registers and shared memory hold a program, and keys arrive while others
    are computed."""
    environment = os.environ | {"PYTHONPATH": "src", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "tests/started/compile_latent.py", dtype]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    kernels = {kernel["name"]: kernel for kernel in map(json.loads, ended.stdout.splitlines())}
    assert [*kernels] == [*REGISTERS[dtype], "keys_to_pages"]
    for name, kernel in kernels.items():
        counts = kernel["instructions"]
        assert kernel["stack"] == 0 and kernel["registers"] <= REGISTERS[dtype].get(name, 64), kernel
        if name in REGISTERS[dtype]:
            assert kernel["registers"] * kernel["threads"] <= 1 << 16 and kernel["shared"] <= 227 << 10, kernel
            assert counts["cp.async"] > 0 and (dtype == "fp32" or counts["mma.sync"] > 0), kernel
