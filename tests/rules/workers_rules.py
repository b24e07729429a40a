"""What breaks each rule of ``workers``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.optim_config import OptimConfig

CASES = [
    (
        lambda: check_tree(RoleConfig(dtype="float64", optim=OptimConfig(name="adamw_8bit")), "models.actor"),
        "models.actor.optim.name=adamw_8bit, models.actor.dtype=float64: bitsandbytes computes in float32; set optim.name=adamw",
    ),
    (
        lambda: check_tree(RoleConfig(dtype="float64", lora=LoraConfig(rank=2, bits=4)), "models.actor"),
        "models.actor.lora.bits=4, models.actor.dtype=float64: bitsandbytes has no float64; set dtype=bfloat16 or float32",
    ),
    (
        lambda: check_tree(OptimConfig(betas=[0.9]), "models.actor.optim"),
        "models.actor.optim.betas=[0.9]: AdamW has two; give two numbers",
    ),
]
