"""A reward function's arguments, bound by their names: this project's signature, verl's and TRL's.

| arguments | of | value |
|---|---|---|
| ``prompt``, ``response``, ``row`` | this project | texts, and the row's columns |
| ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info`` | verl | the response; the answer; ``extra_info`` or ``{}`` |
| ``prompts``, ``completions``, ``completion_ids`` | TRL | lists over rows; any of them makes the function a batched one |
| any other | all | the row's column of that name; of a batched function the list of them |

``**kwargs`` takes all the others. An argument with a default keeps it where there is no value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = tuple[str, str, dict[str, Any]]  # prompt, response, the row's columns

BATCHED = frozenset(("prompts", "completions", "completion_ids"))
ALLOWED = (
    "prompt, response, row; or verl's data_source, solution_str, ground_truth, extra_info; or TRL's prompts, completions, "
    "completion_ids; and columns of the row"
)


@dataclass(frozen=True)
class BoundReward:
    """``label``: the function's configuration key and name, for messages. ``required`` and ``optional``: arguments without and
    with a default. ``takes_all``: there is a ``**kwargs``."""

    label: str
    function: Callable[..., Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    @property
    def batched(self) -> bool:
        """Whether a call takes lists over many rows and returns a list."""
        return not BATCHED.isdisjoint(self.required + self.optional)

    @property
    def takes_ids(self) -> bool:
        """Whether rows must have ``completion_ids``, the response's tokens."""
        return "completion_ids" in self.required + self.optional

    def call(self, rows: Sequence[Row]) -> list[Any]:
        """What the function returns for each row; one row for a function that is not batched.

        Raises ValueError for a row without a required argument, and for a list of another length; and what the function raises.
        """
        each = [_values(*row) for row in rows]
        if not self.batched:
            return [self.function(**self._keywords(values)) for values in each]
        columns = {key: [values.get(key) for values in each] for key in {*self.required, *(key for row in each for key in row)}}
        chats = [_messages(values["row"]) for values in each]
        columns["prompts"] = [chat or values["prompt"] for chat, values in zip(chats, each, strict=True)]
        columns["completions"] = [
            [{"role": "assistant", "content": values["response"]}] if chat else values["response"]
            for chat, values in zip(chats, each, strict=True)
        ]
        results = list(self.function(**self._keywords(columns)))
        if len(results) != len(rows):
            raise ValueError(f"{len(results)} scores were returned for {len(rows)} completions")
        return results

    def _keywords(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [name for name in self.required if name not in values]
        if missing:
            raise ValueError(f"the row has no {missing[0]!r}, which the function takes")
        return values if self.takes_all else {name: values[name] for name in self.required + self.optional if name in values}

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raises ValueError, one line, if no row has a value for a required argument. ``rows``: the rows' columns."""
        columns: set[str] = set()
        missing = set(self.required) - BATCHED
        for row in rows:
            missing -= _values("", "", row).keys()
            if not missing:
                return
            columns |= row.keys()
        if missing:
            raise self.refusal(f"no row has {', '.join(sorted(missing))}; the columns are {', '.join(sorted(columns))}")

    def refusal(self, why: str) -> ValueError:
        """The error for a function that cannot be called; names it, its arguments and what is allowed."""
        return ValueError(f"{self.label} takes ({', '.join(self.required + self.optional)}): {why}. Arguments may be {ALLOWED}")


def bind_reward(function: Callable[..., Any], label: str) -> BoundReward:
    """Raises ValueError, one line, for a function with arguments that cannot be given by name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise BoundReward(label, function, (), (), False).refusal(f"its signature cannot be read: {error}") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = tuple(p.name for p in named if p.default is p.empty)
    optional = tuple(p.name for p in named if p.default is not p.empty)
    bound = BoundReward(label, function, required, optional, any(p.kind is p.VAR_KEYWORD for p in parameters))
    by_position = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    if by_position:
        raise bound.refusal(f"{by_position[0]} cannot be given by name")
    if not named and not bound.takes_all:
        raise bound.refusal("it takes nothing by name")
    return bound


def _values(prompt: str, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Every name that a row has a value for. Where the data have no answer, ``answer`` is none of them."""
    nested = row.get("reward_model")
    truths = row.get("ground_truth"), row.get("answer"), nested.get("ground_truth") if isinstance(nested, Mapping) else None
    truth = next((value for value in truths if value is not None), None)
    columns = {**row, "ground_truth": truth, "extra_info": row.get("extra_info") or {}}
    values = {key: value for key, value in columns.items() if value is not None or key not in ("answer", "ground_truth")}
    return values | {"prompt": prompt, "response": response, "solution_str": response, "row": row}


def _messages(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's prompt as chat messages, None for a text. ``messages`` that end in an answer are another column of the data."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return messages if isinstance(last, Mapping) and last.get("role") != "assistant" else None
