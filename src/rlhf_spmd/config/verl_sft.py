"""Settings of verl's SFT trainer as this project's. Source of names and defaults: verl's sft_trainer.yaml (January 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from yaml import safe_load

from rlhf_spmd.config.foreign import ForeignSettings, checkpoint_limit
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.config.verl_meanings import optimizer_of, our_name, ranks_of_experts


@cache
def sft_names() -> dict[str, Any]:
    """Return the tables of ``verl_sft.yaml``, as the file explains them."""
    settings: dict[str, Any] = safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return settings


def is_sft(given: Mapping[str, Any]) -> bool:
    """Return True if the settings are of verl's SFT trainer, whose model has a section of its own."""
    return not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in given) and any(
        key.startswith(("model.", "optim.")) for key in given
    )


def sft_name(key: str) -> str | None:
    """Return what stands for verl's ``key``, None if nothing does by itself."""
    names = sft_names()
    lora = names["lora"].get(key)
    return our_name(names["keys"], key) if lora is None else f"models.actor.lora.{lora}"


def why_left(key: str, ours: str | None) -> str:
    """Return why a key that is not carried over is not needed, or that it is not known."""
    if ours is not None:
        return (
            "there are no adapters" if ours.startswith("models.actor.lora.") else "it is none, or all ranks, as here without it"
        )
    unknown = "not known: look it up" if "." in key else "it chooses among verl's defaults"
    return next((why for name, why in sft_names()["not_needed"].items() if name in key), unknown)


def sft_settings(verl: ForeignSettings) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this project's settings by dotted key, and the reason for some of verl's keys that are not carried over."""
    settings: dict[str, Any] = {
        "algorithm.name": "sft",
        "data.filter_overlong": False,
        "data.truncation": verl["data.truncation"],
    }
    lora, names = bool(verl.get("model.lora_rank", 0)), sft_names()["lora"]
    for key, value in verl.items():
        ours = sft_name(key)
        if ours is not None and _is_set(key, value) and (lora or key not in names):
            settings[ours] = value
    optimizer, left = optimizer_of(verl, "optim", "actor")
    settings |= optimizer | ranks_of_experts(verl, settings)
    if verl.get("optim.min_lr"):
        settings["models.actor.optim.min_lr_ratio"] = verl["optim.min_lr"] / verl["optim.lr"]
    for key in ("run.save_freq", "run.test_freq"):
        if isinstance(settings[key], str):
            left[f"trainer.{key[4:]}"] = f"{settings[key]!r}; here it is a number of steps"
        settings[key] = 0 if isinstance(settings[key], str) else max(0, settings[key])
    settings["run.keep_checkpoints"] = checkpoint_limit("trainer.max_ckpt_to_keep", verl["trainer.max_ckpt_to_keep"], left)
    if verl.get("model.enable_gradient_checkpointing", True):
        settings["models.actor.activation_checkpointing"] = "full"
    if not any(key.startswith("engine.") and "parallel" in key and "sequence" not in key for key in verl):
        settings["models.actor.layout.zero"] = 3
    messages = verl.get("data.multiturn.messages_key", verl.get("data.messages_key"))
    if verl.get("data.multiturn.enable") or messages:
        settings["data.prompt_key"] = messages or "messages"
        return settings, left
    settings["data.apply_chat_template"] = True  # verl makes a user's message of the prompt
    for side in ("prompt", "response"):
        inner = verl.get(f"data.{side}_dict_keys") or []
        if not isinstance(inner, list) or not all(isinstance(key, str) for key in inner):
            raise ConfigError(f"data.{side}_dict_keys={inner} must be a list of names")
        if len(inner) > 1:
            left[f"data.{side}_dict_keys"] = f"one column is taken, {inner[0]}, and not {', '.join(inner[1:])}"
        settings[f"data.{side}_key"] = ".".join([verl[f"data.{side}_key"], *inner[:1]])
    return settings, left


def _is_set(key: str, value: Any) -> bool:
    """Return False for -1 where verl means by it none, or all ranks."""
    return not (key.endswith(("_max_samples", "fsdp_size")) and isinstance(value, int) and value < 0)
