"""Plans of all ranks, checked against each other."""

from __future__ import annotations

import torch

from reshard_cases import Simulated, filled
from rlhf_spmd.reshard import missing_elements


def check_plans(run: Simulated) -> None:
    """The generation shards come out exact, by as many elements as have to come, and the training shards can come back."""
    for index, plan in enumerate(run.plans):
        got = run.generation(index)
        assert all(torch.equal(got[name], expected) for name, expected in filled(run.wanted[index]).items())
        extra = plan.elements_received - missing_elements(run.train[index], run.wanted[index])
        assert extra >= 0 and (extra == 0 or plan.move is None)  # a gather also brings replicated parts that only some lack
        for name, home in plan.homes.items():
            rebuilt = torch.full_like(run.values[index][name], torch.nan)
            for piece in home.pieces:
                rebuilt[piece.source_box.local_slices] = got[piece.target][piece.target_box.local_slices]
            assert torch.equal(rebuilt, run.values[index][name])
            if home.view is not None:
                assert torch.equal(got[home.view[0]][home.view[1]], run.values[index][name])
