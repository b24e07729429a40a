"""Names: a file of the user's own may stand wherever a module's is asked for; keys from other projects or by heart are understood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.foreign import foreign_hint
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.plan import SearchConfig
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.preflight.roles import describe_roles
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import read_config
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
        ("algorithm.entropy_coef", "it is TRL's; here: algorithm.entropy_coeff"),
        ("sampling.temp", "did you mean 'sampling.temperature'?"),
        ("data.answer", "did you mean 'data.answer_key'?"),
        ("repetition_penalty", "it is TRL's; here: sampling.repetition_penalty"),
        ("run.eval_freq", "did you mean 'run.test_freq'?"),
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


# -- TRL

# every field of the classes that trl grpo, rloo, dpo, kto, sft and reward read (1.16), each where it is first
TRL = """
TrainingArguments: output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to
run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node
save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config parallelism_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy
length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
local_rank
GRPOConfig: model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size
steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights
multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap
RLOOConfig: normalize_advantages reward_clip_range
DPOConfig: dataset_num_proc max_length truncation_mode padding_free precompute_ref_log_probs precompute_ref_batch_size
loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing use_weighting discopop_tau
activation_offloading pad_token
KTOConfig: desirable_weight undesirable_weight
SFTConfig: chat_template_path dataset_text_field dataset_kwargs eos_token packing packing_strategy eval_packing
completion_only_loss assistant_only_loss
RewardConfig: center_rewards_coefficient
ModelConfig: model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit
bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
ScriptArguments: dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
GRPOScriptArguments: reward_model_name_or_path reward_funcs
DatasetMixtureConfig: datasets streaming test_split_size
"""


def trl_fields() -> set[str]:
    """The names above, and those of TRL's own classes where it is installed."""
    words = set(TRL.split())
    classes = {word.rstrip(":") for word in words if word.endswith(":")}
    if find_spec("trl") is not None:
        trl = import_module("trl")
        words |= {field.name for name in classes if hasattr(trl, name) for field in fields(getattr(trl, name))}
    return {word for word in words if not word.endswith(":") and not word.startswith("_")}


def test_every_field_of_trl_is_refused_with_what_stands_for_it() -> None:
    assert len(trl_fields()) >= 250
    assert [name for name in sorted(trl_fields()) if foreign_hint([name], by_end=True) is None] == []
