"""Measures on this machine the times that plans use: single layers, decode steps, the optimizer's update, links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.kernels import capabilities, wait
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.machine import GIB, Gpu
from rlhf_spmd.planner.memory import RESERVE, RankMemory, RoleSettings
from rlhf_spmd.planner.profile import LayerTimes, Profile, sizes_of
from rlhf_spmd.planner.shapes import Workload, call_settings, shape_of
from rlhf_spmd.workers.flops import matmul_rate
from rlhf_spmd.workers.objective import MicroBatch, pack_rows, response_log_probs, response_values
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.train_engine import TrainEngine

# The difference between the times of two models with so many layers gives the time of a layer.
BASE_LAYERS = 1
LARGER_LAYERS = (5, 3, 2)  # tried in this order; the first that fits
NEW_TOKENS = 24  # tokens that a decode measurement generates
REPEATS = 5  # runs of a measurement, of which the median counts: a plan predicts usual steps, not the fastest
MESSAGE_ELEMENTS = 1 << 22


def profile(
    world: World, models: Mapping[tuple[ModelSpec, str], GenerationConfig], work: Workload, max_tokens: int, dtype: torch.dtype
) -> Profile:
    """Return measured times, for each tp up to the ranks of a host. ``models``: models with their heads -> generation settings.

    Rows are as long as those of ``work``; micro-batches have up to ``max_tokens`` tokens. All ranks compute at the same time,
    as in a run. Collective over the world: every rank of it must call, in program order.
    """
    memory = torch.tensor([_memory(world)], dtype=torch.float64, device=world.device)
    device_memory = float(world.all.all_reduce(memory, "profile", "min"))  # all ranks measure the same
    profiler = LayerProfiler(world, work, max_tokens, dtype, device_memory)
    measured: dict[tuple[str, int], tuple[LayerTimes, float]] = {}
    for (spec, head), generation in models.items():
        sizes = sizes_of(shape_of(spec, head))
        for tp in (1 << power for power in range(world.launch.local_size.bit_length())):
            if world.size % tp == 0 and fits(spec, tp) and (sizes, tp) not in measured:
                num_layers = min(profiler.max_layers(kind, head, tp, max_tokens) for kind, _ in kinds(spec))
                if num_layers > BASE_LAYERS:
                    measured[sizes, tp] = profiler.measure(spec, head, tp, generation, num_layers)
    if not measured:
        raise ValueError(
            f"plan profile: {LARGER_LAYERS[-1]} layers of no model fit into a device of {device_memory / GIB:.1f} GiB, in no tp; "
            "use more ranks"
        )
    layer_times, updates = zip(*measured.values(), strict=True)
    device = _device(profiler)
    zero = profiler.zero(*next(iter(models))) if world.size > 1 else ([0.0] * 4, 0.0)
    return Profile(device, world.size, device.latency, sum(updates) / len(updates), *zero, layer_times)


def _device(profiler: LayerProfiler) -> Gpu:
    """Return the device with measured rates."""
    world = profiler.world
    seconds = profiler.seconds
    message = torch.zeros(MESSAGE_ELEMENTS, device=world.device)
    latency = 0.0
    link = 1e12
    if world.size > 1:
        small = torch.zeros(8, device=world.device)
        large, latency = (seconds(partial(world.all.all_reduce, x, "profile")) for x in (message, small))
        link = 2 * (world.size - 1) / world.size * 4 * MESSAGE_ELEMENTS / max(large - latency, 1e-9)
    has_streams = capabilities(world.device).streams
    on_host = torch.empty(MESSAGE_ELEMENTS, pin_memory=capabilities(world.device).pinned)
    return Gpu(
        flops=matmul_rate(world.device, profiler.dtype, world.launch.local_size),
        memory=profiler.device_memory,
        bandwidth=8 * MESSAGE_ELEMENTS / seconds(lambda: message.add_(1.0)),
        link=link,
        host_link=4 * MESSAGE_ELEMENTS / seconds(lambda: message.copy_(on_host, non_blocking=True)),
        latency=latency,
        itemsize=profiler.dtype.itemsize,
        overlap=1.0 if has_streams else 0.0,
        on_host=not has_streams,
        groups_experts=has_streams and torch.cuda.get_device_capability(world.device)[0] in (9, 10),
    )


def fits(spec: ModelSpec, tp: int) -> bool:
    """Return True if the model can be split over ``tp`` ranks."""
    try:
        check_layout(spec, "", tp=tp)
    except ValueError:
        return False
    return True


def kinds(spec: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """Return a model for each kind of layers that take different times, with only the layers of this kind, and their number.

    Kinds differ in window, linear attention or experts.
    """
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for layer in range(spec.num_hidden_layers):
        kind = spec.attention_rule(layer).window, spec.linear_attention_at(layer) is None, spec.experts_at(layer) is None
        by_kind.setdefault(kind, []).append(layer)
    return [(_uniform_model(spec, layers[0], len(layers)), len(layers)) for layers in by_kind.values()]


def _uniform_model(spec: ModelSpec, layer: int, count: int) -> ModelSpec:
    """Return the model with ``count`` layers, all like the one with the global index ``layer``."""
    delta = spec.linear_attention_at(layer)
    experts = spec.experts_at(layer)
    return replace(
        spec,
        num_hidden_layers=count,
        windows=spec.windows[layer : layer + 1] * count,
        unrotated=tuple(range(count)) if layer in spec.unrotated else (),
        delta_rule=delta and replace(delta, layers=frozenset(range(count))),
        experts=experts and replace(experts, dense_layers=()),
    )


def _memory(world: World) -> float:
    """Return the bytes of a device, or a rank's part of the host's memory."""
    if capabilities(world.device).streams:
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.launch.local_size


@dataclass(frozen=True)
class LayerProfiler:
    """Measures layers with rows as long as those of ``work``, in micro-batches of up to ``max_tokens`` tokens.

    ``device_memory``: bytes of a device. Methods that compute are collective over the world: every rank of it must call, in
    program order.
    """

    world: World
    work: Workload
    max_tokens: int
    dtype: torch.dtype
    device_memory: float

    def max_layers(self, spec: ModelSpec, head: str, tp: int, max_tokens: int) -> int:
        """Return the largest number of :data:`LARGER_LAYERS` with which training fits the device, or 0."""
        settings = call_settings([(1, tp, 1)], micro_tokens=(max_tokens,))
        role = RoleSettings(trained=True, itemsize=self.dtype.itemsize)
        for num_layers in LARGER_LAYERS:
            rank = RankMemory(shape_of(_uniform_model(spec, 0, num_layers), head), settings, role, 0)
            parts = (*rank.resident().values(), *rank.train(replace(self.work, mini_batches=1)).values())
            if np.max(sum(parts)) + RESERVE < self.device_memory:
                return num_layers
        return 0

    def measure(
        self, spec: ModelSpec, head: str, tp: int, generation: GenerationConfig, num_layers: int
    ) -> tuple[LayerTimes, float]:
        """Return times of an average layer, and seconds of the update per parameter.

        ``num_layers``: layers of the larger model of each kind.
        """
        work = self.work
        length = round(work.length)
        counts = _powers(max(min(self.max_tokens // length, work.rows), 1))
        rows = _powers(min(work.rows, generation.max_num_seqs))
        layer: dict[str, Any] = {}
        ends: dict[str, Any] = {}
        updates = 0.0
        for kind, number in kinds(spec):
            share = number / spec.num_hidden_layers
            base, _ = self._model_times(_uniform_model(kind, 0, BASE_LAYERS), head, tp, generation, counts, rows)
            larger, update = self._model_times(_uniform_model(kind, 0, num_layers), head, tp, generation, counts, rows)
            for name in base:
                layer_seconds, end_seconds = _layer_and_ends(np.array(base[name]), np.array(larger[name]), num_layers)
                layer[name] = layer.get(name, 0.0) + share * layer_seconds
                ends[name] = ends.get(name, 0.0) + share * end_seconds
            updates += share * update
        tokens = np.array(counts) * work.length
        layer_times = LayerTimes(
            sizes_of(shape_of(spec, head)),
            tp,
            tokens=tokens.tolist(),
            layer_tokens=work.tokens_through_layers(tokens).tolist(),
            forward=layer["forward"].tolist(),
            both=layer["both"].tolist(),
            forward_ends=ends["forward"].tolist(),
            both_ends=ends["both"].tolist(),
            rows=[float(count) for count in rows],
            decode=layer["decode"].tolist(),
            decode_ends=ends["decode"].tolist(),
            context=work.prompt + work.response / 2,
        )
        return layer_times, updates

    def _model_times(
        self, spec: ModelSpec, head: str, tp: int, generation: GenerationConfig, counts: list[int], rows: list[int]
    ) -> tuple[dict[str, list[float]], float]:
        """Return the times of a model, and seconds of the update per parameter. The model is deleted afterwards."""
        world = self.world
        first = world.rank // tp * tp  # each tp group by itself: no sums over dp in what is measured
        mesh = build_mesh(world, range(first, first + tp), Layout(tp=tp))
        engine = TrainEngine(spec, None, head, mesh, OptimConfig(lr=0.0), dtype=self.dtype, device=world.device)
        forward, both = zip(*(self._passes(engine, head, count) for count in counts), strict=True)
        numel = sum(tensor.numel() for tensor in engine.local_tensors().values())
        # a step without gradients is skipped
        update = self.seconds(engine.optimizer_step, 1, self._both_passes(engine, head, 1)) / numel
        decode = []
        if head == "lm":
            backend = choose_backend(generation.attention, engine.attention.name, self.dtype, world.device, "models")
            config = replace(generation, attention=backend, pp=1, tp=tp, num_pages=None)
            generator = Generator(engine.chunks[0].requires_grad_(False), mesh, config, (), None, world.launch.local_size)
            decode = [self._decode_seconds(generator, spec, count) for count in rows]
        return {"forward": [*forward], "both": [*both], "decode": decode}, update

    def zero(self, spec: ModelSpec, head: str) -> tuple[list[float], float]:
        """Return seconds per parameter that a micro-batch over all ranks takes longer with ZeRO.

        They are those of forward and backward with stages 0 to 3, and those of forward with stage 3.
        """
        forward = [0.0] * 4
        both = [0.0] * 4
        num_layers_of = [(kind, self.max_layers(kind, head, 1, round(self.work.length))) for kind, _ in kinds(spec)]
        fitting = [_uniform_model(kind, 0, num_layers) for kind, num_layers in num_layers_of if num_layers]
        if not fitting:  # a run cannot hold these models either
            return both, 0.0
        small = min(fitting, key=lambda model: shape_of(model, head).params)
        for stage in range(4):
            mesh = build_mesh(self.world, range(self.world.size), Layout(dp=self.world.size, zero=stage))
            engine = TrainEngine(small, None, head, mesh, OptimConfig(lr=0.0), dtype=self.dtype, device=self.world.device)
            forward[stage], both[stage] = self._passes(engine, head, 1)
        params = shape_of(small, head).params
        return [max(seconds - both[0], 0.0) / params for seconds in both], max(forward[3] - forward[0], 0.0) / params

    def _passes(self, engine: TrainEngine, head: str, rows: int) -> tuple[float, float]:
        """Return (forward, forward and backward) seconds of a micro-batch of ``rows`` rows."""
        outputs = partial(_outputs, head)
        forward = partial(engine.forward, [self._batch(engine, rows, engine.inference_min_saving)], outputs)
        return self.seconds(forward), self.seconds(self._both_passes(engine, head, rows))

    def _both_passes(self, engine: TrainEngine, head: str, rows: int) -> Callable[[], object]:
        """Return a function that passes a micro-batch of ``rows`` rows forward and backward."""
        return partial(engine.forward_backward, [self._batch(engine, rows)], partial(_loss, head))

    def _batch(self, engine: TrainEngine, rows: int, min_saving: float = 0.0) -> MicroBatch:
        """Return a micro-batch of ``rows`` rows, which share prompts as in a run; ``min_saving``: see ``pack_rows``."""
        work = self.work
        index = torch.arange(rows)
        prompt = max(round(work.prompt), 1)
        prompts = _tokens(engine.spec, -(-rows // work.group), prompt).repeat_interleave(work.group, dim=0)[:rows]
        responses = _tokens(engine.spec, rows, max(round(work.length) - prompt, 1))
        fields = {"prompt_ids": ragged([*prompts], torch.int64), "response_ids": ragged([*responses], torch.int64)}
        return pack_rows(Batch(index, index // work.group, fields), self.world.device, min_saving)

    def _decode_seconds(self, generator: Generator, spec: ModelSpec, rows: int) -> float:
        """Return seconds of a decode step of ``rows`` rows in the middle of their responses."""
        context = max(round(self.work.prompt + self.work.response / 2) - NEW_TOKENS // 2, 1)
        sampling = SamplingConfig(ignore_eos=True)

        def generate(tokens: int) -> None:
            prompts = _tokens(spec, rows, context).tolist()
            requests = [Request(i, i, prompt, tokens) for i, prompt in enumerate(prompts)]
            generator.generate(requests, sampling, 0, 0)

        first, all_tokens = (self.seconds(partial(generate, tokens)) for tokens in (1, 1 + NEW_TOKENS))
        return max(all_tokens - first, 1e-9) / NEW_TOKENS

    def seconds(self, body: Callable[[], object], repeats: int = REPEATS, before: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of the median of ``repeats`` runs, on the slowest rank. A first run does not count.

        ``before``: runs before each of them.
        """
        seconds: list[float] = []
        for _ in range(repeats + 1):
            before()
            self.world.all.barrier("profile")
            started = time.perf_counter()
            body()
            wait(self.world.device)
            seconds.append(time.perf_counter() - started)
        return float(self.world.all.all_reduce(torch.tensor([median(seconds[1:])]), "profile", "max"))


def _layer_and_ends(base: np.ndarray, larger: np.ndarray, num_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of a layer and of all that is outside the layers, for growing sizes, from those of two models.

    Differences of noisy times may shrink, or be below 0. Larger sizes take no less time, so both are made to grow; what is outside
    the layers keeps the mean of the two models' times.
    """
    layer = np.maximum(_growing((larger - base) / (num_layers - BASE_LAYERS)), 1e-9)
    outside = (base + larger - (BASE_LAYERS + num_layers) * layer) / 2
    return layer, np.maximum(_growing(outside), 0.0)


def _growing(values: np.ndarray) -> np.ndarray:
    """Return the values that never fall and are nearest to ``values`` by their squares: falling neighbours get their mean."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and mean(blocks[-2]) > mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.array([mean(block) for block in blocks for _ in block])


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below ``limit``, and ``limit``."""
    return [*(1 << i for i in range((limit - 1).bit_length())), limit]


def _tokens(spec: ModelSpec, *sizes: int) -> Tensor:
    """Return random tokens, the same on all ranks and in every call."""
    return torch.randint(spec.vocab_size, sizes, generator=torch.Generator().manual_seed(0))


def _outputs(head: str, decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> Tensor:
    """Return log-probs or values of the responses."""
    if head == "value":
        return response_values(decoder, hidden, batch)
    return response_log_probs(decoder, hidden, batch, 1.0)[0]


def _loss(head: str, decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of the responses."""
    if head == "value":
        return response_values(decoder, hidden, batch).square().mean(), {}
    log_probs, entropy = response_log_probs(decoder, hidden, batch, 1.0, True)
    assert entropy is not None
    return -log_probs.mean(), {"entropy": entropy.detach().sum()}
