"""Rules: settings that contradict each other, as data beside the dataclass that owns the first of them.

A range or a choice of one field is said in its type (``constraints``), a setting that does nothing without another in ``needs``
(:func:`~rlhf_spmd.config.constraints.idle_settings`). What remains is a relation of several settings::

    @dataclass(frozen=True)
    class SamplingConfig:
        rules: ClassVar[Rules] = (
            Rule(
                ("temperature", "n"),
                lambda s: s.temperature == 0 and s.n > 1,
                "greedy responses to a prompt are all the same",
                "set n=1, or temperature above 0",
            ),
        )

:func:`check_section` applies the rules of a section, ``load.check_tree`` those of every section that is loaded. Rules whose settings
lie in several sections are a tuple of their own, with a subject that has what they read; their package calls :func:`check_rules`.
``--help`` and the page of keys print the same words. ``tests/rules`` drives every rule to its line.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.config.constraints import check_fields
from rlhf_spmd.config.schema import ConfigError, is_inline
from rlhf_spmd.config.words import dotted


class TextFormatter(string.Formatter):
    """``str.format``, with commas between the entries of a list."""

    def format_field(self, value: Any, format_spec: str) -> str:
        is_list = isinstance(value, list | tuple)
        return ", ".join(map(str, value)) if is_list else str(super().format_field(value, format_spec))


TEXT = TextFormatter()


@dataclass(frozen=True)
class Rule:
    """Settings that cannot be together.

    - keys: dotted settings of the subject, first the one to change. The refusal names each with its value
    - when: returns True for a subject that breaks the rule
    - why: the reason. ``{s.name}`` stands for an attribute of the subject, as for both sides of an equation. A brace that is text is
      doubled
    - remedy: what to set instead; it may have such attributes too
    """

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str
    remedy: str

    def line(self, subject: Any, where: str = "") -> str:
        """Return the refusal, as ``sampling.temperature=0, sampling.n=4: why; remedy``. ``where``: the subject's dotted path."""
        keys = [key.format(s=subject) for key in self.keys]
        settings = ", ".join(f"{dotted(where, key)}={as_setting(value_at(subject, key))}" for key in keys)
        return TEXT.format(f"{settings.replace('{', '{{').replace('}', '}}')}: {self.why}; {self.remedy}", s=subject)

    def general(self) -> str:
        """Return reason and remedy without a subject, as ``--help`` and the page of keys print them."""
        return _general(f"{self.why}; {self.remedy}")

    def general_keys(self) -> list[str]:
        """Return the keys without a subject."""
        return [_general(key) for key in self.keys]


def _general(text: str) -> str:
    """Return ``text`` with ``<name>`` in place of ``{s.name}``, an attribute of the subject."""
    return re.sub(r"\{s\.([\w.]+)[^}]*\}", r"<\1>", text).replace("{{", "{").replace("}}", "}")


Rules = tuple[Rule, ...]


class RuleBroken(ConfigError):
    """A refusal by ``rule``."""

    def __init__(self, rule: Rule, line: str) -> None:
        super().__init__(line)
        self.rule = rule


def check_rules(rules: Iterable[Rule], subject: Any, where: str = "") -> None:
    """Raise RuleBroken for the first rule that ``subject`` breaks."""
    for rule in rules:
        if rule.when(subject):
            raise RuleBroken(rule, rule.line(subject, where))


def check_section(section: Any, where: str) -> None:
    """Check ranges and choices of a dataclass, its rules, then its ``check(where)`` if it has one. Raises ValueError."""
    check_fields(section, where)
    check_rules(rules_of(section), section, where)
    if hasattr(section, "check"):
        section.check(where)


def rules_of(section: Any) -> Rules:
    """Return the rules of a dataclass or its instance: those of its bases first."""
    kind = section if isinstance(section, type) else type(section)
    return tuple(rule for base in reversed(kind.__mro__) for rule in vars(base).get("rules", ()))


def value_at(subject: Any, key: str) -> Any:
    """Return the value of a dotted key, whose parts are fields, fields of inline pieces, or keys of mappings."""
    for name in key.split("."):
        subject = subject[name] if isinstance(subject, dict) else _attribute(subject, name)
    return subject


def _attribute(section: Any, name: str) -> Any:
    if not hasattr(section, name) and dataclasses.is_dataclass(section):
        for field in dataclasses.fields(section):
            if is_inline(field) and hasattr(getattr(section, field.name), name):
                return getattr(getattr(section, field.name), name)
    return getattr(section, name)


def as_setting(value: Any) -> str:
    """Return a value as a user would write it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
