"""Plans of all ranks, checked against each other."""

from __future__ import annotations

import torch

from reshard_cases import Simulated, filled
from rlhf_spmd.reshard import missing_elements
from rlhf_spmd.reshard.reshard_methods import single_slice


def check_plans(run: Simulated) -> None:
    """The generation shards come out exact, by as many elements as have to come, and the training shards can come back."""
    for index, plan in enumerate(run.plans):
        got = run.generation(index)
        assert all(torch.equal(got[name], expected) for name, expected in filled(run.wanted[index]).items())
        if not plan.from_whole:
            assert plan.transfer.received(index) == missing_elements(run.train[index], run.wanted[index])
        for name, place in plan.locations.items():
            rebuilt = torch.full_like(run.values[index][name], torch.nan)
            for piece in place:
                rebuilt[piece.source.slices] = got[piece.target.parameter][piece.target.slices]
            assert torch.equal(rebuilt, run.values[index][name])
            view = single_slice(place, run.train[index][name].shape)
            if view is not None:
                assert torch.equal(got[view[0]][view[1]], run.values[index][name])
