"""PPO is the same run in every layout, placement and cut into micro-batches: same responses, metrics and final weights."""

import functools
from pathlib import Path

import pytest

import tasks
from algorithm_cases import assert_same_run
from overrides import FP64, ONE_SCORER, STEADY, layouts, micro_batches
from tiers import tiers

STEPS = 2
TWO_CHUNKS = tuple(f"models.{role}.layout.vpp=2" for role in ("actor", "critic", "reference"))

# name -> ranks, layouts, other overrides. A mini-batch has 8 rows of 4 to 24 tokens. Disjoint pools are in test_algorithms.
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "tp2 throughout": (2, "actor tp2, generation tp2, critic tp2", ()),
    "pp2 for all, 32 tokens at a time": (2, "actor pp2, generation pp2, critic pp2", micro_batches(tokens=32)),
    "cp2 throughout": (2, "actor cp2, critic cp2, reference cp2, reward cp2", ()),
    "tp2 dp2 -> tp1, checkpointed activations": (
        4,
        "actor tp2 dp2, critic dp4 zero3, reference pp2 tp2",
        tuple(f"models.{role}.activation_checkpointing=full" for role in ("actor", "critic")),
    ),
    "pp2 dp2 -> pp1": (4, "actor pp2 dp2, critic tp2 dp2 zero2, reward dp4", micro_batches(rows=3)),
    "pp2 tp2 -> pp1 tp2": (4, "actor pp2 tp2, generation tp2, critic pp4", micro_batches(tokens=40)),
    "two chunks of layers per stage -> pp2, optimizer states on the host": (
        4,
        "actor pp2 dp2 zero2, generation pp2, critic pp2 tp2, reference pp2 dp2",
        (*TWO_CHUNKS, "models.actor.optim.offload=true", *micro_batches(rows=2)),
    ),
    "zero3 over 4": (4, "actor dp4 zero3, critic pp2 tp2, reference dp4 zero3", micro_batches(rows=2)),
    "zero over pairs of ranks -> tp2": (
        4,
        "actor dp4 zero3 zero_size2, generation tp2, critic dp4 zero1 zero_size2, reference dp4 zero3 zero_size2",
        micro_batches(rows=3),
    ),
    "zero over pairs of ranks, weights on loan": (
        4,
        "actor dp4 zero2 zero_size2, critic tp2 dp2",
        ("placement.pools.b=[2,3]", "models.actor.calls.generate_sequences.pool=b", *micro_batches(rows=2)),
    ),
    "tp4 -> tp2, KV heads replicated": (4, "actor tp4, generation tp2, critic tp4", ()),
    "roles on overlapping pools of unequal size": (
        4,
        "actor dp2 pp2 zero1, critic dp3 zero1, reference tp2",
        (
            *("placement.pools.b=[2,3]", "placement.pools.c=[0,1,2]", "models.critic.pool=c", "models.reference.pool=b"),
            *micro_batches(rows=2),
        ),
    ),
    "unequal ranks, whose mini-batches leave the slowest without rows": (
        4,
        "actor pp2 dp2, critic dp4 zero2, reference dp4 zero3, reward pp2 dp2",
        ("placement.speeds=[1.0, 0.02, 0.7, 0.4]",),
    ),
    "cp2 tp2 zero, stages with cp2, cp2 of ZeRO's copies": (
        4,
        "actor cp2 dp2 zero3, critic pp2 cp2, reference tp2 cp2 zero3, reward tp2 cp2",
        micro_batches(rows=3),
    ),
}
# Where a generated token's log-prob is not bit for bit that of the training forward in fp32: generation and training then sum
# the row-parallel products (o_proj, down_proj) and the softmax over the vocabulary in slices of other sizes, tp / tp_g in one.
REGROUPED_TP = (
    "tp2 dp2 -> tp1, checkpointed activations",
    "tp4 -> tp2, KV heads replicated",
    "zero over pairs of ranks -> tp2",
)
# In fp32 the bits of each way to cut a model, of which these are all; the others cut products as they do, on other ranks or in stages.
IN_FP32 = ("tp2 throughout", "pp2 for all, 32 tokens at a time", "cp2 throughout", "zero3 over 4")
IN_FP32_LONG = (*REGROUPED_TP, "pp2 tp2 -> pp1 tp2", "cp2 tp2 zero, stages with cp2, cp2 of ZeRO's copies")
# their parts are in others that run in fp64, and in test_expert_runs
LONG_IN_FP64 = (*IN_FP32[:3], "pp2 dp2 -> pp1", "zero over pairs of ranks, weights on loan")
OWN_FORWARD = "models.actor.generation.reuse_rollout_log_probs=false"


@functools.cache
def run(directory: Path, name: str, precision: str, *more: str) -> tasks.Run:
    ranks, text, overrides = LAYOUTS[name] if name else (1, "actor", ())
    run_dir = directory / f"run_{len(list(directory.iterdir()))}"
    scorers = () if "reward" in text else ONE_SCORER
    return tasks.train(
        ranks, run_dir, STEPS, *layouts(text), *scorers, *overrides, *(FP64 if precision == "fp64" else STEADY), *more
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


def test_the_task_asks_for_something(directory):
    """Differences that the comparison below could not see in a run where nothing moves."""
    one = run(directory, "", "fp64")
    assert len(one.responses) == STEPS * tasks.PROMPTS * tasks.SAMPLES
    assert len({tuple(ids) for ids in one.responses.values()}) == len(one.responses)
    for row in one.metrics:
        assert row["reward/std"] > 0.05 and row["response_length/min"] < tasks.MAX_RESPONSE
        assert row["actor/kl"] > 0.01 and row["actor/clip_frac"] > 0.01 and row["critic/clip_frac"] > 0.01
        assert row["actor/grad_norm"] > 1.0  # it is clipped
    assert len({row["actor/kl_coef"] for row in one.metrics}) == STEPS
    assert one.state["optimizer_steps"] == dict.fromkeys(
        ("actor", "critic"), STEPS * 2 * 2
    )  # of two epochs of two mini-batches
    momenta = {name: tensor for (role, kind, name), tensor in one.weights.items() if (role, kind) == ("actor", "exp_avg")}
    assert all(float(tensor.abs().max()) > 0 for tensor in momenta.values()), "a tensor got no gradient"


@pytest.mark.parametrize("name", tiers(LAYOUTS, lambda name: name not in LONG_IN_FP64))
def test_the_same_run_in_fp64(directory, name):
    other = run(directory, name, "fp64")
    assert_same_run(run(directory, "", "fp64"), other)
    assert other.log_prob_difference() < 1e-12


@pytest.mark.parametrize("name", tiers(("", *IN_FP32, *IN_FP32_LONG), ("", *IN_FP32)))
def test_in_fp32_it_is_the_same_run_and_on_policy_exactly(directory, name):
    """A token's log-prob is the same number when it is drawn, when it is scored, and in the forward of the first update."""
    one, other = run(directory, "", "fp32"), run(directory, name, "fp32")
    assert_same_run(one, other, metrics=1e-4, weights=2e-6)
    assert (0.0 < other.log_prob_difference() < 1e-5) if name in REGROUPED_TP else other.log_prob_difference() == 0.0
    assert [row["actor/ppo_kl_first"] for row in other.metrics] == [0.0] * STEPS


def test_exact_rollouts_need_no_forward_for_old_log_probs(directory):
    one, other = run(directory, "", "fp32"), run(directory, "", "fp32", OWN_FORWARD)
    timed = [any("compute_log_prob" in key for key in run.raw[0]) for run in (one, other)]
    assert timed == [False, True], [key for key in other.raw[0] if key.startswith("timing_s/")]
    tasks.assert_bit_equal(one, other)
