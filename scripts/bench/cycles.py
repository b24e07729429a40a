"""Memory over many generate/train cycles: resident memory and live tensors, with a line through them.

    python scripts/bench/cycles.py --cycles 1000 --ranks 2 --out cycles.json

Each cycle is a step of RLHF on a small model: to the generation layout, responses for new prompts, of which some go on in the next
cycle with pages that wait in host memory meanwhile, back to the training layout, and an optimizer step on the responses. With 2
ranks training slices the model in two and each rank generates with a whole one, so that all weights move twice per cycle.

Resident memory (of the process, from the kernel) and what the C library has handed out and not got back (``heap``) are read after
every cycle; the first one also holds what lies free between the blocks of the second. Live tensors are the storages that any tensor
of the process refers to; they are counted at ``--samples`` moments, with no row in flight. The lines are least-squares fits over the
last four fifths of the cycles.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import machine_facts, memory_mib, on_ranks, table
from rlhf_spmd.generation import GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.sharding import ParamShard, plan_params
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout, generation_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.process.ending import end_process
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.workers.engine import Packed, TrainEngine
from rlhf_spmd.workers.optim_config import OptimConfig

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
PROMPTS, MOST_NEW = 6, 24  # per cycle; tokens of a response
SETTINGS = GenerationConfig(page_size=8, kv_cache="offload")


class Actor:
    """A model that trains and generates on all ranks."""

    def __init__(self, world: World, path: str) -> None:
        spec, ranks, layout = read_spec(path), range(world.size), Layout(tp=world.size)
        target = generation_layout(layout, 1, 1)
        mesh = build_mesh(world, ranks, target)
        options: dict[str, Any] = {"dtype": torch.float32, "device": world.device, "total_updates": 1 << 20}
        self.training = TrainEngine(spec, path, "lm", build_mesh(world, ranks, layout), OptimConfig(lr=1e-4), **options)
        decoder = Decoder(spec, "lm", 0, 1, mesh.tp, torch.float32, torch.device("meta"), blocks=target.blocks)
        decoder.requires_grad_(False)
        method = choose_method("zero_redundancy", target)
        gather = world.group(method.gather_ranks(target, world.rank), "gather", channel="gather")
        assert gather is not None
        gather.connect()

        def shards(pp: int, tp: int) -> dict[str, ParamShard]:
            return plan_params(spec, "lm", pp, layout.pp, tp, layout.tp)

        def held(pp: int, tp: int) -> dict[str, ParamShard]:
            return plan_params(spec, "lm", pp, target.pp, tp, target.tp, target.blocks)

        self.hybrid = HybridWeights(shards, self.training.parameters, decoder, held, gather, method, target, mesh.index)
        self.generator = Generator(decoder, mesh, SETTINGS, spec.eos_token_ids)

    def cycle(self, number: int, drain: bool) -> None:
        """Every rank with the same rows, as ranks of one training replica have them. ``drain``: no row goes on afterwards."""
        rng, generator, sampling = random.Random(number), self.generator, SamplingConfig()
        prompts = [[rng.randrange(3, 301) for _ in range(rng.randint(1, 40))] for _ in range(PROMPTS)]
        rows = [Request(number * PROMPTS + i, number * PROMPTS + i, prompt, MOST_NEW) for i, prompt in enumerate(prompts)]
        self.hybrid.to_generation()
        made = generator.generate(rows[::2], sampling, 0, number)
        texts = [[*row.prompt_ids, *done.token_ids] for row, done in zip(rows[::2], made, strict=True)]
        limits = GenerationLimits() if drain else GenerationLimits(fraction=0.5)
        ended = generator.generate_until(rows[1::2], sampling, 0, number, limits, number)
        generator.before_training()
        self.hybrid.to_training()
        texts += [done.token_ids for done in ended if len(done.token_ids) > 1]
        tokens, lengths = torch.tensor([token for text in texts for token in text]), torch.tensor([len(text) for text in texts])

        def loss(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, _ = token_log_probs(decoder, hidden, batch.tokens.roll(-1), 1.0)
            return -log_probs.mean(), {}

        self.training.forward_backward([Packed(tokens, lengths)], loss)
        self.training.optimizer_step()


def live_storages() -> tuple[int, int]:
    """Number and bytes."""
    gc.collect()
    found = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    sizes = {storage._cdata: storage.nbytes() for storage in found}
    return len(sizes), sum(sizes.values())


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in (*"abcd", "mapped", "e", "f", "used", "g", "h")
    )  # glibc's struct mallinfo2


def heap_kib() -> float:
    """Blocks in use, glibc's count; 0 with other C libraries."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0.0
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return (info.used + info.mapped) / 1024


def slope(values: list[float]) -> float:
    """Per step, least squares."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    square = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / square


def run(world: World, path: str, cycles: int, samples: int, settled: int) -> dict[str, Any]:
    actor, began = Actor(world, path), time.perf_counter()
    resident: list[float] = []
    heap: list[float] = []
    storages: list[tuple[int, int]] = []
    every = max(cycles // samples, 1)
    for number in range(cycles):
        drain = (number + 1) % every == 0
        actor.cycle(number, drain)
        if drain:
            storages.append(live_storages())
        resident.append(memory_mib("VmRSS") * 1024)
        heap.append(heap_kib())
    first, counted = settled, storages[len(storages) * settled // cycles :]
    return {
        "rank": world.rank,
        "cycles": cycles,
        "seconds": round(time.perf_counter() - began, 1),
        "resident_mib": [round(resident[i] / 1024, 1) for i in (0, first, -1)],
        "resident_kib_per_cycle": round(slope(resident[first:]), 3),
        "heap_mib": [round(heap[i] / 1024, 1) for i in (0, first, -1)],
        "heap_kib_per_cycle": round(slope(heap[first:]), 3),
        "storages": [min(n for n, _ in counted), max(n for n, _ in counted)],
        "storage_bytes": [min(size for _, size in counted), max(size for _, size in counted)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=20, help="how often live tensors are counted")
    parser.add_argument("--settled", type=int, help="cycles before those that lines are fitted through; default: a fifth")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", help="used between the ranks")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as directory:
            write_random_model(Path(directory) / "model", MODEL, seed=1)
            sys.exit(on_ranks(args.ranks, *sys.argv, "--model", f"{directory}/model"))
    launch = read_launch()
    world = init_world(launch, connect_store(launch), device=torch.device("cpu"))
    mine = json.dumps(run(world, args.model, args.cycles, args.samples, args.settled or args.cycles // 5)).encode()
    parts = world.all.gather_bytes(mine, "bench")
    if parts is not None:
        rows = [json.loads(part) for part in parts]
        heads = ["rank", "cycles", "seconds", "resident MiB: first, settled, last", "KiB per cycle"]
        heads += ["heap MiB", "KiB per cycle", "storages", "bytes in them"]
        print(table(heads, [[str(value).strip("[]") for value in row.values()] for row in rows], 0))
        if args.out:
            report = {"bench": "cycles", "machine": machine_facts(), "torch": torch.__version__, "rows": rows}
            args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
