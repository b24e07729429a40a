"""YAML and dotted overrides into frozen dataclasses, strictly. Every mistake is one line that names key, value and remedy.

:func:`load` works in this order:

1. the YAML file, then the overrides, whose values stay text until the types of their keys are known (``plain_yaml``);
2. ``sections``: the dataclasses of sections whose schema depends on what was read, as that of ``algorithm`` does;
3. keys and types of all values that have no interpolation (``schema``);
4. OmegaConf's interpolations (``interpolation``), and the types of the interpolated values.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rlhf_spmd.config.constraints import idle_settings
from rlhf_spmd.config.foreign import foreign_hint
from rlhf_spmd.config.interpolation import FromEnvironment, as_yaml_text, interpolate, select
from rlhf_spmd.config.plain_yaml import parse, parse_value, to_plain
from rlhf_spmd.config.rules import as_setting, check_section
from rlhf_spmd.config.schema import ConfigError, is_inline, leaves, read_section, section_keys
from rlhf_spmd.config.words import dotted, first_line

T = TypeVar("T")
Merge = Callable[[Mapping[str, Any]], dict[str, Any]]
SHORT_SECTIONS = {"environment": "cls"}  # a text in place of the section is the value of this key


def load(
    schema: type[T],
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    sections: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw_values: {},
    revise: Callable[[dict[str, Any], Merge], dict[str, Any]] = lambda file, merge: merge(file),
) -> T:
    """Return a ``schema`` instance from a YAML file and overrides such as ``data.train_batch_size=64``.

    - path: the file, a mapping in its place, or None for overrides alone
    - sections: takes what was read, before interpolation. It returns the dataclasses of top-level keys that ``schema`` leaves open
      (``Any``), and None for a section that may exist and does not
    - revise: takes the file's values, and a function that returns values with the overrides. It returns the values to use

    Raises ConfigError, one line, for a file that cannot be read, an unknown key, a wrong type or a missing required key.
    """
    file = _read_source(path)
    try:
        raw_values = _merge_overrides(revise(file, partial(_merge_overrides, overrides=overrides)), ())
        section_types = sections(raw_values)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    open_fields = [(key, Any, None) for key in section_types if key not in typing.get_type_hints(schema)]
    if open_fields:
        schema = dataclasses.make_dataclass(schema.__name__, open_fields, bases=(schema,), frozen=True)
    type_overrides = {key: section for key, section in section_types.items() if section is not None}
    # a section that is not there or without content (``data:``) means the defaults, unless null is allowed there
    types = {**section_keys(schema), **type_overrides}
    raw_values |= {key: {} for key, kind in types.items() if dataclasses.is_dataclass(kind) and raw_values.get(key) is None}
    checked = to_dict(read_section(schema, raw_values, type_overrides, has_references=True))
    try:
        interpolated = interpolate(checked)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    return read_section(schema, interpolated, type_overrides)


def read_tree(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a file and overrides as they were written. Raises ConfigError, one line."""
    return _merge_overrides(_read_source(path), overrides)


def check_tree(config: Any, where: str = "") -> None:
    """Check every dataclass in ``config``, outermost first. ``where``: its dotted path, "" for the root.

    Raises ConfigError for a value out of its range or choices, for what a dataclass's own ``check(where)`` refuses, and for a setting
    that does nothing.
    """
    for path, section in sections_of(config, where):
        try:
            check_section(section, path)
        except ValueError as error:
            raise ConfigError(_masked(str(error), section)) from error
        # The boundary to the user's code: whatever the check of an algorithm of one's own raises.
        except (Exception, SystemExit) as error:
            kind = type(section)
            if kind.__module__.startswith("rlhf_spmd."):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{path}: the check of {kind.__module__}.{kind.__qualname__} raises {reason}") from error
        for key, value, default, condition in idle_settings(section, path):
            default_text = default if isinstance(default, str) else json.dumps(default)
            setting = f"{key}={_masked(as_setting(value), section)}"
            remedy = f"leave it out, or where a file has it give {key}={default_text}"
            raise ConfigError(f"{setting} does nothing without {condition}; {remedy}")


def _masked(text: str, section: Any) -> str:
    """Return ``text`` with references in place of the values that the section has from the environment."""
    secrets: list[FromEnvironment] = []

    def note_secret(value: str) -> str:
        if value and isinstance(value, FromEnvironment):
            secrets.append(value)
        return value

    to_dict(section, note_secret)
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, value.reference_text)
    return text


def sections_of(config: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dataclass in ``config`` with its dotted path, outermost first. ``where``: the path of ``config``."""
    if dataclasses.is_dataclass(config):
        yield where, config
    inline_fields = _inline_fields(config)
    for key, value in _members(config).items():
        yield from sections_of(value, where if key in inline_fields else dotted(where, key))


def to_dict(config: Any, map_text: Callable[[str], str] = lambda text: text) -> Any:
    """Return nested dicts, lists and scalars, which json can write. ``map_text`` is applied to every text."""
    if isinstance(config, list):
        return [to_dict(value, map_text) for value in config]
    if isinstance(config, Mapping) or dataclasses.is_dataclass(config):
        return {key: to_dict(value, map_text) for key, value in _keys(config).items()}
    return map_text(config) if isinstance(config, str) else config


def to_yaml(config: Any) -> str:
    """Return the configuration as YAML, which :func:`load` reads into an equal object.

    A value from the environment is written as its reference. Every other ``${`` is escaped, or it would be read as an interpolation.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config, as_yaml_text)))


def flatten_yaml(text: str) -> dict[str, str]:
    """Return the values of a YAML text as text, by dotted key; empty if it is no mapping."""
    try:
        return flatten(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # libyaml's, ten times as fast
    except (YAMLError, RecursionError):
        return {}


def flatten(tree: Any) -> dict[str, str]:
    """Return the values of nested dicts as text, by dotted key; empty for anything else."""
    values = leaves(tree, "") if isinstance(tree, dict) and tree else ()
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in values}


def _keys(node: Any) -> Mapping[Any, Any]:
    """Return the values of a section, or of a mapping, by key. Keys of inline pieces are keys of their section."""
    inline_fields = _inline_fields(node)
    values: dict[Any, Any] = {}
    for key, value in _members(node).items():
        values |= _keys(value) if key in inline_fields else {key: value}
    return values


def _inline_fields(node: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(node) if is_inline(f)} if dataclasses.is_dataclass(node) else set()


def _members(node: Any) -> Mapping[Any, Any]:
    """Return the values directly in a dataclass, a mapping or a list, by name, key or position; empty for anything else."""
    if dataclasses.is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    return node if isinstance(node, Mapping) else dict(enumerate(node)) if isinstance(node, list) else {}


def read_file(path: str | Path, what: str = "config file") -> dict[str, Any]:
    """Return the mapping in a YAML file, its values as they were written. ``what``: what messages call the file.

    Raises ConfigError naming the file, and the line where the YAML is broken.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{what} '{file}' {'is not a file' if file.exists() else 'does not exist'}")
    try:
        tree = parse(file.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{what} '{file}'{line} is not valid YAML: {error.problem or error.context}") from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"{what} '{file}' cannot be read: {first_line(error)}") from error
    if not isinstance(tree, dict | None):
        kind = "a list" if isinstance(tree, list) else "text"
        raise ConfigError(f"{what} '{file}' must hold a mapping (key: value), not {kind}")
    return tree or {}


def resolved_key(path: Path, key: str) -> Any:
    """Return the value of a dotted key of a run's ``config.yaml``, or None if it is absent.

    References are resolved in this process's environment. Raises ConfigError.
    """
    try:
        return select(read_file(path, "the run's configuration"), key)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the run's configuration '{path}': {key}: {first_line(error)}") from error


def _read_source(path: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a file, or of a mapping in its place. Raises ConfigError."""
    if isinstance(path, str | Path):
        return read_file(path)
    tree = OmegaConf.to_container(path) if OmegaConf.is_config(path) else path or {}
    try:
        return cast(dict[str, Any], to_plain(tree))
    except ValueError as error:
        raise ConfigError(f"the configuration cannot be read: {error}") from error


def _merge_overrides(file: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``file`` with the overrides. ``key=null`` removes a section; ``key={}`` leaves an empty one."""
    tree = cast(dict[str, Any], to_plain(file))
    tree |= {key: {SHORT_SECTIONS[key]: value} for key, value in tree.items() if _is_short(key, value)}
    for override in overrides:
        key, equals, value = override.partition("=")
        if key.startswith("-"):
            raise ConfigError(_not_an_option(override, overrides))
        if not equals and (override.endswith((".yaml", ".yml")) or Path(override).is_file()):
            raise ConfigError(f"'{override}' is a file; give it as --config {override}")
        path = re.sub(r"\[(\w+)\]", r".\1", key).split(".")  # a[b] is a.b
        if not equals or not all(path) or key != key.strip():
            raise ConfigError(f"override '{override}' is not of the form key.subkey=value")
        if not value:
            raise ConfigError(f"override '{override}' has no value; write {key}=null, or {key}='' for an empty text")
        try:
            plain = parse_value(value)
            _set_path(tree, [*path, SHORT_SECTIONS[key]] if _is_short(key, plain) else path, plain)
        except YAMLError as error:
            why = (error.problem if isinstance(error, MarkedYAMLError) else None) or first_line(error)
            hint = "; ${...} needs quotes in a list or a mapping" if "${" in value else ""
            if value.startswith(("{{", "{%")):
                hint = f"; a text that begins with {value[0]} needs quotes: '{key}=\"...\"'"
            raise ConfigError(f"override '{override}' cannot be read: {why}{hint}") from error
        except _Clash as clash:
            raise ConfigError(
                f"override '{override}': '{clash}' is a section and has no value of its own; set '{clash}.<key>=...'"
            ) from None
    return tree


def _is_short(key: str, value: Any) -> bool:
    """Return True if ``value`` is a text in place of the section ``key``."""
    return key in SHORT_SECTIONS and isinstance(value, str) and "${" not in value


class _Clash(Exception):
    """A dotted key is a section on one side and a value on the other; the message is the key."""


def _set_path(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at ``path``; null removes a section. Raises _Clash."""
    *outer, last = path
    section = tree
    for depth, name in enumerate(outer):
        inner = section.get(name)
        inner = {} if inner is None else _copy_of_reference(tree, inner)
        if not isinstance(inner, dict):
            raise _Clash(".".join(path[: depth + 1]))
        section[name] = inner
        section = inner
    if value is None and isinstance(section.get(last), dict):
        del section[last]
    else:
        _set_value(section, last, value, ".".join(path))


def _set_value(section: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set ``section[key]``. A mapping sets only the keys that it has; an empty one clears the section. Raises _Clash."""
    present = section.get(key)
    if not isinstance(present, dict) or value == {} or (isinstance(value, str) and "${" in value):
        section[key] = value
    elif isinstance(value, dict):
        for inner, child in value.items():
            _set_value(present, inner, child, f"{where}.{inner}")
    else:
        raise _Clash(where)


def _copy_of_reference(tree: Mapping[str, Any], value: Any) -> Any:
    """Return ``value``, or if it is a reference, a copy of the section of ``tree`` that it refers to, for overrides to change."""
    reference = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    if reference is None:
        return value
    section: Any = tree
    for name in reference[1].split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return to_plain(section)


def _not_an_option(option: str, overrides: Sequence[str]) -> str:
    """Return the message for ``option``, which does not exist and may be meant as a key."""
    name, _, value = option.lstrip("-").partition("=")
    value = value or next((word for word in overrides if not word.startswith("-") and "=" not in word), "...")
    hint = foreign_hint([name.replace("-", "_")], by_end=True)
    if hint:
        return f"there is no option {hint} (keys are given as key=value)"
    remedy = f"write {name}={value}" if "." in name else "--help lists options and keys"
    return f"there is no option '{option}', and keys are given as key=value: {remedy}"
