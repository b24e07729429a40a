"""Writes configs/presets/*.yaml and the table of docs/presets.md: models, algorithms and GPUs that go together, each judged by `plan`.

    python scripts/presets.py            # write
    python scripts/presets.py --check    # exit status 1 where a file differs or a preset does not fit

Needs neither network nor GPU: the sizes of the models stand in src/rlhf_spmd/models/published.yaml.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESETS, PAGE = ROOT / "configs" / "presets", ROOT / "docs" / "presets.md"

# preset's name of a model -> its name on the hub
MODELS = {
    "qwen2.5_0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5_1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5_7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5_32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen3_0.6b": "Qwen/Qwen3-0.6B",
    "qwen3_1.7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3.5_9b": "Qwen/Qwen3.5-9B",
    "qwen3.5_35b_a3b": "Qwen/Qwen3.5-35B-A3B",
    "gpt_oss_20b": "openai/gpt-oss-20b",
    "deepseek_v2_lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek_v3": "unsloth/DeepSeek-V3-bf16",
    "llama3.1_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1_70b": "meta-llama/Llama-3.1-70B-Instruct",
}

MATH = """\
data:
  path: openai/gsm8k
  subset: main
  val_path: openai/gsm8k
  prompt_key: question
  answer_key: answer
  apply_chat_template: true
  system_prompt: Think step by step, and end with the answer, a number, after "####".
  train_batch_size: {batch}
  max_prompt_length: 512
  max_response_length: 1024
"""
LONG_MATH = """\
data:
  path: agentica-org/DeepScaleR-Preview-Dataset
  val_path: HuggingFaceH4/MATH-500
  prompt_key: problem
  answer_key: answer
  apply_chat_template: true
  train_batch_size: {batch}
  max_prompt_length: 2048
  max_response_length: 30720
"""
PAIRS = """\
data:
  path: trl-lib/ultrafeedback_binarized
  val_path: trl-lib/ultrafeedback_binarized
  val_max_samples: 512
  train_batch_size: {batch}
  max_length: 2048
  epochs: 1
"""
CONVERSATIONS = """\
data:
  path: trl-lib/Capybara
  val_path: trl-lib/Capybara
  train_batch_size: {batch}
  max_length: 2048
  epochs: 2
"""
BY_STEPS = "steps: 200\n  test_freq: 10\n  save_freq: 50"
BY_EPOCHS = "steps: null\n  test_freq: 100\n  save_freq: 200"
# algorithm -> (section of data, rows per step, run, what follows, learning rate of the actor)
RECIPES = {
    "grpo": (
        MATH,
        256,
        BY_STEPS,
        "sampling: {n: 8}\nalgorithm: {name: grpo, ppo_mini_batch_size: 128, kl_loss_coef: 0.001}\nreward: {function: gsm8k}\n",
        "1.0e-6",
    ),
    "grpo_32k": (
        LONG_MATH,
        64,
        BY_STEPS,
        "sampling: {n: 8}\nalgorithm: {name: grpo, ppo_mini_batch_size: 64, ppo_max_token_len_per_gpu: 8192}\n"
        "reward: {function: math}\n",
        "1.0e-6",
    ),
    "ppo": (
        MATH,
        512,
        BY_STEPS,
        "algorithm: {name: ppo, ppo_mini_batch_size: 128, kl_ctrl: {kl_coef: 0.001}}\nreward: {function: gsm8k}\n",
        "1.0e-6",
    ),
    "dpo": (PAIRS, 128, BY_EPOCHS, "algorithm: {name: dpo, beta: 0.1}\n", "5.0e-7"),
    "sft": (CONVERSATIONS, 128, BY_EPOCHS, "algorithm: {name: sft}\n", "1.0e-5"),
}


@dataclass(frozen=True)
class Preset:
    """``layout``: of every role that trains or is frozen; ``generation``: of the actor. ``more``: settings of the actor and critic.
    ``lora``: rank of adapters, which learn ten times as fast and bring their reference along."""

    algorithm: str
    model: str
    gpus: int
    layout: str = ""
    generation: str = ""
    more: str = ""
    lora: int = 0

    @property
    def name(self) -> str:
        return f"{self.algorithm}_{self.model}_{'lora_' * bool(self.lora)}{self.gpus}gpu"

    @property
    def nodes(self) -> int:
        return max(self.gpus // 8, 1)

    @property
    def command(self) -> str:
        path = f"configs/presets/{self.name}.yaml"
        if self.gpus < 8:
            return f"torchrun --nproc-per-node {self.gpus} -m rlhf_spmd.train --config {path}"
        return f"sbatch --nodes={self.nodes} launch/slurm_{'one' if self.nodes == 1 else 'multi'}_node.sbatch {path}"

    def text(self) -> str:
        data, batch, run, rest, rate = RECIPES[self.algorithm]
        generates = self.algorithm in ("grpo", "grpo_32k", "ppo")
        role = "".join(f"    {line}\n" for line in (self.layout and f"layout: {{{self.layout}}}", self.more) if line)
        own = "attention: auto, max_num_seqs: 256" + (f", {self.generation}" if self.generation else "")
        if self.lora:
            rate, role = f"{10 * float(rate):.1e}", f"    lora: {{rank: {self.lora}, alpha: {2 * self.lora}}}\n{role}"
        actor = f"    path: {MODELS[self.model]}\n    optim: {{lr: {rate}}}\n{role}"
        models = f"models:\n  actor:\n{actor}" + (f"    generation: {{{own}}}\n" if generates else "")
        if self.algorithm == "ppo":
            models += f"  critic:\n    optim: {{lr: 1.0e-5}}\n{role}"
        if self.algorithm != "sft" and self.layout and not self.lora:
            models += f"  reference:\n    layout: {{{self.layout}}}\n"
        head = f"# {MODELS[self.model]} by {_title(self.algorithm)} on {self.gpus} GPU{'s' * (self.gpus > 1)} of 80 GB"
        return (
            f"{head}; written by scripts/presets.py, figures in docs/presets.md.\n#   {self.command}\n"
            f"run:\n  name: {self.name}\n  {run}\n{data.format(batch=batch)}{models}{rest}"
        )


def _title(algorithm: str) -> str:
    name, _, length = algorithm.partition("_")
    return f"{name.upper()}{length and f' at {length}'}"


Z3, T8, C4 = "zero: 3", "tp: 8, zero: 3", "cp: 4, zero: 3"
TABLE = [
    Preset("grpo", "qwen2.5_0.5b", 1),
    Preset("grpo", "qwen2.5_0.5b", 8),
    Preset("grpo", "qwen2.5_1.5b", 1),
    Preset("grpo", "qwen2.5_1.5b", 8),
    Preset("grpo", "qwen2.5_7b", 8, Z3),
    Preset("grpo", "qwen2.5_7b", 16, Z3),
    Preset("grpo", "qwen2.5_32b", 16, Z3, "tp: 4"),
    Preset("grpo", "qwen2.5_32b", 64, Z3, "tp: 4"),
    Preset("grpo", "qwen3_0.6b", 1),
    Preset("grpo", "qwen3_1.7b", 8),
    Preset("grpo", "qwen3_4b", 8, Z3),
    Preset("grpo", "qwen3_8b", 8, Z3),
    Preset("grpo", "qwen3_8b", 16, Z3),
    Preset("grpo", "qwen3_30b_a3b", 16, Z3, "tp: 4"),
    Preset("grpo", "qwen3_30b_a3b", 64, Z3, "tp: 4"),
    Preset("grpo_32k", "qwen3_4b", 8, C4),
    Preset("grpo_32k", "qwen3_8b", 8, C4),
    Preset("grpo", "qwen3.5_9b", 8, Z3),
    Preset("grpo", "qwen3.5_35b_a3b", 16, Z3, "tp: 4"),
    Preset("grpo", "gpt_oss_20b", 8, Z3, "tp: 4"),
    Preset("grpo", "deepseek_v2_lite", 16, Z3),
    Preset("grpo", "deepseek_v3", 512, T8, "pp: 8, tp: 8"),
    Preset("grpo", "llama3.1_8b", 8, Z3),
    Preset("grpo", "llama3.1_70b", 64, T8, "tp: 8"),
    Preset("ppo", "qwen2.5_0.5b", 1),
    Preset("ppo", "qwen2.5_1.5b", 8),
    Preset("ppo", "qwen2.5_7b", 8, Z3),
    Preset("ppo", "qwen2.5_32b", 64, Z3, "tp: 4"),
    Preset("ppo", "qwen3_8b", 16, Z3),
    Preset("ppo", "llama3.1_8b", 8, Z3),
    Preset("ppo", "llama3.1_70b", 64, T8, "tp: 8"),
    Preset("dpo", "qwen2.5_0.5b", 1),
    Preset("dpo", "qwen2.5_7b", 8, Z3),
    Preset("dpo", "qwen2.5_32b", 16, Z3),
    Preset("dpo", "qwen3_8b", 8, Z3),
    Preset("dpo", "llama3.1_8b", 8, Z3),
    Preset("dpo", "llama3.1_70b", 64, T8),
    Preset("sft", "qwen2.5_0.5b", 1),
    Preset("sft", "qwen2.5_7b", 8, Z3),
    Preset("sft", "qwen2.5_32b", 16, Z3),
    Preset("sft", "qwen3_4b", 8, Z3),
    Preset("sft", "qwen3_30b_a3b", 16, Z3),
    Preset("sft", "llama3.1_8b", 8, Z3),
    Preset("sft", "llama3.1_70b", 64, T8),
    Preset("grpo", "qwen2.5_7b", 1, lora=32),
    Preset("grpo", "qwen2.5_32b", 8, Z3, "tp: 4", lora=32),
    Preset("dpo", "llama3.1_8b", 1, lora=32),
    Preset("sft", "llama3.1_70b", 8, Z3, lora=32),
]


def judge(preset: Preset, folder: Path) -> tuple[float, float, str | None]:
    """GiB of the fullest GPU, seconds of a step on H100, and why it does not fit."""
    from rlhf_spmd import plan

    path = folder / "preset.yaml"
    path.write_text(preset.text())
    cluster = (f"cluster.nodes={preset.nodes}", f"cluster.gpus_per_node={min(preset.gpus, 8)}", "cluster.gpu=h100")
    steps = ["run.steps=100", "data.epochs=null"] if preset.algorithm in ("dpo", "sft") else []
    run = plan.read_request(str(path), [*cluster, *steps, "plan.fixed=config", f"plan.out={folder / 'plan.yaml'}"])
    planned = plan.search_plan(run)
    calls = planned.file.calls.values()
    return max(call.memory_gb for call in calls), planned.seconds, planned.refusal or planned.warning


def page(found: Sequence[tuple[Preset, float, float, str | None]]) -> str:
    """docs/presets.md: a row for each model and number of GPUs, a column for each algorithm."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for preset, memory, seconds, _ in found:
        model = f"{MODELS[preset.model].partition('/')[2]}{', LoRA' if preset.lora else ''}"
        link = f"[{memory:.0f}, {seconds:.0f}](../configs/presets/{preset.name}.yaml)"
        cells.setdefault((model, preset.gpus), {})[preset.algorithm] = link
    rows = "".join(
        f"| {model} | {gpus} | {' | '.join(links.get(name, '') for name in RECIPES)} |\n"
        for (model, gpus), links in cells.items()
    )
    heads = "".join(f" {_title(name)} |" for name in RECIPES)
    return f"{HEAD}| model | GPUs |{heads}\n|---|--:|{'--:|' * len(RECIPES)}\n{rows}"


HEAD = """# Presets

Configurations to start from: one file for a model, an algorithm and a number of GPUs. Each fits
into GPUs of 80 GB by the estimate of [`plan`](planner.md). The first lines of a file say how to
start it:

    sbatch --nodes=1 launch/slurm_one_node.sbatch configs/presets/grpo_qwen2.5_7b_8gpu.yaml run.steps=50

| algorithm | data, from the Hugging Face hub | rows per step | tokens |
|---|---|--:|--:|
| GRPO | GSM8K, scored by rule | 256 prompts * 8 | 1,024 |
| GRPO at 32k | DeepScaleR's problems, scored by rule | 64 prompts * 8 | 32,768 |
| PPO | as GRPO | 512 prompts | 1,024 |
| DPO | UltraFeedback's pairs | 128 | 2,048 |
| SFT | Capybara's conversations | 128 | 2,048 |

LoRA trains [adapters](parallelism.md#adapters-lora). At 32k four ranks share the tokens of a row
([context parallelism](parallelism.md#context-parallelism)). Another model of the same size needs
only `models.actor.path`. Where ranks have no network, run `hf download NAME` (data: with
`--repo-type dataset`) before, and set `HF_HUB_OFFLINE=1`.

Each cell has the GiB of the fullest GPU (of 79.2) and the seconds of a step on H100, with rows at
their limits. Both are predicted, not measured; the seconds assume CUDA graphs also with tp, which
no GPU has run. For rows as long as yours:

    rlhf-spmd plan --config FILE plan.fixed=config cluster.nodes=N 'workload.response_lengths=[200,300,500]'

Without `plan.fixed` the planner looks for a faster layout.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [(preset, *judge(preset, Path(folder))) for preset in TABLE]
    wrong = [f"{preset.name} does not fit: {why}" for preset, _, _, why in found if why is not None]
    files = {PRESETS / f"{preset.name}.yaml": preset.text() for preset in TABLE} | {PAGE: page(found)}
    if args.check:
        wrong += [f"{path} differs" for path, text in files.items() if not path.exists() or path.read_text() != text]
    else:
        PRESETS.mkdir(exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
