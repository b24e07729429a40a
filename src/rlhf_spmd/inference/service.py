"""The queue of clients' requests in front of an engine that generates for a moment at a time. ``endpoint`` puts HTTP in front."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from queue import Empty, Queue
from typing import Any, TypeVar

import torch

from rlhf_spmd.agents.answer_calls import forced_text
from rlhf_spmd.agents.http import HttpError, error_answer
from rlhf_spmd.config.words import counted
from rlhf_spmd.data.messages import check_messages
from rlhf_spmd.environments.tool_calls import detect_format
from rlhf_spmd.generation import Completion, GenerationLimits, NotFinite, Request, SamplingConfig
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.inference.answers import ClientAnswer
from rlhf_spmd.inference.conversations import Conversations
from rlhf_spmd.inference.openai_forms import (
    OTHER,
    Dialect,
    check_sizes,
    prompts_of,
    read_request,
    with_sampling_fields,
)
from rlhf_spmd.inference.outputs import LogprobsMode, OutputBuilder
from rlhf_spmd.inference.requests import Prompt, RequestProcessor
from rlhf_spmd.inference.sampling_params import CompletionOutput, SamplingParams
from rlhf_spmd.inference.served_adapters import ServedAdapters
from rlhf_spmd.inference.structured_outputs import StructuredOutputsParams, check_characters

TURN_S = 0.2  # seconds of generation after which new requests join and streams are sent what is new
IDLE_S = 1.0  # seconds after which ranks that wait for requests hear of each other
END_S = 8.0  # seconds that running requests have when the service is told to end: container runtimes kill after ten
MAX_ROWS = 4096  # responses of one request
MAX_LOG_PROBS = 1 << 27  # rows * longest response * (1 + logprobs) of a request, and of the rows in flight, on the device
AHEAD = 1.25  # times max_num_seqs: rows in flight, some of which wait for a place in a step; more would hold up later requests
SHARED_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError)  # raised by the host's code, which is alike on all ranks
REQUESTS_PER_CACHE = 4096  # requests after which the cache and the table of its prompts' prefixes are made anew

T = TypeVar("T")
Part = tuple[int, dict[str, Any]] | None  # a part of an answer: status and JSON; None ends the answer
Arrival = tuple[int, dict[str, Any] | None]  # a request's number and what Service.read returned; None: the client went away


@dataclass
class ServedRequest:
    """A client's request while it is answered.

    - adapter: which its rows have; None: none
    - sampling: how all its rows are sampled
    - unstarted: the rows that are not in flight yet
    - unscored: numbers of the prompts whose tokens still need log-probs
    """

    number: int
    answer: ClientAnswer
    adapter: str | None
    sampling: SamplingConfig
    unstarted: deque[Request]
    unscored: deque[int]


def fit_together(num_rows: int, longest: int, sampling: SamplingConfig) -> bool:
    """Return True if the log-probs of so many rows, of at most ``longest`` tokens each, are at most MAX_LOG_PROBS."""
    return num_rows * longest * (1 + sampling.logprobs) <= MAX_LOG_PROBS


def longest_of(rows: Iterable[Request]) -> int:
    """Return the most tokens that one of these rows may get; 0 without rows."""
    return max((row.max_new_tokens for row in rows), default=0)


@dataclass(eq=False)
class Service:
    """Answers requests on all ranks. Rank 0 has the endpoint, and only its ``must_end``, ``arrivals`` and ``replies`` are used.

    Whatever a request does costs that request alone. Two things end the service: a fault of the engine, and an error that other ranks
    may not share.

    - arrivals: requests and clients that went away
    - replies: by request number, takes the parts of the answer
    - variables: of the chat template, where a request sets no others
    - reasoning_tags: between which a chat's answer has reasoning; None: it is not separated
    - call_format: the form of the model's calls of tools; None: that of the chat template
    - adapters: that requests may name; None: there are none
    - logprobs_mode: of responses. names_by_id: log-probs of all answers name tokens by their ids
    - conversations: whose tokens are kept, on rank 0; None: each chat is rendered anew
    - waiting: requests with rows that have not started, in the order of their turns
    - running: requests with rows in flight, or prompts that are scored, by number
    - sampling, adapter: of the rows in flight
    - page_usage: share of the cache's pages that rows refer to, after the last turn
    - num_admitted: requests so far that were not refused; num_prompt_tokens: of their prompts
    - num_drawn: tokens so far; num_ended: responses so far by what ended them
    - state: "on"; then "ending" until ``end_by`` at the latest, in which new requests are refused; then "over"
    """

    processor: RequestProcessor
    name: str
    must_end: Callable[[], bool] = lambda: False
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_tags: Sequence[str] | None = None
    call_format: str | None = None
    adapters: ServedAdapters | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    names_by_id: bool = False
    conversations: Conversations | None = None
    arrivals: Queue[Arrival] = field(default_factory=Queue)
    replies: dict[int, Callable[[Part], Any]] = field(default_factory=dict)
    waiting: deque[ServedRequest] = field(default_factory=deque)
    running: dict[int, ServedRequest] = field(default_factory=dict)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    adapter: str | None = None
    page_usage: float = 0.0
    num_admitted: int = 0
    num_prompt_tokens: int = 0
    num_drawn: int = 0
    num_ended: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "error": 0})
    state: str = "on"
    end_by: float = 0.0

    def __post_init__(self) -> None:
        self.engine = self.processor.engine
        self.output_builder = OutputBuilder(self.engine.generator, self.processor.tokenizer, self.logprobs_mode)
        with suppress(
            ValueError
        ):  # makes the token table, so that no request waits for it; without llguidance they are refused
            self.processor.compile_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
        self.processor.longest = self.engine.generator.reserve_pages(self.processor.longest)

    @property
    def names(self) -> list[str]:
        """Return the names that a request may give as its model: the model's, then those of the adapters."""
        return [self.name, *(self.adapters.settings if self.adapters else ())]

    def read(self, body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
        """Return a client's request with its prompts as token ids, as JSON. Raises ValueError or DataError.

        Local; any thread may call, so that no other request waits while a long text is tokenised or a grammar compiled.
        """
        if dialect == "generate":
            body = with_sampling_fields(body)
        if (model := body.get("model", self.name)) not in self.names:
            raise HttpError(404, f"the model {model!r} is not here; there is {', '.join(self.names)}", "model_not_found")
        check_sizes(body, self.processor.spec.vocab_size, self.processor.longest)
        format, params = read_request(body, dialect)
        prompts = prompts_of(body, dialect)
        if not 0 < len(prompts) * params.n <= MAX_ROWS:
            raise ValueError(f"{len(prompts)} prompts, n={params.n}: a request is for 1 to {MAX_ROWS} responses")
        self.processor.compile_grammar(params)
        if tools := format.forced_tools:
            num_ids = self.engine.generator.num_drawable
            check_characters(forced_text(tools), self.processor.tokenizer, num_ids, f"tool_choice={format.tool_choice!r}")
        variables = {**self.variables, **format.variables}
        conversation, prompt = None, None
        if dialect == "chat" and self.conversations is not None:
            messages = check_messages(prompts[0])
            options = [model, format.cache_salt, format.tools, variables]
            conversation, number, ids = self.conversations.attach(messages, options)
            if ids and messages[-1]["role"] != "assistant":  # which is continued, as the template writes it
                behind = messages[number - 1], messages[number:]
                prompt = self.processor.encode_behind(ids, *behind, variables, format.tools)
        encoded = [prompt] if prompt else self.processor.encode(prompts, None, variables, format.generates, format.tools)
        fields = {key: value for key, value in body.items() if key not in OTHER}
        if self.names_by_id:
            fields["return_tokens_as_token_ids"] = True
        return {"dialect": dialect, "body": fields, "prompts": encoded, "model": model, "conversation": conversation}

    def metrics(self) -> str:
        """Return counts in Prometheus' text format, with vLLM's names. Any thread may call."""
        waiting = [request for request in list(self.waiting) if request.number not in self.running]
        ended = {f'finished_reason="{reason}"': count for reason, count in self.num_ended.items()}
        metrics: tuple[tuple[str, str, str, dict[str, int] | dict[str, float]], ...] = (
            ("num_requests_running", "gauge", "Requests that have begun.", {"": len(self.running)}),
            ("num_requests_waiting", "gauge", "Requests that have not begun.", {"": len(waiting) + self.arrivals.qsize()}),
            ("kv_cache_usage_perc", "gauge", "Share of the cache's pages that rows refer to.", {"": self.page_usage}),
            ("prompt_tokens_total", "counter", "Tokens of the prompts of all requests.", {"": self.num_prompt_tokens}),
            ("generation_tokens_total", "counter", "Tokens that were drawn.", {"": self.num_drawn}),
            ("request_success_total", "counter", "Responses that have ended.", ended),
        )
        name = self.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines = []
        for metric, kind, text, values in metrics:
            lines += [f"# HELP vllm:{metric} {text}", f"# TYPE vllm:{metric} {kind}"]
            for label, value in values.items():
                labels = f'model_name="{name}",{label}'.rstrip(",")
                lines.append(f"vllm:{metric}{{{labels}}} {value}")
        return "\n".join(lines) + "\n"

    def turn(self) -> bool:
        """Take what has arrived, and generate for a moment. Return True while the service goes on.

        Collective over the world: every rank of it must call, in program order.
        """
        news = (self._state(), self._arrived()) if self.engine.world.rank == 0 else None
        self.state, arrivals = self.engine.mesh.replica.broadcast_json(news, "serve:requests")
        for arrival in arrivals:
            self._take(*arrival)
        if self.state != "on":
            waiting = [request for request in self.waiting if request.number not in self.running]
            self._fail(waiting, HttpError(503, "the server is ending"))
        if self.state == "over":
            self._fail([*self.running.values()], HttpError(503, "the server has ended"))
            return False
        rows = self._admit()
        self._score()
        self._generate(rows)
        self.page_usage = self.engine.generator.page_usage
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

    def _take(self, number: int, message: dict[str, Any] | None) -> None:
        """Put an arrived request in the queue, or answer why not; forget one whose client went away."""
        if message is None:
            return self._forget([number])
        if self.state != "on":
            return self._put(number, error_answer(HttpError(503, "the server is ending")))
        try:
            request = self._admitted_request(number, **message)
        except Exception as error:  # a process boundary: one request fails, on all ranks, and the service goes on
            if not self._is_shared(error):
                raise
            return self._put(number, error_answer(error))
        self.num_admitted += 1
        self.num_prompt_tokens += sum(len(prompt_request.prompt_ids) for prompt_request in request.answer.prompt_requests)
        if self.num_admitted % REQUESTS_PER_CACHE == 0:
            self.engine.generator.before_training()
        if request.unstarted:
            self.waiting.append(request)
        else:
            self.running[number] = request

    def _admitted_request(
        self,
        number: int,
        dialect: Dialect,
        body: Mapping[str, Any],
        prompts: Sequence[Prompt],
        model: str,
        conversation: str | None,
    ) -> ServedRequest:
        """Return the request with its rows, none of which has started. Raises ValueError."""
        format, params = read_request(body, dialect)
        adapter = None if model == self.name else model
        salt = None if adapter is format.cache_salt is None else json.dumps([adapter, format.cache_salt])
        tags = self.reasoning_tags if dialect == "chat" else None
        prompt_requests = self.processor.requests(prompts, [params] * len(prompts), salt, tags)
        rows = [row for prompt_request in prompt_requests for row in prompt_request.rows]
        sampling = prompt_requests[0].sampling
        if not fit_together(len(rows), longest_of(rows), sampling):
            raise ValueError(
                f"{len(rows)} responses with so many tokens and logprobs do not fit; ask for fewer in max_tokens, n or logprobs"
            )
        call_format = None
        if format.reads_calls:
            call_format = self.call_format or detect_format(self.processor.tokenizer.chat_template)
        forms = model, tags, call_format, conversation
        answer = ClientAnswer(number, dialect, format, prompt_requests, self.output_builder, *forms)
        if not format.generates:
            empty = CompletionOutput(0, "", [], 0.0, None if params.logprobs is None else [], "length", None)
            answer.responses = dict.fromkeys(answer.rows, empty)
            rows.clear()
        unscored = deque(range(len(prompts)) if params.prompt_logprobs is not None else ())
        return ServedRequest(number, answer, adapter, sampling, deque(rows), unscored)

    def _admit(self) -> list[Request]:
        """Return the rows that start now: one of each request in turn, so that a request with many rows does not hold up the others.

        Rows in flight are sampled alike and have one adapter. A request with another ``sampling`` or adapter waits until they have
        ended. Then the first that waits is next, with all that already wait and can join it; what comes later overtakes none.
        """
        generator = self.engine.generator
        rows = list[Request]()
        num_rows = len(generator.kept)
        longest = longest_of(state.request for state in generator.kept)

        def joins(request: ServedRequest) -> bool:
            return request.adapter == self.adapter and request.sampling == self.sampling

        if self.waiting and not num_rows:
            self.sampling, self.adapter = self.waiting[0].sampling, self.waiting[0].adapter
            self.waiting = deque(sorted(self.waiting, key=lambda request: not joins(request)))
        turns = deque(takewhile(joins, self.waiting))
        later = [*self.waiting][len(turns) :]
        next_turns = deque[ServedRequest]()
        while num_rows < AHEAD * generator.config.max_num_seqs and (turns or next_turns):
            if not turns:
                turns, next_turns = next_turns, turns
            longest = max(longest, turns[0].unstarted[0].max_new_tokens)
            if num_rows and not fit_together(num_rows + 1, longest, self.sampling):
                break
            num_rows += 1
            request = turns.popleft()
            rows.append(request.unstarted.popleft())
            self.running[request.number] = request
            if request.unstarted:
                next_turns.append(request)
        self.waiting = deque([*turns, *later, *next_turns])
        return rows

    def _use(self, adapter: str | None) -> None:
        if self.adapters is not None:
            self.adapters.use(adapter)

    def _score(self) -> None:
        """Compute log-probs of prompts' tokens, about as many as a step of the generator computes; one prompt of each request in turn,
        of those that have the adapter of the first one.

        Collective over the world: every rank of it must call, in program order.
        """
        prompts = list[tuple[ServedRequest, int]]()
        num_tokens = 0
        unscored = [request for request in self.running.values() if request.unscored]
        turns = deque(request for request in unscored if request.adapter == unscored[0].adapter)
        while turns and num_tokens < self.engine.generator.config.max_num_batched_tokens:
            request = turns.popleft()
            number = request.unscored.popleft()
            prompts.append((request, number))
            num_tokens += len(request.answer.prompt_requests[number].prompt_ids)
            if request.unscored:
                turns.append(request)
        for request, _ in prompts:  # in the next turn the others come first
            self.running[request.number] = self.running.pop(request.number)

        def score() -> None:
            prompt_requests = [request.answer.prompt_requests[number] for request, number in prompts]
            num_likeliest = [prompt_request.params.prompt_logprobs or 0 for prompt_request in prompt_requests]
            ids = [prompt_request.prompt_ids for prompt_request in prompt_requests]
            self._use(prompts[0][0].adapter)
            entries = self.engine.prompt_entries(ids, num_likeliest)
            for (request, number), prompt_entries in zip(prompts, entries, strict=True):
                request.answer.add_prompt_entries(number, prompt_entries)

        if prompts:
            self._attempt(score, [request for request, _ in prompts])

    def _generate(self, rows: Sequence[Request]) -> None:
        """Generate for a moment and deliver what is new. ``rows``: those that start now.

        Collective over the world: every rank of it must call, in program order.
        """
        generator = self.engine.generator
        settings = (self.sampling, self.processor.seed, 0, GenerationLimits(seconds=TURN_S), 0, self.engine.tick)
        ended: list[Completion] | None = None
        num_before = sum(state.num_new for state in generator.kept)
        if rows or generator.kept:
            self._use(self.adapter)
            row_ids = {row.row_id for row in rows}
            newcomers = [request for request in self.running.values() if not row_ids.isdisjoint(request.answer.rows)]
            ended = self._attempt(lambda: generator.generate_until(rows, *settings), newcomers)
        if ended is not None:
            num_after = sum(state.num_new for state in generator.kept) + sum(len(row.token_ids) for row in ended)
            self.num_drawn += num_after - num_before
        completions = {completion.row_id: completion for completion in ended or ()}
        states = {state.request.row_id: state for state in generator.kept}
        for request in list(self.running.values()):
            self._attempt(partial(self._deliver, request, completions, states), [request])

    def _is_shared(self, error: Exception) -> bool:
        """Return True if every rank has met ``error``, so that all drop the same request."""
        return self.engine.world.size == 1 or isinstance(error, SHARED_ERRORS)

    def _attempt(self, work: Callable[[], T], suspects: Sequence[ServedRequest]) -> T | None:
        """Return the result of ``work``. If it fails, the request that the error names, else the ``suspects``, get the error.

        Raises what no suspect can have caused, and what the other ranks may not have met.
        """
        try:
            return work()
        except NotFinite as error:
            self._fail([request for request in self.running.values() if error.row_id in request.answer.rows], error)
        except Exception as error:  # a process boundary: these requests fail, on all ranks, and the service goes on
            suspects = suspects or ([*self.running.values()] if isinstance(error, torch.OutOfMemoryError) else [])
            if not suspects or not self._is_shared(error):
                raise
            self._fail(suspects, error)
        return None

    def _fail(self, failed: Sequence[ServedRequest], error: Exception) -> None:
        """Answer these requests with ``error``, which every rank has raised. The others go on."""
        status, answer = error_answer(error)
        if failed and not isinstance(error, ValueError) and self.engine.world.rank == 0:
            print(f"{counted(len(failed), 'request')} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for request in failed:
            self._put(request.number, (status, answer))
            self._put(request.number, None)
        self._forget([request.number for request in failed])

    def _forget(self, numbers: Collection[int]) -> None:
        """Generate no more for these requests."""
        stopped = [self.running.pop(number) for number in numbers if number in self.running]
        self.engine.generator.drop({row for request in stopped for row in request.answer.rows})
        self.waiting = deque(request for request in self.waiting if request.number not in numbers)

    def _deliver(
        self, request: ServedRequest, completions: Mapping[int, Completion], states: Mapping[int, SequenceState]
    ) -> None:
        """Send what is new of a request. ``completions``: of the rows that have just ended; ``states``: the rows in flight."""
        answer = request.answer
        for row in answer.rows.keys() & completions.keys():
            answer.add_response(completions[row])
            if self.conversations is not None and answer.conversation is not None and (message := answer.message(row)):
                self.conversations.add(answer.conversation, *message)
            self.num_ended[answer.responses[row].finish_reason] += 1
        if request.unscored:
            return
        for chunk in answer.new_chunks(states):
            self._put(request.number, (200, chunk))
        if len(answer.responses) < len(answer.rows):
            return
        del self.running[request.number]
        if (last_chunk := answer.last_chunk()) is not None:
            self._put(request.number, (200, last_chunk))
        self._put(request.number, None)

    def _put(self, number: int, part: Part) -> None:
        """Pass a part of an answer on. Does nothing on ranks without an endpoint, and if the client went away."""
        if (reply := self.replies.get(number)) is not None:
            reply(part)
