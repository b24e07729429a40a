"""Settings of the rewards (``reward.*``, ``rewards.<name>.*``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import Fraction, PositiveFloat, PositiveInt, Range, Seconds
from rlhf_spmd.rewards.binding import BoundReward, bind_reward, right_answer
from rlhf_spmd.rewards.judge import JudgeConfig

FLOAT32_MAX = 3.4028234e38
Float32 = Annotated[float, Range(least=-FLOAT32_MAX, most=FLOAT32_MAX)]


@dataclass(frozen=True)
class RewardConfig:
    """A row's reward is ``weight`` * (score of ``function``) + ``model_weight`` * (score of the reward model), where present.

    - function: a built-in name, `package.module:function` or `file.py:function`; its arguments are bound by name
    - kwargs: arguments of the function that are no columns; a class's are its constructor's (verl's `reward_kwargs`)
    - by_group: call a function that takes lists once for the responses to each prompt
    - model: directory of a reward model, the same as `models.reward.path`
    - retokenize: the reward model reads text through its own tokenizer: `auto`, if its vocabulary is not the actor's; `true`;
      `false`, the same token ids
    - apply_chat_template: of such a model, as `data.apply_chat_template`; `auto` is `true` where that is. Of a judge: `auto` is
      `true` where its tokenizer has a template
    - chat_template: of such a model or a judge, in place of its tokenizer's: a file or the Jinja text
    - judge: the model generates a verdict on each response, and the number in it is the score: see [a
      judge](own_data_and_reward.md#a-judge)
    - data_sources: list: only rows whose `data_source` is in it are scored; see [several
      rewards](own_data_and_reward.md#several-rewards) for the others; null: all rows
    - weight: of the function's score
    - model_weight: of the reward model's or the judge's score (`models.reward.path`)
    - timeout_s: limit of one call; below `run.timeout_s`
    - default: score of a row whose call failed; null: none, and the row is left out of what is learnt and measured
    - num_workers: processes per rank that scores
    - max_failure_rate: share of a step's calls that may fail (time-outs included) before the run ends with class `reward`; 1:
      all may fail once, not in the first step and not in two steps that follow each other
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
    judge: JudgeConfig | None = None
    data_sources: list[str] | None = None
    weight: Float32 = 1.0
    model_weight: Float32 = 1.0
    timeout_s: Seconds = 10.0
    default: Float32 | None = None
    num_workers: PositiveInt = 1
    max_failure_rate: Fraction = 1.0
    max_memory_gb: PositiveFloat = 16.0
    max_file_gb: PositiveFloat = 4.0

    def check(self, where: str = "reward") -> None:
        """Raises ValueError naming the key and the value; imports the function's module to see that it is there."""
        if self.data_sources is not None and not self.data_sources:
            raise ValueError(f"{where}.data_sources=[] scores no row; name a data source, or leave it out for all")
        if self.judge is not None and self.retokenize is False:
            raise ValueError(f"{where}.retokenize=false: a judge reads text through its own tokenizer; leave it out")
        if self.function is None:
            given = next((key for key in ("kwargs", "by_group") if getattr(self, key)), None)
            if given:
                raise ValueError(f"{where}.{given} is for a function; give {where}.function, or leave it out")
            return
        bound = self.bind(where)
        if self.by_group and not bound.batched:
            raise bound.refusal(f"with {where}.by_group it must take lists over rows (prompts, completions or completion_ids)")
        self._hook(bound, "check", f"{where}.kwargs", **self.kwargs)

    def _hook(self, bound: BoundReward, name: str, *args: Any, **kwargs: Any) -> None:
        """Call what the module of a built-in reward has to say under ``name``, if it has. Raises what that raises."""
        if not bound.is_own:
            try:
                getattr(sys.modules[bound.function.__module__], name, lambda *_, **__: None)(*args, **kwargs)
            except TypeError as error:  # a setting is missing, or of another type
                raise bound.refusal(f"with kwargs={self.kwargs}: {error}") from error

    def check_no_model(self, where: str) -> None:
        """Raises ValueError for a setting of a model, where none scores."""
        for key in ("model_weight", "retokenize", "apply_chat_template", "chat_template"):
            if (value := getattr(self, key)) != self.__dataclass_fields__[key].default:
                raise ValueError(f"{where}.{key}={value} does nothing without a model that scores; leave it out")

    @property
    def after_failure(self) -> str:
        """What becomes of a row whose call failed, for messages; after the reward's key."""
        return "default=null leaves such rows out" if self.default is None else f"default={self.default} is their score"

    @property
    def scorer(self) -> str:
        """What scores, for messages."""
        return f"function {self.function!r}" if self.function is not None else "model" if self.judge is None else "judge"

    def bind(self, where: str) -> BoundReward:
        """The function, its arguments bound by name. Raises ValueError, one line, where it cannot be found or bound."""
        assert self.function is not None, "there is a function to bind"
        label = f"{where}.function={self.function!r}"
        return bind_reward(resolve_reward(self.function, f"{where}.function"), label, self.kwargs)

    def check_together(self, where: str, run_timeout_s: float) -> None:
        """Against the program's limit of silence. Raises ValueError."""
        if self.function is not None and self.timeout_s >= run_timeout_s:
            raise ValueError(
                f"{where}.timeout_s={self.timeout_s}: other ranks wait for a call, and no longer than run.timeout_s={run_timeout_s}; "
                "lower the first or raise the second"
            )

    def chooses(self, row: Mapping[str, Any]) -> bool:
        """Whether this reward scores a row with these columns."""
        return self.data_sources is None or row.get("data_source") in self.data_sources

    def misses_answers(self, where: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the function has an argument for the answer, and can do without, and no row that it scores has one. Built-in
        functions check their rows themselves."""
        chosen = [row for row in rows if self.chooses(row)]
        if self.function is None or not chosen or any(right_answer(row) is not None for row in chosen):
            return False
        bound = self.bind(where)
        return bound.is_own and not {"answer", "ground_truth"}.isdisjoint(bound.optional)

    def check_rows(self, where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str] = ()) -> None:
        """Raises ValueError for a data source that no row is of, for an argument of the function that no row of the data for training
        or no row of those for validation has, and for a row without the answer that a judge is told. ``places``: setting and id of
        each row, as in ``data.path, row 3``."""
        for source in self.data_sources or ():
            if not any(row.get("data_source") == source for row in rows):
                there = sorted({str(row.get("data_source")) for row in rows})
                raise ValueError(
                    f"{where}.data_sources: no row has the data_source {source!r}; there are {', '.join(there[:20])}"
                )
        chosen = [row for row in rows if self.chooses(row)]
        if self.judge is not None and "answer" in self.judge.fields:
            bare = next((row for row in chosen if row.get("answer") is None), None)
            if bare is not None:
                raise ValueError(f"{where}.judge.template has {{answer}}, and row {bare.get('id')} has none (data.answer_key)")
        if self.function is not None:
            bound = self.bind(where)
            named = [places[i] if places else f"row {i}" for i, row in enumerate(rows) if self.chooses(row)]
            of_each: dict[str, list[Mapping[str, Any]]] = {}
            for place, row in zip(named, chosen, strict=True):
                of_each.setdefault(place.rpartition(", row ")[0], []).append(row)
            for its in of_each.values() or [[]]:
                bound.check_rows(its)
            self._hook(bound, "check_rows", where, chosen, named)


def reward_key(name: str) -> str:
    """The configuration key of a named reward, for messages."""
    return "reward" if name == "reward" else f"rewards.{name}"


def named_rewards(reward: RewardConfig, rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """``rewards``, with ``reward`` as the one of that name if it was given. Raises ValueError if both say what it is."""
    given = {} if reward == RewardConfig() else {"reward": reward}
    if given and "reward" in rewards:
        raise ValueError("reward and rewards.reward are the same reward; give one of them")
    return given | dict(rewards)


def resolve_reward(name: str, where: str = "reward.function") -> Callable[..., Any]:
    """The function called ``name``; see :func:`registry.resolve`. A module's ``compute_score`` (verl's name) stands in for
    ``score``."""
    exports = "score"
    if "." in name and not registry.split_name(name)[1]:
        module = registry.find(where, "rlhf_spmd.rewards", name, "__name__")
        exports = next((found for found in ("score", "compute_score") if hasattr(module, found)), "score")
    return registry.resolve(where, "rlhf_spmd.rewards", name, exports)
