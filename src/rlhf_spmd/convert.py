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
from rlhf_spmd.config.foreign import Conversion, ForeignSettings, foreign_names, not_needed
from rlhf_spmd.config.foreign_values import read_values
from rlhf_spmd.config.interpolation import as_yaml_text, interpolate
from rlhf_spmd.config.load import read_file, sections_of, to_dict
from rlhf_spmd.config.plain_yaml import Plain, resolve
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import SWITCH, ConfigError, leaves, read_section
from rlhf_spmd.config.shell_script import last_command
from rlhf_spmd.config.trl_settings import set_trl, trainer_of
from rlhf_spmd.config.verl_settings import (
    ACTOR,
    ROLLOUT,
    is_sft,
    our_name,
    set_expert_ranks,
    set_optimizer,
    set_router_replay,
    set_sft,
    set_whole_experts,
    sft_name,
    sft_names,
    shard_for_generation,
    split_bounds,
    teacher_of,
    why_left,
)
from rlhf_spmd.data.dataset import Truncation
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.process.arguments import ignore_closed_pipes

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
    settings = {key.lstrip("+"): value_of(value) for key, _, value in (word.partition("=") for word in words)}
    if is_tree:
        try:
            tree = OmegaConf.create(resolve(switched(read_file(path, "a configuration of verl or TRL"))))
            if not tree:
                raise Refused(f"{path}: must hold settings of verl or TRL (key: value), and is empty")
            for key, value in settings.items():
                OmegaConf.update(tree, key, value)
            # the file that is written has references in place of values from the environment, which may be secret
            values = leaves(to_dict(interpolate(OmegaConf.to_container(tree)), as_yaml_text), "")
            settings = {key: value for key, value in values if value != {}}
        except (OmegaConfBaseException, OSError) as error:
            raise Refused(f"{path}: {str(error).splitlines()[0]}") from error
    named = {reduce(lambda name, newer: re.sub(newer[0], newer[1], name), NEWER, key): value for key, value in settings.items()}
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


def is_trl(settings: Mapping[str, Any]) -> bool:
    """Return True for settings of TRL's commands: their keys are in no section, and verl's are."""
    names = foreign_names()["TRL"]
    by_section = any(key.startswith((*OF_VERL, "data.", "algorithm.", "model.", "optim.", "engine.")) for key in settings)
    return not by_section and any(key in names["keys"] or key in names["hints"] for key in settings)


def check_project(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise Refused for settings of a project that cannot be converted, or of this one."""
    ours = next((key for key in settings if key.startswith(("models.", "run.", "sampling.", "algorithm.name"))), None)
    if ours is not None:
        raise Refused(f"{path}: is a configuration of rlhf_spmd already: {ours} is no key of verl")
    known = {project: {**names["keys"], **names["hints"]} for project, names in foreign_names().items()}
    if not is_trl(settings) and not any(key.startswith(OF_VERL) or key in known["verl"] for key in settings):
        hint = next((f"; {key} is {project}'s" for key in settings for project in known if key in known[project]), "")
        raise Refused(
            f"{path}: has no key of verl or TRL{hint}; docs/migrating.md says what stands for those of other projects"
        )


def convert(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this project's settings by dotted key, and the reason for each key of the source that is not carried over."""
    if is_trl(settings):
        return convert_trl(Conversion(ForeignSettings(settings, foreign_names()["TRL"]["defaults"])))
    if is_sft(settings):
        return convert_sft(Conversion(ForeignSettings(settings, sft_names()["defaults"])))
    return convert_verl(Conversion(ForeignSettings(settings, foreign_names()["verl"]["defaults"])))


# ---- verl's PPO trainer


def convert_verl(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for verl's PPO trainer."""
    verl, table, names = conversion.theirs, foreign_names()["verl"], foreign_names()["verl"]["keys"]
    set_algorithm(conversion)
    name = conversion.settings["algorithm.name"]
    config = config_of(name)
    copy_settings(conversion, config)
    conversion.settings |= split_bounds(verl)
    set_expert_ranks(conversion)
    drop_sizes(conversion)
    set_loss(conversion, config)
    set_validation_and_files(conversion)
    set_filter(conversion, config)
    if (teacher := teacher_of(verl)) is not None:
        conversion.settings["models.teacher.path"] = teacher
        conversion.drop("algorithm.gamma", "each token's KL counts by itself, as verl has it")
    set_roles(conversion, list(drop_idle(conversion, config).roles))
    set_run(conversion)
    conversion.fill(rewards_of(verl))

    def why(key: str, ours: str | None) -> str:
        hint = table["hints"].get(key)
        return not_needed(table, key) or (f"here: {hint}" if hint else IDLE if ours else UNKNOWN)

    return conversion.finish(lambda key: our_name(names, key), why)


def config_of(algorithm: str) -> Any:
    """Return the dataclass of an algorithm's settings."""
    return find("algorithm", "rlhf_spmd.algorithms", algorithm, required_attribute="step").Config


def set_algorithm(conversion: Conversion) -> None:
    """Set the algorithm's name, and what verl has in that name."""
    verl = conversion.theirs
    estimator, mode = str(verl["algorithm.adv_estimator"]), verl.get(ACTOR + "policy_loss.loss_mode", "vanilla")
    if teacher_of(verl) is not None:
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
        raise Refused(f"algorithm.adv_estimator={estimator}: {error}") from error
    conversion.settings["algorithm.name"] = name


def copy_settings(conversion: Conversion, config: type) -> None:
    """Set what has the same values here, where verl's file has it or verl's default is not ours."""
    verl, settings, names = conversion.theirs, conversion.settings, foreign_names()["verl"]["keys"]
    name, estimator = settings["algorithm.name"], "algorithm.adv_estimator"
    if default_of(config, estimator) is MISSING and estimator in (verl.written if name == "distill" else settings):
        settings.pop(estimator, None)
        conversion.left[estimator] = f"{name} has advantages of its own"
    for key, value in verl.items():
        ours = our_name(names, key)
        if ours is None:
            continue
        is_algorithm = ours.startswith("algorithm.")
        if is_algorithm and default_of(config, ours) is MISSING:
            conversion.dropped[ours] = f"{name} has no such setting"
        elif key in verl.written or not is_algorithm or default_of(config, ours) != value:
            settings[ours] = value


def drop_sizes(conversion: Conversion) -> None:
    """Leave out the numbers by which verl means none or all, and what does nothing beside others."""
    verl, settings = conversion.theirs, conversion.settings
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
        conversion.drop_below("models.actor.lora.", "there are no adapters")


def set_loss(conversion: Conversion, config: type) -> None:
    """Set the bounds of ratios, and what the loss of this mode reads."""
    settings, bounds = conversion.settings, ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    written = [key for key in bounds if ACTOR + key[10:] in conversion.theirs.written]
    if "algorithm.clip_ratio" in settings or not written:
        for key in bounds:
            if key not in written and default_of(config, key) is None:
                settings.pop(key, None)
    if len(written) == 2:
        conversion.drop("algorithm.clip_ratio", "clip_ratio_low and clip_ratio_high are the bounds")
    mode = settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode"))
    if mode in ("gspo", "geo_mean"):
        if settings.get("algorithm.loss_agg_mode", "seq-mean-token-mean") != "seq-mean-token-mean":
            conversion.left[ACTOR + "loss_agg_mode"] = f"{mode} is a loss of whole responses: seq-mean-token-mean"
        settings["algorithm.loss_agg_mode"] = "seq-mean-token-mean"
    if mode == "cispo" and (settings.get("algorithm.clip_ratio_low") or 0) > 1:
        settings["algorithm.clip_ratio_low"] = 1  # no lower bound: a ratio is above 0
    drop_unread(conversion, mode)
    if settings.get("algorithm.rollout_correction.bypass_mode"):
        conversion.drop_below("algorithm.rollout_correction.rollout_is", "bypass_mode finds no difference to correct")
    if settings["algorithm.name"] == "dapo":
        if settings.get("algorithm.use_kl_loss"):
            why = "dapo, which filters groups and shapes long responses, has no reference"
            conversion.drop("algorithm.use_kl_loss", why)
        conversion.drop("data.gen_batch_size", "further prompts come in batches of data.train_batch_size")


def drop_unread(conversion: Conversion, mode: Any) -> None:
    """Leave out what a loss of this mode does not read."""
    clip = {"vanilla": (), "sapo": ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    for key in (*clip.get(mode, ("clip_ratio_c",)), *(() if mode == "sapo" else ("tau_pos", "tau_neg"))):
        conversion.drop(f"algorithm.{key}", f"loss_mode={mode} does not read it")


def set_validation_and_files(conversion: Conversion) -> None:
    """Set when and how validation draws, how many checkpoints are kept, and the files of rows."""
    verl, settings = conversion.theirs, conversion.settings
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
    metric, ours = FILTER + "metric", "algorithm.filter_groups.metric"
    if metric not in conversion.theirs.written:
        return
    if default_of(config, ours) is MISSING:
        conversion.left[metric] = f"{conversion.settings['algorithm.name']} has no such setting"
        return
    score = conversion.theirs[metric]
    conversion.settings[ours] = "seq_reward" if score == "seq_final_reward" else "score"
    if score == "acc":
        conversion.left[metric] = "acc is no field here: groups are kept by their score"


def set_roles(conversion: Conversion, roles: list[str]) -> None:
    """Set optimizers, experts, adapters, sharding and activation memory of the roles; leave out the settings of others."""
    verl = conversion.theirs
    for section, role in (("actor_rollout_ref.actor.optim", "actor"), ("critic.optim", "critic")):
        if role in roles:
            set_optimizer(conversion, section, role)
    set_router_replay(conversion)
    set_whole_experts(conversion)
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
            conversion.fill({f"models.{role}.activation_checkpointing": "full"})
        if role in ("actor", "critic", "reference", "teacher") and not by_megatron:
            conversion.fill({f"models.{role}.layout.zero": 3})
    shard_for_generation(conversion)


def rewards_of(verl: ForeignSettings) -> dict[str, Any]:
    if verl.get("reward_model.enable"):
        return {}
    path = verl.get("custom_reward_function.path")
    function = f"{path}:{verl.get('custom_reward_function.name', 'compute_score')}" if path else "auto"
    prefix = "custom_reward_function.reward_kwargs."
    kwargs = {f"reward.kwargs.{key.removeprefix(prefix)}": verl[key] for key in verl if key.startswith(prefix)}
    return {"reward.function": function, **kwargs}


def set_run(conversion: Conversion) -> None:
    """Set the run's length, directory and tracker where they are not set yet."""
    verl = conversion.theirs
    settings: dict[str, Any] = {}
    if "trainer.total_training_steps" not in verl:
        settings |= {"data.epochs": verl["trainer.total_epochs"], "run.steps": None}
    settings["run.dir"] = f"runs/{verl.get('trainer.experiment_name', 'verl')}"
    settings |= trackers_of("trainer.logger", verl.get("trainer.logger", "wandb"), conversion.left)
    resume = {"auto": "auto", "disable": "never", "resume_path": None}
    mode = verl.get("trainer.resume_mode", "auto")
    if mode == "resume_path":
        resume[mode] = verl.get("trainer.resume_from_path")
    if resume.get(mode) is None:
        why = "has no trainer.resume_from_path" if mode in resume else "is not known"
        conversion.left["trainer.resume_mode"] = f"{mode} {why}"
    elif mode != "auto":
        settings["run.resume"] = resume[mode]
    conversion.fill(settings)


def trackers_of(key: str, names: Any, left: dict[str, str]) -> dict[str, Any]:
    """Return the trackers that ``key`` names. Adds to ``left`` what is no tracker here."""
    asked = re.findall(r"\w+", str(names).replace("None", "none"))
    if absent := [name for name in asked if name not in ("console", "file", "none", "wandb", "tensorboard")]:
        left[f"{key}={','.join(absent)}"] = "there is wandb, tensorboard"
    return {
        "logger.wandb": "online" if "wandb" in asked else "disabled",
        "logger.trackers": ["tensorboard"] if "tensorboard" in asked else [],
    }


def drop_idle(conversion: Conversion, config: Any) -> Any:
    """Leave out what does nothing beside the other settings. Return the algorithm's configuration."""
    tree: Any = OmegaConf.to_container(tree_of(conversion.settings))
    kinds = {section.key: section.config for section in config.streams.values() if section.key == "data"}
    sections = {
        name: read_section(kind, tree.get(name, {}), interpolated=True)
        for name, kind in (kinds | {"algorithm": config}).items()
    }
    idle = {key: needed for path, section in sections_of(sections) for key, *_, needed in idle_settings(section, path)}
    for ours, needed in idle.items():
        conversion.drop(ours, f"does nothing without {needed}")
    return sections["algorithm"]


# ---- TRL's commands


def convert_trl(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for TRL's commands."""
    trl, table = conversion.theirs, foreign_names()["TRL"]
    trainer, mark = trainer_of(trl)
    set_trl(conversion, trainer)
    settings, dropped = conversion.settings, conversion.dropped
    config = config_of(settings["algorithm.name"])
    data = {f"data.{name}" for section in config.streams.values() for name in section.config.__dataclass_fields__}
    for key, value in trl.items():
        name = trl_name(key)
        if name is None or key in trl.read:
            continue
        absent = name.startswith("data.") and ".".join(name.split(".")[:2]) not in data
        if absent or (name.startswith("algorithm.") and default_of(config, name) is MISSING):
            dropped[name] = f"{settings['algorithm.name']} has no such setting"
        elif name.startswith("models.actor.lora."):
            dropped[name] = "use_peft is false"
        elif key in trl.written or name not in settings:
            settings[name] = value
    settings |= trackers_of("report_to", trl.get("report_to", "none"), conversion.left)
    drop_unread(conversion, settings.get("algorithm.loss_mode", default_of(config, "algorithm.loss_mode")))
    if settings["run.test_freq"] and "sampling.n" in settings:
        conversion.fill({f"val_{key}": value for key, value in settings.items() if key.startswith("sampling.")})
    else:
        conversion.drop("val_sampling.n", "nothing is validated")
    drop_idle(conversion, config)
    if mark and trainer == "grpo":
        conversion.left["trainer"] = f"so {trainer} is taken, by {mark}; for another add trainer=NAME"

    def why(key: str, name: str | None) -> str:
        hint = table["hints"].get(key) or table["hints"].get(key.partition(".")[0])
        reason = f"here: {hint}".removeprefix("here: nothing, ") if hint else UNKNOWN
        reason = "set it in the environment" if key.startswith("env.") else reason
        return not_needed(table, key) or (IDLE if name else reason)

    settings, left = conversion.finish(lambda key: None if key in trl.read else trl_name(key), why)
    role = f"models.{config.exported}."
    return {role + key[13:] if key.startswith("models.actor.") else key: value for key, value in settings.items()}, left


def trl_name(key: str) -> str | None:
    """Return what stands for a key of TRL, None if nothing does."""
    section, _, inner = key.partition(".")
    if section == "generation_kwargs":
        return f"sampling.{inner}" if inner in SamplingConfig.__dataclass_fields__ else None
    name: str | None = foreign_names()["TRL"]["keys"].get(section)
    return f"{name}.{inner}" if name and inner else name


# ---- verl's SFT trainer


def convert_sft(conversion: Conversion) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings and reasons for verl's SFT trainer."""
    set_sft(conversion)
    set_run(conversion)
    conversion.theirs.read.update(("trainer.nnodes", "trainer.n_gpus_per_node"))  # which the command says
    return conversion.finish(sft_name, why_left)


# ---- the command


def tree_of(settings: Mapping[str, Any]) -> DictConfig:
    tree = OmegaConf.create()
    for key in sorted(settings):
        OmegaConf.update(tree, key, settings[key])
    return tree


MISSING = object()


def default_of(config: type, key: str) -> Any:
    """Return the default of ``algorithm.<a>.<b>`` in an algorithm's configuration; MISSING if it has no such key."""
    value: Any = to_dict(config())
    for part in key.split(".")[1:]:
        value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    ignore_closed_pipes()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        theirs = read(Path(arguments[0]), arguments[1:])
        check_project(Path(arguments[0]), theirs)
        settings, left = convert(theirs)
    except (ConfigError, Refused, yaml.YAMLError, UnicodeDecodeError) as error:
        remedy = "; set the variable in the environment of this command" if "${oc.env:" in str(error) else ""
        print(f"config error: {' '.join(str(error).split())}{remedy}", file=sys.stderr)
        return 2
    nodes = theirs.get("trainer.nnodes", 1)
    gpus = theirs.get("num_processes", 1) if is_trl(theirs) else theirs.get("trainer.n_gpus_per_node", 8)
    several = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} -m rlhf_spmd.train"
    print(f"# {several if nodes > 1 else f'rlhf-spmd train --nproc-per-node {gpus}'} --config THIS_FILE")
    print(OmegaConf.to_yaml(tree_of(settings)), end="")
    for key, why in left.items():
        print(f"{key}: {'left out' if key in theirs or not why.startswith('so ') else 'not given'}, {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
