"""Rows that say which of two responses is better, or whether one is good: preference pairs, and single responses for KTO.

A row of the data becomes a group of two rows of a batch, which stay together (``Objective.keep_groups``). Field
``chosen`` [rows] marks the preferred one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlhf_spmd.data.conversations import Example, encode_examples
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.files import DataError, Row, RowError, RowOrError, named_row
from rlhf_spmd.data.messages import Message, argument_text, check_messages, is_text, row_weight, with_arguments
from rlhf_spmd.data.sft import ResponsesConfig
from rlhf_spmd.data.tokenizer import shared_length

PKU = "PKU-SafeRLHF's"  # stands for a setting that names a column
HUMAN, TURN = "\n\nHuman:", "\n\nAssistant:"  # speaker marks of dialogues that are one text, as in hh-rlhf


@dataclass(frozen=True)
class Response:
    """One response to a prompt.

    - prompt: text or messages
    - answer: text, or a message that is more than its text
    - numbers: number fields of the row in a batch
    - from_dialogue: prompt and response are one dialogue in the data
    """

    prompt: Any
    answer: str | Message
    row: Row
    numbers: dict[str, float]
    from_dialogue: bool = False


@dataclass(frozen=True)
class PreferencesConfig(ResponsesConfig):
    """``data`` of algorithms that learn from pairs; batch sizes count pairs.

    A row has ``prompt_key`` (text or messages), ``chosen_key`` and ``rejected_key`` (text or the assistant's message).
    Or it has no prompt and two dialogues, whose common beginning is the prompt: messages, or text with turns
    ``\\n\\nHuman:`` and ``\\n\\nAssistant:``. Or it has the fields of PKU-SafeRLHF.

    - train_batch_size: pairs per step
    - val_batch_size: pairs per validation batch; null: all
    - chosen_key: column of the better response; for `cost_model` the safer one
    - rejected_key: column of the other response
    - margin_key: column that says by how much it is better, at least 0; read by `reward_model`; rows may lack it unless
      this key is set
    """

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    better_index_column: ClassVar[str] = "better_response_id"  # PKU-SafeRLHF's: index of the chosen response

    def pair(self, row: Row) -> tuple[Response, Response]:
        """Return the chosen and the rejected response. Raises DataError."""
        keys = self.columns(row, ("chosen_key", "rejected_key"), "response_{}")
        texts = [_response(row, *key) for key in keys]
        with named_row(row.where):
            if self.prompt_key in row or keys[0][1] == PKU:
                prompt = whole_prompt(row.get(self.prompt_key, "data.prompt_key"), texts)
            else:
                prompt = common_prompt(texts)
        is_optional = self.margin_key == PreferencesConfig.margin_key
        margin = 0.0 if is_optional and self.margin_key not in row else row.get(self.margin_key, "data.margin_key")
        if margin is None and is_optional:
            margin = 0.0
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < float("inf"):
            raise row.error(f"'{self.margin_key}' must be a number of at least 0, not {margin!r}")
        chosen, rejected = (
            answer_to(prompt, text, row, {"chosen": is_chosen, "margin": float(margin)})
            for text, is_chosen in zip(texts, (1.0, 0.0), strict=True)
        )
        return chosen, rejected

    def columns(self, row: Row, settings: tuple[str, str], pku_column: str) -> list[tuple[str, str]]:
        """Return the columns of the chosen and rejected response, each with the setting that names it.

        They are those of ``settings``, or PKU-SafeRLHF's columns if the row has those; ``pku_column`` is their name with
        ``{}`` for the index. Raises DataError.
        """
        columns = [(getattr(self, setting), f"data.{setting}") for setting in settings]
        if columns[0][0] in row or self.better_index_column not in row:
            return columns
        first = _bit(row, self.better_index_column, PKU, "0 or 1")
        return [(pku_column.format(i), PKU) for i in (first, 1 - first)]

    def encode_chunk(self, rows: Sequence[Row], tokenizer: Any) -> GroupDataset:
        return GroupDataset([self.pair(row) for row in rows], self, tokenizer, "pairs")


@dataclass(frozen=True)
class SafetyPreferencesConfig(PreferencesConfig):
    """Pairs whose chosen response is the safer one, or PKU-SafeRLHF's fields. Field ``safe`` [rows]: 1 or -1.

    - safe_chosen_key: column that says whether the chosen response is safe
    - safe_rejected_key: column that says whether the rejected response is safe
    """

    safe_chosen_key: str = "safe_chosen"
    safe_rejected_key: str = "safe_rejected"
    better_index_column: ClassVar[str] = "safer_response_id"

    def pair(self, row: Row) -> tuple[Response, Response]:
        pair = super().pair(row)
        keys = self.columns(row, ("safe_chosen_key", "safe_rejected_key"), "is_response_{}_safe")
        flags = [_bit(row, *key) for key in keys]
        if flags == [0, 1]:
            raise row.error("the chosen response, which is the safer one, is not safe, but the rejected one is")
        for response, is_safe in zip(pair, flags, strict=True):
            response.numbers["safe"] = 1.0 if is_safe else -1.0
        return pair


@dataclass(frozen=True)
class UnpairedConfig(ResponsesConfig):
    """``data`` of KTO; batch sizes count responses. A row has a prompt, ``completion_key`` and ``label_key``. A pair as in
    :class:`PreferencesConfig` counts as a desirable and an undesirable response.

    Field ``desirable`` [rows]: 1 or 0. Each row of a batch comes with a second row of the same label: its prompt, with
    the completion of the next response that has this label and another prompt, cut to ``max_length``. KTO estimates its
    baseline from these.

    - train_batch_size: responses per step
    - val_batch_size: responses per validation batch; null: all
    - completion_key: column of a response
    - label_key: column with true for a desirable response
    """

    completion_key: str = "completion"
    label_key: str = "label"
    one_chunk: ClassVar[bool] = True  # any row may be another's second response

    def single(self, row: Row) -> list[Response]:
        """Return the row's response, or both of a pair. Raises DataError."""
        pairs = PreferencesConfig(path=self.path, prompt_key=self.prompt_key)
        if self.completion_key not in row and (pairs.chosen_key in row or pairs.better_index_column in row):
            return [replace(response, numbers={"desirable": response.numbers["chosen"]}) for response in pairs.pair(row)]
        prompt = row.get(self.prompt_key, "data.prompt_key")
        label = float(_bit(row, self.label_key, "data.label_key"))
        return [answer_to(prompt, _response(row, self.completion_key, "data.completion_key"), row, {"desirable": label})]

    def checked(self, row: RowOrError) -> Row:
        usable = super().checked(row)
        self.single(usable)  # here, because encode_chunk() would read all rows again after each bad one
        return usable

    def encode_chunk(self, rows: Sequence[Row], tokenizer: Any) -> GroupDataset:
        responses = [response for row in rows for response in self.single(row)]
        partners = self._partners(responses)
        groups = [(response, replace(response, answer=answer)) for response, answer in zip(responses, partners, strict=True)]
        return GroupDataset(groups, self, tokenizer, "responses", cut_second=True)

    def _partners(self, responses: Sequence[Response]) -> list[str | Message]:
        """Return for each response the next completion to another prompt, of the same label if there is one.

        So both labels enter the baseline as often as they occur in the data. Raises DataError.
        """
        partners = _next_with_other_prompt(responses)
        for label in (0.0, 1.0):
            same_label = [i for i, response in enumerate(responses) if response.numbers["desirable"] == label]
            if responses and len(same_label) == len(responses):
                kind, key = ("desirable", "undesirable")[:: 1 if label else -1]
                raise DataError(f"'{self.path}': all responses are {kind}; KTO needs {key} ones, too (data.label_key)")
            for i, other in zip(same_label, _next_with_other_prompt([responses[i] for i in same_label]), strict=True):
                partners[i] = other or partners[i]
        answers = [other.answer for other in partners if other]
        if len(answers) < len(responses):
            raise DataError(f"'{self.path}' has one prompt only; KTO compares with responses to other prompts")
        return answers


def _next_with_other_prompt(responses: Sequence[Response]) -> list[Response | None]:
    """Return for each response the next usable one to another prompt; the first follows the last."""
    partners: list[Response | None] = [None] * len(responses)
    next_response: Response | None = None  # the next usable one
    next_other_prompt: Response | None = None  # the next usable one to another prompt than that of next_response
    for i in (*reversed(range(len(responses))), *reversed(range(len(responses)))):
        response = responses[i]
        changes = next_response is None or next_response.prompt != response.prompt
        partners[i] = next_response if changes else next_other_prompt
        if not unusable((response,)):
            next_other_prompt = partners[i]
            next_response = response
    return partners


class GroupDataset(TokenDataset):
    """Pairs of responses. Each index gives two rows with ``prompt_ids`` and ``response_ids``, their numbers and ``entry``.

    Groups with an empty response, or with the same response twice, are left out and counted. ``cut_second``: the second
    response of a group is cut at the limit.
    """

    group_size = 2

    def __init__(
        self,
        groups: Sequence[tuple[Response, Response]],
        config: ResponsesConfig,
        tokenizer: Any,
        noun: str,
        cut_second: bool = False,
    ) -> None:
        self.noun = noun
        reasons = [unusable(group) for group in groups]
        usable = [group for group, reason in zip(groups, reasons, strict=True) if not reason]
        flat = [response for group in usable for response in group]
        columns = _encode(flat, config, tokenizer)
        if cut_second:
            pairs = zip(columns["prompt_ids"][1::2], columns["response_ids"][1::2], strict=True)
            columns["response_ids"][1::2] = [ids[: max(config.max_length - len(prompt), 0)] for prompt, ids in pairs]
        numbers = {name: [response.numbers[name] for response in flat] for name in (flat[0].numbers if flat else ())}
        super().__init__([group[0].row for group in usable], columns, config.length_limit, numbers)
        self.tally.num_dialogues = sum(
            all(response.from_dialogue for response in group[: 1 + (not cut_second)]) for group in usable
        )
        self.tally.left_out = dict(Counter(reason for reason in reasons if reason))
        places = (group[0].row.where for group, reason in zip(groups, reasons, strict=True) if reason)
        self.tally.first_left_out = next(places, "")


def unusable(group: tuple[Response, ...]) -> str:
    """Return why nothing can be learnt from a group; "" if something can."""
    if not row_weight(group[0].row):
        return "weight is 0"
    texts = [response.answer for response in group if isinstance(response.answer, str)]
    if not all(text.strip() for text in texts):
        return "response is empty"
    prompt = group[0].prompt
    if isinstance(prompt, str) and prompt.endswith(TURN) and any(HUMAN in text for text in texts):
        return "dialogues part before their last turn"
    is_pair = "chosen" in group[0].numbers
    return "two responses are equal" if is_pair and group[0].answer == group[-1].answer else ""


def common_prompt(dialogues: Sequence[Any]) -> Any:
    """Return the beginning that two dialogues share, up to the last turn that is a response in both. Raises DataError."""
    chosen, rejected = dialogues
    if isinstance(chosen, str) and isinstance(rejected, str):
        end = chosen.rfind(TURN, 0, shared_length(chosen, rejected))
        if end < 0:
            raise RowError(
                f"without a prompt two texts must be dialogues that begin alike, up to a turn {TURN!r}; name the prompt's "
                f"column as data.prompt_key if there is one"
            )
        return chosen[: end + len(TURN)]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise RowError("of the two responses one is text and one is messages")
    first = check_messages(chosen)
    second = check_messages(rejected)
    return first[: min(shared_length(first, second), len(first) - 1, len(second) - 1)]


def whole_prompt(prompt: Any, responses: list[Any]) -> Any:
    """Return the common beginning of two message dialogues if it ends with the given text prompt, else ``prompt``."""
    if isinstance(prompt, str) and all(isinstance(response, list) and len(response) > 1 for response in responses):
        messages = common_prompt(responses)
        if messages and messages[-1].get("content") == prompt:
            return messages
    return prompt


def answer_to(prompt: Any, response: Any, row: Row, numbers: dict[str, float]) -> Response:
    """Return a response from the data: text, the assistant's message, or a dialogue that continues the prompt.

    Only a dialogue is cut, never a text that happens to begin like the prompt. Raises DataError.
    """
    if isinstance(response, str):
        is_dialogue = isinstance(prompt, str) and prompt.endswith(TURN) and response.startswith(prompt)
        return Response(prompt, response[len(prompt) :] if is_dialogue else response, row, numbers, is_dialogue)
    with named_row(row.where):
        messages = check_messages([response] if isinstance(response, dict) else response)
        before = check_messages(prompt) if isinstance(prompt, list | tuple) and prompt else None
    is_dialogue = before is not None and messages[: len(before)] == before
    messages = messages[len(before or ()) :] if is_dialogue else messages
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise row.error(f"a response must be one message of the assistant after the prompt; there are: {roles}")
    if "weight" in messages[0]:
        raise row.error("the response has the weight 0; leave the row out")
    return Response(prompt, str(messages[0]["content"]) if is_text(messages[0]) else messages[0], row, numbers, is_dialogue)


def _encode(responses: Sequence[Response], config: ResponsesConfig, tokenizer: Any) -> dict[str, list[list[int]]]:
    """Render and tokenise each distinct pair once, however many rows it is in."""
    options = [[response.row.values.get(key) for key in ("tools", "chat_template_kwargs")] for response in responses]
    keys = []
    for response, row_options in zip(responses, options, strict=True):
        with named_row(response.row.where):
            keys.append(json.dumps([_with_texts(response.prompt), _with_texts(response.answer), row_options]))
    distinct = dict(zip(reversed(keys), reversed(responses), strict=True))  # of equal ones the first, whose row an error names
    answers = [[each.answer] if isinstance(each.answer, dict) else each.answer for each in distinct.values()]
    examples = [Example(each.prompt, answer, each.row) for each, answer in zip(distinct.values(), answers, strict=True)]
    encoded = dict(zip(distinct, encode_examples(examples, config, tokenizer, config.append_eos), strict=True))
    pairs = [encoded[key] for key in keys]
    return {"prompt_ids": [prompt for prompt, _, _ in pairs], "response_ids": [response for _, response, _ in pairs]}


def _with_texts(content: Any) -> Any:
    """Return a text, or messages with the JSON text of their arguments, which some templates write as it is."""
    if isinstance(content, str) or not content:
        return content
    return with_arguments(check_messages([content] if isinstance(content, dict) else content), argument_text)


def _response(row: Row, key: str, setting: str) -> Any:
    value = row.get(key, setting)
    if not isinstance(value, (str, dict, list)):
        raise row.error(f"'{key}' ({setting}={key}) must be text or messages, not {value!r}")
    return value


def _bit(row: Row, key: str, setting: str, allowed: str = "true or false") -> int:
    value = row.get(key, setting)
    if value not in (0, 1):  # as true and false are
        raise row.error(f"'{key}' must be {allowed}, not {value!r}")
    return int(value)
