"""Ranges and choices in the types of fields, and pieces whose keys are keys of the section that has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import yaml

from rlhf_spmd.config.constraints import FiniteFloat, PositiveFraction, PositiveInt, Range
from rlhf_spmd.config.keys import list_keys
from rlhf_spmd.config.load import check_tree, load, to_yaml
from rlhf_spmd.config.schema import ConfigError, inline


@dataclass(frozen=True)
class Bounded:
    steps: PositiveInt | None = 3
    share: PositiveFraction = 0.5
    betas: list[Annotated[float, Range(least=0, below=1)]] = field(default_factory=lambda: [0.9])
    ratios: dict[str, PositiveFraction] = field(default_factory=dict)
    kind: Literal["fixed", "adaptive"] = "fixed"
    bits: Literal[4, 8] | None = None
    template: bool | Literal["auto"] = "auto"
    weight: FiniteFloat = 1.0


@dataclass(frozen=True)
class Loss:
    """A piece.

    - clip: of the ratio
    """

    clip: PositiveFraction = 0.2
    mode: str = "vanilla"


@dataclass(frozen=True)
class Whole:
    loss: Loss = inline(Loss, clip=0.3)
    lr: float = 1.0
    bounded: Bounded = field(default_factory=Bounded)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "bounded.steps=0: must be at least 1"),
        ("share=0", "bounded.share=0.0: must be above 0 and at most 1"),
        ("share=.nan", "bounded.share=nan: must be a finite number, above 0, at most 1"),
        ("betas=[0.5,1]", "bounded.betas[1]=1.0: must be at least 0 and below 1"),
        ("ratios.actor=2", "bounded.ratios.actor=2.0: must be above 0 and at most 1"),
        ("kind=fixd", "bounded.kind='fixd' is not known; did you mean 'fixed'? allowed: fixed, adaptive"),
        ("bits=5", "bounded.bits=5 is not known; allowed: 4, 8, or null"),
        ("bits=four", "bounded.bits='four' must be 4 or 8 or null"),
        ("template=yess", "bounded.template='yess' must be true or false or auto"),
        ("weight=.inf", "bounded.weight=inf: must be a finite number"),
    ],
)
def test_a_value_out_of_its_range_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_tree(load(Whole, None, [f"bounded.{override}"]))
    assert str(refused.value) == message


def test_values_within_their_ranges_are_taken() -> None:
    values = ["steps=null", "share=1", "betas=[0,0.5]", "ratios.a=1", "kind=adaptive", "bits=8", "template=no", "weight=-3"]
    config = load(Whole, None, [f"bounded.{value}" for value in values])
    check_tree(config)
    assert config.bounded == Bounded(None, 1.0, [0.0, 0.5], {"a": 1.0}, "adaptive", 8, False, -3.0)


def test_keys_of_a_piece_are_keys_of_its_section() -> None:
    assert load(Whole, None, []).loss == load(Whole, {}, []).loss and load(Whole, None, []).loss.clip == 0.3
    config = load(Whole, None, ["mode=sapo"])
    assert (config.loss.clip, config.loss.mode, config.lr) == (0.3, "sapo", 1.0)
    text = to_yaml(config)
    assert text.startswith("clip: 0.3\nmode: sapo\nlr: 1.0\n")
    again: Any = load(Whole, yaml.safe_load(text), [])
    assert again == config
    with pytest.raises(ConfigError, match=r"^unknown key 'clp'; did you mean 'clip'\? allowed here: bounded, clip, lr, mode$"):
        load(Whole, None, ["clp=0.1"])
    with pytest.raises(ConfigError, match=r"^clip=2\.0: must be above 0 and at most 1$"):
        check_tree(load(Whole, None, ["clip=2"]))


def test_help_shows_ranges_and_the_defaults_of_a_piece() -> None:
    keys = {key.name: key for key in list_keys(Whole, {})}
    assert (keys["clip"].default, keys["clip"].kind, keys["clip"].text) == (
        "0.3",
        "a number, above 0, at most 1",
        "of the ratio",
    )
    assert keys["bounded.kind"].kind == "fixed or adaptive" and keys["bounded.steps"].kind == "an integer, at least 1, or null"
