"""Triton's attention, latent attention too, against attention in float64 and against itself, bit for bit; on GPUs its kernels are
compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from generators import row_of
from places import ROOT
from rlhf_spmd.generation import GenerationConfig, backends, triton_attention
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.generation.triton_attention import TritonAttention
from rlhf_spmd.kernels import AttentionRule, Ops, PageTarget, triton_paged_attention
from rlhf_spmd.kernels.dense_attention import LatentKeys, latent_heads
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.triton_paged_attention import TileShape
from triton_device import DEVICE

PLAIN = AttentionRule(0.25, None, None)
SINKS = torch.linspace(-3, 6, 6, device=DEVICE)
WIDE = (64, 128) if DEVICE.type == "cpu" else (16, 32)  # rows of a chunk's tile; more of float32 would not fit into registers
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {FP32: 1e-5, FP16: 3e-3, BF16: 2e-2}
Chunk = tuple[int, int, int]  # row, first position, tokens


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows have several blocks and splits."""
    monkeypatch.setattr(triton_paged_attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_paged_attention, "BLOCK_BYTES", 1 << 9)


@dataclass
class Rows:
    """Rows whose queries, keys and values [positions, heads, elements] are known in full. ``latent``: of one KV head, whose values are
    its keys' first elements, and whose pages hold the keys of a step before its attention."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    latent: bool = False

    @classmethod
    def draw(cls, lengths: Sequence[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype = FP32) -> Rows:
        generator = torch.Generator().manual_seed(sum(lengths) + dim)

        def some(heads: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=generator).to(DEVICE, dtype) for n in lengths]

        return cls(some(kv_heads * group), some(kv_heads), some(kv_heads))

    @classmethod
    def draw_latent(cls, lengths: Sequence[int], heads: int, rank: int, rope: int, dtype: torch.dtype = FP32) -> Rows:
        rows = cls.draw(lengths, 1, heads, rank + rope, dtype)
        return cls(rows.queries, rows.keys, [keys[..., :rank] for keys in rows.keys], latent=True)

    def cache(self, num_pages: int, page_size: int) -> KVCache:
        dtype, (kv_heads, dim) = self.keys[0].dtype, self.keys[0].shape[1:]
        value_dim = self.values[0].shape[2] if self.latent else None
        backend = build_backend("triton", dtype, DEVICE)
        cache = KVCache(2, kv_heads, dim, num_pages, page_size, dtype, DEVICE, backend, value_dim=value_dim)
        cache.pages.fill_(torch.nan)  # what is not written must not be used
        return cache

    def fill(self, cache: KVCache, row: int, pages: Tensor, count: int) -> None:
        """Writes the first ``count`` positions of ``row`` to its pages."""
        past = torch.arange(count)
        slots = pages[past // cache.page_size] * cache.page_size + past % cache.page_size
        planes = cache.pages[1].view(cache.kv_tensors_per_page, cache.kv_heads, -1, cache.head_dim)
        for plane, entries in zip(planes, (self.keys[row], self.values[row]), strict=False):
            plane[:, slots.to(DEVICE)] = entries[:count].transpose(0, 1)

    def attend(
        self, chunks: Sequence[Chunk], rule: AttentionRule, page_size: int, seed: int = 0, chunk_rows: int | None = None
    ) -> list[Tensor]:
        """Returns what one step gives for each chunk; what comes before lies in the pages already."""
        needed = [-(-(start + count) // page_size) for _, start, count in chunks]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed))
        cache, work = self.cache(len(order), page_size), []
        for (row, start, count), pages in zip(chunks, order[3:].split(needed), strict=True):
            work.append(SequenceWork(row_of(row, [0], 9998, pages=pages.tolist()), start, count, True))
            self.fill(cache, row, pages, start + count if self.latent else start)
        parts = [
            torch.cat([x[row][start : start + count] for row, start, count in chunks])
            for x in (self.queries, self.keys, self.values)
        ]
        if self.latent:
            q, k, v = parts
        else:  # heads of a token lie together, as the decoder gives them
            q, k, v = torch.cat(parts, 1).split([x.shape[1] for x in parts], 1)
        context = TritonAttention.for_step(work, cache, q.shape[1], partial(TileShape.of_chunks, chunk_rows=chunk_rows))
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in chunks])
        assert torch.equal(context.positions.cpu(), positions)
        out = context.attend_written(1, q, rule) if self.latent else context.attend(1, q, k, v, rule)
        assert not context.arrived.any(), "counters are clear for the next layer"
        return list(out.split([count for *_, count in chunks]))

    def decode(self, starts: Sequence[int], rule: AttentionRule, page_size: int, spare: int = 2) -> Tensor:
        """Returns what one step gives for a token of each row, by device tensors alone. ``spare``: columns of the table that no row
        needs."""
        pages = [start // page_size + 1 for start in starts]
        cache, order = self.cache(sum(pages) + 1, page_size), torch.randperm(sum(pages)) + 1
        table = torch.zeros(len(starts), max(pages) + spare + 3, dtype=torch.int32, device=DEVICE)[:, : max(pages) + spare]
        for row, (start, numbers) in enumerate(zip(starts, order.split(pages), strict=True)):
            table[row, : len(numbers)] = numbers
            self.fill(cache, row, numbers, start + 1 if self.latent else start)
        q, k, v = (
            torch.stack([rows[start] for rows, start in zip(each, starts, strict=False)])
            for each in (self.queries, self.keys, self.values)
        )
        positions = torch.tensor(starts, device=DEVICE)
        context = TritonAttention.decoding(positions, table, cache, q.shape[1])
        assert torch.equal(context.cache_slots, cache.cache_slots_of(positions, table))
        layers = [context.attend_written(1, q, rule) if self.latent else context.attend(1, q, k, v, rule) for _ in range(2)]
        assert torch.equal(*layers), "the next layer finds clear counters"
        return layers[0]

    def expected(self, row: int, start: int, count: int, rule: AttentionRule) -> Tensor:
        q, k, v = (x[row].double() for x in (self.queries, self.keys, self.values))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[start : start + count], k.repeat_interleave(group, 1)) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        ahead = torch.arange(start, start + count, device=DEVICE)[:, None] - torch.arange(len(k), device=DEVICE)
        seen = (ahead >= 0) & (ahead < (rule.window or len(k)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v.repeat_interleave(group, 1))

    def check(self, chunks: Sequence[Chunk], outputs: Sequence[Tensor], rule: AttentionRule) -> None:
        """Against float64."""
        for chunk, output in zip(chunks, outputs, strict=True):
            tolerance = TOLERANCES[output.dtype]
            assert output.dtype == self.keys[0].dtype and output.shape[2] == self.values[0].shape[2]
            torch.testing.assert_close(output.double(), self.expected(*chunk, rule), atol=tolerance, rtol=0)


LENGTHS = [1, 7, 64, 65, 130, 203]
CHUNKS = [(0, 0, 1), (1, 0, 7), (2, 63, 1), (3, 40, 25), (4, 129, 1), (5, 190, 1), (4, 60, 17)]
WIDE_CHUNKS = [(5, 130, 73), (4, 13, 40), (3, 64, 1), (2, 5, 2)]
LATENT = AttentionRule(0.1)
SHORT_CASES = [  # page size, rows, rule, rows of a chunk's tile
    (5, (2, 3, 32), replace(PLAIN, window=37), None),
    (64, (1, 1, 64), replace(PLAIN, window=1), None),
    (16, (1, 20, 16), replace(PLAIN, softcap=2.0, window=64), None),
    (16, (2, 3, 32), replace(PLAIN, window=37, sinks=SINKS), None),
    (16, (2, 2, 32, BF16), PLAIN, None),
    (8, (1, 5, 16), PLAIN, WIDE[0]),
    (32, (1, 1, 40), replace(PLAIN, window=30), WIDE[1]),
    (256, (1, 20, 16), replace(PLAIN, softcap=2.0, window=100), WIDE[1]),
    (5, (3, 24, 10), LATENT, None),
    (64, (20, 16, 4), LATENT, None),  # tiles of some of a token's heads
    (64, (40, 32, 8, BF16), LATENT, None),
    (64, (16, 512, 64), LATENT, None),  # DeepSeek's
]
LONG_CASES = [
    (1, (1, 4, 24), PLAIN, None),
    (64, (1, 8, 128), PLAIN, None),
    (256, (1, 2, 96), PLAIN, None),
    (16, (3, 1, 80), replace(PLAIN, softcap=5.0), None),
    (16, (2, 2, 32, FP16), PLAIN, None),
    (1, (1, 40, 2), LATENT, None),
    (16, (3, 24, 16, FP16), LATENT, None),
    (64, (16, 512, 64, BF16), LATENT, None),
]


@pytest.mark.parametrize("case", [*SHORT_CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)], ids=str)
def test_ragged_work_equals_float64(case: tuple[int, tuple[int, ...], AttentionRule, int | None]) -> None:
    """Single tokens, and chunks of prompts of which a part lies in the pages. Wide chunks have several tiles, whose keys begin within a
    block of their own: pages smaller and larger than a block of 16 keys."""
    page_size, sizes, rule, chunk_rows = case
    rows = (Rows.draw_latent if rule is LATENT else Rows.draw)(LENGTHS, *sizes)
    chunks = WIDE_CHUNKS if chunk_rows else CHUNKS
    rows.check(chunks, rows.attend(chunks, rule, page_size, chunk_rows=chunk_rows), rule)


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ((2, 3, 24), PLAIN),
        ((2, 3, 24), replace(PLAIN, softcap=3.0, window=70, sinks=SINKS)),
        ((20, 24, 6), LATENT),
        pytest.param((3, 24, 6), LATENT, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_programs_that_share_a_row_change_no_bit(
    sizes: tuple[int, int, int], rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for all splits, two, and one for each; rows of one split and of four beside each other."""
    starts = [0, 5, 63, 64, 129, 202]
    chunks = [(row, start, 1) for row, start in enumerate(starts)]
    rows = (Rows.draw_latent if rule is LATENT else Rows.draw)(LENGTHS, *sizes)
    outputs = []
    for programs, page_size, spare in ((1, 16, 0), (24, 5, 40), (4096, 64, 9)):
        for name in ("PROGRAMS", "LATENT_PROGRAMS"):
            monkeypatch.setattr(triton_attention, name, programs)
        outputs.append(rows.decode(starts, rule, page_size, spare))
    monkeypatch.setattr(triton_attention, "PART_BYTES", 0)  # parts of so many rows take too much memory
    outputs += [rows.decode(starts, rule, 64, 9), torch.cat(rows.attend(chunks, rule, 7))]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    rows.check(chunks, outputs[0].split(1), rule)


@pytest.mark.parametrize(
    "rule", [replace(PLAIN, softcap=3.0, window=50), pytest.param(PLAIN, marks=pytest.mark.long)], ids=["capped", "plain"]
)
def test_batch_chunks_and_pages_change_no_bit(rule: AttentionRule) -> None:
    """Each token alone through the split kernel, in company, in chunks of several sizes, tiles and pages of several sizes. On GPUs all
    tiles are narrow: there wide ones may round otherwise."""
    wide = WIDE if DEVICE.type == "cpu" else (16, 16)
    rows = Rows.draw(LENGTHS, 1, 3, 24)
    ((together,), (other,)) = (rows.attend([(row, 0, LENGTHS[row])], rule, 16, 0, wide[1]) for row in (4, 3))
    for page_size, size, chunk_rows in ((1, 64, 16), (7, 23, 16), (32, 130, wide[0])):
        for start in range(0, 130, size):
            count = min(size, 130 - start)
            (chunk,) = rows.attend([(4, start, count)], rule, page_size, start, chunk_rows)
            assert torch.equal(chunk, together[start : start + count])
    for start in (0, 50, 63, 64, 129):
        (single,) = rows.attend([(4, start, 1)], rule, 16, start)
        company = rows.attend([(3, start // 2, 1), (5, 9, 20), (4, start, 1), (1, 2, 1)], rule, 5, start)
        assert torch.equal(single[0], together[start]) and torch.equal(company[2][0], together[start])
        assert torch.equal(company[0][0], other[start // 2])


@pytest.mark.parametrize(
    ("sizes", "interleaved", "dtype", "tolerance"),
    [
        ((3, 5, 24, 10), False, FP32, 1e-5),
        ((40, 16, 24, 6), True, BF16, 4e-2),
        pytest.param((2, 128, 512, 64), True, FP32, 1e-5, marks=pytest.mark.long),
        pytest.param((2, 128, 512, 64), True, BF16, 4e-2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_latent_keys_and_queries_equal_float64(
    sizes: tuple[int, int, int, int], interleaved: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Of five rows, one of which is padding: of this one no key is written."""
    (heads, nope, rank, rope), tokens, written = sizes, 5, 4
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    q, latent, weight = some(tokens, heads, nope + rope), some(tokens, rank + rope), some(rank)
    to_keys = (some(heads, nope + 3, rank) / nope**0.5)[:, :nope]  # beside the matrices that make values
    angle = some(tokens, 1, rope // 2)
    keys = LatentKeys(weight, 1e-6, to_keys, angle.cos(), angle.sin(), interleaved)
    cos, sin = keys.cos.double(), keys.sin.double()
    wide = LatentKeys(weight.double(), 1e-6, to_keys.double(), cos, sin, interleaved)
    expected, entries = latent_heads(Ops(), q.double(), latent.double(), wide)
    slots = torch.tensor([17, 3, 40, 0], device=DEVICE)
    for ops in (GpuOps(), Ops()):
        pages = torch.full((1, 1, 3, 16 * (rank + rope)), torch.nan, dtype=dtype, device=DEVICE)
        queries = ops.latent_to_pages(q, latent, keys, PageTarget(pages, slots))
        torch.testing.assert_close(queries.double(), expected, atol=tolerance, rtol=tolerance)
        lines = pages.view(-1, rank + rope)
        torch.testing.assert_close(lines[slots].double(), entries[:written], atol=tolerance, rtol=tolerance)
        assert lines.isnan().all(1).sum() == len(lines) - written


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the backends are there on a GPU")
def test_a_backend_that_cannot_serve_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"attention=triton: it does not compute torch\.float64"):
        choose_backend("triton", "auto", torch.float64, cpu, "attention")
    assert choose_backend("triton", "torch", torch.float32, cpu, "attention") == "triton"
    assert choose_backend("auto", "torch", torch.float32, cpu, "attention") == "torch"
    monkeypatch.delenv("TRITON_INTERPRET")
    allowed = "allowed here: auto, torch, cpp"
    with pytest.raises(ValueError, match=rf"^here\.attention=triton: it needs a CUDA device, here is cpu; {allowed}$"):
        GenerationConfig(attention="triton").check_device("here")
    monkeypatch.setattr(backends, "unavailable", lambda *arguments: None)
    assert choose_backend("auto", "torch", torch.float32, torch.device("cuda"), "attention") == "triton"


def output_of(cache: Path, script: str, *arguments: str) -> list[str]:
    """The lines that a script of ``tests/started`` prints."""
    environment = os.environ | {"PYTHONPATH": "src", "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, f"tests/started/{script}.py", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()


# the most registers of a thread that Triton 3.6 and its ptxas gave for sm_90
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "dtype", "registers"),
    [("triton", "bf16", 255), ("triton", "fp32", 112), ("latent", "bf16", 255), ("latent", "fp32", 107)],
)
def test_compiled_attention(script: str, dtype: str, registers: int, tmp_path: Path) -> None:
    """Nothing spills, at DeepSeek's sizes neither, a multiprocessor's registers and shared memory hold a program, and keys arrive while
    others are computed. Chunks take Hopper's products of warp groups. Multiplications and additions are fused in the matrix products
    alone: elsewhere both forms must round alike."""
    kernels = [json.loads(line) for line in output_of(tmp_path, f"compile_{script}", dtype)]
    assert len(kernels) > 4
    for kernel in kernels:
        name, counts, attends = kernel["name"], kernel["instructions"], kernel["name"].startswith("attend")
        assert kernel["stack"] == 0 and kernel["registers"] <= (registers if attends else 64), kernel
        assert kernel["registers"] * kernel.get("threads", 0) <= 1 << 16 and kernel["shared"] <= 227 << 10, kernel
        assert not attends or counts["cp.async"] > 0, kernel
        if dtype == "bf16" and attends:
            product = "wgmma" if script == "triton" and "chunks" in name and "wide" not in name else "mma.sync"
            assert counts[product] > 0, kernel
        if script == "triton":
            assert counts["fma"] == (kernel["products"] if dtype == "fp32" else 0), kernel


@pytest.mark.long
def test_compiled_draws(tmp_path: Path) -> None:
    """Without spills, with few enough registers, and with no addition fused with a multiplication, so that weights round alike."""
    rows = [line.split() for line in output_of(tmp_path, "compile_draw")]
    names = ["_sum_tiles", "_sum_tiles", "_pick", "_count_weights", "_gather_candidates", "_pick_filtered"]
    assert [row[0] for row in rows] == names
    for name, registers, stack, shared, fused in rows:
        assert int(registers) <= 128 and int(stack) == 0 and int(shared) <= 32 << 10 and int(fused) == 0, name
