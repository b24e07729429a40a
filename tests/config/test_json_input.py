"""JSON from outside: any depth gives a value or one line, wherever the limit of recursion lies."""

from __future__ import annotations

import json

import pytest

from rlhf_spmd.config.json_input import MOST_LEVELS, parse_json


@pytest.mark.parametrize("kind", [str, str.encode])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}"), ('[{"a": 1}, ', "]")])
@pytest.mark.parametrize("levels", [MOST_LEVELS - 1, MOST_LEVELS + 1, 900, 100_000])
def test_depth(kind: type, opening: str, closing: str, levels: int) -> None:
    text = kind(opening * levels + "1" + closing * levels)
    if levels < MOST_LEVELS:
        assert parse_json(text) == json.loads(text)
        return
    with pytest.raises(ValueError, match=r"^nested more than 100 levels deep$"):
        parse_json(text)


def test_what_is_wide_is_not_deep() -> None:
    assert parse_json("[" + "[[1]]," * 1000 + "{}]") == [*([[[1]]] * 1000), {}]
