"""Settings of verl that stand for several of ours at once, and those of its SFT trainer.

Source of names, defaults and meanings: verl of August 2026, ``trainer/config/distillation``, ``trainer/ppo/rollout_corr_helper.py``;
verl's ``sft_trainer.yaml`` (January 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from yaml import safe_load

from rlhf_spmd.config.foreign import Conversion, foreign_names, not_needed
from rlhf_spmd.config.schema import ConfigError

GATHERED = "layout.zero=3 shards the weights: generation's tp or pp does not divide training's"
LOSS, CORRECTION = "distillation.distillation_loss.", "algorithm.rollout_correction."
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VARIABLES = "data.apply_chat_template_kwargs"
PARALLEL_EXPERTS = re.compile(
    r"(actor_rollout_ref\.actor\.|actor_rollout_ref\.ref\.|critic\.|engine\.).*\b(expert_tensor_parallel_size|etp)"
)


def our_name(names: Mapping[str, str], key: str) -> str | None:
    """Return what stands for ``key``, None if nothing does. Each variable of a chat template is a key of its own."""
    inner = key.removeprefix(f"{VARIABLES}.")
    return names.get(key) if inner == key else f"{names[VARIABLES]}.{inner}"


def teacher_of(verl: Mapping[str, Any]) -> str | None:
    """Return the directory of the teacher, None without distillation.

    Raises ConfigError, one line, for a loss other than the policy gradient of the KL on the student's tokens (k1), which is what
    ``distill`` has, and for several teachers.
    """
    if not verl.get("distillation.enabled"):
        return None
    teachers = {key: verl[key] for key in verl if re.fullmatch(r"distillation\.teacher_models\.\w+\.model_path", key)}
    if len(teachers) != 1:
        raise ConfigError(f"distillation.teacher_models: there are {len(teachers)}; here is one teacher, models.teacher.path")
    mode, by_gradient = verl.get(LOSS + "loss_mode", "k3"), bool(verl.get(LOSS + "use_policy_gradient"))
    if mode != "k1" or not by_gradient:
        raise ConfigError(
            f"{LOSS}loss_mode={mode} with use_policy_gradient={str(by_gradient).lower()}: a student learns by the policy gradient of "
            "k1 here"
        )
    if verl.get(LOSS + "use_task_rewards", True):
        raise ConfigError(f"{LOSS}use_task_rewards=true: here a student learns from its teacher alone")
    return str(*teachers.values())


def set_router_replay(conversion: Conversion) -> None:
    """Set ``models.actor.router_replay`` where updates take the experts of an earlier pass."""
    verl = conversion.source
    for key in (key for key in verl if re.fullmatch(r"actor_rollout_ref\.actor\.(\w+\.)?router_replay\.mode", key)):
        if verl[key] in ("R2", "R3"):
            conversion.settings["models.actor.router_replay"] = verl[key]
            records = ROLLOUT + "enable_rollout_routing_replay"
            if verl[key] == "R3" and not verl.get(records, True):
                conversion.left_out[records] = "R3 takes the experts of generation"
            return
        if verl[key] != "disabled":
            conversion.left_out[key] = f"there is no {verl[key]}; models.actor.router_replay has R2 and R3"
            return


def set_expert_ranks(conversion: Conversion) -> None:
    """Set ``layout.ep`` of roles whose experts Megatron cuts into fewer columns than other matrices: its ep counts ranks of tp too.

    Here tp always cuts an expert, so ep is as much smaller. A rank holds as many numbers of experts.
    """
    ranks = {}
    for key, etp in conversion.source.items():
        section = PARALLEL_EXPERTS.fullmatch(key)
        if section is not None and etp:
            role = {"actor_rollout_ref.ref.": "reference", "critic.": "critic"}.get(section[1], "actor")
            ep, tp = (conversion.settings.get(f"models.{role}.layout.{axis}") or 1 for axis in ("ep", "tp"))
            ranks[f"models.{role}.layout.ep"] = max(1, ep * etp // tp)
    conversion.settings |= ranks


def set_whole_experts(conversion: Conversion) -> None:
    """Set ``models.actor.generation.ep`` where a rank that generates has whole experts.

    verl shares them among tp * data_parallel_size ranks; here the ranks of tp do, and each replica has all.
    """
    key = ROLLOUT + "expert_parallel_size"
    ranks, tp = conversion.source.get(key), conversion.settings.get("models.actor.generation.tp", 1)
    if ranks in (None, 1):
        return
    if tp > 1:
        conversion.settings["models.actor.generation.ep"] = tp
    if tp == 1:
        conversion.left_out[key] = "generation shares experts among the ranks of generation.tp, and that is 1"
    elif ranks != tp:
        conversion.left_out[key] = f"the {tp} ranks of generation.tp share them"


def set_optimizer(conversion: Conversion, section: str, role: str) -> None:
    """Set ``models.<role>.optim.name`` where ``<section>.optimizer`` asks for another than AdamW."""
    optimizer = str(conversion.source.get(f"{section}.optimizer", "AdamW"))
    name = foreign_names()["verl"]["optimizers"].get(optimizer.lower())
    if name is None:
        conversion.left_out[f"{section}.optimizer"] = f"there is no {optimizer}; adamw takes its place"
    elif name != "adamw":
        conversion.settings[f"models.{role}.optim.name"] = name


def shard_for_generation(conversion: Conversion) -> None:
    """Set ``layout.zero=3`` for an actor whose generation's ``tp`` or ``pp`` does not divide training's: whole weights are then
    gathered, so that any fits. Generation with whole experts needs none."""
    settings, actor = conversion.settings, "models.actor."
    if {f"{actor}layout.zero", f"{actor}generation.ep"} & settings.keys():
        return
    for axis in ("tp", "pp"):
        if (settings.get(f"{actor}layout.{axis}") or 1) % (settings.get(f"{actor}generation.{axis}") or 1):
            settings[f"{actor}layout.zero"] = 3
            conversion.left_out["actor_rollout_ref.actor.megatron"] = GATHERED


def split_bounds(verl: Mapping[str, Any]) -> dict[str, Any]:
    """Return our bounds for ``rollout_rs_threshold=0.5_2.0``, verl's way to write two. Raises ConfigError, one line.

    verl's ``_k1`` bounds the rollout's probability over training's, here the bounds are of training's over the rollout's.
    """
    kind, bounds = (str(verl.get(f"{CORRECTION}rollout_rs{end}", "")) for end in ("", "_threshold"))
    if "," in kind or "," in bounds:
        raise ConfigError(f"{CORRECTION}rollout_rs={kind}: here one kind of outlier is rejected, with one pair of bounds")
    lower, pair, upper = bounds.partition("_")
    if pair and not kind.endswith("_k1"):
        raise ConfigError(f"{CORRECTION}rollout_rs_threshold={bounds}: two bounds are for _k1, not rollout_rs={kind}; give one")
    try:
        both = {"_lower": 1 / float(upper), "": 1 / float(lower)} if pair else {}
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{CORRECTION}rollout_rs_threshold={bounds} must be a number, or two as in 0.5_2.0") from error
    return {f"{CORRECTION}rollout_rs_threshold{end}": value for end, value in both.items()}


# ---- verl's SFT trainer


@cache
def sft_names() -> dict[str, Any]:
    """Return the tables of ``verl_sft.yaml``, as the file explains them."""
    settings: dict[str, Any] = safe_load(Path(__file__).with_name("verl_sft.yaml").read_text(encoding="utf-8"))
    return settings


def is_sft(settings: Mapping[str, Any]) -> bool:
    """Return True for settings of verl's SFT trainer, whose model has a section of its own."""
    is_ppo = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)
    return not is_ppo and any(key.startswith(("model.", "optim.")) for key in settings)


def sft_name(key: str) -> str | None:
    """Return what stands for verl's ``key``, None if nothing does by itself."""
    names = sft_names()
    lora = names["lora"].get(key)
    return our_name(names["keys"], key) if lora is None else f"models.actor.lora.{lora}"


def sft_reason(key: str, our_key: str | None) -> str:
    """Return why a key is not carried over. ``our_key``: what stands for it, if anything does."""
    if our_key is not None:
        is_lora = our_key.startswith("models.actor.lora.")
        return "there are no adapters" if is_lora else "it is none, or all ranks, as here without it"
    unknown = "not known: look it up" if "." in key else "it chooses among verl's defaults"
    return not_needed(sft_names(), key) or unknown


def set_sft(conversion: Conversion) -> None:
    """Set what verl's SFT trainer has in place of settings of ours. Raises ConfigError, one line."""
    verl, settings = conversion.source, conversion.settings
    settings |= {"algorithm.name": "sft", "data.filter_overlong": False, "data.truncation": verl["data.truncation"]}
    has_adapters = bool(verl.get("model.lora_rank", 0))
    for key, value in verl.items():
        our_key = sft_name(key)
        if our_key is not None and _is_set(key, value) and (has_adapters or key not in sft_names()["lora"]):
            settings[our_key] = value
    set_optimizer(conversion, "optim", "actor")
    set_expert_ranks(conversion)
    if verl.get("optim.min_lr"):
        settings["models.actor.optim.min_lr_ratio"] = verl["optim.min_lr"] / verl["optim.lr"]
    for key in ("run.save_freq", "run.test_freq"):
        if isinstance(settings[key], str):
            conversion.left_out[f"trainer.{key[4:]}"] = f"{settings[key]!r}; here it is a number of steps"
        settings[key] = 0 if isinstance(settings[key], str) else max(0, settings[key])
    conversion.keep_checkpoints("trainer.max_ckpt_to_keep")
    if verl.get("model.enable_gradient_checkpointing", True):
        settings["models.actor.activation_checkpointing"] = "full"
    if not any(key.startswith("engine.") and "parallel" in key and "sequence" not in key for key in verl):
        settings["models.actor.layout.zero"] = 3
    messages = verl.get("data.multiturn.messages_key", verl.get("data.messages_key"))
    if verl.get("data.multiturn.enable") or messages:
        settings["data.prompt_key"] = messages or "messages"
        return
    settings["data.apply_chat_template"] = True  # verl makes a user's message of the prompt
    for side in ("prompt", "response"):
        inner = verl.get(f"data.{side}_dict_keys") or []
        if not isinstance(inner, list) or not all(isinstance(key, str) for key in inner):
            raise ConfigError(f"data.{side}_dict_keys={inner} must be a list of names")
        if len(inner) > 1:
            conversion.left_out[f"data.{side}_dict_keys"] = f"one column is taken, {inner[0]}, and not {', '.join(inner[1:])}"
        settings[f"data.{side}_key"] = ".".join([verl[f"data.{side}_key"], *inner[:1]])


def _is_set(key: str, value: Any) -> bool:
    """Return False for -1 where verl means by it none, or all ranks."""
    return not (key.endswith(("_max_samples", "fsdp_size")) and isinstance(value, int) and value < 0)
