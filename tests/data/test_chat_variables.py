"""Variables of chat templates: checked, said where a template reads them not, and part of what decides whether rows are the same."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import tasks
from generate_runs import arguments, write_rows
from generate_runs import model as model  # a fixture
from rlhf_spmd import evaluate, generate, score
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.data.cached_dataset import load_dataset
from rlhf_spmd.data.messages import read_names, unread_variables
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.inference.inference_program import read_config as read_served
from rlhf_spmd.inference.llm import LLM
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.preflight.banner import _warnings
from rlhf_spmd.serve import ServeConfig
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE
from rlhf_spmd.train import prepare, read_config

# as reasoning models' templates: a default that the template sets itself, a loop's own names, transformers' tag
THINKS = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}A:"
    "{% if not enable_thinking %}<think></think>{% elif effort is defined %}{{ effort }}{% endif %}{% endif %}"
)
KEYS = "data.chat_template_kwargs"
ROW = {"prompt": [{"role": "user", "content": "abd"}], "response": "c", "answer": "c"}


def test_the_names_that_a_template_reads(model: Path) -> None:
    assert read_names(THINKS) - {"bos_token"} == {"enable_thinking", "effort"}
    assert read_names("{% for m in messages %}{{ m }}{% endfor %}") == read_names("{% broken") == set()
    tokenizer = load_tokenizer(model)
    given = {"enable_thinking": False, "thinking": True}
    assert unread_variables(KEYS, given, tokenizer, THINKS) == [
        f"{KEYS}.thinking does nothing: the chat template never reads it; it reads effort, enable_thinking"
    ]
    (line,) = unread_variables(KEYS, {"thinking": True}, tokenizer)  # by the tokenizer's own
    assert line.endswith("it reads none") and unread_variables(KEYS, given, None) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{tools: []}", r"tools is no variable of a template: the trainer sets it itself"),
        ("{continue_final_message: true}", "continue_final_message is no variable"),
        ("{at: .nan}", r"at=nan must be a JSON value"),
        ("5", "must be a mapping"),
    ],
)
def test_what_no_template_can_take_is_refused(value: str, said: str) -> None:
    path = str(tasks.task() / "ppo.json")
    with pytest.raises(ConfigError, match=rf"{KEYS}.*{said}"):
        read_config(path, [f"{KEYS}={value}"])
    assert read_config(path, [f"{KEYS}.enable_thinking=false"])[0].data.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match=r"chat_template_kwargs.tools is no variable"):
        read_served(ServeConfig, None, ["model.path=x", "chat_template_kwargs={tools: 1}"])


def test_a_run_that_trains_says_what_the_template_never_reads(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [ROW] * 64)
    given = [f"data.path={path}", f"data.chat_template={json.dumps(THINKS)}", f"{KEYS}={{thinking: true, effort: high}}"]
    job = prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, *given), 1)
    (line,) = [line for line in _warnings(job) if "chat_template" in line]
    assert line.startswith(f"{KEYS}.thinking does nothing")
    assert job.training["prompts"].row(0)["prompt"].endswith("A:high")  # type: ignore[attr-defined]


def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [ROW] * 64)
    template = json.dumps("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    given = tasks.settings(tmp_path, 1, f"data.path={path}", f"data.chat_template={template}")
    for day in (str(date.today()), "2020-02-03"):
        job = prepare(str(tasks.task() / "ppo.json"), given, 1)
        assert job.config.data.template_date == day
        assert job.training["prompts"].row(0)["prompt"] == f"{day[:4]}abd"  # type: ignore[attr-defined]
        Path(job.config.run.dir).mkdir(exist_ok=True)
        Path(job.config.run.dir, CONFIG_FILE).write_text("data: {template_date: '2020-02-03'}")
    with pytest.raises(ConfigError, match=r"data\.template_date='tomorrow' must be a day, such as 2026-01-31"):
        prepare(str(tasks.task() / "ppo.json"), [*given, "data.template_date=tomorrow"], 1)


@pytest.mark.parametrize("program", [generate, evaluate, score])
def test_programs_say_it_once_and_render_with_them(
    program: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "in.jsonl", [ROW])
    more = [f"data.chat_template={json.dumps(THINKS)}", *(["reward.function=exact_match"] if program is evaluate else [])]

    def prepared(variables: str, rank: int = 0) -> Any:
        argv = arguments(model, path, tmp_path / f"out{len(variables)}{rank}", f"{KEYS}={variables}", *more)
        return program.prepare(None, argv, Launch(rank=rank, size=2, local_rank=rank, local_size=2))

    plain, closed, unread = prepared("{}"), prepared("{enable_thinking: false}"), prepared("{thinking: 1}")
    prepared("{thinking: 1}", rank=1)
    assert capsys.readouterr().err.count(f"warning: {KEYS}.thinking does nothing") == 1
    runs = (plain, closed, unread)
    prompts = [run.batch["prompt_ids"].rows()[0].tolist() if program is score else run.sets[0].prompts[0] for run in runs]
    assert len(prompts[1]) == len(prompts[0]) + len("<think></think>") and prompts[2] == prompts[0]
    assert program is score or len({run.journal.job for run in runs}) == 3, "rows between turns may read it"


def test_a_stored_file_and_a_position_are_of_one_choice_of_variables(model: Path, tmp_path: Path) -> None:
    path, tokenizer = write_rows(tmp_path / "in.jsonl", [ROW]), load_tokenizer(model)
    found = []
    for variables in ({}, {"enable_thinking": False}, {}):
        config = DataConfig(path=str(path), chat_template=THINKS, chat_template_kwargs=variables, cache_dir=str(tmp_path / "c"))
        found.append(load_dataset(config, tokenizer).fingerprint)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    assert found[0] == found[2] != found[1]


def test_llm_chat_warns(model: Path) -> None:
    llm = LLM(model, max_num_seqs=2, page_size=8)
    talk = ROW["prompt"]
    with pytest.warns(UserWarning, match=r"chat_template_kwargs\.thinking does nothing: .* it reads effort, enable_thinking"):
        (answer,) = llm.chat(talk, chat_template=THINKS, chat_template_kwargs={"thinking": 1, "enable_thinking": False})
    assert answer.prompt == "abdA:<think></think>"
    for variables, said in (({"thinking": {1, 2}}, "must be a JSON value"), ({5: 1}, "the name 5 must be text")):
        with pytest.raises(ValueError, match=said):
            llm.chat(talk, chat_template_kwargs=variables)  # type: ignore[arg-type]
