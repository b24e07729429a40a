"""PPO whose roles have names of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker, RoleClass

NAMES = {"actor": "writer", "critic": "reader", "reference": "anchor", "reward": "reward"}


@dataclass(frozen=True)
class Config(ppo.Config):
    exported: ClassVar[str] = "writer"

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {"writer": ActorWorker, "reader": CriticWorker, "anchor": ReferenceWorker, "reward": RewardWorker}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    known = {name: getattr(models, own) for name, own in NAMES.items()}
    others = {name: getattr(models, name) for name in ("compute", "rewards", "controller")}
    return ppo.step(SimpleNamespace(**known, **others), data, config, number)
