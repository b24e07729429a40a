"""Log-probs equal transformers' on the same directory, in every family, with tensor and pipeline parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from places import SHARED
from ranks import run_ranks
from small_models import CONFIGS, LENGTHS, make_batch, make_model
from torch import Tensor

from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, token_log_probs, values
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.world import World

PRETRAINED = SHARED / "models"
TOLERANCE = 5e-5


def expected(path: Path, ids: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """transformers' log-probs and entropies, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs, entropies = [], []
    for some, targets in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
        with torch.no_grad():
            table = (model(some[None]).logits[0] / temperature).log_softmax(-1)
        log_probs.append(table.gather(1, targets[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def score(path: str, pp: int, tp: Group, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and full logits, the stages run one after the other in this process."""
    spec = read_spec(path)
    ids, labels = make_batch(spec.vocab_size)
    attention = PackedAttention(LENGTHS)
    x = ids
    with torch.no_grad():
        for stage in range(pp):
            decoder = Decoder(spec, "lm", stage, pp, tp, torch.float32, "cpu")
            load_pretrained(decoder, path)
            x = decoder(x, attention)
        log_probs, entropy = token_log_probs(decoder, x, labels, temperature, entropy=True, chunk_rows=48)
        assert entropy is not None
        return log_probs, entropy, gather_logits(decoder, local_logits(decoder, x))


def _score_rank(world: World, path: str, pp: int, temperature: float) -> list[Any]:
    return [part.tolist() for part in score(path, pp, world.all, temperature)]


def assert_equal(path: Path, got: tuple[Any, ...], temperature: float) -> None:
    ids, labels = make_batch(read_spec(path).vocab_size)
    log_probs, entropies = expected(path, ids, labels, temperature)
    table = (torch.as_tensor(got[2]) / temperature).log_softmax(-1)
    assert (torch.as_tensor(got[0]) - log_probs).abs().max() < TOLERANCE
    assert (torch.as_tensor(got[1]) - entropies).abs().max() < TOLERANCE
    assert (table.gather(1, labels[:, None])[:, 0] - log_probs).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_transformers(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, CONFIGS[name])
    assert_equal(path, score(str(path), 1, solo(), 1.0), 1.0)
    assert_equal(path, score(str(path), 3, solo(), 0.7), 0.7)
    for got in run_ranks(2, _score_rank, str(path), 2, 0.7):
        assert_equal(path, got, 0.7)


def test_kv_heads_shared_by_tp_ranks(tmp_path: Path) -> None:
    path = make_model(tmp_path, CONFIGS["llama3"])
    for got in run_ranks(4, _score_rank, str(path), 1, 1.0):
        assert_equal(path, got, 1.0)


@pytest.mark.parametrize("name", ["tinystories-656k", "stories260k"])
def test_pretrained_models_equal_transformers(name: str) -> None:
    path = PRETRAINED / name
    if not path.is_dir():
        pytest.skip(f"{name} is not on this machine")
    assert_equal(path, score(str(path), 1, solo(), 1.0), 1.0)
    for got in run_ranks(2, _score_rank, str(path), 2, 1.0):
        assert_equal(path, got, 1.0)


def test_values_equal_transformers_classifier(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    config = {**CONFIGS["llama"], "architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    path = make_model(tmp_path, config)
    spec = read_spec(path)
    ids, _ = make_batch(spec.vocab_size)
    decoder = Decoder(spec, "value", 0, 1, solo(), torch.float32, "cpu")
    load_pretrained(decoder, path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        got = decoder(ids, PackedAttention(LENGTHS), values)
        want = torch.cat([model.score(model.model(some[None])[0])[0, :, 0] for some in ids.split(LENGTHS)])
    assert (got - want).abs().max() < TOLERANCE
