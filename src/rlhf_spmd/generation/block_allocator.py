"""Who owns which page of the KV cache: reference counts, a free list, and which prompt page holds which content. Pure.

A page is free when nobody refers to it; a free page keeps its content and can be revived until it is handed out again, the
least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockAllocator:
    """``num_pages`` pages, by number."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of: dict[int, int] = {}  # content -> page
        self._content_of: dict[int, int] = {}  # page -> content

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> list[int]:
        """Pages that somebody refers to."""
        return [page for page, count in enumerate(self._references) if count]

    def forget(self) -> None:
        """No page is found by its content any more."""
        self._page_of.clear()
        self._content_of.clear()

    def references(self, page: int) -> int:
        return self._references[page]

    def find(self, content: int) -> int | None:
        """The page that holds this content, referred to or free."""
        return self._page_of.get(content)

    def allocate(self) -> int:
        """A page of one's own; what it held is forgotten. The caller has checked ``num_free``."""
        assert self._free, "allocate from an empty free list"
        page, _ = self._free.popitem(last=False)
        content = self._content_of.pop(page, None)
        if content is not None:
            del self._page_of[content]
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference; a free page is revived."""
        if self._references[page] == 0:
            del self._free[page]
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less on each. The first of them is the first to be handed out again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released once too often"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None

    def register(self, page: int, content: int) -> None:
        """``page`` now holds ``content``. The first page that holds it stays the one that is found."""
        assert self._references[page] > 0, f"page {page} is free and cannot be given content"
        if content not in self._page_of:
            assert page not in self._content_of, f"page {page} already holds other content"
            self._page_of[content] = page
            self._content_of[page] = content
