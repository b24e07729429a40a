"""Which row owns which page of the KV cache, and which page holds which part of a prompt.

A page is free when no row refers to it. A free page keeps its content, and can be used again for the same prompt, until it is
handed out; the page that was freed first is handed out first.

With linear attention a slot holds the state behind all but the last token of a prompt. Rows of one prompt compute it once. The first
one stops before its last prompt token, which every row computes by itself to get its first draw. The state is then in that row's slot,
until the next step changes it: rows that start in the next step copy it from there, and for those that still wait it is copied to a
spare slot, if there is one.

This module does not import torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

MIN_PREFIXES = 1 << 14  # of a table, below which none is forgotten
SPARE_SLOTS = 2  # rows start in the order in which they come, so few prompts have rows on both sides


class PageAllocator:
    """Reference counts of ``num_pages`` pages, a free list, and the prefixes of prompts that end in each page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of: dict[int, int] = {}  # prefix id -> page
        self._prefixes_of: dict[int, list[int]] = {}  # page -> prefix ids, the shortest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> list[int]:
        """Return the pages that rows refer to."""
        return [page for page, count in enumerate(self._references) if count]

    def forget_prefixes(self) -> None:
        """Forget the content of all pages, so that none is found by it."""
        self._page_of.clear()
        self._prefixes_of.clear()

    def references(self, page: int) -> int:
        return self._references[page]

    @property
    def prefixes(self) -> Collection[int]:
        """Return the prefixes whose end some page holds."""
        return self._page_of.keys()

    def find(self, prefix_id: int) -> int | None:
        """Return the page that holds the end of this prefix, in use or free."""
        return self._page_of.get(prefix_id)

    def allocate(self) -> int:
        """Return a free page, whose content is forgotten. The caller has checked ``num_free``."""
        assert self._free, "allocate from an empty free list"
        page, _ = self._free.popitem(last=False)
        for prefix_id in self._prefixes_of.pop(page, ()):
            del self._page_of[prefix_id]
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference; a free page comes into use again."""
        if self._references[page] == 0:
            del self._free[page]
        self._references[page] += 1

    def take_over(self, page: int, prefix_ids: Collection[int | None]) -> None:
        """Bring a free page into use for a row with these prefixes, and forget the longer ones, behind which the row writes."""
        self.share(page)
        prefixes = self._prefixes_of[page]
        while prefixes[-1] not in prefix_ids:
            del self._page_of[prefixes.pop()]

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page. Of those that become free, the first is handed out first."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released once too often"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None

    def register(self, page: int, prefix_id: int) -> None:
        """Note that ``page`` holds the end of this prefix, unless another page that holds it is known already.

        A prefix that ends within the page stays there when tokens are written behind it.
        """
        assert self._references[page] > 0, f"page {page} is free and cannot be given content"
        if prefix_id not in self._page_of:
            self._page_of[prefix_id] = page
            self._prefixes_of.setdefault(page, []).append(prefix_id)


class PrefixTable:
    """Numbers the prefixes of prompts, one per page: equal prefixes get equal ids. This addresses content exactly, without hashes.

    A prompt of n tokens is cut into (n - 1) // page_size full pages and a tail of 1 .. page_size tokens. The tail holds the last
    prompt token, which every row computes by itself to get its first logits. Hence full pages are shared, and tails copied.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._ids: dict[tuple[int | str | None, tuple[int, ...]], int] = {}
        self._num_ids = 0  # so far
        self._most = MIN_PREFIXES  # of which more are looked through

    def forget(self, needed: Callable[[], Collection[int]]) -> None:
        """Forget all prefixes but those ``needed`` returns, when they have become twice as many as after the last time.

        Rows with a prefix that comes again then compute it again.
        """
        if len(self._ids) > self._most:
            kept = needed()
            self._ids = {key: number for key, number in self._ids.items() if number in kept}
            self._most = max(2 * len(self._ids), MIN_PREFIXES)

    def prefix_ids(self, prompt_ids: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
        """Return the id of the prefix that ends with each page of the prompt. Only prompts with equal ``salt`` share ids."""
        parent: int | str | None = salt
        prefix_ids = []
        for start in range(0, len(prompt_ids), self.page_size):
            parent = self._id(parent, prompt_ids[start : start + self.page_size])
            prefix_ids.append(parent)
        return tuple(prefix_ids)

    def part_id(self, prefix_ids: Sequence[int], prompt_ids: Sequence[int], length: int, salt: str | None = None) -> int | None:
        """Return the id of the first ``length`` tokens of a prompt with these ``prefix_ids``; None if they end with a page."""
        number, rest = divmod(length, self.page_size)
        if not rest:
            return None
        return self._id(prefix_ids[number - 1] if number else salt, prompt_ids[length - rest : length])

    def _id(self, parent: int | str | None, page: Sequence[int]) -> int:
        number = self._ids.setdefault((parent, tuple(page)), self._num_ids)
        self._num_ids += number == self._num_ids
        return number


class PromptStates:
    """The states of prompts, by the id of the whole prompt (``SequenceState.prefix_ids``). ``spare_slots``: slots of no row."""

    def __init__(self, spare_slots: Iterable[int]) -> None:
        self._free = list(spare_slots)
        self._kept: dict[int, int] = {}
        self._fresh: dict[int, int] = {}  # in slots of rows, until the next step

    def __bool__(self) -> bool:
        return bool(self._kept or self._fresh)

    def find(self, prompt: int) -> int | None:
        return self._fresh.get(prompt, self._kept.get(prompt))

    def note(self, prompt: int, slot: int) -> None:
        """Note that the slot of a row holds the prompt's state, until :meth:`keep` is called for the step that is planned next."""
        self._fresh[prompt] = slot

    def keep(self, prompts: Collection[int]) -> list[tuple[int, int]]:
        """Forget all but these prompts. Return copies (source slot, target slot) by which their states outlive the step."""
        for prompt in [prompt for prompt in self._kept if prompt not in prompts]:
            self._free.append(self._kept.pop(prompt))
        copies = []
        for prompt, slot in self._fresh.items():
            if self._free and prompt in prompts and prompt not in self._kept:
                self._kept[prompt] = self._free.pop()
                copies.append((slot, self._kept[prompt]))
        self._fresh.clear()
        return copies

    def clear(self) -> None:
        """Forget all prompts."""
        self._fresh.clear()
        self.keep(())
