"""The Hugging Face directories that a run writes, and which of its steps is the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from rlhf_spmd.checkpoint.directory import COMMIT, step_directory
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.preflight.roles import model_directory
from rlhf_spmd.telemetry import run_dir, run_lock
from rlhf_spmd.telemetry.progress import LOWEST
from rlhf_spmd.training.model_card import model_card


class Exports:
    """``prepared``: has ``config`` and ``plans``. ``best``: metric, step and value of ``run.keep_best`` so far."""

    def __init__(self, prepared: Any, controller: Controller) -> None:
        self.prepared, self.controller, self.run = prepared, controller, prepared.config.run
        self.run_dir = Path(self.run.dir)
        self.best: dict[str, Any] | None = None

    def restore(self, best: dict[str, Any] | None) -> None:
        """Go on with a checkpoint's best step if it is of the same metric and still exists."""
        same = best is not None and best["metric"] == self.run.keep_best
        self.best = best if best and same and (step_directory(self.run_dir, best["step"]) / COMMIT).is_file() else None

    def is_best(self, global_step: int, found: Mapping[str, float]) -> bool:
        """Return True, and remember the step, if no earlier validation gave a better ``run.keep_best``. Step 0 has no checkpoint.

        Raises ValueError where validation gives no such metric.
        """
        name = self.run.keep_best
        if name is None:
            return False
        if name not in found:
            hint = nearest(name, list(found)) or ";"
            raise ValueError(f"run.keep_best={name}: validation has no such metric{hint} it gives {', '.join(sorted(found))}")
        value, sign = found[name], -1 if LOWEST.fullmatch(name) else 1
        if not global_step or not math.isfinite(value) or (self.best and sign * value <= sign * self.best["value"]):
            return False
        self.best = {"metric": name, "step": global_step, "value": value}
        return True

    def write(self, global_step: int, newest: Path, ended: bool) -> None:
        """Write what is due after step ``global_step`` and missing: a run may have ended between a checkpoint and its export.

        Collective over the world: every rank of it must call, in program order.
        """
        due: dict[str, Path] = {}
        if self.run.export_freq and global_step % self.run.export_freq == 0:
            due[f"{run_dir.EXPORTS_DIR}/step_{global_step}"] = newest
        if self.run.export and self.best:
            due[f"{run_dir.EXPORTS_DIR}/best"] = step_directory(self.run_dir, self.best["step"])
        if self.run.export and ended:
            due[run_dir.EXPORT_DIR] = newest
        first = self.controller.rank == 0
        for name, checkpoint in due.items():
            if self.controller.any_rank(first and run_dir.exported_checkpoint(self.run_dir, name) != checkpoint.name):
                self._write(checkpoint, self.run_dir / name)

    def _write(self, checkpoint: Path, out: Path) -> None:
        """Export on rank 0. The others poll, since the time limit of a collective would not let them wait that long."""

        def export() -> None:
            from transformers.utils.hub import convert_file_size_to_int

            prove = partial(run_lock.check_still_held, self.run_dir)
            prove()
            config, plans = self.prepared.config, self.prepared.plans
            role = config.algorithm.exported
            source, size = model_directory(plans, role), convert_file_size_to_int(self.run.max_shard_size)
            whole = not plans[role].config.lora.rank or self.run.export_merged
            card = model_card(self.run_dir, config, source, checkpoint.name, plans[role].worker.head, whole)
            template = read_template(getattr(config.data, "chat_template", None), "data.chat_template")
            learnt = {"tokenizer": self.prepared.tokenizer, "chat_template": template, "prove": prove}
            export_hugging_face(checkpoint, role, source, out, size, card=card, merged=whole, **learnt)
            run_dir.atomic_write_text(out / run_dir.EXPORTED_FILE, checkpoint.name)

        written: Future[None] | None = Future() if self.controller.rank == 0 else None

        def note(its: Future[None]) -> None:
            try:
                export()
                its.set_result(None)
            except BaseException as error:  # raised below
                its.set_exception(error)

        with self.controller.timeline.span("export", category="io"):
            if written is not None:  # as a daemon, which a run that is ended does not wait for
                Thread(target=note, args=(written,), daemon=True).start()
            pause_s = 0.01
            while self.controller.any_rank(written is not None and not written.done()):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
        if written is not None:
            written.result()
