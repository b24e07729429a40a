"""A model that is loaded to generate, and nothing else: what ``generate``, ``evaluate``, ``serve`` and ``LLM`` share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.schema import counted
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.generation import Completion, GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.pipeline_channels import connect_ways
from rlhf_spmd.inference.job import LoadedModel, ModelConfig, read_first, take_checkpoint
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import kv_heads_of
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.layout import Layout, LayoutConfig
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import Launch, World, choose_device

IN_FLIGHT = 8  # times generation.max_num_seqs rows are with the generator: each call builds its runner anew; graphs stay
ENDED = 0.5  # the share of their prompts that ends before rows are handed out and others follow, so that it never lacks any
HANDED_OUT_S = 60.0  # seconds after which those that have ended are handed out in any case


def check_generation(layout: LayoutConfig, generation: GenerationConfig) -> None:
    """Raises ValueError for what only training has, what ``generation`` says and ``layout`` says here, and what the device lacks."""
    for axis in ("pp", "tp"):
        if getattr(generation, axis) != 1:
            raise ValueError(f"generation.{axis}={getattr(generation, axis)}: here layout.{axis} says it; leave it out")
    usual = GenerationConfig()
    for key in ("engine", "buffers", "overlap", "exact", "kv_cache"):
        if (value := getattr(generation, key)) != getattr(usual, key):
            raise ValueError(f"generation.{key}={value}: nothing is trained here; leave it out")
    if layout.zero:
        raise ValueError(f"layout.zero={layout.zero}: nothing is trained here; allowed is 0")
    if layout.vpp != 1:
        raise ValueError(f"layout.vpp={layout.vpp}: generation does not interleave stages; allowed is 1")
    if layout.sequence_parallel:
        raise ValueError("layout.sequence_parallel=true: generation runs without it; allowed is false")
    generation.check_device("generation")


def check_cache(spec: ModelSpec, layout: Layout, generation: GenerationConfig, model: ModelConfig, launch: Launch) -> None:
    """Raises ValueError where the least cache that these settings allow is more than the device has, or there is no device."""
    device, pages = choose_device(launch), generation.num_pages or 1
    heads, layers = len(kv_heads_of(spec, 0, layout.tp)), -(-spec.num_hidden_layers // layout.pp)
    token = 2 * layers * heads * spec.head_dim * model.torch_dtype(device).itemsize
    needed = pages * generation.page_size * token  # some backends' pages are larger
    there = total_bytes(device, launch.local_size)
    if needed > there:
        raise ValueError(
            f"generation.num_pages={generation.num_pages} and page_size={generation.page_size}: a rank needs "
            f"{needed / 2**30:.1f} GiB for {counted(pages, 'page')}, and its device has {there / 2**30:.1f}; lower them"
        )


def build_generator(ready: LoadedModel, world: World) -> Generator:
    """On all ranks, with its weights. ``config`` of ``ready`` has ``generation``, too.

    Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError.
    """
    config, layout = ready.config, ready.layout
    mesh, dtype = build_mesh(world, range(world.size), layout), config.model.torch_dtype(world.device)
    decoder = Decoder(ready.spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, dtype, world.device)
    if (directory := read_first(config.model.path, ready.checkpoint)) is not None:
        load_pretrained(decoder, directory)
    held = RoleState(decoder.shards, dict(decoder.named_parameters()))
    take_checkpoint(ready.spec, held, config.model.path, ready.checkpoint, world)
    backend = choose_backend(config.generation.attention, config.model.attention, dtype, world.device, "generation.attention")
    generation = replace(config.generation, attention=backend)
    ends, size = ready.spec.eos_token_ids, world.launch.local_size
    generator = Generator(decoder, mesh, generation, ends, decoding(ready.tokenizer), size)
    mesh.tp.meet(world.device)
    connect_ways(mesh, world.device)
    # before any rank generates: one that cannot load its weights must not leave the others in a collective for long
    world.all.barrier("generate:loaded")
    return generator


def generate_in_parts(
    generator: Generator,
    waiting: deque[list[Request]],
    sampling: SamplingConfig,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[list[Completion]]:
    """The completions of ``waiting``, the requests of each prompt, as they end; so many at a time as keep the generator busy.

    Collective over the replica: every rank of it must call, in program order, with the same arguments.
    """
    most = max(IN_FLIGHT * generator.config.max_num_seqs // len(waiting[0]), 1) if waiting else 0
    while waiting or generator.kept:
        room = most - len({row.request.group_id for row in generator.kept})
        groups = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        requests = [request for group in groups for request in group]
        limits = GenerationLimits(fraction=ENDED, seconds=HANDED_OUT_S)
        yield generator.generate_until(requests, sampling, seed, 0, limits, 0, tick)
