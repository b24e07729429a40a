"""The Hugging Face directories that a run writes, their model cards, and the best step of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd.checkpoint.directory import COMMIT, step_directory
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.reshard import BackgroundTask
from rlhf_spmd.telemetry import run_dir, run_lock
from rlhf_spmd.telemetry.progress import LOWER_IS_BETTER
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers import ModelWorker

LOAD = """from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".", dtype="auto")  # the directory of this file"""
LOAD_ADAPTERS = """from peft import PeftModel
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(model, "adapter")  # beside this file"""
CARD = Path(__file__).with_name("model_card.md")


class Exports:
    """Writes exports, and remembers the best step. ``best``: metric, step and value of ``run.keep_best`` so far."""

    def __init__(self, run_plan: RunPlan, controller: Controller) -> None:
        self.run_plan = run_plan
        self.controller = controller
        self.run = run_plan.config.run
        self.run_dir = Path(self.run.dir)
        self.best: dict[str, Any] | None = None

    def restore(self, best: dict[str, Any] | None) -> None:
        """Take over the best step of a checkpoint, if it has the same metric and still exists."""
        self.best = None
        if best is not None and best["metric"] == self.run.keep_best:
            self.best = best if (step_directory(self.run_dir, best["step"]) / COMMIT).is_file() else None

    def is_best(self, global_step: int, metrics: Mapping[str, float]) -> bool:
        """Return True, and remember the step, if no earlier validation gave a better ``run.keep_best``. Step 0 has no checkpoint.

        Raises ValueError if validation gives no such metric.
        """
        name = self.run.keep_best
        if name is None:
            return False
        if name not in metrics:
            hint = nearest(name, list(metrics)) or ";"
            raise ValueError(f"run.keep_best={name}: validation has no such metric{hint} it gives {', '.join(sorted(metrics))}")
        value = metrics[name]
        sign = -1 if LOWER_IS_BETTER.fullmatch(name) else 1
        if not global_step or not math.isfinite(value) or (self.best and sign * value <= sign * self.best["value"]):
            return False
        self.best = {"metric": name, "step": global_step, "value": value}
        return True

    def write(self, global_step: int, newest: Path, ended: bool) -> None:
        """Write the exports that are due after step ``global_step`` and missing.

        A run may have ended between a checkpoint and its export.

        Collective over the world: every rank of it must call, in program order.
        """
        due: dict[str, Path] = {}
        if self.run.export_freq and global_step % self.run.export_freq == 0:
            due[f"{run_dir.EXPORTS_DIR}/step_{global_step}"] = newest
        if self.run.export and self.best:
            due[f"{run_dir.EXPORTS_DIR}/best"] = step_directory(self.run_dir, self.best["step"])
        if self.run.export and ended:
            due[run_dir.EXPORT_DIR] = newest
        is_first = self.controller.rank == 0
        for name, checkpoint in due.items():
            if self.controller.any_rank(is_first and run_dir.exported_checkpoint(self.run_dir, name) != checkpoint.name):
                self._write(checkpoint, self.run_dir / name)

    def _write(self, checkpoint: Path, out: Path) -> None:
        """Export on rank 0. The others poll, since the time limit of a collective would not let them wait that long."""

        with self.controller.timeline.span("export", category="io"):
            # in a daemon thread, for which an interrupted run does not wait
            task = BackgroundTask(partial(self._export, checkpoint, out), "export") if self.controller.rank == 0 else None
            pause_s = 0.01
            while self.controller.any_rank(task is not None and task.is_alive()):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
        if task is not None:
            task.wait()

    def _export(self, checkpoint: Path, out: Path) -> None:
        from transformers.utils.hub import convert_file_size_to_int

        check_lock = partial(run_lock.check_still_held, self.run_dir)
        check_lock()
        config = self.run_plan.config
        exported = self.run_plan.exported
        max_shard_bytes = convert_file_size_to_int(self.run.max_shard_size)
        merged = not exported.config.lora.rank or self.run.export_merged
        assert issubclass(exported.worker, ModelWorker), "the exported role has a model"
        export_hugging_face(
            checkpoint,
            config.algorithm.exported,
            exported.directory,
            out,
            max_shard_bytes,
            card=model_card(config, exported.directory, checkpoint.name, exported.worker.head, merged),
            merged=merged,
            tokenizer=self.run_plan.tokenizer,
            chat_template=read_template(getattr(config.data, "chat_template", None), "data.chat_template"),
            check_owner=check_lock,
        )
        run_dir.atomic_write_text(out / run_dir.EXPORTED_FILE, checkpoint.name)


def model_card(config: TrainConfig, base: Path, checkpoint: str, head: str, merged: bool) -> str:
    """Return README.md as the Hub reads it.

    - base: the directory of the model before training
    - checkpoint: the name of the checkpoint, step_N
    - head: the head of the role's model
    - merged: the export has the whole model, not only adapters
    """
    kind = "AutoModelForSequenceClassification" if head == "value" else "AutoModelForCausalLM"
    has_adapters = config.models[config.algorithm.exported].lora.rank
    name = hub_name(base)
    source = name or str(base)
    beside = " Its low-rank adapters alone are in `adapter`, as PEFT loads them beside the model that they were trained on."
    return CARD.read_text(encoding="utf-8").format(
        base=source,
        base_model=f"base_model: {name}\n" if name else "",
        algorithm=config.algorithm.name,
        name=config.run.name,
        checkpoint=checkpoint,
        adapters=beside if has_adapters and merged else "",
        load=(LOAD if merged else LOAD_ADAPTERS).format(kind=kind, base=source),
        config=to_yaml(config),
    )


def hub_name(directory: Path) -> str | None:
    """Return the Hub's name of a model in the cache of its client; None for any other directory."""
    cached = next((part for part in directory.parts if part.startswith("models--")), None)
    return cached.removeprefix("models--").replace("--", "/", 1) if cached and directory.parent.name == "snapshots" else None
