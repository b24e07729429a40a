"""PPO that looks, before each use of a role, what bytes of all roles' weights are on the device."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import Config as PPOConfig


@dataclass(frozen=True)
class Config(PPOConfig):
    offload: bool = False


class Watched:
    def __init__(self, role: Any, look: Any) -> None:
        self._role, self._look = role, look

    def __getattr__(self, name: str) -> Any:
        self._look(name)
        return getattr(self._role, name)


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    roles = [role for role in vars(models).values() if getattr(role, "spec", None) is not None and role.member]

    def look(name: str) -> None:
        sizes = {role.name: on_device(role) for role in roles}
        assert all((size == 0) == config.offload for size in sizes.values()), f"before {name}: {sizes}"

    watched = {name: Watched(role, look) for name, role in vars(models).items() if name != "rewards"}
    rewards = [watched[role.name] for role in models.rewards]
    return ppo.step(SimpleNamespace(**watched, rewards=rewards), data, config, number)


def on_device(role: Any) -> int:
    """Bytes of the storages of a role's training and generation parameters."""
    tensors = list(role.engine.local_tensors().values())
    if hasattr(role, "generator"):
        tensors += role.generator.decoder.parameters()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
