"""``rlhf_spmd.train(config)``: training in a process that goes on afterwards. The configuration may have objects as values."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.config.interpolation import select
from rlhf_spmd.config.plain_yaml import MAX_DEPTH
from rlhf_spmd.config.registry import forget_files
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.config.words import first_line
from rlhf_spmd.kernels.devices import set_up_cuda
from rlhf_spmd.parallel.device_setup import choose_matmul
from rlhf_spmd.parallel.launch import Launch, read_launch
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.process.program import run_program
from rlhf_spmd.telemetry.run_dir import atomic_write_text, create_run_dir, json_value
from rlhf_spmd.train import settings_of
from rlhf_spmd.train import train as run_training
from rlhf_spmd.training.notebook_source import importable_name, source_of
from rlhf_spmd.training.train_config import RunConfig

OBJECTS_DIR = "objects"  # in the run's directory: a file for each object of the configuration
DATA_KEYS = ("path", "val_path")


def train(config: Mapping[str, Any]) -> Path:
    """Run on this process alone the training that ``config`` describes, nested as a YAML file is. Return the run's directory.

    A function or class may stand where a file has a name, and rows (a list of dicts, a ``datasets.Dataset``) where it has a path of
    data. They are written into the run's directory, and its ``config.yaml`` has their paths. Raises ConfigError, ValueError or
    DataError for bad input, later the exception that ended the run.
    """
    if read_launch().size > 1:
        raise ValueError(
            "train(config) is for one rank; under torchrun start the program: torchrun ... -m rlhf_spmd.train --config FILE"
        )
    forget_files()  # files of code may have been edited since the last run
    config = write_objects(config)
    set_up_cuda()
    choose_matmul()
    run_plan = prepare(config, (), 1, launch=Launch())
    try:
        run_program(lambda: run_plan, run_training, settings_of, saves_on_signal=True)
    except SystemExit as ending:  # how a program of one rank ends, after a line about why
        cause = ending.__context__
        if isinstance(cause, SystemExit):  # the user's code has raised it: it must not end the caller as a success
            raise RuntimeError(f"the run was left before its end by SystemExit: {cause}") from None
        raise cause or ending from None
    return Path(run_plan.config.run.dir)


def write_objects(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` with names and paths in place of objects.

    Rows, and objects that other processes cannot import, are written to files in the run's directory. A file's name has a digest of its
    content, so that no run overwrites another's. Raises ConfigError, one line, for an object that no file can stand for.
    """
    if OmegaConf.is_config(config):  # it cannot hold such objects
        return config

    def with_names(value: Any, where: str, is_data: bool, depth: int) -> Any:
        if depth > MAX_DEPTH:  # the loader refuses it
            return value
        if is_data and (rows := rows_of(value, where)) is not None:
            lines = "".join(f"{json.dumps(json_value(row))}\n" for row in rows)
            return object_file(config, re.sub(r"\W+", "_", where), lines, ".jsonl")
        if isinstance(value, Mapping):
            keys = {key: f"{where}.{key}" if where else str(key) for key in value}
            return {key: with_names(child, keys[key], is_data or key in DATA_KEYS, depth + 1) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [with_names(child, f"{where}[{number}]", is_data, depth + 1) for number, child in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if not callable(value) or (name := importable_name(value)) is not None:
            return name if callable(value) else value
        inner_name, text = source_of(value, where)
        return f"{object_file(config, inner_name, text, '.py')}:{inner_name}"

    named_config: dict[str, Any] = with_names(config, "", False, 0)
    return named_config


def rows_of(value: Any, where: str) -> Iterator[Mapping[str, Any]] | None:
    """Return the rows of a list of dicts or of a ``datasets.Dataset``, else None. Raises ConfigError for a DatasetDict."""
    if isinstance(value, list | tuple):
        return iter(value) if value and all(isinstance(row, Mapping) for row in value) else None
    library = sys.modules.get("datasets")  # a caller with a data set has imported it
    if library is None or not isinstance(value, library.Dataset | library.DatasetDict):
        return None
    if isinstance(value, library.DatasetDict):
        raise ConfigError(f"{where}: a DatasetDict is several data sets; give one of them: {', '.join(map(repr, value))}")
    return iter(value)


def object_file(config: Mapping[str, Any], name: str, text: str, suffix: str) -> str:
    """Return the path of a file in the run's directory with this text; writes it unless it exists. Raises ValueError."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = create_run_dir(_run_dir(config) / OBJECTS_DIR) / f"{name}-{digest}{suffix}"
    if not path.exists():
        atomic_write_text(path, text)
    return str(path)


def _run_dir(config: Mapping[str, Any]) -> Path:
    """Return ``run.dir``, which may refer to other keys of the section. Raises ConfigError."""
    run = config.get("run") or {}
    settings = {"name": RunConfig.name, "dir": RunConfig.dir, **(run if isinstance(run, Mapping) else {})}
    texts = {key: value for key, value in settings.items() if isinstance(value, str | int | float)}
    try:
        return Path(str(select({"run": texts}, "run.dir")))
    except OmegaConfBaseException as error:
        raise ConfigError(f"run.dir: {first_line(error)}") from error
