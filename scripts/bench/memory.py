"""Memory of an actor and its reference by phase of a step: what the formulas say, and what the process takes.

    python scripts/bench/memory.py --model qwen2.5_0.5b:6 --out memory.json

Two ranks with ZeRO-3, bf16, full activation checkpointing, random weights: load both roles; generate; log-probs of both; forward
and backward passes of two micro-batches; optimizer step; all but the first twice, of which the second counts. Resident is the peak
of resident memory in the phase above that of the process when its groups are there and nothing else is. In use is the most that
glibc's allocator had given out at a time, looked at every 5 ms; what is resident beyond it are blocks that were freed and stay in the
heap, and pages of libraries. Each is that of the rank that has most.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import MIB, machine_facts, memory_mib, on_ranks, reset_peak, save, table
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.kernels.exact import ExactOps
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.parallel.layout import Layout, generation_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.workers.engine import Packed, TrainEngine, rank_shards
from rlhf_spmd.workers.optim_config import OptimConfig
from shapes import MODELS_HELP, model_name, write_model

RANKS, ROWS, PROMPT, NEW = 2, 4, 128, 128  # rows per micro-batch
PHASES = ("load", "generate", "log_probs", "update", "step")


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later. ``uordblks``: bytes given out of heaps; ``hblkhd``: of blocks that were mapped."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def in_use_mib() -> float:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallInfo
    found = ask()
    return float(found.uordblks + found.hblkhd) / MIB


class Watch(threading.Thread):
    """``most``: that was in use from its start to :meth:`end`, MiB."""

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
    def __init__(self, world: World, path: str) -> None:
        self.world, self.spec, self.layout = world, read_spec(path), Layout(dp=world.size, zero=3)
        self.mesh = build_mesh(world, range(world.size), self.layout)
        self.actor = self.engine(OptimConfig())
        self.reference = self.engine(None)
        target = generation_layout(self.layout, 1, 1)
        mesh = build_mesh(world, range(world.size), target)
        decoder = Decoder(self.spec, "lm", 0, 1, mesh.tp, torch.bfloat16, "meta", blocks=target.blocks)
        decoder.requires_grad_(False)
        method = choose_method("zero_redundancy", target)
        gather = world.group(method.gather_ranks(target, world.rank), "gather", channel="gather")
        assert gather is not None
        gather.connect()
        self.hybrid = HybridWeights(
            lambda pp, tp: rank_shards(self.spec, "lm", self.layout, pp, tp),
            self.actor.parameters,
            decoder,
            lambda pp, tp: plan_params(self.spec, "lm", pp, 1, tp, 1, target.blocks),
            gather,
            method,
            target,
            mesh.index,
        )
        self.generator = Generator(decoder, mesh, GenerationConfig(), self.spec.eos_token_ids)
        rng = random.Random(world.rank)
        self.prompts = [[rng.randrange(3, self.spec.vocab_size) for _ in range(PROMPT)] for _ in range(2 * ROWS)]
        self.batches: list[Packed] = []

    def engine(self, optim: OptimConfig | None) -> TrainEngine:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": self.world.device, "activation_checkpointing": "full"}
        return TrainEngine(self.spec, None, "lm", self.mesh, optim, **options)

    def generate(self) -> None:
        first = self.world.rank * len(self.prompts)
        rows = [Request(first + i, first + i, prompt, NEW, NEW) for i, prompt in enumerate(self.prompts)]
        self.hybrid.to_generation()
        made = self.generator.generate(rows, SamplingConfig(), 0, 0)
        self.hybrid.to_training()
        texts = [[*prompt, *row.token_ids] for prompt, row in zip(self.prompts, made, strict=True)]
        self.batches = [
            Packed(torch.tensor([token for text in part for token in text]), torch.tensor([len(text) for text in part]))
            for part in (texts[:ROWS], texts[ROWS:])
        ]

    def log_probs(self) -> None:
        for engine in (self.actor, self.reference):
            engine.forward(self.batches, logs)

    def update(self) -> None:
        def loss(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = token_log_probs(decoder, hidden, batch.tokens.roll(-1), 1.0, entropy=True)
            assert entropy is not None
            return -log_probs.mean(), {"entropy": entropy.detach().sum()}

        self.actor.forward_backward(self.batches, loss)

    def step(self) -> None:
        self.actor.optimizer_step()


def logs(decoder: Decoder, hidden: Tensor, batch: Packed) -> Tensor:
    return token_log_probs(decoder, hidden, batch.tokens.roll(-1))[0]


def predict(roles: Roles) -> dict[str, dict[str, float]]:
    """MiB by phase and by what they hold: at rest 2 bytes of weights for each parameter of both roles, 12 of the actor's master
    weights and moments; and what the phase adds."""
    spec, world, tokens = roles.spec, roles.world.size, ROWS * (PROMPT + NEW)
    shard = sum(tensor.numel() for tensor in roles.actor.local_tensors().values())
    whole = sum(param.numel() for param in roles.actor.parameters().values())  # a DTensor counts all of its elements
    embedding = spec.vocab_size * spec.hidden_size
    layer = (whole - embedding) / spec.num_hidden_layers
    cache = 2 * len(roles.prompts) * (PROMPT + NEW) * spec.num_hidden_layers * 2 * spec.num_key_value_heads * spec.head_dim
    logits = 4 * max(ExactOps.chunk_logits, 64 * spec.vocab_size)
    inner = 2 * tokens * (4 * spec.hidden_size + 6 * spec.num_attention_heads * spec.head_dim + 3 * spec.intermediate_size)
    gathered = 2 * embedding + 2 * 2 * layer
    phases: dict[str, dict[str, float]] = {
        "load": {"one tensor in fp32": 4 * embedding},
        "generate": {"generation shard": 2 * whole - 2 * shard, "bucket": roles.hybrid.bucket_bytes, "KV cache": cache},
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


def run(world: World, path: str) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_name, default="qwen2.5_0.5b:6", help=MODELS_HELP)
    parser.add_argument("--out", type=Path, help="a JSON file with all figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args = parser.parse_args()
        write_model(Path(directory) / "model", args.model, with_weights=False)
        sys.exit(on_ranks(RANKS, __file__, "rank", f"{directory}/model", args.model, str(args.out or "")))


def on_rank(path: str, model: str, out: str) -> None:
    launch = read_launch()
    world = init_world(launch, connect_store(launch))
    found = run(world, path)
    if world.rank == 0:
        rows = []
        for name, row in found.items():
            parts = ", ".join(f"{key} {size:,.0f}" for key, size in row["parts"].items())
            rows.append(
                [name, parts, *(f"{size:,.0f}" for size in (sum(row["parts"].values()), row["in_use"], row["measured"]))]
            )
        print(table(["phase", "MiB by what they hold", "predicted", "in use", "resident"], rows, 2))
        save({"model": model, "machine": machine_facts(), "phases": found}, Path(out) if out else None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        on_rank(*sys.argv[2:])
    else:
        main()
