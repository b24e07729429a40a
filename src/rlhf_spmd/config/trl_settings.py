"""What ``trl grpo --config FILE`` and TRL's other commands read, as this project's settings, where several of theirs make one of ours.

Source of names, defaults and meanings: TRL 1.16, ``trl/scripts`` and ``trl/trainer``, and transformers' ``TrainingArguments``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_spmd.config.foreign import ForeignSettings, checkpoint_limit
from rlhf_spmd.config.schema import ConfigError

TRAINERS = {"grpo": "grpo", "rloo": "rloo", "dpo": "dpo", "kto": "kto", "sft": "sft", "reward": "reward_model"}  # ours
MARKS = {  # fields that one of the trainers has; of two that share them the first
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "scale_rewards"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("label_smoothing", "f_divergence_type", "loss_weights", "ld_alpha", "use_weighting", "discopop_tau"),
    "sft": ("dataset_text_field", "packing", "completion_only_loss", "assistant_only_loss", "eval_packing", "packing_strategy"),
    "reward": ("center_rewards_coefficient",),
}
RATES = {"sft": 2e-5, "reward": 1e-4}  # where TRL's is not 1e-6
GRPO_LOSSES = {  # loss_agg_mode and loss_mode
    "grpo": ("seq-mean-token-mean", "vanilla"),
    "bnpo": ("token-mean", "vanilla"),
    "dapo": ("token-mean", "vanilla"),
    "dr_grpo": ("seq-mean-token-sum-norm", "vanilla"),
    "cispo": ("token-mean", "cispo"),
    "sapo": ("seq-mean-token-mean", "sapo"),
}
DPO_LOSSES = {  # loss_type, and whether log-ratios are means per token
    "sigmoid": ("sigmoid", False),
    "sigmoid_norm": ("sigmoid", True),
    "ipo": ("ipo", True),
    "hinge": ("hinge", False),
    "robust": ("robust", False),
}
REWARDS: dict[str, dict[str, Any]] = {  # those that trl grpo knows by name
    "accuracy_reward": {"function": "math"},
    "reasoning_accuracy_reward": {"function": "math", "strip_reasoning": True},
    "think_format_reward": {"function": "format", "kwargs": {"pattern": r"<think>(?!.*<think>).*?</think>.*"}},
    "get_soft_overlong_punishment": {"function": "length:overlong", "kwargs": {"max_length": 1280, "buffer": 256}},
}
OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit", "muon": "muon"}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
NO_LIMIT = 1_000_000  # tokens: more than a model reads
NO_BOUND = 1e6  # of a ratio
Parts = tuple[dict[str, Any], dict[str, str]]  # our settings, and a reason for each of theirs that is not carried over as it is


def trainer_of(trl: ForeignSettings) -> tuple[str, str]:
    """Return TRL's trainer by its command's name, and the field that tells it. Raises ConfigError, one line."""
    asked, names = trl.get("trainer"), ", ".join(TRAINERS)
    if asked is not None and asked not in TRAINERS:
        raise ConfigError(f"trainer={asked}: of TRL's trainers {names} can be converted")
    settings = [(name, mark) for name, marks in MARKS.items() for mark in marks if mark in trl.given]
    if not settings and asked is None:
        raise ConfigError(f"no key tells which of TRL's trainers this is for: say trainer=dpo, or another of {names}")
    return (asked, "") if asked is not None else settings[0]


def trl_settings(trl: ForeignSettings, trainer: str) -> Parts:
    """Return our settings for those of TRL that are not copied. Raises ConfigError, one line, for a loss or sizes that are not here."""
    settings: dict[str, Any] = {"algorithm.name": TRAINERS[trainer]}
    left: dict[str, str] = {}
    samples = trainer in ("grpo", "rloo")
    parts = [_sizes(trl, samples, 8 if trainer == "grpo" else 2), _data(trl, trainer), _model(trl, trainer)]
    parts.append(
        {"grpo": _grpo, "rloo": _rloo, "dpo": _dpo, "kto": _kto, "sft": _sft, "reward": lambda _: ({}, {})}[trainer](trl)
    )
    parts += [_rewards(trl)] if samples else []
    for more, without in parts:
        settings, left = {**settings, **more}, {**left, **without}
    return settings, left


def _sizes(trl: ForeignSettings, samples: bool, usual_n: int) -> Parts:
    """Return batch sizes, the run's length, and how often it saves and validates. TRL's steps are optimizer steps, ours batches."""
    left: dict[str, str] = {}
    if "num_processes" not in trl.given:
        left["num_processes"] = "so 1 is taken: TRL's batch sizes are of one process; add num_processes=8 for 8"
    rows = trl["per_device_train_batch_size"] * trl.get("num_processes", 1)
    batch = step = rows * trl["gradient_accumulation_steps"]
    settings: dict[str, Any] = {}
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
        settings |= {
            "sampling.n": n,
            "algorithm.ppo_mini_batch_size": step // n,
            "algorithm.ppo_epochs": trl.get("num_iterations", 1),
        }
        batch //= n
    settings["data.train_batch_size"] = batch
    if (most := trl["max_steps"]) > 0:
        settings["run.steps"] = math.ceil(most / updates)
    else:
        settings |= {"data.epochs": trl["num_train_epochs"], "run.steps": None}
    for kind, ours, usual in (("save", "run.save_freq", 500), ("eval", "run.test_freq", trl.given.get("logging_steps", 10))):
        strategy = (
            trl.get("evaluation_strategy") if kind == "eval" and "evaluation_strategy" in trl else trl[f"{kind}_strategy"]
        )
        settings[ours] = 0
        if strategy == "steps":
            every = trl.get(f"{kind}_steps") or usual
            if every < 1:
                left[f"{kind}_steps"] = f"{every} is a share of the run; here {ours} is a number of steps"
            else:
                settings[ours] = math.ceil(every / updates)
        elif strategy not in ("no", False):
            left[f"{kind}_strategy"] = f"{strategy}; here {ours} is a number of steps"
    settings["run.keep_checkpoints"] = checkpoint_limit("save_total_limit", trl["save_total_limit"], left)
    return settings, left


def _data(trl: ForeignSettings, trainer: str) -> Parts:
    settings: dict[str, Any] = {}
    left: dict[str, str] = {}
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
                left[f"datasets.{theirs}"] = (
                    f"{', '.join(sorted(values))}: all paths of {ours.partition('.')[0]}.path share {ours}"
                )
        for key in sorted({key for dataset in mixed for key in dataset} - {"path", "name", "split"}):
            left[f"datasets.{key}"] = "write such rows into a file; data.path takes weights, as a mapping"
    if trl.get("evaluation_strategy", trl["eval_strategy"]) not in ("no", False):
        settings["data.val_path"] = settings.get("data.path", trl.given.get("dataset_name"))
        settings["data.val_split"] = trl.get("dataset_test_split", "test")
    if trainer in ("grpo", "rloo"):
        longest = trl.get("vllm_max_model_length")
        if longest is not None:
            settings["data.max_prompt_length"] = longest - trl.given.get("max_completion_length", 512)
        elif "max_prompt_length" not in trl:
            left["max_prompt_length"] = "so longer prompts than data.max_prompt_length=512 are dropped, and counted"
        return settings, left
    limit = trl.get("max_length")
    settings["data.max_length"] = NO_LIMIT if limit is None else limit
    if trainer == "sft":
        sides, mode = {"keep_start": "right", "keep_end": "left"}, trl.get("truncation_mode", "keep_start")
        if mode not in sides:
            raise ConfigError(f"truncation_mode={mode} must be {' or '.join(sides)}")
        side = sides[mode]
        settings |= {"data.filter_overlong": False, "data.truncation": side}
    elif trainer != "reward":
        left["truncation_mode"] = "longer rows than data.max_length are dropped, and counted"
    return settings, left


def _model(trl: ForeignSettings, trainer: str) -> Parts:
    """Return dtype, memory, optimizer and adapters of the trained role."""
    settings: dict[str, Any] = {}
    left: dict[str, str] = {}
    actor = "models.actor."
    wanted = trl.get("dtype", trl.get("torch_dtype", "auto"))
    if trl.get("bf16") or trl.get("fp16") or wanted == "bfloat16":
        settings[f"{actor}dtype"] = "bfloat16"
    elif "bf16" in trl.given or wanted == "float32":
        settings[f"{actor}dtype"] = "float32"
    if trl.get("fp16") or wanted == "float16":
        left["fp16"] = "bfloat16 is taken; there is no loss scaling"
    if "gradient_checkpointing" in trl.given:
        settings[f"{actor}activation_checkpointing"] = "full" if trl["gradient_checkpointing"] else "none"
    settings[f"{actor}optim.lr"] = trl.get("learning_rate", RATES.get(trainer, 1e-6))
    optimizer, schedule = str(trl.get("optim", ADAMW[0])), str(trl["lr_scheduler_type"])
    if optimizer in OPTIMIZERS:
        settings[f"{actor}optim.name"] = OPTIMIZERS[optimizer]
    elif optimizer not in ADAMW:
        left["optim"] = f"there is no {optimizer}; adamw takes its place"
    settings[f"{actor}optim.lr_scheduler_type"] = SCHEDULES.get(schedule, "cosine" if "cosine" in schedule else "linear")
    rest = trl.get("lr_scheduler_kwargs.min_lr_rate")
    if rest is not None:
        settings[f"{actor}optim.min_lr_ratio"] = rest
    if schedule not in SCHEDULES and not (schedule == "cosine_with_min_lr" and rest is not None):
        schedule_here = settings[f"{actor}optim.lr_scheduler_type"]
        left["lr_scheduler_type"] = f"there is no {schedule}; {schedule_here} takes its place"
    if (warmup := trl.get("warmup_steps", 0)) > 0:
        settings[f"{actor}optim.lr_warmup_steps{'_ratio' if warmup < 1 else ''}"] = warmup
    if {"adam_beta1", "adam_beta2"} & trl.given.keys():
        settings[f"{actor}optim.betas"] = [trl.get("adam_beta1", 0.9), trl.get("adam_beta2", 0.999)]
    if trl.get("use_peft"):
        settings |= {
            f"{actor}lora.{ours}": trl[f"lora_{name}"] for name, ours in (("r", "rank"), ("alpha",) * 2, ("dropout",) * 2)
        }
        if (targets := trl.get("lora_target_modules")) is None:
            left["lora_target_modules"] = "so all-linear is taken; PEFT's choice depends on the model"
        else:
            settings[f"{actor}lora.target_modules"] = targets[0] if targets == ["all-linear"] else targets
        if bits := 4 if trl.get("load_in_4bit") else 8 if trl.get("load_in_8bit") else None:
            settings[f"{actor}lora.bits"] = bits
    return settings, left


def _grpo(trl: ForeignSettings) -> Parts:
    kind, level = str(trl.get("loss_type", "dapo")), trl.get("importance_sampling_level", "token")
    if kind not in GRPO_LOSSES:
        raise ConfigError(f"loss_type={kind}: of GRPO's losses here are {', '.join(GRPO_LOSSES)}")
    (agg, mode), left = GRPO_LOSSES[kind], dict[str, str]()
    if level == "sequence" and mode == "vanilla":
        if kind != "grpo":
            left["loss_type"] = f"{kind}; with ratios of whole responses the loss is their mean"
        agg, mode = "seq-mean-token-mean", "gspo"
    settings: dict[str, Any] = {"algorithm.loss_agg_mode": agg, "algorithm.loss_mode": mode}
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
        left["scale_rewards"] = "batch; advantages are divided by the standard deviation of their group"
    settings["algorithm.norm_adv_by_std_in_grpo"] = scale not in (False, "none")
    return settings, left


def _rloo(trl: ForeignSettings) -> Parts:
    low, beta = trl.get("epsilon", 0.2), trl.get("beta", 0.05)
    settings: dict[str, Any] = {"algorithm.loss_agg_mode": "seq-mean-token-sum", "algorithm.clip_ratio_low": low}
    settings |= {"algorithm.clip_ratio_high": trl.get("epsilon_high") or low, "algorithm.clip_ratio_c": NO_BOUND}
    settings |= {"algorithm.use_kl_in_reward": bool(beta)} | ({"algorithm.kl_ctrl.kl_coef": beta} if beta else {})
    late = trl.given.get("num_iterations", 1) > 1 or "steps_per_generation" in trl.given or "generation_batch_size" in trl.given
    return settings, {"epsilon": "bounds the ratio of each token here, of the whole response there"} if late else {}


def _dpo(trl: ForeignSettings) -> Parts:
    kinds = trl.get("loss_type", "sigmoid")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if not isinstance(kind, str) or kind not in DPO_LOSSES:
        raise ConfigError(f"loss_type={kinds}: of DPO's losses here are {', '.join(DPO_LOSSES)}, one at a time")
    if (divergence := trl.get("f_divergence_type", "reverse_kl")) != "reverse_kl":
        raise ConfigError(f"f_divergence_type={divergence}: here it is reverse_kl")
    ours, per_token = DPO_LOSSES[kind]
    settings: dict[str, Any] = {"algorithm.loss_type": ours, "algorithm.beta": trl.get("beta", 0.1)}
    settings["algorithm.length_normalized"] = per_token
    if kind == "robust":
        settings["algorithm.label_smoothing"] = trl.get("label_smoothing", 0.0)
        return settings, {}
    unread = trl.get("label_smoothing")
    return settings, {
        "label_smoothing": f"TRL does not read it with loss_type={kind}; here it is conservative DPO's"
    } if unread else {}


def _kto(trl: ForeignSettings) -> Parts:
    if (kind := trl.get("loss_type", "kto")) != "kto":
        raise ConfigError(f"loss_type={kind}: of KTO's losses here is kto")
    return {"algorithm.beta": trl.get("beta", 0.1)}, {}


def _sft(trl: ForeignSettings) -> Parts:
    if (kind := trl.get("loss_type")) not in (None, "nll", "chunked_nll"):
        raise ConfigError(f"loss_type={kind}: of SFT's losses here is nll")
    if trl.get("assistant_only_loss"):
        return {}, {}
    return {}, {"assistant_only_loss": "so TRL learns all turns of a conversation; here the assistant's alone are learnt"}


def _rewards(trl: ForeignSettings) -> Parts:
    """Return the reward model and ``rewards.<name>`` for TRL's list of functions, each with its weight."""
    names, weights = trl.get("reward_funcs", []), trl.get("reward_weights", [])
    if not isinstance(names, list) or not isinstance(weights, list):
        raise ConfigError(f"reward_funcs={names} and reward_weights={weights} must be lists")
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"reward_funcs={names} must be a list of names")
    model, weights = trl.get("reward_model_name_or_path"), list(weights)
    count = len(names) + (model is not None)
    if not count:
        return {}, {"reward_funcs": "so there is no reward: give rewards.<name>.function for each that the script passes"}
    if weights and len(weights) != count:
        raise ConfigError(f"reward_weights={weights}: there are {count} rewards, the reward model first")
    settings: dict[str, Any] = {}
    if model is not None:
        settings["reward.model"] = model
        settings |= {"reward.model_weight": weights.pop(0)} if weights else {}
    for number, name in enumerate(names):
        module, _, function = name.rpartition(".")
        known: Mapping[str, Any] = REWARDS.get(name, {"function": f"{module}:{function}"})
        is_dotted = bool(module) and all(part.isidentifier() for part in name.split("."))
        if name not in REWARDS and not is_dotted:
            raise ConfigError(
                f"reward_funcs: {name!r} is none of {', '.join(REWARDS)}, and no dotted name of a function; a model goes under "
                "reward_model_name_or_path"
            )
        label = function if f"rewards.{function}.function" not in settings else f"{function}_{number}"
        settings |= {f"rewards.{label}.{key}": value for key, value in known.items()}
        settings |= {f"rewards.{label}.weight": weights[number]} if weights else {}
        if known["function"] == "math":
            settings["data.answer_key"] = "solution"
    return settings, {}
