"""The score program: transformers' log-probs in every family and layout; bad input is one line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from places import ROOT
from rlhf_spmd.data.sort_digits import write_tokenizer
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.score import main
from score_runs import (
    LAYOUTS,
    PRETRAINED,
    TOLERANCE,
    largest_difference,
    read_lines,
    run_program_in,
    write_lines,
)
from small_models import CONFIGS, make_model
from tasks import free_port, other_task, train_alone

INPUT_CODES = (2, 3)  # configuration, data
LENGTHS = [(1, 1), (40, 30), (3, 17), (1, 44), (25, 1), (9, 9), (60, 8)]  # (prompt, response) tokens


# model directory, input file, its rows, transformers' log-probs
Case = tuple[Path, Path, list[dict[str, Any]], list[list[float]]]


def make_rows(vocab_size: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(0, vocab_size, (n,), generator=generator).tolist()

    rows = [{"id": f"row {i}", "prompt_ids": draw(p), "response_ids": draw(r)} for i, (p, r) in enumerate(LENGTHS)]
    del rows[2]["id"]
    return rows


def expected_log_probs(path: Path, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """transformers' log-probs of the response tokens, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        first = len(row["prompt_ids"])
        with torch.no_grad():
            table = model(ids[None]).logits[0, first - 1 : -1].log_softmax(-1)
        found.append(table.gather(1, ids[first:, None])[:, 0].tolist())
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Name -> what is made for it, once."""
    root = tmp_path_factory.mktemp("score")

    @cache
    def make(name: str) -> Case:
        if name in CONFIGS:
            path = make_model(root / name, CONFIGS[name])
        else:
            path = PRETRAINED / name
            if not path.is_dir():
                pytest.skip(f"{name} is not on this machine")
        rows = make_rows(read_spec(path).vocab_size)
        return path, write_lines(root / f"{name}.jsonl", rows), rows, expected_log_probs(path, rows)

    return make


NAMES, OTHERS = [*CONFIGS, "tinystories-656k", "stories260k"], [name for name in LAYOUTS if name not in ("alone", "pp2-tp2")]
# each family whole and cut both ways; the other layouts, which cut it in no third way, in turn
TURNS = [(name, layout) for i, name in enumerate(NAMES) for layout in ("alone", "pp2-tp2", OTHERS[i % len(OTHERS)])]


@pytest.mark.parametrize(("name", "layout"), TURNS)
def test_log_probs_equal_transformers(case, tmp_path, name, layout):
    model, data, rows, expected = case(name)
    # a budget that makes replicas have different numbers of micro-batches
    found = run_program_in(LAYOUTS[layout], model, data, tmp_path / "new" / "out.jsonl", "max_token_len_per_gpu=70")
    assert [row["id"] for row in found] == ["row 0", "row 1", 2, "row 3", "row 4", "row 5", "row 6"]
    assert [row["response_ids"] for row in found] == [row["response_ids"] for row in rows]
    difference = largest_difference(found, expected)
    print(f"{difference:.1e} from transformers")
    # in linear attention transformers' own float32 is up to 5.3e-5 from its float64 here; ours is 1e-14 from that in float64
    assert difference < TOLERANCE * (3 if read_spec(model).delta is not None else 1)


def test_ranks_that_share_the_tokens_of_rows(case, tmp_path):
    """The budget counts the tokens of a rank: half of the longest row, which has more."""
    model, data, rows, expected = case("llama")
    longest = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    budget = f"max_token_len_per_gpu={-(-longest // 2)}"
    found = run_program_in((1, 2, 1, 0), model, data, tmp_path / "out.jsonl", budget, cp=2)
    assert [row["id"] for row in found] == ["row 0", "row 1", 2, "row 3", "row 4", "row 5", "row 6"]
    assert largest_difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("layout", ["dp2-zero3", "pp2-dp2-zero1"])
def test_a_replica_without_rows(case, tmp_path, layout):
    model, _, rows, expected = case("llama")
    data = write_lines(tmp_path / "one.jsonl", rows[1:2])
    found = run_program_in(LAYOUTS[layout], model, data, tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == ["row 1"]
    assert largest_difference(found, expected[1:2]) < TOLERANCE


def test_text_and_ids_in_one_file(tmp_path):
    """Text goes through the tokenizer, the start token before the prompt only; nothing is appended to the response."""
    model = make_model(tmp_path / "model", CONFIGS["llama"])
    write_tokenizer(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer("31")["input_ids"]
    response = tokenizer("13", add_special_tokens=False)["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id and len(response) == 2
    ids = {"prompt_ids": prompt, "response_ids": response}
    data = write_lines(tmp_path / "in.jsonl", [{"question": "31", "response": "13"}, ids, {"question": "2", "response": "2"}])
    found = run_program_in(LAYOUTS["alone"], model, data, tmp_path / "out.jsonl", "data.prompt_key=question")
    assert found[0]["response_ids"] == response and found[0]["log_probs"] == found[1]["log_probs"]
    assert largest_difference(found[1:2], expected_log_probs(model, [ids])) < TOLERANCE


# -- real processes


def torchrun(ranks: int, *overrides: str) -> tuple[list[str], dict[int, int], int]:
    """Standard error without torchrun's own lines, the ranks' exit codes that torchrun reports, and torchrun's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command += ["-m", "rlhf_spmd.score", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    # torchrun's warnings stand between the ranks' lines and its report behind them
    ours = re.split(r"^E\d{4} ", ended.stderr, maxsplit=1, flags=re.M)[0].splitlines()
    codes = {int(r): int(c) for r, c in re.findall(r"rank\s+: (\d+).*?\n\s+exitcode\s+: (-?\d+)", ended.stderr)}
    return [line for line in ours if not re.match(r"\[?W\d{4} ", line)], codes, ended.returncode


def test_the_program_under_torchrun(case, tmp_path):
    model, data, _, expected = case("qwen3-tied")
    config = tmp_path / "score.yaml"
    config.write_text(f"model:\n  path: {model}\n  dtype: bfloat16\ndata:\n  path: {data}\nlayout:\n  tp: 2\n")
    out = tmp_path / "out.jsonl"
    lines, _, code = torchrun(2, "--config", str(config), f"out={out}", "model.dtype=float32")
    assert code == 0, lines
    assert len(lines) == 1 and lines[0].startswith("7 rows, 249 tokens in ") and "pp(1) * tp(2) * dp(1)" in lines[0]
    assert largest_difference(read_lines(out), expected) < TOLERANCE


def test_bad_input_under_torchrun_ends_both_ranks(case, tmp_path):
    model, _, _, _ = case("llama")
    lines, codes, _ = torchrun(2, f"model.path={model}", f"data.path={tmp_path}/absent.jsonl", f"out={tmp_path}/out.jsonl")
    assert len(lines) == 1 and f"data file '{tmp_path}/absent.jsonl' does not exist" in lines[0]
    assert codes[0] == codes[1] and codes[0] in INPUT_CODES


# -- bad input: what the one line must say

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"layout.tpp": "2"}, ["unknown key 'layout.tpp'", "did you mean 'layout.tp'?"]),
    "no value": ({"layout.tp": "two"}, ["layout.tp='two'", "an integer"]),
    "no model": ({"model.path": "/nowhere"}, ["model.path=/nowhere"]),
    "model not given": ({"model.path": None}, ["'model.path' (text)", "must be given"]),
    "dtype": ({"model.dtype": "fp8"}, ["model.dtype='fp8'", "bfloat16"]),
    "layout and ranks": ({"layout.tp": "2"}, ["tp(2)", "= 2 ranks", "has 1"]),
    "zero": ({"layout.zero": "4"}, ["zero=4", "0, 1, 2, 3"]),
    "budget": ({"max_token_len_per_gpu": "69"}, ["llama.jsonl:2", "= 70 tokens", "max_token_len_per_gpu=69"]),
    "out is a directory": ({"out": "/"}, ["out=/", "directory"]),
    "out is a device": ({"out": "/dev/null"}, ["out=/dev/null", "regular file"]),
    "out cannot be written": ({"out": "/proc/here/out.jsonl"}, ["out=/proc/here/out.jsonl", "cannot write"]),
    "out is the input": ({"out": "{data}"}, ["out=", "data.path="]),
    "no file": ({"data.path": "/nowhere/in.jsonl"}, ["/nowhere/in.jsonl", "does not exist"]),
    "no data path": ({"data.path": None}, ["data.path"]),
}
BAD_ROWS: dict[str, tuple[str, list[str]]] = {
    "not json": ("{", [":2", "not valid JSON"]),
    "missing key": ('{"prompt_ids": [1], "answer": "x"}', [":2", "response_ids"]),
    "token id": ('{"prompt_ids": [1], "response_ids": [5, 101]}', [":2", "101", "'response_ids'"]),
    "no response": ('{"prompt_ids": [1], "response_ids": []}', [":2", "'response_ids'", "non-empty"]),
    "too long": (json.dumps({"prompt_ids": [1] * 200, "response_ids": [2] * 57}), [":2", "257", "max_position_embeddings=256"]),
}


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code and the one line of a run in this process, a single rank."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return ending.value.code, lines[0]


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_one_line(case, capfd, tmp_path, name):
    model, data, _, _ = case("llama")
    settings = {"model.path": str(model), "data.path": str(data), "out": str(tmp_path / "out.jsonl")}
    changed, words = BAD[name]
    settings |= {key: value and value.replace("{data}", str(data)) for key, value in changed.items()}
    capfd.readouterr()
    found, line = refusal(capfd, *(f"{key}={value}" for key, value in settings.items() if value is not None))
    assert found in INPUT_CODES and all(word in line for word in words), line
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_one_line(case, capfd, tmp_path, name):
    model, _, rows, _ = case("llama")
    text, words = BAD_ROWS[name]
    data = tmp_path / "in.jsonl"
    data.write_text(f"{json.dumps(rows[0])}\n{text}\n")
    capfd.readouterr()
    found, line = refusal(capfd, f"model.path={model}", f"data.path={data}", f"out={tmp_path}/out.jsonl")
    assert found in INPUT_CODES and all(word in line for word in ("in.jsonl", *words)), line


@pytest.mark.parametrize(("scale", "code", "word"), [(None, 2, "'model.norm.weight' is missing"), (math.nan, 6, "not finite")])
def test_bad_weights_are_one_line(case, capfd, tmp_path, scale, code, word):
    model, data, _, _ = case("llama")
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | ({} if scale is None else {"model.norm.weight": norm * scale}), broken / "model.safetensors")
    capfd.readouterr()
    found, line = refusal(capfd, f"model.path={broken}", f"data.path={data}", f"out={tmp_path}/out.jsonl")
    assert found == code and word in line and str(broken) in line, line
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_whose_actor_is_the_critic_is_scored_without_the_value_head(tmp_path: Path) -> None:
    config = other_task({"name": "ppo", "share_actor_critic": True, "use_kl_in_reward": False}, "actor")
    train_alone(tmp_path / "run", 1, "run.export=true", config=Path(config))
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "12", "response": "3"}])
    paths = "run/export", "run/checkpoints/step_1"
    found = [run_program_in(LAYOUTS["alone"], tmp_path / path, data, tmp_path / f"{path[-3:]}.jsonl") for path in paths]
    assert found[0][0]["log_probs"] == found[1][0]["log_probs"]


@pytest.mark.parametrize("more", [(), ("models.actor.lora.rank=2",)], ids=["weights", "adapters"])
def test_a_run_and_its_checkpoints_stand_for_their_weights(tmp_path: Path, more: tuple[str, ...]) -> None:
    """In a layout of its own, with ZeRO, as the export of the same step."""
    train_alone(tmp_path / "run", 1, "run.export=true", "models.actor.optim.lr=1e-2", *more)
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "12", "response": "3"}, {"prompt": "4", "response": "56"}])
    scored = {
        path: run_program_in(LAYOUTS[layout], tmp_path / path, data, tmp_path / f"{number}.jsonl")
        for number, (path, layout) in enumerate(
            (("run/export", "alone"), ("run", "alone"), ("run/checkpoints/step_1", "dp2-zero3"))
        )
    }
    expected = [row["log_probs"] for row in scored["run/export"]]
    assert largest_difference(scored["run"], expected) == 0.0
    assert largest_difference(scored["run/checkpoints/step_1"], expected) < 1e-6
