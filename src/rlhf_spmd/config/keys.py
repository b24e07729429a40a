"""Every key of a configuration with its type and default, for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from rlhf_spmd.config.schema import describe


def list_keys(schema: type, replaced: Mapping[str, type], where: str = "", default: Any = None) -> Iterator[str]:
    """``run.steps = 100 (an integer)`` for every key below the dataclass ``schema``, in its order.

    ``replaced``: for keys, also some that ``schema`` has not, the dataclass that describes them in place of their annotation.
    Entries of a mapping to dataclasses are called ``<name>``. ``default``: an instance whose values are the defaults.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}
    annotations = {name: kind for name, kind in get_type_hints(schema).items() if name in fields} | dict(replaced)
    for name, annotation in annotations.items():
        key = f"{where}{name}"
        section = next((part for part in (annotation, *get_args(annotation)) if dataclasses.is_dataclass(part)), None)
        if isinstance(section, type):
            factory: Any = fields[name].default_factory if name in fields else None
            made = factory() if callable(factory) else None  # MISSING is not
            yield from list_keys(section, {}, f"{key}.<name>." if get_origin(annotation) is dict else f"{key}.", made)
        elif isinstance(default, schema):
            yield f"{key} = {json.dumps(getattr(default, name), default=str)} ({describe(annotation)})"
        else:
            yield f"{key} {_default(fields[name])} ({describe(annotation)})"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"= {json.dumps(field.default, default=str)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"= {json.dumps(field.default_factory(), default=str)}"
    return "must be given"
