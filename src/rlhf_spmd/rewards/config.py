"""Settings of the rewards (``reward.*``, ``rewards.<name>.*``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import FiniteFloat, Fraction, PositiveFloat, Seconds, Workers
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.rewards.binding import BoundReward, bind_reward
from rlhf_spmd.rewards.judge import JudgeConfig
from rlhf_spmd.rewards.row_values import right_answer

REASONING_TAGS = ("<think>", "</think>")


@dataclass(frozen=True)
class RewardConfig:
    """A row's reward is ``weight`` * (score of ``function``) + ``model_weight`` * (score of the reward model), if present.

    - function: a built-in name, `package.module:function` or `file.py:function`; its arguments are bound by name
    - kwargs: arguments of the function that are no columns; for a class those of its constructor (verl's
      `reward_kwargs`)
    - by_group: call a function that takes lists once for the responses to each prompt
    - model: directory of a reward model, the same as `models.reward.path`
    - retokenize: the reward model reads text through its own tokenizer: `auto`: if its vocabulary differs from the
      actor's; `true`; `false`: the same token ids
    - apply_chat_template: for such a model, like `data.apply_chat_template`; `auto` is `true` if that is. For a judge
      `auto` is `true` if its tokenizer has a template
    - chat_template: for such a model or a judge, in place of its tokenizer's: a file or the Jinja text
    - chat_template_kwargs: variables of that template: `{enable_thinking: false}`
    - strip_reasoning: score only what follows the last closing tag, by a function, a reward model or a judge. A response
      whose reasoning is not closed has an empty answer. `completion_ids` stay whole
    - reasoning_tags: the opening and the closing tag
    - judge: the model generates a verdict on each response, and the number in it is the score: see [a
      judge](data_and_rewards.md#a-judge)
    - data_sources: score only rows whose `data_source` is in this list; see [several
      rewards](data_and_rewards.md#several-rewards) for the others; null: all rows
    - weight: weight of the function's score
    - model_weight: weight of the reward model's or the judge's score (`models.reward.path`)
    - timeout_s: limit of one call; below `run.timeout_s`
    - default: score of a row whose call failed; null: no score, and the row is left out of learning and metrics
    - num_workers: processes per rank that scores, up to 1024
    - max_failure_rate: share of a step's calls that may fail (time-outs included) before the run ends with class
      `reward`; 1: all may fail, but not in the first step nor in two steps in a row
    - max_memory_gb: private memory of each such process, GiB; beyond it a call fails with MemoryError
    - max_file_gb: size of each file that such a process writes, GiB
    """

    function: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    by_group: bool = False
    model: str | None = None
    retokenize: bool | Literal["auto"] = "auto"
    apply_chat_template: bool | Literal["auto"] = "auto"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    strip_reasoning: bool = False
    reasoning_tags: list[str] = field(default_factory=lambda: list(REASONING_TAGS))
    judge: JudgeConfig | None = None
    data_sources: list[str] | None = None
    weight: FiniteFloat = 1.0
    model_weight: FiniteFloat = 1.0
    timeout_s: Seconds = 10.0
    default: FiniteFloat | None = None
    num_workers: Workers = 1
    max_failure_rate: Fraction = 1.0
    max_memory_gb: PositiveFloat = 16.0
    max_file_gb: PositiveFloat = 4.0

    needs: ClassVar = {"strip_reasoning": ("reasoning_tags",), "function": ("kwargs", "by_group")}
    rules: ClassVar[Rules] = (
        Rule(
            ("data_sources",),
            lambda s: s.data_sources == [],
            "no row is scored",
            "name a data source, or leave it out for all",
        ),
        Rule(
            ("retokenize",),
            lambda s: s.judge is not None and s.retokenize is False,
            "a judge reads text through its own tokenizer",
            "leave it out",
        ),
        Rule(
            ("retokenize", "strip_reasoning"),
            lambda s: s.strip_reasoning and s.retokenize is False,
            "a model reads the text that is left",
            "leave the first out",
        ),
        Rule(
            ("strip_reasoning", "function"),
            lambda s: s.strip_reasoning and s.function == "format" and "pattern" not in s.kwargs,
            "no tags are left for the function to find",
            "leave the first out",
        ),
    )

    def check(self, where: str = "reward") -> None:
        """Raise ValueError that names the key and the value; imports the function's module to see that it exists."""
        check_tags(f"{where}.reasoning_tags", self.reasoning_tags)
        if self.function is None:
            return
        bound = self.bind(where)
        if missing := bound.missing_settings:
            raise ValueError(
                f"{where}.function={self.function!r} needs {', '.join(f'{where}.kwargs.{name}' for name in missing)}; give a value"
            )
        if self.by_group and not bound.batched:
            raise bound.refusal(f"with {where}.by_group it must take lists over rows (prompts, completions or completion_ids)")
        bound.check_settings(f"{where}.kwargs")
        bound.module_function("check")(f"{where}.kwargs", **self.kwargs)

    def check_no_model(self, where: str) -> None:
        """Raise ValueError for a setting of a scoring model if there is none."""
        for key in ("model_weight", "retokenize", "apply_chat_template", "chat_template", "chat_template_kwargs"):
            if (value := getattr(self, key)) != getattr(RewardConfig(), key):
                raise ValueError(f"{where}.{key}={value} does nothing without a model that scores; leave it out")

    @property
    def after_failure(self) -> str:
        """Return for messages, behind the reward's key, the setting of a row whose call failed, and what it does."""
        return "default=null leaves such rows out" if self.default is None else f"default={self.default} is their score"

    @property
    def scorer(self) -> str:
        """Return for messages what scores: the function with its name, the model, or the judge."""
        return f"function {self.function!r}" if self.function is not None else "model" if self.judge is None else "judge"

    def bind(self, where: str) -> BoundReward:
        """Return the function with its arguments bound. Raises ValueError, one line, if it does not exist or cannot be bound."""
        assert self.function is not None, "there is a function to bind"
        label = f"{where}.function={self.function!r}"
        return bind_reward(resolve_reward(self.function, f"{where}.function"), label, self.kwargs)

    def check_together(self, where: str, run_timeout_s: float) -> None:
        """Raise ValueError where settings of other sections contradict these; see :class:`RewardInRun`."""
        check_rules(RUN_RULES, RewardInRun(self.function, self.timeout_s, run_timeout_s), where)

    def applies_to(self, row: Mapping[str, Any]) -> bool:
        """Return True if this reward scores a row with these columns."""
        return self.data_sources is None or row.get("data_source") in self.data_sources

    def misses_answers(self, where: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the user's function takes an optional answer, but no row that it scores has one."""
        scored = [row for row in rows if self.applies_to(row)]
        if self.function is None or not scored or any(right_answer(row) is not None for row in scored):
            return False
        bound = self.bind(where)
        return bound.is_user_function and not {"answer", "ground_truth"}.isdisjoint(bound.optional)

    def check_rows(self, where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str] = ()) -> None:
        """Raise ValueError for a data source without rows, a required argument without a column, a judge's row without an answer.

        Rows for training and for validation are checked separately. ``places``: setting and id of each row, as
        ``data.path, row 3``.
        """
        for source in self.data_sources or ():
            if not any(row.get("data_source") == source for row in rows):
                sources = sorted({str(row.get("data_source")) for row in rows})
                raise ValueError(
                    f"{where}.data_sources: no row has the data_source {source!r}; there are {', '.join(sources[:20])}"
                )
        scored = [row for row in rows if self.applies_to(row)]
        if self.judge is not None and "answer" in self.judge.fields:
            unanswered = next((row for row in scored if row.get("answer") is None), None)
            if unanswered is not None:
                row_id = unanswered.get("id")
                raise ValueError(f"{where}.judge.template has {{answer}}, and row {row_id} has none (data.answer_key)")
        if self.function is not None:
            bound = self.bind(where)
            scored_places = [places[i] if places else f"row {i}" for i, row in enumerate(rows) if self.applies_to(row)]
            rows_of_setting: dict[str, list[Mapping[str, Any]]] = {}
            for place, row in zip(scored_places, scored, strict=True):
                rows_of_setting.setdefault(place.rpartition(", row ")[0], []).append(row)
            for setting, setting_rows in rows_of_setting.items() or [("", [])]:
                bound.check_rows(setting_rows, setting)
            bound.module_function("check_rows")(where, scored, scored_places)


@dataclass(frozen=True)
class RewardInRun:
    """What ``RUN_RULES`` read: settings of a reward and of the run. ``run_timeout_s``: ``run.timeout_s``."""

    function: str | None
    timeout_s: float
    run_timeout_s: float


RUN_RULES: Rules = (
    Rule(
        ("timeout_s",),
        lambda s: s.function is not None and s.timeout_s >= s.run_timeout_s,
        "other ranks wait for a call, and no longer than run.timeout_s={s.run_timeout_s}",
        "lower the first or raise the second",
    ),
)


def check_tags(where: str, tags: Sequence[str]) -> None:
    """Raise ValueError unless ``tags`` are an opening and a closing tag, with one name if both are in angle brackets."""
    if len(tags) != 2 or tags[0] == tags[1] or not all(tag.strip() for tag in tags):
        raise ValueError(f"{where}={list(tags)}: two different texts are needed; give [opening, closing]")
    opening = re.fullmatch(r"<(\w+)>", tags[0].strip())
    closing = re.fullmatch(r"</(\w+)>", tags[1].strip())
    if opening and closing and opening[1] != closing[1]:
        raise ValueError(f"{where}={list(tags)}: the closing tag of {tags[0]} is </{opening[1]}>")


def reward_key(name: str) -> str:
    """Return the configuration key of a named reward, for messages."""
    return "reward" if name == "reward" else f"rewards.{name}"


def named_rewards(reward: RewardConfig, rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Return ``rewards``, plus ``reward`` under that name if it is set. Raises ValueError if both are given."""
    unnamed = {} if reward == RewardConfig() else {"reward": reward}
    if unnamed and "reward" in rewards:
        raise ValueError("reward and rewards.reward are the same reward; give one of them")
    return unnamed | dict(rewards)


def resolve_reward(name: str, where: str = "reward.function") -> Callable[..., Any]:
    """Return the function called ``name``, see :func:`registry.resolve`. A module means its ``score``, or verl's ``compute_score``."""
    function_name = "score"
    if "." in name and not registry.split_name(name)[1]:
        module = registry.find(where, "rlhf_spmd.rewards", name, "__name__")
        function_name = next((name for name in ("score", "compute_score") if hasattr(module, name)), "score")
    return registry.resolve(where, "rlhf_spmd.rewards", name, function_name)
