"""Tokens/s of one optimizer step: ours against transformers with torch's AdamW, and on two ranks against one.

    python scripts/bench/train_step.py --out train_step.json

Same weights, same ragged batch, same loss (negative log-likelihood of every token but the first of a row, divided by their
number), same gradient clipping and fused AdamW. Every variant runs in a process of its own with one thread per rank:

- ours: rows packed, at most ``--micro-tokens`` in a micro-batch; one rank, then every two-rank layout.
- padded: rows as they come, ``--micro-rows`` in a micro-batch. sorted: rows sorted by length, micro-batches of so many tokens
  with their padding. packed: rows concatenated with position_ids, of which transformers makes a block mask (sdpa, eager) or
  compiles one (flex). The sizes of the latter two are those at which each is fastest, unless ``--peer-tokens`` is given.

"tuned" gives peers what ours sets for itself: float32 products through oneDNN, and freed memory kept. Losses of the first steps
are compared, so that the work is the same. Memory is the peak of a step above the process after its imports.
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
from measure import machine_facts, machine_rates, run_case, table
from train_variants import MODELS, config_of

from rlhf_spmd.parallel.layout import Layout

SOURCE = Path(__file__).resolve().parents[2] / "src"
# tokens in a micro-batch at which each was the fastest of 512, 1024, 2048 and 4096 ("padded" counts rows)
PEERS = {"padded": 0, "sorted": 1024, "packed_sdpa": 512, "packed_eager": 512, "packed_flex": 1024}
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
    common = {"model": model, "micro_tokens": args.micro_tokens, "micro_rows": args.micro_rows}
    common |= {"seconds": args.seconds, "least": args.least}
    tokens = {name: args.peer_tokens or PEERS[name] for name in PEERS}
    cases: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        shared = {**common, "dtype": dtype}
        cases.append({**shared, "variant": "ours", "layout": {}, "name": "ours", "tuned": True})
        for tuned in (True, False) if dtype == "float32" and args.untuned else (True,):
            for variant in args.peers:
                name = variant + ("" if tuned else ", untuned")
                cases.append({**shared, "variant": variant, "tuned": tuned, "name": name, "micro_tokens": tokens[variant]})
        if dtype == "float32":
            for name in args.layouts:
                cases.append({**shared, "variant": "ours", "layout": LAYOUTS[name], "name": f"ours, {name}", "tuned": True})
    return cases


def run(case: dict[str, Any], root: Path, timeout_s: float) -> dict[str, Any]:
    out = root / "case.json"
    size = Layout(**case.get("layout", {})).size
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    spec = root / "case_spec.json"
    spec.write_text(json.dumps({**case, "path": str(root / case["model"])}), encoding="utf-8")
    command = [sys.executable, *launcher, str(Path(__file__).with_name("train_variants.py")), str(spec), str(out)]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return run_case(command, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, out, timeout_s)


def compare(model: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What the figures come to, per dtype: ours over the peers, and two ranks over one."""
    ratios: dict[str, Any] = {"model": model}
    for dtype in dict.fromkeys(case["dtype"] for case in cases):
        done = {case["name"]: case for case in cases if case["dtype"] == dtype and "error" not in case}
        ours = done.get("ours")
        if ours is None:
            continue
        peers = {name: case for name, case in done.items() if name in PEERS}
        entry: dict[str, Any] = {}
        if "padded" in peers:
            entry["speed_over_padded"] = round(ours["tokens_per_cpu_s"] / peers["padded"]["tokens_per_cpu_s"], 2)
        if peers:
            best = max(peers, key=lambda name: peers[name]["tokens_per_cpu_s"])
            entry |= {"best_peer": best}
            entry["speed_over_best"] = round(ours["tokens_per_cpu_s"] / peers[best]["tokens_per_cpu_s"], 2)
        packed = [case["peak_mib"] for name, case in peers.items() if name.startswith("packed")]
        if packed:
            entry["memory_over_packed"] = round(ours["peak_mib"] / min(packed), 2)
        first = ours["losses"]
        entry["loss_difference"] = max(
            (abs(a - b) / abs(b) for case in done.values() for a, b in zip(case["losses"], first, strict=True)), default=0.0
        )
        entry["two_ranks_over_one"] = {
            name: round(case["tokens_per_s"] / ours["tokens_per_s"], 2)
            for name, case in done.items()
            if name.startswith("ours,")
        }
        ratios[dtype] = entry
    return ratios


def row_of(case: dict[str, Any]) -> list[str]:
    names = [case["model"], case["dtype"], case["name"]]
    if "error" in case:
        return [*names, case["error"], *[""] * 4]
    sent = max((sum(part["mib_sent"].values()) for part in case.get("communication", [])), default=0.0)
    waited = max(case["blocked_s"]) if sent else 0.0
    figures = [
        f"{case['step_s']:.3f}",
        f"{case['tokens_per_s']:.0f}",
        f"{case['tokens_per_cpu_s']:.0f}",
        f"{case['peak_mib']:.0f}",
    ]
    return [*names, *figures, f"{sent:.1f} / {waited:.3f}" if sent else ""]


HEADS = ("model", "dtype", "variant", "step, s", "tokens/s", "tokens/CPU-s", "peak, MiB", "sent, MiB / blocked, s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["S", "M"])
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", default=["float32"])
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=["padded", "sorted", "packed_sdpa"])
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--untuned", action="store_true", help="peers also without the matmul switch, for information")
    parser.add_argument("--micro-tokens", type=int, default=768, help="ours")
    parser.add_argument("--micro-rows", type=int, default=8, help="padded")
    parser.add_argument("--peer-tokens", type=int, help="the other peers, in place of each one's best")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed seconds of each case, after two steps to warm up")
    parser.add_argument("--least", type=int, default=2, help="timed steps of each case at least, and exactly on two ranks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a case is given up")
    parser.add_argument("--quick", action="store_true", help="the smallest model, one timed step")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.quick:
        args.models, args.seconds, args.least = ["tiny"], 0.0, 1
    from rlhf_spmd.models.weights import write_random_model
    from rlhf_spmd.parallel.world import choose_cpu_matmul

    machine = {**machine_facts(), "torch": torch.__version__, "float32_matmul": choose_cpu_matmul()}
    machine |= {key: round(rate / 1e9, 1) for key, rate in machine_rates(1, args.dtypes).items()}
    cases, ratios = [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for model in args.models:
            write_random_model(root / model, config_of(model), seed=0)
            done = []
            print(table(HEADS, [], 3), flush=True)
            for case in plan_cases(args, model):
                done.append({**case, **run(case, root, args.timeout)})
                print("| " + " | ".join(row_of(done[-1])) + " |", flush=True)
            ratios.append(compare(model, done))
            print(json.dumps(ratios[-1], indent=1), flush=True)
            cases += done
    if args.out:
        report = {"bench": "train_step", "machine": machine, "cases": cases, "ratios": ratios}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
