"""Special tokens that an export names: those that end a response, and the one that scored rows are padded with."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_json
from rlhf_spmd.telemetry.run_dir import atomic_write_text


def with_ends(config: Mapping[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """``config`` with ``ends`` as its ``eos_token_id``, which stays as it is where it says the same. Pure."""
    named = config.get("eos_token_id")
    same = not ends or set(named if isinstance(named, list) else [named]) == {*ends}
    return {**config} if same else {**config, "eos_token_id": [*ends] if len(ends) > 1 else next(iter(ends))}


def padding(spec: ModelSpec, tokenizer: Any) -> int | None:
    """The token to pad scored rows with. transformers reads the score at the last token that is another one, so it must not be one
    that ends a response. The first that does not: the tokenizer's own, a special token with "pad" in its name, that of unknown
    words, the first of a text, any special one; without a tokenizer those of config.json. None: there is none, and transformers
    then refuses several rows at once."""
    config = spec.hf_config
    wished = [config.get("pad_token_id"), config.get("bos_token_id")]
    if tokenizer is not None:
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        named = [number for number, text in special.items() if "pad" in text.lower()]
        wished = [tokenizer.pad_token_id, *named, tokenizer.unk_token_id, tokenizer.bos_token_id, *special]
    return next((t for t in wished if isinstance(t, int) and t not in spec.eos_token_ids and 0 <= t < spec.vocab_size), None)


def name_ends(directory: Path, ends: Collection[int]) -> None:
    """In the ``generation_config.json`` there, if there is one."""
    file = directory / "generation_config.json"
    if file.is_file():
        _rewrite(file, with_ends(read_json(file), ends))


def name_padding(directory: Path, token: str) -> None:
    """In the tokenizer's files there."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if file.is_file():
            _rewrite(file, {**read_json(file), "pad_token": token})


def _rewrite(file: Path, value: dict[str, Any]) -> None:
    if value != read_json(file):
        atomic_write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
