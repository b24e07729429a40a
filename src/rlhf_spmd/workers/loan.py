"""Per-call layouts (ReaL's execution plan): a role's weights on loan to a worker that serves one of its methods elsewhere.

The twin is a worker of the same class on the call's pool and layout, without an optimizer; between calls its parameters have no
storage. For a call they get some, and the home's weights are transferred into them: every rank of both pools takes part, each
member of the home only as a sender where it does not run the call, and it goes on while it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from rlhf_spmd.parallel.program import fail_beside
from rlhf_spmd.reshard import Transfer, holdings, plan_transfer, start_transfer

if TYPE_CHECKING:
    from rlhf_spmd.workers.model_worker import ModelWorker


class Loan:
    """The weights of ``home`` for the calls that ``twin`` serves. Every rank of the world makes one; that communicates nothing."""

    def __init__(self, home: ModelWorker, twin: ModelWorker, method: str) -> None:
        world, spec = home.build.world, home.spec
        assert spec is not None, f"{home.name} has no weights to lend"
        self.home, self.twin, self._rank = home, twin, world.rank
        ranks = sorted({*home.pool.ranks, *twin.pool.ranks})
        # a channel of its own: weights may still be on their way while the same ranks compute, or lend others
        self._group = world.group(ranks, "loan", channel=f"{home.name}.{method}")
        self._transfer: Transfer | None = None
        if self._group is not None:
            here, there = (holdings(at.shape.layout, at.shards(spec), at.pool.ranks) for at in (home, twin))
            self._plan = plan_transfer(here, there, lambda rank: rank // world.launch.local_size, world.rank)

    def take(self) -> None:
        """Fill the twin's parameters. Collective over both pools: every rank of them must call, in program order."""
        if self.twin.member:
            self.twin.engine.storages.allocate()
        self.copy(self.twin.engine.local_tensors() if self.twin.member else {})

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets``, which on the twin's ranks are like its local shards. Collective as :meth:`take`."""
        self.settle()
        if self._group is None:
            return
        self._group.connect()
        home = self.home
        if home.resting is not None:
            home.resting.reload()
        sources = home.engine.local_tensors() if home.member else {}
        dtype = self.twin.config.torch_dtype(self.twin.device)
        self._transfer = start_transfer(self._plan, self._rank, sources, targets, self._group, dtype=dtype)
        if self.twin.member or home.resting is not None:
            self.settle()
        else:
            board = home.controller.board
            call = board.call if board else (0, "", "")
            self._transfer.proceed(None if board is None else lambda error: fail_beside(board, error, call))
        if home.resting is not None:
            home.resting.rest(home.engine.local_tensors().values(), changed=False)

    def settle(self) -> None:
        """Wait until this rank has sent and received what it had to: the home's weights may change then."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def give_back(self) -> None:
        if self.twin.member:
            self.twin.engine.reshard()
            self.twin.engine.storages.free()
