"""What is said of keys that people write who come from other projects, or by heart."""

from __future__ import annotations

import pytest

from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.train import read_config
from rlhf_spmd.training.roles import describe_roles
from rlhf_spmd.workers import ActorWorker, ReferenceWorker, RewardWorker, RoleConfig


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("models.actor.lr", "models.actor.optim.lr"),
        ("models.critic.lr", "models.critic.optim.lr"),
        ("models.actor.weight_decay", "models.actor.optim.weight_decay"),
        ("models.actor.tp", "models.actor.generation.tp' or 'models.actor.layout.tp"),
        ("models.actor.zero", "models.actor.layout.zero"),
        ("models.actor.ep", "models.actor.generation.ep' or 'models.actor.layout.ep"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.ppo_micro_batch_size", "algorithm.ppo_micro_batch_size_per_gpu"),
        ("algorithm.mini_batch_size", "algorithm.ppo_mini_batch_size"),
        ("algorithm.entropy_coef", "algorithm.entropy_coeff"),
        ("sampling.temp", "sampling.temperature"),
        ("data.answer", "data.answer_key"),
        ("data.max_prompt_len", "data.max_prompt_length"),
        ("repetition_penalty", "sampling.repetition_penalty' or 'val_sampling.repetition_penalty"),
        ("run.eval_freq", "run.test_freq"),
        ("placement.stream", "placement.rollout_chunks"),
        ("models.actor.generation.engine", "models.actor.generation.reshard_method"),
        ("models.critic.generation.exact", "models.critic.generation.reuse_rollout_log_probs"),
    ],
)
def test_a_slip_of_ours_names_the_key(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(None, [f"{key}=1"])
    assert str(caught.value).startswith(f"unknown key '{key}'; did you mean '{meant}'? allowed here: ")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("data.batch_size", "here: data.train_batch_size"),
        ("batch_size", "here: data.train_batch_size"),
        ("sampling.num", "here: sampling.n"),
        ("sampling.max_tokens", "it is vLLM's; here: data.max_response_length of a run, "),
        ("tensor_parallel_size", "it is vLLM's; here: models.<role>.layout.tp of training, "),
        ("models.actor.generation.max_model_len", "it is vLLM's; here: data.max_prompt_length and data.max_response_length"),
        ("expert_parallel_size", "here: models.<role>.layout.ep of training, models.actor.generation.ep of generation"),
        ("expert_model_parallel_size", "here: models.<role>.layout.ep"),
        ("gpu_memory_utilization", "it is vLLM's; here: models.actor.generation.gpu_memory_utilization"),
        ("mask_truncated_completions", "it is TRL's; here: algorithm.mask_truncated_completions"),
        ("models.actor.grad_clip", "here: models.actor.optim.clip_grad"),
        ("models.actor.model_path", "here: models.actor.path"),
        ("model.path", "here: models.actor.path"),
        ("algorithm.cliprange", "here: algorithm.clip_ratio"),
        ("algorithm.gae_lambda", "here: algorithm.lam"),
        ("data.test_path", "here: data.val_path"),
        ("reward.path", "here: reward.function=FILE.py:NAME of a function, reward.model of a model"),
        ("algorithm.advantage_estimator", "it is OpenRLHF's; here: algorithm.name"),
        ("fsdp_size", "here: models.<role>.layout.zero_size, with layout.zero=3"),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            "it is verl's; here: models.actor.layout.zero_size, with layout.zero=3",
        ),
        ("models.actor.layout.data_parallel_shard_degree", "it is torchtitan's; here: models.<role>.layout.zero_size, with"),
        ("data_parallel_replicate_degree", "it is torchtitan's; here: models.<role>.layout.zero_size, which is dp over it"),
    ],
)
def test_a_word_of_others_is_translated(key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(None, [f"{key}=1"])
    assert str(caught.value).startswith(f"unknown key '{key}'; {said}")


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
