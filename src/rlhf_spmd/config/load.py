"""YAML and dotted overrides into frozen dataclasses, strictly; every mistake is one line that names key, value and remedy.

The order is: YAML file, then overrides, then ``sections`` (a section whose schema depends on what was read, as
``algorithm`` does), then an own walk for unknown keys, then OmegaConf's typed merge for values and interpolations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError

from rlhf_spmd.config.schema import ConfigError, check_keys, describe, fields_of, first_line, locate, type_at

T = TypeVar("T")


def load(
    schema: type[T],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    sections: Callable[[Mapping[str, Any]], Mapping[str, type | None]] = lambda raw: {},
) -> T:
    """A ``schema`` instance from a YAML file (or none) and overrides such as ``data.train_batch_size=64``.

    ``sections`` takes what was read, before interpolation, and returns for top-level keys, which ``schema`` may have as ``Any``, the
    dataclass that describes them, so that the result's ``.algorithm`` is an instance of it; None: there may be such a section, and
    there is none.
    Raises ConfigError, one line, for a file that cannot be read, an unknown key, a wrong type or a missing required key.
    """
    raw = _merge_overrides(_read_file(path), overrides)
    plain = cast(dict[str, Any], OmegaConf.to_container(raw, resolve=False))
    try:
        replaced = sections(plain)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    more = [(key, Any, None) for key in replaced if key not in fields_of(schema)]
    schema = dataclasses.make_dataclass(schema.__name__, more, bases=(schema,), frozen=True)
    typed = {key: section for key, section in replaced.items() if section is not None}
    allowed = {**fields_of(schema), **typed}
    check_keys(allowed, plain)
    for key, value in plain.items():
        if value is None and dataclasses.is_dataclass(allowed[key]):
            del raw[key]  # a section without content (``data:``) means the defaults, unless null is allowed there
    return cast(T, _typed(schema, typed, allowed, raw, plain))


def check_tree(config: Any, where: str = "") -> None:
    """Call ``check(where)`` of every dataclass in ``config``, outermost first; ``where`` is its dotted path ("" for the root).

    A ``check`` raises ValueError; it comes out as ConfigError with the same text.
    """
    for dotted, node in _dataclasses(config, where):
        check = getattr(node, "check", None)
        if check is None:
            continue
        try:
            check(dotted)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def to_dict(config: Any) -> Any:
    """Nested dicts, lists and scalars (enum members by name, paths as text): what json and yaml can write."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(value) for value in config]
    if isinstance(config, Enum):
        return config.name
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML; :func:`load` makes an equal object of it."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_dict(config))))


def _escaped(value: Any) -> Any:
    """``${`` in a resolved value is text; written plainly it would be read back as an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _dataclasses(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield where, node
        entries: Any = ((f.name, getattr(node, f.name)) for f in dataclasses.fields(node))
    elif isinstance(node, Mapping):
        entries = node.items()
    elif isinstance(node, (list, tuple)):
        entries = enumerate(node)
    else:
        return
    for key, value in entries:
        yield from _dataclasses(value, f"{where}.{key}" if where else str(key))


def _read_file(path: str | Path | None) -> DictConfig:
    """Raises ConfigError naming the file, and the line where the YAML is broken."""
    if path is None:
        return OmegaConf.create({})
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


def _merge_overrides(raw: DictConfig, overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip() or key != key.strip():
            raise ConfigError(f"override '{override}' is not of the form key.subkey=value")
        try:
            given = OmegaConf.from_dotlist([override])
            clash = _clash(OmegaConf.to_container(raw), OmegaConf.to_container(given), "")
            raw = cast(DictConfig, OmegaConf.merge(raw, given))
        except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"override '{override}' cannot be read: {first_line(error)}") from error
        if clash:
            raise ConfigError(
                f"override '{override}': '{clash}' is a section and has no value of its own; set '{clash}.<key>=...'"
            )
    return raw


def _clash(before: Any, after: Any, where: str) -> str:
    """The dotted key that is a section on one side and a value on the other; "" without one."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        values = [value for value in (before, after) if not isinstance(value, dict)]
        return where if len(values) == 1 and values[0] is not None and "${" not in str(values[0]) else ""
    shared = ((before[key], after[key], f"{where}.{key}" if where else str(key)) for key in after if key in before)
    return next(filter(None, (_clash(*pair) for pair in shared)), "")


def _typed(
    schema: type, replaced: Mapping[str, type], allowed: Mapping[str, Any], raw: DictConfig, plain: Mapping[str, Any]
) -> Any:
    """OmegaConf's structured merge. Frozen dataclasses come as read-only nodes; the merge writes into our own copy."""
    try:
        target = OmegaConf.structured(schema)
        with flag_override(target, "readonly", False):
            for name, section in replaced.items():
                target[name] = OmegaConf.structured(section)
        merged = OmegaConf.merge(target, raw)
        missing = {key: type_at(allowed, {}, key)[0] for key in sorted(OmegaConf.missing_keys(merged))}
        if missing:
            names = [f"'{key}'" + (f" ({describe(kind)})" if kind is not None else "") for key, kind in missing.items()]
            raise ConfigError(f"{', '.join(names)} must be given")
        return OmegaConf.to_object(merged)
    except ValidationError as error:
        raise ConfigError(_wrong_type(allowed, plain, error)) from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{first_line(error)}") from error


def _wrong_type(allowed: Mapping[str, Any], plain: Mapping[str, Any], error: Any) -> str:
    key = locate(plain, str(error.full_key or ""))
    annotation, value = type_at(allowed, plain, key) if key else (None, None)
    if annotation is None:
        return f"{key}: {first_line(error)}" if key else first_line(error)
    return f"{key}={value!r} must be {describe(annotation)}"
