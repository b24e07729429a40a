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
from algorithm_cases import CASES, assert_same_run
from overrides import layouts
from ranks import run_ranks
from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.quantized import rounded
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.train import prepare
from tiers import tiers

CASE = CASES["grpo with adapters"]
FP32 = "models.actor.dtype=float32"
# each step has four updates: the first moves B, the others A, too
FOUR_BITS = ("models.actor.lora={rank: 4, alpha: 8, bits: 4, target_modules: [q_proj, v_proj, up_proj]}", FP32)
EXPORT = "run.export=true"
WHOLE_TO_TP2 = (*layouts("actor dp2 zero3, generation tp2"), "models.actor.generation.reshard_method=full_gather")
LENT = (
    *("placement.pools={a: [0], b: [1, 2]}", "models.actor.pool=a", "models.reward.pool=b"),
    "models.actor.calls={generate_sequences: {pool: b, layout: {tp: 2}, delta: true}}",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp2": (2, layouts("actor pp2")),
    "tp2 dp2 zero2 -> tp1, kept": (4, (*layouts("actor tp2 dp2 zero2"), "models.actor.generation.buffers=keep")),
    "dp2 zero3 -> tp2, whole": (2, WHOLE_TO_TP2),
    "lent": (3, LENT),
}
ALL_KEPT = (*layouts("actor tp2, generation tp2"), "models.actor.generation.buffers=keep")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@functools.cache
def run(run_dir: Path, ranks: int = 1, *more: str) -> tasks.Run:
    return CASE.train(run_dir, *more, ranks=ranks)


def run_to_checkpoint(run_dir: Path, steps: int, *more: str, ranks: int = 1) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, CASE.file, tasks.settings(run_dir, steps, *CASE.overrides(), *more))
    return tasks.read_run(run_dir)


@pytest.mark.parametrize("where", tiers(LAYOUTS, lambda where: "whole" not in where))  # beside four bits it runs in both tiers
def test_the_same_run(directory: Path, where: str) -> None:
    ranks, more = LAYOUTS[where]
    one = run(directory / "one")
    assert one.weights and all(".lora_" in name for _, _, name in one.weights), "a checkpoint has more than adapters"
    assert_same_run(one, run(directory / where.replace(" ", "_"), ranks, *more))


@pytest.fixture(scope="module")
def four_exported(directory: Path) -> tasks.Run:
    return run_to_checkpoint(directory / "four_exported", 2, *FOUR_BITS, *layouts("actor tp2"), EXPORT, ranks=2)


def test_the_same_run_beside_four_bits(directory: Path, four_exported: tasks.Run) -> None:
    """In float32: as test_lora_training. Another base draws other responses."""
    one = run(directory / "four", 1, *FOUR_BITS)
    assert one.responses != run(directory / "one").responses and one.log_prob_difference() == 0.0
    offloaded = run(directory / "four_offloaded", 2, *FOUR_BITS, *WHOLE_TO_TP2, "models.actor.offload=true")
    for other in (four_exported, offloaded):
        assert_same_run(one, other, metrics=1e-3, weights=1e-3)


def adapted(name: str, weights: dict[tuple[str, str, str], Tensor], base: Tensor) -> Tensor:
    """``base`` and the scaled product of its adapters."""
    a, b = (weights["actor", "param", f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    return base + 2.0 * b @ a


def test_an_export_has_the_base_that_was_trained_beside(directory: Path, four_exported: tasks.Run) -> None:
    out = directory / "four_exported" / "export"
    base, merged = (load_file(path / "model.safetensors") for path in (tasks.task() / "actor", out))
    for module in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.k_proj", "mlp.gate_proj"):
        name = f"model.layers.1.{module}"
        expected = base[f"{name}.weight"]
        if module != "mlp.down_proj":  # k_proj and gate_proj are in one matrix with some that have adapters
            expected = rounded(expected, 4)
        if module in ("self_attn.q_proj", "mlp.up_proj"):
            expected = adapted(name, four_exported.weights, expected)
        torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)
    adapters = find_adapters(directory / "four_exported" / "checkpoints" / "step_2", "actor")
    assert adapters is not None
    from_base, from_export = (Decoder(read_spec(out), "lm", 0, 1, solo(), torch.float32, "cpu") for _ in range(2))
    load_pretrained(from_base, tasks.task() / "actor")
    adapters.add_to(from_base.spec, RoleState(from_base.shards, dict(from_base.named_parameters())), tasks.task() / "actor")
    load_pretrained(from_export, out)
    exported = dict(from_export.named_parameters())
    different = [name for name, tensor in from_base.named_parameters() if not torch.equal(tensor, exported[name])]
    assert not different, "generate and evaluate would read another model"


def test_in_fp32_a_resumed_run_is_the_run_and_the_reference_is_the_model_without_adapters(directory: Path) -> None:
    """The reference gives the same numbers as a copy of the model, which ``models.reference.layout`` asks for. Generation has the
    log-probs of training.
    """
    saves = FP32, "run.save_freq=2", "run.keep_checkpoints=3", "models.actor.optim.lr_scheduler_type=constant"
    uninterrupted = run_to_checkpoint(directory / "uninterrupted", 3, *saves)
    shared = run_to_checkpoint(directory / "resumed", 2, *saves)
    tasks.assert_bit_equal(uninterrupted, run_to_checkpoint(directory / "resumed", 3, *saves))
    assert uninterrupted.log_prob_difference() == 0.0
    copy = f"models.reference.path={tasks.task() / 'actor'}", "models.reference.layout.dp=1", "models.reference.dtype=float32"
    copied = run(directory / "copied", 1, *saves, *copy)
    assert copied.metrics == shared.metrics and tasks.worst_tensor(shared, copied)[0] == 0.0
    assert all(row["actor/kl_loss"] > 1e-9 for row in shared.metrics)  # of all updates of a step, the first one's is 0
    plans = prepare(CASE.file, tasks.settings(Path("unused"), 1, *CASE.overrides()), 1).roles
    assert "reference" not in plans and plans["actor"].serves == ("reference",)


def test_a_run_does_not_go_on_with_other_adapters(directory: Path) -> None:
    """The same tensors would be another function. ``run.resume=force`` means it."""
    run_dir = directory / "other"
    adapters = FP32, "run.save_freq=1", "models.actor.lora.target_modules=[q_proj, v_proj, up_proj]"
    run_to_checkpoint(run_dir, 1, *adapters)
    others = ("models.actor.lora.alpha=16", "models.actor.lora.use_rslora=true", "models.actor.lora.bits=4")
    for other in others:
        with pytest.raises(ValueError, match=f"is of another experiment: {other.partition('=')[0]}=.* \\(was"):
            tasks.train_alone(run_dir, 2, *CASE.overrides(), *adapters, other, config=Path(CASE.file))
    assert len(run_to_checkpoint(run_dir, 2, *adapters, others[0], "run.resume=force").metrics) == 2


def test_the_export_loads_in_peft_and_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = directory / "exported" / "export"
    exported = run_to_checkpoint(directory / "exported", 2, *ALL_KEPT, EXPORT, FP32, ranks=2)
    assert exported.log_prob_difference() == 0.0
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
    name = "model.layers.0.self_attn.q_proj"
    expected = adapted(name, exported.weights, base.get_parameter(f"{name}.weight"))
    torch.testing.assert_close(merged.get_parameter(f"{name}.weight"), expected, rtol=1e-5, atol=1e-7)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    torch.testing.assert_close(log_probs(loaded), log_probs(merged), rtol=0, atol=2e-5)


def test_an_export_of_the_adapter_alone_and_a_start_from_it(directory: Path) -> None:
    first = run_to_checkpoint(directory / "alone", 2, EXPORT, "run.export_merged=false")
    out = directory / "alone" / "export"
    assert 'PeftModel.from_pretrained(model, "adapter")' in (out / "README.md").read_text()
    assert not (out / "config.json").exists() and (out / "adapter" / "adapter_model.safetensors").is_file()
    adapter = {"rank": 0, "path": str(out / "adapter")}  # rank and alpha are the file's
    start = f"models.actor.lora={json.dumps({**adapter, 'alpha': 16})}", "models.actor.optim.lr=0"
    second = CASE.train(directory / "second", *layouts("actor dp2 zero3"), *start, ranks=2, steps=1)
    apart, tensor = tasks.worst_tensor(first, second)
    assert apart == 0.0, tensor
    # nothing is learnt: the reference is the policy that training begins with, unless another one is named
    base, other = (
        f"models.reference.path={tasks.task() / 'actor'}",
        f"models.reference.lora={json.dumps({'rank': 4, 'alpha': 8, 'path': adapter['path']})}",
    )
    kl = [second.metrics[0]["actor/kl_loss"]]
    references = [("models.reference.layout.tp=2",), (other,), (base,)]
    kl += [run(directory / f"reference{i}", 2, *start, *more).metrics[0]["actor/kl_loss"] for i, more in enumerate(references)]
    assert max(map(abs, kl[:3])) < 1e-9 < kl[3], kl


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("models.actor.lora.target_modules=[w1]",), "the model has no matrix 'w1'"),
        (
            ("algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1"),
            "models.actor.lora.rank=4, algorithm.sync_ref_model=true: a reference cannot follow",
        ),
        (("models.actor.lora.bits=5", FP32), "models.actor.lora.bits=5 is not known; allowed: 4, 8, or null"),
        (("models.actor.lora.bits=4", FP32), "with tp=1 a rank would have 96 columns of model.layers.0.mlp.down_proj"),
        (
            (*FOUR_BITS, "models.actor.dtype=float64"),
            "models.actor.dtype=float64: bitsandbytes has no float64",
        ),
        (
            ("models.actor.lora={rank: 0, path: /nowhere}",),
            "models.actor.lora.path=/nowhere, and models.actor.lora.rank is not given: /nowhere/adapter_config.json: no such file",
        ),
        (("models.actor.lora.path=/nowhere",), "models.actor.lora.path=/nowhere: adapter_model.safetensors cannot be read"),
    ],
)
def test_what_is_refused(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(CASE.file, tasks.settings(Path("unused"), 1, *CASE.overrides(), *more), 1)
