"""What each algorithm learns on the quickstart's task, before and after, by seed; GRPO and RLOO beside TRL's with the same settings.

    python scripts/bench/learning.py --seeds 0 1 2 --trl PYTHON --dir runs/learning --out learning.json

For each seed the quickstart's data and its SFT model are made in ``--dir``; then every ``configs/quickstart_<algorithm>.yaml`` runs
from them on two ranks as it stands. What is there already is not run again. Validation samples at temperature 1 on the same held-out
prompts in ours and in TRL's. ``--trl``: Python of an environment with trl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from measure import machine_facts, run_case, save, table

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
FIRST = ("sft", "reward_model", "cost_model", "ppo")  # others start from what these make
SHOWN = ("val/reward_mean", "val/accuracy", "val/loss")  # the first of these that a run has


def order(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def run(name: str, root: Path, seed: int) -> dict[str, Any]:
    """The run of ``configs/quickstart_<name>.yaml`` below ``root``: [step, value] of its validations, and how it ended."""
    text = (CONFIGS / f"quickstart_{name}.yaml").read_text(encoding="utf-8").replace("runs/quickstart", str(root))
    config = root / f"{name}.yaml"
    config.write_text(text, encoding="utf-8")
    run_dir = Path(OmegaConf.create(text).run.dir)
    status = run_dir / "exit_status.json"
    if not status.exists():
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "rlhf_spmd.train",
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run([*launcher, "--config", str(config), f"run.seed={seed}"], env=env, capture_output=True, text=True)
        (root / f"{name}.log").write_text(done.stdout + done.stderr)
    ended = json.loads(status.read_text())["class"] if status.exists() else "not started"
    if ended != "done":
        return {"error": ended}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metric = next(key for key in SHOWN if any(key in row for row in rows))
    curve = [[row["step"], row[metric]] for row in rows if metric in row]
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows)
    return {"metric": metric, "curve": curve, "seconds": round(seconds, 1)}


def theirs(name: str, root: Path, seed: int, python: str) -> dict[str, Any]:
    out = root / f"trl_{name}.json"
    if out.exists():
        return json.loads(out.read_text())
    case = {"algorithm": name, "seed": seed, "config": OmegaConf.to_container(OmegaConf.load(root / f"{name}.yaml"))}
    (root / f"trl_{name}_case.json").write_text(json.dumps(case))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(Path(__file__).with_name("learning_trl.py")), str(root / f"trl_{name}_case.json"), str(out)]
    return run_case(command, env, out, 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = order([path.stem.removeprefix("quickstart_") for path in CONFIGS.glob("quickstart_*.yaml")])
    parser.add_argument("--algorithms", choices=known, nargs="+", default=known)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for seed in args.seeds:
        root = (args.dir / f"seed_{seed}").resolve()
        task = [sys.executable, "-m", "rlhf_spmd.data.sort_digits", "--out", str(root / "task"), "--seed", str(seed)]
        if not (root / "task").exists():
            subprocess.run(task, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
        for name in order([*dict.fromkeys(["sft", *args.algorithms])]):
            found.append({"algorithm": name, "by": "ours", "seed": seed, **run(name, root, seed)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if args.trl and name in ("grpo", "rloo"):
                found.append({"algorithm": name, "by": "TRL", "seed": seed, **theirs(name, root, seed, args.trl)})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(
        table(
            ["algorithm", "metric", *(f"seed {seed}" for seed in args.seeds), "mean after", "s a run"],
            rows_of(found, args.seeds),
            2,
        )
    )
    save({"bench": "learning", "machine": machine_facts(), "runs": found}, args.out)


def rows_of(found: list[dict[str, Any]], seeds: list[int]) -> list[list[str]]:
    rows = []
    for name, by in dict.fromkeys((entry["algorithm"], entry["by"]) for entry in found):
        runs = {entry["seed"]: entry for entry in found if (entry["algorithm"], entry["by"]) == (name, by)}
        good = [entry for entry in runs.values() if "curve" in entry]
        cells = [
            f"{runs[seed]['curve'][0][1]:.3f} -> {runs[seed]['curve'][-1][1]:.3f}"
            if "curve" in runs[seed]
            else str(runs[seed]["error"])
            for seed in seeds
        ]
        after = f"{statistics.mean(entry['curve'][-1][1] for entry in good):.3f}" if good else ""
        seconds = f"{statistics.mean(entry['seconds'] for entry in good):.0f}" if good else ""
        rows.append([name if by == "ours" else f"{name}, TRL", good[0]["metric"] if good else "", *cells, after, seconds])
    return rows


if __name__ == "__main__":
    main()
