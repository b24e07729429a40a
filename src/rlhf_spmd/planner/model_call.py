"""The calls that a plan places, and the layouts that each may have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.quantized import check_quantized
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner.machine import Gpu
from rlhf_spmd.planner.memory import RoleSettings
from rlhf_spmd.planner.shapes import ModelShape, Workload, divisors

MAX_STAGES = 16


@dataclass(frozen=True)
class ModelCall:
    """A call of a role with a model, which a plan places.

    - name: ``role.call``
    - method: as the configuration names it
    - after: the indices of calls that must have ended
    - settings: what memory depends on, as configured
    - num_dealt_units: groups or rows that are dealt to its replicas
    - captures: on replicas of one rank, decode steps can be CUDA graphs
    - home, shares_home: as in :class:`~rlhf_spmd.planner.problem.CallNode`
    - cp: as configured; it is not searched
    - versions: of the weights that it keeps on other ranks than its home's, of which it uses one
    """

    name: str
    role: str
    method: str
    kind: str
    after: frozenset[int]
    spec: ModelSpec
    shape: ModelShape
    work: Workload
    settings: RoleSettings
    generation: GenerationConfig
    lora: LoraConfig
    num_dealt_units: int
    captures: bool = False
    home: bool = False
    shares_home: bool = False
    cp: int = 1
    versions: int = 1

    @property
    def expert_ranks(self) -> list[int]:
        """Return the numbers of ranks that are tried to share the experts."""
        return [1] if self.spec.experts is None or self.kind == "generate" else divisors(self.spec.experts.num_experts)

    @property
    def shares_experts(self) -> bool:
        """Return True if the ranks of tp share the experts in generation."""
        return self.kind == "generate" and self.generation.ep > 1

    def has_graphs_on(self, device: Gpu) -> bool:
        """Return True if decode steps without pipeline stages can be CUDA graphs on this device."""
        captures = self.captures and not device.on_host and (self.spec.experts is None or device.groups_experts)
        return self.kind == "generate" and captures and not self.generation.enforce_eager

    def check_cut(self, pp: int, tp: int, cp: int, ep: int, where: str) -> None:
        """Raise ValueError if the model cannot be cut so."""
        shared = self.shares_experts
        check_layout(self.spec, where, pp, tp, cp=cp, ep=tp if shared else ep, expert_parallel_generation=shared)


def layouts(call: ModelCall, size: int, tp_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (pp, tp, dp) of ``size`` ranks that the model, its rows and cp allow, tp one of ``tp_sizes``.

    Stages have equally many layers if any number of stages above 1 allows that.
    """
    if size % call.cp:
        return []
    num_layers = call.spec.num_hidden_layers
    generates = call.kind == "generate"
    num_units = call.num_dealt_units if generates else call.num_dealt_units // call.work.mini_batches
    allows_unequal_stages = all(num_layers % n for n in range(2, MAX_STAGES + 1))  # nothing divides DeepSeek-V3's 61
    stages = [n for n in range(1, min(MAX_STAGES, num_layers) + 1) if num_layers % n == 0 or allows_unequal_stages]
    grids = []
    for tp in (n for n in tp_sizes if size // call.cp % n == 0):
        for pp in (n for n in stages if size // call.cp // tp % n == 0):
            dp = size // call.cp // tp // pp
            if dp > num_units or (generates and num_units % dp):
                continue
            try:
                call.check_cut(pp, tp, call.cp, 1, "")
                check_quantized(call.spec, call.lora, tp, "")
            except ValueError:
                continue
            grids.append((pp, tp, dp))
    return grids
