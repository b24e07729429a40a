"""Updates take the experts that an earlier forward pass took: as recorded, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_runs import GLM4_MOE, LLAMA, QWEN3_MOE, assert_same, build, local_boxes, together, write_models
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import pack_rows, response_log_probs
from rlhf_spmd.workers.passes import ROUTED_EXPERTS, Packed
from rlhf_spmd.workers.router_replay import ExpertRecords, check_replay
from rlhf_spmd.workers.train_engine import TrainEngine

QWEN = {**QWEN3_MOE, "num_experts": 6, "mlp_only_layers": [0]}
GLM = {**GLM4_MOE, "n_routed_experts": 300}  # which no byte can number
PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ANSWERS = [[1, 2], [3], [4, 5, 6, 7], [2, 3], [8, 8, 8], [1]]
ROWS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), {"qwen": QWEN, "glm": GLM})


def rows() -> Batch:
    ids, groups = torch.arange(ROWS), torch.arange(ROWS) // 3
    prompts = ragged([PROMPTS[group] for group in groups.tolist()], torch.int64)
    return Batch(ids, groups, {"prompt_ids": prompts, "response_ids": ragged(ANSWERS, torch.int64)})


def packed_rows(engine: TrainEngine, batch: Batch, number: int) -> list[Packed]:
    """This replica's rows in ``number`` micro-batches, in no order of theirs."""
    mine = list(range(ROWS))[engine.mesh.dp_rank :: engine.mesh.dp.size][::-1]
    return [pack_rows(batch.take(mine[i::number]), torch.device("cpu")) for i in range(number)]


def head(decoder: Decoder, hidden: Tensor, micro: Packed) -> Tensor:
    return response_log_probs(decoder, hidden, micro, 0.7)[0]


def loss(decoder: Decoder, hidden: Tensor, micro: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    found = head(decoder, hidden, micro) if len(micro.lengths) else hidden.sum()
    weights = (
        torch.repeat_interleave(micro.extra.row_ids + 1.0, micro.extra["response_ids"].lengths) if len(micro.lengths) else 1
    )
    return (found * weights).sum() / 16, {}


def recorded(engine: TrainEngine, number: int) -> Ragged:
    """The experts of all rows, on every rank of the last stage and the others."""
    records, batch = ExpertRecords(engine), rows()
    packed = packed_rows(engine, batch, number)
    engine.forward(packed, head, records.begin(packed))
    mine = batch.take(sorted(torch.cat([micro.extra.row_ids for micro in packed]).tolist()))
    own = records.field(mine)
    sizes = (batch["prompt_ids"].lengths + batch["response_ids"].lengths).tolist()
    whole = torch.zeros(sum(sizes), *own.values.shape[1:], dtype=torch.int64)
    for row, chosen in zip(mine.row_ids.tolist(), own.rows(), strict=True):
        whole.split(sizes)[row].copy_(chosen)
    engine.mesh.dp.all_reduce(whole, "test")
    return Ragged(whole.to(own.values.dtype), torch.tensor(sizes))


def replay(world: Any, path: str, layout: Layout, number: int, options: dict[str, Any]) -> Any:
    """A pass that records, a step that changes the choices, and one that takes those before it."""
    engine = build(world, path, layout, **options)
    field, batch, reports = recorded(engine, number), rows(), []
    for given in (batch, batch.union(batch.with_fields(**{ROUTED_EXPERTS: field}))):
        value = engine.forward_backward(packed_rows(engine, given, number), loss, 1 / ROWS).get("loss")
        report = engine.optimizer_step()
        if value is not None:
            report["loss"] = float(engine.mesh.dp.all_reduce(value, "test"))
        reports.append(report)
    return field.values, reports, local_boxes(engine)


LAYOUTS: list[tuple[Layout, int, dict[str, Any]]] = [
    (Layout(), 3, {"activation_checkpointing": "full"}),
    (Layout(dp=2, ep=2), 3, {"activation_checkpointing": "full"}),
    (Layout(tp=2, sequence_parallel=True), 2, {}),
    (Layout(pp=2), 3, {"activation_checkpointing": "selective"}),
    (Layout(pp=3), 2, {}),
    (Layout(dp=2, zero=3), 2, {}),
    (Layout(dp=2, zero=2), 4, {}),  # micro-batches without rows
    (Layout(cp=2), 2, {}),
    (Layout(cp=4), 6, {}),
    (Layout(pp=2, cp=2), 2, {}),
    (Layout(cp=2, dp=2, zero=1), 1, {"router_aux_loss_coef": 0.1}),
]


@pytest.mark.parametrize("kind", ["qwen", "glm"])
@pytest.mark.parametrize(("layout", "number", "options"), LAYOUTS, ids=str)
def test_replays_are_the_same_in_every_layout(
    models: dict[str, str], kind: str, layout: Layout, number: int, options: dict[str, Any]
) -> None:
    """fp64: what is recorded, and metrics and weights of the updates."""
    kept = {key: value for key, value in options.items() if key == "router_aux_loss_coef"}
    (want,) = run_ranks(1, replay, models[kind], Layout(), 1, kept)
    found = run_ranks(layout.size, replay, models[kind], layout, number, options)
    assert want[0].dtype == (torch.uint8 if kind == "qwen" else torch.int16)
    assert all(torch.equal(field, want[0]) for field, *_ in found)
    assert_same(together([one[1:] for one in found]), together([want[1:]]))


def loads(world: Any, path: str, replays: bool, fast: bool) -> tuple[Tensor, Tensor]:
    """Of the recorded experts and of an update's, by layer and expert. ``fast``: the weights change between them."""
    engine = build(world, path, Layout())
    field, batch = recorded(engine, 2), rows()
    if fast:
        engine.forward_backward(packed_rows(engine, batch, 2), loss)
        engine.optimizer_step()
    given = batch.union(batch.with_fields(**{ROUTED_EXPERTS: field})) if replays else batch
    engine.forward_backward(packed_rows(engine, given, 2), loss)
    counts = [torch.bincount(layer.flatten().long(), minlength=6) for layer in field.values.unbind(1)]
    return torch.stack(counts).double(), engine.balance.sums[:, :-2].clone()


def test_an_update_takes_the_recorded_experts(models: dict[str, str]) -> None:
    for replays, fast in ((True, False), (False, False), (True, True), (False, True)):
        ((before, after),) = run_ranks(1, loads, models["qwen"], replays, fast)
        assert torch.equal(before, after) == (replays or not fast), (replays, fast)


def perturbed(world: Any, path: str, field: Ragged) -> tuple[list[Tensor], Tensor]:
    """The rows' log-probs: with the routers as they were when ``field`` was recorded, freely and as recorded, then with others, freely
    and as recorded. And what the passes counted."""
    engine, batch, found = build(world, path, Layout()), rows(), []
    for _ in range(2):
        for given in (batch, batch.union(batch.with_fields(**{ROUTED_EXPERTS: field}))):
            found.append(torch.cat(engine.forward(packed_rows(engine, given, 2), head)))
        generator = torch.Generator().manual_seed(1)
        for name, tensor in engine.local_tensors().items():
            if ".router." in name:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator).to(tensor)
    return found, engine.balance.sums


def test_a_pass_without_gradients_replays_too(models: dict[str, str]) -> None:
    """Other routers change the log-probs less if their tokens keep their experts. No metric counts such a pass."""
    ((recorded_field, *_),) = run_ranks(1, replay, models["qwen"], Layout(), 2, {})
    lengths = rows()["prompt_ids"].lengths + rows()["response_ids"].lengths
    (((before, same, free, kept), counted),) = run_ranks(1, perturbed, models["qwen"], Ragged(recorded_field, lengths))
    assert torch.equal(before, same) and not counted.any()
    assert 0 < (kept - before).abs().mean() < 0.8 * (free - before).abs().mean()


def test_rows_share_a_prompt_only_if_they_share_its_experts() -> None:
    batch = rows()
    lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    chosen = torch.arange(2).repeat(int(lengths.sum()), 2, 1).to(torch.uint8)
    same = batch.union(batch.with_fields(**{ROUTED_EXPERTS: Ragged(chosen, lengths)}))
    other = chosen.clone()
    other[int(lengths[0]) + 1, 1] = torch.tensor([1, 0])  # a token of the second row's prompt
    apart = batch.union(batch.with_fields(**{ROUTED_EXPERTS: Ragged(other, lengths)}))
    tokens = [len(pack_rows(one, torch.device("cpu")).tokens) for one in (batch, same, apart)]
    assert tokens[0] == tokens[1] == tokens[2] - (len(PROMPTS[0]) - 1)


def test_what_is_refused() -> None:
    mixture, dense = (spec_from_config(config, "config.json") for config in (QWEN, LLAMA))
    check_replay(mixture, True, "key=R2")
    for spec, scores, said in ((dense, True, "models of llama have no experts"), (mixture, False, "it records no experts")):
        with pytest.raises(ValueError, match=f"key=R2: .*{said}"):
            check_replay(spec, scores, "key=R2")
