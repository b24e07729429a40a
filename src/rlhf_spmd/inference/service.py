"""Requests in OpenAI's form, answered by an engine that generates for a moment at a time; ``serve`` puts HTTP in front of it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from queue import Empty, Queue
from typing import Any

import torch

from rlhf_spmd.config.schema import counted
from rlhf_spmd.data.tokenizer import UNFINISHED, added_ids, decode, prompt_texts, token_bytes
from rlhf_spmd.generation import GenerationLimits, Request
from rlhf_spmd.generation.sequence import NotFinite, SequenceState
from rlhf_spmd.inference.llm import Asked, Engine, Prompt, entries_of, prompt_log_probs
from rlhf_spmd.inference.openai_forms import (
    Entry,
    Form,
    Refusal,
    TextDelta,
    TextOffsets,
    choice_of,
    prompts_of,
    read_body,
    read_form,
    refused,
)
from rlhf_spmd.inference.sampling_params import CompletionOutput

TURN_S = 0.2  # after which requests that have come join, and texts that have grown are sent
IDLE_S = 1.0  # after which ranks that wait for requests hear of each other
END_S = 8.0  # for requests under way when the service is told to end: container runtimes kill after ten
MOST_ROWS = 4096  # of a request
MOST_NOTED = 1 << 27  # rows * tokens of the longest response * (1 + logprobs): they lie on the device, of all that run together
FORGET = 4096  # requests after which the generator, which knows the prompts' pages by their tokens, begins anew

Part = tuple[int, dict[str, Any]] | None  # of an answer: status and JSON; None ends it
Arrival = tuple[int, dict[str, Any] | None]  # number and what Service.read made of it; without it: the client went away


@dataclass
class Sent:
    """What a stream has sent of a response."""

    text: str = ""
    tokens: int = 0
    first: bool = True
    ended: bool = False
    offsets: TextOffsets | None = None


@dataclass
class Job:
    """A request. ``rows``: its responses, by row id, and what each was asked. ``unscored``: prompts whose tokens are yet to get
    log-probs, by number; ``scored``: those that have them. ``ended``, ``sent``: by row id."""

    number: int
    chat: bool
    form: Form
    asked: list[Asked]
    ended: dict[int, CompletionOutput] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    unscored: deque[int] = field(default_factory=deque)
    scored: dict[int, list[Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {request.row_id: number for number, its in enumerate(self.asked) for request in its.requests}
        if self.asked[0].params.prompt_logprobs is not None:
            self.unscored.extend(range(len(self.asked)))

    @property
    def requests(self) -> list[Request]:
        """What is yet to be generated."""
        return [request for its in self.asked for request in its.requests if request.row_id not in self.ended]


def noted(jobs: Sequence[Job]) -> int:
    """What MOST_NOTED bounds."""
    requests = [request for job in jobs for asked in job.asked for request in asked.requests]
    return len(requests) * max(request.max_new_tokens for request in requests) * (1 + jobs[0].asked[0].sampling.logprobs)


class Service:
    """Answers requests with ``engine``. ``arrivals``, and ``replies`` by the number of the request, are those of rank 0's endpoint;
    so is ``told_to_end``. ``state``: "on", then "ending", when no request is taken, then "over"."""

    def __init__(self, engine: Engine, name: str, told_to_end: Callable[[], bool] = lambda: False) -> None:
        self.engine, self.name, self.told_to_end = engine, name, told_to_end
        self.arrivals: Queue[Arrival] = Queue()
        self.replies: dict[int, Callable[[Part], Any]] = {}
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.state, self.end_by = "on", 0.0
        engine.longest = engine.generator.reserve_pages(engine.longest)

    def read(self, raw: bytes, chat: bool) -> dict[str, Any]:
        """A request with its prompts as token ids, as JSON can hold it. Local; any thread may call, so that nobody waits for a long
        text. Raises ValueError or DataError."""
        body = read_body(raw)
        if body.get("model", self.name) != self.name:
            raise Refusal(404, f"the model {body['model']!r} is not here; there is {self.name!r}", "model_not_found")
        form, params = read_form(body, chat)
        prompts = prompts_of(body, chat)
        if not 0 < len(prompts) * max(params.n, 1) <= MOST_ROWS:
            raise ValueError(f"{len(prompts)} prompts, n={params.n}: a request is for 1 to {MOST_ROWS} responses")
        read = self.engine.encode(prompts, variables=form.chat_template_kwargs)
        rest = {key: value for key, value in body.items() if key not in ("prompt", "messages")}
        return {"chat": chat, "body": rest, "prompts": read}

    def turn(self) -> bool:
        """Take what has come, and generate for a moment. Whether the service goes on.

        Collective over the world: every rank of it must call, in program order.
        """
        heard = (self._state(), self._arrived()) if self.engine.world.rank == 0 else None
        self.state, arrivals = self.engine.mesh.replica.broadcast_json(heard, "serve:requests")
        for arrival in arrivals:
            self._take(*arrival)
        if self.state != "on":
            while self.waiting:
                self._refuse(self.waiting.popleft().number)
        if self.state == "over":
            self._fail(Refusal(503, "the server has ended"))
            return False
        requests = self._admit()
        if self.running:
            try:
                self._score()
                self._generate(requests)
            except (NotFinite, torch.OutOfMemoryError) as error:
                if isinstance(error, torch.OutOfMemoryError) and self.engine.world.size > 1:
                    raise  # the other ranks wait for this one
                self._fail(error)
        return True

    def _arrived(self) -> list[Arrival]:
        """On rank 0, which waits where there is nothing to do."""
        arrived: list[Arrival] = []
        with suppress(Empty):
            if not self.running and not self.waiting and not self.told_to_end():
                arrived.append(self.arrivals.get(timeout=IDLE_S))
            while True:
                arrived.append(self.arrivals.get_nowait())
        return arrived

    def _state(self) -> str:
        """On rank 0, whose answer counts."""
        if not self.told_to_end():
            return "on"
        if self.state == "on":
            self.end_by = time.monotonic() + END_S
            under_way = f"{counted(len(self.running), 'request')} under way can be answered within {END_S:.0f} s"
            print(f"ending: {under_way}, others are refused", file=sys.stderr, flush=True)
        return "ending" if self.running and time.monotonic() < self.end_by else "over"

    def _take(self, number: int, request: dict[str, Any] | None) -> None:
        if request is None:
            gone = self.running.pop(number, None)
            self.engine.generator.drop(gone.rows if gone else ())
            self.waiting = deque(job for job in self.waiting if job.number != number)
            return
        if self.state != "on":
            return self._refuse(number)
        if number % FORGET == FORGET - 1:
            self.engine.generator.before_training()
        try:
            self.waiting.append(self._job(number, **request))
        except Exception as error:  # the boundary of a request: the service goes on
            self._put(number, refused(error))

    def _job(self, number: int, chat: bool, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> Job:
        """Raises ValueError."""
        form, params = read_form(body, chat)
        generates = params.max_tokens != 0
        asked = self.engine.ask(prompts, [params if generates else replace(params, max_tokens=1)] * len(prompts))
        job = Job(number, chat, form, asked)
        if noted([job]) > MOST_NOTED:
            raise ValueError(
                f"{len(job.rows)} responses with so many tokens and logprobs do not fit; ask for fewer in max_tokens, n or logprobs"
            )
        if not generates:
            none = CompletionOutput(0, "", [], 0.0, None if params.logprobs is None else [], "length", None)
            job.ended = dict.fromkeys(job.rows, none)
        return job

    def _refuse(self, number: int) -> None:
        self._put(number, refused(Refusal(503, "the server is ending")))

    def _admit(self) -> list[Request]:
        """The rows of those that begin now; nobody overtakes who waits, so that its turn comes."""
        generator, requests = self.engine.generator, list[Request]()
        while self.waiting and len(generator.kept) + len(requests) < 2 * generator.config.max_num_seqs:
            others = [*self.running.values(), self.waiting[0]]
            sampling = self.waiting[0].asked[0].sampling
            if any(job.asked[0].sampling != sampling for job in others) or noted(others) > MOST_NOTED:
                break
            job = self.waiting.popleft()
            self.running[job.number] = job
            requests += job.requests
        return requests

    def _score(self) -> None:
        """Log-probs of the tokens of prompts, about as many tokens as a step of the generator has.

        Collective over the world: every rank of it must call, in program order.
        """
        generator, found = self.engine.generator, list[tuple[Job, int]]()
        left = most = generator.config.max_num_batched_tokens
        for job in self.running.values():
            while job.unscored and left > 0:
                found.append((job, job.unscored.popleft()))
                left -= len(job.asked[found[-1][1]].prompt_ids)
        if not found:
            return
        asked = [job.asked[number] for job, number in found]
        many = [its.params.prompt_logprobs or 0 for its in asked]
        entries = prompt_log_probs(generator.decoder, [its.prompt_ids for its in asked], many, most)
        for (job, number), its, scored in zip(found, asked, entries, strict=True):
            if any(value != value for entry in scored for _, value in entry):
                raise NotFinite(its.requests[0].row_id)
            first = self.engine.named([[(its.prompt_ids[0], nan)]])
            job.scored[number] = [*first, *self.engine.named(scored)]

    def _generate(self, requests: Sequence[Request]) -> None:
        """Collective over the world: every rank of it must call, in program order."""
        engine = self.engine
        sampling, limits = next(iter(self.running.values())).asked[0].sampling, GenerationLimits(seconds=TURN_S)
        ended = engine.generator.generate_until(requests, sampling, engine.seed, 0, limits, 0, engine.tick)
        completions = {completion.row_id: completion for completion in ended}
        kept = {row.request.row_id: row for row in engine.generator.kept}
        for job in list(self.running.values()):
            for row, number in job.rows.items():
                if row in completions:
                    asked = job.asked[number]
                    job.ended[row] = engine.output(asked, [engine.record(asked, completions[row])]).outputs[0]
            if not job.unscored:
                self._deliver(job, kept)

    def _fail(self, error: Exception) -> None:
        """All that runs is answered with ``error``, which came on every rank; others go on."""
        self.engine.generator.drop({row.request.row_id for row in self.engine.generator.kept})
        for number in self.running:
            self._put(number, refused(error))
            self._put(number, None)
        self.running.clear()

    def _deliver(self, job: Job, kept: Mapping[int, SequenceState]) -> None:
        if job.form.stream:
            for index, row in enumerate(job.rows):
                self._send_more(job, index, row, kept.get(row))
        if len(job.ended) < len(job.rows):
            return
        del self.running[job.number]
        made, prompts = sum(len(its.token_ids) for its in job.ended.values()), sum(len(asked.prompt_ids) for asked in job.asked)
        usage = {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}
        if not job.form.stream:
            wholes = [self._delta(job, row, Sent(), job.ended[row].text, job.ended[row].logprobs) for row in job.rows]
            self._reply(job, [self._choice(job, index, its) for index, its in enumerate(wholes)], usage=usage)
        elif job.form.stream_options.include_usage:
            self._reply(job, [], usage=usage)
        self._put(job.number, None)

    def _send_more(self, job: Job, index: int, row: int, under_way: SequenceState | None) -> None:
        """What a stream has not sent of a response, where its text has grown or it has ended."""
        sent, asked = job.sent.setdefault(row, Sent()), job.asked[job.rows[row]]
        if row in job.ended:
            text, entries = job.ended[row].text, job.ended[row].logprobs
            entries = entries and entries[sent.tokens :]
        elif under_way is not None and under_way.notes is not None:
            text, entries, notes, first = self._text(asked, under_way.token_ids), None, under_way.notes, sent.tokens
            if asked.params.logprobs is not None:
                top = (notes.top_ids[first:], notes.top_log_probs[first:]) if notes.top_ids.shape[1] else None
                entries = self.engine.named(entries_of(under_way.token_ids[first:], notes.log_probs_t1[first:].double(), top))
        else:
            return
        if sent.ended or (row not in job.ended and len(text) <= len(sent.text) and not (sent.first and job.form.echo)):
            return
        part = "first" if sent.first else "later"
        self._reply(job, [self._choice(job, index, self._delta(job, row, sent, text, entries), part)])

    def _delta(self, job: Job, row: int, sent: Sent, text: str, entries: Sequence[Entry] | None) -> TextDelta:
        """What is new since ``sent``, which is brought up to date: of a response whose whole text is ``text``, and whose ``entries``
        are those of its new tokens."""
        asked, its = job.asked[job.rows[row]], job.ended.get(row)
        new, told, offsets = text[len(sent.text) :], entries, list[int]()
        if entries is not None and not job.chat:
            echoed = len(self._prompt(asked)) if job.form.echo else 0
            if sent.offsets is None:
                sent.offsets = TextOffsets(partial(self._decode, asked.params.skip_special_tokens), echoed)
            offsets = [min(at, echoed + len(text)) for at in sent.offsets.add([next(iter(entry)) for entry in entries])]
        if sent.first and job.form.echo:
            new = self._prompt(asked) + new
            if entries is not None:
                scored = job.scored[job.rows[row]]
                told, offsets = [*scored, *entries], [*self._prompt_offsets(asked), *offsets]
        sent.text, sent.tokens, sent.first, sent.ended = text, sent.tokens + len(entries or ()), False, its is not None
        return TextDelta(new, told, offsets, *((its.finish_reason, its.stop_reason) if its else ()))

    def _prompt(self, asked: Asked) -> str:
        return prompt_texts(self.engine.tokenizer, [asked.prompt_ids])[0] if asked.prompt is None else asked.prompt

    def _prompt_offsets(self, asked: Asked) -> list[int]:
        """The special tokens that a tokenizer begins each text with are not in it, nor is the blank that some put before it."""
        begin = [] if self.engine.tokenizer is None else added_ids(self.engine.tokenizer)[0]
        before = len(begin) * (asked.prompt_ids[: len(begin)] == begin)
        ids, decode_on = asked.prompt_ids[before:], partial(self._decode, False)
        offsets = TextOffsets(decode_on, len(self._prompt(asked)) - len(decode_on(ids))).add(ids)
        return [0] * before + [max(at, 0) for at in offsets]

    def _decode(self, skips: bool, ids: Sequence[int]) -> str:
        return "" if self.engine.tokenizer is None else decode(self.engine.tokenizer, [ids], skips)[0]

    def _text(self, asked: Asked, ids: Sequence[int]) -> str:
        """The text so far of an unfinished response, less what may be the beginning of a character or of a stop string."""
        held = max(map(len, asked.sampling.stop), default=1) - 1
        text = self.engine.text_of(asked, ids, stopped=False)[0].rstrip(UNFINISHED)
        return text[: max(len(text) - held, 0)]

    def _choice(self, job: Job, index: int, its: TextDelta, part: str | None = None) -> dict[str, Any]:
        return choice_of(index, its, job.chat, partial(token_bytes, self.engine.tokenizer), part)

    def _reply(self, job: Job, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = ("chat.completion.chunk" if job.form.stream else "chat.completion") if job.chat else "text_completion"
        name = f"{'chatcmpl' if job.chat else 'cmpl'}-{job.number}"
        head = {"id": name, "object": kind, "created": int(time.time()), "model": self.name}
        self._put(job.number, (200, {**head, "choices": choices, **more}))

    def _put(self, number: int, part: Part) -> None:
        """Nothing on ranks without an endpoint, and where the client went away."""
        if (reply := self.replies.get(number)) is not None:
            reply(part)
