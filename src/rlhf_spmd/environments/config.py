"""Settings of environments (``environment.*``, ``environments.<name>.*``), the class of each, and which one a row has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import FiniteFloat, PositiveInt, Seconds
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.environments.base import Environment

DEFAULT = "environment"  # the section of the environment of rows that name none, and its name


@dataclass(frozen=True)
class EnvironmentConfig:
    """``environment``: what answers the model between its turns.

    - cls: `calculator`, `tools`, or `package.module:Class` or `file.py:Class`; null: the model answers once
    - args: keyword arguments of the class
    - max_turns: turns of the model in a row; null: as many as the response's length allows
    - num_workers: threads of each generation replica
    - timeout_s: limit of one call, beyond which the run ends with class `reward`; below `run.timeout_s`
    - weight: of the environment's reward in a row's score
    """

    cls: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    max_turns: PositiveInt | None = None
    num_workers: PositiveInt = 8
    timeout_s: Seconds = 30.0
    weight: FiniteFloat = 1.0

    @property
    def gives_reward(self) -> bool:
        return self.cls is not None and getattr(resolve_class(self.cls), "gives_reward", True)

    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI's schemas of the tools that the class has. Raises what its ``schemas`` raises."""
        assert self.cls is not None, "there is no class to have tools"
        found: list[dict[str, Any]] = getattr(resolve_class(self.cls), "schemas", lambda **_: [])(**self.args)
        return found

    def check(self, where: str = "environment") -> None:
        """Raises ValueError naming the key and the value; imports the class's module to see that it is there."""
        if self.cls is None:
            if self.args:
                raise ValueError(f"{where}.args={self.args}: there is no {where}.cls that takes them")
            return
        found = resolve_class(self.cls, f"{where}.cls")
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if isinstance(found, type) and missing:
            raise ValueError(
                f"{where}.cls={self.cls!r} has no method {missing[0]}(); an environment has reset(row) and step(text)"
            )
        try:
            inspect.signature(found).bind(**self.args)
        except TypeError as error:
            raise ValueError(f"{where}.args={self.args}: {self.cls} does not take them: {error}") from error
        try:
            self.schemas()
        except ValueError as error:
            raise ValueError(f"{where}.args={self.args}: {error}") from error

    def check_together(self, where: str, run_timeout_s: float, rebalance_steps: int, partial: bool = False) -> None:
        """Against other settings: the program's limit of silence, ``generation.rebalance_steps``, ``data.gen_batch_size`` above a
        batch. Raises ValueError."""
        if self.timeout_s >= run_timeout_s:
            raise ValueError(
                f"{where}.timeout_s={self.timeout_s}: other ranks wait for it, and no longer than {run_timeout_s} s (timeout_s of the "
                "program); lower the first or raise the second"
            )
        if rebalance_steps:
            raise ValueError(
                f"generation.rebalance_steps={rebalance_steps}: an environment's rows stay on their replica; set it to 0"
            )
        if partial:
            raise ValueError(
                f"data.gen_batch_size above data.train_batch_size together with {where}.cls: an environment's rows end in the step "
                "that began them; leave data.gen_batch_size out"
            )


Named = Mapping[str, EnvironmentConfig]


def environment_key(name: str) -> str:
    """The configuration key of a named environment, for messages."""
    return DEFAULT if name == DEFAULT else f"environments.{name}"


def named_environments(environment: EnvironmentConfig, environments: Named) -> dict[str, EnvironmentConfig]:
    """``environments``, and ``environment`` as the one of that name if it has a class. Raises ValueError."""
    given = {} if environment.cls is None else {DEFAULT: environment}
    if DEFAULT in environments:
        raise ValueError("environments.environment: rows that name none have that of the section environment; give it there")
    for name, one in environments.items():
        if one.cls is None:
            raise ValueError(f"environments.{name}.cls must be given: calculator, tools, package.module:Class or file.py:Class")
    return given | dict(environments)


def environment_of(environments: Named, row: Mapping[str, Any]) -> str | None:
    """The name of the environment that a row with these columns has; None: the model answers it once."""
    return row.get("environment") or (DEFAULT if DEFAULT in environments else None)


def check_rows(environments: Named, rows: Sequence[Mapping[str, Any]], places: Sequence[str], scored: bool) -> None:
    """Raises ValueError for a row that names no environment that is there, or that nothing gives a score (``scored``: something
    beside environments does), and for an environment that no row names. ``places``: of the rows, for messages."""
    names = [environment_of(environments, row) for row in rows] if environments else []
    for name, place in zip(names, places, strict=False):
        if name is not None and name not in environments:
            hint = nearest(str(name), list(environments)) or ";"
            raise ValueError(f"{place}: environment={name!r} is no environment{hint} there are {', '.join(environments)}")
        if not scored and not (name and environments[name].gives_reward):
            which = f"{environment_key(name)} gives no reward" if name else "the row has no environment"
            raise ValueError(f"{place}: {which}, and there is no other; give reward.function or reward.model")
    unused = next((name for name in environments if name not in (*names, DEFAULT)), None)
    if unused is not None:
        raise ValueError(f"environments.{unused}: no row has this name in its column 'environment'")


def tools_of(environments: Named, given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The schemas that a chat template tells the model of in rows of each environment, after those ``given``."""
    found = {name: [*given.get(name, ()), *one.schemas()] for name, one in environments.items()}
    return {name: tools for name, tools in {**given, **found}.items() if tools}


def resolve_class(name: str, where: str = "environment.cls") -> Callable[..., Environment]:
    """The class called ``name``; see :func:`registry.resolve`."""
    return registry.resolve(where, "rlhf_spmd.environments", name, "environment")
