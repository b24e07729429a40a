"""The C++ kernels against fp64 references, and what they promise: bits that depend on the row, not on what is computed beside it."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tasks
from attention_definition import attend
from generators import row_of
from ranks import run_ranks
from rlhf_spmd import kernels
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.kernels import AttentionRule, Ops, build, choose_ops, dispatch
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.dense_attention import attend_dense
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS
from tiers import tiers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 5, 70, 63, 64, 131, 2, 200]
HEADS = [(4, 2, 32), (2, 1, 10), (1, 7, 64), (2, 3, 16), (1, 2, 128), (2, 2, 80)]  # KV heads, group, head_dim
CASES = [*((heads, 1) for heads in HEADS), (HEADS[0], 2), (HEADS[1], 2)]  # with numbers of threads
RULES = [
    (None, None, False),
    (20.0, None, False),
    (None, 17, True),
    (5.0, 70, False),
    (None, None, True),
]  # softcap, window, sinks
PAGES = [(64, [1]), (16, [33, 1, 7]), (5, [50, 1]), (1, [64, 3]), (100, [1000])]  # size, tokens of each row's next chunks


@pytest.fixture(params=tiers(["native", "x86-64-v3"], ["native"]))
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[kernels.CppOps]:
    """As built for this processor, and for vectors of 8 floats, which every x86 processor of today has, without AMX."""
    if request.param != "native":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv(dispatch.TARGET, request.param)
    dispatch._load.cache_clear()
    try:
        build.build(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    ops = choose_ops(torch.float32, torch.device("cpu"))
    assert isinstance(ops, kernels.CppOps), "a compiler is here, yet the kernels do not build"
    yield ops
    dispatch._load.cache_clear()


def ops_of(x: Tensor) -> Ops:
    return choose_ops(x.dtype, x.device)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def qkv_of(heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one packed tensor, as a decoder has them."""
    kv, group, dim = heads
    q, k, v = draw((sum(LENGTHS), kv * (group + 2), dim), dtype, 1.5).split([kv * group, kv, kv], 1)
    return q, k, v


def paged(cpp: kernels.CppOps, qkv: tuple[Tensor, ...], rule: AttentionRule, page_size: int, chunks: list[int]) -> Tensor:
    """The sequences fed in chunks of tokens through pages in a shuffled order that hold NaN where nothing was written."""
    q, k, _ = qkv
    kv, dim = k.shape[1:]
    pages = [-(-length // page_size) for length in LENGTHS]
    cache = torch.full((2, kv, sum(pages), kernels.CppOps.page_elements(page_size, dim)), math.nan, dtype=q.dtype)
    table = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    starts, done, out = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))], [0] * len(LENGTHS), torch.empty_like(q)
    for step in range(sum(LENGTHS)):
        items, index = [], []
        for i, length in enumerate(LENGTHS):
            count = min(chunks[step % len(chunks)], length - done[i])
            if count:
                items.append([len(index), done[i], count, sum(pages[:i])])
                index += range(starts[i] + done[i], starts[i] + done[i] + count)
                done[i] += count
        if not items:
            break
        some = (x[index] for x in qkv)
        out[index] = cpp.attend_paged(*some, torch.tensor(items), table, cache, page_size, rule)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "threads"), CASES, ids=str, indirect=["threads"])
def test_attention(cpp: kernels.CppOps, heads: tuple[int, int, int], dtype: torch.dtype, threads: int) -> None:
    """Against fp64, packed, alone, by pages, and backward; and by torch in both its orders."""
    most, most_of_gradients = (2e-5, 5e-6) if dtype == torch.float32 else (4e-2, 3e-2)
    bounds, first_pages = torch.tensor([0, *LENGTHS]).cumsum(0), HEADS.index(heads) + threads
    for number, (softcap, window, has_sinks) in enumerate(RULES):
        plain = AttentionRule(heads[2] ** -0.5, softcap, window)
        qkv, sinks = qkv_of(heads, dtype), [torch.linspace(-2, 4, heads[0] * heads[1]).to(dtype)] if has_sinks else []
        wide = [x.detach().double().requires_grad_() for x in (*qkv, *sinks)]
        grad = draw(tuple(qkv[0].shape), dtype, seed=5)
        wanted, _ = attend(*wide[:3], LENGTHS, with_sinks(plain, wide[3:]))
        wanted.backward(grad.double())
        for ops in (cpp, BatchInvariantOps(), Ops()):
            ours = [x.detach().requires_grad_() for x in (*qkv, *sinks)]
            out = PackedAttention(LENGTHS, ops=ops).attend(0, *ours[:3], with_sinks(plain, ours[3:]))
            assert (out.double() - wanted).abs().max() < most, (type(ops), plain)
            out.backward(grad)
            for a, b in zip(ours, wide, strict=True):
                assert (a.grad.double() - b.grad).abs().max() / b.grad.abs().max() < most_of_gradients, (type(ops), plain)
        rule = with_sinks(plain, sinks)
        out, log_sums = cpp.packed(*qkv, bounds, rule)
        assert log_sums.isfinite().all()
        for part, together in zip(zip(*(x.split(LENGTHS) for x in qkv), strict=True), out.split(LENGTHS), strict=True):
            assert torch.equal(cpp.packed(*part, torch.tensor([0, len(part[0])]), rule)[0], together)
        for page_size, chunks in (PAGES[(first_pages + number) % 5], PAGES[(first_pages + number + 2) % 5]):
            assert torch.equal(paged(cpp, qkv, rule, page_size, chunks), out), (rule, page_size)


def with_sinks(rule: AttentionRule, sinks: Sequence[Tensor]) -> AttentionRule:
    return replace(rule, sinks=sinks[0]) if sinks else rule


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "inner"), [(512, 256), (100, 86), (1, 768), (49, 3), (1000, 64)])
def test_products(cpp: kernels.CppOps, dtype: torch.dtype, outs: int, inner: int, threads: int) -> None:
    x, weight, bias = draw((139, inner), dtype), draw((outs, inner), dtype, seed=1), draw((outs,), dtype, seed=2)
    if not cpp.multiplies(x, weight):
        assert dtype == torch.bfloat16 or not cpp.multiplies(x.float(), weight.float())
        return
    wanted = x.double() @ weight.double().t()
    wide = cpp.product(x, weight, wide=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), wanted, atol=2e-6 * inner, rtol=0)
    close = {"atol": 2e-6 * inner, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    out = cpp.product(x, weight, bias)
    torch.testing.assert_close(out.double(), wanted + bias.double(), **close)
    for rows in (1, 2, 3, 15, 16, 17, 32, 33, 100):  # the same bits in any company and place, also from strided rows
        assert torch.equal(cpp.product(x[:rows], weight, bias), out[:rows])
        assert torch.equal(cpp.product(x[139 - rows :], weight, bias), out[139 - rows :])
    spread = torch.cat([x, x], 1)[:, :inner]
    assert torch.equal(cpp.product(spread, weight, bias), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_gradients(cpp: kernels.CppOps, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has no bfloat16 products, torch's take 5 times as long as float32's: none is asked for."""
    kinds, mm = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: kinds.add(a.dtype) or mm(a, b, **more))
    x, weight, bias = draw((37, 20), dtype), draw((11, 20), dtype, seed=1), draw((11,), dtype, seed=2)
    experts, grad = draw((2, 1, 11, 20), dtype, seed=3), draw((37, 11), dtype, seed=4)
    most = 1e-5 if dtype == torch.float32 else 2e-2
    for operation, inputs in ((cpp.linear, (x, weight, bias)), (lambda a, w: cpp.per_expert(a, w, [30, 7]), (x, experts))):
        ours, wide = ([p.to(kind).clone().requires_grad_() for p in inputs] for kind in (dtype, torch.float64))
        kinds.clear()
        operation(*ours).backward(grad)
        assert kinds == {torch.float32} or os.environ.get(dispatch.TARGET) != "x86-64-v3"
        operation(*wide).backward(grad.double())
        for a, b in zip(ours, wide, strict=True):
            torch.testing.assert_close(a.grad.double(), b.grad, atol=most, rtol=most)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_operations_against_fp64_and_row_by_row(cpp: kernels.CppOps, dtype: torch.dtype, threads: int) -> None:
    x, weight, gates = draw((37, 3, 50), dtype, 2), draw((50,), dtype, seed=1), draw((800, 166), dtype, 5, seed=2)
    angles = draw((37, 1, 25), torch.float32, 3, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(a: Tensor, pairs: int, interleaved: bool) -> Tensor:
        return ops_of(a).rotate(a, *(table[: len(a), :, :pairs].to(a.dtype) for table in (cos, sin)), interleaved)

    cases: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
        "norm": (lambda a, w: ops_of(a).rms_norm(a, w, 1e-5), x[:, 1:]),
        "norm of rows": (lambda a, w: ops_of(a).rms_norm(a, w, 1e-5), x[:, 0]),
        "norm plus one": (lambda a, w: ops_of(a).rms_norm(a, w, 1e-5, True), x),
        "rotate": (lambda a, w: rotate(a, 25, False) * w[0], x[:, 1:]),
        "rotate in part": (lambda a, w: rotate(a, 9, False) * w[0], x[:, 1:]),
        "rotate neighbours": (lambda a, w: rotate(a, 25, True) * w[0], x[:, 1:]),
        "rotate some neighbours": (lambda a, w: rotate(a, 19, True) * w[0], x),
        "silu": (lambda a, w: ops_of(a).gated_activation(a, False) * w[0], gates),
        "gelu": (lambda a, w: ops_of(a).gated_activation(a, True) * w[0], gates),
    }
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for name, (operation, value) in cases.items():
        ours, wide = ([p.to(kind).clone().requires_grad_() for p in (value, weight)] for kind in (dtype, torch.float64))
        results = [operation(*leaves) for leaves in (ours, wide)]
        assert results[0].dtype == dtype
        with torch.no_grad():
            assert torch.equal(operation(value[:5].clone(), weight), results[0][:5]), name
        grad = draw(tuple(results[0].shape), dtype, seed=4)
        results[0].backward(grad)
        results[1].backward(grad.double())
        for a, b in zip((results[0], *(p.grad for p in ours)), (results[1], *(p.grad for p in wide)), strict=True):
            assert (a - b).norm() <= bound * b.norm(), name


def test_capped_attention_of_gpus_keeps_scores_in_fp32() -> None:
    """Only inputs, probabilities and the result are rounded to bf16, each by 2^-9 at most; scores are up to 40, of which bf16 would
    lose 0.1."""
    rule = AttentionRule(1.0, softcap=50.0)
    q, k, v, weight = (draw((1, 4, 70, 64), torch.bfloat16, seed=seed) for seed in range(4))
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend_dense(*leaves, rule, None)
        results.append((out, *torch.autograd.grad(out, leaves, weight.to(dtype))))
    for number, (got, want) in enumerate(zip(*results, strict=True)):
        assert (got - want).norm() < (8e-3 if number else 4e-3) * want.norm()


def test_logit_statistics(cpp: kernels.CppOps) -> None:
    logits, labels = draw((9, 517), torch.float32, 20), torch.tensor([0, 516, 517, 1033, 1034, 600, 530, 999, 5])
    logits[2, :500] = -math.inf  # tokens that may not be drawn
    first, shifted = 517, logits.double() - logits.double().amax(-1, keepdim=True)
    largest, total, at_label, weighted = cpp.logit_statistics(logits, labels, first, True)
    assert torch.equal(largest, logits.amax(-1))
    torch.testing.assert_close(total.double(), shifted.exp().sum(-1), atol=0, rtol=1e-6)
    wanted = [float(logits[i, n - first]) if 0 <= n - first < 517 else 0.0 for i, n in enumerate(labels.tolist())]
    assert at_label.tolist() == wanted
    torch.testing.assert_close(weighted.double(), (shifted.exp() * shifted.clamp(min=-1e4)).sum(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(
        cpp.logit_statistics(logits[3:4], labels[3:4], first, True)[:, 0],
        torch.stack([largest, total, at_label, weighted])[:, 3],
    )


def test_logit_gradients(cpp: kernels.CppOps, threads: int) -> None:
    logits, labels, grads = draw((150, 1034), torch.float32, 9), torch.arange(150) * 6, draw((150,), torch.float32, seed=1)
    logits[0, 520:600] = -math.inf
    wide = logits.double().requires_grad_()
    (torch.log_softmax(wide, -1).gather(1, labels[:, None])[:, 0] * grads).sum().backward()
    log_z = torch.logsumexp(logits, -1)
    for first, last in ((0, 517), (517, 1034)):  # two ranks' slices
        part = logits[:, first:last].contiguous()
        cpp.logit_gradients(part, labels, first, log_z, grads)
        torch.testing.assert_close(part.double(), wide.grad[:, first:last], atol=1e-5, rtol=1e-5)


def test_argmax_takes_the_first_of_equal_ones(cpp: kernels.CppOps) -> None:
    logits = draw((33, 1030), torch.float32, 3)
    logits[3, 1029] = logits[4, 0] = logits[5, 600] = 50.0
    logits[6, [100, 99, 700]] = 60.0
    assert torch.equal(cpp.argmax(logits), logits.argmax(-1)) and int(cpp.argmax(logits)[6]) == 99


# dense layers without other operations than these, each at one number of threads or with one dtype in turn
ONE_BY_ONE = ("llama-tied-bias", "seed-oss", "ministral3", "qwen3-5", "gemma4")
LAYERS = [name for name, config in CONFIGS.items() if name not in ONE_BY_ONE and "num_experts_per_tok" not in config]
SHORT_LAYERS = ("llama", "qwen3-tied", "gemma2", "olmo2", "glm4")


@pytest.mark.parametrize(("threads", "dtype"), [(1, DTYPES[0]), (2, DTYPES[1])], ids=str, indirect=["threads"])
@pytest.mark.parametrize("name", tiers(LAYERS, SHORT_LAYERS))
def test_a_whole_layer_has_the_bits_of_its_operations(
    cpp: kernels.CppOps, name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and paged, with and without gradients, in few rows and in many; the buffers stand from one layer to the next."""
    if not cpp.is_batch_invariant(dtype, 2):
        pytest.skip("no product in C++ for this dtype here")
    calls, buffers, layer = [], set(), cpp.fused_layer

    def counted(*args: Any) -> Any:
        run = layer(*args)

        def noted(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Any, tokens: int) -> Any:
            calls.append(len(x))
            out = run(x, cos, sin, attention, tokens)
            buffers.add((attention, attention.space.data_ptr()))
            return out

        return run and noted

    monkeypatch.setattr(cpp, "fused_layer", counted)
    decoder = Decoder(spec_from_config(CONFIGS[name], name), "none", 0, 1, solo(), dtype, "cpu")
    for seed, parameter in enumerate(decoder.parameters()):
        parameter.data = draw(tuple(parameter.shape), dtype, 0.3, seed)
    block, cpu = decoder.layers[1], torch.device("cpu")
    for lengths in ([3, 1], [70, 200, 33]):
        tokens = torch.randint(3, 101, (sum(lengths),), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            out = decoder(tokens, PackedAttention(lengths))
        assert calls == [max(sum(lengths), decoder.min_rows)] * len(decoder.layers)
        assert torch.equal(decoder(tokens, PackedAttention(lengths)), out)
        rows = [row_of(i, [0] * n, 0, pages=[2 * i + 1, 2 * i]) for i, n in enumerate(lengths)]
        backend, shape = build_backend("cpp", dtype, cpu), (len(decoder.layers), block.num_kv_heads, block.head_dim)
        cache = KVCache(*shape, 2 * len(rows), 128, dtype, cpu, backend)
        work = [SequenceWork(row, 0, row.length, True) for row in rows]
        assert len(buffers) == 1
        with torch.no_grad():
            assert torch.equal(decoder(tokens, backend.for_step(work, cache, 4)), out)
        assert len(buffers) == 2
        calls.clear()
        buffers.clear()


def test_draws_follow_the_cumulative_distribution(cpp: kernels.CppOps) -> None:
    logits = draw((40, 517), torch.float32, 3)
    logits[:, ::7] = -math.inf
    uniforms = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    cumulative = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    wanted = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    drawn = cpp.draw(logits, 0.7, uniforms)
    assert torch.equal(drawn, wanted) and (drawn % 7 != 0).all()
    assert drawn[0] == 1 and drawn[1] == 516  # the first and the last token that can be drawn
    assert torch.equal(cpp.draw(logits[7:9], 0.7, uniforms[7:9]), drawn[7:9])


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    dispatch._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not any(isinstance(ops_of(torch.empty(0)), kernels.CppOps) for _ in range(2))
        assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text
        cpu = torch.device("cpu")
        assert choose_ops(torch.float32, cpu).name == "torch"
        with pytest.raises(ValueError, match=r"models\.actor\.attention=cpp: .* set it to auto or torch"):
            choose_ops(torch.float32, cpu, "cpp", "models.actor.attention")
        out = PackedAttention([3, 4]).attend(0, *(torch.ones(7, 2, 8),) * 3, AttentionRule(1.0))
        assert torch.equal(out, torch.ones(7, 2, 8))
    finally:
        dispatch._load.cache_clear()


def test_processes_share_one_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three at once in an empty cache: one library comes out, nothing unfinished stays behind; a broken source is an OSError."""
    program = "import sys, pathlib; from rlhf_spmd.kernels import build; "
    program += "build.cache_directory = lambda: pathlib.Path(sys.argv[1]); "
    program += "build.FLAGS = ('-std=c++17', '-shared', '-fPIC'); build.SOURCES = build.SOURCES[2:]; print(build.build())"
    source = str(Path(build.__file__).parents[2])
    command, environment = [sys.executable, "-c", program, str(tmp_path)], {"PYTHONPATH": source, "PATH": "/usr/bin:/bin"}
    runs = [subprocess.Popen(command, env=environment, stdout=-1) for _ in range(3)]
    paths = {run.communicate(timeout=600)[0] for run in runs}
    assert len(paths) == 1 and all(run.returncode == 0 for run in runs)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".so"]
    broken = tmp_path / "broken.cpp"
    broken.write_text("not C++")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    with pytest.raises(OSError, match="failed"):
        build.build()


@pytest.mark.parametrize(
    ("change", "is_equal"), [("models.actor.attention=torch", True), ("models.actor.generation.attention=torch", False)]
)
def test_training_with_each_choice(tmp_path: Path, change: str, is_equal: bool) -> None:
    """Generation and training agree bit for bit when they take the same attention, and closely when they do not."""
    run_ranks(1, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, change))
    difference = tasks.read_run(tmp_path).log_prob_difference()
    assert difference == 0 if is_equal else 0 < difference < 1e-4


@pytest.mark.long
def test_training_is_exact_on_processors_with_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that asks for exact log-probs, of which torch's products for AVX2 have none."""
    if "avx2" not in build._cpu_flags().split():
        pytest.skip("this processor has no AVX2")
    for name, value in ((dispatch.TARGET, "x86-64-v3"), ("MKL_ENABLE_INSTRUCTIONS", "AVX2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")):
        monkeypatch.setenv(name, value)
    changes = "models.actor.generation.reuse_rollout_log_probs=true", "models.actor.dtype=bfloat16"
    process = tasks.start_program(1, tmp_path, tasks.settings(tmp_path, 1, *changes))
    assert tasks.finish(process, tmp_path) == 0, (tmp_path / "output.txt").read_text()
    run = tasks.read_run(tmp_path)
    assert run.log_prob_difference() == 0 and "timing_s/compute_log_prob" not in run.raw[0]


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_wide_products_are_exact_also_where_their_parts_do_not_divide_the_columns(precision: str) -> None:
    """A last part of one column would be another kind of product."""
    torch.set_float32_matmul_precision(precision)
    x, weight = draw((64, 4096), torch.bfloat16), draw((4161, 4096), torch.bfloat16, seed=1)
    for ops in (choose_ops(torch.bfloat16, torch.device("cpu")), choose_ops(torch.bfloat16, torch.device("cpu"), "torch")):
        whole = ops.logits(x, weight)
        torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), atol=1e-3, rtol=1e-5)
        if ops.is_batch_invariant(torch.bfloat16):
            for rows in (1, 17, 23):
                assert torch.equal(ops.logits(x[:rows], weight), whole[:rows])


PROBE = """
import torch, torch.nn.functional as F
from rlhf_spmd.kernels import choose_ops
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(3)
for precision in ("highest", "medium"):
    torch.set_float32_matmul_precision(precision)
    for dtype in (torch.float32, torch.bfloat16):
        ops = choose_ops(dtype, torch.device("cpu"), "torch")
        alike = True
        for columns, inner in ((256, 768), (40, 96), (517, 2048)):
            x, weight = (torch.randn(n, inner, generator=draw).to(dtype) for n in (80, columns))
            for product in (F.linear, ops.logits):
                whole, least = product(x, weight), ops.min_rows(weight.numel(), inner)
                alike &= all(torch.equal(product(x[7 : 7 + n], weight), whole[7 : 7 + n]) for n in range(least, 40))
        print(precision, dtype, alike, ops.is_batch_invariant(dtype), ops.is_batch_invariant(dtype, 2))
"""


@pytest.mark.parametrize("instructions", tiers([None, "AVX2"], [None]))
def test_products_of_torch_are_called_exact_only_where_they_are(instructions: str | None) -> None:
    """Those that MKL and oneDNN have for AVX2 are not, nor those of bfloat16 with AMX; the environment makes this processor one with
    AVX2 alone."""
    limits = {} if instructions is None else {"MKL_ENABLE_INSTRUCTIONS": instructions, "ONEDNN_MAX_CPU_ISA": instructions}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **limits}, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for *_, alike, one, two in lines:
        assert two == "False" and one == alike, done.stdout
    if instructions is None and torch.backends.cpu.get_cpu_capability() == "AVX512" and not kernels.has_amx():
        assert all(line[2] == "True" for line in lines), done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("x86-64-v9", "target 'x86-64-v9' of the C++ kernels is not known; allowed: native, x86-64-v3, x86-64-v4"),
        ("x86-64-v4", "target x86-64-v4 of the C++ kernels does not run here: this processor has no avx512bw, avx512f"),
    ],
)
def test_a_target_that_cannot_be_is_refused(target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu_flags", lambda: "flags : sse4_2 avx2 fma avx512cd avx512dq avx512vl\n")
    monkeypatch.setenv(dispatch.TARGET, target)
    dispatch._load.cache_clear()
    with pytest.raises(ValueError, match=re.escape(said)):
        choose_ops(torch.float32, torch.device("cpu"))
