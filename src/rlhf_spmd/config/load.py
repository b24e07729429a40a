"""YAML and dotted overrides into frozen dataclasses, strictly; every mistake is one line that names key, value and remedy.

The order is: YAML file, then overrides, then ``sections`` (a section whose schema depends on what was read, as
``algorithm`` does), then an own walk for unknown keys, then OmegaConf's typed merge for values and interpolations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhf_spmd.config.schema import ConfigError, check_keys, check_required, describe, empty_sections, locate, type_at

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")
Sections = Callable[[Mapping[str, Any]], Mapping[str, type]]

__all__ = ["ConfigError", "check_tree", "load", "to_dict", "to_yaml"]


def load(schema: type[T], path: str | Path | None = None, overrides: Sequence[str] = (), sections: Sections | None = None) -> T:
    """A ``schema`` instance from a YAML file (or none) and overrides such as ``data.train_batch_size=64``.

    ``sections`` takes what was read, before interpolation, and returns for top-level keys the dataclass that describes them;
    it replaces the type of that field (usually ``Any``), so the result's ``.algorithm`` is an instance of that class.
    Raises ConfigError, one line, for a file that cannot be read, an unknown key, a wrong type or a missing required key.
    """
    from omegaconf import OmegaConf

    raw = _merge_overrides(_read_file(path), overrides)
    plain = cast(dict[str, Any], OmegaConf.to_container(raw, resolve=False))
    replaced: dict[str, type] = {}
    if sections is not None:
        try:
            replaced = dict(sections(plain))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    check_keys(schema, plain, replaced)
    for key in empty_sections(schema, plain, replaced):
        del raw[key]
    return cast(T, _typed(schema, raw, plain, replaced))


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
    from omegaconf import OmegaConf

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
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

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
        raise ConfigError(f"config file '{file}' cannot be read: {_first_line(error)}") from error
    if not OmegaConf.is_dict(raw):
        raise ConfigError(f"config file '{file}' must hold a mapping (key: value), not a list")
    return cast("DictConfig", raw)


def _merge_overrides(raw: DictConfig, overrides: Sequence[str]) -> DictConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip() or key != key.strip():
            raise ConfigError(f"override '{override}' is not of the form key.subkey=value")
        try:
            raw = cast("DictConfig", OmegaConf.merge(raw, OmegaConf.from_dotlist([override])))
        except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            raise ConfigError(f"override '{override}' cannot be read: {_first_line(error)}") from error
    return raw


def _typed(schema: type, raw: DictConfig, plain: Mapping[str, Any], replaced: Mapping[str, type]) -> Any:
    """OmegaConf's structured merge. Frozen dataclasses come as read-only nodes; the merge writes into our own copy."""
    from omegaconf import OmegaConf, flag_override
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

    try:
        target = OmegaConf.structured(schema)
        with flag_override(target, "readonly", False):
            for name, section in replaced.items():
                target[name] = OmegaConf.structured(section)
        merged = OmegaConf.merge(target, raw)
        check_required(schema, merged, replaced)
        return OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise ConfigError(f"'{error.full_key}' must be given") from error
    except ValidationError as error:
        raise ConfigError(_wrong_type(schema, plain, replaced, error)) from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{_first_line(error)}") from error


def _wrong_type(schema: type, plain: Mapping[str, Any], replaced: Mapping[str, type], error: Any) -> str:
    key = locate(plain, str(error.full_key or ""))
    annotation, value = type_at(schema, plain, replaced, key)
    if annotation is None:
        return f"{key}: {_first_line(error)}" if key else _first_line(error)
    return f"{key}={value!r} must be {describe(annotation)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
