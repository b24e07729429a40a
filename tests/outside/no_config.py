"""An algorithm whose Config does not derive from AlgorithmConfig."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    name: str = "no_config"


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    return []
