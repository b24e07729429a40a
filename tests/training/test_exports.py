"""Exports during a run and of its best step, their files and model cards; runs by the optimizers that a configuration names."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import tasks
from overrides import layout
from ranks import run_ranks
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.parallel.world import World
from rlhf_spmd.training import exports
from rlhf_spmd.training.exports import Exports, hub_name
from rlhf_spmd.workers import ActorWorker
from tasks import train_alone as train

VALIDATION = [f"data.val_path={tasks.task() / 'train.jsonl'}", "run.test_freq=1"]


def mark(directory: Path) -> str:
    return (directory / "checkpoint.txt").read_text()


def test_the_best_step_is_kept_and_exported_also_after_a_resume(tmp_path: Path) -> None:
    """With a rate of 0 all are as good as the first, which two newer checkpoints would have pushed out. The best step of a run that
    another one goes on from is none of that one."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    settings = [*VALIDATION, "run.export=true", "run.keep_best=val/reward_mean", "run.save_freq=1"]
    settings += ["models.actor.optim.lr=0", "val_sampling.temperature=0"]
    for steps in (2, 4):
        train(run_dir, steps, *settings)
        scores = {row["step"]: row["val/reward_mean"] for row in tasks.read_run(run_dir).raw if row["step"]}
        assert len(set(scores.values())) == 1 and mark(run_dir / "exports" / "best") == "step_1"
        assert (run_dir / "checkpoints" / "step_1" / "COMMIT").is_file()
        assert tasks.read_run(run_dir).state["best"] == {"metric": "val/reward_mean", "step": 1, "value": scores[1]}
    assert len(list((run_dir / "checkpoints").glob("step_*"))) <= 3
    assert mark(run_dir / "export") == "step_4"
    train(other, 1, *settings)  # has a step 1 too
    train(other, 5, *settings, f"run.resume={run_dir}/checkpoints/step_4")
    assert tasks.read_run(other).state["best"]["step"] == 5


def chosen(name: str, metrics: list[dict[str, float]]) -> tuple[list[bool], dict[str, Any] | None]:
    """Which steps are the best so far, and what a checkpoint says of it."""
    run = SimpleNamespace(keep_best=name, dir=".")
    exports = Exports(SimpleNamespace(config=SimpleNamespace(run=run)), SimpleNamespace())  # type: ignore[arg-type]
    return [exports.is_best(step, row) for step, row in enumerate(metrics)], exports.best


def test_what_is_better() -> None:
    """Step 0, before training, has no checkpoint; what is as good as an earlier step is not better."""
    nan = float("nan")
    accuracies = [{"val/gsm8k/mean@1": value} for value in (9.0, 0.25, 0.5, 0.5, nan, 0.25)]
    best = {"metric": "val/gsm8k/mean@1", "step": 2, "value": 0.5}
    assert chosen("val/gsm8k/mean@1", accuracies) == ([False, True, True, False, False, False], best)
    losses = [{"val/loss": value} for value in (0.0, nan, 2.0, 1.0, 3.0)]
    assert chosen("val/loss", losses)[0] == [False, False, True, True, False]
    with pytest.raises(ValueError, match=r"^run\.keep_best=val/los: validation has no such metric; did you mean 'val/loss'\?"):
        chosen("val/los", losses)


def test_exports_of_steps_in_files_of_a_size_as_transformers_writes_them(tmp_path: Path) -> None:
    """A run that goes on from an earlier step exports the later ones again, and one that was ended in an export makes it."""
    from transformers import AutoModelForCausalLM

    settings = ["run.export_freq=1", "run.keep_checkpoints=4", "run.max_shard_size=200KB"]
    train(tmp_path, 3, *settings)
    out = tmp_path / "exports" / "step_2"
    files = {path.name: path.stat().st_size for path in out.glob("*.safetensors")}
    assert len(files) > 1 and max(files.values()) < 210_000
    model = AutoModelForCausalLM.from_pretrained(out)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    ours, theirs = (json.loads((path / "model.safetensors.index.json").read_text()) for path in (out, tmp_path / "theirs"))
    assert ours["weight_map"].keys() == theirs["weight_map"].keys() and set(ours["weight_map"].values()) == files.keys()
    assert ours["metadata"] == theirs["metadata"] and list(ours["weight_map"]) == list(theirs["weight_map"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())

    steps = [tmp_path / "exports" / f"step_{step}" for step in (1, 2, 3)]
    before = [contents(path) for path in steps]
    train(tmp_path, 3, *settings, f"run.resume={tmp_path / 'checkpoints' / 'step_1'}", "models.actor.optim.lr=1e-5")
    assert [contents(path) == old for path, old in zip(steps, before, strict=True)] == [True, False, False]
    assert [mark(path) for path in steps] == ["step_1", "step_2", "step_3"]
    for name in ("checkpoint.txt", "README.md"):
        (steps[2] / name).unlink()
    train(tmp_path, 4, *settings)
    assert mark(steps[2]) == "step_3" and (steps[2] / "README.md").is_file()


def contents(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob("*.safetensors"))]


def test_an_export_has_a_card_and_the_template_that_its_model_learnt_to_read(tmp_path: Path) -> None:
    """The card says what the model was before, how it was trained, and how to load it."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    train(tmp_path, 2, *VALIDATION, "run.export=true", "run.name=cards", f"data.chat_template='{template}'")
    assert load_tokenizer(tmp_path / "export").chat_template == template
    text = (tmp_path / "export" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["rlhf_spmd", "ppo"] and yaml.safe_load(head)["library_name"] == "transformers"
    assert "base_model" not in yaml.safe_load(head), "the hub refuses one that is none of its names"
    assert body.lstrip().startswith(f"# cards\n\n`{tasks.task() / 'actor'}`, trained by rlhf_spmd with `ppo`.")
    folded = body.split("<details>\n<summary>Configuration</summary>\n")[1].removesuffix("\n</details>\n")
    config = yaml.safe_load(folded.split("```yaml\n")[1].removesuffix("```\n"))
    assert config == yaml.safe_load((tmp_path / "config.yaml").read_text())
    code = body.split("```python\n")[1].split("```")[0].replace('"."', repr(str(tmp_path / "export")))
    names: dict[str, Any] = {}
    exec(code, names)
    assert type(names["model"]).__name__ == "LlamaForCausalLM" and names["tokenizer"]("1a")["input_ids"]


def test_a_model_card_names_the_hub_s_model(tmp_path: Path) -> None:
    assert hub_name(tmp_path / "hub" / "models--some--base-1.5B" / "snapshots" / ("a" * 40)) == "some/base-1.5B"
    assert hub_name(tmp_path) is None


def export_slowly(world: World, run_dir: Path, fails: bool) -> int:
    """How often a rank asks while rank 0 writes."""

    def write(checkpoint: Path, role: str, source: Path, directory: Path, size: int, **more: Any) -> None:
        for _ in range(1000):  # until it was asked for often enough
            if len(asked) > 3 or fails:
                break
            time.sleep(0.01)
        if fails:
            raise OSError("disk full")
        directory.mkdir()

    controller, asked = Controller(world.all), []
    decide = controller.any_rank
    controller.any_rank = lambda wish: asked.append(wish) or decide(wish)  # type: ignore[method-assign,func-returns-value]
    run = SimpleNamespace(dir=str(run_dir), export=True, export_freq=0, keep_best=None, max_shard_size="1GB")
    trained = SimpleNamespace(lora=SimpleNamespace(rank=0), random_init=False)
    actor = SimpleNamespace(worker=ActorWorker, config=trained, directory=Path())
    config = SimpleNamespace(run=run, algorithm=SimpleNamespace(exported="actor"), data=SimpleNamespace())
    plan: Any = SimpleNamespace(config=config, exported=actor, tokenizer=None)
    ours = Exports(plan, controller)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "export_hugging_face", write)
        patch.setattr(exports, "model_card", lambda *given: "")
        ours.write(1, Path("x"), ended=True)
    return len(asked)


def test_nobody_waits_for_an_export_in_one_collective(tmp_path: Path) -> None:
    """It may take longer than a collective may: the others ask again and again."""
    assert all(asked > 3 for asked in run_ranks(2, export_slowly, tmp_path, False))
    assert mark(tmp_path / "export") == "x"


def test_an_export_that_fails_raises(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="disk full"):
        run_ranks(1, export_slowly, tmp_path, True)
    assert not (tmp_path / "export").exists()


def test_a_run_that_is_ended_does_not_wait_for_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()
    run = SimpleNamespace(dir=str(tmp_path), max_shard_size="1GB")
    plan: Any = SimpleNamespace(config=SimpleNamespace(run=run))

    def interrupt(wish: bool) -> bool:
        raise KeyboardInterrupt

    controller: Any = SimpleNamespace(rank=0, timeline=SimpleNamespace(span=lambda *a, **k: nullcontext()), any_rank=interrupt)
    writers: list[threading.Thread] = []

    def write(*_: object) -> None:
        writers.append(threading.current_thread())
        began.set()
        goes_on.wait(60)

    monkeypatch.setattr(Exports, "_export", write)
    with pytest.raises(KeyboardInterrupt):
        Exports(plan, controller)._write(Path("step_1"), tmp_path / "out")
    assert began.wait(60) and all(thread.daemon for thread in writers)
    goes_on.set()


def test_a_run_by_other_optimizers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    optim = ["models.actor.optim.name=muon", "models.critic.optim.name=adamw_8bit", "models.critic.optim.head_lr=1e-2"]
    settings = [*optim, *layout("actor", dp=2, zero=3), *layout("critic", tp=2)]
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 3, "run.save_freq=2", *settings))
    uninterrupted = tasks.read_run(tmp_path)
    resumed = tasks.train(2, tmp_path / "rest", 3, *settings, f"run.resume={tmp_path / 'checkpoints' / 'step_2'}")
    assert {"momentum_buffer"} < {kind for role, kind, _ in uninterrupted.weights if role == "actor"}
    assert uninterrupted.metrics[-1:] == resumed.metrics and uninterrupted.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(tensor, resumed.weights[key]) for key, tensor in uninterrupted.weights.items())
