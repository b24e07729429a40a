"""Programs outside, which fetch episodes and post rewards: the numbers of ``agent.run``, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from starlette.requests import Request as StarletteRequest
from test_agent_runs import AGENTS, EXACT, settings
from test_server import LONGEST, drawn

import tasks
import toy_agents
from ranks import Program, run_ranks
from rlhf_spmd.agents import endpoint, http, outside_agents, server
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.episodes import Episode, Episodes
from rlhf_spmd.agents.listener import LISTENER, Listener
from rlhf_spmd.agents.server import AgentServer, EndedEpisode
from rlhf_spmd.parallel.world import World

LOOPBACK = "127.0.0.1:0"


def post(url: str, body: Any, key: str = "") -> Any:
    """The answer to a request; None for 204. Raises urllib.error.HTTPError."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as response:
        return json.loads(response.read() or "null")


def refused(url: str, body: Any, key: str = "") -> tuple[int, str]:
    """Status and message of a refusal."""
    with pytest.raises(HTTPError) as caught:
        post(url, body, key)
    return caught.value.code, json.load(caught.value)["error"]["message"]


@contextmanager
def fetchers(run_dir: Path, agent: Callable[..., Any], number: int) -> Iterator[None]:
    """Threads that run episodes of all replicas until the block ends, whatever becomes of the trainer."""
    has_ended = threading.Event()

    def work(thread: int) -> None:
        while not has_ended.is_set():
            try:
                lines = (run_dir / "agents.jsonl").read_text().splitlines()
                replica = json.loads(lines[thread % len(lines)])
                if episode := post(f"{replica['url']}/episodes", {}, replica["key"]):
                    result = asyncio.run(agent(episode["base_url"], episode["row"]))
                    reward = result if isinstance(result, dict) else {"reward": result}
                    post(f"{episode['base_url']}/reward", reward)
            except (OSError, ValueError):
                time.sleep(0.1)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()


@pytest.mark.parametrize("agent", ["tool_user", pytest.param("debate", marks=pytest.mark.long)])
def test_the_numbers_of_agents_that_the_trainer_starts(root: Path, tmp_path: Path, agent: str) -> None:
    """Two replicas, three fetchers each."""
    run_ranks(2, tasks.train_here, None, settings(root, tmp_path / "run", 2, f"agent.run={AGENTS}:{agent}"))
    with fetchers(tmp_path / "outside", getattr(toy_agents, agent), 6):
        run_ranks(2, tasks.train_here, None, settings(root, tmp_path / "outside", 2, f"agent.external={LOOPBACK}"))
    addresses = tmp_path / "outside" / "agents.jsonl"
    assert stat.S_IMODE(addresses.stat().st_mode) == 0o600
    replicas = [json.loads(line) for line in addresses.read_text().splitlines()]
    assert len({replica["url"] for replica in replicas}) == len({replica["key"] for replica in replicas}) == 2
    assert all(replica["url"].startswith("http://127.0.0.1:") for replica in replicas)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "outside")
    )
    assert [{key: row[key] for key in EXACT} for row in two] == [{key: row[key] for key in EXACT} for row in one]
    assert len(two) == 2 and two[0]["reward/mean"] != two[1]["reward/mean"]


def train_in_a_hurry(world: World, overrides: list[str]) -> None:
    """With 3 seconds for the episodes of a step. The process that answers agents may take longer to start."""
    with patch("rlhf_spmd.workers.actor.CALL_SHARE", 3 / world.timeout_s), patch.object(server, "LATE_SHARE", 30.0):
        tasks.train_here(world, None, overrides)


def test_a_run_whose_episodes_nobody_fetches_ends_and_says_so(root: Path, tmp_path: Path) -> None:
    message = "EnvironmentFailure: 8 of 8 .* 8 of 8 here: no program outside has fetched the episode within 3 s"
    with pytest.raises(Exception, match=message):
        run_ranks(1, train_in_a_hurry, settings(root, tmp_path, 1, f"agent.external={LOOPBACK}"))


@pytest.mark.long
def test_a_run_that_cannot_listen_ends(root: Path, tmp_path: Path) -> None:
    port = tasks.free_port()
    with socket.create_server(("127.0.0.1", port)):
        overrides = settings(root, tmp_path, 1, f"agent.external=127.0.0.1:{port - 1}")
        assert Program(2, overrides, tmp_path / "output.txt", tasks.environment()).wait() == 2
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert (status["class"], status["rank"]) == ("config", 1), status["message"]
    assert f"agent.external='127.0.0.1:{port - 1}': replica 1 cannot listen at port {port}: " in status["message"]


class Replica:
    """The process that answers programs outside, with draws that the test invents. A ``with`` statement ends it."""

    def __init__(self, dialect: Dialect, number: int, limit_s: float = 60.0, **config: Any) -> None:
        self.server = AgentServer(AgentConfig(external=LOOPBACK, **config), dialect, 200)
        assert self.server.listener is not None
        self.url, self.key = self.server.listener.url, self.server.listener.key
        self.begin(range(number), limit_s)

    def begin(self, episodes: range, limit_s: float = 60.0) -> None:
        self.ended: list[EndedEpisode] = []
        new = [(i, f"7.1.{i}", {"prompt": f"{i} what"}) for i in episodes]
        self.server.begin("call", new, LONGEST, limit_s)
        self.thread = threading.Thread(target=self._answer, args=(len(new),), daemon=True)
        self.thread.start()

    def _answer(self, number: int) -> None:
        while len(self.ended) < number:
            news = self.server.receive(0.01)
            self.server.send({turn[0]: drawn(turn[0], turn) for turn in news["asked"]})
            self.ended += map(EndedEpisode.of, news["ended"])

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def fetch(self) -> str:
        """The address of an episode in which the model has answered once."""
        base_url: str = post(f"{self.url}/episodes", {}, self.key)["base_url"]
        toy_agents.post(base_url, [{"role": "user", "content": "x"}], max_tokens=4)
        return base_url

    def end(self) -> list[EndedEpisode]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return sorted(self.ended)


def test_who_does_not_know_the_key_gets_nothing(dialect: Dialect) -> None:
    with Replica(dialect, 1) as replica:
        for key in ("", "wrong", replica.key[:-1], f"{replica.key}x", "é"):
            status, message = refused(f"{replica.url}/episodes", {}, key)
            assert status == 401 and message == "the key is missing or wrong; the run's agents.jsonl has it"
        assert refused(f"{replica.url}/secret/v1/reward", {"reward": 1.0}, replica.key)[0] == 403
        base_url = replica.fetch()
        assert base_url.startswith(f"{replica.url}/") and replica.key not in base_url
        post(f"{base_url}/reward", {"reward": 1.0})
        assert [episode.reward for episode in replica.end()] == [1.0]


def test_a_reward_counts_once_however_often_it_comes(dialect: Dialect) -> None:
    with Replica(dialect, 2) as replica:
        first, second = replica.fetch(), replica.fetch()
        numbers = [{"reward": value} for value in (None, "1", 10**400, float("nan"))]
        for body in (*numbers, {}, {"failure": 1}, {"reward": 1, "failure": "both"}):
            assert refused(f"{first}/reward", body)[0] == 400, "and the episode goes on"
        assert [post(f"{first}/reward", {"reward": 2, "steps": 5}) for _ in range(2)] == [{"reward": 2.0}] * 2
        assert refused(f"{first}/reward", {"reward": 3}) == (409, 'the episode has ended with {"reward": 2.0}')
        post(f"{second}/reward", {"reward": -1.5})
        ended = replica.end()
        assert [episode.reward for episode in ended] == [2.0, -1.5] and not any(episode.retries for episode in ended)
        assert post(f"{second}/reward", {"reward": -1.5}) == {"reward": -1.5}, "also after the call"
        with pytest.raises(HTTPError, match="403"):
            toy_agents.post(first, [{"role": "user", "content": "x"}])
        replica.begin(range(2, 3))
        post(f"{replica.fetch()}/reward", {"reward": 7.0})
        assert [episode.reward for episode in replica.end()] == [7.0]


def test_a_failure_is_begun_again_at_another_address(dialect: Dialect) -> None:
    with Replica(dialect, 1, attempts=3) as replica:
        addresses = []
        for number in range(3):
            addresses.append(replica.fetch())
            assert post(f"{addresses[-1]}/reward", {"failure": f"tool {number}"}) == {"failure": f"tool {number}"}
        (episode,) = replica.end()
        assert (episode.ending, episode.failure, len({*addresses})) == ("failed", "tool 2", 3)


def test_an_episode_whose_program_died_goes_to_another_one(dialect: Dialect) -> None:
    with Replica(dialect, 2, timeout_s=1.0, attempts=2, concurrency=1) as replica:
        lost = replica.fetch()
        post(f"{replica.fetch()}/reward", {"reward": 2.0})  # waits until the first one's time is over
        again = replica.fetch()
        assert refused(f"{lost}/reward", {"reward": 1.0}) == (403, "there is no such episode, or it has ended")
        post(f"{again}/reward", {"reward": 1.0})
        ended = replica.end()
        assert [(episode.ending, episode.reward) for episode in ended] == [("done", 1.0), ("done", 2.0)]
        assert sum(episode.retries for episode in ended) == 1


@pytest.mark.parametrize(("on_timeout", "failed"), [("drop", True), ("keep", False)])
def test_an_episode_that_takes_too_long(dialect: Dialect, on_timeout: str, failed: bool) -> None:
    attempts = 1 if failed else 2  # kept ones do not begin again
    with Replica(dialect, 1, timeout_s=0.5, attempts=attempts, on_timeout=on_timeout) as replica:
        replica.fetch()
        (episode,) = replica.end()
        assert (episode.ending, episode.failure is not None, episode.reward) == ("timeout", failed, 0.0)


@pytest.mark.parametrize("on_timeout", ["drop", "keep"])
def test_episodes_that_nobody_fetches_end_with_the_call(
    dialect: Dialect, on_timeout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LATE_SHARE", 30.0)  # the process has yet to start
    with Replica(dialect, 3, limit_s=1.0, concurrency=2, on_timeout=on_timeout) as replica:
        ended = replica.end()
        reason = "no program outside has fetched the episode within 1 s"
        assert [(episode.ending, episode.failure) for episode in ended] == [("timeout", reason)] * 3


def test_a_program_that_waits_gets_the_next_episode_and_one_that_left_gets_none(dialect: Dialect) -> None:
    with Replica(dialect, 0) as replica:
        request = Request(f"{replica.url}/episodes", b"{}", {"Authorization": f"Bearer {replica.key}"})
        with pytest.raises((URLError, TimeoutError)):
            urlopen(request, timeout=0.3)
        time.sleep(0.2)
        fetched: list[str] = []
        thread = threading.Thread(target=lambda: fetched.append(replica.fetch()), daemon=True)
        thread.start()
        replica.end()
        replica.begin(range(1))
        thread.join(20)
        assert len(fetched) == 1
        post(f"{fetched[0]}/reward", {"reward": 1.0})
        assert [episode.ending for episode in replica.end()] == ["done"]


def test_a_long_poll_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_agents, "LONG_POLL_S", 0.2)
    listener = Listener(LOOPBACK, 0)
    monkeypatch.setenv(LISTENER, listener.environment[LISTENER])
    agents = outside_agents.OutsideAgents()
    listener.socket.detach()
    agents.send({"base_url": "http://127.0.0.1:1/ended/v1", "row": {}})
    assert asyncio.run(agents._next_offer()) is None, "an episode that has ended is offered to nobody"


def test_a_reward_that_is_taken_counts_however_late_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes run out of time together, and the second one's reward comes while the first one ends."""
    listener = Listener(LOOPBACK, 0)
    monkeypatch.setenv(LISTENER, listener.environment[LISTENER])
    outside = outside_agents.OutsideAgents()
    listener.socket.detach()
    statuses: list[int] = []

    def status_of_post(episode: Episode) -> int:
        messages = [{"type": "http.request", "body": b'{"reward": 1}', "more_body": False}]
        scope = {"type": "http", "headers": [], "path_params": {"secret": episode.secret}}

        async def receive() -> Any:
            return messages.pop(0)

        try:
            return asyncio.run(outside._reward(StarletteRequest(scope, receive))).status_code
        except http.HttpError as error:
            return error.status

    def post_second(forest: object) -> None:
        if not statuses:
            statuses.append(status_of_post(second))

    runner = Episodes(AgentConfig(external=LOOPBACK, attempts=1, timeout_s=0.001), str, post_second, outside)
    outside.by_secret = runner.by_secret
    first, second = (Episode(i, f"e{i}", {}) for i in range(2))
    runner.begin("call", [first, second], 60.0)
    first.has_begun = second.has_begun = True
    time.sleep(0.01)
    ended = [*runner.advance(), *runner.advance()]
    assert statuses == [200] and ended == [first, second]
    assert (first.ending, second.ending, second.reward) == ("timeout", "done", 1.0)
    assert status_of_post(first) == 403 and status_of_post(second) == 200, "the second one again"
    outside.socket.close()


def test_connections_are_bounded_and_those_that_ask_nothing_end(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS", 4)
    monkeypatch.setattr(http, "REQUEST_S", 2.0)
    listener = Listener(LOOPBACK, 0)
    monkeypatch.setenv(LISTENER, listener.environment[LISTENER])
    outside = outside_agents.OutsideAgents()
    listener.socket.detach()
    config = AgentConfig(external=LOOPBACK, concurrency=2)
    served = endpoint.AgentEndpoint(config, dialect, 200, lambda turn: None, outside)
    address = "127.0.0.1", served.port
    early = HTTPConnection(*address, timeout=30)

    def status() -> int:
        early.request("POST", "/episodes")
        response = early.getresponse()
        response.read()
        return response.status

    try:
        assert status() == 401
        silent = [socket.create_connection(address, 30) for _ in range(4 + 8 * 2)]
        silent[0].sendall(b"POST /episodes HTTP/1.1\r\n")
        answers = [connection.recv(12) for connection in silent]
        assert answers.count(b"HTTP/1.1 503") == 2 and answers.count(b"") == 18, "refused, and ended"
        assert status() == 401 and refused(f"{listener.url}/episodes", {})[0] == 401
        with socket.create_connection(address, 30) as slow:
            slow.sendall(b"POST /no/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            assert slow.recv(12) == b"HTTP/1.1 403", "the body is not waited for"
    finally:
        served.close()


def test_100_mb_are_refused_and_the_episode_goes_on(dialect: Dialect) -> None:
    with Replica(dialect, 1) as replica:
        base_url = replica.fetch()
        address = urlsplit(base_url)
        for name, value in (("Content-Length", "100000000"), ("Transfer-Encoding", "chunked")):
            client = HTTPConnection(str(address.hostname), address.port, timeout=30)
            client.putrequest("POST", f"{address.path}/chat/completions")
            client.putheader(name, value)
            client.endheaders()
            if value == "chunked":
                for _ in range(100):
                    client.send(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                client.send(b"0\r\n\r\n")
            response = client.getresponse()
            message = json.load(response)["error"]["message"]
            assert (response.status, message) == (413, "a request has at most 8388608 bytes")
            client.close()
        post(f"{base_url}/reward", {"reward": 1.0})
        assert [(episode.ending, episode.turns) for episode in replica.end()] == [("done", 1)]


def test_an_episode_without_an_answer_says_why(dialect: Dialect) -> None:
    with Replica(dialect, 1, attempts=1) as replica:
        base_url = post(f"{replica.url}/episodes", {}, replica.key)["base_url"]
        assert refused(f"{base_url}/chat/completions", {"messages": [{"role": "user", "content": "x" * LONGEST}]})[0] == 400
        post(f"{base_url}/reward", {"reward": 1.0})
        (episode,) = replica.end()
    assert episode.ending == "failed" and episode.failure is not None
    assert episode.failure.startswith(
        "the agent has no answer of the model's; its last request was refused: the conversation has"
    )


def test_a_program_that_waits_at_the_end_gets_none(dialect: Dialect) -> None:
    """Also if no episode has begun."""
    with Replica(dialect, 0) as replica:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(post(f"{replica.url}/episodes", {}, replica.key)), daemon=True)
        thread.start()
        assert refused(f"{replica.url}/episodes", {})[0] == 401  # when it has started
        time.sleep(0.5)
    thread.join(10)
    assert answers == [None]


def test_ports_are_counted_by_replica_and_one_that_is_taken_is_refused() -> None:
    free = Listener(LOOPBACK, 0)
    port = int(free.url.rpartition(":")[2])
    with pytest.raises(ValueError, match=rf"agent.external='127.0.0.1:{port - 1}': replica 1 cannot listen at port {port}: "):
        Listener(f"127.0.0.1:{port - 1}", 1)
    with pytest.raises(ValueError, match=r"agent.external='192.0.2.1:0': replica 0 cannot listen at port 0: "):
        Listener("192.0.2.1:0", 0)
    with suppress(ValueError):  # a machine without IPv6
        assert Listener("[::1]:0", 0).url.startswith("http://[::1]:")
    assert "0.0.0.0" not in Listener("0.0.0.0:0", 0).url
