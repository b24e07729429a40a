"""What ends a response: stop tokens, and stop strings that are found in its text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhf_spmd.data.tokenizer import UNFINISHED, Decoding
from rlhf_spmd.generation.config import SamplingConfig

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Finds the stop string that a response's last token completes. It keeps no state per row.

    Only a token whose text contains the last character of a string can complete it. Every other token costs one dictionary look-up;
    for these, the end of the response is decoded.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self.stops, self.decode = tuple(stops), decode
        self._longest = max(map(len, stops))
        self._last = {stop[-1] for stop in stops}
        self._candidate: dict[int, bool] = {}

    def completed_by_last(self, token_ids: Sequence[int], first: int = 0) -> bool:
        """Return True if the last token completes a stop string in the response, which begins at ``first``."""
        if not self._may_complete(token_ids[-1]):
            return False
        width = self._longest + 4  # some characters take several tokens; the first of a window may be cut
        while True:
            window = token_ids[max(len(token_ids) - width, first) :]
            text = self.decode(window)
            is_complete = len(window) == len(token_ids) - first
            if is_complete or len(text.lstrip(UNFINISHED)) > self._longest + len(self.decode(window[-1:])):
                return self._find(text, window) is not None
            width *= 2

    def cut(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Return the response's text before the stop string that its last token completed, and that string.

        Without one, these are the whole text and "".
        """
        text = self.decode(token_ids)
        start, stop = (self._find(text, token_ids) if token_ids else None) or (len(text), "")
        return text[:start], stop

    def _find(self, text: str, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Return where the first stop string begins that only the last token completed in ``text``, the decoded ids; and the string."""
        before = len(self.decode(token_ids[:-1]).rstrip(UNFINISHED))
        starts = [(text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self.stops]
        return min((start for start in starts if start[0] >= 0), default=None)

    def _may_complete(self, token: int) -> bool:
        if token not in self._candidate:
            text = self.decode([token])
            is_fragment = not text or UNFINISHED in text
            self._candidate[token] = is_fragment or not self._last.isdisjoint(text)
        return self._candidate[token]


@dataclass(frozen=True)
class StopCriteria:
    """What ends a response before its limit."""

    token_ids: frozenset[int]
    strings: StopStrings | None


def build_stop_criteria(
    sampling: SamplingConfig, eos_ids: Collection[int], decoding: Decoding | None, where: str
) -> StopCriteria:
    """Return what ends a response by ``sampling`` and ``eos_ids``. A stop string that is a special token counts as that token.

    Raises ValueError for stop strings that no response could contain.
    """
    token_ids = {*(() if sampling.ignore_eos else eos_ids), *sampling.stop_token_ids}
    if not sampling.stop:
        return StopCriteria(frozenset(token_ids), None)
    if decoding is None:
        raise ValueError(f"{where}.stop={sampling.stop}: stop strings need a tokenizer, and this model has none")
    token_ids.update(special_stops(sampling.stop, decoding.special_ids, where).values())
    return StopCriteria(frozenset(token_ids), StopStrings(sampling.stop, decoding))


def special_stops(stops: Sequence[str], special_ids: Mapping[str, int], where: str) -> dict[str, int]:
    """Return the ``stops`` that are special tokens, with their ids. Raises ValueError for a stop that only contains such a token."""
    for stop in stops:
        part = next((special for special in special_ids if special in stop), None)
        if stop not in special_ids and part is not None:
            raise ValueError(
                f"{where}.stop: {stop!r} contains the special token {part!r}, which leaves nothing in a text; "
                f"name the token alone, or its id {special_ids[part]} in {where}.stop_token_ids"
            )
    return {stop: special_ids[stop] for stop in stops if stop in special_ids}
