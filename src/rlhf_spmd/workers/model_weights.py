"""A role's weights on this rank, in one layout on one pool: how they are built, and whether they are offloaded between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlhf_spmd.controller import CallRecord, GroupShape, ResourcePool
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.reshard import Storages
from rlhf_spmd.workers.config import RoleConfig, WorkerContext
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.rank_shards import rank_shards
from rlhf_spmd.workers.train_engine import TrainEngine


@dataclass(eq=False)
class ModelWeights:
    """A model on a pool. On ranks outside the pool, and without a ``spec``, it is a description only and has no ``engine``.

    - head: "lm", "value" or "both"
    - version: the version of the weights in ``engine``: number of calls of this run that have trained the role

    Construction is collective over the pool: every rank of it must call, in program order.
    """

    context: WorkerContext
    name: str
    pool: ResourcePool
    shape: GroupShape
    config: RoleConfig
    spec: ModelSpec | None
    head: str

    def __post_init__(self) -> None:
        self._engine: TrainEngine | None = None
        self.mesh = build_mesh(self.context.world, self.pool.ranks, self.shape.layout)
        self.device = self.context.world.device
        self.version = 0

    @property
    def member(self) -> bool:
        """Return True on ranks of the pool."""
        return self.mesh.member

    @property
    def engine(self) -> TrainEngine:
        """Return this rank's engine. Only members of a role with a model have one."""
        assert self._engine is not None, f"{self.name} has no engine on this rank"
        return self._engine

    def build_engine(self, optim: OptimConfig | None, checkpointing: str, *, fill: bool, new_head: bool = False) -> None:
        """Build the engine on members. ``fill``: give the parameters memory and values."""
        config = self.config
        if self.member and self.spec is not None:
            self._engine = TrainEngine(
                self.spec,
                None if config.random_init else config.path,
                self.head,
                self.mesh,
                optim,
                dtype=config.torch_dtype(self.device),
                device=self.device,
                activation_checkpointing=checkpointing,
                activation_offload=config.activation_offload,
                attention=config.attention,
                seed=self.context.seed,
                total_updates=self.context.total_updates.get(self.name, 1),
                new_head=new_head,
                fill=fill,
                lora=config.lora,
                batch_invariant_gpu=config.generation.reuse_rollout_log_probs is True,
                router_aux_loss_coef=config.router_aux_loss_coef,
            )

    def shards(self, spec: ModelSpec) -> Callable[[int, int], dict[str, ParamShard]]:
        """Return a function: (pp, tp) of the layout -> the parameters of a rank at it, before ZeRO cuts out the rank's rows."""
        return partial(
            rank_shards, spec, self.head, self.shape.layout, lora=self.config.lora if self.config.lora.rank else None
        )

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the local shards on members; {} on other ranks."""
        return self.engine.local_tensors() if self.member else {}

    def enter(self, call: CallRecord) -> None:
        """Bring the weights of ``call.version`` into the engine.

        Collective over the world: every rank of it must call, in program order.
        """

    def leave(self, call: CallRecord) -> None:
        """Settle the weights after a call that used them.

        Collective over the world: every rank of it must call, in program order.
        """


@dataclass(eq=False)
class OwnedWeights(ModelWeights):
    """The weights that a role trains, saves and sends to replicas.

    ``offloaded``: with ``models.<role>.offload``, the storages that are in host memory between calls.
    """

    trained: bool = False
    new_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offloaded: Storages | None = None
        if self.member and self.spec is not None:
            optim = self.config.optim if self.trained else None
            self.build_engine(optim, self._checkpointing(), fill=True, new_head=self.new_head)
            if self.config.offload:
                self.offloaded = Storages(resident_tensors(self.engine))
                self.offloaded.offload()

    def _checkpointing(self) -> str:
        """Return the configured level. For ``auto``: the highest that any rank of the pool needs, since all must recompute alike.

        Collective over the pool: every rank of it must call, in program order.
        """
        if self.config.activation_checkpointing != "auto" or not self.trained:
            return self.config.activation_checkpointing
        level = torch.tensor([CHECKPOINTING.index(self.context.checkpointing)], device=self.device)
        return CHECKPOINTING[int(self.mesh.pool.all_reduce(level, "control", "max"))]

    def between_calls(self) -> dict[str, Tensor]:
        """Return the local shards between calls, on members: on the device or in host memory. Writing there changes the weights."""
        local = self.engine.local_tensors()
        return {name: self.offloaded.on_host(x) for name, x in local.items()} if self.offloaded is not None else local

    def prefetch(self) -> None:
        assert self.offloaded is not None, "nothing is in host memory"
        self.offloaded.prefetch()

    def enter(self, call: CallRecord) -> None:
        if self.offloaded is not None:
            with self.context.controller.timeline.span(f"{self.name}.reload", category="reshard"):
                self.offloaded.reload()
            self.offloaded.release()  # generation gives the weights other storages; the former ones must not stay beside them

    def leave(self, call: CallRecord) -> None:
        if call.spec.kind == "train":
            self.version = call.version + 1
        if self.offloaded is not None:
            changed = self.engine.trained_tensors() if call.spec.kind == "train" else {}
            self.offloaded.offload(resident_tensors(self.engine), changed.values())


def resident_tensors(engine: TrainEngine) -> list[Tensor]:
    """Return the tensors that stay in memory between calls: local shards, and buffers, among them matrices in 4 or 8 bits."""
    return [*engine.local_tensors().values(), *(buffer for chunk in engine.chunks for buffer in chunk.buffers())]
