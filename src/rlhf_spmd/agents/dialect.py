"""Between OpenAI's messages and token ids: what a turn reads, and the message that its draws become."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhf_spmd.agents.answer_calls import AnswerCalls, check_tools, text_parameters
from rlhf_spmd.agents.forest import Turn
from rlhf_spmd.config.constraints import PositiveInt, Range
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.config.schema import read_section
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import RowError
from rlhf_spmd.data.messages import ChatOptions, Message, check_messages, check_variables
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.environments.tool_calls import detect_format


@dataclass(frozen=True)
class ChatFields:
    """The fields of a request that an agent decides. Others are unknown, or those of :data:`SAMPLING` and :data:`NO_EFFECT`.

    ``model``, ``stream_options``: clients send them, and they change nothing.
    """

    messages: Any = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    n: Annotated[int, Range(least=1, most=64)] = 1
    stream: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(least=0, most=0)] = 0
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    stream_options: Any = None


# fields that clients send and that change no answer
NO_EFFECT = (
    *("user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
# fields that the trainer decides
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for: its ``fields``, and the whole conversation. ``ignores``: it sets what the trainer decides."""

    fields: ChatFields
    messages: list[Message]
    ignores: bool

    @property
    def options(self) -> ChatOptions:
        """Return the tools and the variables of the template."""
        tools = self.fields.tools if self.fields.tool_choice == "auto" else []
        return ChatOptions(tools or None, self.fields.chat_template_kwargs)

    @property
    def max_tokens(self) -> int | None:
        """Return the most tokens of an answer; None: as many as there is room for."""
        return self.fields.max_completion_tokens or self.fields.max_tokens

    @property
    def gives_usage(self) -> bool:
        """Return True if a stream ends with the numbers of tokens."""
        options = self.fields.stream_options
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def conversation_options(self) -> dict[str, Any]:
        """Return what decides the text of a conversation beside its messages."""
        return {"tools": self.options.tools, "variables": dict(self.options.variables)}


def read_chat_request(body: Mapping[str, Any], names: Mapping[str, str] | None = None) -> ChatRequest:
    """Return what a request asks for. ``names``: the client's, of fields of a chat. Raises ValueError or DataError, one line."""
    values = {key: value for key, value in body.items() if value is not None and key not in NO_EFFECT}
    for key, name in (names or {}).items():
        if key in values:
            raise ValueError(f"{name}={values[key]!r:.200} is not supported in training; leave it out")
    if (choice := values.get("tool_choice", "auto")) not in ("auto", "none"):
        raise ValueError(
            f"tool_choice={choice!r}: no call can be forced, since the trainer decides what is drawn; allowed: auto, none"
        )
    fields = read_section(ChatFields, {key: value for key, value in values.items() if key not in SAMPLING}, strict=True)
    check_section(fields, "request")
    check_variables("chat_template_kwargs", fields.chat_template_kwargs)
    check_tools(fields.tools)
    messages = check_messages(fields.messages)
    if messages[-1]["role"] == "assistant":
        raise RowError("the last message is the assistant's; end with what it shall answer")
    return ChatRequest(fields, messages, any(key in SAMPLING for key in values))


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
        self.tool_format = detect_format(self.encoder.template or getattr(self.tokenizer, "chat_template", None))

    def read_ids(self, parent: Turn | None, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Return the tokens that the model reads in a turn. Raises DataError for what the template refuses."""
        if parent is None:
            text = self.encoder.apply_template(messages, options=options)
            return next(self.encoder.tokenize([text], special_tokens=False))
        calls = (parent.answer or {}).get("tool_calls") or ()
        return self.encoder.ids_between_turns(parent.ids[-1], messages, self.end_ids, options, calls)

    def answer(self, turn: Turn, request: ChatRequest) -> Message:
        """Return the message that the agent gets for a turn: with ``tool_calls`` if the model may call tools and does."""
        assert turn.draws is not None, "the turn has ended"
        ids = [token for token in turn.draws.ids if token not in self.end_ids]
        tools = request.options.tools
        if not tools:
            return {"role": "assistant", "content": decode(self.tokenizer, [ids])[0]}
        prompt_ids = turn.ids[: -len(turn.draws.ids)]
        prompt, text = decode(self.tokenizer, [prompt_ids, ids], skip_special_tokens=False)
        parameters = text_parameters(tools)
        parallel = request.fields.parallel_tool_calls
        reader = AnswerCalls(self.tokenizer, self.tool_format, parameters, parallel, prompt, None, hides_special=True)
        content, calls = reader.split(ids, text, ended=True)
        if not calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or None, "tool_calls": calls}


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


def usage_of(num_prompt: int, num_drawn: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's numbers of tokens. ``num_cached``: of the prompt, which were in the cache."""
    total = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn}
    return total | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def completion_body(
    name: str, number: str, turns: Sequence[Turn], request: ChatRequest, prompt_ids: Sequence[int], tokenizer: Any
) -> Mapping[str, Any]:
    """Return the answer to a request in OpenAI's form."""
    choices = []
    for index, turn in enumerate(turns):
        assert turn.draws is not None and turn.answer is not None, "the turn has ended"
        reason = "tool_calls" if turn.answer.get("tool_calls") else turn.draws.finish_reason
        choice: dict[str, Any] = {"index": index, "message": turn.answer, "finish_reason": reason, "logprobs": None}
        if request.fields.logprobs:
            texts = [decode(tokenizer, [[token]], skip_special_tokens=False)[0] for token in turn.draws.ids]
            pairs = zip(texts, turn.draws.log_probs, strict=True)
            choice["logprobs"] = {
                "content": [{"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in pairs]
            }
        if request.fields.return_token_ids:
            choice["token_ids"] = turn.draws.ids
        choices.append(choice)
    num_drawn = sum(len(turn.draws.ids) for turn in turns if turn.draws)
    num_cached = min(turn.draws.num_cached for turn in turns if turn.draws)
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": name,
        "choices": choices,
        "usage": usage_of(len(prompt_ids), num_drawn, num_cached),
    }
    return body | ({"prompt_token_ids": [*prompt_ids]} if request.fields.return_token_ids else {})
