"""Settings of the rewards (``reward.*``, ``rewards.<name>.*``), and of a model that judges responses (``reward.judge``)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Seconds, Workers
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.rewards.answers import plain
from rlhf_spmd.rewards.binding import BoundReward, bind_reward, right_answer
from rlhf_spmd.rewards.format import check as check_pattern

REASONING_TAGS = ("<think>", "</think>")
FIELDS = ("prompt", "response", "answer")
LARGEST = 1e38  # score; finite in float32 too


@dataclass(frozen=True)
class JudgeConfig:
    """A model generates a verdict on each response, as LLM-as-a-judge does (Zheng et al., arXiv:2306.05685, single-answer
    grading); the number in it is the row's score.

    - template: the question: text with `{prompt}`, `{response}`, `{answer}` (recognised by a brace), or a file with it
    - pattern: regular expression of the number in a verdict; of the last match the first group counts, or all without a
      group. Null: the number that the verdict states as `[[8]]`, `"score": 8`, a line `Rating: 8`, `8/10`, `8 out of 10`, or
      alone, see [a judge](data_and_rewards.md#a-judge)
    - range: `[lowest, highest]` become 0 and 1, and a number outside is no verdict; null: the number as it is
    - max_response_length: tokens of a verdict
    - temperature: temperature of verdicts; 0: greedy
    """

    template: str = ""
    pattern: str | None = None
    range: list[float] | None = None
    max_response_length: PositiveInt = 256
    temperature: NonNegativeFloat = 0.0

    def check(self, where: str) -> None:
        """Raises ValueError that names the key and the value; reads the template's file."""
        if self.pattern is not None:
            check_pattern(where, self.pattern)
        limits = self.range
        if limits is not None and not (len(limits) == 2 and -LARGEST <= limits[0] < limits[1] <= LARGEST):
            raise ValueError(f"{where}.range={limits} must be [lowest, highest], two finite numbers in this order, or null")
        try:
            names = self.fields
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where}.template={self.template!r} is neither a text with {{response}} nor a file that can be read: {error}"
            ) from error
        for name in names:
            if name not in FIELDS:
                hint = nearest(name, FIELDS) or ";"
                raise ValueError(f"{where}.template: unknown field {{{name}}}{hint} known are {', '.join(FIELDS)}")
        if "response" not in names:
            raise ValueError(f"{where}.template has no field {{response}}, so the judge would not see what it judges")

    @cached_property
    def text(self) -> str:
        return self.template if "{" in self.template else Path(self.template).expanduser().read_text(encoding="utf-8")

    @property
    def fields(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.text)

    def render(self, values: Mapping[str, str]) -> str:
        """Returns the question about a row; braces in ``values`` (prompt, response, answer) are text."""
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], self.text)

    def score(self, verdict: str, cut: bool = False) -> float:
        """Returns the score. Raises ValueError with the reason if the verdict cannot be read.

        ``cut``: the verdict was cut at ``max_response_length``, so its last number may be incomplete, or without a pattern
        not the last.
        """
        text, is_sure = self._match(verdict) if self.pattern is not None else (stated_number(verdict, self.range), False)
        if cut and text and not is_sure:
            raise ValueError(
                f"max_response_length={self.max_response_length} cut the verdict before its number was sure: {verdict[-200:]!r}"
            )
        try:
            number = float(text or "")
        except ValueError:
            number = float("nan")
        lowest, highest = self.range or (-LARGEST, LARGEST)
        if not lowest <= number <= highest:
            wanted = f"no number from {lowest:g} to {highest:g}" if self.range else "no number"
            raise ValueError(f"{wanted} in the verdict {verdict[-200:]!r}")
        return (number - lowest) / (highest - lowest) if self.range else number

    def _match(self, verdict: str) -> tuple[str | None, bool]:
        """Returns what ``pattern`` finds, and whether text follows it."""
        assert self.pattern is not None, "there is a pattern to search for"
        matches = list(re.finditer(self.pattern, verdict, re.DOTALL))
        group = min(1, re.compile(self.pattern).groups)
        return (matches[-1].group(group), bool(verdict[matches[-1].end(group) :].lstrip(".,"))) if matches else (None, False)


_NUMBER = r"([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
_SCALE = r"(?:\s*\(?\s*(?:/|out\s+of\b|of\b)\s*(\d+(?:\.\d+)?)(?![\d.]*\d)\s*\)?)"  # /10, out of 10, (out of 10)
_LABEL = r"(?:(?:overall|final|total|my)\s+)*(?:rating|score|grade|reward|mark|points|verdict|result|total|overall)(?:\s+is)?"
_SAID = r"(?:the|my)\s+(?:(?:overall|final|total)\s+)?(?:rating|score|grade)\s+is\b"
# A number behind its name: Rating: 8, The score is 8, # Rating and 8 below, <score>8.
_LABELLED = (
    rf"(?:(?:^\W{{0,4}}|[.!?;]\s+)(?:(?:the\s+)?{_LABEL}\s*[:=]|{_SAID})|^#+[ \t]*{_LABEL}[ \t]*:?[ \t]*\n|<(?:rating|score|grade)>)"
    rf"\s*{_NUMBER}{_SCALE}?"
)
# How a verdict may state its number. Of the first form that occurs all must say the same.
STATED = tuple(
    re.compile(form, re.MULTILINE | re.IGNORECASE)
    for form in (
        rf"\[\[\s*{_NUMBER}\s*\]\]{_SCALE}?",
        rf"[\"'](?:\w+_)?(?:rating|score|grade|reward)[\"']\s*:\s*[\"']?{_NUMBER}{_SCALE}?[\"']?\s*(?=[,}}\n]|\Z)",
        rf"{_LABELLED}\s*(?:points?)?\s*[.!]?\s*(?:</\w+>\s*)?$",
        rf"(?<![\w.,/-]){_NUMBER}\s*(?:/|out\s+of\b)\s*(\d+(?:\.\d+)?)(?=\s*(?:[.,;!)](?!\d)|$))",
        rf"\A\s*{_NUMBER}{_SCALE}?\s*(?:points?)?\s*[.!]?\s*\Z",
    )
)

_REMARKED = re.compile(_LABELLED, re.MULTILINE | re.IGNORECASE)  # a labelled number that a remark may follow


def stated_number(verdict: str, limits: Sequence[float] | None) -> str | None:
    """Returns the number that a verdict states in one of the forms ``STATED``, or None: without one, and where two differ.

    The last two forms have no label. They are none where a labelled number differs (``Rating: 8, it covers 2/3.``).
    ``limits``: lowest and highest rating; a number of another scale (``4/5`` of 1 to 10) is none.
    """
    text = re.sub(r"\*\*|__|`", "", plain(verdict))
    for form in STATED:
        pairs = {(match[1], match[2]) for match in form.finditer(text)}
        if not pairs:
            continue
        numbers = {float(number) for number, _ in pairs}
        if form in STATED[-2:]:
            numbers |= {float(match[1]) for match in _REMARKED.finditer(text)}
        if len(numbers) > 1:
            return None
        scales = {float(scale) for _, scale in pairs if scale}
        return next(iter(pairs))[0] if limits is None or scales <= {float(limits[1])} else None
    return None


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

    needs: ClassVar = {"strip_reasoning": ("reasoning_tags",)}

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

    def check(self, where: str = "reward") -> None:
        """Raises ValueError that names the key and the value; imports the function's module to see that it exists."""
        if self.data_sources is not None and not self.data_sources:
            raise ValueError(f"{where}.data_sources=[] scores no row; name a data source, or leave it out for all")
        if self.judge is not None and self.retokenize is False:
            raise ValueError(f"{where}.retokenize=false: a judge reads text through its own tokenizer; leave it out")
        check_tags(f"{where}.reasoning_tags", self.reasoning_tags)
        if self.strip_reasoning and self.retokenize is False:
            raise ValueError(f"{where}.retokenize=false: with strip_reasoning a model reads text; leave it out")
        if self.strip_reasoning and self.function == "format" and "pattern" not in self.kwargs:
            raise ValueError(f"{where}.strip_reasoning=true leaves no tags for the function 'format'; leave it out")
        if self.function is None:
            given = next((key for key in ("kwargs", "by_group") if getattr(self, key)), None)
            if given:
                raise ValueError(f"{where}.{given} is for a function; give {where}.function, or leave it out")
            return
        bound = self.bind(where)
        if missing := bound.missing_settings:
            raise ValueError(
                f"{where}.function={self.function!r} needs {', '.join(f'{where}.kwargs.{name}' for name in missing)}; give a value"
            )
        if self.by_group and not bound.batched:
            raise bound.refusal(f"with {where}.by_group it must take lists over rows (prompts, completions or completion_ids)")
        self._hook(bound, "check", f"{where}.kwargs", **self.kwargs)

    def _hook(self, bound: BoundReward, name: str, *args: Any, **kwargs: Any) -> None:
        """Calls function ``name`` of a built-in reward's module, if there is one. Raises what it raises."""
        if not bound.is_own:
            try:
                getattr(sys.modules[bound.function.__module__], name, lambda *_, **__: None)(*args, **kwargs)
            except TypeError as error:  # a setting is missing or has another type
                raise bound.refusal(f"with kwargs={self.kwargs}: {error}") from error

    def check_no_model(self, where: str) -> None:
        """Raises ValueError for a setting of a scoring model if there is none."""
        for key in ("model_weight", "retokenize", "apply_chat_template", "chat_template", "chat_template_kwargs"):
            if (value := getattr(self, key)) != getattr(RewardConfig(), key):
                raise ValueError(f"{where}.{key}={value} does nothing without a model that scores; leave it out")

    @property
    def after_failure(self) -> str:
        """What happens to a row whose call failed, for messages; follows the reward's key."""
        return "default=null leaves such rows out" if self.default is None else f"default={self.default} is their score"

    @property
    def scorer(self) -> str:
        """What scores, for messages."""
        return f"function {self.function!r}" if self.function is not None else "model" if self.judge is None else "judge"

    def bind(self, where: str) -> BoundReward:
        """Returns the function with its arguments bound. Raises ValueError, one line, if it is not found or cannot be
        bound."""
        assert self.function is not None, "there is a function to bind"
        label = f"{where}.function={self.function!r}"
        return bind_reward(resolve_reward(self.function, f"{where}.function"), label, self.kwargs)

    def check_together(self, where: str, run_timeout_s: float) -> None:
        """Checks against the program's limit of silence. Raises ValueError."""
        if self.function is not None and self.timeout_s >= run_timeout_s:
            raise ValueError(
                f"{where}.timeout_s={self.timeout_s}: other ranks wait for a call, and no longer than run.timeout_s={run_timeout_s}; "
                "lower the first or raise the second"
            )

    def chooses(self, row: Mapping[str, Any]) -> bool:
        """True if this reward scores a row with these columns."""
        return self.data_sources is None or row.get("data_source") in self.data_sources

    def misses_answers(self, where: str, rows: Sequence[Mapping[str, Any]]) -> bool:
        """True if the user's function takes an optional answer, but no row that it scores has one."""
        chosen = [row for row in rows if self.chooses(row)]
        if self.function is None or not chosen or any(right_answer(row) is not None for row in chosen):
            return False
        bound = self.bind(where)
        return bound.is_own and not {"answer", "ground_truth"}.isdisjoint(bound.optional)

    def check_rows(self, where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str] = ()) -> None:
        """Checks the data: every data source has rows, required arguments have columns, a judge's rows have answers.

        Rows for training and for validation are checked separately. ``places``: setting and id of each row, as in
        ``data.path, row 3``. Raises ValueError.
        """
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
            for source, its in of_each.items() or [("", [])]:
                bound.check_rows(its, source)
            self._hook(bound, "check_rows", where, chosen, named)


def check_tags(where: str, tags: Sequence[str]) -> None:
    """Raises ValueError unless ``tags`` are an opening and a closing tag, with one name if both are in angle brackets."""
    if len(tags) != 2 or tags[0] == tags[1] or not all(tag.strip() for tag in tags):
        raise ValueError(f"{where}={list(tags)} must be two different texts: [opening, closing]")
    first, last = (re.fullmatch(form, tag.strip()) for form, tag in zip((r"<(\w+)>", r"</(\w+)>"), tags, strict=True))
    if first and last and first[1] != last[1]:
        raise ValueError(f"{where}={list(tags)}: the closing tag of {tags[0]} is </{first[1]}>")


def reward_key(name: str) -> str:
    """Returns the configuration key of a named reward, for messages."""
    return "reward" if name == "reward" else f"rewards.{name}"


def named_rewards(reward: RewardConfig, rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Returns ``rewards``, plus ``reward`` under that name if it is set. Raises ValueError if both are given."""
    given = {} if reward == RewardConfig() else {"reward": reward}
    if given and "reward" in rewards:
        raise ValueError("reward and rewards.reward are the same reward; give one of them")
    return given | dict(rewards)


def resolve_reward(name: str, where: str = "reward.function") -> Callable[..., Any]:
    """Returns the function called ``name``; see :func:`registry.resolve`. verl's ``compute_score`` may stand in for
    ``score``."""
    exports = "score"
    if "." in name and not registry.split_name(name)[1]:
        module = registry.find(where, "rlhf_spmd.rewards", name, "__name__")
        exports = next((found for found in ("score", "compute_score") if hasattr(module, found)), "score")
    return registry.resolve(where, "rlhf_spmd.rewards", name, exports)
