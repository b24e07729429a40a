"""The same programs on a CUDA device, against themselves on CPUs. Skipped where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tasks
from engine_runs import LLAMA, STEADY, assert_same, together
from engine_runs import train as train_engine_steps
from generators import MODELS, alone, ragged_requests, tokens_of
from places import ROOT
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.kernels import choose_ops
from rlhf_spmd.kernels.pinned_memory import copy_to_host, host_like, host_zeros
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import init_random, load_pretrained, write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.world import World, backend_of
from rlhf_spmd.workers import train_engine
from small_models import CONFIGS, LENGTHS, make_batch, make_model

DEVICE = "cuda"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def float32_products(as_on_a_rank: None) -> None:
    """As in programs on GPUs; what CPU ranks choose would be TF32 here."""
    torch.set_float32_matmul_precision("highest")


def train(run_dir: Path, steps: int, *overrides: str) -> tasks.Run:
    settings = tasks.settings(run_dir, steps, "run.save_freq=1", *overrides)
    process = tasks.start_torchrun(run_dir, settings, *tasks.one_node(1))
    assert tasks.finish(process, run_dir) == 0, (run_dir / "output.txt").read_text()[-4000:]
    return tasks.read_run(run_dir)


def assert_near(on_gpu: tasks.Run, on_cpu: tasks.Run) -> None:
    """Both compute in float32, so products round otherwise, and sums are taken in another order: 1e-5 in a log-prob, which Adam's first
    steps, where a gradient is near zero, make a few percent of a weight's change."""
    assert on_gpu.responses == on_cpu.responses
    difference, where = tasks.worst_metric(on_gpu, on_cpu, floor=0.1)
    assert difference < 2e-3, where
    difference, where = tasks.worst_tensor(on_gpu, on_cpu)
    assert difference < 2e-3, where


FLOAT32 = tuple(f"models.{role}.dtype=float32" for role in ("actor", "critic", "reference"))
SETTINGS = {
    "plain": (),
    "kept on the host": (
        "models.actor.activation_checkpointing=none",
        "models.actor.activation_offload=true",
        "models.actor.optim.offload=true",
        "models.actor.generation.buffers=offload",
        "models.critic.offload=true",
        "models.critic.prefetch=true",
        "models.reference.offload=true",
    ),
    "computed again": ("models.actor.activation_checkpointing=full", "models.critic.activation_checkpointing=selective"),
    "graphs": (
        "models.actor.generation.enforce_eager=false",
        "models.actor.generation.steps_per_sync=4",
        "models.actor.generation.buffers=keep",
    ),
    "graphs, weights freed": ("models.actor.generation.enforce_eager=false", "models.actor.generation.steps_per_sync=8"),
    "torch": ("models.actor.generation.attention=torch",),
    "adapters": ("models.actor.lora.rank=4", "models.actor.generation.page_size=16"),
}


@pytest.mark.parametrize("changes", SETTINGS)
def test_a_gpu_trains_what_a_cpu_trains(tmp_path: Path, changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*FLOAT32, *SETTINGS[changes]]
    on_gpu = train(tmp_path / "gpu", 3, *overrides)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cpu = train(tmp_path / "cpu", 3, *(key for key in overrides if "generation" not in key and "prefetch" not in key))
    assert_near(on_gpu, on_cpu)


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    overrides = [*FLOAT32, *(f"models.{role}.optim.lr_scheduler_type=constant" for role in ("actor", "critic"))]
    whole = train(tmp_path / "whole", 3, *overrides)
    train(tmp_path / "parts", 2, *overrides)
    parts = train(tmp_path / "parts", 3, *overrides)
    assert_near(parts, whole)


def log_probs_and_gradients(path: Path, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    decoder = Decoder(read_spec(path), "lm", 0, 1, alone()[1].tp, torch.float32, device)
    load_pretrained(decoder, path)
    ids, labels = (x.to(device) for x in make_batch(decoder.spec.vocab_size))
    attention = PackedAttention(LENGTHS, torch.device(device))
    log_probs, entropy = decoder(ids, attention, lambda d, hidden: token_log_probs(d, hidden, labels, 0.8, entropy=True))
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    gradients = {name: p.grad.cpu() for name, p in decoder.named_parameters() if p.grad is not None}
    assert len(gradients) == len(decoder.shards)
    return log_probs.detach().cpu(), gradients


@pytest.mark.parametrize("name", CONFIGS)
def test_models_compute_what_they_do_on_a_cpu(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, CONFIGS[name])
    (log_probs, gradients), (others, wanted) = (log_probs_and_gradients(path, device) for device in ("cuda", "cpu"))
    torch.testing.assert_close(log_probs, others, atol=5e-5, rtol=0)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[key], atol=5e-5 * float(wanted[key].abs().max()) + 1e-6, rtol=0, msg=key)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_under_fsdp_trains_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """FSDP2's streams, hooks and buffers, where it has nothing to do. In float32: of one rank it calls no reduction, which sums of half
    precision are taken from."""
    device, store = torch.device(DEVICE), torch.distributed.HashStore()
    options = {"dtype": torch.float32, "device": device, "optim": STEADY}
    write_random_model(tmp_path, LLAMA, seed=3)
    torch.distributed.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
    try:
        world = World(Launch(), device, store, 60.0)
        plain = together([train_engine_steps(world, str(tmp_path), Layout(), [2], "lm", options)])
        monkeypatch.setattr(train_engine, "stage_of_zero", lambda layout: layout.zero)
        monkeypatch.setattr(Mesh, "device_mesh", DeviceMesh(device.type, [0], mesh_dim_names=("dp",)))
        sharded = together([train_engine_steps(world, str(tmp_path), Layout(zero=stage), [2], "lm", options)])
    finally:
        torch.distributed.destroy_process_group()
    assert_same(sharded, plain, 1e-6)


def test_copies_to_the_host_have_the_values_of_their_time() -> None:
    """Though the host goes on and changes the tensors; the thread that reads the copies waits for them."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.arange(1 << 26, device=device), torch.arange(1 << 20, device=device).view(1024, 1024)[:, 1:500]]
    expected = [x.cpu() for x in tensors]
    copies, wait_for_copies = copy_to_host(tensors)
    for x in tensors:
        x.fill_(-1)
    reader = Thread(target=wait_for_copies)
    reader.start()
    reader.join()
    assert all(x.is_pinned() and torch.equal(x, y) for x, y in zip(copies, expected, strict=True))


def test_host_memory_is_pinned_in_slabs_and_in_the_arena() -> None:
    """Also when its memory is taken again while a copy from it is still to run: the stream's order keeps them apart."""
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.randn(3000, 1000, device=device)
    (host,) = host_zeros([(values.shape, values.dtype)], device)
    assert host.is_pinned() and not host.any()
    host.copy_(values, non_blocking=True)
    assert torch.equal(host.to(device, non_blocking=True), values)
    found = []
    for number in range(20):
        lent = host_like(values)
        assert lent.is_pinned()
        lent.copy_(values + number, non_blocking=True)
        found.append(lent.to(device, non_blocking=True))
        del lent
    assert all(torch.equal(each, values + number) for number, each in enumerate(found))


def test_segments_of_the_allocator_grow() -> None:
    """In a process that sets CUDA up as the programs do, after torch was imported and before a GPU was asked for."""
    script = (
        "import torch; from rlhf_spmd.kernels.devices import set_up_cuda; set_up_cuda()\n"
        "held = torch.zeros(1 << 26, device='cuda')\n"
        "assert all(segment['is_expandable'] for segment in torch.cuda.memory_snapshot())"
    )
    clean = {name: value for name, value in tasks.environment().items() if "ALLOC_CONF" not in name}
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gpu") / "qwen3"
    write_random_model(path, {**MODELS["qwen3"], "head_dim": 64, "hidden_size": 256}, seed=7)
    return str(path)


def generate(
    path: str, dtype: torch.dtype, sampling: SamplingConfig, device: str = "cuda", **changes: object
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of all rows, and their log-probs, one after the other."""
    mesh = alone()[1]
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, dtype, device)
    load_pretrained(decoder, path)
    settings = {"page_size": 256, "max_num_seqs": 16, "max_num_batched_tokens": 512, **changes}
    completions = Generator(decoder, mesh, GenerationConfig(**settings), [0, 1]).generate(
        ragged_requests(vocabulary=min(decoder.spec.vocab_size, 301)), sampling, 3, 5
    )
    return tokens_of(completions), torch.cat([c.log_probs for c in completions])


@pytest.mark.parametrize("name", CONFIGS)
def test_models_generate_what_they_do_on_a_cpu(tmp_path: Path, name: str) -> None:
    path, sampling = make_model(tmp_path, CONFIGS[name]), SamplingConfig(temperature=0.9)
    (tokens, log_probs), (others, wanted) = (
        generate(str(path), torch.float32, sampling, device, page_size=16) for device in ("cuda", "cpu")
    )
    assert tokens == others
    torch.testing.assert_close(log_probs, wanted, atol=2e-4, rtol=0)


def test_triton_draws_what_torch_draws_and_batches_change_no_bit(path: str) -> None:
    sampling = SamplingConfig(temperature=0.9)
    (tokens, log_probs), (torchs, others) = (
        generate(path, torch.float32, sampling, attention=name) for name in ("triton", "torch")
    )
    assert tokens == torchs
    torch.testing.assert_close(log_probs, others, atol=1e-4, rtol=0)
    for changes in ({"page_size": 16, "max_num_batched_tokens": 33}, {"page_size": 7, "num_pages": 60}):
        assert generate(path, torch.float32, sampling, attention="triton", **changes)[0] == tokens


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.9, top_k=20), SamplingConfig(temperature=0.0)], ids=str)
def test_cuda_graphs_draw_what_steps_draw(path: str, sampling: SamplingConfig) -> None:
    """Other sizes of batch may round otherwise in cuBLAS, so log-probs are close and tokens the same but for ties."""
    wanted, log_probs = generate(path, torch.bfloat16, sampling, attention="triton")
    for changes in ({"steps_per_sync": 8}, {"steps_per_sync": 8, "enforce_eager": False}, {"enforce_eager": False}):
        tokens, others = generate(path, torch.bfloat16, sampling, attention="triton", **changes)
        same = [a == b for a, b in zip(tokens, wanted, strict=True)]
        assert sum(same) >= 0.8 * len(same)
        if all(same):
            torch.testing.assert_close(others, log_probs, atol=0.1, rtol=0)


EXACT_MODEL = {
    **MODELS["qwen3"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "vocab_size": 5003,
    "num_attention_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


def exact_log_probs(decoder: Decoder, requests: list[Request], done: list[Completion], order: list[int]) -> list[torch.Tensor]:
    """Of the responses, by one training forward over the rows in ``order``."""
    rows = [[*requests[i].prompt_ids, *done[i].token_ids] for i in order]
    ids, lengths = torch.tensor([token for row in rows for token in row], device="cuda"), [len(row) for row in rows]
    attention = PackedAttention(lengths, torch.device("cuda"), decoder.ops)
    log_probs, _ = token_log_probs(decoder, decoder(ids, attention), ids.roll(-1), 0.7)
    log_probs.sum().backward()
    parts = dict(zip(order, log_probs.detach().cpu().split(lengths), strict=True))
    return [parts[i][len(requests[i].prompt_ids) - 1 : -1] for i in sorted(order)]


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.bfloat16), ("qwen3", torch.float32), ("gemma2", torch.bfloat16)], ids=str
)
def test_exact_generation_has_the_log_probs_of_training(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, with graphs and without, of 64 rows and of a few, in other orders and chunks; prompts of several splits."""
    device = torch.device("cuda")
    spec = spec_from_config(EXACT_MODEL if name == "qwen3" else {**CONFIGS["gemma2"], "max_position_embeddings": 4096}, "test")
    decoder = Decoder(spec, "lm", 0, 1, alone()[1].tp, dtype, device, ops=choose_ops(dtype, device, batch_invariant_gpu=True))
    init_random(decoder, 7)
    draw = torch.Generator().manual_seed(5)
    lengths = [1, 3, 40, 64, 130, 515, 700, 1200] * 8
    requests = [
        Request(i, i, torch.randint(3, spec.vocab_size, (n,), generator=draw).tolist(), 9 + i % 5)
        for i, n in enumerate(lengths)
    ]

    def generate(some: list[Request], **settings: Any) -> list[Completion]:
        sampling = SamplingConfig(temperature=0.7)
        return Generator(decoder, alone()[1], GenerationConfig(**settings), ()).generate(some, sampling, 3, 5)

    done = generate(requests)
    orders = [list(range(64)), list(range(63, -1, -1)), list(range(0, 64, 7))]
    for order in orders:
        for i, found in zip(sorted(order), exact_log_probs(decoder, requests, done, order), strict=True):
            assert torch.equal(done[i].log_probs, found), (i, (done[i].log_probs - found).abs().max())
    few = [requests[i] for i in (7, 12, 30)]
    changes: list[dict[str, Any]] = [{}, {"enforce_eager": True, "page_size": 16, "max_num_batched_tokens": 256}]
    for settings in changes:
        for one in generate(few, **settings):
            assert one.token_ids == done[one.row_id].token_ids
            assert torch.equal(one.log_probs, done[one.row_id].log_probs), one.row_id


def test_an_exact_run_in_bf16_computes_no_old_log_probs(tmp_path: Path) -> None:
    bf16 = (f"models.{role}.dtype=bfloat16" for role in ("actor", "critic"))
    run = train(tmp_path, 2, "models.actor.generation.reuse_rollout_log_probs=true", *bf16)
    assert run.log_prob_difference() == 0 and "timing_s/compute_log_prob" not in run.raw[0]


def test_generation_and_training_agree_in_bf16(tmp_path: Path) -> None:
    """Within what their kernels differ by, with all weights in host memory between calls."""
    roles = ("actor", "critic", "reference")
    settings = [f"models.{role}.{key}" for role in roles for key in ("dtype=bfloat16", "offload=true")]
    for row in train(tmp_path, 3, *settings).raw:
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert row["rollout/log_prob_diff_max"] < 0.1
