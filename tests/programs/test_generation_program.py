"""``rlhf_spmd.generate``: the file it reads, the file it writes, the mistakes it names."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
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
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.data.files import DataError
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.model_runner import ModelRunner
from rlhf_spmd.inference.output_files import Journal
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.runner import RewardRunner
from rlhf_spmd.telemetry.run_dir import EXIT_CODES


def test_rows_come_out_in_input_order_with_every_field(model: Path, tmp_path: Path) -> None:
    rows, out = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "deep" / "out.jsonl"
    program.main(arguments(model, rows, out, "sampling.n=2", "sampling.max_response_length=12", "sampling.seed=4"))
    written = read_output(out)
    assert [row["id"] for row in written] == ["first", "first", 1, 1, 17, 17, 3, 3]
    assert written[2]["prompt_ids"] == [5, 6, 7, 8]
    chat = "<|user|>abd<|assistant|>"
    assert written[4]["prompt_ids"] == [ord(c) - 29 for c in chat]
    for row, limit in zip(written, [5, 5, 12, 12, 12, 12, 4, 4], strict=True):  # the last prompt leaves 4 of 64 tokens
        assert set(row) == {"id", "prompt", "answer", "prompt_ids", "response_ids", "log_probs", "text", "finish_reason"}
        assert 1 <= len(row["response_ids"]) == len(row["log_probs"]) <= limit
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 2 else "length")
        assert all(log_prob <= 0 for log_prob in row["log_probs"]) and isinstance(row["text"], str)
    assert written[2]["response_ids"] != written[3]["response_ids"]
    assert not list(out.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, ["layout.dp=2"]), (2, ["layout.tp=2"]), (2, ["layout.pp=2", "generation.page_size=4"])],
    ids=["dp2", "tp2", "pp2"],
)
def test_every_layout_writes_the_same_responses(model: Path, tmp_path: Path, size: int, layout: list[str]) -> None:
    rows = write_rows(tmp_path / "in.jsonl", ROWS * 3)
    sampling = ["sampling.n=3", "sampling.max_response_length=10", "sampling.temperature=0.8", "sampling.top_p=0.9"]
    program.main(arguments(model, rows, tmp_path / "one.jsonl", *sampling))
    run_ranks(size, run_program_on_rank, arguments(model, rows, tmp_path / "many.jsonl", *sampling, *layout))
    one, many = read_output(tmp_path / "one.jsonl"), read_output(tmp_path / "many.jsonl")
    for a, b in zip(one, many, strict=True):
        assert b.pop("log_probs") == pytest.approx(a.pop("log_probs"), abs=2e-5)
        assert a == b


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
        [],
        ["sampling.temperature=0"],
        ["sampling.top_p=0.9", "sampling.n=2"],
        ["generation.steps_per_sync=4", "sampling.temperature=0.8"],
        ["generation.speculative_tokens=2"],
        ["model.dtype=float64"],
        ["sampling.logprobs=2", "sampling.forbidden_token_ids=[7]"],
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


@pytest.mark.parametrize("layout", ["layout.pp=2", "layout.tp=2"])
def test_every_rank_of_a_replica_hears_what_is_not_finite(broken: Path, tmp_path: Path, layout: str) -> None:
    rows = write_rows(tmp_path / "in.jsonl", BROKEN_ROWS)
    told = run_ranks(2, not_finite_on_rank, arguments(broken, rows, tmp_path / "out.jsonl", layout))
    assert all("row 1 (id 'bad')" in message for message in told)


@pytest.mark.parametrize(
    ("rows", "overrides", "error", "message"),
    [
        ([{"prompt_ids": [1]}], ["sampling.top_q=1"], ConfigError, "sampling.top_q.*did you mean 'sampling.top_"),
        ([{"prompt_ids": [1]}], ["sampling.top_p=2"], ConfigError, r"sampling\.top_p=2\.0"),
        ([{"prompt_ids": [1]}], ["layout.tp=3"], ValueError, r"pp\(1\) \* tp\(3\) \* dp\(1\) = 3 ranks, but the pool has 1"),
        ([{"prompt_ids": [1]}], ["layout.zero=2"], ConfigError, r"layout\.zero=2"),
        ([{"prompt_ids": [1]}], ["generation.tp=2"], ConfigError, r"generation\.tp=2: here layout\.tp says it"),
        (
            [{"prompt_ids": [1]}],
            ["generation.ep=2"],
            ValueError,
            r"generation\.ep=2: the tp ranks share the experts, and layout\.tp is 1; allowed: 1$",
        ),
        (
            [{"prompt_ids": [1]}],
            ["generation.reshard_method=bogus"],
            ConfigError,
            "generation.reshard_method=bogus: nothing is trained here",
        ),
        (
            [{"prompt_ids": [1]}],
            ["generation.buffers=keep"],
            ConfigError,
            "generation.buffers=keep: nothing is trained here",
        ),
        (
            [{"prompt_ids": [1]}],
            ["generation.reuse_rollout_log_probs=true"],
            ConfigError,
            "reuse_rollout_log_probs=True: nothing is trained here",
        ),
        ([{"prompt_ids": [1]}], ["generation.kv_cache=keep"], ConfigError, "generation.kv_cache=keep: nothing is trained here"),
        (
            [{"prompt_ids": [1]}],
            ["generation.overlap=true"],
            ConfigError,
            "generation.overlap=True: nothing is trained here",
        ),
        (
            [{"prompt_ids": [1]}],
            ["sampling.seed=18446744073709551616"],
            ConfigError,
            "sampling.seed=18446744073709551616: must be",
        ),
        (
            [{"prompt_ids": [1]}],
            ["generation.page_size=1000000000000"],
            ValueError,
            r"generation\.num_pages=None and page_size=1000000000000: a rank needs .* GiB for 1 page, and its device has",
        ),
        (
            [{"prompt_ids": [1]}],
            ["generation.num_pages=1000000000000"],
            ValueError,
            r"generation\.num_pages=1000000000000 and page_size=64: a rank needs .* GiB for 1000000000000 pages, and",
        ),
        ([{"prompt_ids": [1]}], ["threads=100000"], ConfigError, "threads=100000: must be at least 1 and at most 1024"),
        ([{"prompt_ids": [1]}], ["model.dtype=float8"], ConfigError, r"model\.dtype='float8'"),
        ([{"prompt_ids": [1]}], ["model.path=/no/such/place"], ValueError, "/no/such/place"),
        ([{"prompt_ids": [1]}], ["out=/dev/null/x"], ValueError, "out=/dev/null/x: cannot write"),
        ([{"prompt_ids": [200]}], [], DataError, r"in\.jsonl:1: token id 200 in 'prompt_ids' must be less than .* 200"),
        ([{"prompt_ids": []}], [], DataError, r"in\.jsonl:1: 'prompt_ids' must be a non-empty list"),
        ([{"prompt_ids": [3] * 64}], [], DataError, r"in\.jsonl:1: the prompt has 64 tokens, the model's context 64"),
        ([{"prompt_ids": [3], "max_response_length": 0}], [], DataError, r"in\.jsonl:1: max_response_length=0"),
        (
            [{"prompt_ids": [3], "min_response_length": 6, "max_response_length": 5}],
            ["sampling.max_response_length=9"],
            DataError,
            r"in\.jsonl:1: min_response_length=6 must be at most 5, which max_response_length",
        ),
        ([{"text": "abc"}], [], DataError, r"in\.jsonl:1: no key 'prompt'"),
        ([], [], DataError, "holds no rows"),
    ],
)
def test_mistakes_are_named(
    model: Path, tmp_path: Path, rows: list[Any], overrides: list[str], error: type[Exception], message: str
) -> None:
    file = write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(error, match=message):
        program.prepare(None, arguments(model, file, tmp_path / "out.jsonl", *overrides), Launch())


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
    given = arguments(model, file, tmp_path / "out.jsonl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"--nproc-per-node=3, but this node has 2 GPUs"):
        program.prepare(None, given, Launch(rank=2, size=3, local_rank=2, local_size=3))


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


def test_a_job_of_many_rows_builds_few_runners(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7 + i % 20]} for i in range(64)])
    built: list[Any] = []
    build = ModelRunner.__init__
    monkeypatch.setattr(ModelRunner, "__init__", lambda *given: built.append(given) or build(*given))
    more = ["generation.max_num_seqs=4", "generation.steps_per_sync=4", "sampling.max_response_length=12"]
    program.main(arguments(model, rows, tmp_path / "out.jsonl", *more))
    assert len(read_output(tmp_path / "out.jsonl")) == 64
    assert len(built) <= 8  # 64 rows are 16 times as many as run together


def test_rows_are_made_while_others_are_scored(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7 + i]} for i in range(12)])
    calls: list[int] = []
    second, met = threading.Event(), []
    generate, score = Generator.generate_until, RewardRunner.score

    def generated(*given: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            second.set()
        return generate(*given)

    def scored(*given: Any) -> Any:
        met.append(second.wait(20.0))
        return score(*given)

    monkeypatch.setattr(Generator, "generate_until", generated)
    monkeypatch.setattr(RewardRunner, "score", scored)
    more = ["generation.max_num_seqs=1", "sampling.max_response_length=5", "reward.function=reward_functions:length"]
    program.main(arguments(model, rows, tmp_path / "out.jsonl", *more))
    assert len(calls) > 2 and met and all(met)
    assert all(row["score"] == len(row["text"]) / 10 for row in read_output(tmp_path / "out.jsonl"))


def test_a_prompt_without_room_is_a_row_with_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [4] * 70, "id": "long"}, {"prompt": "abc", "answer": "d"}])
    program.main(arguments(model, rows, tmp_path / "out.jsonl", "sampling.n=2", "sampling.max_response_length=4"))
    written = read_output(tmp_path / "out.jsonl")
    assert [row["id"] for row in written] == ["long", "long", 1, 1]
    assert all(row["error"].endswith("in.jsonl:1: the prompt has 70 tokens, the model's context 64") for row in written[:2])
    assert written[0]["response_ids"] == [] and written[0]["text"] is None
    assert written[2]["prompt"] == "abc" and written[2]["answer"] == "d" and "error" not in written[2]
    assert "1 prompt not answered, the first: " in capsys.readouterr().err
