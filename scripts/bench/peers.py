"""What the benchmarks of whole runs compare with: torch alone, verl's single controller, TRL's trainers.

``controller.py`` and ``train.py`` start these in Python environments that have them:

    pip install torch ray numpy omegaconf codetiming psutil "tensordict<=0.10" "transformers<5.11" && pip install --no-deps verl
    pip install torch trl    # of which 1.12 and earlier have PPO
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import memory_mib, run_parts


def torch_alone(begun: float) -> dict[str, float] | None:
    """Seconds from ``begun`` until gloo is connected on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    slowest = torch.tensor([time.time() - begun], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return {"program_s": float(slowest)} if first else None


# verl: one process drives all workers through Ray


def tree_cpu_s() -> float:
    """CPU seconds of this process and of all that descend from it: Ray's daemons and workers."""
    children, used = defaultdict(list), {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    total, todo = 0.0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0.0)
        todo += children[pid]
    return total


def repeated(body: Callable[[], object], repeats: int) -> dict[str, float]:
    """Of all repetitions together the CPU time: a tick of the kernel's clock is longer than one of them."""
    import torch

    wall = []
    for i in range(-2, repeats):
        if i == 0:
            cpu = tree_cpu_s()
        begin = time.perf_counter()
        body()
        wall.append((time.perf_counter() - begin) * 1e6)
    kept = torch.tensor(wall[2:])
    spent = (tree_cpu_s() - cpu) / repeats * 1e6
    return {"median_us": float(kept.median()), "p90_us": float(kept.quantile(0.9)), "all_cpu_us": spent}


def verl(ranks: int, repeats: int, sizes: list[tuple[int, int]], begun: float) -> dict[str, Any]:
    """Seconds from the start of the program, and from that of the worker group, to the end of the first call to all, with the CPU
    seconds of all processes; then wall and CPU microseconds of an empty call to all, and of a call of one half of the workers whose
    result is taken by a call of the other half, through the driver (``blocking``) and as futures."""
    import ray
    import torch
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Toy(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def nothing(self) -> None:
            pass

        @register(Dispatch.ONE_TO_ALL)
        def width(self, columns: int, rows: int) -> None:
            torch.set_num_threads(1)
            self.payload = torch.ones(rows, columns)

        @register(Dispatch.DP_COMPUTE_PROTO)
        def produce(self, rows: DataProto) -> DataProto:
            return DataProto.from_dict({"payload": self.payload[: len(rows)]})

        @register(Dispatch.DP_COMPUTE_PROTO)
        def consume(self, rows: DataProto) -> DataProto:
            assert rows.batch["payload"].shape[1] == self.payload.shape[1]
            return DataProto.from_dict({"done": torch.ones(len(rows))})

        @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def produce_later(self, rows: DataProto) -> DataProto:
            return DataProto.from_dict({"payload": self.payload[: len(rows)]})

    def one_move(produce: Callable[[Any], Any], consume: Callable[[Any], Any], prompts: Any) -> None:
        consume(produce(prompts))

    half = ranks // 2
    ray.init(num_cpus=2 * ranks, include_dashboard=False, log_to_driver=False, logging_level="error")
    group_begun = time.time()
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    toy = RayClassWithInitArgs(ray.remote(Toy))
    every = RayWorkerGroup(pool, toy, device_name="cpu")
    every.nothing()
    now = time.time()
    report: dict[str, Any] = {"start": {"program_s": now - begun, "group_s": now - group_begun, "cpu_s": tree_cpu_s()}}
    report |= {"empty": repeated(every.nothing, 4 * repeats), "moves": []}
    halves = slice(half), slice(half, 2 * half)
    a, b = (RayWorkerGroup.from_detached(None, every.worker_names[of], every.workers[of], toy) for of in halves)
    for rows, mebibytes in sizes:
        for group in (a, b):
            group.width((mebibytes << 20) // 4 // rows, rows)
        prompts = DataProto.from_dict({"prompt_ids": torch.zeros(rows, 40, dtype=torch.int64)})
        for way, produce in (("blocking", a.produce), ("futures", a.produce_later)):
            took = repeated(partial(one_move, produce, b.consume, prompts), repeats)
            report["moves"].append({"rows": rows, "mebibytes": mebibytes, "way": way, **took})
    ray.shutdown()
    return report


# TRL

COMMON = {
    **dict.fromkeys(("logging_strategy", "save_strategy"), "no"),
    **dict.fromkeys(("use_cpu", "disable_tqdm"), True),
    **dict.fromkeys(("bf16", "gradient_checkpointing"), False),
    "report_to": [],
    "temperature": 1.0,
}


def different_words(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def group_trainer(
    name: str, path: str, reward: Callable[..., Any], callback: Any, prompts: Any, tokenizer: Any, **settings: Any
) -> Any:
    """GRPO's or RLOO's."""
    import trl
    from transformers import AutoModelForCausalLM

    config = getattr(trl, f"{name.upper()}Config")(**COMMON, **settings)
    model = AutoModelForCausalLM.from_pretrained(path)
    options = {"train_dataset": prompts, "processing_class": tokenizer, "callbacks": [callback]}
    return getattr(trl, f"{name.upper()}Trainer")(model, reward, config, **options)


def ppo_trainer(case: dict[str, Any], callback: Any, prompts: Any, tokenizer: Any, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, reference = (AutoModelForCausalLM.from_pretrained(case["model"]) for _ in range(2))
    scores, values = (AutoModelForSequenceClassification.from_pretrained(case["scorer"], num_labels=1) for _ in range(2))
    rows = case["rows"] // case["ranks"]
    config = PPOConfig(
        **COMMON,
        **settings,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=rows,
        response_length=case["length"],
        total_episodes=case["rows"] * case["steps"],
        num_sample_generations=0,
        kl_coef=case["kl"],
    )
    tokens = prompts.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=prompts.column_names)
    return PPOTrainer(config, tokenizer, policy, reference, scores, tokens, values, eval_dataset=tokens, callbacks=[callback])


def trl_iteration(**case: Any) -> dict[str, Any] | None:
    """One algorithm on one workload: seconds of each iteration (a generation with one optimizer step after it) and the largest resident
    memory of any rank. Responses have one length: no token ends them."""
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(case["matmul"])
    datasets.disable_progress_bars()
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(case["model"], padding_side="left")
    prompts = datasets.Dataset.from_list([{"prompt": prompt} for prompt in case["prompts"]])
    settings = {"output_dir": case["scratch"], "learning_rate": 1e-6, "seed": 0}
    if case["algorithm"] == "ppo":
        trainer = ppo_trainer(case, Clock(), prompts, tokenizer, **settings)
    else:
        settings |= {"per_device_train_batch_size": case["rows"] // case["ranks"], "num_generations": case["n"]}
        settings |= {"max_completion_length": case["length"], "generation_kwargs": {"min_new_tokens": case["length"]}}
        settings |= {"beta": case["kl"], "max_steps": case["steps"]}
        trainer = group_trainer(case["algorithm"], case["model"], different_words, Clock(), prompts, tokenizer, **settings)
    trainer.train()
    mine = torch.tensor([memory_mib("VmHWM")])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
    first = int(os.environ.get("RANK", "0")) == 0
    return {"seconds": [b - a for a, b in pairwise(ends)], "peak_mib": float(mine)} if first else None


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]


def trl_learning(algorithm: str, seed: int, config: dict[str, Any], scratch: str) -> dict[str, Any]:
    """GRPO or RLOO with the settings of one of this project's configurations: the same model, prompts, reward, learning rate, optimizer
    steps, group size, clip range and KL coefficient; what TRL has no setting for stays TRL's. [step, share of right answers] on the
    held-out prompts, sampled at temperature 1, and seconds of training."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    data, rules, run = config["data"], config["algorithm"], config["run"]
    path, optim = config["models"]["actor"]["path"], config["models"]["actor"]["optim"]
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    rows, held_out = (
        [json.loads(line) for line in Path(data[key]).read_text(encoding="utf-8").splitlines()] for key in ("path", "val_path")
    )
    prompts = Dataset.from_list([{key: row[key] for key in ("prompt", "answer")} for row in rows])
    n, mini = config["sampling"]["n"], rules["ppo_mini_batch_size"]
    updates = data["train_batch_size"] // mini  # optimizer steps on one rollout
    grpo: dict[str, Any] = {"loss_type": "dapo", "scale_rewards": "group"}
    settings = {
        **(grpo if algorithm == "grpo" else {"normalize_advantages": False}),
        "output_dir": scratch,
        "per_device_train_batch_size": mini * n,
        "steps_per_generation": updates,
        "num_generations": n,
        "max_completion_length": data["max_response_length"],
        "max_steps": run["steps"] * updates,
        "learning_rate": optim["lr"],
        "weight_decay": optim["weight_decay"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "beta": rules["kl_loss_coef"] if algorithm == "grpo" else rules["kl_ctrl"]["kl_coef"],
        "epsilon": 0.2,
        "seed": seed,
    }
    curve: list[list[float]] = []

    class Validate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % (run["test_freq"] * updates) == 0:
                validate(state.global_step // updates)

    trainer = group_trainer(algorithm, path, right, Validate(), prompts, tokenizer, **settings)

    @torch.no_grad()
    def validate(step: int) -> None:
        state = torch.random.get_rng_state()
        torch.manual_seed(1_000_003 + seed)
        inputs = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True)
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": data["max_response_length"]}
        found = trainer.model.generate(**inputs, **sampled)
        texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = right(texts, [row["answer"] for row in held_out])
        curve.append([step, sum(scores) / len(scores)])
        torch.random.set_rng_state(state)

    validate(0)
    begin = time.perf_counter()
    trainer.train()
    return {"metric": "val/reward_mean", "curve": curve, "seconds": round(time.perf_counter() - begin, 1)}


if __name__ == "__main__":
    run_parts()
