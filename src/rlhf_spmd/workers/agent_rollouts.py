"""Episodes of agents in generate calls: the replica's first rank has the endpoint, and all its ranks generate what agents ask for.

Between short runs of the generator the first rank tells the others which turns have come, and which episodes have ended. The draws of
a turn are keyed by what was asked, so they do not depend on the order of requests. Rows are ordered by id. The paths of an episode's
forest are its rows: the first has the row id of the episode, the others those behind it (``agent.max_rows`` ids belong to each).

With ``rollout.in_flight`` a call of training ends when enough groups of episodes have. The others go on in its next call; agents use
their tools meanwhile, and what they ask waits. A validation between the two calls has episodes of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.endpoint import AskedTurn
from rlhf_spmd.agents.forest import Draws, RowTokens, row_tokens
from rlhf_spmd.agents.listener import write_addresses
from rlhf_spmd.agents.server import AgentServer, EndedEpisode
from rlhf_spmd.data.messages import Message
from rlhf_spmd.data.prompts import IS_CHAT
from rlhf_spmd.generation.call import GenerationLimits
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request
from rlhf_spmd.telemetry.progress import say

RUN_STEPS = 16  # steps of the generator after which turns that have come meanwhile join
ENDED_SHARE = 0.25  # of the turns in flight: a run ends when so many of them have, since their agents wait
WAIT_S = 0.02  # between looks for requests while none is generated


class AgentRow(NamedTuple):
    """A row that an agent answers: its group, and its columns as the data have them."""

    group_id: int
    columns: Mapping[str, Any]


def agent_row(group_id: int, row: Mapping[str, Any]) -> AgentRow:
    """Return what an agent reads of ``row``, which is as rewards see it.

    A prompt of messages is the messages, not the text that a template makes of them.
    """
    return AgentRow(group_id, {**row, "prompt": row["messages"] if row.get(IS_CHAT) else row["prompt"]})


@dataclass
class EpisodeInFlight:
    """An episode of a call that has not returned it.

    - row_id: the first of its rows
    - draws: of its turns so far, by their numbers
    - ended: how it ended; None until then
    - rows: then, its completions
    - nodes: and by row id, the place of each row in the episode, for people to read
    """

    row_id: int
    group_id: int
    draws: dict[int, Draws] = field(default_factory=dict)
    ended: EndedEpisode | None = None
    rows: list[Completion] = field(default_factory=list)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)


class EndedGroups(NamedTuple):
    """What a call returns: groups, rows of their episodes, and how these ended."""

    groups: list[int]
    rows: list[Completion]
    episodes: list[EndedEpisode]

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts that metrics name."""
        return {
            "episodes": len(self.episodes),
            "turns": sum(episode.turns for episode in self.episodes),
            "new_roots": sum(episode.new_roots for episode in self.episodes),
            "retries": sum(episode.retries for episode in self.episodes),
            "failed": sum(episode.ending == "failed" for episode in self.episodes),
            "timeouts": sum(episode.ending == "timeout" for episode in self.episodes),
            "ignored_settings": sum(episode.ignored_settings for episode in self.episodes),
        }


class AgentRollouts:
    """Runs the episodes of generate calls on this replica. Every rank of the replica has one.

    Its construction is collective over the pool: every rank of it must call, in program order.

    - longest: tokens that a conversation may have
    - limit_s: of all episodes of a call, for which other ranks wait
    - nodes: by row id, the place of each row of the last call in its episode, for people to read
    - in_flight: episodes of training that go on in its next call, by number
    """

    def __init__(
        self, config: AgentConfig, generator: Generator, dialect: Dialect, longest: int, limit_s: float, run_dir: Path
    ) -> None:
        self.config, self.generator, self.dialect = config, generator, dialect
        self.longest, self.limit_s = longest, limit_s
        self.replica = generator.mesh.replica
        self.nodes: dict[int, dict[str, Any]] = {}
        self.in_flight: dict[int, EpisodeInFlight] = {}
        self._asked: list[AskedTurn] = []  # turns of these that came in a call of other episodes
        self._episode_of: dict[int, int] = {}  # number of a turn -> that of its episode, until the episode ends
        self._num_episodes = self._num_calls = 0
        vocab_size = generator.decoder.spec.vocab_size
        mesh = generator.mesh
        self.server = AgentServer(config, dialect, vocab_size, mesh.dp_rank) if self.replica.rank == 0 else None
        if config.external is not None:
            address = None
            if self.server is not None and self.server.listener is not None:
                address = {"url": self.server.listener.url, "key": self.server.listener.key}
            if (addresses := mesh.pool.gather_json(address, "agents:addresses")) is not None:
                say(f"agents outside fetch episodes: {write_addresses(run_dir, addresses)} says where")

    def close(self) -> None:
        """End the process that answers agents, and the agents. Local."""
        if self.server is not None:
            self.server.close()

    def run(
        self,
        rows: Mapping[int, AgentRow],
        sampling: SamplingConfig,
        global_step: int,
        version: int,
        tick: Callable[[], None],
        num_groups: int | None = None,
    ) -> EndedGroups:
        """Return the rows of episodes that have ended, at least one for each.

        - rows: by the first row ids of their episodes. Those that are in flight go on, the others begin
        - num_groups: return the oldest so many groups that have ended, and leave the others in flight; None: return all

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        generator = self.generator
        if not rows:
            generator.stats = GenerationStats()
            return EndedGroups([], [], [])
        is_training = num_groups is not None
        episodes = self.in_flight if is_training else {}
        wanted = len({row.group_id for row in rows.values()}) if num_groups is None else num_groups
        self._num_calls += 1
        call = "in flight" if is_training else str(self._num_calls)
        started = time.perf_counter()
        totals: dict[str, Any] = {}  # of the runs of the generator
        with nullcontext() if is_training else generator.aside(), generator.reserving(self.longest) as longest:
            self._begin(call, rows, episodes, f"{sampling.seed}.{global_step}", longest)
            while len(groups := _ended_groups(episodes.values())) < wanted:
                asked = self._receive(episodes, version)
                if is_training:
                    asked, self._asked = self._asked + asked, []
                requests = [_request(turn, sampling.seed) for turn in asked if turn.number in self._episode_of]
                self._drop_ended()
                if requests or generator.kept:
                    limits = GenerationLimits(steps=RUN_STEPS, fraction=ENDED_SHARE)
                    settings = (sampling, sampling.seed, global_step, limits, version, tick)
                    self._send(episodes, generator.generate_until(requests, *settings))
                    totals = {name: totals.get(name, 0) + value for name, value in vars(generator.stats).items()}
                else:
                    tick()
            if self.server is not None:
                self.server.pause()
            self._drop_ended()
        generator.stats = GenerationStats(**totals | {"seconds": time.perf_counter() - started})
        return self._take(episodes, groups[:wanted])

    def _begin(
        self, call: str, rows: Mapping[int, AgentRow], episodes: dict[int, EpisodeInFlight], key: str, longest: int
    ) -> None:
        """Begin the episodes of ``rows`` that are not among ``episodes``. ``key``: of their draws."""
        begun = {episode.row_id for episode in episodes.values()}
        new = []
        for row_id in (row_id for row_id in rows if row_id not in begun):
            self._num_episodes += 1
            episodes[self._num_episodes] = EpisodeInFlight(row_id, rows[row_id].group_id)
            new.append((self._num_episodes, f"{key}.{row_id}", rows[row_id].columns))
        if self.server is not None:
            self.server.begin(call, new, longest, self.limit_s)

    def _receive(self, episodes: Mapping[int, EpisodeInFlight], version: int) -> list[AskedTurn]:
        """Return the turns of ``episodes`` that have come, and note which episodes have ended, on every rank.

        Wait a moment if nothing is generated. Turns of other episodes are kept for their call. Some come behind the end of their
        episode: nobody waits for those.
        """
        wait_s = 0.0 if self.generator.kept else WAIT_S
        message = self.replica.broadcast_json(None if self.server is None else self.server.receive(wait_s), "agents:news")
        in_flight = self.in_flight | {**episodes}
        for ended in map(EndedEpisode.of, message["ended"]):
            self._end(in_flight[ended.number], ended, version)
        live = {number for number, episode in in_flight.items() if episode.ended is None}
        turns = [AskedTurn(*turn) for turn in message["asked"]]
        turns = sorted((turn for turn in turns if turn.episode in live), key=lambda turn: turn.draw_number)
        self._episode_of |= {turn.number: turn.episode for turn in turns}
        self._asked += [turn for turn in turns if turn.episode not in episodes]
        return [turn for turn in turns if turn.episode in episodes]

    def _send(self, episodes: Mapping[int, EpisodeInFlight], completions: Sequence[Completion]) -> None:
        """Give agents the turns that have ended."""
        draws = {completion.row_id: _draws(completion) for completion in completions}
        for number, turn in draws.items():
            episodes[self._episode_of[number]].draws[number] = turn
        if self.server is not None:
            self.server.send(draws)

    def _drop_ended(self) -> None:
        """Forget turns in the generator whose episodes have ended."""
        self.generator.drop({row.request.row_id for row in self.generator.kept} - self._episode_of.keys())

    def _end(self, episode: EpisodeInFlight, ended: EndedEpisode, version: int) -> None:
        """Note how an episode has ended, and its rows. One that is left out has a row with nothing to learn."""
        self._episode_of = {turn: number for turn, number in self._episode_of.items() if number != ended.number}
        episode.ended = ended
        head = {"episode": episode.row_id}
        for row_id, row in enumerate(ended.rows, start=episode.row_id):
            tokens = row_tokens(row.turns, episode.draws)
            episode.rows.append(self._completion(row_id, tokens, row.num_turns, row.observations, ended.reward))
            episode.nodes[row_id] = {**head, "node": row.node, "parent": row.parent, "ending": ended.ending}
        if not ended.rows:
            ids = [*self.dialect.first_ids, next(iter(self.dialect.end_ids))]
            tokens = RowTokens(ids, [False] * len(ids), [0.0] * len(ids), [version] * len(ids), "stop")
            episode.rows.append(self._completion(episode.row_id, tokens, 0, [[]], math.nan, ended.failure))
            place = {"node": "", "parent": "", "ending": ended.ending, "failure": ended.failure}
            episode.nodes[episode.row_id] = {**head, **place}

    def _take(self, episodes: dict[int, EpisodeInFlight], groups: Sequence[int]) -> EndedGroups:
        """Return the episodes of these groups, which are no longer among ``episodes``."""
        numbers = [number for number, episode in episodes.items() if episode.group_id in groups]
        ended = sorted((episodes.pop(number) for number in numbers), key=lambda episode: episode.row_id)
        self.nodes = {row_id: node for episode in ended for row_id, node in episode.nodes.items()}
        rows = [row for episode in ended for row in episode.rows]
        return EndedGroups([*groups], rows, [episode.ended for episode in ended if episode.ended is not None])

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


def _ended_groups(episodes: Iterable[EpisodeInFlight]) -> list[int]:
    """Return the groups whose episodes have all ended, the oldest first."""
    groups: dict[int, bool] = {}
    for episode in episodes:
        groups[episode.group_id] = groups.get(episode.group_id, True) and episode.ended is not None
    return sorted(group for group, has_ended in groups.items() if has_ended)


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
    return Draws(c.token_ids, c.log_probs.tolist(), c.versions.tolist(), c.finish_reason, c.num_cached)
