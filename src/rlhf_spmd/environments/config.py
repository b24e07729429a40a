"""Settings of environments (``environment.*``), and the name in ``environment.cls`` -> the class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.config import registry
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.environments.base import Environment


@dataclass(frozen=True)
class EnvironmentConfig:
    """``cls``: a built-in's name or ``package.module:Class``; None: the model answers once, without an environment. ``args``: keyword
    arguments of the class. ``max_turns``: of the model, in a row; None: as many as the response's length allows.
    ``num_workers``: threads of each generation replica. ``timeout_s``: limit of one call, seconds; beyond it the run ends with class
    ``reward``. ``weight``: of the environment's reward in a row's score.
    """

    cls: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    num_workers: int = 8
    timeout_s: float = 30.0
    weight: float = 1.0

    def check(self, where: str = "environment") -> None:
        """Raises ValueError naming the key and the value; imports the class's module to see that it is there."""
        check_bounds(self, where, "max_turns", "num_workers", least=1)
        check_bounds(self, where, "timeout_s", above=0)
        check_bounds(self, where, "weight")
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

    def check_together(self, where: str, run_timeout_s: float, rebalance_steps: int, partial: bool = False) -> None:
        """Against other settings: the program's limit of silence, ``generation.rebalance_steps``, ``data.gen_batch_size`` above a
        batch. Raises ValueError."""
        if self.cls is None:
            return
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


def resolve_class(name: str, where: str = "environment.cls") -> Callable[..., Environment]:
    """The class called ``name``; see :func:`registry.resolve`."""
    return registry.resolve(where, "rlhf_spmd.environments", name, "environment")
