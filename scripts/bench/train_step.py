"""Tokens/s of one optimizer step: ours against transformers with torch's AdamW, and on two ranks against one.

    python scripts/bench/train_step.py --out train_step.json
    python scripts/bench/train_step.py --models qwen3_1.7b llama_8b:16 --dtypes bfloat16 --out train_step_gpu.json  # on a GPU

Same weights, same ragged batch, same loss (negative log-likelihood of every token but the first of a row, divided by their
number), same gradient clipping and fused AdamW. Every variant runs in a process of its own with one thread per rank:

- ours: rows packed, at most ``--micro-tokens`` in a micro-batch; one rank, then every two-rank layout. bfloat16 parameters have
  float32 gradient sums and, with ``--optimizer masters`` or ``offload``, float32 copies and moments; peers keep none of these.
- padded: rows as they come, ``--micro-rows`` in a micro-batch. sorted: rows sorted by length, micro-batches of so many tokens
  with their padding. packed: rows concatenated with position_ids, of which transformers makes a block mask (sdpa, eager),
  compiles one (flex) or the bounds of its sequences (flash, where flash-attn is installed). On CPUs the sizes of the small models'
  micro-batches are those at which each is fastest, unless ``--peer-tokens`` is given.
- lora: with ``--lora 16``, adapters of all matrices of the layers (rank 16, alpha 32) in place of the weights, peers by PEFT, which
  also makes those that all begin with. With ``--bits 4`` also beside a base of so few bits, ours alone.
- compiled_...: the same under ``torch.compile``; it compiles in the two steps that warm up.

"tuned" gives peers what ours sets for itself on CPUs: float32 products through oneDNN, and freed memory kept. Losses of the first
steps are compared, so that the work is the same. Memory is the peak of a step: on CPUs above the process after its imports, on GPUs
that of all tensors. MFU: FLOPs of the model (6 per weight and token, and the attention's; what is computed twice counts once) over
the rate of a large matrix product of the dtype, measured in the run on ``--device``.

Ours takes 18 bytes per parameter with masters, 10 with ``no_masters``, 6 and 12 on the host with ``offload``; peers take 8. So of
llama_8b (8.0 billion) 141 GB hold llama_8b:16 with masters, or all of it with ``--optimizer no_masters --micro-tokens 4096``, and
80 GB llama_8b:8. Layers are alike: in a part of them only the head's share of the time is larger.
``--out`` is written after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from measure import add_device, device_facts, line, machine_facts, machine_rates, rounded, run_case, save, table
from rlhf_spmd.parallel.layout import Layout
from shapes import MODELS_HELP, is_large, model_name, write_model
from train_variants import OPTIMIZERS, write_adapter

SOURCE = Path(__file__).resolve().parents[2] / "src"
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


def plan_cases(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    large = is_large(model)
    common = {"model": model, "device": args.device, "seconds": args.seconds, "least": args.least, "layout": {}, "tuned": True}
    common |= {"rows": args.rows or ([32, 512, 4096] if large else None), "compile_backend": args.compile_backend}
    common |= {"lora": 0, "bits": None, "micro_rows": args.micro_rows or (2 if large else 8), "optimizer": args.optimizer[0]}
    ours_tokens = args.micro_tokens or (8192 if large else 768)
    tokens = {name: args.peer_tokens or (ours_tokens if large else best) for name, best in PEERS.items()}
    cases: list[dict[str, Any]] = []
    for dtype, kept in ((dtype, kept) for dtype in args.dtypes for kept in args.checkpointing):
        shared = {**common, "dtype": dtype, "checkpointing": kept}
        suffix = "" if kept == "none" else f", {kept}"
        ours = {**shared, "variant": "ours", "micro_tokens": ours_tokens}
        for states in args.optimizer:
            name = f"ours{suffix}" + (f", {states}" if len(args.optimizer) > 1 else "")
            cases.append({**ours, "optimizer": states, "name": name})
        for tuned in (True, False) if dtype == "float32" and args.untuned else (True,):
            for variant in args.peers if kept != "selective" else ():
                name = variant + suffix + ("" if tuned else ", untuned")
                cases.append({**shared, "variant": variant, "tuned": tuned, "name": name, "micro_tokens": tokens[variant]})
        for rank in args.lora if kept == "none" else ():
            for case in [
                case for case in cases if case["dtype"] == dtype and not case["lora"] and case["checkpointing"] == kept
            ]:
                cases.append({**case, "lora": rank, "name": f"{case['name']}, lora {rank}"})
            for bits in args.bits:
                cases.append({**ours, "lora": rank, "bits": bits, "name": f"ours{suffix}, lora {rank}, {bits} bits"})
        if dtype == "float32":
            for name in args.layouts:
                cases.append({**ours, "layout": LAYOUTS[name], "name": f"ours{suffix}, {name}"})
    return cases


def run(case: dict[str, Any], root: Path, timeout_s: float) -> dict[str, Any]:
    out = root / "case.json"
    size = Layout(**case["layout"]).size
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    spec = root / "case_spec.json"
    spec.write_text(json.dumps({**case, "path": str(root / case["model"])}), encoding="utf-8")
    command = [sys.executable, *launcher, str(Path(__file__).with_name("train_variants.py")), str(spec), str(out)]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return run_case(command, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, out, timeout_s)


def compare(model: str, cases: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """What the figures come to, per dtype and rank of adapters: ours over the peers, the best of each, and two ranks over one."""
    ratios: dict[str, Any] = {"model": model}
    speed = "tokens_per_cpu_s" if device == "cpu" else "tokens_per_s"
    for kind in dict.fromkeys((case["dtype"], case["lora"], case["bits"]) for case in cases):
        dtype, rank, bits = kind
        alike = [case for case in cases if (case["dtype"], case["lora"], case["bits"]) == kind]
        done = {case["name"]: case for case in alike if "error" not in case}
        single = [case for case in done.values() if case["variant"] == "ours" and not case["layout"]]
        if not single:
            continue
        ours = max(single, key=lambda case: case[speed])
        peers = {name: case for name, case in done.items() if case["variant"] != "ours" and case["tuned"]}
        entry: dict[str, Any] = {"ours": ours["name"]}
        padded = [case[speed] for case in peers.values() if case["variant"] == "padded"]
        if padded:
            entry["speed_over_padded"] = round(ours[speed] / max(padded), 2)
        if peers:
            best = max(peers, key=lambda name: peers[name][speed])
            entry |= {"best_peer": best, "speed_over_best": round(ours[speed] / peers[best][speed], 2)}
        packed = [case["peak_mib"] for name, case in peers.items() if "packed" in name]
        if packed:
            entry["memory_over_packed"] = round(ours["peak_mib"] / min(packed), 2)
        first = ours["losses"]
        entry["loss_difference"] = max(
            (abs(a - b) / abs(b) for case in done.values() for a, b in zip(case["losses"], first, strict=True)), default=0.0
        )
        entry["two_ranks_over_one"] = {
            name: round(case["tokens_per_s"] / ours["tokens_per_s"], 2) for name, case in done.items() if case["layout"]
        }
        ratios[dtype + (f", lora {rank}" if rank else "") + (f", {bits} bits" if bits else "")] = entry
    return ratios


def row_of(case: dict[str, Any]) -> list[str]:
    names = [case["model"], case["dtype"], case["name"]]
    if "error" in case:
        return [*names, case["error"], *[""] * 5]
    sent = max((sum(part["mib_sent"].values()) for part in case.get("communication", [])), default=0.0)
    waited = max(case["blocked_s"]) if sent else 0.0
    figures = [
        f"{case['step_s']:.3f}",
        f"{case['tokens_per_s']:.0f}",
        f"{case['tokens_per_cpu_s']:.0f}",
        f"{case['peak_mib']:.0f}",
        f"{case['mfu']:.2f}",
    ]
    return [*names, *figures, f"{sent:.1f} / {waited:.3f}" if sent else ""]


HEADS = ("model", "dtype", "variant", "step, s", "tokens/s", "tokens/CPU-s", "peak, MiB", "MFU", "sent, MiB / blocked, s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--models", type=model_name, nargs="+", default=["S", "M"], metavar="MODEL", help=MODELS_HELP)
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", default=["float32"], help="of the parameters")
    parser.add_argument("--peers", choices=PEERS, nargs="*", metavar="PEER", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="*", help="of ours on two ranks; none where there are fewer GPUs")
    parser.add_argument(
        "--checkpointing", choices=("none", "selective", "full"), nargs="+", default=["none"], help="peers: no selective"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", default=["masters"], help="states of ours, see above")
    parser.add_argument("--lora", type=int, nargs="*", default=[], metavar="RANK", help="also with adapters; small models")
    parser.add_argument(
        "--bits", type=int, nargs="*", default=[], choices=(4, 8), help="with --lora: also beside such a base, ours"
    )
    parser.add_argument("--untuned", action="store_true", help="peers also without the matmul switch, for information")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile")
    parser.add_argument(
        "--rows", type=int, nargs=3, metavar=("NUMBER", "SHORTEST", "LONGEST"), help="the batch; large models: 32 512 4096"
    )
    parser.add_argument("--micro-tokens", type=int, help="ours; 768, of large models 8192")
    parser.add_argument("--micro-rows", type=int, help="padded; 8, of large models 2")
    parser.add_argument("--peer-tokens", type=int, help="the other peers; small models: each one's best, large ones: as ours")
    parser.add_argument("--no-files", action="store_true", help="small models too draw their weights in place; for one rank")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed seconds of each case, after two steps to warm up")
    parser.add_argument("--least", type=int, default=2, help="timed steps of each case at least, and exactly on two ranks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a case is given up")
    parser.add_argument("--quick", action="store_true", help="the smallest model, one timed step")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.quick:
        args.models, args.seconds, args.least = ["tiny"], 0.0, 1
    if args.peers is None:
        args.peers = ["padded", "sorted", "packed_sdpa"]
        args.peers += ["packed_flex", "compiled_sorted", "compiled_packed_flex"] if args.device == "cuda" else []
    in_place = args.no_files or any(map(is_large, args.models))
    if args.layouts is None:
        args.layouts = [] if in_place or (args.device == "cuda" and torch.cuda.device_count() < 2) else list(LAYOUTS)
    if args.layouts and in_place:
        parser.error("--layouts: models whose weights are drawn in place run on one rank")
    return args


def main() -> None:
    args = parse()
    machine = {**machine_facts(), **device_facts(args.device)}
    if args.device == "cpu":
        from rlhf_spmd.parallel.world import choose_cpu_matmul

        machine["float32_matmul"] = choose_cpu_matmul()
    rates = machine_rates(1, args.dtypes, args.device)
    machine |= {key: round(rate / 1e9, 1) for key, rate in rates.items()}
    report: dict[str, Any] = {"bench": "train_step", "machine": machine, "cases": [], "ratios": []}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for model in args.models:
            write_model(root / model, model, with_weights=not (args.no_files or is_large(model)))
            for rank in () if is_large(model) else args.lora:  # large ones begin with B at zero
                write_adapter(root / model, rank)
            done: list[dict[str, Any]] = []
            print(table(HEADS, [], 3), flush=True)
            for case in plan_cases(args, model):
                made = run(case, root, args.timeout)
                if "error" not in made:
                    peak = rates[f"{case['dtype']}_flops"] * Layout(**case["layout"]).size
                    made["mfu"] = rounded(made.pop("flops_per_s") / peak)
                done.append({**case, **made})
                report["cases"].append(done[-1])
                print(line(row_of(done[-1])), flush=True)
                save(report, args.out)
            report["ratios"].append(compare(model, done, args.device))
            print(json.dumps(report["ratios"][-1], indent=1), flush=True)
    save(report, args.out)


if __name__ == "__main__":
    main()
