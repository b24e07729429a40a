"""Where a model's weights are found, and what is said where they are not; what a run's last lines name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError
from rlhf_spmd.inference.loaded_model import find_weights
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.telemetry.run_dir import newest_checkpoint
from rlhf_spmd.telemetry.summary import artifact_lines
from rlhf_spmd.training.train_config import RunConfig


def test_latest_stands_for_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMIT").write_text("{}")
    (tmp_path / "config.yaml").write_text("models: {actor: {path: its/model}}")
    latest = checkpoint.with_name("latest")
    latest.write_text("step_3")
    assert find_weights(str(latest)) == find_weights(str(checkpoint)) == ("its/model", checkpoint)
    RunConfig(dir=str(tmp_path), resume=str(latest)).check("run")


def test_adapters_alone_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(
        ValueError, match=r"^model\.path=.* holds adapters of some/base, not a model; of a run, its export/ has"
    ):
        local_directory(str(tmp_path), "model.path")


@pytest.mark.parametrize(
    ("section", "remedy"), [("data", "set data.chat_template to"), ("", "put chat_template.jinja beside it, give LLM.chat")]
)
def test_a_tokenizer_without_a_template_names_what_there_is_to_set(section: str, remedy: str) -> None:
    encoder = PromptEncoder(SimpleNamespace(name_or_path="it"), EncodingConfig(), section)
    with pytest.raises(DataError, match=rf"tokenizer 'it' has none; .*{remedy}.*, or use text prompts$"):
        encoder.render([{"role": "user", "content": "1"}])


def test_the_newest_checkpoint_is_the_one_saved_last(tmp_path: Path) -> None:
    """A run that went on from an older one saves steps again: the end of the run and its report name what ``auto`` goes on from."""
    for name in ("step_2", "step_10"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_10"
    (tmp_path / "checkpoints" / "latest").write_text("step_2\n")
    assert any(line.endswith("checkpoints/step_2") for line in artifact_lines(tmp_path))
    (tmp_path / "checkpoints" / "latest").write_text("step_3")  # not there
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_10"
