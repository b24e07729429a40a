"""Serves a model behind OpenAI's HTTP interface, for judges, agents and other clients. After ``scripts/quickstart.sh``:

rlhf-spmd serve --nproc-per-node 2 model.path=runs/quickstart/ppo/export layout.tp=2

It has ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``, Anthropic's ``/v1/messages``, vLLM's
``/inference/v1/generate`` (token ids in and out), all also as streams, ``/metrics``, ``/health`` and ``/version``. Only this machine
can ask, unless ``host`` says otherwise. Beside OpenAI's fields a request may have those of ``SamplingParams``, such as ``top_k``,
``min_p``, ``repetition_penalty`` and ``stop_token_ids``. Unknown fields are refused.

A request that comes while others run joins them after a moment, if it differs from them only in lengths and in how a token is drawn
(temperature, top_p, top_k, min_p, seed). Otherwise, also if it names another adapter, it waits until the responses that have begun
have ended. Responses begin in turn, one of each request, so one that asks for many does not hold up the others. All ranks hold one
model together.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from rlhf_spmd.config.constraints import PositiveInt, Range
from rlhf_spmd.data.messages import check_variables, unread_variables
from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.environments.tool_calls import check_format
from rlhf_spmd.inference.conversations import Conversations
from rlhf_spmd.inference.endpoint import AccessRules, Endpoint
from rlhf_spmd.inference.inference_program import inference_program, read_config, say_warnings
from rlhf_spmd.inference.loaded_model import CheckedModel
from rlhf_spmd.inference.outputs import LogprobsMode
from rlhf_spmd.inference.requests import EngineConfig, RequestProcessor, prepare_model
from rlhf_spmd.inference.served_adapters import ServedAdapters, read_adapter
from rlhf_spmd.inference.service import Service
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.board import Board
from rlhf_spmd.rewards.config import REASONING_TAGS, check_tags


@dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Everything that ``serve`` takes.

    - host: the address to listen at
    - port: the port to listen at; 0: a free one
    - chat_template_kwargs: variables of the chat template, such as `{enable_thinking: false}`; those of a request come before them
    - separate_reasoning: chats' answers have the text between the reasoning tags as `reasoning_content`, as vLLM's and SGLang's
      servers give it, and only what follows as `content`
    - reasoning_tags: the opening and the closing tag
    - tool_call_parser: the form of the model's calls of tools, by vLLM's name, such as `hermes` or `llama3_json`; null: that of
      the chat template
    - keep_conversations: a chat goes on from the tokens that the model drew for its earlier answers, as agents' do in training; else
      the chat template writes the whole chat anew, without thoughts if it leaves them out
    - adapters: LoRA adapters of the model by the names that requests have for them, as `{poet: PATH}`: PEFT's directories, such as
      the exports of runs
    - logprobs_mode: log-probs of responses are at temperature 1 (`raw_logprobs`), or at the temperature of the request
      (`processed_logprobs`), which trainers need that read them; in both of the whole vocabulary, before penalties and top_p
    - return_tokens_as_token_ids: log-probs name tokens as `token_id:5`; a request may ask for it, too
    - served_model_name: the model's name in requests; null: `model.path`
    - token_env: name of the environment variable with the bearer token that requests must have; null: none
    - allowed_origins: web pages whose scripts may ask from a browser, as in `https://chat.example.org`; `*`: all
    - max_body_bytes: bytes of a request; a longer one is answered with status 413
    - max_queued_requests: requests that are read or wait for their first turn; others are answered with status 429
    """

    needs: ClassVar = {"separate_reasoning": ("reasoning_tags",)}

    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    served_model_name: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    logprobs_mode: LogprobsMode = "raw_logprobs"
    return_tokens_as_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    separate_reasoning: bool = False
    reasoning_tags: list[str] = field(default_factory=lambda: list(REASONING_TAGS))
    tool_call_parser: str | None = None
    keep_conversations: bool = False
    token_env: str | None = None
    allowed_origins: list[str] = field(default_factory=list)
    max_body_bytes: PositiveInt = 1 << 23
    max_queued_requests: PositiveInt = 1024

    def check(self, where: str) -> None:
        super().check(where)
        check_variables("chat_template_kwargs", self.chat_template_kwargs)
        check_tags("reasoning_tags", self.reasoning_tags)
        check_format(self.tool_call_parser, "tool_call_parser")
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(f"token_env={self.token_env!r}: there is no such variable in the environment")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} must be as https://chat.example.org or http://localhost:3000, or '*'"
                )


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> CheckedModel[ServeConfig]:
    """Return the checked model. Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    loaded = prepare_model(read_config(ServeConfig, path, overrides), launch)
    if loaded.layout.dp != 1:
        raise ValueError(
            f"layout.tp={loaded.layout.tp} on {launch.size} ranks: they hold one model; set layout.tp={launch.size}"
        )
    special = () if loaded.tokenizer is None else Decoding(loaded.tokenizer).special_ids
    if hidden := [tag for tag in loaded.config.reasoning_tags if loaded.config.separate_reasoning and tag in special]:
        raise ValueError(f"reasoning_tags: {hidden[0]} is a special token of this tokenizer, which responses do not show")
    if (name := loaded.config.served_model_name or loaded.config.model.path) in loaded.config.adapters:
        raise ValueError(f"adapters.{name}: the model has this name; give the adapter another one")
    adapters = {name: read_adapter(loaded.spec, path, f"adapters.{name}") for name, path in loaded.config.adapters.items()}
    say_warnings(launch, unread_variables("chat_template_kwargs", loaded.config.chat_template_kwargs, loaded.tokenizer))
    return replace(loaded, adapters=adapters)


def serve(loaded: CheckedModel[ServeConfig], world: World, board: Board) -> None:
    """Answer requests until the process is told to end.

    Collective over the world: every rank of it must call. Raises ValueError for an address at which it cannot listen.
    """
    config = loaded.config
    name = config.served_model_name or config.model.path
    processor = RequestProcessor(loaded, world, board.tick)
    tags = config.reasoning_tags if config.separate_reasoning else None
    forms = config.chat_template_kwargs, tags, config.tool_call_parser
    adapters = ServedAdapters(processor.engine.generator.decoder, loaded.adapters)
    log_probs = config.logprobs_mode, config.return_tokens_as_token_ids
    service = Service(processor, name, lambda: board.preempted, *forms, adapters, *log_probs)
    if world.rank > 0:
        while service.turn():
            pass
        return
    service.conversations = Conversations() if config.keep_conversations else None
    token = None if config.token_env is None else os.environ[config.token_env]
    limits = config.max_body_bytes, config.max_queued_requests
    endpoint = Endpoint(config.port, AccessRules(config.host, token, config.allowed_origins, *limits), service)
    print(f"{name} on {loaded.layout}: {endpoint.url}", file=sys.stderr, flush=True)
    while service.turn():
        pass
    endpoint.close()
    print("ended", file=sys.stderr, flush=True)


INTERRUPT_NOTICE = "the server answers running requests and ends"
# keys: the configuration's keys; main: the command line
keys, main = inference_program("serve", __doc__, ServeConfig, prepare, serve, INTERRUPT_NOTICE)


if __name__ == "__main__":
    main()
