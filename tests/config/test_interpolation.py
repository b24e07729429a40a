"""What came from the environment is written as its reference, and read back from it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.config.interpolation import FromEnvironment, comparable_text
from rlhf_spmd.config.load import check_tree, flatten, load, resolved_key, to_dict, to_yaml
from rlhf_spmd.config.schema import ConfigError

SECRET = "sk-1234567890"


@dataclasses.dataclass(frozen=True)
class Judge:
    key: str = ""
    url: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0

    def check(self, where: str) -> None:
        if self.key == "Bearer " + SECRET:
            raise ValueError(f"{where}.key={self.key}: no")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", SECRET)
    monkeypatch.setenv("TEST_NUMBER", "12")
    monkeypatch.delenv("TEST_NONE", raising=False)


@pytest.mark.parametrize(
    ("text", "value", "reference"),
    [
        ("${oc.env:TEST_KEY}", SECRET, "${oc.env:TEST_KEY}"),
        ("Bearer ${oc.env:TEST_KEY}!", f"Bearer {SECRET}!", "Bearer ${oc.env:TEST_KEY}!"),
        ("${ oc.env:TEST_KEY }", SECRET, "${oc.env:TEST_KEY}"),
        ("${oc.env:TEST_NONE,x}", "x", "${oc.env:TEST_NONE,x}"),
        ("${oc.env:TEST_NONE,'a/b c'}", "a/b c", "${oc.env:TEST_NONE,'a/b c'}"),
        ("${oc.env:TEST_NONE,${oc.env:TEST_KEY}}", SECRET, "${oc.env:TEST_NONE,${oc.env:TEST_KEY}}"),
        ("${oc.env:TEST_NONE,'007'}", "007", "${oc.env:TEST_NONE,'007'}"),
        ("${oc.env:TEST_NONE,5}", "5", "${oc.env:TEST_NONE,5}"),
        ("${url}", "none", "none"),
        (r"\${oc.env:TEST_KEY}", "${oc.env:TEST_KEY}", r"\${oc.env:TEST_KEY}"),
    ],
)
def test_the_reference_is_written(text: str, value: str, reference: str, tmp_path: Path) -> None:
    """Of the key itself, of one that stands for it, and of a section that does."""
    args = {"a": {"b": ["${key}"]}, "c": "${args.a}"}
    config = load(Judge, {"key": text, "url": "none", "headers": {"a": "${key}"}, "args": args})
    assert (config.key, config.headers["a"], config.args["c"]["b"]) == (value, value, [value])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert SECRET not in file.read_text()
    assert reference in file.read_text().replace("''", "'")
    again = load(Judge, file)
    assert again == config and to_yaml(again) == to_yaml(config)
    assert resolved_key(file, "headers.a") == value


def test_what_is_copied_and_changed_keeps_its_reference() -> None:
    config = load(Judge, None, ["key=${oc.env:TEST_KEY}", "number=${oc.env:TEST_NUMBER}"])
    for other in (copy.deepcopy(config), dataclasses.replace(config, url="x")):
        assert "key: ${oc.env:TEST_KEY}" in to_yaml(other)
    assert Judge(**dataclasses.asdict(config)) == config and type(dataclasses.asdict(config)["key"]) is FromEnvironment
    assert config.number == 12 and "number: 12" in to_yaml(config), "a number is no secret"


def test_refusals_do_not_say_the_value() -> None:
    with pytest.raises(ConfigError, match=r"^number='\$\{oc\.env:TEST_KEY\}' must be an integer$"):
        load(Judge, None, ["number=${oc.env:TEST_KEY}"])
    with pytest.raises(ConfigError, match=r"^judge\.key=Bearer \$\{oc\.env:TEST_KEY\}: no$"):
        check_tree(load(Judge, None, ["key=Bearer ${oc.env:TEST_KEY}"]), "judge")
    with pytest.raises(ConfigError, match=r"^headers\.b: \$\{oc\.env:\.\.\.\} may stand for a value or for a part of one"):
        load(Judge, {"headers": {SECRET: "a", "b": "${headers.${oc.env:TEST_KEY}}"}})
    with pytest.raises(ConfigError, match=r"^key: .*Environment variable 'TEST_NONE' not found"):
        load(Judge, None, ["key=${oc.env:TEST_NONE}"])


def test_ranks_compare_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reference may stand for other values on other hosts."""
    here = flatten(to_dict(load(Judge, None, ["key=${oc.env:TEST_KEY}"]), comparable_text))["key"]
    monkeypatch.setenv("TEST_KEY", "other")
    there = flatten(to_dict(load(Judge, None, ["key=${oc.env:TEST_KEY}"]), comparable_text))["key"]
    assert here != there and SECRET not in here and "${oc.env:TEST_KEY}" in here
