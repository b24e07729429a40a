"""Useful tokens/s of generation: ours and peers on the same weights, prompts and lengths, one after the other in one run.

    python scripts/bench/generation.py --models S --out generation.json \\
        --peer vllm=/path/to/python --peer openvino=/path/to/python

64 prompts of 16 to 256 tokens, responses of 16 to 256 (most of them short), end-of-sequence ignored; a token that nobody asked
for does not count. Every engine runs in a process of its own, ours and transformers in this Python environment, others in the one
that ``--peer`` names; an engine that is not there is skipped, and the table says why. Sampled: temperature 1, no filters.

Roofline: the larger of two times, over the measured one. FLOPs of the work over the rate of a large matrix product; bytes of
the weights in every step (as many as the longest response has) and of the keys and values that each token reads, over the rate
of a large copy. Both rates are measured in the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from generation_engines import GROUP_PROMPT
from measure import machine_facts, machine_rates, median, run_case, table

from rlhf_spmd.data.sort_digits import LLAMA
from rlhf_spmd.models.spec import ModelSpec, read_spec

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 4},
    "S": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 32},
    "M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192, "head_dim": 64},
}
ENGINES = ("ours", "ours_2_ranks", "transformers", "transformers_cb", "vllm", "openvino")
SLOW = ("transformers", "transformers_cb")  # one timed repetition is enough
Rows = list[tuple[list[int], int]]


def make_rows(num_rows: int, longest: int, vocab: int) -> Rows:
    """Prompts of 16 .. ``longest`` tokens; as long responses, most of them short, one at its end."""
    rng = random.Random(5)
    rows = []
    for index in range(num_rows):
        prompt = [rng.randrange(4, vocab) for _ in range(rng.randint(16, longest))]
        wanted = 16 + int((longest - 16) * rng.random() ** 4.2)
        rows.append((prompt, wanted if index else longest))
    return rows


def work_of(spec: ModelSpec, rows: Rows, dtype: str) -> tuple[float, float]:
    """(FLOPs, bytes) that the rows take with no padding and nothing computed twice."""
    width, kv_width = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    block = spec.hidden_size * (2 * width + 2 * kv_width + 3 * spec.intermediate_size)
    weights = spec.num_hidden_layers * block + spec.vocab_size * spec.hidden_size
    item = getattr(torch, dtype).itemsize
    flops = read = 0.0
    for prompt, wanted in rows:
        length = len(prompt) + wanted - 1  # the last token is drawn, not computed
        flops += 2.0 * (spec.num_hidden_layers * block * length + spec.vocab_size * spec.hidden_size * wanted)
        flops += 4.0 * spec.num_hidden_layers * width * length * (length + 1) / 2
        contexts = sum(range(len(prompt) + 1, length + 1))
        read += 2.0 * spec.num_hidden_layers * kv_width * item * contexts
    return flops, read + weights * item * max(wanted for _, wanted in rows)


def summarise(case: dict[str, Any], rates: dict[str, float], work: tuple[float, float]) -> dict[str, Any]:
    useful = sum(n for _, n in case["rows"])
    result = {key: value for key, value in case.items() if key not in ("rows", "wall_s", "cpu_s", "path", "exported")}
    if "error" in case:
        return result
    wall = median(case["wall_s"])
    seconds = {"flops": work[0] / rates[f"{case['dtype']}_flops"], "bytes": work[1] / rates["copy_bytes"]}
    return {
        **result,
        "repeats": len(case["wall_s"]),
        "wall_s": round(wall, 4),
        "cpu_s": round(median(case["cpu_s"]), 4),
        "tokens_per_s": round(useful / wall, 1),
        "tokens_per_cpu_s": round(useful / median(case["cpu_s"]), 1),
        "roofline_flops": round(seconds["flops"] / wall, 3),
        "roofline_bytes": round(seconds["bytes"] / wall, 3),
        "roofline": round(max(seconds.values()) / wall, 3),
    }


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> dict[str, float]:
    """``rows``: part of the rows that are equal; ``tokens``: part of the tokens before each row's first difference."""
    equal = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y))
        for x, y in zip(tokens, reference, strict=True)
    ]
    total = sum(len(y) for y in reference)
    same = sum(x == y for x, y in zip(tokens, reference, strict=True))
    return {"rows": round(same / len(reference), 4), "tokens": round(sum(equal) / total, 4)}


class Bench:
    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.args, self.root = args, root
        self.peers: dict[str, str] = dict(args.peer)
        self.results: list[dict[str, Any]] = []

    def spawn(self, engine: str, case: dict[str, Any]) -> dict[str, Any]:
        """Run one engine; {"error": reason} where it cannot."""
        python = self.peers.get(engine.removeprefix("export_"), sys.executable)
        if engine in ("vllm", "openvino") and engine not in self.peers:
            return {"error": f"skipped: no --peer {engine}=PYTHON"}
        spec, out = self.root / "case.json", self.root / "out.json"
        ranks = 2 if engine == "ours_2_ranks" else 1
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks > 1 else []
        threads = str(case["threads"] // ranks)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if python == sys.executable:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        else:
            env.pop("PYTHONPATH", None)
        spec.write_text(json.dumps({**case, "engine": engine, "spawned": time.time()}), encoding="utf-8")
        script = str(Path(__file__).with_name("generation_engines.py"))
        return run_case([python, *launcher, script, str(spec), str(out)], env, out, self.args.timeout)

    def run_model(self, name: str, path: Path) -> None:
        args, spec = self.args, read_spec(path)
        longest = min(args.longest, (spec.max_position_embeddings - 1) // 2)
        rows = make_rows(args.rows, longest, spec.vocab_size)
        base = {"path": str(path), "exported": str(self.root / f"{name}_openvino"), "vocab": spec.vocab_size, "rows": rows}
        export = None
        if "openvino" in args.engines and "openvino" in self.peers:
            export = self.spawn("export_openvino", {**base, "threads": 2})
        for dtype, threads in ((d, t) for d in args.dtypes for t in args.threads):
            rates = self.rates(dtype, threads)
            for mode in args.modes:
                case = {**base, "model": name, "dtype": dtype, "threads": threads, "mode": mode, "least": args.repeats}
                case |= {"cb_batch_tokens": args.cb_batch_tokens, "repeats": args.repeats}
                case["extras"] = mode == "greedy" and threads == 1 and spec.max_position_embeddings > GROUP_PROMPT
                self.run_engines(case, rates, work_of(spec, rows, dtype), export)

    def run_engines(
        self, case: dict[str, Any], rates: dict[str, float], work: tuple[float, float], export: dict[str, Any] | None
    ) -> None:
        reference = None
        engines = [engine for engine in self.args.engines if engine != "ours_2_ranks" or case["threads"] == 2]
        done = {}
        for engine in engines:
            slow = engine in SLOW
            # ranks must agree on the number of repetitions: no time budget there
            seconds = 0.0 if slow or engine == "ours_2_ranks" else self.args.seconds
            if engine == "openvino" and export is not None and "error" in export:
                made = export
            else:
                made = self.spawn(engine, {**case, "seconds": seconds, "least": 1 if slow else case["least"]})
            tokens = made.pop("tokens", None)
            done[engine] = summarise({**case, **made, "engine": engine}, rates, work)
            if engine == "openvino" and export is not None and "error" not in export:
                done[engine]["export_s"] = export["seconds"]
            done[engine]["made"] = tokens
            print(line_of(done[engine]), flush=True)
        reference = done.get("transformers", {}).get("made")
        for engine, entry in done.items():
            made = entry.pop("made", None)
            if made and reference and case["mode"] == "greedy" and engine != "transformers":
                entry["agreement"] = agreement(made, reference)
        self.results += done.values()

    def rates(self, dtype: str, threads: int) -> dict[str, float]:
        found = machine_rates(threads, [dtype])
        torch.set_num_threads(1)
        self.results.append({"rates": {key: round(rate / 1e9, 1) for key, rate in found.items()}, "threads": threads})
        return found


KEY = ("model", "dtype", "threads", "mode")
HEADS = ("model", "dtype", "threads", "mode", "engine", "start-up, s", "useful tokens/s", "per CPU-s", "peak, MiB", "roofline")


def line_of(entry: dict[str, Any]) -> str:
    cells = [entry["model"], entry["dtype"], str(entry["threads"]), entry["mode"], entry["engine"]]
    if "error" in entry:
        cells += [entry["error"], "", "", "", ""]
    else:
        cells += [f"{entry['startup_s']:.1f}", f"{entry['tokens_per_s']:.0f}", f"{entry['tokens_per_cpu_s']:.0f}"]
        cells += [f"{entry['peak_mib']:.0f}", f"{entry['roofline']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over every peer of the same case, per wall second (the faster of ours) and per CPU second (ours on one rank)."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for entry in results:
        if "tokens_per_s" in entry:
            key = tuple(entry[name] for name in KEY)
            groups.setdefault(key, {})[entry["engine"]] = entry
    out = []
    for key, done in groups.items():
        if "ours" not in done:
            continue
        ours = max(entry["tokens_per_s"] for engine, entry in done.items() if engine.startswith("ours"))
        per_cpu = done["ours"]["tokens_per_cpu_s"]
        peers = {engine: entry for engine, entry in done.items() if not engine.startswith("ours")}
        over = {engine: round(ours / entry["tokens_per_s"], 2) for engine, entry in peers.items()}
        over_cpu = {engine: round(per_cpu / entry["tokens_per_cpu_s"], 2) for engine, entry in peers.items()}
        out.append({**dict(zip(KEY, key, strict=True)), "ours_over": over, "ours_over_per_cpu": over_cpu})
    return out


def peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in ENGINES or not python:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=/path/to/python with a name of {', '.join(ENGINES[2:])}")
    return name, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, nargs="*", default=["S"])
    parser.add_argument("--model-dir", type=Path, help="a pretrained model's directory, measured after the others")
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--modes", choices=("greedy", "sampled"), nargs="+", default=["greedy"])
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions at least (transformers: one)")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="timed seconds of each engine; more repetitions while they fit"
    )
    parser.add_argument(
        "--cb-batch-tokens", type=int, default=512, help="transformers' continuous batching: tokens in one step; 0: its choice"
    )
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which an engine is given up")
    parser.add_argument("--quick", action="store_true", help="the smallest model, 6 rows, ours and transformers")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.quick:
        args.models, args.dtypes, args.rows, args.longest, args.repeats, args.seconds = ["tiny"], ["float32"], 6, 24, 1, 0.0
        args.engines = [engine for engine in args.engines if engine in ("ours", "transformers")]
    from rlhf_spmd.models.weights import write_random_model
    from rlhf_spmd.parallel.world import choose_cpu_matmul

    machine = {**machine_facts(), "torch": torch.__version__, "float32_matmul": choose_cpu_matmul()}
    print(table(HEADS, [], 5), flush=True)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args, Path(name))
        for model in args.models:
            write_random_model(Path(name) / model, {**LLAMA, **MODELS[model], "max_position_embeddings": 1024}, seed=0)
            bench.run_model(model, Path(name) / model)
        if args.model_dir:
            bench.run_model(args.model_dir.name, args.model_dir)
    for entry in bench.results:
        if "group_sampling" in entry:
            print(
                f"{entry['model']} {entry['dtype']}: 8 samples of a {GROUP_PROMPT}-token prompt, first token: {entry['group_sampling']}"
            )
        if "agreement" in entry:
            print(f"{entry['model']} {entry['dtype']} {entry['engine']}: greedy, equal to transformers: {entry['agreement']}")
    compared = ratios(bench.results)
    print(json.dumps(compared, indent=1))
    if args.out:
        cases = [entry for entry in bench.results if "engine" in entry]
        rates = [entry for entry in bench.results if "rates" in entry]
        report = {"bench": "generation", "machine": machine, "rates": rates, "cases": cases, "ratios": compared}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
