"""YAML and dotted overrides into frozen dataclasses, strictly; every mistake is one line that names key, value and remedy.

The order is: YAML file, then overrides, then ``sections`` (a section whose schema depends on what was read, as
``algorithm`` does), then keys and types, then OmegaConf's interpolations, then the types of what they gave.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rlhf_spmd.config.bounds import idle_settings
from rlhf_spmd.config.foreign import foreign_hint
from rlhf_spmd.config.schema import ConfigError, Reader, first_line, leaves

T = TypeVar("T")


def load(
    schema: type[T],
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    sections: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: {},
    revise: Callable[[dict[str, Any], Mapping[str, Any]], tuple[dict[str, Any], bool]] = lambda file, whole: (file, True),
) -> T:
    """A ``schema`` instance from a YAML file (or what one would say, or nothing) and overrides such as ``data.train_batch_size=64``.

    ``sections`` takes what was read, before interpolation, and returns for top-level keys, which ``schema`` may have as ``Any``, the
    dataclass that describes them, so that the result's ``.algorithm`` is an instance of it; None: there may be such a section, and
    there is none.
    ``revise`` takes what the file says and what it says with the overrides, and returns what goes in the file's place, and whether the
    overrides go over that.
    Raises ConfigError, one line, for a file that cannot be read, an unknown key, a wrong type or a missing required key.
    """
    file = cast(dict[str, Any], OmegaConf.to_container(_read_file(path)))
    plain = _merge_overrides(file, overrides)
    try:
        revised, goes_over = revise(file, plain)
        if revised is not file or not goes_over:
            plain = _merge_overrides(revised, overrides if goes_over else ())
        replaced = sections(plain)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    more = [(key, Any, None) for key in replaced if key not in typing.get_type_hints(schema)]
    if more:
        schema = dataclasses.make_dataclass(schema.__name__, more, bases=(schema,), frozen=True)
    types = {key: section for key, section in replaced.items() if section is not None}
    # a section that is not there or without content (``data:``) means the defaults, unless null is allowed there
    kinds = {**typing.get_type_hints(schema), **types}
    plain |= {key: {} for key, kind in kinds.items() if dataclasses.is_dataclass(kind) and plain.get(key) is None}
    resolved = to_dict(Reader(schema, types, plain, interpolated=True).read())
    try:
        if "${" in str(resolved):  # OmegaConf's containers cost more than all the rest
            resolved = OmegaConf.to_container(OmegaConf.create(resolved), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    return cast(T, Reader(schema, types, resolved, interpolated=False).read())


def check_tree(config: Any, where: str = "") -> None:
    """Call ``check(where)`` of every dataclass in ``config``, outermost first; ``where`` is its dotted path ("" for the root).

    A ``check`` raises ValueError; it comes out as ConfigError with the same text. So does a setting that does nothing.
    """
    for path, section in sections_of(config, where):
        try:
            if hasattr(section, "check"):
                section.check(path)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        # The boundary to the user's code: whatever the check of an algorithm of one's own raises.
        except (Exception, SystemExit) as error:
            kind, reason = type(section), f"{type(error).__name__}: {first_line(error)}"
            if kind.__module__.startswith("rlhf_spmd."):
                raise
            raise ConfigError(f"{path}: the check of {kind.__module__}.{kind.__qualname__} raises {reason}") from error
        for key, value, default, needed in idle_settings(section, path):
            plain = default if isinstance(default, str) else json.dumps(default)
            raise ConfigError(
                f"{key}={value} does nothing without {needed}; leave it out, or where a file has it give {key}={plain}"
            )


def sections_of(config: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass in ``config`` with its dotted path, outermost first; ``where``: that of ``config``."""
    if dataclasses.is_dataclass(config):
        yield where, config
    for key, value in _children(config).items():
        yield from sections_of(value, f"{where}.{key}" if where else str(key))


def to_dict(config: Any, text: Callable[[str], str] = str) -> Any:
    """Nested dicts, lists and scalars, which json and yaml can write; ``text`` is applied to every text."""
    if isinstance(config, list):
        return [to_dict(value, text) for value in config]
    if isinstance(config, Mapping) or dataclasses.is_dataclass(config):
        return {key: to_dict(value, text) for key, value in _children(config).items()}
    return text(config) if isinstance(config, str) else config


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML; :func:`load` makes an equal object of it.

    ``${`` in a resolved value is text; written plainly it would be read back as an interpolation.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config, lambda text: text.replace("${", "\\${"))))


def flatten_yaml(text: str) -> dict[str, str]:
    """The values of a YAML text as text, by dotted key; empty where it is no mapping."""
    try:
        tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml's, ten times as fast
    except YAMLError:
        return {}
    found = leaves(tree, "") if isinstance(tree, dict) and tree else ()
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in found}


def _children(node: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    return node if isinstance(node, Mapping) else dict(enumerate(node)) if isinstance(node, list) else {}


def _read_file(path: str | Path | Mapping[str, Any] | None) -> DictConfig:
    """Raises ConfigError naming the file, and the line where the YAML is broken."""
    if path is None or isinstance(path, Mapping):
        try:
            return OmegaConf.create(dict(path or {}))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config file '{file}' {'is not a file' if file.exists() else 'does not exist'}")
    try:
        raw = OmegaConf.load(file)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"config file '{file}'{line} is not valid YAML: {error.problem or error.context}") from error
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"config file '{file}' cannot be read: {first_line(error)}") from error
    if not OmegaConf.is_dict(raw):
        raise ConfigError(f"config file '{file}' must hold a mapping (key: value), not a list")
    return cast(DictConfig, raw)


def _merge_overrides(file: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``key=null`` takes a section out, as if the file did not have it."""
    raw = OmegaConf.create(dict(file))
    for override in overrides:
        key, equals, value = override.partition("=")
        if key.startswith("-"):
            raise ConfigError(_not_an_option(override, overrides))
        if not equals and (override.endswith((".yaml", ".yml")) or Path(override).is_file()):
            raise ConfigError(f"'{override}' is a file; give it as --config {override}")
        if not equals or not key.strip() or key != key.strip():
            raise ConfigError(f"override '{override}' is not of the form key.subkey=value")
        if not value:
            raise ConfigError(f"override '{override}' has no value; write {key}=null, or {key}='' for an empty text")
        try:
            given = OmegaConf.from_dotlist([override])
            before = OmegaConf.to_container(raw)
            clash = _clash(before, OmegaConf.to_container(given), "")
            if value == "null" and _drop_section(before, key.split(".")):
                raw = OmegaConf.create(cast(dict[str, Any], before))
                continue
            raw = cast(DictConfig, OmegaConf.unsafe_merge(raw, given))
        except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"override '{override}' cannot be read: {first_line(error)}") from error
        if clash and not (clash == key and value.startswith("{")):  # a mapping may take the place of a text: of data.path
            raise ConfigError(
                f"override '{override}': '{clash}' is a section and has no value of its own; set '{clash}.<key>=...'"
            )
    return cast(dict[str, Any], OmegaConf.to_container(raw))


def _drop_section(tree: Any, path: Sequence[str]) -> bool:
    """Whether there was a section there. On plain values: interpolations in the tree may need overrides that are still to come."""
    *outer, last = path
    for name in outer:
        tree = tree.get(name) if isinstance(tree, dict) else None
    found = isinstance(tree, dict) and isinstance(tree.get(last), dict)
    if found:
        del tree[last]
    return found


def _not_an_option(given: str, overrides: Sequence[str]) -> str:
    """What is said of ``given``, an option that there is not, and may be a key."""
    name, _, value = given.lstrip("-").partition("=")
    value = value or next((one for one in overrides if not one.startswith("-") and "=" not in one), "...")
    theirs = foreign_hint([name.replace("-", "_")], by_end=True)
    if theirs:
        return f"there is no option {theirs} (keys are given as key=value)"
    known = f"write {name}={value}" if "." in name else "--help lists options and keys"
    return f"there is no option '{given}', and keys are given as key=value: {known}"


def _clash(before: Any, after: Any, where: str) -> str:
    """The dotted key that is a section on one side and a value on the other; "" without one."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        values = [value for value in (before, after) if not isinstance(value, dict)]
        return where if len(values) == 1 and values[0] is not None and "${" not in str(values[0]) else ""
    shared = ((before[key], after[key], f"{where}.{key}" if where else str(key)) for key in after if key in before)
    return next(filter(None, (_clash(*pair) for pair in shared)), "")
