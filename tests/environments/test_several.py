"""Several environments in one run, one for each row; turns with special tokens; messages and tools through a chat template."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import BoundedSemaphore, Event
from typing import Any, ClassVar

import pytest
import yaml

import tasks
from generators import Generator, alone, load, read_eos_ids
from places import ROOT
from ranks import run_ranks
from rlhf_spmd import generate as program
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.tokenizer import decoding, load_tokenizer, spelled_marks
from rlhf_spmd.environments import tools as tools_module
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.runner import EnvironmentFailure, EnvironmentRunner
from rlhf_spmd.environments.tool_calls import FORMATS, TurnContext
from rlhf_spmd.environments.tools import Tools, tool_schema
from rlhf_spmd.generation import Completion, GenerationConfig, Request, SamplingConfig
from rlhf_spmd.generation.multi_turn import Environments, turn_messages
from rlhf_spmd.inference.output_files import Journal
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.train import prepare

# -- a model that writes calls as single tokens, so that one with random weights makes some


def call_of(query: str) -> str:
    return f'<tool_call>{{"name": "find", "arguments": {{"query": "{query}"}}}}</tool_call>'


END, START, ANGRY = "<|im_end|>", "<|im_start|>", "<|angry|>"
SPECIAL = (END, START, ANGRY, call_of("nile"), call_of("moon"), '<tool_call>{"name": "fnd"}', "<tool_call>oh")
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
WORDS = (*SPECIAL, *LETTERS)
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RIVERS = {"nile": "6650 km"}
READ = {  # what the model reads between its turns, by the special token of its turn
    3: f"\n{START}tool\n6650 km{END}\n{START}assistant\n",
    4: f"\n{START}tool\nerror: KeyError: 'moon'{END}\n{START}assistant\n",
    5: f"\n{START}tool\nerror: there is no tool 'fnd'; there are find{END}\n{START}assistant\n",
    6: f"\n{START}tool\nerror: the call cannot be read; a call is {FORMATS['hermes'].form}{END}\n{START}assistant\n",
}


def find(query: str) -> str:
    """Looks up a river's length.

    Args:
        query: the river
    """
    return RIVERS[query]


def undescribed(query: str) -> str:
    return query


@functools.cache
def talker(template: str = TEMPLATE) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    directory = tasks.task() / f"talker{len(template)}"
    shape = {**json.loads((tasks.task() / "actor" / "config.json").read_text()), "vocab_size": len(WORDS)}
    write_random_model(directory, {**shape, "max_position_embeddings": 512}, 3)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return directory


def talk(cls: str, most: int = 400, model: Path | None = None, **settings: Any) -> list[tuple[str, list[bool], Completion]]:
    """Of 24 rows: their text with special tokens, which of it the model said, character or token by token, and all else.

    Raises RuntimeError for an environment that failed.
    """
    path = str(model or talker())
    config, mesh = EnvironmentConfig(cls=cls, **settings), alone()[1]
    found = Environments({"environment": config}, {i: {} for i in range(24)}, load_tokenizer(path))
    sampling = SamplingConfig(allowed_token_ids=[0, 2, 3, 4, 5, 6, 60, 61], logit_bias={0: 1.0})
    requests = [Request(i, i, [50 + i, 60], most) for i in range(24)]
    generator = Generator(load(path, mesh), mesh, GenerationConfig(), read_eos_ids(path), decoding(found.tokenizer))
    completions = generator.generate(requests, sampling, 1, 2, environments=found)
    for failure in (done.failure for done in completions if done.failure is not None):
        raise RuntimeError(failure)
    return [("".join(WORDS[token] for token in done.token_ids), done.mask or [], done) for done in completions]


class Listening:
    """Remembers what it hears, and what was before it."""

    heard: ClassVar[list[str]] = []
    contexts: ClassVar[set[str]] = set()

    def __init__(self, chat_template: str | None = None) -> None:
        self.template = chat_template

    def reset(self, row: Mapping[str, Any]) -> None:
        assert self.template == TEMPLATE

    def step(self, text: str, context: TurnContext) -> tuple[str, float, bool]:
        self.heard.append(text)
        self.contexts.add(context.before)
        return "", 0.0, True


def test_a_turn_has_its_special_tokens_but_the_end_of_text() -> None:
    Listening.heard.clear()
    said = [text for text, _, _ in talk("test_several:Listening", most=40)]
    assert sorted(Listening.heard) == sorted(text.removesuffix(END) for text in said)
    assert any(text.endswith(END) for text in said) and any(ANGRY in text for text in Listening.heard)
    assert any("<tool_call>" in text for text in Listening.heard) and not any(END in text for text in Listening.heard)
    assert Listening.contexts == {WORDS[50 + i] + WORDS[60] for i in range(24)}


def test_marks_that_other_tokens_spell_are_told_apart() -> None:
    ids = [*map(WORDS.index, ANGRY), 2, WORDS.index("a"), 2]
    assert spelled_marks(load_tokenizer(talker()), ids, ANGRY * 2 + "a" + ANGRY) == {ANGRY: [len(ANGRY), 2 * len(ANGRY) + 1]}
    assert spelled_marks(load_tokenizer(talker()), [2], ANGRY) == {}


TOOLS = {"tools": ["test_several:find"]}


def tools(functions: str) -> tuple[str, str]:
    return "environment.cls=tools", f"environment.args.tools={functions}"


TOOL_SETTINGS = tools("[test_several:find]")


def test_the_model_calls_tools_and_reads_them_as_its_template_writes_them() -> None:
    """Each row again, by hand: turns of the model, and between them what follows from the calls in them."""
    used, last = set[int](), 0
    for text, mask, done in talk("tools", args=TOOLS):
        at, calls = 0, list[int]()
        for number, (token, drawn) in enumerate(zip(done.token_ids, mask, strict=True)):
            assert drawn == (number >= at)
            if not drawn:
                continue
            if token in READ:
                calls.append(token)
            if token == 0 and number < len(mask) - 1:  # between several results is all but the beginning of a turn
                texts = [READ[call].removesuffix(f"{START}assistant\n") for call in calls]
                expected = texts[0] + "".join(one.removeprefix("\n") for one in texts[1:]) + f"{START}assistant\n"
                at = number + 1
                read = "".join(WORDS[i] for i in done.token_ids[at : at + len(encoded(expected))])
                assert read == expected
                at += len(encoded(expected))
                used, calls = used | set(calls), []
        last += done.finish_reason == "stop" and text.endswith(END) and not calls
        assert done.reward == 0
    assert used == set(READ) and last > 0


def encoded(text: str) -> list[int]:
    ids: list[int] = load_tokenizer(talker())(text, add_special_tokens=False)["input_ids"]
    return ids


class Answering:
    """Answers each turn with ``role``'s message."""

    def __init__(self, role: str, **fields: Any) -> None:
        self.role, self.fields = role, fields

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[list[dict[str, Any]], float, bool]:
        return [{"role": self.role, "content": "go\udc80 on", **self.fields}], 0.0, False


def test_a_turn_that_did_not_end_its_message_is_ended_in_the_observation() -> None:
    first = [(text, mask) for text, mask, _ in talk("test_several:Answering", args={"role": "user"}, max_turns=2)]
    closed = f"\n{START}user\ngo? on{END}\n{START}assistant\n"
    for text, _ in first:
        assert f"{END}{closed}" in text or END not in text[:-1]
    assert behind_a_cut_turn(talker(), {}).startswith(f"{END}{closed}")


def test_an_observation_is_written_with_its_rows_variables() -> None:
    moody = TEMPLATE.replace("assistant\n", "assistant{{ mood }}\n")
    text = behind_a_cut_turn(talker(moody), {"chat_template_kwargs": '{"mood": "!"}'})
    assert text.startswith(f"{END}\n{START}user\ngo? on{END}\n{START}assistant!\n")


def behind_a_cut_turn(model: Path, row: dict[str, Any]) -> str:
    """What follows a turn that a stop token ended."""
    path, mesh = str(model), alone()[1]
    config = EnvironmentConfig(cls="test_several:Answering", args={"role": "user"}, max_turns=2)
    environments = Environments({"environment": config}, {0: row}, load_tokenizer(path))
    generator = Generator(load(path, mesh), mesh, GenerationConfig(), read_eos_ids(path), decoding(environments.tokenizer))
    cut = SamplingConfig(allowed_token_ids=[60, 61], stop_token_ids=[61])
    (completion,) = generator.generate([Request(0, 0, [50], 200)], cut, 1, 2, environments=environments)
    return "".join(WORDS[token] for token in completion.token_ids).partition(WORDS[61])[2]


def test_a_template_that_has_no_place_for_a_message_fails() -> None:
    silent = "{% for message in messages if message.role != 'critic' %}{{ message.content }}<|im_end|>{% endfor %}"
    refusing = "{{ raise_exception('no tools here') }}"
    for role, template, message in (
        (
            "critic",
            silent,
            "'environment': row [0-9]+: its messages: the chat template leaves out messages of the role 'critic'",
        ),
        ("tool", refusing, "the chat template refuses these messages: no tools here"),
    ):
        with pytest.raises(RuntimeError, match=message):
            talk("test_several:Answering", model=talker(template), args={"role": role})
    with pytest.raises(RuntimeError, match=r"'environment': row [0-9]+: Object of type set is not JSON"):
        talk("test_several:Answering", args={"role": "user", "seen": {1}})


def test_the_name_that_a_model_calls_is_text_for_the_template() -> None:
    """Of half a surrogate pair no tokenizer makes tokens."""
    configs = {"tools": EnvironmentConfig(cls="rlhf_spmd.environments.tools:Tools", args={"tools": ["test_several:find"]})}
    runner = EnvironmentRunner(configs, {0: "tools"}, {0: {"prompt": "a"}})
    runner.reset(0)
    runner.answers(wait=True)
    runner.step(0, '<tool_call>{"name": "\\ud800"}</tool_call>')
    (answer,) = runner.answers(wait=True)
    runner.close()
    (message,) = answer.observation
    assert message["name"] == "?" and "there is no tool" in message["content"]


async def later(query: str) -> str:
    return RIVERS[query]


def endless(query: str) -> Iterator[str]:
    """Says it again and again.

    Args:
        query: what to say
    """
    yield query


def leave(query: str) -> None:
    raise BaseException(query)


@pytest.mark.parametrize(
    ("function", "call", "content"),
    [
        ("test_several:find", '{"name": "find", "parameters": {"query": "nile"}}', "6650 km"),
        ("test_several:later", '{"name": "later", "parameters": {"query": "nile"}}', "6650 km"),
        ("test_several:later", '{"name": "later", "parameters": {"query": "po"}}', "error: KeyError: 'po'"),
        ("test_several:leave", '{"name": "leave", "parameters": {"query": "now"}}', "error: BaseException: now"),
        ("sys:exit", '{"name": "exit", "parameters": {}}', "error: SystemExit: "),
    ],
)
def test_the_model_reads_what_a_tool_returns_or_raises(function: str, call: str, content: str) -> None:
    tools = Tools([function], format="llama3_json", role="user")
    name = function.partition(":")[2]
    assert tools.step(call) == ([{"role": "user", "name": name, "content": content}], 0.0, False)
    assert tools.step("It is 6650 km.") == ("", 0.0, True)


def test_calls_of_a_turn_run_together_and_the_model_reads_which_took_too_long() -> None:
    tools, called = Tools(["test_several:nap", "test_several:find"], format="hermes"), '<tool_call>{"name": '
    turn = f'{called}"nap", "arguments": {{"seconds": 100}}}}</tool_call>' * 2
    turn += f'{called}"find", "arguments": {{"query": "nile"}}}}</tool_call>'
    (*slow, quick), _, done = tools.step(turn, TurnContext(timeout_s=0.5))
    assert [slow, quick["content"], done] == [[{"role": "tool", "name": "nap", "content": LATE}] * 2, "6650 km", False]


def test_calls_that_never_return_fail_their_rows_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads cannot be ended; without them no call would have an answer, for the rest of the run."""
    monkeypatch.setattr(tools_module, "RUNNING_CALLS", BoundedSemaphore(1))
    tools, turn = Tools(["test_several:stay"], format="llama3_json"), '{"name": "stay", "parameters": {}}'
    assert tools.step(turn, TurnContext(timeout_s=0.1))[0][0]["content"] == "error: no result within 0.09 s"  # type: ignore[index]
    with pytest.raises(RuntimeError, match="512 calls of tools have not returned; give the tools time limits of their own"):
        tools.step(turn, TurnContext(timeout_s=0.1))
    MAY_RETURN.set()
    assert tools_module.RUNNING_CALLS.acquire(timeout=60), "a call that returns leaves its thread to others"


MAY_RETURN = Event()


def stay() -> None:
    MAY_RETURN.wait()


LATE = "error: no result within 0.45 s"


def nap(seconds: float) -> None:
    time.sleep(seconds)


def test_a_function_describes_itself() -> None:
    schema = tool_schema(find)
    assert schema["type"] == "function" and schema["function"]["name"] == "find"
    parameters = schema["function"]["parameters"]
    assert parameters["properties"] == {"query": {"type": "string", "description": "the river"}}
    assert parameters["required"] == ["query"]


# -- programs


class Paying:
    """Answers ``said`` until its third turn, which it pays for."""

    def __init__(self, said: str = "") -> None:
        self.said, self.turns = said, 0

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        return self.said, float(self.turns == 3), self.turns == 3


SEVERAL = (
    *("environments.zeds.cls=test_several:Paying", "environments.zeds.args.said=zz", "environments.zeds.weight=3"),
    *("environments.short.cls=test_several:Paying", "environments.short.max_turns=2"),
    *("environments.parrot.cls=test_environments:Parrot", "environments.parrot.args.sleep_s=0.01"),
    *("data.max_response_length=24", 'sampling.stop=["7","a","b","c","d"]'),
)
NAMES = ("zeds", "short", "parrot", None)


def mixed(path: Path, *names: str | None) -> Path:
    """The task's prompts, with an environment each in turn."""
    rows = [json.loads(line) for line in (tasks.task() / "train.jsonl").read_text().splitlines()]
    named = names or NAMES
    rows = [row | {"environment": named[i % len(named)], "id": i} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(turns: list[dict[str, Any]]) -> str:
    """What a reward for one text sees: the model's turns."""
    return "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")


def share_of_turns(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The task's reward, if the model's turns make the response."""
    if text_of(row["completion_messages"]) != response:
        raise ValueError(row["completion_messages"])
    return tasks.even_share(prompt, response, row)


def test_rows_of_one_run_have_different_environments_in_any_layout(tmp_path: Path) -> None:
    """On one rank, in pipeline stages with few pages, and with the actor's responses streamed to other ranks."""
    roles = ("actor", "critic", "reference", "reward")
    common = [*SEVERAL, f"data.path={mixed(tmp_path / 'mixed.jsonl')}", "data.shuffle=false"]
    common += ["reward.function=test_several:share_of_turns", "reward.max_failure_rate=0"]
    common += [f"models.{role}.dtype=float64" for role in roles]
    stages = ["models.actor.layout.pp=2", "models.critic.layout.pp=2"]
    stages += [f"models.actor.generation.{key}" for key in ("pp=2", "num_pages=40", "page_size=2")]
    apart = ["placement.pools={a: [0], b: [1]}", "rollout.chunks=2", "models.actor.generation.max_num_seqs=3"]
    apart += [f"models.{role}.pool={'a' if role == 'actor' else 'b'}" for role in roles]
    single = tasks.train(1, tmp_path / "single", 2, *common)
    for name, more in (("stages", stages), ("apart", apart)):
        other = tasks.train(2, tmp_path / name, 2, *common, *more)
        assert single.responses == other.responses
        difference, where = tasks.worst_metric(single, other, floor=1e-2)
        assert difference < 1e-8, where
    assert single.log_prob_difference() < 1e-9
    ended, several_turns = set[tuple[str | None, bool]](), 0
    for line in (tmp_path / "single" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = NAMES[row["row_id"] // tasks.SAMPLES % len(NAMES)]
        if "turns" in row:  # who wrote which part of it
            speakers = [who for who, _ in row["turns"]]
            assert "".join(text for _, text in row["turns"]) == row["response"]
            assert all({a, b} == {"model", "environment"} for a, b in itertools.pairwise(speakers))
            several_turns += len(speakers) > 1
        if row["step"] == 1 and name != "parrot":  # prompts 0 to 7, two responses each
            drawn = "\n".join(text for who, text in row.get("turns", [("model", row["response"])]) if who == "model")
            paid = row["score"] - tasks.even_share("", drawn, {})
            assert min(abs(paid - possible) for possible in ((0, 3) if name == "zeds" else (0,))) < 1e-5, row
            ended.add((name, paid > 1))
    assert ended >= {("zeds", True), ("short", False), (None, False)} and several_turns


def test_generate_scores_no_row_whose_environment_failed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "1?"}\n{"prompt": "2?"}\n')
    settings = [f"model.path={talker()}", f"data.path={tmp_path / 'in.jsonl'}", f"out={tmp_path / 'out.jsonl'}"]
    settings += ["environment.cls=test_environments:Broken", "environment.args.how=reset", "environment.max_failure_rate=1"]
    settings += ["reward.function=length", "reward.kwargs={max_length: 9}", "sampling.max_response_length=5"]
    program.generate(program.prepare(None, settings, Launch()), alone()[0])
    for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert row["score"] is row["environment_reward"] is None and row["response_ids"]
        assert "failed in reset(): KeyError: 'no such game'" in row["environment_failure"]
    refused = program.prepare(None, [*settings, "environment.max_failure_rate=0.5", f"out={tmp_path / 'b.jsonl'}"], Launch())
    with pytest.raises(EnvironmentFailure, match=r"failed in 2 of 2 rows, more than environment\.max_failure_rate=0.5"):
        program.generate(refused, alone()[0])


class Halting:
    """Fails in the first row."""

    def reset(self, row: Mapping[str, Any]) -> None:
        if row["id"] == 0:
            raise ValueError("halted")

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 0.0, True


def generate_rows(world: World, settings: list[str]) -> None:
    program.generate(program.prepare(None, settings, Launch(world.rank, world.size)), world)


def test_failures_are_judged_over_all_replicas_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two rows fails, which is alone on its replica, or in its start."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl").write_text('{"prompt": "1?", "id": 0}\n{"prompt": "2?", "id": 1}\n')
    settings = [f"model.path={talker()}", f"data.path={tmp_path / 'in.jsonl'}", "sampling.max_response_length=5"]
    settings += ["environment.cls=test_several:Halting", f"out={out}"]
    run_ranks(2, generate_rows, [*settings, "environment.max_failure_rate=0.5"])
    assert [("environment_failure" in json.loads(line)) for line in out.read_text().splitlines()] == [True, False]

    monkeypatch.setattr(Journal, "remove", lambda self: None)
    again = [*settings, "environment.max_failure_rate=0.5", f"out={tmp_path / 'again.jsonl'}"]
    generate_rows(alone()[0], again)
    (path,) = program.prepare(None, again, Launch()).journal.directory.glob("*.jsonl")
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "halted" not in line))
    generate_rows(alone()[0], again)
    assert "halted" in (tmp_path / "again.jsonl").read_text()
    assert "1 of them were there from an earlier start" in capsys.readouterr().err


def test_generate_tells_each_row_of_its_tools(tmp_path: Path) -> None:
    """Three ranks' worth of rows in one file: with tools, with a game, and with neither."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "environment": ("river", "game", None)[n % 3]} for n in range(9)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        *(f"model.path={talker()}", f"data.path={source}", f"out={out}"),
        *("environments.river.cls=tools", "environments.river.args.tools=[test_several:find]"),
        "reward.function=test_several:long_river",
        'data.tools.game=[{"type": "function", "function": {"name": "own"}}]',
        *(
            "environments.game.cls=test_several:Paying",
            "sampling.allowed_token_ids=[0,3,60]",
            "sampling.max_response_length=120",
        ),
    )
    program.generate(program.prepare(None, list(settings), Launch()), alone()[0])
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(made) == 9
    told = json.dumps([tool_schema(find)])
    for number, row in enumerate(made):
        assert (told in row["prompt"]) == (number % 3 == 0) and ('"own"' in row["prompt"]) == (number % 3 == 1)
        assert len(row["response_mask"]) == len(row["response_ids"]) == len(row["log_probs"])
        assert not any(log_prob for log_prob, drawn in zip(row["log_probs"], row["response_mask"], strict=True) if not drawn)
        if number % 3 == 1:
            assert row["environment_reward"] == float(row["num_turns"] == 3)
        elif number % 3 == 2:
            assert (row["environment_reward"], row["num_turns"]) == (0.0, 1) and all(row["response_mask"])
    assert any("6650 km" in row["text"] and row["num_turns"] > 1 for row in made[::3])
    assert all(row["score"] == ("6650 km" in row["text"]) for row in made)


def long_river(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Whether the model read it; the response is what the model wrote."""
    turns = row["completion_messages"]
    assert text_of(turns) == response
    assert {turn["role"] for turn in turns} <= {"assistant", "tool"}
    return float(any(turn["content"] == "6650 km" for turn in turns if turn["role"] == "tool"))


def test_a_response_as_messages() -> None:
    ids, mask = encoded("ab1cd<think>e</think>f"), [True, True, False, *[True] * 19]
    observations = [[{"role": "tool", "name": "find", "content": "1"}]]
    tokenizer, found = load_tokenizer(talker()), [{"role": "assistant", "content": "ab"}, *observations[0]]
    last = {"role": "assistant", "content": "cd<think>e</think>f"}
    assert turn_messages(tokenizer, [7], ids, mask, observations) == [*found, last]
    stripped = turn_messages(tokenizer, [7], ids, mask, observations, ("<think>", "</think>"))
    assert stripped == [*found, {"role": "assistant", "content": "f"}]
    assert turn_messages(tokenizer, [7], ids[2:], mask[2:], observations)[0] == observations[0][0]


def river_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """As TRL calls it: a completion is a list of messages, and ``kwargs`` has the columns."""
    tools = [[turn["content"] for turn in turns if turn["role"] == "tool"] for turns in completions]
    return [float(right in found) for right, found in zip(kwargs["solution"], tools, strict=True)]


def turns_reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(turns)) for turns in completions]


def test_a_model_that_calls_tools_is_trained_on_what_it_drew(tmp_path: Path) -> None:
    """With TRL's list of reward functions, by name: no section ``reward``."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "solution": "6650 km"} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    overrides = (
        *("algorithm.name=grpo", "algorithm.ppo_mini_batch_size=4", "data.train_batch_size=4", "sampling.n=2"),
        *(f"models.actor.path={talker()}", "models.actor.dtype=float64", "models.actor.optim.lr=1e-3"),
        *(f"data.path={data}", "data.max_prompt_length=400", "data.max_response_length=100"),
        *(*TOOL_SETTINGS, "sampling.allowed_token_ids=[0,3,60]", "rewards.river.function=test_several:river_reward"),
        *("rewards.turns.function=test_several:turns_reward", "rewards.turns.weight=0.5"),
    )
    run_ranks(2, tasks.train_here, None, tasks.settings(tmp_path / "run", 2, *overrides))
    metrics, samples = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "rollouts.jsonl")
    )
    assert all(json.dumps([tool_schema(find)]) in row["prompt"] for row in samples)
    assert {row["score"] for row in samples} == {0.0, 1.0}
    assert all(row["score"] == ("6650 km" in row["response"]) for row in samples)
    for row in metrics:
        assert row["rollout/log_prob_diff_max"] < 1e-9 and row["rollout/num_turns_mean"] > 1
        assert row["actor/grad_norm"] > 0
        total = row["river/mean"] + row["turns/mean"]  # a reward's mean is weighted
        assert row["reward/total_mean"] == pytest.approx(total) and row["turns/mean"] > 0.5 and "reward/mean" not in row


@pytest.mark.parametrize(
    ("names", "overrides", "message"),
    [
        (NAMES, ["environments.short.cls=null"], r"environments.short.cls must be given"),
        (NAMES, ["environments.environment.cls=calculator"], r"environments.environment: rows that name none have that of"),
        (NAMES, ["reward.function=null"], r"data.path, row 3: the row has no environment, and there is no other; give reward"),
        (("zeds", "shrot"), [], r"data.path, row 1: environment='shrot' is not an .*did you mean 'short'\?.* there are zeds"),
        (("zeds", "parrot"), [], r"environments.short: no row has this name in its column 'environment'"),
        (NAMES, ["environments.parrot.args.patients=3"], r"environments.parrot.args=.*unexpected keyword argument 'patients'"),
        (NAMES, ["environment.cls=calculatr"], r"unknown environment.cls 'calculatr'; did you mean 'calculator'\?"),
        (NAMES, ["environment.cls=test_environments:random"], r"environment.cls.*random is a module, not a function"),
        (NAMES, ["environment.cls=tools"], r"environment.args={}: give tools, or servers, or both"),
        (NAMES, tools("[test_several:fnd]"), r"tool 'test_several:fnd': module test_several has no function .* 'find'\?"),
        (NAMES, tools("[test_several:undescribed]"), r"tool 'undescribed' needs type hints and a docstring"),
        (NAMES, tools("[test_several:find,test_several:find]"), r"two functions have one name, by which the model calls them"),
        (NAMES, tools("test_several:find"), r"tools='test_several:find' must be a list"),
        (
            NAMES,
            tools("[test_several:endless]"),
            r"tool 'endless' is a generator \(it has a yield\); it must return its result",
        ),
        (
            NAMES,
            [*TOOL_SETTINGS, "environment.args.format=herms"],
            r"format='herms' is not a form of calls; did you mean 'hermes'\?.* there are openai, ",
        ),
        (
            (None, "zeds", "short", "parrot"),
            [*tools("[test_several:find]"), "data.apply_chat_template=false", "reward.function=null"],
            r"data.path, row 0: environment gives no reward, and there is no other; give reward.function",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, names: tuple[str, ...], overrides: list[str], message: str) -> None:
    data = f"data.path={mixed(tmp_path / 'mixed.jsonl', *names)}"
    with pytest.raises(ValueError, match=message):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, *SEVERAL, data, *overrides), 1)


def test_a_prompt_that_does_not_tell_of_tools_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    settings = [f"data.path={source}", f"out={tmp_path / 'out.jsonl'}", *TOOL_SETTINGS]
    silent = talker(TEMPLATE.partition("{% endif %}")[2].removeprefix("\n"))
    source.write_text(json.dumps({"prompt": [{"role": "user", "content": "?"}]}) + "\n")
    with pytest.raises(
        ValueError, match=r"in.jsonl:1: the chat template does not tell the model of tools; give data.chat_temp"
    ):
        program.prepare(None, [*settings, f"model.path={silent}"], Launch())
    source.write_text(json.dumps({"prompt": "How long?"}) + "\n")
    settings.append(f"model.path={talker()}")
    with pytest.raises(ValueError, match=r"in.jsonl:1: the prompt is text, and the model has tools: set data.apply_chat_templ"):
        program.prepare(None, settings, Launch())
    ready = program.prepare(None, [*settings, "data.apply_chat_template=true"], Launch())
    assert json.dumps([tool_schema(find)]) in "".join(WORDS[token] for token in ready.sets[0].prompts[0])
    plain = program.prepare(None, [*settings, "data.apply_chat_template=false"], Launch())
    assert plain.sets[0].rows[0]["prompt"] == "How long?"


# -- docs/environments.md


def test_the_tools_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written down and named as the document says."""
    page = (ROOT / "docs" / "environments.md").read_text()
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "my_project/tools.py" in block)
    (settings,) = (block for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "tools.py:python" in block)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "tools.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(**yaml.safe_load(settings)["environment"])
    check_section(config, "environment")
    assert [schema["function"]["name"] for schema in config.schemas()] == ["search", "python"]
    tools = Tools(**config.args)

    def ask(name: str, **arguments: Any) -> str:
        said, _, done = tools.step(f"Let me see. <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
        assert isinstance(said, list) and not done
        return str(said[0]["content"])

    length = "Nile: The Nile flows through eleven countries and is about 6650 km long."
    assert ask("search", query="long river Nile", most=1) == length
    assert ask("search", query="zebra") == "nothing found"
    assert ask("search", topic="Nile").startswith("error: TypeError:")
    assert ask("python", code="print(6650 - 1230)") == "5420\n"
    assert "ZeroDivisionError" in ask("python", code="1 / 0")
