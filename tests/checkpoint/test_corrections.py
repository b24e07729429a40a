"""A router's correction on its way through a run: updates leave it alone, and each copy of the weights has its bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tasks
from ranks import run_ranks
from rlhf_spmd.models.weights import write_random_model
from small_models import CONFIGS

CORRECTION = "gate.e_score_correction_bias"


def write_actor(path: Path) -> Path:
    """Corrections that bf16 would round, and that decide which experts are chosen."""
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12, "pad_token_id": None}
    write_random_model(path, {**CONFIGS["glm4-moe"], **sizes}, 3)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors.items():
        if name.endswith(CORRECTION):
            tensor += torch.randn(tensor.shape, generator=generator) * 0.05 + 14.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(tasks.task() / "tokenizer", path, dirs_exist_ok=True)
    return path


REPLICA = ("placement.pools.b=[1]", "models.actor.calls.generate_sequences.pool=b", "models.actor.layout.dp=2")
RESHARDED = ("models.actor.layout.tp=2", "models.actor.generation.tp=1", "models.actor.layout.pp=1")


@pytest.mark.parametrize(
    ("layout", "stops"),  # each stop but the last is resumed from
    [(RESHARDED, (1, 2)), ((*REPLICA, "models.actor.layout.zero=3"), (2,))],
    ids=["resharded and resumed", "sent to a replica"],
)
def test_corrections_stay_as_they_are(tmp_path: Path, layout: tuple[str, ...], stops: tuple[int, ...]) -> None:
    source = write_actor(tmp_path / "actor")
    more = [f"models.{role}.path={source}" for role in ("actor", "reference")] + [*layout, "run.export=true"]
    more += [f"models.{role}.dtype=bfloat16" for role in ("actor", "reference")] + ["models.actor.optim.lr=0.01"]
    for steps in stops:
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(tmp_path / "run", steps, *more))
    if stops == (2,):  # the replica has the trained layout: with other corrections it would choose other experts
        assert tasks.read_run(tmp_path / "run").log_prob_difference() == 0.0
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "run" / "export"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name.endswith(CORRECTION):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
            assert not torch.equal(tensor, tensor.bfloat16().float())
        else:
            assert tensor.dtype == torch.bfloat16 and not torch.equal(tensor, before[name].bfloat16()), name
