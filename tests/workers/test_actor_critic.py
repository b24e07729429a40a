"""Actor and critic in one model: both heads on one trunk, and one backward pass of both losses, against transformers in float64."""

from __future__ import annotations

import pytest
import torch

import tasks
from ranks import run_ranks
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.objective import Objective, Rows, Totals, joint
from role_workers import batch_of, build

LENGTHS = [(3, 5), (7, 2), (2, 9), (6, 6)]
WEIGHT = 0.3


def policy(fields: dict[str, torch.Tensor], rows: Rows, totals: Totals) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = -fields["log_probs"].sum() / totals.tokens
    return value, {"actor/of_policy": value.detach().double()}


def value(fields: dict[str, torch.Tensor], rows: Rows, totals: Totals) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    error = (fields["values"] - 1.0).square().sum() / totals.tokens
    return error, {"actor/of_value": error.detach().double()}


def head(hidden: int) -> torch.Tensor:
    return torch.linspace(-1, 1, hidden, dtype=torch.float64)[None]


def update(world: World, where: tuple[str, ...]) -> tuple[dict[str, float], list[float]]:
    """The statistics of one optimizer step of both losses, and the sums of each row's values before it."""
    config = tasks.other_task({"name": "ppo", "share_actor_critic": True, "use_kl_in_reward": False}, "actor")
    controller, models = build(world, "models.actor.dtype=float64", *where, config=config)
    for name, tensor in models.actor.engine.local_tensors().items():
        if name.endswith("value.weight"):
            tensor.copy_(head(tensor.shape[1])[: len(tensor)])
    rows = controller.source(batch_of(LENGTHS))
    both = joint(Objective(policy), Objective(value, model_outputs=("values",), weight=WEIGHT))

    def script() -> tuple:
        values = rows.union(models.actor.compute_values(rows))
        sums = models.compute.apply(values, row_sums, ("values",), outputs=("sums",))
        return controller.get_field(sums, "sums"), models.actor.update(rows, both)

    sums, report = controller.run(script)
    return controller.get(report)[0][0], sums.tolist()


def row_sums(fields: dict[str, torch.Tensor], rows: Rows, whole: object) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    row = torch.repeat_interleave(torch.arange(len(rows)), rows.lengths)
    return {"sums": torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row, fields["values"])}, {}


def reference() -> tuple[dict[str, float], list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tasks.task() / "actor", dtype=torch.float64)
    weight = head(model.config.hidden_size).requires_grad_()
    batch = batch_of(LENGTHS)
    tokens = sum(response for _, response in LENGTHS)
    log_probs, values = torch.zeros((), dtype=torch.float64), []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True):
        out = model(torch.cat([prompt, response])[None], output_hidden_states=True)
        predicting = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        chosen = out.logits[0, predicting].log_softmax(-1).gather(1, response[:, None])
        log_probs = log_probs + chosen.sum()
        values.append((out.hidden_states[-1][0, predicting] * weight).sum(-1))
    of_policy, of_value = -log_probs / tokens, (torch.cat(values) - 1.0).square().sum() / tokens
    (of_policy + WEIGHT * of_value).backward()
    squares = sum(float(p.grad.square().sum()) for p in (*model.parameters(), weight) if p.grad is not None)
    losses = {"of_policy": of_policy.item(), "of_value": of_value.item()}
    return {**losses, "grad_norm": squares**0.5}, [row.sum().item() for row in values]


@pytest.mark.parametrize(
    "where", [("models.actor.layout.tp=2",), ("models.actor.layout.pp=2",), ("models.actor.layout.zero=3",)]
)
def test_one_backward_pass_of_both_losses(where: tuple[str, ...]) -> None:
    """transformers takes norms and rotations in float32 also in a float64 model, hence 1e-6."""
    expected, values = reference()
    report, sums = run_ranks(2, update, where)[0]
    for key, number in expected.items():
        assert report[f"actor/{key}"] == pytest.approx(number, rel=1e-6), key
    assert sums == pytest.approx(values, rel=1e-6, abs=1e-6)  # sums of terms of size one
