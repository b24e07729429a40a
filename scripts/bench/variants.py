"""One variant of an optimizer step on one batch; ``update.py`` starts it, in a process (or ranks) of its own."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import MIB, device_kernels, join_world, median, memory_mib, peak_mib, reset_peak, run_parts, timed
from rlhf_spmd.data.balance import micro_batches_by_tokens, partition_by_tokens
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.flops import forward_flops
from shapes import config_of, fill, has_weights, is_large, peer_model

NUM_ROWS = {"tiny": 6, "S": 32, "M": 16}
# ours, "optimizer": what the states are
OPTIMIZERS: dict[str, dict[str, Any]] = {"masters": {}, "offload": {"offload": True}, "no_masters": {"master_weights": False}}


def make_rows(case: dict[str, Any]) -> list[list[int]]:
    """``case["rows"]`` = [number, shortest, longest]: lengths as likely as each other; null, for the small models: prompts of 16
    to 256 tokens with responses of 16 to 256, most of them short."""
    rng = random.Random(7)
    vocab = config_of(case["model"])["vocab_size"]
    if case["rows"]:
        number, *bounds = case["rows"]
        lengths = [rng.randint(*bounds) for _ in range(number)]
    else:
        lengths = [
            rng.randint(16, 256) + 16 + int(240 * rng.random() ** 3) for _ in range(NUM_ROWS[case["model"].partition(":")[0]])
        ]
    return [[rng.randrange(4, vocab) for _ in range(n)] for n in lengths]


def learning_rate(case: dict[str, Any]) -> float:
    return 1e-5 if is_large(case["model"]) else 1e-3


@dataclasses.dataclass
class Step:
    """``run()`` is one optimizer step and returns its loss; ``barrier()`` waits for all of the ``ranks``."""

    run: Callable[[], float]
    barrier: Callable[[], None] = lambda: None
    ranks: int = 1


def adapter_of(path: Path, rank: int) -> Path:
    """Where PEFT's adapters lie that a case begins with."""
    return path.with_name(f"{path.name}_lora_{rank}")


def write_adapter(path: Path, rank: int) -> None:
    """Writes PEFT's adapters of all matrices of the layers, with B at zero."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(5)
    get_peft_model(peer_model(str(path), "float32", "cpu"), settings).save_pretrained(str(adapter_of(path, rank)))


def peer_batches(case: dict[str, Any], rows: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of a transformers model for each micro-batch."""
    variant, lengths = case["variant"].removeprefix("compiled_"), [len(row) for row in rows]
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
    from rlhf_spmd.parallel.device_setup import choose_cpu_matmul, keep_freed_memory

    torch.set_num_threads(1)
    device, attention = case["device"], case["variant"].rpartition("packed_")[2]
    if device == "cpu":
        choose_cpu_matmul()
        keep_freed_memory()
    names = {"flex": "flex_attention", "flash": "flash_attention_2", "eager": "eager"}
    model = peer_model(case["path"], case["dtype"], device, attn_implementation=names.get(attention, "sdpa")).train()
    if case["lora"]:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter_of(Path(case["path"]), case["lora"]), is_trainable=True)
    if case["checkpointing"] == "full":
        model.gradient_checkpointing_enable()
    if case["variant"].startswith("compiled_"):
        model.compile(backend=case["compile_backend"])
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate(case), weight_decay=0.01, fused=True)
    batches = [{key: x.to(device) for key, x in batch.items()} for batch in peer_batches(case, rows)]
    count = torch.tensor(sum(len(row) - 1 for row in rows), device=device)

    def run() -> float:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return Step(run)


def build_ours(case: dict[str, Any], rows: list[list[int]]) -> Step:
    from rlhf_spmd.models.decoder import Decoder
    from rlhf_spmd.models.heads import token_log_probs
    from rlhf_spmd.models.lora import LoraConfig
    from rlhf_spmd.parallel.mesh import build_mesh
    from rlhf_spmd.workers.objective import MicroBatch
    from rlhf_spmd.workers.optim_config import OptimConfig
    from rlhf_spmd.workers.train_engine import TrainEngine

    world = join_world(case["device"])
    layout = Layout(**case["layout"])
    mesh = build_mesh(world, range(world.size), layout)
    rank = case["lora"]
    adapter = adapter_of(Path(case["path"]), rank)
    lora = (
        LoraConfig(rank, alpha=2.0 * rank, path=str(adapter) if adapter.exists() else None, bits=case["bits"]) if rank else None
    )
    engine = TrainEngine(
        read_spec(case["path"]),
        case["path"] if has_weights(case["path"]) else None,
        "lm",
        mesh,
        OptimConfig(lr=learning_rate(case), **OPTIMIZERS[case["optimizer"]]),
        dtype=getattr(torch, case["dtype"]),
        device=world.device,
        activation_checkpointing=case["checkpointing"],
        lora=lora,
    )
    if not has_weights(case["path"]):
        assert engine.optimizer is not None and layout.size == 1, "drawn weights are those of one rank"
        fill(engine.chunks[0])
        engine.optimizer.refresh_masters(engine.local_tensors())
    parts = partition_by_tokens([len(row) for row in rows], layout.dp)
    mine = [i for i in range(len(rows)) if parts[i] == mesh.dp_rank]
    lengths = [len(rows[i]) for i in mine]
    number = torch.tensor([len(micro_batches_by_tokens(lengths, case["micro_tokens"]))])
    agreed = int(mesh.dp.all_reduce(number, "control", "max"))
    micro = [[mine[i] for i in index] for index in micro_batches_by_tokens(lengths, case["micro_tokens"], agreed)]
    packed, before = [], {}
    for index in micro:
        tokens = torch.tensor([token for i in index for token in rows[i]], dtype=torch.int64)
        sizes = torch.tensor([len(rows[i]) for i in index], dtype=torch.int64)
        packed.append(MicroBatch(tokens.to(world.device), sizes))
        last = torch.zeros(len(tokens), dtype=torch.bool).index_fill_(0, sizes.cumsum(0) - 1, True)
        before[id(packed[-1])] = (~last).nonzero()[:, 0].to(world.device)
    count = sum(len(row) - 1 for row in rows)

    def loss(decoder: Decoder, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        at = before[id(batch)]
        log_probs, _ = token_log_probs(decoder, hidden[at], batch.tokens[at + 1])
        return -log_probs.sum() / count, {}

    def run() -> float:
        total = engine.forward_backward(packed, loss).get("loss", torch.zeros((), dtype=torch.float64))
        engine.optimizer_step()
        share = total if mesh.last_stage and mesh.tp_rank == 0 else torch.zeros_like(total)
        return float(world.all.all_reduce(share.reshape(1), "control")) if world.size > 1 else float(total)

    return Step(run, lambda: world.all.barrier("bench"), world.size)


def measure_case(**case: Any) -> dict[str, Any] | None:
    """One variant in this process; None on ranks other than 0."""
    rows = make_rows(case)
    if case["variant"] == "ours":
        import rlhf_spmd.workers.train_engine  # noqa: F401
    else:
        from transformers import LlamaForCausalLM  # noqa: F401
    if case["bits"]:
        import bitsandbytes  # noqa: F401
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
        wall, used, results = timed(step.run, 0, 1, case["device"])
        seconds.append(wall[0])
        cpu.append(used[0])
        blocked.append(wall[0] - (time.thread_time() - own))
        losses.append(results[0])
    peak = peak_mib(case["device"], baseline)
    figures: dict[str, Any] = {"wall": seconds, "cpu": cpu, "blocked_s": round(median(blocked), 4)}
    figures |= {"peak_mib": peak, "losses": losses[:3]}
    if case["variant"] == "ours" and case["device"] == "cuda":
        figures["kernels"] = device_kernels(step.run)
    if step.ranks > 1:
        gathered = over_ranks(figures, step)
        if gathered is None:
            return None
        figures = gathered
    tokens, spec = sum(len(row) for row in rows), read_spec(case["path"])
    flops = 3 * sum(forward_flops(spec, len(row), len(row)) for row in rows)  # what is computed twice counts once
    wall_s, cpu_s = median(figures.pop("wall")), median(figures.pop("cpu"))
    return {
        **figures,
        "tokens": tokens,
        "step_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "tokens_per_s": round(tokens / wall_s, 1),
        "tokens_per_cpu_s": round(tokens / cpu_s, 1),
        "peak_mib": round(figures["peak_mib"], 1),
        "flops_per_s": flops / wall_s,
    }


def over_ranks(figures: dict[str, Any], step: Step) -> dict[str, Any] | None:
    """Rank 0: the slowest rank's seconds, all ranks' CPU seconds, the largest peak, and what each rank sends in a step. What its main
    thread waited is ``blocked_s``: wall without CPU time."""
    import torch.distributed as dist

    parts: list[Any] = [None] * step.ranks
    dist.all_gather_object(parts, {**figures, "mib_sent": mib_sent(step)})
    every = {key: [part[key] for part in parts] for key in parts[0]}
    figures |= {key: every[key] for key in ("blocked_s", "mib_sent")} | {"peak_mib": max(every["peak_mib"])}
    figures["wall"] = [max(times) for times in zip(*every["wall"], strict=True)]
    figures["cpu"] = [sum(times) for times in zip(*every["cpu"], strict=True)]
    return None if dist.get_rank() else figures


def mib_sent(step: Step) -> dict[str, float]:
    """What this rank sends in one more step, by label."""
    from rlhf_spmd.parallel.collectives import RECORDER

    RECORDER.sent.clear()
    step.barrier()
    step.run()
    return {label: round(n / MIB, 3) for label, n in sorted(RECORDER.sent.items()) if label not in ("bench", "control")}


if __name__ == "__main__":
    run_parts()
