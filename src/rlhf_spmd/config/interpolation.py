"""OmegaConf's interpolations. A value from the environment may be secret, so what is written out has its reference instead."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.config.written import resolve

RESOLVER = "rlhf_spmd.reference"  # stands for ``oc.env`` where references are kept
KEPT = re.compile("rlhf_spmd_reference_([0-9a-f]+)_end")  # a reference, in a form that is no interpolation


class FromEnvironment(str):
    """Text with a value from the environment in it. ``written``: the same text with ``${oc.env:NAME}`` in place of that value."""

    written: str

    def __new__(cls, value: str, written: str = "") -> FromEnvironment:
        self = super().__new__(cls, value)
        self.written = written
        return self

    def __repr__(self) -> str:
        return repr(self.written)


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
        OmegaConf.register_new_resolver(RESOLVER, _kept_reference, replace=True)
    try:
        with_references = OmegaConf.to_container(OmegaConf.create(_with_kept_references(tree)), resolve=True)
    except OmegaConfBaseException as error:
        error.args = ("${oc.env:...} may stand for a value or for a part of one, and not for the name of a key",)
        raise
    return _marked(resolved, with_references)


def written(text: str) -> str:
    """Return ``text`` as YAML should have it: references for values from the environment, and every other ``${`` escaped."""
    return text.written if isinstance(text, FromEnvironment) else escaped(text)


def compared(text: str) -> str:
    """Return ``text`` for people who compare two texts. A value from the environment appears as its reference and a digest."""
    return f"{text.written} (sha256 {digest(text)})" if isinstance(text, FromEnvironment) else text


def select(tree: Any, key: str) -> Any:
    """Return the value of a dotted key with its interpolations resolved; None if the key is absent. Raises OmegaConfBaseException."""
    return OmegaConf.select(OmegaConf.create(resolve(tree)), key)


def _kept_reference(*arguments: Any) -> str:
    return f"rlhf_spmd_reference_{','.join(map(_argument, arguments)).encode().hex()}_end"


def _argument(value: Any) -> str:
    """Return an argument of a resolver as YAML text would have it."""
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    is_word = re.fullmatch(r"[A-Za-z_]\w*", value) and value.lower() not in ("null", "true", "false", "nan", "inf")
    return value if is_word else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_kept_references(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _with_kept_references(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(_with_kept_references, tree))
    return re.sub(r"\$\{\s*oc\.env\s*:", f"${{{RESOLVER}:", tree) if isinstance(tree, str) else tree


def _marked(resolved: Any, reference: Any) -> Any:
    """Return ``resolved`` with a FromEnvironment where the same tree with references in place of values has one."""
    if isinstance(resolved, dict) and isinstance(reference, dict):
        return {key: _marked(value, reference.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(reference, Sequence) and len(resolved) == len(reference):
        return list(map(_marked, resolved, reference))
    if isinstance(resolved, str) and isinstance(reference, str) and KEPT.search(reference):
        return FromEnvironment(resolved, _restored(escaped(reference)))
    return resolved


def _restored(text: str) -> str:
    """Undo :func:`_kept_reference`, also for a reference that is the default of another one."""
    while KEPT.search(text):
        text = KEPT.sub(lambda match: f"${{oc.env:{bytes.fromhex(match[1]).decode()}}}", text)
    return text


def digest(text: str) -> str:
    """Return a short digest: equal values have equal digests, and the value cannot be found from it."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def escaped(text: str) -> str:
    return text.replace("${", "\\${")
