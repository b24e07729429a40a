"""Writes checkpoints in a thread of its own while the next steps run."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType

import torch

from rlhf_spmd.checkpoint.save import Draft
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.board import Board
from rlhf_spmd.reshard import BackgroundTask


class CheckpointWriter:
    """At most one checkpoint is in flight. ``board.last_checkpoint`` names it once it is committed.

    All ranks write the same checkpoints in the same order. The collectives of their threads have a channel of their own, so they
    never wait for those of the steps. As a context it does not end before the thread, unless the run is ended at once.
    """

    def __init__(self, world: World, board: Board) -> None:
        self._world, self._board = world, board
        self._task: BackgroundTask | None = None

    @cached_property
    def _group(self) -> Group:
        group = self._world.group(range(self._world.size), "checkpoints", channel="checkpoints")
        assert group is not None, "it is of all ranks"
        return group

    def write(self, draft: Draft) -> None:
        """Collective over the world: every rank of it must call, in program order. Raises CheckpointError on all of them."""
        self._write(draft, self._world.all)

    def start(self, draft: Draft) -> None:
        """Copy the draft's values and write them in the background.

        Collective over the world: every rank of it must call, in program order, after :meth:`wait`.
        """
        assert self._task is None, "a checkpoint is in flight"
        copied = draft.copied()
        self._group.connect()  # here, where all ranks are
        self._task = BackgroundTask(lambda: self._write(copied, self._group), "checkpoint")

    def check(self) -> None:
        """Raise CheckpointError if the checkpoint in flight has failed. Does not wait."""
        if self._task is not None and not self._task.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is in flight on this rank. Raises CheckpointError if it has failed."""
        task, self._task = self._task, None
        if task is not None:
            task.wait()

    def _write(self, draft: Draft, group: Group) -> None:
        self._board.last_checkpoint = str(draft.write(group))

    def __enter__(self) -> CheckpointWriter:
        # so that its thread is there, with what torch keeps for each, before memory runs out
        BackgroundTask(lambda: torch.zeros(1), "checkpoint").wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After a failure the other ranks still live, so that the checkpoint becomes complete. A Ctrl-C does not wait for them."""
        if self._task is not None and (self._world.size == 1 or kind is None or issubclass(kind, Exception)):
            self._task.join()
