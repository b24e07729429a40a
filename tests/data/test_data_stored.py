"""Bad rows are left out up to a limit, for every kind of data; a data set from its file is the one that was built."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from ranks import run_ranks
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data import cached_dataset as stored_data
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.data.cached_dataset import build_dataset, load_dataset
from rlhf_spmd.data.dataset import StoredRowsConfig, TokenDataset
from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.preferences import PreferencesConfig, UnpairedConfig
from rlhf_spmd.data.prompts import DataConfig, PromptDataset, ValidationPromptsConfig
from rlhf_spmd.data.sft import SftConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.banner import run_banner
from rlhf_spmd.preflight.prepare import prepare

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}{{ m.role[0] }}{{ m.content }}"
    "{% endfor %}{{ 'a' if add_generation_prompt }}"
)
SAID = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
BAD_CHAT = [{"role": "user", "content": "bad"}]
ODD = [b"{", b"[1]", b'"\\ud800"', b"\xff", b'{"id": 1}']
ODD.append(b'{"prompt": 3, "response": 1, "chosen": 1, "rejected": 2, "completion": 3}')
ODD.append(b'{"prompt": [1], "response": "1", "chosen": "1", "rejected": "2", "completion": "3", "label": true}')
GOOD: dict[type[StoredRowsConfig], list[dict[str, Any]]] = {
    DataConfig: [
        {"prompt": "12", "answer": "3", "max_response_length": 4},
        {"prompt": "4", "data_source": "x"},
        {"prompt": SAID[:1]},
    ],
    ValidationPromptsConfig: [{"prompt": "12"}, {"prompt": "4"}, {"prompt": SAID[:1]}],
    SftConfig: [{"prompt": "1", "response": "23"}, {"messages": [*SAID, *SAID]}, {"prompt": "4", "completion": "5"}],
    PreferencesConfig: [{"prompt": c, "chosen": "a", "rejected": "bc", "margin": 2} for c in "123"],
    UnpairedConfig: [{"prompt": c, "completion": c, "label": c == "2"} for c in "123"],
}
REFUSED: dict[type[StoredRowsConfig], dict[str, Any]] = {
    DataConfig: {"prompt": BAD_CHAT},
    ValidationPromptsConfig: {"prompt": ""},
    SftConfig: {"messages": [*BAD_CHAT, SAID[1]]},
    PreferencesConfig: {"prompt": BAD_CHAT, "chosen": "1", "rejected": "2"},
    UnpairedConfig: {"prompt": "", "completion": "1", "label": True},
}
KINDS = pytest.mark.parametrize("kind", list(GOOD), ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(tasks.task() / "tokenizer")


def write(path: Path, *rows: Any) -> str:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def config_of(kind: type[StoredRowsConfig], path: str, **more: Any) -> Any:
    return kind(path=path, chat_template=TEMPLATE, **more)


def contents(data: TokenDataset) -> dict[str, Any]:
    """All fields of all rows, without the names that rows have by their number."""
    batch = data.batch(range(len(data)), range(len(data)))
    found: dict[str, Any] = {}
    for name in batch.fields:
        found[name] = [x.tolist() for x in batch[name].rows()] if isinstance(batch[name], Ragged) else batch[name].tolist()
    if isinstance(data, PromptDataset):
        found["row"] = [{key: value for key, value in row.items() if key != "id"} for row in map(data.row, range(len(data)))]
    return found


@KINDS
def test_bad_rows_are_left_out_named_and_counted(tmp_path: Path, tokenizer: Any, kind: type[StoredRowsConfig]) -> None:
    first, *others = GOOD[kind]
    path = write(tmp_path / "a.jsonl", first, *ODD, REFUSED[kind], *others)
    number = len(ODD) + 1
    data = build_dataset(config_of(kind, path, max_bad_rows=number), tokenizer)
    assert contents(data) == contents(build_dataset(config_of(kind, write(tmp_path / "b.jsonl", *GOOD[kind])), tokenizer))
    assert data.tally.num_bad == number and f", {number} bad ones left out" in data.summary()
    assert [bad.partition(": ")[0] for bad in data.tally.bad] == [f"{path}:{line}" for line in (2, 3, 4)]
    begins = f"{number} rows cannot be used and are left out; the first: {path}:2: not valid JSON"
    assert len(data.warnings()) == 1 and data.warnings()[0].startswith(begins)
    message = (
        rf"^{number} rows cannot be used, more than data\.max_bad_rows={number - 1}; the first .*a\.jsonl:2: not valid JSON"
    )
    with pytest.raises(DataError, match=message):
        build_dataset(config_of(kind, path, max_bad_rows=number - 1), tokenizer)
    for line, row in enumerate([*ODD, REFUSED[kind]]):
        alone = write(tmp_path / f"{line}.jsonl", *GOOD[kind], row)
        with pytest.raises(DataError, match=rf"{line}\.jsonl:4: "):
            build_dataset(config_of(kind, alone), tokenizer)


def test_what_is_no_row_s_mistake_ends_the_run_whatever_the_limit(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": SAID[:1]}, {"prompt": "123456"}, {"prompt": "1", "id": 7}, {"prompt": "2", "id": 7}]
    path, keep = write(tmp_path / "a.jsonl", *rows), {"duplicates": "keep"}
    for options, message in (
        ({"chat_template": "{% if %}", **keep}, "not valid Jinja"),
        ({"max_prompt_length": 3, "filter_overlong_prompts": False, **keep}, "a.jsonl:2: 6 tokens are more than"),
        ({}, r"a\.jsonl:4: the id 7 is also that of"),
        ({"path": [path, str(tmp_path / "none.jsonl")], "duplicates": "drop"}, "does not exist"),
        ({"prompt_key": "text", **keep}, "none of 4 prompts can be used, 4 bad ones left out; .*a.jsonl:1: no key 'text'"),
    ):
        with pytest.raises(DataError, match=message):
            build_dataset(DataConfig(**{"path": path, "chat_template": TEMPLATE, "max_bad_rows": 100} | options), tokenizer)
    with pytest.raises(ValueError, match=r"data\.max_bad_rows=-1: must be at least 0"):
        check_section(DataConfig(path="x", max_bad_rows=-1), "data")


@KINDS
def test_chunks_and_the_file_change_nothing(
    tmp_path: Path, tokenizer: Any, kind: type[StoredRowsConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *GOOD[kind], *ODD, *GOOD[kind])
    config = config_of(kind, path, max_bad_rows=2 * len(ODD))
    whole = build_dataset(config, tokenizer)
    monkeypatch.setattr(stored_data, "CHUNK_ROWS", 2)
    stored = dataclasses.replace(config, cache_dir=str(tmp_path / "cache"))
    built, made = build_dataset(config, tokenizer), load_dataset(stored, tokenizer)
    monkeypatch.setattr(stored_data, "build_dataset", lambda *_: pytest.fail("the file was not used"))
    again = load_dataset(stored, tokenizer)
    for data in (built, made, again):
        assert type(data) is type(whole) and data.fingerprint == whole.fingerprint and data.tally == whole.tally
        assert contents(data) == contents(whole) and data.row_fields.keys() == whole.row_fields.keys()
        assert data.summary() == whole.summary()
    assert str(tmp_path / "cache") in Path("/proc/self/maps").read_text()
    if again.numbers:
        again.store_numbers("known", torch.arange(len(again) * 2), torch.ones(len(again) * 2, dtype=torch.float64))
        assert again.fingerprint == whole.fingerprint and "known" in contents(again)
    if isinstance(again, PromptDataset):
        assert len({json.dumps(row) for row in again.examples()}) == len(again)  # few rows: all are among the first


def test_examples_have_every_source_and_every_set_of_columns(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_spmd.data.prompts.NUM_FIRST", 2)
    rows: list[dict[str, Any]] = [{"prompt": "1", "data_source": "a"} for _ in range(9)]
    rows[5] |= {"answer": "3"}
    rows[7] |= {"data_source": "b"}
    rows[8] |= {"answer": None}
    data = DataConfig(path="x").encode_all(list(DataConfig(path=write(tmp_path / "a.jsonl", *rows)).read()), tokenizer)
    assert isinstance(data, PromptDataset) and [row["id"] for row in data.examples()] == [0, 1, 5, 7]


def test_another_file_is_made_for_other_data(tmp_path: Path, tokenizer: Any) -> None:
    """And a half-written one is never used."""
    path, home = write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": SAID[:1]}), tmp_path / "cache"
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    config = DataConfig(path=path, chat_template=str(tmp_path / "t.jinja"), cache_dir=str(home))

    def files() -> int:
        return len(list(home.glob("*.safetensors")))

    load_dataset(config, tokenizer)
    assert {file.stat().st_mode for file in home.iterdir()} == {Path(path).stat().st_mode}, "for whom the umask says"
    load_dataset(dataclasses.replace(config, train_batch_size=1, seed=3, shuffle=False, val_path="other"), tokenizer)
    assert files() == 1
    (tmp_path / "t.jinja").write_text(TEMPLATE + "b")
    assert load_dataset(config, tokenizer).columns["prompt_ids"].rows()[1].tolist()[-1] == tasks.VOCABULARY.index("b")
    load_dataset(dataclasses.replace(config, max_prompt_length=1, filter_overlong_prompts=True), tokenizer)
    write(tmp_path / "a.jsonl", {"prompt": "22"}, {"prompt": SAID[:1]})
    assert load_dataset(config, tokenizer).columns["prompt_ids"].lengths[0] == 2
    assert files() == 4
    shutil.copytree(tasks.task() / "tokenizer", tmp_path / "tokenizer")
    settings = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    load_dataset(config, load_tokenizer(tmp_path / "tokenizer"))
    load_dataset(dataclasses.replace(config, val_path=path), tokenizer, validation=True)
    assert files() == 6
    newest = max(home.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    half = newest.with_name(f".{newest.name}.0.tmp")
    newest.rename(half)
    load_dataset(dataclasses.replace(config, val_path=path), tokenizer, validation=True)
    assert newest.is_file() and not half.exists()
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"^data\.cache_dir={home}: {newest.name} cannot be made or read: ") as caught:
        load_dataset(dataclasses.replace(config, val_path=path), tokenizer, validation=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.cache_dir=.*a\.jsonl: .* cannot be made or read: "):
        load_dataset(dataclasses.replace(config, cache_dir=path), tokenizer)


def load_here(world: World, path: str, directory: str) -> tuple[str, int]:
    """What a rank gets, and how often it built the data set."""
    built = []
    original = stored_data.build_dataset
    stored_data.build_dataset = lambda *given: built.append(1) or original(*given)  # type: ignore[func-returns-value]
    tokenizer = load_tokenizer(tasks.task() / "tokenizer")
    world.all.barrier("test")
    try:
        data = load_dataset(DataConfig(path=path, cache_dir=directory), tokenizer)
        return data.fingerprint, len(built)
    except DataError as error:
        return str(error), len(built)
    finally:
        stored_data.build_dataset = original


def test_one_rank_makes_the_file_and_all_tell_its_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(2000)))
    loads = run_ranks(3, load_here, path, str(tmp_path / "cache"))
    assert len({fingerprint for fingerprint, _ in loads}) == 1 and sum(built for _, built in loads) == 1
    bad = write(tmp_path / "b.jsonl", *({"prompt": str(i)} for i in range(2000)), {"prompt": ""})
    loads = run_ranks(3, load_here, bad, str(tmp_path / "cache"))
    assert {line for line, _ in loads} == {f"{bad}:2001: the prompt is empty"}


def test_one_that_waited_tells_what_the_maker_told(tmp_path: Path, tokenizer: Any) -> None:
    """Of an earlier job it does not."""
    config = DataConfig(path=write(tmp_path / "a.jsonl", {"prompt": ""}), cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:1: the prompt is empty"):
            load_dataset(config, tokenizer)
    (lock,) = (tmp_path / "cache").glob("*.lock")
    lock.write_text(f"{time.time() + 100}\nthe maker's line")
    with pytest.raises(DataError, match=r"^the maker's line$"):
        load_dataset(config, tokenizer)


def test_a_run_leaves_bad_rows_out_and_reads_the_file(tmp_path: Path) -> None:
    """The same numbers from the stored file on two ranks, with bad rows in between, as of the good rows alone on one rank."""
    lines = (tasks.task() / "train.jsonl").read_bytes().splitlines()
    path = write(tmp_path / "bad.jsonl", *lines[:3], b"{", *lines[3:], {"prompt": 1})
    config = tasks.other_task({"name": "dr_grpo", "ppo_mini_batch_size": 4}, "actor")
    more = [f"data.path={path}", "data.max_bad_rows=2", f"data.cache_dir={tmp_path / 'cache'}"]
    exact = "models.actor.dtype=float64"
    plain = tasks.train(1, tmp_path / "plain", 1, exact, config=config)
    stored = tasks.train(2, tmp_path / "stored", 1, exact, *more, config=config)
    assert "data/bad_rows" not in plain.metrics[0] and stored.metrics[0].pop("data/bad_rows") == 2
    assert tasks.worst_metric(plain, stored, floor=1e-2)[0] < 1e-8
    prepared = prepare(config, tasks.settings(tmp_path / "other", 2, *more), 2)
    described = run_banner(prepared, World(Launch(size=2), torch.device("cpu"), torch.distributed.HashStore(), 1.0))
    warning = r"2 rows cannot be used and are left out; the first: [^\n]*bad.jsonl:4: not valid"
    assert "2 bad ones left out" in described.splitlines()[0] and len(re.findall(warning, described)) == 1
