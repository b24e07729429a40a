"""Which slot holds the state behind all but the last token of which prompt, for models with linear attention.

Rows of one prompt compute it once. The first one stops before its last prompt token, which every row computes by itself to get its
first draw. The state is then in that row's slot, until the next step changes it: rows that start in the next step copy it from there,
and for those that still wait it is copied to a spare slot, if there is one. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

SPARE_SLOTS = 2  # rows start in the order in which they come, so few prompts have rows on both sides


class PromptStates:
    """The states of prompts, by the id of the whole prompt (``SequenceState.prefix_ids``). ``spare``: slots of no row."""

    def __init__(self, spare: Iterable[int]) -> None:
        self._free = list(spare)
        self._kept: dict[int, int] = {}
        self._fresh: dict[int, int] = {}  # in slots of rows, until the next step

    def __bool__(self) -> bool:
        return bool(self._kept or self._fresh)

    def find(self, prompt: int) -> int | None:
        return self._fresh.get(prompt, self._kept.get(prompt))

    def note(self, prompt: int, slot: int) -> None:
        """``slot``, of a row, holds the state until the step after the next plan."""
        self._fresh[prompt] = slot

    def keep(self, wanted: Collection[int]) -> list[tuple[int, int]]:
        """Forget prompts that are not ``wanted``. Returns copies (from, to) by which the others outlive the step."""
        for prompt in [prompt for prompt in self._kept if prompt not in wanted]:
            self._free.append(self._kept.pop(prompt))
        copies = []
        for prompt, slot in self._fresh.items():
            if self._free and prompt in wanted and prompt not in self._kept:
                self._kept[prompt] = self._free.pop()
                copies.append((slot, self._kept[prompt]))
        self._fresh.clear()
        return copies

    def clear(self) -> None:
        """From now on no prompt is found."""
        self._fresh.clear()
        self.keep(())
