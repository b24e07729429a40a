"""The Triton attention against attention in float64 and against itself, bit for bit; on GPUs its kernels are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from generators import MODELS, SMALL, alone, load, ragged_requests, row_of, tokens_of
from places import ROOT
from rlhf_spmd.generation import GenerationConfig, Generator, SamplingConfig, backends, triton_attention
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.generation.triton_attention import TritonAttention
from rlhf_spmd.kernels import AttentionRule, triton_paged_attention
from rlhf_spmd.kernels.triton_paged_attention import TileShape
from rlhf_spmd.models.spec import read_eos_ids, spec_from_config
from rlhf_spmd.models.weights import write_random_model
from small_models import CONFIGS
from triton_device import DEVICE

PLAIN = AttentionRule(0.25, None, None)
WIDE = (64, 128) if DEVICE.type == "cpu" else (16, 32)  # rows of a chunk's tile; more of float32 would not fit into registers


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows have several blocks and splits."""
    monkeypatch.setattr(triton_paged_attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_paged_attention, "BLOCK_BYTES", 1 << 9)


@dataclass
class Rows:
    """Rows whose queries, keys and values [positions, heads, D] are known in full."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def draw(cls, lengths: Sequence[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> Rows:
        generator = torch.Generator().manual_seed(sum(lengths) + dim)

        def some(heads: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=generator).to(DEVICE, dtype) for n in lengths]

        return cls(some(kv_heads * group), some(kv_heads), some(kv_heads))

    def attend(
        self,
        chunks: Sequence[tuple[int, int, int]],
        rule: AttentionRule,
        page_size: int,
        seed: int = 0,
        chunk_rows: int | None = None,
    ) -> list[Tensor]:
        """What one step gives for each chunk (row, first position, tokens); what comes before lies in the pages already."""
        kv_heads, dim = self.keys[0].shape[1:]
        needed = [-(-(start + count) // page_size) for _, start, count in chunks]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        dtype = self.keys[0].dtype
        cache = KVCache(2, kv_heads, dim, len(order), page_size, dtype, DEVICE, build_backend("triton", dtype, DEVICE))
        cache.pages.fill_(torch.nan)  # what is not written must not be used
        by_slot = cache.pages[1].view(2, kv_heads, -1, dim)
        work = []
        for (row, start, count), pages in zip(chunks, needed, strict=True):
            held = [order.pop() for _ in range(pages)]
            work.append(SequenceWork(row_of(row, [0], 9998, pages=held), start, count, True))
            for position in range(start):
                slot = held[position // page_size] * page_size + position % page_size
                by_slot[0, :, slot], by_slot[1, :, slot] = self.keys[row][position], self.values[row][position]
        parts = [
            torch.cat([x[row][start : start + count] for row, start, count in chunks])
            for x in (self.queries, self.keys, self.values)
        ]
        whole = torch.cat(parts, 1)  # heads of a token lie together, as the decoder gives them
        q, k, v = whole.split([x.shape[1] for x in parts], 1)
        shape_of = partial(TileShape.of_chunks, chunk_rows=chunk_rows)
        context = TritonAttention.for_step(work, cache, q.shape[1], shape_of)
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in chunks])
        assert torch.equal(context.positions.cpu(), positions)
        out = context.attend(1, q, k, v, rule)
        assert not context.arrived.any(), "counters are clear for the next layer"
        return list(out.split([count for *_, count in chunks]))

    def decode(self, starts: Sequence[int], rule: AttentionRule, page_size: int, spare: int) -> Tensor:
        """What one step gives for a token of each row, by device tensors alone. ``spare``: columns of the table that no row needs."""
        kv_heads, dim = self.keys[0].shape[1:]
        dtype, pages = self.keys[0].dtype, [start // page_size + 1 for start in starts]
        cache = KVCache(2, kv_heads, dim, sum(pages) + 1, page_size, dtype, DEVICE, build_backend("triton", dtype, DEVICE))
        cache.pages.fill_(torch.nan)
        by_slot = cache.pages[1].view(2, kv_heads, -1, dim)
        order = torch.randperm(sum(pages)) + 1
        table = torch.zeros(len(starts), max(pages) + spare + 3, dtype=torch.int32, device=DEVICE)[:, : max(pages) + spare]
        for row, (start, held) in enumerate(zip(starts, order.split(pages), strict=True)):
            table[row, : len(held)] = held
            past = torch.arange(start)
            slots = held[past // page_size] * page_size + past % page_size
            by_slot[0][:, slots.to(DEVICE)] = self.keys[row][:start].transpose(0, 1)
            by_slot[1][:, slots.to(DEVICE)] = self.values[row][:start].transpose(0, 1)
        q, k, v = (
            torch.stack([rows[start] for rows, start in zip(each, starts, strict=False)])
            for each in (self.queries, self.keys, self.values)
        )
        positions = torch.tensor(starts, device=DEVICE)
        context = TritonAttention.decoding(positions, table, cache, q.shape[1])
        assert torch.equal(context.slots, cache.slots_of(positions, table))
        out = context.attend(1, q, k, v, rule)
        assert torch.equal(context.attend(1, q, k, v, rule), out), "the next layer finds clear counters"
        return out

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


LENGTHS = [1, 7, 64, 65, 130, 203]
CHUNKS = [(0, 0, 1), (1, 0, 7), (2, 63, 1), (3, 40, 25), (4, 129, 1), (5, 190, 1), (4, 60, 17)]


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "group", "dim", "rule"),
    [
        (16, 2, 2, 16, PLAIN),
        (1, 1, 4, 24, PLAIN),
        (64, 1, 8, 128, PLAIN),
        (256, 1, 2, 96, PLAIN),
        (16, 3, 1, 80, replace(PLAIN, softcap=5.0)),
        (5, 2, 3, 32, replace(PLAIN, window=37)),
        (64, 1, 1, 64, replace(PLAIN, window=1)),
        (16, 1, 20, 16, replace(PLAIN, softcap=2.0, window=64)),
        (16, 2, 3, 32, replace(PLAIN, window=37, sinks=torch.linspace(-3, 6, 6, device=DEVICE))),
    ],
    ids=str,
)
def test_ragged_work_equals_float64(page_size: int, kv_heads: int, group: int, dim: int, rule: AttentionRule) -> None:
    rows = Rows.draw(LENGTHS, kv_heads, group, dim)
    for chunk, found in zip(CHUNKS, rows.attend(CHUNKS, rule, page_size), strict=True):
        torch.testing.assert_close(found.double(), rows.expected(*chunk, rule), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_rows", WIDE)
@pytest.mark.parametrize(
    ("page_size", "group", "dim", "rule"),
    [
        (8, 5, 16, PLAIN),
        (32, 1, 40, replace(PLAIN, window=30)),
        (256, 20, 16, replace(PLAIN, softcap=2.0, window=100)),
    ],
    ids=str,
)
def test_wide_tiles_equal_float64(page_size: int, group: int, dim: int, rule: AttentionRule, chunk_rows: int) -> None:
    """Chunks of several tiles, whose keys begin within a block of their own: pages smaller and larger than a block of 16 keys."""
    rows, chunks = Rows.draw(LENGTHS, 1, group, dim), [(5, 130, 73), (4, 13, 40), (3, 64, 1), (2, 5, 2)]
    for chunk, found in zip(chunks, rows.attend(chunks, rule, page_size, 0, chunk_rows), strict=True):
        torch.testing.assert_close(found.double(), rows.expected(*chunk, rule), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "rule",
    [PLAIN, replace(PLAIN, softcap=3.0, window=70), replace(PLAIN, sinks=torch.linspace(-3, 6, 6, device=DEVICE))],
    ids=["plain", "capped", "sinks"],
)
def test_programs_that_share_a_row_change_no_bit(rule: AttentionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all splits, two, and one for each; rows of one split and of four beside each other."""
    rows, starts = Rows.draw(LENGTHS, 2, 3, 24), [0, 5, 63, 64, 129, 202]
    found = []
    for programs, page_size, spare in ((1, 16, 0), (24, 5, 40), (4096, 64, 9)):
        monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
        found.append(rows.decode(starts, rule, page_size, spare))
    monkeypatch.setattr(triton_attention, "PART_BYTES", 0)  # parts of so many rows take too much memory
    found.append(rows.decode(starts, rule, 64, 9))
    assert all(torch.equal(found[0], other) for other in found[1:])
    for row, start in enumerate(starts):
        torch.testing.assert_close(found[0][row : row + 1].double(), rows.expected(row, start, 1, rule), atol=1e-5, rtol=0)
    stepped = rows.attend([(row, start, 1) for row, start in enumerate(starts)], rule, 7)
    assert torch.equal(torch.cat(stepped), found[0])


class Launches(TorchDispatchMode):
    """What a GPU would be asked to run: torch's operators but for views and new memory, and Triton's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for name in ("locate_rows", "write", "attend_chunks", "attend_singles"):
            monkeypatch.setattr(triton_paged_attention, name, _Counted(getattr(triton_paged_attention, name), name, self.names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.name().startswith("aten::empty")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@dataclass
class _Counted:
    kernel: Any
    name: str
    names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.names.append(self.name)
            with _disable_current_modes():  # the interpreter works with torch, too
                self.kernel[grid](*arguments, **options)

        return launch


def test_a_decoding_step_launches_once_and_twice_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32
    cache = KVCache(2, 2, 16, 24, 16, dtype, DEVICE, build_backend("triton", dtype, DEVICE))
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(3, 8)
    positions = torch.tensor([3, 66, 127], device=DEVICE)
    q, k, v = torch.randn(3, 10, 16, device=DEVICE).split([6, 2, 2], 1)
    with Launches(monkeypatch) as launches:
        context = TritonAttention.decoding(positions, table, cache, 6)
        assert context.sharing > 1, "rows whose splits several programs share are counted, too"
        assert launches.names == ["locate_rows"]
        for layer in range(2):
            context.attend(layer, q, k, v, PLAIN)
    assert launches.names == ["locate_rows", *["write", "attend_singles"] * 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=str)
def test_half_precision_equals_float64_within_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    rows = Rows.draw(LENGTHS, 2, 2, 32, dtype)
    for chunk, found in zip(CHUNKS, rows.attend(CHUNKS, PLAIN, 16), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), rows.expected(*chunk, PLAIN), atol=tolerance, rtol=0)


@pytest.mark.parametrize("rule", [PLAIN, replace(PLAIN, softcap=3.0, window=50)], ids=str)
def test_batch_chunks_and_pages_change_no_bit(rule: AttentionRule) -> None:
    """Each token alone through the split kernel, in company, in chunks of several sizes, tiles and pages of several sizes. On GPUs all
    tiles are narrow: there wide ones may round otherwise."""
    wide = WIDE if DEVICE.type == "cpu" else (16, 16)
    rows = Rows.draw(LENGTHS, 1, 3, 24)
    ((whole,), (other,)) = (rows.attend([(row, 0, LENGTHS[row])], rule, 16, 0, wide[1]) for row in (4, 3))
    for page_size, size, chunk_rows in ((1, 64, 16), (7, 23, 16), (32, 130, wide[0])):
        for start in range(0, 130, size):
            count = min(size, 130 - start)
            (found,) = rows.attend([(4, start, count)], rule, page_size, start, chunk_rows)
            assert torch.equal(found, whole[start : start + count])
    for start in (0, 50, 63, 64, 129):
        (single,) = rows.attend([(4, start, 1)], rule, 16, start)
        company = rows.attend([(3, start // 2, 1), (5, 9, 20), (4, start, 1), (1, 2, 1)], rule, 5, start)
        assert torch.equal(single[0], whole[start]) and torch.equal(company[2][0], whole[start])
        assert torch.equal(company[0][0], other[start // 2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("triton") / "qwen3"
    write_random_model(path, {**MODELS["qwen3"], "num_hidden_layers": 2}, seed=7)
    return str(path)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with the CPU's numbers; test_gpu.py generates on a GPU")
@pytest.mark.parametrize(
    "changes", [{}, {"page_size": 5, "max_num_batched_tokens": 33, "num_pages": 45, "steps_per_sync": 3}], ids=str
)
def test_the_generator_draws_the_same_tokens(model: str, changes: dict[str, int]) -> None:
    requests = ragged_requests(num_prompts=6, samples=2, max_new_tokens=6)
    results = []
    for attention in ("torch", "triton"):
        decoder = load(model, alone()[1])
        config = replace(SMALL, attention=attention, **changes)
        generator = Generator(decoder, alone()[1], config, read_eos_ids(model))
        results.append(generator.generate(requests, SamplingConfig(temperature=0.9), 3, 5))
    assert tokens_of(results[0]) == tokens_of(results[1])
    for ours, torchs in zip(*results[::-1], strict=True):
        torch.testing.assert_close(ours.log_probs, torchs.log_probs, atol=2e-5, rtol=0)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="generates on the CPU, in the interpreter")
def test_the_command_line_takes_it_and_names_it(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    settings = {
        "model.path": model,
        "data.path": tmp_path / "in.jsonl",
        "out": tmp_path / "out.jsonl",
        "sampling.max_response_length": 3,
        "generation.attention": "triton",
    }
    program = "import triton_device; from rlhf_spmd.generate import main; main()"
    command = [sys.executable, "-c", program, *(f"{key}={value}" for key, value in settings.items())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(("src", "tests", "tests/helpers"))}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "attention triton" in ended.stderr, ended.stderr
    assert len(json.loads((tmp_path / "out.jsonl").read_text())["response_ids"]) == 3


# registers of a thread that Triton 3.6 and its ptxas gave for sm_90, see tests/started/compile_triton.py
REGISTERS = {
    "bf16": {
        "attend_chunks": 253,
        "attend_chunks, windows": 255,
        "attend_chunks, wide": 230,
        "attend_chunks, sinks": 255,
        "attend_singles": 168,
        "attend_singles, windows": 210,
        "attend_singles, wide": 170,
        "attend_singles, sinks": 210,
    },
    "fp32": {"attend_chunks": 108, "attend_chunks, windows": 111, "attend_singles": 96, "attend_singles, windows": 106},
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu(dtype: str, tmp_path: Path) -> None:
    """Nothing spills. Chunks take Hopper's products of warp groups, and keys arrive while others are computed. Multiplications and
    additions are fused in the matrix products alone: elsewhere both forms must round alike."""
    environment = os.environ | {"PYTHONPATH": "src", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "tests/started/compile_triton.py", dtype]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    kernels = {kernel["name"]: kernel for kernel in map(json.loads, ended.stdout.splitlines())}
    assert [*kernels] == [*REGISTERS[dtype], "locate_rows", "write"]
    for name, kernel in kernels.items():
        counts = kernel["instructions"]
        assert kernel["stack"] == 0 and kernel["registers"] <= REGISTERS[dtype].get(name, 64), kernel
        assert counts["fma"] == (kernel["products"] if dtype == "fp32" else 0), kernel
        if name in REGISTERS[dtype]:
            assert counts["cp.async"] > 0 and (
                dtype == "fp32" or counts["wgmma" if "chunks" in name and "wide" not in name else "mma.sync"] > 0
            ), kernel


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the backends are there on a GPU")
def test_a_backend_that_cannot_serve_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, allowed = torch.device("cpu"), "allowed here: auto, torch, cpp"
    with pytest.raises(
        ValueError, match=rf"^here\.attention=flash_attn: flash_attn is not installed: pip .*; {allowed}, triton$"
    ):
        GenerationConfig(attention="flash_attn", page_size=256).check_device("here")
    with pytest.raises(ValueError, match=r"attention=triton: it does not compute torch\.float64"):
        choose_backend("triton", "auto", torch.float64, cpu, "attention")
    with pytest.raises(ValueError, match="attention=flash_attn: it has no sinks"):
        choose_backend("flash_attn", "auto", torch.float32, cpu, "attention", spec_from_config(CONFIGS["gpt-oss"], "test"))
    assert choose_backend("triton", "torch", torch.float32, cpu, "attention") == "triton"
    assert choose_backend("auto", "torch", torch.float32, cpu, "attention") == "torch"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=rf"^here\.attention=triton: it needs a CUDA device, here is cpu; {allowed}$"):
        GenerationConfig(attention="triton").check_device("here")
    monkeypatch.setattr(backends, "unavailable", lambda *arguments: None)
    with pytest.raises(ValueError, match=r"^here\.page_size=64: flash_attn's pages are multiples of 256 tokens"):
        GenerationConfig(attention="flash_attn").check("here")
    assert choose_backend("auto", "torch", torch.float32, torch.device("cuda"), "attention") == "triton"
