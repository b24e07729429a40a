"""Episodes of agents in a generate call: the replica's first rank has the endpoint, and all its ranks generate what agents ask for.

Between short runs of the generator the first rank tells the others which turns have come. The draws of a turn are keyed by what was
asked, so they do not depend on the order of requests. Rows are ordered by id. The paths of an episode's forest are its rows: the first
has the row id of the episode, the others those behind it (``agent.max_rows`` ids belong to each).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.endpoint import AgentEndpoint, AskedTurn
from rlhf_spmd.agents.episodes import Episode, Episodes
from rlhf_spmd.agents.forest import Draws, EpisodeRow
from rlhf_spmd.generation.call import GenerationLimits
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request

RUN_STEPS = 16  # steps of the generator after which turns that have come meanwhile join
ENDED_SHARE = 0.1  # of the turns in flight: a run ends when so many of them have, since their agents wait
WAIT_S = 0.02  # between looks for requests while none is generated


@dataclass(frozen=True)
class AgentReport:
    """Counts of a call on a replica."""

    episodes: int = 0
    turns: int = 0
    new_roots: int = 0
    retries: int = 0
    failed: int = 0
    timeouts: int = 0
    ignored_settings: int = 0


class AgentRollouts:
    """Runs the episodes of generate calls on this replica. Every rank of the replica has one.

    - longest: tokens that a conversation may have
    - limit_s: of all episodes of a call, for which other ranks wait
    - nodes: by row id, the place of each row of the last call in its episode, for people to read
    """

    def __init__(self, config: AgentConfig, generator: Generator, dialect: Dialect, longest: int, limit_s: float) -> None:
        self.config, self.generator, self.dialect = config, generator, dialect
        self.longest, self.limit_s = longest, limit_s
        self.replica = generator.mesh.replica
        self.nodes: dict[int, dict[str, Any]] = {}

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
        arguments = rows, sampling, global_step, version
        with generator.reserving(self.longest) as longest, _Replica(self, *arguments, longest) as replica:
            while (news := self._news(replica)) is not None:
                requests = [replica.request(*turn) for turn in news]
                if requests or generator.kept:
                    limits = GenerationLimits(steps=RUN_STEPS, fraction=ENDED_SHARE)
                    settings = (sampling, sampling.seed, global_step, limits, version, tick)
                    replica.finish(generator.generate_until(requests, *settings))
                    totals = {name: totals.get(name, 0) + value for name, value in vars(generator.stats).items()}
                else:
                    tick()
            result = self._rows(replica)
        generator.stats = GenerationStats(**totals | {"seconds": time.perf_counter() - started})
        return result

    def _news(self, replica: _Replica) -> list[AskedTurn] | None:
        """Return the turns that have come, on every rank; None when all episodes have ended."""
        news = replica.news(waits=not self.generator.kept) if self.replica.rank == 0 else None
        arrived = self.replica.broadcast_json(news, "agents:turns")
        return None if arrived is None else [AskedTurn(*turn) for turn in arrived]

    def _rows(self, replica: _Replica) -> tuple[list[Completion], AgentReport]:
        """Return the rows of all episodes, on every rank."""
        local_rows = replica.rows_of_episodes() if self.replica.rank == 0 else None
        episodes, counts = self.replica.broadcast_json(local_rows, "agents:rows")
        completions = []
        self.nodes = {}
        for first, ending, reward, failure, values in episodes:
            for row_id, row in enumerate((EpisodeRow(*row) for row in values), start=first):
                completions.append(self._completion(row_id, row, reward, failure))
                self.nodes[row_id] = {"episode": first, "node": row.node, "parent": row.parent, "ending": ending}
        return completions, AgentReport(**counts)

    def _completion(self, row_id: int, row: EpisodeRow, reward: float, failure: str | None) -> Completion:
        """Return a path as the response to the tokens with which every conversation begins."""
        begin = len(self.dialect.first_ids)
        log_probs = torch.tensor(row.log_probs[begin:], dtype=torch.float64 if self._is_double else torch.float32)
        versions = torch.tensor(row.versions[begin:], dtype=torch.int64)
        return Completion(
            row_id,
            row.ids[begin:],
            log_probs,
            log_probs,
            "stop" if row.finish_reason == "stop" else "length",
            versions,
            mask=row.mask[begin:],
            reward=reward,
            num_turns=row.num_turns,
            observations=row.observations,
            failure=failure,
        )

    @property
    def _is_double(self) -> bool:
        return self.generator.decoder.dtype == torch.float64


class _Replica:
    """The state of a call: on the replica's first rank its endpoint and episodes, on others only the arguments of the call."""

    def __init__(
        self,
        rollouts: AgentRollouts,
        rows: Mapping[int, Mapping[str, Any]],
        sampling: SamplingConfig,
        global_step: int,
        version: int,
        longest: int,
    ) -> None:
        self.rollouts, self.sampling, self.version = rollouts, sampling, version
        self.episodes: Episodes | None = None
        self.endpoint: AgentEndpoint | None = None
        if rollouts.replica.rank == 0:
            config = rollouts.config
            self.endpoint = AgentEndpoint(config, rollouts.dialect, longest, rollouts.generator.decoder.spec.vocab_size)
            self.episodes = Episodes(config, self.endpoint.url_of, rollouts.limit_s)
            self.endpoint.by_secret = self.episodes.by_secret
            self.all = [Episode(first, f"{sampling.seed}.{global_step}.{first}", row) for first, row in rows.items()]
            self.episodes.begin(self.all)

    def __enter__(self) -> _Replica:
        return self

    def __exit__(self, *_: object) -> None:
        if self.episodes is not None and self.endpoint is not None:
            try:
                self.episodes.close()
            finally:
                self.endpoint.close()

    def news(self, waits: bool) -> list[AskedTurn] | None:
        """Return the turns that have come; None when all episodes have ended. Wait a moment for some if ``waits``."""
        assert self.episodes is not None and self.endpoint is not None, "on the first rank"
        self.episodes.advance()
        if self.episodes.has_ended:
            return None
        asked = self.endpoint.asked
        if waits and asked.empty():
            time.sleep(WAIT_S)
        return sorted((asked.get() for _ in range(asked.qsize())), key=lambda turn: turn.draw_number)

    def request(self, number: int, prompt_ids: Sequence[int], max_new_tokens: int, draw_number: int) -> Request:
        """Return a turn as a row of the generator."""
        draw_key = self.sampling.seed, draw_number
        return Request(number, number, prompt_ids, max_new_tokens, draw_key=draw_key, is_continued=True)

    def finish(self, completions: Sequence[Completion]) -> None:
        """Give agents the turns that have ended."""
        if self.endpoint is None:
            return
        for c in completions:
            draws = Draws(c.token_ids, c.log_probs.tolist(), c.versions.tolist(), c.finish_reason)
            self.endpoint.finish(c.row_id, draws)

    def rows_of_episodes(self) -> tuple[list[Any], dict[str, int]]:
        """Return (first row id, ending, reward, failure, rows) of each episode, and counts.

        An episode that is left out has a row, too.
        """
        assert self.episodes is not None and self.endpoint is not None, "on the first rank"
        self.endpoint.settle()
        config = self.rollouts.config
        episode_rows = []
        counts = AgentReport(len(self.all), retries=self.episodes.retries, ignored_settings=self.endpoint.num_ignored)
        for episode in self.all:
            rows = [*episode.forest.rows()]
            failure = episode.failure
            if failure is None and not rows:
                failure = "the agent has asked the model nothing"
            if len(rows) > config.max_rows:
                failure = f"the episode has {len(rows)} conversations, and agent.max_rows={config.max_rows}"
            counts = replace(
                counts,
                turns=counts.turns + sum(row.num_turns for row in rows),
                new_roots=counts.new_roots + max(episode.forest.num_roots - 1, 0),
                failed=counts.failed + (failure is not None and episode.ending != "timeout"),
                timeouts=counts.timeouts + (episode.ending == "timeout"),
            )
            if failure is not None or not rows:
                end = next(iter(self.rollouts.dialect.end_ids))
                ids = [*self.rollouts.dialect.first_ids, end]
                rows = [EpisodeRow(ids, [False] * len(ids), [0.0] * len(ids), [self.version] * len(ids), [[]], 0, "stop")]
            ending = "failed" if failure is not None and episode.ending == "done" else episode.ending
            episode_rows.append((episode.row_id, ending, episode.reward if failure is None else math.nan, failure, rows))
        return episode_rows, vars(counts)
