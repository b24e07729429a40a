"""What every algorithm's configuration has: the roles it needs, and the knobs that roles and programs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class AlgorithmConfig:
    """``algorithm``; the names are verl's. Batch sizes count prompts. An algorithm derives from it and adds its own knobs."""

    name: str = ""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    ppo_mini_batch_size: int = 256
    ppo_epochs: int = 1
    use_dynamic_bsz: bool = True
    ppo_max_token_len_per_gpu: int = 16384
    ppo_micro_batch_size_per_gpu: int | None = None

    def check(self, where: str) -> None:
        check_bounds(self, where, "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", least=1)
        if not self.use_dynamic_bsz and (self.ppo_micro_batch_size_per_gpu or 0) < 1:
            raise ValueError(f"{where}.use_dynamic_bsz=false needs {where}.ppo_micro_batch_size_per_gpu, at least 1")

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        """Role -> the class of its object in ``models``. There is always an actor, the role that is exported."""
        return {"actor": ActorWorker, "reward": RewardWorker}

    def training_steps(self, role: str, steps: int) -> int:
        """In how many of a run's ``steps`` a trained role is updated: the length of its learning-rate schedule."""
        return steps

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.ppo_max_token_len_per_gpu, None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu)
