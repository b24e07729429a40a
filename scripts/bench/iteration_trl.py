"""One algorithm of TRL on one workload, in the Python environment that has it; ``iteration.py`` starts it, under torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node 2 iteration_trl.py CASE.json OUT.json

Responses have one length: no token ends them. Rank 0 writes the seconds of each iteration (a generation with one optimizer step after
it) and the largest resident memory of any rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import memory_mib


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grpo(case: dict[str, Any], common: dict[str, Any], prompts: Any, tokenizer: Any, clock: Any) -> None:
    import trl
    from transformers import AutoModelForCausalLM

    kind = {"grpo": "GRPO", "rloo": "RLOO"}[case["algorithm"]]
    model = AutoModelForCausalLM.from_pretrained(case["model"])
    config = getattr(trl, f"{kind}Config")(
        **common,
        per_device_train_batch_size=case["rows"] // case["ranks"],
        num_generations=case["n"],
        max_completion_length=case["length"],
        generation_kwargs={"min_new_tokens": case["length"]},
        beta=case["kl"],
        max_steps=case["steps"],
        temperature=1.0,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model, reward, config, train_dataset=prompts, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.train()


def ppo(case: dict[str, Any], common: dict[str, Any], prompts: Any, tokenizer: Any, clock: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, reference = (AutoModelForCausalLM.from_pretrained(case["model"]) for _ in range(2))
    scores, values = (AutoModelForSequenceClassification.from_pretrained(case["scorer"], num_labels=1) for _ in range(2))
    rows = case["rows"] // case["ranks"]
    config = PPOConfig(
        **common,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=rows,
        response_length=case["length"],
        total_episodes=case["rows"] * case["steps"],
        num_sample_generations=0,
        kl_coef=case["kl"],
        temperature=1.0,
    )
    tokens = prompts.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=prompts.column_names)
    PPOTrainer(config, tokenizer, policy, reference, scores, tokens, values, eval_dataset=tokens, callbacks=[clock]).train()


def main(case_path: str, out: str) -> None:
    import torch

    case = json.loads(Path(case_path).read_text(encoding="utf-8"))
    torch.set_num_threads(case["threads"])
    torch.set_float32_matmul_precision(case["matmul"])
    import datasets
    from transformers import AutoTokenizer, TrainerCallback

    datasets.disable_progress_bars()
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(case["model"], padding_side="left")
    prompts = datasets.Dataset.from_list([{"prompt": prompt} for prompt in case["prompts"]])
    common = {
        "output_dir": case["scratch"],
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "seed": 0,
    }
    {"grpo": grpo, "rloo": grpo, "ppo": ppo}[case["algorithm"]](case, common, prompts, tokenizer, Clock())
    mine = torch.tensor([memory_mib("VmHWM")])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = [b - a for a, b in pairwise(ends)]
        Path(out).write_text(json.dumps({"seconds": seconds, "peak_mib": float(mine)}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
