"""``rlhf_spmd.generate``: the file it reads, the file it writes, the mistakes it names."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate_runs import (
    CONFIG,
    ROWS,
    arguments,
    read_output,
    run_program_on_rank,
    write_rows,
)
from generate_runs import model as model  # a fixture
from ranks import run_ranks
from rlhf_spmd import generate as program
from rlhf_spmd.data.files import DataError
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.inference.output_files import Journal
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.runner import RewardRunner
from rlhf_spmd.telemetry.run_dir import EXIT_CODES


def test_rows_come_out_in_input_order_with_every_field(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt without room is a row with an error."""
    prompts = [*ROWS, {"prompt_ids": [4] * 70, "answer": "d"}]
    file, out = write_rows(tmp_path / "in.jsonl", prompts), tmp_path / "deep" / "out.jsonl"
    program.main(arguments(model, file, out, "sampling.n=2", "sampling.max_response_length=12", "sampling.seed=4"))
    rows = read_output(out)
    assert [row["id"] for row in rows] == ["first", "first", 1, 1, 17, 17, 3, 3, 4, 4]
    assert rows[0]["prompt"] == "abc abd" and rows[2]["prompt_ids"] == [5, 6, 7, 8]
    assert rows[4]["prompt_ids"] == [ord(character) - 29 for character in "<|user|>abd<|assistant|>"]
    for row, limit in zip(rows, [5, 5, 12, 12, 12, 12, 4, 4], strict=False):  # the last prompt leaves 4 of 64 tokens
        assert set(row) == {"id", "prompt", "answer", "prompt_ids", "response_ids", "log_probs", "text", "finish_reason"}
        assert 1 <= len(row["response_ids"]) == len(row["log_probs"]) <= limit
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 2 else "length")
        assert all(log_prob <= 0 for log_prob in row["log_probs"]) and isinstance(row["text"], str)
    assert rows[2]["response_ids"] != rows[3]["response_ids"]
    for row in rows[8:]:
        assert row["error"].endswith("in.jsonl:5: the prompt has 70 tokens, the model's context 64")
        assert (row["answer"], row["response_ids"], row["text"]) == ("d", [], None)
    assert "1 prompt not answered, the first: " in capsys.readouterr().err
    assert not list(out.parent.glob("*.tmp"))


def test_two_replicas_write_the_same_responses(model: Path, tmp_path: Path) -> None:
    """test_score has other layouts."""
    prompts = write_rows(tmp_path / "in.jsonl", ROWS * 3)
    sampling = ["sampling.n=3", "sampling.max_response_length=10", "sampling.temperature=0.8", "sampling.top_p=0.9"]
    program.main(arguments(model, prompts, tmp_path / "alone.jsonl", *sampling))
    run_ranks(2, run_program_on_rank, arguments(model, prompts, tmp_path / "two.jsonl", *sampling, "layout.dp=2"))
    for row, other in zip(read_output(tmp_path / "alone.jsonl"), read_output(tmp_path / "two.jsonl"), strict=True):
        assert other.pop("log_probs") == pytest.approx(row.pop("log_probs"), abs=2e-5)
        assert other == row


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not a number for rows that hold token 7."""
    path = tmp_path_factory.mktemp("model") / "broken"
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


BROKEN_ROWS = [{"prompt_ids": [5, 6], "max_response_length": 1}, {"prompt_ids": [5, 7, 8], "id": "bad"}]


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.temperature=0"],
        ["sampling.top_p=0.9", "sampling.n=2", "model.dtype=float64"],
        ["generation.steps_per_sync=4", "sampling.temperature=0.8"],
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_ends_the_program(
    broken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    rows, out = write_rows(tmp_path / "in.jsonl", BROKEN_ROWS), tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as ending:
        program.main(arguments(broken, rows, out, *overrides))
    (line,) = capfd.readouterr().err.splitlines()
    assert ending.value.code == EXIT_CODES["numerics"] and not out.exists()
    assert f"row 1 (id 'bad') has log-probs that are not finite; check the weights in {broken}" in line


def not_finite_on_rank(world: World, argv: list[str]) -> str:
    with pytest.raises(FloatingPointError) as error:
        run_program_on_rank(world, argv)
    return str(error.value)


def test_every_rank_of_a_replica_hears_what_is_not_finite(broken: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", BROKEN_ROWS)
    for layout in ("layout.pp=2", "layout.tp=2"):
        messages = run_ranks(2, not_finite_on_rank, arguments(broken, prompts, tmp_path / "out.jsonl", layout))
        assert all("row 1 (id 'bad')" in message for message in messages)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_q=1", r"sampling\.top_q.*did you mean 'sampling\.top_"),
        ("sampling.top_p=2", r"sampling\.top_p=2\.0"),
        ("layout.tp=3", r"pp\(1\) \* tp\(3\) \* dp\(1\) = 3 ranks, but the pool has 1"),
        ("layout.zero=2", r"layout\.zero=2"),
        ("generation.tp=2", r"generation\.tp=2: here layout\.tp says it"),
        ("generation.ep=2", r"generation\.ep=2: the tp ranks share the experts, and layout\.tp is 1; allowed: 1$"),
        ("generation.reshard_method=bogus", r"generation\.reshard_method=bogus: nothing is trained here"),
        ("generation.reuse_rollout_log_probs=true", r"reuse_rollout_log_probs=True: nothing is trained here"),
        ("sampling.seed=18446744073709551616", r"sampling\.seed=18446744073709551616: must be"),
        ("generation.page_size=2000000000", r"page_size=2000000000: a rank needs .* GiB for 1 page, and its device has"),
        ("generation.num_pages=2000000000", r"page_size=64: a rank needs .* GiB for 2000000000 pages, and"),
        ("threads=100000", r"threads=100000: must be at least 1 and at most 1024"),
        ("model.dtype=float8", r"model\.dtype='float8'"),
        ("out=/dev/null/x", r"out=/dev/null/x: cannot write"),
    ],
)
def test_mistakes_of_settings_are_named(model: Path, tmp_path: Path, override: str, message: str) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [1]}])
    with pytest.raises(ValueError, match=message):
        program.prepare(None, arguments(model, prompts, tmp_path / "out.jsonl", override), Launch())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": [200]}, r"token id 200 in 'prompt_ids' must be less than .* 200"),
        ({"prompt_ids": []}, r"'prompt_ids' must be a non-empty list"),
        ({"prompt_ids": [3] * 64}, r"the prompt has 64 tokens, the model's context 64"),
        ({"prompt_ids": [3], "max_response_length": 0}, r"max_response_length=0"),
        (
            {"prompt_ids": [3], "min_response_length": 6, "max_response_length": 5},
            r"min_response_length=6 must be at most 5, whi",
        ),
        ({"text": "abc"}, r"no key 'prompt'"),
    ],
)
def test_mistakes_of_rows_are_named(model: Path, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [row])
    with pytest.raises(DataError, match=rf"in\.jsonl:1: {message}"):
        program.prepare(None, arguments(model, prompts, tmp_path / "out.jsonl", "sampling.max_response_length=9"), Launch())


def test_a_cache_of_small_pages_is_counted_as_it_lies(model: Path, tmp_path: Path) -> None:
    """Pages of the C++ kernels are wider than their tokens; the others' are not, and no setting says which are meant."""
    file = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [1]}])
    room, spec = total_bytes(torch.device("cpu"), 1), read_spec(model)
    token = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * 4
    fits = f"generation.num_pages={int(0.8 * room / token)}"
    program.prepare(None, arguments(model, file, tmp_path / "out.jsonl", "generation.page_size=1", fits), Launch())


def test_more_ranks_than_gpus_is_said_before_their_memory_is_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [1]}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"--nproc-per-node=3, but this node has 2 GPUs"):
        program.prepare(
            None, arguments(model, file, tmp_path / "out.jsonl"), Launch(rank=2, size=3, local_rank=2, local_size=3)
        )


def test_the_file_of_another_job_is_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    for length in (3, 5):
        program.main(arguments(model, rows, out, f"sampling.max_response_length={length}", "sampling.temperature=0"))
    assert f"the earlier {out} is now {out}.before" in capsys.readouterr().err
    before, after = (sum(len(row["response_ids"]) for row in read_output(path)) for path in (Path(f"{out}.before"), out))
    assert 0 < before < after


def test_a_model_without_tokenizer_takes_ids(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    write_random_model(bare, CONFIG, seed=3)
    rows = write_rows(tmp_path / "ids.jsonl", [{"prompt_ids": [4, 5]}])
    program.main(arguments(bare, rows, tmp_path / "out.jsonl", "sampling.temperature=0", "sampling.max_response_length=3"))
    assert [row["text"] for row in read_output(tmp_path / "out.jsonl")] == [None]
    text = write_rows(tmp_path / "text.jsonl", [{"prompt": "abc"}])
    with pytest.raises(DataError, match="holds no tokenizer"):
        program.prepare(None, arguments(bare, text, tmp_path / "out.jsonl"), Launch())


def test_a_job_that_was_killed_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that had ended are not made again, a torn line is; the file is that of a job that was not killed."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7 + i], "max_response_length": 3 + i} for i in range(12)])
    more = ["sampling.n=2", "generation.max_num_seqs=2", "sampling.ignore_eos=true", "reward.function=reward_functions:length"]
    program.main(arguments(model, rows, tmp_path / "whole.jsonl", *more))
    out = tmp_path / "out.jsonl"
    append = Journal.append

    def appended(self: Journal, records: Any) -> None:
        append(self, records)
        (file,) = self.directory.iterdir()
        if len(file.read_text().splitlines()) > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", appended)
        with pytest.raises(SystemExit):
            program.main(arguments(model, rows, out, *more))
    (part,) = (tmp_path / "out.jsonl.part").iterdir()
    part.write_text(part.read_text()[:-20])
    left = len(part.read_text().splitlines()) - 3  # without the job, the torn line and the other row of its prompt
    assert not out.exists() and 6 <= left < 24 and left % 2 == 0
    with pytest.raises(
        ValueError, match=r"out\.jsonl\.part holds rows of a job with another model, other prompts or other settings"
    ):
        program.prepare(None, arguments(model, rows, out, *more, "sampling.seed=9"), Launch())
    capsys.readouterr()
    program.main(arguments(model, rows, out, *more))
    assert f"24 responses, {2 * sum(range(3, 15))} tokens" in (said := capsys.readouterr().err)
    assert f"{left} of them were there from an earlier start" in said
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not part.parent.exists()


def test_rows_are_made_while_others_are_scored(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7 + i]} for i in range(12)])
    calls, waits = Semaphore(0), list[bool]()
    generate_until, score = Generator.generate_until, RewardRunner.score
    monkeypatch.setattr(Generator, "generate_until", lambda *a: calls.release() or generate_until(*a))
    # the first score waits until the generator has been called twice
    monkeypatch.setattr(RewardRunner, "score", lambda *a: waits.append(bool(waits) or twice(calls)) or score(*a))
    more = ["generation.max_num_seqs=1", "sampling.max_response_length=5", "reward.function=reward_functions:length"]
    program.main(arguments(model, prompts, tmp_path / "out.jsonl", *more))
    assert waits and all(waits)
    assert all(row["score"] == len(row["text"]) / 10 for row in read_output(tmp_path / "out.jsonl"))


def twice(calls: Semaphore) -> bool:
    return all(calls.acquire(timeout=20.0) for _ in range(2))
