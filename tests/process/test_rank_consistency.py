"""What ranks compare before they begin: settings, rows and weights, wherever these lie on their hosts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import tasks
from rlhf_spmd.config.load import load
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.process.input_digests import file_digests, run_digests, text_digest
from rlhf_spmd.train import prepare


def digests(directory: Path, rows: list[dict[str, object]], *more: str) -> dict[str, str]:
    directory.mkdir()
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.path={directory / 'prompts.jsonl'}", "data.train_batch_size=4"
    return run_digests(prepare(str(tasks.task() / "ppo.json"), tasks.settings(directory / "run", 2, *data, *more), 1))


def test_what_ranks_must_have_the_same_of(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"{i}{i}>", "answer": str(i)} for i in range(8)]
    first = digests(tmp_path / "a", rows)
    assert first == digests(tmp_path / "b", rows)  # copies elsewhere
    for name, there, more in (
        ("set of rows (prompts)", [*rows[1:], rows[0]], ()),
        ("set of rows (prompts)", [{**rows[0], "answer": "9"}, *rows[1:]], ()),  # tokens alone do not tell
        ("models.actor.optim.lr", rows, ("models.actor.optim.lr=0.5",)),
        ("models.critic.path (its weights)", rows, (f"models.critic.path={tasks.task() / 'reference'}",)),
    ):
        other = digests(tmp_path / f"{len(list(tmp_path.iterdir()))}", there, *more)
        differing = {key for key in {**first, **other} if first.get(key) != other.get(key)}
        assert name in differing and {key.partition(" (its")[0] for key in differing} == {name.partition(" (its")[0]}


def test_the_users_files_are_compared_and_not_only_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in a file, a module on the path, a template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"mine.py": "def f(): ...", "named_module.py": "class Env: ...", "chat.jinja": "{{ messages }}"}
    for name, text in files.items():
        Path(name).write_text(text)
    importlib.import_module("named_module")
    overrides = ["model.path=m", "data.path=in.jsonl", "out=o.jsonl", "reward.function=mine.py:f"]
    overrides += ["data.chat_template=chat.jinja", "environment.cls=named_module:Env"]
    config = load(GenerateConfig, None, overrides)
    first = file_digests(config)
    assert [name.partition(" ")[0] for name in sorted(first)] == ["data.chat_template", "environment.cls", "reward.function"]
    assert first["reward.function (its file)"].startswith("mine.py ")
    for name in files:
        Path(name).write_text("# another\n" + files[name])
        now = file_digests(config)
        assert [first[key].partition(" ")[0] for key in first if first[key] != now[key]] == [name]
        Path(name).write_text(files[name])
    assert file_digests(config) == first


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    first = text_digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert text_digest(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("[]")
    assert text_digest(tmp_path) != first
