"""A key of text gets what was written, one of numbers what is meant; broken and hostile YAML and JSON is one line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_spmd.config.json_input import MAX_LEVELS, parse_json
from rlhf_spmd.config.load import load, to_yaml
from rlhf_spmd.config.plain_yaml import parse, resolve
from rlhf_spmd.config.schema import PART_OF, ConfigError


@dataclass(frozen=True)
class Sampling:
    stop: list[str] = field(default_factory=list)
    n: int = 1


@dataclass(frozen=True)
class Keys:
    text: str = ""
    maybe: str | None = None
    texts: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    number: int = 0
    real: float = 0.0
    switch: bool = False
    chat: bool | str = "auto"
    keep: str | int = "all"
    ids: dict[int, float] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict, metadata={PART_OF: Sampling})
    path: str | list[str] | dict[str, float] = ""


WRITTEN = "No on yes off true False 007 010 1.10 12:30 1_000 0x10 2026-11-26 1e-5 .5 .inf +1 nan auto a:b =".split()  # noqa: SIM905


def both(key: str, value: str, folder: Path) -> list[Keys]:
    """From an override and from a file."""
    file = folder / "keys.yaml"
    inner = value
    for name in reversed(key.split(".")):
        inner = f"{{{name}: {inner}}}"
    file.write_text(inner)
    return [load(Keys, None, [f"{key}={value}"]), load(Keys, file)]


@pytest.mark.parametrize("text", WRITTEN)
def test_text_is_what_was_written(text: str, tmp_path: Path) -> None:
    for key, value, result in (
        ("text", text, text),
        ("maybe", text, text),
        ("texts", f"[{text}, '{text}']", [text, text]),
        ("tags", f"{{{text}: {text}}}", {text: text}),
        ("own.stop", f"[{text}]", {"stop": [text]}),
    ):
        for config in both(key, value, tmp_path):
            assert getattr(config, key.partition(".")[0]) == result


@pytest.mark.parametrize(
    "text", [*WRITTEN, "null", "~", "", "# c", "a # b", "- a", "a: b", "*x", "&x", "'", '"', " a ", "é\n", "${x}"]
)
def test_what_is_written_out_is_read_back(text: str, tmp_path: Path) -> None:
    config = Keys(text, text, [text], {text: text}, args={"a": [text, 1, 1.5, True, None]}, own={"stop": [text]}, path=[text])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(Keys, file) == config
    assert yaml.safe_load(to_yaml(Keys(args={"a": text.replace("$", "")})))["args"] == {"a": text.replace("$", "")}, "YAML 1.1"


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("number", "0x10", ConfigError("number='0x10' must be an integer")),
        ("number", "12:30", ConfigError("number='12:30' must be an integer")),
        ("real", "0x10", ConfigError("real='0x10' must be a number")),
        ("real", "2026-11-26", ConfigError("real='2026-11-26' must be a number")),
        ("texts", "[null]", ConfigError("texts[0]=null must be text")),
        ("own", "{stp: 1}", ConfigError("unknown key 'own.stp'; did you mean 'own.stop'? allowed here: n, stop")),
        ("own", "{n: x}", ConfigError("own.n='x' must be an integer")),
        ("number", "010", 10),
        ("number", "1_000", 1000),
        ("real", "1e-5", 1e-5),
        ("real", ".inf", float("inf")),
        ("switch", "on", True),
        ("switch", "No", False),
        ("chat", "on", True),
        ("chat", "auto", "auto"),
        ("chat", "'on'", "on"),
        ("keep", "4", 4),
        ("keep", "best", "best"),
        ("maybe", "null", None),
        ("maybe", "'null'", "null"),
        ("ids", "{010: 1}", {10: 1.0}),
        ("ids.7", "2", {7: 2.0}),
        ("path", "007", "007"),
        ("path", "{on: 1}", {"on": 1.0}),
        ("args", "{a: 1, b: 1e-5, c: true, d: null, e: No, f: 007, g: [12:30], h: '1'}",
         {"a": 1, "b": 1e-5, "c": True, "d": None, "e": "No", "f": "007", "g": ["12:30"], "h": "1"}),
    ],
)  # fmt: skip
def test_values_are_what_the_type_of_their_key_makes_of_them(key: str, value: str, result: object, tmp_path: Path) -> None:
    if isinstance(result, ConfigError):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(result))}$"):
            both(key, value, tmp_path)
        return
    for config in both(key, value, tmp_path):
        read_value = getattr(config, key.partition(".")[0])
        assert read_value == result and type(read_value) is type(result)


def test_values_from_python_are_their_types() -> None:
    values: dict[str, Any] = {"texts": ["007"], "number": 3, "args": {"a": "1"}, "keep": "1"}
    assert load(Keys, values) == Keys(**values)
    with pytest.raises(ConfigError, match=r"^number=True must be an integer$"):
        load(Keys, {"number": True})


def test_an_override_that_is_no_list_mapping_or_quoted_text_has_no_signs() -> None:
    for value in ("a # b", "#1", "- a", "a: b", "*.jsonl", "@x", "%y", "!z", "a, b", "x]"):
        assert load(Keys, None, [f"text={value}"]).text == value


@pytest.mark.parametrize(
    ("override", "args"),
    [
        ("args={}", {}),
        ("args=null", {}),
        ("args={b: 2}", {"a": {"x": 1}, "b": 2}),
        ("args.a={}", {"a": {}}),
        ("args.a.y=3", {"a": {"x": 1, "y": 3}}),
    ],
)
def test_an_empty_mapping_clears_what_the_file_has(override: str, args: dict[str, Any]) -> None:
    assert load(Keys, {"args": {"a": {"x": 1}}, "texts": ["a"]}, [override, "texts=[]"]) == Keys(args=args)


def test_a_key_below_an_interpolated_section_changes_a_copy() -> None:
    tree = {"args": {"a": {"x": 1}, "b": "${args.a}"}}
    assert load(Keys, tree, ["args.b.x=2"]).args == {"a": {"x": 1}, "b": {"x": 2}}


def test_yaml_s_merge_keys_and_tags() -> None:
    tree = resolve(parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: !!str 5\nd: !!int 5"))
    assert tree == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": "5", "d": 5}


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "cannot be read: more than 100000 values, its aliases followed"),
        ("[" * 5000, "cannot be read: it is nested deeper than 64 levels"),
        ("args: " + "[" * 70 + "]" * 70, "cannot be read: it is nested deeper than 64 levels"),
        ("args: &a {b: *a}", "cannot be read: it is nested deeper than 64 levels"),
        ("args: 1\ntexts: [1\nkeep: 2\n", ":3 is not valid YAML"),
        ("\tx", "is not valid YAML"),
        ("- 1\n", "must hold a mapping (key: value), not a list"),
        ("text: a\ntext: b", ":2 is not valid YAML: found duplicate key text"),
        ("args:\n  x: !!python/name:os.system", ":2 is not valid YAML: there is no tag:yaml.org,2002:python/name:os.system here"),
        ("[a]: b", ":1 is not valid YAML: a key must be text"),
        ("a\n", "must hold a mapping (key: value), not text"),
        ("text: a\x00", "cannot be read: unacceptable character #x0000: special characters are not allowed"),
        ("\xff\xfe", "cannot be read: "),
    ],
)  # fmt: skip
def test_hostile_files_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"\Aconfig file '{file}'[^\n]*{re.escape(message)}[^\n]*\Z"):
        load(Keys, file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml' does not exist"):
        load(Keys, tmp_path / "none.yaml")


def test_hostile_overrides_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: it is nested deeper than 64 levels$"):
        load(Keys, None, [f"args={'[' * 5000}"])
    tree: dict[str, Any] = {}
    tree["args"] = tree
    with pytest.raises(ConfigError, match="nested deeper"):
        load(Keys, tree)


# -- JSON: any depth gives a value or one line, wherever the limit of recursion lies


@pytest.mark.parametrize("kind", [str, str.encode])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}"), ('[{"a": 1}, ', "]")])
@pytest.mark.parametrize("levels", [MAX_LEVELS - 1, MAX_LEVELS + 1, 900, 100_000])
def test_depth(kind: type, opening: str, closing: str, levels: int) -> None:
    text = kind(opening * levels + "1" + closing * levels)
    if levels < MAX_LEVELS:
        assert parse_json(text) == json.loads(text)
        return
    with pytest.raises(ValueError, match=r"^nested more than 100 levels deep$"):
        parse_json(text)


def test_what_is_wide_is_not_deep() -> None:
    assert parse_json("[" + "[[1]]," * 1000 + "{}]") == [*([[[1]]] * 1000), {}]
