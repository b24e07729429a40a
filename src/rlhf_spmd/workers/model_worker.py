"""What all model roles share: a mesh, a training engine, and rows cut into packed micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.controller import RANK_ZERO, Controller, GroupShape, MethodSpec, ResourcePool, Worker, register
from rlhf_spmd.data.balance import micro_batches_by_count, micro_batches_by_tokens
from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.config import BatchLimits, RoleConfig
from rlhf_spmd.workers.engine import Packed, TrainEngine, rank_shards
from rlhf_spmd.workers.loan import Loan
from rlhf_spmd.workers.resting import Resting


@dataclass(frozen=True)
class Totals:
    """Counts of a mini-batch over all data-parallel ranks: what its loss is divided by."""

    tokens: int
    rows: int


# (fields by name, each [response tokens], response lengths [rows], totals) -> (loss, statistics), summed over micro-batches and ranks
Objective = Callable[[dict[str, Tensor], Tensor, Totals], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Build:
    """What every role is built from, besides its own configuration.

    ``temperature``: of sampling, and so of log-probs. ``num_samples``: scored rows that come back as text, for people to read.
    ``exact_rollouts``: generation's log-probs are training's, bit for bit. ``partial_rollouts``: rows may cross steps.
    ``serves``: the worker is a twin that serves this method, with weights on loan and without an optimizer.
    """

    controller: Controller
    world: World
    limits: BatchLimits
    seed: int
    num_mini_batches: int = 1
    total_updates: Mapping[str, int] = field(default_factory=dict)  # role -> optimizer steps of the whole run
    temperature: float = 1.0
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)  # role -> its settings, of every reward role
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    tokenizer: Any = None
    num_samples: int = 0
    exact_rollouts: bool = False
    partial_rollouts: bool = False
    serves: str | None = None


class ModelWorker(Worker):
    """A role with a model. On ranks outside the pool, and without a ``spec``, it is the description only: no ``engine``.

    ``head``: lm or value; ``new_head``: a value head that the model's directory has not starts at zero. ``model_of``: the role
    whose model it takes where its configuration names none; None: it may have none.
    """

    head: ClassVar[str] = "lm"
    trained: ClassVar[bool] = False
    new_head: ClassVar[bool] = False
    model_of: ClassVar[str | None] = "actor"

    def __init__(
        self, build: Build, name: str, pool: ResourcePool, shape: GroupShape, config: RoleConfig, spec: ModelSpec | None
    ) -> None:
        super().__init__(build.controller, name, pool, shape)
        self.build, self.config, self.spec = build, config, spec
        self.loan: Loan | None = None  # of a twin
        self.resting: Resting | None = None  # weights that are in host memory between calls
        self.mesh = build_mesh(build.world, pool.ranks, shape.layout)
        self.device = build.world.device
        if self.member and spec is not None:
            self.engine = TrainEngine(
                spec,
                None if config.random_init else config.path,
                self.head,
                self.mesh,
                config.optim if self.trained and build.serves is None else None,
                dtype=config.torch_dtype(self.device),
                device=self.device,
                activation_checkpointing=config.activation_checkpointing,
                activation_offload=config.activation_offload,
                attention=config.attention,
                seed=build.seed,
                total_updates=build.total_updates.get(name, 1),
                new_head=self.new_head,
                fill=build.serves is None,
            )
            if config.offload and build.serves is None:
                self.resting = Resting(self.engine)
        self.build_more()

    def build_more(self) -> None:
        """What a subclass needs besides, at the end of construction: called on every rank of the world, in program order."""

    def shards(self, spec: ModelSpec) -> Callable[[int, int], dict[str, ParamShard]]:
        """(pp, tp) coordinate of the role's layout -> the parameters of a rank there, before ZeRO cuts out its rows."""
        return functools.partial(rank_shards, spec, self.head, self.shape.layout)

    def weights(self) -> dict[str, Tensor]:
        """Between calls, on members: the local shards, on the device or in host memory. Writing there changes the weights."""
        return self.engine.local_tensors() if self.resting is None else self.resting.tensors()

    def serves(self, method: str) -> bool:
        """Whether calls of ``method`` run here: on the twin if the configuration gives them a pool or layout of their own."""
        return self.build.serves == method if method in self.config.calls else self.build.serves is None

    def lend(self, method: str, twin: ModelWorker) -> None:
        """Let ``twin`` serve a method. Collective over the world: every rank of it must call, in program order."""
        self.twins[method] = twin
        twin.loan = Loan(self, twin, method)

    def needs_weights(self, spec: MethodSpec, args: Sequence[Any]) -> bool:
        """Whether a call computes with the weights: those on rows do. The same on every rank."""
        return bool(spec.inputs)

    def enter(self, spec: MethodSpec, args: Sequence[Any]) -> None:
        """A twin takes the weights for calls that need them; a home may go on when its weights have left."""
        for twin in self.twins.values():
            assert isinstance(twin, ModelWorker) and twin.loan is not None
            twin.loan.settle()
        self._holds = self.needs_weights(spec, args)
        if self.loan is not None and self._holds:
            with self.controller.timeline.span(f"{self.name}.reallocate", category="reshard"):
                self.loan.take()
        elif self.resting is not None and self._holds:
            with self.controller.timeline.span(f"{self.name}.reload", category="reshard"):
                self.resting.wake()

    def leave(self) -> None:
        if self.loan is not None and self._holds:
            self.loan.give_back()
        elif self.resting is not None and self._holds:
            self.resting.rest()

    def micro_batches(self, batch: Batch) -> tuple[list[list[int]], list[Packed], Totals]:
        """Cut rows into packed micro-batches, as many on every data-parallel rank.

        Returns the row positions of each micro-batch, the micro-batches, and the mini-batch's global counts.
        Collective over mesh.dp: every rank of it must call, in program order.
        """
        lengths = sequence_lengths(batch)
        index = self._cut(lengths, None)
        response_tokens = int(model_tokens(batch).sum()) if len(batch) else 0
        counts = torch.stack(self.mesh.dp.all_gather(torch.tensor([len(index), response_tokens, len(batch)]), "control"))
        agreed = int(counts[:, 0].max())
        if agreed > len(index):
            index = self._cut(lengths, agreed)
        totals = Totals(int(counts[:, 1].sum()), int(counts[:, 2].sum()))
        return index, [pack_rows(batch.take(rows), self.device) for rows in index], totals

    def _cut(self, lengths: list[int], number: int | None) -> list[list[int]]:
        limits = self.build.limits
        if limits.rows is not None:
            return micro_batches_by_count(lengths, limits.rows, number)
        return micro_batches_by_tokens(lengths, limits.max_tokens, number)

    def infer(
        self, batch: Batch, head: Callable[[Decoder, Tensor, Packed], Tensor], lengths: Tensor | None = None
    ) -> Ragged | None:
        """Forward all rows. ``head`` gives ``lengths`` [rows] numbers per row, by default one per token of the model's responses;
        the tokens of environments then get 0. None off the last stage and where there are no rows.
        Collective over the pool: every rank of it must call, in program order.
        """
        index, packed, _ = self.micro_batches(batch)
        outputs = self.engine.forward(packed, head)
        if not self.mesh.last_stage or not len(batch):
            return None
        order = torch.tensor([row for rows in index for row in rows])
        done = [(rows, out) for rows, out in zip(index, outputs, strict=True) if rows]
        values = torch.cat([out for _, out in done]).cpu()
        spreads = lengths is None and MASK in batch
        lengths = model_tokens(batch) if lengths is None else lengths
        result = Ragged(values, lengths[order]).take(torch.argsort(order))
        return result.spread(batch[MASK]) if spreads else result

    def log_probs(self, batch: Batch, temperature: float) -> Ragged | None:
        """Log-probability of every response token of the model, by :meth:`infer`."""
        return self.infer(batch, lambda decoder, hidden, micro: response_log_probs(decoder, hidden, micro, temperature)[0])

    def train(
        self, batch: Batch, loss: Callable[[Decoder, Tensor, Packed, Totals], tuple[Tensor, dict[str, Tensor]]]
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch. ``loss`` returns this micro-batch's share of the mini-batch's loss and of its statistics.

        Returns the statistics summed over micro-batches and data-parallel ranks (empty off the last stage), with grad_norm and lr.
        Collective over the pool: every rank of it must call, in program order.
        """
        _, packed, totals = self.micro_batches(batch)
        stats = self.engine.forward_backward(packed, lambda decoder, hidden, micro: loss(decoder, hidden, micro, totals))
        summed: dict[str, float] = {}
        if self.mesh.last_stage:
            names = sorted(stats)
            values = torch.stack([stats[name].detach().to(torch.float64).cpu() for name in names])
            self.mesh.dp.all_reduce(values, "control")
            summed = dict(zip(names, values.tolist(), strict=True))
        return {**summed, **self.engine.optimizer_step()}

    def summarise(self, reports: Sequence[dict[str, float]], first: tuple[str, ...] = ()) -> dict[str, float]:
        """The mean of each statistic over a step's updates, under ``<role>/<name>``; of ``first`` also the first update's value."""
        named = [
            {name if "/" in name else f"{self.name}/{name}": value for name, value in report.items()} for report in reports
        ]
        result = {name: sum(report[name] for report in named) / len(named) for name in named[0]}
        return result | {f"{name}_first": named[0][name] for name in first if name in named[0]}

    @register(RANK_ZERO)
    def progress(self) -> dict[str, int]:
        """What a checkpoint must know of this role besides its tensors."""
        return {"optimizer_steps": self.engine.optimizer.step_count if self.engine.optimizer else 0}


def sequence_lengths(batch: Batch) -> list[int]:
    if not len(batch):
        return []
    total: Tensor = batch["prompt_ids"].lengths + batch["response_ids"].lengths
    return total.tolist()


def pack_rows(batch: Batch, device: torch.device) -> Packed:
    """Prompt and response of each row, one after the other, on ``device``; the other fields stay with the rows."""
    if not len(batch):
        return Packed(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64), batch)
    prompts, responses = batch["prompt_ids"].rows(), batch["response_ids"].rows()
    whole = ragged([part for pair in zip(prompts, responses, strict=True) for part in pair], torch.int64)
    return Packed(whole.values.to(device), batch["prompt_ids"].lengths + batch["response_ids"].lengths, batch)


MASK = "response_mask"  # bool, ragged: false for the tokens of an environment, which were not drawn


def model_tokens(batch: Batch) -> Tensor:
    """Response tokens of each row that the model drew, int64 [rows]: all, or with an environment those of its mask."""
    counts: Tensor = batch[MASK].counts() if MASK in batch else batch["response_ids"].lengths
    return counts


def response_positions(micro: Packed) -> Tensor:
    """Positions in the packed tokens whose hidden state predicts each response token of the model, int64 [response tokens]."""
    responses: Tensor = micro.extra["response_ids"].lengths
    ends = micro.lengths.cumsum(0)
    first = ends - responses - 1
    within = torch.arange(int(responses.sum())) - torch.repeat_interleave(responses.cumsum(0) - responses, responses)
    positions = torch.repeat_interleave(first, responses) + within
    return (positions[micro.extra[MASK].values] if MASK in micro.extra else positions).to(micro.tokens.device)


def response_log_probs(
    decoder: Decoder, hidden: Tensor, micro: Packed, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of every response token of the model, and the entropy of its distribution: [response tokens] each."""
    labels = drawn(micro.extra, "response_ids").to(hidden.device)
    return token_log_probs(decoder, hidden[response_positions(micro)], labels, temperature, entropy)


def drawn(batch: Batch, name: str) -> Tensor:
    """A ragged field's entries for the response tokens of the model, packed."""
    field: Ragged = batch[name]
    return (field.where(batch[MASK]) if MASK in batch else field).values
