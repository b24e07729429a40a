"""Tokens/s of one optimizer step: ours against transformers with torch's AdamW, and on two ranks against one.

    python scripts/bench/update.py --out update.json
    python scripts/bench/update.py --models qwen3_1.7b llama_8b:16 --dtypes bfloat16 --out update_gpu.json  # on a GPU

Same weights, same ragged batch, same loss (negative log-likelihood of every token but the first of a row, divided by their number),
same gradient clipping and fused AdamW. Each variant runs in a process of its own, one thread per rank:

- ours: rows packed, at most ``--micro-tokens`` in a micro-batch; one rank, then every two-rank layout. bfloat16 parameters have
  float32 gradient sums and, with ``--optimizer masters`` or ``offload``, float32 copies and moments; peers keep none of these.
- padded: rows as they come, ``--micro-rows`` in a micro-batch. sorted: rows sorted by length, micro-batches of so many tokens with
  their padding. packed: rows concatenated with position_ids, of which transformers makes a block mask (sdpa, eager), compiles one
  (flex) or the bounds of its sequences (flash, where flash-attn is installed). On CPUs small models have the micro-batches that are
  fastest for each, unless ``--peer-tokens`` is given. compiled_...: under ``torch.compile``, which compiles while it warms up.
- lora: ``--lora 16`` adds adapters of all matrices of the layers (rank 16, alpha 32), trained in place of the weights; peers by PEFT,
  whose adapters all begin with. ``--bits 4`` adds ours beside a base of so few bits.

Peers get what ours sets for itself on CPUs: float32 products through oneDNN, and freed memory kept. The losses of the first steps
are compared, so that the work is the same. Peak: of a step; on CPUs resident memory above the process after its imports, on GPUs that
of all tensors. MFU: FLOPs of the model (6 per weight and token, and the attention's; what is computed twice counts once) over the
rate of a large matrix product of the dtype, measured in the same run.

Ours takes 18 bytes per parameter with masters, 10 with ``no_masters``, 6 and 12 on the host with ``offload``; peers take 8. So of
llama_8b (8.0 billion) 141 GB hold llama_8b:16 with masters, or all of it with ``--optimizer no_masters --micro-tokens 4096``, and
80 GB llama_8b:8. Layers are alike: in a part of them only the head's share of the time is larger.

``--rows``: number, shortest and longest; of large models 32 512 4096. ``--micro-tokens``: 768, of large models 8192;
``--micro-rows``: 8, of large models 2. ``--seconds``: timed, of each case; ``--least``: timed steps at least, and exactly on two
ranks. ``--no-files``: small models too draw their weights in place, on one rank. ``--out`` is written after every case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from measure import (
    Device,
    chosen,
    found_device,
    line,
    machine_facts,
    machine_rates,
    rounded,
    run_case,
    run_parts,
    save,
    table,
)
from rlhf_spmd.parallel.device_setup import choose_cpu_matmul
from rlhf_spmd.parallel.layout import Layout
from shapes import is_large, write_model
from variants import measure_case, write_adapter

# tokens in a micro-batch at which each was the fastest of 512, 1024, 2048 and 4096 ("padded" counts rows)
PEERS = {"padded": 0, "sorted": 1024, "packed_sdpa": 512, "packed_eager": 512, "packed_flex": 1024, "packed_flash": 1024}
PEERS |= {f"compiled_{name}": tokens for name, tokens in PEERS.items()}
LAYOUTS = {
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
}


@dataclasses.dataclass(frozen=True)
class Options:
    models: Sequence[str] = ("S", "M")
    device: Device | None = None
    dtypes: Sequence[Literal["float32", "bfloat16"]] = ("float32",)
    peers: Sequence[str] | None = None
    layouts: Sequence[str] | None = None
    checkpointing: Sequence[Literal["none", "selective", "full"]] = ("none",)
    optimizer: Sequence[Literal["masters", "offload", "no_masters"]] = ("masters",)
    lora: Sequence[int] = ()
    bits: Sequence[int] = ()
    compile_backend: str = "inductor"
    rows: Sequence[int] | None = None
    micro_tokens: int | None = None
    micro_rows: int | None = None
    peer_tokens: int | None = None
    no_files: bool = False
    seconds: float = 4.0
    least: int = 2
    timeout: float = 300.0
    out: Path | None = None


def settled(options: Options) -> Options:
    """With what follows from the device and the models where nothing was said."""
    device = options.device or found_device()
    peers = ["padded", "sorted", "packed_sdpa"]
    peers += ["packed_flex", "compiled_sorted", "compiled_packed_flex"] if device == "cuda" else []
    in_place = options.no_files or any(map(is_large, options.models))
    one_rank = in_place or (device == "cuda" and torch.cuda.device_count() < 2)
    layouts = [] if one_rank and options.layouts is None else chosen(options.layouts, LAYOUTS)
    if layouts and in_place:
        sys.exit("--layouts: models whose weights are drawn in place run on one rank")
    peers = peers if options.peers is None else chosen(options.peers, PEERS)
    return dataclasses.replace(options, device=device, peers=peers, layouts=layouts)


def plan_cases(args: Options, model: str) -> list[dict[str, Any]]:
    assert args.peers is not None and args.layouts is not None
    large = is_large(model)
    common: dict[str, Any] = {"model": model, "device": args.device, "seconds": args.seconds, "least": args.least, "layout": {}}
    common |= {"rows": args.rows or ([32, 512, 4096] if large else None), "compile_backend": args.compile_backend}
    common |= {"lora": 0, "bits": None, "micro_rows": args.micro_rows or (2 if large else 8), "optimizer": args.optimizer[0]}
    ours_tokens = args.micro_tokens or (8192 if large else 768)
    tokens = {name: args.peer_tokens or (ours_tokens if large else best) for name, best in PEERS.items()}
    cases: list[dict[str, Any]] = []
    for dtype, kept in ((dtype, kept) for dtype in args.dtypes for kept in args.checkpointing):
        suffix = "" if kept == "none" else f", {kept}"
        shared = {**common, "dtype": dtype, "checkpointing": kept}
        ours = {**shared, "variant": "ours", "micro_tokens": ours_tokens}
        alike = []
        for states in args.optimizer:
            name = f"ours{suffix}" + (f", {states}" if len(args.optimizer) > 1 else "")
            alike.append({**ours, "optimizer": states, "name": name})
        for variant in args.peers if kept != "selective" else ():
            alike.append({**shared, "variant": variant, "name": variant + suffix, "micro_tokens": tokens[variant]})
        cases += alike
        for rank in args.lora if kept == "none" else ():
            cases += [{**case, "lora": rank, "name": f"{case['name']}, lora {rank}"} for case in alike]
            for bits in args.bits:
                cases.append({**ours, "lora": rank, "bits": bits, "name": f"ours, lora {rank}, {bits} bits"})
        if dtype == "float32":
            cases += [{**ours, "layout": LAYOUTS[name], "name": f"ours{suffix}, {name}"} for name in args.layouts]
    return cases


def compare(model: str, cases: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Per dtype and rank of adapters: the speed of the fastest of ours on one rank over every other case's, its memory over theirs, and
    how far losses differ."""
    ratios: dict[str, Any] = {"model": model}
    speed = "tokens_per_cpu_s" if device == "cpu" else "tokens_per_s"
    for kind in dict.fromkeys((case["dtype"], case["lora"], case["bits"]) for case in cases):
        alike = [case for case in cases if (case["dtype"], case["lora"], case["bits"]) == kind and "error" not in case]
        single = [case for case in alike if case["variant"] == "ours" and not case["layout"]]
        if single:
            ours = max(single, key=lambda case: case[speed])
            name = ", ".join(filter(None, [kind[0], kind[1] and f"lora {kind[1]}", kind[2] and f"{kind[2]} bits"]))
            pairs = [pair for case in alike for pair in zip(case["losses"], ours["losses"], strict=True)]
            ratios[name] = {
                "ours": ours["name"],
                "speed_over": {case["name"]: round(ours[speed] / case[speed], 2) for case in alike},
                "memory_over": {case["name"]: round(ours["peak_mib"] / case["peak_mib"], 2) for case in alike},
                "loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
            }
    return ratios


COLUMNS = "model dtype name step_s tokens_per_s tokens_per_cpu_s peak_mib mfu sent_mib blocked_s"


def update(options: Options) -> None:
    args = settled(options)
    assert args.device is not None
    machine = machine_facts(args.device)
    if args.device == "cpu":
        machine["float32_matmul"] = choose_cpu_matmul()
    rates = machine_rates(1, args.dtypes, args.device)
    machine |= {key: round(rate / 1e9, 1) for key, rate in rates.items()}
    report: dict[str, Any] = {"bench": "update", "machine": machine, "cases": [], "ratios": []}
    with tempfile.TemporaryDirectory() as name:
        for model in args.models:
            path = Path(name) / model
            write_model(path, model, with_weights=not (args.no_files or is_large(model)))
            for rank in () if is_large(model) else args.lora:  # large ones begin with B at zero
                write_adapter(path, rank)
            done: list[dict[str, Any]] = []
            print(table([], COLUMNS), flush=True)
            for case in plan_cases(args, model):
                size = Layout(**case["layout"]).size
                made = run_case(measure_case, {**case, "path": str(path)}, size, timeout_s=args.timeout)
                if "error" not in made:
                    made["mfu"] = rounded(made.pop("flops_per_s") / rates[f"{case['dtype']}_flops"] / size)
                if "mib_sent" in made:
                    made["sent_mib"] = max(sum(sent.values()) for sent in made["mib_sent"])
                done.append({**case, **made})
                report["cases"].append(done[-1])
                print(line(done[-1], COLUMNS), flush=True)
                save(report, args.out)
            report["ratios"].append(compare(model, done, args.device))
            print(json.dumps(report["ratios"][-1], indent=1), flush=True)
    save(report, args.out)


if __name__ == "__main__":
    run_parts(update)
