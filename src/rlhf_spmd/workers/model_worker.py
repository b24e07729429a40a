"""What all model roles share: a mesh, a training engine, and rows cut into packed micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller import (
    RANK_ZERO,
    THREE_D,
    CallRecord,
    Controller,
    GroupShape,
    ResourcePool,
    Signature,
    Stream,
    Worker,
    register,
)
from rlhf_spmd.data.balance import cut_rows
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import Storages
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.adapters import held_tensors
from rlhf_spmd.workers.config import BatchLimits, RoleConfig
from rlhf_spmd.workers.engine import Packed, TrainEngine, rank_shards
from rlhf_spmd.workers.objective import (
    MASK,
    Objective,
    Rows,
    Totals,
    as_objectives,
    learnt_rows,
    log_prob_differences,
    model_outputs,
    model_tokens,
    pack_rows,
    response_log_probs,
    sequence_lengths,
    take_field,
)
from rlhf_spmd.workers.weight_sync import AsyncWeightSync, WeightSync


@dataclass(frozen=True)
class WorkerContext:
    """What every role is built from, besides its own configuration.

    ``temperature``: of sampling, and so of log-probs. ``num_samples``: scored rows that come back as text, for people to read.
    ``encoding``: how messages between turns are rendered.
    ``max_prompt_length`` and ``max_response_length``: limits of sampling, 0: none is known. ``exact_rollouts``: generation's
    log-probs are training's, bit for bit. ``partial_rollouts``: rows may cross steps. ``rollout_log_probs``: the old
    log-probs are always generation's.
    ``checkpointing``: what ``activation_checkpointing=auto`` comes to by this rank's memory.
    ``serves``: the worker is a twin that serves this method, with weights on loan and without an optimizer.
    """

    controller: Controller
    world: World
    limits: BatchLimits
    seed: int
    total_updates: Mapping[str, int] = field(default_factory=dict)  # role -> optimizer steps of the whole run
    temperature: float = 1.0
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)  # by role
    added_rewards: tuple[str, ...] = ()  # those whose scores are added up
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    encoding: EncodingConfig | None = None
    tokenizer: Any = None
    num_samples: int = 0
    max_prompt_length: int = 0
    max_response_length: int = 0
    exact_rollouts: bool = False
    partial_rollouts: bool = False
    rollout_log_probs: bool = False
    checkpointing: str = "none"
    serves: str | None = None


class ModelWorker(Worker):
    """A role with a model. On ranks outside the pool, and without a ``spec``, it is the description only: no ``engine``.

    ``head``: lm or value; ``new_head``: a value head that the model's directory has not starts at zero.
    """

    head: ClassVar[str] = "lm"
    trained: ClassVar[bool] = False
    new_head: ClassVar[bool] = False
    checks_rollouts = False  # whether the next update is to compare the rollout's log-probs with its own

    def __init__(
        self, build: WorkerContext, name: str, pool: ResourcePool, shape: GroupShape, config: RoleConfig, spec: ModelSpec | None
    ) -> None:
        super().__init__(build.controller, name, pool, shape)
        self.build, self.config, self.spec = build, config, spec
        self.loan: WeightSync | None = None  # of a twin
        self.version = 0  # of the role's weights that are here: calls of this run that had trained them
        self.resting: Storages | None = None  # of weights that are in host memory between calls, on members
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
                activation_checkpointing=self._checkpointing(),
                activation_offload=config.activation_offload,
                attention=config.attention,
                seed=build.seed,
                total_updates=build.total_updates.get(name, 1),
                new_head=self.new_head,
                fill=build.serves is None,
                lora=config.lora,
                exact_gpu=config.generation.exact is True,
            )
            if config.offload and build.serves is None:
                self.resting = Storages(held_tensors(self.engine))
                self.resting.offload()
                self.prefetches = config.prefetch
        self.build_more()

    def _checkpointing(self) -> str:
        """What is configured, or by ``auto`` the most that one of the role's ranks needs: they must recompute alike.

        Collective over the pool: every rank of it must call, in program order.
        """
        if self.config.activation_checkpointing != "auto" or not self.trained or self.build.serves is not None:
            return self.config.activation_checkpointing
        level = torch.tensor([CHECKPOINTING.index(self.build.checkpointing)], device=self.device)
        return CHECKPOINTING[int(self.mesh.pool.all_reduce(level, "control", "max"))]

    def build_more(self) -> None:
        """What a subclass needs besides, at the end of construction: called on every rank of the world, in program order."""

    def shards(self, spec: ModelSpec) -> Callable[[int, int], dict[str, ParamShard]]:
        """(pp, tp) coordinate of the role's layout -> the parameters of a rank there, before ZeRO cuts out its rows."""
        lora = self.config.lora if self.config.lora.rank else None
        return functools.partial(rank_shards, spec, self.head, self.shape.layout, lora=lora)

    def weights(self) -> dict[str, Tensor]:
        """Between calls, on members: the local shards, on the device or in host memory. Writing there changes the weights."""
        local, resting = self.engine.local_tensors(), self.resting
        return local if resting is None else {name: resting.on_host(tensor) for name, tensor in local.items()}

    def serves(self, method: str) -> bool:
        """Whether calls of ``method`` run here: on the twin if the configuration gives them a pool or layout of their own."""
        return self.build.serves == method if method in self.config.calls else self.build.serves is None

    def lend(self, method: str, twin: ModelWorker) -> None:
        """Let ``twin`` serve a method. Collective over the world: every rank of it must call, in program order."""
        self.twins[method], twin.lenders = twin, self.pool.ranks
        is_ahead = self.controller.versions.ahead > 0 and self.trained and getattr(type(self), method).spec.kind == "generate"
        twin.loan = (AsyncWeightSync if is_ahead else WeightSync)(self, twin, method)

    def prefetch(self) -> None:
        assert self.resting is not None, "nothing rests in host memory"
        self.resting.prefetch()

    def enter(self, call: CallRecord) -> None:
        """A twin takes the weights for calls that need them; a home may go on when its weights have left."""
        for twin in self.twins.values():
            assert isinstance(twin, ModelWorker) and twin.loan is not None
            twin.loan.settle()
        self._holds = call.spec.kind in ("generate", "infer", "train")
        if self.loan is not None and self._holds:
            with self.controller.timeline.span(f"{self.name}.reallocate", category="reshard"):
                self.loan.take(call.version)
                self.version = call.version
        elif self.resting is not None and self._holds:
            with self.controller.timeline.span(f"{self.name}.reload", category="reshard"):
                self.resting.reload()
            self.resting.let_go()  # generation gives the weights other storages, and the former ones must not stay beside them

    def leave(self, call: CallRecord) -> None:
        if call.spec.kind == "train":
            self.version = call.version + 1
        if self.loan is not None and self._holds:
            self.loan.give_back()
        elif self.resting is not None and self._holds:
            # generation may have given the weights other storages
            changed = self.engine.trained_tensors() if call.spec.kind == "train" else {}
            self.resting.rest(held_tensors(self.engine), changed.values())

    def micro_batches(
        self, batch: Batch, keep_groups: bool = False, least: float = 0.0
    ) -> tuple[list[list[int]], list[Packed], Totals]:
        """Cut rows, or with ``keep_groups`` groups of rows, into packed micro-batches, as many on every data-parallel rank.
        Rows of a group come together where that pays: they share their prompt. ``least``: see :func:`pack_rows`.

        Returns the row positions of each micro-batch, the micro-batches, and the mini-batch's global counts.
        Collective over mesh.dp: every rank of it must call, in program order.
        """
        limits, lengths = self.build.limits, np.array(sequence_lengths(batch), dtype=np.int64)
        prompts = batch["prompt_ids"].lengths.numpy() if len(batch) else lengths
        shared = np.maximum(prompts - 1, 0)  # of a prompt all but the last token, see pack_rows
        sizes = lengths, shared, batch.group_ids.numpy()
        cut = functools.partial(cut_rows, *sizes, limits.max_tokens, limits.rows, keep_groups, where=limits.where)
        index = cut()
        response_tokens = int(model_tokens(batch).sum()) if len(batch) else 0
        counts = torch.stack(self.mesh.dp.all_gather(torch.tensor([len(index), response_tokens, len(batch)]), "control"))
        agreed = int(counts[:, 0].max())
        if agreed > len(index):
            index = cut(number=agreed)
        totals = Totals(int(counts[:, 1].sum()), int(counts[:, 2].sum()))
        return index, [pack_rows(batch.take(rows), self.device, least) for rows in index], totals

    def infer(
        self, batch: Batch, head: Callable[[Decoder, Tensor, Packed], Tensor], lengths: Tensor | None = None
    ) -> Ragged | None:
        """Forward all rows. ``head`` gives ``lengths`` [rows] numbers per row, by default one per token of the model's responses;
        the tokens of environments then get 0. None off the last stage and where there are no rows.
        Collective over the pool: every rank of it must call, in program order.
        """
        # a layer as one kernel reads its rows whole
        index, packed, _ = self.micro_batches(batch, least=0.25 if self.engine.ops.joins_layers else 0.0)
        outputs = self.engine.forward(packed, head)
        if not self.mesh.last_stage or not len(batch):
            return None
        order = torch.tensor([row for rows in index for row in rows])
        done = [(rows, out) for rows, out in zip(index, outputs, strict=True) if rows]
        values = torch.cat([out for _, out in done]).cpu()
        spreads = lengths is None and MASK in batch
        lengths = model_tokens(batch) if lengths is None else lengths
        result = Ragged(values, lengths[order]).take(torch.argsort(order))
        if not result.values.isfinite().all():
            row = batch.row_ids.repeat_interleave(result.lengths)[~result.values.isfinite()][0]
            raise FloatingPointError(f"row {row}: what {self.name} makes of it is not finite; {self._remedy()}")
        return result.spread(batch[MASK]) if spreads else result

    def _remedy(self) -> str:
        learning = f"lower models.{self.name}.optim.lr={self.config.optim.lr:g}, " if self.trained else ""
        return f"{learning}look at the weights that it began with, or set models.{self.name}.dtype=float32"

    def log_probs(self, batch: Batch, temperature: float) -> Ragged | None:
        """Log-probability of every response token of the model, by :meth:`infer`."""
        return self.infer(batch, lambda decoder, hidden, micro: response_log_probs(decoder, hidden, micro, temperature)[0])

    @register(
        THREE_D,
        kind="train",
        describe=lambda self, objective, *, mini_batch_size=None, epochs=1: Signature(
            f"update_{self.name}",
            tuple(Stream(one.inputs, one.keep_groups) for one in as_objectives(objective)),
            mini_batch_size=mini_batch_size,
            epochs=epochs,
        ),
    )
    def update(
        self,
        steps: list[list[Batch]],
        objective: Objective | Sequence[Objective],
        *,
        mini_batch_size: int | None = None,
        epochs: int = 1,
    ) -> dict[str, float]:
        """Learn: one optimizer step for each mini-batch of ``mini_batch_size`` groups (prompts; None: all of them) and epoch.

        With several references and as many objectives, the losses of each mini-batch are added up into one step; the first
        one's groups say how many mini-batches there are. Returns the mean statistics over the steps, and the first one's ``ppo_kl``.
        Collective over the pool: every rank of it must call, in program order.
        """
        objectives = as_objectives(objective)
        differences: list[Tensor] = []  # before the first update, from the log-probs of the same weights
        checked = differences if self.checks_rollouts else None
        reports = []
        for batches in steps:
            reports.append(self._step(batches, objectives, checked))
            checked = None
        if not self.engine.weights_finite():
            raise FloatingPointError(f"the weights of {self.name} are not finite after its update; {self._remedy()}")
        named = [{name if "/" in name else f"{self.name}/{name}": x for name, x in report.items()} for report in reports]
        names = dict.fromkeys(name for report in named for name in report)
        having = {name: [report[name] for report in named if name in report] for name in names}
        means = {name: sum(values) / len(values) for name, values in having.items()}
        if (kl := f"{self.name}/ppo_kl") in named[0]:
            means[f"{kl}_first"] = named[0][kl]
        return means | log_prob_differences(torch.cat(differences)) if differences else means

    def _step(
        self, batches: Sequence[Batch], objectives: Sequence[Objective], differences: list[Tensor] | None
    ) -> dict[str, float]:
        """One optimizer step. Returns the statistics summed over micro-batches and data-parallel ranks (empty off the last stage),
        with grad_norm and lr. ``differences`` receives those of the rollout's log-probs from these, where they should be none."""
        stats: dict[str, Tensor] = {}
        for batch, objective in zip(batches, objectives, strict=True):
            _, packed, totals = self.micro_batches(learnt_rows(batch, objective.only), objective.keep_groups)
            if totals.rows:  # of a stream that is shorter than the others this mini-batch may have none
                loss = functools.partial(_loss, objective, totals, differences if objective is objectives[0] else None)
                told = self.engine.forward_backward(packed, loss)
                for name, value in told.items() if totals.tokens else ():  # where no row is learnt there is nothing to tell
                    stats[name] = stats[name] + value if name in stats else value
        if all(objective.names_loss for objective in objectives):
            stats.pop("loss", None)
        summed: dict[str, float] = {}
        if self.mesh.last_stage and stats:
            names = sorted(stats)
            values = torch.stack([stats[name] for name in names]).cpu()
            self.mesh.dp.all_reduce(values, "control")
            summed = dict(zip(names, values.tolist(), strict=True))
        return {**summed, **self.engine.optimizer_step()}

    @register(
        THREE_D,
        describe=lambda self, objective: Signature(f"evaluate_{self.name}", (Stream(objective.inputs, objective.keep_groups),)),
    )
    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """The objective's loss and statistics without learning: of each the share of this replica's rows, times the number of all;
        and ``rows``, its own. The sums over replicas, of the first over the last, are what an update of these rows would report.

        Collective over the pool: every rank of it must call, in program order.
        """
        _, packed, totals = self.micro_batches(learnt_rows(batch, objective.only), objective.keep_groups)
        loss = functools.partial(_loss, replace(objective, weight=1.0), totals, None)
        sums: dict[str, float] = {"rows": len(batch)}
        for value, told in filter(None, self.engine.forward(packed, loss)):
            for name, share in {"loss": value, **told}.items():
                sums[name] = sums.get(name, 0.0) + float(share) * totals.rows
        return sums

    @register(RANK_ZERO, kind="control")
    def progress(self) -> dict[str, int]:
        """What a checkpoint must know of this role besides its tensors."""
        return {"optimizer_steps": self.engine.optimizer.step_count if self.engine.optimizer else 0}


def _loss(
    objective: Objective, totals: Totals, differences: list[Tensor] | None, decoder: Decoder, hidden: Tensor, micro: Packed
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a micro-batch the weighted loss, and statistics; for ``differences`` see :meth:`ModelWorker._step`."""
    devices = {name: torch.device("cpu") if name in objective.on_cpu else hidden.device for name in objective.reads}
    fields = model_outputs(objective, decoder, hidden, micro)
    fields |= {name: take_field(micro.extra, name, device) for name, device in devices.items()}
    if differences is not None and "old_log_probs" in fields:
        differences.append((fields["log_probs"].detach() - fields["old_log_probs"]).abs())
    some = replace(totals, tokens=max(totals.tokens, 1))  # where no row is learnt the loss is 0
    value, told = objective.evaluate(fields, Rows.of(micro.extra), some)
    return value * objective.weight, told
