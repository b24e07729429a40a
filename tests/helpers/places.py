"""Where things are, for tests. ``SHARED``: data and models beside the repository; tests that need them skip where they are absent."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
