"""Training steps of a small model: on one rank, in any layout, and by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import save_checkpoint
from ranks import run_ranks
from rlhf_spmd.checkpoint.load import load_checkpoint
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.models.context_parallel import at_tokens
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs, values
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.workers.objective import MicroBatch
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.train_engine import TrainEngine
from saved_models import model_tensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}

QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_attention_heads": 8,
    "head_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "sliding_window": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GLM4_MOE = {
    **LLAMA,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "shared_kv": {**LLAMA, "num_key_value_heads": 1},
    "qwen3": {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
}


def write_models(base: Path, configs: Mapping[str, Mapping[str, Any]] = CONFIGS) -> dict[str, str]:
    """Random weights for each of ``configs``; returns their directories by name."""
    for name, config in configs.items():
        write_random_model(base / name, {**config}, seed=3)
    return {name: str(base / name) for name in configs}


LENGTHS = [5, 3, 9, 2, 7, 4, 6]

ROW_WEIGHT = 1 / len(LENGTHS)  # of a row in the load-balancing loss

OPTIM = OptimConfig(lr=1e-2, lr_scheduler_type="linear", lr_warmup_steps=1, clip_grad=0.5, weight_decay=0.1)

STEADY = replace(OPTIM, eps=1e-3)  # Adam divides by the gradient's size: a larger eps does not magnify what rounds off at 0

STEPS = 2

PRECISION_STEPS = 3  # the more steps, the smaller what bf16 rounds off beside what they have added

TOTAL_UPDATES = 5  # of the schedule

Result = tuple[list[dict[str, float]], dict[str, Tensor]]


def rows_of(step: int, vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(vocab, (n,), generator=generator) for n in LENGTHS]


def cut(rows: Sequence[Tensor], dp: int, dp_rank: int, num_micro_batches: int, padded: int = 0) -> list[MicroBatch]:
    """Every dp-th row, spread over micro-batches; later micro-batches are empty where rows run out, and those up to ``padded``."""
    mine = list(rows)[dp_rank::dp]
    packed = []
    for i in range(max(num_micro_batches, padded)):
        part = mine[i::num_micro_batches] if i < num_micro_batches else []
        tokens = torch.cat(part) if part else torch.zeros(0, dtype=torch.int64)
        packed.append(MicroBatch(tokens, torch.tensor([len(r) for r in part], dtype=torch.int64)))
    return packed


def next_token_loss(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of -log p of each next token over the count of the whole mini-batch."""
    ends = batch.lengths.cumsum(0)
    keep = torch.ones(len(batch.tokens), dtype=torch.bool, device=batch.tokens.device)
    keep[ends - 1] = False
    if decoder.head_kind == "value":
        (predicted,) = at_tokens(hidden, keep.nonzero()[:, 0], decoder.cp, lambda states, _: [values(decoder, states)])
        return ((predicted - batch.tokens[keep] / 10) ** 2).sum() / COUNT, {"tokens": keep.sum()}
    log_probs = log_probs_at(decoder, hidden, keep.nonzero()[:, 0], batch.tokens.roll(-1)[keep])
    return -log_probs.sum() / COUNT, {"tokens": keep.sum()}


def log_probs_at(decoder: Decoder, hidden: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """log p of each of ``labels`` [N] after the token at its position [N]."""
    (log_probs,) = at_tokens(
        hidden, positions, decoder.cp, lambda states, index: [token_log_probs(decoder, states, labels[index])[0]]
    )
    return log_probs


COUNT = sum(LENGTHS) - len(LENGTHS)


def build(
    world: Any, path: str, layout: Layout, head: str = "lm", dtype: torch.dtype = torch.float64, **options: Any
) -> TrainEngine:
    mesh = build_mesh(world, range(layout.size), layout)
    optim = options.pop("optim", OPTIM)
    settings = {"device": torch.device("cpu"), "total_updates": TOTAL_UPDATES, "new_head": head == "value", **options}
    return TrainEngine(read_spec(path), path, head, mesh, optim, dtype=dtype, **settings)


def local_boxes(engine: TrainEngine) -> list[Any]:
    return boxes_of(engine, engine.local_tensors())


def boxes_of(
    engine: TrainEngine, tensors: Mapping[str, Tensor]
) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]:
    return [
        (box.name, box.shape, box.global_slices, tensor[box.local_slices].clone())
        for name, tensor in tensors.items()
        for box in engine.param_shards()[name].boxes
    ]


def train(world: Any, path: str, layout: Layout, num_micro_batches: Sequence[int], head: str, options: dict[str, Any]) -> Any:
    """Optimizer steps, STEPS or ``options["steps"]``. The loss before each one, summed over replicas, and the boxes that this rank
    holds at the end, for bf16 those of the fp32 master weights."""
    steps = options.pop("steps", STEPS)
    engine = build(world, path, layout, head, **options)
    vocab, reports = engine.spec.vocab_size, []
    for step in range(steps):
        mine = engine.mesh.dp_rank
        rows = [row.to(engine.device) for row in rows_of(step, vocab)]
        batches = cut(rows, layout.dp, mine, num_micro_batches[mine], max(num_micro_batches[: layout.dp]))
        sums = engine.forward_backward(batches, next_token_loss, ROW_WEIGHT)
        assert set(sums) == ({"loss", "tokens"} if engine.mesh.last_stage else set())
        assert engine.dtype != torch.bfloat16 or {grad.dtype for grad in engine._wide_grads.values()} == {torch.float32}
        report = engine.optimizer_step()
        if engine.mesh.last_stage:
            both = torch.stack([sums["loss"], sums["tokens"]])
            engine.mesh.dp.all_reduce(both, "test")
            assert int(both[1]) == COUNT
            report["loss"] = float(both[0])
        reports.append(report)
    return reports, master_boxes(engine) if engine.dtype == torch.bfloat16 else local_boxes(engine)


def master_boxes(engine: TrainEngine) -> list[Any]:
    """Of fp32 weights, to which the engine's bf16 weights must be near."""
    assert engine.optimizer is not None
    masters = {name: state["master"] for name, state in engine.optimizer.state_tensors().items()}
    for name, tensor in engine.local_tensors().items():
        assert tensor.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
        assert torch.equal(masters[name].bfloat16(), tensor)
    return boxes_of(engine, masters)


def whole_tensors(held: Sequence[Any]) -> dict[str, Tensor]:
    """From all ranks' boxes, which must agree where they overlap."""
    whole: dict[str, Tensor] = {}
    for boxes in held:
        for name, shape, slices, tensor in boxes:
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            there = target[slices]
            known = ~there.isnan()
            assert torch.allclose(there[known], tensor[known], rtol=1e-12, atol=1e-14), f"copies of {name} differ"
            target[slices] = tensor
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is not covered"
    return whole


def together(results: Sequence[Any]) -> Result:
    """Whole tensors, and the reports of a last-stage rank."""
    whole = whole_tensors([boxes for _, boxes in results])
    assert all(
        {k: v for k, v in r.items() if k != "loss"} == {k: v for k, v in results[0][0][i].items() if k != "loss"}
        for reports, _ in results
        for i, r in enumerate(reports)
    ), "ranks report different norms"
    return next(reports for reports, _ in results if "loss" in reports[0]), whole


_SINGLE: dict[str, Result] = {}


def single(path: str, head: str, eps: float = OPTIM.eps, **options: Any) -> Result:
    """One rank, one micro-batch, fp64 unless ``options`` of the engine say otherwise; computed once."""
    key = repr((path, head, eps, options))
    if key not in _SINGLE:
        settings = {"optim": replace(OPTIM, eps=eps), **options}
        _SINGLE[key] = together(run_ranks(1, train, path, Layout(), [1], head, settings))
    return _SINGLE[key]


def assert_same(got: Result, want: Result, tolerance: float = 1e-10) -> None:
    for mine, theirs in zip(got[0], want[0], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, tensor in want[1].items():
        torch.testing.assert_close(
            got[1][name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def special_batches(world: Any, path: str, layout: Layout) -> Any:
    """Replica 0 has all rows, replica 1 none; gradients are added over two calls."""
    engine = build(world, path, layout)
    rows = rows_of(0, engine.spec.vocab_size)
    none = MicroBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    first = engine.mesh.dp_rank == 0
    sums = [
        engine.forward_backward(cut(rows[:3], 1, 0, 2) if first else [none] * 2, next_token_loss),
        engine.forward_backward(cut(rows[3:], 1, 0, 1) if first else [none], next_token_loss),
    ]
    if engine.mesh.last_stage and not first:
        assert all({k: float(v) for k, v in part.items()} == {"loss": 0.0, "tokens": 0.0} for part in sums)
    return [engine.optimizer_step()], local_boxes(engine)


def joined(results: Sequence[Any]) -> Result:
    return together([([{**r, "loss": 0.0} for r in reports], boxes) for reports, boxes in results])


def half_precision(world: Any, path: str, layout: Layout) -> Any:
    """:func:`train` in bf16, with the boxes of the fp32 master weights."""
    options = {"dtype": torch.bfloat16, "optim": STEADY, "steps": PRECISION_STEPS}
    return train(world, path, layout, [3] * layout.dp, "lm", options)


def check_half_precision(results: Sequence[Any], path: str) -> None:
    """Losses to 2%, norms to 5%, what the steps have added to each tensor to 15% of its 2-norm."""
    _check_precision(results, path, torch.bfloat16, 2e-2, 5e-2, 0.15)


def check_single_precision(results: Sequence[Any], path: str) -> None:
    """Losses and norms to 1e-4, what the steps have added to each tensor to 1e-4 of its 2-norm."""
    _check_precision(results, path, torch.float32, 1e-4, 1e-4, 1e-4)


def _check_precision(results: Sequence[Any], path: str, stored: torch.dtype, loss: float, norm: float, update: float) -> None:
    reports, weights = together(results)
    reference = single(path, "lm", STEADY.eps, steps=len(reports))
    for report, expected in zip(reports, reference[0], strict=True):
        assert report["loss"] == pytest.approx(expected["loss"], rel=loss)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
    doubles = {name: tensor.double() for name, tensor in weights.items()}
    difference, where = worst_update(doubles, reference[1], path, stored)
    assert difference < update, f"{where}: {difference}"


def worst_update(got: Mapping[str, Tensor], want: Mapping[str, Tensor], path: str, stored: torch.dtype) -> tuple[float, str]:
    """The largest relative error (2-norms) of what training has added to a tensor, and where. ``stored``: the dtype to which the
    first weights of ``got`` had been rounded."""
    first = model_tensors(Path(path))
    return max(
        (float(((got[name] - first[name].to(stored).double()) - change).norm() / change.norm()), name)
        for name, change in ((name, tensor - first[name].double()) for name, tensor in want.items())
        if change.any()  # corrections of routers stay
    )


def go(world: Any, path: str, layout: Layout, options: dict[str, Any], steps: range, load: str, save: str) -> Any:
    """Optimizer steps ``steps`` after reading the checkpoint ``load``; then writes one under ``save``. Either may be empty."""
    engine = build(world, path, layout, **options)
    optimizer = engine.optimizer
    assert optimizer is not None
    if load:
        state = RoleState(engine.param_shards(), engine.local_tensors(), optimizer.state_tensors())
        load_checkpoint(Path(load), "actor", state, engine.mesh.pool)
        optimizer.take_states(state.optim)
        optimizer.step_count = steps.start
    reports = []
    for step in steps:
        rows = rows_of(step, engine.spec.vocab_size)
        engine.forward_backward(cut(rows, layout.dp, engine.mesh.dp_rank, 3), next_token_loss)
        reports.append(engine.optimizer_step() | {"loss": 0.0})
    if save:
        state = RoleState(engine.param_shards(), engine.local_tensors(), optimizer.state_tensors())
        save_checkpoint(Path(save), steps.stop, {"actor": state}, {}, engine.mesh.pool)
    return reports, local_boxes(engine)
