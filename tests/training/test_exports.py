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
from rlhf_spmd.train import prepare
from rlhf_spmd.training import exports
from rlhf_spmd.training.exports import Exports
from rlhf_spmd.training.model_card import base_names, curves
from tasks import train_alone as train

VALIDATION = [f"data.val_path={tasks.task() / 'train.jsonl'}", "run.test_freq=1"]


def mark(directory: Path) -> str:
    return (directory / "checkpoint.txt").read_text()


def test_the_best_step_is_kept_and_exported_also_after_a_resume(tmp_path: Path) -> None:
    """With a rate of 0 all are as good as the first, which two newer checkpoints would have pushed out."""
    from transformers import AutoModelForCausalLM

    settings = [*VALIDATION, "run.export=true", "run.keep_best=val/reward_mean", "run.save_freq=1"]
    settings += ["models.actor.optim.lr=0", "val_sampling.temperature=0"]
    for steps in (3, 6):
        train(tmp_path, steps, *settings)
        scores = {row["step"]: row["val/reward_mean"] for row in tasks.read_run(tmp_path).raw if row["step"]}
        best = max(scores, key=lambda step: (scores[step], -step))
        assert best == 1, scores
        assert mark(tmp_path / "exports" / "best") == f"step_{best}"
        assert (tmp_path / "checkpoints" / f"step_{best}" / "COMMIT").is_file()
        state = tasks.read_run(tmp_path).state["best"]
        assert state == {"metric": "val/reward_mean", "step": best, "value": scores[best]}
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) <= 3
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exports" / "best", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert mark(tmp_path / "export") == "step_6"


def test_the_best_step_of_another_run_is_none_of_this_one(tmp_path: Path) -> None:
    settings = [*VALIDATION, "run.keep_best=val/reward_mean", "run.save_freq=1"]
    settings += ["models.actor.optim.lr=0", "val_sampling.temperature=0"]
    train(tmp_path / "first", 2, *settings)
    train(tmp_path / "second", 1, *settings)  # has a step 1 too
    train(tmp_path / "second", 3, *settings, f"run.resume={tmp_path}/first/checkpoints/step_2")
    assert [tasks.read_run(tmp_path / name).state["best"]["step"] for name in ("first", "second")] == [1, 3]


def chosen(name: str, values: list[float]) -> tuple[list[bool], dict[str, Any] | None]:
    run = SimpleNamespace(keep_best=name, dir=".")
    ours = Exports(SimpleNamespace(config=SimpleNamespace(run=run)), SimpleNamespace())  # type: ignore[arg-type]
    return [ours.is_best(step, {name: value}) for step, value in enumerate(values)], ours.best


def test_what_is_better() -> None:
    """Step 0, before training, has no checkpoint; what is as good as an earlier step is not better."""
    nan = float("nan")
    up = chosen("val/gsm8k/mean@1", [9.0, 0.25, 0.5, 0.5, nan, 0.25])
    assert up == ([False, True, True, False, False, False], {"metric": "val/gsm8k/mean@1", "step": 2, "value": 0.5})
    assert chosen("val/loss", [0.0, nan, 2.0, 1.0, 3.0])[0] == [False, False, True, True, False]
    with pytest.raises(ValueError, match=r"^run\.keep_best=val/los: validation has no such metric; did you mean 'val/loss'\?"):
        Exports(
            SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(keep_best="val/los", dir="."))),
            SimpleNamespace(),  # type: ignore[arg-type]
        ).is_best(0, {"val/loss": 1.0})


def test_exports_every_few_steps_in_files_of_a_size_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = ["run.export_freq=2", "run.max_shard_size=200KB"]
    train(tmp_path, 3, *settings)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["step_2"]
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


def test_a_run_that_goes_on_from_an_earlier_step_exports_the_later_ones_again(tmp_path: Path) -> None:
    settings = ["run.export_freq=1", "run.keep_checkpoints=4"]
    train(tmp_path, 3, *settings)
    files = [tmp_path / "exports" / f"step_{step}" / "model.safetensors" for step in (1, 2, 3)]
    before = [path.read_bytes() for path in files]
    train(tmp_path, 3, *settings, f"run.resume={tmp_path / 'checkpoints' / 'step_1'}", "models.actor.optim.lr=1e-5")
    after = [path.read_bytes() for path in files]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert [mark(path.parent) for path in files] == ["step_1", "step_2", "step_3"]


def test_an_export_that_was_ended_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    train(tmp_path, 2, "run.export_freq=2")
    out = tmp_path / "exports" / "step_2"
    (out / "checkpoint.txt").unlink()
    (out / "README.md").unlink()
    train(tmp_path, 3, "run.export_freq=2")
    assert mark(out) == "step_2" and (out / "README.md").is_file()


def test_an_export_has_the_template_that_its_model_learnt_to_read(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    train(tmp_path, 1, "run.export=true", f"data.chat_template='{template}'")
    assert load_tokenizer(tmp_path / "export").chat_template == template


def test_a_model_card_tells_base_configuration_and_curves(tmp_path: Path) -> None:
    train(tmp_path, 3, *VALIDATION, "run.export=true", "run.name=cards")
    text = (tmp_path / "export" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["rlhf_spmd", "ppo"] and yaml.safe_load(head)["library_name"] == "transformers"
    assert "base_model" not in yaml.safe_load(head), "the hub refuses one that is none of its names"
    assert body.lstrip().startswith(f"# cards\n\n`{tasks.task() / 'actor'}`, trained by rlhf_spmd with `ppo`.")
    folded = body.split("<details>\n<summary>Configuration</summary>\n")[1].removesuffix("\n</details>\n")
    config = yaml.safe_load(folded.split("```yaml\n")[1].removesuffix("```\n"))
    assert config == yaml.safe_load((tmp_path / "config.yaml").read_text())
    table = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
    rows = {row["step"]: row for row in tasks.read_run(tmp_path).raw}
    assert table[0][:2] == ["step", "val/reward_mean"] and [int(line[0]) for line in table[2:]] == [0, 1, 2, 3]
    for line in table[2:]:
        assert float(line[1]) == pytest.approx(rows[int(line[0])]["val/reward_mean"], rel=1e-3)
    code = body.split("```python\n")[1].split("```")[0].replace('"."', repr(str(tmp_path / "export")))
    found: dict[str, Any] = {}
    exec(code, found)
    assert type(found["model"]).__name__ == "LlamaForCausalLM" and found["tokenizer"]("1a")["input_ids"]


def test_a_model_card_names_the_hub_s_model(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--some--base-1.5B" / "snapshots" / ("a" * 40)
    assert base_names(cached) == ("some/base-1.5B", "some/base-1.5B")
    assert base_names(tmp_path) == (str(tmp_path), None)
    heads = {"base_model: some/base\nx: 1": "some/base", "base_model: /a/b": None, "x: 1": None}
    for head, family in heads.items():  # of what was trained from it before
        (tmp_path / "README.md").write_text(f"---\n{head}\n---\nbase_model: not/this")
        assert base_names(tmp_path) == (str(tmp_path), family)


def test_curves_are_short() -> None:
    rows = [{"step": i, "reward/mean": i / 7, "actor/loss": 1.0 / (i + 1), "perf/mfu": 0.1} for i in range(1, 1001)]
    lines = curves(rows).splitlines()
    assert lines[0] == "| step | reward/mean | actor/loss |" and len(lines) == 8
    assert lines[2].startswith("| 1 |") and lines[-1] == "| 1000 | 142.9 | 0.000999 |"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.max_shard_size=much", "run.max_shard_size='much' is no size; give one such as 5GB or 200MB"),
        ("run.keep_best=val/loss", "run.keep_best=val/loss is a metric of validation, and run.test_freq is 0; set it"),
        ("run.export_freq=-1", "run.export_freq=-1: must be at least 0"),
        ("models.actor.optim.name=lion", "models.actor.optim.name='lion' is not known; allowed: adamw, adamw_8bit, muon"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 2, override), 1)


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
    decide = controller.decide
    controller.decide = lambda wish: asked.append(wish) or decide(wish)  # type: ignore[method-assign,func-returns-value]
    run = SimpleNamespace(dir=str(run_dir), export=True, export_freq=0, keep_best=None, max_shard_size="1GB")
    trained = SimpleNamespace(lora=SimpleNamespace(rank=0), random_init=False)
    plans = {"actor": SimpleNamespace(worker=SimpleNamespace(head="lm"), config=trained)}
    config = SimpleNamespace(run=run, algorithm=SimpleNamespace(exported="actor"), data=SimpleNamespace())
    ours = Exports(SimpleNamespace(config=config, plans=plans, tokenizer=None), controller)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "export_hugging_face", write)
        patch.setattr(exports, "model_directory", lambda plans, role: Path())
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
    goes_on = threading.Event()
    config = SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path), max_shard_size="1GB"), algorithm=SimpleNamespace(exported="actor")
    )

    def interrupt(wish: bool) -> bool:
        raise KeyboardInterrupt

    controller = SimpleNamespace(rank=0, timeline=SimpleNamespace(span=lambda *a, **k: nullcontext()), decide=interrupt)
    monkeypatch.setattr(exports, "model_directory", lambda plans, role: goes_on.wait(60))
    ours = Exports(SimpleNamespace(config=config, plans={}), controller)  # type: ignore[arg-type]
    before, since = set(threading.enumerate()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ours._write(Path("step_1"), tmp_path / "out")
    assert time.monotonic() - since < 30
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    goes_on.set()


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_a_run_by_another_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    optim = [f"models.{role}.optim.name={name}" for role in ("actor", "critic")] + ["models.critic.optim.head_lr=1e-2"]
    layouts = [*layout("actor", dp=2, zero=3), *layout("critic", tp=2)]

    def go(run_dir: Path, *more: str) -> tasks.Run:
        given = tasks.settings(run_dir, 3, "run.save_freq=2", *optim, *layouts, *more)
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), given)
        return tasks.read_run(run_dir)

    whole = go(tmp_path / "whole")
    resumed = go(tmp_path / "rest", f"run.resume={tmp_path / 'whole' / 'checkpoints' / 'step_2'}")
    kinds = {kind for role, kind, _ in whole.weights if role == "actor"}
    assert kinds >= ({"param", "momentum_buffer"} if name == "muon" else {"param", "exp_avg"})
    assert whole.metrics[-1:] == resumed.metrics and whole.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(tensor, resumed.weights[key]) for key, tensor in whole.weights.items())
