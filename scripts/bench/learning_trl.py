"""TRL's GRPO or RLOO with the settings of one of this project's configurations; ``learning.py`` starts it where trl is installed.

    python learning_trl.py CASE.json OUT.json

The same model, prompts, reward, learning rate, optimizer steps, group size, clip range and KL coefficient; what TRL has no setting for
stays TRL's. Written: [step, share of right answers] on the held-out prompts, sampled at temperature 1, and seconds of training.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]


def main(case_path: str, out: str) -> None:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    case = json.loads(Path(case_path).read_text(encoding="utf-8"))
    config, name = case["config"], case["algorithm"]
    data, algorithm, run = config["data"], config["algorithm"], config["run"]
    path, optim = config["models"]["actor"]["path"], config["models"]["actor"]["optim"]
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    prompts = Dataset.from_list([{key: row[key] for key in ("prompt", "answer")} for row in read(data["path"])])
    held_out = read(data["val_path"])
    n, mini = config["sampling"]["n"], algorithm["ppo_mini_batch_size"]
    updates = data["train_batch_size"] // mini  # optimizer steps on one rollout
    kl = algorithm["kl_loss_coef"] if name == "grpo" else algorithm["kl_ctrl"]["kl_coef"]
    settings: dict[str, Any] = (
        {"loss_type": "dapo", "scale_rewards": "group"} if name == "grpo" else {"normalize_advantages": False}
    )
    arguments = getattr(trl, f"{name.upper()}Config")(
        output_dir=str(Path(out).with_suffix("")),
        per_device_train_batch_size=mini * n,
        steps_per_generation=updates,
        num_generations=n,
        max_completion_length=data["max_response_length"],
        max_steps=run["steps"] * updates,
        learning_rate=optim["lr"],
        weight_decay=optim["weight_decay"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=kl,
        epsilon=0.2,
        temperature=1.0,
        seed=case["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        **settings,
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    curve: list[list[float]] = []

    @torch.no_grad()
    def validate(step: int) -> None:
        state = torch.random.get_rng_state()
        torch.manual_seed(1_000_003 + case["seed"])
        inputs = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True, add_special_tokens=False)
        found = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=data["max_response_length"])
        texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = right(texts, [row["answer"] for row in held_out])
        curve.append([step, sum(scores) / len(scores)])
        torch.random.set_rng_state(state)

    class Validate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % (run["test_freq"] * updates) == 0:
                validate(state.global_step // updates)

    validate(0)
    trainer = getattr(trl, f"{name.upper()}Trainer")(
        model, right, arguments, train_dataset=prompts, processing_class=tokenizer, callbacks=[Validate()]
    )
    begin = time.perf_counter()
    trainer.train()
    report = {"metric": "val/reward_mean", "curve": curve, "seconds": round(time.perf_counter() - begin, 1)}
    Path(out).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
