"""The protocol of environments, their settings (``environment.*``, ``environments.<name>.*``), and which of them a row has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import FiniteFloat, Fraction, PositiveInt, Seconds, Workers
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.config.words import nearest
from rlhf_spmd.environments.libraries import names_library

ChatMessage = dict[str, Any]  # with ``role`` and ``content`` (text)


class Environment(Protocol):
    """One object per row: made, reset, then stepped once per turn of the model, by one thread at a time.

    The class may have ``schemas(**args)``, a static method that returns OpenAI's schemas of its tools for chat
    templates, ``gives_reward = False`` if its rows need a score from elsewhere, and the static method ``load()``, which
    imports before the run what is optional or slow and raises ValueError if it is absent. Its parameter ``chat_template``, if
    it has one that ``args`` leave out, gets the text of the model's chat template.
    """

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin. Returns text that the model reads after its prompt, or None.

        ``row``: the data's columns, as rewards see them.
        """

    def step(self, text: str) -> tuple[str | list[ChatMessage], float, bool]:
        """Answer a turn. Returns (observation, reward, done).

        ``text``: the model's turn with its special tokens, except those that end a text. A parameter ``context``, if
        there is one, gets the turn's :class:`tool_calls.TurnContext`. Unless done, the model reads the observation
        (``?`` for a lone surrogate) and goes on. Messages are rendered as the chat template writes them between two of
        the model's turns. Rewards of a row's turns are summed.
        """


DEFAULT = "environment"  # name and section of the environment of rows that name none


@dataclass(frozen=True)
class EnvironmentConfig:
    """``environment``: what answers the model between its turns.

    - cls: `calculator`, `tools`, or `package.module:Class` or `file.py:Class`; or one of a library: `reasoning_gym:NAME`,
      `gem:NAME`, `verifiers:NAME`, `openenv:URL`; null: the model answers once. `environment=...` is short for it
    - args: keyword arguments of the class
    - max_turns: turns of the model per row; null: as many as the response's length allows
    - num_workers: threads per generation replica, up to 1024
    - timeout_s: limit of one call; below `run.timeout_s`. A row whose call fails or takes longer ends there and is left out
      of learning. `tools` takes nine tenths of it for the calls of a turn, and the model reads that one took longer
    - attempts: how often a row is begun whose environment fails so, each time with other draws; then it is left out
    - max_failure_rate: share of a step's rows that may fail so before the run ends with class `reward`
    - weight: weight of the environment's reward in a row's score
    """

    needs: ClassVar = {"cls": ("args",)}

    cls: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    max_turns: PositiveInt | None = None
    num_workers: Workers = 8
    timeout_s: Seconds = 30.0
    attempts: PositiveInt = 1
    max_failure_rate: Fraction = 0.5
    weight: FiniteFloat = 1.0

    @property
    def gives_reward(self) -> bool:
        return self.cls is not None and getattr(resolve_class(self.cls), "gives_reward", True)

    def schemas(self) -> list[dict[str, Any]]:
        """Return OpenAI's schemas of the class's tools. Raises what its ``schemas`` raises."""
        assert self.cls is not None, "there is no class to have tools"
        schemas: list[dict[str, Any]] = getattr(resolve_class(self.cls), "schemas", lambda **_: [])(**self.args)
        return schemas

    def check(self, where: str = "environment") -> None:
        """Raise ValueError that names the key and the value. Imports the class's module to see that it exists."""
        if self.cls is None:
            return
        cls = resolve_class(self.cls, f"{where}.cls")
        missing = [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]
        if isinstance(cls, type) and missing:
            raise ValueError(
                f"{where}.cls={self.cls!r} has no method {missing[0]}(); an environment has reset(row) and step(text)"
            )
        if isinstance(inspect.getattr_static(cls, "load", None), staticmethod):
            cls.load()  # type: ignore[attr-defined]
        try:
            inspect.signature(cls).bind(**self.args)
        except TypeError as error:
            raise ValueError(f"{where}.args={self.args}: {self.cls} does not take them: {error}") from error
        try:
            self.schemas()
        except ValueError as error:
            raise ValueError(f"{where}.args={self.args}: {error}") from error

    def check_together(self, where: str, run_timeout_s: float, partial: bool = False) -> None:
        """Raise ValueError where settings of other sections contradict these; see :class:`EnvironmentInRun`."""
        check_rules(RUN_RULES, EnvironmentInRun(self.cls, self.timeout_s, run_timeout_s, partial), where)


@dataclass(frozen=True)
class EnvironmentInRun:
    """Settings of an environment and of other sections that rules relate.

    - run_timeout_s: ``run.timeout_s``, or ``timeout_s`` of a program without a section ``run``
    - partial: ``rollout.in_flight`` is above ``data.train_batch_size``
    """

    cls: str | None
    timeout_s: float
    run_timeout_s: float
    partial: bool


RUN_RULES: Rules = (
    Rule(
        ("timeout_s",),
        lambda s: s.timeout_s >= s.run_timeout_s,
        "other ranks wait for it, and no longer than the program's timeout_s={s.run_timeout_s}",
        "lower the first or raise the second",
    ),
    Rule(
        ("cls",),
        lambda s: s.partial,
        "its rows end in the step that began them, and rollout.in_flight is above data.train_batch_size",
        "leave rollout.in_flight out",
    ),
)

EnvironmentConfigs = Mapping[str, EnvironmentConfig]


def environment_key(name: str) -> str:
    """Return the configuration key of a named environment, for messages."""
    return DEFAULT if name == DEFAULT else f"environments.{name}"


def named_environments(environment: EnvironmentConfig, environments: EnvironmentConfigs) -> dict[str, EnvironmentConfig]:
    """Return ``environments``, plus ``environment`` under that name if it has a class. Raises ValueError."""
    default = {} if environment.cls is None else {DEFAULT: environment}
    if DEFAULT in environments:
        raise ValueError("environments.environment: rows that name none have that of the section environment; give it there")
    for name, config in environments.items():
        if config.cls is None:
            raise ValueError(f"environments.{name}.cls must be given: calculator, tools, package.module:Class or file.py:Class")
    return default | dict(environments)


def environment_of(environments: EnvironmentConfigs, row: Mapping[str, Any]) -> str | None:
    """Return the name of a row's environment, or None if the model answers the row once."""
    return row.get("environment") or (DEFAULT if DEFAULT in environments else None)


def check_rows(
    environments: EnvironmentConfigs, rows: Sequence[Mapping[str, Any]], places: Sequence[str], has_other_reward: bool
) -> None:
    """Raise ValueError for a row with an unknown environment or without a reward, and for an environment without rows.

    ``has_other_reward``: rows have a reward besides that of environments. ``places``: the rows' places, for messages.
    """
    names = [environment_of(environments, row) for row in rows] if environments else []
    for name, place in zip(names, places, strict=False):
        if name is not None and name not in environments:
            hint = nearest(str(name), list(environments)) or ";"
            raise ValueError(f"{place}: environment={name!r} is not an environment{hint} there are {', '.join(environments)}")
        if not has_other_reward and not (name and environments[name].gives_reward):
            reason = f"{environment_key(name)} gives no reward" if name else "the row has no environment"
            raise ValueError(f"{place}: {reason}, and there is no other; give reward.function or reward.model")
    unused = next((name for name in environments if name not in (*names, DEFAULT)), None)
    if unused is not None:
        raise ValueError(f"environments.{unused}: no row has this name in its column 'environment'")


def tools_of(environments: EnvironmentConfigs, columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the tool schemas for the chat template by environment: those of ``columns``, then the environment's."""
    schemas = {name: [*columns.get(name, ()), *config.schemas()] for name, config in environments.items()}
    return {name: tools for name, tools in {**columns, **schemas}.items() if tools}


def resolve_class(name: str, where: str = "environment.cls") -> Callable[..., Environment]:
    """Return the class called ``name``; see :func:`registry.resolve`."""
    if names_library(name):
        library = name.partition(":")[0]
        raise ValueError(f"{where}={name!r}: only the section environment names rows; write {library}, and data.path={name}")
    return registry.resolve(where, "rlhf_spmd.environments", name, "environment")
