"""The memory model: bytes on a rank, term by term as ``workers``, ``parallel`` and ``generation`` allocate them. Pure, over
settings [n].

Legend: b bytes of a weight, a bytes of a sum of gradients (4 if b is 2).

A rank's peak is what its roles hold between calls, plus the most that one of its calls needs besides, plus :data:`RESERVE`.
:func:`held` has the first; :func:`train`, :func:`infer` and :func:`generate` have the second, with :func:`communicators` beside
them. The planner takes the fullest rank of each call (:func:`fullest`); the check before a run takes each rank by itself
(preflight/memory_estimate.py). Replicated parts of a tp slice (norms) count as sliced.
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
ERROR = 0.1  # of a prediction: a run that exceeds the memory by less is warned, not refused
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
        """Bytes of a sum of gradients."""
        return max(self.itemsize, 4)

    @property
    def masters(self) -> int:
        """Bytes of the copy of a parameter that the optimizer keeps."""
        return self.wide if self.wide > self.itemsize and self.master_weights else 0

    @property
    def moment(self) -> float:
        """Bytes of a moment. In 8 bits it includes its part of a block's scale."""
        return 1 + 4 / 256 if self.optim == "adamw_8bit" else self.masters or self.itemsize

    @property
    def states(self) -> float:
        """Bytes that the optimizer keeps for a parameter of a layer; for other parameters it keeps two moments."""
        return self.masters + self.moment * (1 if self.optim == "muon" else 2)


def total(parts: Mapping[str, Any]) -> Any:
    return sum(parts.values())


class _Slice:
    """Sizes [n] of a rank's part of a model."""

    def __init__(self, shape: ModelShape, settings: CallSettings, stage: Stage, itemsize: int = 4) -> None:
        pp, tp = settings.pp, settings.tp
        self.gates, self.mixing = shape.gates / tp, shape.mixing / tp * (4 / itemsize)
        base, extra = np.divmod(shape.layers, pp)
        self.layers = base + (stage < extra)
        self.first, self.last = np.asarray(stage) == 0, np.asarray(stage) == pp - 1
        self.rows = np.where(settings.sequence_parallel > 0, tp, 1)  # slices of the residual stream
        self.hidden, self.queries, self.columns = shape.hidden, shape.queries / tp, shape.intermediate / tp
        self.mixed = shape.mixed / tp
        self.to_experts = shape.expert_rows * shape.hidden  # rows for experts; their results are as many
        self.keys = shape.rank_keys(tp)
        self.entered = shape.entered(tp)
        self.vocab = np.where(self.last, shape.outputs, 0) / (tp if shape.outputs > 1 else 1)
        self.tp, self.layer = tp, shape.layer / tp
        shared = np.where(settings.ep > 1, shape.experts / tp, 0.0)
        self.experts = self.layers * shared / settings.ep  # that stay whole under ZeRO; below are the others
        self.expert_copies = settings.dp * settings.cp // settings.ep
        self.layer = self.layer - shared
        self.exchanged = np.where(settings.ep > 1, 2 * self.to_experts, 0.0)  # rows and results of a token, on their way
        tied = np.where(shape.tied & ~self.first, shape.embed, 0)
        self.ends = (self.first * shape.embed + self.last * (shape.head + tied)) / tp  # outside of the layers
        self.params = self.layers * self.layer + self.ends
        self.shards = settings.dp_shard
        table = shape.vocab * shape.hidden * (self.first | (self.last & (shape.outputs > 1)))
        self.widest = min(2 * shape.intermediate * shape.hidden, shape.layer) / tp  # of a layer's matrices
        self.largest = np.maximum(table / tp, self.widest)

    @property
    def beside(self) -> Any:
        """Numbers that gates and linear attention keep for a token."""
        return self.gates + self.mixing

    def whole_layer(self) -> Any:
        """Numbers that the operations of a layer keep for a token's backward pass, see ``docs/parallelism.md``."""
        gathered = np.where(self.rows > 1, 0, 2 * self.hidden)  # slices are gathered again instead
        return (
            2 * self.hidden / self.rows
            + gathered
            + 3 * (self.queries + self.keys + self.columns)
            + 2 * self.to_experts
            + self.beside
        )

    def kept(self, checkpointing: np.ndarray) -> Any:
        """Numbers that a layer keeps for a token with these levels of checkpointing."""
        residual = self.hidden / self.rows
        selective = 2 * residual + self.entered + 2 * (self.columns - self.mixed) + self.gates
        return np.choose(checkpointing, [self.whole_layer(), selective, residual + 0 * self.columns])


def held(shape: ModelShape, settings: CallSettings, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes between calls: weights, and the optimizer's states if the role is trained."""
    weights, states = _kept(_Slice(shape, settings, stage), role)
    return {
        "weights": weights * (role.on_host or not role.offload),
        "optimizer": states * (role.on_host or not role.optim_offload),
    }


def held_by_host(shape: ModelShape, settings: CallSettings, role: RoleSettings, stage: Stage) -> Parts:
    """Pinned host memory of a rank on a GPU. It stays from the first offload on, even while the device has a copy."""
    weights, states = _kept(_Slice(shape, settings, stage), role)
    here = not role.on_host
    return {"weights": weights * (here and role.offload), "optimizer": states * (here and role.optim_offload)}


def communicators(settings: CallSettings, role: RoleSettings) -> Any:
    """Bytes of NCCL's buffers on a rank of this layout, which stay. Roles of equal layouts share them.

    A communicator for each group that reduces: tp, those of ZeRO and its copies, cp, ep, and all ranks if none of these has them all.
    Messages: to the stages before and behind, each way; and all-to-alls of cp and ep, whose ranks of other hosts share buffers.
    """
    groups = settings.tp, settings.dp_shard, settings.dp_replicate, settings.cp, settings.ep
    size, number = settings.size, sum((group > 1) * 1 for group in groups)
    number = number + ((size > 1) & ~np.any([group == size for group in groups], axis=0))
    peers = 2 * np.minimum(settings.pp - 1, 2) + sum(np.minimum(group, 8) - 1 for group in (settings.cp, settings.ep))
    return (NCCL_GROUP * number + NCCL_PEER * peers) * (not role.on_host)


def checkpoint_copy(shape: ModelShape, settings: CallSettings, role: RoleSettings, stage: Stage) -> Any:
    """Bytes in host memory of what a rank writes to a checkpoint, while it is written in the background.

    Ranks that hold the same share it: by whole tensors, here evenly. Moments in 8 bits are saved in float32.
    """
    part = _Slice(shape, settings, stage)
    _, states = _kept(part, replace(role, optim="adamw") if role.optim == "adamw_8bit" else role)
    experts = 0 if role.adapters else part.experts
    of_experts = role.states * experts * role.trained
    rest = role.itemsize * _trained(part, role) / part.shards + states - of_experts
    return rest / settings.dp_replicate + (role.itemsize * experts + of_experts) / part.expert_copies


def train(shape: ModelShape, work: Workload, settings: CallSettings, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes beside :func:`held` at the worst moment of a mini-batch: before the last micro-batch's backward pass, after it, or
    in the optimizer step.

    The largest micro-batch counts. It has as many tokens as the budget allows, if a replica has so many.
    """
    part, (tokens, number) = _Slice(shape, settings, stage, role.itemsize), _micro_batches(work, settings)
    b, a, pp = role.itemsize, role.wide, settings.pp
    alive = _alive(settings, role, stage, number)
    kept = part.layers * part.kept(settings.checkpointing)
    if role.activation_offload and not role.on_host:
        kept = part.whole_layer()
    kept = kept + np.where(part.last, 2 * part.hidden, part.hidden / part.rows)  # of the last norm, or for the next stage
    activations = b * tokens * kept * alive
    again = [
        0,
        part.columns + 2 * part.mixed + part.queries + part.keys + 2 * part.to_experts + part.mixing,
        part.whole_layer(),
    ]  # numbers that are computed again, by level
    rows = part.mixing / 2 + 2 * part.columns + 2 * part.hidden + 2 * part.to_experts + part.exchanged
    passing = b * tokens * (np.choose(settings.checkpointing, again) + rows)
    loss = _head(part, work, tokens, role, backward=True)
    # gradients are sums of whole parameters (zero 0, and 1 until the last micro-batch) or of the rank's shard
    trained = _trained(part, role)
    frozen = role.adapters > 0
    experts = 0 if frozen else part.experts
    whole, shard = a * (trained + experts), a * (trained / part.shards + experts)
    before = np.where(number > 1, np.where(settings.zero <= 1, whole, shard), 0)
    gathered, root = _gathered(part, settings, role), np.where((settings.zero > 0) & (not frozen), part.ends, 0)
    layer = role.adapters if frozen else part.layer
    largest = _merging(part, role) if frozen else b * part.largest
    reducing = root * (b + a + (a + b) / part.shards) + np.where(settings.zero > 0, layer * (b + a), largest)
    reducing = np.maximum(reducing, largest * frozen)
    bucket = np.maximum(BUCKET_ELEMENTS, part.largest / part.shards)
    summed, brought = settings.dp_replicate > 1, role.optim_offload and not role.on_host
    step = a * bucket * summed + role.states * bucket * brought
    if role.optim == "muon":  # a bucket's steps both ways, the rank's own matrices, one product
        matrices = np.minimum(MATRIX_ELEMENTS, part.layers * part.layer / part.shards + part.experts)
        step = step + 10 * matrices + 18 * part.largest * settings.tp
    late = 0 if frozen else a * part.first * part.ends / part.shards  # the embedding's gradient is the last one
    behind = np.maximum(reducing, passing - late)
    left = activations * role.on_host  # on CPUs, small freed blocks stay in the process's heap
    moments = [
        {"gathered weights": gathered, "gradients": before, "activations": activations, "work": np.maximum(loss, passing)},
        {"gathered weights": gathered, "gradients": np.maximum(before, shard), "activations": left, "work": behind},
        {"gathered weights": 0 * kept, "gradients": shard, "activations": left, "work": step},
    ]
    sums = np.array([np.broadcast_to(total(moment), pp.shape) for moment in moments])
    worst = sums.argmax(0)
    found = {name: np.choose(worst, [moment[name] for moment in moments]) for name in moments[0]}
    return found | {"weights back": _resting(part, role) * role.offload}  # loaded from host memory for the call


def saved_by_host(shape: ModelShape, work: Workload, settings: CallSettings, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes of activations that a rank on a GPU saves in host memory while it trains."""
    part, (tokens, number) = _Slice(shape, settings, stage, role.itemsize), _micro_batches(work, settings)
    kept = part.layers * part.kept(settings.checkpointing) * _alive(settings, role, stage, number)
    return {"activations": role.itemsize * tokens * kept * (role.activation_offload and not role.on_host)}


def infer(shape: ModelShape, work: Workload, settings: CallSettings, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes beside :func:`held` in a forward pass of all rows."""
    part, (tokens, _) = _Slice(shape, settings, stage, role.itemsize), _micro_batches(work, settings)
    gathered = _gathered(part, settings, role)
    layer = role.itemsize * tokens * _forward(part) + _merging(part, role)
    passing = np.maximum(layer, _head(part, work, tokens, role, backward=False))
    return {"gathered weights": gathered, "work": passing, "weights back": _resting(part, role) * role.offload}


def generate(
    shape: ModelShape, work: Workload, settings: CallSettings, role: RoleSettings, config: GenerationConfig, stage: Stage
) -> tuple[Parts, Any, Any]:
    """Bytes beside the weights in the layout of generation. Returns (parts, row, most).

    ``parts``: the call's work, and the smallest cache that suffices. ``row``: keys, values and states of the longest row. ``most``: of
    all rows that run at once. On a GPU these and what is held take at most ``gpu_memory_utilization`` of its memory. On CPUs a
    cache takes at most that share of the free memory, and the rest must hold the other parts.
    """
    part = _Slice(shape, settings, stage, role.itemsize)
    rows = np.ceil(work.rows / settings.dp)
    flying = np.minimum(rows, settings.max_num_seqs)
    batch = np.minimum(config.max_num_batched_tokens, rows * work.longest)
    # the slice's logits and their probabilities; with tp also those of all slices together
    copies = 2 + np.where(settings.tp > 1, 2 * settings.tp, 0)
    logits = np.where(part.last, 4 * flying * part.vocab * copies, 0) * (1 + settings.graphs)
    texts = rows * (8 * work.longest + 8 * work.responses[-1])
    cached = shape.cached(settings.tp, 1 + role.on_host)  # the C++ kernels have pages of values, whatever the model
    page = part.layers * cached * role.itemsize * config.page_size
    state = 4 * part.layers * shape.state / settings.tp
    row = page * np.ceil((work.longest - 1) / config.page_size) + state
    most = row * flying if config.num_pages is None else page * config.num_pages + state * flying
    absorbed = 3 * shape.kv_heads * shape.entry / settings.tp  # queries twice and their outputs, as wide as an entry
    work = np.maximum(_forward(part), 4 * part.hidden + part.queries + 2 * shape.entry + absorbed)
    decoding = TEMPORARY_STATES * 4 * flying * shape.state / settings.tp
    parts = {"work": np.maximum(role.itemsize * batch * work, decoding) + logits + texts}
    return parts | {"cache": least_cache(total(parts), row, most, config, role.on_host)}, row, most


def least_cache(others: Any, row: Any, most: Any, config: GenerationConfig, on_host: bool) -> Any:
    """The smallest cache beside ``others``: enough for the longest row. On CPUs the generator takes a share of the free memory,
    so the cache grows until ``others`` fit into the rest."""
    share = config.memory_share(on_host)
    if config.num_pages is not None:
        return most
    if not on_host:
        return row
    free = np.maximum(row / share, np.minimum(others / max(1 - share, 1e-9), most + others))
    return np.maximum(free - others, row)


def weights_for_generation(
    shape: ModelShape,
    home: CallSettings,
    there: CallSettings,
    role: RoleSettings,
    config: GenerationConfig,
    beside: bool,
    stages: tuple[Stage, Stage],
) -> Any:
    """Bytes of generation weights on a home's own ranks, beside the training weights, and of NCCL's buffers that bring them; 0 if
    both layouts are the same.

    They are the generation shard and one bucket, less the training shard, which becomes a part of it unless it stays ``beside``.
    ``stages``: the rank's stages in the two layouts.
    """
    train, made = _Slice(shape, home, stages[0]), _Slice(shape, there, stages[1])
    own, shard = role.itemsize * (train.params / train.shards + train.experts), role.itemsize * made.params
    same = (home.pp == there.pp) & (home.tp == there.tp) & (train.shards == 1) & (home.ep == 1)
    if config.buffers == "offload" and not role.on_host:
        beside = False
    bucket = np.minimum(np.maximum(SHARD_BUCKET, role.itemsize * made.largest), shard)
    # other stages' layers come by messages; their buffers stay
    messages = np.where(home.pp != there.pp, NCCL_PEER * (np.minimum(home.size, 8) - 1), 0) * (not role.on_host)
    if role.adapters:  # merged weights lie beside the others
        return np.maximum(own, shard) + np.where(same, 0, bucket) + messages
    return np.where(same & (not beside), 0, shard + bucket - (0 if beside else own)) + messages


def fullest(settings: CallSettings, parts: Callable[[Stage], Parts]) -> np.ndarray:
    """Bytes [n] of the stage that needs most: the first, which has most micro-batches in flight, or the last, with the logits."""
    first, last = (total(parts(stage)) + np.zeros(len(settings)) for stage in (0 * settings.pp, settings.pp - 1))
    return np.maximum(first, last)


def _kept(part: _Slice, role: RoleSettings) -> tuple[Any, Any]:
    """(weights, optimizer states) of a role between calls, wherever they lie."""
    trained = _trained(part, role) / part.shards
    states = 0 * trained
    if role.trained:
        ends = 0 if role.adapters else part.ends / part.shards
        experts = 0 if role.adapters else part.experts
        states = role.states * (trained + experts) + (role.masters + 2 * role.moment - role.states) * ends
    copies = 1 / part.shards + role.keeps_start
    return _resting(part, role) + role.itemsize * part.layers * role.adapters * copies, states


def _alive(settings: CallSettings, role: RoleSettings, stage: Stage, number: Any) -> Any:
    """Micro-batches, of ``number``, whose activations a stage holds at a time."""
    if role.vpp == 1:
        return np.minimum(settings.pp - stage, number)
    return np.minimum(2 * (settings.pp - 1 - stage) + (role.vpp - 1) * settings.pp + 1, number * role.vpp) / role.vpp


def _micro_batches(work: Workload, settings: CallSettings) -> tuple[Any, Any]:
    """(tokens of the largest micro-batch on a rank, micro-batches of a replica's mini-batch)."""
    rows = np.ceil(work.rows / work.mini_batches / settings.dp)
    tokens = np.minimum(np.maximum(settings.micro_tokens * settings.cp, work.longest), rows * work.longest)
    return tokens / settings.cp, np.clip(np.ceil(rows * work.length / tokens), 1, rows)


def _gathered(part: _Slice, settings: CallSettings, role: RoleSettings) -> Any:
    """Weights that ZeRO gathers beside the shard: all, or with stage 3 the root's, two layers', and FSDP2's buffer for the
    larger."""
    layer = part.layer - role.quantized / part.tp
    whole, some = part.layers * layer + part.ends, part.ends + 2 * layer + np.maximum(part.ends, layer)
    return role.itemsize * np.choose(np.where(settings.dp_shard > 1, settings.zero, 0), [0 * whole, whole, whole, some])


def _merging(part: _Slice, role: RoleSettings) -> Any:
    """A matrix merged with its adapters, which CPUs do in fp32; also its dequantized values if it is quantized."""
    return (role.itemsize * (1 + (role.quantized > 0)) + 4 * role.on_host) * part.widest * (role.adapters > 0)


def _forward(part: _Slice) -> Any:
    """Numbers that a layer's forward pass has for a token at a time."""
    mlp = 3 * part.columns + 2 * part.to_experts + part.exchanged
    mixing = 3 * part.queries + 3 * part.keys + part.mixing / 2
    return 4 * part.hidden + part.queries + 2 * part.keys + part.gates + np.maximum(mlp, mixing)


def _head(part: _Slice, work: Workload, tokens: Any, role: RoleSettings, backward: bool) -> Any:
    """Bytes of the head: hidden states of response tokens, a chunk of logits, and backward the gradients of both and of the
    weight."""
    asked = tokens * work.responses[-1] / work.longest
    chunk = np.minimum(np.maximum(role.chunk, 64 * part.vocab), asked * part.vocab)
    of_hidden = (part.vocab > 0) * asked * part.hidden * (role.itemsize + (4 + role.itemsize) * backward)
    copies = 2 + 0.5 * backward if role.entropy else 1 + 0.5 * backward
    of_weight = backward * (role.adapters == 0) * role.itemsize * part.vocab * part.hidden
    return np.where(part.vocab > 1, of_hidden + 4 * chunk * copies, 2 * of_hidden) + of_weight


def _trained(part: _Slice, role: RoleSettings) -> Any:
    """Parameters of a rank's part that have gradients and states, all that ZeRO divides. Replicated halves of adapters count on every
    rank."""
    return part.layers * role.adapters if role.adapters else part.params


def _resting(part: _Slice, role: RoleSettings) -> Any:
    """The model's weights between calls: experts are never quantized."""
    quantized = part.layers * role.quantized / part.tp
    return role.itemsize * ((part.params - quantized) / part.shards + part.experts) + (role.bits / 8 + 4 / BLOCK) * quantized


assert CHECKPOINTING == ("none", "selective", "full"), "np.choose above goes by this order"
