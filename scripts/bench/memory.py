"""Memory of training and generation: by phase of a step, and over many steps.

    python scripts/bench/memory.py phases --model qwen2.5_0.5b:6 --out memory.json
    python scripts/bench/memory.py cycles --cycles 1000 --ranks 2 --out cycles.json

Models have random weights. Resident memory is the process's, from the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import MIB, join_world, machine_facts, memory_mib, on_ranks, reset_peak, run_parts, save, table
from rlhf_spmd.generation import GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec, read_spec
from rlhf_spmd.parallel.layout import Layout, generation_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.workers.objective import Packed
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.rank_shards import rank_shards
from rlhf_spmd.workers.train_engine import TrainEngine
from shapes import write_model


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later. ``uordblks``: bytes given out of heaps; ``hblkhd``: of blocks that were mapped."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def in_use_mib() -> float:
    """What the C library has handed out and not got back; 0 with other libraries than glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0.0
    library.mallinfo2.restype = MallInfo
    found = library.mallinfo2()
    return float(found.uordblks + found.hblkhd) / MIB


@dataclass(frozen=True)
class Actor:
    """A model that trains and, on each rank, generates with the whole of it."""

    spec: ModelSpec
    training: TrainEngine
    hybrid: HybridWeights
    generator: Generator


def build_engine(
    world: World, spec: ModelSpec, path: str | None, layout: Layout, optim: OptimConfig | None, **more: Any
) -> TrainEngine:
    mesh = build_mesh(world, range(world.size), layout)
    return TrainEngine(spec, path, "lm", mesh, optim, device=world.device, **more)


def build_actor(
    world: World, spec: ModelSpec, path: str | None, layout: Layout, settings: GenerationConfig, dtype: torch.dtype, **more: Any
) -> Actor:
    """Without a path the weights are random. Collective over the world: every rank of it must call, in program order."""
    training = build_engine(world, spec, path, layout, OptimConfig(lr=1e-4), dtype=dtype, **more)
    target = generation_layout(layout, 1, 1)
    mesh = build_mesh(world, range(world.size), target)
    decoder = Decoder(spec, "lm", 0, 1, mesh.tp, dtype, "meta", blocks=target.blocks)
    decoder.requires_grad_(False)
    method = choose_method("zero_redundancy", target)
    gather = world.group(method.gather_ranks(target, world.rank), "gather", channel="gather")
    assert gather is not None
    gather.connect()
    hybrid = HybridWeights(
        lambda pp, tp: rank_shards(spec, "lm", layout, pp, tp),
        training.parameters,
        decoder,
        lambda pp, tp: plan_params(spec, "lm", pp, 1, tp, 1, target.blocks),
        gather,
        method,
        target,
        mesh.index,
    )
    return Actor(spec, training, hybrid, Generator(decoder, mesh, settings, spec.eos_token_ids))


# By phase of a step

RANKS, ROWS, PROMPT, NEW = 2, 4, 128, 128  # rows per micro-batch
PHASES = ("load", "generate", "log_probs", "update", "step")


class Watch(threading.Thread):
    """The most that was in use from its start to :meth:`end`, MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._over = in_use_mib(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, in_use_mib())

    def end(self) -> float:
        self._over.set()
        self.join()
        return max(self.most, in_use_mib())


class Roles:
    """An actor and its reference; each method is a phase of a step."""

    def __init__(self, world: World, path: str) -> None:
        spec, layout, how = read_spec(path), Layout(dp=world.size, zero=3), {"activation_checkpointing": "full"}
        self.world, self.actor = world, build_actor(world, spec, None, layout, GenerationConfig(), torch.bfloat16, **how)
        self.reference = build_engine(world, spec, None, layout, None, dtype=torch.bfloat16, **how)
        rng = random.Random(world.rank)
        self.prompts = [[rng.randrange(3, spec.vocab_size) for _ in range(PROMPT)] for _ in range(2 * ROWS)]
        self.batches: list[Packed] = []

    def generate(self) -> None:
        first = self.world.rank * len(self.prompts)
        rows = [Request(first + i, first + i, prompt, NEW, NEW) for i, prompt in enumerate(self.prompts)]
        self.actor.hybrid.to_generation()
        made = self.actor.generator.generate(rows, SamplingConfig(), 0, 0)
        self.actor.hybrid.to_training()
        texts = [[*prompt, *row.token_ids] for prompt, row in zip(self.prompts, made, strict=True)]
        self.batches = [pack(part) for part in (texts[:ROWS], texts[ROWS:])]

    def log_probs(self) -> None:
        def logs(decoder: Decoder, hidden: Tensor, batch: Packed) -> Tensor:
            return token_log_probs(decoder, hidden, batch.tokens.roll(-1))[0]

        for engine in (self.actor.training, self.reference):
            engine.forward(self.batches, logs)

    def update(self) -> None:
        self.actor.training.forward_backward(self.batches, partial(mean_loss, entropies=True))

    def step(self) -> None:
        self.actor.training.optimizer_step()


def pack(texts: list[list[int]]) -> Packed:
    return Packed(torch.tensor([token for text in texts for token in text]), torch.tensor([len(text) for text in texts]))


def mean_loss(decoder: Decoder, hidden: Tensor, batch: Packed, entropies: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, entropy = token_log_probs(decoder, hidden, batch.tokens.roll(-1), 1.0, entropy=entropies)
    return -log_probs.mean(), {} if entropy is None else {"entropy": entropy.detach().sum()}


def predict(roles: Roles) -> dict[str, dict[str, float]]:
    """MiB by phase and by what they hold: at rest 2 bytes of weights for each parameter of both roles, 12 of the actor's master
    weights and moments; and what the phase adds."""
    actor, world, tokens = roles.actor, roles.world.size, ROWS * (PROMPT + NEW)
    spec = actor.spec
    shard = sum(tensor.numel() for tensor in actor.training.local_tensors().values())
    whole = sum(param.numel() for param in actor.training.parameters().values())  # a DTensor counts all of its elements
    embedding = spec.vocab_size * spec.hidden_size
    layer = (whole - embedding) / spec.num_hidden_layers
    cache = 2 * len(roles.prompts) * (PROMPT + NEW) * spec.num_hidden_layers * 2 * spec.num_key_value_heads * spec.head_dim
    logits = 4 * max(BatchInvariantOps.chunk_logits, 64 * spec.vocab_size)
    inner = 2 * tokens * (4 * spec.hidden_size + 6 * spec.num_attention_heads * spec.head_dim + 3 * spec.intermediate_size)
    gathered = 2 * embedding + 2 * 2 * layer
    phases: dict[str, dict[str, float]] = {
        "load": {"one tensor in fp32": 4 * embedding},
        "generate": {"generation shard": 2 * whole - 2 * shard, "bucket": actor.hybrid.bucket_bytes, "KV cache": cache},
        "log_probs": {"gathered": gathered, "its buffer": 2 * embedding, "logits": logits},
        "update": {
            "gradients": 4 * shard,
            "gathered": gathered,
            "activations": 2 * tokens * spec.hidden_size * spec.num_hidden_layers + 2 * inner,
            "a micro-batch's gradient": 2 * embedding,
            "its reduction in fp32": 4 * embedding + 4 * embedding / world,
            "its rounded copy, FSDP2's": 2 * embedding / world,
        },
        "step": {"gradients": 4 * shard},
    }
    rest = {"actor's weights": 2 * shard, "its optimizer": 12 * shard, "reference's weights": 2 * shard}
    return {name: {key: size / MIB for key, size in (rest | more).items()} for name, more in phases.items()}


def measure_phases(path: str) -> dict[str, Any]:
    world = join_world()
    before, used_before = memory_mib("VmRSS"), in_use_mib()
    measured: dict[str, tuple[float, float]] = {}

    def phase(name: str, body: Callable[[], Any]) -> Any:
        reset_peak()
        watch = Watch()
        result = body()
        used = watch.end() - used_before
        measured[name] = memory_mib("VmHWM") - before, used
        return result

    roles: Roles = phase("load", lambda: Roles(world, path))
    for name in PHASES[1:] * 2:
        phase(name, getattr(roles, name))
    peaks = torch.tensor([measured[name] for name in PHASES])
    world.all.all_reduce(peaks, "bench", "max")
    predicted = predict(roles)
    rows = zip(PHASES, peaks.tolist(), strict=True)
    return {name: {"parts": predicted[name], "measured": peak, "in_use": used} for name, (peak, used) in rows}


def phases(model: str = "qwen2.5_0.5b:6", out: Path | None = None) -> None:
    """An actor and its reference by phase of a step: what the formulas say, and what the process takes.

    Two ranks with ZeRO-3, bf16, full activation checkpointing, random weights: load both roles; generate; log-probs of both; forward
    and backward passes of two micro-batches; optimizer step; all but the first twice, of which the second counts. Resident is the peak
    of resident memory in the phase above that of the process when its groups are there and nothing else is. In use is the most that
    glibc's allocator had given out at a time, looked at every 5 ms; what is resident beyond it are blocks that were freed and stay in
    the heap, and pages of libraries. Each is that of the rank that has most.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "model", model, with_weights=False)
        found = on_ranks(RANKS, measure_phases, path=f"{directory}/model")
    for row in found.values():
        row |= {
            "mib": ", ".join(f"{key} {size:,.0f}" for key, size in row["parts"].items()),
            "predicted": sum(row["parts"].values()),
        }
    print(table([{"phase": name, **row} for name, row in found.items()], "phase mib predicted in_use measured"))
    save({"model": model, "machine": machine_facts(), "phases": found}, out)


# Over many steps

PROMPTS, MOST_NEW = 6, 24  # per cycle; tokens of a response


def cycle(actor: Actor, number: int, drain: bool) -> None:
    """Every rank with the same rows, as ranks of one training replica have them. ``drain``: no row goes on afterwards."""
    rng, generator, sampling = random.Random(number), actor.generator, SamplingConfig()
    prompts = [[rng.randrange(3, actor.spec.vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(PROMPTS)]
    rows = [Request(number * PROMPTS + i, number * PROMPTS + i, prompt, MOST_NEW) for i, prompt in enumerate(prompts)]
    actor.hybrid.to_generation()
    made = generator.generate(rows[::2], sampling, 0, number)
    texts = [[*row.prompt_ids, *done.token_ids] for row, done in zip(rows[::2], made, strict=True)]
    limits = GenerationLimits() if drain else GenerationLimits(fraction=0.5)
    ended = generator.generate_until(rows[1::2], sampling, 0, number, limits, number)
    generator.before_training()
    actor.hybrid.to_training()
    texts += [done.token_ids for done in ended if len(done.token_ids) > 1]
    actor.training.forward_backward([pack(texts)], mean_loss)
    actor.training.optimizer_step()


def live_storages() -> tuple[int, int]:
    """How many storages live tensors have, and their bytes."""
    gc.collect()
    found = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    sizes = {storage._cdata: storage.nbytes() for storage in found}
    return len(sizes), sum(sizes.values())


def slope(values: list[float]) -> float:
    """The slope per step of a least-squares line."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    square = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / square


def run_cycles(path: str, cycles: int, samples: int, settled: int) -> dict[str, Any] | None:
    world, began, spec = join_world(), time.perf_counter(), read_spec(path)
    kept, layout = GenerationConfig(page_size=8, kv_cache="offload"), Layout(tp=world.size)
    actor = build_actor(world, spec, path, layout, kept, torch.float32, total_updates=1 << 20)
    used: dict[str, list[float]] = {"resident": [], "heap": []}
    storages: list[tuple[int, int]] = []
    every = max(cycles // samples, 1)
    for number in range(cycles):
        drain = (number + 1) % every == 0
        cycle(actor, number, drain)
        if drain:
            storages.append(live_storages())
        used["resident"].append(memory_mib("VmRSS"))
        used["heap"].append(in_use_mib())
    row: dict[str, Any] = {"rank": world.rank, "cycles": cycles, "seconds": round(time.perf_counter() - began, 1)}
    for name, values in used.items():
        row[f"{name}_mib"] = [round(values[i], 1) for i in (0, settled, -1)]
        row[f"{name}_kib_per_cycle"] = round(1024 * slope(values[settled:]), 3)
    numbers, sizes = zip(*storages[len(storages) * settled // cycles :], strict=True)
    row |= {"storages": [min(numbers), max(numbers)], "bytes_in_them": [min(sizes), max(sizes)]}
    parts = world.all.gather_bytes(json.dumps(row).encode(), "bench")
    return None if parts is None else {"rows": [json.loads(part) for part in parts]}


def cycles(cycles: int = 1000, samples: int = 20, settled: int | None = None, ranks: int = 1, out: Path | None = None) -> None:
    """Memory over many generate/train cycles: resident memory and live tensors, with a line through them.

    Each cycle is a step of RLHF on a small model: to the generation layout, responses for new prompts, of which some go on in the next
    cycle with pages that wait in host memory meanwhile, back to the training layout, and an optimizer step on the responses. With 2
    ranks training slices the model in two and each rank generates with a whole one, so that all weights move twice per cycle.

    Resident memory (of the process, from the kernel) and what the C library has handed out and not got back (``heap``) are read after
    every cycle; the first one also holds what lies free between the blocks of the second. Live tensors are the storages that any tensor
    of the process refers to; they are counted at ``--samples`` moments, with no row in flight. The lines are least-squares fits over
    the cycles after the first ``--settled``, a fifth unless it is given.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "model", "tiny", with_weights=True)
        case = {"cycles": cycles, "samples": samples, "settled": settled or cycles // 5}
        rows = on_ranks(ranks, run_cycles, path=f"{directory}/model", **case)["rows"]
    memory = "resident_mib resident_kib_per_cycle heap_mib heap_kib_per_cycle"
    print(table(rows, f"rank cycles seconds {memory} storages bytes_in_them"))
    save({"bench": "cycles", "machine": machine_facts(), "rows": rows}, out)


if __name__ == "__main__":
    run_parts(phases, cycles)
