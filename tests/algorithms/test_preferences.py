"""Runs on preference data: the reference is asked once, what was trained is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from algorithm_cases import CASES, assert_same_run
from ranks import run_ranks
from rlhf_spmd.algorithms import preferences
from rlhf_spmd.data.preferences import PreferencesConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.objectives.preferences import bradley_terry
from rlhf_spmd.parallel.world import World
from rlhf_spmd.train import prepare
from rlhf_spmd.training.streams import RowStream


def train_and_count(world: World, config: str, overrides: list[str], keeps: bool) -> list[int]:
    """How many rows the reference was asked about, in each trace and each run of a step."""
    asked: list[int] = []
    ask = preferences.reference_log_probs

    def counted(models: Any, rows: Any) -> Any:
        asked.append(len(rows))
        return ask(models, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences, "reference_log_probs", counted)
        if not keeps:
            patch.setattr(RowStream, "keep", lambda *_: None)
        tasks.train_here(world, config, overrides)
    return asked


@pytest.mark.parametrize(("name", "num"), [("dpo", 16), pytest.param("kto", 32, marks=pytest.mark.long)])
def test_of_a_batch_the_reference_is_asked_about_the_rows_that_are_new(tmp_path: Path, name: str, num: int) -> None:
    """20 pairs in batches of 8: in the third step half are known, in the fourth all. The numbers are those of a run that asks about all
    rows, and of one that goes on after two steps, which asks again.
    """
    resume = f"run.resume={tmp_path / 'kept' / 'checkpoints' / 'step_2'}"
    batches = (f"data.train_batch_size={num // 2}", "run.test_freq=0", "run.save_freq=2", "run.keep_checkpoints=3")
    counts, runs = {}, {}
    for run_dir, keeps, more in (("kept", True, ()), ("all", False, ()), ("resumed", True, (resume,))):
        overrides = tasks.settings(tmp_path / run_dir, 4, *CASES[name].overrides(), *batches, *more)
        asked, asked_on_the_other = run_ranks(2, train_and_count, CASES[name].file, overrides, keeps)
        assert asked == asked_on_the_other
        counts[run_dir] = asked[2:]  # before the run two steps are traced
        runs[run_dir] = tasks.read_run(tmp_path / run_dir)
    *first, traced, third = counts["kept"]  # a row that is twice in the batch in which an epoch ends is asked about twice
    assert counts["all"] == [num] * 8 and first == [num] * 4 and num // 2 <= traced == third < 0.7 * num
    assert_same_run(runs["all"], runs["kept"])
    assert_same_run(replace(runs["kept"], metrics=runs["kept"].metrics[2:]), runs["resumed"])
    assert ["timing_s/compute_ref_log_prob" in row for row in runs["resumed"].raw] == [True, True]


def test_kto_s_validation_is_of_all_rows_of_a_label_however_they_are_batched(tmp_path: Path) -> None:
    """The first batch of three has desirable rows only, so that the mean over batches is another."""
    labels = [True, True, True, False, False, True, False]
    rows = [{"prompt": f"{i}{i + 1}>", "completion": str(2 * i), "label": label} for i, label in enumerate(labels)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (f"data.val_path={tmp_path / 'val.jsonl'}", "run.test_freq=1")
    at_once = CASES["kto"].train(tmp_path / "at_once", *more, steps=1).metrics[-1]
    in_batches = CASES["kto"].train(tmp_path / "in_batches", *more, "data.val_batch_size=3", steps=1).metrics[-1]
    for name in ("val/rewards/chosen", "val/rewards/rejected"):
        assert abs(at_once[name]) > 1e-4 and in_batches[name] == pytest.approx(at_once[name], rel=1e-9)


def test_what_was_trained_is_what_is_exported(tmp_path: Path) -> None:
    """transformers gives the scores from which the last validation came. A reward role reads such models in test_roles."""
    case = CASES["reward_model"]
    run_ranks(1, tasks.train_here, case.file, tasks.settings(tmp_path, 2, *case.overrides(), "run.export=true"))
    from transformers import AutoModelForSequenceClassification

    export = tmp_path / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float64)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    data = PreferencesConfig(path=str(tasks.pairs("pairs_val", 7)))
    batch = data.encode_all(data.read(), load_tokenizer(export)).batch(range(7), range(7))
    with torch.no_grad():
        ids = [torch.cat(parts)[None] for parts in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)]
        scores = torch.stack([model.score(model.model(row).last_hidden_state[0, -1])[0] for row in ids])
    last = tasks.read_run(tmp_path).metrics[-1]
    assert float((scores[::2] > scores[1::2]).double().mean()) == last["val/accuracy"]
    assert float(bradley_terry(scores[::2], scores[1::2], batch["margin"][::2]).mean()) == pytest.approx(
        last["val/loss"], rel=1e-6
    )
    assert scores.std() > 1e-4


def test_ties_teach_nothing_and_are_counted(tmp_path: Path) -> None:
    (tied,) = CASES["online_dpo"].train(tmp_path / "tied", "reward.function=tasks:always_one", ranks=2, steps=1).metrics
    assert (tied["online_dpo/ties"], tied["online_dpo/pairs"]) == (tasks.PROMPTS, 0)
    assert not any("grad_norm" in key for key in tied)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("safe_rlhf", ("algorithm.ptx_coeff=0",), r"algorithm.ptx_coeff=0.0: it and the section ptx go together"),
        ("safe_rlhf", ("ptx=null",), r"algorithm.ptx_coeff=0.1: it and the section ptx go together"),
        (
            "dpo",
            ("algorithm.max_token_len_per_gpu=30",),
            r"per_gpu=30, .*the longest pair of data has \d+ tokens.*must hold a pair",
        ),
        ("dpo", ("reward.function=exact_match",), r"reward scores responses to prompts, and there are none: leave it out"),
    ],
)
def test_runs_that_cannot_be(name: str, more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(CASES[name].file, tasks.settings(tmp_path, 3, *CASES[name].overrides(), *more), 1)
