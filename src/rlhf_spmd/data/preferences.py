"""Rows that say which of two responses is better, or whether one is good: pairs for preferences, single responses for KTO.

A row of the data becomes a group of two rows of a batch, which nothing cuts apart (``Objective.keep_groups``); the field
``chosen`` [rows] says which of the two is preferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.encoding import PromptEncoder, check_messages
from rlhf_spmd.data.files import DataError, Row

HUMAN, TURN = "\n\nHuman:", "\n\nAssistant:"  # before what each says in dialogues that are one text, as those of hh-rlhf


@dataclass(frozen=True)
class Response:
    """``prompt``: text or messages. ``numbers``: fields of the row."""

    prompt: Any
    text: str
    row: Row
    numbers: dict[str, float]


@dataclass(frozen=True)
class ResponsesConfig(DatasetConfig):
    """``max_length`` counts tokens of prompt and response; rows of which one is longer are dropped."""

    max_length: int = 1024
    filter_overlong: bool = True
    append_eos: bool = True

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "max_length", least=2)


@dataclass(frozen=True)
class PreferencesConfig(ResponsesConfig):
    """``data`` of algorithms that learn from pairs; batch sizes count pairs.

    A row has ``prompt_key`` (text or messages), ``chosen_key`` and ``rejected_key`` (text or the assistant's message); or no prompt
    and two whole dialogues, whose common beginning it is: messages, or text with turns ``\\n\\nHuman:`` and ``\\n\\nAssistant:``; or
    the fields of PKU-SafeRLHF. ``margin_key``, where a row has it: by how much the chosen one is better, at least 0.
    """

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    better: ClassVar[str] = "better_response_id"  # which of PKU-SafeRLHF's responses is the chosen one

    def pair(self, row: Row) -> tuple[Response, Response]:
        """The chosen and the rejected response. Raises DataError."""
        if self.chosen_key not in row and self.better in row:
            first, texts = _index(row, self.better), [row.get(f"response_{i}", "PKU-SafeRLHF's") for i in (0, 1)]
            prompt: Any = row.get(self.prompt_key, "data.prompt_key")
            texts = [texts[first], texts[1 - first]]
        else:
            texts = [row.get(self.chosen_key, "data.chosen_key"), row.get(self.rejected_key, "data.rejected_key")]
            prompt = row.get(self.prompt_key, "data.prompt_key") if self.prompt_key in row else common_prompt(texts, row.where)
        margin = _number(row, self.margin_key, 0.0)
        chosen, rejected = (
            Response(prompt, answer_to(prompt, text, row.where), row, {"chosen": is_chosen, "margin": margin})
            for text, is_chosen in zip(texts, (1.0, 0.0), strict=True)
        )
        return chosen, rejected

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> GroupDataset:
        return GroupDataset([self.pair(row) for row in rows], self, tokenizer, "pairs")


@dataclass(frozen=True)
class SafetyPreferencesConfig(PreferencesConfig):
    """Pairs whose chosen response is the safer one. ``safe_chosen_key`` and ``safe_rejected_key``: whether each is safe, true or false;
    or PKU-SafeRLHF's fields. They become the field ``safe`` [rows]: 1 or -1."""

    safe_chosen_key: str = "safe_chosen"
    safe_rejected_key: str = "safe_rejected"
    better: ClassVar[str] = "safer_response_id"

    def pair(self, row: Row) -> tuple[Response, Response]:
        pair = super().pair(row)
        if self.safe_chosen_key not in row and self.better in row:
            first = _index(row, self.better)
            flags = [_flag(row, f"is_response_{i}_safe", "PKU-SafeRLHF's") for i in (first, 1 - first)]
        else:
            keys = (self.safe_chosen_key, "data.safe_chosen_key"), (self.safe_rejected_key, "data.safe_rejected_key")
            flags = [_flag(row, *key) for key in keys]
        if flags == [False, True]:
            raise DataError(f"{row.where}: the chosen response, which is the safer one, is not safe, but the rejected one is")
        for response, is_safe in zip(pair, flags, strict=True):
            response.numbers["safe"] = 1.0 if is_safe else -1.0
        return pair


@dataclass(frozen=True)
class UnpairedConfig(ResponsesConfig):
    """``data`` of KTO; batch sizes count responses. A row has a prompt, ``completion_key`` and ``label_key`` (true: desirable); or is
    a pair as :class:`PreferencesConfig` has them, which is a desirable and an undesirable response.

    Field ``desirable`` [rows]: 1 or 0. Each row of a batch comes with a second one of the same label: its prompt with the completion
    of the next row that has another prompt, from which KTO's baseline is estimated.
    """

    completion_key: str = "completion"
    label_key: str = "label"
    one_chunk: ClassVar[bool] = True  # any row may be another's second response

    def single(self, row: Row) -> list[Response]:
        """The row's response, or both of a pair. Raises DataError."""
        pairs = PreferencesConfig(path=self.path, prompt_key=self.prompt_key)
        if self.completion_key not in row and (pairs.chosen_key in row or pairs.better in row):
            return [replace(response, numbers={"desirable": response.numbers["chosen"]}) for response in pairs.pair(row)]
        prompt = row.get(self.prompt_key, "data.prompt_key")
        text = answer_to(prompt, row.get(self.completion_key, "data.completion_key"), row.where)
        return [Response(prompt, text, row, {"desirable": float(_flag(row, self.label_key, "data.label_key"))})]

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> GroupDataset:
        responses = [response for row in rows for response in self.single(row)]
        count = len(responses)
        groups = []
        for at, response in enumerate(responses):
            others = (responses[(at + step) % count] for step in range(1, count))
            other = next((other for other in others if other.prompt != response.prompt and other.text.strip()), None)
            if other is None:
                raise DataError(f"'{self.path}' has one prompt only; KTO compares with responses to other prompts")
            groups.append((response, replace(response, text=other.text)))
        return GroupDataset(groups, self, tokenizer, "responses")


class GroupDataset(TokenDataset):
    """``batch(indices, row_ids)`` has for each index two rows with ``prompt_ids`` and ``response_ids`` (Ragged int64), and as float64
    [rows] their numbers and ``entry``. Groups with an empty response, or with the same response twice, are left out and counted."""

    group_size = 2

    def __init__(self, groups: Sequence[tuple[Response, Response]], config: ResponsesConfig, tokenizer: Any, noun: str) -> None:
        self.noun = noun
        found = [unusable(group) for group in groups]
        usable = [group for group, reason in zip(groups, found, strict=True) if not reason]
        flat = [response for group in usable for response in group]
        columns = _encode(flat, config, tokenizer)
        numbers = {name: [response.numbers[name] for response in flat] for name in (flat[0].numbers if flat else ())}
        limit, drop = ("max_length", config.max_length), ("filter_overlong", config.filter_overlong)
        super().__init__([group[0].row for group in usable], columns, limit, drop, numbers)
        self.tally.left_out = dict(Counter(reason for reason in found if reason))
        self.tally.first_left_out = next((g[0].row.where for g, reason in zip(groups, found, strict=True) if reason), "")


def unusable(group: tuple[Response, Response]) -> str:
    """Why a group teaches nothing; empty if it may."""
    if not all(response.text.strip() for response in group):
        return "response is empty"
    if any(HUMAN in response.text for response in group):
        return "dialogues part before their last turn"
    is_pair = "chosen" in group[0].numbers
    return "two responses are equal" if is_pair and group[0].text == group[1].text else ""


def common_prompt(dialogues: Sequence[Any], where: str) -> Any:
    """The beginning that two dialogues share, up to the last turn that is a response in both. Raises DataError."""
    one, other = dialogues
    if isinstance(one, str) and isinstance(other, str):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        end = one.rfind(TURN, 0, same)
        if end < 0:
            raise DataError(
                f"{where}: without a prompt two texts must be dialogues that begin alike, up to a turn {TURN!r}; name the prompt's "
                f"column as data.prompt_key if there is one"
            )
        return one[: end + len(TURN)]
    if isinstance(one, str) or isinstance(other, str):
        raise DataError(f"{where}: of the two responses one is text and one is messages")
    first, second = check_messages(one, where), check_messages(other, where)
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[: min(same, len(first) - 1, len(second) - 1)]


def answer_to(prompt: Any, response: Any, where: str) -> str:
    """The text of a response: text, the assistant's message, or a dialogue that goes on from the prompt. Raises DataError."""
    if isinstance(response, str):
        begins = isinstance(prompt, str) and prompt.endswith(TURN) and response.startswith(prompt)
        return response[len(prompt) :] if begins else response
    messages = [response] if isinstance(response, dict) else response
    messages = check_messages(messages, where)
    if not isinstance(prompt, str) and messages[: len(prompt)] == list(prompt):
        messages = messages[len(prompt) :]
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise DataError(f"{where}: a response must be one message of the assistant after the prompt; there are: {roles}")
    return str(messages[0]["content"])


def _encode(responses: Sequence[Response], config: ResponsesConfig, tokenizer: Any) -> dict[str, list[list[int]]]:
    if config.append_eos and tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
    end = [int(tokenizer.eos_token_id)] if config.append_eos else []
    encoder = PromptEncoder(tokenizer, config)
    prompts = encoder.encode([response.prompt for response in responses], [response.row.where for response in responses])
    texts = encoder.tokenize([response.text for response in responses], special_tokens=False)
    return {"prompt_ids": [ids for ids, _ in prompts], "response_ids": [[*ids, *end] for ids in texts]}


def _index(row: Row, key: str) -> int:
    value = row.get(key, "PKU-SafeRLHF's")
    if value not in (0, 1):
        raise DataError(f"{row.where}: '{key}' must be 0 or 1, not {value!r}")
    return int(value)


def _flag(row: Row, key: str, setting: str) -> bool:
    value = row.get(key, setting)
    if value not in (0, 1):  # true and false are, too
        raise DataError(f"{row.where}: '{key}' must be true or false, not {value!r}")
    return bool(value)


def _number(row: Row, key: str, default: float) -> float:
    value = row.get(key, "data.margin_key") if key in row else default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise DataError(f"{row.where}: '{key}' must be a number of at least 0, not {value!r}")
    return float(value)
