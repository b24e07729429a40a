"""Seconds of a call, from counts of what its slowest rank computes, reads and sends. Pure numpy, over arrays of choices [n].

A layer takes what its matrix products, its attention, its elementwise operations and the sums over tp take, one after the other, or as
long as the host needs to start them. Stages take their layers, and the last one the head; a pipeline takes its way through all stages,
then the slowest stage for each micro-batch that follows. Formulas and what they miss: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.shape import Choices, ModelShape, Workload, divisors

Numbers = Any  # float array [n], or one that broadcasts to it

# Numbers that a layer's elementwise operations read and write, of each token: per element of the residual stream (two norms, two sums),
# of queries and keys (rotation), and of a column of the MLP (gated activation); counted in ``kernels.Ops``.
STREAM, HEADS, COLUMNS = 42, 10, 5
LOGIT_BYTES = 28  # read and written for a logit on the way to its log-prob (``Ops``); with gradients three times that
SAMPLE_BYTES = 80  # for a logit on the way to a drawn token and its log-prob
OPTIMIZER_BYTES = 50  # for a parameter in an optimizer step: norm, clipping, AdamW in fp32, the copy in half precision
SUM_BYTES = 10  # to add a micro-batch's gradient of a parameter to the sum
PAGE = GenerationConfig.page_size  # of the cache; a row's last one is half full
CALL_SECONDS = 0.05  # of a call beside its work; of this trainer's controller it is less than a hundredth, the rest is rows
OUTSIDE = 5  # what a decode step starts outside of the layers (sampler, plan, embedding), against a layer


@dataclass(frozen=True)
class Calibration:
    """What counts cannot tell. A profile of one's own hardware replaces the defaults, which are those of H100s.

    Fitted to the calls of ReaL's tables 4 to 6 (7B + 7B on 16 H100): ``memory``: share of the memory's bandwidth that elementwise
    operations reach; ``launch``: seconds of the host to start the kernels of a layer, where no CUDA graph does; ``call``: seconds of a
    call that do not depend on its work. From Vidur's published H100 profiles, not fitted: ``matrix``: share of the peak that large
    matrix products reach; ``reads``: share of the memory's bandwidth at which weights, keys and values are read; ``link``: share of the
    links' bandwidth that collectives reach; ``kernels``: seconds that a layer's products take beside, and its other kernels at least.
    """

    memory: float = 0.66
    launch: float = 0.66e-3
    call: float = 1.7
    matrix: float = 0.76
    reads: float = 0.9
    link: float = 0.8
    kernels: float = 40e-6


class _StageLinks(NamedTuple):
    """Seconds of one micro-batch: ``whole``: through all stages, ``slowest``: of one of them."""

    whole: Numbers
    slowest: Numbers

    def times(self, number: Numbers) -> Numbers:
        """Of so many micro-batches, one after the other through the stages (1F1B, or forward only)."""
        return self.whole + (number - 1) * self.slowest


class _Ring(NamedTuple):
    """``per_byte`` and ``fixed``: seconds of an all-gather or a reduce-scatter; an all-reduce is both."""

    per_byte: Numbers
    fixed: Numbers

    def gather(self, size: Numbers) -> Numbers:
        """``size``: bytes of the whole."""
        return size * self.per_byte + self.fixed


class _Rates:
    """Rates of a machine under a calibration, and what ranks of a layout send to each other."""

    def __init__(self, shape: ModelShape, choices: Choices, machine: Machine, calibration: Calibration) -> None:
        self.shape, self.choices, self.machine, self.calibration = shape, choices, machine, calibration
        device = machine.device
        self.itemsize, self.wide = device.itemsize, max(device.itemsize, 4)
        self.flops, self.bytes = device.flops * calibration.matrix, device.bandwidth * calibration.memory
        self.reads = device.bandwidth * calibration.reads
        self.layers = np.ceil(shape.layers / choices.pp)  # of the stage with most
        self.last_layers = shape.layers // choices.pp
        self.slices = np.where(choices.sequence_parallel > 0, choices.tp, 1)  # of the residual stream
        self.tp_ring, self.shard_ring = self.ring(choices.tp, 1), self.ring(choices.dp_shard, choices.tp)
        self.replicate_ring = self.ring(choices.dp_replicate, choices.tp * choices.dp_shard)

    def ring(self, ranks: Numbers, apart: Numbers) -> _Ring:
        """Over so many ranks, one every ``apart``. Between hosts a ring crosses the network on all devices of a host that are in it."""
        near = np.maximum(self.machine.local_size // apart, 1)
        inside, link = ranks * apart <= self.machine.local_size, self.machine.device.link
        rate = np.where(inside, link, np.minimum(link, self.machine.network * near)) * self.calibration.link
        return _Ring((ranks - 1) / ranks / rate, np.log2(ranks) * np.where(inside, 1, 2) * self.machine.device.latency / 2)

    def tp_sum(self, tokens: Numbers) -> Numbers:
        return 2 * self.tp_ring.gather(tokens * (self.shape.hidden * self.itemsize))

    def hand_over(self, tokens: Numbers) -> Numbers:
        """To the next stage."""
        rate = np.where(self.choices.size <= self.machine.local_size, self.machine.device.link, self.machine.network)
        size = tokens * self.shape.hidden * self.itemsize / self.slices
        return np.where(self.choices.pp > 1, size / (rate * self.calibration.link) + self.machine.device.latency, 0.0)

    def products(self, tokens: Numbers) -> Numbers:
        """A layer's matrix products: at least as long as their weights take to be read."""
        shape, tp = self.shape, self.choices.tp
        met = np.minimum(shape.layer, shape.active * np.maximum(tokens, 1))  # of experts, those that tokens go to
        read = met * self.itemsize / tp
        return np.maximum(2 * shape.active * tokens / tp / self.flops, read / self.reads) + self.calibration.kernels

    def attention(self, tokens: Numbers, seen: Numbers) -> Numbers:
        """``seen``: tokens that one attends to, on average."""
        return 4 * self.shape.queries * seen * tokens / self.choices.tp / self.flops

    def elementwise(self, tokens: Numbers) -> Numbers:
        shape, tp = self.shape, self.choices.tp
        sliced = HEADS * (shape.queries + shape.keys) + COLUMNS * shape.intermediate
        numbers = STREAM * shape.hidden / self.slices + sliced / tp
        return np.maximum(tokens * numbers * self.itemsize / self.bytes, self.calibration.kernels)

    def head(self, tokens: Numbers, products: float, reads: float) -> Numbers:
        """Of a vocabulary: so many products of all tokens with it, and ``reads`` bytes for each logit."""
        if self.shape.outputs <= 1:
            return np.zeros(1)
        matrix = self.shape.hidden * self.shape.outputs / self.choices.tp
        product = np.maximum(2 * matrix * tokens / self.flops, matrix * self.itemsize / self.reads)
        return products * product + tokens * self.shape.outputs / self.choices.tp * reads / self.bytes

    def through(self, layer: Numbers, head: Numbers, hand_over: Numbers) -> _StageLinks:
        slowest = np.maximum(self.layers * layer, self.last_layers * layer + head) + hand_over
        return _StageLinks(self.shape.layers * layer + head + (self.choices.pp - 1) * hand_over, slowest)

    def passes(self, work: Workload, rows: float, one: Callable[..., _StageLinks]) -> tuple[Numbers, Numbers]:
        """Micro-batches of so many rows, and seconds of ``one`` pass, :meth:`forward` or :meth:`train`, over each of them."""
        number, tokens = work.micro_batches(rows, self.choices)
        own = work.computed(tokens)  # of which each is seen from all its rows
        seen = _age(work.prompt + np.array(work.responses)) * tokens / own
        return number, one(own, seen, tokens * work.response / work.length).times(number)

    def forward(self, tokens: Numbers, seen: Numbers, drawn: Numbers) -> _StageLinks:
        """A forward pass over a micro-batch of ``tokens``, of which ``drawn`` have their log-probs taken."""
        layer = self.products(tokens) + self.attention(tokens, seen) + self.elementwise(tokens) + 2 * self.tp_sum(tokens)
        layer = np.maximum(layer, self.calibration.launch)
        return self.through(layer, self.head(drawn, 1, LOGIT_BYTES), self.hand_over(tokens))

    def train(self, tokens: Numbers, seen: Numbers, drawn: Numbers) -> _StageLinks:
        """Forward and backward pass, with what is computed again, and the sum of gradients.

        Of tp's sums there are two in each pass; what is computed again stops before the last one, and with sequence parallelism what
        was gathered for the forward pass is gathered again."""
        level, sliced = self.choices.checkpointing, self.choices.sequence_parallel
        again, full = level >= 1, level == 2
        layer = (3 + full) * self.products(tokens) + (3 + again) * (self.attention(tokens, seen) + self.elementwise(tokens))
        layer = layer + (4 + full + sliced * (1 - full / 2)) * self.tp_sum(tokens)
        layer = np.maximum(layer, (3 + again) * self.calibration.launch)
        layer = layer + self.shape.layer / self.choices.tp * SUM_BYTES / self.bytes
        return self.through(layer, self.head(drawn, 4, 3 * LOGIT_BYTES), 2 * self.hand_over(tokens))

    def zero(self, passes: Numbers, compute: Numbers, trains: bool) -> Numbers:
        """What of ZeRO's transfers in a shard group does not go on beside ``passes`` micro-batches that take ``compute`` seconds.

        1 and 2 gather parameters once, 3 in every pass; gradients are scattered once by 1, after every micro-batch by 2 and 3."""
        stage = self.choices.zero
        params = self.shape.stage_params(self.choices.pp, self.choices.tp)
        gathers = np.where(stage == 3, passes * (1 + trains), stage > 0)
        scatters = np.where(stage >= 2, passes, stage > 0) * trains
        sent = gathers * self.shard_ring.gather(params * self.itemsize) + scatters * self.shard_ring.gather(params * self.wide)
        beside = compute * np.where(stage == 1, 1 / passes, 1) * self.machine.device.overlap
        return np.maximum(sent - beside, 0)

    def optimizer(self) -> Numbers:
        """An optimizer step, and before it the sum of a rank's gradients over the copies of the model."""
        own = self.shape.stage_params(self.choices.pp, self.choices.tp) / self.choices.dp_shard
        return 2 * self.replicate_ring.gather(own * self.wide) + own * OPTIMIZER_BYTES / self.bytes

    def decode(self, rows: Numbers, context: Numbers, held: Numbers) -> Numbers:
        """A step of one token of each of ``rows`` [n, k] of a replica, which have ``context`` [n, k] tokens of ``held`` bytes each.

        With pp stages the rows are in as many lanes, which take turns; a lane's next step needs its last one's token."""
        calibration = self.calibration
        lanes = np.minimum(self.choices.pp, np.maximum(rows, 1))
        rows = rows / lanes
        layer = self.products(rows) + self.elementwise(rows) + 2 * self.tp_sum(rows)
        layer = layer + rows * context * held / self.layers / self.reads
        layer = np.where(self.choices.graphs > 0, layer, np.maximum(layer, calibration.launch))
        logits = rows * self.shape.outputs
        head = self.head(rows, 1, 0) + logits * SAMPLE_BYTES / self.bytes + self.tp_ring.gather(logits * 4)
        stages = self.through(layer, head + OUTSIDE * calibration.launch, self.hand_over(rows))
        return np.maximum(lanes * stages.slowest, stages.whole)


def kv_bytes_per_token(shape: ModelShape, choices: Choices, itemsize: int = 2) -> np.ndarray:
    """Of keys and values of a token on a rank of the stage with most layers, [n]. Where tp exceeds the KV heads, ranks hold copies."""
    keys = shape.keys / np.minimum(choices.tp, shape.kv_heads)
    return np.ceil(shape.layers / choices.pp) * 2 * keys * itemsize


def _age(lengths: np.ndarray) -> float:
    """Tokens that a row has on average, of rows that grow to these lengths one token at a time."""
    return float((lengths**2).mean() / lengths.mean() / 2)


@dataclass(frozen=True)
class Formulas:
    """Seconds [n] of calls by these formulas, with what a call of this trainer costs by itself."""

    machine: Machine
    calibration: Calibration = Calibration(call=CALL_SECONDS)

    def captured(self, config: GenerationConfig) -> bool:
        """Whether steps that a CUDA graph can be made of are taken to be one."""
        return not (self.machine.device.on_host or config.enforce_eager)

    def slices(self, shape: ModelShape) -> list[int]:
        """The tp that there are times for."""
        return divisors(self.machine.local_size)

    def infer_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray:
        """Of a forward pass over all rows."""
        rates = _Rates(shape, choices, self.machine, self.calibration)
        number, compute = rates.passes(work, work.rows, rates.forward)
        return compute + rates.zero(number, compute, trains=False) + self.calibration.call

    def train_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray:
        """Of learning: ``work.mini_batches`` optimizer steps in each of its epochs."""
        rates = _Rates(shape, choices, self.machine, self.calibration)
        number, compute = rates.passes(work, work.rows / work.mini_batches, rates.train)
        step = compute + rates.zero(number, compute, trains=True) + rates.optimizer()
        return step * work.mini_batches * work.epochs + self.calibration.call

    def generate_seconds(self, shape: ModelShape, work: Workload, choices: Choices, kv_bytes: Numbers) -> np.ndarray:
        """Of generating all responses with ``kv_bytes`` for keys and values on each rank, a number or an array [n].

        Prompts are computed once for a group. So many rows are in flight as ``max_num_seqs`` and memory allow; while rows wait,
        others take the places of those that end; then fewer and fewer are left, down to the longest. A step is costed at each of
        these numbers.
        """
        rates = _Rates(shape, choices, self.machine, self.calibration)
        groups = np.maximum(np.ceil(work.rows / work.group / choices.dp), 1)
        rows, prompts = groups * work.group, groups * work.prompt
        number, tokens = np.ceil(prompts / choices.micro_tokens), np.minimum(prompts, choices.micro_tokens)
        prefill = rates.forward(tokens, work.prompt / 2, 0.0).times(np.maximum(number, 1))
        flight = np.maximum(np.minimum(rows_in_flight(shape, work, choices, self.machine, kv_bytes), rows), 1)
        lengths, held = np.array(work.responses), kv_bytes_per_token(shape, choices, self.machine.device.itemsize)
        waiting = (rows - flight) * lengths.mean() / flight  # steps in which all places are taken
        total = prefill + waiting * rates.decode(flight, work.prompt + _age(lengths), held) + self.calibration.call
        for index, (begun, end) in enumerate(pairwise([0.0, *lengths])):
            if end > begun:
                alive = np.maximum(flight * (1 - index / len(lengths)), 1)
                total = total + (end - begun) * rates.decode(alive, work.prompt + (begun + end) / 2, held)
        return total


def rows_in_flight(shape: ModelShape, work: Workload, choices: Choices, machine: Machine, kv_bytes: Numbers) -> np.ndarray:
    """Rows of a replica that ``max_num_seqs`` and memory allow at once, [n]: a row of the average age, with its part of a
    group's prompt, whose last page each row has for itself."""
    tail = min(work.prompt, PAGE / 2)
    tokens = (work.prompt - tail) / work.group + tail + _age(np.array(work.responses)) + PAGE / 2
    fitting = kv_bytes / kv_bytes_per_token(shape, choices, machine.device.itemsize) / tokens
    return np.maximum(np.floor(np.minimum(fitting, choices.max_num_seqs)), 1)
