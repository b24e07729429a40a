"""Useful tokens/s of generation: ours and peers on the same weights, prompts and lengths, one after the other in one run.

    python scripts/bench/generation.py --models S --out generation.json --peer vllm=PYTHON openvino=PYTHON
    python scripts/bench/generation.py --models qwen3_0.6b --workload nano --dtypes bfloat16 --modes sampled \\
        --ours enforce_eager=false enforce_eager=true,steps_per_sync=1 --out generation_gpu.json  # on a GPU

Workloads: ``skewed``, 64 prompts of 16 to 256 tokens with responses of 16 to 256, most of them short; ``nano``, the benchmark of
nano-vllm: 256 prompts of 100 to 1024 tokens with responses of 100 to 1024, lengths as likely as each other, 133,966 tokens in all.
End-of-sequence is ignored; a token that nobody asked for does not count. Sampled: temperature 1, no filters.

Every engine runs in a process of its own, in this Python environment or in the one that ``--peer`` names; an engine that is not there
is skipped, and the table says why. OpenVINO runs on CPUs only. ``--ours``: settings of our generator, a case for each.

Roofline: the larger of two times, over the measured one. FLOPs of the work over the rate of a large matrix product; bytes of the
weights in every step (as many as the longest response has) and of the keys and values that each token reads, over the rate of a
large copy. Both rates are measured in the same run.

``--model-dir``: a pretrained model, measured after the others. ``--rows`` and ``--longest`` (of prompts and responses) replace the
workload's. ``--repeats``: timed repetitions at least (transformers: one); more while they fit into ``--seconds``.
``--cb-batch-tokens``: tokens in one step of transformers' continuous batching; 0: its choice; 512 on CPUs, 0 on GPUs. ``--no-files``:
small models too draw their weights in place. ``--out`` is written after every case.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from engines import export_openvino, measure_engine
from measure import (
    Device,
    chosen,
    found_device,
    line,
    machine_facts,
    machine_rates,
    median,
    rounded,
    run_case,
    run_parts,
    save,
    table,
)
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.generation import GenerationConfig
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.device_setup import choose_cpu_matmul
from shapes import is_large, write_model

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


@dataclass(frozen=True)
class Options:
    models: Sequence[str] = ("S",)
    model_dir: Path | None = None
    device: Device | None = None
    dtypes: Sequence[Literal["float32", "bfloat16"]] = ("float32", "bfloat16")
    threads: Sequence[int] = (1,)
    modes: Sequence[Literal["greedy", "sampled"]] = ("greedy",)
    engines: Sequence[str] | None = None
    peer: Sequence[str] = ()
    ours: Sequence[str] = ("",)
    workload: Literal["skewed", "nano"] = "skewed"
    rows: int | None = None
    longest: int | None = None
    no_files: bool = False
    repeats: int = 3
    seconds: float = 6.0
    cb_batch_tokens: int | None = None
    timeout: float = 400.0
    out: Path | None = None

    @property
    def peers(self) -> dict[str, str]:
        """Engine -> Python."""
        found = dict(text.partition("=")[::2] for text in self.peer)
        chosen(list(found), ENGINES[2:])
        return found


def settings_of(text: str) -> dict[str, Any]:
    """Settings of our generator, from text as ``attention=triton,enforce_eager=false``."""
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        settings[key] = json.loads(value) if value in ("true", "false", "null") or value[:1].isdecimal() else value
    try:
        check_section(GenerationConfig(**settings), "--ours")
    except (TypeError, ValueError) as error:
        sys.exit(str(error))
    return settings


def spawn(engine: str, case: dict[str, Any], options: Options) -> dict[str, Any]:
    """Run one engine; {"error": reason} where it cannot."""
    python = options.peers.get(engine.removeprefix("export_"), sys.executable)
    if engine in PACKAGES and engine not in options.peers and find_spec(PACKAGES[engine]) is None:
        return {"error": f"skipped: {PACKAGES[engine]} is not installed here, and no --peer {engine}=PYTHON given"}
    ranks = 2 if engine == "ours_2_ranks" else 1
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    threads = str(case["threads"] // ranks)
    body = export_openvino if engine == "export_openvino" else measure_engine
    case = {**case, "engine": engine, "spawned": time.time()}
    return run_case(body, case, ranks, python, options.timeout, False, OMP_NUM_THREADS=threads, **quiet)


def engines_of(case: dict[str, Any], options: Options) -> list[tuple[str, dict[str, Any]]]:
    """The engines to run, with the settings of ours."""
    found: list[tuple[str, dict[str, Any]]] = []
    for engine in chosen(options.engines, ENGINES):
        if engine == "ours":
            found += [(engine, settings_of(text)) for text in options.ours]
        elif engine != "openvino" or case["device"] == "cpu":
            found += [(engine, {})] if engine != "ours_2_ranks" or case["threads"] == 2 else []
    return found


def run_engines(
    case: dict[str, Any], options: Options, rates: dict[str, float], work: tuple[float, float], export: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Each engine's figures as it is done; greedy ones have in the end how far their tokens agree."""
    drawn: dict[str, list[list[int]]] = {}
    entries = []
    for engine, settings in engines_of(case, options):
        slow, name = engine in SLOW, " ".join([engine, *(f"{key}={value}" for key, value in settings.items())])
        # ranks must agree on the number of repetitions: no time budget there
        seconds = 0.0 if slow or engine == "ours_2_ranks" else options.seconds
        if engine == "openvino" and export is not None and "error" in export:
            made = dict(export)
        else:
            own = {"settings": settings, "seconds": seconds, "least": 1 if slow else options.repeats}
            made = spawn(engine, {**case, **own}, options)
        drawn[name] = made.pop("tokens", [])
        entries.append(summarise({**case, **made, "settings": settings, "engine": name}, rates, work))
        if engine == "openvino" and export is not None and "error" not in export:
            entries[-1]["export_s"] = export["seconds"]
        yield entries[-1]
    drawn = {name: tokens for name, tokens in drawn.items() if tokens}
    reference = "transformers" if "transformers" in drawn else next(iter(drawn), "")
    for entry in entries:
        if entry["engine"] in drawn and case["mode"] == "greedy" and entry["engine"] != reference:
            entry["agreement"] = agreement(drawn[entry["engine"]], drawn[reference])
            print(f"{case['model']} {case['dtype']} {entry['engine']}: greedy, equal to {reference}: {entry['agreement']}")


def run_model(name: str, path: Path, exported: Path, options: Options, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec, device = read_spec(path), options.device
    number, _, longest = WORKLOADS[options.workload]
    longest = min(options.longest or longest, (spec.max_position_embeddings - 1) // 2)
    rows = make_rows(options.workload, options.rows or number, longest, spec.vocab_size)
    base = {"path": str(path), "exported": str(exported), "vocab": spec.vocab_size, "rows": rows}
    base |= {"device": device, "workload": options.workload, "model": name}
    base |= {"cb_batch_tokens": options.cb_batch_tokens, "repeats": options.repeats, "least": options.repeats}
    export, engines = None, chosen(options.engines, ENGINES)
    if device == "cpu" and "openvino" in engines and ("openvino" in options.peers or find_spec("openvino_genai")):
        export = spawn("export_openvino", {**base, "threads": 2}, options)
    for dtype, threads in product(options.dtypes, options.threads):
        rates = machine_rates(threads, [dtype], device or found_device())
        torch.set_num_threads(1)
        report["rates"].append({"rates": {key: round(rate / 1e9, 1) for key, rate in rates.items()}, "threads": threads})
        for mode in options.modes:
            case = {**base, "dtype": dtype, "threads": threads, "mode": mode}
            yield from run_engines(case, options, rates, work_of(spec, rows, dtype), export)


def summarise(case: dict[str, Any], rates: dict[str, float], work: tuple[float, float]) -> dict[str, Any]:
    result = {key: value for key, value in case.items() if key not in ("rows", "wall_s", "cpu_s", "path", "exported")}
    if "error" in case:
        return result
    useful, wall, cpu = sum(n for _, n in case["rows"]), median(case["wall_s"]), median(case["cpu_s"])
    seconds = {"flops": work[0] / rates[f"{case['dtype']}_flops"], "bytes": work[1] / rates["copy_bytes"]}
    result |= {"repeats": len(case["wall_s"]), "wall_s": round(wall, 4), "cpu_s": round(cpu, 4)}
    result |= {"tokens_per_s": round(useful / wall, 1), "tokens_per_cpu_s": round(useful / cpu, 1)}
    result |= {f"roofline_{name}": rounded(taken / wall) for name, taken in seconds.items()}
    return {**result, "roofline": rounded(max(seconds.values()) / wall)}


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> dict[str, float]:
    """``rows``: part of the rows that are equal; ``tokens``: part of the tokens before each row's first difference."""
    equal = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y))
        for x, y in zip(tokens, reference, strict=True)
    ]
    total = sum(len(y) for y in reference)
    same = sum(x == y for x, y in zip(tokens, reference, strict=True))
    return {"rows": round(same / len(reference), 4), "tokens": round(sum(equal) / total, 4)}


KEY = ("model", "dtype", "threads", "mode")
COLUMNS = "model dtype threads mode engine startup_s tokens_per_s tokens_per_cpu_s peak_mib roofline"


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over every peer of the same case, per wall second (the faster of ours) and per CPU second (ours on one rank)."""
    out = []
    done = [entry for entry in results if "tokens_per_s" in entry]
    for key in dict.fromkeys(tuple(entry[name] for name in KEY) for entry in done):
        alike = [entry for entry in done if tuple(entry[name] for name in KEY) == key]
        peers = [entry for entry in alike if not entry["engine"].startswith("ours")]
        row: dict[str, Any] = dict(zip(KEY, key, strict=True))
        for head, speed, names in (
            ("ours_over", "tokens_per_s", ("ours", "ours_2_ranks")),
            ("ours_over_per_cpu", "tokens_per_cpu_s", ("ours",)),
        ):
            best = max((entry[speed] for entry in alike if entry["engine"].partition(" ")[0] in names), default=None)
            row[head] = {entry["engine"]: round(best / entry[speed], 2) for entry in peers} if best else {}
        out.append(row)
    return out


def engines(options: Options) -> None:
    device = options.device or found_device()
    tokens = options.cb_batch_tokens if options.cb_batch_tokens is not None else 512 if device == "cpu" else 0
    options = replace(options, device=device, cb_batch_tokens=tokens)
    machine = machine_facts(device) | ({"float32_matmul": choose_cpu_matmul()} if device == "cpu" else {})
    report: dict[str, Any] = {"bench": "generation", "machine": machine, "rates": [], "cases": [], "ratios": []}
    print(table([], COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as name:
        paths = {model: Path(name) / model for model in options.models}
        for model, path in paths.items():
            write_model(path, model, with_weights=not (options.no_files or is_large(model)))
        if options.model_dir:
            paths[options.model_dir.name] = options.model_dir
        for model, path in paths.items():
            for entry in run_model(model, path, Path(name) / f"{model}_openvino", options, report):
                report["cases"].append(entry)
                report["ratios"] = ratios(report["cases"])
                print(line(entry, COLUMNS), flush=True)
                save(report, options.out)
    print(json.dumps(report["ratios"], indent=1))
    save(report, options.out)


if __name__ == "__main__":
    run_parts(engines)
