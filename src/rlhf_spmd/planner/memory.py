"""What ranks hold, in bytes: as ``workers``, ``parallel`` and ``generation`` allocate it, term by term. Pure, over arrays of choices.

Legend: b bytes of a weight, a of a sum of gradients (4 where b is 2).

A rank's peak is what the roles on it hold between calls plus the most that one of its calls takes besides, and :data:`RESERVE`. Shares
of a tp slice that are replicated (norms) count as sliced; of a mixture of experts, the rows that are gathered for them do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.quantized import BLOCK
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS, MATRIX_ELEMENTS
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.shape import CHECKPOINTING, Choices, ModelShape, Workload

RESERVE = 2.5 * GIB  # of a GPU: driver and kernels 0.6, nccl's channels 1, workspaces of cuBLAS 0.1, holes of torch's allocator
ERROR = 0.1  # of what is predicted: what exceeds the memory by less may run
SHARD_BUCKET = 256 << 20  # that weights travel in to the generation layout, see ``HybridWeights``

Parts = dict[str, Any]  # name -> bytes [n]
Stage = Any  # pipeline rank, a number or an array [n]


@dataclass(frozen=True)
class RoleSettings:
    """What memory depends on beside :class:`Choices`. ``itemsize``: bytes of a weight. ``on_host``: on a CPU what is
    offloaded lies in the same memory. ``chunk``: logits that the head makes at a time. ``entropy``: of its distributions, too.
    ``optim``: the optimizer's name. ``adapters``: elements of a layer's low-rank adapters, which are trained in place of the weights;
    0: there are none. ``quantized``: elements of a layer that lie in ``bits``, which ZeRO does not cut."""

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
    quantized: float = 0.0
    bits: int = 0

    @property
    def wide(self) -> int:
        """Bytes of a sum of gradients."""
        return max(self.itemsize, 4)

    @property
    def masters(self) -> int:
        """Bytes of a parameter's copy that the optimizer keeps."""
        return self.wide if self.wide > self.itemsize and self.master_weights else 0

    @property
    def moment(self) -> float:
        """Bytes of a moment; in 8 bits with its part of the scale of a block."""
        return 1 + 4 / 256 if self.optim == "adamw_8bit" else self.masters or self.itemsize

    @property
    def states(self) -> float:
        """Bytes that the optimizer keeps of a parameter of a layer; of others two moments."""
        return self.masters + self.moment * (1 if self.optim == "muon" else 2)


def total(parts: Mapping[str, Any]) -> Any:
    return sum(parts.values())


class _Slice:
    """Sizes of a rank's part of a model, arrays [n]."""

    def __init__(self, shape: ModelShape, choices: Choices, stage: Stage) -> None:
        pp, tp = choices.pp, choices.tp
        base, extra = np.divmod(shape.layers, pp)
        self.layers = base + (stage < extra)
        self.first, self.last = np.asarray(stage) == 0, np.asarray(stage) == pp - 1
        self.rows = np.where(choices.sequence_parallel > 0, tp, 1)  # the residual stream is cut into so many
        self.hidden, self.queries, self.columns = shape.hidden, shape.queries / tp, shape.intermediate / tp
        self.keys = shape.keys / np.minimum(tp, shape.kv_heads)
        self.vocab = np.where(self.last, shape.outputs, 0) / (tp if shape.outputs > 1 else 1)
        self.tp, self.layer = tp, shape.layer / tp
        tied = np.where(shape.tied & ~self.first, shape.embed, 0)
        self.ends = (self.first * shape.embed + self.last * (shape.head + tied)) / tp  # outside of the layers
        self.params = self.layers * self.layer + self.ends
        self.shards = choices.dp_shard
        table = shape.vocab * shape.hidden * (self.first | (self.last & (shape.outputs > 1)))
        self.widest = min(2 * shape.intermediate * shape.hidden, shape.layer) / tp  # of a layer's matrices
        self.largest = np.maximum(table / tp, self.widest)

    def whole_layer(self) -> Any:
        """Numbers of a token that the operations of a layer keep for their backward passes, see ``docs/parallelism.md``."""
        gathered = np.where(self.rows > 1, 0, 2 * self.hidden)  # results of norms, made again from slices
        return 2 * self.hidden / self.rows + gathered + 3 * (self.queries + self.keys + self.columns)

    def kept(self, checkpointing: np.ndarray) -> Any:
        """Numbers of a token that a layer keeps."""
        residual = self.hidden / self.rows
        selective = 2 * residual + self.queries + 2 * self.keys + 2 * self.columns
        return np.choose(checkpointing, [self.whole_layer(), selective, residual + 0 * self.columns])


def held(shape: ModelShape, choices: Choices, role: RoleSettings, stage: Stage) -> Parts:
    """Between calls: weights, and of a role that is trained what its optimizer keeps."""
    weights, states = _kept(_Slice(shape, choices, stage), role)
    return {
        "weights": weights * (role.on_host or not role.offload),
        "optimizer": states * (role.on_host or not role.optim_offload),
    }


def held_by_host(shape: ModelShape, choices: Choices, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes in pinned host memory of a rank on a GPU. They stay from the first offload on, also while the device has a copy."""
    weights, states = _kept(_Slice(shape, choices, stage), role)
    here = not role.on_host
    return {"weights": weights * (here and role.offload), "optimizer": states * (here and role.optim_offload)}


def train(shape: ModelShape, work: Workload, choices: Choices, role: RoleSettings, stage: Stage) -> Parts:
    """Beside :func:`held`, at the worst moment of a mini-batch: before the last micro-batch's backward pass, behind it, or in the step.

    The largest micro-batch counts: as many tokens as the budget allows, if a replica has so many.
    """
    part, (tokens, number) = _Slice(shape, choices, stage), _micro_batches(work, choices)
    b, a, pp = role.itemsize, role.wide, choices.pp
    alive = _alive(choices, role, stage, number)
    kept = part.layers * part.kept(choices.checkpointing)
    if role.activation_offload and not role.on_host:
        kept = part.whole_layer()
    kept = kept + np.where(part.last, 2 * part.hidden, part.hidden / part.rows)  # the last norm's; what the next stage gets
    activations = b * tokens * kept * alive
    again = [0, part.columns + part.queries + part.keys, part.whole_layer()]  # what is computed again of a layer
    passing = b * tokens * (np.choose(choices.checkpointing, again) + 2 * part.columns + 2 * part.hidden)
    loss = _head(part, work, tokens, role, backward=True)
    # gradients: sums of whole parameters (zero 0, and 1 until the last micro-batch), else of the rank's rows
    trained = _trained(part, role)
    whole, shard, frozen = a * trained, a * trained / part.shards, role.adapters > 0
    before = np.where(number > 1, np.where(choices.zero <= 1, whole, shard), 0)
    gathered, root = _gathered(part, choices, role), np.where((choices.zero > 0) & (not frozen), part.ends, 0)
    layer = role.adapters if frozen else part.layer
    largest = _merging(part, role) if frozen else b * part.largest
    reducing = root * (b + a + (a + b) / part.shards) + np.where(choices.zero > 0, layer * (b + a), largest)
    reducing = np.maximum(reducing, largest * frozen)
    bucket = np.maximum(BUCKET_ELEMENTS, part.largest / part.shards)
    summed, brought = choices.dp_replicate > 1, role.optim_offload and not role.on_host
    step = a * bucket * summed + role.states * bucket * brought
    if role.optim == "muon":  # a bucket's steps, on their way and back, the rank's own matrices, and of one the product
        matrices = np.minimum(MATRIX_ELEMENTS, part.layers * part.layer / part.shards)
        step = step + 10 * matrices + 18 * part.largest * choices.tp
    late = 0 if frozen else a * part.first * part.ends / part.shards  # the embedding's is the last gradient
    behind = np.maximum(reducing, passing - late)
    left = activations * role.on_host  # there what was freed in small blocks stays in the process's heap
    moments = [
        {"gathered weights": gathered, "gradients": before, "activations": activations, "work": np.maximum(loss, passing)},
        {"gathered weights": gathered, "gradients": np.maximum(before, shard), "activations": left, "work": behind},
        {"gathered weights": 0 * kept, "gradients": shard, "activations": left, "work": step},
    ]
    sums = np.array([np.broadcast_to(total(moment), pp.shape) for moment in moments])
    worst = sums.argmax(0)
    found = {name: np.choose(worst, [moment[name] for moment in moments]) for name in moments[0]}
    return found | {"weights back": _resting(part, role) * role.offload}  # from host memory, for the call


def saved_by_host(shape: ModelShape, work: Workload, choices: Choices, role: RoleSettings, stage: Stage) -> Parts:
    """Bytes that the layers of a rank on a GPU save in host memory while it trains."""
    part, (tokens, number) = _Slice(shape, choices, stage), _micro_batches(work, choices)
    kept = part.layers * part.kept(choices.checkpointing) * _alive(choices, role, stage, number)
    return {"activations": role.itemsize * tokens * kept * (role.activation_offload and not role.on_host)}


def infer(shape: ModelShape, work: Workload, choices: Choices, role: RoleSettings, stage: Stage) -> Parts:
    """Beside :func:`held`, of a forward pass of all rows."""
    part, (tokens, _) = _Slice(shape, choices, stage), _micro_batches(work, choices)
    gathered = _gathered(part, choices, role)
    layer = role.itemsize * tokens * _forward(part) + _merging(part, role)
    passing = np.maximum(layer, _head(part, work, tokens, role, backward=False))
    return {"gathered weights": gathered, "work": passing, "weights back": _resting(part, role) * role.offload}


def generate(
    shape: ModelShape, work: Workload, choices: Choices, role: RoleSettings, config: GenerationConfig, stage: Stage
) -> tuple[Parts, Any, Any]:
    """Beside the weights, in the layout of generation: what a call needs whatever it caches, with the least cache that can do it; the
    bytes of a row's keys and values; and what all rows that run at once may need of them.

    On a GPU all of that, with what is held, takes at most ``gpu_memory_utilization`` of its memory. On CPUs a cache takes at most that
    share of what is free, and the rest must hold the other things.
    """
    part = _Slice(shape, choices, stage)
    rows = np.ceil(work.rows / choices.dp)
    flying = np.minimum(rows, choices.max_num_seqs)
    batch = np.minimum(config.max_num_batched_tokens, rows * work.longest)
    # logits of the slice and what is drawn from; of all slices, joined
    copies = 2 + np.where(choices.tp > 1, 2 * choices.tp, 0)
    logits = np.where(part.last, 4 * flying * part.vocab * copies, 0) * (1 + choices.graphs)
    texts = rows * (8 * work.longest + 8 * work.responses[-1])
    page = 2 * part.layers * part.keys * role.itemsize * config.page_size
    row = page * np.ceil((work.longest - 1) / config.page_size)
    most = row * flying if config.num_pages is None else page * config.num_pages
    parts = {"work": role.itemsize * batch * _forward(part) + logits + texts}
    return parts | {"cache": least_cache(total(parts), row, most, config, role.on_host)}, row, most


def least_cache(others: Any, row: Any, most: Any, config: GenerationConfig, on_host: bool) -> Any:
    """Beside ``others`` that are needed: enough for the longest row, and on CPUs what the generator takes of free memory where the
    others just have room in the rest."""
    share = config.memory_share(on_host)
    if config.num_pages is not None:
        return most
    if not on_host:
        return row
    free = np.maximum(row / share, np.minimum(others / max(1 - share, 1e-9), most + others))
    return np.maximum(free - others, row)


def weights_for_generation(
    shape: ModelShape,
    home: Choices,
    there: Choices,
    role: RoleSettings,
    config: GenerationConfig,
    beside: bool,
    stages: tuple[Stage, Stage],
) -> Any:
    """On a home's own ranks, beside its weights: the generation shard with one bucket, less the training shard that lives on in it
    unless it stays ``beside``. ``stages``: of the rank in either layout. 0 where both are the same."""
    train, made = _Slice(shape, home, stages[0]), _Slice(shape, there, stages[1])
    own, shard = role.itemsize * train.params / train.shards, role.itemsize * made.params
    same = (home.pp == there.pp) & (home.tp == there.tp) & (train.shards == 1)
    if config.buffers == "offload" and not role.on_host:
        beside = False
    bucket = np.minimum(np.maximum(SHARD_BUCKET, role.itemsize * made.largest), shard)
    if role.adapters:  # sums with them, of the training shard at first, lie beside the weights
        return np.maximum(own, shard) + np.where(same, 0, bucket)
    return np.where(same & (not beside), 0, shard + bucket - (0 if beside else own))


def fullest(choices: Choices, parts: Callable[[Stage], tuple[Parts, Parts]]) -> tuple[Any, Any]:
    """(held, active) [n] of the pipeline rank that needs most: the first, which has most micro-batches under way, or the last, with
    the logits. ``parts``: both of a stage."""
    first, last = (
        np.array([np.broadcast_to(total(each), choices.pp.shape) for each in parts(stage)])
        for stage in (0 * choices.pp, choices.pp - 1)
    )
    held, active = np.where(last.sum(0) > first.sum(0), last, first)
    return held, active


def _kept(part: _Slice, role: RoleSettings) -> tuple[Any, Any]:
    """Of a role between calls, wherever it lies: weights, and the states of its optimizer."""
    trained = _trained(part, role) / part.shards
    states = 0 * trained
    if role.trained:
        ends = 0 if role.adapters else part.ends / part.shards
        states = role.states * trained + (role.masters + 2 * role.moment - role.states) * ends
    return _resting(part, role) + role.itemsize * part.layers * role.adapters / part.shards, states


def _alive(choices: Choices, role: RoleSettings, stage: Stage, number: Any) -> Any:
    """Micro-batches whose activations a stage holds at a time, of ``number``."""
    if role.vpp == 1:
        return np.minimum(choices.pp - stage, number)
    return np.minimum(2 * (choices.pp - 1 - stage) + (role.vpp - 1) * choices.pp + 1, number * role.vpp) / role.vpp


def _micro_batches(work: Workload, choices: Choices) -> tuple[Any, Any]:
    """Tokens of the largest micro-batch, and how many of them a replica's mini-batch has."""
    rows = np.ceil(work.rows / work.mini_batches / choices.dp)
    tokens = np.minimum(np.maximum(choices.micro_tokens, work.longest), rows * work.longest)
    return tokens, np.clip(np.ceil(rows * work.length / tokens), 1, rows)


def _gathered(part: _Slice, choices: Choices, role: RoleSettings) -> Any:
    """Weights of ZeRO beside the rank's rows: all, or with stage 3 the root's and two layers', and FSDP2's buffer for the larger."""
    layer = part.layer - role.quantized / part.tp
    whole, some = part.layers * layer + part.ends, part.ends + 2 * layer + np.maximum(part.ends, layer)
    return role.itemsize * np.choose(np.where(choices.dp_shard > 1, choices.zero, 0), [0 * whole, whole, whole, some])


def _merging(part: _Slice, role: RoleSettings) -> Any:
    """Of a matrix with adapters its values, where they lie in fewer bits, and its sum with them, which CPUs make in fp32."""
    return (role.itemsize * (1 + (role.quantized > 0)) + 4 * role.on_host) * part.widest * (role.adapters > 0)


def _forward(part: _Slice) -> Any:
    """Numbers of a token that a layer's forward pass has at a time."""
    return 4 * part.hidden + part.queries + 2 * part.keys + np.maximum(3 * part.columns, 3 * part.queries + 3 * part.keys)


def _head(part: _Slice, work: Workload, tokens: Any, role: RoleSettings, backward: bool) -> Any:
    """Of response tokens: their hidden states and, backward, the gradients of these and of the weight; chunks of logits."""
    asked = tokens * work.responses[-1] / work.longest
    chunk = np.minimum(np.maximum(role.chunk, 64 * part.vocab), asked * part.vocab)
    of_hidden = (part.vocab > 0) * asked * part.hidden * (role.itemsize + (4 + role.itemsize) * backward)
    copies = 2 + 0.5 * backward if role.entropy else 1 + 0.5 * backward
    of_weight = backward * (role.adapters == 0) * role.itemsize * part.vocab * part.hidden
    return np.where(part.vocab > 1, of_hidden + 4 * chunk * copies, 2 * of_hidden) + of_weight


def _trained(part: _Slice, role: RoleSettings) -> Any:
    """Parameters of a rank's part that have gradients and states; replicated halves of adapters count as whole everywhere."""
    return part.layers * role.adapters if role.adapters else part.params


def _resting(part: _Slice, role: RoleSettings) -> Any:
    """The model's weights between calls."""
    quantized = part.layers * role.quantized / part.tp
    return role.itemsize * (part.params - quantized) / part.shards + (role.bits / 8 + 4 / BLOCK) * quantized


assert CHECKPOINTING == ("none", "selective", "full"), "np.choose above goes by this order"
