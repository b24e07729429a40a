"""The row algebra and the dealing of rows to parts and mini-batches: pure, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from controllers import prompts
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.ppo import gae_advantages
from rlhf_spmd.controller import (
    DP,
    MICRO_DP,
    ONE_TO_ALL,
    THREE_D,
    GroupShape,
    PartitionSpec,
    Protocol,
    Reference,
    ResourcePool,
    source,
)
from rlhf_spmd.controller.call import CallInput, FieldShard, ReplicatedBatch
from rlhf_spmd.controller.protocols import ProtocolRanks, RankSpeeds
from rlhf_spmd.controller.reference import COPY_STRIDE
from rlhf_spmd.controller.rows import RowIndex, assign_rows
from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.compute import ComputeWorker, GlobalReduce
from rlhf_spmd.workers.objective import Objective, Rows


def rows(num_groups: int = 4, n: int = 2, first: int = 0, **fields: Any) -> Reference:
    """Groups ``first``, ...; row ids ``group * n + j``; ``tokens`` of row i are i + 1 times i."""
    groups = torch.arange(first, first + num_groups)
    batch = Batch(groups, groups, {}).repeat(n)
    tokens = ragged([torch.full((int(i) + 1,), int(i)) for i in batch.row_ids], torch.int64)
    return source(batch.with_fields(tokens=tokens, label=batch.row_ids * 10, **fields))


def data(reference: Reference, name: str) -> list[Any]:
    """What a call with one member would get, by row."""
    call_input = intake_of(reference, name)
    result: list[Any] = [None] * len(reference)
    for piece, names in call_input.sources:
        batch = piece.producer.data.select([names[name]]).reorder(torch.from_numpy(piece.ids))
        field = batch[names[name]]
        values = field.tolist() if isinstance(field, torch.Tensor) else [row.tolist() for row in field.rows()]
        for at, value in zip(piece.positions.tolist(), values, strict=True):
            result[at] = value
    return result


def intake_of(reference: Reference, *names: str, parts: int = 1, tokens: str | None = None) -> CallInput:
    assert reference.rows is not None
    fields = {name: reference.fields[name] for name in names}
    return CallInput(reference.rows, fields, reference.fields[tokens] if tokens else (), PartitionSpec(parts))


def ids(reference: Reference) -> list[int]:
    return reference.rows.row_ids.tolist()


def groups(reference: Reference) -> list[int]:
    return reference.rows.group_ids.tolist()


# -- the algebra


def test_union_has_the_fields_of_all_and_refuses_other_rows_and_other_data_under_one_name() -> None:
    base = rows()
    other = base.select("label").rename(label="mark")
    joined = base.union(other, base)  # the same data twice is no conflict
    assert sorted(joined.fields) == ["label", "mark", "tokens"] and data(joined, "mark") == data(base, "label")
    assert ids(joined) == ids(base) == list(range(8))
    single = rows(8, 1)
    repeated = single.take([0, 1, 2, 3]).repeat(2)  # has the ids of other rows
    assert ids(repeated) == ids(single)
    for reference, different, message in (
        (base, base.take([0, 1]), "union of references to different rows: 8 and 2; take"),
        (single.select("label"), repeated.select("tokens"), "union of references to different rows"),
        (base, rows().select("label"), "both references have a field 'label'; rename"),  # other data, of a batch of its own
        (base, base.select("tokens").rename(tokens="label"), "both references have a field 'label'"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.union(different)


def test_select_and_rename() -> None:
    base = rows()
    assert list(base.select("label").fields) == ["label"]
    assert sorted(base.rename(label="tokens", tokens="label").fields) == ["label", "tokens"]  # they change places
    with pytest.raises(ValueError, match=r"no field 'labels'; it has label, tokens"):
        base.select("labels")
    with pytest.raises(ValueError, match=r"no field 'labels'; it has label, tokens"):
        base.rename(labels="x")
    with pytest.raises(ValueError, match="would have two fields 'tokens'"):
        base.rename(label="tokens")


def test_take_by_mask_ids_and_reference() -> None:
    base = rows()
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0]).bool()
    for taken in (base.take(mask), base.take(mask.numpy()), base.take([5, 3, 2, 3]), base.take(torch.tensor([2, 5, 3]))):
        assert ids(taken) == [2, 3, 5] and groups(taken) == [1, 1, 2] and data(taken, "label") == [20, 30, 50]
        assert taken.rows.data_dependent, "which rows these are only those know who computed the mask"
    assert ids(base.take(taken)) == ids(taken) and base.take(taken).rows.data_dependent
    assert not base.take(base.firsts()).rows.data_dependent
    none = base.take(np.zeros(8, bool))
    assert len(none) == len(base.take(none)) == 0 and none.rows.data_dependent and base.take(none).rows.data_dependent
    assert data(base.take([2, 3, 5]).take([5]), "tokens") == [[5] * 6]


def test_take_refuses_what_is_not_there() -> None:
    base = rows()
    for which in ([8], [-1], rows(first=4), base.copy()):
        with pytest.raises(ValueError, match=r"take: of \d rows some are not among the 8"):
            base.take(which)
    with pytest.raises(ValueError, match="not among the 0"):
        base.take([]).take([1])
    with pytest.raises(AssertionError, match=r"it takes a mask or ids, such as get_field\(\.\.\.\) > 0"):
        base.take(torch.ones(8))


def test_firsts_repeat_and_copy() -> None:
    base = rows()
    assert ids(base.firsts()) == [0, 2, 4, 6] and groups(base.firsts()) == [0, 1, 2, 3]
    again = base.firsts().repeat(3)
    assert ids(again) == [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]
    assert (
        groups(again) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        and data(again, "label") == [0] * 3 + [20] * 3 + [40] * 3 + [60] * 3
    )
    other = base.copy().copy()
    assert ids(other) == [2 * COPY_STRIDE + i for i in range(8)] == ids(base.copy(2)) and groups(other) == groups(base)
    assert data(other, "tokens") == data(base, "tokens")


def test_ids_of_repeated_rows_and_copies_fit() -> None:
    base = rows()
    assert ids(base.copy((1 << 15) - 1))[0] == (1 << 63) - COPY_STRIDE
    for count in (0, 1 << 15, np.int64(1 << 15)):  # whose products turn over
        for function in (base.copy, base.copy().repeat):
            with pytest.raises(ValueError, match=r"the largest row id would be -?\d+; at least 1, and ids stay below"):
                function(count)


def test_concat_has_the_fields_that_all_have_in_the_order_of_ids() -> None:
    base = rows()
    greedy = base.firsts().copy()
    both = greedy.concat(base.select("label"), base.take([3]).copy(2))
    assert ids(both) == [*range(8), *(COPY_STRIDE + i for i in (0, 2, 4, 6)), 2 * COPY_STRIDE + 3]
    assert list(both.fields) == ["label"] and data(both, "label") == [*range(0, 80, 10), 0, 20, 40, 60, 30]
    assert groups(both) == [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3, 1] and both.rows.data_dependent
    assert data(both.take(greedy), "label") == [0, 20, 40, 60]
    assert ids(both.take(base)) == ids(base)
    with pytest.raises(ValueError, match=r"a row is in two of the references; copy\(\)"):
        base.concat(base.take([3]))


def test_pieces_for_the_same_rows_travel_together() -> None:
    """However rows were moved, the fields that one call made go in one message."""
    base = rows()
    moved = base.concat(base.copy()).take(np.arange(4, 12)[:4]).repeat(2)
    shares = intake_of(moved, "tokens", "label").sources
    assert [sorted(names) for _, names in shares] == [["label", "tokens"]]
    twice = intake_of(base.concat(base.copy()), "tokens", "label").sources
    assert [sorted(names) for _, names in twice] == [["label", "tokens"]] * 2


# -- placing rows


def tokens_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(4, 1, num_rows), 2000).astype(np.int64) + 1


def apart(tokens: np.ndarray) -> np.ndarray:
    """Of rows that have none of them in common."""
    return np.stack([tokens, np.zeros_like(tokens)])


def test_rows_whose_responses_are_unknown_are_dealt_one_by_one() -> None:
    """Prompts are then all that counts, and of a whole group they would count once: half of the parts would get no row."""
    index = torch.arange(2)
    prompts = source(Batch(index, index, {"prompt_ids": ragged([[5] * 90, [5] * 91], torch.int32)})).repeat(16)
    call_input = CallInput(prompts.rows, {}, prompts.fields["prompt_ids"], PartitionSpec(8, keep_groups=False))
    assert np.bincount(call_input.partition.parts[0], minlength=8).tolist() == [4] * 8


def test_single_rows_balance_better_than_groups() -> None:
    groups, tokens = np.repeat(np.arange(16), 8), tokens_of(128)
    fullest = [
        np.bincount(assign_rows(PartitionSpec(8, keep), groups, apart(tokens))[0][0], tokens).max() for keep in (True, False)
    ]
    assert fullest[1] < fullest[0] and fullest[1] < 1.02 * tokens.sum() / 8


def test_rows_keep_the_part_that_was_given_to_them() -> None:
    homes = np.array([1, 1, 0, 0])
    batch = Batch(torch.arange(4), torch.arange(4) // 2, {"x": torch.zeros(4)})
    reference = source(batch, {PartitionSpec(2): homes})
    whole = reference.take(np.ones(4, bool))
    for same in (reference, whole):
        assert same.rows.partition(PartitionSpec(2), "", lambda: apart(np.array([100, 1, 1, 1]))).parts.tolist() == [
            homes.tolist()
        ]
    assert len(reference.take([0, 1, 2]).rows.fixed_parts) == 0


def test_parts_of_a_replica_have_the_speed_of_its_slowest_rank() -> None:
    pool = ResourcePool("p", (1, 2, 4, 5))

    def speeds(protocol: Protocol, layout: Layout, *of_ranks: float, generation: Sequence[float] = ()) -> tuple[float, ...]:
        return ProtocolRanks(protocol, GroupShape(layout), pool, RankSpeeds(of_ranks, generation)).speeds

    some = 9.0, 1.0, 0.5, 9.0, 0.7, 2.0  # of ranks 0 to 5
    assert speeds(THREE_D, Layout(dp=4), *some) == (1.0, 0.5, 0.7, 2.0)
    assert speeds(THREE_D, Layout(dp=2, tp=2), *some) == (0.5, 0.7)
    assert speeds(THREE_D, Layout(pp=2, dp=2), *some) == (0.7, 0.5)
    assert speeds(MICRO_DP, Layout(dp=2, tp=2), *some) == (0.5, 0.7)
    others = 1.0, 1.0, 1.0, 1.0, 0.3, 0.2
    assert speeds(MICRO_DP, Layout(dp=2, tp=2), *some, generation=others) == (1.0, 0.2)
    assert speeds(THREE_D, Layout(dp=2, tp=2), *some, generation=others) == (0.5, 0.7)
    assert speeds(ONE_TO_ALL, Layout(dp=4), *some) == () == speeds(THREE_D, Layout(dp=4))
    assert speeds(DP, Layout(dp=4), *[0.5] * 6) == (), "equal ranks of a pool are dealt rows as without speeds"


def test_rows_go_to_parts_in_proportion_to_their_speeds() -> None:
    tokens, groups = tokens_of(240), np.arange(240) // 4
    spec = PartitionSpec(3, True, 4, 2, 1, (1.0, 0.25, 0.5))
    parts, mini_batches = assign_rows(spec, groups, apart(tokens))
    assert (mini_batches == assign_rows(PartitionSpec(1, True, 4, 2, 1), groups, apart(tokens))[1]).all(), (
        "a mini-batch has the same rows everywhere"
    )
    most = np.bincount(groups, tokens).max()
    for epoch in range(2):
        for mini_batch in range(4):
            rows = mini_batches[epoch] == mini_batch
            held = np.bincount(parts[epoch, rows], tokens[rows], minlength=3)
            assert (np.abs(held - held.sum() * np.array(spec.speeds) / 1.75) <= most + 1).all()
            assert all(len(set(parts[epoch, groups == group])) == 1 for group in set(groups[rows]))


def test_sums_over_all_rows_are_in_float64() -> None:
    """Where rows lie decides which sums of a few rows are added up, and must not show in what PPO makes of them."""
    ids, lengths = torch.arange(3), torch.tensor([2, 1, 3])
    fields = {name: torch.linspace(low, 1, 6).double() for low, name in enumerate(("values", "old_log_probs"))}
    fields |= {"ref_log_prob": torch.arange(6).double() / 7, "scores": torch.tensor([0.1, 0.2, 0.7]).double()}
    whole = GlobalReduce(lambda x: x, lambda x: x, {})
    _, metrics = gae_advantages(PPOConfig())(fields, Rows(ids, ids, lengths), whole)
    kl = fields["old_log_probs"] - fields["ref_log_prob"]
    assert metrics["actor/kl"] == pytest.approx(float(kl.mean()), rel=1e-14)


def test_what_a_loss_gives_is_checked() -> None:
    def likelihood(fields: Any, rows: Any, totals: Any) -> Any:
        return torch.zeros(())

    with pytest.raises(TypeError, match=r"the loss likelihood returned a Tensor, not \(loss, statistics by name\)"):
        Objective(likelihood).evaluate({}, None, None)  # type: ignore[arg-type]
    whole = Objective(lambda *_: (torch.zeros(()), {}, 3))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="returned a tuple of 3"):
        whole.evaluate({}, None, None)  # type: ignore[arg-type]


def test_arithmetic_gives_as_many_as_there_are_rows() -> None:
    """A field too short is blamed on the function that made it, not on the next call."""

    def too_few(fields: dict[str, torch.Tensor], rows: Rows, whole: GlobalReduce) -> Any:
        return {"spread": fields["scores"][1:]}, {}

    ids = torch.arange(4)
    tokens = Ragged(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64))
    batch = Batch(ids, ids, {"scores": torch.rand(4), "response_ids": tokens})
    worker = SimpleNamespace(mesh=SimpleNamespace(pool=None), state={})
    apply = ComputeWorker.apply.spec.body  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="too_few returns field 'spread' with 3 entries for 4 rows"):
        apply(worker, batch, too_few, ("scores",))


def test_a_partition_knows_which_rows_its_token_counts_are_of() -> None:
    """The same rows, balanced by the prompts of other rows: pieces of one source, as long."""
    rows = RowIndex(np.arange(4), np.zeros(4, dtype=np.int64))
    made = ReplicatedBatch(prompts(8, 1))
    ids = np.arange(4), np.arange(4)[::-1].copy(), np.arange(4, 8)
    inputs = [
        CallInput(rows, {}, (FieldShard(made, "prompt_ids", rows.all_positions, one),), PartitionSpec(2, keep_groups=False))
        for one in ids
    ]
    assert len({call_input.counts_key for call_input in inputs}) == 3 and inputs[0].counts_key == inputs[0].counts_key
    assert len({id(call_input.partition) for call_input in inputs}) == 3
