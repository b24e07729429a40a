"""One variant of an optimizer step on one batch; ``train_step.py`` starts it, in a process (or ranks) of its own.

python train_variants.py CASE.json OUT.json
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import median, memory_mib, reset_peak, timed
from torch import Tensor

from rlhf_spmd.data.balance import micro_batches_by_tokens, partition_by_tokens
from rlhf_spmd.data.sort_digits import LLAMA
from rlhf_spmd.parallel.layout import Layout

LR = 1e-3
# name -> (what differs from LLAMA, rows of the batch)
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "tiny": ({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 4}, 6),
    "S": ({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 32}, 32),
    "M": ({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192, "head_dim": 64}, 16),
}


def config_of(name: str) -> dict[str, Any]:
    return {**LLAMA, **MODELS[name][0], "max_position_embeddings": 1024}


def make_rows(name: str) -> list[list[int]]:
    """Prompts of 16 to 256 tokens with responses of 16 to 256, most of them short."""
    rng = random.Random(7)
    vocab = config_of(name)["vocab_size"]
    lengths = [rng.randint(16, 256) + 16 + int(240 * rng.random() ** 3) for _ in range(MODELS[name][1])]
    return [[rng.randrange(4, vocab) for _ in range(n)] for n in lengths]


@dataclasses.dataclass
class Step:
    """``run()`` is one optimizer step and returns its loss; ``close`` what is left to do at the end."""

    run: Callable[[], float]
    barrier: Callable[[], None] = lambda: None
    ranks: int = 1


def peer_batches(case: dict[str, Any], rows: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of a transformers model for each micro-batch."""
    variant, lengths = case["variant"], [len(row) for row in rows]
    if variant.startswith("packed"):
        for index in micro_batches_by_tokens(lengths, case["micro_tokens"]):
            tokens = torch.tensor([[token for i in index for token in rows[i]]])
            positions = torch.cat([torch.arange(lengths[i]) for i in index])[None]
            yield {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}
        return
    order = list(range(len(rows)))
    groups: list[list[int]] = []
    if variant == "sorted":
        order.sort(key=lambda i: lengths[i])
    for i in order:
        full = len(groups[-1]) == case["micro_rows"] if groups else True
        if variant == "sorted" and groups:
            full = (len(groups[-1]) + 1) * lengths[i] > case["micro_tokens"]
        groups.append([i]) if full else groups[-1].append(i)
    for group in groups:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[i]) for i in group], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(lengths[i], dtype=torch.int64) for i in group], batch_first=True)
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def build_peer(case: dict[str, Any], rows: list[list[int]]) -> Step:
    from transformers import AutoModelForCausalLM

    from rlhf_spmd.parallel.world import choose_cpu_matmul, keep_freed_memory

    torch.set_num_threads(1)
    if case["tuned"]:
        choose_cpu_matmul()
        keep_freed_memory()
    attention = case["variant"].removeprefix("packed_") if case["variant"].startswith("packed") else "sdpa"
    attention = {"flex": "flex_attention"}.get(attention, attention)
    dtype = getattr(torch, case["dtype"])
    model = AutoModelForCausalLM.from_pretrained(case["path"], dtype=dtype, attn_implementation=attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    batches = list(peer_batches(case, rows))
    count = torch.tensor(sum(len(row) - 1 for row in rows))

    def run() -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Step(run)


def build_ours(case: dict[str, Any], rows: list[list[int]]) -> Step:
    from rlhf_spmd.models.decoder import Decoder
    from rlhf_spmd.models.heads import token_log_probs
    from rlhf_spmd.models.spec import read_spec
    from rlhf_spmd.parallel.mesh import build_mesh
    from rlhf_spmd.parallel.world import connect_store, init_world, read_launch
    from rlhf_spmd.workers.engine import Packed, TrainEngine
    from rlhf_spmd.workers.optimizer import OptimConfig

    launch = read_launch()
    world = init_world(launch, connect_store(launch), device=torch.device("cpu"))
    layout = Layout(**case["layout"])
    mesh = build_mesh(world, range(world.size), layout)
    engine = TrainEngine(
        read_spec(case["path"]),
        case["path"],
        "lm",
        mesh,
        OptimConfig(lr=LR),
        dtype=getattr(torch, case["dtype"]),
        device=world.device,
    )
    mine = partition_by_tokens([len(row) for row in rows], layout.dp)[mesh.dp_rank]
    lengths = [len(rows[i]) for i in mine]
    number = torch.tensor([len(micro_batches_by_tokens(lengths, case["micro_tokens"]))])
    agreed = int(mesh.dp.all_reduce(number, "control", "max"))
    micro = [[mine[i] for i in index] for index in micro_batches_by_tokens(lengths, case["micro_tokens"], agreed)]
    packed = [
        Packed(torch.tensor([token for i in index for token in rows[i]]), torch.tensor([len(rows[i]) for i in index]))
        for index in micro
    ]
    count = sum(len(row) - 1 for row in rows)

    def loss(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        last = torch.zeros(len(batch.tokens), dtype=torch.bool)
        last[batch.lengths.cumsum(0) - 1] = True
        before = (~last).nonzero()[:, 0]
        log_probs, _ = token_log_probs(decoder, hidden[before], batch.tokens[before + 1])
        return -log_probs.sum() / count, {}

    def run() -> float:
        total = engine.forward_backward(packed, loss).get("loss", torch.zeros((), dtype=torch.float64))
        engine.optimizer_step()
        share = total if mesh.last_stage and mesh.tp_rank == 0 else torch.zeros_like(total)
        return float(world.all.all_reduce(share.reshape(1), "control")) if world.size > 1 else float(total)

    return Step(run, lambda: world.all.barrier("bench"), world.size)


def measure_case(case: dict[str, Any]) -> dict[str, Any] | None:
    """None on ranks other than 0."""
    rows = make_rows(case["model"])
    if case["variant"] == "ours":
        import rlhf_spmd.workers.engine  # noqa: F401
    else:
        from transformers import LlamaForCausalLM  # noqa: F401
    reset_peak()
    baseline = memory_mib("VmRSS")
    step = (build_ours if case["variant"] == "ours" else build_peer)(case, rows)
    losses = [step.run(), step.run()]
    seconds: list[float] = []
    cpu: list[float] = []
    blocked: list[float] = []
    while len(seconds) < case["least"] or (step.ranks == 1 and sum(seconds) + seconds[-1] <= case["seconds"]):
        step.barrier()
        own = time.thread_time()
        wall, used, results = timed(step.run, 0, 1)
        seconds.append(wall[0])
        cpu.append(used[0])
        blocked.append(wall[0] - (time.thread_time() - own))
        losses.append(results[0])
    peak = memory_mib("VmHWM") - baseline
    figures: dict[str, Any] = {
        "wall": seconds,
        "cpu": cpu,
        "blocked_s": median(blocked),
        "peak_mib": peak,
        "losses": losses[:3],
    }
    if step.ranks > 1:
        gathered = over_ranks(figures, step)
        if gathered is None:
            return None
        figures = gathered
    tokens = sum(len(row) for row in rows)
    wall_s, cpu_s = median(figures.pop("wall")), median(figures.pop("cpu"))
    return {
        **figures,
        "tokens": tokens,
        "step_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "tokens_per_s": round(tokens / wall_s, 1),
        "tokens_per_cpu_s": round(tokens / cpu_s, 1),
        "peak_mib": round(figures["peak_mib"], 1),
    }


def over_ranks(figures: dict[str, Any], step: Step) -> dict[str, Any] | None:
    """Rank 0: the slowest rank's seconds, all ranks' CPU seconds, the largest peak, and one step's communication per rank."""
    import torch.distributed as dist

    figures["communication"] = communication(step)
    parts: list[Any] = [None] * step.ranks
    dist.all_gather_object(parts, figures)
    if dist.get_rank():
        return None
    return {
        "wall": [max(times) for times in zip(*(part["wall"] for part in parts), strict=True)],
        "cpu": [sum(times) for times in zip(*(part["cpu"] for part in parts), strict=True)],
        "blocked_s": [round(part["blocked_s"], 4) for part in parts],
        "peak_mib": max(part["peak_mib"] for part in parts),
        "losses": figures["losses"],
        "communication": [part["communication"] for part in parts],
    }


def communication(step: Step) -> dict[str, Any]:
    """One more step under torch's profiler: MiB by label, as the collectives module counts them, and seconds by gloo operation.

    Seconds run from a collective's start to its end: they include waiting for the other rank, and compute that overlapped (a
    send ends when it is received). What the main thread waited in the timed steps is ``blocked_s``: wall without CPU time.
    """
    from torch.profiler import ProfilerActivity, profile

    from rlhf_spmd.parallel.collectives import RECORDER

    RECORDER.sent.clear()
    RECORDER.received.clear()
    step.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step.run()
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            seconds[event.name] = seconds.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
            calls[event.name] = calls.get(event.name, 0) + 1
    mib = {label: round(n / 2**20, 3) for label, n in sorted(RECORDER.sent.items()) if label not in ("bench", "control")}
    return {
        "mib_sent": mib,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "calls": calls,
    }


def main() -> None:
    figures = measure_case(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if figures is not None:
        Path(sys.argv[2]).write_text(json.dumps(figures), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
