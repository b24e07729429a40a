"""Times of single layers as ``plan profile`` measured them on the user's machines, and seconds of calls from these. Pure.

As ReaL's profiler (section 5.1): sizes are powers of two and what lies between is interpolated; a layer's time includes tp's exchange.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.planner.machine import Gpu, Machine
from rlhf_spmd.planner.shape import Choices, ModelShape, Workload

# of a layer's forward pass, what is computed again by CHECKPOINTING: selective keeps the large products
AGAIN = (0.0, 0.4, 1.0)


@dataclass(frozen=True)
class LayerTimes:
    """Of a model of ``sizes`` in tp slices. Seconds, by ``tokens`` of a micro-batch: of one layer ``forward`` and ``both`` (forward and
    backward), of what is outside the layers ``forward_ends`` and ``both_ends``; by ``rows`` in flight of a decoding step: of a layer
    ``decode`` and outside ``decode_ends``, with ``context`` tokens behind each row."""

    sizes: str
    tp: int
    tokens: list[float]
    forward: list[float]
    both: list[float]
    forward_ends: list[float]
    both_ends: list[float]
    rows: list[float]
    decode: list[float]
    decode_ends: list[float]
    context: float

    def at(self, name: str, amount: Any) -> Any:
        """Seconds, interpolated; beyond the largest measured size in proportion."""
        sizes = np.asarray(self.rows if name.startswith("decode") else self.tokens)
        values = np.asarray(getattr(self, name))
        return np.interp(amount, sizes, values) * np.maximum(np.asarray(amount) / sizes[-1], 1.0)


def sizes_of(shape: ModelShape) -> str:
    """What tells models apart whose layers take different times."""
    return f"{shape.hidden}-{shape.queries}-{shape.keys}-{shape.intermediate}-{shape.vocab}-{shape.outputs}"


@dataclass(frozen=True)
class Profile:
    """``device``: memory as it is, rates as measured. ``latency``: seconds of a small exchange of all ranks. ``update``: seconds per
    parameter of an optimizer step. ``zero``: of ZeRO 0 to 3 seconds per parameter that a micro-batch takes longer, forward and
    backward; ``zero_forward``: with 3, forward only. ``size``: ranks that measured."""

    device: Gpu
    size: int
    latency: float
    update: float
    zero: list[float]
    zero_forward: float
    layers: tuple[LayerTimes, ...]

    def check_ranks(self, size: int, key: str) -> None:
        """Raises ValueError for a plan of several ranks where one measured, which knows no links."""
        if self.size == 1 < size:
            raise ValueError(
                f"{key}: the profile is of one rank, and links are not in it; profile with as many ranks as a host has"
            )


@dataclass(frozen=True)
class Measured:
    """Seconds of calls on a machine of whose devices there is a profile."""

    profile: Profile
    machine: Machine

    def find(self, shape: ModelShape, tp: int) -> LayerTimes:
        """Raises ValueError where this model was not measured."""
        found = next((one for one in self.profile.layers if (one.sizes, one.tp) == (sizes_of(shape), tp)), None)
        if found is None:
            there = sorted({(one.sizes, one.tp) for one in self.profile.layers})
            raise ValueError(f"the profile has no times of a model {sizes_of(shape)} at tp={tp}; it has {there}; profile again")
        return found

    def captured(self, config: GenerationConfig) -> bool:
        return not (self.machine.device.on_host or config.enforce_eager)  # as it was measured

    def slices(self, shape: ModelShape) -> list[int]:
        """The tp of which there are times."""
        return sorted(one.tp for one in self.profile.layers if one.sizes == sizes_of(shape))

    def infer_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray:
        """[n] of a forward pass over all rows."""
        took = self._passes("forward", shape, work, work.rows, choices)
        count, _ = work.micro_batches(work.rows, choices)
        params, slower = shape.stage_params(choices.pp, choices.tp), self._slower(choices.dp_shard, choices.tp)
        return took + ((choices.zero == 3) & (choices.dp_shard > 1)) * count * self.profile.zero_forward * params * slower

    def train_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray:
        """[n] of all mini-batches and epochs: passes, the sums of gradients, the update."""
        steps = work.mini_batches * work.epochs
        passes = self._passes("both", shape, work, work.rows / work.mini_batches, choices)
        params, shards, copies = shape.stage_params(choices.pp, choices.tp), choices.dp_shard, choices.dp_replicate
        link = self.profile.device.link / self._slower(copies, choices.tp * shards)
        summed = 2 * 4 * params / shards * (copies - 1) / copies / link + self.profile.latency
        count, _ = work.micro_batches(work.rows / work.mini_batches, choices)
        slower = np.asarray(self.profile.zero)[choices.zero] * self._slower(shards, choices.tp)
        sliced = slower * params * np.where(choices.zero >= 2, count, 1)
        over_dp = np.where(shards > 1, sliced, 0.0) + np.where(copies > 1, summed, 0.0)
        return steps * (passes + over_dp + self.profile.update * params / shards)

    def generate_seconds(self, shape: ModelShape, work: Workload, choices: Choices, kv_bytes: Any = None) -> np.ndarray:
        """[n] of prefill, shared by a group, and of decoding in waves of ``max_num_seqs`` rows on each replica."""
        own = np.ceil(work.rows / choices.dp)
        prefill = shape.layers * self._layer("forward", shape, choices, own / work.group * work.prompt)
        waves = np.floor((own - 1) / choices.max_num_seqs)
        total = waves * work.response * self._step(shape, choices, np.minimum(own, choices.max_num_seqs))
        left = own - waves * choices.max_num_seqs
        for place, (before, length) in enumerate(pairwise([0.0, *work.responses])):
            alive = left * (len(work.responses) - place) / len(work.responses)
            total = total + (length - before) * self._step(shape, choices, alive)
        return prefill + total * choices.pp

    def _slower(self, ranks: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """[n]: of a ring of so many ranks, one every ``apart``, how many times as long it takes as over what was measured; between
        hosts it crosses the network on all devices of a host that are in it."""
        host, link = self.machine.local_size, self.profile.device.link
        inside = (self.profile.size > host) | (apart * ranks <= host)
        return np.where(inside, 1.0, np.maximum(link / (self.machine.network * np.maximum(host // apart, 1)), 1.0))

    def _layer(self, name: str, shape: ModelShape, choices: Choices, amount: np.ndarray) -> np.ndarray:
        """Seconds [n] by this name of :class:`LayerTimes`, of tokens or rows [n], each by the times of its tp."""
        found = np.zeros(len(choices))
        for tp in np.unique(choices.tp):
            at = choices.tp == tp
            found[at] = self.find(shape, int(tp)).at(name, amount[at])
        return found

    def _passes(self, name: str, shape: ModelShape, work: Workload, rows: float, choices: Choices) -> np.ndarray:
        count, whole = work.micro_batches(rows, choices)
        tokens = work.computed(whole)
        layer, ends = self._layer(name, shape, choices, tokens), self._layer(f"{name}_ends", shape, choices, whole)
        if name == "both":
            layer = layer + np.asarray(AGAIN)[choices.checkpointing] * self._layer("forward", shape, choices, tokens)
        stage = np.ceil(shape.layers / choices.pp) * layer
        near = choices.size <= self.machine.local_size
        link = np.where(near, self.machine.device.link, self.machine.network)
        sent = (choices.pp > 1) * (self.profile.latency + 4 * tokens * shape.hidden / link)
        return (count + choices.pp - 1) * (stage + sent) + count * ends

    def _step(self, shape: ModelShape, choices: Choices, rows: np.ndarray) -> np.ndarray:
        layers = shape.layers * self._layer("decode", shape, choices, rows)
        return layers + self._layer("decode_ends", shape, choices, rows)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(json.dumps(asdict(profile), indent=1))


def read_profile(path: str, key: str = "cluster.gpu") -> Profile:
    """Raises ValueError that names the file and the setting ``key`` that gave it."""
    try:
        raw = parse_json(Path(path).read_text(encoding="utf-8"))
        layers = tuple(LayerTimes(**one) for one in raw.pop("layers"))
        return Profile(Gpu(**raw.pop("device")), layers=layers, **raw)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{key}={path} is no file that `rlhf-spmd plan profile` wrote: {type(error).__name__}: {error}"
        ) from error
