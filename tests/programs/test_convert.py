"""rlhf-spmd convert: what it writes loads and means the same; what it leaves out is said."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from places import ROOT
from rlhf_spmd.config.load import flatten_yaml, to_yaml
from rlhf_spmd.convert import main
from rlhf_spmd.train import TrainConfig, read_config

SCRIPT = r"""
train=$PLACE/gsm8k/train.parquet
more="['$train', '$PLACE/math/train.parquet']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=ESTIMATOR \
    data.train_files="$more" data.val_files=$PLACE/gsm8k/test.parquet \
    data.train_batch_size=64 data.max_prompt_length=128 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=/models/small actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=4 \
    actor_rollout_ref.ref.fsdp_config.fsdp_size=8 critic.model.fsdp_config.fsdp_size=-1 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.top_k=-1 \
    critic.model.path=/models/critic \
    trainer.logger='["console"]' trainer.experiment_name=mine trainer.nnodes=2 trainer.n_gpus_per_node=4 \
    trainer.total_epochs=3 trainer.save_freq=-1 trainer.test_freq=5 MORE $@
""".replace("$PLACE", "/data")


def run_program(*arguments: str) -> tuple[int, str, str]:
    """The program in this process: exit code, standard output and standard error."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(arguments)
    return code, output.getvalue(), errors.getvalue()


def convert(tmp_path: Path, text: str, name: str = "run.sh") -> tuple[TrainConfig, str, str]:
    """Of a script or a YAML: the configuration that the result means, the result, and what was said."""
    (tmp_path / name).write_text(text)
    code, result, errors = run_program(str(tmp_path / name))
    assert code == 0, errors
    (tmp_path / "converted.yaml").write_text(result)
    return read_config(str(tmp_path / "converted.yaml"), [])[0], result, errors


def convert_script(tmp_path: Path, estimator: str, settings: str) -> tuple[TrainConfig, str, str]:
    return convert(tmp_path, SCRIPT.replace("ESTIMATOR", estimator).replace("MORE", settings))


def test_a_script_with_a_critic(tmp_path: Path) -> None:
    config, result, _ = convert_script(tmp_path, "gae", "")
    assert result.startswith("# torchrun --nnodes 2 --nproc-per-node 4 -m rlhf_spmd.train")
    assert config.algorithm.name == "ppo" and not config.algorithm.kl.use_kl_in_reward, "verl's default, not this project's"
    assert config.data.path == ["/data/gsm8k/train.parquet", "/data/math/train.parquet"]
    assert (config.data.val_path, config.data.epochs, config.run.steps) == ("/data/gsm8k/test.parquet", 3, None)
    assert config.run.keep_checkpoints is None, "verl keeps all"
    assert (config.run.save_freq, config.run.test_freq, config.logger.wandb, config.logger.trackers) == (0, 5, "disabled", [])
    actor, critic = config.models["actor"], config.models["critic"]
    assert (actor.path, actor.optim.lr, actor.optim.offload, actor.layout.zero) == ("/models/small", 2e-6, True, 3)
    assert (actor.layout.zero_size, critic.layout.zero_size) == (4, None), "all 8 ranks are no part"
    assert "reference:" not in result
    assert (actor.generation.tp, actor.activation_checkpointing) == (2, "full")
    assert (critic.path, critic.optim.lr) == ("/models/critic", 1e-5)
    assert (config.sampling.n, config.val_sampling.temperature, config.reward.function) == (5, 0, "auto")
    assert (config.algorithm.use_dynamic_bsz, config.algorithm.ppo_micro_batch_size_per_gpu) == (False, 4)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_scripts_without_one(tmp_path: Path, estimator: str) -> None:
    """A reference comes with a KL loss, but for adapters, without which the actor is the reference: the base, also where
    training begins with an adapter."""
    for settings, roles in (
        ("", {"actor"}),
        (KL, {"actor", "reference"}),
        (f"{KL} actor_rollout_ref.model.lora_rank=8", {"actor"}),
        (f"{KL} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_adapter_path=/a", {"actor", "reference"}),
    ):
        config, _, _ = convert_script(tmp_path, estimator, settings if estimator == "grpo" else "")
        assert config.algorithm.name == estimator
        assert set(config.models) == (roles if estimator == "grpo" else {"actor"})


KL = "actor_rollout_ref.actor.use_kl_loss=True"
LOSS = "distillation.distillation_loss"
DISTILLATION = (
    f"{LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True {LOSS}.use_task_rewards=False {LOSS}.loss_max_clamp=10.0 "
    "distillation.enabled=True +distillation.teacher_models.one.model_path=/models/teacher"
)
CORRECTION = "algorithm.rollout_correction.rollout_rs"
# a paragraph for a script: its estimator and more settings; then what they become, what is said and what is not said
CASES = """
grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo
becomes algorithm.name: gspo

grpo actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.actor.no_such_key=1
becomes models.actor.lora.rank: 8
says actor_rollout_ref.actor.no_such_key: left out, not known
says use_remove_padding: left out, rows are always packed
not trainer.nnodes

opo algorithm.filter_groups.enable=True
becomes algorithm.name: dapo
says algorithm.adv_estimator: left out, dapo has advantages of its own

grpo algorithm.filter_groups.enable=False algorithm.filter_groups.metric=acc
becomes algorithm.name: grpo
says algorithm.filter_groups.metric: left out, grpo has no such setting

grpo trainer.logger=[console,swanlab,vemlp_wandb,tensorboard] trainer.resume_mode=maybe
becomes logger.wandb: disabled, logger.trackers: [tensorboard], run.resume: auto
says trainer.logger=swanlab,vemlp_wandb: left out, there is wandb, tensorboard
says trainer.resume_mode: left out, maybe is not known

rloo algorithm.use_kl_in_reward=True
becomes algorithm.loss_agg_mode: token-mean, algorithm.use_kl_in_reward: true, algorithm.kl_ctrl.kl_coef: 0.001

grpo reward.custom_reward_function.path=OWN +reward.custom_reward_function.reward_kwargs.scale=2 reward.reward_manager.name=dapo \
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=32
becomes reward.function: OWN:compute_score, reward.kwargs.scale: 2, algorithm.name: dapo, algorithm.overlong_buffer.len: 32
says reward_model.reward_manager: left out, reward.function scores each response
not custom_reward_function

grpo actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.ref.ulysses_sequence_parallel_size=2 \
    reward_model.reward_manager=dapo actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 trainer.max_actor_ckpt_to_keep=null
becomes run.keep_checkpoints: null, models.actor.layout.zero_size: null
says actor_rollout_ref.ref.fsdp_config.param_offload: left out, grpo has no reference with these settings
says actor_rollout_ref.ref.ulysses_sequence_parallel_size: left out, grpo has no reference with these settings
says reward_model.reward_manager: left out, reward.function scores each response; dapo's shaping
says actor_rollout_ref.actor.fsdp_config.fsdp_size: left out, -1 is all ranks, as here without it

grpo actor_rollout_ref.rollout.do_sample=False trainer.max_actor_ckpt_to_keep=1
becomes run.keep_checkpoints: 2
says actor_rollout_ref.rollout.do_sample: left out, here: sampling.temperature
says trainer.max_actor_ckpt_to_keep: left out, the one before the newest is kept too

gae reward.reward_model.enable=True reward.reward_model.model_path=/rm critic.optim.optimizer=muon
becomes reward.model: /rm, models.critic.optim.name: muon

gae critic.optim.optimizer=Sophia actor_rollout_ref.actor.optim.optimizer=AdamW8bit
becomes models.critic.optim.name: adamw, models.actor.optim.name: adamw_8bit
says critic.optim.optimizer: left out, there is no Sophia; adamw takes its place

grpo model_engine=veomni actor_rollout_ref.actor.veomni.param_offload=True actor_rollout_ref.actor.optim.lr_decay_style=cosine \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
becomes models.actor.offload: true, models.actor.optim.offload: true, models.actor.optim.lr_scheduler_type: cosine
says model_engine: left out, it chooses among verl's defaults

grpo model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.ref.megatron.optimizer_offload=True
becomes models.actor.layout.zero: 0, models.actor.generation.tp: 2
says optimizer_offload: left out, a reference is not trained
not layout.zero=3 shards

grpo model_engine=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
becomes models.actor.layout.zero: 3
says actor_rollout_ref.actor.megatron: left out, layout.zero=3 shards the weights

grpo EXPERTS actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
becomes models.actor.layout.ep: 4, models.reference.layout.ep: 2
says expert_tensor_parallel_size: left out, layout.tp splits each expert

grpo ROLLOUT.expert_parallel_size=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4
becomes models.actor.generation.ep: 4, models.actor.generation.tp: 4, models.actor.layout.zero: 0
says expert_parallel_size: left out, the 4 ranks of generation.tp share them
not generation shares experts

grpo ROLLOUT.expert_parallel_size=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1
becomes models.actor.generation.ep: 1, models.actor.layout.zero: 0
says expert_parallel_size: left out, generation shares experts among the ranks

grpo actor_rollout_ref.actor.megatron.router_replay.mode=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01
becomes models.actor.router_replay: R3
says moe_aux_loss_coeff: left out, models.<role>.router_aux_loss_coef is theirs times layers
not rollout_routing_replay

grpo actor_rollout_ref.actor.megatron.router_replay.mode=R4
becomes models.actor.router_replay: disabled
says actor_rollout_ref.actor.megatron.router_replay.mode: left out, there is no R4; models.actor.router_replay has R2

grpo CORRECTION=token_k1 CORRECTION_threshold=0.5_4.0
becomes CORRECTION_threshold: 2.0, CORRECTION_threshold_lower: 0.25

grpo +data.apply_chat_template_kwargs.enable_thinking=False +data.apply_chat_template_kwargs.effort=high
becomes data.chat_template_kwargs.enable_thinking: false, data.chat_template_kwargs.effort: high
not apply_chat

grpo data.filter_overlong_prompts=False data.truncation=left
becomes data.filter_overlong_prompts: false, data.truncation: left

grpo data.truncation=left
becomes data.filter_overlong_prompts: true, data.truncation: error
says data.truncation: left out, does nothing without data.filter_overlong_prompts=false

grpo data.filter_overlong_prompts=False data.truncation=middle
becomes data.filter_overlong_prompts: false, data.truncation: error
says data.truncation: left out, there is no middle; a longer prompt is an error

grpo DISTILLATION
becomes algorithm.name: distill, algorithm.gamma: 0.0, models.teacher.path: /models/teacher
says algorithm.adv_estimator: left out, distill has advantages of its own
says loss_max_clamp: left out, the teacher is a role, models.teacher, and nothing is clamped
"""
WORDS = {
    "DISTILLATION": DISTILLATION,
    "CORRECTION": CORRECTION,
    "ROLLOUT": "model_engine=megatron actor_rollout_ref.rollout.data_parallel_size=2 actor_rollout_ref.rollout",
    "EXPERTS": f"model_engine=megatron {KL} actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 actor_rollout_ref.ref.megatron.expert_model_parallel_size=2",
}


@pytest.mark.parametrize("case", CASES.replace("\\\n   ", "").strip().split("\n\n"))
def test_settings_mean_the_same(tmp_path: Path, case: str) -> None:
    (tmp_path / "own.py").write_text("def compute_score(solution_str, scale=1):\n    return 1.0\n")
    for word, text in {"OWN": f"{tmp_path}/own.py", **WORDS}.items():
        case = case.replace(word, text)
    script, *lines = case.splitlines()
    estimator, _, settings = script.partition(" ")
    check_meaning(*convert_script(tmp_path, estimator, settings)[::2], lines)


def check_meaning(config: TrainConfig, errors: str, lines: list[str]) -> None:
    """Lines begin with becomes, says or not."""
    values = {key: yaml.safe_load(value) for key, value in flatten_yaml(to_yaml(config)).items()}
    for line in lines:
        kind, _, text = line.partition(" ")
        if kind == "becomes":
            expected = yaml.safe_load(f"{{{text}}}")
            assert {key: values[key] for key in expected} == expected
        else:
            assert (text in errors) == (kind == "says"), errors


BROKEN = [
    ("run.sh", SCRIPT.replace("ESTIMATOR", "gpg"), "a.b=1", "algorithm.adv_estimator=gpg"),
    ("run.sh", SCRIPT, "trainer.nnodes=two", "trainer.nnodes=two must be a number"),
    ("run.sh", SCRIPT, "data.seed", "'data.seed' is no override; give key=value"),
    ("run.sh", SCRIPT, f"{DISTILLATION} {LOSS}.loss_mode=k3", "a student learns by the policy gradient of k1"),
    ("run.sh", SCRIPT, f"{DISTILLATION} {LOSS}.use_policy_gradient=False", "loss_mode=k1 with use_policy_gradient=false"),
    ("run.sh", SCRIPT, f"{DISTILLATION} {LOSS}.use_task_rewards=True", "here a student learns from its teacher alone"),
    ("run.sh", SCRIPT, f"{DISTILLATION} +distillation.teacher_models.two.model_path=/t", "there are 2; here is one"),
    ("run.sh", SCRIPT, f"{CORRECTION}=token_k1,seq_max_k2 {CORRECTION}_threshold=0.6_1.6,2", "here one kind"),
    ("run.sh", SCRIPT, f"{CORRECTION}=token_k1 {CORRECTION}_threshold=a_b", "must be a number, or two"),
    ("run.sh", SCRIPT, f"{CORRECTION}=token_k1 {CORRECTION}_threshold=0.0_2.0", "threshold=0.0_2.0 must be a number, or two"),
    ("run.sh", SCRIPT, f"{CORRECTION}=seq_mean_k3 {CORRECTION}_threshold=0.5_2.0", "two bounds are for _k1"),
    ("run.sh", "python3 -m other.program a.b=1\n", "data.seed=1", "run.sh"),
    ("a.yaml", "data: {seed: 1}", "data.seed", "'data.seed' is no override; give key=value"),
    ("a.yaml", "", "data.seed=1", "must hold settings of verl or TRL (key: value), and is empty"),
    ("a.yaml", "- data\n- trainer", "data.seed=1", "a.yaml' must hold a mapping (key: value), not a list"),
    ("a.yaml", "data: {seed: 1", "data.seed=1", "a.yaml':1 is not valid YAML"),
    ("run.sh", SCRIPT, "data.val_max_samples=[]", "data.val_max_samples=[] must be a number"),
    ("run.sh", SCRIPT, "actor_rollout_ref.actor.veomni.fsdp_size=abc", "veomni.fsdp_size=abc must be a number"),
    ("a.yaml", "num_generations: 0", "max_steps=3", "num_generations=0 must be above 0"),
    ("a.yaml", "trainer: grpo", "num_iterations=0", "num_iterations=0 must be above 0"),
    ("a.yaml", "num_generations: 4", "reward_funcs=[5]", "reward_funcs=[5] must be a list of names"),
    ("a.yaml", "trainer: {test_freq: often}", "data.seed=1", "trainer.test_freq=often must be a number"),
    ("a.yaml", "algorithm: {adv_estimator: [grpo]}", "data.seed=1", "algorithm.adv_estimator=['grpo']"),
    ("a.yaml", "zero_stage: 3", "pretrain=here", "has no key of verl or TRL; zero_stage is OpenRLHF's; docs/migrating.md"),
    ("a.yaml", "learning_rate: 1e-6", "output_dir=here", "no key tells which of TRL's trainers this is for: say trainer=dpo"),
    ("a.yaml", "learning_rate: 1e-6", "trainer=ppo", "trainer=ppo: of TRL's trainers grpo, rloo, dpo, kto, sft, reward can be"),
    (
        "a.yaml",
        "num_generations: 6",
        "max_steps=3",
        "= 8 completions of an optimizer step: must be a multiple of num_generations=6",
    ),
    ("a.yaml", "loss_type: vespo", "trainer=grpo", "loss_type=vespo: of GRPO's losses here are grpo, bnpo, dapo"),
    ("a.yaml", "loss_type: [sigmoid, sft]", "trainer=dpo", "loss_type=['sigmoid', 'sft']: of DPO's losses here are"),
    ("a.yaml", "max_steps: many", "trainer=sft", "max_steps=many must be a number"),
    ("a.yaml", "reward_funcs: mine", "max_steps=3", "reward_funcs=mine and reward_weights=[] must be lists"),
    ("a.yaml", "datasets: [a, b]", "trainer=sft", "datasets=['a', 'b'] must be a list of mappings, each with a path"),
    ("a.yaml", "truncation_mode: middle", "trainer=sft", "truncation_mode=middle must be keep_start or keep_end"),
    ("a.yaml", "reward_funcs: [mine]", "max_steps=3", "reward_funcs: 'mine' is none of accuracy_reward, "),
    ("a.yaml", "reward_funcs: [Qwen/RM-0.5B]", "max_steps=3", "reward_funcs: 'Qwen/RM-0.5B' is none of accuracy_reward, "),
    (
        "a.py",
        "GRPOConfig(learning_rate=1e-6)",
        "max_steps=3",
        "a.py: a Python script is not read, it computes its settings; give",
    ),
    ("a.yaml", "data: {train_batch_size: 8}", "models.actor.path=/m", "is a configuration of rlhf_spmd already: models.actor"),
    ("a.yaml", "mode: fast", "deep=1", "a.yaml: has no key of verl or TRL; docs/migrating.md"),
]


@pytest.mark.parametrize(("name", "text", "overrides", "message"), BROKEN)
def test_what_cannot_be_converted_is_one_line(tmp_path: Path, name: str, text: str, overrides: str, message: str) -> None:
    (tmp_path / name).write_text(text.replace("ESTIMATOR", "grpo").replace("MORE", ""))
    code, result, errors = run_program(str(tmp_path / name), *overrides.split())
    *lines, last = errors.splitlines()
    assert code == 2 and not result and message in last and not any("convert" in line for line in lines)


# a paragraph for a YAML of TRL's: the keys beside the model and the data; then as above
OF_TRL = """
trainer: grpo, num_processes: 2, gradient_accumulation_steps: 4, beta: 0.04, max_steps: 30, eval_strategy: steps
becomes algorithm.name: grpo, sampling.n: 8, data.train_batch_size: 8, algorithm.ppo_mini_batch_size: 8, run.steps: 30, run.seed: 42
becomes algorithm.loss_agg_mode: token-mean, algorithm.use_kl_loss: true, algorithm.kl_loss_coef: 0.04, algorithm.clip_ratio_c: 1.0e+6
becomes models.actor.optim.weight_decay: 0.0, models.actor.optim.lr_scheduler_type: linear, data.val_split: test, run.test_freq: 10
becomes val_sampling.n: 8, run.save_freq: 500, run.keep_checkpoints: null, models.actor.lora.rank: 0, logger.wandb: disabled
says max_prompt_length: not given, so longer prompts than data.max_prompt_length=512 are dropped
not num_processes

num_generations: 4, generation_batch_size: 32, num_iterations: 2, max_steps: 30, save_steps: 16, epsilon_high: 0.28, scale_rewards: none
becomes data.train_batch_size: 8, algorithm.ppo_mini_batch_size: 2, algorithm.ppo_epochs: 2, run.steps: 4, run.save_freq: 2
becomes algorithm.clip_ratio_low: 0.2, algorithm.clip_ratio_high: 0.28, algorithm.norm_adv_by_std_in_grpo: false
says trainer: not given, so grpo is taken, by num_generations; for another add trainer=NAME
says num_processes: not given, so 1 is taken: TRL's batch sizes are of one process

num_generations: 4, reward_funcs: [accuracy_reward, reward_functions.trl], reward_weights: [1, 0.5], loss_type: cispo, epsilon_high: 5.0
becomes rewards.accuracy_reward.function: math, rewards.trl.function: "reward_functions:trl", rewards.trl.weight: 0.5
becomes data.answer_key: solution, algorithm.loss_mode: cispo, algorithm.clip_ratio_high: 4.0, algorithm.clip_ratio_low: 1.0

num_generations: 4, importance_sampling_level: sequence, delta: 2.0, sapo_temperature_neg: 1.1, use_vllm: true, hub_token: x, new_key: 1
becomes algorithm.loss_mode: gspo, algorithm.loss_agg_mode: seq-mean-token-mean
says loss_type: left out, dapo; with ratios of whole responses the loss is their mean
says sapo_temperature_neg: left out, loss_mode=gspo does not read it
says delta: left out, loss_mode=gspo does not read it
says use_vllm: left out, there is one generator, of the training weights
says hub_token: left out, nothing is uploaded
says new_key: left out, not known: look it up

trainer: rloo, num_generations: 4, generation_kwargs: {presence_penalty: 0.5, foo: 1}, chat_template_kwargs: {enable_thinking: false}
becomes algorithm.name: rloo, algorithm.use_kl_in_reward: true, algorithm.kl_ctrl.kl_coef: 0.05, sampling.presence_penalty: 0.5
becomes algorithm.loss_agg_mode: seq-mean-token-sum, data.chat_template_kwargs.enable_thinking: false
says generation_kwargs.foo: left out, here: the keys of sampling

trainer: dpo, loss_type: ipo, use_peft: true, lora_r: 4, lora_target_modules: [q_proj], gradient_checkpointing: true, report_to: wandb
becomes algorithm.loss_type: ipo, algorithm.length_normalized: true, models.actor.lora.rank: 4, models.actor.lora.alpha: 32
becomes models.actor.lora.target_modules: [q_proj], models.actor.activation_checkpointing: full, logger.wandb: online
becomes data.train_batch_size: 8, data.epochs: 3, data.max_length: 1024, models.actor.optim.lr: 1e-06
says truncation_mode: left out, longer rows than data.max_length are dropped

trainer: kto, desirable_weight: 1.5, bf16: true, save_total_limit: 1, save_strategy: epoch, lora_r: 8, warmup_steps: 0.1
becomes algorithm.desirable_weight: 1.5, models.actor.dtype: bfloat16, run.keep_checkpoints: 2, run.save_freq: 0
becomes models.actor.optim.lr_warmup_steps_ratio: 0.1, models.actor.lora.rank: 0
says save_strategy: left out, epoch; here run.save_freq is a number of steps
says save_total_limit: left out, the one before the newest is kept too
says lora_r: left out, use_peft is false

packing: true, max_length: null, optim: adamw_bnb_8bit, adam_beta2: 0.95, lr_scheduler_type: cosine, warmup_ratio: 0.1
becomes algorithm.name: sft, data.max_length: 1000000, data.truncation: right, data.filter_overlong: false, models.actor.optim.lr: 2e-05
becomes models.actor.optim.name: adamw_8bit, models.actor.optim.betas: [0.9, 0.95], models.actor.optim.lr_warmup_steps_ratio: 0.1
says packing: left out, rows are always packed
says assistant_only_loss: not given, so TRL learns all turns of a conversation

trainer: sft, datasets: [{path: a, split: train}, {path: b, split: train, columns: [text]}], learning_rate: 1e-6
becomes data.path: [a, b], data.split: train, models.actor.optim.lr: 1e-06
says datasets.columns: left out, write such rows into a file

trainer: reward, center_rewards_coefficient: 0.01, learning_rate: 1.0e-5, label_smoothing: 0.1
becomes algorithm.name: reward_model, models.reward.path: /m, models.reward.optim.lr: 1e-05, algorithm.center_rewards_coefficient: 0.01
says label_smoothing: left out, reward_model has no such setting
"""


@pytest.mark.parametrize("case", OF_TRL.strip().split("\n\n"))
def test_settings_of_trl_mean_the_same(tmp_path: Path, case: str) -> None:
    keys, *lines = case.splitlines()
    text = f"{{model_name_or_path: /m, dataset_name: /d, {keys}}}"
    check_meaning(*convert(tmp_path, text, "trl.yaml")[::2], lines)


OF_VERL = "model_engine: megatron, actor_rollout_ref: {model: {path: /m}, actor: {megatron: {expert_tensor_parallel_size: 1}}}"
BASES = {  # settings, and keys that are computed with or looked up
    "trainer: grpo, num_generations: 4, per_device_train_batch_size: 8": "num_generations num_iterations num_processes trainer",
    "trainer: sft, model_name_or_path: /m": "per_device_train_batch_size save_total_limit warmup_steps truncation_mode num_iterations",
    OF_VERL: "trainer.nnodes trainer.save_freq trainer.resume_mode data.val_max_samples algorithm.filter_groups.metric "
    "actor_rollout_ref.actor.veomni.fsdp_size actor_rollout_ref.actor.megatron.tensor_model_parallel_size "
    "actor_rollout_ref.actor.policy_loss.loss_mode trainer.max_actor_ckpt_to_keep actor_rollout_ref.actor.engine.etp",
    "model: {path: /m}, optim: {lr: 1e-4, min_lr: 1e-5}, data: {train_files: /d}": "trainer.nnodes trainer.n_gpus_per_node optim.lr "
    "trainer.test_freq optim.min_lr data.prompt_key data.prompt_dict_keys engine.etp engine.fsdp_size "
    "trainer.max_ckpt_to_keep data.train_max_samples",
}


@pytest.mark.parametrize(("settings", "key"), [(settings, key) for settings, keys in BASES.items() for key in keys.split()])
def test_any_value_converts_or_is_refused_by_its_key(tmp_path: Path, settings: str, key: str) -> None:
    (tmp_path / "their.yaml").write_text(f"{{{settings}}}")
    for value in ("x", "[]", "0", "-1", "{}", ".inf", "${oc.env:NOWHERE_SET,8}"):
        code, _, errors = run_program(str(tmp_path / "their.yaml"), f"{key}={value}")
        assert code == 0 or (code == 2 and errors.startswith("config error: ") and key in errors), errors
    number, quoted = (run_program(str(tmp_path / "their.yaml"), f"{key}={value}") for value in ("2", "'2'"))
    assert number == quoted


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("model_name_or_path: /m, dataset_name: /d, trainer: dpo", "save_total_limit: LIMIT"),
        ("actor_rollout_ref: {model: {path: /m}}, data: {train_files: /d}", "trainer: {max_actor_ckpt_to_keep: LIMIT}"),
        ("model: {path: /m}, data: {train_files: /d}", "trainer: {max_ckpt_to_keep: LIMIT}"),
    ],
)
def test_no_limit_keeps_all_checkpoints(tmp_path: Path, settings: str, key: str, limit: int) -> None:
    config, _, errors = convert(tmp_path, f"{{{settings}, {key.replace('LIMIT', str(limit))}}}", "their.yaml")
    assert config.run.keep_checkpoints is None and "to_keep" not in errors and "save_total_limit" not in errors


@pytest.mark.parametrize("word", ["none", "None", "null", "7"])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("num_generations: 4, KEY", "scale_rewards"),
        ("num_generations: 4, KEY", "report_to"),
        ("trainer: sft, KEY", "max_length"),
        ("trainer: dpo, KEY", "save_strategy"),
        ("trainer: {nnodes: 1, KEY}", "trainer.logger"),
        ("trainer: {nnodes: 1, KEY}", "trainer.resume_mode"),
        ("model: {path: /m}, data: {train_files: /d, KEY}", "data.truncation"),
    ],
)
def test_an_override_means_what_it_means_in_a_file(tmp_path: Path, settings: str, key: str, word: str) -> None:
    """Also a word that other languages have for nothing."""
    path, results = tmp_path / "their.yaml", list[Any]()
    for inside, overrides in ((f"{key.rpartition('.')[2]}: {word}", []), ("", [f"{key}={word}"])):
        path.write_text(f"{{{settings.replace('KEY', inside)}}}")
        results.append(run_program(str(path), *overrides))
    assert results[0] == results[1]


@pytest.mark.parametrize("word", ["none", "None", "null"])
@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ("num_generations: 4, per_device_train_batch_size: 8", "scale_rewards", "norm_adv_by_std_in_grpo: false"),
        ("num_generations: 4", "report_to", "wandb: disabled"),
        ("trainer: {nnodes: 1}", "trainer.logger", "wandb: disabled"),
        ("trainer: sft", "max_length", "max_length: 1000000"),
    ],
)
def test_no_word_for_nothing_is_lost(tmp_path: Path, settings: str, key: str, expected: str, word: str) -> None:
    """It has its effect, or is refused or left out by its name."""
    (tmp_path / "their.yaml").write_text(f"{{{settings}}}")
    _, result, errors = run_program(str(tmp_path / "their.yaml"), f"{key}={word}")
    assert expected in result or f"{key}=None must be" in errors


# -- scripts


def test_bash_expands_the_script_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic, tests and quotes are no redirections. Values of the environment stay references."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setenv("MY_API_KEY", "hunter2")
    text = """max=$((1024 * 2)); name='a>b'
export OUT=${NOWHERE_SET:-/tmp/here}
DATA=(
  data.train_files=[/d/a.parquet,/d/b.parquet]
  data.max_prompt_length=${max}
)
LAUNCH=(torchrun --nnodes 1)
if [ "$max" -gt 2000 ]; then steps=7; else steps=8; fi
if (( max > 4000 )); then size=2048; else size=512; fi
if [[ $max > 3000 ]]; then seed=1; else seed=2; fi  # > what
ray status || exit 1
echo "$max" > LOG.txt
"${LAUNCH[@]}" -m recipe.dapo.main_dapo "${DATA[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    trainer.total_training_steps=$steps trainer.experiment_name="$name" trainer.project_name=$(basename /a/mine.sh .sh) \\
    actor_rollout_ref.model.path=$MODEL trainer.default_local_dir=$OUT algorithm.filter_groups.enable=True \\
    data.train_batch_size=$size data.seed=$seed custom_reward_function.reward_kwargs.key=$MY_API_KEY \\
    algorithm.filter_groups.metric=acc 2>&1 | tee log
"""
    (tmp_path / "run.sh").write_text(text)
    _, result, errors = run_program("run.sh")
    assert "path: ${oc.env:MODEL}" in result and "takes them from the environment: MODEL" in errors
    assert "${oc.env:MY_API_KEY}" in result and "hunter2" not in result + errors
    assert "not run, so what they do or answer is missing: ray\n" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]
    monkeypatch.setenv("MODEL", "/m")
    config, _, _ = convert(tmp_path, text.replace("custom_reward_function.reward_kwargs.key=$MY_API_KEY", ""))
    data, run = config.data, config.run
    assert config.algorithm.name == "dapo" and data.path == ["/d/a.parquet", "/d/b.parquet"]
    assert (data.max_prompt_length, data.train_batch_size, data.seed) == (2048, 512, 2)
    assert (run.dir, config.models["actor"].path) == ("/tmp/here", "/m")
    assert (run.steps, run.name, config.logger.project) == (7, "a>b", "mine")


def test_dapo_is_what_the_script_turns_on(tmp_path: Path) -> None:
    """Also where it turns filtering off; what does nothing as the script has it is left out and said."""
    keys = ("filter_groups", "overlong_buffer")
    script = """on=FILTER
python3 -m recipe.dapo.main_dapo data.train_files=/d.parquet algorithm.adv_estimator=grpo algorithm.filter_groups.enable=$on \\
    actor_rollout_ref.model.path=/m reward_model.overlong_buffer.enable=OVERLONG reward_model.overlong_buffer.penalty_factor=0.7 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 algorithm.kl_ctrl.kl_coef=0.0 data.seed=3 \\
    data.shuffle=False
"""
    for filtering, overlong in ((False, True), (True, False), (False, False)):
        text = script.replace("FILTER", str(filtering)).replace("OVERLONG", str(overlong))
        config, result, errors = convert(tmp_path, text)
        assert config.algorithm.name == ("dapo" if filtering or overlong else "grpo")
        if config.algorithm.name == "dapo":
            assert [getattr(config.algorithm, key).enable for key in keys] == [filtering, overlong]
        assert "kl_loss_coef: left out, does nothing without algorithm.use_kl_loss" in errors and "kl_coef" not in result
        assert "data.seed: left out, does nothing without data.shuffle" in errors
        assert ("penalty_factor: left out" in errors) != overlong


def test_a_script_that_trains_by_examples(tmp_path: Path) -> None:
    text = """if [ "$#" -lt 2 ]; then echo usage; exit 1; fi
torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer data.train_files=/d.parquet data.val_files=/v.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.micro_batch_size_per_gpu=4 engine.fsdp_size=2 model.partial_pretrain=/m model.lora_rank=8 optim.lr=1e-4 \\
    trainer.total_epochs=2 trainer.default_local_dir=/out trainer.logger=console trainer.no_such=1 \\
    use_remove_padding=true trainer.test_freq=-1 optim=fsdp trainer.nnodes=1
"""
    config, _, errors = convert(tmp_path, text)
    assert config.algorithm.name == "sft" and set(config.models) == {"actor"}
    data, actor = config.data, config.models["actor"]
    assert (data.prompt_key, data.response_key, data.apply_chat_template) == ("extra_info.question", "extra_info.answer", True)
    assert (data.path, data.val_path, data.epochs, data.train_batch_size) == ("/d.parquet", "/v.parquet", 2, 256)
    assert (actor.path, actor.lora.rank, actor.optim.lr, actor.layout.zero) == ("/m", 8, 1e-4, 3)
    assert actor.layout.zero_size == 2
    assert (config.run.dir, config.run.test_freq, config.logger.wandb) == ("/out", 0, "disabled")
    assert "trainer.no_such: left out, not known" in errors and "nnodes" not in errors and "rows are always packed" in errors
    _, result, _ = convert(tmp_path, text.replace("data.prompt_key=extra_info", "data.multiturn.enable=true"))
    assert "prompt_key: messages" in result and "response_key" not in result


def test_what_a_script_demands_is_a_reference(tmp_path: Path) -> None:
    """Whatever words it demands it with; a brace and a list are read though they are quoted for Hydra."""
    (tmp_path / "run.sh").write_text(
        "MODEL=${MODEL_DIR:?say where the model is}\nPLAN='{layers.\\{*\\}:{}}'\n"
        "OPTIONS=\"model.path=$MODEL optim.betas='[0.9,0.99]' +model.recompute=$PLAN optim.lr=1e-4 optim.min_lr=1e-5\"\n"
        "torchrun -m verl.trainer.sft_trainer data.train_files=/d.parquet $OPTIONS trainer.save_freq=after_each_epoch "
        "trainer.max_ckpt_to_keep=1\n"
    )
    code, result, errors = run_program(str(tmp_path / "run.sh"))
    assert code == 0 and "path: ${oc.env:MODEL_DIR}" in result and "MODEL_DIR" in errors
    (tmp_path / "converted.yaml").write_text(result.replace("${oc.env:MODEL_DIR}", "/m"))
    config, _ = read_config(str(tmp_path / "converted.yaml"), [])
    optim = config.models["actor"].optim
    assert (list(optim.betas), optim.min_lr_ratio, config.run.keep_checkpoints) == ([0.9, 0.99], pytest.approx(0.1), 2)
    assert "trainer.save_freq: left out, 'after_each_epoch'; here it is a number of steps" in errors


# -- YAML


def test_text_of_a_yaml_stays_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML 1.1 has 750 for 12:30 and 202401 for 2024_01; a switch is what verl reads. References stay."""
    monkeypatch.setenv("MODEL_SECRET", "hidden")
    config, result, _ = convert(
        tmp_path,
        "algorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref: {model: {path: '/m/${oc.env:MODEL_SECRET}'}, actor: {use_kl_loss: yes, optim: {lr: 1e-6}}}\n"
        "data: {seed: 3, train_batch_size: '${oc.env:BATCH,64}', train_files: /d, apply_chat_template_kwargs: {x: false}}\n"
        "trainer: {experiment_name: 12:30, project_name: 2024_01, default_local_dir: 'runs/${data.seed}x', nnodes: 3}\n",
        "verl.yaml",
    )
    assert (config.run.name, config.logger.project, config.run.dir) == ("12:30", "2024_01", str(Path("runs/3x").absolute()))
    assert config.algorithm.kl.use_kl_loss is True and config.models["actor"].optim.lr == 1e-6
    assert "path: /m/${oc.env:MODEL_SECRET}" in result and "hidden" not in result and "--nnodes 3" in result
    assert (config.models["actor"].path, config.data.train_batch_size) == ("/m/hidden", 64)
    assert config.data.chat_template_kwargs == {"x": False}


# -- scripts/results/convert_scripts.py


HEAD = (
    "set -xeuo pipefail\nMODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}\n"
    "ACTOR=(actor_rollout_ref.model.path=$MODEL_PATH actor_rollout_ref.rollout.n=8 MORE)\n"
)
RL = HEAD + 'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=ESTIMATOR data.train_files=/d.parquet "${ACTOR[@]}"\n'
SFT = "torchrun -m verl.trainer.sft_trainer data.train_files=/d.parquet model.path=/m data.messages_key=messages MORE\n"
SCRIPTS = {  # name: text, estimator, further settings
    "good/run.sh": (RL, "grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    "good/sft.sh": (SFT, "", "engine.fsdp_size=4"),
    "news.sh": (RL, "grpo", "actor_rollout_ref.actor.brand_new=1 critic.enable=False"),
    "estimator.sh": (RL, "no_such", ""),
    "fits_not.sh": (RL, "grpo", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"),
    "other.sh": ("python3 -m verl.trainer.main_generation data.path=/d\n", "", ""),
}


@pytest.mark.long
def test_a_directory_of_scripts(tmp_path: Path) -> None:
    for name, (text, estimator, more) in SCRIPTS.items():
        path = tmp_path / "scripts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("ESTIMATOR", estimator).replace("MORE", more))
    command = [sys.executable, str(ROOT / "scripts/results/convert_scripts.py"), str(tmp_path / "scripts")]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["rl", "5", "3", "3", "2", "1"] in lines and ["sft", "1", "1", "1", "1", "1"] in lines
    results = {script["script"]: script for script in json.loads((tmp_path / "out.json").read_text())}
    stopped = {name: script["stopped_by"] for name, script in results.items() if script["stopped_by"]}
    assert stopped == {
        "estimator.sh": "algorithm.adv_estimator",
        "fits_not.sh": "models.actor.generation.pp",  # its product with tp
        "other.sh": "no trainer",
    }
    assert results["news.sh"]["unknown"] == ["actor_rollout_ref.actor.brand_new"]
    assert ["1", "actor_rollout_ref.actor.brand_new"] in lines
