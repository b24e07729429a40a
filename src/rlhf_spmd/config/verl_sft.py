"""Settings of verl's SFT trainer as this project's. Source of names and defaults: verl's sft_trainer.yaml (January 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIM = (
    "lr",
    "betas",
    "weight_decay",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "clip_grad",
    "min_lr_ratio",
    "lr_scheduler_type",
)
NAMES = {  # theirs: ours, with the same values
    "data.train_files": "data.path",
    "data.val_files": "data.val_path",
    "data.train_batch_size": "data.train_batch_size",
    "data.max_length": "data.max_length",
    "data.train_max_samples": "data.train_max_samples",
    "data.val_max_samples": "data.val_max_samples",
    "data.chat_template": "data.chat_template",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.max_token_len_per_gpu": "algorithm.max_token_len_per_gpu",
    "model.partial_pretrain": "models.actor.path",
    "model.path": "models.actor.path",
    **{f"optim.{name}": f"models.actor.optim.{name}" for name in OPTIM},
    "optim.lr_scheduler": "models.actor.optim.lr_scheduler_type",
    "optim.warmup_style": "models.actor.optim.lr_scheduler_type",
    "engine.tensor_model_parallel_size": "models.actor.layout.tp",
    "engine.pipeline_model_parallel_size": "models.actor.layout.pp",
    "engine.fsdp_size": "models.actor.layout.zero_size",
    "trainer.project_name": "logger.project",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.total_training_steps": "run.steps",
    "trainer.save_freq": "run.save_freq",
    "trainer.test_freq": "run.test_freq",
    "trainer.seed": "run.seed",
}
LORA = {"model.lora_rank": "rank", "model.lora_alpha": "alpha", "model.target_modules": "target_modules"}
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.truncation": "error",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "trainer.total_epochs": 4,
    "trainer.save_freq": 0,
    "trainer.test_freq": 0,
}
SAID = (
    *("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys", "data.truncation"),
    *("data.multiturn.enable", "data.multiturn.messages_key", "data.messages_key", "trainer.logger", "trainer.total_epochs"),
    *("trainer.resume_mode", "trainer.resume_from_path", "trainer.nnodes", "trainer.n_gpus_per_node"),
    *("model.enable_gradient_checkpointing", "model.lora_rank", "model.lora_alpha", "model.target_modules", "engine", "optim"),
)
NOT_NEEDED = {
    "micro_batch_size": "micro-batches are cut by tokens (algorithm.max_token_len_per_gpu)",
    "use_remove_padding": "rows are always packed",
    "pad_mode": "rows are always packed",
    "use_dynamic_bsz": "rows are always packed",
    "strategy": "layout.zero says how weights are sharded",
    "fsdp": "layout.zero says how weights are sharded",
    "ulysses_sequence_parallel_size": "layout.sequence_parallel shares a sequence among tp ranks",
    "save_contents": "a checkpoint has all that a run goes on with",
}


def is_sft(given: Mapping[str, Any]) -> bool:
    """Return True if the settings are of verl's SFT trainer, whose model has a section of its own."""
    return not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in given) and any(
        key.startswith(("model.", "optim.")) for key in given
    )


def sft_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this project's settings by dotted key, and the reason for each of verl's keys that is not carried over."""
    verl = DEFAULTS | dict(given)
    found: dict[str, Any] = {"algorithm.name": "sft", "data.filter_overlong": verl["data.truncation"] != "error"}
    found |= {NAMES[key]: value for key, value in verl.items() if key in NAMES and _is_set(key, value)}
    left = {
        key: next((why for name, why in NOT_NEEDED.items() if name in key), "not known: look it up")
        for key in given
        if key not in NAMES and key not in SAID
    }
    if verl.get("model.lora_rank", 0):
        found |= {f"models.actor.lora.{ours}": verl[key] for key, ours in LORA.items() if key in verl}
    if verl.get("model.enable_gradient_checkpointing", True):
        found["models.actor.activation_checkpointing"] = "full"
    if not any(key.startswith("engine.") and "parallel" in key and "sequence" not in key for key in given):
        found["models.actor.layout.zero"] = 3
    messages = verl.get("data.multiturn.messages_key", verl.get("data.messages_key"))
    if messages or verl.get("data.multiturn.enable"):
        found["data.prompt_key"] = messages or "messages"
        return found, left
    found["data.apply_chat_template"] = True  # verl makes a user's message of the prompt
    for side in ("prompt", "response"):
        inner = verl.get(f"data.{side}_dict_keys") or []
        if len(inner) > 1:
            left[f"data.{side}_dict_keys"] = f"one column is taken, {inner[0]}, and not {', '.join(inner[1:])}"
        found[f"data.{side}_key"] = ".".join([verl[f"data.{side}_key"], *inner[:1]])
    return found, left


def _is_set(key: str, value: Any) -> bool:
    """Return False for -1 where verl means by it none, or all ranks."""
    return not (key.endswith(("_max_samples", "_freq", "fsdp_size")) and isinstance(value, int) and value < 0)
