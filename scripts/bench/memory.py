"""Memory of training and generation over many steps.

python scripts/bench/memory.py --cycles 1000 --ranks 2 --out cycles.json
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import MIB, join_world, machine_facts, memory_mib, on_ranks, run_parts, save, table
from rlhf_spmd.generation import GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.layout import Layout, generation_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.workers.objective import MicroBatch
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


def build_actor(world: World, path: str) -> Actor:
    """Collective over the world: every rank of it must call, in program order."""
    spec, layout, optim = read_spec(path), Layout(tp=world.size), OptimConfig(lr=1e-4)
    mesh = build_mesh(world, range(world.size), layout)
    training = TrainEngine(spec, path, "lm", mesh, optim, device=world.device, dtype=torch.float32, total_updates=1 << 20)
    target = generation_layout(layout, 1, 1)
    mesh = build_mesh(world, range(world.size), target)
    decoder = Decoder(spec, "lm", 0, 1, mesh.tp, torch.float32, "meta", fused_slices=target.fused_slices)
    decoder.requires_grad_(False)
    method = choose_method("zero_redundancy", target)
    gather = world.group(method.gather_ranks(target, world.rank), "gather", channel="gather")
    assert gather is not None
    gather.connect()
    hybrid = HybridWeights(
        lambda pp, tp: rank_shards(spec, "lm", layout, pp, tp),
        training.parameters,
        decoder,
        lambda pp, tp: plan_params(spec, "lm", pp, 1, tp, 1, target.fused_slices),
        gather,
        method,
        target,
        mesh.index,
    )
    settings = GenerationConfig(page_size=8, kv_cache="offload")
    return Actor(spec, training, hybrid, Generator(decoder, mesh, settings, spec.eos_token_ids))


def pack(texts: list[list[int]]) -> MicroBatch:
    return MicroBatch(torch.tensor([token for text in texts for token in text]), torch.tensor([len(text) for text in texts]))


def mean_loss(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, _ = token_log_probs(decoder, hidden, batch.tokens.roll(-1), 1.0)
    return -log_probs.mean(), {}


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
    world, began = join_world(), time.perf_counter()
    actor = build_actor(world, path)
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
    run_parts(cycles)
