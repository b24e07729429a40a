"""Seconds of a call, counted from what its slowest rank computes, reads and sends. Pure numpy, over settings [n].

The time of a layer is the sum of its matrix products, its attention, its elementwise operations and its sums over tp, or longer
if the host needs longer to start them. A stage takes its layers, the last one also the head. A pipeline takes one way through
all stages, and then the slowest stage for each micro-batch that follows. docs/planner.md has the formulas and what they miss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.linear_attention import CHUNK
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload, divisors, mean_age

# Numbers that a layer's elementwise operations read and write for each token, counted in ``kernels.Ops``
STREAM = 42  # for an element of the residual stream: two norms, two sums
HEADS = 10  # for an element of queries and keys: rotation
COLUMNS = 5  # for a column of the MLP: gated activation
LOGIT_BYTES = 28  # read and written to take a logit's log-prob (``Ops``); with gradients three times as many
SAMPLE_BYTES = 80  # read and written for a logit to draw a token and take its log-prob
STATE_BYTES = 52  # for a number of a row's state of linear attention in a decode step: 13 passes of fp32
# Operations of torch that the host starts for linear attention: (fixed, for each chunk of the longest row)
MIXER_STARTS = (80, 5)  # in a forward pass
MIXER_BACKWARD = (155, 16)  # in a backward pass
TOKEN_STARTS = (50, 0)  # in a decode step
OPTIMIZER_BYTES = 50  # for a parameter in an optimizer step: norm, clipping, AdamW in fp32, the copy in half precision
SUM_BYTES = 10  # to add a micro-batch's gradient of a parameter to the sum
PAGE = GenerationConfig.page_size  # tokens of a cache page; a row's last page is half full on average
CALL_SECONDS = 0.05  # of a call beside its work; the controller takes less than a hundredth of it, preparing rows the rest
OUTSIDE = 5  # kernels outside the layers in a decode step (sampler, plan, embedding), as a multiple of those of one layer


@dataclass(frozen=True)
class Calibration:
    """Constants that cannot be counted. The defaults are those of H100s; a profile of other hardware replaces them.

    Three are fitted to the calls of ReaL's tables 4 to 6 (7B + 7B on 16 H100):

    - memory: share of the memory bandwidth that elementwise operations reach
    - launch: seconds in which the host starts the kernels of a layer without a CUDA graph
    - call: seconds of a call that do not depend on its work

    The others are from Vidur's published H100 profiles, not fitted:

    - matrix: share of the peak that large matrix products reach
    - reads: share of the memory bandwidth at which weights, keys and values are read
    - link: share of the links' bandwidth that collectives reach
    - kernels: fixed seconds of a layer's products, and the least that its other kernels take
    - start: seconds in which the host starts an operation of linear attention
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


class _CallTerms:
    """The terms of a call's seconds [n]: of a layer, of the stages, of ZeRO and the optimizer.

    ``residual_slices``: slices of the residual stream.
    """

    def __init__(self, shape: ModelShape, settings: CallSettings, machine: Machine, calibration: Calibration) -> None:
        self.shape = shape
        self.settings = settings
        self.machine = machine
        self.calibration = calibration
        device = machine.device
        self.itemsize = device.itemsize
        self.gradient_itemsize = max(device.itemsize, 4)
        self.matmul_flops = device.flops * calibration.matrix
        self.elementwise_bandwidth = device.bandwidth * calibration.memory
        self.read_bandwidth = device.bandwidth * calibration.reads
        self.stage_layers = np.ceil(shape.num_layers / settings.pp)  # of the stage with most
        self.last_stage_layers = shape.num_layers // settings.pp
        self.residual_slices = np.where(settings.sequence_parallel > 0, settings.tp, 1)
        self.tp_ring = self.ring(settings.tp, 1)
        self.shard_ring = self.ring(settings.dp_shard, settings.tp)
        self.replicate_ring = self.ring(settings.dp_replicate, settings.tp * settings.dp_shard)
        self.expert_params = shape.stage_expert_params(settings) / settings.ep  # of the fullest stage, on a rank of ep
        other_experts = np.where(settings.ep > 1, shape.expert_params * (1 - 1 / settings.ep), 0.0)
        self.layer_params = shape.layer_params - other_experts  # of a layer, on a rank of ep

    def ring(self, ranks: Numbers, apart: Numbers) -> _Ring:
        """Return the ring of ``ranks`` ranks, one every ``apart``. Between hosts it uses the network of all its devices in a host."""
        link = self.machine.device.link
        on_one_host = ranks * apart <= self.machine.local_size
        network = self.machine.network * np.maximum(self.machine.local_size // apart, 1)
        rate = np.where(on_one_host, link, np.minimum(link, network)) * self.calibration.link
        latency = np.log2(ranks) * np.where(on_one_host, 1, 2) * self.machine.device.latency / 2
        return _Ring((ranks - 1) / ranks / rate, latency)

    def tp_sum_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds of a sum of a layer over tp."""
        return 2 * self.tp_ring.gather(tokens * (self.shape.hidden * self.itemsize))

    def cp_exchange_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's two all-to-alls over cp: q, k and v one way, the attention's result back."""
        numbers = 2 * (self.shape.query_dims + self.shape.key_dims) / self.settings.tp
        ring = self.ring(self.settings.cp, self.settings.tp)
        return np.where(self.settings.cp > 1, ring.gather(tokens * numbers * self.itemsize), 0.0)

    def ep_exchange_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's two all-to-alls over ep: rows to their experts, results back."""
        size = tokens * (self.shape.expert_rows * self.shape.hidden * self.itemsize)
        return np.where(self.settings.ep > 1, 2 * self.ring(self.settings.ep, self.settings.tp).gather(size), 0.0)

    def transfer_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds to send activations to the next stage."""
        rate = np.where(self.settings.size <= self.machine.local_size, self.machine.device.link, self.machine.network)
        size = tokens * self.shape.hidden * self.itemsize / self.residual_slices
        return np.where(self.settings.pp > 1, size / (rate * self.calibration.link) + self.machine.device.latency, 0.0)

    def start_seconds(self, operations: tuple[int, int], longest: float) -> float:
        """Return seconds in which the host starts the operations of linear attention, in an average layer."""
        fixed, per_chunk = operations
        return self.shape.linear_share * self.calibration.start * (fixed + per_chunk * np.ceil(longest / CHUNK))

    def matmul_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's matrix products, at least as long as reading their weights takes."""
        weights = self.shape.matmul_weights
        weights_read = np.minimum(self.layer_params, weights * np.maximum(tokens, 1))  # only the experts that tokens go to
        reading = weights_read * self.itemsize / self.settings.tp / self.read_bandwidth
        return np.maximum(2 * weights * tokens / self.settings.tp / self.matmul_flops, reading) + self.calibration.kernels

    def attention_seconds(self, tokens: Numbers, seen: Numbers) -> Numbers:
        """Return seconds of a layer's attention if a token attends to ``seen`` tokens on average."""
        return 4 * self.shape.query_dims * seen * tokens / self.settings.tp / self.matmul_flops

    def elementwise_seconds(self, tokens: Numbers) -> Numbers:
        """Return seconds of a layer's elementwise operations."""
        shape = self.shape
        sliced = HEADS * (shape.query_dims + shape.key_dims) + COLUMNS * shape.intermediate
        numbers = STREAM * shape.hidden / self.residual_slices + sliced / self.settings.tp
        return np.maximum(tokens * numbers * self.itemsize / self.elementwise_bandwidth, self.calibration.kernels)

    def head_seconds(self, tokens: Numbers, num_products: float, logit_bytes: float) -> Numbers:
        """Return seconds of ``num_products`` products of all tokens with the vocabulary, and of ``logit_bytes`` for each logit."""
        if self.shape.head_outputs <= 1:
            return np.zeros(1)
        weights = self.shape.hidden * self.shape.head_outputs / self.settings.tp
        product = np.maximum(2 * weights * tokens / self.matmul_flops, weights * self.itemsize / self.read_bandwidth)
        elementwise = tokens * self.shape.head_outputs / self.settings.tp * logit_bytes / self.elementwise_bandwidth
        return num_products * product + elementwise

    def pipeline_time(self, layer: Numbers, head: Numbers, transfer: Numbers) -> _PipelineTime:
        """Return the time of a micro-batch from seconds of a layer, of the head, and of the transfer to the next stage."""
        slowest = np.maximum(self.stage_layers * layer, self.last_stage_layers * layer + head) + transfer
        return _PipelineTime(self.shape.num_layers * layer + head + (self.settings.pp - 1) * transfer, slowest)

    def passes(self, work: Workload, rows: float, micro_batch: Callable[..., _PipelineTime]) -> tuple[Numbers, Numbers]:
        """Return the number of micro-batches of ``rows`` rows, and seconds of ``micro_batch``, :meth:`forward` or
        :meth:`train`, over all of them."""
        num_micro_batches, tokens = work.micro_batches(rows, self.settings)
        layer_tokens = work.tokens_through_layers(tokens)  # a shared prompt's token is seen from all rows
        seen = mean_age(work.prompt + np.array(work.responses)) * tokens / layer_tokens
        response_tokens = tokens * work.response / work.length
        time = micro_batch(layer_tokens, seen, response_tokens, work.longest)
        return num_micro_batches, time.times(num_micro_batches)

    def forward(self, tokens: Numbers, seen: Numbers, scored: Numbers, longest: float) -> _PipelineTime:
        """Return seconds of a forward pass over ``tokens`` tokens.

        - seen: tokens that a token attends to on average
        - scored: tokens whose log-probs are taken
        - longest: tokens of the longest row
        """
        compute = self.matmul_seconds(tokens) + self.attention_seconds(tokens, seen) + self.elementwise_seconds(tokens)
        launch = self.calibration.launch + self.start_seconds(MIXER_STARTS, longest)
        layer = np.maximum(compute + 2 * self.tp_sum_seconds(tokens), launch)
        layer = layer + self.cp_exchange_seconds(tokens) + self.ep_exchange_seconds(tokens)
        return self.pipeline_time(layer, self.head_seconds(scored, 1, LOGIT_BYTES), self.transfer_seconds(tokens))

    def train(self, tokens: Numbers, seen: Numbers, scored: Numbers, longest: float) -> _PipelineTime:
        """Return seconds of a forward and a backward pass with recomputation, and of adding the gradients; see :meth:`forward`.

        Each pass has two sums over tp. Recomputation stops before the last one. With sequence parallelism, what was gathered
        for the forward pass is gathered again.
        """
        sliced = self.settings.sequence_parallel
        again = self.settings.checkpointing >= 1  # all but the products is computed again
        full = self.settings.checkpointing == 2  # so are the products
        elementwise = self.attention_seconds(tokens, seen) + self.elementwise_seconds(tokens)
        layer = (3 + full) * self.matmul_seconds(tokens) + (3 + again) * elementwise
        layer = layer + (4 + full + sliced * (1 - full / 2)) * self.tp_sum_seconds(tokens)
        exchanges = self.cp_exchange_seconds(tokens) + self.ep_exchange_seconds(tokens)
        launch = (3 + again) * self.calibration.launch + self.start_seconds(MIXER_BACKWARD, longest)
        launch = launch + (1 + again) * self.start_seconds(MIXER_STARTS, longest)
        layer = np.maximum(layer, launch) + (2 + again) * exchanges
        layer = layer + self.layer_params / self.settings.tp * SUM_BYTES / self.elementwise_bandwidth
        return self.pipeline_time(layer, self.head_seconds(scored, 4, 3 * LOGIT_BYTES), 2 * self.transfer_seconds(tokens))

    def zero_seconds(self, num_micro_batches: Numbers, compute: Numbers, trains: bool) -> np.ndarray:
        """Return seconds of ZeRO's transfers that do not hide behind ``compute`` seconds of all micro-batches.

        Stages 1 and 2 gather parameters once, 3 in every pass. Stage 1 scatters gradients once, 2 and 3 after every
        micro-batch.
        """
        stage = self.settings.zero
        params = self.shape.stage_params(self.settings.pp, self.settings.tp) - self.shape.stage_expert_params(self.settings)
        gathers = np.where(stage == 3, num_micro_batches * (1 + trains), stage > 0)
        scatters = np.where(stage >= 2, num_micro_batches, stage > 0) * trains
        gather_seconds = gathers * self.shard_ring.gather(params * self.itemsize)
        scatter_seconds = scatters * self.shard_ring.gather(params * self.gradient_itemsize)
        overlapped = compute * np.where(stage == 1, 1 / num_micro_batches, 1) * self.machine.device.overlap
        return np.maximum(gather_seconds + scatter_seconds - overlapped, 0)

    def optimizer_seconds(self) -> Numbers:
        """Return seconds of an optimizer step, and of summing gradients over the copies of the model before it."""
        settings = self.settings
        params = self.shape.rank_params(settings)
        expert_ring = self.ring(settings.dp * settings.cp // settings.ep, settings.tp * settings.ep)
        sums = self.replicate_ring.gather((params - self.expert_params) * self.gradient_itemsize)
        sums = sums + np.where(settings.ep > 1, expert_ring.gather(self.expert_params * self.gradient_itemsize), 0.0)
        return 2 * sums + params * OPTIMIZER_BYTES / self.elementwise_bandwidth

    def decode_seconds(self, rows: Numbers, context: Numbers, token_bytes: Numbers) -> Numbers:
        """Return seconds of a step that decodes one token for each of a replica's ``rows`` [n, k].

        Their caches have ``context`` [n, k] tokens of ``token_bytes`` each. With pp stages, pp micro-batches of rows take turns:
        the next step of one needs the token of its last step.
        """
        launch = self.calibration.launch
        micro_batches = np.minimum(self.settings.pp, np.maximum(rows, 1))
        rows = rows / micro_batches
        state_bytes = STATE_BYTES * self.shape.row_state / self.settings.tp
        reading = rows * (context * token_bytes / self.stage_layers + state_bytes) / self.read_bandwidth
        layer = self.matmul_seconds(rows) + self.elementwise_seconds(rows) + 2 * self.tp_sum_seconds(rows) + reading
        eager = np.maximum(layer, launch + self.start_seconds(TOKEN_STARTS, 1))
        layer = np.where(self.settings.graphs > 0, layer, eager)
        logits = rows * self.shape.head_outputs
        sampling = logits * SAMPLE_BYTES / self.elementwise_bandwidth
        head = self.head_seconds(rows, 1, 0) + sampling + self.tp_ring.gather(logits * 4)
        stages = self.pipeline_time(layer, head + OUTSIDE * launch, self.transfer_seconds(rows))
        return np.maximum(micro_batches * stages.slowest, stages.all_stages)


def kv_bytes_per_token(shape: ModelShape, settings: CallSettings, itemsize: int = 2) -> np.ndarray:
    """Return bytes [n] of a token's keys and values on a rank of the stage with most layers."""
    return np.ceil(shape.num_layers / settings.pp) * shape.cached_numbers(settings.tp) * itemsize


@dataclass(frozen=True)
class FormulaTimes:
    """Seconds [n] of calls by these formulas."""

    machine: Machine
    calibration: Calibration = Calibration(call=CALL_SECONDS)

    def tp_sizes(self, shape: ModelShape) -> list[int]:
        """Return the tensor-parallel sizes for which there are times."""
        return divisors(self.machine.local_size)

    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of a forward pass over all rows."""
        terms = _CallTerms(shape, settings, self.machine, self.calibration)
        num_micro_batches, compute = terms.passes(work, work.rows, terms.forward)
        return compute + terms.zero_seconds(num_micro_batches, compute, trains=False) + self.calibration.call

    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray:
        """Return seconds of training: ``work.mini_batches`` optimizer steps in each epoch."""
        terms = _CallTerms(shape, settings, self.machine, self.calibration)
        num_micro_batches, compute = terms.passes(work, work.rows / work.mini_batches, terms.train)
        step = compute + terms.zero_seconds(num_micro_batches, compute, trains=True) + terms.optimizer_seconds()
        return step * work.mini_batches * work.epochs + self.calibration.call

    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
        """Return seconds of generating all responses with ``kv_bytes`` for keys and values on each rank, a number or an array [n].

        Prompts are computed once for a group. ``max_num_seqs`` and memory limit the rows in flight.
        """
        terms = _CallTerms(shape, settings, self.machine, self.calibration)
        prompt_tokens = work.prefill_tokens(settings)
        num_micro_batches = np.maximum(np.ceil(prompt_tokens / settings.micro_tokens), 1)
        micro_tokens = np.minimum(prompt_tokens, settings.micro_tokens)
        prefill = terms.forward(micro_tokens, work.prompt / 2, 0.0, work.prompt).times(num_micro_batches)
        capacity = rows_in_flight(shape, work, settings, self.machine, kv_bytes)
        token_bytes = kv_bytes_per_token(shape, settings, self.machine.device.itemsize)
        total: np.ndarray = np.asarray(prefill + self.calibration.call)
        for phase in work.decode_phases(settings, capacity):
            total = total + phase.steps * terms.decode_seconds(phase.rows, phase.context, token_bytes)
        return total


def rows_in_flight(
    shape: ModelShape, work: Workload, settings: CallSettings, machine: Machine, kv_bytes: Numbers
) -> np.ndarray:
    """Return the rows [n] of a replica that ``max_num_seqs`` and memory allow at once.

    A row has the average age and its part of a group's prompt; the prompt's last page belongs to each row alone.
    """
    tail = min(work.prompt, PAGE / 2)
    tokens = (work.prompt - tail) / work.group + tail + mean_age(np.array(work.responses)) + PAGE / 2
    fitting = kv_bytes / kv_bytes_per_token(shape, settings, machine.device.itemsize) / tokens
    return np.maximum(np.floor(np.minimum(fitting, settings.max_num_seqs)), 1)
