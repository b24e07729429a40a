"""Episodes of agents in a generate call: the replica's first rank has the endpoint, and all its ranks generate what agents ask for.

Between short runs of the generator the first rank tells the others which turns have come. The draws of a turn are keyed by what was
asked, so they do not depend on the order of requests. Rows are ordered by id. The paths of an episode's forest are its rows: the first
has the row id of the episode, the others those behind it (``agent.max_rows`` ids belong to each).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.endpoint import AskedTurn
from rlhf_spmd.agents.forest import Draws, RowTokens, row_tokens
from rlhf_spmd.agents.listener import write_addresses
from rlhf_spmd.agents.server import AgentReport, AgentServer, EndedCall
from rlhf_spmd.data.messages import Message
from rlhf_spmd.generation.call import GenerationLimits
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request
from rlhf_spmd.telemetry.progress import say

RUN_STEPS = 16  # steps of the generator after which turns that have come meanwhile join
ENDED_SHARE = 0.25  # of the turns in flight: a run ends when so many of them have, since their agents wait
WAIT_S = 0.02  # between looks for requests while none is generated


class AgentRollouts:
    """Runs the episodes of generate calls on this replica. Every rank of the replica has one.

    Its construction is collective over the pool: every rank of it must call, in program order.

    - longest: tokens that a conversation may have
    - limit_s: of all episodes of a call, for which other ranks wait
    - nodes: by row id, the place of each row of the last call in its episode, for people to read
    """

    def __init__(
        self, config: AgentConfig, generator: Generator, dialect: Dialect, longest: int, limit_s: float, run_dir: Path
    ) -> None:
        self.config, self.generator, self.dialect = config, generator, dialect
        self.longest, self.limit_s = longest, limit_s
        self.replica = generator.mesh.replica
        self.nodes: dict[int, dict[str, Any]] = {}
        vocab_size = generator.decoder.spec.vocab_size
        mesh = generator.mesh
        self.server = AgentServer(config, dialect, vocab_size, mesh.dp_rank) if self.replica.rank == 0 else None
        if config.external is not None:
            address = None
            if self.server is not None and self.server.listener is not None:
                address = {"url": self.server.listener.url, "key": self.server.listener.key}
            if (addresses := mesh.pool.gather_json(address, "agents:addresses")) is not None:
                say(f"agents outside fetch episodes: {write_addresses(run_dir, addresses)} says where")

    def run(
        self,
        rows: Mapping[int, Mapping[str, Any]],
        sampling: SamplingConfig,
        global_step: int,
        version: int,
        tick: Callable[[], None],
    ) -> tuple[list[Completion], AgentReport]:
        """Return the rows of the episodes, at least one for each, and counts.

        ``rows``: the columns of each episode's row, by its first row id.

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        if not rows:
            return [], AgentReport()
        generator = self.generator
        started = time.perf_counter()
        totals: dict[str, Any] = {}  # of the runs of the generator
        draws: dict[int, Draws] = {}
        with generator.reserving(self.longest) as longest:
            if self.server is not None:
                episodes = ((first, f"{sampling.seed}.{global_step}.{first}", row) for first, row in rows.items())
                self.server.begin(episodes, longest, self.limit_s)
            while not isinstance(news := self._news(), EndedCall):
                requests = [_request(turn, sampling.seed) for turn in news]
                if requests or generator.kept:
                    limits = GenerationLimits(steps=RUN_STEPS, fraction=ENDED_SHARE)
                    settings = (sampling, sampling.seed, global_step, limits, version, tick)
                    ended = {c.row_id: _draws(c) for c in generator.generate_until(requests, *settings)}
                    totals = {name: totals.get(name, 0) + value for name, value in vars(generator.stats).items()}
                    draws |= ended
                    if self.server is not None:
                        self.server.send(ended)
                else:
                    tick()
        generator.stats = GenerationStats(**totals | {"seconds": time.perf_counter() - started})
        return self._completions(news, draws, version), news.report

    def _news(self) -> list[AskedTurn] | EndedCall:
        """Return the turns that have come, on every rank; when all episodes have ended, how. Wait a moment if nothing is generated."""
        wait_s = 0.0 if self.generator.kept else WAIT_S
        message = self.replica.broadcast_json(None if self.server is None else self.server.receive(wait_s), "agents:news")
        if "ended" in message:
            return EndedCall.of(message["ended"])
        return sorted((AskedTurn(*turn) for turn in message["asked"]), key=lambda turn: turn.draw_number)

    def _completions(self, ended: EndedCall, draws: Mapping[int, Draws], version: int) -> list[Completion]:
        """Return the rows of all episodes, and note their places. An episode that is left out has one, with nothing to learn."""
        completions = []
        self.nodes = {}
        for first, ending, reward, failure, rows in ended.episodes:
            for row_id, row in enumerate(rows, start=first):
                tokens = row_tokens(row.turns, draws)
                completions.append(self._completion(row_id, tokens, row.num_turns, row.observations, reward))
                self.nodes[row_id] = {"episode": first, "node": row.node, "parent": row.parent, "ending": ending}
            if not rows:
                ids = [*self.dialect.first_ids, next(iter(self.dialect.end_ids))]
                tokens = RowTokens(ids, [False] * len(ids), [0.0] * len(ids), [version] * len(ids), "stop")
                completions.append(self._completion(first, tokens, 0, [[]], math.nan, failure))
                self.nodes[first] = {"episode": first, "node": "", "parent": "", "ending": ending, "failure": failure}
        return completions

    def _completion(
        self,
        row_id: int,
        row: RowTokens,
        num_turns: int,
        observations: list[list[Message]],
        reward: float,
        failure: str | None = None,
    ) -> Completion:
        """Return a row as the response to the tokens with which every conversation begins."""
        begin = len(self.dialect.first_ids)
        dtype = torch.float64 if self.generator.decoder.dtype == torch.float64 else torch.float32
        log_probs = torch.tensor(row.log_probs[begin:], dtype=dtype)
        return Completion(
            row_id,
            row.ids[begin:],
            log_probs,
            log_probs,
            "stop" if row.finish_reason == "stop" else "length",
            torch.tensor(row.versions[begin:], dtype=torch.int64),
            mask=row.mask[begin:],
            reward=reward,
            num_turns=num_turns,
            observations=observations,
            failure=failure,
        )


def _request(turn: AskedTurn, seed: int) -> Request:
    """Return a turn as a row of the generator."""
    return Request(
        turn.number,
        turn.number,
        turn.prompt_ids,
        turn.max_new_tokens,
        draw_key=(seed, turn.draw_number),
        is_continued=True,
        num_continued=turn.num_continued,
    )


def _draws(completion: Completion) -> Draws:
    c = completion
    return Draws(c.token_ids, c.log_probs.tolist(), c.versions.tolist(), c.finish_reason)
