"""Rows from files, prompts to tokens, SFT pairs, the loader's cursor, and the quickstart's task."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sort_digits
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.batch import decode_json
from rlhf_spmd.data.cached_dataset import build_dataset, load_dataset
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, local_files, read_rows
from rlhf_spmd.data.loader import Loader, build_loader, validation_batches
from rlhf_spmd.data.prompts import DataConfig, PromptDataset
from rlhf_spmd.data.sft import SftConfig
from rlhf_spmd.data.tokenizer import NO_TURN, decode, load_tokenizer, turn_frame
from rlhf_spmd.rewards.config import RewardConfig

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    sort_digits.write_tokenizer(directory)
    return load_tokenizer(directory)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(tokenizer: Any, path: str, **options: Any) -> PromptDataset:
    config = DataConfig(path=path, **options)
    return config.encode_all(config.read(), tokenizer)


def ids_of(data: PromptDataset) -> list[Any]:
    return data.columns["prompt_ids"].rows()


def test_file_formats_agree(tmp_path: Path) -> None:
    rows = [
        {"prompt": "12>", "answer": "12", "extra": {"k": [1, 2.5, None]}},
        {"prompt": "3>", "answer": "3", "extra": {"k": []}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text("\n" + text)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.json").write_text(text)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as stream:
        stream.write(text)
    for name in ("b.json", "c.json", "a.jsonl"):  # a mark of the encoding, as some programs put there
        (tmp_path / f"marked_{name}").write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes().lstrip())
    for path in tmp_path.iterdir():
        assert [row.values for row in read_rows(str(path))] == rows, path.name
    assert len(read_rows(str(tmp_path / "[ac].json*"))) == 4
    assert len(read_rows(str(tmp_path / "a.jsonl"), limit=1)) == 1
    assert read_rows(str(tmp_path / "a.jsonl"))[0].where.endswith("a.jsonl:2")


def test_a_file_is_read_whatever_its_name_and_a_directory_not_taken_for_another(tmp_path: Path) -> None:
    """``datasets`` takes a directory's name for a pattern: of d[1] it would read d1."""
    for name in ("x[1].jsonl", "d[1]/a.jsonl", "d1/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": name}) + "\n")
    assert [row.values["prompt"] for row in read_rows(str(tmp_path / "x[1].jsonl"))] == ["x[1].jsonl"]
    assert local_files(str(tmp_path / "d[1]")) == [tmp_path / "d[1]" / "a.jsonl"]
    with pytest.raises(DataError, match="its name would be taken for a pattern; rename it, or give its files"):
        read_rows(str(tmp_path / "d[1]"))
    (tmp_path / "d1" / "b.jsonl").write_text('{"prompt": "12", "m": {"x": "z"}}\n')  # other columns
    with pytest.raises(DataError, match=r"; to read its files one after the other give \S*/\*\.jsonl, or one of them$"):
        read_rows(str(tmp_path / "d1"))
    assert len(read_rows(f"{tmp_path}/d1/*.jsonl")) == 2


def test_parquet_and_saved_dataset(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in (("1", "1"), ("2", None))]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [row.values for row in read_rows(str(tmp_path / "x.parquet"))] == rows
    (tmp_path / "y.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"y\.parquet' is not readable parquet"):
        read_rows(str(tmp_path / "y.parquet"))
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    assert [row.values for row in read_rows(str(tmp_path / "saved"))] == rows
    with pytest.raises(DataError, match="has no split 'test'; it has: train"):
        read_rows(str(tmp_path / "saved"), "test")


def test_what_arrow_adds_to_messages_goes_and_json_is_read(tmp_path: Path) -> None:
    """Nulls of other rows' keys go from messages, tools and variables; those of JSON and of other columns stay."""
    datasets, parquet, pyarrow = map(pytest.importorskip, ("datasets", "pyarrow.parquet", "pyarrow"))

    def said(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}

    given, shown = [{"city": "Ulm"}, {"x": [1, None], "y": None}], [{"city": "Ulm"}, {"x": [1, None]}]
    rows = [{"messages": [said(x)], "tools": [{"p": x}], "answer": x} for x in given]
    without = [{"messages": [said(x)], "tools": [{"p": x}], "answer": {"city": None, "y": None, **x}} for x in shown]
    without[0]["answer"]["x"] = None
    for options, wanted in (({}, without), ({"on_mixed_types": "use_json"}, rows)):
        table, saved = datasets.Dataset.from_list(rows, **options), tmp_path / f"saved{len(options)}"
        table.to_parquet(tmp_path / "rows.parquet")
        table.save_to_disk(saved)
        for path in (tmp_path / "rows.parquet", saved):
            assert [row.values for row in read_rows(str(path))] == wanted, (path, options)
    mixed = [{"answer": ["1", 2]}, {"answer": {"a": None}}]
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").to_parquet(tmp_path / "json.parquet")
    assert [row.values for row in read_rows(str(tmp_path / "json.parquet"))] == mixed
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[1]))
    assert read_rows(str(tmp_path / "a.jsonl"))[0].values == rows[1]
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["x", "x"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet' has two columns 'x'"):
        read_rows(str(tmp_path / "twice.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: must be a JSON object, not list"),
        ("a.jsonl", "\n", "holds no rows"),
        ("a.json", "[{},\n 3", r"a\.json:2: not valid JSON"),
        ("a.json", "[" * 100_000, r"a\.json: nested more than 100 levels deep"),
        ("a.jsonl", '{"prompt": ' + "[" * 500 + "]" * 500 + "}", r"a\.jsonl:1: nested more than 100 levels deep"),
        ("a.json", '[{"prompt": "1\\ud800"}]', r"a\.json, entry 1: not valid Unicode: the escape \\ud800 is half of a"),
        ("a.json", f'[{{"prompt": "1", "answer": {"9" * 5000}}}]', r"a\.json: Exceeds the limit \(4300 digits\)"),
        ("a.jsonl", f'{{"prompt": "1", "answer": {"9" * 5000}}}', r"a\.jsonl:1: Exceeds the limit \(4300 digits\)"),
        ("a.jsonl", '{"prompt": "1", "m": {"a": 1, "a": 2}}', r"a\.jsonl:1: an object has the key 'a' twice"),
        ("a.csv", "x", "suffix that is not known; allowed: .jsonl"),
        ("a.jsonl", None, r"a\.jsonl' is no regular file, and each rank reads it"),
        ("a.jsonl.gz", "plain text", "cannot be read: Not a gzipped file"),
        ("a.jsonl", '{"question": "1"}\n', r"a\.jsonl:1: no key 'prompt' \(data\.prompt_key=prompt\); this row has: question"),
        ("a.jsonl", '{"prompt": ""}\n', r"a\.jsonl:1: the prompt is empty"),
        ("a.jsonl", '{"prompt": 3}\n', r"a\.jsonl:1: a prompt must be text or a list of chat messages, not int"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', "content of message 0 must be text, not NoneType"),
        ("a.jsonl", '{"prompt_ids": [1, 99]}\n', "token id 99 in 'prompt_ids' must be less than the vocabulary size 16"),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": "1"}]}\n', r"needs a chat template, and tokenizer '.*' has none"),
    ],
)
def test_bad_data_is_one_line(tmp_path: Path, tokenizer: Any, name: str, text: str | None, message: str) -> None:
    (tmp_path / name).write_text(text) if text is not None else os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        prompts(tokenizer, str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_prompt_of_megabytes_is_not_tokenised_to_be_dropped(tmp_path: Path) -> None:
    """One of as many characters whose tokens are few is read in full, and stays."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    read: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, texts: Any, *arguments: Any, **options: Any) -> Any:
            read.append(sum(map(len, texts)))
            return super().__call__(texts, *arguments, **options)

    huge, wide = "one " * 100_000, "one" + " " * 100_000 + "two"
    path, counting = (
        write(tmp_path / "a.jsonl", *({"prompt": text} for text in ("one two", huge, wide))),
        Counting(tokenizer_object=words),
    )
    data = prompts(counting, path, max_prompt_length=4, filter_overlong_prompts=True)
    assert [ids.tolist() for ids in ids_of(data)] == [[1, 2], [1, 2]] and data.tally.num_overlong == 1
    assert sum(read) < 2 * len(wide) < len(huge)
    with pytest.raises(DataError, match=r"a\.jsonl:2: 100000 tokens are more than data\.max_prompt_length=4"):
        prompts(counting, path, max_prompt_length=4, filter_overlong_prompts=False)


@pytest.mark.parametrize("path", ["none.jsonl", "./none", "/no/such/directory", "data/none*.jsonl"])
def test_missing_files_are_not_looked_up_on_the_network(path: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|no file matches"):
        read_rows(path)


def test_keys_with_dots_reach_into_columns(tmp_path: Path, tokenizer: Any) -> None:
    """Rows as verl writes them, in jsonl and in parquet (nested structs)."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"input": {"text": f"{n}>"}, "reward_model": {"ground_truth": str(n), "style": "rule"}} for n in (1, 2)]
    files = [write(tmp_path / "a.jsonl", *rows), str(tmp_path / "a.parquet")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), files[1])
    for file in files:
        data = prompts(tokenizer, file, prompt_key="input.text", answer_key="reward_model.ground_truth")
        seen = decode_json(data.batch([1], [0])["row"])[0]
        assert (seen["prompt"], seen["answer"], seen["reward_model"]) == ("2>", "2", rows[1]["reward_model"])
        config = SftConfig(path=file, prompt_key="input.text", response_key="reward_model.ground_truth", append_eos=False)
        assert config.encode_all(config.read(), tokenizer).columns["response_ids"].rows()[1].tolist() == [6]
    path = write(tmp_path / "b.jsonl", {"a.b": "1>", "a": {"b": "2>"}})
    assert decode_json(prompts(tokenizer, path, prompt_key="a.b").batch([0], [0])["row"])[0]["prompt"] == "1>"


@pytest.mark.parametrize("key", ["answr", "reward_model.truth", "prompt.text"])
def test_an_answer_key_that_a_row_lacks_is_refused(tmp_path: Path, tokenizer: Any, key: str) -> None:
    rows = [{"prompt": "1>", key: "1"}, {"prompt": "2>", "reward_model": {"ground_truth": "2"}}]
    message = rf"a\.jsonl:2: no key '{key}' \(data\.answer_key={key}\); this row has: prompt, reward_model\.ground_truth$"
    with pytest.raises(DataError, match=message):
        prompts(tokenizer, write(tmp_path / "a.jsonl", *rows), answer_key=key)


def test_text_prompts(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "21>", "answer": "12", "level": 3}, {"prompt": "123456789>"}, {"prompt": "7>", "id": "x"}]
    path = write(tmp_path / "a.jsonl", *rows)
    data = prompts(tokenizer, path, max_prompt_length=5)
    assert (len(data), data.tally.num_overlong) == (2, 1)
    batch = data.batch([1, 0], [10, 11])
    assert [row.tolist() for row in batch["prompt_ids"].rows()] == [[1, 11, 14], [1, 6, 5, 14]]
    assert batch["prompt_ids"].values.dtype == torch.int64
    assert batch.row_ids.tolist() == batch.group_ids.tolist() == [10, 11]
    assert decode_json(batch["row"]) == [
        {"prompt": "7>", "answer": None, "data_source": None, "id": "x"},
        {"prompt": "21>", "answer": "12", "data_source": None, "id": 0, "level": 3},
    ]
    dropped = (
        r"data.max_prompt_length=5 drops 1 of 3 prompts \(33%\), which are longer; the first: .*:2: 11 tokens. Raise it, or cut"
    )
    assert re.match(dropped, *data.warnings()) and not prompts(tokenizer, path, max_prompt_length=11).warnings()
    with pytest.raises(DataError, match=r"a\.jsonl:2: 11 tokens are more than data\.max_prompt_length=5"):
        prompts(tokenizer, path, max_prompt_length=5, filter_overlong_prompts=False)
    for side, ids in (("left", [10, 11, 12, 13, 14]), ("right", [1, 5, 6, 7, 8])):
        data = prompts(tokenizer, path, max_prompt_length=5, filter_overlong_prompts=False, truncation=side)
        assert ids_of(data)[1].tolist() == ids and data.row(1)["prompt"] == "123456789>" and not data.warnings()
        assert data.summary().endswith(", 1 over-long ones cut")
    with pytest.raises(DataError, match=r"all 3 prompts are longer than data\.max_prompt_length=2"):
        prompts(tokenizer, path, max_prompt_length=2)


def test_chat_templates(tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "12"}]
    path = write(tmp_path / "a.jsonl", {"prompt": chat}, {"prompt": "34"})
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    for template in (TEMPLATE, str(tmp_path / "t.jinja")):
        data = prompts(tokenizer, path, chat_template=template)
        assert decode(tokenizer, ids_of(data), skip_special_tokens=False) == ["12 >", "<bos>34"]
    assert data.row(0)["prompt"] == "12 >"
    assert data.row(0)["messages"] == chat
    data = prompts(tokenizer, path, chat_template=TEMPLATE, apply_chat_template=True, system_prompt="0")
    assert decode(tokenizer, ids_of(data), skip_special_tokens=False) == ["0 12 >", "0 34 >"]
    assert data.row(1)["prompt"] == "34"
    for options, message in (
        ({"apply_chat_template": False}, "the prompt is chat messages, but data.apply_chat_template=false"),
        ({"chat_template": "{{ raise_exception('roles must alternate') }}"}, "refuses these messages: roles must alternate"),
        ({"chat_template": "nowhere.jinja"}, "chat_template='nowhere.jinja' is neither Jinja text"),
        ({"chat_template": TEMPLATE, "system_prompt": "0"}, "text prompt needs data.apply_chat_template=true"),
    ):
        with pytest.raises(DataError, match=message):
            prompts(tokenizer, path, **options)


def test_prompt_ids_need_no_tokenizer(tmp_path: Path) -> None:
    data = prompts(None, write(tmp_path / "a.jsonl", {"prompt_ids": [5, 700], "id": 4}))
    assert data.row(0)["prompt"] == ""
    assert data.columns["prompt_ids"].rows()[0].tolist() == [5, 700]
    assert data.row(0)["id"] == 4
    with pytest.raises(DataError, match="without a tokenizer a row must have 'prompt_ids'"):
        prompts(None, write(tmp_path / "b.jsonl", {"prompt": "5"}))


def test_prompt_ids_reach_rewards_as_text(tmp_path: Path, tokenizer: Any) -> None:
    """Without what the tokenizer begins texts with; a chat's special tokens stay."""
    rows = [{"prompt": "12>"}, {"prompt_ids": [1, 5, 6, 14]}, {"prompt_ids": [5, 1, 6]}]
    data = prompts(tokenizer, write(tmp_path / "a.jsonl", *rows))
    assert [data.row(i)["prompt"] for i in range(3)] == ["12>", "12>", "1<bos>2"] and data.row(1)["prompt_ids"] == [1, 5, 6, 14]
    assert ids_of(data)[0].tolist() == ids_of(data)[1].tolist()


def test_loader_order_and_resume(tmp_path: Path, tokenizer: Any) -> None:
    data = prompts(tokenizer, write(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(10))))

    def names(loader: Loader, steps: int) -> list[list[str]]:
        return [[row["prompt"] for row in decode_json(loader.next_batch()["row"])] for _ in range(steps)]

    loader = Loader(data, 4, seed=3)
    drawn = names(loader, 10)
    flat = [name for batch in drawn for name in batch]
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert drawn == names(Loader(data, 4, seed=3), 10)
    assert drawn != names(Loader(data, 4, seed=4), 10)
    for stop in range(10):
        first, second = Loader(data, 4, seed=3), Loader(data, 4, seed=9)
        names(first, stop)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert names(second, 10 - stop) == drawn[stop:]
        assert second.next_batch().row_ids.tolist() == [40, 41, 42, 43]
    assert names(Loader(data, 10, shuffle=False), 2) == [[str(i) for i in range(10)]] * 2
    assert loader.epochs == 4.0
    with pytest.raises(DataError, match="train_batch_size=11, but the data have only 10 usable rows"):
        Loader(data, 11)


def sources(tmp_path: Path, tokenizer: Any, sizes: dict[str, int], **more: Any) -> Any:
    """A loader over files of so many rows, ``<file><number>`` each."""
    made = {name: [{"prompt": str(i), "f": name, "hard": -i} for i in range(n)] for name, n in sizes.items()}
    paths = [write(tmp_path / f"{name}.jsonl", *rows) for name, rows in made.items()]
    weights = dict(zip(paths, more.pop("weights"), strict=True)) if "weights" in more else paths
    config = DataConfig(path=weights, train_batch_size=5, **more)
    return lambda: build_loader(config.encode_all(config.read(), tokenizer), config, 3)


def drawn(loader: Loader, steps: int) -> list[str]:
    return [row["f"] + row["prompt"] for _ in range(steps) for row in decode_json(loader.next_batch()["row"])]


def test_files_are_mixed_by_weight(tmp_path: Path, tokenizer: Any) -> None:
    """Shares, whole passes of each file, the same again, and the same after a resume anywhere."""
    build = sources(tmp_path, tokenizer, {"a": 30, "b": 10}, weights=(1.0, 3.0))
    names = drawn(build(), 32)  # 4 epochs of 40
    for epoch in range(4):
        part = names[40 * epoch : 40 * (epoch + 1)]
        assert sum(name[0] == "b" for name in part) == 30
    own = [name for name in names if name[0] == "b"]
    assert all(sorted(own[i : i + 10]) != own[i : i + 10] for i in range(0, 120, 10))
    assert {name: own[:30].count(name) for name in own} == {f"b{i}": 3 for i in range(10)}
    slow = [name for name in names if name[0] == "a"]
    assert len(slow) == 40 and len(set(slow)) == 30
    assert max(map(slow.count, slow)) == 2, "no row a third time before all came twice"
    assert names == drawn(build(), 32) and names != drawn(sources(tmp_path, tokenizer, {"a": 30, "b": 10})(), 32)
    for stop in (3, 8, 13):
        first, second = build(), build()
        drawn(first, stop)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert drawn(second, 4) == names[5 * stop : 5 * stop + 20]
    flat = drawn(sources(tmp_path, tokenizer, {"a": 30, "b": 10}, weights=(1.0, 1.0), shuffle=False)(), 2)
    assert flat == [f"{name}{i}" for i in range(5) for name in "ab"]
    with pytest.raises(DataError, match=r"b\.jsonl' has 10 usable rows and with its weight 0\.01 a share of 0\.40 rows"):
        sources(tmp_path, tokenizer, {"a": 30, "b": 10}, weights=(1.0, 0.01))()
    with pytest.raises(ValueError, match=r"data\.path: the weight of 'x' is -1\.0; it must be above 0"):
        check_section(DataConfig(path={"x": -1.0}), "data")


def test_a_curriculum_begins_with_the_smallest(tmp_path: Path, tokenizer: Any) -> None:
    names = drawn(sources(tmp_path, tokenizer, {"a": 10}, curriculum_key="hard")(), 4)
    assert names[:10] == [f"a{i}" for i in reversed(range(10))] and names[10:] != names[:10]
    assert sorted(names[10:]) == sorted(names[:10])
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'f' \(data\.curriculum_key\) must be a number, not 'a'"):
        sources(tmp_path, tokenizer, {"a": 3}, curriculum_key="f")()


def test_duplicates_by_id(tmp_path: Path, tokenizer: Any) -> None:
    def built(path: str, **options: Any) -> tuple[list[str], str]:
        data = build_dataset(DataConfig(path=path, **options), tokenizer)
        assert isinstance(data, PromptDataset)
        return [data.row(i)["prompt"] for i in range(len(data))], data.tally.describe()

    path = write(tmp_path / "a.jsonl", *({"prompt": str(i), "id": name} for i, name in enumerate([1, "1", 1, None, None])))
    with pytest.raises(DataError, match=r"a\.jsonl:3: the id 1 is also that of .*a\.jsonl:1; set data\.duplicates=drop"):
        built(path)
    assert built(path, duplicates="drop") == (["0", "1", "3", "4"], ", 1 duplicate left out")
    assert built(path, duplicates="keep") == (["0", "1", "2", "3", "4"], "")
    far = write(tmp_path / "b.jsonl", *({"prompt": str(i), "id": i % 300} for i in range(600)))
    assert built(far, duplicates="drop") == ([str(i) for i in range(300)], ", 300 duplicates left out"), "over chunks"


def test_verl_s_parquet_has_its_answer(tmp_path: Path, tokenizer: Any) -> None:
    """The columns that verl's preprocessing of GSM8K writes, nested as it writes them; the built-in reward reads them."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "7", "style": "rule"},
        "extra_info": {"answer": "It is #### 7", "index": 0, "question": "3 + 4?", "split": "train"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    options = {"chat_template": TEMPLATE, "cache_dir": str(tmp_path)}
    mapped = load_dataset(DataConfig(path=str(tmp_path / "train.parquet"), **options), tokenizer)
    (seen,) = mapped.examples()  # type: ignore[attr-defined]
    assert seen["answer"] == "7" and seen["messages"] == row["prompt"]
    assert {key: seen[key] for key in ("data_source", "ability", "extra_info")} == {
        key: row[key] for key in ("data_source", "ability", "extra_info")
    }
    RewardConfig(function="auto").check_rows("reward", [seen])


def test_loader_warns_of_changed_data(tmp_path: Path, tokenizer: Any) -> None:
    old = Loader(prompts(tokenizer, write(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(9)))), 4)
    old.next_batch(), old.next_batch()
    new = Loader(prompts(tokenizer, write(tmp_path / "b.jsonl", *({"prompt": str(i)} for i in range(5)))), 4)
    with pytest.warns(UserWarning, match="9 rows then, 5 now"):
        new.load_state_dict(old.state_dict())
    assert len(new.next_batch()) == 4
    assert new.epoch == 1


def test_validation_rows(tmp_path: Path, tokenizer: Any) -> None:
    """In batches, and so many of each set."""
    paths = {name: write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(5))) for name in "12"}
    config = DataConfig(path="-", val_path=paths["1"], val_max_samples=5)
    data = config.encode_all(config.read(validation=True), tokenizer)
    assert [batch.row_ids.tolist() for batch in validation_batches(data, 2)] == [[0, 1], [2, 3], [4]]
    assert [len(batch) for batch in validation_batches(data)] == [5]
    rows = DataConfig(path="-", val_path=paths, val_max_samples=2).read(validation=True)
    assert [row.values["prompt"] for row in rows] == ["10", "11", "20", "21"]
    assert [(row.number, row.source) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("side", "limit", "expected"),
    [
        ("right", 6, ([1, 6, 5, 14], [5, 6])),  # of [1, 6, 5, 14], [5, 6, 2]
        ("right", 4, None),
        ("left", 6, ([6, 5, 14], [5, 6, 2])),
        ("left", 4, ([14], [5, 6, 2])),
        ("left", 3, ([5], [6, 2])),
    ],
)
def test_long_rows_are_cut(tmp_path: Path, tokenizer: Any, side: Any, limit: int, expected: Any) -> None:
    rows = {"prompt": "21>", "response": "12"}, {"prompt": "3>", "response": ""}
    path = write(tmp_path / "a.jsonl", *rows)
    data = build_dataset(SftConfig(path=path, max_length=limit, filter_overlong=False, truncation=side), tokenizer)
    pairs = [tuple(data.columns[key].rows()[0].tolist() for key in ("prompt_ids", "response_ids"))]
    assert (len(data), pairs[0]) == ((2, expected) if expected else (1, ([1, 7, 14], [2])))
    assert bool(data.tally.num_cut) == bool(expected) and data.tally.left_out == (
        {} if expected else {"prompt leaves no room": 1}
    )


def test_sft_pairs(tmp_path: Path, tokenizer: Any) -> None:
    def pairs(path: str, **options: Any) -> list[tuple[list[int], list[int]]]:
        config = SftConfig(path=path, **options)
        batch = next(validation_batches(config.encode_all(config.read(), tokenizer)))
        keys = ("prompt_ids", "response_ids")
        prompt, response = ([row.tolist() for row in batch[key].rows()] for key in keys)
        return list(zip(prompt, response, strict=True))

    rows = [{"prompt": "21>", "response": "12", "t": "0"}, {"prompt": "3>", "response": "", "t": "123456"}]
    path = write(tmp_path / "a.jsonl", *rows)
    assert pairs(path) == [([1, 6, 5, 14], [5, 6, 2]), ([1, 7, 14], [2])]
    assert pairs(path, text_key="t", max_length=4) == [([1], [4, 2])]
    with pytest.raises(DataError, match=r"a\.jsonl:2: the response has no tokens"):
        pairs(path, append_eos=False)
    with pytest.raises(DataError, match=r"a\.jsonl:2: 8 tokens are more than data\.max_length=4"):
        pairs(path, text_key="t", max_length=4, filter_overlong=False)
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "b.jsonl", {"messages": chat})
    template = "{% for m in messages %}{{ '>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    template += "{{ '>' if add_generation_prompt }}"
    assert pairs(path, prompt_key="messages", chat_template=template) == [([5, 14], [6, 2])]
    with pytest.raises(DataError, match="no key 'response'"):
        pairs(write(tmp_path / "c.jsonl", {"prompt": chat[:1]}), chat_template=TEMPLATE)
    ids = write(tmp_path / "d.jsonl", {"prompt_ids": [1, 4], "response_ids": [5]})
    assert pairs(ids) == [([1, 4], [5])]
    mixed = {"prompt_ids": [1, 4], "response_ids": [5], "prompt": "1", "response": "2"}
    assert pairs(write(tmp_path / "f.jsonl", {"prompt": "1", "response": "2"}, mixed)) == [([1, 5], [6, 2]), ([1, 4], [5])]
    with pytest.raises(DataError, match="non-empty list of token ids"):
        pairs(write(tmp_path / "e.jsonl", {"prompt_ids": [1, 4], "response_ids": []}))


def test_config_checks() -> None:
    for config, message in (
        (DataConfig(), r"data\.path must be given"),
        (DataConfig(path="x", apply_chat_template="yes"), r"data\.apply_chat_template='yes' must be"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            check_section(config, "data")


def test_tokenizer_errors(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no tokenizer; looked for tokenizer\.json"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, required=False) is None
    deep = '{"a": ' * 900 + "1" + "}" * 900
    for file, text in (("tokenizer.json", "{}"), ("config.json", deep), ("tokenizer_config.json", deep)):
        tokenizer.save_pretrained(tmp_path / file)
        (tmp_path / file / file).write_text(text)
        with pytest.raises(DataError, match=r"^the tokenizer in '[^\n]*' cannot be loaded: [^\n]*$"):
            load_tokenizer(tmp_path / file)


def test_sort_digits_task(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sort_digits.main(["--out", str(tmp_path / name), "--seed", "5", "--sft", "50", "--train", "30", "--val", "20"])
    files = ("sft.jsonl", "train.jsonl", "val.jsonl", "model/config.json", "model/tokenizer.json")
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    rows = [row.values for f in files[:3] for row in read_rows(str(tmp_path / "a" / f))]
    assert len({row["prompt"] for row in rows}) == 100
    assert all("".join(sorted(row["prompt"][:-1])) == row["answer"] for row in rows)
    assert {len(row["answer"]) for row in rows} <= set(range(4, 15))
    tokenizer = load_tokenizer(tmp_path / "a" / "model")
    ids = tokenizer(rows[0]["prompt"])["input_ids"]
    assert (ids[0], len(ids)) == (tokenizer.bos_token_id, len(rows[0]["prompt"]) + 1)
    assert decode(tokenizer, [[*ids, tokenizer.eos_token_id]]) == [rows[0]["prompt"]]
    config = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_chat_template_may_do_is_one_line(tokenizer: Any, template: str, reason: str) -> None:
    encoder = PromptEncoder(tokenizer, EncodingConfig(chat_template=template))
    with pytest.raises(DataError, match=rf"^the chat template refuses these messages: [^\n]*{reason}[^\n]*$"):
        encoder.apply_template([{"role": "user", "content": "x"}])
    assert turn_frame(tokenizer, template) == NO_TURN
