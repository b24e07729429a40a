"""Hashes of what the programs put out, in six layouts: whether a change of the code has changed a bit.

    python scripts/results/same_bits.py --out before.json            # at one commit
    python scripts/results/same_bits.py --out after.json --with before.json      # at another: names what differs, exit 1

``generate`` (sampled), ``score``, three steps of PPO and of GRPO through torchrun on one and four CPU ranks, on random models and
data that this script makes. Of a run: responses, metrics (without those of clock, memory and traffic) and the exported weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "initializer_range": 0.12,
}
NOT_THE_SAME = ("timing_s/", "perf/", "memory/", "reshard/", "generation/", "unix_s")
Axes = dict[str, int | bool]
LAYOUTS: dict[str, tuple[int, Axes, Axes, list[str]]] = {  # ranks, training layout, generation layout, more for training
    "one rank": (1, {}, {}, []),
    "tp2 dp2": (4, {"tp": 2}, {}, []),
    "pp2 tp2 -> pp2": (4, {"pp": 2, "tp": 2}, {"pp": 2}, []),
    "zero3 -> tp2": (4, {"zero": 3}, {"tp": 2}, ["models.reference.offload=true"]),
    "pp2 vpp2 zero1": (4, {"pp": 2, "vpp": 2, "zero": 1}, {}, ["models.actor.calls.compute_log_prob.layout.tp=2"]),
    "tp4, full_gather": (
        4,
        {"tp": 4, "sequence_parallel": True},
        {"tp": 2},
        ["models.actor.generation.reshard_method=full_gather"],
    ),
}


def write_task(root: Path) -> None:
    """Models, tokenizer, prompts and a reward below ``root``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from rlhf_spmd.models.weights import write_random_model

    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(("<eos>", *CHARACTERS))}, unk_token="<eos>"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    for seed, (name, kind) in enumerate(
        (("actor", "CausalLM"), ("reference", "CausalLM"), ("critic", "SequenceClassification"))
    ):
        write_random_model(root / name, {**LLAMA, "architectures": [f"LlamaFor{kind}"]}, seed)
        tokenizer.save(str(root / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
        (root / name / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = random.Random(5)
    texts = [["".join(rng.choices(CHARACTERS, k=rng.randint(2, 12))) for _ in range(2)] for _ in range(24)]
    rows = [{"prompt": prompt, "response": response} for prompt, response in texts]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text("def even(prompt, response, row):\n    return sum(c in '02468' for c in response) / 12\n")


def overrides(prefix: str, axes: Axes) -> list[str]:
    return [f"{prefix}.{axis}={str(value).lower()}" for axis, value in axes.items()]


def training(name: str, root: Path, ranks: int, train: Axes, generation: Axes, more: list[str]) -> list[str]:
    roles = ["actor", "reference", *["critic"] * (name == "ppo")]
    given = [f"models.{role}.path={root / role}" for role in roles]
    given += ["run.seed=3", f"run.dir={root / 'run'}", "run.steps=3", "run.log_samples=32"]
    given += [f"algorithm.name={name}", "algorithm.ppo_mini_batch_size=4", f"reward.function={root / 'reward.py'}:even"]
    given += [f"data.path={root / 'rows.jsonl'}", "data.train_batch_size=8", "data.max_prompt_length=12"]
    given += ["data.max_response_length=12", "sampling.n=4", *overrides("models.actor.generation", generation)]
    for role in roles:
        given += [*overrides(f"models.{role}.layout", train), f"models.{role}.dtype=float32"]
    trained = [role for role in roles if role != "reference"]
    given += [f"models.{role}.optim.lr=1e-3" for role in trained]
    return [*given, *[key for key in more if ranks > 1]]


def commands(root: Path, ranks: int, train: Axes, generation: Axes, more: list[str]) -> dict[str, list[str]]:
    """Program and overrides by what they show. ``generate`` has no ZeRO and no interleaving, ``score`` both."""
    rows = [f"model.path={root / 'actor'}", f"data.path={root / 'rows.jsonl'}", f"out={root / 'out.jsonl'}"]
    asked = ["sampling.n=4", "sampling.max_response_length=16", "sampling.temperature=0.9", "sampling.top_p=0.95"]
    whole = {axis: n for axis, n in train.items() if axis in ("pp", "tp")}
    found = {
        "generate": ["generate", *rows, *asked, "sampling.seed=7", *overrides("layout", whole)],
        "score": ["score", *rows, *overrides("layout", train)],
    }
    for name in ("ppo", "grpo"):
        found[name] = ["train", *training(name, root, ranks, train, generation, more)]
    return found


def digest(root: Path) -> dict[str, str]:
    """The hashes of what a program has written below ``root``."""
    out, run = root / "out.jsonl", root / "run"
    if out.exists():
        return {"rows": hashlib.sha256(out.read_bytes()).hexdigest()[:16]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if not key.startswith(NOT_THE_SAME)} for row in rows]
    samples = sorted((run / "rollouts.jsonl").read_text().splitlines())
    weights = hashlib.sha256()
    for path in sorted((run / "export").rglob("*.safetensors")):
        weights.update(path.read_bytes())
    texts = {"metrics": json.dumps(metrics, sort_keys=True), "responses": "\n".join(samples)}
    found = {key: hashlib.sha256(text.encode()).hexdigest()[:16] for key, text in texts.items()}
    return {**found, "weights": weights.hexdigest()[:16]}


def run(ranks: int, arguments: list[str], root: Path) -> dict[str, str]:
    for left in (root / "run", root / "out.jsonl"):
        if left.is_dir():
            shutil.rmtree(left)
        left.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*launcher, f"rlhf_spmd.{arguments[0]}", *arguments[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return digest(root) if done.returncode == 0 else {"failed": (done.stdout + done.stderr)[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--with", type=Path, dest="other", help="hashes of another commit")
    parser.add_argument("--only", help="of these programs, separated by commas")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="same_bits_") as directory:
        root = Path(directory)
        write_task(root)
        for layout, (ranks, train, generation, more) in LAYOUTS.items():
            for program, arguments in commands(root, ranks, train, generation, more).items():
                if options.only and program not in options.only.split(","):
                    continue
                for what, value in run(ranks, arguments, root).items():
                    found[f"{program}, {layout}: {what}"] = value
                    print(f"{program:9} {layout:18} {what:10} {value}", flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    failed = [key for key in found if key.endswith(": failed")]
    other = json.loads(options.other.read_text()) if options.other else found
    different = [key for key in found if other.get(key) != found[key]]
    print(f"{len(found)} hashes, {len(different)} differ, {len(failed)} failed", *different, sep="\n  ")
    return int(bool(different or failed))


if __name__ == "__main__":
    sys.exit(main())
