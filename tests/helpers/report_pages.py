"""The page of a report: its elements and its data, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Collects tags, attributes and texts, and what lies in the page's JSON; checks that every element is closed."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        (self.data,) = re.findall(r'<script[^>]* id="data"[^>]*>(.*?)</script>', text, flags=re.DOTALL) or [""]
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    @property
    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self.data)["runs"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag, f"unexpected </{tag}>"

    def handle_data(self, data: str) -> None:
        self.text += data


def browse(address: str, budget_ms: int = 4000) -> str:
    """What a browser makes of it, inside <main>."""
    options = f"--headless --no-sandbox --disable-gpu --virtual-time-budget={budget_ms} --enable-logging=stderr --dump-dom"
    command = ["chromium", *options.split(), address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in ended.stderr, ended.stderr
    return ended.stdout.partition("<main>")[2].partition("</main>")[0]
