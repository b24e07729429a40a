"""HTTP for agents while a model is trained: OpenAI's chats and Responses, and Anthropic's Messages, on a thread.

The address of an episode has a secret, so a request is that of one episode. The thread renders requests and keeps the forests. Turns to
generate go to ``ask``; :meth:`AgentEndpoint.finish` takes what the model drew for them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import ChatRequest, Dialect, completion_body, read_chat_request
from rlhf_spmd.agents.episodes import Episode
from rlhf_spmd.agents.forest import Draws, Forest, Turn
from rlhf_spmd.agents.forms import CHAT, TRANSLATED, AnswerForm, Form
from rlhf_spmd.agents.http import HANDLERS, HttpError, ServedConnection, read_body, read_bytes, unless_gone
from rlhf_spmd.agents.outside_agents import OutsideAgents

MAX_BODY_BYTES = 1 << 23
NAME = "actor"  # of the model
RETRIES = "x-stainless-retry-count"  # of OpenAI's clients: above 0 if a request is sent again
CONNECTIONS, CONNECTIONS_OF_EPISODE = 256, 8  # of programs outside: together, and more for each of agent.concurrency
CLOSE_S = 2.0
SILENT_S = 300  # a connection stays open while its agent uses a tool


class AskedTurn(NamedTuple):
    """A turn to generate.

    - number: of the turn among all of the endpoint
    - episode: number of its episode
    - prompt_ids: the whole conversation
    - num_continued: so many of them are the conversation of the turn before
    - draw_number: keys its draws
    """

    number: int
    episode: int
    prompt_ids: list[int]
    max_new_tokens: int
    draw_number: int
    num_continued: int


class AgentEndpoint:
    """Answers agents on a loopback port, or where programs outside ask.

    - by_secret: the running episodes
    - vocab_size: ids are below it
    - ask: called with each turn to generate
    - longest: tokens that a conversation may have
    """

    def __init__(
        self,
        config: AgentConfig,
        dialect: Dialect,
        vocab_size: int,
        ask: Callable[[AskedTurn], None],
        outside: OutsideAgents | None = None,
    ) -> None:
        self.config, self.dialect, self.vocab_size, self.ask = config, dialect, vocab_size, ask
        self.by_secret: Mapping[str, Episode] = {}
        self.longest = 0
        self._waiting: dict[int, Turn] = {}  # turns that are generated, by number
        self._futures: dict[Turn, asyncio.Future[None]] = {}  # done when such a turn has its draws
        self._number = 0
        self.socket = outside.socket if outside else socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        routes = [
            *(
                Route(f"/{{secret}}/v1/{form.path}", partial(self._answer, form), methods=["POST"])
                for form in (CHAT, *TRANSLATED)
            ),
            Route("/{secret}/v1/models", self._models),
            *(outside.routes if outside else ()),
        ]
        app = Starlette(routes=routes, exception_handlers=HANDLERS)
        settings = uvicorn.Config(
            app,
            http=ServedConnection if outside else "auto",
            limit_concurrency=CONNECTIONS + CONNECTIONS_OF_EPISODE * config.concurrency if outside else None,
            loop="asyncio",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(CLOSE_S),
            timeout_keep_alive=SILENT_S,
        )
        self.server = uvicorn.Server(settings)
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self.server.serve([self.socket]))
        finally:
            self.loop.close()

    def url_of(self, secret: str) -> str:
        """Return the address that the agent of an episode asks."""
        return f"http://127.0.0.1:{self.port}/{secret}/v1"

    def finish(self, number: int, draws: Draws) -> None:
        """Give a turn what the model drew. Any thread may call."""
        self.loop.call_soon_threadsafe(self._finish, number, draws)

    def close_forest(self, forest: Forest) -> None:
        """Wait until what has been answered so far of an attempt is noted. Requests that wait, or that come later, get an error."""

        async def close() -> None:
            forest.is_closed = True
            for turn in forest.turns.values():
                if (future := self._futures.pop(turn, None)) is not None:
                    del self._waiting[turn.number]
                    future.cancel()

        asyncio.run_coroutine_threadsafe(close(), self.loop).result()

    def close(self) -> None:
        """Stop answering."""
        self.server.should_exit = True
        self.thread.join(2 * CLOSE_S)

    def _finish(self, number: int, draws: Draws) -> None:
        if number in self._waiting:  # its episode has not ended
            turn = self._waiting.pop(number)
            turn.draws = draws
            self._futures.pop(turn).set_result(None)

    async def _models(self, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": NAME, "object": "model", "created": 0, "owned_by": "rlhf_spmd"}]}
        )

    async def _answer(self, form: Form, request: Request) -> Response:
        self._forest(request)  # who knows no secret sends no bytes
        body = read_body(await read_bytes(request, MAX_BODY_BYTES))
        forest = self._forest(request)
        try:
            chat = read_chat_request(form.chat_of(body), form.names)
            retries = int(request.headers.get(RETRIES, "0") or 0) > 0
            turns, prompt_ids = self._turns(forest, chat, retries)
        except ValueError as error:
            forest.refusal = str(error)
            raise
        await self._generated(request, forest, turns, prompt_ids, chat)
        completion = completion_body(NAME, turns[0].key, turns, chat, prompt_ids, self.dialect.tokenizer)
        answer = form.answer(body)
        response = (
            StreamingResponse(_events(answer, completion, chat.gives_usage), media_type="text/event-stream")
            if chat.fields.stream
            else JSONResponse(answer.whole(completion))
        )
        return DeliveredResponse(response, forest, turns)

    def _forest(self, request: Request) -> Forest:
        """Return the forest of the attempt that asks. Raises HttpError."""
        episode = self.by_secret.get(request.path_params["secret"])
        if episode is None:
            raise HttpError(403, "there is no such episode, or it has ended", "invalid_api_key")
        return episode.forest

    def _turns(self, forest: Forest, chat: ChatRequest, retries: bool) -> tuple[list[Turn], list[int]]:
        """Return the turns that answer a request, new ones if it has not come before, and the conversation's tokens.

        Raises ValueError.
        """
        options = chat.conversation_options
        request = {**options, "max_tokens": chat.max_tokens}  # which decides what is drawn, and not what is read
        forest.num_ignored += chat.ignores
        parent, messages = forest.attach(chat.messages, options)
        turns: list[Turn] = []
        if chat.fields.n == 1 and (turn := forest.repeated(parent, messages, request, retries)) is not None:
            turns = [turn]
        elif len(forest.turns) + chat.fields.n > self.config.max_turns:
            raise HttpError(400, f"agent.max_turns={self.config.max_turns}: the episode may ask for no more", "max_turns")
        else:
            read_ids = self.dialect.read_ids(parent, messages, chat.options)
            if parent is None and read_ids[:1] != self.dialect.first_ids:
                raise ValueError("the conversation does not begin as the chat template begins others")
            if max(read_ids) >= self.vocab_size:
                raise ValueError(
                    f"the conversation has the token id {max(read_ids)}, and the model a vocabulary of {self.vocab_size}"
                )
            turns = [forest.add(parent, messages, read_ids, request) for _ in range(chat.fields.n)]
        prompt_ids = [*(parent.ids if parent else ()), *turns[0].read_ids]
        if len(prompt_ids) >= self.longest:
            for turn in turns:
                turn.num_waiting = 0
            message = (
                f"the conversation has {len(prompt_ids)} tokens, and {self.longest} are the most, with those of the answer"
            )
            raise HttpError(400, message, "context_length_exceeded")
        return turns, prompt_ids

    async def _generated(
        self, request: Request, forest: Forest, turns: list[Turn], prompt_ids: list[int], chat: ChatRequest
    ) -> None:
        """Wait until the turns have their draws and answers. They go on if the client goes away, for its next try."""
        room = self.longest - len(prompt_ids)
        limit = min(limit for limit in (room, self.config.max_tokens, chat.max_tokens) if limit is not None)
        for turn in turns:
            turn.num_waiting += 1
            if turn.draws is None and turn not in self._futures:
                self._number += 1
                turn.number = self._number
                self._futures[turn] = self.loop.create_future()
                self._waiting[turn.number] = turn
                num_continued = len(prompt_ids) - len(turn.read_ids)
                self.ask(AskedTurn(turn.number, forest.episode, prompt_ids, limit, turn.draw_number, num_continued))
        try:
            if undrawn := [self._futures[turn] for turn in turns if turn.draws is None]:
                await unless_gone(request, asyncio.wait(undrawn))  # which go on in any case
        except ClientDisconnect:
            for turn in turns:
                turn.num_waiting -= 1
            raise
        for turn in turns:
            if turn.draws is None:
                raise HttpError(410, "the episode has ended")
            if turn.answer is None:
                forest.finish(turn, turn.draws, self.dialect.answer(turn, chat), chat.conversation_options)


class DeliveredResponse(Response):
    """A response that notes of its turns that the client has it."""

    def __init__(self, response: Response, forest: Forest, turns: list[Turn]) -> None:
        super().__init__()
        self.response, self.forest, self.turns = response, forest, turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
            for turn in self.turns:
                turn.was_delivered |= not self.forest.is_closed
        finally:
            for turn in self.turns:
                turn.num_waiting -= 1


async def _events(answer: AnswerForm, body: Mapping[str, Any], gives_usage: bool) -> AsyncIterator[str]:
    """Yield a completion as server-sent events: each choice in one part, then the usage if it is asked for."""
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in body["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        part = {**choice, "delta": delta}
        del part["message"]
        for event in answer.events({**head, "choices": [part]}):
            yield event
    if gives_usage:
        for event in answer.events({**head, "choices": [], "usage": body["usage"]}):
            yield event
    for event in answer.end():
        yield event
