"""Binds a reward function's arguments by their names: this project's signature, verl's and TRL's.

| arguments | of | value |
|---|---|---|
| ``prompt``, ``response``, ``row`` | this project | texts, and the row's columns |
| ``begun`` | this project | the beginning of the response that the prompt already contains, else "" |
| ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` | verl | the response; the answer; ``extra_info`` or ``{}`` |
| ``prompts``, ``completions``, ``completion_ids`` | TRL | lists over rows; any of them makes the function a batched one |
| ``completion_messages`` | all | the turns of a multi-turn response, with roles; absent for others |
| any other | all | its value in ``kwargs``, else the row's column of that name; for a batched function the list of them |

``**kwargs`` takes all the others. An argument with a default keeps it if there is no value. A class is instantiated once
per process with ``kwargs``; its ``__call__`` is the function. An ``async def`` function is awaited for many rows together.
``row_values`` has the values of a row.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

from rlhf_spmd.config.constraints import check_fields, full_type_hints
from rlhf_spmd.config.schema import read_value
from rlhf_spmd.config.words import nearest
from rlhf_spmd.rewards.row_values import RewardRow, as_trl, row_values

BATCHED = frozenset(("prompts", "completions", "completion_ids"))
FROM_ROW = BATCHED | {"prompt", "response", "begun", "row", "solution_str"}  # never from the configuration
COLUMNS = frozenset(("data_source", "ground_truth", "extra_info"))  # arguments of built-in rewards that are no settings
TRL_ONLY = frozenset(("log_metric", "log_extra", "trainer_state"))
OVERRUN = object()  # stands for the result of an awaited function that did not return in time
ALLOWED = (
    "prompt, response, row; or verl's data_source, solution_str, ground_truth, extra_info; or TRL's prompts, completions, "
    "completion_ids; and columns of the row"
)


@dataclass(frozen=True)
class BoundReward:
    """A reward function with its signature.

    - label: configuration key and name, for messages
    - required, optional: arguments without and with a default that are not in ``kwargs``
    - takes_all: True if it has ``**kwargs``
    - kwargs: arguments from the configuration
    - is_class: True if ``function`` is a class, whose objects are called
    - is_async: True if its results are awaited
    """

    label: str
    function: Callable[..., Any]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_all: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_class: bool = False
    is_async: bool = False

    @property
    def batched(self) -> bool:
        """Return True if a call takes lists over many rows and returns a list."""
        return not BATCHED.isdisjoint(self.required + self.optional)

    @property
    def takes_ids(self) -> bool:
        """Return True if rows must have ``completion_ids``, the response's tokens."""
        return "completion_ids" in self.required + self.optional

    @property
    def is_user_function(self) -> bool:
        """Return True for the user's function, False for a built-in one."""
        return not getattr(self.function, "__module__", "").startswith("rlhf_spmd.rewards.")

    def module_function(self, name: str) -> Callable[..., None]:
        """Return the function ``name`` of a built-in reward's module. Without one, and for the user's, return one that does nothing."""
        module = None if self.is_user_function else sys.modules[self.function.__module__]
        return getattr(module, name, lambda *_, **__: None)

    def instantiate(self) -> ReadyReward:
        """Return the reward for calls in this process. A built-in one imports its libraries (its module's ``load``).

        Raises ValueError, one line, if a constructor raises.
        """
        self.module_function("load")()
        function = self.function
        if self.is_class:
            try:
                function = function(**self.kwargs)
            # The boundary to the user's code: whatever it raises.
            except (Exception, SystemExit) as error:
                raise self.refusal(f"its constructor failed: {type(error).__name__}: {error}") from error
        kwargs = {} if self.is_class else self.kwargs
        return ReadyReward(self, function, kwargs, asyncio.Runner() if self.is_async else None)

    @property
    def missing_settings(self) -> list[str]:
        """Return the settings that a built-in reward requires and ``kwargs`` lacks."""
        return [] if self.is_user_function else [name for name in self.required if name not in FROM_ROW | COLUMNS]

    def check_settings(self, where: str) -> None:
        """Raise ValueError for a setting of a built-in reward that does not fit the type of its parameter. ``where``: their key."""
        if self.is_user_function:
            return
        types = typing.get_type_hints(self.function)
        ranges = full_type_hints(self.function)
        settings = {name: read_value(types[name], value, f"{where}.{name}") for name, value in self.kwargs.items()}
        check_fields(make_dataclass("Settings", [(name, ranges[name]) for name in settings])(**settings), where)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], source: str = "") -> None:
        """Raise ValueError, one line, if no row has a value for a required argument.

        ``rows``: the columns of each row. ``source``: the setting that names their file, for the message.
        """
        columns: set[str] = set()
        missing = set(self.required) - BATCHED
        if absent := [name for name in self.required if name in TRL_ONLY and not any(name in row for row in rows)]:
            raise self.refusal(f"{absent[0]}, which TRL passes, does not exist here; give it a default")
        for row in rows:
            missing -= row_values("", "", row).keys()
            if not missing:
                return
            columns |= {key for key, value in row.items() if value is not None}
        if missing:
            hint = " (data.answer_key names the answer's column)" if missing & {"answer", "ground_truth"} else ""
            where = f" of {source}" if source else ""
            names = ", ".join(sorted(columns))
            raise self.refusal(f"no row{where} has {', '.join(sorted(missing))}{hint}; the columns are {names}")

    def refusal(self, why: str) -> ValueError:
        """Return the error for a function that cannot be called. It names the function, its arguments and those allowed."""
        return ValueError(f"{self.label} takes ({', '.join(self.required + self.optional)}): {why}. Arguments may be {ALLOWED}")


@dataclass(frozen=True)
class ReadyReward:
    """A reward function that can be called: its class is instantiated, and ``kwargs`` are arguments of every call.

    - loop: where results are awaited; None for a function that is not async
    """

    bound: BoundReward
    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    loop: asyncio.Runner | None

    def call(self, rows: Sequence[RewardRow], timeout_s: float) -> list[Any]:
        """Return the function's result for each row. A function that is neither batched nor async takes one row.

        For an async function that is not batched, each row has ``timeout_s``, and its result may be the exception or
        ``OVERRUN``. Raises ValueError for a row without a required argument, and for a list of another length; also
        what the function raises.
        """
        values_of_rows = [row_values(*row) for row in rows]
        if self.bound.batched:
            return self._call_batched(values_of_rows)
        if self.loop is not None:
            return self.loop.run(self._await_rows(values_of_rows, timeout_s))
        return [self.function(**self._arguments(values)) for values in values_of_rows]

    def _call_batched(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        names = {*self.bound.required, *(name for values in rows for name in values)}
        columns = {name: [values.get(name) for values in rows] for name in names}
        pairs = [as_trl(values) for values in rows]
        columns["prompts"] = [prompt for prompt, _ in pairs]
        columns["completions"] = [completion for _, completion in pairs]
        returned = self.function(**self._arguments(columns))
        scores = self.loop.run(returned) if self.loop is not None else returned
        if not isinstance(scores, Iterable) or isinstance(scores, str | bytes | Mapping | Set):
            raise TypeError(f"one {type(scores).__name__} was returned for {len(rows)} completions; return a list of scores")
        results = list(scores)
        if len(results) != len(rows):
            raise ValueError(f"{len(results)} scores were returned for {len(rows)} completions")
        return results

    async def _await_rows(self, rows: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        async def score_row(values: Mapping[str, Any]) -> Any:
            try:
                return await self.function(**self._arguments(values))
            except SystemExit as error:  # it would end the loop, and the other rows with it
                raise RuntimeError(f"the function ended by SystemExit: {error}") from error

        tasks = [asyncio.ensure_future(score_row(values)) for values in rows]
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)  # a task that refuses cancellation ends with the process
        cancelled = RuntimeError("the function was cancelled from within")
        return [
            OVERRUN if task in late else cancelled if task.cancelled() else task.exception() or task.result() for task in tasks
        ]

    def _arguments(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call: ``kwargs``, and those of ``values`` that the function takes."""
        bound = self.bound
        missing = [name for name in bound.required if name not in values]
        if missing:
            raise ValueError(f"the row has no {missing[0]!r}, which the function takes")
        names = values if bound.takes_all else [name for name in bound.required + bound.optional if name in values]
        return {name: values[name] for name in names} | dict(self.kwargs)


def bind_reward(function: Callable[..., Any], label: str, kwargs: Mapping[str, Any] | None = None) -> BoundReward:
    """Bind ``function``; ``kwargs`` are arguments from the configuration, for a class those of its constructor.

    Raises ValueError, one line, for arguments that cannot be given by name, for a function that returns no result (a
    generator, a class without ``__call__``), and for ``kwargs`` that it does not take.
    """
    bound = BoundReward(label, function, kwargs=kwargs or {}, is_class=inspect.isclass(function))
    callee = _callee(bound)
    parameters = _parameters(bound, callee)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    settings = {} if bound.is_class else bound.kwargs
    bound = replace(
        bound,
        required=tuple(p.name for p in named if p.default is p.empty and p.name not in settings),
        optional=tuple(p.name for p in named if p.default is not p.empty and p.name not in settings),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(callee),
    )
    by_position = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    if by_position:
        raise bound.refusal(f"{by_position[0]} cannot be given by name")
    if not named and not bound.takes_all:
        raise bound.refusal("it takes nothing by name")
    for name in settings:
        if name in FROM_ROW or not (bound.takes_all or name in (p.name for p in named)):
            allowed = [p.name for p in named if p.name not in FROM_ROW]
            hint = nearest(name, allowed) or ";"
            names = ", ".join(allowed) or "none"
            raise bound.refusal(f"kwargs.{name} is not one of its settings{hint} its settings are {names}")
    return bound


def _callee(bound: BoundReward) -> Callable[..., Any]:
    """Return the function itself, or the ``__call__`` of a class or an object. Raises ValueError if it returns no score."""
    function = bound.function
    if isinstance(function, type) and not any("__call__" in vars(base) for base in function.__mro__):
        raise bound.refusal("it is a class without __call__: its objects return no score")
    is_plain = inspect.isroutine(function) or isinstance(function, functools.partial)
    owner = function if isinstance(function, type) else type(function)
    callee: Callable[..., Any] = function if is_plain else owner.__call__
    if inspect.isgeneratorfunction(callee) or inspect.isasyncgenfunction(callee):
        raise bound.refusal("it is a generator (it has a yield); it must return the score")
    return callee


def _parameters(bound: BoundReward, callee: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a call. Raises ValueError if they cannot be read, or do not fit a constructor's ``kwargs``."""
    try:
        if not bound.is_class:
            return list(inspect.signature(bound.function).parameters.values())
        parameters = list(inspect.signature(callee).parameters.values())[1:]  # without self
        inspect.signature(bound.function).bind(**bound.kwargs)
        return parameters
    except TypeError as error:
        raise bound.refusal(f"its constructor, with kwargs={dict(bound.kwargs)}: {error}") from error
    except ValueError as error:
        raise bound.refusal(f"its signature cannot be read: {error}") from error
