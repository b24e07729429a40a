"""Sequence parallelism: the bits of the forward pass without it, and the training of one rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tasks
from engine_runs import (
    CONFIGS,
    STEADY,
    assert_same,
    check_half_precision,
    check_single_precision,
    half_precision,
    joined,
    single,
    special_batches,
    together,
    train,
)
from live_memory import LiveMemory
from ranks import run_ranks
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.inference.loaded_model import ModelConfig
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.models.weights import init_random, write_random_model
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout, LayoutConfig
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS as FAMILIES

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_checkpointing": "selective", "activation_offload": True},
}
# (p, t, d, zero), then micro-batches per replica: the last ones are empty, and tp never divides the tokens of all
SHAPES = [
    ((1, 4, 1, 0), [8]),
    ((2, 2, 1, 0), [4]),
    ((1, 2, 2, 0), [2, 3]),
    ((1, 2, 2, 1), [4, 3]),
    ((1, 2, 2, 3), [2, 5]),
]


def layout_of(shape: tuple[int, int, int, int]) -> Layout:
    pp, tp, dp, zero = shape
    return Layout(pp=pp, tp=tp, dp=dp, zero=zero, sequence_parallel=True)


@functools.cache
def model(name: str, directory: Path) -> str:
    config = CONFIGS[name] if name in CONFIGS else {**FAMILIES[name], "initializer_range": 0.3}
    write_random_model(directory / name, config, seed=3)
    return str(directory / name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# without checkpoints all shapes; what is kept, made again or fetched knows of tp, stages and FSDP, and not of how many there are
TRAINED = [("none", *case) for case in SHAPES] + [
    (mode, *case) for mode in ("full", "offload") for case in (SHAPES[1], SHAPES[4])
]


@pytest.mark.parametrize(("mode", "shape", "micro"), TRAINED, ids=str)
def test_training_is_that_of_one_rank(directory: Path, shape: tuple[int, int, int, int], micro: list[int], mode: str) -> None:
    layout, path = layout_of(shape), model("tied", directory)
    assert_same(together(run_ranks(layout.size, train, path, layout, micro, "lm", MODES[mode])), single(path, "lm"))


@pytest.mark.parametrize(
    ("name", "shape", "head"),
    [
        ("qwen2", (1, 2, 1, 0), "lm"),
        ("qwen3", (2, 2, 1, 0), "lm"),
        ("llama-tied-bias", (1, 2, 2, 3), "lm"),
        ("llama-tied-bias", (1, 4, 1, 0), "lm"),
        ("gemma3", (2, 2, 1, 0), "lm"),
        ("qwen3-moe", (1, 2, 2, 1), "lm"),
        ("shared_kv", (1, 2, 2, 1), "lm"),
        ("untied", (2, 2, 1, 0), "value"),
    ],
    ids=str,
)
def test_families_and_heads(directory: Path, name: str, shape: tuple[int, int, int, int], head: str) -> None:
    """Biases and norms after row-parallel matrices, norms of q and k, KV heads that ranks share, experts, a value head."""
    layout, path = layout_of(shape), model(name, directory)
    options = MODES["selective"]
    assert_same(together(run_ranks(layout.size, train, path, layout, [2, 3], head, options)), single(path, head))


@pytest.mark.parametrize(
    ("mode", "shape", "micro"), [("none", *SHAPES[0]), ("offload", *SHAPES[2]), ("none", *SHAPES[4])], ids=str
)
def test_fp32_stays_near_fp64(directory: Path, shape: tuple[int, int, int, int], micro: list[int], mode: str) -> None:
    layout, path = layout_of(shape), model("tied", directory)
    options = {**MODES[mode], "dtype": torch.float32, "optim": STEADY}
    check_single_precision(run_ranks(layout.size, train, path, layout, micro, "lm", options), path)


def test_bf16_with_fp32_gradients(directory: Path) -> None:
    path = model("untied", directory)
    check_half_precision(run_ranks(2, half_precision, path, layout_of((1, 2, 1, 0))), path)


def test_virtual_stages(directory: Path) -> None:
    path, layout = model("llama-tied-bias", directory), Layout(pp=2, tp=2, vpp=2, sequence_parallel=True)
    assert_same(together(run_ranks(4, train, path, layout, [4], "lm", MODES["selective"])), single(path, "lm"))


def test_replicas_without_rows(directory: Path) -> None:
    path, layout = model("tied", directory), layout_of((1, 2, 2, 3))
    want = run_ranks(1, special_batches, path, Layout())
    assert_same(joined(run_ranks(4, special_batches, path, layout)), joined(want))


def outputs(world: World, config: dict[str, Any], dtype: torch.dtype, lengths: list[int], sequence_parallel: bool) -> Any:
    """Log-probs of one forward pass, and the bytes that its layers sent and received over tp."""
    spec = spec_from_config(config, "test")
    decoder = Decoder(spec, "lm", 0, 1, world.all, dtype, "cpu", sequence_parallel=sequence_parallel)
    init_random(decoder, 7)
    ids = torch.randint(0, spec.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))

    def head(d: Decoder, hidden: Tensor) -> Tensor:
        return token_log_probs(d, hidden, ids.roll(-1))[0]

    labels = ("embedding", "tp_gather", "attention", "mlp")
    before = [(RECORDER.sent[label], RECORDER.received[label]) for label in labels]
    with torch.no_grad():
        out = decoder(ids, PackedAttention(lengths), head)
    after = [(RECORDER.sent[label], RECORDER.received[label]) for label in labels]
    return out, [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)], decoder.min_rows


TP, DTYPES = (2, 4), (torch.float32, torch.bfloat16)
TURNS = [
    (name, tp, DTYPES[(i + j) % 2])  # each tp in both dtypes, each family in both and at either tp
    for i, name in enumerate(("llama-tied-bias", "qwen3-tied", "gemma2", "qwen3-moe"))
    for j, tp in enumerate(TP)
]


@pytest.mark.parametrize(("name", "tp", "dtype"), TURNS, ids=str)
def test_the_forward_pass_keeps_its_bits(name: str, tp: int, dtype: torch.dtype) -> None:
    """As generation does not scatter its rows, this is what keeps log-probs equal to training's."""
    for lengths in ([1], [3, 2], [70, 1, 64, 66]):
        scattered = run_ranks(tp, outputs, FAMILIES[name], dtype, lengths, True)
        for mine, theirs in zip(scattered, run_ranks(tp, outputs, FAMILIES[name], dtype, lengths, False), strict=True):
            assert torch.equal(mine[0], theirs[0])


def test_every_row_travels_once_each_way() -> None:
    """Per rank: every gather receives and every scatter sends (t - 1) / t of all rows, padded to a multiple of t."""
    tp, config = 4, FAMILIES["llama"]
    for lengths in ([70, 1, 64, 66], [1]):
        for _, counted, min_rows in run_ranks(tp, outputs, config, torch.float32, lengths, True):
            rows = -(-max(sum(lengths), min_rows) // tp)  # of one rank
            row = 4 * config["hidden_size"]
            others, layers = (tp - 1) * rows * row, config["num_hidden_layers"]
            scatter = (others, others)
            gathers = (2 * layers + 1) * rows * row, (2 * layers + 1) * others
            assert counted == [scatter, gathers, (layers * others,) * 2, (layers * others,) * 2]


def kept_bytes(world: World, checkpointing: str, sequence_parallel: bool) -> int:
    """What a rank holds between the forward and the backward pass of the layers: the least of a few times, since gloo's threads
    may hold a tensor a moment longer."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    spec = spec_from_config({**FAMILIES["llama"], **sizes}, "test")
    decoder = Decoder(spec, "none", 0, 1, world.all, torch.float32, "cpu", sequence_parallel=sequence_parallel)
    init_random(decoder, 7)
    decoder.keep_activations(checkpointing)
    ids, attention = torch.arange(101).repeat(4), PackedAttention([101] * 4)
    decoder(ids, attention)
    found = []
    for _ in range(4):
        with LiveMemory() as memory:
            loss = decoder(ids, attention).sum()
            found.append(memory.live)
        loss.backward()
    return min(found)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_each_rank_keeps_its_part(checkpointing: str) -> None:
    """Without sequence parallelism the residual stream and what the norms give are kept whole on every rank."""
    (alone,) = run_ranks(1, kept_bytes, checkpointing, False)
    for scattered, whole in zip(*(run_ranks(4, kept_bytes, checkpointing, way) for way in (True, False)), strict=True):
        tables = 4 * 404 * 32 * 2  # cos and sin, which every rank needs of all tokens
        assert scattered < 1.05 * alone / 4 + tables
        assert whole > 1.4 * scattered


def test_generation_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"layout\.sequence_parallel=true: generation runs without it"):
        GenerateConfig(ModelConfig(path="m"), out="out", layout=LayoutConfig(tp=2, sequence_parallel=True)).check("")


def test_ppo_stays_on_policy(tmp_path: Path) -> None:
    layout = ("tp=2", "pp=2", "sequence_parallel=true")
    roles = [f"models.{role}.layout.{key}" for role in ("actor", "critic") for key in layout]
    more = (*roles, "models.actor.generation.tp=2", "models.actor.activation_checkpointing=selective")
    run_ranks(4, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 2, *more))
    run = tasks.read_run(tmp_path)
    assert run.log_prob_difference() == 0.0
    assert [row["actor/ppo_kl_first"] for row in run.metrics] == [0.0] * 2
