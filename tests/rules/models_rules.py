"""What breaks each rule of ``models``."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.rules import check_rules
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.router_balance import BALANCE_RULES, BalanceLoss
from rlhf_spmd.models.spec import ModelSpec
from small_models import CONFIGS

ROLE = "models.actor"
LAYOUT = f"{ROLE}.layout"
MANY_HEADS = {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 96}


def spec_of(family: str, changes: dict[str, Any] | None = None) -> ModelSpec:
    return spec_from_config({**CONFIGS[family], **(changes or {})}, "test")


def divide(family: str, changes: dict[str, Any] | None = None, **ranks: int) -> None:
    check_layout(spec_of(family, changes), LAYOUT, **ranks)


def balance(family: str, trained: bool) -> None:
    check_rules(BALANCE_RULES, BalanceLoss(0.1, spec_of(family), trained), ROLE)


CASES = [
    (
        partial(divide, "llama", pp=3, vpp=2),
        f"{LAYOUT}.pp=3, {LAYOUT}.vpp=2: each of 6 stages needs a layer, but the model has num_hidden_layers=4; choose at most as many "
        "stages",
    ),
    (
        partial(divide, "llama", tp=3),
        f"{LAYOUT}.tp=3: does not divide num_attention_heads=4; choose a tp that does",
    ),
    (
        partial(divide, "llama", {"intermediate_size": 30}, tp=4),
        f"{LAYOUT}.tp=4: does not divide intermediate_size=30; choose a tp that does",
    ),
    (
        partial(divide, "qwen3-moe", {"moe_intermediate_size": 22}, tp=4),
        f"{LAYOUT}.tp=4: does not divide moe_intermediate_size=22; choose a tp that does",
    ),
    (
        partial(divide, "qwen3-5", {"linear_num_key_heads": 2}, tp=4),
        f"{LAYOUT}.tp=4: does not divide linear_num_key_heads=2; choose a tp that does",
    ),
    (
        partial(divide, "llama", MANY_HEADS, tp=4),
        f"{LAYOUT}.tp=4: it must divide num_key_value_heads=6, or be divided by it: a rank holds whole KV heads, or several ranks hold "
        "copies of one; choose another tp",
    ),
    (
        partial(divide, "llama", {"vocab_size": 3}, tp=4),
        f"{LAYOUT}.tp=4: there are not as many tokens in a vocabulary of vocab_size=3; choose a smaller tp",
    ),
    (
        partial(divide, "qwen3-5", cp=2),
        f"{LAYOUT}.cp=2: linear attention (qwen3_5_text) passes its state from token to token, and ranks cannot share a row's tokens; "
        "allowed: 1",
    ),
    (
        partial(divide, "llama", {"num_attention_heads": 12, "hidden_size": 48}, cp=8),
        f"{LAYOUT}.cp=8: its ranks share the heads of the attention, and with tp=1 a rank has 12 query heads and 2 KV heads; "
        "allowed: 1, 2, 4, 6, 12",
    ),
    (
        partial(divide, "llama", ep=2),
        f"{LAYOUT}.ep=2: models of llama have 0 experts to share; allowed: 1",
    ),
    (
        partial(divide, "qwen3-moe", ep=4),
        f"{LAYOUT}.ep=4: models of qwen3_moe have 6 experts to share; allowed: 1, 2, 3, 6",
    ),
    (partial(balance, "qwen3-moe", False), f"{ROLE}.router_aux_loss_coef=0.1: this role is not trained; leave it out"),
    (partial(balance, "llama", True), f"{ROLE}.router_aux_loss_coef=0.1: models of llama have no experts; leave it out"),
    (
        lambda: check_tree(LoraConfig(rank=4, target_modules="q_proj"), f"{ROLE}.lora"),
        f"{ROLE}.lora.target_modules=q_proj: it names no matrices; set all-linear, or a list of modules such as [q_proj, v_proj]",
    ),
]
