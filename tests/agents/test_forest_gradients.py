"""The gradient of a forest is that of each drawn token once, on its own path, computed apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from double_transformers import double_model, wide
from engine_runs import LLAMA, assert_same, build, local_boxes, together, write_models
from ranks import run_ranks
from rlhf_spmd.agents.forest import Draws, Forest, Turn, row_tokens
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import MASK, MicroBatch, pack_rows, response_log_probs

CPU = torch.device("cpu")
DRAWN = [[11, 12, 13], [14, 15], [16], [17, 18, 19, 20], [21, 22], [23]]


def forest() -> Forest:
    """A conversation of three turns, a branch of its first one that branches again, and another conversation."""
    result = Forest("e")
    turns: list[Turn] = []
    for number, (parent, read_ids) in enumerate([(None, [3, 4]), (0, [5]), (1, [6]), (0, [7, 8]), (3, [9]), (None, [3, 10])]):
        before = None if parent is None else turns[parent]
        turn = result.add(before, [{"role": "user", "content": str(number)}], read_ids, {})
        turn.number, turn.was_delivered = number, True
        draws = Draws(DRAWN[number], [-1.0] * len(DRAWN[number]), [0] * len(DRAWN[number]), "stop")
        result.finish(turn, draws, {"role": "assistant", "content": f"a{number}"}, {})
        turns.append(turn)
    return result


def rows() -> tuple[Batch, list[tuple[list[int], list[int]]]]:
    """The rows to learn, and each turn apart: what was read before it, and what was drawn."""
    episode = forest()
    draws = {turn.number: turn.draws for turn in episode.turns.values() if turn.draws}
    tokens = [row_tokens(row.turns, draws) for row in episode.rows()]
    ids = torch.arange(len(tokens))
    fields = {
        "prompt_ids": ragged([row.ids[:1] for row in tokens], torch.int64),
        "response_ids": ragged([row.ids[1:] for row in tokens], torch.int64),
        MASK: ragged([row.mask[1:] for row in tokens], torch.bool),
    }
    apart = [(turn.ids[: -len(turn.draws.ids)], turn.draws.ids) for turn in episode.turns.values() if turn.draws]
    return Batch(ids, ids, fields), apart


def loss(decoder: Any, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs = response_log_probs(decoder, hidden, micro, 1.0)[0]
    weights = micro.fields["response_ids"].values[micro.fields[MASK].values].to(log_probs.dtype)  # of a token, its number
    return -(log_probs * weights).sum() / 100, {}


def learn(world: Any, path: str, layout: Layout, apart: bool) -> Any:
    engine = build(world, path, layout)
    batch, _ = rows()
    parts = [batch.take([i]) for i in range(len(batch))] if apart else [batch]
    micros = [pack_rows(part, CPU) for part in parts]
    share = micros if layout.dp == 1 else micros[engine.mesh.dp_rank :: layout.dp]
    value = engine.forward_backward(share, loss, 1 / len(batch)).get("loss")
    report = engine.optimizer_step()
    if value is not None:
        engine.mesh.dp.all_reduce(value, "test")
        report["loss"] = float(value)
    return [report], local_boxes(engine)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_forest_learns_what_its_turns_do_apart(tmp_path: Path, layout: Layout) -> None:
    path = write_models(tmp_path, {"model": LLAMA})["model"]
    reports, weights = together(run_ranks(layout.size, learn, path, layout, False))
    assert_same((reports, weights), together(run_ranks(1, learn, path, Layout(), True)))
    model = double_model(Path(path))
    total = torch.zeros((), dtype=torch.float64)
    with wide():
        for read_ids, drawn in rows()[1]:
            logits = model(torch.tensor([[*read_ids, *drawn]])).logits[0, len(read_ids) - 1 : -1]
            targets = torch.tensor(drawn)
            total = total - (logits.log_softmax(-1)[torch.arange(len(drawn)), targets] * targets).sum() / 100
        total.backward()
    norm = (
        torch.stack([parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None])
        .sum()
        .sqrt()
    )
    assert reports[0]["loss"] == pytest.approx(float(total.detach()), rel=1e-10)
    assert reports[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-10)
