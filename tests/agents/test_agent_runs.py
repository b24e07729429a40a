"""Agents that the trainer does not know, over HTTP: the same numbers in any layout and order, and how episodes end."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import tasks
import toy_agents
from ranks import run_ranks
from rlhf_spmd import train as train_from_python
from rlhf_spmd.train import prepare
from tiers import tiers

STEPS = 3
AGENTS = Path(toy_agents.__file__)
EXACT = ("actor/grad_norm", "actor/pg_loss", "reward/mean", "agents/turns", "response_length/mean")


def settings(root: Path, run_dir: Path, steps: int, *more: str) -> list[str]:
    return [
        "algorithm.name=grpo",
        "algorithm.use_kl_loss=false",
        "algorithm.ppo_max_token_len_per_gpu=2048",
        f"data.path={root / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.shuffle=false",
        "data.max_prompt_length=64",
        "data.max_response_length=300",
        f"models.actor.path={root / 'model'}",
        "models.actor.dtype=float64",
        "sampling.n=2",
        "agent.timeout_s=60",
        f"run.steps={steps}",
        f"run.dir={run_dir}",
        "run.export=false",
        "run.log_samples=100",
        *more,
    ]


def train(ranks: int, root: Path, run_dir: Path, agent: str, *more: str, steps: int = STEPS) -> list[dict[str, Any]]:
    """The metrics of a run whose rows ``agent`` of ``toy_agents`` answers."""
    overrides = settings(root, run_dir, steps, f"agent.run={AGENTS}:{agent}", *more)
    run_ranks(ranks, tasks.train_here, None, overrides)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "two replicas": (2, ()),
    "tp 2": (2, ("models.actor.layout.tp=2", "models.actor.generation.tp=2")),
    "pp 2": (2, ("models.actor.layout.pp=2", "models.actor.generation.pp=2")),
    "apart": (2, ("placement.strategy=separate",)),
    "four": (4, ("models.actor.layout.tp=2", "models.actor.layout.zero=2", "models.actor.generation.tp=2")),
    "preempted": (1, ("models.actor.generation.num_pages=12", "models.actor.generation.page_size=32")),
}


CASES = [f"{agent}, {layout}" for agent in ("tool_user", "debate", "compacting") for layout in LAYOUTS]


@pytest.mark.parametrize("case", tiers(CASES, ["debate, two replicas", "compacting, tp 2", "tool_user, apart"]))
def test_the_same_numbers_in_any_layout(root: Path, tmp_path: Path, case: str) -> None:
    agent, layout = case.split(", ")
    reference = train(1, root, tmp_path / "one", agent)
    ranks, more = LAYOUTS[layout]
    other = train(ranks, root, tmp_path / "other", agent, *more)
    for one, two in zip(reference, other, strict=True):
        assert {key: two[key] for key in EXACT} == {key: pytest.approx(one[key], rel=1e-8, abs=1e-12) for key in EXACT}
        assert one["rollout/log_prob_diff_max"] < 1e-12 > two["rollout/log_prob_diff_max"], "what is learned is what was drawn"
    assert len({row["reward/mean"] for row in reference}) > 1


@pytest.mark.parametrize("form", ["responses", "messages"])
def test_the_same_numbers_in_any_form(root: Path, tmp_path: Path, form: str) -> None:
    """OpenAI's Responses and Anthropic's Messages are chats."""
    chats, others = (train(1, root, tmp_path / agent, agent, steps=2) for agent in ("tool_user", f"tool_user_of_{form}"))
    for chat, other in zip(chats, others, strict=True):
        assert {key: other[key] for key in EXACT} == {key: chat[key] for key in EXACT}


def test_a_prompt_of_messages_is_what_the_data_have(root: Path, tmp_path: Path) -> None:
    """The agent's ``row["prompt"]`` is no rendered text. Messages beside a text are no prompt."""
    texts = [json.loads(line)["prompt"] for line in (root / "train.jsonl").read_text().splitlines()]
    said = [[{"role": "user", "content": text}] for text in texts]
    chats = [{"prompt": messages} for messages in said]
    beside = [{"prompt": chat[0]["content"], "messages": [{"role": "user", "content": "other"}]} for chat in said]
    metrics = [train(1, root, tmp_path / "text", "tool_user", steps=1)]
    for name, rows, agent in (("chats", chats, "tool_user_of_chats"), ("beside", beside, "tool_user")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics.append(train(1, root, tmp_path / name, agent, f"data.path={tmp_path / name}.jsonl", steps=1))
    (text,), *others = [[{key: row[key] for key in EXACT} for row in rows] for rows in metrics]
    assert others == [[text]] * 2


def text_of(path: Path) -> str:
    """Of a file of /proc; empty if its thread or process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""


def test_no_process_outlives_a_run_from_python(root: Path, tmp_path: Path) -> None:
    gc.disable()  # which would end it some time
    try:
        train_from_python(
            OmegaConf.to_container(OmegaConf.from_dotlist(settings(root, tmp_path, 1, f"agent.run={AGENTS}:debate")))
        )
        children = " ".join(map(text_of, Path("/proc/self/task").glob("*/children"))).split()
        assert not [child for child in children if "rlhf_spmd.agents" in text_of(Path("/proc", child, "cmdline"))]
    finally:
        gc.enable()
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "done"


@pytest.mark.parametrize("share", [False, pytest.param(True, marks=pytest.mark.long)], ids=["critic", "shared"])
def test_a_critic_learns_each_turn_once(root: Path, tmp_path: Path, share: bool) -> None:
    critic = f"models.critic.path={root / 'model'}", "models.critic.dtype=float64"
    ppo = "algorithm.name=ppo", *(["algorithm.share_actor_critic=true"] if share else critic)
    one, two = (train(ranks, root, tmp_path / str(ranks), "compacting", *ppo, steps=2) for ranks in (1, 2))
    keys = *EXACT, f"{'actor' if share else 'critic'}/grad_norm", "critic/vf_loss", "critic/returns/mean"
    for expected, row in zip(one, two, strict=True):
        assert {key: row[key] for key in keys} == {key: pytest.approx(expected[key], rel=1e-8, abs=1e-12) for key in keys}
    assert one[0]["agents/turns"] == 32 and one[1]["critic/vf_loss"] > 0


def test_agents_answer_validation_prompts(root: Path, tmp_path: Path) -> None:
    """Each episode counts once, whatever its rows; one that fails does not count."""
    more = (
        f"data.val_path={root / 'train.jsonl'}",
        "data.val_batch_size=12",
        "run.test_freq=1",
        "val_sampling.n=2",
        "val_sampling.temperature=1",
    )
    one, two = (train(ranks, root, tmp_path / str(ranks), "debate", *more, steps=1) for ranks in (1, 2))
    keys = [key for key in one[-1] if key.startswith("val/")]
    assert {key: two[-1][key] for key in keys} == {key: pytest.approx(one[-1][key], rel=1e-8) for key in keys}
    assert one[-1]["val/reward_mean"] > 0 and "val/pass@2" in keys
    failing = train(1, root, tmp_path / "failing", "failing", *more, "agent.max_failure_rate=1", steps=1)[-1]
    assert failing["val/reward_mean"] > 0
    lines = (tmp_path / "failing" / "validation.jsonl").read_text().splitlines()
    assert {json.loads(line)["score"] is None for line in lines} == {True, False}, "an episode that failed is no 0"


def test_a_step_whose_episodes_all_failed_teaches_a_critic_nothing(root: Path, tmp_path: Path) -> None:
    ppo = "algorithm.name=ppo", f"models.critic.path={root / 'model'}", "models.critic.dtype=float64"
    metrics = train(1, root, tmp_path, "debate", *ppo, "agent.max_rows=2", "agent.max_failure_rate=1", steps=1)[0]
    assert metrics["agents/failed"] == 8 and metrics["actor/grad_norm"] == metrics["critic/grad_norm"] == 0


def test_requests_in_another_order_and_a_kill_in_the_middle(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(1, root, tmp_path / "plain", "debate", "run.save_freq=1", "run.keep_checkpoints=3")
    resumed = train(1, root, tmp_path / "resumed", "debate", f"run.resume={tmp_path / 'plain' / 'checkpoints' / 'step_2'}")
    assert [row["step"] for row in resumed] == [3]
    delayed = train(1, root, tmp_path / "delayed", "late_debate")  # the other side asks first
    for expected, row in zip([*plain, plain[-1]], [*delayed, *resumed], strict=True):
        assert {key: row[key] for key in EXACT} == {key: expected[key] for key in EXACT}
    assert plain[0]["agents/new_roots"] == 8, "a side each"


def test_turns_are_learned_once_whatever_branches(root: Path, tmp_path: Path) -> None:
    """Five turns in three conversations; four in three, of which one is asked for twice."""
    for agent, turns, rows in (("debate", 5, 3), ("compacting", 4, 3)):
        metrics = train(1, root, tmp_path / agent, agent, "agent.max_rows=4", "run.log_samples=6", steps=1)[0]
        assert metrics["agents/turns"] == turns * 8 and metrics["agents/episodes"] == 8
        samples = [json.loads(line) for line in (tmp_path / agent / "rollouts.jsonl").read_text().splitlines()]
        assert len(samples) == rows * 6, "six whole episodes"
        assert len({sample["episode"] for sample in samples}) == 6 and {sample["ending"] for sample in samples} == {"done"}
        nodes = {sample["node"] for sample in samples}
        assert len(nodes) == rows * 6 and nodes.isdisjoint(sample["parent"] for sample in samples), "rows end in leaves"
        for sample in samples:
            assert (
                len(sample["ids"])
                == len(sample["mask"])
                == len(sample["log_probs"])
                == sum(n for _, n in sample["versions"]) + 1
            )
            assert all((value < 0) == bool(drawn) for value, drawn in zip(sample["log_probs"], sample["mask"], strict=True))
        assert metrics["rollout/num_turns_mean"] * rows == pytest.approx(turns)


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_plus_plus"])
def test_other_algorithms_without_a_critic(root: Path, tmp_path: Path, algorithm: str) -> None:
    """Also with an episode that is left out, which has no token to learn."""
    more = (
        f"algorithm.name={algorithm}",
        "algorithm.use_kl_in_reward=false",
        "algorithm.loss_agg_mode=token-mean",
        "sampling.n=4",
    )
    metrics = train(1, root, tmp_path, "failing", "agent.max_failure_rate=1", *more, steps=1)[0]
    assert metrics["agents/failed"] == 8 and metrics["actor/grad_norm"] > 0


def test_turns_find_what_earlier_turns_computed(root: Path, tmp_path: Path) -> None:
    """Whatever the pages' size, all but the last token of a conversation; the numbers stay. First turns do not count: where an episode
    of the same row begins late, it may take over the page that one has ended in."""
    small = train(1, root, tmp_path / "small", "tool_user", "models.actor.generation.page_size=8", steps=1)[0]
    large = train(1, root, tmp_path / "large", "tool_user", "models.actor.generation.page_size=256", steps=1)[0]
    assert {key: small[key] for key in EXACT} == {key: pytest.approx(large[key], rel=1e-12) for key in EXACT}
    samples = [json.loads(line) for line in (tmp_path / "small" / "rollouts.jsonl").read_text().splitlines()]
    num_read = num_kept = 0
    for sample in samples:
        turns = [number for number, bit in enumerate(sample["mask"]) if bit and not sample["mask"][number - 1]]
        ends = [
            number + 1 for number, bit in enumerate(sample["mask"]) if bit and not any(sample["mask"][number + 1 : number + 2])
        ]
        num_read += sum(turns)
        num_kept += sum(end - 1 for end in ends[1:-1])
    assert num_kept > 400
    assert large["generation/prefix_hit_tokens"] >= num_kept and large["generation/prefix_hit_rate"] >= num_kept / num_read


def per_token(config: Any, rewards: Any, group_ids: Any, lengths: Any) -> Any:
    """An estimator of the user's with an advantage for each token."""
    return rewards.repeat_interleave(lengths)


def test_an_estimator_of_tokens_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="with agents it must return one for each"):
        train(1, root, tmp_path, "debate", f"algorithm.adv_estimator={Path(__file__)}:per_token", steps=1)


def test_advantages_compare_episodes_not_rows(root: Path, tmp_path: Path) -> None:
    """Two episodes of a prompt: their advantages are opposite, however many rows they have."""
    metrics = train(1, root, tmp_path, "debate", steps=1)[0]
    assert metrics["critic/advantages/max"] == pytest.approx(-metrics["critic/advantages/min"], rel=1e-4)
    assert metrics["critic/advantages/max"] == pytest.approx(2**-0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("agent", "more", "expected"),
    [
        ("failing", (), {"agents/failed": 4, "agents/retries": 4, "agents/timeouts": 0}),
        ("hanging", ("agent.timeout_s=6",), {"agents/failed": 0, "agents/timeouts": 4, "agents/retries": 0}),
        ("hanging", ("agent.timeout_s=6", "agent.on_timeout=keep"), {"agents/failed": 0, "agents/timeouts": 4}),
        ("tool_user", ("agent.max_turns=2",), {"agents/failed": 8, "agents/turns": 16}),
        ("debate", ("agent.max_rows=2",), {"agents/failed": 8}),
    ],
    ids=["fails", "hangs", "hangs and is kept", "too many turns", "too many conversations"],
)
def test_an_episode_that_fails_costs_itself(
    root: Path, tmp_path: Path, agent: str, more: tuple[str, ...], expected: dict[str, int]
) -> None:
    metrics = train(1, root, tmp_path, agent, "agent.max_failure_rate=1", *more, steps=1)[0]
    assert {key: metrics[key] for key in expected} == expected
    failed = expected["agents/failed"] + (0 if "agent.on_timeout=keep" in more else expected.get("agents/timeouts", 0))
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [sample["score"] for sample in samples].count(None) == failed, "a failure is no score of 0"
    assert all(("failure" in sample) == (sample["score"] is None) for sample in samples), "the reason can be read"
    if failed == 8:
        assert metrics["actor/grad_norm"] == 0


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("failing", "4 of 8 episodes failed"),
        ("dying", "the agents' process ended with code 3"),
        ("wrong", "an agent returns a number"),
    ],
)
def test_too_many_failures_end_the_run_with_a_class_of_their_own(root: Path, tmp_path: Path, agent: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        train(1, root, tmp_path, agent, "agent.max_failure_rate=0.25", steps=1)


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 6, "model": "actor"}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("the answer was", len(answer))
print(json.dumps({"reward": len(answer) / 10}))
"""


def test_a_command_is_an_agent(root: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = f"agent.command={sys.executable} {tmp_path / 'agent.py'}"
    run_ranks(1, tasks.train_here, None, settings(root, tmp_path / "run", 1, command))
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["agents/turns"] == 8 and metrics["agents/failed"] == 0 and 0 < metrics["reward/mean"] < 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((f"agent.run={AGENTS}:digits",), "must be `async def f"),
        ((f"agent.run={AGENTS}:absent",), "has no function 'absent'"),
        ((f"agent.run={AGENTS}:debate", "agent.command=true"), "each of them says what runs episodes"),
        ((f"agent.run={AGENTS}:debate", "agent.external=127.0.0.1:0"), "each of them says what runs episodes"),
        (("agent.external=8000",), "agent.external='8000' must be HOST:PORT, such as 127.0.0.1:0"),
        (("agent.external=127.0.0.1:70000",), "agent.external='127.0.0.1:70000' must be HOST:PORT"),
        ((f"agent.run={AGENTS}:post",), "must be `async def f"),
        (("agent.command='nosuchprogram x'",), "there is no program 'nosuchprogram'"),
        (('agent.command="echo \'x"',), "No closing quotation"),
    ],
)
def test_what_is_refused_before_the_run(root: Path, tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(None, settings(root, tmp_path, 1, *more), 1)


def test_a_model_without_a_chat_template_is_refused_before_the_run(tmp_path: Path) -> None:
    prompts = f"data.path={tasks.task() / 'train.jsonl'}", f"models.actor.path={tasks.task() / 'actor'}"
    more = *prompts, "data.max_prompt_length=12", "data.max_response_length=12", "agent.command=true", "agent.timeout_s=60"
    with pytest.raises(ValueError, match="needs a chat template"):
        prepare(None, ["algorithm.name=grpo", "sampling.n=2", "data.train_batch_size=4", f"run.dir={tmp_path}", *more], 1)
