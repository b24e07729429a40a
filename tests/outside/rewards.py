"""Rewards as a user writes them: a module that a dotted name reaches."""

from typing import Any


def share_of_even_digits(prompt: str, response: str, row: dict[str, Any]) -> float:
    return sum(character in "02468" for character in response) / max(len(response), 1)


def often_fails(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Raises for about half of the responses."""
    if sum(map(ord, response)) % 2:
        raise RuntimeError("no opinion")
    return 1.0


def one_argument(response: str) -> float:
    return float(len(response))
