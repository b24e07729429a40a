"""Text for messages: shortened, counted, made printable, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_KEYS = 40  # in a list of known keys
MAX_DIGITS = 40  # of a number
NEAR = 0.6  # least likeness of a mistyped name to the known name that is proposed


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type's name if the message is empty."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    """Return ``text`` with characters that a terminal would obey, such as escape, written as Python writes them."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def shortened(value: float) -> str:
    """Return a number as text, without most of its digits if it has very many."""
    text = str(value)
    return text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}... ({len(text)} digits)"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'x'?``, or the empty string if no known name is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def check_keys(values: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise ValueError for a key that is not among ``known``. ``where``: stands before it."""
    for key in values:
        if key not in known:
            raise ValueError(f"unknown key '{where}{key}'{nearest(key, known)}")


def listed(names: Sequence[object]) -> str:
    """Return names with commas between them, at most ``MAX_KEYS`` of them."""
    rest = f" and {len(names) - MAX_KEYS} more" if len(names) > MAX_KEYS else ""
    return ", ".join(map(str, names[:MAX_KEYS])) + rest


def dotted(where: str, key: object) -> str:
    """Return the dotted path of ``key`` in the section ``where``, which is "" for the root."""
    return f"{where}.{key}" if where else str(key)
