"""What routers report and the load-balancing loss: against transformers in float64, and one rank's numbers in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from double_transformers import double_model, whole_gradients, wide
from engine_runs import (
    GLM4_MOE,
    LENGTHS,
    LLAMA,
    QWEN3_MOE,
    assert_same,
    build,
    cut,
    local_boxes,
    next_token_loss,
    rows_of,
    together,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.kernels import Ops
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.routing import as_parts
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.router_balance import RouterBalance, check_balance
from rlhf_spmd.models.spec import read_spec, spec_from_config
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import pack_rows, response_log_probs
from small_models import CONFIGS, make_batch, make_model
from small_models import LENGTHS as ROWS
from triton_device import DEVICE

MOST = 1e-9
COEF = 0.3
SIGMOID = ["glm4-moe", "deepseek-v3"]  # which choose with a correction and in groups
EXPERTS = ["qwen3-moe", "qwen2-moe", "olmoe", "mixtral", "gpt-oss", "deepseek-v2", *SIGMOID]


def router_logits(model: Any) -> list[Tensor]:
    """Filled in a forward pass with the logits of each router [T, E], from what goes into it."""
    found: list[Tensor] = []

    def keep(gate: Any, inputs: tuple[Tensor, ...], _: object) -> None:
        found.append(torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight, getattr(gate, "bias", None)))

    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if gate is not None:
            gate.register_forward_hook(keep)
    return found


def deepseek_loss(logits: Tensor, per_token: int) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, without alpha."""
    scores, (tokens, count) = logits.sigmoid(), logits.shape
    chosen = torch.stack([torch.isin(torch.arange(count), row.topk(per_token).indices) for row in scores])
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return sum(count / (per_token * tokens) * int(chosen[:, i].sum()) * share[i] for i in range(count))


def loss_of(name: str, logits: Tensor, experts: Any) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if name in SIGMOID:
        return deepseek_loss(logits, experts.per_token)
    return load_balancing_loss_func((logits,), experts.count, experts.per_token)


@pytest.mark.parametrize("name", EXPERTS)
def test_loss_gradients_and_metrics_equal_transformers(tmp_path: Path, name: str) -> None:
    """Beside a loss of log-probs, whose gradients are added."""
    path = make_model(tmp_path, {**CONFIGS[name], "vocab_size": 301})
    ids, labels = make_batch(301)
    ids, weights = ids.clamp(min=1), torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    model, spec, by_row = double_model(path), read_spec(path), []
    assert spec.experts is not None
    with wide():
        found, values = router_logits(model), []
        for some, targets in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
            values.append(model(some[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
            by_row.append(list(found))
            found.clear()
        aux = sum(loss_of(name, one, spec.experts) for row in by_row for one in row) / sum(map(len, by_row))
        ((torch.cat(values) * weights).sum() + COEF * aux).backward()
        theirs = whole_gradients(model)
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float64, "cpu")
    load_pretrained(decoder, path)
    balance = RouterBalance(spec, decoder.layer_ids, COEF, solo(), solo(), torch.device("cpu"))
    routers = balance.begin(torch.tensor(ROWS), None, 1 / len(ROWS))
    got, _ = decoder(ids, PackedAttention(ROWS), lambda d, hidden: token_log_probs(d, hidden, labels), routers)
    (got * weights).sum().backward()
    scale = max(float(grad.abs().max()) for grad in theirs.values())
    for key, parameter in decoder.named_parameters():
        for box in decoder.shards[key].boxes if parameter.requires_grad else ():
            assert parameter.grad is not None
            off = (parameter.grad[box.local_slices] - theirs[box.name][box.global_slices]).abs().max()
            assert off < MOST * scale, f"{box.name}: {off / scale}"
    report = balance.report(solo())
    assert report["moe/load_balancing_loss"] == pytest.approx(aux.item(), rel=MOST)
    layers = [torch.cat(parts).detach() for parts in zip(*by_row, strict=True)]
    shares = [one.sigmoid() / one.sigmoid().sum(-1, keepdim=True) if name in SIGMOID else one.softmax(-1) for one in layers]
    entropy = torch.stack([-(one * one.log()).sum(-1).mean() for one in shares]).mean()
    assert report["moe/router_entropy"] == pytest.approx(float(entropy), rel=MOST)
    if spec.experts.groups == 1 and not spec.experts.corrected:  # others take other experts than those of the highest scores
        loads = [
            torch.bincount(one.topk(spec.experts.per_token).indices.flatten(), minlength=spec.experts.count) for one in layers
        ]
        violation = sum(float(one.max() / one.double().mean() - 1) for one in loads) / len(loads)
        assert report["moe/max_vio"] == pytest.approx(violation, rel=MOST)
    assert balance.report(solo()) == {}, "the sums begin anew"


QWEN = {**QWEN3_MOE, "mlp_only_layers": [0]}
PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ANSWERS = [[[1, 2], [3], [4, 5, 6, 7]], [[2, 3], [8, 8, 8], [1]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), {"qwen": QWEN, "glm": GLM4_MOE, "dense": LLAMA})


def learn(world: Any, path: str, layout: Layout, num_micro_batches: int, options: dict[str, Any]) -> Any:
    """Two steps of an engine; the last-stage ranks report the loss too."""
    engine, reports = build(world, path, layout, router_aux_loss_coef=COEF, **options), []
    for step in range(2):
        batches = cut(rows_of(step, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, num_micro_batches)
        sums = engine.forward_backward(batches, next_token_loss, 1 / len(LENGTHS))
        report = engine.optimizer_step()
        if engine.mesh.last_stage:
            report["loss"] = float(engine.mesh.dp.all_reduce(sums["loss"], "test"))
        reports.append(report)
    return reports, local_boxes(engine)


LAYOUTS: list[tuple[Layout, int, dict[str, Any]]] = [
    (Layout(), 4, {}),
    (Layout(), 2, {"activation_checkpointing": "full"}),
    (Layout(tp=2), 2, {"activation_checkpointing": "selective"}),
    (Layout(tp=2, sequence_parallel=True), 3, {}),
    (Layout(pp=2), 3, {"activation_offload": True}),
    (Layout(pp=3), 2, {}),  # the first stage has no router
    (Layout(dp=2, zero=1), 2, {}),
    (Layout(dp=2, zero=2), 5, {}),  # micro-batches without rows
    (Layout(dp=2, zero=3), 3, {"activation_checkpointing": "full"}),
    (Layout(cp=2), 2, {}),
    (Layout(cp=4), 7, {"activation_checkpointing": "selective"}),  # fewer tokens than ranks
    (Layout(cp=2, tp=2), 3, {}),
    (Layout(dp=2, cp=2, zero=3), 2, {}),
    (Layout(dp=2, ep=2, zero=2), 3, {"activation_checkpointing": "selective"}),
]


@pytest.mark.parametrize("kind", ["qwen", "glm"])
@pytest.mark.parametrize(("layout", "micro", "options"), LAYOUTS, ids=str)
def test_training_is_the_same_as_on_one_rank(
    models: dict[str, str], kind: str, layout: Layout, micro: int, options: dict[str, Any]
) -> None:
    """Weights, norms, losses and the metrics, in fp64."""
    want = together(run_ranks(1, learn, models[kind], Layout(), 1, {}))
    assert {"moe/max_vio", "moe/router_entropy", "moe/load_balancing_loss"} <= want[0][0].keys()
    assert_same(together(run_ranks(layout.size, learn, models[kind], layout, micro, options)), want)


def test_the_loss_changes_what_is_learnt(models: dict[str, str]) -> None:
    """Also where only adapters learn: its gradient goes on through the residual stream."""
    for options in ({}, {"lora": LoraConfig(rank=2)}):
        (_, weights), (_, others) = (run_ranks(1, learn_with, models["qwen"], coef, options)[0] for coef in (0.0, COEF))
        assert any(not torch.equal(a[3], b[3]) for a, b in zip(weights, others, strict=True))


def learn_with(world: Any, path: str, coef: float, options: dict[str, Any]) -> Any:
    engine = build(world, path, Layout(), router_aux_loss_coef=coef, **options)
    engine.forward_backward(cut(rows_of(0, 41), 1, 0, 1), next_token_loss, 1 / len(LENGTHS))
    report = engine.optimizer_step()
    assert ("moe/load_balancing_loss" in report) == (coef > 0)
    return report, local_boxes(engine)


def balanced(world: Any, path: str) -> list[dict[str, float]]:
    """Steps on the same rows, that learn nothing but balance."""
    engine, reports = build(world, path, Layout(), router_aux_loss_coef=100.0), []
    for _ in range(12):
        engine.forward_backward(cut(rows_of(0, 41), 1, 0, 1), next_token_loss, 1 / len(LENGTHS))
        reports.append(engine.optimizer_step())
    return reports


@pytest.mark.parametrize("kind", ["qwen", "glm"])
def test_loads_become_even(models: dict[str, str], kind: str) -> None:
    (reports,) = run_ranks(1, balanced, models[kind])
    first, last = reports[0], reports[-1]
    for name in ("moe/load_balancing_loss", "moe/max_vio"):
        assert last[name] < 0.95 * first[name], (name, first[name], last[name])


def shared(world: Any, path: str, layout: Layout, apart: bool) -> Any:
    """A step on two groups of three rows, which share their prompts in a micro-batch unless ``apart``."""
    engine, packed = build(world, path, layout, router_aux_loss_coef=COEF), []
    for group, (prompt, answers) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = torch.arange(3) + 3 * group
        rows = {"prompt_ids": ragged([prompt] * 3, torch.int64), "response_ids": ragged(answers, torch.int64)}
        packed.append(pack_rows(Batch(ids, ids, rows), torch.device("cpu"), 1.0 if apart else 0.0))
        assert (packed[-1].places is None) == apart

    def loss(decoder: Decoder, hidden: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = response_log_probs(decoder, hidden, micro, 0.7)[0]
        return (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum() / 16, {}

    sums = engine.forward_backward(packed, loss, 1 / 6)
    return [engine.optimizer_step() | {"loss": float(sums.get("loss", 0.0))}], local_boxes(engine)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_rows_that_share_a_prompt_count_it_each(models: dict[str, str], layout: Layout) -> None:
    want = together(run_ranks(1, shared, models["qwen"], Layout(), True))
    assert_same(together(run_ranks(layout.size, shared, models["qwen"], layout, False)), want)


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "gpt-oss"])
def test_gpu_kernels_and_torch_agree(name: str) -> None:
    """In Triton's interpreter, in fp32: weights of experts, whether chosen or given, the logits' gradients, and the sums."""
    spec = spec_from_config(CONFIGS[name], "test")
    assert spec.experts is not None
    count, per_token = spec.experts.count, spec.experts.per_token
    make = torch.Generator().manual_seed(0)
    logits, correction = torch.randn(12, count, generator=make), as_parts(torch.zeros(count)) if name == "glm4-moe" else None
    given = torch.stack([torch.randperm(count, generator=make)[:per_token] for _ in range(10)])
    layers = sum(spec.experts_of(layer) is not None for layer in range(4))
    for chosen in (None, given[:, None].expand(-1, layers, -1)):
        results = []
        for ops in (Ops(), GpuOps()):
            balance = RouterBalance(spec, range(4), COEF, solo(), solo(), torch.device(DEVICE))
            routers = balance.begin(torch.tensor([3, 7]), None, 0.5, chosen)
            assert routers is not None
            x = logits.to(DEVICE, torch.float32).requires_grad_()
            weights, _ = routers.route(ops, 2 if name == "glm4-moe" else 0, x, correction, spec.experts.rule, torch.float32)
            scale = torch.linspace(-1, 1, 12 * per_token, device=DEVICE).view_as(weights)
            results.append((weights.detach(), torch.autograd.grad((weights * scale).sum(), x)[0], balance.sums))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_half_precision(models: dict[str, str]) -> None:
    (want, _), (got, _) = (
        run_ranks(1, learn, models["qwen"], Layout(), 1, {"dtype": dtype})[0] for dtype in (torch.float64, torch.bfloat16)
    )
    for name in ("moe/router_entropy", "moe/load_balancing_loss"):
        assert got[0][name] == pytest.approx(want[0][name], rel=2e-2)


def test_models_without_experts_report_nothing(models: dict[str, str]) -> None:
    report, _ = run_ranks(1, learn_with, models["dense"], 0.0, {})[0]
    assert report.keys() == {"grad_norm", "lr"}


def test_what_is_refused() -> None:
    mixture, dense = (spec_from_config(config, "config.json") for config in (QWEN, LLAMA))
    check_balance(mixture, 0.1, True, "key")
    check_balance(dense, 0.0, False, "key")
    for spec, coef, trained, said in (
        (mixture, -0.1, True, "key=-0.1 must be at least 0"),
        (mixture, float("nan"), True, "key=nan must be at least 0"),
        (mixture, 0.1, False, "key=0.1: this role is not trained; leave it out"),
        (dense, 0.1, True, "key=0.1: models of llama have no experts; leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            check_balance(spec, coef, trained, "key")
