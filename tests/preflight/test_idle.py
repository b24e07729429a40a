"""Settings by which a run would learn nothing, or that nothing reads: said before it starts; and sections that an override drops."""

import re
from pathlib import Path

import pytest

import tasks
from rlhf_spmd.config.load import load
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.train import TrainConfig, prepare


def ppo(tmp_path: Path, *overrides: str, size: int = 1) -> tuple[str, ...]:
    """Warnings of the small PPO task, four steps of two mini-batches, with these settings."""
    settings = [*tasks.settings(tmp_path, 1), "run.steps=4", *overrides]
    return prepare(str(tasks.task() / "ppo.json"), settings, size, launch=Launch(0, size, 0, size)).warnings


def test_an_update_that_changes_nothing_and_a_warm_up_that_never_ends_are_said(tmp_path: Path) -> None:
    assert ppo(tmp_path) == ()
    warm_up = "models.critic.optim.lr_warmup_steps=400"
    lines = sorted(ppo(tmp_path, "models.actor.optim.lr=0", "models.critic.optim.lr=1e-3", warm_up))
    assert lines[0] == "models.actor.optim.lr=0.0: the weights of actor stay as they are"
    match = re.fullmatch(re.escape(warm_up) + r", and critic has (\d+) updates: .* ends at (\S+)", lines[1])
    assert match is not None, lines
    updates, rate = int(match[1]), float(match[2])
    assert updates >= 4
    assert rate == pytest.approx(1e-3 * updates / 400, rel=0.06)  # two digits are shown
    assert ppo(tmp_path, f"models.critic.optim.lr_warmup_steps={updates}") == ()


def test_a_stream_of_rows_that_nobody_takes_is_said(tmp_path: Path) -> None:
    chunks = "rollout.chunks=4"
    text = f"{chunks} does nothing: no call takes generated rows on ranks that do not generate"
    assert ppo(tmp_path, chunks) == ppo(tmp_path, chunks, "placement.strategy=interleave", size=2) == (text,)
    assert ppo(tmp_path, chunks, "placement.strategy=split", size=2) == ()


def test_ranks_for_a_call_that_nobody_makes_are_said(tmp_path: Path) -> None:
    roles = "actor", "critic", "reference", "reward"
    pools = "placement.pools={a: [0], b: [1]}", *(f"models.{role}.pool=a" for role in roles)
    text = "models.critic.calls.evaluate does nothing: no step of ppo makes this call"
    assert ppo(tmp_path, *pools, "models.critic.calls.evaluate.pool=b", size=2) == (text,)
    assert ppo(tmp_path, *pools, "models.critic.calls.compute_values.pool=b", size=2) == ()
    validated = *pools, f"data.val_path={tasks.task() / 'train.jsonl'}", "run.test_freq=2"
    assert ppo(tmp_path, *validated, "models.critic.calls.evaluate.pool=b", size=2) == ()  # a validation's, it may be


@pytest.mark.parametrize(
    ("name", "key", "when"),
    [
        ("dpo", "sampling.n=2", "in training"),
        ("dpo", "val_sampling.top_p=0.5", "in validation"),
        ("dpo", "val_sampling.temperature=0.5", "in validation"),
        *((name, "sampling.temperature=0.5", "in training") for name in ("dpo", "kto", "orpo", "simpo", "reward_model", "sft")),
    ],
)
def test_settings_of_samples_that_nobody_draws_are_refused(name: str, key: str, when: str, tmp_path: Path) -> None:
    role = "reward" if name == "reward_model" else "actor"
    settings = [f"algorithm.name={name}", f"data.path={tmp_path}/none.jsonl", f"models.{role}.path={tasks.task() / 'actor'}"]
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}.*: {name} draws no samples {when}; leave \w+ out$"):
        prepare(None, [*settings, f"run.dir={tmp_path}", "run.test_freq=0", key], 1)


def test_null_takes_a_section_of_the_file_out(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {actor: {path: here}, critic: {path: there}}\nrun: {seed: 3}\n")
    assert sorted(load(TrainConfig, file).models) == ["actor", "critic"]
    config = load(TrainConfig, file, ["models.critic=null", "run=null"])
    assert (sorted(config.models), config.run.seed) == (["actor"], TrainConfig().run.seed)
    again = load(TrainConfig, file, ["models.critic=null", "models.critic.path=elsewhere"])
    assert again.models["critic"].path == "elsewhere"
    file.write_text("models: {actor: {}, critic: {path: '${models.actor.path}'}}\n")
    later = load(TrainConfig, file, ["models.critic.path=null", "models.actor.path=there"])  # the first needs not the second
    assert (later.models["critic"].path, later.models["actor"].path) == (None, "there")
    with pytest.raises(ValueError, match=r"models\.critic=null must be a mapping"):
        load(TrainConfig, {"models": {"critic": None}})
