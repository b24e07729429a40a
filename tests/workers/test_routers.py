"""Routers of mixtures of experts: metrics and load-balancing loss are those of transformers in float64. Updates take the experts that
an earlier forward pass took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from double_transformers import double_model, whole_gradients, wide
from engine_runs import (
    GLM4_MOE,
    LLAMA,
    QWEN3_MOE,
    ROW_WEIGHT,
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
from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.router_balance import RouterBalance
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import ROUTED_EXPERTS, MicroBatch, pack_rows, response_log_probs
from rlhf_spmd.workers.router_replay import ExpertRecords, check_replay
from rlhf_spmd.workers.train_engine import TrainEngine
from small_models import CONFIGS, make_batch, make_model
from small_models import LENGTHS as ROWS
from tiers import tiers

# -- the load-balancing loss; tests/workers/test_engine_layouts.py has it in many layouts

TOLERANCE = 1e-9
COEF = 0.3
SIGMOID = ["glm4-moe", "deepseek-v3"]  # which choose with a bias of the scores and in groups
SHORT = {"qwen3-moe", "gpt-oss", *SIGMOID}


def router_logits(model: Any) -> list[Tensor]:
    """Filled in a forward pass with the logits of each router [T, E], from what goes into it."""
    logits: list[Tensor] = []

    def keep(gate: Any, inputs: tuple[Tensor, ...], _: object) -> None:
        logits.append(torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight, getattr(gate, "bias", None)))

    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if gate is not None:
            gate.register_forward_hook(keep)
    return logits


def deepseek_loss(logits: Tensor, per_token: int) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, without alpha."""
    scores, (tokens, count) = logits.sigmoid(), logits.shape
    chosen = torch.stack([torch.isin(torch.arange(count), row.topk(per_token).indices) for row in scores])
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return sum(count / (per_token * tokens) * int(chosen[:, i].sum()) * share[i] for i in range(count))


def loss_of(name: str, logits: Tensor, experts: Any) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if name in SIGMOID:
        return deepseek_loss(logits, experts.experts_per_token)
    return load_balancing_loss_func((logits,), experts.num_experts, experts.experts_per_token)


@pytest.mark.parametrize("name", tiers([*sorted(SHORT), "qwen2-moe", "olmoe", "mixtral", "deepseek-v2"], SHORT))
def test_loss_gradients_and_metrics_equal_transformers(tmp_path: Path, name: str) -> None:
    """Beside a loss of log-probs, whose gradients are added."""
    path = make_model(tmp_path, {**CONFIGS[name], "vocab_size": 301})
    ids, labels = make_batch(301)
    ids, weights = ids.clamp(min=1), torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    model, spec, by_row = double_model(path), read_spec(path), []
    assert spec.experts is not None
    with wide():
        logits, values = router_logits(model), []
        for row, targets in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
            values.append(model(row[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
            by_row.append(list(logits))
            logits.clear()
        balance_loss = sum(loss_of(name, layer, spec.experts) for row in by_row for layer in row) / sum(map(len, by_row))
        ((torch.cat(values) * weights).sum() + COEF * balance_loss).backward()
        expected = whole_gradients(model)
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float64, "cpu")
    load_pretrained(decoder, path)
    balance = RouterBalance(spec, decoder.layer_ids, COEF, solo(), solo(), torch.device("cpu"))
    routers = balance.begin(torch.tensor(ROWS), None, 1 / len(ROWS))
    log_probs, _ = decoder(ids, PackedAttention(ROWS), lambda d, hidden: token_log_probs(d, hidden, labels), routers)
    (log_probs * weights).sum().backward()
    scale = max(float(grad.abs().max()) for grad in expected.values())
    for key, parameter in decoder.named_parameters():
        for box in decoder.shards[key].boxes if parameter.requires_grad else ():
            assert parameter.grad is not None
            error = (parameter.grad[box.local_slices] - expected[box.name][box.global_slices]).abs().max()
            assert error < TOLERANCE * scale, f"{box.name}: {error / scale}"
    report = balance.report(solo())
    assert report["moe/load_balancing_loss"] == pytest.approx(balance_loss.item(), rel=TOLERANCE)
    layers = [torch.cat(parts).detach() for parts in zip(*by_row, strict=True)]
    scores = [layer.sigmoid() if name in SIGMOID else layer.softmax(-1) for layer in layers]
    shares = [layer / layer.sum(-1, keepdim=True) for layer in scores]
    entropy = torch.stack([-(layer * layer.log()).sum(-1).mean() for layer in shares]).mean()
    assert report["moe/router_entropy"] == pytest.approx(float(entropy), rel=TOLERANCE)
    if spec.experts.groups == 1 and not spec.experts.score_biased:  # others take other experts than those of the highest scores
        experts = spec.experts
        loads = [
            torch.bincount(layer.topk(experts.experts_per_token).indices.flatten(), minlength=experts.num_experts)
            for layer in layers
        ]
        violation = sum(float(load.max() / load.double().mean() - 1) for load in loads) / len(loads)
        assert report["moe/max_vio"] == pytest.approx(violation, rel=TOLERANCE)
    assert balance.report(solo()) == {}, "the sums begin anew"


QWEN = {**QWEN3_MOE, "num_experts": 6, "mlp_only_layers": [0]}
GLM = {**GLM4_MOE, "n_routed_experts": 300}  # which no byte can number


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), {"qwen": QWEN, "glm": GLM})


def learn(world: Any, path: str, coef: float) -> Any:
    """A step of adapters alone."""
    engine = build(world, path, Layout(), router_aux_loss_coef=coef, lora=LoraConfig(rank=2))
    engine.forward_backward(cut(rows_of(0, engine.spec.vocab_size), 1, 0, 1), next_token_loss, ROW_WEIGHT)
    engine.optimizer_step()
    return local_boxes(engine)


def test_the_loss_changes_what_adapters_learn(models: dict[str, str]) -> None:
    """Its gradient goes on through the residual stream."""
    (weights,), (others,) = (run_ranks(1, learn, models["qwen"], coef) for coef in (0.0, COEF))
    assert any(not torch.equal(a[3], b[3]) for a, b in zip(weights, others, strict=True))


# -- experts of an earlier forward pass

PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ANSWERS = [[1, 2], [3], [4, 5, 6, 7], [2, 3], [8, 8, 8], [1]]
NUM_ROWS = len(ANSWERS)


def rows() -> Batch:
    ids, groups = torch.arange(NUM_ROWS), torch.arange(NUM_ROWS) // 3
    prompts = ragged([PROMPTS[group] for group in groups.tolist()], torch.int64)
    return Batch(ids, groups, {"prompt_ids": prompts, "response_ids": ragged(ANSWERS, torch.int64)})


def with_experts(batch: Batch, experts: Ragged) -> Batch:
    return batch.union(batch.with_fields(**{ROUTED_EXPERTS: experts}))


def packed_rows(engine: TrainEngine, batch: Batch, number: int) -> list[MicroBatch]:
    """This replica's rows in ``number`` micro-batches, in no order of theirs."""
    mine = list(range(NUM_ROWS))[engine.mesh.dp_rank :: engine.mesh.dp.size][::-1]
    return [pack_rows(batch.take(mine[i::number]), torch.device("cpu")) for i in range(number)]


def head(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> Tensor:
    return response_log_probs(decoder, hidden, micro, 0.7)[0]


def loss(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    if not len(micro.lengths):
        return hidden.sum() / 16, {}
    weights = torch.repeat_interleave(micro.fields.row_ids + 1.0, micro.fields["response_ids"].lengths)
    return (head(decoder, hidden, micro) * weights).sum() / 16, {}


def recorded_experts(engine: TrainEngine, number: int) -> Ragged:
    """The experts of all rows, on every rank of the last stage and the others."""
    records, batch = ExpertRecords(engine), rows()
    packed = packed_rows(engine, batch, number)
    engine.forward(packed, head, records.begin(packed))
    mine = batch.take(sorted(torch.cat([micro.fields.row_ids for micro in packed]).tolist()))
    field = records.field(mine)
    sizes = (batch["prompt_ids"].lengths + batch["response_ids"].lengths).tolist()
    experts = torch.zeros(sum(sizes), *field.values.shape[1:], dtype=torch.int64)
    for row, chosen in zip(mine.row_ids.tolist(), field.rows(), strict=True):
        experts.split(sizes)[row].copy_(chosen)
    engine.mesh.dp.all_reduce(experts, "test")
    return Ragged(experts.to(field.values.dtype), torch.tensor(sizes))


def replay(world: Any, path: str, layout: Layout, number: int, options: dict[str, Any]) -> Any:
    """A pass that records, a step that changes the choices, and one that takes those before it."""
    engine = build(world, path, layout, **options)
    field, batch, reports = recorded_experts(engine, number), rows(), []
    for each in (batch, with_experts(batch, field)):
        value = engine.forward_backward(packed_rows(engine, each, number), loss, 1 / NUM_ROWS).get("loss")
        report = engine.optimizer_step()
        if value is not None:
            report["loss"] = float(engine.mesh.dp.all_reduce(value, "test"))
        reports.append(report)
    return field.values, reports, local_boxes(engine)


@pytest.mark.parametrize(
    ("kind", "layout", "number", "options"),
    [
        ("glm", Layout(), 3, {"activation_checkpointing": "full"}),
        ("qwen", Layout(dp=2, ep=2), 3, {"activation_checkpointing": "full"}),
        ("qwen", Layout(tp=2, sequence_parallel=True), 2, {}),
        ("glm", Layout(pp=2), 3, {"activation_checkpointing": "selective"}),
        ("qwen", Layout(pp=3), 2, {}),  # the first stage has no router
        ("glm", Layout(dp=2, zero=2), 4, {}),  # micro-batches without rows
        ("qwen", Layout(cp=4), 6, {}),
        ("glm", Layout(pp=2, cp=2), 2, {}),
        ("qwen", Layout(cp=2, dp=2, zero=3), 1, {"router_aux_loss_coef": 0.1}),
    ],
    ids=str,
)
def test_replays_are_the_same_in_every_layout(
    models: dict[str, str], kind: str, layout: Layout, number: int, options: dict[str, Any]
) -> None:
    """fp64: what is recorded, and metrics and weights of the updates."""
    numeric = {key: value for key, value in options.items() if key == "router_aux_loss_coef"}
    ((experts, *updates),) = run_ranks(1, replay, models[kind], Layout(), 1, numeric)
    results = run_ranks(layout.size, replay, models[kind], layout, number, options)
    assert experts.dtype == (torch.uint8 if kind == "qwen" else torch.int16)
    assert all(torch.equal(field, experts) for field, *_ in results)
    assert_same(together([result[1:] for result in results]), together([updates]))


def loads(world: Any, path: str, replays: bool, changed: bool) -> tuple[Tensor, Tensor]:
    """Of the recorded experts and of an update's, by layer and expert. ``changed``: the weights change between them."""
    engine = build(world, path, Layout())
    field, batch = recorded_experts(engine, 2), rows()
    if changed:
        engine.forward_backward(packed_rows(engine, batch, 2), loss)
        engine.optimizer_step()
    engine.forward_backward(packed_rows(engine, with_experts(batch, field) if replays else batch, 2), loss)
    counts = [torch.bincount(layer.flatten().long(), minlength=6) for layer in field.values.unbind(1)]
    return torch.stack(counts).double(), engine.balance.sums[:, :-2].clone()


def test_an_update_takes_the_recorded_experts(models: dict[str, str]) -> None:
    for replays, changed in ((False, False), (True, True), (False, True)):
        ((before, after),) = run_ranks(1, loads, models["qwen"], replays, changed)
        assert torch.equal(before, after) == (replays or not changed), (replays, changed)


def perturbed(world: Any, path: str) -> tuple[list[Tensor], Tensor]:
    """The rows' log-probs: with the routers as they were when their experts were recorded, freely and as recorded, then with others,
    freely and as recorded. And what the passes counted."""
    engine, batch, log_probs = build(world, path, Layout()), rows(), []
    field = recorded_experts(engine, 2)
    for _ in range(2):
        for each in (batch, with_experts(batch, field)):
            log_probs.append(torch.cat(engine.forward(packed_rows(engine, each, 2), head)))
        generator = torch.Generator().manual_seed(1)
        for name, tensor in engine.local_tensors().items():
            if ".router." in name:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator).to(tensor)
    return log_probs, engine.balance.sums


def test_a_pass_without_gradients_replays_too(models: dict[str, str]) -> None:
    """Other routers change the log-probs less if their tokens keep their experts. No metric counts such a pass."""
    (((before, same, free, kept), counted),) = run_ranks(1, perturbed, models["qwen"])
    assert torch.equal(before, same) and not counted.any()
    assert 0 < (kept - before).abs().mean() < 0.8 * (free - before).abs().mean()


def test_rows_share_a_prompt_only_if_they_share_its_experts() -> None:
    batch = rows()
    lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    experts = torch.arange(2).repeat(int(lengths.sum()), 2, 1).to(torch.uint8)
    others = experts.clone()
    others[int(lengths[0]) + 1, 1] = torch.tensor([1, 0])  # a token of the second row's prompt
    batches = (batch, with_experts(batch, Ragged(experts, lengths)), with_experts(batch, Ragged(others, lengths)))
    tokens = [len(pack_rows(each, torch.device("cpu")).tokens) for each in batches]
    assert tokens[0] == tokens[1] == tokens[2] - (len(PROMPTS[0]) - 1)


def test_what_is_refused() -> None:
    mixture, dense = (spec_from_config(config, "config.json") for config in (QWEN, LLAMA))
    check_replay(mixture, True, "key=R2")
    for spec, scores, message in ((dense, True, "models of llama have no experts"), (mixture, False, "it records no experts")):
        with pytest.raises(ValueError, match=f"key=R2: .*{message}"):
            check_replay(spec, scores, "key=R2")
