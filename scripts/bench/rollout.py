"""What the options of our generator gain, on 2 CPU ranks with one thread each.

    python scripts/bench/rollout.py --out rollout.json

All cases of a part make the same tokens; the first of a part is the option off. Idle: the share of the replicas' time until the
last one ends in which they have nothing to do. CPU seconds are those of all ranks. ``--scale``: of lengths.

- replicas: two of them, 160 prompts, of which each has 32 in flight at a time, with responses of 8 to 200 tokens, most of them
  short. Prompts are dealt out as the programs do it, or with all long responses on one replica.
- groups: 8 prompts of 256 tokens, 8 samples of 16 tokens, with and without sharing of prompts, on one rank.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from measure import join_world, machine_facts, on_ranks, run_parts, save, table
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World
from shapes import write_model


class OptionCases:
    """One run on this rank. ``scale``: of lengths."""

    def __init__(self, world: World, path: str, scale: float, repeats: int) -> None:
        self.world, self.path, self.scale, self.repeats = world, path, scale, repeats
        self.spec, self.rng, self.cases = read_spec(path), random.Random(3), list[dict[str, Any]]()

    def count(self, number: int) -> int:
        return max(round(number * self.scale), 2)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(4, self.spec.vocab_size) for _ in range(length)]

    def load(self, layout: Layout) -> tuple[Mesh, Decoder | None]:
        """On the first ranks. Collective over the world: every rank of it must call, in program order."""
        mesh = build_mesh(self.world, range(layout.size), layout)
        if not mesh.member:
            return mesh, None
        decoder = Decoder(self.spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, torch.float32, self.world.device)
        load_pretrained(decoder, self.path)
        return mesh, decoder

    def measure(self, case: str, decoder: Decoder | None, mesh: Mesh, requests: Sequence[Request], **settings: Any) -> None:
        """The median repetition by its slowest rank. ``case``: its part, and its name before the settings.

        Collective over the world: every rank of it must call, in program order."""
        counts = ("steps", "decode_tokens", "prefill_tokens", "moved_rows")
        runs = []
        for _ in range(self.repeats + 1):  # the first one warms up
            self.world.all.barrier("bench")
            figures = torch.zeros(7, dtype=torch.float64)
            if decoder is not None:
                cpu, generator = time.process_time(), Generator(decoder, mesh, GenerationConfig(**settings), ())
                generator.generate(requests, SamplingConfig(ignore_eos=True), 0, 0)
                stats, leads = generator.stats, float(mesh.replica.rank == 0)
                times = [stats.seconds, stats.busy_seconds, time.process_time() - cpu]
                figures = torch.tensor([*(leads * getattr(stats, name) for name in counts), *times], dtype=torch.float64)
            runs.append(torch.stack(self.world.all.all_gather(figures, "bench")))
        ranks = sorted(runs[1:], key=lambda each: float(each[:, 4].max()))[self.repeats // 2]
        seconds, busy, cpu = ranks[:, 4:].T
        members, wall = mesh.pool.size, float(seconds.max())
        idle = (wall - busy[:members]).sum()
        steps, drawn, prefill, moved = map(int, ranks[:, :4].sum(0))
        part, _, name = case.partition(": ")
        turned = ", ".join(
            filter(None, [name, *(f"{key}={value}" for key, value in settings.items() if key != "max_num_seqs")])
        )
        entry = {"part": part, "case": turned, "wall_s": round(wall, 3), "cpu_s": round(float(cpu.sum()), 3)}
        entry |= {"tokens_per_s": round(drawn / wall, 1), "idle": round(float(idle) / (members * wall), 3), "steps": steps}
        self.cases.append({**entry, "drawn": drawn, "prefill": prefill, "moved_rows": moved})

    def replicas(self) -> None:
        mesh, decoder = self.load(Layout(dp=2))
        draw = self.rng.random
        rows = [(self.prompt(self.rng.randint(8, 48)), 8 + int(self.count(192) * draw() ** 3)) for _ in range(160)]
        parts = partition_by_tokens([len(prompt) for prompt, _ in rows], 2)
        longest = sorted(range(160), key=lambda i: -rows[i][1])
        dealt = [[i for i in range(160) if parts[i] == part] for part in (0, 1)]
        for name, shares in {"dealt out": dealt, "long ones together": [longest[:80], longest[80:]]}.items():
            mine = [Request(i, i, *rows[i]) for i in shares[mesh.dp_rank]]
            for steps in (0, 8, 32):
                self.measure(f"replicas: {name}", decoder, mesh, mine, rebalance_steps=steps, max_num_seqs=32)

    def groups(self) -> None:
        mesh, decoder = self.load(Layout())
        prompts = [self.prompt(self.count(256)) for _ in range(8)]
        requests = [Request(8 * g + j, g, prompt, 16) for g, prompt in enumerate(prompts) for j in range(8)]
        for shared in (False, True):
            self.measure("groups", decoder, mesh, requests, enable_prefix_caching=shared)


def measure_options(path: str, scale: float, repeats: int) -> dict[str, Any]:
    found = OptionCases(join_world(), path, scale, repeats)
    found.replicas()
    found.groups()
    return {"cases": found.cases}


def rollout(model: str = "S", scale: float = 1.0, repeats: int = 3, out: Path | None = None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "model", model, with_weights=True)
        found = on_ranks(2, measure_options, path=f"{directory}/model", scale=scale, repeats=repeats)
    print(table(found["cases"], "part case wall_s cpu_s tokens_per_s idle steps drawn prefill moved_rows"))
    save({"bench": "rollout", "machine": machine_facts(), "model": model, **found}, out)


if __name__ == "__main__":
    run_parts(rollout)
