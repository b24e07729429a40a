"""Sequence parallelism: the bits of the forward pass without it, and the training of one rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from ranks import run_ranks
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.inference.loaded_model import ModelConfig
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.weights import init_random, write_random_model
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout, LayoutConfig
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS as FAMILIES
from tiers import tiers

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_checkpointing": "selective", "activation_offload": True},
}


def scattered(pp: int = 1, tp: int = 2, dp: int = 1, zero: int = 0, vpp: int = 1) -> Layout:
    return Layout(pp=pp, tp=tp, dp=dp, zero=zero, vpp=vpp, sequence_parallel=True)


@functools.cache
def model(name: str, directory: Path) -> str:
    config = CONFIGS[name] if name in CONFIGS else {**FAMILIES[name], "initializer_range": 0.3}
    write_random_model(directory / name, config, seed=3)
    return str(directory / name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("name", "head", "layout", "micro", "mode"),
    [
        # the last micro-batches are empty, and tp never divides the tokens of all
        ("tied", "lm", scattered(tp=4), [8], "none"),
        ("tied", "lm", scattered(pp=2), [4], "full"),
        ("tied", "lm", scattered(dp=2, zero=3), [2, 5], "offload"),
        # biases behind row-parallel matrices, KV heads that ranks share, virtual stages, a value head
        ("llama-tied-bias", "lm", scattered(pp=2, vpp=2), [4], "selective"),
        ("shared_kv", "lm", scattered(dp=2, zero=1), [2, 3], "selective"),
        ("untied", "value", scattered(), [3], "none"),
        pytest.param("tied", "lm", scattered(dp=2), [2, 3], "none", marks=pytest.mark.long),
        pytest.param("tied", "lm", scattered(dp=2, zero=3), [2, 5], "full", marks=pytest.mark.long),
        pytest.param("tied", "lm", scattered(pp=2), [4], "offload", marks=pytest.mark.long),
        pytest.param("llama-tied-bias", "lm", scattered(tp=4), [3], "selective", marks=pytest.mark.long),
        pytest.param("llama-tied-bias", "lm", scattered(dp=2, zero=3), [2, 3], "selective", marks=pytest.mark.long),
        pytest.param("qwen3", "lm", scattered(pp=2), [2], "selective", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_training_is_that_of_one_rank(
    directory: Path, name: str, head: str, layout: Layout, micro: list[int], mode: str
) -> None:
    """Other families are in test_family_layouts.py."""
    path = model(name, directory)
    got = together(run_ranks(layout.size, train, path, layout, micro, head, OPTIONS[mode]))
    assert_same(got, single(path, head))


def test_fp32_stays_near_fp64(directory: Path) -> None:
    layout, path = scattered(dp=2, zero=1), model("tied", directory)
    options = {**OPTIONS["offload"], "dtype": torch.float32, "optim": STEADY}
    check_single_precision(run_ranks(layout.size, train, path, layout, [2, 3], "lm", options), path)


def test_bf16_with_fp32_gradients(directory: Path) -> None:
    path = model("untied", directory)
    check_half_precision(run_ranks(2, half_precision, path, scattered()), path)


def test_replicas_without_rows(directory: Path) -> None:
    path, layout = model("tied", directory), scattered(dp=2, zero=3)
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


TURNS = tiers(
    [
        ("llama-tied-bias", 2, torch.bfloat16),
        ("qwen3-tied", 4, torch.float32),
        ("gemma2", 2, torch.float32),
        ("qwen3-moe", 4, torch.bfloat16),
        ("qwen3-moe", 2, torch.float32),
    ],
    lambda turn: turn[0] != "qwen3-moe",
)


@pytest.mark.parametrize("turn", TURNS, ids=str)
def test_the_forward_pass_keeps_its_bits(turn: tuple[str, int, torch.dtype]) -> None:
    """As generation does not scatter its rows, this is what keeps log-probs equal to training's."""
    name, tp, dtype = turn
    for lengths in ([1], [3, 2], [70, 1, 64, 66]):
        results = (run_ranks(tp, outputs, FAMILIES[name], dtype, lengths, scatters) for scatters in (True, False))
        for scattered_rows, whole_rows in zip(*results, strict=True):
            assert torch.equal(scattered_rows[0], whole_rows[0])


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


def test_generation_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"layout\.sequence_parallel=true: generation runs without it"):
        check_section(GenerateConfig(ModelConfig(path="m"), out="out", layout=LayoutConfig(tp=2, sequence_parallel=True)), "")
