"""Mean and standard deviation of all numbers of a run so far, to normalise rewards and values by.

Stable-Baselines3's VecNormalize does the same.

The state is three numbers in a dictionary that checkpoints hold. It takes sums over all ranks, so it is the same on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

STD_EPSILON = 1e-8


class RunningMoments:
    """``state[name]`` is [count, mean, sum of squared distances from the mean].

    Merged by Chan et al. 1979, so that numbers far from 0 lose no digits. Before the first numbers nothing is normalised; equal numbers
    have the standard deviation 1.
    """

    def __init__(self, name: str, state: dict[str, Any]) -> None:
        self.name, self.state = name, state
        self.count, self.mean, self.squares = state.get(name, (0.0, 0.0, 0.0))

    def add(self, moments: Tensor) -> None:
        """Add numbers by their ``moments``, float64 [3] as :func:`advantages.moments` returns them, summed over ranks."""
        count, total, squares = moments.tolist()
        if count:
            mean = total / count
            total_count = self.count + count
            distance = mean - self.mean
            self.squares += max(squares - count * mean**2, 0.0) + distance**2 * self.count * count / total_count
            self.mean += distance * count / total_count
            self.count = total_count
        self.state[self.name] = [self.count, self.mean, self.squares]

    @property
    def std(self) -> float:
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return float(variance**0.5) if variance > STD_EPSILON**2 * max(1.0, self.mean**2) else 1.0

    def normalise(self, x: Tensor, center: bool = True) -> Tensor:
        """Return (x - mean) / std, or x / std."""
        return (x - self.mean if center else x) / self.std

    def restore(self, x: Tensor) -> Tensor:
        """Return the inverse of :meth:`normalise`: x std + mean."""
        return x * self.std + self.mean
