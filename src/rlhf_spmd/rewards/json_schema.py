"""Is the response JSON that a schema allows? By the library jsonschema."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

from rlhf_spmd.config.json_input import parse_json

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def check(where: str, schema: Any = None) -> None:
    """Raise ValueError if the library is missing or the schema invalid."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError("reward 'json_schema' needs the library: pip install jsonschema")
    if schema is not None:
        _validator(schema, f"{where}.schema")


def _validator(schema: Any, where: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = parse_json(schema) if isinstance(schema, str) else schema
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, TypeError, SchemaError) as error:
        raise ValueError(f"{where} is not a JSON schema: {str(error).splitlines()[0]}") from error
    return kind(schema, registry=Registry())  # which fetches nothing from the network


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def score(response: str, row: dict[str, Any], schema: Any = None) -> float:
    """Return 1.0 if the response, or its only fenced block, is JSON that ``schema`` allows, else 0.0.

    ``schema``: an object or its JSON text; null: the row's column ``schema``. Raises ValueError without a schema.
    """
    schema = row.get("schema") if schema is None else schema
    if schema is None:
        raise ValueError("there is no schema: give kwargs.schema or a column 'schema'")
    blocks = _FENCE.findall(response)
    try:
        value = json.loads(blocks[0] if len(blocks) == 1 else response, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return 0.0
    return float(_validator(schema, "the row's schema").is_valid(value))
