"""Plans with experts in parallel: what a rank holds and sends, by hand; 1,024 ranks in milliseconds; ep is searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from known_models import KEYS
from places import ROOT
from rlhf_spmd import plan
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.machine import ClusterConfig
from rlhf_spmd.planner.model_call import layouts
from rlhf_spmd.planner.planning import ProblemBuilder
from rlhf_spmd.planner.profile import LayerTimes, Profile, ProfileTimes, sizes_of
from rlhf_spmd.planner.search import exact
from rlhf_spmd.planner.shapes import Workload, call_settings, shape_of
from rlhf_spmd.preflight.plan_roles import placed_roles

PRESET = str(ROOT / "configs" / "presets" / "grpo_qwen3_30b_a3b_16gpu.yaml")
SIZES = dict(zip(KEYS, (151936, 2048, 6144, 48, 32, 4), strict=True))
EIGHT = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 4096}
CONFIG = {"model_type": "qwen3_moe", **SIZES, "head_dim": 128, **EIGHT}
SHAPE = shape_of(spec_from_config(CONFIG, "config"), "lm")
WORK = Workload(8192, 512.0, (1024.0,), mini_batches=2)
EXPERTS = 128 * 3 * 768 * 2048  # parameters of a layer's experts


def times(nodes: int) -> FormulaTimes:
    return FormulaTimes(ClusterConfig(nodes=nodes, gpus_per_node=8, gpu="h100").machine())


def test_a_rank_holds_its_experts_by_hand() -> None:
    assert SHAPE.expert_params == EXPERTS
    ways = call_settings([(1, 1, 16)], zero=(0, 3), ep=(1, 8))
    weights = memory.RankMemory(SHAPE, ways, memory.RoleSettings(itemsize=2), 0).resident()["weights"] / 2
    rest = SHAPE.params - 48 * EXPERTS
    rows = list(zip(ways.zero.tolist(), ways.ep.tolist(), weights.tolist(), strict=True))
    by_way = {(zero, ep): held for zero, ep, held in rows}
    whole, slices = rest + 48 * EXPERTS, 48 * EXPERTS / 8
    by_hand = {(0, 1): whole, (3, 1): whole / 16, (0, 8): rest + slices, (3, 8): rest / 16 + slices}
    assert by_way == pytest.approx(by_hand)
    trained = memory.RoleSettings(itemsize=2, trained=True)
    written = memory.RankMemory(SHAPE, ways, trained, 0).checkpoint_copy()  # all copies write each part once
    assert written == pytest.approx([SHAPE.params * (2 + 12) / 16] * 4)


def test_what_travels_takes_its_time() -> None:
    """Two all-to-alls of 8 rows of 2,048 bfloat16 a token and layer, of which 7 in 8 leave the rank, in each of three passes."""
    machine = times(1).machine
    one, eight = call_settings([(1, 1, 8)], ep=(1,)), call_settings([(1, 1, 8)], ep=(8,))
    seconds = [times(1).infer_seconds(SHAPE, WORK, how)[0] for how in (one, eight)]
    count, tokens = WORK.micro_batches(WORK.rows, eight)
    sent = 48 * 2 * WORK.tokens_through_layers(tokens)[0] * 8 * 2048 * 2 * 7 / 8 * count[0]
    rate = machine.device.link * times(1).calibration.link
    fixed = 48 * 2 * count[0] * np.log2(8) * machine.device.latency / 2
    assert seconds[1] - seconds[0] == pytest.approx(sent / rate + fixed, rel=1e-6)
    assert all(
        times(1).train_seconds(SHAPE, WORK, how)[0] > 2.5 * took for how, took in zip((one, eight), seconds, strict=True)
    )


def test_profiles_have_what_travels_too() -> None:
    """Measured layers have no ep: three passes send, and the sums of the experts' gradients are of an eighth, between hosts."""
    flat = LayerTimes(sizes_of(SHAPE), 1, [1.0, 1e6], [1.0, 1e6], *([1e-3] * 2 for _ in range(4)), [1.0], [0.0], [0.0], 1.0)
    profile = Profile(times(2).machine.device, 8, 0.0, 0.0, [0.0] * 4, 0.0, (flat,))
    measured = ProfileTimes(profile, times(2).machine)
    one, eight = (call_settings([(1, 1, 16)], checkpointing=(1,), ep=(ep,)) for ep in (1, 8))
    work = replace(WORK, mini_batches=1)
    count, whole = work.micro_batches(work.rows, one)
    sent = 2 * 8 * 2048 * 2 * 7 / 8 * work.tokens_through_layers(whole)[0] / profile.device.link
    for passes, name in ((1, "infer_seconds"), (3, "train_seconds")):
        more = float(getattr(measured, name)(SHAPE, work, eight)[0] - getattr(measured, name)(SHAPE, work, one)[0])
        fewer = 8 * 48 * EXPERTS * (15 / 16 / 8 - 1 / 2 / 8) / measured.machine.network if passes == 3 else 0.0
        assert more == pytest.approx(48 * passes * count[0] * sent - fewer, rel=1e-6)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    plan.main(["--config", PRESET, *arguments, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_plan_shares_experts_where_that_is_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Behind small micro-batches the gathers of ZeRO do not hide. The configuration says nothing of ep."""
    out, alone, again = (tmp_path / f"{name}.yaml" for name in ("plan", "alone", "again"))
    cluster = ["cluster.nodes=2", "cluster.gpu=h200", "cluster.network_gb_s=25", "algorithm.ppo_max_token_len_per_gpu=1536"]
    best = planned(capsys, *cluster, f"plan.out={out}")
    assert best["optimal"]
    file = plan.read_plan(str(out))
    for name, call in file.calls.items():
        assert call.dp * call.cp % call.ep == 0 and 128 % call.ep == 0 and (name != "actor.generate_sequences" or call.ep == 1)
    update = file.calls["actor.update_actor"]
    assert update.ep > 1
    request = plan.read_request(PRESET, cluster)
    assert placed_roles(request.unplaced_roles, file, lambda: request.graph, 0)["actor"].shape.layout.ep == update.ep
    plan.main(["--config", PRESET, *cluster, f"plan.fixed={out}", f"plan.out={again}"])
    assert f" ep{update.ep} " in capsys.readouterr().out
    alone.write_text(replace(file, calls={**file.calls, "actor.update_actor": replace(update, ep=1, zero=3)}).to_yaml())
    evaluations = [
        planned(capsys, *cluster, f"plan.fixed={fixed}", f"plan.out={again}")["step_seconds"] for fixed in (out, alone)
    ]
    assert evaluations[0] == pytest.approx(best["step_seconds"], rel=0.02) and evaluations[1] > best["step_seconds"]


def test_ep_is_searched_on_a_thousand_ranks() -> None:
    request = plan.read_request(PRESET, ["cluster.nodes=128", "cluster.gpu=h100"])
    problem = ProblemBuilder(request.calls, times(128).machine, [times(128)], 8192).problem()
    update = next(call for call in problem.calls if call.name == "actor.update_actor")
    assert {option.ep for option in update.options if option.size == 1024} >= {1, 8, 128}
    assert exact.search(problem, 120.0).optimal


def test_stages_of_a_prime_number_of_layers() -> None:
    """DeepSeek-V3 has 61 layers, which no number of stages divides; 48 are only divided evenly."""
    call = next(call for call in plan.read_request(PRESET, []).calls if call.kind == "train")
    for number, stages in ((48, {1, 2, 4, 8, 16}), (61, {1, 2, 4, 8, 16}), (62, {1, 2})):
        uneven = replace(call, spec=replace(call.spec, num_hidden_layers=number))
        assert {pp for pp, _, _ in layouts(uneven, 256, (1, 2, 4, 8) if number < 62 else (1,))} == stages


def test_a_plan_that_cannot_share_them_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--config", PRESET, "models.actor.layout.ep=5", f"plan.out={tmp_path / 'plan.yaml'}"])
    assert (
        "models.actor.layout.ep=5: models of qwen3_moe have 128 experts to share; allowed: 1, 2, 4, " in capsys.readouterr().err
    )


def test_a_plan_keeps_experts_whole_in_generation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whatever tp it chooses for generation, its ranks share the experts, at home as on ranks apart."""
    out, name = tmp_path / "plan.yaml", "actor.generate_sequences"
    overrides = ["cluster.gpu=h100", f"plan.out={out}", "models.actor.generation.tp=4", "models.actor.generation.ep=4"]
    planned(capsys, *overrides)
    request, file = plan.read_request(PRESET, overrides), plan.read_plan(str(out))
    planned_call = file.calls[name]
    size = len(planned_call.rank_range.ranks)
    for call in (planned_call, replace(planned_call, pp=1, tp=1, dp=size), replace(planned_call, pp=1, tp=8, dp=size // 8)):
        roles = placed_roles(request.unplaced_roles, replace(file, calls={**file.calls, name: call}), lambda: request.graph, 0)
        grid = roles["actor"].generation
        assert grid is not None and grid.tp == call.tp and grid.expert_parallel_generation == (call.tp > 1)
        assert roles["actor"].config.generation.ep == call.tp


def test_whole_experts_stay_beside_the_slices() -> None:
    """In the home's layout, too, where a generation that slices experts copies nothing."""
    overrides = ["cluster.gpu=h100", "models.actor.generation.tp=4"]
    moved = []
    for ep in (1, 4):
        request = plan.read_request(PRESET, [*overrides, f"models.actor.generation.ep={ep}"])
        problem = ProblemBuilder(request.calls, times(2).machine, [times(2)], 8192).problem()
        call = next(call for call in problem.calls if call.name == "actor.generate_sequences")
        option = next(option for option in call.options if (option.size, option.pp, option.tp) == (16, 1, 4))
        home = option.layout
        moved.append(problem.weight_copy_cost_between("actor", home, 16, option, on_one_host=False))
    assert moved[0] == (0.0, 0.0)
    assert moved[1][0] > 0 and moved[1][1] == problem.weights["actor"] / 4
