"""Rewards as a user writes them: a module that a dotted name reaches."""

from typing import Any


def share_of_even_digits(prompt: str, response: str, row: dict[str, Any]) -> float:
    return sum(character in "02468" for character in response) / max(len(response), 1)


def often_fails(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    """Raises for about half of the responses, and gives names to its own numbers that the trainer has too."""
    if sum(map(ord, response)) % 2:
        raise RuntimeError("no opinion")
    return {"score": 1.0, "mean": 7.0, "failures": 99.0}


def always_fails(prompt: str, response: str, row: dict[str, Any]) -> str:
    """Returns text, which is no score."""
    return "good"


def priced(response: str) -> dict[str, float]:
    return {"score": share_of_even_digits("", response, {}), "length": float(len(response))}


def unknown_arguments(text: str, question: str) -> float:
    return float(len(text))
