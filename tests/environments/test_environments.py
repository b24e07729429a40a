"""Rows that environments extend: the same tokens whatever the timing and the layout, losses on the model's tokens only."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch

import tasks
from generators import Generator, alone, assert_recorded, load, read_eos_ids, training_log_probs
from ranks import run_ranks
from rlhf_spmd.data.tokenizer import decoding, encode, encode_continued, load_tokenizer
from rlhf_spmd.environments.calculator import Calculator, calculate
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.runner import Answer, EnvironmentFailure, EnvironmentRunner, check_failed_rows
from rlhf_spmd.generation import Completion, GenerationConfig, Request, SamplingConfig, multi_turn
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.train import prepare
from small_models import CONFIGS


class Parrot:
    """Says a turn's last characters backwards, sometimes nothing, and is done when it hears enough; takes up to ``sleep_s``."""

    def __init__(self, sleep_s: float = 0.0, patience: int = 4) -> None:
        self.sleep_s, self.patience, self.heard = sleep_s, patience, 0

    def _think(self) -> None:
        time.sleep(random.SystemRandom().random() * self.sleep_s)  # another time in every run

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self._think()
        return row["prompt"][:2] if len(row["prompt"]) % 2 else None

    def step(self, text: str) -> tuple[str, float, bool]:
        self._think()
        self.heard += 1
        return text[::-1][: len(text) % 4], len(text) / 8, self.heard >= self.patience


class Waiting(Parrot):
    """A parrot that answers the first turn of a row marked ``waits`` when the others have drawn ``TOKENS`` more."""

    TOKENS = 100
    generators: ClassVar[list[Generator]] = []  # whose counter it watches
    drawn: ClassVar[list[int]] = []  # when it was asked, and when it answered

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.waits = "waits" in row
        return super().reset(row)

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.waits and self.heard == 0:
            self.drawn.append(self.generators[0].stats.decode_tokens)
            while self.generators[0].stats.decode_tokens < self.drawn[0] + self.TOKENS:
                time.sleep(1e-3)  # if the others wait too, until environment.timeout_s
            self.drawn.append(self.generators[0].stats.decode_tokens)
        return super().step(text)


class Broken:
    """``how`` it goes wrong in the second turn."""

    def __init__(self, how: str) -> None:
        self.how, self.turns = how, 0

    def reset(self, row: Mapping[str, Any]) -> str | None:
        if self.how == "reset":
            raise KeyError("no such game")
        return {"long": "z" * 99, "surrogate": "a\ud83db"}.get(self.how)

    def step(self, text: str) -> Any:
        self.turns += 1
        if self.turns == 2:
            if self.how == "sleep":
                time.sleep(3600)
            wrong: dict[str, Callable[[], Any]] = {
                "raise": lambda: 1 // 0,
                "pair": lambda: ("", 0.0),
                "nan": lambda: ("", float("nan"), False),
                "surrogate": lambda: ("\udc80", 0.0, False),
                "deep": lambda: (nested(10**5), 0.0, False),
                "rather deep": lambda: (nested(sys.getrecursionlimit() - 150), 0.0, False),
                "mute": raise_mute,
            }
            return wrong[self.how]()
        return "", 0.0, False


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("nothing to say")


def raise_mute() -> None:
    raise Mute


def nested(depth: int) -> list[dict[str, Any]]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return [{"role": "tool", "content": "a", "more": value}]


# -- generating

SAMPLING = SamplingConfig(stop=["7", "ab"], stop_token_ids=[12, 13, 14])
SMALL = GenerationConfig(page_size=4, max_num_seqs=16, max_num_batched_tokens=64)


def requests() -> tuple[list[Request], dict[int, dict[str, Any]]]:
    """Twelve prompts, two rows each, of different limits, and what their environments begin with."""
    rng = random.Random(3)
    prompts = ["".join(rng.choices(tasks.VOCABULARY[1:], k=rng.randint(1, 14))) for _ in range(12)]
    ids = {prompt: [tasks.VOCABULARY.index(c) for c in prompt] for prompt in prompts}
    rows = {2 * i + j: {"prompt": prompt} for i, prompt in enumerate(prompts) for j in range(2)}
    return [Request(r, r // 2, ids[row["prompt"]], 24 + r % 9) for r, row in rows.items()], rows


def environments(**settings: Any) -> Environments:
    config = EnvironmentConfig(**{"cls": "test_environments:Parrot", "num_workers": 4, **settings})
    return Environments({"environment": config}, requests()[1], load_tokenizer(tasks.task() / "actor"))


def generate(
    world: World, path: str, layout: Layout, config: GenerationConfig, settings: dict[str, Any]
) -> list[tuple[list[int], list[bool], float, int, str]] | None:
    """What each row of this replica went through."""
    mesh = build_mesh(world, range(world.size), layout) if world.size > 1 else alone()[1]
    found = environments(**settings)
    generator = Generator(load(path, mesh), mesh, config, read_eos_ids(path), decoding(found.tokenizer))
    completions = generator.generate(requests()[0], SAMPLING, 1, 2, environments=found)
    assert not any(done.failure for done in completions)
    return [outcome(done) for done in completions]


def outcome(done: Completion) -> tuple[list[int], list[bool], float, int, str]:
    assert done.mask is not None
    return done.token_ids, done.mask, done.reward, done.num_turns, done.finish_reason


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Rows one by one, environments at once: the reference for all else."""
    world = alone()[0]
    return generate(world, str(tasks.task() / "actor"), Layout(), replace(SMALL, max_num_seqs=1), {}) or []


def test_rows_are_what_the_environment_and_the_model_said(plain: list[Any]) -> None:
    """Each row's environment, run again by hand on the model's turns, says what lies between them."""
    made, rows = requests()
    vocabulary = tasks.VOCABULARY
    for request, (token_ids, mask, reward, turns, reason) in zip(made, plain, strict=True):
        assert len(token_ids) == len(mask) <= request.max_new_tokens and mask[-1]
        environment, at, total, number, done = Parrot(), 0, 0.0, 0, False
        expected = encode_by_hand(environment.reset(rows[request.row_id]))
        while True:
            assert token_ids[at : at + len(expected)] == expected and not any(mask[at : at + len(expected)])
            start = at = at + len(expected)
            while not ends_turn(token_ids[start:at]) and at < len(token_ids):
                assert mask[at]
                at += 1
            said = "".join(vocabulary[i] for i in token_ids[start:at] if i != tasks.EOS)
            observation, value, done = environment.step(said)
            expected, total, number = encode_by_hand(observation), total + value, number + 1
            if at == len(token_ids):
                break
            assert not done
        assert (total, number) == (pytest.approx(reward, abs=1e-12), turns)
        full = len(token_ids) == request.max_new_tokens
        assert done or full or at + len(expected) >= request.max_new_tokens
        assert reason == ("stop" if (ends_turn(token_ids[start:]) if full else done) else "length")
    assert sum(row[3] for row in plain) > 2 * len(plain) and {row[4] for row in plain} == {"stop", "length"}


def encode_by_hand(text: str | None) -> list[int]:
    return [tasks.VOCABULARY.index(c) for c in text or ""]


@pytest.mark.parametrize("text", ["a", ".1", "11", " a", "\n", "a 1"])
def test_an_observation_continues_the_text(text: str) -> None:
    """No space is put before it, as before the beginning of a text, and what it says is all that is read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "a", ".", "1", "11", "\n", "▁a", "aa", ".."]
    merges = [("▁", "a"), ("1", "1"), ("a", "a"), (".", ".")]
    model = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    ids = encode_continued(tokenizer, text)
    assert "".join(pieces[i] for i in ids) == text.replace(" ", "▁")
    assert encode(tokenizer, "1") != encode_continued(tokenizer, "1")


def ends_turn(token_ids: list[int]) -> bool:
    text = "".join(tasks.VOCABULARY[i] if i != tasks.EOS else "." for i in token_ids)
    return bool(token_ids) and (token_ids[-1] in (tasks.EOS, 12, 13, 14) or text.endswith(("7", "ab")))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (replace(SMALL, page_size=2, num_pages=24, max_num_seqs=24), {"args": {"sleep_s": 0.01}, "num_workers": 24}),
        (
            replace(SMALL, page_size=16, max_num_batched_tokens=16, enable_prefix_caching=False),
            {"num_workers": 1},
        ),
        (replace(SMALL, steps_per_sync=4), {"args": {"sleep_s": 0.01}}),
    ],
    ids=["preemption", "other pages", "several tokens per look"],
)
def test_tokens_do_not_depend_on_timing_and_pages(plain: list[Any], config: GenerationConfig, settings: dict[str, Any]) -> None:
    assert generate(alone()[0], str(tasks.task() / "actor"), Layout(), config, settings) == plain


@pytest.mark.parametrize("config", [replace(SMALL, page_size=2, num_pages=24), replace(SMALL, steps_per_sync=4)], ids=str)
def test_experts_of_all_turns_are_recorded(tmp_path: Path, config: GenerationConfig) -> None:
    """Those of the environments' tokens, too, and of rows that lose their pages while they wait."""
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS}
    write_random_model(tmp_path, {**CONFIGS["qwen3-moe"], **sizes}, seed=7)
    mesh, found, made = alone()[1], environments(args={"sleep_s": 0.01}), requests()[0]
    decoder = load(str(tmp_path), mesh)
    generator = Generator(decoder, mesh, config, {tasks.EOS}, decoding(found.tokenizer), records_experts=True)
    completions = generator.generate(made, SAMPLING, 1, 2, environments=found)
    assert_recorded(decoder, made, completions)
    assert any(done.mask is not None and not all(done.mask) for done in completions)
    assert (generator.stats.preemptions > 0) == (config.num_pages is not None)


def test_both_tensor_parallel_ranks_hear_the_same() -> None:
    config = replace(SMALL, page_size=2, num_pages=40)
    first, second = run_ranks(2, generate, str(tasks.task() / "actor"), Layout(tp=2), config, {"args": {"sleep_s": 0.01}})
    assert first == second


@pytest.mark.parametrize(("ahead", "likeliest"), [(1, 2), (4, 0)])
def test_log_probs_are_those_of_training_and_none_of_the_environment(ahead: int, likeliest: int) -> None:
    path = str(tasks.task() / "actor")
    config = replace(SMALL, steps_per_sync=ahead)
    found = environments()
    generator = Generator(load(path, alone()[1]), alone()[1], config, read_eos_ids(path), decoding(found.tokenizer))
    made, _ = requests()
    completions = generator.generate(made, replace(SAMPLING, logprobs=likeliest), 1, 2, environments=found)
    wanted = training_log_probs(generator.decoder, made, completions, 1.0)
    for completion, log_probs in zip(completions, wanted, strict=True):
        assert completion.mask is not None
        mask = torch.tensor(completion.mask)
        assert torch.equal(completion.log_probs[mask], log_probs[mask])
        assert not completion.log_probs[~mask].any()
        if completion.top_log_probs is not None:
            assert not completion.top_log_probs[1][~mask].any() and completion.top_log_probs[1][mask].all()
        assert (completion.top_log_probs is not None) == (likeliest > 0)


@pytest.mark.parametrize("options", [{"page_size": 2, "num_pages": 40, "max_num_seqs": 5}, {"steps_per_sync": 8}], ids=str)
def test_linear_attention_goes_on_with_its_states(tmp_path: Path, options: dict[str, Any]) -> None:
    """A row's state waits for the environment's answer, or all of its tokens are computed again after a preemption."""
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12}
    write_random_model(tmp_path, {**CONFIGS["qwen3-5"], **sizes}, 3)
    mesh, found = alone()[1], environments()
    decoder = load(str(tmp_path), mesh, torch.float64)
    generator = Generator(decoder, mesh, replace(SMALL, **options), [tasks.EOS], decoding(found.tokenizer))
    made, _ = requests()
    completions = generator.generate(made, SAMPLING, 1, 2, environments=found)
    assert max(completion.num_turns for completion in completions) > 1
    assert (generator.stats.preemptions > 0) == ("num_pages" in options)
    for completion, log_probs in zip(completions, training_log_probs(decoder, made, completions, 1.0), strict=True):
        mask = torch.tensor(completion.mask)
        assert (completion.log_probs[mask] - log_probs[mask]).abs().max() < 1e-10


def test_other_rows_go_on_while_one_waits(plain: list[Any]) -> None:
    mesh, path = alone()[1], str(tasks.task() / "actor")
    found = environments(cls="test_environments:Waiting", timeout_s=300.0)
    generator = Generator(load(path, mesh), mesh, SMALL, read_eos_ids(path), decoding(found.tokenizer))
    Waiting.generators[:], Waiting.drawn[:] = [generator], []
    rows = {row: {**values, **({"waits": True} if row == 5 else {})} for row, values in found.rows.items()}
    completions = generator.generate(requests()[0], SAMPLING, 1, 2, environments=replace(found, rows=rows))
    asked, answered = Waiting.drawn
    assert answered - asked >= Waiting.TOKENS and completions[5].mask is not None
    assert completions[5].num_turns > 1
    assert [outcome(done) for done in completions] == plain


def test_max_turns() -> None:
    path = str(tasks.task() / "actor")
    rows = generate(alone()[0], path, Layout(), SMALL, {"max_turns": 2, "args": {"patience": 1000}})
    assert rows is not None and {row[3] for row in rows} == {1, 2}
    assert all(row[4] == "stop" or len(row[0]) > 20 for row in rows)


def test_a_rows_next_call_may_begin_before_the_last_ones_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(SimpleQueue):  # type: ignore[type-arg]
        def put(self, answer: Answer) -> None:
            super().put(answer)
            given.append(answer)
            if len(given) == 1:  # another thread takes the next call and is done with it at once
                runner.step(answer.row_id, "ab")
                limit = time.monotonic() + 60
                while len(given) < 2 and time.monotonic() < limit:
                    time.sleep(1e-3)

    given: list[Answer] = []
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    others = set(threading.enumerate())
    configs = {"some": EnvironmentConfig(cls="test_environments:Parrot", num_workers=2)}
    runner = EnvironmentRunner(configs, {0: "some", 1: "some"}, {0: {"prompt": "a"}, 1: {}})
    runner._answers = Answers()
    runner.reset(0)
    found: list[Answer] = []
    while len(found) < 2:
        found += runner.answers(wait=True)
    runner.close()
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    assert not failures


class Forking:
    """Forks in the call ``method`` of row 0, and leaves in the child as ``how`` says. Writes down its calls and the child's id."""

    def __init__(self, path: str, method: str, how: str) -> None:
        self.path, self.method, self.how = Path(path), method, how

    def _call(self, method: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{self.row} {method}\n")
        if self.row == 0 and method == self.method and os.fork() == 0:
            self.path.with_suffix(".pid").write_text(str(os.getpid()))
            if self.how == "sys.exit":
                sys.exit(3)
            if self.how == "raise":
                raise ValueError("in the child")

    def reset(self, row: Mapping[str, Any]) -> None:
        self.row = row["row"]
        self._call("reset")

    def step(self, text: str) -> tuple[str, float, bool]:
        self._call("step")
        return "", 0.0, True


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(("how", "status"), [("sys.exit", 3), ("raise", 1), ("return", 0)])
def test_a_process_that_an_environment_has_forked_makes_no_calls_and_ends(
    tmp_path: Path, method: str, how: str, status: int
) -> None:
    path, rows = tmp_path / "calls", range(4)
    settings = {"path": str(path), "method": method, "how": how}
    configs = {"some": EnvironmentConfig(cls="test_environments:Forking", num_workers=1, args=settings)}
    runner = EnvironmentRunner(configs, dict.fromkeys(rows, "some"), {row: {"row": row} for row in rows})
    for ask in (runner.reset, lambda row: runner.step(row, "a")):
        for row in rows:
            ask(row)
        answers = list[Answer]()
        while len(answers) < len(rows):
            answers += runner.answers(wait=True)
        assert [answer.failure for answer in answers] == [None] * len(rows)
    runner.close()
    pid_file, limit = path.with_suffix(".pid"), time.monotonic() + 60
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.01)
    child = int(pid_file.read_text())
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, status << 8)
    assert sorted(path.read_text().splitlines()) == sorted(f"{row} {call}" for row in rows for call in ("reset", "step"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"environment 'test_environments:Broken' of row \d+ failed in step\(\): ZeroDivisionError"),
        ("reset", r"failed in reset\(\): KeyError: 'no such game'"),
        ("pair", r"it must return \(observation, reward, done\), not \('', 0.0\)"),
        ("nan", r"the reward must be a finite number, not nan"),
        ("deep", r"row \d+: RecursionError: maximum recursion depth exceeded"),
        ("rather deep", r"row \d+: RecursionError: maximum recursion depth exceeded"),
        ("mute", r"failed in step\(\): Mute, whose text cannot be read"),
        ("sleep", r"has not returned within environment.timeout_s=0.5"),
        ("long", r"reset\(\) observes 99 characters, .* but max_response_length=\d+, .* must leave one"),
    ],
)
def test_a_failing_environment_ends_its_row_and_no_other(plain: list[Any], how: str, message: str) -> None:
    """Also if its calls take all threads. A row without a token answers once, alone."""
    found = environments(timeout_s=0.5 if how == "sleep" else 300.0)
    broken = replace(found.configs["environment"], cls="test_environments:Broken", args={"how": how}, num_workers=1)
    rows = {row: values | {"environment": "broken"} if row < 3 else values for row, values in found.rows.items()}
    found, path = replace(found, configs={**found.configs, "broken": broken}, rows=rows), str(tasks.task() / "actor")
    generator = Generator(load(path, alone()[1]), alone()[1], SMALL, read_eos_ids(path), decoding(found.tokenizer))
    completions = generator.generate(requests()[0], SAMPLING, 1, 2, environments=found)
    assert [outcome(done) for done in completions[3:]] == plain[3:]
    failed = [done for done in completions if done.failure is not None]
    assert failed and {done.row_id for done in failed} <= {0, 1, 2}
    for done in failed:
        assert re.search(message.replace("environment.timeout", r"environments\.broken\.timeout"), done.failure or "")
        assert math.isnan(done.reward) and done.token_ids and len(done.mask or ()) == len(done.token_ids)
    with pytest.raises(
        EnvironmentFailure, match=r"environments.broken failed in 2 of 3 rows, more than .*rate=0.5; the first: why"
    ):
        check_failed_rows(broken, "broken", 2, 3, "why")
    check_failed_rows(broken, "broken", 1, 2, "why")
    assert EnvironmentFailure.exit_class == "reward"


def test_an_observation_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(multi_turn, "encode_continued", lambda _, text: [lengths.append(len(text))] and [3])
    for said in ("z" * 10_000_000, [{"role": "tool", "content": "z" * 10_000_000}]):
        settings = {"cls": "test_environments:Saying", "args": {"said": said}}
        rows = generate(alone()[0], str(tasks.task() / "actor"), Layout(), SMALL, settings)
        assert rows is not None and {(turns, reason) for _, _, _, turns, reason in rows} <= {(1, "length"), (1, "stop")}
    assert not any(lengths)


class Saying:
    def __init__(self, said: Any) -> None:
        self.said = said

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[Any, float, bool]:
        return self.said, 0.0, False


def test_half_a_surrogate_pair_is_read_as_a_question_mark() -> None:
    settings = {"cls": "test_environments:Broken", "args": {"how": "surrogate"}, "max_turns": 3}
    rows = generate(alone()[0], str(tasks.task() / "actor"), Layout(), SMALL, settings)
    assert rows is not None and any(turns == 3 for _, _, _, turns, _ in rows)
    heard = [*encode_by_hand("a"), tasks.EOS, *encode_by_hand("b")]  # <eos> stands for what the tokenizer does not know
    assert all(token_ids[:3] == heard and mask[:4] == [0, 0, 0, 1] for token_ids, mask, _, _, _ in rows)


# -- training

PARROT = (
    *("environment.cls=test_environments:Parrot", "environment.weight=0.5", "environment.num_workers=3"),
    *("data.max_response_length=24", 'sampling.stop=["7","ab"]'),
)
FP64 = tuple(f"models.{role}.dtype=float64" for role in ("actor", "critic", "reference", "reward"))
ONE_UPDATE = (
    *("algorithm.ppo_mini_batch_size=8", "algorithm.ppo_epochs=1", "algorithm.loss_agg_mode=seq-mean-token-mean"),
    *("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1", "algorithm.gamma=0.9", "algorithm.lam=0.8"),
)


def one_step(world: World, overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first step of PPO on one rank: the fields of its batch (lists per row) and its metrics."""
    from rlhf_spmd.algorithms.policy import clipped_policy
    from rlhf_spmd.algorithms.values import clipped_value, gae_advantages
    from rlhf_spmd.controller import Controller
    from rlhf_spmd.data.batch import Batch, Ragged, encode_json, ragged
    from rlhf_spmd.training.build import build_models
    from rlhf_spmd.training.recorder import merge_values
    from rlhf_spmd.workers.config import BatchLimits, WorkerContext

    ready = prepare(str(tasks.task() / "ppo.json"), tasks.settings(Path("unused"), 1, *overrides), 1)
    config = ready.config.algorithm
    controller = Controller(world.all)
    build = WorkerContext(
        controller,
        world,
        BatchLimits(max_tokens=100),
        seed=0,
        rewards={"reward": ready.config.reward},
        environments={"environment": ready.config.environment} if ready.config.environment.cls else {},
        tokenizer=ready.tokenizer,
    )
    models = build_models(ready.roles, build)
    made, rows = requests()
    made = made[:16]
    fields = {"prompt_ids": ragged([r.prompt_ids for r in made], torch.int64), "row": encode_json(rows[r.row_id] for r in made)}
    ids, groups = (torch.tensor([getattr(r, name) for r in made]) for name in ("row_id", "group_id"))
    seen: dict[str, Any] = {}

    def script(prompts: Any) -> list[Any]:
        """As ppo.step without the updates, to see what they get; then they run."""
        batch = prompts
        for call in (
            lambda batch: models.actor.generate_sequences(batch, ready.sampling(), 1),
            models.reward.compute_reward,
            models.actor.compute_log_prob,
            models.critic.compute_values,
            models.reference.compute_ref_log_prob,
            lambda batch: models.compute.apply(batch, gae_advantages(config), reads, outputs=("advantages", "returns")),
        ):
            batch = batch.union(call(batch))
            calls.append(batch)
        learnt = batch.rename(values="old_values")
        return [
            models.actor.update(learnt, clipped_policy(config, ready.sampling())),
            models.critic.update(learnt, clipped_value(config)),
        ]

    calls: list[Any] = []
    reads = ("scores", "values", "old_log_probs", "ref_log_prob")
    updates = script(controller.source(Batch(ids, groups, fields)))
    for name, (piece,) in calls[-1].fields.items():
        assert piece.producer.data is not None
        field = piece.producer.data[piece.name]
        seen[name] = [row.tolist() for row in field.rows()] if isinstance(field, Ragged) else field.tolist()
    metrics, _ = merge_values(controller.get(calls[0], calls[1], calls[5], *updates))
    return seen, metrics


@pytest.fixture(scope="module")
def stepped() -> tuple[dict[str, Any], dict[str, Any]]:
    ((fields, metrics),) = run_ranks(1, one_step, (*PARROT, *FP64, *ONE_UPDATE))
    return fields, metrics


def masked_gae(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    """Backwards over all tokens; those of environments pass on what they got."""
    following = last = 0.0
    advantages = []
    for reward, value, drawn in reversed(list(zip(rewards, values, mask, strict=True))):
        if drawn:
            last = reward + gamma * following - value + gamma * lam * last
            following = value
        advantages.append(last)
    return advantages[::-1]


def test_losses_see_the_models_tokens_only(stepped: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Rewards, KL, GAE, whitening, losses and gradient norms again, in float64, from transformers' models and padded rows."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    batch, metrics = stepped
    models = {role: AutoModelForCausalLM.from_pretrained(tasks.task() / role).double() for role in ("actor", "reference")}
    critic = AutoModelForSequenceClassification.from_pretrained(tasks.task() / "critic", num_labels=1).double()
    size = max(map(len, batch["response_ids"]))
    shape = len(batch["response_ids"]), size
    log_probs, entropy, ref, values = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
    mask, token_rewards, raw = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for i, (prompt, response) in enumerate(zip(batch["prompt_ids"], batch["response_ids"], strict=True)):
        ids, n = torch.tensor([prompt + response]), len(response)
        logits = models["actor"](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_probs[i, :n] = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
        entropy[i, :n] = -(logits.exp() * logits).sum(-1)
        with torch.no_grad():
            other = models["reference"](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ref[i, :n] = other.gather(1, torch.tensor(response)[:, None])[:, 0]
        values[i, :n] = critic.score(critic.model(ids).last_hidden_state)[0, len(prompt) - 1 : -1, 0]
        mask[i, :n] = torch.tensor(batch["response_mask"][i], dtype=torch.float64)
    assert 0 < mask.sum() < sum(map(len, batch["response_ids"]))
    old, kl = log_probs.detach(), ((log_probs - ref) * mask).detach()
    for i, response in enumerate(batch["response_ids"]):
        pairs = itertools.groupby(zip(batch["response_mask"][i], response, strict=True), key=itemgetter(0))
        turns = ["".join(tasks.VOCABULARY[token] for _, token in run if token != tasks.EOS) for drawn, run in pairs if drawn]
        text = "\n".join(turns)
        score = tasks.even_share("", text, {}) + 0.5 * batch["environment_reward"][i]
        assert batch["scores"][i] == pytest.approx(score, abs=1e-6)
        last = int(mask[i].nonzero()[-1])
        token_rewards[i] = -0.05 * kl[i]
        token_rewards[i, last] += score
        raw[i] = torch.tensor(masked_gae(token_rewards[i].tolist(), values[i].tolist(), mask[i].tolist(), 0.9, 0.8))
    picked = raw[mask.bool()]
    white = (raw - picked.mean()) * torch.rsqrt(picked.var(correction=1) + 1e-8) * mask
    returns = (raw + values.detach()) * mask
    for name, wanted in (("advantages", white), ("returns", returns), ("old_log_probs", old * mask), ("values", values * mask)):
        for i, row in enumerate(batch[name]):
            assert row == pytest.approx(wanted[i, : len(row)].tolist(), abs=5e-6), name

    def row_means(x: torch.Tensor) -> torch.Tensor:
        return ((x * mask).sum(1) / mask.sum(1)).mean()

    def token_mean(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / mask.sum()

    gap = ref - log_probs
    pg, kl_loss = row_means(-(log_probs - old).exp() * white), row_means(gap.exp() - gap - 1)
    vf = token_mean(0.5 * (values - returns).square())
    (pg - 0.01 * row_means(entropy) + 0.1 * kl_loss).backward()
    vf.backward()
    expected = {
        "actor/pg_loss": pg,
        "actor/kl_loss": kl_loss,
        "actor/entropy": token_mean(entropy),
        "actor/kl": token_mean(kl),
        "critic/vf_loss": vf,
        "critic/values_mean": token_mean(values),
        "actor/grad_norm": norm(models["actor"]),
        "critic/grad_norm": norm(critic),
        "response_length/mean": mask.sum() / len(mask),
        "rollout/environment_tokens_mean": (sum(map(len, batch["response_ids"])) - mask.sum()) / len(mask),
        "rollout/environment_reward_mean": sum(batch["environment_reward"]) / len(mask),
    }
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(float(torch.as_tensor(number).detach()), rel=1e-5, abs=1e-9), name
    assert metrics["rollout/num_turns_mean"] > 1.5


def norm(model: torch.nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())


def test_without_an_environment_there_is_no_field_of_it_and_without_a_function_it_gives_the_reward() -> None:
    ((fields, metrics),) = run_ranks(1, one_step, ("data.max_response_length=24",))
    assert not {"response_mask", "environment_reward", "observations"} & set(fields)
    assert not [name for name in metrics if "num_turns" in name or "environment" in name]
    ((_, metrics),) = run_ranks(1, one_step, (*PARROT, "reward.function=null"))
    assert metrics["reward/mean"] == pytest.approx(0.5 * metrics["rollout/environment_reward_mean"], rel=1e-6)


class Choosy(Parrot):
    """Fails in rows with an odd prompt."""

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.odd = len(row["prompt"]) % 2
        return super().reset(row)

    def step(self, text: str) -> tuple[str, float, bool]:
        return super().step(text) if not self.odd else ("", math.nan, False)


def test_rows_whose_environment_fails_are_left_out() -> None:
    more = ("environment.cls=test_environments:Choosy", "environment.max_failure_rate=0.9")
    ((fields, metrics),) = run_ranks(1, one_step, (*PARROT, *more))
    odd = [len(prompt) % 2 == 1 for prompt in fields["prompt_ids"]]
    assert [math.isnan(score) for score in fields["scores"]] == odd and any(odd) and not all(odd)
    assert metrics["rollout/environment_failures"] == metrics["reward/unscored"] == sum(odd)
    assert math.isfinite(metrics["actor/pg_loss"]) and metrics["rollout/environment_reward_mean"] > 0


def test_a_run_whose_environment_fails_ends_with_one_line(tmp_path: Path) -> None:
    """On one of two replicas, which other ranks wait for."""
    broken = ("environment.cls=test_environments:Fragile", "environment.max_failure_rate=0.25", *PARROT[2:])
    program = tasks.start_program(2, tmp_path, tasks.settings(tmp_path, 1, *broken))
    assert tasks.finish(program, tmp_path) == 7 and set(program.codes.values()) == {7}
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert (status["class"], status["code"]) == ("reward", 7)
    assert "failed in step(): ValueError: odd rank" in status["message"] and status["rank"] == 1
    text = (tmp_path / "output.txt").read_text()
    assert text.count("ValueError: odd rank") == 1 and "Traceback" not in text.split("ValueError: odd rank")[0]


def test_a_run_goes_on_whose_environment_may_fail_in_all_rows(tmp_path: Path) -> None:
    """One of its ranks says so, and nothing is said of the reward."""
    broken = ("environment.cls=test_environments:Hopeless", "environment.max_failure_rate=1.0", *PARROT[2:])
    program = tasks.start_program(2, tmp_path, tasks.settings(tmp_path, 1, *broken))
    assert tasks.finish(program, tmp_path) == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert text.count("environment failed; such rows are left out") == 1 and "returned None" not in text


class Hopeless(Parrot):
    def step(self, text: str) -> tuple[str, float, bool]:
        raise ValueError("always")


class Fragile(Parrot):
    """Fails on rank 1 only."""

    def step(self, text: str) -> tuple[str, float, bool]:
        if os.environ["RANK"] == "1":
            raise ValueError("odd rank")
        return super().step(text)


# -- the calculator


def test_the_calculator() -> None:
    values = {
        **{
            "48/2": "24",
            "2*(3+4)-1": "13",
            "1/3": "0.3333333333",
            "0.1+0.2": "0.3",
            "3,000*2": "6000",
            "-4+1": "-3",
            "-2.5*2": "-5",
        },
        **{"+8-(-1)": "9", "7" * 200: "7" * 200, "1e300*1e8": "1" + "0" * 308, "1e200/1e308": "1e-108"},
        "((" * 40 + "1" + "))" * 40: "1",
    }
    assert {text: calculate(text) for text in values} == values
    bad = ["2**9", "1/0", "__import__('os')", "", "4 4", "abs(1)", "1 if 1 else 2", "0x10", "(" * 500, "1e9999999", "0e9999999"]
    bad += ["1e-9999999", "1e400/3", "1e308*1e308/3", "*".join(["1e308"] * 30), "-" * 5000 + "1", "1" * 5000]
    assert [text for text in bad if calculate(text) != "error"] == []
    played = Calculator()
    played.reset({"answer": 3})
    assert played.step("<<1e308*1e308=") == ("error>>", 0.0, False)
    assert played.step(f"#### {'3' * 5000}") == ("", 0.0, True)
    assert played.reset({"answer": "She sold 24. #### 1,072"}) is None
    assert played.step("48/2 =") == ("", 0.0, False)
    assert played.step(" <<48/2=") == ("24>>", 0.0, False)
    assert played.step(" so #### $1072.0") == ("", 1.0, True)
    with pytest.raises(ValueError, match="no number in the row's 'answer': 'None'"):
        Calculator().reset({})
