"""Useful tokens/s of generation: ours and peers on the same weights, prompts and lengths, one after the other in one run.

    python scripts/bench/generation.py --models S --out generation.json \\
        --peer vllm=/path/to/python --peer openvino=/path/to/python
    python scripts/bench/generation.py --models qwen3_0.6b --workload nano --dtypes bfloat16 --modes sampled \\
        --ours enforce_eager=false --ours enforce_eager=true,steps_per_sync=1 --out generation_gpu.json  # on a GPU

Workloads: ``skewed``, 64 prompts of 16 to 256 tokens with responses of 16 to 256, most of them short; ``nano``, the benchmark of
nano-vllm: 256 prompts of 100 to 1024 tokens with responses of 100 to 1024, lengths as likely as each other, 133,966 tokens in all.
End-of-sequence is ignored; a token that nobody asked for does not count. Every engine runs in a process of its own, in this
Python environment or in the one that ``--peer`` names; an engine that is not there is skipped, and the table says why. Sampled:
temperature 1, no filters.

Roofline: the larger of two times, over the measured one. FLOPs of the work over the rate of a large matrix product; bytes of
the weights in every step (as many as the longest response has) and of the keys and values that each token reads, over the rate
of a large copy. Both rates are measured in the run on ``--device``. ``--out`` is written after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from generation_engines import GROUP_PROMPT
from measure import add_device, device_facts, machine_facts, machine_rates, median, rounded, run_case, save, table
from rlhf_spmd.generation import GenerationConfig
from rlhf_spmd.models.spec import ModelSpec, read_spec
from shapes import MODELS_HELP, is_large, model_name, write_model

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENGINES = ("ours", "ours_2_ranks", "transformers", "transformers_cb", "vllm", "openvino")
PACKAGES = {"vllm": "vllm", "openvino": "openvino_genai"}
SLOW = ("transformers", "transformers_cb")  # one timed repetition is enough
WORKLOADS = {"skewed": (64, 16, 256), "nano": (256, 100, 1024)}  # rows, shortest and longest prompt and response
Rows = list[tuple[list[int], int]]


def make_rows(workload: str, num_rows: int, longest: int, vocab: int) -> Rows:
    """Prompts and responses of the workload's shortest to ``longest`` tokens. skewed: one of the longest responses at the front."""
    shortest = min(WORKLOADS[workload][1], longest)
    if workload == "nano":  # the order of the draws gives the lengths that nano-vllm's figures are of
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) % vocab for _ in range(rng.randint(shortest, longest))] for _ in range(num_rows)]
        return [(prompt, rng.randint(shortest, longest)) for prompt in prompts]
    rng, rows = random.Random(5), []
    for index in range(num_rows):
        prompt = [rng.randrange(4, vocab) for _ in range(rng.randint(shortest, longest))]
        wanted = shortest + int((longest - shortest) * rng.random() ** 4.2)
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
        "roofline_flops": rounded(seconds["flops"] / wall),
        "roofline_bytes": rounded(seconds["bytes"] / wall),
        "roofline": rounded(max(seconds.values()) / wall),
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
        self.machine = {**machine_facts(), **device_facts(args.device)}
        if args.device == "cpu":
            from rlhf_spmd.parallel.world import choose_cpu_matmul

            self.machine["float32_matmul"] = choose_cpu_matmul()

    def save(self) -> None:
        cases = [entry for entry in self.results if "engine" in entry]
        rates = [entry for entry in self.results if "rates" in entry]
        report = {"bench": "generation", "machine": self.machine, "rates": rates, "cases": cases}
        save({**report, "ratios": ratios(self.results)}, self.args.out)

    def spawn(self, engine: str, case: dict[str, Any]) -> dict[str, Any]:
        """Run one engine; {"error": reason} where it cannot."""
        python = self.peers.get(engine.removeprefix("export_"), sys.executable)
        if engine in PACKAGES and engine not in self.peers and find_spec(PACKAGES[engine]) is None:
            return {"error": f"skipped: {PACKAGES[engine]} is not installed here, and no --peer {engine}=PYTHON given"}
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
        number, _, longest = WORKLOADS[args.workload]
        longest = min(args.longest or longest, (spec.max_position_embeddings - 1) // 2)
        rows = make_rows(args.workload, args.rows or number, longest, spec.vocab_size)
        base = {"path": str(path), "exported": str(self.root / f"{name}_openvino"), "vocab": spec.vocab_size, "rows": rows}
        base |= {"device": args.device, "workload": args.workload}
        export = None
        if args.device == "cpu" and "openvino" in args.engines and ("openvino" in self.peers or find_spec("openvino_genai")):
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
        made_by: list[tuple[dict[str, Any], list[list[int]]]] = []
        for engine, settings in self.engines(case):
            slow, name = engine in SLOW, " ".join([engine, *(f"{key}={value}" for key, value in settings.items())])
            # ranks must agree on the number of repetitions: no time budget there
            seconds = 0.0 if slow or engine == "ours_2_ranks" else self.args.seconds
            if engine == "openvino" and export is not None and "error" in export:
                made = export
            else:
                least = 1 if slow else case["least"]
                made = self.spawn(engine, {**case, "settings": settings, "seconds": seconds, "least": least})
            made["settings"] = settings
            tokens = made.pop("tokens", [])
            entry = summarise({**case, **made, "engine": name}, rates, work)
            if engine == "openvino" and export is not None and "error" not in export:
                entry["export_s"] = export["seconds"]
            self.results.append(entry)
            made_by.append((entry, tokens))
            print(line_of(entry), flush=True)
            self.save()
        drawn = {entry["engine"]: tokens for entry, tokens in made_by if tokens}
        reference = "transformers" if "transformers" in drawn else next(iter(drawn), None)
        for entry, tokens in made_by:
            if tokens and case["mode"] == "greedy" and entry["engine"] != reference:
                entry["agreement"] = agreement(tokens, drawn[reference])
                print(f"{case['model']} {case['dtype']} {entry['engine']}: greedy, equal to {reference}: {entry['agreement']}")

    def engines(self, case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(engine, settings of ours)."""
        args, chosen = self.args, []
        for engine in args.engines:
            if engine == "ours":
                chosen += [(engine, settings) for settings in args.ours]
            elif engine != "openvino" or case["device"] == "cpu":
                chosen += [(engine, {})] if engine != "ours_2_ranks" or case["threads"] == 2 else []
        return chosen

    def rates(self, dtype: str, threads: int) -> dict[str, float]:
        found = machine_rates(threads, [dtype], self.args.device)
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
        one_rank = [entry for engine, entry in done.items() if engine.partition(" ")[0] == "ours"]
        if not one_rank:
            continue
        ours = max(entry["tokens_per_s"] for engine, entry in done.items() if engine.startswith("ours"))
        per_cpu = max(entry["tokens_per_cpu_s"] for entry in one_rank)
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


def settings_of(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        settings[key] = json.loads(value) if value in ("true", "false", "null") or value[:1].isdecimal() else value
    try:
        GenerationConfig(**settings).check("--ours")
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return settings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--models", type=model_name, nargs="*", default=["S"], metavar="MODEL", help=MODELS_HELP)
    parser.add_argument("--model-dir", type=Path, help="a pretrained model's directory, measured after the others")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtypes", choices=dtypes, nargs="+", default=list(dtypes), help="of parameters and cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of each engine on the CPU")
    parser.add_argument("--modes", choices=("greedy", "sampled"), nargs="+", default=["greedy"], help="sampled: temperature 1")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES), help="openvino: CPUs only")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", help="who runs an engine")
    parser.add_argument(
        "--ours",
        type=settings_of,
        action="append",
        metavar="KEY=VALUE,...",
        help="generator settings of ours, as attention=triton,enforce_eager=false,steps_per_sync=8; a case for each --ours",
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="skewed", help="see above")
    parser.add_argument("--rows", type=int, help="in place of the workload's")
    parser.add_argument("--longest", type=int, help="prompt and response, in place of the workload's")
    parser.add_argument("--no-files", action="store_true", help="small models too draw their weights in place")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions at least (transformers: one)")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="timed seconds of each engine; more repetitions while they fit"
    )
    parser.add_argument(
        "--cb-batch-tokens",
        type=int,
        help="transformers' continuous batching: tokens in one step; 0: its choice; 512 on CPUs, 0 on GPUs",
    )
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which an engine is given up")
    parser.add_argument("--quick", action="store_true", help="the smallest model, 6 rows, ours and transformers")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.quick:
        args.models, args.dtypes, args.rows, args.longest, args.repeats, args.seconds = ["tiny"], ["float32"], 6, 24, 1, 0.0
        args.engines = [engine for engine in args.engines if engine in ("ours", "transformers")]
    if args.cb_batch_tokens is None:
        args.cb_batch_tokens = 512 if args.device == "cpu" else 0
    args.ours = args.ours or [{}]
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args, Path(name))
        print(table(HEADS, [], 5), flush=True)
        for model in args.models:
            write_model(Path(name) / model, model, with_weights=not (args.no_files or is_large(model)))
            bench.run_model(model, Path(name) / model)
        if args.model_dir:
            bench.run_model(args.model_dir.name, args.model_dir)
    for entry in bench.results:
        if "group_sampling" in entry:
            case = f"{entry['model']} {entry['dtype']}"
            print(f"{case}: 8 samples of a {GROUP_PROMPT}-token prompt, first token: {entry['group_sampling']}")
    print(json.dumps(ratios(bench.results), indent=1))
    bench.save()


if __name__ == "__main__":
    main()
