"""Seconds of calls from times of single layers that ``plan profile`` measured on the user's machines. Pure.

As in ReaL's profiler (section 5.1), sizes are powers of two, and sizes between them are interpolated. A layer's time includes the
communication of tp.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.planner.machine import Gpu, Machine
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload

# share of a layer's forward pass that each level of CHECKPOINTING computes again; selective keeps the large products
RECOMPUTED_SHARE = (0.0, 0.4, 1.0)


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds of a model of ``sizes`` in tp slices.

    - tokens: of the rows of the measured micro-batches
    - layer_tokens: those of them that went through the layers, since rows share prompts; for each micro-batch:
    - forward, both: a forward pass, and a forward and backward pass, of one layer
    - forward_ends, both_ends: the same of all that is outside the layers
    - rows: in flight in the measured decode steps; for each:
    - decode, decode_ends: a step of one layer, and of all that is outside the layers
    - context: tokens in each row's cache in these steps
    """

    sizes: str
    tp: int
    tokens: list[float]
    layer_tokens: list[float]
    forward: list[float]
    both: list[float]
    forward_ends: list[float]
    both_ends: list[float]
    rows: list[float]
    decode: list[float]
    decode_ends: list[float]
    context: float

    def seconds(self, name: str, amount: Numbers) -> Numbers:
        """Return interpolated seconds of the field ``name``; beyond the largest measured size in proportion to it."""
        sizes = np.asarray(
            self.rows if name.startswith("decode") else self.tokens if name.endswith("ends") else self.layer_tokens
        )
        values = np.asarray(getattr(self, name))
        return np.interp(amount, sizes, values) * np.maximum(np.asarray(amount) / sizes[-1], 1.0)


def sizes_of(shape: ModelShape) -> str:
    """Return the key of a model's times: models with equal keys have layers that take equal times."""
    latent = f"-{shape.cache_entry}-{shape.q_rank}" if shape.cache_entry else ""
    experts = f"-e{shape.expert_columns:g}-{shape.expert_params:g}" if shape.expert_params else ""
    linear = f"-d{shape.gate_columns:g}-{shape.row_state:g}" if shape.gate_columns else ""
    sizes = f"{shape.hidden}-{shape.query_dims}-{shape.key_dims}-{shape.intermediate}-{shape.vocab}-{shape.head_outputs}"
    return f"{sizes}{latent}{experts}{linear}"


@dataclass(frozen=True)
class Profile:
    """Result of ``plan profile`` with ``size`` ranks.

    - device: with measured rates
    - latency: seconds of a small all-reduce of all ranks
    - update: seconds of an optimizer step for each parameter
    - zero: for ZeRO 0 to 3, seconds for each parameter that the forward and backward pass of a micro-batch take longer
    - zero_forward: the same for a forward pass with ZeRO 3
    """

    device: Gpu
    size: int
    latency: float
    update: float
    zero: list[float]
    zero_forward: float
    layers: tuple[LayerTimes, ...]

    def check_ranks(self, size: int, key: str) -> None:
        """Raise ValueError if one rank measured, which cannot measure links, and the plan is for several."""
        if self.size == 1 < size:
            raise ValueError(
                f"{key}: the profile is of one rank and has no times of links; profile with as many ranks as a host has"
            )


@dataclass(frozen=True)
class ProfileTimes:
    """Seconds of calls by a profile of the machine's devices."""

    profile: Profile
    machine: Machine

    def find(self, shape: ModelShape, tp: int) -> LayerTimes:
        """Return the times of a model's layers. Raises ValueError if this model was not measured."""
        layers = {(times.sizes, times.tp): times for times in self.profile.layers}
        if (sizes_of(shape), tp) not in layers:
            raise ValueError(
                f"the profile has no times of a model {sizes_of(shape)} at tp={tp}; it has {sorted(layers)}; profile again"
            )
        return layers[sizes_of(shape), tp]

    def tp_sizes(self, shape: ModelShape) -> list[int]:
        """Return the tensor-parallel sizes that were measured."""
        return sorted(times.tp for times in self.profile.layers if times.sizes == sizes_of(shape))

    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds [n] of a forward pass over all rows."""
        passes = self._passes("forward", shape, work, work.rows, settings)
        count, _ = work.micro_batches(work.rows, settings)
        params = shape.stage_params(settings.pp, settings.tp) - shape.stage_expert_params(settings)
        slowdown = self._slowdown(settings.dp_shard, settings.tp)
        return passes + ((settings.zero == 3) & (settings.dp_shard > 1)) * count * self.profile.zero_forward * params * slowdown

    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds [n] of all mini-batches and epochs: passes, sums of gradients, updates."""
        steps = work.mini_batches * work.epochs
        passes = self._passes("both", shape, work, work.rows / work.mini_batches, settings)
        shards = settings.dp_shard
        experts = shape.stage_expert_params(settings)
        params = shape.stage_params(settings.pp, settings.tp) - experts
        expert_sums = self._sums(experts / settings.ep, settings.dp * settings.cp // settings.ep, settings.tp * settings.ep)
        sums = self._sums(params / shards, settings.dp_replicate, settings.tp * shards)
        count, _ = work.micro_batches(work.rows / work.mini_batches, settings)
        slowdown = np.asarray(self.profile.zero)[settings.zero] * self._slowdown(shards, settings.tp)
        sliced = slowdown * params * np.where(settings.zero >= 2, count, 1)
        over_dp = np.where(shards > 1, sliced, 0.0) + sums + expert_sums
        return steps * (passes + over_dp + self.profile.update * shape.rank_params(settings))

    def generate_seconds(
        self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers | None = None
    ) -> np.ndarray:
        """Return seconds [n] of generating all responses, ``max_num_seqs`` rows at a time on each replica."""
        prefill = shape.num_layers * self._layer("forward", shape, settings, work.prefill_tokens(settings))
        total = np.zeros(len(settings))
        for phase in work.decode_phases(settings, settings.max_num_seqs):
            total = total + phase.steps * self._step(shape, settings, phase.rows)
        return prefill + total * settings.pp

    def _sums(self, numel: np.ndarray, copies: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """Return seconds [n] of summing ``numel`` fp32 gradients over ``copies`` ranks, one every ``apart``."""
        sent = 2 * 4 * numel * (copies - 1) / copies * self._slowdown(copies, apart) / self.profile.device.link
        return np.where((copies > 1) & (numel > 0), sent + self.profile.latency, 0.0)

    def _exchanges(self, shape: ModelShape, settings: CallSettings, tokens: np.ndarray) -> Numbers:
        """Return seconds [n] of a layer's all-to-alls in a pass over ``tokens``, which were measured without them.

        Over ep go rows for experts and their results; over cp queries, keys, values and the outputs of attention.
        """
        tp = settings.tp
        total = np.zeros(len(settings))
        cp_numbers = 2 * (shape.query_dims + shape.key_dims) / tp
        exchanges = ((settings.ep, 2 * shape.expert_rows * shape.hidden), (settings.cp, cp_numbers))
        for ranks, numbers in exchanges:
            size = tokens * numbers * self.profile.device.itemsize * (ranks - 1) / ranks
            sent = size * self._slowdown(ranks, tp) / self.profile.device.link
            total = total + np.where(ranks > 1, sent + 2 * self.profile.latency, 0.0)
        return total

    def _slowdown(self, ranks: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """Return the time of a ring of ``ranks`` ranks, one every ``apart``, as a multiple of the measured one, [n].

        Between hosts it uses the network of all its devices in a host.
        """
        local_size = self.machine.local_size
        is_measured = (self.profile.size > local_size) | (apart * ranks <= local_size)
        network = self.machine.network * np.maximum(local_size // apart, 1)
        return np.where(is_measured, 1.0, np.maximum(self.profile.device.link / network, 1.0))

    def _layer(self, name: str, shape: ModelShape, settings: CallSettings, amount: np.ndarray) -> np.ndarray:
        """Return seconds [n] of the field ``name`` of :class:`LayerTimes`, for tokens or rows [n], each by the times of its tp."""
        seconds = np.zeros(len(settings))
        for tp in np.unique(settings.tp):
            same_tp = settings.tp == tp
            seconds[same_tp] = self.find(shape, int(tp)).seconds(name, amount[same_tp])
        return seconds

    def _passes(self, name: str, shape: ModelShape, work: Workload, rows: float, settings: CallSettings) -> np.ndarray:
        """Return seconds [n] of the pipeline's passes over ``rows`` rows."""
        count, micro_tokens = work.micro_batches(rows, settings)
        tokens = work.tokens_through_layers(micro_tokens)
        layer = self._layer(name, shape, settings, tokens)
        ends = self._layer(f"{name}_ends", shape, settings, micro_tokens)
        if name == "both":
            layer = layer + np.asarray(RECOMPUTED_SHARE)[settings.checkpointing] * self._layer(
                "forward", shape, settings, tokens
            )
        exchanges = self._exchanges(shape, settings, tokens)
        layer = layer + (2 + (settings.checkpointing > 0) if name == "both" else 1) * exchanges
        stage = np.ceil(shape.num_layers / settings.pp) * layer
        link = np.where(settings.size <= self.machine.local_size, self.machine.device.link, self.machine.network)
        sent = (settings.pp > 1) * (self.profile.latency + 4 * tokens * shape.hidden / link)
        return (count + settings.pp - 1) * (stage + sent) + count * ends

    def _step(self, shape: ModelShape, settings: CallSettings, rows: np.ndarray) -> np.ndarray:
        """Return seconds [n] of a decode step."""
        layers = shape.num_layers * self._layer("decode", shape, settings, rows)
        return layers + self._layer("decode_ends", shape, settings, rows)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(json.dumps(asdict(profile), indent=1))


def read_profile(path: str, key: str = "cluster.gpu") -> Profile:
    """Return the profile in a file. Raises ValueError, which names the file and the setting ``key`` that gave it."""
    try:
        raw = parse_json(Path(path).read_text(encoding="utf-8"))
        layers = tuple(LayerTimes(**times) for times in raw.pop("layers"))
        return Profile(Gpu(**raw.pop("device")), layers=layers, **raw)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key}={path} is not a file that `rlhf-spmd plan profile` wrote: {type(error).__name__}: {error}"
        ) from error
