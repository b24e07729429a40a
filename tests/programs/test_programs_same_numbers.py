"""``generate`` and ``score`` on one directory: transformers' greedy tokens, and log-probs that are equal bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import run_ranks
from rlhf_spmd import generate as generation
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.parallel.world import World
from score_runs import LAYOUTS, PRETRAINED, TOLERANCE, largest_difference, read_lines, run_program_in, write_lines
from small_models import CONFIGS, make_model

LENGTHS = (1, 5, 23, 70, 2)
NUM_TOKENS = 24
MODELS = ("llama-tied-bias", "qwen2", "qwen3-tied", "tinystories-656k")


def make_prompts(vocab_size: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(11)
    return [{"prompt_ids": torch.randint(3, vocab_size, (n,), generator=generator).tolist()} for n in LENGTHS]


def greedy(path: Path, prompts: list[dict[str, Any]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for row in prompts:
        ids = torch.tensor([row["prompt_ids"]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> (model directory, prompt file, transformers' greedy responses), made once."""
    root = tmp_path_factory.mktemp("programs")

    @cache
    def make(name: str) -> tuple[Path, Path, list[list[int]]]:
        path = make_model(root / name, CONFIGS[name]) if name in CONFIGS else PRETRAINED / name
        if not path.is_dir():
            pytest.skip(f"{name} is not on this machine")
        prompts = make_prompts(read_spec(path).vocab_size)
        return path, write_lines(root / f"{name}.jsonl", prompts), greedy(path, prompts)

    return make


def generate_here(world: World, overrides: list[str]) -> None:
    generation.generate(generation.prepare(None, overrides, world.launch), world)
    world.all.barrier("test:written")


def generate_in(layout: tuple[int, int, int, int], model: Path, data: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    pp, tp, dp, _ = layout
    overrides = [f"model.path={model}", f"data.path={data}", f"out={out}", f"sampling.max_response_length={NUM_TOKENS}"]
    overrides += [f"layout.pp={pp}", f"layout.tp={tp}", f"layout.dp={dp}", *more]
    if pp * tp * dp == 1:
        generation.main(overrides)
    else:
        run_ranks(pp * tp * dp, generate_here, overrides)
    return read_lines(out)


@pytest.mark.parametrize("layout", ["alone", "pp2-tp2", "dp2-zero3"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(case, tmp_path, name, layout):
    model, prompts, expected = case(name)
    found = generate_in(LAYOUTS[layout], model, prompts, tmp_path / "out.jsonl", "sampling.temperature=0")
    assert [row["response_ids"] for row in found] == expected


@pytest.mark.parametrize(("layout", "temperature"), [("pp2", 0.7), ("pp2-tp2", 1), ("tp2-dp2-zero3", 1)])
@pytest.mark.parametrize("name", MODELS)
def test_score_of_what_was_generated_has_its_log_probs(case, tmp_path, name, layout, temperature):
    """Bit for bit in one layout, and in any two of the same tp: pp, dp and ZeRO change no number."""
    model, prompts, _ = case(name)
    made = tmp_path / "made.jsonl"
    sampling = (f"sampling.temperature={temperature}", "sampling.n=3", "sampling.seed=5")
    generated = generate_in(LAYOUTS[layout], model, prompts, made, *sampling)
    assert len({tuple(row["response_ids"]) for row in generated}) > len(LENGTHS)
    scored = run_program_in(LAYOUTS[layout], model, made, tmp_path / "same.jsonl")
    assert [row["response_ids"] for row in scored] == [row["response_ids"] for row in generated]
    assert [row["id"] for row in scored] == [row["id"] for row in generated]
    assert [row["log_probs"] for row in scored] == [row["log_probs"] for row in generated]
    other = run_program_in(LAYOUTS["alone"], model, made, tmp_path / "other.jsonl")
    assert other == scored or LAYOUTS[layout][1] > 1
    assert largest_difference(other, [row["log_probs"] for row in generated]) < TOLERANCE
