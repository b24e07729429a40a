"""Answers to clients, whole or in parts, from the responses so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan
from typing import Any

from rlhf_spmd.agents.answer_calls import AnswerCalls, ForcedCalls, text_parameters
from rlhf_spmd.agents.dialect import usage_of
from rlhf_spmd.data.messages import Message
from rlhf_spmd.data.reasoning import begins_reasoning, split_reasoning
from rlhf_spmd.data.tokenizer import UNFINISHED, added_ids, prompt_texts, token_bytes
from rlhf_spmd.generation import Completion, NotFinite
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.inference.inference_engine import Entries
from rlhf_spmd.inference.openai_forms import AnswerFormat, Dialect, Entry, TextDelta, TextOffsets, choice_of
from rlhf_spmd.inference.outputs import OutputBuilder
from rlhf_spmd.inference.requests import PromptRequest
from rlhf_spmd.inference.sampling_params import CompletionOutput


@dataclass
class ResponseProgress:
    """The part of one response that its client has.

    - offsets: finds where its tokens begin, after ``start`` characters of the answer; None if the answer does not say
    - tags: separate reasoning from content; None: they are not separated. in_reasoning: the prompt ends with the opening tag
    - call_reader: reads calls of tools; None: they are not read
    - gives_ids: the client asks for token ids
    - text: the text so far, of which reasoning and content were sent. num_tokens: tokens that were sent; num_calls: calls
    - has_begun, has_ended: whether its beginning and its end were sent
    """

    offsets: TextOffsets | None
    start: int
    tags: Sequence[str] | None
    in_reasoning: bool
    call_reader: AnswerCalls | ForcedCalls | None
    gives_ids: bool
    text: str = ""
    reasoning: str = ""
    content: str = ""
    num_tokens: int = 0
    num_calls: int = 0
    has_begun: bool = False
    has_ended: bool = False

    def advance(
        self, text: str, ids: Sequence[int], entries: Sequence[Entry] | None, output: CompletionOutput | None
    ) -> TextDelta:
        """Return what is new in the response, which the client has from now on.

        ``text``, ``ids``: the whole response so far; ``entries``: the log-probs of the new tokens; ``output``: the response if it
        has ended.
        """
        calls: list[dict[str, Any]] = []
        shown = text
        if self.call_reader is not None:
            shown, calls = self.call_reader.split(ids, text, output is not None)
        reasoning, content = "", shown
        if self.tags is not None:
            reasoning, content = split_reasoning(shown, self.in_reasoning, self.tags, output is not None)
        offsets: list[int] = []
        if entries is not None and self.offsets is not None:
            offsets = self.offsets.add([next(iter(entry)) for entry in entries])
            offsets = [min(offset, self.start + len(text)) for offset in offsets]
        finish_reason, stop_reason = (None, None) if output is None else (output.finish_reason, output.stop_reason)
        if output is not None and max(len(calls), self.num_calls) > 0:
            finish_reason = "tool_calls"
        delta = TextDelta(
            content[len(self.content) :],
            entries,
            offsets,
            finish_reason,
            stop_reason,
            None if self.tags is None else reasoning[len(self.reasoning) :],
            calls[self.num_calls :],
            self.num_calls,
            ids[self.num_tokens :] if self.gives_ids else None,
        )
        self.text = text
        self.reasoning, self.content = reasoning, content
        self.num_tokens = len(ids)
        self.num_calls = max(len(calls), self.num_calls)
        self.has_begun = True
        self.has_ended = output is not None
        return delta


@dataclass
class ClientAnswer:
    """The answer to a client's request, while its responses are generated.

    - model: the model's name
    - reasoning_tags: between which a chat's answer has reasoning; None: it is not separated
    - call_format: the form of calls in a chat's answer; None: they are not read
    - responses: those that have ended, by row id; progress: what was streamed of each, by row id
    - prompt_logprobs: of the prompts' tokens, by number of the prompt, once they are computed
    - conversation: digest of a chat that later requests may go on from; None: its tokens are not kept
    - num_cached: tokens of each prompt that no response to it had to compute, by its number
    - rows: by row id of each response, the number of its prompt
    """

    number: int
    dialect: Dialect
    format: AnswerFormat
    prompt_requests: Sequence[PromptRequest]
    output_builder: OutputBuilder
    model: str
    reasoning_tags: Sequence[str] | None
    call_format: str | None
    conversation: str | None = None
    responses: dict[int, CompletionOutput] = field(default_factory=dict)
    progress: dict[int, ResponseProgress] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {
            row.row_id: number for number, prompt_request in enumerate(self.prompt_requests) for row in prompt_request.rows
        }
        self.names_by_id = self.format.return_tokens_as_token_ids or self.dialect == "generate"
        self.gives_ids = self.format.return_token_ids or self.dialect == "generate"
        self._has_begun = False  # whether a part of the answer was made

    def add_response(self, completion: Completion) -> None:
        """Keep a response that has ended."""
        number = self.rows[completion.row_id]
        self.num_cached[number] = min(self.num_cached.get(number, completion.num_cached), completion.num_cached)
        prompt_request = self.prompt_requests[number]
        record = self.output_builder.record(prompt_request, completion)
        self.responses[completion.row_id] = self.output_builder.output(prompt_request, [record]).outputs[0]

    def add_prompt_entries(self, number: int, entries: Entries) -> None:
        """Keep the log-probs of a prompt's tokens. ``entries``: of all but the first. Raises NotFinite."""
        prompt_request = self.prompt_requests[number]
        if any(isnan(value) for entry in entries for _, value in entry):
            raise NotFinite(prompt_request.rows[0].row_id)
        self.prompt_logprobs[number] = self.output_builder.logprobs([[(prompt_request.prompt_ids[0], nan)], *entries])

    def new_chunks(self, states: Mapping[int, SequenceState]) -> Iterator[dict[str, Any]]:
        """Yield what a stream has not sent yet, of responses that have ended or whose text has grown.

        ``states``: the rows in flight, by row id.
        """
        for index, row in enumerate(self.rows if self.format.stream else ()):
            progress = self.progress.get(row)
            if progress is not None and progress.has_ended:
                continue
            state = states.get(row)
            if row not in self.responses and (state is None or state.token_logprobs is None):
                continue  # before its first tokens
            if progress is None:
                progress = self.progress[row] = self._new_progress(row)
            text, ids = self._text_so_far(row, state), self._ids_so_far(row, state)
            has_news = len(text) > len(progress.text) or (self.gives_ids and len(ids) > progress.num_tokens)
            if has_news or (self.format.echo and not progress.has_begun) or row in self.responses:
                yield self._body([self._choice(index, row, progress, text, state)])

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the whole answer, or the end of a stream if it counts tokens, else None. All responses have ended."""
        num_prompt = sum(len(prompt_request.prompt_ids) for prompt_request in self.prompt_requests)
        num_drawn = sum(len(response.token_ids) for response in self.responses.values())
        usage = usage_of(num_prompt, num_drawn, sum(self.num_cached.values()))
        if self.format.stream:
            return self._body([], usage=usage) if self.format.stream_options.include_usage else None
        choices = [
            self._choice(index, row, self._new_progress(row), self._text_so_far(row, None), None)
            for index, row in enumerate(self.rows)
        ]
        return self._body(choices, usage=usage)

    def message(self, row: int) -> tuple[Message, list[int]] | None:
        """Return the message of a response that has ended, and the tokens of the conversation up to its end.

        None: the message does not have all that was drawn, because a stop text or token cut it, or it has no end.
        """
        response = self.responses[row]
        if response.stop_reason is not None or response.finish_reason == "error":
            return None
        delta = self._new_progress(row).advance(self._text_so_far(row, None), response.token_ids, None, response)
        ids = [*self.prompt_requests[self.rows[row]].prompt_ids, *response.token_ids]
        return choice_of(0, delta, "chat", None)["message"], ids

    def _ids_so_far(self, row: int, state: SequenceState | None) -> Sequence[int]:
        if row in self.responses:
            return self.responses[row].token_ids
        return [] if state is None else state.token_ids

    def _text_so_far(self, row: int, state: SequenceState | None) -> str:
        """Return the text of a response, with its special tokens if calls are read.

        Unless it has ended, it is without what may be the beginning of a character or of a stop string.
        """
        prompt_request = self.prompt_requests[self.rows[row]]
        reads_calls = self.call_format is not None
        if (response := self.responses.get(row)) is not None:
            if not reads_calls:
                return response.text
            stopped = response.finish_reason != "length"
            return self.output_builder.text_and_stop(prompt_request, response.token_ids, stopped, shows_special=True)[0]
        ids = self._ids_so_far(row, state)
        text, _ = self.output_builder.text_and_stop(prompt_request, ids, stopped=False, shows_special=reads_calls)
        text = text.rstrip(UNFINISHED)
        reserve = max(map(len, prompt_request.sampling.stop), default=1) - 1
        return text[: max(len(text) - reserve, 0)]

    def _entries_from(self, first: int, row: int, state: SequenceState | None) -> Sequence[Entry] | None:
        """Return the log-probs of a response's tokens from number ``first`` on; None if the request does not ask for them."""
        if row in self.responses:
            logprobs = self.responses[row].logprobs
            return logprobs and logprobs[first:]
        if self.prompt_requests[self.rows[row]].params.logprobs is None or state is None or state.token_logprobs is None:
            return None
        prompt_request, stored = self.prompt_requests[self.rows[row]], state.token_logprobs
        likeliest = (stored.top_ids[first:], stored.top_log_probs[first:]) if stored.top_ids.shape[1] else None
        log_probs = stored.log_probs[first:], stored.log_probs_t1[first:]
        builder = self.output_builder
        return builder.logprobs(builder.response_entries(prompt_request, state.token_ids[first:], *log_probs, likeliest))

    def _new_progress(self, row: int) -> ResponseProgress:
        prompt_request = self.prompt_requests[self.rows[row]]
        start = len(self._prompt_text(prompt_request)) if self.format.echo else 0
        if self.dialect != "chat":
            decode = partial(self.output_builder.decode, skip_special=prompt_request.params.skip_special_tokens)
            offsets = TextOffsets(decode, start) if self.dialect == "completion" else None
            return ResponseProgress(offsets, start, None, False, None, self.gives_ids)
        tags = self.reasoning_tags
        prompt = self._prompt_text(prompt_request)
        in_reasoning = tags is not None and begins_reasoning(prompt, tags[0])
        if prompt_request.params.structured_outputs is not None and prompt_request.thoughts_end is None:
            in_reasoning = False  # nothing could end it
        call_reader: AnswerCalls | ForcedCalls | None = None
        if self.format.forced_tools:
            call_reader = ForcedCalls(prompt, tags[1] if tags is not None and in_reasoning else "")
        elif self.call_format is not None:
            call_reader = AnswerCalls(
                self.output_builder.tokenizer,
                self.call_format,
                text_parameters(self.format.tools),
                self.format.parallel_tool_calls,
                prompt,
                None if tags is None else (tags[0], tags[1]),
                prompt_request.params.skip_special_tokens,
            )
        return ResponseProgress(None, start, tags, in_reasoning, call_reader, self.gives_ids)

    def _choice(
        self, index: int, row: int, progress: ResponseProgress, text: str, state: SequenceState | None
    ) -> dict[str, Any]:
        """Return the choice with what is new since ``progress``, after the prompt if that is repeated."""
        is_first = not progress.has_begun
        entries = self._entries_from(progress.num_tokens, row, state)
        delta = progress.advance(text, self._ids_so_far(row, state), entries, self.responses.get(row))
        prompt_request = self.prompt_requests[self.rows[row]]
        if is_first and self.gives_ids:
            delta = replace(delta, prompt_ids=prompt_request.prompt_ids)
        if is_first and self.format.echo:
            delta = replace(delta, text=self._prompt_text(prompt_request) + delta.text)
            if entries is not None:
                entries = [*self.prompt_logprobs[self.rows[row]], *entries]
                delta = replace(delta, entries=entries, offsets=[*self._prompt_offsets(prompt_request), *delta.offsets])
        part = ("first" if is_first else "later") if self.format.stream else None
        to_bytes = None if self.names_by_id else partial(token_bytes, self.output_builder.tokenizer)
        return choice_of(index, delta, self.dialect, to_bytes, part)

    def _prompt_text(self, prompt_request: PromptRequest) -> str:
        if prompt_request.prompt is not None:
            return prompt_request.prompt
        return prompt_texts(self.output_builder.tokenizer, [prompt_request.prompt_ids])[0]

    def _prompt_offsets(self, prompt_request: PromptRequest) -> list[int]:
        """Return where each prompt token begins in the prompt's text.

        The text has neither the special tokens that a tokenizer starts each text with, nor the blank that some put before it.
        """
        added = [] if self.output_builder.tokenizer is None else added_ids(self.output_builder.tokenizer)[0]
        num_added = len(added) * (prompt_request.prompt_ids[: len(added)] == added)
        ids = prompt_request.prompt_ids[num_added:]
        decode = partial(self.output_builder.decode, skip_special=False)
        offsets = TextOffsets(decode, len(self._prompt_text(prompt_request)) - len(decode(ids))).add(ids)
        return [0] * num_added + [max(offset, 0) for offset in offsets]

    def _body(self, choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        name = self.format.request_id or str(self.number)
        if self.dialect == "generate":
            return {"request_id": name, "choices": choices, **usage}
        kind = "chat.completion.chunk" if self.format.stream else "chat.completion"
        head = {"id": f"chatcmpl-{name}", "object": kind}
        if self.dialect == "completion":
            head = {"id": f"cmpl-{name}", "object": "text_completion"}
        ids = {}
        if self.format.return_token_ids and len(self.prompt_requests) == 1 and not self._has_begun:
            ids = {"prompt_token_ids": self.prompt_requests[0].prompt_ids}
        self._has_begun = True
        return {**head, "created": int(time.time()), "model": self.model, "choices": choices, **ids, **usage}
