"""Seconds per phase and tokens/s of one PPO, GRPO or SFT step.

    python scripts/bench/step.py --model quickstart --ranks 1 2 --out step.json
    python scripts/bench/step.py --model qwen3_0.6b --ranks 1 --programs grpo --steps 3 --out step_gpu.json  # on a GPU

Runs ``rlhf_spmd.train`` and ``rlhf_spmd.sft`` under torchrun on models with random weights and random token ids, in a temporary
directory, and takes the figures from their ``metrics.jsonl``: medians over the steps after the first. All rows have the same
lengths (stop tokens are ignored), so that every step does the same work. A phase's time is that of its slowest rank, waiting for
others included. On a machine that others use too, trust the fastest step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.data.sort_digits import LLAMA
from shapes import config_of

SOURCE = Path(__file__).resolve().parents[2] / "src"
FIRST_ID = 4  # below it are the special tokens


@dataclass(frozen=True)
class Work:
    """A model and what a step does with it. PPO and GRPO: ``num_prompts`` * ``n`` rows; SFT: ``sft_rows`` rows of the same lengths.
    ``shape``: the model's name among ``shapes``, in place of the sizes here."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    num_prompts: int
    n: int
    prompt_length: int
    response_length: int
    mini_batches: int
    sft_rows: int
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    shape: str = ""


WORK = {
    "tiny": Work(32, 64, 2, 16, 4, 2, 6, 6, 1, 8, 4, 2),
    "quickstart": Work(192, 512, 4, 16, 32, 4, 12, 12, 2, 128),
    "S": Work(256, 768, 4, 4096, 16, 4, 64, 64, 1, 64),
    "M": Work(512, 1536, 8, 8192, 16, 4, 64, 64, 1, 64),
    "qwen3_0.6b": Work(1024, 3072, 28, 151936, 32, 8, 256, 512, 1, 256, 16, 8, "qwen3_0.6b"),
}


def write_model(directory: Path, work: Work) -> None:
    """config.json, and a tokenizer whose i-th token is the word ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {key: value for key, value in asdict(work).items() if key in LLAMA}
    config = {**LLAMA, **sizes, "head_dim": work.hidden_size // work.num_attention_heads, "max_position_embeddings": 1024}
    if work.shape:
        config = config_of(work.shape)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(FIRST_ID, work.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(words[:FIRST_ID])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def write_rows(path: Path, work: Work, num_rows: int, with_responses: bool) -> None:
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(FIRST_ID, work.vocab_size) for _ in range(length)]

    rows: list[dict[str, Any]] = [{"prompt_ids": draw(work.prompt_length)} for _ in range(num_rows)]
    if with_responses:
        rows = [{**row, "response_ids": draw(work.response_length)} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def overrides(program: str, root: Path, work: Work, steps: int) -> dict[str, Any]:
    model, data = root / "model", root / f"{program}.jsonl"
    run = {"run.steps": steps, "run.export": False, "data.path": data}
    if program == "grpo":
        run |= {"algorithm.name": "grpo", "algorithm.use_kl_loss": False}
    if program == "sft":
        return {**run, "data.train_batch_size": work.sft_rows, "models.actor.path": model, "models.actor.random_init": True}
    return {
        **run,
        "data.train_batch_size": work.num_prompts,
        "data.max_prompt_length": work.prompt_length,
        "data.max_response_length": work.response_length,
        "sampling.n": work.n,
        "sampling.ignore_eos": True,
        "models.actor.path": model,
        "models.actor.random_init": True,
        "algorithm.ppo_mini_batch_size": work.num_prompts // work.mini_batches,
        "reward.function": "happy_words",
    }


def run_program(program: str, ranks: int, root: Path, settings: dict[str, Any], extra: list[str]) -> list[dict[str, float]]:
    """The metrics of every step after the first."""
    run_dir = root / f"{program}_{ranks}"
    module = "rlhf_spmd.sft" if program == "sft" else "rlhf_spmd.train"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    arguments = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    metrics, said = run_dir / "metrics.jsonl", root / f"{run_dir.name}.txt"

    def rows() -> list[dict[str, float]]:
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    with said.open("w") as output:
        command = [*launcher, *arguments, f"run.dir={run_dir}", *extra]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        # a run ends with a checkpoint, which would take longer than the steps of a large model
        while process.poll() is None and len(rows()) < settings["run.steps"]:
            time.sleep(0.2)
        process.terminate()
        process.wait()
    found = rows()
    if len(found) < settings["run.steps"]:
        sys.exit(f"{module} on {ranks} rank(s) ended with code {process.returncode}\n{said.read_text()[-4000:]}")
    return found[1:]


def summarise(program: str, ranks: int, metrics: list[dict[str, float]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(step[key] for step in metrics)

    phases = {key.removeprefix("timing_s/"): round(median(key), 5) for key in metrics[-1] if key.startswith("timing_s/")}
    return {
        "program": program,
        "ranks": ranks,
        "steps": len(metrics),
        "step_s": phases.pop("step"),
        "fastest_step_s": round(min(step["timing_s/step"] for step in metrics), 5),
        "phases_s": phases,
        "tokens_per_s": round(median("perf/tokens_per_s"), 1),
        "peak_gb": round(median("memory/peak_gb"), 3),
    }


def table(program: str, runs: list[dict[str, Any]]) -> str:
    """One line per phase, one column per number of ranks."""
    columns = [run for run in runs if run["program"] == program]
    rows = [[f"{run['ranks']} rank(s)" for run in columns]]
    names = list(dict.fromkeys(name for run in columns for name in run["phases_s"]))
    rows += [[f"{run['phases_s'].get(name, 0.0):.4f}" for run in columns] for name in names]
    rows += [[f"{run[key]:.4f}" for run in columns] for key in ("step_s", "fastest_step_s")]
    rows.append([f"{run['tokens_per_s']:.0f}" for run in columns])
    heads = [f"{program}, seconds", *names, "whole step", "fastest step", "tokens/s"]
    lines = ["| " + " | ".join([head, *cells]) + " |" for head, cells in zip(heads, rows, strict=True)]
    return "\n".join([lines[0], "|---" + "|--:" * len(columns) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="quickstart")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--programs", choices=("ppo", "grpo", "sft"), nargs="+", default=["ppo", "sft"])
    parser.add_argument("--steps", type=int, default=6, help="steps of each run; the first one is not counted")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings, for every run")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step is not counted, so at least 2")
    work, runs = WORK[args.model], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_model(root / "model", work)
        for program in ("ppo", "grpo"):
            write_rows(root / f"{program}.jsonl", work, 4 * work.num_prompts, with_responses=False)
        write_rows(root / "sft.jsonl", work, 4 * work.sft_rows, with_responses=True)
        for program in args.programs:
            for ranks in args.ranks:
                metrics = run_program(program, ranks, root, overrides(program, root, work, args.steps), args.set)
                runs.append(summarise(program, ranks, metrics))
            print(table(program, runs), end="\n\n", flush=True)
    if args.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        report = {"bench": "step", "model": args.model, "work": asdict(work), "machine": machine, "runs": runs}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
