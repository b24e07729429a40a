"""Whole training runs: seconds of a step by phase, an iteration beside TRL's, and what each algorithm learns.

    python scripts/bench/train.py step --model quickstart --ranks 1 2 --out step.json
    python scripts/bench/train.py step --model qwen3_0.6b --ranks 1 --programs grpo --steps 3 --out step_gpu.json  # on a GPU
    python scripts/bench/train.py iteration --trl PYTHON --trl-ppo PYTHON --out iteration.json
    python scripts/bench/train.py learning --seeds 0 1 2 --trl PYTHON --directory runs/learning --out learning.json

``--trl``: Python of an environment with trl (peers.py); ``--trl-ppo``: of one whose trl still has PPO (at most 1.12).
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from measure import (
    ROOT,
    RunError,
    chosen,
    environment,
    machine_facts,
    median,
    read_metrics,
    run_case,
    run_parts,
    run_program,
    save,
    table,
)
from peers import trl_iteration, trl_learning
from shapes import config_of, write_model

# Steps on made-up work, which the benchmarks of the controller and the planner use too

WHOLE = ("step_s", "fastest_step_s", "tokens_per_s", "peak_gb")
FIRST_ID = 4  # below it are the special tokens


@dataclass(frozen=True)
class Work:
    """What a step does with a model of shapes.py. PPO and GRPO: ``num_prompts`` * ``n`` rows; SFT: ``sft_rows`` rows of the same
    lengths."""

    model: str
    num_prompts: int
    n: int
    prompt_length: int
    response_length: int
    mini_batches: int
    sft_rows: int


WORK = {
    "tiny": Work("tiny", 4, 2, 6, 6, 1, 8),
    "quickstart": Work("quickstart", 32, 4, 12, 12, 2, 128),
    "S": Work("S", 16, 4, 64, 64, 1, 64),
    "M": Work("M", 16, 4, 64, 64, 1, 64),
    "qwen3_0.6b": Work("qwen3_0.6b", 32, 8, 256, 512, 1, 256),
}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """One whose i-th token is the word ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(FIRST_ID, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(words[:FIRST_ID])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def write_inputs(root: Path, work: Work, model: str = "model") -> None:
    """``model``, and rows of random ids for all programs: ``prompts.jsonl`` and ``sft.jsonl``."""
    vocab, rng = config_of(work.model)["vocab_size"], random.Random(0)
    write_model(root / model, work.model, with_weights=False)
    write_tokenizer(root / model, vocab)
    lengths = {"prompt_ids": work.prompt_length, "response_ids": work.response_length}
    for name, number, keys in (("prompts", 4 * work.num_prompts, ["prompt_ids"]), ("sft", 4 * work.sft_rows, list(lengths))):
        rows = [{key: [rng.randrange(FIRST_ID, vocab) for _ in range(lengths[key])] for key in keys} for _ in range(number)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings_of(program: str, root: Path, work: Work, steps: int) -> dict[str, Any]:
    run = {"run.steps": steps, "run.export": False, "models.actor.path": root / "model", "models.actor.random_init": True}
    if program == "sft":
        return {**run, "algorithm.name": "sft", "data.path": root / "sft.jsonl", "data.train_batch_size": work.sft_rows}
    run |= {"algorithm.name": program, "data.path": root / "prompts.jsonl", "data.train_batch_size": work.num_prompts}
    if program == "grpo":
        run |= {"algorithm.use_kl_loss": False}
    run |= {"data.max_prompt_length": work.prompt_length, "data.max_response_length": work.response_length}
    run |= {"sampling.n": work.n, "sampling.ignore_eos": True, "reward.function": "happy_words"}
    return {**run, "algorithm.ppo_mini_batch_size": work.num_prompts // work.mini_batches}


def summarise(program: str, ranks: int, metrics: list[dict[str, float]]) -> dict[str, Any]:
    def middle(key: str) -> float:
        return median([step[key] for step in metrics])

    phases = {key.removeprefix("timing_s/"): round(middle(key), 5) for key in metrics[-1] if key.startswith("timing_s/")}
    run: dict[str, Any] = {"program": program, "ranks": ranks, "steps": len(metrics), "step_s": phases.pop("step")}
    run |= {"fastest_step_s": round(min(step["timing_s/step"] for step in metrics), 5), "phases_s": phases}
    return {**run, "tokens_per_s": round(middle("perf/tokens_per_s"), 1), "peak_gb": round(middle("memory/peak_gb"), 3)}


def by_phase(program: str, runs: list[dict[str, Any]]) -> str:
    """One line per phase, one column per number of ranks."""
    columns = {f"{run['ranks']}_rank(s)": run["phases_s"] | {key: run[key] for key in WHOLE} for run in runs}
    names = dict.fromkeys(name for phases in columns.values() for name in phases)
    rows = [{program: name, **{head: phases.get(name) for head, phases in columns.items()}} for name in names]
    return table(rows, " ".join([program, *columns]))


def step(
    model: Literal["tiny", "quickstart", "S", "M", "qwen3_0.6b"] = "quickstart",
    ranks: Sequence[int] = (1, 2),
    programs: Sequence[Literal["ppo", "grpo", "sft"]] = ("ppo", "sft"),
    steps: int = 6,
    settings: Sequence[str] = (),
    out: Path | None = None,
) -> None:
    """Seconds per phase and tokens/s of one PPO, GRPO or SFT step.

    Models have random weights, rows random token ids, and figures come from ``metrics.jsonl``: medians over the steps after the
    first. All rows have the same lengths (stop tokens are ignored), so that every step does the same work. A phase's time is that
    of its slowest rank, waiting for others included. On a machine that others use too, trust the fastest step. ``--settings``: more,
    for every run.
    """
    if steps < 2:
        sys.exit(f"--steps {steps}: the first step is not counted, so at least 2")
    work, runs = WORK[model], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_inputs(root, work)
        for program in programs:
            mine = []
            for number in ranks:
                given = settings_of(program, root, work, steps)
                metrics = run_program(root / f"{program}_{number}", number, given, *settings, stop_after=steps)
                mine.append(summarise(program, number, metrics[1:]))
            print(by_phase(program, mine), end="\n\n", flush=True)
            runs += mine
    save({"bench": "step", "model": model, "work": asdict(work), "machine": machine_facts(), "runs": runs}, out)


# An iteration beside TRL's

WARM, LENGTH, GROUP, NUM_ROWS = 2, 64, 8, 64
CASES = {"grpo": ("grpo", 0.0), "grpo, KL loss": ("grpo", 0.01), "rloo": ("rloo", 0.0), "ppo": ("ppo", 0.05)}


def write_iteration(root: Path) -> list[str]:
    """Models ``model`` and ``scorer`` and ``prompts.jsonl`` in ``root``; returns the prompts as texts of one word a token."""
    from rlhf_spmd.models.weights import write_random_model

    config, rng = config_of("S"), random.Random(0)
    for name, architecture in (("model", "LlamaForCausalLM"), ("scorer", "LlamaForSequenceClassification")):
        labels = {"num_labels": 1} if name == "scorer" else {}
        write_random_model(root / name, {**config, "architectures": [architecture], **labels}, seed=0)
        write_tokenizer(root / name, config["vocab_size"])
    words = range(FIRST_ID, config["vocab_size"])
    prompts = [" ".join(f"w{i}" for i in rng.choices(words, k=LENGTH)) for _ in range(4 * NUM_ROWS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def our_iteration(root: Path, algorithm: str, kl: float, ranks: int, steps: int) -> dict[str, Any]:
    n = 1 if algorithm == "ppo" else GROUP
    settings = settings_of(algorithm, root, Work("S", NUM_ROWS // n, n, LENGTH, LENGTH, 1, 0), steps)
    settings |= {"models.actor.random_init": False, "run.log_samples": 0}
    if algorithm == "ppo":
        settings |= {"algorithm.kl_ctrl.kl_coef": kl, "reward.model": root / "scorer", "reward.function": "null"}
    else:
        settings |= {"algorithm.kl_loss_coef": kl, "algorithm.use_kl_loss": True} if kl else {"algorithm.use_kl_loss": False}
    try:
        rows = run_program(root / f"{algorithm}_{kl}_{ranks}", ranks, settings, stop_after=steps)
    except RunError as error:
        return {"error": str(error)}
    peak = max(row["memory/peak_gb"] for row in rows) * 1e9 / 2**20
    return {"seconds": [row["timing_s/step"] for row in rows], "peak_mib": peak}


def iteration(
    cases: Sequence[str] | None = None,
    ranks: Sequence[int] = (1, 2),
    steps: int = 7,
    trl: str = "",
    trl_ppo: str = "",
    out: Path | None = None,
) -> None:
    """One whole iteration (generate, score, update) against TRL's on the same work, in one run.

    A 5.25 M model with random weights; 64 responses of 64 tokens to 64-token prompts, 8 to each; one optimizer step; float32, one
    thread a rank, the same switch for float32 products. GRPO and RLOO without and with a reference (KL loss); PPO with actor,
    critic, reference and reward model. Seconds are medians over the iterations after the first two; memory is resident, of the
    largest rank, libraries included.
    """
    from rlhf_spmd.parallel.device_setup import choose_cpu_matmul

    matmul, report = choose_cpu_matmul(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prompts = write_iteration(root)
        for title in chosen(cases, CASES):
            algorithm, kl = CASES[title]
            for number in ranks:
                found: dict[str, Any] = {"ours": our_iteration(root, algorithm, kl, number, steps)}
                case = {"algorithm": algorithm, "kl": kl, "ranks": number, "steps": steps, "rows": NUM_ROWS, "n": GROUP}
                case |= {"length": LENGTH, "matmul": matmul, "prompts": prompts}
                case |= {key: str(root / key) for key in ("model", "scorer", "scratch")}
                if python := trl_ppo if algorithm == "ppo" else trl:
                    found["trl"] = run_case(trl_iteration, case, number, python, 900)
                report.append({"case": title, "ranks": number, **found})
                print(json.dumps(report[-1]), file=sys.stderr, flush=True)
    for row in report:
        for by in ("ours", "trl"):
            row |= {f"{by}_{key}": value for key, value in median_of(row.get(by, {})).items()}
        if "trl_s" in row and "ours_s" in row:
            row |= {"trl_over_ours": row["trl_s"] / row["ours_s"], "memory_over_trl": row["ours_mib"] / row["trl_mib"]}
    print(table(report, "case ranks ours_s trl_s trl_over_ours ours_mib trl_mib memory_over_trl"))
    save({"bench": "iteration", "machine": machine_facts(), "float32_matmul": matmul, "runs": report}, out)


def median_of(found: dict[str, Any]) -> dict[str, Any]:
    if "seconds" not in found:
        return {"s": found.get("error")}
    return {"s": median(found["seconds"][WARM:]), "mib": found["peak_mib"]}


# What each algorithm learns

CONFIGS = ROOT / "configs"
FIRST = ("sft", "reward_model", "cost_model", "ppo")  # others start from what these make
SHOWN = ("val/reward_mean", "val/accuracy", "val/loss")  # the first of these that a run has


def in_order(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def our_learning(name: str, root: Path, seed: int) -> dict[str, Any]:
    """The run of ``configs/quickstart_<name>.yaml`` below ``root``: [step, value] of its validations, and how it ended."""
    from omegaconf import OmegaConf

    text = (CONFIGS / f"quickstart_{name}.yaml").read_text(encoding="utf-8").replace("runs/quickstart", str(root))
    config = root / f"{name}.yaml"
    config.write_text(text, encoding="utf-8")
    run_dir = Path(OmegaConf.create(text).run.dir)
    if not (run_dir / "exit_status.json").exists():
        try:
            run_program(run_dir, 2, {"run.seed": seed}, "--config", str(config), CUDA_VISIBLE_DEVICES="")
        except RunError as error:
            return {"error": str(error).partition(":")[0]}
    rows = read_metrics(run_dir)
    metric = next(key for key in SHOWN if any(key in row for row in rows))
    curve = [[row["step"], row[metric]] for row in rows if metric in row]
    return {"metric": metric, "curve": curve, "seconds": round(sum(row.get("timing_s/step", 0.0) for row in rows), 1)}


def their_learning(name: str, root: Path, seed: int, python: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    out = root / f"trl_{name}.json"
    if not out.exists():
        config = OmegaConf.to_container(OmegaConf.load(root / f"{name}.yaml"))
        case = {"algorithm": name, "seed": seed, "config": config, "scratch": str(out.with_suffix(""))}
        found = run_case(trl_learning, case, python=python, timeout_s=3600, CUDA_VISIBLE_DEVICES="")
        if "error" in found:
            return found
        save(found, out)
    return json.loads(out.read_text())


def learning(
    algorithms: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    trl: str = "",
    directory: Path = ROOT / "runs" / "learning",
    out: Path | None = None,
) -> None:
    """What each algorithm learns on the quickstart's task, before and after, by seed; GRPO and RLOO beside TRL's with the same
    settings.

    For each seed the quickstart's data and its SFT model are made in ``--directory``; then every
    ``configs/quickstart_<algorithm>.yaml`` runs from them on two ranks as it stands. What is there already is not run again.
    Validation samples at temperature 1 on the same held-out prompts in ours and in TRL's.
    """
    known = in_order([path.stem.removeprefix("quickstart_") for path in CONFIGS.glob("quickstart_*.yaml")])
    found: list[dict[str, Any]] = []
    for seed in seeds:
        root = (directory / f"seed_{seed}").resolve()
        task = [sys.executable, str(ROOT / "examples" / "sort_digits.py"), "--out", str(root / "task"), "--seed", str(seed)]
        if not (root / "task").exists():
            subprocess.run(task, env=environment(), check=True)
        for name in in_order([*dict.fromkeys(["sft", *chosen(algorithms, known)])]):
            runs = {"ours": our_learning(name, root, seed)}
            if trl and name in ("grpo", "rloo"):
                runs["TRL"] = their_learning(name, root, seed, trl)
            for by, run in runs.items():
                found.append({"algorithm": name, "by": by, "seed": seed, **run})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(table(rows_of(found), " ".join(["algorithm metric", *(f"seed_{seed}" for seed in seeds), "mean_after seconds"])))
    save({"bench": "learning", "machine": machine_facts(), "runs": found}, out)


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, by in dict.fromkeys((entry["algorithm"], entry["by"]) for entry in found):
        runs = [entry for entry in found if (entry["algorithm"], entry["by"]) == (name, by)]
        good = [entry for entry in runs if "curve" in entry]
        row = {"algorithm": name if by == "ours" else f"{name}, TRL", "metric": good[0]["metric"] if good else ""}
        for run in runs:
            curve = [f"{value:.3f}" for _, value in run.get("curve", ())]
            row[f"seed_{run['seed']}"] = f"{curve[0]} -> {curve[-1]}" if curve else run["error"]
        if good:
            row["mean_after"] = statistics.mean(entry["curve"][-1][1] for entry in good)
            row["seconds"] = statistics.mean(entry["seconds"] for entry in good)
        rows.append(row)
    return rows


if __name__ == "__main__":
    run_parts(step, iteration, learning)
