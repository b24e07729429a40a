"""Measures the times that plans use, on this machine: single layers, decode steps, the optimizer's update, links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.kernels import capabilities, wait
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs, values
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.machine import GIB, Gpu
from rlhf_spmd.planner.memory import RESERVE, RoleSettings, held, train
from rlhf_spmd.planner.profile import LayerTimes, Profile, sizes_of
from rlhf_spmd.planner.shapes import Workload, call_settings, shape_of
from rlhf_spmd.workers.flops import matmul_rate
from rlhf_spmd.workers.objective import Packed
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.train_engine import TrainEngine

FEW, MORE = 1, (5, 3, 2)  # layers of two models whose difference gives the time of a layer; the most that fit
NEW_TOKENS, REPEATS = 24, 3
MESSAGE = 1 << 22  # elements


def profile(
    world: World, models: Mapping[tuple[ModelSpec, str], GenerationConfig], work: Workload, max_tokens: int, dtype: torch.dtype
) -> Profile:
    """Measures models with their heads and generation settings, in all tp up to the ranks of a host.

    Rows are as long as those of ``work``; micro-batches have up to ``max_tokens`` tokens. All ranks compute at the same time,
    as in a run. Collective over the world: every rank of it must call, in program order.
    """
    measured: dict[tuple[str, int], tuple[LayerTimes, float]] = {}
    own = torch.tensor([_memory(world)], dtype=torch.float64, device=world.device)
    room = float(world.all.all_reduce(own, "profile", "min"))  # all ranks measure the same
    for (spec, head), generation in models.items():
        sizes = sizes_of(shape_of(spec, head))
        for tp in (1 << power for power in range(world.launch.local_size.bit_length())):
            if world.size % tp == 0 and fits(spec, tp) and (sizes, tp) not in measured:
                most = min(most_layers(one, head, tp, work, max_tokens, dtype, room) for one, _ in kinds(spec))
                if most > FEW:
                    measured[sizes, tp] = _measure(world, spec, head, tp, work, max_tokens, dtype, generation, most)
    if not measured:
        raise ValueError(
            f"plan profile: {MORE[-1]} layers of no model fit into a device of {room / GIB:.1f} GiB, in no tp; use more ranks"
        )
    layers, updates = zip(*measured.values(), strict=True)
    message, small = (torch.zeros(size, device=world.device) for size in (MESSAGE, 8))
    of_large, latency = (
        _seconds(world, partial(world.all.all_reduce, x, "profile")) if world.size > 1 else 0.0 for x in (message, small)
    )
    link = 2 * (world.size - 1) / world.size * 4 * MESSAGE / max(of_large - latency, 1e-9) if world.size > 1 else 1e12
    rate = matmul_rate(world.device, dtype, world.launch.local_size)
    bandwidth = 8 * MESSAGE / _seconds(world, lambda: message.add_(1.0))
    has_streams = capabilities(world.device).streams
    on_host = torch.empty(MESSAGE, pin_memory=capabilities(world.device).pinned)
    host_link = 4 * MESSAGE / _seconds(world, lambda: message.copy_(on_host, non_blocking=True))
    groups_experts = has_streams and torch.cuda.get_device_capability(world.device)[0] in (9, 10)
    device = Gpu(
        rate,
        room,
        bandwidth,
        link,
        host_link,
        latency,
        dtype.itemsize,
        1.0 if has_streams else 0.0,
        not has_streams,
        groups_experts,
    )
    zero = _zero(world, *next(iter(models)), work, dtype, room) if world.size > 1 else ([0.0] * 4, 0.0)
    return Profile(device, world.size, latency, sum(updates) / len(updates), *zero, layers)


def fits(spec: ModelSpec, tp: int) -> bool:
    try:
        check_layout(spec, 1, tp, "")
    except ValueError:
        return False
    return True


def kinds(spec: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """The kinds of layers that take different times, by window, linear attention and experts: models that have only layers of a kind,
    as many as the model has of it; and their number."""
    layers: dict[tuple[object, ...], list[int]] = {}
    for layer in range(spec.num_hidden_layers):
        kind = spec.attention_rule(layer).window, spec.delta_of(layer) is None, spec.experts_of(layer) is None
        layers.setdefault(kind, []).append(layer)
    return [(_alike(spec, of_kind[0], len(of_kind)), len(of_kind)) for of_kind in layers.values()]


def _alike(spec: ModelSpec, layer: int, count: int) -> ModelSpec:
    """The model with ``count`` layers like this one, by its global index."""
    delta, experts = spec.delta_of(layer), spec.experts_of(layer)
    return replace(
        spec,
        num_hidden_layers=count,
        windows=spec.windows[layer : layer + 1] * count,
        unrotated=tuple(range(count)) if layer in spec.unrotated else (),
        delta=delta and replace(delta, layers=frozenset(range(count))),
        experts=experts and replace(experts, dense_layers=()),
    )


def _memory(world: World) -> float:
    """Bytes of a device, or a rank's part of the host's memory."""
    if capabilities(world.device).streams:
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.launch.local_size


def most_layers(spec: ModelSpec, head: str, tp: int, work: Workload, max_tokens: int, dtype: torch.dtype, room: float) -> int:
    """The largest number of :data:`MORE` of which the model trains in ``room`` bytes, or 0."""
    one, role = call_settings([(1, tp, 1)], micro_tokens=(max_tokens,)), RoleSettings(trained=True, itemsize=dtype.itemsize)
    for layers in MORE:
        shape = shape_of(_alike(spec, 0, layers), head)
        parts = (*held(shape, one, role, 0).values(), *train(shape, replace(work, mini_batches=1), one, role, 0).values())
        if max(sum(parts)) + RESERVE < room:
            return layers
    return 0


def _measure(
    world: World,
    spec: ModelSpec,
    head: str,
    tp: int,
    work: Workload,
    max_tokens: int,
    dtype: torch.dtype,
    generation: GenerationConfig,
    most: int,
) -> tuple[LayerTimes, float]:
    """Times of an average layer, and seconds of the update per parameter. ``most``: layers of the larger model of each kind."""
    first = world.rank // tp * tp  # each tp group by itself: no sums over dp in what is measured
    mesh = build_mesh(world, range(first, first + tp), Layout(tp=tp))
    length = round(work.length)
    counts = _powers(max(min(max_tokens // length, work.rows), 1))
    rows = _powers(min(max(work.rows * tp // world.size, 1), generation.max_num_seqs))

    def times(spec: ModelSpec) -> tuple[dict[str, list[float]], float]:
        """Times of this model, which is deleted afterwards."""
        engine = TrainEngine(spec, None, head, mesh, OptimConfig(lr=0.0), dtype=dtype, device=world.device)
        forward, both = zip(*(_passes(world, engine, head, work, count) for count in counts), strict=True)
        taken: dict[str, list[float]] = {"forward": [*forward], "both": [*both], "decode": []}
        own = sum(tensor.numel() for tensor in engine.local_tensors().values())
        # a step without gradients is skipped
        update = _seconds(world, engine.optimizer_step, 1, _both_passes(world, engine, head, work, 1)) / own
        if head == "lm":
            backend = choose_backend(generation.attention, engine.attention.name, dtype, world.device, "models")
            config = replace(generation, attention=backend, pp=1, tp=tp, num_pages=None)
            generator = Generator(engine.chunks[0].requires_grad_(False), mesh, config, (), None, world.launch.local_size)
            taken["decode"] = [_decoding(world, generator, spec, work, count) for count in rows]
        return taken, update

    layer, ends, updates = dict[str, Any](), dict[str, Any](), 0.0
    for one, number in kinds(spec):
        share = number / spec.num_hidden_layers
        (few, _), (more, update) = times(_alike(one, 0, FEW)), times(_alike(one, 0, most))
        for name in few:
            a, b = np.array(few[name]), np.array(more[name])
            each = np.maximum(b - a, 1e-9) / (most - FEW)
            layer[name] = layer.get(name, 0.0) + share * each
            ends[name] = ends.get(name, 0.0) + share * np.maximum(a - FEW * each, 0.0)
        updates += share * update
    found = LayerTimes(
        sizes_of(shape_of(spec, head)),
        tp,
        [float(count * length) for count in counts],
        layer["forward"].tolist(),
        layer["both"].tolist(),
        ends["forward"].tolist(),
        ends["both"].tolist(),
        [float(count) for count in rows],
        layer["decode"].tolist(),
        ends["decode"].tolist(),
        work.prompt + work.response / 2,
    )
    return found, updates


def _zero(
    world: World, spec: ModelSpec, head: str, work: Workload, dtype: torch.dtype, room: float
) -> tuple[list[float], float]:
    """Seconds per parameter that a micro-batch over all ranks takes longer with ZeRO 0 to 3: forward and backward, and forward
    with 3."""
    forward, both = [0.0] * 4, [0.0] * 4
    few = [(one, most_layers(one, head, 1, work, round(work.length), dtype, room)) for one, _ in kinds(spec)]
    fitting = [_alike(one, 0, layers) for one, layers in few if layers]
    if not fitting:  # what no device could hold is not run so either
        return both, 0.0
    small = min(fitting, key=lambda one: shape_of(one, head).params)
    for stage in range(4):
        mesh = build_mesh(world, range(world.size), Layout(dp=world.size, zero=stage))
        engine = TrainEngine(small, None, head, mesh, OptimConfig(lr=0.0), dtype=dtype, device=world.device)
        forward[stage], both[stage] = _passes(world, engine, head, work, 1)
    params = shape_of(small, head).params
    return [max(seconds - both[0], 0.0) / params for seconds in both], max(forward[3] - forward[0], 0.0) / params


def _passes(world: World, engine: TrainEngine, head: str, work: Workload, rows: int) -> tuple[float, float]:
    """(forward, forward and backward) seconds of a micro-batch of so many rows."""
    forward = partial(engine.forward, [_batch(world, engine, work, rows)], partial(_outputs, head, work.response / work.length))
    return _seconds(world, forward), _seconds(world, _both_passes(world, engine, head, work, rows))


def _both_passes(world: World, engine: TrainEngine, head: str, work: Workload, rows: int) -> Callable[[], object]:
    """A function that passes such a micro-batch forward and backward."""
    loss = partial(_loss, head, work.response / work.length)
    return partial(engine.forward_backward, [_batch(world, engine, work, rows)], loss)


def _batch(world: World, engine: TrainEngine, work: Workload, rows: int) -> Packed:
    length = round(work.length)
    return Packed(_tokens(engine.spec, rows * length).to(world.device), torch.full((rows,), length))


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... below ``most``, and ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _decoding(world: World, generator: Generator, spec: ModelSpec, work: Workload, rows: int) -> float:
    """Seconds of a decode step of ``rows`` rows in the middle of their responses."""
    context = max(round(work.prompt + work.response / 2) - NEW_TOKENS // 2, 1)
    sampling = SamplingConfig(ignore_eos=True)

    def generate(tokens: int) -> None:
        prompts = _tokens(spec, rows, context).tolist()
        requests = [Request(i, i, prompt, tokens) for i, prompt in enumerate(prompts)]
        generator.generate(requests, sampling, 0, 0)

    one, more = (_seconds(world, partial(generate, tokens)) for tokens in (1, 1 + NEW_TOKENS))
    return max(more - one, 1e-9) / NEW_TOKENS


def _tokens(spec: ModelSpec, *sizes: int) -> Tensor:
    """Random tokens, the same on all ranks and in every call."""
    return torch.randint(spec.vocab_size, sizes, generator=torch.Generator().manual_seed(0))


def _outputs(head: str, share: float, decoder: Decoder, hidden: Tensor, batch: Packed) -> Tensor:
    """Log-probs or values of ``share`` of the tokens, as many as responses have."""
    asked = round(share * len(hidden))
    if head == "value":
        return values(decoder, hidden[:asked])
    return token_log_probs(decoder, hidden[:asked], batch.tokens[:asked])[0]


def _loss(head: str, share: float, decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    asked = round(share * len(hidden))
    if head == "value":
        return values(decoder, hidden[:asked]).square().mean(), {}
    log_probs, entropy = token_log_probs(decoder, hidden[:asked], batch.tokens[:asked], 1.0, entropy=True)
    assert entropy is not None
    return -log_probs.mean(), {"entropy": entropy.detach().sum()}


def _seconds(
    world: World, body: Callable[[], object], repeats: int = REPEATS, before: Callable[[], object] = lambda: None
) -> float:
    """The best seconds of ``repeats`` on the slowest rank, after a first run that does not count. ``before``: runs before each.

    Collective over the world: every rank of it must call, in program order.
    """
    best: Sequence[float] = []
    for _ in range(repeats + 1):
        before()
        world.all.barrier("profile")
        started = time.perf_counter()
        body()
        wait(world.device)
        best = [*best, time.perf_counter() - started]
    return float(world.all.all_reduce(torch.tensor([min(best[1:])]), "profile", "max"))
