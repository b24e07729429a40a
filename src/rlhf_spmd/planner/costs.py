"""Seconds of a call, counted from what its slowest rank computes, reads and sends. Pure numpy, over settings [n].

The time of a layer is the sum of its matrix products, its attention, its elementwise operations and its sums over tp, or longer
if the host needs longer to start them. A stage takes its layers, the last one also the head. A pipeline takes one way through
all stages, and then the slowest stage for each micro-batch that follows. docs/planner.md has the formulas and what they miss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.linear_attention import CHUNK
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Workload, divisors

Numbers = Any  # float array [n], or one that broadcasts to it

# Numbers that a layer's elementwise operations read and write for each token, counted in ``kernels.Ops``: for an element of the
# residual stream (two norms, two sums), for one of queries and keys (rotation), for a column of the MLP (gated activation).
STREAM, HEADS, COLUMNS = 42, 10, 5
LOGIT_BYTES = 28  # read and written to take a logit's log-prob (``Ops``); with gradients three times as many
SAMPLE_BYTES = 80  # read and written for a logit to draw a token and take its log-prob
STATE_BYTES = 52  # for a number of a row's state of linear attention in a decode step: 13 passes of fp32
# Operations of torch that the host starts for linear attention: fixed, and for each chunk of the longest row; in a decode step
MIXER_STARTS, MIXER_BACKWARD, TOKEN_STARTS = (80, 5), (155, 16), 50
OPTIMIZER_BYTES = 50  # for a parameter in an optimizer step: norm, clipping, AdamW in fp32, the copy in half precision
SUM_BYTES = 10  # to add a micro-batch's gradient of a parameter to the sum
PAGE = GenerationConfig.page_size  # tokens of a cache page; a row's last page is half full on average
CALL_SECONDS = 0.05  # of a call beside its work; the controller takes less than a hundredth of it, preparing rows the rest
OUTSIDE = 5  # kernels that a decode step starts outside the layers (sampler, plan, embedding), in those of one layer


@dataclass(frozen=True)
class Calibration:
    """Constants that cannot be counted. The defaults are those of H100s; a profile of other hardware replaces them.

    Three are fitted to the calls of ReaL's tables 4 to 6 (7B + 7B on 16 H100). ``memory``: share of the memory bandwidth that
    elementwise operations reach. ``launch``: seconds in which the host starts the kernels of a layer without a CUDA graph.
    ``call``: seconds of a call that do not depend on its work.

    The others are from Vidur's published H100 profiles, not fitted. ``matrix``: share of the peak that large matrix products
    reach. ``reads``: share of the memory bandwidth at which weights, keys and values are read. ``link``: share of the links'
    bandwidth that collectives reach. ``kernels``: fixed seconds of a layer's products, and the least that its other kernels
    take. ``start``: seconds in which the host starts an operation of linear attention.
    """

    memory: float = 0.66
    launch: float = 0.66e-3
    call: float = 1.7
    matrix: float = 0.76
    reads: float = 0.9
    link: float = 0.8
    kernels: float = 40e-6
    start: float = 10e-6


class _PipelineTime(NamedTuple):
    """Seconds of one micro-batch, through all stages and in the slowest one."""

    all_stages: Numbers
    slowest: Numbers

    def times(self, num_micro_batches: Numbers) -> Numbers:
        """Return seconds of ``num_micro_batches`` micro-batches that follow each other through the stages (1F1B, or forward only)."""
        return self.all_stages + (num_micro_batches - 1) * self.slowest


class _Ring(NamedTuple):
    """Seconds of an all-gather or a reduce-scatter, for each byte and fixed. An all-reduce is both."""

    per_byte: Numbers
    fixed: Numbers

    def gather(self, size: Numbers) -> Numbers:
        """Return seconds to gather ``size`` bytes."""
        return size * self.per_byte + self.fixed


class _Rates:
    """Rates of a machine under a calibration, and what ranks of a layout send to each other."""

    def __init__(self, shape: ModelShape, settings: CallSettings, machine: Machine, calibration: Calibration) -> None:
        self.shape = shape
        self.settings = settings
        self.machine = machine
        self.calibration = calibration
        device = machine.device
        self.itemsize, self.wide = device.itemsize, max(device.itemsize, 4)
        self.flops, self.bytes = device.flops * calibration.matrix, device.bandwidth * calibration.memory
        self.reads = device.bandwidth * calibration.reads
        self.layers = np.ceil(shape.layers / settings.pp)  # of the stage with most
        self.last_layers = shape.layers // settings.pp
        self.slices = np.where(settings.sequence_parallel > 0, settings.tp, 1)  # of the residual stream
        self.tp_ring, self.shard_ring = self.ring(settings.tp, 1), self.ring(settings.dp_shard, settings.tp)
        self.replicate_ring = self.ring(settings.dp_replicate, settings.tp * settings.dp_shard)
        self.cp_ring, self.ep_ring = self.ring(settings.cp, settings.tp), self.ring(settings.ep, settings.tp)
        self.experts = shape.stage_experts(settings) / settings.ep  # of the fullest stage, on a rank of ep
        self.layer = shape.layer - np.where(
            settings.ep > 1, shape.experts * (1 - 1 / settings.ep), 0.0
        )  # parameters of a layer

    def ring(self, ranks: Numbers, apart: Numbers) -> _Ring:
        """Return the ring over so many ranks, one every ``apart``. Between hosts it uses the network of all its devices in a host."""
        near = np.maximum(self.machine.local_size // apart, 1)
        inside, link = ranks * apart <= self.machine.local_size, self.machine.device.link
        rate = np.where(inside, link, np.minimum(link, self.machine.network * near)) * self.calibration.link
        return _Ring((ranks - 1) / ranks / rate, np.log2(ranks) * np.where(inside, 1, 2) * self.machine.device.latency / 2)

    def tp_sum(self, tokens: Numbers) -> Numbers:
        """Return seconds of a sum of a layer over tp."""
        return 2 * self.tp_ring.gather(tokens * (self.shape.hidden * self.itemsize))

    def cp_exchange(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's two all-to-alls over cp: q, k and v one way, the attention's result back."""
        numbers = 2 * (self.shape.queries + self.shape.keys) / self.settings.tp
        return np.where(self.settings.cp > 1, self.cp_ring.gather(tokens * numbers * self.itemsize), 0.0)

    def ep_exchange(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's two all-to-alls over ep: rows to their experts, results back."""
        size = tokens * (self.shape.expert_rows * self.shape.hidden * self.itemsize)
        return np.where(self.settings.ep > 1, 2 * self.ep_ring.gather(size), 0.0)

    def hand_over(self, tokens: Numbers) -> Numbers:
        """Return seconds to send activations to the next stage."""
        rate = np.where(self.settings.size <= self.machine.local_size, self.machine.device.link, self.machine.network)
        size = tokens * self.shape.hidden * self.itemsize / self.slices
        return np.where(self.settings.pp > 1, size / (rate * self.calibration.link) + self.machine.device.latency, 0.0)

    def starts(self, operations: tuple[int, int], longest: float) -> float:
        """Return seconds in which the host starts the operations of linear attention, in an average layer."""
        fixed, per_chunk = operations
        return self.shape.linear_share * self.calibration.start * (fixed + per_chunk * np.ceil(longest / CHUNK))

    def products(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's matrix products, at least as long as reading their weights takes."""
        shape, tp = self.shape, self.settings.tp
        numel = np.minimum(self.layer, shape.matmul_weights * np.maximum(tokens, 1))  # only the experts that tokens go to
        read = numel * self.itemsize / tp
        return np.maximum(2 * shape.matmul_weights * tokens / tp / self.flops, read / self.reads) + self.calibration.kernels

    def attention(self, tokens: Numbers, seen: Numbers) -> Numbers:
        """Return seconds of a layer's attention if a token attends to ``seen`` tokens on average."""
        return 4 * self.shape.queries * seen * tokens / self.settings.tp / self.flops

    def elementwise(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's elementwise operations."""
        shape, tp = self.shape, self.settings.tp
        sliced = HEADS * (shape.queries + shape.keys) + COLUMNS * shape.intermediate
        numbers = STREAM * shape.hidden / self.slices + sliced / tp
        return np.maximum(tokens * numbers * self.itemsize / self.bytes, self.calibration.kernels)

    def head(self, tokens: Numbers, products: float, reads: float) -> Numbers:
        """Return seconds of ``products`` products of all tokens with the vocabulary, and of ``reads`` bytes for each logit."""
        if self.shape.head_outputs <= 1:
            return np.zeros(1)
        matrix = self.shape.hidden * self.shape.head_outputs / self.settings.tp
        product = np.maximum(2 * matrix * tokens / self.flops, matrix * self.itemsize / self.reads)
        return products * product + tokens * self.shape.head_outputs / self.settings.tp * reads / self.bytes

    def through(self, layer: Numbers, head: Numbers, hand_over: Numbers) -> _PipelineTime:
        """Return seconds of a micro-batch whose layers, head and transfer to the next stage take so long."""
        slowest = np.maximum(self.layers * layer, self.last_layers * layer + head) + hand_over
        return _PipelineTime(self.shape.layers * layer + head + (self.settings.pp - 1) * hand_over, slowest)

    def passes(self, work: Workload, rows: float, micro_batch: Callable[..., _PipelineTime]) -> tuple[Numbers, Numbers]:
        """Return the number of micro-batches of so many rows, and seconds of ``micro_batch``, :meth:`forward` or
        :meth:`train`, over all of them."""
        num_micro_batches, tokens = work.micro_batches(rows, self.settings)
        layer_tokens = work.tokens_through_layers(tokens)  # a shared prompt's token is seen from all rows
        seen = _age(work.prompt + np.array(work.responses)) * tokens / layer_tokens
        return num_micro_batches, micro_batch(layer_tokens, seen, tokens * work.response / work.length, work.longest).times(
            num_micro_batches
        )

    def forward(self, tokens: Numbers, seen: Numbers, drawn: Numbers, longest: float) -> _PipelineTime:
        """Return seconds of a forward pass over ``tokens``, of which ``drawn`` have their log-probs taken. ``longest``:
        tokens of a row."""
        layer = self.products(tokens) + self.attention(tokens, seen) + self.elementwise(tokens) + 2 * self.tp_sum(tokens)
        launch = self.calibration.launch + self.starts(MIXER_STARTS, longest)
        layer = np.maximum(layer, launch) + self.cp_exchange(tokens) + self.ep_exchange(tokens)
        return self.through(layer, self.head(drawn, 1, LOGIT_BYTES), self.hand_over(tokens))

    def train(self, tokens: Numbers, seen: Numbers, drawn: Numbers, longest: float) -> _PipelineTime:
        """Return seconds of a forward and a backward pass with recomputation, and of adding the gradients.

        Each pass has two sums over tp. Recomputation stops before the last one. With sequence parallelism, what was gathered
        for the forward pass is gathered again.
        """
        level, sliced = self.settings.checkpointing, self.settings.sequence_parallel
        again, full = level >= 1, level == 2
        layer = (3 + full) * self.products(tokens) + (3 + again) * (self.attention(tokens, seen) + self.elementwise(tokens))
        layer = layer + (4 + full + sliced * (1 - full / 2)) * self.tp_sum(tokens)
        exchanges = self.cp_exchange(tokens) + self.ep_exchange(tokens)
        launch = (3 + again) * self.calibration.launch + self.starts(MIXER_BACKWARD, longest)
        layer = np.maximum(layer, launch + (1 + again) * self.starts(MIXER_STARTS, longest)) + (2 + again) * exchanges
        layer = layer + self.layer / self.settings.tp * SUM_BYTES / self.bytes
        return self.through(layer, self.head(drawn, 4, 3 * LOGIT_BYTES), 2 * self.hand_over(tokens))

    def zero(self, passes: Numbers, compute: Numbers, trains: bool) -> Numbers:
        """Return seconds of ZeRO's transfers that do not hide behind ``passes`` micro-batches of ``compute`` seconds.

        Stages 1 and 2 gather parameters once, 3 in every pass. Stage 1 scatters gradients once, 2 and 3 after every
        micro-batch.
        """
        stage = self.settings.zero
        params = self.shape.stage_params(self.settings.pp, self.settings.tp) - self.shape.stage_experts(self.settings)
        gathers = np.where(stage == 3, passes * (1 + trains), stage > 0)
        scatters = np.where(stage >= 2, passes, stage > 0) * trains
        sent = gathers * self.shard_ring.gather(params * self.itemsize) + scatters * self.shard_ring.gather(params * self.wide)
        beside = compute * np.where(stage == 1, 1 / passes, 1) * self.machine.device.overlap
        return np.maximum(sent - beside, 0)

    def optimizer(self) -> Numbers:
        """Return seconds of an optimizer step, and of summing gradients over the copies of the model before it."""
        settings, params = self.settings, self.shape.rank_params(self.settings)
        expert_ring = self.ring(settings.dp * settings.cp // settings.ep, settings.tp * settings.ep)
        sums = self.replicate_ring.gather((params - self.experts) * self.wide)
        sums = sums + np.where(settings.ep > 1, expert_ring.gather(self.experts * self.wide), 0.0)
        return 2 * sums + params * OPTIMIZER_BYTES / self.bytes

    def decode(self, rows: Numbers, context: Numbers, token_bytes: Numbers) -> Numbers:
        """Return seconds of a step that decodes one token for each of a replica's ``rows`` [n, k]. Their caches have ``context`` [n,
        k] tokens of ``token_bytes`` each.

        With pp stages, pp micro-batches of rows take turns: the next step of one needs the token of its last step.
        """
        calibration = self.calibration
        micro_batches = np.minimum(self.settings.pp, np.maximum(rows, 1))
        rows = rows / micro_batches
        layer = self.products(rows) + self.elementwise(rows) + 2 * self.tp_sum(rows)
        layer = (
            layer
            + rows * (context * token_bytes / self.layers + STATE_BYTES * self.shape.row_state / self.settings.tp) / self.reads
        )
        launch = calibration.launch + self.starts((TOKEN_STARTS, 0), 1)
        layer = np.where(self.settings.graphs > 0, layer, np.maximum(layer, launch))
        logits = rows * self.shape.head_outputs
        head = self.head(rows, 1, 0) + logits * SAMPLE_BYTES / self.bytes + self.tp_ring.gather(logits * 4)
        stages = self.through(layer, head + OUTSIDE * calibration.launch, self.hand_over(rows))
        return np.maximum(micro_batches * stages.slowest, stages.all_stages)


def kv_bytes_per_token(shape: ModelShape, settings: CallSettings, itemsize: int = 2) -> np.ndarray:
    """Return bytes [n] of a token's keys and values on a rank of the stage with most layers. If tp exceeds the KV heads, ranks hold
    copies."""
    return np.ceil(shape.layers / settings.pp) * shape.cached(settings.tp) * itemsize


def _age(lengths: np.ndarray) -> float:
    """Return the tokens of an average row while rows grow to these lengths one token at a time."""
    return float((lengths**2).mean() / lengths.mean() / 2)


@dataclass(frozen=True)
class FormulaTimes:
    """Seconds [n] of calls by these formulas."""

    machine: Machine
    calibration: Calibration = Calibration(call=CALL_SECONDS)

    def slices(self, shape: ModelShape) -> list[int]:
        """Return the values of tp that have times."""
        return divisors(self.machine.local_size)

    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of a forward pass over all rows."""
        rates = _Rates(shape, settings, self.machine, self.calibration)
        num_micro_batches, compute = rates.passes(work, work.rows, rates.forward)
        return compute + rates.zero(num_micro_batches, compute, trains=False) + self.calibration.call

    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of training: ``work.mini_batches`` optimizer steps in each epoch."""
        rates = _Rates(shape, settings, self.machine, self.calibration)
        num_micro_batches, compute = rates.passes(work, work.rows / work.mini_batches, rates.train)
        step = compute + rates.zero(num_micro_batches, compute, trains=True) + rates.optimizer()
        return step * work.mini_batches * work.epochs + self.calibration.call

    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
        """Return seconds of generating all responses with ``kv_bytes`` for keys and values on each rank, a number or an array [n].

        Prompts are computed once for a group. ``max_num_seqs`` and memory limit the rows in flight. While rows wait, each takes
        the place of one that ends. Then fewer and fewer are left, and a step is costed at each of these numbers.
        """
        rates = _Rates(shape, settings, self.machine, self.calibration)
        groups = np.maximum(np.ceil(work.rows / work.group / settings.dp), 1)
        rows, prompts = groups * work.group, groups * work.prompt
        num_micro_batches, tokens = np.ceil(prompts / settings.micro_tokens), np.minimum(prompts, settings.micro_tokens)
        prefill = rates.forward(tokens, work.prompt / 2, 0.0, work.prompt).times(np.maximum(num_micro_batches, 1))
        flight = np.maximum(np.minimum(rows_in_flight(shape, work, settings, self.machine, kv_bytes), rows), 1)
        lengths = np.array(work.responses)
        token_bytes = kv_bytes_per_token(shape, settings, self.machine.device.itemsize)
        waiting = (rows - flight) * lengths.mean() / flight  # steps in which all places are taken
        total = prefill + waiting * rates.decode(flight, work.prompt + _age(lengths), token_bytes) + self.calibration.call
        for index, (begun, end) in enumerate(pairwise([0.0, *lengths])):
            if end > begun:
                alive = np.maximum(flight * (1 - index / len(lengths)), 1)
                total = total + (end - begun) * rates.decode(alive, work.prompt + (begun + end) / 2, token_bytes)
        return total


def rows_in_flight(
    shape: ModelShape, work: Workload, settings: CallSettings, machine: Machine, kv_bytes: Numbers
) -> np.ndarray:
    """Return the rows [n] of a replica that ``max_num_seqs`` and memory allow at once. A row has the average age and its part
    of a group's prompt; the prompt's last page belongs to each row alone."""
    tail = min(work.prompt, PAGE / 2)
    tokens = (work.prompt - tail) / work.group + tail + _age(np.array(work.responses)) + PAGE / 2
    fitting = kv_bytes / kv_bytes_per_token(shape, settings, machine.device.itemsize) / tokens
    return np.maximum(np.floor(np.minimum(fitting, settings.max_num_seqs)), 1)
