"""A model that is not trained: its configuration, and where its weights are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch

from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.directory import COMMIT, committed, named_checkpoint, read_manifest
from rlhf_spmd.checkpoint.load import load_checkpoint
from rlhf_spmd.checkpoint.manifest import DTYPES
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.constraints import Range, Seconds
from rlhf_spmd.config.load import resolved_key
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.models.layout_rules import check_generation_ep, check_layout
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import check_pretrained
from rlhf_spmd.parallel.device_setup import MOST_THREADS
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.input_digests import weights_digest
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE, EXPORT_DIR, exported_checkpoint
from rlhf_spmd.workers.config import ComputeConfig

ROLE = "actor"  # the role whose weights are read from a run's checkpoints


@dataclass(frozen=True)
class ModelConfig(ComputeConfig):
    """``model``.

    - path: Hugging Face directory, a run's directory (its newest checkpoint, read from the export of that if there is one) or one
      of its checkpoints
    """

    path: str = field(kw_only=True)


@dataclass(frozen=True)
class ModelSourceConfig:
    """A model that is not trained.

    - timeout_s: seconds for which one rank may keep the others waiting
    - threads: threads of a rank on CPUs
    """

    model: ModelConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    timeout_s: Seconds = 3600.0
    threads: Annotated[int, Range(least=1, most=MOST_THREADS)] = 1


Config = TypeVar("Config", bound=ModelSourceConfig)
CheckedConfig = TypeVar("CheckedConfig", bound=ModelSourceConfig, covariant=True)


@dataclass(frozen=True)
class CheckedModel(Generic[CheckedConfig]):
    """A model that one rank has read and checked, before any process group exists.

    ``checkpoint``: where the weights are, if not in the model's directory. ``adapters``: those that are served beside the model.
    """

    config: CheckedConfig
    spec: ModelSpec
    layout: Layout
    checkpoint: Path | None
    tokenizer: Any
    adapters: Mapping[str, LoraConfig] = field(default_factory=dict, kw_only=True)

    @property
    def must_match(self) -> dict[str, str]:
        """Return values that must be equal on all ranks, see :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        adapters = [lora.path for lora in self.adapters.values()]
        sources = (base_directory(self.config.model.path, self.checkpoint), self.checkpoint, *adapters)
        return {"set of weights": str([weights_digest(Path(source)) for source in sources if source is not None])}


def find_weights(path: str) -> tuple[str, Path | None]:
    """Return the directory of the model's configuration and tokenizer, and the checkpoint with its weights, or None.

    ``path`` is a Hugging Face directory, a run's directory, or one of its checkpoints. A run's directory stands for its newest
    checkpoint. The run's export is read instead if it was made from that checkpoint, or if there is none. Raises ValueError for a
    checkpoint whose run does not name the model that it started from.
    """
    directory = named_checkpoint(Path(path))
    checkpoints = committed(directory)
    has_export = (directory / EXPORT_DIR / "config.json").is_file() and (directory / CONFIG_FILE).is_file()
    if has_export and (not checkpoints or exported_checkpoint(directory) == checkpoints[0].path.name):
        return str(directory / EXPORT_DIR), None
    checkpoint = directory if (directory / COMMIT).is_file() else checkpoints[0].path if checkpoints else None
    if (directory / "config.json").is_file() or checkpoint is None:
        return path, None
    run_config = checkpoint.parent.parent / CONFIG_FILE
    key = f"models.{ROLE}.path"
    model = resolved_key(run_config, key) if run_config.exists() else None
    if model is None:
        raise ValueError(f"model.path={path} is a checkpoint, and {run_config} does not name {key}, whose tokenizer it needs")
    return model, checkpoint


def read_weights(config: Config, launch: Launch, generation_ep: int = 1) -> tuple[Config, ModelSpec, Layout, Path | None]:
    """Return the configuration with the model's full path, the architecture, the layout, and the checkpoint or None.

    The checkpoint has the weights if they are not in the model's directory. Local: no communication. Raises ValueError, one line.
    """
    path = Path(config.model.path)
    directory, checkpoint = find_weights(config.model.path)
    if launch.rank == 0 and (path / CONFIG_FILE).is_file():
        source = (checkpoint.name if checkpoint else exported_checkpoint(path)) or "an unknown checkpoint"
        print(f"model.path={path}: the weights of {source}, from {checkpoint or directory}", file=sys.stderr)
    config = replace(config, model=replace(config.model, path=local_directory(directory, "model.path")))
    spec = read_spec(config.model.path)
    layout = resolve_layout(config.layout, launch.size, "layout on all ranks")
    expert_parallel = check_generation_ep(spec, generation_ep, layout.tp, "generation", "layout.tp")
    layout = replace(layout, expert_parallel_generation=expert_parallel)
    sizes = (layout.pp, layout.tp, layout.vpp, layout.cp, layout.ep)
    check_layout(spec, "layout", *sizes, expert_parallel_generation=expert_parallel)
    if checkpoint is None:
        check_pretrained(spec, config.model.path, "lm")
    else:
        find_adapters(checkpoint, ROLE)  # raises now what it would raise on every rank
    return config, spec, layout, checkpoint


def base_directory(directory: str, checkpoint: Path | None) -> str | None:
    """Return the directory whose weights are loaded before :func:`load_from_checkpoint`; None if the checkpoint has all weights."""
    return directory if checkpoint is None or find_adapters(checkpoint, ROLE) is not None else None


def load_from_checkpoint(spec: ModelSpec, weights: RoleState, directory: str, checkpoint: Path | None, world: World) -> None:
    """Load the checkpoint, if there is one, into this rank's weights, in their dtype.

    Adapters are added to the weights of ``directory``, which were loaded before.
    Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError.
    """
    if checkpoint is None:
        return
    adapters = find_adapters(checkpoint, ROLE)
    if adapters is not None:
        adapters.add_to(spec, weights, Path(directory))
        return
    dtype = DTYPES[read_manifest(checkpoint).dtype_of(ROLE)]
    stored = {name: torch.empty(value.shape, dtype=dtype) for name, value in weights.tensors.items()}
    unread = frozenset([spec.names.second_head])  # an actor that is also the critic has one
    load_checkpoint(checkpoint, ROLE, RoleState(weights.shards, stored), world.all, unread)
    with torch.no_grad():
        for name, value in weights.tensors.items():
            value.copy_(stored.pop(name))


def not_finite(row: int, name: Any, model: ModelConfig) -> FloatingPointError:
    """Return the error for row number ``row``, whose id in the input is ``name``."""
    return FloatingPointError(
        f"row {row} (id {name!r}) has log-probs that are not finite; check the weights in {model.path}, or set model.dtype=float32"
    )
