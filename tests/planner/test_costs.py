"""The cost model against counts of the code it models (FLOPs, bytes on ranks, the scheduler's steps) and against published calls."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_runs import CONFIGS, build, next_token_loss
from generators import row_of
from places import ROOT
from ranks import run_ranks
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.page_allocator import PrefixTable
from rlhf_spmd.generation.scheduler import Scheduler
from rlhf_spmd.kernels import dispatch
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layer_kinds import Experts
from rlhf_spmd.models.linear_attention import PackedDeltaAttention
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.collectives import RECORDER, solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.planner.costs import MIXER_BACKWARD, MIXER_STARTS, PAGE, Calibration, FormulaTimes, kv_bytes_per_token
from rlhf_spmd.planner.machine import GPUS, Gpu, Machine
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Workload, call_settings, shape_of
from rlhf_spmd.workers.flops import forward_flops
from rlhf_spmd.workers.objective import MicroBatch
from small_models import CONFIGS as FAMILIES

LLAMA = ModelSpec("llama", 1000, 256, 768, 8, 8, 4, 32)
MIXED = replace(LLAMA, experts=Experts(16, 2, 384, True))
IDEAL = Calibration(1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0)
FREE = Gpu(math.inf, math.inf, math.inf, math.inf, math.inf, 0.0, 4, 0.0)  # what a test does not look at costs nothing


def machine(size: int = 16, local_size: int = 8, network: float = math.inf, **rates: float) -> Machine:
    return Machine(size, local_size, replace(FREE, **rates), (math.inf,) * size, network)


H100S = Calibration()


class CountedOperations(TorchDispatchMode):
    """``count``: operations that compute or move numbers."""

    VIEWS = ("view", "transpose", "slice", "select", "expand", "permute", "unsqueeze", "split", "unbind", "detach", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(name in str(func) for name in self.VIEWS)
        return func(*args, **(kwargs or {}))


def infer_seconds(shape: ModelShape, work: Workload, how: CallSettings, on: Machine, costs: Calibration = H100S) -> np.ndarray:
    return FormulaTimes(on, costs).infer_seconds(shape, work, how)


def train_seconds(shape: ModelShape, work: Workload, how: CallSettings, on: Machine, costs: Calibration = H100S) -> np.ndarray:
    return FormulaTimes(on, costs).train_seconds(shape, work, how)


def generate_seconds(
    shape: ModelShape, work: Workload, how: CallSettings, on: Machine, kv_bytes: float, costs: Calibration = H100S
) -> np.ndarray:
    return FormulaTimes(on, costs).generate_seconds(shape, work, how, kv_bytes)


def rows(number: int, length: float, **more: int) -> Workload:
    """Without prompts: the head has all tokens, as in ``forward_flops``."""
    return Workload(number, 0, (length,), **more)


@pytest.mark.parametrize("spec", [LLAMA, MIXED], ids=["dense", "experts"])
def test_flops_are_those_of_the_utilisation(spec: ModelSpec) -> None:
    shape, work = shape_of(spec, "lm"), rows(64, 100)
    how = call_settings([(1, 1, 1), (1, 1, 4), (1, 4, 2)], micro_tokens=[800])
    estimate = infer_seconds(shape, work, how, machine(flops=1.0), IDEAL)
    assert estimate == pytest.approx(forward_flops(spec, 6400, 100) / np.array([1, 4, 8]))
    values = shape_of(spec, "value")
    passes = forward_flops(spec, 6400, 100) - 6400 * 2 * spec.vocab_size * spec.hidden_size
    for level, layers in enumerate((3, 3, 4)):  # selective checkpointing computes the attention again, no product
        attention = 6400 * 2 * 100 * 8 * 256 if level == 1 else 0
        estimate = train_seconds(values, work, call_settings([(1, 1, 1)], checkpointing=[level]), machine(flops=1.0), IDEAL)
        assert estimate == pytest.approx(layers * passes + attention)
        head = (
            train_seconds(shape, work, call_settings([(1, 1, 1)], checkpointing=[level]), machine(flops=1.0), IDEAL) - estimate
        )
        assert head == pytest.approx(4 * 6400 * 2 * spec.vocab_size * spec.hidden_size)  # its logits are made again


def test_a_pipeline_takes_its_way_and_then_its_slowest_stage() -> None:
    work, how = rows(32, 100), call_settings([(4, 1, 1)], micro_tokens=[400])  # 8 micro-batches
    one = 4 * 2 * shape_of(LLAMA, "none").matmul_weights * 100 + 4 * 2 * 100 * 8 * 32 * 100  # FLOPs of a layer
    assert infer_seconds(shape_of(LLAMA, "value"), work, how, machine(flops=1.0), IDEAL) == pytest.approx(2 * one * (8 + 4 - 1))
    head = 2 * 400 * 1000 * 256
    estimate = infer_seconds(shape_of(LLAMA, "lm"), work, how, machine(flops=1.0), IDEAL)
    assert estimate == pytest.approx(8 * one + head + 7 * (2 * one + head))
    uneven = shape_of(replace(LLAMA, num_hidden_layers=7), "lm")  # 2, 2, 2, 1: the head evens it out
    estimate = infer_seconds(uneven, work, how, machine(flops=1.0), IDEAL)
    assert estimate == pytest.approx(7 * one + head + 7 * max(2 * one, one + head))
    several = replace(work, mini_batches=4, epochs=3)  # 2 micro-batches each
    estimate = train_seconds(shape_of(LLAMA, "value"), several, how, machine(flops=1.0), IDEAL)
    assert estimate == pytest.approx(12 * 3 * 2 * one * (2 + 4 - 1))


def test_rings_between_hosts_take_all_devices_of_a_host() -> None:
    params = shape_of(LLAMA, "none").params
    for tp, dp, rate in ((1, 8, 450.0), (1, 16, 400.0), (2, 8, 200.0), (8, 2, 50.0), (4, 2, 450.0)):
        how = call_settings([(1, tp, dp)])
        estimate = train_seconds(shape_of(LLAMA, "none"), rows(16, 10), how, machine(link=450.0, network=50.0), IDEAL)
        sums = 4 * 8 * 2 * (tp - 1) / tp * (16 / dp * 10 * 256 * 4) / 450.0
        assert estimate == pytest.approx(2 * (dp - 1) / dp * params / tp * 4 / rate + sums, rel=1e-6)


def test_between_hosts_only_sums_of_shards_are_slow() -> None:
    """Each device of a host has a ring of its own over the copies, of its own shard."""
    shape, on = shape_of(LLAMA, "none"), machine(link=450.0, network=50.0)
    how = call_settings([(1, 1, 16)], zero=[1, 3], zero_size=[8, 0], micro_tokens=[10])
    estimate, share = train_seconds(shape, rows(16, 10), how, on, IDEAL), shape.params * 4
    gathers = np.array([2, 2, 3, 3])  # with the gradients' scatter, which moves as much
    inside, across = share * 7 / 8 / 450.0 * gathers, 2 * share / 8 * 1 / 2 / 50.0
    assert estimate[[0, 2]] == pytest.approx((inside + across)[[0, 2]], rel=1e-6)
    assert estimate[[1, 3]] == pytest.approx((share * 15 / 16 / 400.0 * gathers)[[1, 3]], rel=1e-6)


def test_small_messages_take_their_latency_and_stages_what_they_hand_over() -> None:
    shape = shape_of(LLAMA, "none")
    for size, hops in ((8, 2), (16, 4)):  # 4 ranks of a host, or 16 of two, which take twice as long for a doubling
        how = call_settings([(1, size // (1 if size == 16 else 2), 1)])
        estimate = infer_seconds(shape, rows(16, 10), how, machine(latency=1.0), IDEAL)
        assert estimate == pytest.approx(8 * 2 * hops * (2 if size == 16 else 1))
    how = call_settings([(4, 1, 1), (4, 1, 4)], micro_tokens=[40])  # 4 and 1 micro-batches, in a host and between two
    size = 40 * 256 * 4
    on = machine(link=450.0, network=50.0)
    assert infer_seconds(shape, rows(16, 10), how, on, IDEAL) == pytest.approx([(3 + 3) * size / 450, 3 * size / 50])
    sums = [0, 2 * 3 / 4 * 4 * (2 * shape.layer_params + shape.embed_params) / 450]  # replicas are neighbours
    estimate = train_seconds(shape, rows(16, 10), how, on, IDEAL)
    assert estimate == pytest.approx(np.array([(3 + 3) * 2 * size / 450, 3 * 2 * size / 50]) + sums, rel=0.01)


def mixer_operations(tokens: int) -> tuple[int, int]:
    """Operations of torch that linear attention starts for rows of ``tokens``, forward and backward."""
    spec = spec_from_config(FAMILIES["qwen3-5"], "test")
    delta = spec.delta_rule
    assert delta is not None
    with mock.patch.object(dispatch, "_load", return_value=None):
        decoder = Decoder(spec, "none", 0, 1, solo(), torch.float32, "cpu")
        block = decoder.layers[min(delta.layers)]
        assert isinstance(block, Block) and block.mixer is not None
        product = torch.randn(2 * tokens, delta.columns, requires_grad=True)
        with CountedOperations() as forward:
            out = block.mixer(product, PackedDeltaAttention(PackedAttention([tokens] * 2, "cpu")))
        with CountedOperations() as backward:
            out.backward(torch.ones_like(out))
    return forward.count, backward.count


def test_the_host_starts_linear_attention_chunk_by_chunk() -> None:
    for tokens in (128, 256, 512):
        forward, backward = mixer_operations(tokens)
        assert forward == pytest.approx(MIXER_STARTS[0] + MIXER_STARTS[1] * tokens // 64, rel=0.08)
        assert backward == pytest.approx(MIXER_BACKWARD[0] + MIXER_BACKWARD[1] * tokens // 64, rel=0.08)
    shape, how = shape_of(spec_from_config(FAMILIES["qwen3-5"], "test"), "none"), call_settings([(1, 1, 1)], checkpointing=[1])
    slow, work = Calibration(1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, start=1.0), rows(4, 1000)
    linear = shape.num_layers * shape.linear_share  # of 4 layers; 16 chunks
    assert infer_seconds(shape, work, how, machine(), slow) == pytest.approx(linear * (80 + 5 * 16))
    assert train_seconds(shape, work, how, machine(), slow) == pytest.approx(linear * (2 * (80 + 5 * 16) + 155 + 16 * 16))
    assert generate_seconds(shape, work, how, machine(), math.inf, slow) == pytest.approx(linear * (80 + 1000 * 50), rel=1e-3)


def test_a_step_draws_from_the_whole_vocabulary() -> None:
    work, how = Workload(32, 0, (10.0,)), call_settings([(1, 1, 1), (1, 4, 1)])
    bytes_ = 10 * 32 * 1000 * 80, [0, 10 * 32 * 1000 * 4 * 3 / 4]
    for on, costs, expected in zip(
        (machine(bandwidth=1.0), machine(link=1.0)), (replace(IDEAL, reads=math.inf), IDEAL), bytes_, strict=True
    ):
        full, none = (generate_seconds(shape_of(LLAMA, head), work, how, on, math.inf, costs) for head in ("lm", "none"))
        assert full - none == pytest.approx(expected)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By the number of layers, with matrices that 2 divides."""
    base: Path = tmp_path_factory.mktemp("models")
    for layers in (2, 5):
        write_random_model(base / str(layers), {**CONFIGS["untied"], "vocab_size": 40, "num_hidden_layers": layers}, seed=3)
    return {layers: str(base / str(layers)) for layers in (2, 5)}


ROWS, LENGTH, PARTS = 8, 32, 2  # of a replica, in two micro-batches


def received(world: Any, path: str, layout: Layout, checkpointing: str) -> int:
    """Bytes that come to this rank in a training step."""
    engine = build(world, path, layout, dtype=torch.float32, activation_checkpointing=checkpointing)
    lengths = torch.full((ROWS // PARTS,), LENGTH)
    batches = [MicroBatch(torch.arange(int(lengths.sum())) % 40, lengths) for _ in range(PARTS)]
    before = RECORDER.received.total()
    engine.forward_backward(batches, next_token_loss)
    engine.optimizer_step()
    return RECORDER.received.total() - before


SLICED = Layout(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        *zip((Layout(tp=2), SLICED, Layout(tp=2), SLICED), ("none", "selective", "full", "full"), strict=True),
        *((Layout(dp=2, zero=stage), "none") for stage in range(4)),
        *((Layout(dp=4, zero=stage, zero_size=2), "none") for stage in (1, 3)),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_step(models: dict[int, str], layout: Layout, checkpointing: str) -> None:
    """Those of three layers more: the embedding and the head, which send something too, are left out. An all-reduce is counted once
    for each element, and a ring of n moves (n - 1) / n of them twice: of two ranks as many."""
    how = call_settings(
        [(1, layout.tp, layout.dp)],
        micro_tokens=[ROWS * LENGTH // PARTS],
        zero=[layout.zero],
        zero_size=[layout.zero_size or 0],
        checkpointing=[CHECKPOINTING.index(checkpointing)],
        sequence_parallel=[int(layout.sequence_parallel)],
    )
    counts, costs = {}, {}
    for layers, path in models.items():
        counts[layers] = run_ranks(layout.size, received, path, layout, checkpointing)[0]
        shape, work = shape_of(read_spec(path), "lm"), rows(layout.dp * ROWS, LENGTH)
        costs[layers] = train_seconds(shape, work, how, machine(link=1.0), IDEAL)[0]
    assert costs[5] - costs[2] == pytest.approx(counts[5] - counts[2], rel=0.01)


def scheduled(work: Workload, flight: int, pages: int, layers: float, weights: float, token: float) -> float:
    """Seconds of the scheduler's own steps: ``layers`` to start a step, ``weights`` for what it reads, ``token`` for each token that a
    row has by then; prompts are free. Lengths are dealt so that any few rows have all of them."""
    scheduler = Scheduler(GenerationConfig(num_pages=pages, max_num_seqs=flight, max_num_batched_tokens=1 << 20))
    order = np.random.default_rng(0).permutation(np.resize(work.responses, work.rows))
    ends, prefix_table = {}, PrefixTable(PAGE)
    for index, length in enumerate(order):
        first = index // work.group * 1000
        row = row_of(index, range(first, first + int(work.prompt)), int(max(work.responses)))
        row.prefix_ids = prefix_table.prefix_ids(row.request.prompt_ids)
        ends[row] = int(length)
        scheduler.add(row)
    seconds = 0.0
    while not scheduler.finished:
        step = scheduler.schedule()
        overrides = [item.row for item in step.work if item.samples]
        seconds += layers + weights + token * sum(row.length for row in overrides)
        for row in overrides:
            row.tokens.append(7)
            row.stopped = row.num_new == ends[row]
        scheduler.advance(step)
        for row in overrides:
            if row.stopped:
                scheduler.end(row)
    return seconds


EVEN, UNEVEN = (256.0,), tuple(32.0 * k for k in range(1, 16, 2))


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("number", "flight", "pages", "group"),
    [(32, 64, 4000, 1), (96, 32, 4000, 1), (256, 16, 4000, 1), (96, 96, 150, 1), (96, 96, 100, 8)],
)
def test_generation_takes_the_steps_of_the_scheduler(
    number: int, flight: int, pages: int, group: int, lengths: tuple[float, ...]
) -> None:
    """Without a limit, in waves by number, and in waves by memory, where rows of a prompt share its pages."""
    shape, work = shape_of(LLAMA, "none"), Workload(number, 224, lengths, group=group)
    how = call_settings([(1, 1, 1)], max_num_seqs=[flight])
    held = float(kv_bytes_per_token(shape, how, 4)[0])
    assert held == 8 * 2 * 4 * 32 * 4
    costs = replace(IDEAL, memory=math.inf, kernels=1e-3)
    on = machine(bandwidth=1e9)
    got = generate_seconds(shape, work, how, on, pages * PAGE * held, costs)[0]
    prefill = 8 * (2e-3 + shape.layer_params * 4 / 1e9)
    want = scheduled(work, flight, pages, 8 * 2e-3, shape.layer_params * 8 * 4 / 1e9, held / 1e9)
    assert got - prefill == pytest.approx(want, rel=0.1)


def test_prompts_are_computed_once_for_a_group() -> None:
    shape, how = shape_of(LLAMA, "none"), call_settings([(1, 1, 1), (1, 1, 4)], micro_tokens=[500])
    prompts = forward_flops(LLAMA, 1000, 100) - 1000 * 2 * 1000 * 256
    drawn = 40 * 10 * 8 * 2 * shape.matmul_weights  # whose attention reads, and computes nothing that counts
    for group in (1, 4):
        estimate = generate_seconds(shape, Workload(40, 100, (10.0,), group=group), how, machine(flops=1.0), math.inf, IDEAL)
        assert estimate == pytest.approx(np.array([1, 12 / 40 if group == 4 else 1 / 4]) * (prompts * 4 / group + drawn))


def test_passes_compute_a_prompt_once_for_the_rows_of_a_micro_batch() -> None:
    """Of 4 rows in a micro-batch, and of 1; attention is over whole rows, whose tokens see 55 on average."""
    shape, work = shape_of(LLAMA, "none"), Workload(8, 100, (10.0,), group=4)
    how = call_settings([(1, 1, 1)], micro_tokens=[440, 110])
    tokens, attention = np.array([2 * (100 + 4 * 10), 8 * 110]), 4 * shape.query_dims * 55 * 8 * 110
    for seconds, times in ((infer_seconds, 1), (train_seconds, 3)):
        estimate = seconds(shape, work, how, machine(flops=1.0), IDEAL)
        assert estimate == pytest.approx(times * shape.num_layers * (2 * shape.matmul_weights * tokens + attention))


def test_what_zero_sends_goes_on_beside_computing() -> None:
    shape, work, single = shape_of(LLAMA, "none"), rows(64, 100), call_settings([(1, 1, 1)], micro_tokens=[400])
    how = call_settings([(1, 1, 4)] * 2, zero=[1, 2, 3], micro_tokens=[400])
    compute = train_seconds(shape, rows(16, 100), single, machine(flops=1e9), IDEAL)[0]
    for link in (1e9, 1e6):
        sent = train_seconds(shape, work, how, machine(link=link), IDEAL)
        beside = compute * np.where(how.zero == 1, 1 / 4, 1)  # 1 sends beside the last micro-batch
        estimate = train_seconds(shape, work, how, machine(flops=1e9, link=link, overlap=1.0), IDEAL)
        assert estimate == pytest.approx(compute + np.maximum(sent - beside, 0))


def test_bytes_over_the_memory() -> None:
    """An optimizer step, which ZeRO divides; a head's logits."""
    shape, on = shape_of(LLAMA, "none"), machine(bandwidth=1.0, host_link=2.0)
    only = replace(IDEAL, reads=math.inf)
    how = call_settings([(1, 1, 1), (1, 1, 2)], zero=[0, 1])
    one = train_seconds(shape, rows(16, 100), how, on, only)
    two = train_seconds(shape, rows(16, 100, mini_batches=2), how, on, only)
    sums = shape.num_layers * shape.layer_params * 10  # each mini-batch is a micro-batch of its own, with a sum of gradients
    assert two - one == pytest.approx(shape.params * 50 / np.array([1, 1, 1, 2]) + sums)
    full, none = (infer_seconds(shape_of(LLAMA, head), rows(16, 100), how, on, only) for head in ("lm", "none"))
    assert full - none == pytest.approx(1600 * 1000 * 28 / np.array([1, 1, 2, 2]))


def test_graphs_and_lanes() -> None:
    """The host starts layers one after the other, or a graph does; lanes of a pipeline take turns on each stage."""
    shape, work = shape_of(LLAMA, "none"), Workload(64, 0, (100.0,))
    slow = replace(IDEAL, launch=1e-3, kernels=1e-5)
    how = call_settings([(1, 1, 1), (4, 1, 1)], graphs=[0, 1], max_num_seqs=[64])
    eager, graphs, staged, both = generate_seconds(shape, work, how, machine(), math.inf, slow)
    outside = 5 * 1e-3
    assert eager == pytest.approx(100 * (8e-3 + outside) + 8e-3)
    assert graphs == pytest.approx(100 * (16e-5 + outside) + 8e-3)
    assert staged == pytest.approx(100 * 4 * (2e-3 + outside) + 8e-3)
    assert both == pytest.approx(100 * 4 * (4e-5 + outside) + 8e-3)


def test_matrix_products_lose_with_small_slices_as_vidur_measured() -> None:
    """Shares of the peak of an H100 in Vidur's profiles, of a layer of LLaMA-2 7B and 70B, by (tokens, tp)."""
    measured = {
        (4096, 4096, 11008, 32): {(4096, 1): 0.76, (4096, 2): 0.76, (4096, 4): 0.73, (4096, 8): 0.66, (512, 8): 0.37},
        (8192, 8192, 28672, 8): {(4096, 1): 0.70, (4096, 2): 0.71, (4096, 4): 0.75, (4096, 8): 0.75, (512, 8): 0.61},
    }
    only = replace(IDEAL, matrix=Calibration().matrix, kernels=Calibration().kernels)
    on = Machine(8, 8, replace(GPUS["h100"], link=math.inf, latency=0.0, bandwidth=math.inf), (0.0,) * 8, math.inf)
    for (hidden, _, inner, kv), shares in measured.items():
        shape = shape_of(ModelSpec("llama", 32000, hidden, inner, 1, hidden // 128, kv, 128), "none")
        for (tokens, tp), share in shares.items():
            how = call_settings([(1, tp, 1)], micro_tokens=[tokens])
            products = infer_seconds(shape, rows(tokens, 1), how, on, only)[0] - only.kernels  # without the other kernels
            assert 2 * shape.matmul_weights * tokens / tp / 989e12 / products == pytest.approx(share, abs=0.07), (
                hidden,
                tokens,
                tp,
            )


def test_published_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReaL's tables 4 to 6. The bounds are what a planner needs: which plan is better, and by how much."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    bench = runpy.run_path(str(ROOT / "scripts" / "bench" / "paper_real_calls.py"))
    errors = np.abs(bench["errors"](Calibration()))
    assert len(errors) == 14 and errors.mean() <= 0.08 and (errors <= 0.25).all()
    ours = [bench["estimate"](call, Calibration()) for call in bench["REAL"]]
    steps = {key: bench["BEYOND"] * bench["step_seconds"](ours, *key) for key in bench["STEPS"]}
    assert sorted(steps, key=steps.get) == sorted(steps, key=bench["STEPS"].get)  # type: ignore[arg-type]
    for key, seconds in bench["STEPS"].items():
        assert steps[key] == pytest.approx(seconds, rel=0.1)
    start = replace(Calibration(), memory=0.4, launch=1e-3, call=0.5)
    again = bench["fit"](bench["REAL"], bench["FITTED"], start)
    for name in bench["FITTED"]:  # the defaults are the fit, rounded
        assert getattr(Calibration(), name) == pytest.approx(getattr(again, name), rel=0.05)
