"""Strict loading: every mistake is one line with key, value and remedy; names become modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml

from rlhf_spmd.config.constraints import FiniteFloat, PositiveFraction, PositiveInt, Range, check_fields
from rlhf_spmd.config.foreign import foreign_names
from rlhf_spmd.config.keys import list_keys
from rlhf_spmd.config.load import check_tree, load, to_yaml
from rlhf_spmd.config.registry import available, find, noting_user_line, resolve_function
from rlhf_spmd.config.schema import ConfigError, inline
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import keys as train_keys
from rlhf_spmd.training.train_config import QueueConfig

pytest.importorskip("omegaconf")


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-6
    name: str = "adamw"


@dataclass(frozen=True)
class Role:
    path: str
    optim: Optim = field(default_factory=Optim)
    schedule: Optim | None = None
    chat: bool | str = "auto"


@dataclass(frozen=True)
class Data:
    path: str = "train.jsonl"
    train_batch_size: int = 8


@dataclass(frozen=True)
class PPO:
    name: str = "ppo"
    clip_ratio: float = 0.2

    def check(self, where: str) -> None:
        if self.clip_ratio <= 0:
            raise ValueError(f"{where}.clip_ratio={self.clip_ratio} must be positive")


@dataclass(frozen=True)
class Main:
    data: Data = field(default_factory=Data)
    algorithm: Any = None
    models: dict[str, Role] = field(default_factory=dict)
    pools: dict[str, list[int]] = field(default_factory=dict)
    rewards: list[Optim] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    shuffle: bool = True
    warm: Optim = field(default_factory=lambda: Optim(lr=0.5, name="${data.path}"))


def sections(raw: Mapping[str, Any]) -> dict[str, type]:
    name = (raw.get("algorithm") or {}).get("name", "ppo")
    if name != "ppo":
        raise ValueError(f"unknown algorithm '{name}'")
    return {"algorithm": PPO}


def test_translations_lead_to_keys() -> None:
    keys: set[str] = set()
    for name in available("rlhf_spmd.algorithms", required_attribute="step"):
        keys |= {key.name for key in train_keys([f"algorithm.name={name}"])}
    sections = r"\b(?:run|data|algorithm|models|sampling|placement|logger|reward)\.[\w.<>]*\w"
    for project, names in foreign_names().items():
        for theirs, ours in names["keys"].items():
            assert re.sub(r"^models\.\w+", "models.<role>", ours) in keys, f"{project}: {theirs}"
        for text in names["hints"].values():
            for ours in re.findall(sections, text):
                prefix = re.sub(r"^models\.\w+", "models.<role>", ours) + "."
                assert any(f"{key}.".startswith(prefix) for key in keys), f"{project}: {text}"


def test_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "algorithm:\n  clip_ratio: 1e-1\nmodels:\n  actor:\n    path: dir\n    optim: {lr: 3e-4}\n"
        "pools: {a: [0, 1]}\ndata:\n  train_batch_size: 4\n"
    )
    config = load(
        Main, file, ["data.train_batch_size=64", "models.actor.schedule.lr=2", "data.path=${models.actor.path}"], sections
    )
    assert config.data == Data("dir", 64)
    assert config.algorithm == PPO("ppo", 0.1)
    assert config.models == {"actor": Role("dir", Optim(3e-4), Optim(2.0))}
    assert config.pools == {"a": [0, 1]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_batch_sizes=3", "unknown key 'train_batch_sizes'; did you mean 'data.train_batch_size'? allowed here: "),
        ("algorithm.lam=1", "unknown key 'algorithm.lam'; allowed here: "),  # far from algorithm.name, whatever they begin with
        ("data.clip_ratio=1", "unknown key 'data.clip_ratio'; did you mean 'algorithm.clip_ratio'?"),
        # TRL has a delta, but what is unknown is its section
        ("models.a.optm.delta=1", "unknown key 'models.a.optm'; did you mean 'models.a.optim'? allowed here: "),
        ("models.a.pth=1", "unknown key 'models.a.pth'; did you mean 'models.a.path'?"),
        ("zzz=1", "unknown key 'zzz'; allowed here: algorithm, bias, data, models, pools, rewards, shuffle, warm"),
        ("rewards=[{lrs: 1}]", "unknown key 'rewards[0].lrs'; did you mean 'rewards[0].lr'?"),
        ("data.train_batch_size=abc", "data.train_batch_size='abc' must be an integer"),
        ("data.train_batch_size=1.5", "data.train_batch_size=1.5 must be an integer"),
        ("pools.b=[0,x]", "pools.b[1]='x' must be an integer"),
        ("pools.b=3", "pools.b=3 must be a list, each entry an integer"),
        ("models.a=3", "models.a=3 must be a mapping with the keys path, optim, schedule, chat"),
        ("bias.x=1", "bias.x='x' must be an integer"),
        ("shuffle=maybe", "shuffle='maybe' must be true or false"),
        ("algorithm.clip_ratio=true", "algorithm.clip_ratio=True must be a number"),
        ("data.path=[a]", "data.path=['a'] must be text"),
        ("models.a.optim.lr=1", "'models.a.path' (text) must be given"),
        ("data.path=${data.zzz}", "data.path: Interpolation key 'data.zzz' not found"),
        ("algorithm.name=grop", "unknown algorithm 'grop'"),
        ("no_value", "override 'no_value' is not of the form key.subkey=value"),
        ("data.path=", "override 'data.path=' has no value; write data.path=null, or data.path='' for an empty text"),
        ("data.path=[1", "override 'data.path=[1' cannot be read"),
        (
            "data.path={{x}}",
            "override 'data.path={{x}}' cannot be read: a key must be text; a text that begins with { needs quotes: ",
        ),
        ("algorithm.clip_ratio=null", "algorithm.clip_ratio=null must be a number; leave it out for 0.2"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\A{re.escape(message)}[^\n]*\Z"):
        load(Main, None, [override], sections)


def test_values_are_read_as_their_types_and_interpolations_see_the_defaults() -> None:
    values = (
        "bias.5=1",
        "shuffle='off'",
        "pools={1: ['3']}",
        "data.path=7",
        "warm.lr='1e-3'",
        "models.a.path=${models.a.chat}",
    )
    config = load(Main, None, values, sections)
    assert (config.bias, config.shuffle, config.pools, config.data.path) == ({5: 1.0}, False, {"1": [3]}, "7")
    assert isinstance(config.bias[5], float)
    assert config.warm == Optim(1e-3, "7") and config.models["a"].path == "auto"


def test_empty_sections_mean_defaults(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("data:\nalgorithm:\n")
    config = load(Main, file, [], sections)
    assert (config.data, config.algorithm) == (Data(), PPO())


def test_check_tree_walks_everything() -> None:
    check_tree(load(Main, None, [], sections))
    with pytest.raises(ConfigError, match=r"^algorithm\.clip_ratio=-1\.0 must be positive$"):
        check_tree(load(Main, None, ["algorithm.clip_ratio=-1"], sections))
    with pytest.raises(ConfigError, match=r"^x\.deep\.0\.clip_ratio"):
        check_tree({"deep": [PPO(clip_ratio=0)]}, "x")


def test_find_by_name_and_by_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_algorithms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "grpo.py").write_text("step = 1\n")
    (package / "dpo.py").write_text("step = 2\n")
    (package / "helper.py").write_text("")
    (tmp_path / "my_algo.py").write_text("step = 3\ndef score(x):\n    return x\n")
    (tmp_path / "wrong.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("algorithm", "some_algorithms", "grpo", "step").step == 1
    assert find("algorithm", "some_algorithms", "some_algorithms.dpo", "step").step == 2
    with pytest.raises(ValueError, match="unknown algorithm 'grop'; did you mean 'grpo'\\? available: dpo, grpo \\("):
        find("algorithm", "some_algorithms", "grop", "step")
    with pytest.raises(ValueError, match="unknown algorithm 'helper'; available: dpo, grpo \\("):
        find("algorithm", "some_algorithms", "helper", required_attribute="step")
    with pytest.raises(ValueError, match=r"'no_such_pkg\.x' cannot be imported: ModuleNotFoundError"):
        find("algorithm", "some_algorithms", "no_such_pkg.x", "step")
    assert resolve_function("my_algo:score")(4) == 4
    for name, message in {
        "my_algo.score": "is not of the form package.module:function",
        "my_algo:scor": "has no function 'scor'; did you mean 'score'\\?",
        "my_algo:step": "step is a int, not a function",
        "wrong:f": "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'$",
        "absent.too:f": "No module named 'absent'; is it on PYTHONPATH\\?$",
        "my_algo.score:score": "; my_algo is a module: write my_algo, or my_algo:score for what is in it$",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_function(name, "reward.function")
    for module in ("some_algorithms", "my_algo"):
        sys.modules.pop(module, None)


@dataclass(frozen=True)
class Inner:
    size: int = 1
    kind: str = "a"


@dataclass(frozen=True)
class Switched:
    on: bool = False
    off: bool = False
    inner: Inner = field(default_factory=Inner)
    weight: float = 1.0
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"on or off": ("weight", "inner.size")}


@dataclass(frozen=True)
class Derived(Switched):
    inner: Inner = field(default_factory=lambda: Inner(size=7))
    mode: str | None = None
    depth: int = 2
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"mode=deep": ("depth",)}


@pytest.mark.parametrize(
    ("config", "setting", "switch", "default"),
    [
        (Derived(), None, None, None),
        (Derived(weight=2.0), "a.weight=2.0", "a.on or off", "a.weight=1.0"),
        (Derived(weight=2.0, off=True), None, None, None),
        (Derived(inner=Inner(kind="b", size=7)), None, None, None),
        (Derived(inner=Inner()), "a.inner.size=1", "a.on or off", "a.inner.size=7"),
        (Derived(mode="flat", depth=3), "a.depth=3", "a.mode=deep", "a.depth=2"),
        (Derived(mode="deep", depth=3), None, None, None),
    ],
)
def test_a_setting_that_does_nothing_is_refused(config: Derived, setting: str | None, switch: str, default: str) -> None:
    """A class and its bases say what needs what. What a class has as its own default is no setting."""
    if setting is None:
        check_tree({"a": config})
        return
    line = f"{setting} does nothing without {switch}; leave it out, or where a file has it give {default}"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_tree({"a": config})


@dataclass(frozen=True)
class Leaves:
    def check(self, where: str) -> None:
        sys.exit(0)


def test_sys_exit_in_user_code_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef step():\n    sys.exit(0)\n")
    module = find("algorithm", "rlhf_spmd.algorithms", f"{tmp_path}/mine.py", "step")
    with pytest.raises(RuntimeError, match="SystemExit: 0") as failed, noting_user_line("algorithm", "mine.py", module):
        module.step()
    assert failed.value.__notes__ == [f"algorithm 'mine.py', {tmp_path}/mine.py:3"]
    with pytest.raises(ConfigError, match=r"^algorithm: the check of test_config.Leaves raises SystemExit: 0$"):
        check_tree(Leaves(), "algorithm")


# -- ranges and choices in the types of fields, and pieces whose keys are keys of the section that has them


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
        ("weight=-1e39", "bounded.weight=-1e+39: must be at least -3.4028234663852886e+38, which 32 bits hold"),
        ("steps=2147483648", "bounded.steps=2147483648: must be at most 2147483647, which 32 bits hold"),
        (f"steps=1{'0' * 400}", f"bounded.steps=1{'0' * 39}... (401 digits): must be at most 2147483647, which 32 bits hold"),
        (f"steps=1{'0' * 5000}", "bounded.steps=inf must be an integer or null"),
    ],
)
def test_a_value_out_of_its_range_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_tree(load(Whole, None, [f"bounded.{override}"]))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("section", "key", "most"),
    [
        (LayoutConfig, "tp", 65_536),
        (LayoutConfig, "cp", 65_536),
        (SamplingConfig, "n", 2**20),
        (GenerationConfig, "max_num_seqs", 2**20),
        (DataConfig, "train_batch_size", 2**20),
        (QueueConfig, "in_flight", 2**20),
        (RewardConfig, "num_workers", 1024),
        (EnvironmentConfig, "num_workers", 1024),
    ],
)
def test_what_32_bits_hold_and_no_host_does_is_refused(section: type, key: str, most: int) -> None:
    """It would fill the memory, or start processes for ever, and no line would name the key."""
    needed = {"path": "x"} if section is DataConfig else {}
    check_fields(section(**needed, **{key: most}), "some")
    with pytest.raises(ValueError, match=rf"some.{key}=2147483647: must be at least 1 and at most {most}"):
        check_fields(section(**needed, **{key: 2**31 - 1}), "some")


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


def test_help_keeps_the_words_of_links() -> None:
    key = replace(next(iter(list_keys(Whole, {}))), text="runs [ahead](a.md#b) of it, see [c.md](c.md#d)")
    assert "runs ahead (docs/a.md) of it, see docs/c.md" in key.lines(80)


def test_help_shows_ranges_and_the_defaults_of_a_piece() -> None:
    keys = {key.name: key for key in list_keys(Whole, {})}
    assert (keys["clip"].default, keys["clip"].kind, keys["clip"].text) == (
        "0.3",
        "a number, above 0, at most 1",
        "of the ratio",
    )
    assert keys["bounded.kind"].kind == "fixed or adaptive" and keys["bounded.steps"].kind == "an integer, at least 1, or null"
