"""What ends a response: the ends of a model's configuration, of its tokenizer and of its chat template, in every program."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from generate_runs import CONFIG, TEMPLATE, read_output, write_rows, write_tokenizer
from reward_models import write_reward_model
from rlhf_spmd import evaluate, generate
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.inference.loaded_model import ModelConfig
from rlhf_spmd.inference.requests import EngineConfig, prepare_model
from rlhf_spmd.models.spec import ModelSpec, with_end_tokens
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.train import prepare
from tasks import other_task, settings

OF_CONFIG, OF_TOKENIZER, OF_TEMPLATE = 5, 2, 98
ENDS = (OF_TOKENIZER, OF_CONFIG, OF_TEMPLATE)
LAUNCH = Launch(rank=0, size=1, local_rank=0, local_size=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ends") / "model"
    write_random_model(path, {**CONFIG, "eos_token_id": OF_CONFIG}, seed=3)
    write_tokenizer(path)
    tokenizer = load_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE.replace("{% endfor %}", "<|im_end|>{% endfor %}")
    tokenizer.save_pretrained(path)
    return path


def arguments(model: Path, directory: Path, *more: str) -> list[str]:
    rows = write_rows(directory / "in.jsonl", [{"prompt": "abc", "answer": "1"}])
    return [f"model.path={model}", f"data.path={rows}", f"out={directory / 'out.jsonl'}", *more]


def test_ends_are_joined(model: Path) -> None:
    spec, tokenizer = read_spec(model), load_tokenizer(model)
    assert with_end_tokens(spec, None).eos_token_ids == (OF_CONFIG,)
    assert with_end_tokens(spec, tokenizer).eos_token_ids == ENDS
    assert with_end_tokens(with_end_tokens(spec, tokenizer), tokenizer).eos_token_ids == ENDS
    assert with_end_tokens(spec, tokenizer, TEMPLATE).eos_token_ids == (OF_TOKENIZER, OF_CONFIG)  # which closes no turn
    small = ModelSpec("llama", OF_TEMPLATE, 32, 64, 2, 4, 2, 8)
    assert with_end_tokens(small, tokenizer).eos_token_ids == (OF_TOKENIZER,)  # others are not in its vocabulary


def test_programs_know_all_ends(model: Path, tmp_path: Path) -> None:
    reward = "reward.function=reward_functions:length"
    for program in (
        generate.prepare(None, arguments(model, tmp_path), LAUNCH),
        evaluate.prepare(None, arguments(model, tmp_path, reward), LAUNCH),
        prepare_model(EngineConfig(model=ModelConfig(path=str(model))), LAUNCH),
    ):
        assert program.spec.eos_token_ids == ENDS


def test_training_knows_all_ends_of_each_model_that_generates(model: Path, tmp_path: Path) -> None:
    judge = write_reward_model(tmp_path / "judge", architecture="LlamaForCausalLM")  # which has a tokenizer of its own
    config = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "abc", "answer": "1"}] * 16)
    judged = ("template='{response}'", "pattern='(1)'", "range=[0, 1]", "max_response_length=4")
    overrides = [f"reward.judge.{key}" for key in judged]
    overrides += [f"models.actor.path={model}", f"models.reward.path={judge}", f"data.path={rows}", "sampling.n=2"]
    task = other_task({"name": "dr_grpo", "ppo_mini_batch_size": 4}, "actor")
    plans = prepare(task, settings(tmp_path / "run", 1, *overrides), 1).roles
    specs = [plans[role].spec for role in ("actor", "reward")]
    assert [spec.eos_token_ids for spec in specs if spec is not None] == [ENDS, (1, 7)]


def test_a_response_stops_at_each_end(model: Path, tmp_path: Path) -> None:
    for token, ignored in product(ENDS, (False, True)):
        more = [f"sampling.logit_bias={{{token}: 100}}", "sampling.max_response_length=3", f"sampling.ignore_eos={ignored}"]
        generate.main(arguments(model, tmp_path, *more))
        (row,) = read_output(tmp_path / "out.jsonl")
        response = ([token] * 3, "length") if ignored else ([token], "stop")
        assert (row["response_ids"], row["finish_reason"]) == response
