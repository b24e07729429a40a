"""Answers requests in OpenAI's form with an engine that generates for a moment at a time. ``endpoint`` puts HTTP in front."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import nan
from queue import Empty, Queue
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from rlhf_spmd.config.words import counted
from rlhf_spmd.data.reasoning import begins_reasoning, split_reasoning
from rlhf_spmd.data.tokenizer import UNFINISHED, added_ids, prompt_texts, token_bytes
from rlhf_spmd.generation import Completion, GenerationLimits, NotFinite, Request, SamplingConfig
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.inference.openai_forms import (
    OTHER,
    AnswerFormat,
    Entry,
    HttpError,
    TextDelta,
    TextOffsets,
    check_sizes,
    choice_of,
    error_answer,
    prompts_of,
    read_body,
    read_request,
)
from rlhf_spmd.inference.requests import Prompt, PromptRequest, RequestProcessor, entries_of, prompt_log_probs
from rlhf_spmd.inference.sampling_params import CompletionOutput

TURN_S = 0.2  # seconds of generation after which new requests join and streams are sent what is new
IDLE_S = 1.0  # seconds after which ranks that wait for requests hear of each other
END_S = 8.0  # seconds that running requests have when the service is told to end: container runtimes kill after ten
MAX_ROWS = 4096  # responses of one request
MAX_LOG_PROBS = 1 << 27  # rows * longest response * (1 + logprobs) of a request, and of the rows in flight, on the device
AHEAD = 1.25  # times max_num_seqs: rows in flight, some of which wait for a place in a step; more would hold up later requests
OF_REQUESTS = ValueError, TypeError, LookupError, ArithmeticError  # raised by the host's code, which is alike on all ranks
FORGET = 4096  # requests after which the cache and the table of its prompts' prefixes are made anew

T = TypeVar("T")
Part = tuple[int, dict[str, Any]] | None  # a part of an answer: status and JSON; None ends the answer
Arrival = tuple[int, dict[str, Any] | None]  # a request's number and what Service.read returned; None: the client went away


@dataclass
class StreamProgress:
    """What a stream has sent of one response."""

    text: str = ""
    reasoning: str = ""
    content: str = ""
    tokens: int = 0
    first: bool = True
    ended: bool = False
    offsets: TextOffsets | None = None


@dataclass
class ServedRequest:
    """A client's request while it is answered.

    - asked: its prompts; rows: by row id of each response, the number of its prompt
    - unstarted: the rows that are not in flight yet
    - ended: finished responses by row id; sent: what has been streamed, by row id
    - unscored: numbers of the prompts whose tokens still need log-probs; scored: those log-probs by number
    """

    number: int
    chat: bool
    format: AnswerFormat
    asked: list[PromptRequest]
    ended: dict[int, CompletionOutput] = field(default_factory=dict)
    sent: dict[int, StreamProgress] = field(default_factory=dict)
    unscored: deque[int] = field(default_factory=deque)
    scored: dict[int, list[Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {request.row_id: number for number, each in enumerate(self.asked) for request in each.requests}
        self.sampling, self.unstarted = self.asked[0].sampling, deque(each for asked in self.asked for each in asked.requests)
        if self.asked[0].params.prompt_logprobs is not None:
            self.unscored.extend(range(len(self.asked)))


def fit_together(num_rows: int, longest: int, sampling: SamplingConfig) -> bool:
    """Return True if the log-probs of so many rows, of at most ``longest`` tokens each, are at most MAX_LOG_PROBS."""
    return num_rows * longest * (1 + sampling.logprobs) <= MAX_LOG_PROBS


def longest_of(requests: Iterable[Request]) -> int:
    """Return the most tokens that one of these rows may get; 0 without rows."""
    return max((request.max_new_tokens for request in requests), default=0)


class Service:
    """Answers requests on all ranks. Rank 0 has the endpoint, and only its ``must_end``, ``arrivals`` and ``replies`` are used.

    Whatever a request does costs that request alone; only a fault of the engine raises, and what a rank may have met alone.

    - arrivals: requests and clients that went away
    - replies: by request number, takes the parts of the answer
    - variables: of the chat template, where a request sets no others
    - reasoning_tags: between which a chat's answer has reasoning; None: it is not separated
    - waiting: requests with rows that have not started, in the order of their turns
    - running: requests with rows in flight, or prompts that are scored, by number
    - num_admitted: requests so far that were not refused
    - state: "on"; then "ending", in which new requests are refused; then "over"
    """

    def __init__(
        self,
        processor: RequestProcessor,
        name: str,
        must_end: Callable[[], bool] = lambda: False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        reasoning_tags: Sequence[str] | None = None,
    ) -> None:
        self.processor, self.engine, self.name, self.must_end = processor, processor.engine, name, must_end
        self.variables, self.reasoning_tags = variables, reasoning_tags
        self.arrivals: Queue[Arrival] = Queue()
        self.replies: dict[int, Callable[[Part], Any]] = {}
        self.waiting: deque[ServedRequest] = deque()
        self.running: dict[int, ServedRequest] = {}
        self.sampling = SamplingConfig()  # of the rows in flight
        self.num_admitted = 0
        self.state, self.end_by = "on", 0.0
        processor.longest = self.engine.generator.reserve_pages(processor.longest)

    def read(self, raw: bytes, chat: bool) -> dict[str, Any]:
        """Return a request with its prompts as token ids, as JSON. Raises ValueError or DataError.

        Local; any thread may call, so that no other request waits while a long text is tokenised.
        """
        body = read_body(raw)
        if body.get("model", self.name) != self.name:
            raise HttpError(404, f"the model {body['model']!r} is not here; there is {self.name!r}", "model_not_found")
        check_sizes(body, self.processor.spec.vocab_size, self.processor.longest)
        format, params = read_request(body, chat)
        prompts = prompts_of(body, chat)
        if not 0 < len(prompts) * params.n <= MAX_ROWS:
            raise ValueError(f"{len(prompts)} prompts, n={params.n}: a request is for 1 to {MAX_ROWS} responses")
        variables = {**self.variables, **format.chat_template_kwargs}
        read = self.processor.encode(prompts, variables=variables, generates=format.generates)
        rest = {key: value for key, value in body.items() if key not in OTHER}
        return {"chat": chat, "body": rest, "prompts": read}

    def turn(self) -> bool:
        """Take what has arrived, and generate for a moment. Return True while the service goes on.

        Collective over the world: every rank of it must call, in program order.
        """
        heard = (self._state(), self._arrived()) if self.engine.world.rank == 0 else None
        self.state, arrivals = self.engine.mesh.replica.broadcast_json(heard, "serve:requests")
        for arrival in arrivals:
            self._take(*arrival)
        if self.state != "on":
            self._fail(
                [each for each in self.waiting if each.number not in self.running], HttpError(503, "the server is ending")
            )
        if self.state == "over":
            self._fail([*self.running.values()], HttpError(503, "the server has ended"))
            return False
        requests = self._admit()
        self._score()
        self._generate(requests)
        return True

    def _arrived(self) -> list[Arrival]:
        """Return what has arrived (rank 0). Wait if there is nothing to do."""
        arrived: list[Arrival] = []
        with suppress(Empty):
            if not self.running and not self.waiting and not self.must_end():
                arrived.append(self.arrivals.get(timeout=IDLE_S))
            while True:
                arrived.append(self.arrivals.get_nowait())
        return arrived

    def _state(self) -> str:
        """Return the state from now on (rank 0)."""
        if not self.must_end():
            return "on"
        if self.state == "on":
            self.end_by = time.monotonic() + END_S
            running = f"{counted(len(self.running), 'running request')} can be answered within {END_S:.0f} s"
            print(f"ending: {running}, others are refused", file=sys.stderr, flush=True)
        return "ending" if self.running and time.monotonic() < self.end_by else "over"

    def _take(self, number: int, request: dict[str, Any] | None) -> None:
        if request is None:
            return self._forget([number])
        if self.state != "on":
            return self._put(number, error_answer(HttpError(503, "the server is ending")))
        try:
            served = self._job(number, **request)
        except Exception as error:  # a process boundary: one request fails, on all ranks, and the service goes on
            if not self._is_shared(error):
                raise
            return self._put(number, error_answer(error))
        self.num_admitted += 1
        if self.num_admitted % FORGET == 0:
            self.engine.generator.before_training()
        if served.unstarted:
            self.waiting.append(served)
        else:
            self.running[number] = served

    def _job(self, number: int, chat: bool, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> ServedRequest:
        """Return the request while it is answered. Raises ValueError."""
        format, params = read_request(body, chat)
        asked = self.processor.requests(prompts, [params] * len(prompts))
        served = ServedRequest(number, chat, format, asked)
        if not fit_together(len(served.rows), longest_of(served.unstarted), served.sampling):
            raise ValueError(
                f"{len(served.rows)} responses with so many tokens and logprobs do not fit; ask for fewer in max_tokens, n or logprobs"
            )
        if not format.generates:
            none = CompletionOutput(0, "", [], 0.0, None if params.logprobs is None else [], "length", None)
            served.ended = dict.fromkeys(served.rows, none)
            served.unstarted.clear()
        return served

    def _admit(self) -> list[Request]:
        """Return the rows that start now: one of each request in turn, so that a request with many rows does not hold up the others.

        Rows in flight are sampled alike. A request with another ``sampling`` waits until they have ended, and none overtakes it.
        """
        generator = self.engine.generator
        requests = list[Request]()
        num_rows, longest = len(generator.kept), longest_of(row.request for row in generator.kept)
        if self.waiting and not num_rows:
            self.sampling = self.waiting[0].sampling
        turns = deque(takewhile(lambda served: served.sampling == self.sampling, self.waiting))
        others, served_before = [*self.waiting][len(turns) :], deque[ServedRequest]()
        while num_rows < AHEAD * generator.config.max_num_seqs and (turns or served_before):
            if not turns:
                turns, served_before = served_before, turns
            longest = max(longest, turns[0].unstarted[0].max_new_tokens)
            if num_rows and not fit_together(num_rows + 1, longest, self.sampling):
                break
            num_rows += 1
            served = turns.popleft()
            requests.append(served.unstarted.popleft())
            self.running[served.number] = served
            if served.unstarted:
                served_before.append(served)
        self.waiting = deque([*turns, *others, *served_before])
        return requests

    def _score(self) -> None:
        """Compute log-probs of prompts' tokens, about as many as a step of the generator computes; one prompt of each request in turn.

        Collective over the world: every rank of it must call, in program order.
        """
        generator, prompts = self.engine.generator, list[tuple[ServedRequest, int]]()
        left = max_tokens = generator.config.max_num_batched_tokens
        turns = deque(served for served in self.running.values() if served.unscored)
        while turns and left > 0:
            served = turns.popleft()
            prompts.append((served, served.unscored.popleft()))
            left -= len(served.asked[prompts[-1][1]].prompt_ids)
            if served.unscored:
                turns.append(served)
        for served, _ in prompts:  # in the next turn the others come first
            self.running[served.number] = self.running.pop(served.number)
        if not prompts:
            return
        asked = [served.asked[number] for served, number in prompts]

        def score() -> None:
            num_likeliest = [each.params.prompt_logprobs or 0 for each in asked]
            entries = prompt_log_probs(generator, [each.prompt_ids for each in asked], num_likeliest, max_tokens)
            for (served, number), each, scored in zip(prompts, asked, entries, strict=True):
                if any(value != value for entry in scored for _, value in entry):
                    raise NotFinite(each.requests[0].row_id)
                first = self.processor.named([[(each.prompt_ids[0], nan)]])
                served.scored[number] = [*first, *self.processor.named(scored)]

        self._attempt(score, [served for served, _ in prompts])

    def _generate(self, requests: Sequence[Request]) -> None:
        """Generate for a moment and deliver what is new. Collective over the world: every rank of it must call, in program order."""
        engine, limits, ended = self.engine, GenerationLimits(seconds=TURN_S), list[Completion]()
        settings = self.sampling, self.processor.seed, 0, limits, 0, engine.tick
        if requests or engine.generator.kept:
            new = {request.row_id for request in requests}
            newcomers = [served for served in self.running.values() if not new.isdisjoint(served.rows)]
            ended = self._attempt(lambda: engine.generator.generate_until(requests, *settings), newcomers) or []
        completions = {completion.row_id: completion for completion in ended}
        kept = {row.request.row_id: row for row in engine.generator.kept}
        for served in list(self.running.values()):
            try:
                self._deliver(served, completions, kept)
            except Exception as error:  # a process boundary: one request fails, on all ranks, and the service goes on
                if not self._is_shared(error):
                    raise
                self._fail([served], error)

    def _is_shared(self, error: Exception) -> bool:
        """Return True if every rank has met ``error``, so that all drop the same request."""
        return self.engine.world.size == 1 or isinstance(error, OF_REQUESTS)

    def _attempt(self, work: Callable[[], T], newcomers: Sequence[ServedRequest]) -> T | None:
        """Return the result of ``work``. If it fails, the request that the error names, else the ``newcomers``, get the error.

        Raises what no newcomer can have caused, and what the other ranks may not have met.
        """
        try:
            return work()
        except NotFinite as error:
            self._fail([served for served in self.running.values() if error.row_id in served.rows], error)
        except Exception as error:  # a process boundary
            culprits = newcomers or ([*self.running.values()] if isinstance(error, torch.OutOfMemoryError) else [])
            if not culprits or not self._is_shared(error):
                raise
            self._fail(culprits, error)
        return None

    def _fail(self, failed: Sequence[ServedRequest], error: Exception) -> None:
        """Answer these requests with ``error``, which every rank has raised. The others go on."""
        status, answer = error_answer(error)
        if failed and not isinstance(error, ValueError) and self.engine.world.rank == 0:
            print(f"{counted(len(failed), 'request')} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for served in failed:
            self._put(served.number, (status, answer))
            self._put(served.number, None)
        self._forget([served.number for served in failed])

    def _forget(self, numbers: Collection[int]) -> None:
        """Generate no more for these requests."""
        gone = [self.running.pop(number) for number in numbers if number in self.running]
        self.engine.generator.drop({row for served in gone for row in served.rows})
        self.waiting = deque(served for served in self.waiting if served.number not in numbers)

    def _deliver(self, served: ServedRequest, completions: Mapping[int, Completion], kept: Mapping[int, SequenceState]) -> None:
        """Send what is new of a request. ``completions``: of the rows that have just ended; ``kept``: the rows in flight."""
        for row in served.rows.keys() & completions.keys():
            asked = served.asked[served.rows[row]]
            (served.ended[row],) = self.processor.output(asked, [self.processor.record(asked, completions[row])]).outputs
        if served.unscored:
            return
        if served.format.stream:
            for index, row in enumerate(served.rows):
                self._send_more(served, index, row, kept.get(row))
        if len(served.ended) < len(served.rows):
            return
        del self.running[served.number]
        num_generated, num_prompt_tokens = (
            sum(len(output.token_ids) for output in served.ended.values()),
            sum(len(asked.prompt_ids) for asked in served.asked),
        )
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt_tokens + num_generated,
        }
        if not served.format.stream:
            wholes = [
                self._delta(served, row, StreamProgress(), served.ended[row].text, served.ended[row].logprobs)
                for row in served.rows
            ]
            self._reply(served, [self._choice(served, index, delta) for index, delta in enumerate(wholes)], usage=usage)
        elif served.format.stream_options.include_usage:
            self._reply(served, [], usage=usage)
        self._put(served.number, None)

    def _send_more(self, served: ServedRequest, index: int, row: int, kept: SequenceState | None) -> None:
        """Send the rest of a response to its stream, if the text has grown or the response has ended.

        ``kept``: the row, if it is still generated.
        """
        sent, asked = served.sent.setdefault(row, StreamProgress()), served.asked[served.rows[row]]
        if row in served.ended:
            text, entries = served.ended[row].text, served.ended[row].logprobs
            entries = entries and entries[sent.tokens :]
        elif kept is not None and kept.token_logprobs is not None:
            text, entries, noted, first = self._text(asked, kept.token_ids), None, kept.token_logprobs, sent.tokens
            if asked.params.logprobs is not None:
                top = (noted.top_ids[first:], noted.top_log_probs[first:]) if noted.top_ids.shape[1] else None
                entries = self.processor.named(entries_of(kept.token_ids[first:], noted.log_probs_t1[first:].double(), top))
        else:
            return
        is_news = row in served.ended or len(text) > len(sent.text) or (sent.first and served.format.echo)
        if sent.ended or not is_news:
            return
        part = "first" if sent.first else "later"
        self._reply(served, [self._choice(served, index, self._delta(served, row, sent, text, entries), part)])

    def _delta(
        self, served: ServedRequest, row: int, sent: StreamProgress, text: str, entries: Sequence[Entry] | None
    ) -> TextDelta:
        """Return what is new in a response since ``sent``, which is updated.

        ``text``: the response's whole text so far; ``entries``: the log-probs of its new tokens.
        """
        asked, ended = served.asked[served.rows[row]], served.ended.get(row)
        new, shown_entries, offsets, reasoning = text[len(sent.text) :], entries, list[int](), None
        if served.chat and self.reasoning_tags is not None:
            begun = begins_reasoning(self._prompt(asked), self.reasoning_tags[0])
            parts = split_reasoning(text, begun, self.reasoning_tags, ended is not None)
            reasoning, new = parts[0][len(sent.reasoning) :], parts[1][len(sent.content) :]
            sent.reasoning, sent.content = parts
        if entries is not None and not served.chat:
            echoed = len(self._prompt(asked)) if served.format.echo else 0
            if sent.offsets is None:
                sent.offsets = TextOffsets(partial(self.processor.decode, skips=asked.params.skip_special_tokens), echoed)
            offsets = [min(offset, echoed + len(text)) for offset in sent.offsets.add([next(iter(entry)) for entry in entries])]
        if sent.first and served.format.echo:
            new = self._prompt(asked) + new
            if entries is not None:
                scored = served.scored[served.rows[row]]
                shown_entries, offsets = [*scored, *entries], [*self._prompt_offsets(asked), *offsets]
        sent.text, sent.tokens, sent.first, sent.ended = text, sent.tokens + len(entries or ()), False, ended is not None
        finish, stop = (ended.finish_reason, ended.stop_reason) if ended else (None, None)
        return TextDelta(new, shown_entries, offsets, finish, stop, reasoning)

    def _prompt(self, asked: PromptRequest) -> str:
        return prompt_texts(self.processor.tokenizer, [asked.prompt_ids])[0] if asked.prompt is None else asked.prompt

    def _prompt_offsets(self, asked: PromptRequest) -> list[int]:
        """Return where each prompt token begins in the prompt's text.

        The text has neither the special tokens that a tokenizer starts each text with, nor the blank that some put before it.
        """
        begin = [] if self.processor.tokenizer is None else added_ids(self.processor.tokenizer)[0]
        before = len(begin) * (asked.prompt_ids[: len(begin)] == begin)
        ids, decode_on = asked.prompt_ids[before:], partial(self.processor.decode, skips=False)
        offsets = TextOffsets(decode_on, len(self._prompt(asked)) - len(decode_on(ids))).add(ids)
        return [0] * before + [max(offset, 0) for offset in offsets]

    def _text(self, asked: PromptRequest, ids: Sequence[int]) -> str:
        """Return the text of an unfinished response, without what may be the beginning of a character or of a stop string."""
        reserve = max(map(len, asked.sampling.stop), default=1) - 1
        text = self.processor.text_of(asked, ids, stopped=False)[0].rstrip(UNFINISHED)
        return text[: max(len(text) - reserve, 0)]

    def _choice(self, served: ServedRequest, index: int, delta: TextDelta, part: str | None = None) -> dict[str, Any]:
        return choice_of(index, delta, served.chat, partial(token_bytes, self.processor.tokenizer), part)

    def _reply(self, served: ServedRequest, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = ("chat.completion.chunk" if served.format.stream else "chat.completion") if served.chat else "text_completion"
        name = f"{'chatcmpl' if served.chat else 'cmpl'}-{served.number}"
        head = {"id": name, "object": kind, "created": int(time.time()), "model": self.name}
        self._put(served.number, (200, {**head, "choices": choices, **more}))

    def _put(self, number: int, part: Part) -> None:
        """Pass a part of an answer on. Does nothing on ranks without an endpoint, and if the client went away."""
        if (reply := self.replies.get(number)) is not None:
            reply(part)
