"""Configurations of models of the Hugging Face hub (``published.yaml``), for a plan where there is no network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def _published() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[
        "models"
    ]
    return models


def published_config(name: str) -> dict[str, Any] | None:
    """Return what ``config.json`` of the model ``name`` says of sizes, or None for a model that the file does not have."""
    return _published().get(name.removesuffix("-Instruct"))
