"""Between OpenAI's messages and token ids: what a turn reads, and the message that its draws become."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.agents.forest import Turn
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.messages import ChatOptions, Message, check_messages
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.environments.tool_calls import detect_format, parse_turn


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for.

    - messages: the whole conversation
    - options: its tools and the variables of the template
    - max_tokens: at most so many are drawn; None: as many as there is room for
    - n: answers, each with draws of its own
    - stream: the answer is sent as events
    - with_ids, with_log_probs: the answer has its token ids; and their log-probs
    - ignored: settings of sampling that the trainer decides
    """

    messages: list[Message]
    options: ChatOptions
    max_tokens: int | None
    n: int
    stream: bool
    with_ids: bool
    with_log_probs: bool
    ignored: tuple[str, ...]

    @property
    def conversation_options(self) -> dict[str, Any]:
        """Return what decides the text of a conversation beside its messages."""
        return {"tools": self.options.tools, "variables": dict(self.options.variables)}


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
READ = (
    *("messages", "model", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens", "n", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "return_token_ids", "chat_template_kwargs", "user", "metadata", "store"),
)
MOST_ANSWERS = 64  # n of a request


def read_chat_request(body: Any) -> ChatRequest:
    """Return what a request asks for. Raises ValueError or DataError, one line."""
    if not isinstance(body, dict):
        raise ValueError("a request is a JSON object")
    fields = {key: value for key, value in body.items() if value is not None}
    ignored = tuple(key for key in SAMPLING if key in fields)
    unknown = next((key for key in fields if key not in (*READ, *SAMPLING)), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is not supported while a model is trained; leave the field out")
    if fields.get("tool_choice", "auto") not in ("auto", "none"):
        raise ValueError(f"tool_choice={fields['tool_choice']!r} must be auto or none")
    numbers = {"n": fields.get("n", 1), "max_tokens": fields.get("max_completion_tokens", fields.get("max_tokens"))}
    for key, value in numbers.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{key}={value!r} must be an integer of at least 1")
    if numbers["n"] > MOST_ANSWERS:
        raise ValueError(f"n={numbers['n']}: at most {MOST_ANSWERS}")
    tools = fields.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools must be a list of schemas, each an object")
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ValueError("chat_template_kwargs must be an object")
    messages = check_messages(fields.get("messages"))
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's; end with what it shall answer")
    return ChatRequest(
        messages,
        ChatOptions(tools if fields.get("tool_choice") != "none" else None, variables),
        numbers["max_tokens"],
        numbers["n"],
        bool(fields.get("stream")),
        bool(fields.get("return_token_ids")),
        bool(fields.get("logprobs")),
        ignored,
    )


@dataclass(eq=False)
class Dialect:
    """Renders requests and reads answers with a model's tokenizer and template.

    - end_ids: tokens that end a turn
    - first_ids: those with which every conversation begins; rows of one step have them as their prompt
    """

    tokenizer: Any
    encoding: EncodingConfig
    end_ids: Collection[int]
    encoder: PromptEncoder = field(init=False)
    tool_format: str = field(init=False)
    first_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = PromptEncoder(self.tokenizer, self.encoding)
        self.first_ids = first_ids(self.encoder)
        template = self.encoder.template or getattr(self.tokenizer, "chat_template", None)
        self.tool_format = detect_format("\n".join(template.values()) if isinstance(template, dict) else template)

    def read_ids(self, parent: Turn | None, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Return the tokens that the model reads in a turn. Raises DataError for what the template refuses."""
        if parent is None:
            text = self.encoder.apply_template(messages, options=options)
            return next(self.encoder.tokenize([text], special_tokens=False))
        return self.encoder.ids_between_turns(parent.ids[-1], messages, self.end_ids, options)

    def answer(self, turn: Turn, options: ChatOptions) -> Message:
        """Return the message that the agent gets for a turn: with ``tool_calls`` if the model may call tools and does."""
        assert turn.draws is not None, "the turn has ended"
        ids = [token for token in turn.draws.ids if token not in self.end_ids]
        if not options.tools:
            return {"role": "assistant", "content": decode(self.tokenizer, [ids])[0]}
        text = decode(self.tokenizer, [ids], skip_special_tokens=False)[0]
        parsed = parse_turn(text, self.tool_format)
        calls = [call for call in parsed.calls if call is not None]
        message: Message = {"role": "assistant", "content": parsed.content or (None if calls else "")}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{turn.key[-8:].replace('.', '_')}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for number, call in enumerate(calls)
            ]
        return message


def first_ids(encoder: PromptEncoder) -> list[int]:
    """Return the tokens with which every conversation begins. Raises ValueError if there are none."""
    openings: list[Message] = [
        {"role": role, "content": content} for role, content in (("user", "a"), ("user", "b"), ("system", "c"))
    ]
    conversations: list[list[Message]] = [[openings[0]], [openings[1]], [openings[2], openings[0]]]
    texts = [encoder.apply_template(messages) for messages in conversations]
    encoded = [*encoder.tokenize(texts, special_tokens=False)]
    length = next((i for i, tokens in enumerate(zip(*encoded, strict=False)) if len(set(tokens)) > 1), min(map(len, encoded)))
    if not length:
        raise ValueError(
            "agent: conversations of this chat template begin with no token in common; give data.chat_template, one that does"
        )
    return encoded[0][:1]


def completion_body(
    name: str, number: str, turns: Sequence[Turn], request: ChatRequest, prompt_ids: Sequence[int], tokenizer: Any
) -> Mapping[str, Any]:
    """Return the answer to a request in OpenAI's form."""
    choices = []
    for index, turn in enumerate(turns):
        assert turn.draws is not None and turn.answer is not None, "the turn has ended"
        reason = "tool_calls" if turn.answer.get("tool_calls") else turn.draws.finish_reason
        choice: dict[str, Any] = {"index": index, "message": turn.answer, "finish_reason": reason, "logprobs": None}
        if request.with_log_probs:
            texts = [decode(tokenizer, [[token]], skip_special_tokens=False)[0] for token in turn.draws.ids]
            pairs = zip(texts, turn.draws.log_probs, strict=True)
            choice["logprobs"] = {
                "content": [{"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in pairs]
            }
        if request.with_ids:
            choice["token_ids"] = turn.draws.ids
        choices.append(choice)
    num_drawn = sum(len(turn.draws.ids) for turn in turns if turn.draws)
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": num_drawn, "total_tokens": len(prompt_ids) + num_drawn}
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": name,
        "choices": choices,
        "usage": usage,
    }
    return body | ({"prompt_token_ids": [*prompt_ids]} if request.with_ids else {})
