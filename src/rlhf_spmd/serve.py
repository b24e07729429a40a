"""A model behind OpenAI's interface, for judges, agents and whatever else speaks it. After ``scripts/quickstart.sh``:

rlhf-spmd serve --nproc-per-node 2 model.path=runs/quickstart/ppo/export layout.tp=2

``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, also as streams, for this machine alone unless ``host`` says
otherwise. Beside OpenAI's fields a request may have those of ``SamplingParams``: ``top_k``, ``min_p``, ``repetition_penalty``,
``stop_token_ids`` and the others; unknown ones are refused. Requests that come while others run join these after a moment, if they
differ from them only in lengths and in how a token is drawn (temperature, top_p, top_k, min_p, seed); else they wait until those
have ended. All ranks hold the one model together.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.data.tokenizer import UNFINISHED, token_bytes
from rlhf_spmd.generation import CallLimits, Request
from rlhf_spmd.generation.sequence import NotFinite
from rlhf_spmd.parallel.world import Launch, World
from rlhf_spmd.runtime.inference import LoadedModel, inference_program, read_config
from rlhf_spmd.runtime.llm import Asked, Engine, EngineConfig, prepare_model
from rlhf_spmd.runtime.openai_forms import choice, params_of, prompts_of, read_body
from rlhf_spmd.runtime.sampling_params import CompletionOutput

TURN_S = 0.2  # after which requests that have come join, and texts that have grown are sent
IDLE_S = 1.0  # after which ranks that wait for requests hear of each other
MOST_BYTES, MOST_ROWS = 1 << 26, 4096  # of a request
MOST_NOTED = 1 << 27  # rows * tokens of the longest response * (1 + logprobs): they lie on the device, of all that run together
MOST_REFUSED = 1 << 16  # bytes that are read of what is refused unread: a client that cannot send does not read the answer
FORGET = 4096  # requests after which the generator, which knows the prompts' pages by their tokens, begins anew
CHAT = {"/v1/completions": False, "/v1/chat/completions": True}

Part = tuple[int, dict[str, Any]] | None  # of an answer: status and JSON; None ends it
Arrival = tuple[int, bool, dict[str, Any] | None]  # number, whether it is a chat, body; without one: the client went away


@dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Everything that ``serve`` takes.

    - host: the address to listen at
    - port: 0: a free one
    - served_model_name: what requests call the model; null: `model.path`
    - token_env: name of the environment variable with the bearer token that requests must have; null: none
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    token_env: str | None = None

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "port", least=0, most=65535)
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(f"token_env={self.token_env!r}: there is no such variable in the environment")


class Refusal(ValueError):
    """What OpenAI tells by another status than 400."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def refused(error: Exception) -> tuple[int, dict[str, Any]]:
    ours, kind = (400, "invalid_request_error") if isinstance(error, ValueError) else (500, "server_error")
    told = {"message": str(error), "type": kind, "param": None, "code": getattr(error, "code", None)}
    return getattr(error, "status", ours), {"error": told}


@dataclass
class Job:
    """A request. By row: what has ended, and the text that was sent of it as a stream."""

    number: int
    chat: bool
    body: dict[str, Any]
    asked: list[Asked]
    ended: dict[int, CompletionOutput] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def rows(self) -> dict[int, Asked]:
        return {request.row_id: asked for asked in self.asked for request in asked.requests}


def noted(jobs: Sequence[Job]) -> int:
    """What MOST_NOTED bounds."""
    requests = [request for job in jobs for asked in job.asked for request in asked.requests]
    return len(requests) * max(request.max_new_tokens for request in requests) * (1 + jobs[0].asked[0].sampling.logprobs)


class Service:
    """Answers requests with ``engine``. ``arrivals``, and ``replies`` by the number of the request, are those of rank 0's endpoint."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.arrivals: Queue[Arrival] = Queue()
        self.replies: dict[int, Queue[Part]] = {}
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        engine.longest = engine.generator.reserve_pages(engine.longest)

    def turn(self) -> None:
        """Take what has come, and generate for a moment.

        Collective over the world: every rank of it must call, in program order.
        """
        engine, running = self.engine, self.running
        requests: list[Request] = []
        for arrival in engine.mesh.replica.broadcast_json(self._arrived(), "serve:requests"):
            self._take(*arrival)
        while self.waiting and len(engine.generator.kept) + len(requests) < 2 * engine.generator.config.max_num_seqs:
            sampling = self.waiting[0].asked[0].sampling
            others = [*running.values(), self.waiting[0]]
            if any(job.asked[0].sampling != sampling for job in others) or noted(others) > MOST_NOTED:
                break  # and nobody overtakes it, so that its turn comes
            job = self.waiting.popleft()
            running[job.number] = job
            requests += [request for asked in job.asked for request in asked.requests]
        if running:
            sampling, limits = next(iter(running.values())).asked[0].sampling, CallLimits(seconds=TURN_S)
            try:
                ended = engine.generator.generate_until(requests, sampling, engine.seed, 0, limits, 0, engine.tick)
            except (NotFinite, torch.OutOfMemoryError) as error:
                if isinstance(error, torch.OutOfMemoryError) and engine.world.size > 1:
                    raise  # the other ranks wait for this one
                return self._fail(error)
            completions = {completion.row_id: completion for completion in ended}
            drawn = {row.request.row_id: row.token_ids for row in engine.generator.kept}
            for job in list(running.values()):
                texts = {row: self._text(asked, drawn[row]) for row, asked in job.rows.items() if job.streams and row in drawn}
                for row, asked in job.rows.items():
                    if row in completions:
                        job.ended[row] = engine.output(asked, [engine.record(asked, completions[row])]).outputs[0]
                        texts[row] = job.ended[row].text
                self._deliver(job, texts)

    def _arrived(self) -> list[Arrival]:
        """On rank 0, which waits where there is nothing to do."""
        arrived: list[Arrival] = []
        with suppress(Empty):
            if self.engine.world.rank == 0 and not self.running and not self.waiting:
                arrived.append(self.arrivals.get(timeout=IDLE_S))
            while True:
                arrived.append(self.arrivals.get_nowait())
        return arrived

    def _take(self, number: int, chat: bool, body: dict[str, Any] | None) -> None:
        if body is None:
            gone = self.running.pop(number, None)
            self.engine.generator.drop(gone.rows if gone else ())
            self.waiting = deque(job for job in self.waiting if job.number != number)
            return
        if number % FORGET == FORGET - 1:
            self.engine.generator.before_training()
        try:
            prompts, params = prompts_of(body, chat), params_of(body, chat)
            if not 0 < len(prompts) * max(params.n, 1) <= MOST_ROWS:
                raise ValueError(f"{len(prompts)} prompts, n={params.n}: a request is for 1 to {MOST_ROWS} responses")
            job = Job(number, chat, body, self.engine.ask(prompts, [params] * len(prompts)))
            if noted([job]) > MOST_NOTED:
                raise ValueError(
                    f"{len(job.rows)} responses with so many tokens and logprobs do not fit; ask for fewer in max_tokens, n or logprobs"
                )
            self.waiting.append(job)
        except Exception as error:  # the boundary of a request: the service goes on
            self._put(number, refused(error))

    def _fail(self, error: Exception) -> None:
        """All that runs is answered with ``error``, which came on every rank; others go on."""
        self.engine.generator.drop({row.request.row_id for row in self.engine.generator.kept})
        for number in self.running:
            self._put(number, refused(error))
            self._put(number, None)
        self.running.clear()

    def _deliver(self, job: Job, texts: Mapping[int, str]) -> None:
        """``texts``: by row, of those that have grown or ended in this turn."""
        for index, row in enumerate(job.rows):
            if job.streams and row in texts and (row in job.ended or texts[row] != job.sent.get(row)):
                before, reason = job.sent.get(row, ""), job.ended[row].finish_reason if row in job.ended else None
                delta = {"content": texts[row][len(before) :]} | ({} if row in job.sent else {"role": "assistant"})
                told = {"delta": delta} if job.chat else {"text": delta["content"]}
                job.sent[row] = before + delta["content"]
                self._reply(job, [{"index": index, **told, "logprobs": None, "finish_reason": reason}])
        if len(job.ended) < len(job.rows):
            return
        del self.running[job.number]
        made, prompts = sum(len(its.token_ids) for its in job.ended.values()), sum(len(asked.prompt_ids) for asked in job.asked)
        usage = {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}
        if not job.streams:
            to_bytes = partial(token_bytes, self.engine.tokenizer)
            choices = [choice(index, job.ended[row], job.chat, to_bytes) for index, row in enumerate(job.rows)]
            self._reply(job, choices, usage=usage)
        elif isinstance(options := job.body.get("stream_options"), dict) and options.get("include_usage"):
            self._reply(job, [], usage=usage)
        self._put(job.number, None)

    def _text(self, asked: Asked, ids: Sequence[int]) -> str:
        """Of a response under way: without what may be the beginning of a character or of a stop string."""
        held = max(map(len, asked.sampling.stop), default=1) - 1
        text = self.engine.text_of(asked, ids, stopped=False)[0].rstrip(UNFINISHED)
        return text[: max(len(text) - held, 0)]

    def _reply(self, job: Job, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = ("chat.completion.chunk" if job.streams else "chat.completion") if job.chat else "text_completion"
        head = {"id": f"request-{job.number}", "object": kind, "created": int(time.time()), "model": self.name}
        self._put(job.number, (200, {**head, "choices": choices, **more}))

    def _put(self, number: int, part: Part) -> None:
        """Nothing on ranks without an endpoint, and where the client went away."""
        if (reply := self.replies.get(number)) is not None:
            reply.put(part)


class Endpoint(ThreadingHTTPServer):
    """Brings requests to ``service`` and its answers back, each on a thread of its own. Raises ValueError where it cannot listen."""

    daemon_threads = True
    request_queue_size = 128  # connections that come together while the ranks compute; socketserver's 5 resets the others

    def __init__(self, config: ServeConfig, service: Service) -> None:
        self.service, self.numbers = service, count()
        self.token = None if config.token_env is None else os.environ[config.token_env]
        try:
            super().__init__((config.host, config.port), Handler)
        except OSError as error:
            raise ValueError(
                f"host={config.host}, port={config.port}: cannot listen there: {error.strerror or error}"
            ) from error


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    timeout = 600.0  # seconds for what the client sends, and for what it reads

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        with suppress(OSError):  # the client went away
            try:
                self._answer()
            except ValueError as error:
                self._send(*refused(error))

    def _answer(self) -> None:
        """Raises ValueError."""
        name, token, given = self.server.service.name, self.server.token, self.headers.get("Authorization", "")
        said = self.headers.get("Content-Length", "" if self.command == "POST" else "0")
        length = int(said) if said.isdecimal() and len(said) < 20 else None
        try:
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise Refusal(401, "the bearer token is missing or wrong", "invalid_api_key")
            if length is None:
                raise Refusal(400 if said else 411, f"Content-Length: {said!r} must be the number of bytes of the request")
            if length > MOST_BYTES:
                raise Refusal(413, f"Content-Length: {length}: a request has at most {MOST_BYTES} bytes")
        except Refusal as error:
            self._send(*refused(error))
            self.rfile.read(min(length or 0, MOST_REFUSED))
            return
        raw = self.rfile.read(length)
        if self.path == "/v1/models":
            model = {"id": name, "object": "model", "created": 0, "owned_by": "rlhf_spmd"}
            return self._send(200, {"object": "list", "data": [model]})
        if self.path not in CHAT:
            raise Refusal(404, f"there is nothing at {self.path}; there are /v1/models, {', '.join(CHAT)}")
        body = read_body(raw)
        if body.get("model", name) != name:
            raise Refusal(404, f"the model {body['model']!r} is not here; there is {name!r}", "model_not_found")
        service, number = self.server.service, next(self.server.numbers)
        reply = service.replies[number] = Queue()
        service.arrivals.put((number, CHAT[self.path], body))
        try:
            self._pass_on(reply, bool(body.get("stream")))
        except OSError:
            service.arrivals.put((number, False, None))
            raise
        finally:
            del service.replies[number]

    def _next(self, reply: Queue[Part]) -> Part:
        """Raises OSError where the client goes away meanwhile."""
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        while True:
            with suppress(Empty):
                return reply.get(timeout=IDLE_S)
            if look.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError("the client went away")

    def _pass_on(self, reply: Queue[Part], streams: bool) -> None:
        part = self._next(reply)
        assert part is not None, "an answer has a part"
        if not streams or part[0] != 200:
            return self._send(*part)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while part is not None:
            self.wfile.write(f"data: {json.dumps(part[1])}\n\n".encode())
            part = self._next(reply)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: standard error tells what went wrong."""


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> LoadedModel:
    """Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    ready = prepare_model(read_config(ServeConfig, path, overrides), launch)
    if ready.layout.dp != 1:
        raise ValueError(
            f"layout.tp={ready.layout.tp} on {launch.size} ranks: they hold one model; set layout.tp={launch.size}"
        )
    return ready


def serve(ready: LoadedModel, world: World, tick: Callable[[], None]) -> None:
    """Until the process is told to end. Collective over the world: every rank of it must call. Raises ValueError for an address where
    it cannot listen."""
    config = ready.config
    service = Service(Engine(ready, world, tick), config.served_model_name or config.model.path)
    if world.rank == 0:
        endpoint = Endpoint(config, service)
        Thread(target=endpoint.serve_forever, daemon=True).start()
        host, port = endpoint.server_address[:2]
        print(f"{service.name} on {ready.layout}: http://{host!s}:{port}/v1", file=sys.stderr, flush=True)
    try:
        while True:
            service.turn()
    except KeyboardInterrupt:
        if world.size > 1:  # ranks wait for each other; the board ends them together
            raise


keys, main = inference_program("serve", __doc__, ServeConfig, prepare, serve)


if __name__ == "__main__":
    main()
