"""Environments of other projects: what a text names, their rows, and one of each against the real library where it is there."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tasks
from generate_runs import CONFIG, write_tokenizer
from ranks import run_ranks
from rlhf_spmd.config.load import read_tree
from rlhf_spmd.data.files import DataError, read_rows
from rlhf_spmd.environments import gem, openenv
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.libraries import Source, library_rows, read_source
from rlhf_spmd.environments.mcp import server_of
from rlhf_spmd.environments.runner import EnvironmentRunner
from rlhf_spmd.environments.tools import Tools
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.inference.inference_program import read_config as read_inference_config
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.training.train_config import TrainConfig, read_config

GUESS = "gem:game:GuessTheNumber-v0-easy?size=6&seed=5"


# -- texts


def config_of(*overrides: str) -> TrainConfig:
    return read_config(None, [*overrides, "algorithm.name=grpo"])[0]


def test_a_text_stands_for_the_class(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("environment: calculator\n")
    assert read_tree(file, ["environment.max_turns=2"])["environment"] == {"cls": "calculator", "max_turns": "2"}
    assert read_tree(file, ["environment=tools"])["environment"] == {"cls": "tools"}
    file.write_text("environment: {cls: calculator, weight: 2}\n")
    assert read_tree(file, ["environment=tools"])["environment"] == {"cls": "tools", "weight": "2"}


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"size": 5, "rate": 0.5, "flag": True, "nothing": None, "word": "a b&c=d%+#?", "number_like": "5"},
        {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}, "list": [1, {"a": "&"}], "empty": {}},
    ],
)
def test_a_source_is_read_as_it_was_written(args: dict[str, Any]) -> None:
    source = Source("verifiers", "owner/my-env@1", args)
    assert read_source(str(source)) == source


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gem:", "names nothing of gem; write gem:NAME"),
        ("gem:a?b", r"is not of the form gem:NAME\?KEY=VALUE"),
        ("gem:a?b=1&b.c=2", r"is not of the form gem:NAME\?KEY=VALUE"),
        ("other:a", "names no rows of a library"),
    ],
)
def test_what_is_no_source(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(path)


def test_an_absent_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, module, extra in (
        ("gem:a", "gem", "gem"),
        ("verifiers:absent", "verifiers.v1", "verifiers"),
        ("reasoning_gym:absent", "reasoning_gym", "reasoning-gym"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DataError, match=rf"data '{path}' cannot be made: {module} .*pip install 'rlhf_spmd\[{extra}\]'"):
            read_rows(path)


def test_the_name_of_a_library_becomes_the_path_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnvironmentConfig, "check", lambda self, where: None)  # which imports the library
    config = config_of("environment=gem:game:Wordle-v0", "environment.args.size=5", "environment.max_turns=3")
    assert config.data.path == "gem:game:Wordle-v0?size=5"
    assert config.environment == EnvironmentConfig(cls="gem", max_turns=3)
    config = config_of("environment=openenv:http://host:80", "data.path=a.jsonl", "environment.args.shown=text")
    assert config.environment == EnvironmentConfig(cls="openenv", args={"url": "http://host:80", "shown": "text"})
    config = config_of("environments.a.cls=openenv:ws://host:80", "data.path=a.jsonl")
    assert config.environments["a"] == EnvironmentConfig(cls="openenv", args={"url": "ws://host:80"})
    config = config_of("environment=verifiers:words", "environment.args.select.limit=9", "agent.timeout_s=60")
    assert (config.data.path, config.environment) == ("verifiers:words?select.limit=9", EnvironmentConfig())
    assert config.agent.run == "rlhf_spmd.environments.verifiers:run" and config.agent.timeout_s == 60
    generate = ["environment=reasoning_gym:chain_sum", "model.path=m", "out=o.jsonl"]
    assert read_inference_config(GenerateConfig, None, generate).data.path == "reasoning_gym:chain_sum"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("environments.a.cls=gem:b", "data.path=b.jsonl"),
            "only the section environment names rows; write gem",
        ),
        (("environment=gem:a", "data.path=b.jsonl"), "environment.cls=gem:a, data.path=b.jsonl: the first brings its own rows"),
        (("environment=verifiers:a", "agent.command=true"), "is an agent, and the section agent names another one"),
        (
            ("environment=verifiers:a", "environment.timeout_s=5"),
            "environment.timeout_s: environment.cls=verifiers:a is an agent",
        ),
    ],
)
def test_settings_that_contradict_a_library(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*more)


def test_generate_runs_no_agents() -> None:
    with pytest.raises(ValueError, match="ask the model over HTTP, which only train lets them do"):
        read_inference_config(GenerateConfig, None, ["environment=verifiers:a", "model.path=m", "out=o.jsonl"])


def test_draws_of_rows_do_not_mix() -> None:
    """And the process's own go on as if no row drew."""
    random.seed(1)
    states: list[Any] = [(), ()]
    drawn: list[list[float]] = [[], []]
    before = random.getstate()
    for row, seed in ((0, 5), (1, 5), (0, None), (1, None), (1, None), (0, None)):
        with gem._own_draws(states[row]) as states[row]:
            if seed is not None:
                random.seed(seed)
            drawn[row].append(random.random())
    assert drawn[0] == drawn[1] and len({*drawn[0]}) == 3
    assert random.getstate() == before


# -- the libraries


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads characters."""
    directory = tmp_path_factory.mktemp("adapters") / "model"
    write_random_model(directory, {**CONFIG, "max_position_embeddings": 1024, "initializer_range": 0.1}, seed=3)
    write_tokenizer(directory)
    return directory


def train(ranks: int, model: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    """The metrics of two steps."""
    overrides = [
        *("algorithm.name=grpo", "algorithm.use_kl_loss=false", "algorithm.ppo_max_token_len_per_gpu=2048"),
        *("data.train_batch_size=4", "data.max_prompt_length=700", "data.max_response_length=100", "sampling.n=2"),
        *(f"models.actor.path={model}", "models.actor.dtype=float64", f"run.dir={run_dir}", "run.steps=2", "run.export=false"),
        *more,
    ]
    run_ranks(ranks, tasks.train_here, None, overrides)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


EXACT = ("reward/mean", "actor/grad_norm")


@pytest.mark.long
def test_questions_of_reasoning_gym(model: Path, tmp_path: Path) -> None:
    """The same on one rank and on two, and after a restart."""
    library = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    settings = "environment=reasoning_gym:letter_counting", "environment.args.size=12", "environment.args.max_words=6"
    one = train(1, model, tmp_path / "one", *settings, "run.save_freq=1")
    two = train(2, model, tmp_path / "two", *settings)
    resumed = train(1, model, tmp_path / "resumed", *settings, f"run.resume={tmp_path / 'one' / 'checkpoints' / 'step_1'}")
    assert [row["step"] for row in resumed] == [2] and one[0]["rollout/environment_failures"] == 0
    for row, expected in zip([*two, *resumed], [*one, one[1]], strict=True):
        assert {key: row[key] for key in EXACT} == {key: pytest.approx(expected[key], rel=1e-8, abs=1e-12) for key in EXACT}
    (row, *_) = library_rows("reasoning_gym:letter_counting?size=12&max_words=6")
    assert row["prompt"] == library.create_dataset("letter_counting", size=12, max_words=6, seed=0)[0]["question"]


def test_answers_are_scored_by_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    path = "reasoning_gym:chain_sum?size=2&seed=4"
    configs = {"environment": EnvironmentConfig(cls="reasoning_gym")}
    rows = dict(enumerate(library_rows(path)))
    runner = EnvironmentRunner(configs, dict.fromkeys(rows, "environment"), rows)
    rewards = []
    for text in (f"I think\n<answer> {rows[1]['answer']} </answer>", rows[1]["answer"], "<answer></answer>", "\ud800"):
        runner.reset(1)
        runner.answers(wait=True)
        runner.step(1, text)
        (answer,) = runner.answers(wait=True)
        rewards.append(answer.reward)
        assert answer.done and answer.failure is None
    runner.close()
    assert rewards == [1.0, 1.0, 0.0, 0.0]


def test_games_of_gem_replay_whatever_runs_beside_them(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gem", reason="gem-llm is not installed")
    rows = [*library_rows(GUESS)]
    assert rows == [*library_rows(GUESS)] and [row["seed"] for row in rows] == [*range(5, 11)]

    def play(row: dict[str, Any]) -> list[Any]:
        game = gem.Gem()
        game.reset(row)
        return [game.step(f"\\boxed{{{guess}}}") for guess in (5, 7)]

    games = [*map(play, rows)]
    assert len({json.dumps(game) for game in games}) > 1
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(play, reversed(rows))] == games[::-1]
    metrics = train(1, model, tmp_path, "environment=gem:game:GuessTheNumber-v0-easy", "environment.args.size=8")
    assert [row["reward/mean"] for row in metrics] == [pytest.approx(-0.1)] * 2, "a malformed guess"


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.turns = 0
        return Heard(text="Say digits. ", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.turns += 1
        return Heard(text="Again.", done=self.turns == 2, reward=float(sum(map(str.isdigit, action.message))))

    state = property(lambda self: State())

uvicorn.run(create_fastapi_app(Digits, Say, Heard, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def openenv_server() -> Iterator[str]:
    pytest.importorskip("openenv", reason="openenv is not installed")
    port = tasks.free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.long
def test_a_server_of_openenv(openenv_server: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} what"}) + "\n" for i in range(8)))
    settings = f"environment=openenv:{openenv_server}", f"data.path={tmp_path / 'prompts.jsonl'}", "sampling.stop=[a,b,c]"
    metrics = train(1, model, tmp_path / "run", *settings, "environment.timeout_s=100")
    assert [row["rollout/environment_failures"] for row in metrics] == [0, 0]
    assert metrics[0]["rollout/num_turns_mean"] > 1 and metrics[0]["reward/mean"] > 0
    session = openenv.OpenEnv(openenv_server, chat_template="any")
    assert session.reset({}) == "Say digits. "
    assert session.step("1 2") == ([{"role": "user", "content": "Again."}], 2.0, False)
    assert session.step("3") == ("", 1.0, True)


@pytest.mark.parametrize(
    ("required", "properties", "expected"),
    [
        (["code"], {"code": {"type": "string"}, "metadata": {"type": "object"}}, "code"),
        (["a", "b"], {"a": {"type": "string"}, "b": {"type": "integer"}}, "a"),
        (["a", "b"], {"a": {"type": "string"}, "b": {"type": "string"}}, None),
        ([], {"a": {"type": "string"}}, None),
    ],
)
def test_the_field_of_an_action_that_takes_the_text(required: list[str], properties: Any, expected: str | None) -> None:
    body = json.dumps({"action": {"required": required, "properties": properties}}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/schema" else 404)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    if expected is None:
        with pytest.raises(ValueError, match=r"have the fields a.*; name one by environment.args.action"):
            openenv.text_field(url)
    else:
        assert openenv.text_field(url) == expected
    server.shutdown()


WORDS = """
import verifiers.v1 as vf

class Digits(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def digits(self, task, trace) -> float:
        text = "".join(str(node.message.content) for node in trace.nodes if node.sampled)
        return sum(map(str.isdigit, text)) / max(len(text), 1)

class Words(vf.Taskset[Digits, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield Digits(vf.TaskData(prompt=f"Say {number}."), self.config.task)
            number += 1

class Ask(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        from openai import AsyncOpenAI

        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
                messages += [{"role": "user", "content": "More."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Ask", "Words"]
"""
SUBPROCESS = "environment.args.agent.runtime.type=subprocess"


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    (tmp_path / "counted_words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )  # of the agents' process
    return "counted-words"


@pytest.mark.long
def test_an_environment_of_verifiers_is_an_agent(taskset: str, model: Path, tmp_path: Path) -> None:
    settings = f"environment=verifiers:{taskset}", SUBPROCESS, "environment.args.select.limit=8"
    metrics = train(1, model, tmp_path / "run", *settings)
    for row in metrics:
        assert (row["agents/episodes"], row["agents/turns"], row["agents/failed"]) == (8, 16, 0)
    assert metrics[0]["reward/mean"] > 0 and metrics[0]["actor/grad_norm"] > 0


def test_a_failed_episode_of_verifiers_is_no_reward(taskset: str) -> None:
    from rlhf_spmd.environments import verifiers

    row, *_ = library_rows(f"verifiers:{taskset}?select.limit=2&agent.runtime.type=subprocess")
    with pytest.raises(RuntimeError, match=r"task 0 of verifiers:.* failed: \w+"):
        asyncio.run(verifiers.run("http://127.0.0.1:9/none/v1", row))  # where nobody listens
    with pytest.raises(ValueError, match=r"has no end; give environment\.args\.select\.limit"):
        next(library_rows(f"verifiers:{taskset}"))


# -- MCP


MCP_SERVER = """
import os
from mcp.server import MCPServer

server = MCPServer("rivers")
LENGTHS = {"nile": 6650}
calls = 0

@server.tool()
def length(river: str) -> str:
    '''Looks up a river.'''
    global calls
    calls += 1
    return f"{LENGTHS[river]} km, call {calls}"

@server.tool()
def end() -> str:
    '''Ends the server.'''
    os._exit(1)

server.run()
"""


@pytest.fixture
def mcp_settings(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("mcp.client.client", reason="mcp 2 is not installed")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    return {"servers": [{"command": f"{sys.executable} {tmp_path / 'server.py'}"}]}


def called(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def test_the_model_calls_tools_of_a_server(mcp_settings: dict[str, Any]) -> None:
    """In one session; a server that ends costs the row whose call ends it."""
    config = EnvironmentConfig(cls="tools", args={**mcp_settings, "tools": ["test_several:find"]})
    config.check()
    assert [schema["function"]["name"] for schema in config.schemas()] == ["find", "length", "end"]
    assert config.schemas()[1]["function"]["parameters"]["required"] == ["river"]
    rows: dict[int, dict[str, Any]] = {number: {} for number in range(3)}
    runner = EnvironmentRunner({"environment": config}, dict.fromkeys(rows, "environment"), rows)

    def answer(row: int, text: str | None) -> Any:
        runner.reset(row) if text is None else runner.step(row, text)
        return runner.answers(wait=True)[0]

    assert [answer(row, None).failure for row in rows] == [None] * 3
    assert answer(0, called("length", river="nile")).observation[0]["content"] == "6650 km, call 1"
    assert answer(1, called("length", river="nile")).observation[0]["content"] == "6650 km, call 2"
    for arguments in ({"river": "po"}, {"lake": "nile"}):
        assert answer(1, called("length", **arguments)).observation[0]["content"].startswith("error: RuntimeError: ")
    lost = answer(2, called("end"))
    assert lost.done and "is gone" in lost.failure
    assert answer(0, called("length", river="nile")).observation[0]["content"] == "6650 km, call 1", "of another process"
    runner.close()


def test_what_is_refused_of_a_server(tmp_path: Path) -> None:
    for servers in ([{}], [{"command": "a", "url": "b"}], [{"url": "a", "name": "b"}]):
        with pytest.raises(ValueError, match="must have a command"):
            Tools.schemas(servers=servers)
    with pytest.raises(ValueError, match="must be a list, each with a command or a url"):
        Tools.schemas(servers="python server.py")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give tools, or servers, or both"):
        Tools.schemas()


def test_a_server_that_does_not_begin_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mcp.client.client", reason="mcp 2 is not installed")
    for command in (f"{sys.executable} -c pass", str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=r"servers: the MCP server .* cannot be reached"):
            server_of({"command": command})
