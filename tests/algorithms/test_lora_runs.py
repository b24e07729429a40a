"""Runs that train adapters: the same in every layout, generation with training's bits, the actor's own reference, resumed, exported."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tasks
from algorithm_cases import CASES, CONFIGS
from overrides import layout
from ranks import run_ranks
from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.quantized import rounded
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.train import prepare

NAME = "grpo with adapters"
STEPS = 2  # of four updates each: the first moves B, the others A, too
LENT = (
    *("placement.pools={a: [0, 1], b: [2, 3]}", "models.actor.pool=a", "models.actor.layout={dp: 2, zero: 3}"),
    *("models.actor.calls={generate_sequences: {pool: b, layout: {tp: 2}, delta: true}}", "models.reward.pool=b"),
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2": (2, layout("actor", tp=2)),
    "pp2": (2, layout("actor", pp=2)),
    "dp2 zero3": (2, layout("actor", dp=2, zero=3)),
    "tp2 dp2": (4, layout("actor", tp=2, dp=2)),
    "tp2 dp2 zero2 -> tp1, kept": (4, (*layout("actor", tp=2, dp=2, zero=2), "models.actor.generation.buffers=keep")),
    "tp2, all kept": (2, (*layout("actor", tp=2), *layout("generation", tp=2), "models.actor.generation.buffers=keep")),
    "dp2 zero3 -> tp2, whole": (
        2,
        (*layout("actor", dp=2, zero=3), *layout("generation", tp=2), "models.actor.generation.reshard_method=full_gather"),
    ),
    "lent": (4, LENT),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@functools.cache
def run(run_dir: Path, ranks: int = 1, steps: int = STEPS, *more: str) -> tasks.Run:
    overrides = tasks.settings(run_dir, steps, *CASES[NAME].overrides(), *more)
    run_ranks(ranks, tasks.train_here, str(CONFIGS / f"{CASES[NAME].config}.yaml"), overrides)
    return tasks.read_run(run_dir)


@pytest.mark.parametrize("where", LAYOUTS)
def test_the_same_run(directory: Path, where: str) -> None:
    ranks, more = LAYOUTS[where]
    one, other = run(directory / "one"), run(directory / where.replace(" ", "_"), ranks, STEPS, *more)
    assert other.responses == one.responses and one.weights
    assert {name for _, _, name in one.weights if ".lora_" not in name} == set(), "the checkpoint has more than adapters"
    difference, what = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{where}: metrics {difference:.1e} ({what}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, what
    assert weights < 1e-9, tensor


FOUR = (
    "models.actor.lora={rank: 4, alpha: 8, bits: 4, target_modules: [q_proj, v_proj, up_proj]}",
    "models.actor.dtype=float32",
)


@pytest.mark.parametrize(
    ("where", "more"),
    {
        "tp2": layout("actor", tp=2),
        "dp2 zero3 -> tp2": (*layout("actor", dp=2, zero=3), *layout("generation", tp=2)),
        "dp2, at rest on the host": (*layout("actor", dp=2, zero=1), "models.actor.offload=true"),
    }.items(),
)
def test_the_same_run_beside_four_bits(directory: Path, where: str, more: tuple[str, ...]) -> None:
    """In float32: as test_lora_training. Another base draws other responses."""
    one = run(directory / "four", 1, STEPS, *FOUR)
    other = run(directory / f"four_{where.replace(' ', '_')}", 2, STEPS, *FOUR, *more)
    assert other.responses == one.responses != run(directory / "one").responses
    assert one.log_prob_difference() == 0.0
    difference, what = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{where}: metrics {difference:.1e} ({what}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-3, what
    assert weights < 1e-3, tensor


def test_an_export_has_the_base_that_was_trained_beside(directory: Path) -> None:
    out = directory / "four_exported" / "export"
    found = run(directory / "four_exported", 2, 2, *FOUR, *layout("actor", tp=2), "run.export=true")
    base, merged = (load_file(path / "model.safetensors") for path in (tasks.task() / "actor", out))
    weights = {name: tensor for (_, kind, name), tensor in found.weights.items() if kind == "param"}
    fused = ("self_attn.k_proj", "mlp.gate_proj")  # with some that have adapters
    for module in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", *fused):
        name = f"model.layers.1.{module}"
        expected = base[f"{name}.weight"]
        if module != "mlp.down_proj":
            expected = rounded(expected, 4)
        if module not in ("mlp.down_proj", *fused):
            a, b = (weights[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            expected = expected + 2.0 * b @ a
        torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)
    loaded, saved = ({}, find_adapters(directory / "four_exported" / "checkpoints" / "step_2", "actor"))
    assert saved is not None
    for path in (tasks.task() / "actor", out):
        decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float32, "cpu")
        load_pretrained(decoder, path)
        if path != out:
            saved.add_to(decoder.spec, RoleState(decoder.shards, dict(decoder.named_parameters())), path)
        loaded[path] = dict(decoder.named_parameters())
    one, other = loaded.values()
    assert all(torch.equal(one[name], other[name]) for name in one), "generate and evaluate would read another model"


@pytest.mark.parametrize("where", ["one", "tp2", "dp2 zero3"])
def test_generation_has_the_log_probs_of_training(directory: Path, where: str) -> None:
    ranks, more = LAYOUTS.get(where, (1, ()))
    made = (*layout("generation", tp=2),) if where == "tp2" else ()
    found = run(directory / f"exact_{where.replace(' ', '_')}", ranks, 2, *more, *made, "models.actor.dtype=float32")
    assert found.log_prob_difference() == 0.0


def test_the_reference_is_the_model_without_adapters(directory: Path) -> None:
    """And the same numbers as a copy of it gives, which ``models.reference.layout`` asks for."""
    exact = "models.actor.dtype=float32", "models.reference.dtype=float32"
    shared = run(directory / "shared", 1, STEPS, *exact)
    path = f"models.reference.path={tasks.task() / 'actor'}"
    copied = run(directory / "copied", 1, STEPS, *exact, path, "models.reference.layout.dp=1")
    tasks.assert_bit_equal(shared, copied)
    assert all(row["actor/kl_loss"] > 1e-9 for row in shared.metrics)  # of all updates of a step, the first one's is 0
    case = CASES[NAME]
    plans = prepare(str(CONFIGS / f"{case.config}.yaml"), tasks.settings(Path("unused"), 1, *case.overrides()), 1).plans
    assert "reference" not in plans and plans["actor"].serves == ("reference",)


def test_a_resumed_run_is_the_run(directory: Path) -> None:
    more = "models.actor.dtype=float32", "run.save_freq=2", "run.keep_checkpoints=3"
    whole = run(directory / "whole", 1, 3, *more)
    run(directory / "resumed", 1, 2, *more)
    again = tasks.settings(directory / "resumed", 3, *CASES[NAME].overrides(), *more)
    run_ranks(1, tasks.train_here, str(CONFIGS / f"{CASES[NAME].config}.yaml"), again)
    tasks.assert_bit_equal(whole, tasks.read_run(directory / "resumed"))


@pytest.mark.parametrize(
    "other", ["models.actor.lora.alpha=16", "models.actor.lora.use_rslora=true", "models.actor.lora.bits=4"]
)
def test_a_run_does_not_go_on_with_other_adapters(directory: Path, other: str) -> None:
    """The same tensors would be another function. ``run.resume=force`` means it."""
    targets = "models.actor.lora.target_modules=[q_proj, v_proj, up_proj]"
    more, run_dir = ("models.actor.dtype=float32", "run.save_freq=1", targets), directory / other.replace("=", "_")
    run(run_dir, 1, 1, *more)
    again = tasks.settings(run_dir, 2, *CASES[NAME].overrides(), *more, other)
    config = str(CONFIGS / f"{CASES[NAME].config}.yaml")
    with pytest.raises(AssertionError, match=f"is of another experiment: {other.partition('=')[0]}=.* \\(was"):
        run_ranks(1, tasks.train_here, config, again)
    run_ranks(1, tasks.train_here, config, [*again, "run.resume=force"])
    assert len(tasks.read_run(run_dir).metrics) == 2


def test_the_export_loads_in_peft_and_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = directory / "exported" / "export"
    found = run(directory / "exported", 2, STEPS, *layout("actor", tp=2), "run.export=true", "models.actor.dtype=float32")
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0) and "q_proj" in config["target_modules"]
    assert "low-rank adapters alone are in `adapter`" in (out / "README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    base = AutoModelForCausalLM.from_pretrained(tasks.task() / "actor").eval()
    ids = torch.arange(1, 30)[None]

    def log_probs(model: torch.nn.Module) -> Tensor:
        with torch.no_grad():
            return model(ids).logits.log_softmax(-1)

    assert not torch.allclose(log_probs(merged), log_probs(base), atol=1e-3), "the adapters do nothing"
    weights = {name: tensor for (_, kind, name), tensor in found.weights.items() if kind == "param"}
    name = "model.layers.0.self_attn.q_proj"
    a, b = (weights[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    expected = base.get_parameter(f"{name}.weight") + 2.0 * b @ a
    torch.testing.assert_close(merged.get_parameter(f"{name}.weight"), expected, rtol=1e-5, atol=1e-7)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    torch.testing.assert_close(log_probs(loaded), log_probs(merged), rtol=0, atol=2e-5)


def test_an_export_of_the_adapter_alone_and_a_start_from_it(directory: Path) -> None:
    first = run(directory / "alone", 1, 2, "run.export=true", "run.export_merged=false")
    out = directory / "alone" / "export"
    assert 'PeftModel.from_pretrained(model, "adapter")' in (out / "README.md").read_text()
    assert not (out / "config.json").exists() and (out / "adapter" / "adapter_model.safetensors").is_file()
    adapter = {"rank": 4, "alpha": 8, "path": str(out / "adapter")}
    start = f"models.actor.lora={json.dumps(adapter)}", "models.actor.optim.lr=0"
    second = run(directory / "second", 2, 1, *layout("actor", dp=2, zero=3), *start)
    apart, tensor = tasks.worst_tensor(first, second)
    assert apart == 0.0, tensor


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("models.reference.lora.rank=2",), "models.reference.lora.rank=2: this role is not trained"),
        (("models.actor.lora.target_modules=[w1]",), "the model has no matrix 'w1'"),
        (
            ("algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1"),
            "a reference cannot follow adapters, models.actor.lora.rank=4",
        ),
        (("models.actor.optim.name=muon",), "models.actor.optim.name=muon is for whole matrices, and models.actor.lora.rank=4"),
        (
            ("models.actor.optim.head_lr=1e-3",),
            "models.actor.optim.head_lr=0.001: (with models.actor.lora no head|the model's output)",
        ),
        (("models.actor.random_init=true",), "models.actor.random_init=true: models.actor.lora.rank=4 trains beside weights"),
        (
            ("models.actor.lora.bits=5", "models.actor.dtype=float32"),
            "models.actor.lora.bits=5 is not known; allowed: 4, 8, or null",
        ),
        (
            ("models.actor.lora.bits=4", "models.actor.dtype=float32"),
            "models.actor.lora.bits=4: with tp=1 a rank would have 96 columns of model.layers.0.mlp.down_proj",
        ),
        ((*FOUR, "models.actor.dtype=float64"), "models.actor.lora.bits=4: bitsandbytes has no float64"),
        (
            (*FOUR, "models.actor.calls={generate_sequences: {layout: {tp: 1}}}"),
            "models.actor.calls.generate_sequences: weights in 4 bits cannot be sent",
        ),
        (("models.actor.lora.path=/nowhere",), "models.actor.lora.path=/nowhere: adapter_model.safetensors cannot be read"),
    ],
)
def test_what_is_refused(more: tuple[str, ...], said: str) -> None:
    case = CASES[NAME]
    with pytest.raises(ValueError, match=said):
        prepare(str(CONFIGS / f"{case.config}.yaml"), tasks.settings(Path("unused"), 1, *case.overrides(), *more), 1)
