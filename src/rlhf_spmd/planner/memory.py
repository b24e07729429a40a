"""The memory model: bytes on a rank, term by term as ``workers``, ``parallel`` and ``generation`` allocate them. Pure, over
settings [n].

A rank's peak has three terms: what is resident for its roles between calls, the largest need of a call beside it, and
:data:`RESERVE`. :class:`RankMemory` has the terms of a role on a rank. Two modules add them up. ``planning`` takes the fullest rank
of each call (:func:`fullest`). ``preflight/memory_estimate.py`` takes each rank with all of its roles, for
``activation_checkpointing=auto`` and for the refusal of a run that does not fit. Replicated parts of a tp slice (norms) count as
sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.kv_cache import TEMPORARY_STATES
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.quantized import BLOCK
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS, MATRIX_ELEMENTS
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Workload

RESERVE = 1.5 * GIB  # of a GPU: driver and kernels 0.6, workspaces of cuBLAS 0.1, holes of torch's allocator
# NCCL's buffers for reductions of a group: 10 MiB for each of 24 channels and 2 or 3 neighbours; 0.53 and 0.67 GiB measured (nccl#964)
NCCL_GROUP = 0.65 * GIB
NCCL_PEER = 0.44 * GIB  # and for messages with another rank: 14 MiB for each of 32 channels, as measured (nccl#1685)
HOST_RESERVE = 0.5 * GIB  # of a rank on CPUs: the interpreter, torch, and what it has loaded
MEMORY_MODEL_ERROR = 0.1  # of a prediction: a run that exceeds the memory by less is warned, not refused
SHARD_BUCKET = 256 << 20  # bytes in which weights travel to the generation layout, see ``HybridWeights``

Parts = dict[str, Any]  # name -> bytes [n]
Stage = Any  # pipeline rank, a number or an array [n]


@dataclass(frozen=True)
class RoleSettings:
    """Settings of a role that memory depends on, beside :class:`CallSettings`.

    ``itemsize``: bytes of a weight. ``on_host``: the device is a CPU, where offloaded tensors lie in the same memory.
    ``chunk``: logits that the head makes at a time. ``entropy``: the head also makes entropies. ``optim``: the optimizer's
    name. ``adapters``: elements of a layer's low-rank adapters, which are trained instead of the weights; 0: there are none.
    ``keeps_start``: the adapters that training began with stay beside them, for a reference; ZeRO does not cut these.
    ``quantized``: elements of a layer that are quantized to ``bits``; ZeRO does not cut these.
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
    def wide(self) -> int:
        """Return the bytes of a sum of gradients."""
        return max(self.itemsize, 4)

    @property
    def masters(self) -> int:
        """Return the bytes of the copy of a parameter that the optimizer keeps."""
        return self.wide if self.wide > self.itemsize and self.master_weights else 0

    @property
    def moment(self) -> float:
        """Return the bytes of a moment. In 8 bits it includes its part of a block's scale."""
        return 1 + 4 / 256 if self.optim == "adamw_8bit" else self.masters or self.itemsize

    @property
    def states(self) -> float:
        """Return the bytes that the optimizer keeps for a parameter of a layer; for other parameters it keeps two moments."""
        return self.masters + self.moment * (1 if self.optim == "muon" else 2)


def total(parts: Mapping[str, Any]) -> Any:
    """Return the sum of all parts."""
    return sum(parts.values())


class RankMemory:
    """Bytes of a role on a rank of a pipeline ``stage``. b: bytes of a weight, a: bytes of a sum of gradients (4 if b is 2)."""

    def __init__(self, shape: ModelShape, settings: CallSettings, role: RoleSettings, stage: Stage) -> None:
        self.shape, self.settings = shape, settings
        self.role, self.stage = role, stage
        pp, tp = settings.pp, settings.tp
        self.gate_columns = shape.gate_columns / tp
        self.mixer_floats = shape.mixer_floats / tp * (4 / role.itemsize)
        base, extra = np.divmod(shape.layers, pp)
        self.layers = base + (stage < extra)
        self.first = np.asarray(stage) == 0
        self.last = np.asarray(stage) == pp - 1
        self.rows = np.where(settings.sequence_parallel > 0, tp, 1)  # slices of the residual stream
        self.hidden = shape.hidden
        self.queries = shape.queries / tp
        self.columns = shape.intermediate / tp
        self.expert_columns = shape.expert_columns / tp
        self.to_experts = shape.expert_rows * shape.hidden  # rows for experts; their results are as many
        self.keys = shape.rank_keys(tp)
        self.first_product_outputs = shape.first_product_outputs(tp)
        self.vocab = np.where(self.last, shape.head_outputs, 0) / (tp if shape.head_outputs > 1 else 1)
        shared = np.where(settings.ep > 1, shape.experts / tp, 0.0)
        self.experts = self.layers * shared / settings.ep  # that ZeRO does not cut; below are the other parameters
        self.expert_copies = settings.dp * settings.cp // settings.ep
        self.layer = shape.layer / tp - shared
        self.exchanged = np.where(settings.ep > 1, 2 * self.to_experts, 0.0)  # rows and results of a token, on their way
        tied = np.where(shape.tied & ~self.first, shape.embed, 0)
        self.ends = (self.first * shape.embed + self.last * (shape.head + tied)) / tp  # outside of the layers
        self.params = self.layers * self.layer + self.ends
        self.shards = settings.dp_shard
        table = shape.vocab * shape.hidden * (self.first | (self.last & (shape.head_outputs > 1)))
        self.widest = min(2 * shape.intermediate * shape.hidden, shape.layer) / tp  # of a layer's matrices
        self.largest = np.maximum(table / tp, self.widest)

    def resident(self) -> Parts:
        """Return bytes between calls: weights, and the optimizer's states if the role is trained."""
        role = self.role
        return {
            "weights": self._weights() * (role.on_host or not role.offload),
            "optimizer": self._states(role) * (role.on_host or not role.optim_offload),
        }

    def pinned(self) -> Parts:
        """Return bytes of pinned host memory between calls. They stay from the first offload on, even while the device has a copy."""
        role = self.role
        return {
            "weights": self._weights() * (role.offload and not role.on_host),
            "optimizer": self._states(role) * (role.optim_offload and not role.on_host),
        }

    def communicators(self) -> Any:
        """Return bytes of NCCL's buffers, which stay. Roles of equal layouts share them.

        A communicator for each group that reduces: tp, those of ZeRO and its copies, cp, ep, and all ranks if none of these has
        them all. Messages: to the stages before and behind, each way; and all-to-alls of cp and ep, whose ranks of other hosts
        share buffers.
        """
        settings = self.settings
        groups = settings.tp, settings.dp_shard, settings.dp_replicate, settings.cp, settings.ep
        num_groups = sum((group > 1) * 1 for group in groups)
        num_groups = num_groups + ((settings.size > 1) & ~np.any([group == settings.size for group in groups], axis=0))
        peers = 2 * np.minimum(settings.pp - 1, 2) + sum(np.minimum(group, 8) - 1 for group in (settings.cp, settings.ep))
        return (NCCL_GROUP * num_groups + NCCL_PEER * peers) * (not self.role.on_host)

    def checkpoint_copy(self) -> Any:
        """Return bytes in host memory of what the rank writes to a checkpoint, while it is written in the background.

        Ranks that hold the same share it: by whole tensors, here evenly. Moments in 8 bits are saved in float32.
        """
        role = self.role
        states = self._states(replace(role, optim="adamw") if role.optim == "adamw_8bit" else role)
        experts = 0 if role.adapters else self.experts
        expert_states = role.states * experts * role.trained
        rest = role.itemsize * self._trained() / self.shards + states - expert_states
        return rest / self.settings.dp_replicate + (role.itemsize * experts + expert_states) / self.expert_copies

    def train(self, work: Workload) -> Parts:
        """Return bytes beside :meth:`resident` at the worst moment of a mini-batch: before the last micro-batch's backward pass, after
        it, or in the optimizer step.

        The largest micro-batch counts. It has as many tokens as the budget allows, if a replica has so many.
        """
        settings, role = self.settings, self.role
        tokens, num_micro_batches = _micro_batches(work, settings)
        b, a = role.itemsize, role.wide
        kept = (
            self.layer_activations() if role.activation_offload and not role.on_host else self.layers * self.kept_activations()
        )
        kept = kept + np.where(self.last, 2 * self.hidden, self.hidden / self.rows)  # of the last norm, or for the next stage
        activations = b * tokens * kept * self._micro_batches_in_flight(num_micro_batches)
        recomputed = [
            0,
            self.columns + 2 * self.expert_columns + self.queries + self.keys + 2 * self.to_experts + self.mixer_floats,
            self.layer_activations(),
        ]  # numbers by level of checkpointing
        rows = self.mixer_floats / 2 + 2 * self.columns + 2 * self.hidden + 2 * self.to_experts + self.exchanged
        passing = b * tokens * (np.choose(settings.checkpointing, recomputed) + rows)
        loss = self._head(work, tokens, backward=True)
        # gradients are sums of whole parameters (zero 0, and 1 until the last micro-batch) or of the rank's shard
        trained = self._trained()
        frozen = role.adapters > 0
        experts = 0 if frozen else self.experts
        shard = a * (trained / self.shards + experts)
        before = np.where(num_micro_batches > 1, np.where(settings.zero <= 1, a * (trained + experts), shard), 0)
        gathered = self._gathered()
        root = np.where((settings.zero > 0) & (not frozen), self.ends, 0)
        layer = role.adapters if frozen else self.layer
        largest = self._merging() if frozen else b * self.largest
        reducing = root * (b + a + (a + b) / self.shards) + np.where(settings.zero > 0, layer * (b + a), largest)
        reducing = np.maximum(reducing, largest * frozen)
        late = 0 if frozen else a * self.first * self.ends / self.shards  # the embedding's gradient is the last one
        behind = np.maximum(reducing, passing - late)
        left = activations * role.on_host  # on CPUs, small freed blocks stay in the process's heap
        work_before = np.maximum(loss, passing)
        step = self._optimizer_step()
        moments = [
            {"gathered weights": gathered, "gradients": before, "activations": activations, "work": work_before},
            {"gathered weights": gathered, "gradients": np.maximum(before, shard), "activations": left, "work": behind},
            {"gathered weights": 0 * kept, "gradients": shard, "activations": left, "work": step},
        ]
        worst = np.array([np.broadcast_to(total(moment), settings.pp.shape) for moment in moments]).argmax(0)
        parts = {name: np.choose(worst, [moment[name] for moment in moments]) for name in moments[0]}
        return parts | {"weights back": self._resting() * role.offload}  # loaded from host memory for the call

    def _optimizer_step(self) -> Any:
        """Return the bytes that an optimizer step works with."""
        role, settings = self.role, self.settings
        bucket = np.maximum(BUCKET_ELEMENTS, self.largest / self.shards)
        loads_states = role.optim_offload and not role.on_host
        step = role.wide * bucket * (settings.dp_replicate > 1) + role.states * bucket * loads_states
        if role.optim == "muon":  # a bucket's steps both ways, the rank's own matrices, one product
            matrices = np.minimum(MATRIX_ELEMENTS, self.layers * self.layer / self.shards + self.experts)
            step = step + 10 * matrices + 18 * self.largest * settings.tp
        return step

    def pinned_activations(self, work: Workload) -> Parts:
        """Return bytes of pinned host memory that activations take in a training call."""
        tokens, num_micro_batches = _micro_batches(work, self.settings)
        kept = self.layers * self.kept_activations() * self._micro_batches_in_flight(num_micro_batches)
        return {"activations": self.role.itemsize * tokens * kept * (self.role.activation_offload and not self.role.on_host)}

    def infer(self, work: Workload) -> Parts:
        """Return bytes beside :meth:`resident` in a forward pass of all rows."""
        tokens, _ = _micro_batches(work, self.settings)
        layer = self.role.itemsize * tokens * self._forward() + self._merging()
        passing = np.maximum(layer, self._head(work, tokens, backward=False))
        return {"gathered weights": self._gathered(), "work": passing, "weights back": self._resting() * self.role.offload}

    def generate(self, work: Workload, config: GenerationConfig) -> tuple[Parts, Any, Any]:
        """Return bytes beside the weights in the layout of generation, those of one row, and those of all rows in flight.

        The parts are the call's work, and the smallest cache that suffices. A row has keys, values and states of the longest row.
        On a GPU the cache and what is resident take at most ``gpu_memory_utilization`` of its memory. On CPUs a cache takes at most
        that share of the free memory, and the rest must hold the other parts.
        """
        shape = self.shape
        settings = self.settings
        role = self.role
        rows = np.ceil(work.rows / settings.dp)
        in_flight = np.minimum(rows, settings.max_num_seqs)
        batch = np.minimum(config.max_num_batched_tokens, rows * work.longest)
        # the slice's logits and their probabilities; with tp also those of all slices together
        copies = 2 + np.where(settings.tp > 1, 2 * settings.tp, 0)
        logits = np.where(self.last, 4 * in_flight * self.vocab * copies, 0) * (1 + settings.graphs)
        texts = rows * (8 * work.longest + 8 * work.responses[-1])
        cached = shape.cached(settings.tp, 1 + role.on_host)  # the C++ kernels have pages of values, whatever the model
        page = self.layers * cached * role.itemsize * config.page_size
        state = 4 * self.layers * shape.row_state / settings.tp
        row = page * np.ceil((work.longest - 1) / config.page_size) + state
        all_rows = row * in_flight if config.num_pages is None else page * config.num_pages + state * in_flight
        absorbed = 3 * shape.kv_heads * shape.cache_entry / settings.tp  # queries twice and their outputs, as wide as an entry
        numbers = np.maximum(self._forward(), 4 * self.hidden + self.queries + 2 * shape.cache_entry + absorbed)
        decoding = TEMPORARY_STATES * 4 * in_flight * shape.row_state / settings.tp
        parts = {"work": np.maximum(role.itemsize * batch * numbers, decoding) + logits + texts}
        cache = least_cache(total(parts), row, all_rows, config, role.on_host)
        return parts | {"cache": cache}, row, all_rows

    def layer_activations(self) -> Any:
        """Return the numbers that the operations of a layer keep for a token's backward pass, see ``docs/parallelism.md``."""
        gathered = np.where(self.rows > 1, 0, 2 * self.hidden)  # slices are gathered again instead
        return (
            2 * self.hidden / self.rows
            + gathered
            + 3 * (self.queries + self.keys + self.columns)
            + 2 * self.to_experts
            + (self.gate_columns + self.mixer_floats)
        )

    def kept_activations(self) -> Any:
        """Return the numbers that a layer keeps for a token with the settings' levels of checkpointing."""
        residual = self.hidden / self.rows
        selective = 2 * residual + self.first_product_outputs + 2 * (self.columns - self.expert_columns) + self.gate_columns
        return np.choose(self.settings.checkpointing, [self.layer_activations(), selective, residual + 0 * self.columns])

    def _weights(self) -> Any:
        """Return bytes of weights between calls, wherever they lie."""
        copies = 1 / self.shards + self.role.keeps_start
        return self._resting() + self.role.itemsize * self.layers * self.role.adapters * copies

    def _states(self, role: RoleSettings) -> Any:
        """Return bytes of the optimizer's states between calls, wherever they lie."""
        trained = self._trained() / self.shards
        if not role.trained:
            return 0 * trained
        ends = 0 if role.adapters else self.ends / self.shards
        experts = 0 if role.adapters else self.experts
        return role.states * (trained + experts) + (role.masters + 2 * role.moment - role.states) * ends

    def _trained(self) -> Any:
        """Return the parameters that have gradients and states, all that ZeRO divides. Replicated halves of adapters count on
        every rank."""
        return self.layers * self.role.adapters if self.role.adapters else self.params

    def _resting(self) -> Any:
        """Return bytes of the model's weights between calls: experts are never quantized."""
        role = self.role
        quantized = self.layers * role.quantized / self.settings.tp
        return (
            role.itemsize * ((self.params - quantized) / self.shards + self.experts) + (role.bits / 8 + 4 / BLOCK) * quantized
        )

    def _micro_batches_in_flight(self, num_micro_batches: Any) -> Any:
        """Return the number of micro-batches whose activations the stage keeps at a time."""
        pp, vpp = self.settings.pp, self.role.vpp
        if vpp == 1:
            return np.minimum(pp - self.stage, num_micro_batches)
        return np.minimum(2 * (pp - 1 - self.stage) + (vpp - 1) * pp + 1, num_micro_batches * vpp) / vpp

    def _gathered(self) -> Any:
        """Return bytes of weights that ZeRO gathers beside the shard: all, or with stage 3 the root's, two layers', and FSDP2's
        buffer for the larger."""
        layer = self.layer - self.role.quantized / self.settings.tp
        everything = self.layers * layer + self.ends
        root_and_layers = self.ends + 2 * layer + np.maximum(self.ends, layer)
        stage = np.where(self.shards > 1, self.settings.zero, 0)
        return self.role.itemsize * np.choose(stage, [0 * everything, everything, everything, root_and_layers])

    def _merging(self) -> Any:
        """Return bytes of a matrix merged with its adapters, which CPUs do in fp32; also of its dequantized values if it is
        quantized."""
        role = self.role
        return (role.itemsize * (1 + (role.quantized > 0)) + 4 * role.on_host) * self.widest * (role.adapters > 0)

    def _forward(self) -> Any:
        """Return the numbers that a layer's forward pass has for a token at a time."""
        mlp = 3 * self.columns + 2 * self.to_experts + self.exchanged
        mixing = 3 * self.queries + 3 * self.keys + self.mixer_floats / 2
        return 4 * self.hidden + self.queries + 2 * self.keys + self.gate_columns + np.maximum(mlp, mixing)

    def _head(self, work: Workload, tokens: Any, backward: bool) -> Any:
        """Return bytes of the head: hidden states of response tokens, a chunk of logits, and backward the gradients of both and of
        the weight."""
        role = self.role
        response_tokens = tokens * work.responses[-1] / work.longest
        chunk = np.minimum(np.maximum(role.chunk, 64 * self.vocab), response_tokens * self.vocab)
        hidden = (self.vocab > 0) * response_tokens * self.hidden * (role.itemsize + (4 + role.itemsize) * backward)
        copies = 2 + 0.5 * backward if role.entropy else 1 + 0.5 * backward
        weight = backward * (role.adapters == 0) * role.itemsize * self.vocab * self.hidden
        return np.where(self.vocab > 1, hidden + 4 * chunk * copies, 2 * hidden) + weight


def least_cache(other_bytes: Any, row: Any, all_rows: Any, config: GenerationConfig, on_host: bool) -> Any:
    """Return bytes of the smallest cache beside ``other_bytes``: enough for the longest row. On CPUs the generator takes a share of the
    free memory, so the cache grows until ``other_bytes`` fit into the rest."""
    share = config.memory_share(on_host)
    if config.num_pages is not None:
        return all_rows
    if not on_host:
        return row
    free = np.maximum(row / share, np.minimum(other_bytes / max(1 - share, 1e-9), all_rows + other_bytes))
    return np.maximum(free - other_bytes, row)


def weights_for_generation(home: RankMemory, generation: RankMemory, config: GenerationConfig, beside: bool) -> Any:
    """Return bytes of generation weights on a home's own ranks, beside the training weights, and of NCCL's buffers that bring them;
    0 if both layouts are the same.

    They are the generation shard and one bucket, less the training shard, which becomes a part of it unless it stays ``beside``.
    ``home``, ``generation``: the rank in the layout of training and of generation.
    """
    role = home.role
    resident = role.itemsize * (home.params / home.shards + home.experts)
    shard = role.itemsize * generation.params
    same_grid = (home.settings.pp == generation.settings.pp) & (home.settings.tp == generation.settings.tp)
    same = same_grid & (home.shards == 1) & (home.settings.ep == 1)
    if config.buffers == "offload" and not role.on_host:
        beside = False
    bucket = np.minimum(np.maximum(SHARD_BUCKET, role.itemsize * generation.largest), shard)
    # other stages' layers come by messages; their buffers stay
    messages = np.where(home.settings.pp != generation.settings.pp, NCCL_PEER * (np.minimum(home.settings.size, 8) - 1), 0)
    messages = messages * (not role.on_host)
    if role.adapters:  # merged weights lie beside the others
        return np.maximum(resident, shard) + np.where(same, 0, bucket) + messages
    return np.where(same & (not beside), 0, shard + bucket - (0 if beside else resident)) + messages


def fullest(shape: ModelShape, settings: CallSettings, role: RoleSettings, parts: Callable[[RankMemory], Parts]) -> np.ndarray:
    """Return bytes [n] of the stage that needs most: the first, which has most micro-batches in flight, or the last, with the
    logits."""
    stages = [RankMemory(shape, settings, role, stage) for stage in (0 * settings.pp, settings.pp - 1)]
    first, last = (total(parts(stage)) + np.zeros(len(settings)) for stage in stages)
    return np.maximum(first, last)


def _micro_batches(work: Workload, settings: CallSettings) -> tuple[Any, Any]:
    """Return the tokens of the largest micro-batch on a rank, and the micro-batches of a replica's mini-batch."""
    rows = np.ceil(work.rows / work.mini_batches / settings.dp)
    tokens = np.minimum(np.maximum(settings.micro_tokens * settings.cp, work.longest), rows * work.longest)
    return tokens / settings.cp, np.clip(np.ceil(rows * work.length / tokens), 1, rows)


assert CHECKPOINTING == ("none", "selective", "full"), "np.choose above goes by this order"
