"""``score``: transformers' log-probs in families and layouts, and those of ``generate`` bit for bit; bad input is one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tasks
from generate_runs import run_program_on_rank
from generators import transformers_greedy
from places import ROOT, SHARED
from ranks import Program, run_ranks
from rlhf_spmd import generate
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.score import main, prepare, score
from small_models import CONFIGS, make_model
from sort_digits import write_tokenizer
from tiers import tiers

TOLERANCE = 5e-5
LENGTHS = [(1, 1), (40, 30), (3, 17), (1, 44), (25, 1), (9, 9), (60, 8)]  # (prompt, response) tokens
PROMPT_LENGTHS = (1, 5, 23, 70, 2)
IDS = ["row 0", "row 1", 2, "row 3", "row 4", "row 5", "row 6"]
LAYOUTS = {  # (pp, tp, dp, zero)
    "alone": (1, 1, 1, 0),
    "tp2": (1, 2, 1, 0),
    "pp2": (2, 1, 1, 0),
    "pp2-tp2": (2, 2, 1, 0),
    "dp2-zero3": (1, 1, 2, 3),
    "tp2-dp2-zero3": (1, 2, 2, 3),
    "pp2-dp2-zero1": (2, 1, 2, 1),
}

Rows = list[dict[str, Any]]
# model directory, input file, its rows, transformers' log-probs
Case = tuple[Path, Path, Rows, list[list[float]]]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score_on_rank(world: World, overrides: list[str]) -> None:
    score(prepare(None, overrides, world.launch), world)
    world.all.barrier("test:written")


def score_in(layout: str, model: Path, data: Path, out: Path, *more: str, cp: int = 1) -> Rows:
    pp, tp, dp, zero = LAYOUTS[layout]
    overrides = [f"model.path={model}", f"data.path={data}", f"out={out}"]
    overrides += [f"layout.pp={pp}", f"layout.tp={tp}", f"layout.dp={dp}", f"layout.zero={zero}", f"layout.cp={cp}", *more]
    if pp * tp * dp * cp == 1:
        main(overrides)
    else:
        run_ranks(pp * tp * dp * cp, score_on_rank, overrides)
    return read_lines(out)


def generate_in(layout: str, model: Path, data: Path, out: Path, *more: str) -> Rows:
    pp, tp, dp, _ = LAYOUTS[layout]
    overrides = [f"model.path={model}", f"data.path={data}", f"out={out}", "sampling.max_response_length=24"]
    overrides += [f"layout.pp={pp}", f"layout.tp={tp}", f"layout.dp={dp}", *more]
    if pp * tp * dp == 1:
        generate.main(overrides)
    else:
        run_ranks(pp * tp * dp, run_program_on_rank, overrides)
    return read_lines(out)


def largest_difference(rows: Rows, expected: Sequence[Sequence[float]]) -> float:
    pairs = zip(rows, expected, strict=True)
    return max(abs(a - b) for row, log_probs in pairs for a, b in zip(row["log_probs"], log_probs, strict=True))


def draw(generator: torch.Generator, vocab_size: int, count: int) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def make_rows(vocab_size: int) -> Rows:
    generator = torch.Generator().manual_seed(3)
    rows: Rows = []
    for name, (prompt, response) in zip(IDS, LENGTHS, strict=True):
        ids = {"prompt_ids": draw(generator, vocab_size, prompt), "response_ids": draw(generator, vocab_size, response)}
        rows.append(ids if name == 2 else {"id": name, **ids})
    return rows


def transformers_log_probs(path: Path, rows: Rows) -> list[list[float]]:
    """Of the response tokens, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs = []
    for row in rows:
        ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
        first = len(row["prompt_ids"])
        with torch.no_grad():
            table = model(ids[None]).logits[0, first - 1 : -1].log_softmax(-1)
        log_probs.append(table.gather(1, ids[first:, None])[:, 0].tolist())
    return log_probs


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> model directory, made once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def find(name: str) -> Path:
        path = make_model(root / name, CONFIGS[name]) if name in CONFIGS else SHARED / "models" / name
        if not path.is_dir():
            pytest.skip(f"{name} is not on this machine")
        return path

    return find


@pytest.fixture(scope="module")
def case(path_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Name -> what is made for it, once."""
    root = tmp_path_factory.mktemp("score")

    @cache
    def make(name: str) -> Case:
        path = path_of(name)
        rows = make_rows(read_spec(path).vocab_size)
        return path, write_lines(root / f"{name}.jsonl", rows), rows, transformers_log_probs(path, rows)

    return make


FAMILIES = ("llama", "qwen3-tied", "gemma2", "gemma4", "gpt-oss", "glm4-moe", "deepseek-v3", "qwen3-5")
NAMES, OTHERS = [*CONFIGS, "tinystories-656k", "stories260k"], [name for name in LAYOUTS if name not in ("alone", "pp2-tp2")]
# each family alone and cut both ways; the other layouts, which cut it in no third way, in turn
TURNS = [(name, layout) for i, name in enumerate(NAMES) for layout in ("alone", "pp2-tp2", OTHERS[i % len(OTHERS)])]
SHORT = [(name, [*LAYOUTS][i % len(LAYOUTS)]) for i, name in enumerate(FAMILIES)]


@pytest.mark.parametrize("turn", tiers(dict.fromkeys([*SHORT, *TURNS]), SHORT), ids=" ".join)
def test_log_probs_equal_transformers(case, tmp_path, turn):
    name, layout = turn
    model, data, rows, expected = case(name)
    # a budget that makes replicas have different numbers of micro-batches
    scored = score_in(layout, model, data, tmp_path / "new" / "out.jsonl", "max_token_len_per_gpu=70")
    assert [row["id"] for row in scored] == IDS
    assert [row["response_ids"] for row in scored] == [row["response_ids"] for row in rows]
    difference = largest_difference(scored, expected)
    print(f"{difference:.1e} from transformers")  # docs/figures/same_as_transformers.json
    # in linear attention transformers' own float32 is up to 5.3e-5 from its float64 here; ours is 1e-14 from that in float64
    assert difference < TOLERANCE * (3 if read_spec(model).delta_rule is not None else 1)


def test_ranks_that_share_the_tokens_of_rows(case, tmp_path):
    """The budget counts the tokens of a rank: half of the longest row, which has more."""
    model, data, rows, expected = case("llama")
    longest = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    budget = f"max_token_len_per_gpu={-(-longest // 2)}"
    scored = score_in("tp2", model, data, tmp_path / "out.jsonl", budget, cp=2)
    assert [row["id"] for row in scored] == IDS
    assert largest_difference(scored, expected) < TOLERANCE


def test_a_replica_without_rows(case, tmp_path):
    model, _, rows, expected = case("llama")
    data = write_lines(tmp_path / "one.jsonl", rows[1:2])
    scored = score_in("dp2-zero3", model, data, tmp_path / "out.jsonl")
    assert [row["id"] for row in scored] == ["row 1"]
    assert largest_difference(scored, expected[1:2]) < TOLERANCE


MODELS, CUTS = ("llama-tied-bias", "qwen2", "qwen3-tied", "tinystories-656k"), ("pp2", "pp2-tp2", "tp2-dp2-zero3")


CUT_MODELS = [(name, cut) for name in MODELS for cut in CUTS]


@pytest.mark.parametrize("turn", tiers(CUT_MODELS, zip(MODELS, (*CUTS, "pp2"), strict=True)), ids=" ".join)
def test_what_was_generated_has_its_log_probs(path_of, tmp_path, turn):
    """Greedy tokens are transformers'. Log-probs of draws are the same bits in one layout, and in any two of the same tp:
    pp, dp and ZeRO change no number.
    """
    name, layout = turn
    model, generator = path_of(name), torch.Generator().manual_seed(11)
    ids = [draw(generator, read_spec(model).vocab_size, length) for length in PROMPT_LENGTHS]
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt_ids": each} for each in ids])
    greedy = generate_in(layout, model, prompts, tmp_path / "greedy.jsonl", "sampling.temperature=0")
    assert [row["response_ids"] for row in greedy] == transformers_greedy(str(model), ids, 24)
    sampling = (f"sampling.temperature={0.7 if layout == 'pp2' else 1}", "sampling.n=3", "sampling.seed=5")
    generated = generate_in(layout, model, prompts, tmp_path / "generated.jsonl", *sampling)
    assert len({tuple(row["response_ids"]) for row in generated}) > len(ids)
    scored = score_in(layout, model, tmp_path / "generated.jsonl", tmp_path / "scored.jsonl")
    for key in ("response_ids", "id", "log_probs"):
        assert [row[key] for row in scored] == [row[key] for row in generated]
    scored_alone = score_in("alone", model, tmp_path / "generated.jsonl", tmp_path / "alone.jsonl")
    assert scored_alone == scored or LAYOUTS[layout][1] > 1
    assert largest_difference(scored_alone, [row["log_probs"] for row in generated]) < TOLERANCE


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
    data = write_lines(tmp_path / "in.jsonl", [{"question": "31", "response": "13"}, ids])
    scored = score_in("alone", model, data, tmp_path / "out.jsonl", "data.prompt_key=question")
    assert scored[0]["response_ids"] == response and scored[0]["log_probs"] == scored[1]["log_probs"]
    assert largest_difference(scored[1:], transformers_log_probs(model, [ids])) < TOLERANCE


# -- runs and their checkpoints stand for their weights


def test_a_run_whose_actor_is_the_critic_is_scored_without_the_value_head(tmp_path: Path) -> None:
    config = tasks.other_task({"name": "ppo", "share_actor_critic": True, "use_kl_in_reward": False}, "actor")
    tasks.train_alone(tmp_path / "run", 1, "run.export=true", config=Path(config))
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "12", "response": "3"}])
    paths = "run/export", "run/checkpoints/step_1"
    scored = [score_in("alone", tmp_path / path, data, tmp_path / f"{path[-3:]}.jsonl") for path in paths]
    assert scored[0][0]["log_probs"] == scored[1][0]["log_probs"]


def test_adapters_of_a_run_and_of_its_checkpoints_are_merged(tmp_path: Path) -> None:
    """Also in another layout, with ZeRO: as the export of the same step. test_evaluate has runs without adapters."""
    tasks.train_alone(tmp_path / "run", 1, "run.export=true", "models.actor.optim.lr=1e-2", "models.actor.lora.rank=2")
    data = write_lines(tmp_path / "rows.jsonl", [{"prompt": "12", "response": "3"}, {"prompt": "4", "response": "56"}])
    exported = score_in("alone", tmp_path / "run/export", data, tmp_path / "export.jsonl")
    expected = [row["log_probs"] for row in exported]
    for path, layout, tolerance in (("run", "alone", 0.0), ("run/checkpoints/step_1", "dp2-zero3", 1e-6)):
        scored = score_in(layout, tmp_path / path, data, tmp_path / f"{layout}.jsonl")
        assert largest_difference(scored, expected) <= tolerance


# -- as a program; bad input


def run_program(output: Path, *arguments: str) -> tuple[list[str], dict[int, int]]:
    """What two ranks write, and their exit codes."""
    program = Program(2, arguments, output, tasks.environment(), str(ROOT / "src" / "rlhf_spmd" / "score.py"))
    tasks.finish(program, output.parent)
    return output.read_text().splitlines(), program.codes


def test_the_program_on_two_ranks(case, tmp_path):
    model, data, _, expected = case("qwen3-tied")
    config, out = tmp_path / "score.yaml", tmp_path / "out.jsonl"
    config.write_text(f"model:\n  path: {model}\n  dtype: bfloat16\ndata:\n  path: {data}\nlayout:\n  tp: 2\n")
    lines, codes = run_program(tmp_path / "output.txt", "--config", str(config), f"out={out}", "model.dtype=float32")
    assert codes == {0: 0, 1: 0} and len(lines) == 1
    assert re.match(r"7 rows, 249 tokens in .*pp\(1\) \* tp\(2\) \* dp\(1\)", lines[0])
    assert largest_difference(read_lines(out), expected) < TOLERANCE
    absent = f"data.path={tmp_path}/absent.jsonl"
    lines, codes = run_program(tmp_path / "refusal.txt", f"model.path={model}", absent, f"out={tmp_path}/new.jsonl")
    assert codes == {0: 2, 1: 2}
    assert len(lines) == 1 and lines[0].startswith(f"data error: data file '{tmp_path}/absent.jsonl' does not exist")


BAD: dict[str, list[str]] = {  # override: parts of the line
    "model.path=/nowhere": ["model.path=/nowhere"],
    "model={dtype: float32}": ["'model.path' (text)", "must be given"],
    "layout.tp=2": ["tp(2)", "= 2 ranks", "has 1"],
    "max_token_len_per_gpu=69": ["llama.jsonl:2", "= 70 tokens", "max_token_len_per_gpu=69"],
    "out=/": ["out=/", "directory"],
    "out=/dev/null": ["out=/dev/null", "regular file"],
    "out=/proc/here/out.jsonl": ["out=/proc/here/out.jsonl", "cannot write"],
    "out={data}": ["out=", "data.path="],
    "data.path=[]": ["data.path"],
}
BAD_ROWS: dict[str, list[str]] = {
    "{": ["not valid JSON"],
    '{"prompt_ids": [1], "answer": "x"}': ["response_ids"],
    '{"prompt_ids": [1], "response_ids": [5, 101]}': ["101", "'response_ids'"],
    '{"prompt_ids": [1], "response_ids": []}': ["'response_ids'", "non-empty"],
    json.dumps({"prompt_ids": [1] * 200, "response_ids": [2] * 57}): ["257", "max_position_embeddings=256"],
}


@pytest.mark.parametrize("override", BAD)
def test_bad_settings_are_one_line(case, tmp_path, override):
    model, data, _, _ = case("llama")
    overrides = [f"model.path={model}", f"data.path={data}", f"out={tmp_path}/out.jsonl", override.replace("{data}", str(data))]
    if override.startswith("model="):
        del overrides[0]
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refusal:
        prepare(None, overrides, Launch())
    assert all(part in str(refusal.value) for part in BAD[override]), refusal.value


@pytest.mark.parametrize("text", BAD_ROWS)
def test_bad_rows_are_one_line(case, tmp_path, text):
    model, _, rows, _ = case("llama")
    data = tmp_path / "in.jsonl"
    data.write_text(f"{json.dumps(rows[0])}\n{text}\n")
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refusal:
        prepare(None, [f"model.path={model}", f"data.path={data}", f"out={tmp_path}/out.jsonl"], Launch())
    assert all(part in str(refusal.value) for part in ("in.jsonl:2", *BAD_ROWS[text])), refusal.value


@pytest.mark.parametrize(("scale", "code", "part"), [(None, 2, "'model.norm.weight' is missing"), (math.nan, 6, "not finite")])
def test_bad_weights_are_one_line(case, capfd, tmp_path, scale, code, part):
    model, data, _, _ = case("llama")
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | ({} if scale is None else {"model.norm.weight": norm * scale}), broken / "model.safetensors")
    capfd.readouterr()
    with pytest.raises(SystemExit) as ending:
        main([f"model.path={broken}", f"data.path={data}", f"out={tmp_path}/out.jsonl"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ending.value.code == code and part in line and str(broken) in line, line
    assert not (tmp_path / "out.jsonl").exists()
