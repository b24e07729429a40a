"""Settings of ``trl grpo --config FILE`` and TRL's other commands, where several of them make one of ours.

Source of names, defaults and meanings: TRL 1.16, ``trl/scripts`` and ``trl/trainer``, and transformers' ``TrainingArguments``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_spmd.config.foreign import Conversion, ForeignSettings, foreign_names
from rlhf_spmd.config.schema import ConfigError

NO_LIMIT = 1_000_000  # tokens: more than a model reads
NO_BOUND = 1e6  # of a ratio


def _table(name: str) -> dict[str, Any]:
    return foreign_names()["TRL"][name]


def trainer_of(trl: ForeignSettings) -> tuple[str, str]:
    """Return TRL's trainer by its command's name, and the field that tells it. Raises ConfigError, one line."""
    trainer = trl.get("trainer")
    trainers = _table("trainers")
    if trainer is not None and trainer not in trainers:
        raise ConfigError(f"trainer={trainer}: of TRL's trainers {', '.join(trainers)} can be converted")
    if trainer is not None:
        return trainer, ""
    for name, marks in _table("marks").items():
        for mark in marks.split():
            if mark in trl.written:
                return name, mark
    raise ConfigError(f"no key tells which of TRL's trainers this is for: say trainer=dpo, or another of {', '.join(trainers)}")


def set_trl(conversion: Conversion, trainer: str) -> None:
    """Set what is not copied from TRL. Raises ConfigError, one line, for a loss or sizes that are not here."""
    conversion.settings["algorithm.name"] = _table("trainers")[trainer]
    samples = trainer in ("grpo", "rloo")
    _set_sizes(conversion, samples, 8 if trainer == "grpo" else 2)
    _set_data(conversion, trainer)
    _set_model(conversion, trainer)
    set_loss = {"grpo": _set_grpo, "rloo": _set_rloo, "dpo": _set_dpo, "kto": _set_kto, "sft": _set_sft}.get(trainer)
    if set_loss is not None:
        set_loss(conversion)
    if samples:
        _set_rewards(conversion)


def _set_sizes(conversion: Conversion, samples: bool, usual_n: int) -> None:
    """Set batch sizes, the run's length, and how often it saves and validates. TRL's steps are optimizer steps, ours batches."""
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    if "num_processes" not in trl.written:
        left_out["num_processes"] = "so 1 is taken: TRL's batch sizes are of one process; add num_processes=8 for 8"
    rows = trl["per_device_train_batch_size"] * trl.get("num_processes", 1)
    batch = step = rows * trl["gradient_accumulation_steps"]
    updates = 1
    if samples:
        n = trl.get("num_generations", usual_n)
        batch = trl.get("generation_batch_size") or rows * (
            trl.get("steps_per_generation") or trl["gradient_accumulation_steps"]
        )
        if step % n or batch % step:
            raise ConfigError(
                f"per_device_train_batch_size * num_processes * gradient_accumulation_steps = {step} completions of an optimizer step: "
                f"must be a multiple of num_generations={n}, whose responses stay together here, and divide the {batch} of a batch"
            )
        updates = batch // step * trl.get("num_iterations", 1)
        settings |= {"sampling.n": n, "algorithm.ppo_mini_batch_size": step // n}
        settings["algorithm.ppo_epochs"] = trl.get("num_iterations", 1)
        batch //= n
    settings["data.train_batch_size"] = batch
    if trl["max_steps"] > 0:
        settings["run.steps"] = math.ceil(trl["max_steps"] / updates)
    else:
        settings |= {"data.epochs": trl["num_train_epochs"], "run.steps": None}
    for kind, ours, usual in (("save", "run.save_freq", 500), ("eval", "run.test_freq", trl.written.get("logging_steps", 10))):
        has_old_name = kind == "eval" and "evaluation_strategy" in trl
        strategy = trl.get("evaluation_strategy" if has_old_name else f"{kind}_strategy")
        settings[ours] = 0
        if strategy == "steps":
            every = trl.get(f"{kind}_steps") or usual
            if every < 1:
                left_out[f"{kind}_steps"] = f"{every} is a share of the run; here {ours} is a number of steps"
            else:
                settings[ours] = math.ceil(every / updates)
        elif strategy not in ("no", False):
            left_out[f"{kind}_strategy"] = f"{strategy}; here {ours} is a number of steps"
    conversion.keep_checkpoints("save_total_limit")


def _set_data(conversion: Conversion, trainer: str) -> None:
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    if mixed := trl.get("datasets"):
        trl.get("dataset_name")  # which TRL does not read either
        if not isinstance(mixed, list) or not all(isinstance(dataset, dict) and "path" in dataset for dataset in mixed):
            raise ConfigError(f"datasets={mixed} must be a list of mappings, each with a path")
        paths = [dataset["path"] for dataset in mixed]
        settings["data.path"] = paths if len(paths) > 1 else paths[0]
        for theirs, ours in (("split", "data.split"), ("name", "data.subset")):
            values = list({str(dataset[theirs]) for dataset in mixed if dataset.get(theirs) is not None})
            if len(values) == 1 and all(theirs in dataset for dataset in mixed):
                settings[ours] = values[0]
            elif values:
                left_out[f"datasets.{theirs}"] = f"{', '.join(sorted(values))}: all paths of data.path share {ours}"
        for key in sorted({key for dataset in mixed for key in dataset} - {"path", "name", "split"}):
            left_out[f"datasets.{key}"] = "write such rows into a file; data.path takes weights, as a mapping"
    if trl.get("evaluation_strategy", trl["eval_strategy"]) not in ("no", False):
        settings["data.val_path"] = settings.get("data.path", trl.written.get("dataset_name"))
        settings["data.val_split"] = trl.get("dataset_test_split", "test")
    if trainer in ("grpo", "rloo"):
        longest = trl.get("vllm_max_model_length")
        if longest is not None:
            settings["data.max_prompt_length"] = longest - trl.written.get("max_completion_length", 512)
        elif "max_prompt_length" not in trl:
            left_out["max_prompt_length"] = "so longer prompts than data.max_prompt_length=512 are dropped, and counted"
        return
    limit = trl.get("max_length")
    settings["data.max_length"] = NO_LIMIT if limit is None else limit
    if trainer == "sft":
        sides, mode = {"keep_start": "right", "keep_end": "left"}, trl.get("truncation_mode", "keep_start")
        if mode not in sides:
            raise ConfigError(f"truncation_mode={mode} must be {' or '.join(sides)}")
        side = sides[mode]
        settings |= {"data.filter_overlong": False, "data.truncation": side}
    elif trainer != "reward":
        left_out["truncation_mode"] = "longer rows than data.max_length are dropped, and counted"


def _set_model(conversion: Conversion, trainer: str) -> None:
    """Set dtype, memory, optimizer and adapters of the trained role."""
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    actor = "models.actor."
    wanted = trl.get("dtype", trl.get("torch_dtype", "auto"))
    if trl.get("bf16") or trl.get("fp16") or wanted == "bfloat16":
        settings[f"{actor}dtype"] = "bfloat16"
    elif "bf16" in trl.written or wanted == "float32":
        settings[f"{actor}dtype"] = "float32"
    if trl.get("fp16") or wanted == "float16":
        left_out["fp16"] = "bfloat16 is taken; there is no loss scaling"
    if "gradient_checkpointing" in trl.written:
        settings[f"{actor}activation_checkpointing"] = "full" if trl["gradient_checkpointing"] else "none"
    settings[f"{actor}optim.lr"] = trl.get("learning_rate", _table("rates").get(trainer, 1e-6))
    optimizer, schedule = str(trl.get("optim", "adamw_torch")), str(trl["lr_scheduler_type"])
    name = _table("optimizers").get(optimizer)
    if name is None:
        left_out["optim"] = f"there is no {optimizer}; adamw takes its place"
    elif name != "adamw":
        settings[f"{actor}optim.name"] = name
    schedules = _table("schedules")
    settings[f"{actor}optim.lr_scheduler_type"] = schedules.get(schedule, "cosine" if "cosine" in schedule else "linear")
    rest = trl.get("lr_scheduler_kwargs.min_lr_rate")
    if rest is not None:
        settings[f"{actor}optim.min_lr_ratio"] = rest
    if schedule not in schedules and not (schedule == "cosine_with_min_lr" and rest is not None):
        schedule_here = settings[f"{actor}optim.lr_scheduler_type"]
        left_out["lr_scheduler_type"] = f"there is no {schedule}; {schedule_here} takes its place"
    if (warmup := trl.get("warmup_steps", 0)) > 0:
        settings[f"{actor}optim.lr_warmup_steps{'_ratio' if warmup < 1 else ''}"] = warmup
    if {"adam_beta1", "adam_beta2"} & trl.written.keys():
        settings[f"{actor}optim.betas"] = [trl.get("adam_beta1", 0.9), trl.get("adam_beta2", 0.999)]
    if trl.get("use_peft"):
        for name, our_name in (("r", "rank"), ("alpha",) * 2, ("dropout",) * 2):
            settings[f"{actor}lora.{our_name}"] = trl[f"lora_{name}"]
        if (targets := trl.get("lora_target_modules")) is None:
            left_out["lora_target_modules"] = "so all-linear is taken; PEFT's choice depends on the model"
        else:
            settings[f"{actor}lora.target_modules"] = targets[0] if targets == ["all-linear"] else targets
        if bits := 4 if trl.get("load_in_4bit") else 8 if trl.get("load_in_8bit") else None:
            settings[f"{actor}lora.bits"] = bits


def _set_grpo(conversion: Conversion) -> None:
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    kind = str(trl.get("loss_type", "dapo"))
    level = trl.get("importance_sampling_level", "token")
    losses = _table("grpo_losses")
    if kind not in losses:
        raise ConfigError(f"loss_type={kind}: of GRPO's losses here are {', '.join(losses)}")
    agg, mode = losses[kind]
    if level == "sequence" and mode == "vanilla":
        if kind != "grpo":
            left_out["loss_type"] = f"{kind}; with ratios of whole responses the loss is their mean"
        agg, mode = "seq-mean-token-mean", "gspo"
    settings |= {"algorithm.loss_agg_mode": agg, "algorithm.loss_mode": mode}
    low = trl.get("epsilon", 0.2)
    high = trl.get("epsilon_high", low) if trl.get("epsilon_high") is not None else low
    if mode == "cispo":
        if high <= 1:
            raise ConfigError(f"epsilon_high={high}: with loss_type=cispo it is the largest ratio, so it must be above 1")
        low, high = 1.0, high - 1
    if mode != "sapo":
        settings |= {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}
    if mode == "vanilla":
        settings["algorithm.clip_ratio_c"] = trl.get("delta") or NO_BOUND
    beta = trl.get("beta", 0.0)
    settings |= {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": beta} if beta else {"algorithm.use_kl_loss": False}
    scale = trl.get("scale_rewards", "group")
    if scale not in (True, False, "group", "batch", "none"):
        raise ConfigError(f"scale_rewards={scale} must be group, batch or none")
    if scale == "batch":
        left_out["scale_rewards"] = "batch; advantages are divided by the standard deviation of their group"
    settings["algorithm.norm_adv_by_std_in_grpo"] = scale not in (False, "none")


def _set_rloo(conversion: Conversion) -> None:
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    low, beta = trl.get("epsilon", 0.2), trl.get("beta", 0.05)
    settings |= {"algorithm.loss_agg_mode": "seq-mean-token-sum", "algorithm.clip_ratio_low": low}
    settings |= {"algorithm.clip_ratio_high": trl.get("epsilon_high") or low, "algorithm.clip_ratio_c": NO_BOUND}
    settings |= {"algorithm.use_kl_in_reward": bool(beta)} | ({"algorithm.kl_ctrl.kl_coef": beta} if beta else {})
    is_reused = trl.written.get("num_iterations", 1) > 1
    if is_reused or {"steps_per_generation", "generation_batch_size"} & trl.written.keys():
        left_out["epsilon"] = "bounds the ratio of each token here, of the whole response there"


def _set_dpo(conversion: Conversion) -> None:
    trl, settings, left_out = conversion.source, conversion.settings, conversion.left_out
    losses = _table("dpo_losses")
    kinds = trl.get("loss_type", "sigmoid")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if not isinstance(kind, str) or kind not in losses:
        raise ConfigError(f"loss_type={kinds}: of DPO's losses here are {', '.join(losses)}, one at a time")
    if (divergence := trl.get("f_divergence_type", "reverse_kl")) != "reverse_kl":
        raise ConfigError(f"f_divergence_type={divergence}: here it is reverse_kl")
    settings["algorithm.loss_type"], settings["algorithm.length_normalized"] = losses[kind]
    settings["algorithm.beta"] = trl.get("beta", 0.1)
    if kind == "robust":
        settings["algorithm.label_smoothing"] = trl.get("label_smoothing", 0.0)
    elif trl.get("label_smoothing"):
        left_out["label_smoothing"] = f"TRL does not read it with loss_type={kind}; here it is conservative DPO's"


def _set_kto(conversion: Conversion) -> None:
    trl = conversion.source
    if (kind := trl.get("loss_type", "kto")) != "kto":
        raise ConfigError(f"loss_type={kind}: of KTO's losses here is kto")
    conversion.settings["algorithm.beta"] = trl.get("beta", 0.1)


def _set_sft(conversion: Conversion) -> None:
    trl = conversion.source
    if (kind := trl.get("loss_type")) not in (None, "nll", "chunked_nll"):
        raise ConfigError(f"loss_type={kind}: of SFT's losses here is nll")
    if not trl.get("assistant_only_loss"):
        why = "so TRL learns all turns of a conversation; here the assistant's alone are learnt"
        conversion.left_out["assistant_only_loss"] = why


def _set_rewards(conversion: Conversion) -> None:
    """Set the reward model and ``rewards.<name>`` for TRL's list of functions, each with its weight."""
    trl, settings = conversion.source, conversion.settings
    names, weights = trl.get("reward_funcs", []), trl.get("reward_weights", [])
    if not isinstance(names, list) or not isinstance(weights, list):
        raise ConfigError(f"reward_funcs={names} and reward_weights={weights} must be lists")
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"reward_funcs={names} must be a list of names")
    model, weights = trl.get("reward_model_name_or_path"), list(weights)
    count = len(names) + (model is not None)
    if not count:
        why = "so there is no reward: give rewards.<name>.function for each that the script passes"
        conversion.left_out["reward_funcs"] = why
        return
    if weights and len(weights) != count:
        raise ConfigError(f"reward_weights={weights}: there are {count} rewards, the reward model first")
    if model is not None:
        settings["reward.model"] = model
        settings |= {"reward.model_weight": weights.pop(0)} if weights else {}
    rewards = _table("rewards")
    for number, name in enumerate(names):
        module, _, function = name.rpartition(".")
        known: Mapping[str, Any] = rewards.get(name, {"function": f"{module}:{function}"})
        is_dotted = bool(module) and all(part.isidentifier() for part in name.split("."))
        if name not in rewards and not is_dotted:
            raise ConfigError(
                f"reward_funcs: {name!r} is none of {', '.join(rewards)}, and no dotted name of a function; a model goes under "
                "reward_model_name_or_path"
            )
        label = function if f"rewards.{function}.function" not in settings else f"{function}_{number}"
        settings |= {f"rewards.{label}.{key}": value for key, value in known.items()}
        settings |= {f"rewards.{label}.weight": weights[number]} if weights else {}
        if known["function"] == "math":
            settings["data.answer_key"] = "solution"
