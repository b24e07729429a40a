"""What a row offers for the arguments of a reward function: its texts, its columns, its right answer.

The environment writes a part of a multi-turn response. Such a row's ``completions`` are its turns, as in TRL; ``response``
and ``solution_str`` are the model's turns alone, joined by line breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RewardRow = tuple[str, str, dict[str, Any]]  # prompt, response, the row's columns

TURNS = "completion_messages"  # of a row: the turns of a multi-turn response, messages with role and content


def right_answer(row: Mapping[str, Any]) -> Any:
    """Return the row's answer: ``ground_truth``, ``answer``, or verl's ``reward_model.ground_truth``; None without any."""
    nested = row.get("reward_model")
    truths = row.get("ground_truth"), row.get("answer"), nested.get("ground_truth") if isinstance(nested, Mapping) else None
    return next((value for value in truths if value is not None), None)


def row_values(prompt: str, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument that the row has a value for, by name. Missing answers are left out."""
    columns = {**row, "ground_truth": right_answer(row), "extra_info": row.get("extra_info") or {}}
    values = {key: value for key, value in columns.items() if value is not None or key not in ("answer", "ground_truth")}
    if turns := row.get(TURNS):
        response = "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")
    chat = chat_messages(row, prompt)
    begun = str(chat[-1]["content"]) if chat and chat[-1]["role"] == "assistant" else ""
    return values | {"prompt": prompt, "response": response, "begun": begun, "solution_str": response, "row": row}


def as_trl(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return prompt and completion as TRL passes them: messages if the prompt is a chat, else text. ``values``: of :func:`row_values`.

    If the prompt's last message is the assistant's, it belongs to the completion.
    """
    row, prompt = values["row"], values["prompt"]
    chat = chat_messages(row, prompt)
    if chat is None:
        return prompt, row.get(TURNS) or values["response"]
    turns = list(row.get(TURNS) or [{"role": "assistant", "content": values["response"]}])
    if chat[-1]["role"] != "assistant":
        return chat, turns
    position = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), None)
    if position is None:
        return chat[:-1], [chat[-1], *turns]
    turns[position] = {**turns[position], "content": str(chat[-1]["content"]) + turns[position]["content"]}
    return chat[:-1], turns


def chat_messages(row: Mapping[str, Any], prompt: str) -> list[Any] | None:
    """Return the row's prompt as chat messages; None if it is text.

    A last message of the assistant is the beginning of its response if ``prompt``, the prompt's text, ends with it.
    Otherwise the column ``messages`` has a whole conversation, and not the prompt.
    """
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping):
        return None
    begun = str(last.get("content") or "").rstrip()
    is_prompt = last.get("role") != "assistant" or (begun and prompt.rstrip().endswith(begun))
    return messages if is_prompt else None
