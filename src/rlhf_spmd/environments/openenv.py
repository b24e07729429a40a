"""Servers of OpenEnv. ``environment=openenv:http://host:8000``; the rows of ``data`` are the prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.request import urlopen

from rlhf_spmd.environments.config import ChatMessage
from rlhf_spmd.environments.libraries import import_library

SCHEMA_LIMIT_S = 10.0
BOOKKEEPING = ("done", "reward", "metadata")  # of every observation, beside what the model reads


class OpenEnv:
    """The environment: a session of a server for each row.

    - url: of the server
    - action: field of its actions that takes the turn's text; None: the only text that an action must have
    - shown: field of its observations that the model reads; None: the only one, else all as JSON
    - chat_template: with one, the model reads the answers to its turns as messages of the user
    """

    def __init__(self, url: str, action: str | None = None, shown: str | None = None, chat_template: str | None = None) -> None:
        self.action = action or text_field(url)
        self.shown = shown
        self.has_template = chat_template is not None
        self.client = self.load().GenericEnvClient(base_url=url).sync()

    @staticmethod
    def load() -> Any:
        """Import the library. Raises ValueError if it is absent."""
        return import_library("openenv.core", "openenv")

    def reset(self, row: Mapping[str, Any]) -> str:
        self.client.connect()
        seed = {"seed": row["seed"]} if "seed" in row else {}
        return self._text(self.client.reset(**seed).observation)

    def step(self, text: str) -> tuple[str | list[ChatMessage], float, bool]:
        result = self.client.step({self.action: text})
        if result.done:
            self.client.close()
            return "", float(result.reward or 0.0), True
        answer = self._text(result.observation)
        return [{"role": "user", "content": answer}] if self.has_template else answer, float(result.reward or 0.0), False

    def __del__(self) -> None:  # a row may end before its environment is done
        if hasattr(self, "client"):
            self.client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return what the model reads of an observation. Raises KeyError if it lacks the field ``shown``."""
        if self.shown is not None:
            return str(observation[self.shown])
        values = {key: value for key, value in observation.items() if key not in BOOKKEEPING}
        value = next(iter(values.values())) if len(values) == 1 else values
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


environment = OpenEnv


@lru_cache
def text_field(url: str) -> str:
    """Return the only text that an action of the server must have. Raises ValueError if there is none or several."""
    with urlopen(f"{url.rstrip('/')}/schema", timeout=SCHEMA_LIMIT_S) as answer:
        schema = json.load(answer)["action"]
    properties = schema.get("properties", {})
    texts = [key for key in schema.get("required", []) if properties.get(key, {}).get("type") == "string"]
    if len(texts) != 1:
        raise ValueError(f"actions of {url} have the fields {', '.join(properties)}; name one by environment.args.action")
    return texts[0]
