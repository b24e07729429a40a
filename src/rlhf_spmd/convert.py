"""A configuration of verl or TRL as one of this project: verl's YAML, a shell script that starts verl, or the YAML of TRL's commands.

rlhf-spmd convert run_qwen2-7b.sh > mine.yaml
rlhf-spmd convert my_ppo_trainer.yaml data.train_batch_size=512 > mine.yaml
rlhf-spmd convert dpo.yaml trainer=dpo num_processes=8 > mine.yaml     # of trl dpo --config dpo.yaml

Standard output is the configuration, with the command at its head. Standard error names each key that is not carried over:
either it is not needed here, and why, or it is not known. Their own defaults are written out where they differ from this project's.
A script runs in a bash that can start no program and write no file; what it would start last of verl is taken. What cannot be converted
ends with one line and status 2.
What stands for their names is in config/foreign.yaml. Source of names and defaults: verl's ppo_trainer.yaml (0.8
development version, January 2026), TRL 1.16.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from rlhf_spmd.config import verl_settings
from rlhf_spmd.config.constraints import idle_settings
from rlhf_spmd.config.foreign import Conversion, ForeignSettings, foreign_names, not_needed
from rlhf_spmd.config.foreign_input import is_trl, read_foreign
from rlhf_spmd.config.load import sections_of, to_dict
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import ConfigError, read_section
from rlhf_spmd.config.trl_settings import set_trl, trainer_of
from rlhf_spmd.config.verl_settings import ACTOR, ROLLOUT
from rlhf_spmd.data.dataset import Truncation
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.process.arguments import ignore_closed_pipes

VALIDATION = ROLLOUT + "val_kwargs."
FILTER = "algorithm.filter_groups."
OVERLONG = ("reward_model.overlong_buffer.enable", "reward_model.reward_kwargs.overlong_buffer_cfg.enable")
IDLE = "does nothing with these settings"
UNKNOWN = "not known: look it up"
MISSING = object()  # in place of a default: there is no such key


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    ignore_closed_pipes()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        source = read_foreign(Path(arguments[0]), arguments[1:])
        settings, left_out = convert(source)
    except ConfigError as error:
        remedy = "; set the variable in the environment of this command" if "${oc.env:" in str(error) else ""
        print(f"config error: {' '.join(str(error).split())}{remedy}", file=sys.stderr)
        return 2
    nodes = source.get("trainer.nnodes", 1)
    gpus = source.get("num_processes", 1) if is_trl(source) else source.get("trainer.n_gpus_per_node", 8)
    several = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} -m rlhf_spmd.train"
    print(f"# {several if nodes > 1 else f'rlhf-spmd train --nproc-per-node {gpus}'} --config THIS_FILE")
    print(OmegaConf.to_yaml(tree_of(settings)), end="")
    for key, reason in left_out.items():
        is_default = reason.startswith("so ") and key not in source
        print(f"{key}: {'not given' if is_default else 'left out'}, {reason}", file=sys.stderr)
    return 0


def convert(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this project's settings by dotted key, and the reason for each key of ``settings`` that is not carried over."""
    if is_trl(settings):
        return convert_trl(Conversion(ForeignSettings(settings, foreign_names()["TRL"]["defaults"])))
    if verl_settings.is_sft(settings):
        return convert_sft(Conversion(ForeignSettings(settings, verl_settings.sft_names()["defaults"])))
    return convert_verl(Conversion(ForeignSettings(settings, foreign_names()["verl"]["defaults"])))


# ---- verl's PPO trainer


def convert_verl(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for verl's PPO trainer.

    The order matters: the algorithm says which settings exist, copies of verl's values come before what replaces or drops them, and
    missing settings are added last.
    """
    verl = conversion.source
    names = foreign_names()["verl"]
    set_algorithm(conversion)
    config = config_of(conversion.settings["algorithm.name"])
    copy_settings(conversion, config)
    conversion.settings |= verl_settings.split_bounds(verl)
    verl_settings.set_expert_ranks(conversion)
    drop_sizes(conversion)
    set_loss(conversion, config)
    set_validation_and_files(conversion)
    set_filter(conversion, config)
    if (teacher := verl_settings.teacher_of(verl)) is not None:
        conversion.settings["models.teacher.path"] = teacher
        conversion.drop("algorithm.gamma", "each token's KL counts by itself, as verl has it")
    set_roles(conversion, list(drop_idle(conversion, config).roles))
    set_run(conversion)
    conversion.set_missing(rewards_of(verl))

    def reason(key: str, our_key: str | None) -> str:
        hint = names["hints"].get(key)
        return not_needed(names, key) or (f"here: {hint}" if hint else IDLE if our_key else UNKNOWN)

    return conversion.result(lambda key: verl_settings.our_name(names["keys"], key), reason)


def set_algorithm(conversion: Conversion) -> None:
    """Set the algorithm's name, and its estimator and loss where verl's names say these, too. Raises ConfigError, one line."""
    verl = conversion.source
    estimator = str(verl["algorithm.adv_estimator"])
    mode = verl.get(ACTOR + "policy_loss.loss_mode", "vanilla")
    if verl_settings.teacher_of(verl) is not None:
        conversion.settings["algorithm.name"] = "distill"
        return
    name = {"gae": "ppo", "opo": "grpo"}.get(estimator, estimator)
    if estimator == "opo":
        conversion.settings["algorithm.adv_estimator"] = "opo"
    if name == "grpo" and (verl.get(FILTER + "enable") or any(verl.get(key) for key in OVERLONG)):
        name = "dapo"
    elif estimator == "grpo" and mode in ("gspo", "cispo"):
        name = mode
        mode = "vanilla"
    if mode != "vanilla":
        conversion.settings["algorithm.loss_mode"] = mode
    try:
        config_of(name)
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_estimator={estimator}: {error}") from error
    conversion.settings["algorithm.name"] = name


def copy_settings(conversion: Conversion, config: type) -> None:
    """Set what has the same values here, where verl's file has it or verl's default is not ours."""
    verl, settings = conversion.source, conversion.settings
    name = settings["algorithm.name"]
    estimator = "algorithm.adv_estimator"
    if default_of(config, estimator) is MISSING and estimator in (verl.written if name == "distill" else settings):
        settings.pop(estimator, None)
        conversion.left_out[estimator] = f"{name} has advantages of its own"
    for key, value in verl.items():
        our_key = verl_settings.our_name(foreign_names()["verl"]["keys"], key)
        if our_key is None:
            continue
        is_algorithm = our_key.startswith("algorithm.")
        if is_algorithm and default_of(config, our_key) is MISSING:
            conversion.dropped[our_key] = f"{name} has no such setting"
        elif key in verl.written or not is_algorithm or default_of(config, our_key) != value:
            settings[our_key] = value


def drop_sizes(conversion: Conversion) -> None:
    """Leave out the numbers by which verl means none or all, and what does nothing beside others."""
    verl, settings = conversion.source, conversion.settings
    if verl.get(ACTOR + "use_dynamic_bsz"):
        conversion.drop("algorithm.ppo_micro_batch_size_per_gpu", "verl does not read it either, with use_dynamic_bsz")
    elif "algorithm.ppo_micro_batch_size_per_gpu" in settings:
        settings["algorithm.use_dynamic_bsz"] = False
    elif not settings.get("algorithm.use_dynamic_bsz", True):
        why = "without ppo_micro_batch_size_per_gpu micro-batches are cut by tokens"
        conversion.drop("algorithm.use_dynamic_bsz", why)
    for key in ("sampling.top_k", "val_sampling.top_k", "data.train_max_samples", "data.val_max_samples"):
        if settings.get(key, 0) < 0:
            conversion.drop(key, f"{settings[key]} is no limit, as here without it")
    if settings.get("data.truncation", "error") not in get_args(Truncation):
        conversion.drop("data.truncation", f"there is no {settings['data.truncation']}; a longer prompt is an error")
    ranks = verl.get("trainer.nnodes", 1) * verl.get("trainer.n_gpus_per_node", 8)
    for key in [key for key in settings if key.endswith(".zero_size") and not 0 < settings[key] < ranks]:
        conversion.drop(key, f"{settings[key]} is all ranks, as here without it")
    if not settings.get("models.actor.lora.rank"):
        conversion.drop_with_prefix("models.actor.lora.", "there are no adapters")


def set_loss(conversion: Conversion, config: type) -> None:
    """Set the bounds of ratios, and what the loss of this mode reads."""
    settings = conversion.settings
    bounds = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    written = [key for key in bounds if ACTOR + key.removeprefix("algorithm.") in conversion.source.written]
    if "algorithm.clip_ratio" in settings or not written:
        for key in bounds:
            if key not in written and default_of(config, key) is None:
                settings.pop(key, None)
    if len(written) == 2:
        conversion.drop("algorithm.clip_ratio", "clip_ratio_low and clip_ratio_high are the bounds")
    mode = settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode"))
    if mode in ("gspo", "geo_mean"):
        if settings.get("algorithm.loss_agg_mode", "seq-mean-token-mean") != "seq-mean-token-mean":
            conversion.left_out[ACTOR + "loss_agg_mode"] = f"{mode} is a loss of whole responses: seq-mean-token-mean"
        settings["algorithm.loss_agg_mode"] = "seq-mean-token-mean"
    if mode == "cispo" and (settings.get("algorithm.clip_ratio_low") or 0) > 1:
        settings["algorithm.clip_ratio_low"] = 1  # no lower bound: a ratio is above 0
    drop_unread(conversion, mode)
    if settings.get("algorithm.rollout_correction.bypass_mode"):
        conversion.drop_with_prefix("algorithm.rollout_correction.rollout_is", "bypass_mode finds no difference to correct")
    if settings["algorithm.name"] == "dapo":
        if settings.get("algorithm.use_kl_loss"):
            why = "dapo, which filters groups and shapes long responses, has no reference"
            conversion.drop("algorithm.use_kl_loss", why)
        conversion.drop("rollout.in_flight", "further prompts come in batches of data.train_batch_size")


def set_validation_and_files(conversion: Conversion) -> None:
    """Set when and how validation draws, how many checkpoints are kept, and the files of rows."""
    verl, settings = conversion.source, conversion.settings
    if not verl.get(VALIDATION + "do_sample", True) or "val_sampling.temperature" not in settings:
        settings["val_sampling.temperature"] = 0
    for key in ("run.test_freq", "run.save_freq"):
        if settings.get(key, 0) < 0:
            settings[key] = 0
    conversion.keep_checkpoints("trainer.max_actor_ckpt_to_keep")
    for key in ("data.path", "data.val_path"):
        if isinstance(settings.get(key), list) and len(settings[key]) == 1:
            settings[key] = settings[key][0]


def set_filter(conversion: Conversion, config: type) -> None:
    """Set by which score groups are kept."""
    metric = FILTER + "metric"  # which is our key, too
    if metric not in conversion.source.written:
        return
    if default_of(config, metric) is MISSING:
        conversion.left_out[metric] = f"{conversion.settings['algorithm.name']} has no such setting"
        return
    score = conversion.source[metric]
    conversion.settings[metric] = "seq_reward" if score == "seq_final_reward" else "score"
    if score == "acc":
        conversion.left_out[metric] = "acc is no field here: groups are kept by their score"


def set_roles(conversion: Conversion, roles: list[str]) -> None:
    """Set optimizers, experts, adapters, sharding and activation memory of the roles; leave out the settings of others."""
    verl = conversion.source
    for section, role in (("actor_rollout_ref.actor.optim", "actor"), ("critic.optim", "critic")):
        if role in roles:
            verl_settings.set_optimizer(conversion, section, role)
    verl_settings.set_router_replay(conversion)
    verl_settings.set_whole_experts(conversion)
    settings = conversion.settings
    if settings.get("models.actor.lora.path") and "reference" in roles:
        settings["models.reference.path"] = settings["models.actor.path"]  # without the adapter that training begins with
    elif settings.get("models.actor.lora.rank"):
        roles = [role for role in roles if role != "reference"]  # the actor without its adapters is the reference
    name = settings["algorithm.name"]
    for key in [key for key in settings if key.startswith("models.") and key.split(".")[1] not in roles]:
        conversion.drop(key, f"{name} has no {key.split('.')[1]} with these settings")
    if not verl.get("reward_model.enable"):
        conversion.drop("reward.model", "reward_model.enable is false")
    by_megatron = verl.written.get("model_engine") == "megatron" or any(".megatron." in key for key in verl)
    for role in roles:
        section = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        if role in ("actor", "critic") and verl.get(f"{section}.enable_gradient_checkpointing"):
            conversion.set_missing({f"models.{role}.activation_checkpointing": "full"})
        if role in ("actor", "critic", "reference", "teacher") and not by_megatron:
            conversion.set_missing({f"models.{role}.layout.zero": 3})
    verl_settings.shard_for_generation(conversion)


def rewards_of(verl: ForeignSettings) -> dict[str, Any]:
    """Return the settings of the reward function; none where a model rewards."""
    if verl.get("reward_model.enable"):
        return {}
    path = verl.get("custom_reward_function.path")
    function = f"{path}:{verl.get('custom_reward_function.name', 'compute_score')}" if path else "auto"
    prefix = "custom_reward_function.reward_kwargs."
    kwargs = {f"reward.kwargs.{key.removeprefix(prefix)}": verl[key] for key in verl if key.startswith(prefix)}
    return {"reward.function": function, **kwargs}


# ---- verl's SFT trainer


def convert_sft(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for verl's SFT trainer."""
    verl_settings.set_sft(conversion)
    set_run(conversion)
    conversion.source.read.update(("trainer.nnodes", "trainer.n_gpus_per_node"))  # which the command says
    return conversion.result(verl_settings.sft_name, verl_settings.sft_reason)


# ---- both of verl's trainers


def set_run(conversion: Conversion) -> None:
    """Set the run's length, directory, trackers and resuming, as verl's trainers have them, where they are not set yet."""
    verl = conversion.source
    settings: dict[str, Any] = {}
    if "trainer.total_training_steps" not in verl:
        settings |= {"data.epochs": verl["trainer.total_epochs"], "run.steps": None}
    settings["run.dir"] = f"runs/{verl.get('trainer.experiment_name', 'verl')}"
    settings |= trackers_of("trainer.logger", verl.get("trainer.logger", "wandb"), conversion.left_out)
    resume = {"auto": "auto", "disable": "never", "resume_path": None}
    mode = verl.get("trainer.resume_mode", "auto")
    if mode == "resume_path":
        resume[mode] = verl.get("trainer.resume_from_path")
    if resume.get(mode) is None:
        why = "has no trainer.resume_from_path" if mode in resume else "is not known"
        conversion.left_out["trainer.resume_mode"] = f"{mode} {why}"
    elif mode != "auto":
        settings["run.resume"] = resume[mode]
    conversion.set_missing(settings)


# ---- TRL's commands


def convert_trl(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for TRL's commands."""
    trl, settings = conversion.source, conversion.settings
    names = foreign_names()["TRL"]
    trainer, mark = trainer_of(trl)
    set_trl(conversion, trainer)
    config = config_of(settings["algorithm.name"])
    data_keys = {f"data.{name}" for section in config.streams.values() for name in section.config.__dataclass_fields__}
    for key, value in trl.items():
        name = trl_name(key)
        if name is None or key in trl.read:
            continue
        is_absent = name.startswith("data.") and ".".join(name.split(".")[:2]) not in data_keys
        if is_absent or (name.startswith("algorithm.") and default_of(config, name) is MISSING):
            conversion.dropped[name] = f"{settings['algorithm.name']} has no such setting"
        elif name.startswith("models.actor.lora."):
            conversion.dropped[name] = "use_peft is false"
        elif key in trl.written or name not in settings:
            settings[name] = value
    settings |= trackers_of("report_to", trl.get("report_to", "none"), conversion.left_out)
    drop_unread(conversion, settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode")))
    if settings["run.test_freq"] and "sampling.n" in settings:
        conversion.set_missing({f"val_{key}": value for key, value in settings.items() if key.startswith("sampling.")})
    else:
        conversion.drop("val_sampling.n", "nothing is validated")
    drop_idle(conversion, config)
    if mark and trainer == "grpo":
        conversion.left_out["trainer"] = f"so {trainer} is taken, by {mark}; for another add trainer=NAME"

    def reason(key: str, our_key: str | None) -> str:
        hint = names["hints"].get(key) or names["hints"].get(key.partition(".")[0])
        advice = f"here: {hint}".removeprefix("here: nothing, ") if hint else UNKNOWN
        advice = "set it in the environment" if key.startswith("env.") else advice
        return not_needed(names, key) or (IDLE if our_key else advice)

    settings, left_out = conversion.result(lambda key: None if key in trl.read else trl_name(key), reason)
    role = f"models.{config.exported}."
    return {re.sub(r"^models\.actor\.", role, key): value for key, value in settings.items()}, left_out


def trl_name(key: str) -> str | None:
    """Return what stands for a key of TRL, None if nothing does."""
    section, _, inner = key.partition(".")
    if section == "generation_kwargs":
        return f"sampling.{inner}" if inner in SamplingConfig.__dataclass_fields__ else None
    name: str | None = foreign_names()["TRL"]["keys"].get(section)
    return f"{name}.{inner}" if name and inner else name


# ---- both projects


def trackers_of(key: str, value: Any, left_out: dict[str, str]) -> dict[str, Any]:
    """Return the settings of the trackers that ``value`` names, which ``key`` has. Adds to ``left_out`` what is no tracker here."""
    names = re.findall(r"\w+", str(value).replace("None", "none"))
    if absent := [name for name in names if name not in ("console", "file", "none", "wandb", "tensorboard")]:
        left_out[f"{key}={','.join(absent)}"] = "there is wandb, tensorboard"
    return {
        "logger.wandb": "online" if "wandb" in names else "disabled",
        "logger.trackers": ["tensorboard"] if "tensorboard" in names else [],
    }


def drop_unread(conversion: Conversion, mode: Any) -> None:
    """Leave out what a loss of this mode does not read."""
    clip = {"vanilla": (), "sapo": ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    for key in (*clip.get(mode, ("clip_ratio_c",)), *(() if mode == "sapo" else ("tau_pos", "tau_neg"))):
        conversion.drop(f"algorithm.{key}", f"loss_mode={mode} does not read it")


def drop_idle(conversion: Conversion, config: Any) -> Any:
    """Leave out what does nothing beside the other settings. Return the algorithm's configuration."""
    tree: Any = OmegaConf.to_container(tree_of(conversion.settings))
    kinds = {section.key: section.config for section in config.streams.values() if section.key == "data"}
    sections = {
        name: read_section(kind, tree.get(name, {}), has_references=True)
        for name, kind in (kinds | {"algorithm": config}).items()
    }
    idle = {key: needed for path, section in sections_of(sections) for key, *_, needed in idle_settings(section, path)}
    for key, needed in idle.items():
        conversion.drop(key, f"does nothing without {needed}")
    return sections["algorithm"]


def config_of(algorithm: str) -> Any:
    """Return the dataclass of an algorithm's settings."""
    return find("algorithm", "rlhf_spmd.algorithms", algorithm, required_attribute="step").Config


def default_of(config: type, key: str) -> Any:
    """Return the default of ``algorithm.<a>.<b>`` in an algorithm's configuration; MISSING if it has no such key."""
    value: Any = to_dict(config())
    for part in key.split(".")[1:]:
        value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
    return value


def tree_of(settings: Mapping[str, Any]) -> DictConfig:
    """Return settings by dotted key as a tree, in the order of their keys."""
    tree = OmegaConf.create()
    for key in sorted(settings):
        OmegaConf.update(tree, key, settings[key])
    return tree


if __name__ == "__main__":
    sys.exit(main())
