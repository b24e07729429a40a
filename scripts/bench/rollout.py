"""What the generator's options gain: micro-batches of a pipeline, rows that move between replicas, guessed tokens, shared prompts.

    python scripts/bench/rollout.py --out rollout.json

Starts itself on 2 ranks with one thread each. All cases of a part make the same tokens; the first of a part is the option off.
Idle: pipeline: the share of a stage's time in which its host waits for the other stage; replicas: the share of their time until the
last one ends in which they have nothing to do. CPU seconds are those of all ranks.

- pipeline: two stages, 96 prompts, one micro-batch or more.
- replicas: two of them, 160 prompts, of which each has 32 in flight at a time, with responses of 8 to 200 tokens, most of them short.
  Prompts are dealt out as the programs do it, or with all long responses on one replica.
- guesses: 8 samples per prompt on one rank. Random weights, whose texts never repeat themselves, and a model that is trained here
  for some seconds to go around 64 tokens in a fixed order, from which it departs in one place of twenty.
- groups: 8 prompts of 256 tokens, 8 samples of 16 tokens, with and without sharing of prompts, on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from measure import machine_facts, on_ranks, table
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.sort_digits import LLAMA
from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.process.ending import end_process
from rlhf_spmd.workers.engine import Packed, TrainEngine
from rlhf_spmd.workers.optim_config import OptimConfig

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 8},
    "S": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 32},
}
SAMPLED = SamplingConfig(ignore_eos=True)
ORDER, DEPARTURES = 64, 20  # tokens; one of so many tokens is not the one that follows in the fixed order
Row = tuple[list[int], int]  # prompt, tokens wanted


class Bench:
    """One run on this rank. ``scale``: of the amounts of work."""

    def __init__(self, world: World, path: str, scale: float, repeats: int) -> None:
        self.world, self.path, self.scale, self.repeats = world, path, scale, repeats
        self.spec, self.rng, self.cases = read_spec(path), random.Random(3), list[dict[str, Any]]()

    def count(self, number: int) -> int:
        return max(round(number * self.scale), 2)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(4, self.spec.vocab_size) for _ in range(length)]

    def mesh(self, layout: Layout) -> Mesh:
        """On the first ranks. Collective over the world: every rank of it must call, in program order."""
        return build_mesh(self.world, range(layout.size), layout)

    def load(self, mesh: Mesh) -> Decoder:
        decoder = Decoder(self.spec, "lm", mesh.pp_rank, mesh.layout.pp, mesh.tp, torch.float32, self.world.device)
        load_pretrained(decoder, self.path)
        return decoder

    def measure(
        self, part: str, name: str, decoder: Decoder | None, mesh: Mesh, requests: Sequence[Request], **config: Any
    ) -> None:
        """The median repetition by its slowest rank. Collective over the world: every rank of it must call, in program order."""
        runs = []
        for repetition in range(self.repeats + 1):
            self.world.all.barrier("bench")
            figures = torch.zeros(10, dtype=torch.float64)
            if decoder is not None:
                cpu = time.process_time()
                generator = Generator(decoder, mesh, GenerationConfig(**config), ())
                generator.generate(requests, SAMPLED, 0, 0)
                stats, leads = generator.stats, float(mesh.replica.rank == 0)
                counts = (
                    stats.steps,
                    stats.decode_tokens,
                    stats.prefill_tokens,
                    stats.draft_tokens,
                    stats.accepted_tokens,
                    stats.moved_rows,
                )
                times = stats.seconds, stats.busy_seconds, stats.stage_seconds, time.process_time() - cpu
                figures = torch.tensor([leads * count for count in counts] + list(times), dtype=torch.float64)
            ranks = torch.stack(self.world.all.all_gather(figures, "bench"))
            runs += [ranks] * (repetition > 0)
        ranks = sorted(runs, key=lambda each: float(each[:, 6].max()))[len(runs) // 2]
        steps, drawn, prefill, guessed, accepted, moved = ranks[:, :6].sum(0).tolist()
        members, wall = mesh.pool.size, float(ranks[:, 6].max())
        idle = ranks[:members, 8].sum() if mesh.layout.pp > 1 else (wall - ranks[:members, 7]).sum()
        self.cases.append(
            {
                "part": part,
                "case": name,
                "wall_s": round(wall, 3),
                "cpu_s": round(float(ranks[:, 9].sum()), 3),
                "tokens_per_s": round(drawn / wall, 1),
                "idle": round(float(idle) / (members * wall), 3),
                "steps": int(steps),
                "drawn": int(drawn),
                "prefill": int(prefill),
                "moved_rows": int(moved),
                "accepted": round(accepted / guessed, 3) if guessed else None,
            }
        )

    def pipeline(self) -> None:
        mesh = self.mesh(Layout(pp=2))
        decoder = self.load(mesh)
        requests = [Request(i, i, self.prompt(32), self.count(64)) for i in range(96)]
        for number in (1, 2, 4):
            self.measure("pipeline", f"micro_batches={number}", decoder, mesh, requests, micro_batches=number)

    def replicas(self) -> None:
        mesh = self.mesh(Layout(dp=2))
        decoder = self.load(mesh)
        rows: list[Row] = [
            (self.prompt(self.rng.randint(8, 48)), 8 + int(self.count(192) * self.rng.random() ** 3)) for _ in range(160)
        ]
        parts = partition_by_tokens([len(prompt) for prompt, _ in rows], 2)
        shares = {
            "dealt out": [np.flatnonzero(parts == part).tolist() for part in (0, 1)],
            "long ones together": [sorted(range(160), key=lambda i: -rows[i][1])[half : half + 80] for half in (0, 80)],
        }
        for name, share in shares.items():
            mine = [Request(i, i, *rows[i]) for i in share[mesh.dp_rank]]
            for steps in (0, 8, 32):
                self.measure(
                    "replicas", f"{name}, rebalance_steps={steps}", decoder, mesh, mine, rebalance_steps=steps, max_num_seqs=32
                )

    def guesses(self, updates: int) -> None:
        mesh = self.mesh(Layout())
        first = mesh.member
        decoders = {
            "random weights": self.load(mesh) if first else None,
            "follows an order": self.trained(mesh, updates) if first else None,
        }
        for name, decoder in decoders.items():
            for groups in (1, 8):
                requests = [Request(8 * g + j, g, self.text(16), self.count(128)) for g in range(groups) for j in range(8)]
                for guessed in (0, 4):
                    case = f"{name}, {8 * groups} rows, speculative_tokens={guessed}"
                    self.measure("guesses", case, decoder, mesh, requests, speculative_tokens=guessed)

    def groups(self) -> None:
        mesh = self.mesh(Layout())
        decoder = self.load(mesh) if mesh.member else None
        prompts = [self.prompt(self.count(256)) for _ in range(8)]
        requests = [Request(8 * g + j, g, prompt, 16) for g, prompt in enumerate(prompts) for j in range(8)]
        for shared in (False, True):
            self.measure("groups", f"enable_prefix_caching={shared}", decoder, mesh, requests, enable_prefix_caching=shared)

    def text(self, length: int) -> list[int]:
        """Tokens of the order, most of the time."""
        rng = self.rng
        tokens = [rng.randrange(ORDER)]
        while len(tokens) < length:
            tokens.append(rng.randrange(ORDER) if rng.random() < 1 / DEPARTURES else (tokens[-1] * 5 + 17) % ORDER)
        return tokens

    def trained(self, mesh: Mesh, updates: int) -> Decoder:
        optim = OptimConfig(lr=3e-3, weight_decay=0.0)
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.world.device, "total_updates": updates}
        engine = TrainEngine(self.spec, self.path, "lm", mesh, optim, **options)

        def loss(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
            return -token_log_probs(decoder, hidden, batch.tokens.roll(-1), 1.0)[0].mean(), {}

        for _ in range(updates):
            texts = [self.text(128) for _ in range(8)]
            tokens = torch.tensor([token for text in texts for token in text])
            engine.forward_backward([Packed(tokens, torch.full((8,), 128))], loss)
            engine.optimizer_step()
        return engine.chunks[0]


def print_tables(cases: Sequence[dict[str, Any]]) -> None:
    keys = ["wall_s", "cpu_s", "tokens_per_s", "idle", "steps", "drawn", "prefill", "moved_rows", "accepted"]
    for part in dict.fromkeys(case["part"] for case in cases):
        rows = [
            [case["case"], *("" if case[key] is None else str(case[key]) for key in keys)]
            for case in cases
            if case["part"] == part
        ]
        print(f"\n{table([part, *keys], rows, 1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="S")
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths")
    parser.add_argument("--updates", type=int, default=100, help="to train the model that follows an order")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--path", help="used between the ranks")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as directory:
            config = {
                **LLAMA,
                **SIZES[args.model],
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 1024,
            }
            if args.model == "tiny":
                config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
            write_random_model(Path(directory) / "model", config, seed=1)
            sys.exit(on_ranks(2, *sys.argv, "--path", f"{directory}/model"))
    launch = read_launch()
    world = init_world(launch, connect_store(launch), device=torch.device("cpu"))
    bench = Bench(world, args.path, args.scale, args.repeats)
    bench.pipeline()
    bench.replicas()
    bench.guesses(args.updates)
    bench.groups()
    if launch.rank == 0:
        print_tables(bench.cases)
        if args.out:
            report = {"bench": "rollout", "machine": machine_facts(), "torch": torch.__version__, "cases": bench.cases}
            args.out.write_text(json.dumps({**report, "model": args.model}, indent=2) + "\n", encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
