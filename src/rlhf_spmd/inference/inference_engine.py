"""The engine that generates with a model that is not trained, under ``LLM``, ``generate``, ``evaluate`` and ``serve``.

It distributes groups of rows over the replicas, generates as many at a time as keep the generator busy, and gathers results. It also
computes log-probs of prompts. ``score`` distributes and gathers its rows by the same functions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch

from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.rules import Rule, Rules, value_at
from rlhf_spmd.config.words import counted
from rlhf_spmd.data.balance import micro_batches_by_tokens, partition_by_tokens
from rlhf_spmd.data.tokenizer import decoding, load_tokenizer
from rlhf_spmd.generation import Completion, GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.pipeline_channels import connect_channels
from rlhf_spmd.inference.loaded_model import (
    CheckedModel,
    ModelConfig,
    ModelSourceConfig,
    base_directory,
    load_from_checkpoint,
    read_weights,
)
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.models.spec import ModelSpec, with_end_tokens
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.device_setup import choose_device
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World

IN_FLIGHT = 8  # a call of the generator gets this times generation.max_num_seqs rows, so that building its runner is worth it
RETURN_FRACTION = 0.5  # a call returns when this share of its groups has ended, so that others can follow before it lacks rows
RETURN_S = 60.0  # a call returns after these seconds in any case
OF_TRAINING = ("reshard_method", "buffers", "reuse_rollout_log_probs", "kv_cache")  # keys of ``generation``
Entries = list[list[tuple[int, float]]]  # for each token: itself and its log-prob, then the likeliest tokens and theirs


def _only(key: str, allowed: Any, why: str, remedy: str) -> Rule:
    return Rule((key,), lambda s: value_at(s, key) != allowed, why, remedy)


@dataclass(frozen=True)
class GeneratingConfig(ModelSourceConfig):
    """A model that generates in ``layout``."""

    rules: ClassVar[Rules] = (
        *(_only(f"generation.{axis}", 1, f"here layout.{axis} says it", "leave it out") for axis in ("pp", "tp")),
        *(
            _only(f"generation.{key}", getattr(GenerationConfig(), key), "nothing is trained here", "leave it out")
            for key in OF_TRAINING
        ),
        _only("layout.zero", 0, "nothing is trained here", "leave it out"),
        _only("layout.cp", 1, "generation does not split sequences", "leave it out"),
        _only("layout.ep", 1, "generation shares experts over layout.tp by generation.ep", "leave it out"),
        _only("layout.vpp", 1, "generation does not interleave stages", "leave it out"),
        _only("layout.sequence_parallel", False, "generation runs without it", "leave it out"),
    )

    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def check(self, where: str) -> None:
        self.generation.check_device("generation")


Config = TypeVar("Config", bound=GeneratingConfig)


def read_generating_model(
    config: Config,
    launch: Launch,
    needs_tokenizer: bool,
    template: str | None = None,
    tokenizer_path: str | None = None,
) -> CheckedModel[Config]:
    """Return the model that ``config`` names. Local: no communication. Raises ValueError or DataError, one line.

    ``template``: the chat template whose end token ends responses too, by default the tokenizer's. ``tokenizer_path``: its directory
    in place of the model's.
    """
    config, spec, layout, checkpoint = read_weights(config, launch, config.generation.ep)
    check_cache(spec, layout, config.generation, config.model, launch)
    tokenizer = load_tokenizer(tokenizer_path or config.model.path, required=needs_tokenizer)
    return CheckedModel(config, with_end_tokens(spec, tokenizer, template), layout, checkpoint, tokenizer)


def check_cache(spec: ModelSpec, layout: Layout, generation: GenerationConfig, model: ModelConfig, launch: Launch) -> None:
    """Raise ValueError if the device lacks memory for ``num_pages`` (at least one), or if there is no device."""
    device = choose_device(launch)
    num_pages = generation.num_pages or 1
    num_layers = -(-spec.num_hidden_layers // layout.pp)
    num_planes = 2 if spec.latent is None else 1
    num_values = min(num_planes * math.prod(cache_shape(kind, 0, layout.tp)) for kind in spec.kinds_of_heads())
    token_bytes = num_layers * num_values * model.torch_dtype(device).itemsize
    needed_bytes = num_pages * generation.page_size * token_bytes  # some backends' pages are larger
    device_bytes = total_bytes(device, launch.local_size)
    if needed_bytes > device_bytes:
        raise ValueError(
            f"generation.num_pages={generation.num_pages} and page_size={generation.page_size}: a rank needs "
            f"{needed_bytes / 2**30:.1f} GiB for {counted(num_pages, 'page')}, and its device has {device_bytes / 2**30:.1f}; "
            "lower them"
        )


def build_generator(loaded: CheckedModel[GeneratingConfig], world: World) -> Generator:
    """Return the generator of ``loaded`` with its weights.

    Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError.
    """
    config = loaded.config
    spec, layout = loaded.spec, loaded.layout
    device = world.device
    mesh = build_mesh(world, range(world.size), layout)
    dtype = config.model.torch_dtype(device)
    ep = layout.expert_parallel_generation
    decoder = Decoder(spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, dtype, device, expert_parallel_generation=ep)
    if (directory := base_directory(config.model.path, loaded.checkpoint)) is not None:
        load_pretrained(decoder, directory)
    weights = RoleState(decoder.shards, dict(decoder.named_parameters()))
    load_from_checkpoint(spec, weights, config.model.path, loaded.checkpoint, world)
    attention = choose_backend(config.generation.attention, config.model.attention, dtype, device, "generation.attention")
    generation = replace(config.generation, attention=attention)
    local_size = world.launch.local_size
    generator = Generator(decoder, mesh, generation, spec.eos_token_ids, decoding(loaded.tokenizer), local_size)
    mesh.tp.connect_nccl(device)
    connect_channels(mesh, device)
    # before any rank generates: the others must not wait in a collective for one that cannot load its weights
    world.all.barrier("generate:loaded")
    return generator


class InferenceEngine:
    """A loaded model on all ranks of ``world``. ``tick`` is called after each step of the generator.

    Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError.
    """

    def __init__(self, loaded: CheckedModel[GeneratingConfig], world: World, tick: Callable[[], None] = lambda: None) -> None:
        self.world = world
        self.tick = tick
        self.generator = build_generator(loaded, world)
        self.mesh = self.generator.mesh

    @property
    def leads(self) -> bool:
        """Return True on the first rank of a replica, which reports the completions that all its ranks have."""
        return self.mesh.replica.rank == 0

    def groups_of_replica(self, groups: Sequence[Sequence[Request]]) -> list[int]:
        """Return indices of the groups that this replica generates; tokens are balanced over replicas. Local.

        The longest rows come first: pages that are allocated for them have room for all that follow.
        """
        tokens = [len(group[0].prompt_ids) + sum(request.max_new_tokens for request in group) for group in groups]
        rows = [len(group[0].prompt_ids) + max(request.max_new_tokens for request in group) for group in groups]
        return sorted(rows_of_replica(tokens, self.mesh), key=lambda i: -rows[i])

    def complete(
        self,
        groups: Iterable[Sequence[Request]],
        sampling: SamplingConfig,
        seed: int,
        environments: Environments | None = None,
    ) -> Iterator[list[Completion]]:
        """Yield the completions of this replica's ``groups``, some at a time as they end. Raises NotFinite.

        Rows with environments end together. Collective over the replica: every rank of it must call, in program order, with the
        same arguments.
        """
        generator = self.generator
        waiting = deque(groups)
        generator.drop({row.request.row_id for row in generator.kept})  # of a call that was interrupted
        if environments is not None:
            requests = [request for group in waiting for request in group]
            yield generator.generate(requests, sampling, seed, 0, self.tick, environments if requests else None)
            return
        max_groups = max(IN_FLIGHT * generator.config.max_num_seqs // len(waiting[0]), 1) if waiting else 0
        limits = GenerationLimits(fraction=RETURN_FRACTION, seconds=RETURN_S)
        while waiting or generator.kept:
            room = max_groups - len({row.request.group_id for row in generator.kept})
            requests = [request for _ in range(min(room, len(waiting))) for request in waiting.popleft()]
            yield generator.generate_until(requests, sampling, seed, 0, limits, 0, self.tick)

    def prompt_entries(self, prompts: Sequence[Sequence[int]], num_likeliest: Sequence[int]) -> list[Entries]:
        """Return the entries of all tokens of the prompts but the first, at temperature 1, as training computes them.

        ``num_likeliest``: of each prompt. About as many tokens are computed at once as in a step of the generator.
        Collective over tp: every rank of it must call, in program order, with the same arguments.
        """
        decoder = self.generator.decoder
        device = decoder.head_weight.device
        lengths = [len(ids) for ids in prompts]
        max_tokens = max([self.generator.config.max_num_batched_tokens, *lengths])
        chunk = max(decoder.ops.chunk_logits // decoder.head_weight.shape[0], 64)
        entries_of_prompts: list[Entries] = [[] for _ in prompts]
        for indices in micro_batches_by_tokens(lengths, max_tokens):
            packed = torch.tensor([token for i in indices for token in prompts[i]], device=device)
            sizes = [lengths[i] for i in indices]
            with torch.no_grad():
                hidden = decoder(packed, PackedAttention(sizes, device))
            entries: Entries = []
            for states, labels in zip(hidden.split(chunk), packed.roll(-1).split(chunk), strict=True):
                logits = local_logits(decoder, states)
                likeliest = gather_logits(decoder, logits)[:, : self.generator.num_drawable].topk(max(num_likeliest)).indices
                ids = torch.cat([labels[:, None], likeliest], 1)
                values = log_probs_of(decoder, logits, ids)
                entries += [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
            for i, end in zip(indices, accumulate(sizes), strict=True):
                entries_of_prompts[i] = [entry[: 1 + num_likeliest[i]] for entry in entries[end - lengths[i] : end - 1]]
        return entries_of_prompts


def rows_of_replica(tokens: Sequence[int], mesh: Mesh) -> list[int]:
    """Return indices of the rows that this rank's replica computes. ``tokens``: of each row, balanced over replicas."""
    parts = partition_by_tokens(tokens, mesh.layout.dp)
    return [number for number, part in enumerate(parts.tolist()) if part == mesh.dp_rank]


def gather_records(world: World, records: Sequence[tuple[Any, Any]], label: str) -> list[tuple[Any, Any]] | None:
    """Return on rank 0 all ranks' records (position of a row, its result as JSON) by position; None elsewhere.

    Collective over the world: every rank of it must call, in program order.
    """
    parts = world.all.gather_json(records, label)
    return parts and sorted((record for part in parts for record in part), key=lambda record: record[0])
