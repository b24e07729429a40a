"""What a step finds in ``data``: the rows of a stream, in the trace and in the run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_spmd.controller import source
from rlhf_spmd.data import batch
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.data.files import Row
from rlhf_spmd.data.loader import Loader
from rlhf_spmd.data.sft import SftConfig
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.training.recorder import merge_values
from rlhf_spmd.training.streams import STREAM_STRIDE, InFlightStream, RowStream
from rlhf_spmd.workers.compute import ComputeWorker
from rlhf_spmd.workers.objective import Rows


def stream(number: int = 0, n: int = 1) -> RowStream:
    rows = [Row({"prompt_ids": [i + 1], "response_ids": [1]}, str(i)) for i in range(12)]
    dataset = SftConfig(path="unused").encode_all(rows, None)
    return RowStream(Loader(dataset, 4, shuffle=False), n, number)


def first_tokens(rows: Batch | None) -> list[int]:
    assert rows is not None
    return rows["prompt_ids"].values.tolist()


@pytest.mark.parametrize(
    ("traced", "run", "expected"),
    [
        ([4], [4], [1, 2, 3, 4]),
        ([4], [3], [1, 2, 3]),
        ([2], [2, 3], [1, 2, 3, 4, 5]),
        ([4], [0, 2], [1, 2]),
    ],
)
def test_the_run_gets_the_rows_that_it_asks_for_whatever_the_trace_did(
    traced: list[int], run: list[int], expected: list[int]
) -> None:
    data = stream()
    for sizes in (traced, run):
        data.begin()
        assert [len(data.next(size)) for size in sizes] == sizes
    assert first_tokens(data.commit()) == expected
    data.begin()
    assert data.next(1).fields["prompt_ids"][0].producer.data["prompt_ids"].values.tolist() == [len(expected) + 1]  # type: ignore[union-attr]


def test_prompts_in_flight_that_nobody_takes_are_refused() -> None:
    """The next step would get the same prompts again, and so would all others."""
    flying = InFlightStream(stream().loader, n=1, in_flight=8, num_replicas=1)
    flying.begin()
    assert len(flying.next()) == 8
    with pytest.raises(RuntimeError, match="the next step would get the same ones"):
        flying.commit()
    with pytest.raises(ValueError, match="leave the size out"):
        flying.next(3)


def test_prompts_in_flight_keep_no_numbers() -> None:
    """Their rows are not those of a batch of the loader."""
    flying = InFlightStream(stream().loader, n=1, in_flight=8, num_replicas=1)
    flying.begin()
    rows = flying.next()
    with pytest.raises(ValueError, match="leave it out"):
        flying.keep(rows, "x", torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="leave it out"):
        flying.split_by_kept(rows, "x")


def test_replicas_have_prompts_in_flight_in_proportion_to_their_speeds() -> None:
    """Each has always at least as many as it gives, also one that is much slower than the others."""
    speeds, loader = (1.0, 0.5, 0.01), stream().loader
    flying = InFlightStream(loader, n=1, in_flight=8, num_replicas=3, speeds=speeds)
    assert flying.num_groups == (2, 1, 1)
    for _ in range(4):
        flying.begin()
        flying.next()
        held = np.bincount(flying.replicas, minlength=3)
        assert held.tolist() == [5, 2, 1] and flying.prompts is not None
        order = flying.prompts.row_ids.numpy()
        ended = [order[flying.replicas == replica][:gives] for replica, gives in enumerate(flying.num_groups)]
        flying.take_reported([{"groups": np.concatenate(ended).tolist()}])
        flying.commit()
    state, replicas = flying.state_dict(), flying.replicas.tolist()
    for other, same in ((speeds, True), ((1.0, 0.6, 0.01), False)):
        resumed = InFlightStream(stream().loader, n=1, in_flight=8, num_replicas=3, speeds=other)
        resumed.load_state_dict(state)
        assert (resumed.replicas.tolist() == replicas) == same
        assert np.bincount(resumed.replicas, minlength=3).sum() == 4
        resumed.begin()
        resumed.next()
        assert (np.bincount(resumed.replicas, minlength=3) >= resumed.num_groups).all()


def test_rows_of_two_streams_are_never_the_same_rows() -> None:
    one, other = stream(), stream(number=1)
    assert other.next().rows.row_ids.min() == STREAM_STRIDE  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="different rows"):
        one.next().union(other.next())
    rows = source(Batch(torch.arange(4), torch.arange(4), {}))
    with pytest.raises(ValueError, match="other groups"):
        rows.repeat(2).take(rows)


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0]])
def test_a_number_that_is_none_is_seen_wherever_it_stands(values: list[float]) -> None:
    for name in ("x/max", "x/min", "x/mean"):
        metrics, _ = merge_values([[{name: value} for value in values]])
        assert math.isnan(metrics[name])


def test_a_function_that_writes_to_its_fields_changes_no_other_call_s_result() -> None:
    """One rank, whose calls give each other their own tensors."""
    scores = torch.arange(8.0)
    batch = Batch(torch.arange(8), torch.arange(8), {"scores": scores, "response_ids": ragged([[1]] * 8, torch.int64)})

    def centre(fields: dict[str, Any], rows: Rows, whole: Any) -> Any:
        whole.sum(fields["scores"])
        fields["scores"] -= fields["scores"].mean()
        return {"centred": fields["scores"]}, {}

    worker = ComputeWorker.__new__(ComputeWorker)
    worker.mesh, worker.state = type("Mesh", (), {"pool": solo()})(), {}
    made, _ = ComputeWorker.apply.spec.body(worker, batch, centre, ("scores",), ("centred",))
    assert np.allclose(made["centred"], torch.arange(8.0) - 3.5)
    assert torch.equal(scores, torch.arange(8.0))


@pytest.mark.parametrize("index", [[2, 0, 2, 3], []])
def test_long_rows_are_copied_by_slices_to_the_same_rows(index: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.arange(length) + 1000 * i for i, length in enumerate((40, 0, 33, 90))]
    field, at = ragged([row.tolist() for row in rows], torch.int64), torch.tensor(index, dtype=torch.int64)
    taken = []
    for limit in (0, math.inf):  # always slices, never
        monkeypatch.setattr(batch, "MIN_SLICED_LENGTH", limit)
        taken.append([row.tolist() for row in field.take(at).rows()])
    assert taken[0] == taken[1] == [rows[i].tolist() for i in index]
