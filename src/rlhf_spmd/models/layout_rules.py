"""Which layouts a model allows: rules over its sizes and the numbers of ranks that divide them."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.models.spec import ModelSpec


@dataclass(frozen=True)
class DividedModel:
    """A model and the ranks that divide it, as keys of a layout name them.

    ``expert_parallel_generation``: the tp ranks share whole experts, see :func:`check_generation_ep`.
    """

    spec: ModelSpec
    pp: int = 1
    vpp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_parallel_generation: bool = False

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages, virtual ones included."""
        return self.pp * self.vpp

    @property
    def undivided(self) -> str:
        """Return the first size that tp has to divide and does not, ``key=size``; empty if it divides all."""
        spec = self.spec
        sizes = {key: getattr(spec, key) for key in ("num_attention_heads", "intermediate_size")}
        if spec.experts is not None:
            if not self.expert_parallel_generation:
                sizes["moe_intermediate_size"] = spec.experts.intermediate_size
            sizes["shared_expert_intermediate_size"] = spec.experts.shared_size
        if spec.delta_rule is not None:
            sizes["linear_num_key_heads"] = spec.delta_rule.key_heads
        return next((f"{key}={size}" for key, size in sizes.items() if size % self.tp), "")

    @property
    def cut_kv_heads(self) -> int:
        """Return a number of KV heads, of some layer, that tp would cut; 0 if it cuts none."""
        counts = [kind.num_key_value_heads for kind in self.spec.kinds_of_heads()]
        return next((count for count in counts if count % self.tp and self.tp % count), 0)

    @property
    def query_heads(self) -> int:
        """Return the query heads of a rank."""
        return self.spec.num_attention_heads // self.tp

    @property
    def kv_heads(self) -> list[int]:
        """Return the KV heads of a rank, for each kind of layers."""
        return [max(kind.num_key_value_heads // self.tp, 1) for kind in self.spec.kinds_of_heads()]

    @property
    def allowed_cp(self) -> list[int]:
        """Return the values of cp that divide the heads of a rank in all layers."""
        divisors = [n for n in range(1, self.query_heads + 1) if self.query_heads % n == 0]
        return [n for n in divisors if all(count % n == 0 or n % count == 0 for count in self.kv_heads)]

    @property
    def num_experts(self) -> int:
        """Return the number of experts of a mixture; 0 without mixtures."""
        return 0 if self.spec.experts is None else self.spec.experts.num_experts

    @property
    def allowed_ep(self) -> list[int]:
        """Return the values of ep that divide the experts."""
        return [n for n in range(1, max(self.num_experts, 1) + 1) if max(self.num_experts, 1) % n == 0]


LAYOUT_RULES: Rules = (
    Rule(
        ("pp", "vpp"),
        lambda s: s.stages > s.spec.num_hidden_layers,
        "each of {s.stages} stages needs a layer, but the model has num_hidden_layers={s.spec.num_hidden_layers}",
        "choose at most as many stages",
    ),
    Rule(("tp",), lambda s: bool(s.undivided), "does not divide {s.undivided}", "choose a tp that does"),
    Rule(
        ("tp",),
        lambda s: bool(s.cut_kv_heads),
        "it must divide num_key_value_heads={s.cut_kv_heads}, or be divided by it: a rank holds whole KV heads, or several ranks hold "
        "copies of one",
        "choose another tp",
    ),
    Rule(
        ("tp",),
        lambda s: s.spec.vocab_size < s.tp,
        "there are not as many tokens in a vocabulary of vocab_size={s.spec.vocab_size}",
        "choose a smaller tp",
    ),
    Rule(
        ("cp",),
        lambda s: s.cp > 1 and s.spec.delta_rule is not None,
        "linear attention ({s.spec.family}) passes its state from token to token, and ranks cannot share a row's tokens",
        "allowed: 1",
    ),
    Rule(
        ("cp",),
        lambda s: s.cp > 1 and s.cp not in s.allowed_cp,
        "its ranks share the heads of the attention, and with tp={s.tp} a rank has {s.query_heads} query heads and {s.kv_heads} KV "
        "heads",
        "allowed: {s.allowed_cp}",
    ),
    Rule(
        ("ep",),
        lambda s: s.ep > 1 and s.ep not in s.allowed_ep,
        "models of {s.spec.family} have {s.num_experts} experts to share",
        "allowed: {s.allowed_ep}",
    ),
)


def check_layout(
    spec: ModelSpec,
    where: str,
    pp: int = 1,
    tp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_parallel_generation: bool = False,
) -> None:
    """Raise ValueError if ranks cannot divide the model so. ``where`` names the layout, as in ``models.actor.layout``."""
    check_rules(LAYOUT_RULES, DividedModel(spec, pp, vpp, tp, cp, ep, expert_parallel_generation), where)


def check_generation_ep(spec: ModelSpec, ep: int, tp: int, where: str, tp_key: str) -> bool:
    """Return True if each tp rank that generates has ``1 / ep`` of the experts, whole. ``tp_key``: the setting of ``tp``.

    Raises ValueError for an ``ep`` that is neither 1 nor ``tp``, and if the experts cannot be shared so.
    """
    if ep not in (1, tp):
        allowed = "1" if tp == 1 else f"1 and {tp}"
        raise ValueError(f"{where}.ep={ep}: the tp ranks share the experts, and {tp_key} is {tp}; allowed: {allowed}")
    check_layout(spec, where, ep=ep)
    return ep > 1
