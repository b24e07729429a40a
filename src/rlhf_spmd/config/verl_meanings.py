"""Settings of verl that stand for several of ours at once: teachers, pairs of bounds, variables of a chat template.

Source of their meanings: verl of August 2026, ``trainer/config/distillation``, ``trainer/ppo/rollout_corr_helper.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_spmd.config.schema import ConfigError

OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "fusedadam": "adamw",
    "adamw8bit": "adamw_8bit",
    "muon": "muon",
}  # Adam decays apart
GATHERED = "layout.zero=3 shards the weights: generation's tp or pp does not divide training's"
LOSS, CORRECTION = "distillation.distillation_loss.", "algorithm.rollout_correction."
VARIABLES = "data.apply_chat_template_kwargs"


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


def replay_of(verl: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``models.actor.router_replay`` where updates take the experts of an earlier pass; and why others cannot be had."""
    for key in (key for key in verl if re.fullmatch(r"actor_rollout_ref\.actor\.(\w+\.)?router_replay\.mode", key)):
        if verl[key] in ("R2", "R3"):
            records = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
            unmeant = verl[key] == "R3" and not verl.get(records, True)
            return {"models.actor.router_replay": verl[key]}, {records: "R3 takes the experts of generation"} if unmeant else {}
        if verl[key] != "disabled":
            return {}, {key: f"there is no {verl[key]}; models.actor.router_replay has R2 and R3"}
    return {}, {}


def ranks_of_experts(verl: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``layout.ep`` of roles whose experts Megatron cuts into fewer columns than other matrices: its ep counts ranks of tp too.

    Here tp always cuts an expert, so ep is as much smaller. A rank holds as many numbers of experts.
    """
    made = {}
    for key, etp in verl.items():
        section = re.fullmatch(
            r"(actor_rollout_ref\.actor\.|actor_rollout_ref\.ref\.|critic\.|engine\.).*\b(expert_tensor_parallel_size|etp)", key
        )
        if section is not None and etp:
            role = {"actor_rollout_ref.ref.": "reference", "critic.": "critic"}.get(section[1], "actor")
            ep, tp = (found.get(f"models.{role}.layout.{axis}") or 1 for axis in ("ep", "tp"))
            made[f"models.{role}.layout.ep"] = max(1, ep * etp // tp)
    return made


def whole_experts_of(verl: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``models.actor.generation.ep`` where a rank that generates has whole experts; and why that cannot be had.

    verl shares them among tp * data_parallel_size ranks; here the ranks of tp do, and each replica has all.
    """
    key, tp = "actor_rollout_ref.rollout.expert_parallel_size", found.get("models.actor.generation.tp", 1)
    if verl.get(key) in (None, 1):
        return {}, {}
    if tp == 1:
        return {}, {key: "generation shares experts among the ranks of generation.tp, and that is 1"}
    return {"models.actor.generation.ep": tp}, {} if verl[key] == tp else {key: f"the {tp} ranks of generation.tp share them"}


def optimizer_of(verl: Mapping[str, Any], section: str, role: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``models.<role>.optim.name`` where ``<section>.optimizer`` asks for another than AdamW; and why it cannot be had."""
    asked = str(verl.get(f"{section}.optimizer", "AdamW"))
    name = OPTIMIZERS.get(asked.lower())
    if name is None:
        return {}, {f"{section}.optimizer": f"there is no {asked}; adamw takes its place"}
    return {} if name == "adamw" else {f"models.{role}.optim.name": name}, {}


def shard_for_generation(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``layout.zero=3`` for an actor whose generation's ``tp`` or ``pp`` does not divide training's: whole weights are then
    gathered, so that any fits. Generation with whole experts needs none."""
    actor = "models.actor."
    pairs = [(found.get(f"{actor}layout.{axis}") or 1, found.get(f"{actor}generation.{axis}") or 1) for axis in ("tp", "pp")]
    fits = (
        f"{actor}layout.zero" in found
        or f"{actor}generation.ep" in found
        or all(training % generation == 0 for training, generation in pairs)
    )
    return {} if fits else {f"{actor}layout.zero": 3}


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
