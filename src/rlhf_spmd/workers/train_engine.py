"""The engine that trains and scores with one role on this rank: its part of the decoder, ZeRO, the pipeline, the optimizer.

Parallelism is applied in one fixed order, on the meta device: tensor slices (in the decoder), activation checkpointing, FSDP2. Only
then the shards of this rank get memory and values. Between calls the rank holds these local shards, plain tensors that checkpoints
and resharding read and write by boxes. Its part of the decoder is one pipeline stage, or ``layout.vpp`` chunks if that is above 1;
parameter names then start with ``chunks.<i>.``.

ZeRO cuts parameters over the ranks of a shard group. Stage 0 keeps plain parameters and sums gradients once per optimizer step. Stage
1 sums each gradient into its owner's shard once, after the last micro-batch. Stage 2 does so after every micro-batch. Stage 3 also
gathers parameters layer by layer, in every pass; 1 and 2 hold the gathered parameters from the first micro-batch to the last. A shard
group is all of dp * cp, or ``layout.zero_size`` neighbours in it. Then the shards' gradients are also summed over these groups, once
per optimizer step.

Gradients are summed in a fixed order, so equal runs give equal bits: over the micro-batches of a chunk in the schedule's order, then
over ranks in the collectives' order. Gradients of half-precision parameters are summed in fp32, over ranks too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import choose_ops
from rlhf_spmd.models.attention import Attention, PackedAttention
from rlhf_spmd.models.context_parallel import own_tokens, rows_of, share_tokens
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.lora import LoraConfig, is_trained
from rlhf_spmd.models.router_balance import RouterBalance, Routers
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import init_adapters, init_random, load_pretrained
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.data_parallel import owned_boxes, partial_boxes, squared_norm, sum_in_buckets, sum_partial
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.pipeline import Action, Schedule, connect_stages, run_pipeline, schedule_1f1b, schedule_forward
from rlhf_spmd.parallel.zero import FSDPModel, allocate, is_sharded, local_part, stage_of_zero, zero_loss
from rlhf_spmd.reshard import Storages
from rlhf_spmd.workers.muon import muons_of
from rlhf_spmd.workers.objective import MicroBatch
from rlhf_spmd.workers.optim_config import OptimConfig, accumulation_dtype
from rlhf_spmd.workers.optimizer import Optimizer
from rlhf_spmd.workers.rank_shards import chunk_shards, named_by_chunk, rank_shards, replica_groups, zero_part

StagePass = Callable[[Action, Tensor | None], Tensor | None]
Head = Callable[[Decoder, Tensor, MicroBatch], Any]
MicroBatchLoss = Callable[[Decoder, Tensor, MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]


class TrainEngine:
    """A model on a mesh, for training (with ``optim``) or only for forward passes.

    Construction and all methods that compute are collective over the pool: every rank of it must call, in program order. The ranks of
    one replica pass the same rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        path: str | None,
        head: str,
        mesh: Mesh,
        optim: OptimConfig | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        activation_checkpointing: str = "none",
        activation_offload: bool = False,
        attention: str = "auto",
        seed: int = 0,
        total_updates: int = 1,
        new_head: bool = False,
        fill: bool = True,
        lora: LoraConfig | None = None,
        batch_invariant_gpu: bool = False,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        """Read the weights from the Hugging Face directory ``path``, or draw them from ``seed``, the same in every layout.

        - head: "lm", "value", "both" or "none"
        - activation_*: see :meth:`Decoder.keep_activations`
        - attention, batch_invariant_gpu: see ``kernels.choose_ops``
        - total_updates: optimizer steps in the whole run, for the schedule
        - new_head: a value head that the directory lacks starts at zero
        - fill: false: the weights are not set and have no memory; ``storages`` gives it to them
        - lora: train adapters and a value head; other weights stay
        - router_aux_loss_coef: see ``models.<role>``

        Attributes: ``trained``, the names of parameters that an optimizer changes, and ``saved``, the names of those in checkpoints.
        Raises ValueError for unfit weights.
        """
        assert isinstance(mesh.layout, Layout) and mesh.member, "a training engine needs a training mesh that this rank is in"
        self.spec = spec
        self.mesh = mesh
        self.dtype = dtype
        self.device = device
        self.layout = mesh.layout
        self.lora = lora if lora is not None and lora.rank else None
        self.zero = stage_of_zero(mesh.layout)
        choose = partial(choose_ops, dtype, device, batch_invariant_gpu=batch_invariant_gpu)
        self.ops = choose("auto")
        self.attention = choose(attention)
        self._num_calls = 0  # calls of forward_backward in this optimizer step
        self._seeds = seed, mesh.pp_rank, mesh.dp_rank, mesh.cp_rank
        self._wide_grads: dict[str, Tensor] = {}
        self.chunks = self._build_chunks(head)
        for chunk in self.chunks:
            chunk.keep_activations(activation_checkpointing, activation_offload)
            for name, param in chunk.named_parameters():
                param.requires_grad_(optim is not None and is_trained(name, head, self.lora is not None))
        sharded = self.chunks if self.zero else []
        wide = accumulation_dtype(dtype)
        self.zeros = [FSDPModel(chunk, chunk.layers, mesh, self.zero, wide, chunk.local_expert_params()) for chunk in sharded]
        self.storages = Storages()
        for tensors in (tensors for chunk in self.chunks for tensors in allocate(chunk, chunk.layers, device)):
            if not fill:
                self.storages.include(tensors)
                self.storages.free()
        self._params = named_by_chunk([dict(chunk.named_parameters()) for chunk in self.chunks])
        self.trained = [name for name in self._params if is_trained(name, head, self.lora is not None)]
        self.saved = self.trained if self.lora else list(self._params)
        self._plan_shards(head)
        if fill:
            self._load_weights(path, head, seed, new_head)
        self._connect(optim is not None)
        layers = (layer for chunk in self.chunks for layer in chunk.layer_ids)
        self.balance = RouterBalance(spec, layers, router_aux_loss_coef, mesh.tp, mesh.cp, device)
        self.optimizer = None if optim is None else self._build_optimizer(optim, head, total_updates)

    def _build_chunks(self, head: str) -> list[Decoder]:
        """Return this rank's chunks of layers on the meta device."""
        mesh, layout = self.mesh, self.layout
        options: dict[str, Any] = {"sequence_parallel": layout.sequence_parallel, "ops": self.ops, "lora": self.lora}
        options |= {"cp": mesh.cp, "ep": mesh.ep, "expert_parallel_generation": layout.expert_parallel_generation}
        place = layout.pp * layout.vpp, mesh.tp, self.dtype, "meta"
        return [Decoder(self.spec, head, stage, *place, **options) for stage in layout.stages(mesh.pp_rank)]

    def _load_weights(self, path: str | None, head: str, seed: int, new_head: bool) -> None:
        """Fill the local shards from a directory, or draw them."""
        plans = chunk_shards(self.spec, head, self.layout, self.mesh.pp_rank, self.mesh.tp_rank, self.lora)
        for chunk, plan in zip(self.chunks, plans, strict=True):
            shards = zero_part(plan, self.mesh)
            if path is None:
                init_random(chunk, seed, shards)
            else:
                load_pretrained(chunk, path, new_head, shards)
            if self.lora is not None:
                init_adapters(chunk, self.lora, seed, shards)

    def _build_optimizer(self, optim: OptimConfig, head: str, total_updates: int) -> Optimizer:
        """Return the optimizer. Gradients of half-precision parameters are summed in float32 from now on."""
        heads = [name for name in self._params if name.endswith("value.weight" if head == "both" else "head.weight")]
        shards_of_tp = partial(rank_shards, self.spec, head, self.layout, self.mesh.pp_rank)
        muons = muons_of(self.mesh, shards_of_tp) if optim.name == "muon" else ()
        if accumulation_dtype(self.dtype) != self.dtype:
            self._accumulate_wide()
        return Optimizer(optim, self.trained_tensors(), total_updates, heads, muons)

    def _connect(self, trains: bool) -> None:
        """Connect the groups. Collective over the pool: every rank of it must call, in program order."""
        mesh = self.mesh
        groups = [mesh.tp, *[mesh.dp_shard] * (self.zero > 0)]
        if trains:
            ends = [mesh.first_last_group] * (self.lora is None and self.chunks[0].tied_across_stages)
            groups += [mesh.dp_replicate, *ends, mesh.pool, *[mesh.ep_copies] * (mesh.ep.size > 1)]
        for group in groups:
            group.connect_nccl(self.device)
        for group in (mesh.cp, mesh.ep):
            group.connect_nccl(self.device, pairs=True)
        connect_stages(mesh, self.device)

    def _plan_shards(self, head: str) -> None:
        """Plan this rank's shards, which part it counts in the gradient norm, and for which part it has a partial gradient."""
        mesh = self.mesh
        tp = self.mesh.tp
        plan = partial(rank_shards, self.spec, head, self.layout, lora=self.lora)
        rank_plan = plan(mesh.pp_rank, tp.rank)
        before = [plan(mesh.pp_rank, rank) for rank in range(tp.rank)]
        if self.chunks[0].tied_across_stages and not mesh.first_stage:
            before += [plan(0, rank) for rank in range(tp.size)]
        other_slices = [plan(mesh.pp_rank, rank) for rank in range(tp.size) if rank != tp.rank]
        self._shards = zero_part(rank_plan, mesh)
        self._owned = zero_part(owned_boxes(rank_plan, before), mesh)
        scattered = named_by_chunk([dict.fromkeys(chunk.scattered) for chunk in self.chunks])
        partial_shards = zero_part(partial_boxes(rank_plan, other_slices, scattered), mesh)
        self._partial = {name: shard for name, shard in partial_shards.items() if name in self.trained}
        for name, tensor in self.local_tensors().items():
            planned = self._shards[name].shape
            assert tensor.shape == planned, f"{name}: local shard {list(tensor.shape)}, planned {list(planned)}"

    # -- forward and backward

    @property
    def inference_min_saving(self) -> float:
        """Return ``min_saving`` of ``pack_rows`` for rows that are not trained: a layer that is one kernel reads whole rows."""
        return 0.25 if self.ops.joins_layers else 0.0

    def forward(self, micro_batches: Sequence[MicroBatch], head: Head, routers: Sequence[Routers | None] = ()) -> list[Any]:
        """Return ``head(decoder, hidden [T, hidden], micro_batch)`` of every micro-batch, computed without gradients.

        The output is None on stages before the last one and for micro-batches without rows. Heads read ``hidden`` by ``at_tokens``.
        All replicas must pass equally many micro-batches, some of which may have no rows. ``routers``: what chooses the experts of each
        micro-batch; without it, rows that have experts take those.
        """
        outputs: list[Any] = [None] * len(micro_batches)

        def run(action: Action, received: Tensor | None) -> Tensor | None:
            batch = micro_batches[action.micro_batch]

            def last(decoder: Decoder, hidden: Tensor) -> None:
                outputs[action.micro_batch] = head(decoder, hidden, batch) if len(batch.lengths) else None

            through = routers[action.micro_batch] if routers else None
            if through is None and batch.experts is not None:
                through = self.balance.begin(batch.lengths, batch.token_index, 0.0, batch.experts, counts=False)
            result: Tensor | None = self.pass_through(self.chunks[action.chunk], batch, received, last, through)
            return result

        def never(action: Action, received: Tensor | None) -> Tensor | None:
            raise AssertionError(f"{action} in a forward schedule")

        with torch.no_grad():
            self._run(schedule_forward, micro_batches, run, never)
        self.reshard()
        return outputs

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: MicroBatchLoss, row_weight: float = 0.0
    ) -> dict[str, Tensor]:
        """Add the gradients of the micro-batches' losses to those so far, in (interleaved) 1F1B over the pipeline.

        ``loss(decoder, hidden [T, hidden], micro_batch) -> (loss, stats)``. The loss is a scalar, already divided by the global count
        of its mini-batch over all replicas, so the gradient is the plain sum over micro-batches and replicas. Stats are scalars to
        sum. ``loss`` is also called for micro-batches without rows, of which only the stats count. All replicas must pass equally many
        micro-batches, because under ZeRO each has collectives over dp. ``row_weight``: factor of the load-balancing loss of each row,
        beside its coefficient.

        Return on the last stage the sums over this replica's micro-batches in float64, the loss as "loss"; {} on other stages.
        Gradients are complete only in :meth:`optimizer_step`. Until then further calls add to them.
        """
        assert self.optimizer is not None, "this engine was built without an optimizer"
        self._num_calls += 1
        passes = ForwardBackward(self, micro_batches, loss, row_weight)
        with torch.random.fork_rng(devices=()):  # seeds the dropout of adapters, alike on all tp ranks
            torch.default_generator.manual_seed(hash((*self._seeds, self.optimizer.step_count, self._num_calls)))
            self._run(schedule_1f1b, micro_batches, passes.forward, passes.backward)
        self.reshard()
        return passes.sums

    def _run(self, schedule: Schedule, batches: Sequence[MicroBatch], forward: StagePass, backward: StagePass) -> None:
        rows = [rows_of(max(len(batch.tokens), 1), self.mesh.cp) for batch in batches]
        shapes = [(self.chunks[0].num_rows(num_rows), self.spec.hidden_size) for num_rows in rows]
        run_pipeline(schedule, self.mesh, shapes, self.dtype, self.device, forward, backward)

    def pass_through(
        self,
        chunk: Decoder,
        batch: MicroBatch,
        received: Tensor | None,
        last: Callable[[Decoder, Tensor], Any],
        routers: Routers | None = None,
    ) -> Any:
        """Return the result of a chunk for one micro-batch. Without rows it is that of a single token, which nobody uses."""
        attention: Attention = PackedAttention(batch.lengths.tolist() or [1], self.device, self.attention, batch.token_index)
        if received is None:
            received = batch.tokens if len(batch.lengths) else batch.tokens.new_zeros(1)
            received = own_tokens(received, self.mesh.cp)
        return chunk(received, share_tokens(attention, self.mesh.cp), last, routers)

    # -- gradients and the optimizer step. Each gradient is summed over micro-batches by backward passes, over the shard group by ZeRO,
    # -- and once per step over tp ranks with partial gradients, tied stages and replicas. The norm counts each parameter once.

    def optimizer_step(self) -> dict[str, float]:
        """Clip by the global norm, update, and clear the gradients.

        Return ``grad_norm`` (before clipping), ``lr``, ``skipped_updates`` (0 or 1), and for models with experts the metrics of
        ``router_balance``. If all gradients are 0 there is nothing to learn, and the update is skipped: weight decay and momentum
        would move the weights.

        If the norm is not finite, raises FloatingPointError on every rank of the pool, before any parameter has changed.
        """
        assert self.optimizer is not None, "this engine was built without an optimizer"
        grads = self._summed_gradients()
        norm = self._gradient_norm(grads)
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm} at optimizer step {self.optimizer.step_count}")
        clip = self.optimizer.config.clip_grad
        if clip and norm > clip:
            torch._foreach_mul_(list(grads.values()), clip / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_'s constant
        lr = self.optimizer.step(self.trained_tensors(), grads) if norm else self.optimizer.skip()
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(not norm), **self.balance.report(self.mesh.pool)}

    @torch.no_grad()
    def _summed_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each local shard, summed over all ranks that contribute to it. Called once per step."""
        grads = {name: self._gradient(name, self._params[name]) for name in self.trained}
        sum_partial(grads, self._partial, self.mesh.tp)
        if self.lora is None and self.chunks[0].tied_across_stages and (self.mesh.first_stage or self.mesh.last_stage):
            end = "embed.weight" if self.mesh.first_stage else "head.weight"
            (tied,) = (name for name in grads if name.endswith(end))
            self.mesh.first_last_group.all_reduce(grads[tied], "tied_gradients")
        for group, part in replica_groups(grads, self._shards, self.mesh):
            sum_in_buckets(part, group, "gradients")
        return grads

    def _gradient(self, name: str, param: nn.Parameter) -> Tensor:
        wide = self._wide_grads.get(name)
        if wide is not None:
            return wide
        if param.grad is None:
            return torch.zeros_like(local_part(param), dtype=accumulation_dtype(self.dtype))
        return local_part(param.grad)

    @torch.no_grad()
    def _gradient_norm(self, grads: Mapping[str, Tensor]) -> float:
        """Return the 2-norm over all parameters of the model, each counted once, accumulated in float64."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for group, part in replica_groups(grads, self._shards, self.mesh):
            if group.rank == 0:  # copies hold equal gradients, so only the first one counts
                square += squared_norm(part, self._owned)
        return math.sqrt(float(self.mesh.pool.all_reduce(square, "grad_norm")))

    @torch.no_grad()
    def weights_finite(self) -> bool:
        """Return True if this rank's local shards are finite. No communication. On GPUs it waits for the work that was started."""
        return bool(squared_norm(self.local_tensors(), self._shards).isfinite())

    def _accumulate_wide(self) -> None:
        """Sum gradients of half-precision parameters over micro-batches in fp32."""
        for sharded in self.zeros:
            sharded.keep_reduced()
        by_chunk: Sequence[FSDPModel | None] = self.zeros or [None] * len(self.chunks)
        parts = zip(self.chunks, by_chunk, strict=True)
        zeros = named_by_chunk([dict.fromkeys(dict(chunk.named_parameters()), zero) for chunk, zero in parts])
        for name in self.trained:
            zero = zeros[name] if is_sharded(self._params[name]) else None
            self._params[name].register_post_accumulate_grad_hook(partial(self._keep_wide, name, zero))

    def _keep_wide(self, name: str, zero: FSDPModel | None, param: Tensor) -> None:
        if zero is not None:
            grad = zero.take_gradient(param)
        else:
            assert param.grad is not None, f"{name}: the hook ran without a gradient"
            grad, param.grad = param.grad, None
        if name in self._wide_grads:
            self._wide_grads[name] += grad
        else:
            self._wide_grads[name] = grad.float()

    def zero_grad(self) -> None:
        self._wide_grads.clear()
        self._num_calls = 0
        for param in self._params.values():
            param.grad = None

    # -- parameters of this rank

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return parameter name -> the parameter: a plain one, or under ZeRO FSDP2's DTensor over this rank's rows."""
        return self._params

    def param_shards(self) -> dict[str, ParamShard]:
        """Return parameter name -> shape and boxes of this rank's local shard, after ZeRO; also of quantized matrices."""
        return self._shards

    @torch.no_grad()
    def local_tensors(self) -> dict[str, Tensor]:
        """Return parameter name -> this rank's local shard, not a copy."""
        self.reshard()
        return {name: local_part(param) for name, param in self._params.items()}

    def trained_tensors(self) -> dict[str, Tensor]:
        """Return the :meth:`local_tensors` that an optimizer changes."""
        local = self.local_tensors()
        return {name: local[name] for name in self.trained}

    def reshard(self) -> None:
        """Free gathered parameters, so that only the local shards are left. No communication."""
        for zero in self.zeros:
            zero.reshard()


class ForwardBackward:
    """The passes of one ``TrainEngine.forward_backward``: tensors between a forward pass and its backward pass, and sums so far."""

    def __init__(self, engine: TrainEngine, batches: Sequence[MicroBatch], loss: MicroBatchLoss, row_weight: float) -> None:
        self._engine = engine
        self._batches = batches
        self._loss = loss
        self._row_weight = row_weight
        # (micro-batch, chunk) -> input and output of a forward pass whose backward pass has not run
        self._in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Return the output of a chunk for a micro-batch; None after the last layer."""
        chunk = self._engine.chunks[action.chunk]
        batch = self._batches[action.micro_batch]
        leaf = None if received is None else received.requires_grad_()
        routers = self._engine.balance.begin(batch.lengths, batch.token_index, self._row_weight, batch.experts)
        out = self._engine.pass_through(chunk, batch, leaf, partial(self._end, batch), routers)
        self._in_flight[action.micro_batch, action.chunk] = leaf, out
        return None if chunk.is_last else out.detach()

    def _end(self, batch: MicroBatch, decoder: Decoder, hidden: Tensor) -> Tensor:
        """Return the loss of a micro-batch, after the last layer."""
        empty = not len(batch.lengths)
        with torch.set_grad_enabled(not empty):
            value, stats = self._loss(decoder, hidden[:0] if empty else hidden, batch)
        for key, part in {"loss": value, **stats}.items():
            part = part.detach().double()
            self.sums[key] = self.sums[key] + part if key in self.sums else part
        assert empty or value.requires_grad, "the loss does not depend on the model's output"
        return zero_loss(decoder, hidden) if empty else value

    def backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Return the gradient of the input of a chunk for a micro-batch; None for the first chunk."""
        leaf, out = self._in_flight.pop((action.micro_batch, action.chunk))
        if self._engine.zeros:
            self._engine.zeros[action.chunk].before_backward(is_last=action.micro_batch == len(self._batches) - 1)
        torch.autograd.backward(out, received)
        return None if leaf is None else leaf.grad
