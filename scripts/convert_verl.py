"""A configuration of verl's PPO trainer as one of this project: from its YAML, or from a shell script that starts it.

    python scripts/convert_verl.py run_qwen2-7b.sh > mine.yaml
    python scripts/convert_verl.py my_ppo_trainer.yaml data.train_batch_size=512 > mine.yaml

Standard output is the configuration, with the torchrun line at its head. Standard error says, key by key, what has no counterpart:
either it is not needed here, and why, or it is not known. verl's own defaults are written out where they differ from this project's.
Source of names and defaults: verl's ppo_trainer.yaml (0.8 development version, January 2026).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_spmd.config.registry import find

ROLLOUT, ACTOR, REF, CRITIC = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic."
DEFAULTS: dict[str, Any] = {  # verl's, where this project has another
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    ACTOR + "use_kl_loss": False,
    ROLLOUT + "val_kwargs.temperature": 0,
    "critic.optim.lr": 1e-5,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    "trainer.total_epochs": 30,
}
OPTIM = (
    "lr",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "weight_decay",
    "betas",
    "clip_grad",
    "min_lr_ratio",
    "lr_scheduler_type",
)
SAME = {  # verl's prefix -> ours, and the keys that keep their names
    "algorithm.": ("algorithm.", ("gamma", "lam", "kl_penalty", "use_kl_in_reward", "norm_adv_by_std_in_grpo")),
    "algorithm.kl_ctrl.": ("algorithm.kl_ctrl.", ("type", "kl_coef", "horizon", "target_kl")),
    "algorithm.rollout_correction.": (
        "algorithm.rollout_correction.",
        ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"),
    ),
    "data.": (
        "data.",
        (
            "train_batch_size",
            "val_batch_size",
            "max_prompt_length",
            "max_response_length",
            "filter_overlong_prompts",
            "shuffle",
            "seed",
            "prompt_key",
        ),
    ),
    ACTOR: (
        "algorithm.",
        (
            *(
                "ppo_mini_batch_size",
                "ppo_epochs",
                "use_dynamic_bsz",
                "ppo_max_token_len_per_gpu",
                "ppo_micro_batch_size_per_gpu",
            ),
            *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff", "loss_agg_mode"),
            *("use_kl_loss", "kl_loss_coef", "kl_loss_type"),
        ),
    ),
    ACTOR + "optim.": ("models.actor.optim.", OPTIM),
    CRITIC + "optim.": ("models.critic.optim.", OPTIM),
    CRITIC: ("algorithm.", ("cliprange_value",)),
    ROLLOUT: ("sampling.", ("n", "temperature", "top_p", "ignore_eos")),
    ROLLOUT + "val_kwargs.": ("val_sampling.", ("n", "temperature", "top_p")),
    "trainer.": ("run.", ("test_freq",)),
}
GENERATION = (
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
)
RENAMED = {
    "actor_rollout_ref.model.path": "models.actor.path",
    "critic.model.path": "models.critic.path",
    "reward_model.model.path": "reward.model",
    "data.train_files": "data.path",
    "data.val_files": "data.val_path",
    ACTOR + "tau_pos": "algorithm.tau_pos",
    ACTOR + "tau_neg": "algorithm.tau_neg",
    ACTOR + "grad_clip": "models.actor.optim.clip_grad",
    "critic.grad_clip": "models.critic.optim.clip_grad",
    ACTOR + "megatron.tensor_model_parallel_size": "models.actor.layout.tp",
    ACTOR + "megatron.pipeline_model_parallel_size": "models.actor.layout.pp",
    REF + "megatron.tensor_model_parallel_size": "models.reference.layout.tp",
    REF + "megatron.pipeline_model_parallel_size": "models.reference.layout.pp",
    "critic.megatron.tensor_model_parallel_size": "models.critic.layout.tp",
    "critic.megatron.pipeline_model_parallel_size": "models.critic.layout.pp",
    ACTOR + "fsdp_config.optimizer_offload": "models.actor.optim.offload",
    "critic.model.fsdp_config.optimizer_offload": "models.critic.optim.offload",
    REF + "fsdp_config.param_offload": "models.reference.offload",
    "critic.model.fsdp_config.param_offload": "models.critic.offload",
    ROLLOUT + "tensor_model_parallel_size": "models.actor.generation.tp",
    ROLLOUT + "pipeline_model_parallel_size": "models.actor.generation.pp",
    "actor_rollout_ref.model.enable_activation_offload": "models.actor.activation_offload",
    "trainer.total_training_steps": "run.steps",
    "trainer.critic_warmup": "algorithm.critic_warmup",
    "trainer.project_name": "logger.project",
    "trainer.experiment_name": "run.name",
    "trainer.max_actor_ckpt_to_keep": "run.keep_checkpoints",
    **{ROLLOUT + key: f"models.actor.generation.{key}" for key in GENERATION},
}
NOT_NEEDED = {  # a pattern of verl's key -> why there is nothing to set; "": it is taken into account elsewhere
    r"use_remove_padding": "rows are always packed",
    r"log_prob_(micro_batch|use_dynamic|max_token)|forward_(micro_batch|max_token)": "forward passes are cut like updates",
    r"critic\.(ppo_micro|ppo_max_token|ppo_mini|use_dynamic|ppo_epochs|loss_agg)": "the critic's rows are cut like the actor's",
    r"rollout\.(name|mode|load_format|free_cache|layered_sum|dtype|max_model_len|disable)": "one generator, of the training weights",
    r"fsdp_config\.|\.strategy$|hybrid_engine": "layout.zero says how weights are sharded",
    r"reward_model\.": "a reward model is named by reward.model and is a role like others",
    r"trainer\.(logger|nnodes|n_gpus|val_before|total_epochs|save_freq|default_local|use_legacy|balance|device)": "",
    r"data\.(truncation|return_|reward_fn_key|trust_remote|image_key|video_key)": "",
    r"adv_estimator|loss_mode|custom_reward_function|enable_gradient_checkpointing|rollout\.top_k|val_kwargs": "",
    r"ulysses_sequence_parallel_size": "layout.sequence_parallel shares a sequence among tp ranks",
    r"lora": "THERE IS NO LORA: this run trains all weights",
    r"profiler|^ray_kwargs|^transfer_queue|trainer\.ray": "there is no such part",
}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, inner in tree.items() for key, value in flatten(inner, f"{prefix}{name}.").items()}


def read_script(text: str) -> list[str]:
    """The ``key=value`` arguments of the last command of a shell script, with its own plain variables put in."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*$", "", text)).splitlines()
    variables = dict(os.environ)

    def expand(word: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)

    arguments: list[str] = []
    for line in lines:
        words = shlex.split(line, comments=True)
        if len(words) == 1 and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
            name, _, value = words[0].partition("=")
            variables[name] = expand(value)
        elif any("main_ppo" in word for word in words):
            arguments = [expand(word).lstrip("+") for word in words if re.match(r"\+*[a-z_]+\.[\w.]+=", word)]
    return arguments


def value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Everything that the file and the overrides say, by dotted key."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        given = flatten(OmegaConf.to_container(OmegaConf.create(text), resolve=False))
        given = {key: value for key, value in given.items() if not key.endswith("_target_") and "${" not in str(value)}
    else:
        given = dict(part.split("=", 1) for part in read_script(text))
    given |= dict(part.split("=", 1) for part in overrides)
    return {key: value_of(value) if isinstance(value, str) else value for key, value in given.items()}


def algorithm_name(verl: dict[str, Any]) -> dict[str, Any]:
    estimator, mode = verl["algorithm.adv_estimator"], verl.get(ACTOR + "policy_loss.loss_mode", "vanilla")
    if estimator == "gae":
        found: dict[str, Any] = {"algorithm.name": "ppo"}
    elif estimator == "grpo" and mode in ("gspo", "cispo"):
        return {"algorithm.name": mode}
    else:
        found = {"algorithm.name": estimator}
    return found | ({"algorithm.loss_mode": mode} if mode != "vanilla" else {})


def reward_of(verl: dict[str, Any]) -> dict[str, Any]:
    if verl.get("reward_model.enable"):
        return {}
    path = verl.get("custom_reward_function.path")
    return {"reward.function": f"{path}:{verl.get('custom_reward_function.name', 'compute_score')}" if path else "auto"}


def training_of(verl: dict[str, Any], roles: Sequence[str]) -> dict[str, Any]:
    """Sharding and activation memory of each role, the run's length, its directory."""
    found: dict[str, Any] = {}
    for role in roles:
        section = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        if role != "reference" and verl.get(f"{section}.enable_gradient_checkpointing"):
            found[f"models.{role}.activation_checkpointing"] = "full"
        if not any(".megatron." in key for key in verl):
            found[f"models.{role}.layout.zero"] = 3
    if verl.get("trainer.total_training_steps") is None:
        found |= {"data.epochs": verl["trainer.total_epochs"], "run.steps": None}
    found["run.dir"] = verl.get("trainer.default_local_dir") or f"runs/{verl.get('trainer.experiment_name', 'verl')}"
    found["run.save_freq"] = max(verl.get("trainer.save_freq", -1), 0)
    found["logger.wandb"] = "online" if "wandb" in verl.get("trainer.logger", ["wandb"]) else "disabled"
    return found


def convert(verl: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """This project's settings by dotted key, and of each of verl's keys that is not carried over, why."""
    given, verl = dict(verl), DEFAULTS | verl
    with_critic = verl["algorithm.adv_estimator"] == "gae"
    with_reference = verl["algorithm.use_kl_in_reward"] or verl[ACTOR + "use_kl_loss"]
    roles = ["actor", *(["critic"] if with_critic else []), *(["reference"] if with_reference else [])]
    names = {f"{theirs}{key}": f"{ours}{key}" for theirs, (ours, keys) in SAME.items() for key in keys} | RENAMED
    absent = [role for role in ("critic", "reference") if role not in roles]
    found, left = {**algorithm_name(verl), **reward_of(verl), **training_of(verl, roles)}, {}
    for key, value in verl.items():
        ours = names.get(key)
        dropped = ours is not None and any(f"models.{role}." in ours for role in absent)
        if dropped or (ours == "reward.model" and not verl.get("reward_model.enable")):
            continue
        if ours is not None and value is not None:
            found[ours] = value
        elif ours is None and key in given:
            why = next((why for pattern, why in NOT_NEEDED.items() if re.search(pattern, key)), "not known: look it up")
            left |= {key: why} if why else {}
    if found["algorithm.name"] != "grpo" or found.get("algorithm.loss_mode") != "sapo":
        found = {key: value for key, value in found.items() if key not in ("algorithm.tau_pos", "algorithm.tau_neg")}
    found.pop("algorithm.use_dynamic_bsz", None)
    if found.get("algorithm.ppo_micro_batch_size_per_gpu") and not verl.get(ACTOR + "use_dynamic_bsz"):
        found["algorithm.use_dynamic_bsz"] = False
    if verl.get(ROLLOUT + "top_k", -1) > 0:
        found["sampling.top_k"] = verl[ROLLOUT + "top_k"]
    if isinstance(found.get("algorithm.clip_ratio_low"), (int, float)):
        found["algorithm.clip_ratio_low"] = min(found["algorithm.clip_ratio_low"], 1)  # no lower bound: a ratio is above 0
    found = {key: value for key, value in found.items() if has_key(found["algorithm.name"], key)}
    for key in ("data.path", "data.val_path"):
        if isinstance(found.get(key), list) and len(found[key]) == 1:
            found[key] = found[key][0]
    if found.get("run.test_freq", 0) < 0:
        found["run.test_freq"] = 0
    return found, left


def has_key(algorithm: str, key: str) -> bool:
    """Whether the algorithm's configuration has this key; those of other sections are the same for all."""
    first, _, name = key.partition(".")
    if first != "algorithm":
        return True
    module = find("algorithm", "rlhf_spmd.algorithms", algorithm, exports="step")
    return name.partition(".")[0] in {field.name for field in fields(module.Config)}


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    verl = read(Path(arguments[0]), arguments[1:])
    found, left = convert(verl)
    tree = OmegaConf.create()
    for key in sorted(found):
        OmegaConf.update(tree, key, found[key])
    gpus, nodes = verl.get("trainer.n_gpus_per_node", 8), verl.get("trainer.nnodes", 1)
    print(f"# torchrun --nnodes {nodes} --nproc-per-node {gpus} -m rlhf_spmd.train --config THIS_FILE")
    print(OmegaConf.to_yaml(tree), end="")
    for key, why in left.items():
        print(f"{key}: left out, {why}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
