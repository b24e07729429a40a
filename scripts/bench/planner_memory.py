"""Memory as the planner predicts it beside that of real runs on this machine: ``memory/peak_gb`` of small PPO, GRPO and SFT runs.

    python scripts/bench/planner_memory.py --out planner_memory.json [--only ppo]

Random weights, random rows, two steps, a thread per rank. On CPUs ``memory/peak_gb`` is the most that a process held resident, its
libraries too; what it has without a model comes from the same run with a tiny one, and is added to the prediction.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from measure import machine_facts, save, table
from rlhf_spmd import train
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.training.job import trace
from rlhf_spmd.training.memory import measure, step_facts

PROMPT, RESPONSE, ROWS, BUDGET = 64, 128, 8, 800  # tokens, tokens, rows of a step, tokens of a micro-batch
SHAPES = {
    "tiny": (64, 128, 2, 1000),
    "model": (768, 2048, 12, 16000),
}  # hidden, intermediate, layers, vocabulary: 110 M parameters


@dataclass(frozen=True)
class Case:
    name: str
    algorithm: str
    ranks: int
    roles: tuple[str, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()


PPO, GRPO = ("actor", "critic", "reference"), ("actor", "reference")
CASES = [
    Case("sft, 1 rank", "sft", 1, ("actor",)),
    Case("sft, 1 rank, selective", "sft", 1, ("actor",), more=("models.actor.activation_checkpointing=selective",)),
    Case("sft, 1 rank, full", "sft", 1, ("actor",), more=("models.actor.activation_checkpointing=full",)),
    Case("sft, 1 rank, bfloat16", "sft", 1, ("actor",), more=("models.actor.dtype=bfloat16",)),
    Case("sft, tp 2", "sft", 2, ("actor",), {"tp": 2}),
    Case("sft, pp 2", "sft", 2, ("actor",), {"pp": 2}),
    Case("grpo, dp 2", "grpo", 2, GRPO),
    Case("grpo, dp 2, zero 1", "grpo", 2, GRPO, {"zero": 1}),
    Case("grpo, dp 2, zero 3, full", "grpo", 2, GRPO, {"zero": 3}, ("models.actor.activation_checkpointing=full",)),
    Case("ppo, 1 rank", "ppo", 1, PPO),
    Case("ppo, tp 2", "ppo", 2, PPO, {"tp": 2}),
    Case("ppo, dp 2, zero 2", "ppo", 2, PPO, {"zero": 2}),
    Case("ppo, pp 2 * dp 2", "ppo", 4, PPO, {"pp": 2}),
]


def write_inputs(root: Path) -> None:
    """Models of both sizes with the tokenizer of digits, and rows for all algorithms."""
    digits = root / "digits"
    subprocess.run([sys.executable, "-m", "rlhf_spmd.data.sort_digits", "--out", str(digits)], check=True, capture_output=True)
    for name, (hidden, intermediate, layers, vocab) in SHAPES.items():
        shutil.copytree(digits / "model", root / name)
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "vocab_size": vocab}
        heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64, "head_dim": 32}
        (root / name / "config.json").write_text(
            json.dumps(
                json.loads((digits / "model/config.json").read_text()) | sizes | heads | {"max_position_embeddings": 1024}
            )
        )
    rng = random.Random(0)
    texts = [
        {key: "".join(rng.choices("0123456789", k=n)) for key, n in (("prompt", PROMPT - 1), ("response", RESPONSE - 1))}
        for _ in range(32)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps({**text, "answer": "1"}) + "\n" for text in texts))


def overrides(case: Case, root: Path, model: str) -> list[str]:
    rows = 1 if case.algorithm == "sft" else 2  # of a prompt
    chosen = [
        f"algorithm.name={case.algorithm}",
        f"data.path={root}/rows.jsonl",
        f"data.train_batch_size={ROWS // rows}",
        "run.steps=2",
    ]
    chosen += [f"run.dir={root}/run", "run.export=false", "run.resume=never"]
    if case.algorithm == "sft":
        chosen.append(f"algorithm.max_token_len_per_gpu={BUDGET}")
    else:
        chosen += [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}", f"sampling.n={rows}"]
        chosen += [
            "sampling.ignore_eos=true",
            f"sampling.allowed_token_ids={list(range(4, 14))}",
            "reward.function=exact_match",
        ]
        chosen.append(f"algorithm.ppo_max_token_len_per_gpu={BUDGET}")
    for role in case.roles:
        chosen += [f"models.{role}.path={root / model}", f"models.{role}.random_init=true"]
        chosen += [f"models.{role}.layout.{key}={value}" for key, value in case.layout.items()]
    return [*chosen, *case.more]


def run(case: Case, root: Path, model: str) -> float:
    """GiB of the rank that had most."""
    shutil.rmtree(root / "run", ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command = [*command, "-m", "rlhf_spmd.train", *overrides(case, root, model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[:2000]}")
    lines = (root / "run/metrics.jsonl").read_text().splitlines()
    return max(float(json.loads(line)["memory/peak_gb"]) for line in lines)


def predict(case: Case, root: Path) -> tuple[float, str]:
    """GiB without what a process takes anyway, and the largest parts."""
    ready = train.prepare(None, overrides(case, root, "model"), case.ranks)
    report = measure(ready.plans, step_facts(ready, trace(ready), torch.device("cpu")))
    kind = int(report.peaks.argmax())
    words = ", ".join(f"{name} {size / GIB:.2f}" for name, size in report.largest(kind, 6))
    return float(report.peaks[kind] - report.reserve) / GIB, words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", type=Path, help="a JSON file with all figures")
    args = parser.parse_args()
    rows, bases = [], dict[tuple[str, int], float]()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root)
        for case in [case for case in CASES if args.only in case.name]:
            key = case.algorithm, case.ranks
            bases[key] = bases.get(key) or run(case, root, "tiny")
            predicted, parts = predict(case, root)
            measured = run(case, root, "model")
            error = (predicted + bases[key]) / measured - 1
            row = {
                "case": case.name,
                "base": bases[key],
                "predicted": predicted + bases[key],
                "measured": measured,
                "error": error,
            }
            print(row, parts, flush=True)
            rows.append({**row, "parts": parts})
    cells = [
        [str(row["case"]), *(f"{row[key]:.2f}" for key in ("base", "predicted", "measured")), f"{row['error']:+.0%}"]
        for row in rows
    ]
    print(table(["case", "base, GiB", "predicted", "measured", "error"], cells, 1))
    save({"machine": machine_facts(), "cases": rows}, args.out)


if __name__ == "__main__":
    main()
