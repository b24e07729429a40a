"""The memory model: bytes on a rank, term by term as ``workers``, ``parallel`` and ``generation`` allocate them. Pure, over
settings [n].

A rank's peak has three terms: what is resident for its roles between calls, the largest need of a call beside it, and
:data:`RESERVE`. :class:`RankMemory` has the terms of a role on a rank. Two modules add them up. ``options`` takes the fullest rank
of each call (:func:`fullest`). ``preflight/memory_estimate.py`` takes each rank with all of its roles, for
``activation_checkpointing=auto`` and for the refusal of a run that does not fit. Replicated parts of a tp slice (norms) count as
sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.kv_cache import TEMPORARY_STATES
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.quantized import BLOCK
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS, MATRIX_ELEMENTS
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload

RESERVE = 1.5 * GIB  # of a GPU: driver and kernels 0.6, workspaces of cuBLAS 0.1, holes of torch's allocator
# NCCL's buffers for reductions of a group: 10 MiB for each of 24 channels and 2 or 3 neighbours; 0.53 and 0.67 GiB measured (nccl#964)
NCCL_GROUP = 0.65 * GIB
NCCL_PEER = 0.44 * GIB  # and for messages with another rank: 14 MiB for each of 32 channels, as measured (nccl#1685)
HOST_RESERVE = 0.5 * GIB  # of a rank on CPUs: the interpreter, torch, and what it has loaded
MEMORY_MODEL_ERROR = 0.1  # of a prediction: a run that exceeds the memory by less is warned, not refused
SHARD_BUCKET = 256 << 20  # bytes in which weights travel to the generation layout, see ``HybridWeights``

Parts = dict[str, Numbers]  # name -> bytes
Stage = np.ndarray | int  # pipeline rank, one or an array [n]


@dataclass(frozen=True)
class RoleSettings:
    """Settings of a role that memory depends on, beside :class:`CallSettings`.

    - itemsize: bytes of a weight
    - on_host: the device is a CPU, where offloaded tensors lie in the same memory
    - chunk: logits that the head makes at a time
    - entropy: the head also makes entropies
    - optim: the optimizer's name
    - adapters: elements of a layer's low-rank adapters, which are trained instead of the weights; 0: there are none
    - keeps_start: the adapters that training began with stay beside them, for a reference; ZeRO does not cut these
    - quantized: elements of a layer that are quantized to ``bits``; ZeRO does not cut these
    """

    trained: bool = False
    itemsize: int = 2
    master_weights: bool = True
    optim_offload: bool = False
    offload: bool = False
    activation_offload: bool = False
    vpp: int = 1
    on_host: bool = False
    chunk: int = GPU_CHUNK_LOGITS
    entropy: bool = True
    optim: str = "adamw"
    adapters: float = 0.0
    keeps_start: bool = False
    quantized: float = 0.0
    bits: int = 0

    @property
    def gradient_itemsize(self) -> int:
        """Return the bytes of one number in a sum of gradients."""
        return max(self.itemsize, 4)

    @property
    def master_itemsize(self) -> int:
        """Return the bytes of the copy that the optimizer keeps of a parameter; 0 without a copy."""
        return self.gradient_itemsize if self.gradient_itemsize > self.itemsize and self.master_weights else 0

    @property
    def moment_itemsize(self) -> float:
        """Return the bytes of one number in a moment. In 8 bits it includes its part of a block's scale."""
        return 1 + 4 / 256 if self.optim == "adamw_8bit" else self.master_itemsize or self.itemsize

    @property
    def optimizer_bytes_per_param(self) -> float:
        """Return the bytes that the optimizer keeps for a parameter of a layer; for other parameters it keeps two moments."""
        return self.master_itemsize + self.moment_itemsize * (1 if self.optim == "muon" else 2)


def total(parts: Mapping[str, Numbers]) -> Numbers:
    """Return the sum of all parts."""
    return sum(parts.values())


class GenerationMemory(NamedTuple):
    """Bytes of a generating call beside the weights.

    - parts: the call's work, and the smallest cache that suffices
    - all_rows_bytes: keys, values and states of all rows in flight
    """

    parts: Parts
    all_rows_bytes: Numbers


class RankMemory:
    """Bytes of a role on a rank of a pipeline ``stage``. Its fields are sizes of the rank's part of the model."""

    def __init__(self, shape: ModelShape, settings: CallSettings, role: RoleSettings, stage: Stage) -> None:
        self.shape = shape
        self.settings = settings
        self.role = role
        self.stage = stage
        pp, tp = settings.pp, settings.tp
        base, extra = np.divmod(shape.num_layers, pp)
        self.num_layers = base + (stage < extra)
        self.has_embedding = np.asarray(stage) == 0
        self.has_head = np.asarray(stage) == pp - 1
        # numbers for a token
        self.hidden = shape.hidden
        self.stream_slices = np.where(settings.sequence_parallel > 0, tp, 1)  # slices of the residual stream
        self.query_dims = shape.query_dims / tp
        self.key_dims = shape.rank_key_dims(tp)
        self.first_product_outputs = shape.first_product_outputs(tp)
        self.gate_columns = shape.gate_columns / tp
        self.mixer_floats = shape.mixer_floats / tp * (4 / role.itemsize)  # counted in numbers of ``itemsize`` bytes
        self.mlp_columns = shape.intermediate / tp
        self.expert_columns = shape.expert_columns / tp
        self.expert_inputs = shape.expert_rows * shape.hidden  # rows for experts; their results are as many
        self.exchanged_numbers = np.where(settings.ep > 1, 2 * self.expert_inputs, 0.0)  # rows and results that ep exchanges
        self.head_outputs = np.where(self.has_head, shape.head_outputs, 0) / (tp if shape.head_outputs > 1 else 1)
        # parameters: ep divides those of experts, ZeRO the others; without ep ZeRO divides all
        layer_expert_params = np.where(settings.ep > 1, shape.expert_params / tp, 0.0)
        self.expert_params = self.num_layers * layer_expert_params / settings.ep
        self.expert_copies = settings.dp * settings.cp // settings.ep
        self.layer_params = shape.layer_params / tp - layer_expert_params
        tied_head = np.where(shape.ties_embeddings & ~self.has_embedding, shape.embed_params, 0)
        end_params = self.has_embedding * shape.embed_params + self.has_head * (shape.head_params + tied_head)
        self.end_params = end_params / tp  # of embedding and head
        self.zero_params = self.num_layers * self.layer_params + self.end_params
        self.zero_shards = settings.dp_shard
        self.largest_layer_matrix = min(2 * shape.intermediate * shape.hidden, shape.layer_params) / tp
        table = shape.vocab * shape.hidden * (self.has_embedding | (self.has_head & (shape.head_outputs > 1)))
        self.largest_matrix = np.maximum(table / tp, self.largest_layer_matrix)

    def resident(self) -> Parts:
        """Return bytes between calls: weights, and the optimizer's states if the role is trained."""
        role = self.role
        return {
            "weights": self._weight_bytes() * (role.on_host or not role.offload),
            "optimizer": self._optimizer_bytes(role) * (role.on_host or not role.optim_offload),
        }

    def pinned(self) -> Parts:
        """Return bytes of pinned host memory between calls. They stay from the first offload on, even while the device has a copy."""
        role = self.role
        return {
            "weights": self._weight_bytes() * (role.offload and not role.on_host),
            "optimizer": self._optimizer_bytes(role) * (role.optim_offload and not role.on_host),
        }

    def communicators(self) -> Numbers:
        """Return bytes of NCCL's buffers, which stay. Roles of equal layouts share them.

        Each group that reduces has a communicator: tp, those of ZeRO and its copies, cp, ep, and all ranks if none of these has
        them all. Messages go to the stages before and behind, each way. All-to-alls of cp and ep also take buffers, which the
        ranks of other hosts share.
        """
        settings = self.settings
        groups = (settings.tp, settings.dp_shard, settings.dp_replicate, settings.cp, settings.ep)
        num_groups = sum((group > 1) * 1 for group in groups)
        num_groups = num_groups + ((settings.size > 1) & ~np.any([group == settings.size for group in groups], axis=0))
        peers = 2 * np.minimum(settings.pp - 1, 2) + sum(np.minimum(group, 8) - 1 for group in (settings.cp, settings.ep))
        return (NCCL_GROUP * num_groups + NCCL_PEER * peers) * (not self.role.on_host)

    def checkpoint_copy(self) -> Numbers:
        """Return bytes in host memory of what the rank writes to a checkpoint, while it is written in the background.

        Ranks that hold the same tensors divide them among themselves, here evenly. Moments in 8 bits are saved in float32.
        """
        role = self.role
        states = self._optimizer_bytes(replace(role, optim="adamw") if role.optim == "adamw_8bit" else role)
        experts = 0 if role.adapters else self.expert_params
        expert_states = role.optimizer_bytes_per_param * experts * role.trained
        other_bytes = role.itemsize * self._trained_params() / self.zero_shards + states - expert_states
        return other_bytes / self.settings.dp_replicate + (role.itemsize * experts + expert_states) / self.expert_copies

    def train(self, work: Workload) -> Parts:
        """Return bytes beside :meth:`resident` at the worst moment of a mini-batch: before the last micro-batch's backward pass, after
        it, or in the optimizer step.

        The largest micro-batch counts. It has as many tokens as the budget allows, if a replica has so many.
        """
        tokens, num_micro_batches = _micro_batches(work, self.settings)
        gathered = self._gathered_bytes()
        activations = self._activation_bytes(tokens, num_micro_batches)
        remaining = activations * self.role.on_host  # on CPUs, small freed blocks stay in the process's heap
        layer = self._backward_layer_bytes(tokens)
        first = np.maximum(self._head_bytes(work, tokens, backward=True), layer)
        last = self._last_backward_bytes(layer)
        step = self._optimizer_step_bytes()
        summed, shard = self._gradient_bytes(num_micro_batches)
        names = ("gathered weights", "gradients", "activations", "work")
        instants = (
            (gathered, summed, activations, first),  # the first backward pass begins
            (gathered, np.maximum(summed, shard), remaining, last),  # the last one ends
            (0 * gathered, shard, remaining, step),  # the optimizer's step
        )
        # bytes [instants, parts, n]
        table = np.array([[np.broadcast_to(size, self.settings.pp.shape) for size in instant] for instant in instants])
        worst = table.sum(1).argmax(0)
        parts: Parts = {name: np.choose(worst, table[:, part]) for part, name in enumerate(names)}
        return parts | {"weights back": self._model_bytes() * self.role.offload}  # loaded from host memory for the call

    def _activation_bytes(self, tokens: Numbers, num_micro_batches: Numbers) -> Numbers:
        """Return the bytes that the forward passes of the micro-batches in flight keep for their backward passes."""
        offloads = self.role.activation_offload and not self.role.on_host
        layers = self.layer_activations() if offloads else self.num_layers * self.kept_activations()
        # of the last norm, or for the next stage
        stage_output = np.where(self.has_head, 2 * self.hidden, self.hidden / self.stream_slices)
        return self.role.itemsize * tokens * (layers + stage_output) * self._micro_batches_in_flight(num_micro_batches)

    def _backward_layer_bytes(self, tokens: Numbers) -> Numbers:
        """Return the bytes that the backward pass of a layer works with: what it computes again, and gradients."""
        experts = 2 * self.expert_inputs
        products = self.mlp_columns + 2 * self.expert_columns + self.query_dims + self.key_dims + experts + self.mixer_floats
        recomputed = np.choose(self.settings.checkpointing, [0, products, self.layer_activations()])
        gradients = self.mixer_floats / 2 + 2 * self.mlp_columns + 2 * self.hidden + experts + self.exchanged_numbers
        return self.role.itemsize * tokens * (recomputed + gradients)

    def _gradient_bytes(self, num_micro_batches: Numbers) -> tuple[Numbers, Numbers]:
        """Return the bytes of the sums of gradients before the last backward pass, and in the optimizer step.

        In the step they are those of the rank's shard. Before it they are those of whole parameters with ZeRO 0, and with ZeRO 1
        until the last micro-batch.
        """
        itemsize = self.role.gradient_itemsize
        trained = self._trained_params()
        experts = 0 if self.role.adapters else self.expert_params
        shard = itemsize * (trained / self.zero_shards + experts)
        summed = np.where(self.settings.zero <= 1, itemsize * (trained + experts), shard)
        return np.where(num_micro_batches > 1, summed, 0), shard

    def _last_backward_bytes(self, layer_work: Numbers) -> Numbers:
        """Return the bytes that the last backward pass works with when activations are gone: in a layer, or in ZeRO's reductions."""
        role = self.role
        itemsize = role.itemsize
        gradient_itemsize = role.gradient_itemsize
        frozen = role.adapters > 0  # the model's weights are
        layer_params = role.adapters if frozen else self.layer_params
        matrix = self._merged_matrix_bytes() if frozen else itemsize * self.largest_matrix
        ends = np.where((self.settings.zero > 0) & (not frozen), self.end_params, 0)
        end_bytes = ends * (itemsize + gradient_itemsize + (gradient_itemsize + itemsize) / self.zero_shards)
        reduced = end_bytes + np.where(self.settings.zero > 0, layer_params * (itemsize + gradient_itemsize), matrix)
        reduced = np.maximum(reduced, matrix * frozen)
        # the embedding's gradient is the last one
        embedding = 0 if frozen else gradient_itemsize * self.has_embedding * self.end_params / self.zero_shards
        return np.maximum(reduced, layer_work - embedding)

    def _optimizer_step_bytes(self) -> Numbers:
        """Return the bytes that an optimizer step works with."""
        role = self.role
        bucket = np.maximum(BUCKET_ELEMENTS, self.largest_matrix / self.zero_shards)
        loaded_bytes = role.optimizer_bytes_per_param * bucket * (role.optim_offload and not role.on_host)
        step = role.gradient_itemsize * bucket * (self.settings.dp_replicate > 1) + loaded_bytes
        if role.optim == "muon":  # a bucket's steps both ways, the rank's own matrices, one product
            matrices = np.minimum(MATRIX_ELEMENTS, self.num_layers * self.layer_params / self.zero_shards + self.expert_params)
            step = step + 10 * matrices + 18 * self.largest_matrix * self.settings.tp
        return step

    def pinned_activations(self, work: Workload) -> Parts:
        """Return bytes of pinned host memory that activations take in a training call."""
        tokens, num_micro_batches = _micro_batches(work, self.settings)
        numbers = self.num_layers * self.kept_activations() * self._micro_batches_in_flight(num_micro_batches)
        return {"activations": self.role.itemsize * tokens * numbers * (self.role.activation_offload and not self.role.on_host)}

    def infer(self, work: Workload) -> Parts:
        """Return bytes beside :meth:`resident` in a forward pass of all rows."""
        tokens, _ = _micro_batches(work, self.settings)
        layer = self.role.itemsize * tokens * self._forward_numbers() + self._merged_matrix_bytes()
        largest = np.maximum(layer, self._head_bytes(work, tokens, backward=False))
        reloaded = self._model_bytes() * self.role.offload
        return {"gathered weights": self._gathered_bytes(), "work": largest, "weights back": reloaded}

    def generate(self, work: Workload, config: GenerationConfig) -> GenerationMemory:
        """Return bytes beside the weights in the layout of generation.

        On a GPU the cache and what is resident take at most ``gpu_memory_utilization`` of its memory. On CPUs a cache takes at most
        that share of the free memory, and the rest must hold the other parts.
        """
        shape = self.shape
        settings = self.settings
        role = self.role
        rows = np.ceil((work.in_flight or work.rows) * work.row_share / settings.dp)
        in_flight = np.minimum(rows, settings.max_num_seqs)
        batch_tokens = np.minimum(config.max_num_batched_tokens, rows * work.longest)
        # the slice's logits and their probabilities; with tp also those of all slices together
        copies = 2 + np.where(settings.tp > 1, 2 * settings.tp, 0)
        logits = np.where(self.has_head, 4 * in_flight * self.head_outputs * copies, 0) * (1 + settings.graphs)
        texts = rows * (8 * work.longest + 8 * work.responses[-1])
        cached = shape.cached_numbers(settings.tp, 1 + role.on_host)  # the C++ kernels have pages of values, whatever the model
        page = self.num_layers * cached * role.itemsize * config.page_size
        state = 4 * self.num_layers * shape.row_state / settings.tp
        row = page * np.ceil((work.longest - 1) / config.page_size) + state
        all_rows = row * in_flight if config.num_pages is None else page * config.num_pages + state * in_flight
        # of a token in a layer; with latent attention queries twice and their outputs, as wide as an entry of the cache
        absorbed = 3 * shape.kv_heads * shape.cache_entry / settings.tp
        numbers = np.maximum(self._forward_numbers(), 4 * self.hidden + self.query_dims + 2 * shape.cache_entry + absorbed)
        states = TEMPORARY_STATES * 4 * in_flight * shape.row_state / settings.tp
        work_bytes = np.maximum(role.itemsize * batch_tokens * numbers, states) + logits + texts
        cache = least_cache(work_bytes, row, all_rows, config, role.on_host)
        return GenerationMemory({"work": work_bytes, "cache": cache}, all_rows)

    def layer_activations(self) -> Numbers:
        """Return the numbers that the operations of a layer keep for a token's backward pass, see ``docs/parallelism.md``."""
        gathered = np.where(self.stream_slices > 1, 0, 2 * self.hidden)  # slices are gathered again instead
        products = 3 * (self.query_dims + self.key_dims + self.mlp_columns)
        mixer = self.gate_columns + self.mixer_floats
        return 2 * self.hidden / self.stream_slices + gathered + products + 2 * self.expert_inputs + mixer

    def kept_activations(self) -> Numbers:
        """Return the numbers that a layer keeps for a token with the settings' levels of checkpointing."""
        residual = self.hidden / self.stream_slices
        dense_columns = self.mlp_columns - self.expert_columns
        selective = 2 * residual + self.first_product_outputs + 2 * dense_columns + self.gate_columns
        return np.choose(self.settings.checkpointing, [self.layer_activations(), selective, residual + 0 * self.mlp_columns])

    def _weight_bytes(self) -> Numbers:
        """Return bytes of weights between calls, wherever they lie."""
        copies = 1 / self.zero_shards + self.role.keeps_start
        return self._model_bytes() + self.role.itemsize * self.num_layers * self.role.adapters * copies

    def _optimizer_bytes(self, role: RoleSettings) -> Numbers:
        """Return bytes of the optimizer's states between calls, wherever they lie."""
        trained = self._trained_params() / self.zero_shards
        if not role.trained:
            return 0 * trained
        per_param = role.optimizer_bytes_per_param
        more_per_end_param = role.master_itemsize + 2 * role.moment_itemsize - per_param
        ends = 0 if role.adapters else self.end_params / self.zero_shards
        experts = 0 if role.adapters else self.expert_params
        return per_param * (trained + experts) + more_per_end_param * ends

    def _trained_params(self) -> Numbers:
        """Return the parameters that have gradients and states, and that ZeRO divides. Replicated halves of adapters count on
        every rank."""
        return self.num_layers * self.role.adapters if self.role.adapters else self.zero_params

    def _model_bytes(self) -> Numbers:
        """Return bytes of the model's weights between calls. Experts are never quantized."""
        role = self.role
        quantized = self.num_layers * role.quantized / self.settings.tp
        others = (self.zero_params - quantized) / self.zero_shards + self.expert_params
        return role.itemsize * others + (role.bits / 8 + 4 / BLOCK) * quantized

    def _micro_batches_in_flight(self, num_micro_batches: Numbers) -> Numbers:
        """Return the number of micro-batches whose activations the stage keeps at a time."""
        pp, vpp = self.settings.pp, self.role.vpp
        if vpp == 1:
            return np.minimum(pp - self.stage, num_micro_batches)
        return np.minimum(2 * (pp - 1 - self.stage) + (vpp - 1) * pp + 1, num_micro_batches * vpp) / vpp

    def _gathered_bytes(self) -> Numbers:
        """Return bytes of weights that ZeRO gathers beside the shard.

        Stages 1 and 2 gather all. Stage 3 gathers embedding and head (FSDP2's root) and two layers, and has a buffer for the larger.
        """
        layer = self.layer_params - self.role.quantized / self.settings.tp
        all_params = self.num_layers * layer + self.end_params
        root_and_layers = self.end_params + 2 * layer + np.maximum(self.end_params, layer)
        stage = np.where(self.zero_shards > 1, self.settings.zero, 0)
        return self.role.itemsize * np.choose(stage, [0 * all_params, all_params, all_params, root_and_layers])

    def _merged_matrix_bytes(self) -> Numbers:
        """Return bytes of a layer's largest matrix merged with its adapters, also of its dequantized values if it is quantized.

        CPUs merge in fp32. 0 without adapters.
        """
        role = self.role
        return (role.itemsize * (1 + (role.quantized > 0)) + 4 * role.on_host) * self.largest_layer_matrix * (role.adapters > 0)

    def _forward_numbers(self) -> Numbers:
        """Return the numbers for a token that a layer's forward pass has at the same time."""
        mlp = 3 * self.mlp_columns + 2 * self.expert_inputs + self.exchanged_numbers
        mixing = 3 * self.query_dims + 3 * self.key_dims + self.mixer_floats / 2
        return 4 * self.hidden + self.query_dims + 2 * self.key_dims + self.gate_columns + np.maximum(mlp, mixing)

    def _head_bytes(self, work: Workload, tokens: Numbers, backward: bool) -> Numbers:
        """Return bytes of the head: hidden states of response tokens and a chunk of logits; with ``backward`` also the gradients of
        both and of the weight."""
        role = self.role
        response_tokens = tokens * work.responses[-1] / work.longest
        chunk = np.minimum(np.maximum(role.chunk, 64 * self.head_outputs), response_tokens * self.head_outputs)
        hidden = (self.head_outputs > 0) * response_tokens * self.hidden * (role.itemsize + (4 + role.itemsize) * backward)
        copies = 2 + 0.5 * backward if role.entropy else 1 + 0.5 * backward
        weight = backward * (role.adapters == 0) * role.itemsize * self.head_outputs * self.hidden
        return np.where(self.head_outputs > 1, hidden + 4 * chunk * copies, 2 * hidden) + weight


def least_cache(other_bytes: Numbers, row: Numbers, all_rows: Numbers, config: GenerationConfig, on_host: bool) -> Numbers:
    """Return bytes of the smallest cache beside ``other_bytes``: enough for the longest row.

    On CPUs the generator takes a share of the free memory, so the cache grows until ``other_bytes`` fit into the rest. ``row``,
    ``all_rows``: bytes of the longest row, and of all rows in flight.
    """
    share = config.memory_share(on_host)
    if config.num_pages is not None:
        return all_rows
    if not on_host:
        return row
    free = np.maximum(row / share, np.minimum(other_bytes / max(1 - share, 1e-9), all_rows + other_bytes))
    return np.maximum(free - other_bytes, row)


def weights_for_generation(home: RankMemory, generation: RankMemory, config: GenerationConfig, beside: bool) -> Numbers:
    """Return bytes of generation weights on a home's own ranks, beside the training weights, and of NCCL's buffers that bring them;
    0 if both layouts are the same.

    They are the generation shard and one bucket, less the training shard, which becomes a part of it unless it stays ``beside``.
    ``home``, ``generation``: memory of the rank in the layout of training and of generation.
    """
    role = home.role
    training_shard = role.itemsize * (home.zero_params / home.zero_shards + home.expert_params)
    shard = role.itemsize * generation.zero_params
    same_grid = (home.settings.pp == generation.settings.pp) & (home.settings.tp == generation.settings.tp)
    same_layout = same_grid & (home.zero_shards == 1) & (home.settings.ep == 1)
    if config.buffers == "offload" and not role.on_host:
        beside = False
    bucket = np.minimum(np.maximum(SHARD_BUCKET, role.itemsize * generation.largest_matrix), shard)
    # other stages' layers come by messages; their buffers stay
    messages = np.where(home.settings.pp != generation.settings.pp, NCCL_PEER * (np.minimum(home.settings.size, 8) - 1), 0)
    messages = messages * (not role.on_host)
    if role.adapters:  # merged weights lie beside the others
        return np.maximum(training_shard, shard) + np.where(same_layout, 0, bucket) + messages
    return np.where(same_layout & (not beside), 0, shard + bucket - (0 if beside else training_shard)) + messages


def fullest(shape: ModelShape, settings: CallSettings, role: RoleSettings, parts: Callable[[RankMemory], Parts]) -> np.ndarray:
    """Return bytes [n] of ``parts`` on the stage that needs most.

    It is the first, which has most micro-batches in flight, or the last, with the logits.
    """
    stages = [RankMemory(shape, settings, role, stage) for stage in (0 * settings.pp, settings.pp - 1)]
    first, last = (total(parts(stage)) + np.zeros(len(settings)) for stage in stages)
    return np.maximum(first, last)


def _micro_batches(work: Workload, settings: CallSettings) -> tuple[Numbers, Numbers]:
    """Return the tokens of the largest micro-batch on a rank, and the micro-batches of a replica's mini-batch.

    These are as many as the replica with most rows has, and a micro-batch may have no rows.
    """
    rows, most_rows = (
        np.ceil(work.rows * share / work.mini_batches / settings.dp)
        for share in (work.row_share, np.maximum(work.row_share, work.largest_share))
    )
    budget = np.maximum(settings.micro_tokens * settings.cp, work.longest)
    tokens, most_tokens = (np.minimum(budget, number * work.longest) for number in (rows, most_rows))
    return tokens / settings.cp, np.clip(np.ceil(most_rows * work.length / most_tokens), 1, most_rows)


assert CHECKPOINTING == ("none", "selective", "full"), "np.choose above goes by this order"
