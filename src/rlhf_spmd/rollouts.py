"""Prompts whose responses may take several steps: more are in flight than a step trains on (``data.gen_batch_size``).

A step generates until enough whole groups have ended on every generation replica, trains on the oldest of those, and leaves the
rest where they are; the next step goes on with them under its own weights. Which rows are in flight and on which replica they
lie is the same on every rank; their tokens are known to their replica only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.controller import MICRO_DP, Reference
from rlhf_spmd.controller.reference import Cut, source
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.batch import Batch, concat
from rlhf_spmd.data.loader import Loader
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.reports import merge_values


class PromptQueue:
    """The loader's batches: every response ends in the step that began it."""

    def __init__(self, actor: Any, loader: Loader, sampling: SamplingConfig) -> None:
        self.actor, self.loader, self.sampling = actor, loader, sampling

    def next_batch(self, number: int) -> tuple[Batch, Reference, dict[str, float]]:
        """The rows of step ``number``, ``sampling.n`` of each prompt, a reference to them, and metrics.

        Collective over the world: every rank of it must call, in program order.
        """
        rows = self.loader.next_batch().repeat(self.sampling.n)
        return rows, source(rows, "prompt_ids"), {}

    def state_dict(self) -> dict[str, Any]:
        """Collective over the world: every rank of it must call, in program order."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the checkpoint has rows in flight, which only a :class:`RolloutQueue` can go on with."""
        if state:
            raise CheckpointError(
                f"the checkpoint has {len(state['groups'])} prompts in flight; give the data.gen_batch_size of the run that wrote it"
            )


def build_queue(actor: Any, loader: Loader, sampling: SamplingConfig, in_flight: int | None) -> PromptQueue:
    """``actor`` generates; ``in_flight`` prompts at a time, null: the loader's batch size."""
    if in_flight is None or in_flight == loader.batch_size:
        return PromptQueue(actor, loader, sampling)
    return RolloutQueue(actor, loader, sampling, in_flight)


class RolloutQueue(PromptQueue):
    """The loader's batch size of prompts a step, out of ``in_flight``."""

    def __init__(self, actor: Any, loader: Loader, sampling: SamplingConfig, in_flight: int) -> None:
        super().__init__(actor, loader, sampling)
        self.in_flight = in_flight
        self.cut = Cut(actor.serving("generate_sequences").members(MICRO_DP).num_parts, keep_groups=True, num_chunks=1)
        self.rows: Batch | None = None  # in flight, sampling.n of each prompt side by side
        self.homes = np.empty(0, dtype=np.int64)  # the replica of each
        self._num_new = 0  # of the last rows: those that the replicas have not been told of

    def next_batch(self, number: int) -> tuple[Batch, Reference, dict[str, float]]:
        """As the base's; the reference lies where the rows were generated."""
        missing = self.in_flight - (0 if self.rows is None else len(self.rows) // self.sampling.n)
        if missing > 0:
            self._append(self.loader.next_batch(missing))
        assert self.rows is not None
        new = np.arange(len(self.rows) - self._num_new, len(self.rows))
        quota = self.loader.batch_size // self.cut.num_parts  # whole groups of each replica
        call = self.actor.advance_rollouts(self._source(new), self.sampling, number, quota)
        self._num_new = 0
        reports = self.actor.controller.get(call)[0]
        metrics, _ = merge_values([reports])
        groups = [group for report in reports for group in report["groups"][:quota]]
        chosen = np.isin(self.rows.group_ids.numpy(), groups)
        reference = self._source(np.flatnonzero(chosen))
        rows = self.rows.take(torch.from_numpy(np.flatnonzero(chosen)))
        self.rows, self.homes = self.rows.take(torch.from_numpy(np.flatnonzero(~chosen))), self.homes[~chosen]
        return rows, reference, metrics

    def state_dict(self) -> dict[str, Any]:
        """Collective over the world: every rank of it must call, in program order."""
        held = self.actor.controller.get(self.actor.rollout_state())[0]
        groups = [] if self.rows is None else self.rows.group_ids[:: self.sampling.n].tolist()
        homes = self.homes[:: self.sampling.n].tolist()
        rows = [row for part in held for row in part]
        return {"groups": groups, "homes": homes, "num_parts": self.cut.num_parts, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Local: no communication. Another number of replicas than then takes the rows by token count."""
        if state:
            self.actor.restore_rollouts(state["rows"])
            homes = np.array(state["homes"]) if state["num_parts"] == self.cut.num_parts else None
            self._append(self.loader.rows(state["groups"]), homes)

    def _append(self, prompts: Batch, homes: np.ndarray | None = None) -> None:
        """``homes``: of each prompt; None: balanced by tokens."""
        if homes is None:
            homes = partition_by_tokens(prompts["prompt_ids"].lengths.numpy(), self.cut.num_parts)
        rows = prompts.repeat(self.sampling.n)
        self._num_new += len(rows)
        self.rows = rows if self.rows is None else concat([self.rows, rows])
        self.homes = np.concatenate([self.homes, homes.repeat(self.sampling.n)])

    def _source(self, index: np.ndarray) -> Reference:
        assert self.rows is not None
        return source(self.rows.take(torch.from_numpy(index)), "prompt_ids", {self.cut: self.homes[index]})
