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

import ast
import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.config.constraints import idle_settings
from rlhf_spmd.config.foreign import ForeignSettings, checkpoint_limit, foreign_names
from rlhf_spmd.config.foreign_values import read_values
from rlhf_spmd.config.interpolation import interpolate, written
from rlhf_spmd.config.load import read_file, sections_of, to_dict
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import SWITCH, ConfigError, read_section
from rlhf_spmd.config.shell_script import last_command
from rlhf_spmd.config.trl_settings import trainer_of, trl_settings
from rlhf_spmd.config.verl_meanings import (
    GATHERED,
    optimizer_of,
    our_name,
    ranks_of_experts,
    replay_of,
    shard_for_generation,
    split_bounds,
    teacher_of,
    whole_experts_of,
)
from rlhf_spmd.config.verl_sft import is_sft, sft_name, sft_names, sft_settings, why_left
from rlhf_spmd.config.written import Plain, resolve
from rlhf_spmd.data.dataset import Truncation
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.process.arguments import ignore_closed_pipes

ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
OF_VERL = ("actor_rollout_ref.", "critic.", "trainer.", "reward_model.", "custom_reward_function.")
VALIDATION, FILTER = ROLLOUT + "val_kwargs.", "algorithm.filter_groups."
OVERLONG = ("reward_model.overlong_buffer.enable", "reward_model.reward_kwargs.overlong_buffer_cfg.enable")

NEWER = (  # names since February 2026: the ones before, by which the rest of this file and foreign.yaml know them
    (r"^reward\.reward_model\.model_path$", "reward_model.model.path"),
    (r"^reward\.reward_manager\.name$", "reward_model.reward_manager"),
    (r"^reward\.(custom_reward_function\.|reward_model\.)", r"\1"),
    (r"^reward\.", "reward_model."),
)
PROGRAM = r"(?:.*[./])?(?:main_(?:ppo|ppo_sync|dapo)|(?:fsdp_)?sft_trainer(?:_ray)?)(?:\.py)?"


IDLE, UNKNOWN = "does nothing with these settings", "not known: look it up"


class Refused(ValueError):
    """Settings that cannot be converted, in one line."""


def read_script(path: Path) -> list[str]:
    """Return the ``key=value`` arguments of the last command of a shell script that starts verl, as bash expands them."""
    try:
        command = last_command(path, PROGRAM)
    except ValueError as error:
        raise Refused(
            f"{error}; give a script that starts verl.trainer.main_ppo, main_dapo or an SFT trainer, or its YAML"
        ) from error
    if command.unset:
        print(f"{path}: not set, so the file takes them from the environment: {', '.join(command.unset)}", file=sys.stderr)
    if command.not_run:
        print(f"{path}: not run, so what they do or answer is missing: {', '.join(command.not_run)}", file=sys.stderr)
    words = [word.lstrip("+") for word in command.arguments if re.match(r"[+~]*[A-Za-z_][\w.]*=", word)]
    if other := [word for word in command.arguments if word.lstrip("+") not in words]:
        print(f"{path}: not read: {' '.join(other)[:200]}", file=sys.stderr)
    return words


def value_of(text: str) -> Any:
    """Return the value of an override as Hydra reads it: numbers, lists with and without quotes, true, null. ``none`` is a word."""
    if text == "None":
        return text
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        return value if not isinstance(value, str) or value[:1] != "[" else value_of(value)  # a list that was quoted twice
    if text[:1] in ("[", "{"):
        with contextlib.suppress(yaml.YAMLError):  # as Hydra writes a brace that is text: \{
            return yaml.safe_load(text)
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def switched(tree: Any) -> Any:
    """Return ``tree`` with ``yes`` and ``off`` as the truth values that verl reads them as."""
    if isinstance(tree, dict):
        return {key: switched(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(switched, tree))
    return SWITCH.get(tree.lower(), tree) if isinstance(tree, Plain) and tree.isalpha() else tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, inner in tree.items() for key, value in flatten(inner, f"{prefix}{name}.").items()}


def read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the file and the overrides by dotted key, without nulls."""
    if not path.is_file():
        raise Refused(f"{path}: there is no such file")
    if path.suffix == ".py":
        raise Refused(
            f"{path}: a Python script is not read, it computes its settings; give the YAML of TRL's commands (trl grpo --config FILE: "
            "the fields of GRPOConfig, ModelConfig and ScriptArguments by their names), or a shell script or a YAML of verl"
        )
    for text in overrides:
        if not re.match(r"\+*[\w.]+=", text):
            raise Refused(f"'{text}' is no override; give key=value, such as trainer.nnodes=2")
    is_tree = path.suffix in (".yaml", ".yml")
    words = [*([] if is_tree else read_script(path)), *overrides]
    given = {key.lstrip("+"): value_of(value) for key, _, value in (word.partition("=") for word in words)}
    if is_tree:
        try:
            tree = OmegaConf.create(resolve(switched(read_file(path, "a configuration of verl or TRL"))))
            if not tree:
                raise Refused(f"{path}: must hold settings of verl or TRL (key: value), and is empty")
            for key, value in given.items():
                OmegaConf.update(tree, key, value)
            # the file that is written has references in place of values from the environment, which may be secret
            given = flatten(to_dict(interpolate(OmegaConf.to_container(tree)), written))
        except (OmegaConfBaseException, OSError) as error:
            raise Refused(f"{path}: {str(error).splitlines()[0]}") from error
    named = {reduce(lambda name, newer: re.sub(newer[0], newer[1], name), NEWER, key): value for key, value in given.items()}
    decides = {
        **foreign_names()["verl"]["defaults"],
        **sft_names()["defaults"],
        "max_length": 1024,
        "scale_rewards": "group",
        "trainer.logger": "wandb",
    }  # where null means something
    return {
        key: value
        for key, value in read_values(named).items()
        if not key.endswith("_target_") and (value is not None or decides.get(key) is not None)
    }


def is_trl(given: Mapping[str, Any]) -> bool:
    """Return True if the settings are of TRL's commands: their keys are in no section, and verl's are."""
    names = foreign_names()["TRL"]
    by_section = any(key.startswith((*OF_VERL, "data.", "algorithm.", "model.", "optim.", "engine.")) for key in given)
    return not by_section and any(key in names["keys"] or key in names["said"] for key in given)


def check_project(path: Path, given: Mapping[str, Any]) -> None:
    """Raises Refused for settings of a project that cannot be converted, or of this one."""
    own = next((key for key in given if key.startswith(("models.", "run.", "sampling.", "algorithm.name"))), None)
    if own is not None:
        raise Refused(f"{path}: is a configuration of rlhf_spmd already: {own} is no key of verl")
    known = {project: {**names["keys"], **names["said"]} for project, names in foreign_names().items()}
    if not is_trl(given) and not any(key.startswith(OF_VERL) or key in known["verl"] for key in given):
        hint = next((f"; {key} is {project}'s" for key in given for project in known if key in known[project]), "")
        raise Refused(
            f"{path}: has no key of verl or TRL{hint}; docs/migrating.md says what stands for those of other projects"
        )


def algorithm_of(verl: ForeignSettings) -> dict[str, Any]:
    """Return the algorithm's name, and the settings that verl has in its name."""
    estimator, mode = str(verl["algorithm.adv_estimator"]), verl.get(ACTOR + "policy_loss.loss_mode", "vanilla")
    if teacher_of(verl) is not None:
        return {"algorithm.name": "distill"}
    name, more = {"gae": "ppo"}.get(estimator, estimator), {}
    if estimator == "opo":
        name, more = "grpo", {"algorithm.adv_estimator": "opo"}
    if name == "grpo" and (verl.get(FILTER + "enable") or any(verl.get(key) for key in OVERLONG)):
        name = "dapo"
    elif name == "grpo" and not more and mode in ("gspo", "cispo"):
        name, mode = mode, "vanilla"
    if mode != "vanilla":
        more["algorithm.loss_mode"] = mode
    try:
        find("algorithm", "rlhf_spmd.algorithms", name, exports="step")
    except ValueError as error:
        raise Refused(f"algorithm.adv_estimator={estimator}: {error}") from error
    return {"algorithm.name": name, **more}


def rewards_of(verl: ForeignSettings) -> dict[str, Any]:
    if verl.get("reward_model.enable"):
        return {}
    path = verl.get("custom_reward_function.path")
    function = f"{path}:{verl.get('custom_reward_function.name', 'compute_score')}" if path else "auto"
    prefix = "custom_reward_function.reward_kwargs."
    kwargs = {f"reward.kwargs.{key.removeprefix(prefix)}": verl[key] for key in verl if key.startswith(prefix)}
    return {"reward.function": function, **kwargs}


def roles_of(verl: ForeignSettings, roles: Sequence[str]) -> dict[str, Any]:
    """Return sharding and activation memory of each role."""
    settings: dict[str, Any] = {}
    for role in roles:
        section = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        if role in ("actor", "critic") and verl.get(f"{section}.enable_gradient_checkpointing"):
            settings[f"models.{role}.activation_checkpointing"] = "full"
        by_megatron = verl.given.get("model_engine") == "megatron" or any(".megatron." in key for key in verl)
        if role in ("actor", "critic", "reference", "teacher") and not by_megatron:
            settings[f"models.{role}.layout.zero"] = 3
    return settings


def run_of(verl: ForeignSettings, left: dict[str, str]) -> dict[str, Any]:
    """Return the run's length, directory and tracker. Adds to ``left`` what has no counterpart."""
    settings: dict[str, Any] = {}
    if "trainer.total_training_steps" not in verl:
        settings |= {"data.epochs": verl["trainer.total_epochs"], "run.steps": None}
    settings["run.dir"] = f"runs/{verl.get('trainer.experiment_name', 'verl')}"
    settings |= trackers_of("trainer.logger", verl.get("trainer.logger", "wandb"), left)
    resume, mode = {"auto": "auto", "disable": "never", "resume_path": None}, verl.get("trainer.resume_mode", "auto")
    if mode == "resume_path":
        resume[mode] = verl.get("trainer.resume_from_path")
    if resume.get(mode) is None:
        left["trainer.resume_mode"] = f"{mode} {'has no trainer.resume_from_path' if mode in resume else 'is not known'}"
    elif mode != "auto":
        settings["run.resume"] = resume[mode]
    return settings


def trackers_of(key: str, names: Any, left: dict[str, str]) -> dict[str, Any]:
    """Return the trackers that ``key`` names. Adds to ``left`` what is no tracker here."""
    asked = re.findall(r"\w+", str(names).replace("None", "none"))
    if absent := [name for name in asked if name not in ("console", "file", "none", "wandb", "tensorboard")]:
        left[f"{key}={','.join(absent)}"] = "there is wandb, tensorboard"
    return {
        "logger.wandb": "online" if "wandb" in asked else "disabled",
        "logger.trackers": ["tensorboard"] if "tensorboard" in asked else [],
    }


def convert(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this project's settings by dotted key, and the reason for each key of the source that is not carried over."""
    if is_trl(given):
        return convert_trl(given)
    return convert_sft(given) if is_sft(given) else convert_verl(given)


def convert_verl(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the same for verl's PPO trainer."""
    table = foreign_names()["verl"]
    verl, names, left = ForeignSettings(given, table["defaults"]), table["keys"], dict[str, str]()
    chosen = algorithm_of(verl)
    name = chosen["algorithm.name"]
    config = find("algorithm", "rlhf_spmd.algorithms", name, exports="step").Config
    settings, gone, bounds = dict(chosen), dict[str, str](), split_bounds(verl)  # gone: why a key of ours is not set after all
    unused = "algorithm.adv_estimator" in (given if name == "distill" else settings)
    if default_of(config, "algorithm.adv_estimator") is MISSING and unused:
        settings.pop("algorithm.adv_estimator", None)
        left["algorithm.adv_estimator"] = f"{name} has advantages of its own"
    for key, value in verl.items():
        ours = our_name(names, key)
        if ours is not None and ours.startswith("algorithm.") and default_of(config, ours) is MISSING:
            gone[ours] = f"{name} has no such setting"
        elif ours is not None and (key in given or not ours.startswith("algorithm.") or default_of(config, ours) != value):
            settings[ours] = value
    settings |= bounds
    settle(settings, left, gone, verl, config)
    if (teacher := teacher_of(verl)) is not None:
        settings["models.teacher.path"] = teacher
        drop(settings, gone, "algorithm.gamma", "each token's KL counts by itself, as verl has it")
    roles = list(drop_idle(settings, gone, config).roles)
    for section, role in (("actor_rollout_ref.actor.optim", "actor"), ("critic.optim", "critic")):
        optimizer, without = optimizer_of(verl, section, role) if role in roles else ({}, {})
        settings, left = {**settings, **optimizer}, {**left, **without}
    for more, without in (replay_of(verl), whole_experts_of(verl, settings)):
        settings, left = {**settings, **more}, {**left, **without}
    if settings.get("models.actor.lora.path") and "reference" in roles:
        settings["models.reference.path"] = settings["models.actor.path"]  # without the adapter that training begins with
    elif settings.get("models.actor.lora.rank"):
        roles = [role for role in roles if role != "reference"]  # the actor without its adapters is the reference
    for ours in [ours for ours in settings if ours.startswith("models.") and ours.split(".")[1] not in roles]:
        drop(settings, gone, ours, f"{name} has no {ours.split('.')[1]} with these settings")
    if not verl.get("reward_model.enable"):
        drop(settings, gone, "reward.model", "reward_model.enable is false")
    shards = shard_for_generation({**roles_of(verl, roles), **settings})
    left |= dict.fromkeys(("actor_rollout_ref.actor.megatron",) * bool(shards), GATHERED)
    settings = {**roles_of(verl, roles), **shards, **run_of(verl, left), **rewards_of(verl), **settings}

    def why(key: str, ours: str | None) -> str:
        patterns = (reason for pattern, reason in table["not_needed"].items() if re.search(pattern, key))
        said = table["said"].get(key)
        return gone.get(ours or "") or next(patterns, f"here: {said}" if said else IDLE if ours else UNKNOWN)

    return settings, {**verl.left(lambda key: our_name(names, key), settings, why), **left}


def convert_trl(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the same for TRL's commands."""
    table = foreign_names()["TRL"]
    trl = ForeignSettings(given, table["defaults"])
    trainer, mark = trainer_of(trl)
    settings, left = trl_settings(trl, trainer)
    gone: dict[str, str] = {}
    config = find("algorithm", "rlhf_spmd.algorithms", settings["algorithm.name"], exports="step").Config
    data = {f"data.{name}" for section in config.streams.values() for name in section.config.__dataclass_fields__}

    def ours(key: str) -> str | None:
        section, _, inner = key.partition(".")
        if section == "generation_kwargs":
            return f"sampling.{inner}" if inner in SamplingConfig.__dataclass_fields__ else None
        name = table["keys"].get(section)
        return f"{name}.{inner}" if name and inner else name

    for key, value in trl.items():
        name = ours(key)
        if name is None or key in trl.read:
            continue
        absent = name.startswith("data.") and ".".join(name.split(".")[:2]) not in data
        if absent or (name.startswith("algorithm.") and default_of(config, name) is MISSING):
            gone[name] = f"{settings['algorithm.name']} has no such setting"
        elif name.startswith("models.actor.lora."):
            gone[name] = "use_peft is false"
        elif key in given or name not in settings:
            settings[name] = value
    settings |= trackers_of("report_to", trl.get("report_to", "none"), left)
    drop_unread(settings, gone, settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode")))
    if settings["run.test_freq"] and "sampling.n" in settings:
        settings = {**{f"val_{key}": value for key, value in settings.items() if key.startswith("sampling.")}, **settings}
    else:
        drop(settings, gone, "val_sampling.n", "nothing is validated")
    drop_idle(settings, gone, config)
    if mark and trainer == "grpo":
        left["trainer"] = f"so {trainer} is taken, by {mark}; for another add trainer=NAME"

    def why(key: str, name: str | None) -> str:
        said = table["said"].get(key) or table["said"].get(key.partition(".")[0])
        patterns = (reason for pattern, reason in table["not_needed"].items() if re.search(pattern, key))
        named = f"here: {said}".removeprefix("here: nothing, ") if said else UNKNOWN
        named = "set it in the environment" if key.startswith("env.") else named
        return gone.get(name or "") or next(patterns, IDLE if name else named)

    left = {**trl.left(lambda key: None if key in trl.read else ours(key), settings, why), **left}
    role = f"models.{config.exported}."
    return {role + key[13:] if key.startswith("models.actor.") else key: value for key, value in settings.items()}, left


def convert_sft(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the same for verl's SFT trainer."""
    verl = ForeignSettings(given, sft_names()["defaults"])
    settings, left = sft_settings(verl)
    settings = {**run_of(verl, left), **settings}
    verl.read.update(("trainer.nnodes", "trainer.n_gpus_per_node"))  # which the command says
    return settings, {**verl.left(sft_name, settings, why_left), **left}


def tree_of(settings: dict[str, Any]) -> DictConfig:
    tree = OmegaConf.create()
    for key in sorted(settings):
        OmegaConf.update(tree, key, settings[key])
    return tree


def drop(settings: dict[str, Any], gone: dict[str, str], ours: str, why: str) -> None:
    """Leave out a setting, and say why."""
    if ours in settings:
        del settings[ours]
        gone[ours] = why


def drop_idle(settings: dict[str, Any], gone: dict[str, str], config: Any) -> Any:
    """Leave out, in place, what does nothing beside the other settings. Returns the algorithm's configuration."""
    tree: Any = OmegaConf.to_container(tree_of(settings))
    kinds = {section.key: section.config for section in config.streams.values() if section.key == "data"}
    sections = {
        name: read_section(kind, tree.get(name, {}), interpolated=True)
        for name, kind in (kinds | {"algorithm": config}).items()
    }
    idle = {key: needed for path, section in sections_of(sections) for key, *_, needed in idle_settings(section, path)}
    for ours, needed in idle.items():
        drop(settings, gone, ours, f"does nothing without {needed}")
    return sections["algorithm"]


def drop_unread(settings: dict[str, Any], gone: dict[str, str], mode: Any) -> None:
    """Leave out, in place, what a loss of this mode does not read."""
    unread = {"vanilla": (), "sapo": ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}.get(
        mode, ("clip_ratio_c",)
    )
    for key in (*unread, *(() if mode == "sapo" else ("tau_pos", "tau_neg"))):
        drop(settings, gone, f"algorithm.{key}", f"loss_mode={mode} does not read it")


def settle(settings: dict[str, Any], left: dict[str, str], gone: dict[str, str], verl: ForeignSettings, config: type) -> None:
    """Change, in place, the settings that verl and this project express differently."""
    settings.update(ranks_of_experts(verl, settings))
    drop_sizes(settings, gone, verl)
    bounds = [key for key in ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high") if ACTOR + key[10:] in verl.given]
    if "algorithm.clip_ratio" in settings or not bounds:
        for key in ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"):
            if key not in bounds and default_of(config, key) is None:
                settings.pop(key, None)
    if len(bounds) == 2:
        drop(settings, gone, "algorithm.clip_ratio", "clip_ratio_low and clip_ratio_high are the bounds")
    mode = settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode"))
    if mode in ("gspo", "geo_mean"):
        if settings.get("algorithm.loss_agg_mode", "seq-mean-token-mean") != "seq-mean-token-mean":
            left[ACTOR + "loss_agg_mode"] = f"{mode} is a loss of whole responses: seq-mean-token-mean"
        settings["algorithm.loss_agg_mode"] = "seq-mean-token-mean"
    if mode == "cispo" and (settings.get("algorithm.clip_ratio_low") or 0) > 1:
        settings["algorithm.clip_ratio_low"] = 1  # no lower bound: a ratio is above 0
    drop_unread(settings, gone, mode)
    if not verl.get(VALIDATION + "do_sample", True) or "val_sampling.temperature" not in settings:
        settings["val_sampling.temperature"] = 0
    for key in ("run.test_freq", "run.save_freq"):
        if settings.get(key, 0) < 0:
            settings[key] = 0
    if settings["algorithm.name"] == "dapo" and settings.get("algorithm.use_kl_loss"):
        drop(settings, gone, "algorithm.use_kl_loss", "dapo, which filters groups and shapes long responses, has no reference")
    keep = "trainer.max_actor_ckpt_to_keep"
    settings["run.keep_checkpoints"] = checkpoint_limit(keep, verl[keep], left)
    if settings.get("algorithm.rollout_correction.bypass_mode"):
        for key in [key for key in settings if key.startswith("algorithm.rollout_correction.rollout_is")]:
            drop(settings, gone, key, "bypass_mode finds no difference to correct")
    for key in ("data.path", "data.val_path"):
        if isinstance(settings.get(key), list) and len(settings[key]) == 1:
            settings[key] = settings[key][0]
    if settings["algorithm.name"] == "dapo":
        drop(settings, gone, "data.gen_batch_size", "further prompts come in batches of data.train_batch_size")
    if FILTER + "metric" in verl.given and default_of(config, "algorithm.filter_groups.metric") is MISSING:
        left[FILTER + "metric"] = f"{settings['algorithm.name']} has no such setting"
    elif FILTER + "metric" in verl.given:
        settings["algorithm.filter_groups.metric"] = {"seq_final_reward": "seq_reward"}.get(verl[FILTER + "metric"], "score")
        if verl[FILTER + "metric"] == "acc":
            left[FILTER + "metric"] = "acc is no field here: groups are kept by their score"


def drop_sizes(settings: dict[str, Any], gone: dict[str, str], verl: ForeignSettings) -> None:
    """Leave out, in place, the numbers by which verl means none or all, and what does nothing beside others."""
    if verl.get(ACTOR + "use_dynamic_bsz"):
        drop(settings, gone, "algorithm.ppo_micro_batch_size_per_gpu", "verl does not read it either, with use_dynamic_bsz")
    elif "algorithm.ppo_micro_batch_size_per_gpu" in settings:
        settings["algorithm.use_dynamic_bsz"] = False
    elif not settings.get("algorithm.use_dynamic_bsz", True):
        drop(
            settings, gone, "algorithm.use_dynamic_bsz", "without ppo_micro_batch_size_per_gpu micro-batches are cut by tokens"
        )
    for key in ("sampling.top_k", "val_sampling.top_k", "data.train_max_samples", "data.val_max_samples"):
        if settings.get(key, 0) < 0:
            drop(settings, gone, key, f"{settings[key]} is no limit, as here without it")
    if settings.get("data.truncation", "error") not in get_args(Truncation):
        drop(settings, gone, "data.truncation", f"there is no {settings['data.truncation']}; a longer prompt is an error")
    ranks = verl.get("trainer.nnodes", 1) * verl.get("trainer.n_gpus_per_node", 8)
    for key in [key for key in settings if key.endswith(".zero_size") and not 0 < settings[key] < ranks]:
        drop(settings, gone, key, f"{settings[key]} is all ranks, as here without it")
    if not settings.get("models.actor.lora.rank"):
        for key in [key for key in settings if key.startswith("models.actor.lora.")]:
            drop(settings, gone, key, "there are no adapters")


MISSING = object()


def default_of(config: type, key: str) -> Any:
    """Return the default of ``algorithm.<a>.<b>`` in an algorithm's configuration; MISSING if it has no such key."""
    value: Any = to_dict(config())
    for part in key.split(".")[1:]:
        value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    ignore_closed_pipes()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        given = read(Path(arguments[0]), arguments[1:])
        check_project(Path(arguments[0]), given)
        settings, left = convert(given)
    except (ConfigError, Refused, yaml.YAMLError, UnicodeDecodeError) as error:
        remedy = "; set the variable in the environment of this command" if "${oc.env:" in str(error) else ""
        print(f"config error: {' '.join(str(error).split())}{remedy}", file=sys.stderr)
        return 2
    gpus, nodes = given.get("trainer.n_gpus_per_node", 8), given.get("trainer.nnodes", 1)
    gpus = given.get("num_processes", 1) if is_trl(given) else gpus
    several = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} -m rlhf_spmd.train"
    print(f"# {several if nodes > 1 else f'rlhf-spmd train --nproc-per-node {gpus}'} --config THIS_FILE")
    print(OmegaConf.to_yaml(tree_of(settings)), end="")
    for key, why in left.items():
        print(f"{key}: {'left out' if key in given or not why.startswith('so ') else 'not given'}, {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
