"""OmegaConf's interpolations. A value from the environment may be secret, so configurations are written out with its reference."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.config.plain_yaml import resolve

RESOLVER = "rlhf_spmd.reference"  # replaces ``oc.env``; returns a placeholder for the reference
PLACEHOLDER = re.compile("rlhf_spmd_reference_([0-9a-f]+)_end")  # stands for a reference, and is no interpolation


class FromEnvironment(str):
    """Text that contains a value from the environment.

    - reference_text: the same text with ``${oc.env:NAME}`` in place of the value
    """

    reference_text: str

    def __new__(cls, value: str, reference_text: str = "") -> FromEnvironment:
        self = super().__new__(cls, value)
        self.reference_text = reference_text
        return self

    def __repr__(self) -> str:
        return repr(self.reference_text)


def interpolate(tree: Any) -> Any:
    """Return ``tree`` with its interpolations resolved. A text with a value from the environment is a :class:`FromEnvironment`.

    Raises OmegaConfBaseException, whose ``full_key`` is the key.
    """
    text = str(tree)
    if "${" not in text:  # OmegaConf's containers cost more than all the rest
        return tree
    resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    if "oc.env" not in text:
        return resolved
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf 2.4 has a newer name for this, which 2.3 has not
        OmegaConf.register_new_resolver(RESOLVER, _placeholder, replace=True)
    try:
        with_references = OmegaConf.to_container(OmegaConf.create(_with_placeholders(tree)), resolve=True)
    except OmegaConfBaseException as error:
        error.args = ("${oc.env:...} may stand for a value or for a part of one, and not for the name of a key",)
        raise
    return _join_references(resolved, with_references)


def as_yaml_text(text: str) -> str:
    """Return the text to write into YAML: references for values from the environment, and every other ``${`` escaped."""
    return text.reference_text if isinstance(text, FromEnvironment) else escaped(text)


def comparable_text(text: str) -> str:
    """Return a text that differs where ``text`` does. A value from the environment appears as its reference and a digest."""
    return f"{text.reference_text} (sha256 {digest(text)})" if isinstance(text, FromEnvironment) else text


def select(tree: Any, key: str) -> Any:
    """Return the value of a dotted key with its interpolations resolved; None if the key is absent. Raises OmegaConfBaseException."""
    return OmegaConf.select(OmegaConf.create(resolve(tree)), key)


def _placeholder(*arguments: Any) -> str:
    return f"rlhf_spmd_reference_{','.join(map(_argument, arguments)).encode().hex()}_end"


def _argument(value: Any) -> str:
    """Return an argument of a resolver as YAML text would have it."""
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    is_word = re.fullmatch(r"[A-Za-z_]\w*", value) and value.lower() not in ("null", "true", "false", "nan", "inf")
    return value if is_word else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_placeholders(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _with_placeholders(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(_with_placeholders, tree))
    return re.sub(r"\$\{\s*oc\.env\s*:", f"${{{RESOLVER}:", tree) if isinstance(tree, str) else tree


def _join_references(resolved: Any, reference: Any) -> Any:
    """Return ``resolved`` with a FromEnvironment where ``reference``, the same tree with placeholders, has a placeholder."""
    if isinstance(resolved, dict) and isinstance(reference, dict):
        return {key: _join_references(value, reference.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(reference, Sequence) and len(resolved) == len(reference):
        return list(map(_join_references, resolved, reference))
    if isinstance(resolved, str) and isinstance(reference, str) and PLACEHOLDER.search(reference):
        return FromEnvironment(resolved, _fill_placeholders(escaped(reference)))
    return resolved


def _fill_placeholders(text: str) -> str:
    """Return ``text`` with references for placeholders, also for a reference that is the default of another one."""
    while PLACEHOLDER.search(text):
        text = PLACEHOLDER.sub(lambda match: f"${{oc.env:{bytes.fromhex(match[1]).decode()}}}", text)
    return text


def digest(text: str) -> str:
    """Return a short digest, equal for equal texts, from which the text cannot be recovered."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def escaped(text: str) -> str:
    return text.replace("${", "\\${")
