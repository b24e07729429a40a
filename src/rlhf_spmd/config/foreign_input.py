"""A configuration of verl or TRL as it is written: a YAML file, or a shell script that starts verl, with overrides."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.config.foreign import foreign_names
from rlhf_spmd.config.interpolation import as_yaml_text, interpolate
from rlhf_spmd.config.load import read_file, to_dict
from rlhf_spmd.config.plain_yaml import Plain, resolve
from rlhf_spmd.config.schema import SWITCH, ConfigError, leaves
from rlhf_spmd.config.shell_script import last_command
from rlhf_spmd.config.verl_settings import is_sft, sft_names

VERL_SECTIONS = ("actor_rollout_ref.", "critic.", "trainer.", "reward_model.", "custom_reward_function.")
SHARED_SECTIONS = ("data.", "algorithm.", "model.", "optim.", "engine.")  # which others have, too
RENAMED = (  # patterns of verl's names since February 2026, and its earlier names, which foreign.yaml and convert have
    (r"^reward\.reward_model\.model_path$", "reward_model.model.path"),
    (r"^reward\.reward_manager\.name$", "reward_model.reward_manager"),
    (r"^reward\.(custom_reward_function\.|reward_model\.)", r"\1"),
    (r"^reward\.", "reward_model."),
)
MEGATRON = re.compile(r".*\b(megatron\..*|expert_tensor_parallel_size|etp)")
EPOCHS = "after_each_epoch"  # verl's SFT trainer takes it for a number of steps
PROGRAM = r"(?:.*[./])?(?:main_(?:ppo|ppo_sync|dapo)|(?:fsdp_)?sft_trainer(?:_ray)?)(?:\.py)?"


def read_foreign(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the file and the overrides by dotted key, without nulls that mean nothing.

    Raises ConfigError, one line, also for settings that are not verl's or TRL's.
    """
    check_input(path, overrides)
    is_yaml = path.suffix in (".yaml", ".yml")
    settings = read_overrides(overrides if is_yaml else [*script_arguments(path), *overrides])
    if is_yaml:
        settings = read_yaml(path, settings)
    settings = read_values({earlier_name(key): value for key, value in settings.items()})
    settings = {
        key: value
        for key, value in settings.items()
        if not key.endswith("_target_") and (value is not None or null_means_something(key))
    }
    check_project(path, settings)
    return settings


def check_input(path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a file that cannot be read, and for text that is no override."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: a Python script is not read, it computes its settings; give the YAML of TRL's commands (trl grpo --config FILE: "
            "the fields of GRPOConfig, ModelConfig and ScriptArguments by their names), or a shell script or a YAML of verl"
        )
    for text in overrides:
        if not re.match(r"\+*[\w.]+=", text):
            raise ConfigError(f"'{text}' is no override; give key=value, such as trainer.nnodes=2")


def script_arguments(path: Path) -> list[str]:
    """Return the ``key=value`` arguments of the last command of a shell script that starts verl, as bash expands them."""
    try:
        command = last_command(path, PROGRAM)
    except ValueError as error:
        raise ConfigError(
            f"{error}; give a script that starts verl.trainer.main_ppo, main_dapo or an SFT trainer, or its YAML"
        ) from error
    if command.unset:
        print(f"{path}: not set, so the file takes them from the environment: {', '.join(command.unset)}", file=sys.stderr)
    if command.not_run:
        print(f"{path}: not run, so what they do or answer is missing: {', '.join(command.not_run)}", file=sys.stderr)
    words = [word.lstrip("+") for word in command.arguments if re.match(r"[+~]*[A-Za-z_][\w.]*=", word)]
    if unread := [word for word in command.arguments if word.lstrip("+") not in words]:
        print(f"{path}: not read: {' '.join(unread)[:200]}", file=sys.stderr)
    return words


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``key=value`` words by dotted key."""
    pairs = [word.partition("=") for word in words]
    return {key.lstrip("+"): override_value(text) for key, _, text in pairs}


def override_value(text: str) -> Any:
    """Return the value of an override as Hydra reads it: numbers, lists with and without quotes, true, null. ``none`` is a word."""
    if text == "None":
        return text
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        is_quoted_list = isinstance(value, str) and value[:1] == "["  # a list that was quoted twice
        return override_value(value) if is_quoted_list else value
    if text[:1] in ("[", "{"):
        with contextlib.suppress(yaml.YAMLError):  # as Hydra writes a brace that is text: \{
            return yaml.safe_load(text)
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def read_yaml(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a YAML file with ``overrides``, by dotted key. Raises ConfigError, one line.

    References to other keys are resolved. Those to the environment are kept: a value from there may be secret.
    """
    try:
        tree = OmegaConf.create(resolve(with_switches(read_file(path, "a configuration of verl or TRL"))))
        if not tree:
            raise ConfigError(f"{path}: must hold settings of verl or TRL (key: value), and is empty")
        for key, value in overrides.items():
            OmegaConf.update(tree, key, value)
        values = leaves(to_dict(interpolate(OmegaConf.to_container(tree)), as_yaml_text), "")
        return {key: value for key, value in values if value != {}}
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error


def with_switches(tree: Any) -> Any:
    """Return ``tree`` with ``yes`` and ``off`` as the truth values that verl reads them as."""
    if isinstance(tree, dict):
        return {key: with_switches(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(with_switches, tree))
    return SWITCH.get(tree.lower(), tree) if isinstance(tree, Plain) and tree.isalpha() else tree


def earlier_name(key: str) -> str:
    """Return verl's name of a key before February 2026; other keys as they are."""
    for pattern, name in RENAMED:
        key = re.sub(pattern, name, key)
    return key


@cache
def _patterns(kind: str) -> re.Pattern[str]:
    """Return the pattern of dotted keys whose values are of this kind, as the tables of verl and TRL have them."""
    return re.compile("|".join(pattern for names in foreign_names().values() for pattern in str(names.get(kind, "")).split()))


def read_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with numbers where a conversion computes, and text where it looks a word up.

    Text that says a number, or none, is read so. Raises ConfigError, one line, for other values.
    """
    by_megatron = settings.get("model_engine") == "megatron" or any(map(MEGATRON.fullmatch, settings))
    is_sft_trainer = is_sft(settings)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        is_count = _patterns("counts").fullmatch(key) is not None
        if is_sft_trainer and (value == EPOCHS or _is_copied(key, value, settings)):
            values[key] = value
            continue
        if is_count or _patterns("numbers").fullmatch(key) or (by_megatron and _patterns("layouts").fullmatch(key)):
            value = _number(key, value)
        elif _patterns("words").fullmatch(key) and value is not None:
            if isinstance(value, list | dict):
                raise ConfigError(f"{key}={value} must be a word")
            value = str(value)
        if is_count and value is not None and value <= 0:
            raise ConfigError(f"{key}={value} must be above 0")
        values[key] = value
    return values


def _is_copied(key: str, value: Any, settings: Mapping[str, Any]) -> bool:
    """Return True for a reference to the environment that verl's SFT trainer has where nothing is computed."""
    is_computed = key.startswith("trainer.") or _patterns("layouts").fullmatch(key) or "optim.min_lr" in settings
    return not is_computed and isinstance(value, str) and "${oc.env:" in value


def _number(key: str, value: Any) -> Any:
    """Return the number that ``value`` says, None if it says none. Raises ConfigError, one line."""
    number = resolve(Plain(value)) if isinstance(value, str) else value
    if number in (None, "none", "None"):
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ConfigError(f"{key}={value} must be a number")
    return number


def null_means_something(key: str) -> bool:
    """Return True for a key whose default is not null, so that null changes it."""
    defaults = {**foreign_names()["verl"]["defaults"], **sft_names()["defaults"]}
    return key in ("max_length", "scale_rewards", "trainer.logger") or defaults.get(key) is not None


def is_trl(settings: Mapping[str, Any]) -> bool:
    """Return True for settings of TRL's commands, whose keys are in no section."""
    names = foreign_names()["TRL"]
    has_sections = any(key.startswith((*VERL_SECTIONS, *SHARED_SECTIONS)) for key in settings)
    return not has_sections and any(key in names["keys"] or key in names["hints"] for key in settings)


def check_project(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of a project that cannot be converted, or of this one."""
    our_key = next((key for key in settings if key.startswith(("models.", "run.", "sampling.", "algorithm.name"))), None)
    if our_key is not None:
        raise ConfigError(f"{path}: is a configuration of rlhf_spmd already: {our_key} is no key of verl")
    names = {project: {**tables["keys"], **tables["hints"]} for project, tables in foreign_names().items()}
    if not is_trl(settings) and not any(key.startswith(VERL_SECTIONS) or key in names["verl"] for key in settings):
        hints = (f"; {key} is {project}'s" for key in settings for project in names if key in names[project])
        raise ConfigError(
            f"{path}: has no key of verl or TRL{next(hints, '')}; docs/migrating.md says what stands for those of other projects"
        )
