"""One whole iteration (generate, score, update) against TRL's on the same work, in one run.

    python scripts/bench/iteration.py --trl PYTHON --trl-ppo PYTHON --out iteration.json

A 5.25 M model (``S`` of step.py) with random weights; 64 responses of 64 tokens to 64-token prompts, 8 to each; one optimizer step;
float32, one thread a rank, the same switch for float32 products. GRPO and RLOO without and with a reference (KL
loss); PPO with actor, critic, reference and reward model. ``--trl``: Python of an environment with trl; ``--trl-ppo``: of one whose trl
still has PPO (at most 1.12). Seconds are medians over the iterations after the first two; memory is resident, of the largest rank,
libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from measure import machine_facts, run_case, save, table
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.world import choose_cpu_matmul
from step import FIRST_ID, SOURCE, WORK, write_model

HERE = Path(__file__).parent
ROWS, GROUP, PROMPT, RESPONSE = 64, 8, 64, 64
WARM = 2
CASES = {"grpo": ("grpo", 0.0), "grpo, KL loss": ("grpo", 0.01), "rloo": ("rloo", 0.0), "ppo": ("ppo", 0.05)}


def write_inputs(root: Path) -> list[str]:
    """Models ``model`` and ``scorer`` and ``prompts.jsonl`` in ``root``; returns the prompts as texts of one word a token."""
    generator = torch.Generator().manual_seed(0)
    for name, architecture in (("model", "LlamaForCausalLM"), ("scorer", "LlamaForSequenceClassification")):
        write_model(root / name, WORK["S"])
        config = json.loads((root / name / "config.json").read_text()) | {"architectures": [architecture]}
        write_random_model(root / name, config | ({"num_labels": 1} if name == "scorer" else {}), seed=0)
    ids = torch.randint(FIRST_ID, WORK["S"].vocab_size, (4 * ROWS, PROMPT), generator=generator).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in ids]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def settings(root: Path, algorithm: str, kl: float, steps: int) -> list[str]:
    chosen = [f"algorithm.name={algorithm}", f"algorithm.ppo_mini_batch_size={ROWS // (1 if algorithm == 'ppo' else GROUP)}"]
    if algorithm == "ppo":
        chosen += [f"algorithm.kl_ctrl.kl_coef={kl}", f"reward.model={root / 'scorer'}", "reward.function=null"]
    else:
        chosen += [f"algorithm.kl_loss_coef={kl}"] if kl else ["algorithm.use_kl_loss=false"]
        chosen += ["reward.function=happy_words", f"sampling.n={GROUP}"]
    return [
        *chosen,
        f"models.actor.path={root / 'model'}",
        f"data.path={root / 'prompts.jsonl'}",
        f"data.train_batch_size={ROWS if algorithm == 'ppo' else ROWS // GROUP}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "sampling.ignore_eos=true",
        f"run.steps={steps}",
        "run.export=false",
        "run.log_samples=0",
    ]


def ours(root: Path, algorithm: str, kl: float, ranks: int, steps: int) -> dict[str, Any]:
    run_dir = root / f"{algorithm}_{kl}_{ranks}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "rlhf_spmd.train",
    ]
    command += [*settings(root, algorithm, kl, steps), f"run.dir={run_dir}"]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [row["timing_s/step"] for row in rows],
        "peak_mib": max(row["memory/peak_gb"] for row in rows) * 1e9 / 2**20,
    }


def theirs(root: Path, python: str, case: dict[str, Any]) -> dict[str, Any]:
    (root / "case.json").write_text(json.dumps(case))
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case['ranks']}"]
    out = root / "out.json"
    env = {**os.environ, "OMP_NUM_THREADS": str(case["threads"]), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    return run_case([*launcher, str(HERE / "iteration_trl.py"), str(root / "case.json"), str(out)], env, out, 900)


def seconds(found: dict[str, Any]) -> float:
    return statistics.median(found["seconds"][WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=7, help=f"iterations of each run; the first {WARM} are not counted")
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--trl-ppo", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    matmul, report = choose_cpu_matmul(), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prompts = write_inputs(root)
        for title in args.cases:
            algorithm, kl = CASES[title]
            for ranks in args.ranks:
                found = {"ours": ours(root, algorithm, kl, ranks, args.steps)}
                python = args.trl_ppo if algorithm == "ppo" else args.trl
                if python:
                    case = {"algorithm": algorithm, "kl": kl, "ranks": ranks, "steps": args.steps, "rows": ROWS, "n": GROUP}
                    case |= {"length": RESPONSE, "threads": 1, "matmul": matmul, "prompts": prompts}
                    case |= {"model": str(root / "model"), "scorer": str(root / "scorer"), "scratch": str(root / "scratch")}
                    found["trl"] = theirs(root, python, case)
                report.append({"case": title, "ranks": ranks, **found})
                print(json.dumps(report[-1]), file=sys.stderr, flush=True)
    heads = ["iteration", "ranks", "ours, s", "TRL, s", "TRL / ours", "ours, MiB", "TRL, MiB", "ours / TRL"]
    print(table(heads, [row_of(entry) for entry in report], 1))
    save({"bench": "iteration", "machine": machine_facts(), "float32_matmul": matmul, "runs": report}, args.out)


def row_of(entry: dict[str, Any]) -> list[str]:
    mine, peer = entry["ours"], entry.get("trl", {"error": "not run"})
    cells = [entry["case"], str(entry["ranks"])]
    if "error" in mine or "error" in peer:
        return [*cells, *("failed" if "error" in each else f"{seconds(each):.2f}" for each in (mine, peer)), "", "", "", ""]
    memory = [each["peak_mib"] for each in (mine, peer)]
    ratio = seconds(peer) / seconds(mine)
    return [
        *cells,
        f"{seconds(mine):.2f}",
        f"{seconds(peer):.2f}",
        f"{ratio:.1f}",
        *(f"{x:.0f}" for x in memory),
        f"{memory[0] / memory[1]:.2f}",
    ]


if __name__ == "__main__":
    main()
