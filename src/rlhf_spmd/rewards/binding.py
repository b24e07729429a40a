"""Binds a reward function's arguments by their names: this project's signature, verl's and TRL's.

| arguments | of | value |
|---|---|---|
| ``prompt``, ``response``, ``row`` | this project | texts, and the row's columns |
| ``begun`` | this project | the beginning of the answer that a prompt's last message, the assistant's, gives; otherwise "" |
| ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` | verl | the response; the answer; ``extra_info`` or ``{}`` |
| ``prompts``, ``completions``, ``completion_ids`` | TRL | lists over rows; any of them makes the function a batched one |
| ``completion_messages`` | all | the turns of a multi-turn response, with roles; absent for others |
| any other | all | its value in ``kwargs``, else the row's column of that name; for a batched function the list of them |

``**kwargs`` takes all the others. An argument with a default keeps it if there is no value. A class is made once per
process with ``kwargs``; its ``__call__`` is the function. An ``async def`` function is awaited for many rows together.

The environment writes a part of a multi-turn response. Such a row's ``completions`` are its turns, as in TRL; ``response``
and ``solution_str`` are the model's turns alone, joined by line breaks.
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

RewardRow = tuple[str, str, dict[str, Any]]  # prompt, response, the row's columns

BATCHED = frozenset(("prompts", "completions", "completion_ids"))
FROM_ROW = BATCHED | {"prompt", "response", "begun", "row", "solution_str"}  # never from the configuration
TURNS = "completion_messages"  # of a row: the turns of a multi-turn response, messages with role and content
COLUMNS = frozenset(("data_source", "ground_truth", "extra_info"))  # arguments of built-in rewards that are no settings
TRL_ONLY = frozenset(("log_metric", "log_extra", "trainer_state"))
OVERRUN = object()  # stands for the result of an awaited function that did not return in time
ALLOWED = (
    "prompt, response, row; or verl's data_source, solution_str, ground_truth, extra_info; or TRL's prompts, completions, "
    "completion_ids; and columns of the row"
)


@dataclass(frozen=True)
class BoundReward:
    """A reward function and its arguments.

    ``label``: configuration key and name, for messages. ``required`` and ``optional``: arguments without and with a
    default that are not in ``kwargs``. ``takes_all``: it has ``**kwargs``. ``kwargs``: arguments from the
    configuration. ``is_class``: ``function`` must still be instantiated. ``is_async``: results are awaited in ``loop``.
    """

    label: str
    function: Callable[..., Any]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_all: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_class: bool = False
    is_async: bool = False
    loop: asyncio.Runner | None = None

    @property
    def batched(self) -> bool:
        """Return True if a call takes lists over many rows and returns a list."""
        return not BATCHED.isdisjoint(self.required + self.optional)

    @property
    def is_users(self) -> bool:
        """Return True for the user's function, False for a built-in one."""
        return not getattr(self.function, "__module__", "").startswith("rlhf_spmd.rewards.")

    def hook(self, name: str) -> Callable[..., None]:
        """Return the function ``name`` of a built-in reward's module; one that does nothing for the user's, and where there is none."""
        module = None if self.is_users else sys.modules[self.function.__module__]
        return getattr(module, name, lambda *_, **__: None)

    @property
    def takes_ids(self) -> bool:
        """Return True if rows must have ``completion_ids``, the response's tokens."""
        return "completion_ids" in self.required + self.optional

    def ready(self) -> BoundReward:
        """Return the reward ready to be called: a class instantiated, a built-in one's libraries imported (its module's
        ``load``). Raises ValueError, one line, if a constructor raises."""
        function, kwargs = self.function, self.kwargs
        self.hook("load")()
        if self.is_class:
            try:
                function, kwargs = function(**kwargs), {}
            # The boundary to the user's code: whatever it raises.
            except (Exception, SystemExit) as error:
                raise self.refusal(f"its constructor failed: {type(error).__name__}: {error}") from error
        return replace(self, function=function, kwargs=kwargs, loop=asyncio.Runner() if self.is_async else None)

    def call(self, rows: Sequence[RewardRow], timeout_s: float) -> list[Any]:
        """Return the function's result for each row. A function that is neither batched nor async takes one row.

        For an async function that is not batched, each row has ``timeout_s``, and its result may be the exception or
        ``OVERRUN``. Raises ValueError for a row without a required argument, and for a list of another length; also
        what the function raises.
        """
        each = [_values(*row) for row in rows]
        if not self.batched:
            if self.loop is not None:
                return self.loop.run(self._together(each, timeout_s))
            return [self.function(**self._keywords(values)) for values in each]
        columns = {key: [values.get(key) for values in each] for key in {*self.required, *(key for row in each for key in row)}}
        pairs = [_as_trl(values) for values in each]
        columns["prompts"] = [prompt for prompt, _ in pairs]
        columns["completions"] = [completion for _, completion in pairs]
        returned = self.function(**self._keywords(columns))
        scores = self.loop.run(returned) if self.loop is not None else returned
        if not isinstance(scores, Iterable) or isinstance(scores, str | bytes | Mapping | Set):
            raise TypeError(f"one {type(scores).__name__} was returned for {len(rows)} completions; return a list of scores")
        results = list(scores)
        if len(results) != len(rows):
            raise ValueError(f"{len(results)} scores were returned for {len(rows)} completions")
        return results

    async def _together(self, each: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        async def score_row(values: Mapping[str, Any]) -> Any:
            try:
                return await self.function(**self._keywords(values))
            except SystemExit as error:  # it would end the loop, and the other rows with it
                raise RuntimeError(f"the function ended by SystemExit: {error}") from error

        tasks = [asyncio.ensure_future(score_row(values)) for values in each]
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)  # a task that refuses cancellation ends with the process
        cancelled = RuntimeError("the function was cancelled from within")
        return [
            OVERRUN if task in late else cancelled if task.cancelled() else task.exception() or task.result() for task in tasks
        ]

    def _keywords(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [name for name in self.required if name not in values]
        if missing:
            raise ValueError(f"the row has no {missing[0]!r}, which the function takes")
        arguments = (
            values if self.takes_all else {name: values[name] for name in self.required + self.optional if name in values}
        )
        return {**arguments, **self.kwargs}

    @property
    def missing_settings(self) -> list[str]:
        """Return the settings of a built-in reward that ``kwargs`` must have and has not."""
        return [] if self.is_users else [name for name in self.required if name not in FROM_ROW | COLUMNS]

    def check_settings(self, where: str) -> None:
        """Raise ValueError for a setting of a built-in reward that does not fit the type of its parameter. ``where``: their key."""
        if self.is_users:
            return
        types = typing.get_type_hints(self.function)
        ranges = full_type_hints(self.function)
        settings = {name: read_value(types[name], value, f"{where}.{name}") for name, value in self.kwargs.items()}
        check_fields(make_dataclass("Settings", [(name, ranges[name]) for name in settings])(**settings), where)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], source: str = "") -> None:
        """Raise ValueError, one line, if no row has a value for a required argument. ``rows``: the rows' columns. ``source``: the
        setting that names their file, for the message."""
        columns: set[str] = set()
        missing = set(self.required) - BATCHED
        if absent := [name for name in self.required if name in TRL_ONLY and not any(name in row for row in rows)]:
            raise self.refusal(f"{absent[0]}, which TRL passes, does not exist here; give it a default")
        for row in rows:
            missing -= _values("", "", row).keys()
            if not missing:
                return
            columns |= {key for key, value in row.items() if value is not None}
        if missing:
            hint = " (data.answer_key names the answer's column)" if missing & {"answer", "ground_truth"} else ""
            where = f" of {source}" if source else ""
            raise self.refusal(
                f"no row{where} has {', '.join(sorted(missing))}{hint}; the columns are {', '.join(sorted(columns))}"
            )

    def refusal(self, why: str) -> ValueError:
        """Return the error for a function that cannot be called; it names the function, its arguments and what is
        allowed."""
        return ValueError(f"{self.label} takes ({', '.join(self.required + self.optional)}): {why}. Arguments may be {ALLOWED}")


def bind_reward(function: Callable[..., Any], label: str, kwargs: Mapping[str, Any] | None = None) -> BoundReward:
    """Bind ``function``; ``kwargs`` are arguments from the configuration, for a class those of its constructor.

    Raises ValueError, one line, for arguments that cannot be given by name, for a function that returns no result (a
    generator, a class without ``__call__``), and for ``kwargs`` that it does not take.
    """
    kwargs = kwargs or {}
    is_class = inspect.isclass(function)
    bound = BoundReward(label, function, kwargs=kwargs, is_class=is_class)
    if isinstance(function, type) and not any("__call__" in vars(base) for base in function.__mro__):
        raise bound.refusal("it is a class without __call__: its objects return no score")
    is_plain = inspect.isroutine(function) or isinstance(function, functools.partial)
    called = function if is_plain else (function if isinstance(function, type) else type(function)).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise bound.refusal("it is a generator (it has a yield); it must return the score")
    try:
        parameters = list(inspect.signature(called if is_class else function).parameters.values())[int(is_class) :]
        if is_class:
            inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise bound.refusal(f"its constructor, with kwargs={dict(kwargs)}: {error}") from error
    except ValueError as error:
        raise bound.refusal(f"its signature cannot be read: {error}") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    settings = {} if is_class else kwargs
    bound = replace(
        bound,
        required=tuple(p.name for p in named if p.default is p.empty and p.name not in settings),
        optional=tuple(p.name for p in named if p.default is not p.empty and p.name not in settings),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(called),
    )
    by_position = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    if by_position:
        raise bound.refusal(f"{by_position[0]} cannot be given by name")
    if not named and not bound.takes_all:
        raise bound.refusal("it takes nothing by name")
    for name in settings:
        if name in FROM_ROW or not (bound.takes_all or name in (p.name for p in named)):
            free = [p.name for p in named if p.name not in FROM_ROW]
            hint = nearest(name, free) or ";"
            raise bound.refusal(f"kwargs.{name} is not one of its settings{hint} its settings are {', '.join(free) or 'none'}")
    return bound


def right_answer(row: Mapping[str, Any]) -> Any:
    """Return the row's answer (verl's ``ground_truth``), or None."""
    nested = row.get("reward_model")
    truths = row.get("ground_truth"), row.get("answer"), nested.get("ground_truth") if isinstance(nested, Mapping) else None
    return next((value for value in truths if value is not None), None)


def _values(prompt: str, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return every name that the row has a value for. Missing answers are left out."""
    columns = {**row, "ground_truth": right_answer(row), "extra_info": row.get("extra_info") or {}}
    values = {key: value for key, value in columns.items() if value is not None or key not in ("answer", "ground_truth")}
    if turns := row.get(TURNS):
        response = "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")
    chat = chat_messages(row, prompt)
    begun = str(chat[-1]["content"]) if chat and chat[-1]["role"] == "assistant" else ""
    return values | {"prompt": prompt, "response": response, "begun": begun, "solution_str": response, "row": row}


def _as_trl(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return prompt and completion as TRL passes them: messages where the prompt is a chat, text otherwise.

    What the prompt's last message begins of the answer belongs to the completion.
    """
    row, prompt = values["row"], values["prompt"]
    chat = chat_messages(row, prompt)
    if chat is None:
        return prompt, row.get(TURNS) or values["response"]
    turns = list(row.get(TURNS) or [{"role": "assistant", "content": values["response"]}])
    if chat[-1]["role"] != "assistant":
        return chat, turns
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), None)
    if first is None:
        return chat[:-1], [chat[-1], *turns]
    turns[first] = {**turns[first], "content": str(chat[-1]["content"]) + turns[first]["content"]}
    return chat[:-1], turns


def chat_messages(row: Mapping[str, Any], prompt: str) -> list[Any] | None:
    """Return the row's prompt as chat messages, None for text.

    A last message of the assistant is the beginning of its answer if ``prompt``, the prompt's text, ends with it; other
    columns of the name ``messages`` hold whole conversations.
    """
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping):
        return None
    begun = str(last.get("content") or "").rstrip()
    is_prompt = last.get("role") != "assistant" or (begun and prompt.rstrip().endswith(begun))
    return messages if is_prompt else None
