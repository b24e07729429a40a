"""Names: a file of the user's own may stand wherever a module's is asked for; keys from other projects or by heart are understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.plan import SearchConfig
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import read_config
from rlhf_spmd.training.roles import describe_roles
from rlhf_spmd.workers import ActorWorker, ReferenceWorker, RewardWorker, RoleConfig

MINE = '''
from dataclasses import dataclass
from rlhf_spmd.algorithms.base import AlgorithmConfig
@dataclass(frozen=True)
class Config(AlgorithmConfig): ...
class environment:
    def reset(self, row): ...
    def step(self, text): ...
def step(models, data, config, number): ...
def place(graph, cluster, roles): ...
def search(problem, limit, seed): ...
def score(response): return 0.0
def estimate(rewards): return rewards
def loss(log_prob): return log_prob
def tool(x: int) -> int:
    """Twice.

    Args:
        x: A number.
    """
    return 2 * x
'''


def check(section: object) -> None:
    check_tree(section, "section")


Use = Callable[[str], None]
# what takes the name, and what of the module is meant where it does not say; None: it must
FUNCTIONS: dict[str, tuple[Use, str | None]] = {
    "reward.function": (lambda name: check(RewardConfig(function=name)), "score"),
    "environment.cls": (lambda name: check(EnvironmentConfig(cls=name)), "environment"),
    "algorithm.adv_estimator": (lambda name: check(GroupAdvantageConfig(adv_estimator=name)), "estimate"),
    "algorithm.loss_mode": (lambda name: check(PolicyLossConfig(loss_mode=name)), "loss"),
    "tools": (lambda name: check(EnvironmentConfig(cls="tools", args={"tools": [name]})), None),
}
MODULES: dict[str, Use] = {
    "algorithm.name": lambda name: check(read_config(None, [f"algorithm.name={name}", "data.path=a"])),
    "placement.strategy": lambda name: check(PlacementConfig(strategy=name)),
    "plan.search": lambda name: check(SearchConfig(search=name)),
}
ALL = {key: use for key, (use, _) in FUNCTIONS.items()} | MODULES


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine.py", "18:30 mine.py"):
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "own" / name).write_text(MINE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", ALL)
def test_a_file_stands_for_a_module(key: str, tmp_path: Path) -> None:
    """One that is not there is one line with the nearest."""
    use, meant = FUNCTIONS.get(key, (ALL[key], ""))
    for file in ("own/mine.py", "./own/mine.py", "own/18:30 mine.py"):
        if meant is not None:
            use(file)
        if meant != "":
            use(f"{file}:{meant or 'tool'}")
    line = rf"'own/mien.py': the file does not exist in {tmp_path}; did you mean 'own/mine.py'[^\n]*\Z"
    with pytest.raises(ValueError, match=line):
        use("own/mien.py" + ("" if key in MODULES else ":tool"))


@pytest.mark.parametrize("key", MODULES)
def test_what_is_a_whole_module_takes_no_name_in_it(key: str) -> None:
    with pytest.raises(ValueError, match=r"'own/mine.py:step' stands for the whole module; leave :step out"):
        MODULES[key]("own/mine.py:step")
    with pytest.raises(ValueError, match=r"\(or your own module: its dotted name, or a file.py\)"):
        MODULES[key]("none_such")


# -- keys that people write who come from other projects, or by heart


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        # slips of ours
        ("models.actor.lr", "did you mean 'models.actor.optim.lr'? allowed here: "),
        ("models.actor.tp", "did you mean 'models.actor.generation.tp' or 'models.actor.layout.tp'? allowed here: "),
        ("models.actor.zero", "did you mean 'models.actor.layout.zero'?"),
        ("algorithm.kl_coef", "did you mean 'algorithm.kl_ctrl.kl_coef'?"),
        ("algorithm.ppo_micro_batch_size", "did you mean 'algorithm.ppo_micro_batch_size_per_gpu'?"),
        ("algorithm.entropy_coef", "did you mean 'algorithm.entropy_coeff'?"),
        ("sampling.temp", "did you mean 'sampling.temperature'?"),
        ("data.answer", "did you mean 'data.answer_key'?"),
        ("repetition_penalty", "did you mean 'sampling.repetition_penalty' or 'val_sampling.repetition_penalty'?"),
        ("run.eval_freq", "did you mean 'run.test_freq'?"),
        ("placement.stream", "did you mean 'placement.rollout_chunks'?"),
        ("models.actor.generation.engine", "did you mean 'models.actor.generation.reshard_method'?"),
        ("models.critic.generation.exact", "did you mean 'models.critic.generation.reuse_rollout_log_probs'?"),
        # words of others
        ("data.batch_size", "here: data.train_batch_size"),
        ("sampling.num", "here: sampling.n"),
        ("models.actor.grad_clip", "here: models.actor.optim.clip_grad"),
        ("model.path", "here: models.actor.path"),
        ("reward.path", "here: reward.function=FILE.py:NAME of a function, reward.model of a model"),
        ("trainer.total_epochs", "it is verl's; here: data.epochs, with run.steps=null"),
        ("trainer.nnodes", "it is verl's; here: torchrun's --nnodes"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "it is verl's; here: models.actor.layout.zero_size, with"),
        ("actor_rollout_ref.model.use_remove_padding", "it is verl's; not needed: rows are always packed"),
        ("actor_rollout_ref.model.what", "it is verl's; docs/migrating.md says what stands for it"),
        ("algorithm.num_generations", "it is TRL's; here: sampling.n"),
        ("optim", "it is TRL's; here: models.<role>.optim.name"),
        ("peft_config.use_rslora", "it is PEFT's; here: models.actor.lora.use_rslora"),
        ("n_samples_per_prompt", "it is OpenRLHF's; here: sampling.n"),
        ("num_processes", "it is accelerate's; here: --nproc-per-node"),
        ("tensor_parallel_size", "it is vLLM's; here: models.<role>.layout.tp of training, "),
        ("models.actor.generation.max_model_len", "it is vLLM's; here: data.max_prompt_length and data.max_response_length"),
        ("models.actor.layout.data_parallel_shard_degree", "it is torchtitan's; here: models.<role>.layout.zero_size, with"),
    ],
)
def test_the_key_that_is_meant_is_named(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_config(None, [f"{key}=1"])
    assert str(refusal.value).startswith(f"unknown key '{key}'; {hint}")


def test_a_word_of_others_that_is_ours_in_another_algorithm_is_not_translated_into_itself() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'algorithm.mask_truncated_completions'; allowed here: "):
        read_config(None, ["algorithm.name=dpo", "algorithm.mask_truncated_completions=true"])


@pytest.mark.parametrize(
    ("role", "exported", "meant"),
    [("actor", "reward", "reward"), ("ref", "actor", "reference"), ("policy", "actor", "actor"), ("rewrd", "actor", "reward")],
)
def test_a_role_that_there_is_not_names_the_one_that_is_meant(role: str, exported: str, meant: str) -> None:
    roles = {"reward": RewardWorker} if exported == "reward" else {"actor": ActorWorker, "reward": RewardWorker}
    if exported == "actor":
        roles |= {"reference": ReferenceWorker}
    with pytest.raises(ValueError, match=rf"^models\.{role}: this algorithm has no such role; did you mean '{meant}'\? its"):
        describe_roles({role: RoleConfig(path="x")}, roles, exported, {})
