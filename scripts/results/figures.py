"""Compares the tables of ``docs/*.md`` with ``docs/figures/*.json``, which hold what was measured in full.

    python scripts/results/figures.py      # prints what differs; exit status 1 if anything does

A table belongs to the file that the line above it names: ``<!-- figures/step_ppo.json -->``. It shows some of that file's columns, by
their names, and some of its rows, in their order.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
KEYS = ["name", "date", "machine", "command", "columns", "rows", "notes"]
TABLE = re.compile(r"^<!-- figures/(\w+)\.json -->\n\|(.*)\|\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", flags=re.MULTILINE)

Value = str | float | None


def value(cell: str) -> Value:
    """A cell of a page as JSON has it: numbers without units and separators of thousands, None for an empty cell."""
    text = cell.strip().replace("`", "")
    try:
        return float(text.rstrip(" %x").replace(",", ""))
    except ValueError:
        return text or None


def differences(page: str) -> Iterator[str]:
    """What the tables of a page say that their files do not."""
    for name, header, body in TABLE.findall(page):
        figures = json.loads((DOCS / "figures" / f"{name}.json").read_text(encoding="utf-8"))
        shown = [title.strip() for title in header.split("|")]
        if unknown := set(shown) - set(figures["columns"]):
            yield f"{name}.json has no columns {sorted(unknown)}"
            continue
        left = iter([[row[figures["columns"].index(title)] for title in shown] for row in figures["rows"]])
        for line in body.splitlines():
            if [value(cell) for cell in line[1:-1].split("|")] not in left:
                yield f"{name}.json has no such row, or not in this place: {line}"


def flaws(path: Path) -> Iterator[str]:
    """What a file of figures lacks."""
    figures = json.loads(path.read_text(encoding="utf-8"))
    if list(figures) != KEYS:
        yield f"{path.name}: keys are {list(figures)}, not {KEYS}"
    elif any(len(row) != len(figures["columns"]) for row in figures["rows"]):
        yield f"{path.name}: a row is not as long as the columns"


def main() -> int:
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    found = [f"{path.name}: {line}" for path, page in pages.items() for line in differences(page)]
    for path in sorted((DOCS / "figures").glob("*.json")):
        found += flaws(path)
        if not any(f"(figures/{path.name})" in page or f"<!-- figures/{path.name} -->" in page for page in pages.values()):
            found.append(f"{path.name}: no page shows it or links to it")
    print("\n".join(found) or f"{sum(len(TABLE.findall(page)) for page in pages.values())} tables as in docs/figures/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
