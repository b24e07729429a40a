"""A run goes on with its own experiment, also where parts of its configuration come from the environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.inference.loaded_model import find_weights
from rlhf_spmd.train import read_config
from rlhf_spmd.training.resume_checks import compare_runs, environment_digests
from tasks import train_alone as train

STATE: dict[str, Any] = {"data": {"prompts": {"fingerprint": "a"}}, "environment": {}}


def configured(*overrides: str) -> Any:
    return read_config(None, ["algorithm.name=rloo", "data.path=x.jsonl", *overrides])[0]


@pytest.mark.parametrize(
    ("before", "after", "environment", "difference"),
    [
        ("${oc.env:TEST_DIR}/m", "${oc.env:TEST_DIR}/m", "/a", ""),
        ("${oc.env:TEST_DIR}/m", "/a/m", "/b", ""),
        ("${oc.env:TEST_DIR}/m", "${oc.env:TEST_DIR}/m", "/b", "models.actor.path=${oc.env:TEST_DIR}/m (was another value)"),
        ("/a/m", "${oc.env:TEST_DIR}/m", "/b", "models.actor.path=${oc.env:TEST_DIR}/m (was /a/m)"),
    ],
)
def test_values_are_compared_and_not_references(
    before: str, after: str, environment: str | None, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    monkeypatch.setenv("TEST_DIR", "/a")
    old = configured(f"models.actor.path={before}")
    (tmp_path / "config.yaml").write_text(to_yaml(old))
    saved = {**STATE, "environment": environment_digests(old)}
    monkeypatch.setenv("TEST_DIR", environment) if environment else monkeypatch.delenv("TEST_DIR")
    new = configured(f"models.actor.path={after}")
    if not difference:
        assert "models.actor.path=" not in compare_runs(checkpoint, new, saved, STATE)
    else:
        with pytest.raises(ValueError, match=re.escape(f"is of another experiment: {difference}; give")):
            compare_runs(checkpoint, new, saved, STATE)


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe\x00", None])
def test_a_configuration_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    checkpoint, file = tmp_path / "checkpoints" / "step_1", tmp_path / "config.yaml"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMIT").write_text("{}")
    file.mkdir() if content is None else file.write_bytes(content)
    for use in (lambda: compare_runs(checkpoint, configured(), STATE, STATE), lambda: find_weights(str(checkpoint))):
        with pytest.raises(ConfigError, match=rf"^the run's configuration '{file}'.* is not|cannot be read"):
            use()


def test_the_model_of_a_run_is_found_by_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMIT").write_text("{}")
    (tmp_path / "config.yaml").write_text("models: {actor: {path: '${oc.env:TEST_DIR}/m'}}")
    monkeypatch.setenv("TEST_DIR", "/a")
    assert find_weights(str(checkpoint)) == ("/a/m", checkpoint)
    monkeypatch.delenv("TEST_DIR")
    with pytest.raises(ConfigError, match=r"config\.yaml': models\.actor\.path: .*'TEST_DIR' not found"):
        find_weights(str(checkpoint))


def test_no_file_of_a_run_has_what_came_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-secret-1234")
    scores = tmp_path / "scores.py"
    scores.write_text("def score(response, key):\n    assert key == 'sk-secret-1234'\n    return float(len(response))\n")
    reward = (f"reward.function={scores}:score", "reward.kwargs={key: '${oc.env:TEST_KEY}'}")
    train(tmp_path / "run", 1, *reward, "run.export=true")
    train(tmp_path / "run", 2, config=tmp_path / "run" / "config.yaml")  # its own record
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    leaks = [file for file in files if b"sk-secret-1234" in file.read_bytes()]
    assert {"config.yaml", "report.html", "README.md"} <= {file.name for file in files} and not leaks
