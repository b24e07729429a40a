"""Overrides for runs of the small task (``tasks``): layouts, precisions, micro-batches, prompts in flight."""

from __future__ import annotations

import re

STEADY = tuple(f"models.{role}.optim.eps=1e-3" for role in ("actor", "critic"))  # Adam does not magnify what rounds off at 0
FP64 = tuple(f"models.{role}.dtype=float64" for role in ("actor", "critic", "reference", "reward"))


def layout(
    role: str, pp: int = 1, tp: int = 1, dp: int = 1, zero: int = 0, zero_size: int | None = None, cp: int = 1, ep: int = 1
) -> tuple[str, ...]:
    """Overrides; ``role`` "generation" is the actor's generation layout."""
    if role == "generation":
        return f"models.actor.generation.pp={pp}", f"models.actor.generation.tp={tp}"
    keys = {"pp": pp, "tp": tp, "dp": dp, "zero": zero, "cp": cp, "ep": ep}
    keys |= {} if zero_size is None else {"zero_size": zero_size}
    return tuple(f"models.{role}.layout.{key}={n}" for key, n in keys.items())


def layouts(text: str) -> tuple[str, ...]:
    """Overrides; ``text`` such as "actor tp2 dp2, generation tp2, critic dp4 zero3"."""
    overrides: tuple[str, ...] = ()
    for part in text.split(", "):
        role, *axes = part.split()
        overrides += layout(role, **{axis: int(size) for axis, size in re.findall(r"([a-z_]+)(\d+)", " ".join(axes))})
    return overrides


def micro_batches(rows: int | None = None, tokens: int | None = None) -> tuple[str, ...]:
    if tokens:
        return (f"algorithm.ppo_max_token_len_per_gpu={tokens}",)
    return "algorithm.use_dynamic_bsz=false", f"algorithm.ppo_micro_batch_size_per_gpu={rows}"


# Each rank of the reward role starts a process that scores, which takes 0.2 CPU seconds.
ONE_SCORER = ("placement.pools.scores=[0]", "models.reward.pool=scores")
ACROSS_NODES = (*layout("actor", tp=2), *layout("critic", dp=2, zero=1))
IN_FLIGHT = 16  # prompts; a step takes half of them
PARTIAL = (
    f"rollout.in_flight={IN_FLIGHT}",
    "models.actor.generation.max_num_seqs=8",
    "sampling.logit_bias={0: 2.0}",  # the end of the text is likelier: responses of many lengths
    "run.save_freq=3",
    "run.keep_checkpoints=3",
)
