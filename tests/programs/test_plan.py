"""The program ``plan``: what it prints and writes, what ``train`` makes of it, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tasks
from algorithm_cases import CASES, CONFIGS
from ranks import run_ranks
from rlhf_spmd import plan
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.planner.machine import GIB, Gpu, Machine
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile, apply_plan
from rlhf_spmd.planner.plan_summary import measured_seconds, read_trace
from rlhf_spmd.planner.profile import LayerTimes, Profile, ProfileTimes, read_profile, sizes_of, write_profile
from rlhf_spmd.planner.shapes import Workload, call_settings, shape_of
from rlhf_spmd.preflight.checks import check_batches
from rlhf_spmd.preflight.memory_check import check_memory
from rlhf_spmd.preflight.plan_roles import checked_plan, placed_roles
from rlhf_spmd.train import prepare
from tiers import tiers

STEPS = 2
STRATEGIES = ("colocate", "split", "standalone", "interleave", "separate")
SIZES = "hidden_size=4096 intermediate_size=14336 num_hidden_layers=32 num_attention_heads=32 num_key_value_heads=8 vocab_size=128256"
PPO = str(CONFIGS / "quickstart_ppo.yaml")
RECOMPUTED = "models.actor.generation.reuse_rollout_log_probs=false"
KEYS = {"ranks", "pp", "tp", "dp", "micro_batches", "seconds", "memory_gb", "room_gb"}


def large(*roles: str) -> list[str]:
    """8B models and a usual PPO batch."""
    rows = ("data.train_batch_size=512", "sampling.n=1", "data.max_prompt_length=1024", "data.max_response_length=1024")
    models = [f"models.{role}.spec.{size}" for role in roles for size in SIZES.split()]
    return [
        *models,
        *rows,
        "algorithm.ppo_mini_batch_size=64",
        "algorithm.ppo_max_token_len_per_gpu=16384",
        "reward.function=null",
    ]


def planned_by(capsys: pytest.CaptureFixture[str], *arguments: str, config: str = PPO) -> dict[str, Any]:
    plan.main(["--config", config, *arguments, "--json"])
    planned: dict[str, Any] = json.loads(capsys.readouterr().out)
    return planned


def host_profile(directory: Path, size: int = 4, slowness: float = 1.0) -> str:
    """A profile of this machine's CPUs with made-up times, of the models of ``tasks``. ``slowness``: of its decode steps; other
    steps take its square longer."""
    sizes, layers = [1.0, 8.0, 64.0, 512.0], []
    for head in ("lm", "value"):
        shape = shape_of(read_spec(tasks.task() / "actor"), head)
        for tp in (1, 2, 4):
            decode = [1e-4 * (1 + n / (50 * tp)) * slowness for n in sizes]
            seconds = [s * slowness for s in decode]
            times = (seconds, [3 * s for s in seconds], [2e-4 * slowness**2] * 4, [4e-4 * slowness**2] * 4)
            layers.append(LayerTimes(sizes_of(shape), tp, sizes, sizes, *times, sizes, decode, [1e-4 * slowness] * 4, 16.0))
    device = Gpu(1e11, 8 * GIB, 1e10, 1e9, 1e10, itemsize=8, overlap=0.0, on_host=True)
    path = directory / f"host_{slowness:g}.json"
    write_profile(Profile(device, size, 1e-4, 1e-9, [0.0, 1e-9, 2e-9, 3e-9], 1e-9, tuple(layers)), path)
    return str(path)


def test_a_plan_for_sixteen_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The plan costs what the search said; another search finds none that is better, and proves nothing."""
    out = tmp_path / "plan.yaml"
    cluster = ("cluster.nodes=2", "cluster.gpus_per_node=8", "cluster.gpu=h100", f"plan.out={out}")
    planned = planned_by(capsys, *large("actor", "reward"), *cluster)
    assert planned["optimal"] is True and planned["fits"] is True
    assert planned["lower_bound_seconds"] == pytest.approx(planned["step_seconds"], rel=1e-3)
    calls = planned["calls"]
    assert calls.keys() >= {"actor.generate_sequences", "actor.update_actor", "critic.update_critic", "reward.compute_reward"}
    for call in calls.values():
        assert call.keys() >= KEYS
        assert call["pp"] * call["tp"] * call["dp"] == len(call["ranks"]) and max(call["ranks"]) < 16
        assert 0 < call["memory_gb"] <= 79.2 and call["seconds"] > 0
    file = yaml.safe_load(out.read_text())
    assert file["ranks"] == 16 and file["calls"].keys() == calls.keys()
    tokens = planned["tokens_per_second"] * planned["step_seconds"]
    assert planned["hours"] == pytest.approx(planned["step_seconds"] * 50 / 3600) and tokens % 1 == pytest.approx(0, abs=1e-3)
    assert planned["memory_gb"] == max(call["memory_gb"] for call in calls.values()) < planned["room_gb"]

    fixed = planned_by(capsys, *large("actor", "reward"), *cluster, f"plan.fixed={out}")
    assert fixed["step_seconds"] == pytest.approx(planned["step_seconds"], rel=1e-6)
    other = planned_by(capsys, *large("actor", "reward"), *cluster, "plan.search=grid")
    assert other["step_seconds"] >= planned["step_seconds"] * (1 - 1e-6) and other["optimal"] is False


def test_a_plan_says_what_it_comes_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For a preset, whose model's sizes are known without a network."""
    preset, out = str(CONFIGS / "presets" / "grpo_qwen2.5_7b_8gpu.yaml"), tmp_path / "plan.yaml"
    plan.main(["--config", preset, "cluster.nodes=1", "cluster.gpu=h100", "placement.strategy=split", f"plan.out={out}"])
    cluster, fits, step, comparison, *files = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert cluster == "cluster: 1 host of 8 h100, 79.2 GiB each, 450 GB/s in a host"
    assert re.fullmatch(r"fits: [\d.]+ of 79.2 GiB on the fullest rank, \d+% free", fits)
    seconds = re.match(r"([\d.]+) s a step, [\d,]+ tokens/s, [\d.]+ hours", step)
    assert seconds is not None and " times as fast as" in comparison
    assert float(comparison.split("(")[1].split()[0]) > float(seconds[1])
    assert files == [f"written: {out} (start with plan={out})"]


def test_a_plan_is_never_slower_than_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is a candidate, and whose plan as a file is what it was. Without ``plan.out`` nothing is written."""
    monkeypatch.chdir(tmp_path)
    preset, cluster = str(CONFIGS / "presets" / "grpo_qwen3_8b_8gpu.yaml"), ("cluster.nodes=1", "plan.search=grid")
    own = planned_by(capsys, *cluster, "plan.fixed=config", config=preset)
    found = planned_by(capsys, *cluster, config=preset)
    assert found["step_seconds"] <= own["step_seconds"] and list(tmp_path.iterdir()) == []
    assert found["cluster"].startswith("1 host of 8 h100, 79.2 GiB each")
    planned_by(capsys, *cluster, "plan.out=plan.yaml", config=preset)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml"]
    again = planned_by(capsys, *cluster, "plan.fixed=plan.yaml", config=preset)
    assert (again["calls"], again["step_seconds"]) == (found["calls"], found["step_seconds"])


def test_pages_between_steps_count_in_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan is refused where training lacks the memory that pages keep, and a search finds one that leaves it."""
    preset, out = str(CONFIGS / "presets" / "grpo_qwen2.5_7b_8gpu.yaml"), f"{tmp_path}/plan.yaml"
    settings = ("cluster.nodes=1", "rollout.in_flight=384", "models.actor.activation_checkpointing=selective")
    planned_by(capsys, *settings, "plan.fixed=config", f"plan.out={out}", config=preset)
    keep = "models.actor.generation.kv_cache=keep"
    with pytest.raises(SystemExit, match="2"):
        planned_by(capsys, *settings, keep, f"plan.fixed={out}", config=preset)
    refusal = json.loads(capsys.readouterr().out)["refusal"]
    assert "pages between steps" in refusal and "fit with models.actor.generation.kv_cache=offload" in refusal
    searched = planned_by(capsys, *settings, keep, config=preset)
    assert searched["refusal"] is None and searched["optimal"] is False
    assert searched["room_gb"] == pytest.approx(79.2, abs=0.1), "of the device, not of the smaller one that was searched"
    assert 0 < searched["calls"]["actor.generate_sequences"]["gpu_memory_utilization"] < 0.9, "training needs the rest"


def test_a_cache_that_lacks_rows_in_flight_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    preset, out = str(CONFIGS / "presets" / "grpo_qwen2.5_7b_8gpu.yaml"), tmp_path / "plan.yaml"
    settings = ("cluster.nodes=1", "rollout.in_flight=1536", "models.actor.activation_checkpointing=selective")
    planned_by(capsys, *settings, "plan.fixed=config", f"plan.out={out}", config=preset)
    text = re.sub(r"max_num_seqs: \d+", "max_num_seqs: 2048\n    gpu_memory_utilization: 0.5", out.read_text())
    (tmp_path / "more.yaml").write_text(text)
    planned = planned_by(capsys, *settings, f"plan.fixed={tmp_path / 'more.yaml'}", config=preset)
    assert planned["refusal"] is None and "not all rows in flight have room" in planned["warning"]
    assert planned["memory_gb"] > planned["room_gb"]


def test_all_calls_of_a_role_in_few_bits_are_at_home(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grpo, lora = str(CONFIGS / "quickstart_grpo.yaml"), "models.actor.lora={rank: 16, bits: 4}"
    settings = *large("actor", "reference")[:-1], lora, "sampling.n=8", "data.train_batch_size=64"
    cluster = ("cluster.nodes=1", "cluster.gpu=h100", f"plan.out={tmp_path / 'plan.yaml'}")
    calls = planned_by(capsys, *settings, *cluster, config=grpo)["calls"]
    placements = [(call["ranks"], call["pp"], call["tp"]) for name, call in calls.items() if name.startswith("actor.")]
    assert len(placements) >= 2 and all(placement == placements[0] for placement in placements)


def test_a_configuration_that_does_not_fit_or_may_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is named makes it fit. As in training, a run that may not fit is warned of."""
    arguments = [*large("actor", "reward"), "cluster.nodes=1", "plan.fixed=config", f"plan.out={tmp_path / 'plan.yaml'}"]
    zero = [f"models.{role}.layout.zero=3" for role in ("actor", "critic", "reference", "reward")]
    printed = []
    for more in ([], [*zero, "cluster.gpu=a10"]):
        with pytest.raises(SystemExit) as ending:
            plan.main(["--config", PPO, *arguments, *more])
        assert ending.value.code == 2
        printed.append(capsys.readouterr().out)
    assert "does not fit: rank 0" in printed[0]
    remedy = printed[0].partition("it would fit with ")[2].splitlines()[0].split()
    assert remedy and planned_by(capsys, *arguments, *remedy)["fits"] is True
    need = re.search(r"would need ([\d.]+) GiB", printed[1])
    assert need is not None
    tight = [*arguments, *zero, "cluster.gpu=b200", f"cluster.memory_gb={float(need[1]) / 1.03:.2f}"]
    plan.main(["--config", PPO, *tight])
    assert "\nwarning: rank 0" in capsys.readouterr().out
    planned = planned_by(capsys, *tight)
    assert planned["fits"] is True and planned["refusal"] is None and "that may be too much" in planned["warning"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster.nodes=1", "cluster.gpus_per_node=2", "cluster.gpu=a10"], "no plan fits: "),
        (["cluster.gpu=h101"], "cluster.gpu='h101' is not known; did you mean 'h100'?"),
        (["cluster.gpu=./none.json"], "cluster.gpu=./none.json is not a file that"),
        (["cluster.nodes=0"], "cluster.nodes=0"),
        (["plan.search=exakt"], "did you mean 'exact'"),
        (["plan.fixed=none.yaml"], "plan.fixed=none.yaml cannot be read: No such file"),
        (["workload.prompt_length=90000"], "workload.prompt_length=90000.0, data.max_prompt_length="),
        (["cluster.groups=[{nodes: 0, gpu: h200}]"], "cluster.groups.0.nodes=0"),
        (["cluster.groups=[{gpu: h200}, {gpu: ./p.json}]"], "measured times of one kind and formulas for another"),
        (["cluster.memory_gb=1"], "cluster.memory_gb=1.0: must be above 2.5"),
        (["plan.out=/none/plan.yaml"], "plan.out=/none/plan.yaml: must be a file in a directory that exists"),
        (["models.actor.spec.hidden_sizes=3"], "did you mean 'models.actor.spec.hidden_size'"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ending:
        plan.main(["--config", PPO, *large("actor", "reward"), *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2 and message in line


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("{ranks: 0-3, dp: 4, home: 'maybe'}", "calls.actor.update_actor"),
        ("{ranks: x, home: true}", "ranks=x must be the first and the last rank"),
        ("{ranks: 0-3, dp: 4}", "one call of role 'actor' must have home: true"),
        ("{ranks: 0-3, dp: 4, home: true, zero: 3, zero_size: 3}", "zero_size=3: must divide dp * cp = 4; allowed: 1, 2, 4"),
        ("{ranks: 0-3, dp: 2, home: true}", "calls.actor.update_actor.ranks=0-3, calls.actor.update_actor.pp=1, "),
    ],
)
def test_edited_plans_are_checked(tmp_path: Path, call: str, message: str) -> None:
    path = tmp_path / "edited.yaml"
    path.write_text(f"calls:\n  actor.update_actor: {call}\n")
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        plan.read_plan(str(path))
    assert "\n" not in str(refusal.value) and str(refusal.value).count("edited.yaml") == 1


@pytest.mark.parametrize("algorithm", tiers(["grpo", "remax", "dapo", "dpo", "sft"], ["remax", "dpo"]))
def test_plans_are_those_that_training_accepts(tmp_path: Path, algorithm: str) -> None:
    """Of 8B models: what is found is placed, its batches are checked, and its memory is measured as training does it."""
    roles = [setting for setting in large("actor") if setting.startswith("models.")]
    gpus = f"cluster.gpus_per_node={24 if algorithm == 'remax' else 16}"
    settings = ["cluster.nodes=1", gpus, f"plan.out={tmp_path / 'plan.yaml'}", *roles]
    run = plan.read_request(str(CONFIGS / f"quickstart_{algorithm}.yaml"), settings)
    machine, _ = run.target
    plans = placed_roles(run.unplaced_roles, plan.search_plan(run).file, lambda: run.graph, 0)
    check_batches(run.config, plans)
    assert check_memory(plans, run.step(), machine.memory, machine.local_size) is None


def test_a_plan_offloads_no_more_than_a_host_has(tmp_path: Path) -> None:
    """8B on one GPU, whose optimizer rests in host memory: 12 bytes of each parameter, 90 GiB. A copy for a checkpoint has more."""
    roles = [setting for setting in large("actor") if setting.startswith("models.")]
    settings = ["cluster.nodes=1", "cluster.gpus_per_node=1", f"plan.out={tmp_path / 'plan.yaml'}", *roles]

    def plan_with(*more: str) -> PlanFile:
        return plan.search_plan(plan.read_request(str(CONFIGS / "quickstart_grpo.yaml"), [*settings, *more])).file

    calls = plan_with().calls
    assert any(call.optim_offload for call in calls.values() if call.home)
    with pytest.raises(ValueError, match=r"no plan fits: .*; run\.background_save=false needs no copies in host memory"):
        plan_with("cluster.host_memory_gb=128")
    assert plan_with("cluster.host_memory_gb=128", "run.background_save=false").calls.keys() == calls.keys()
    with pytest.raises(ValueError, match=r"no plan fits: .* needs at least [\d.]+ GiB on each of 1 ranks"):
        plan_with("cluster.host_memory_gb=64", "run.background_save=false")


def test_a_home_in_rows_is_gathered_for_its_calls(tmp_path: Path) -> None:
    """70B on 32 GPUs: only a home in ZeRO's rows fits, and each call's gathered weights count."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256}
    models = [f"models.actor.spec.{key}={size}" for key, size in sizes.items()]
    more = ("cluster.nodes=4", f"plan.out={tmp_path / 'p.yaml'}", "sampling.n=8", "reward.function=exact_match")
    run = plan.read_request(str(CONFIGS / "quickstart_grpo.yaml"), [*models, *large(), *more])
    call = plan.search_plan(run).file.calls["actor.generate_sequences"]
    assert call.memory_gb > 2 * 70.5e9 / (call.pp * call.tp) / GIB, "a generating rank holds its whole shard"


def test_a_configuration_with_copies_of_shards_is_planned_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, memory = tmp_path / "plan.yaml", []
    cluster = ("cluster.nodes=2", "cluster.gpus_per_node=8", "cluster.gpu=h200", f"plan.out={out}", "plan.fixed=config")
    layouts = [f"models.{role}.layout" for role in ("actor", "critic", "reference", "reward")]
    for size in (16, 8):
        zero = [f"{layout}={{zero: 3, zero_size: {size}}}" for layout in layouts]
        calls = planned_by(capsys, *large("actor", "reward"), *cluster, *zero)["calls"]
        memory.append(calls["actor.update_actor"]["memory_gb"])
    assert memory[1] > memory[0]
    layout = plan.read_plan(str(out)).settings()["models"]["actor"]["layout"]
    assert layout == {"pp": 1, "tp": 1, "dp": 16, "zero": 3, "zero_size": 8, "sequence_parallel": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@functools.cache
def train(directory: Path, name: str, *more: str, ranks: int = 4) -> tasks.Run:
    """Of a PPO run in ``directory``/``name``."""
    overrides = tasks.settings(directory / name, STEPS, *CASES["ppo"].overrides(), RECOMPUTED, *more)
    run_ranks(ranks, tasks.train_here, PPO, overrides)
    return tasks.read_run(directory / name)


def check_against_one_rank(directory: Path, run: tasks.Run) -> None:
    alone = train(directory, "alone", ranks=1)
    assert run.responses == alone.responses
    difference, metric = tasks.worst_metric(alone, run, floor=1e-2)
    assert difference < 1e-10, metric
    difference, tensor = tasks.worst_tensor(alone, run)
    assert difference < 1e-9, tensor


def test_a_run_plans_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration has the plan's placement. Its data are tokenised once: for the plan's rows, and not again for the run."""
    from rlhf_spmd.preflight import data
    from rlhf_spmd.preflight.prepare import prepare

    auto = f"placement={{strategy: auto, profile: {host_profile(directory)}}}"
    check_against_one_rank(directory, train(directory, "auto", auto))
    config = yaml.safe_load((directory / "auto" / "config.yaml").read_text())
    assert config["placement"]["pools"] and config["models"]["actor"]["pool"]
    reads, load_dataset = [], data.load_dataset
    monkeypatch.setattr(data, "load_dataset", lambda *args, **more: reads.append(args) or load_dataset(*args, **more))
    run_plan = prepare(PPO, tasks.settings(directory / "once", STEPS, *CASES["ppo"].overrides(), RECOMPUTED, auto), 4)
    assert len(reads) == len(run_plan.training) + len(run_plan.validation) > 0


@pytest.mark.parametrize("strategy", tiers([*STRATEGIES, "exact", "unequal"], ["separate", "unequal"]))
def test_train_follows_a_plan(capsys: pytest.CaptureFixture[str], directory: Path, strategy: str) -> None:
    """fp64, against one rank without a plan. ``unequal``: two ranks are slower, so they get fewer rows."""
    out, gpu = directory / f"{strategy}.yaml", host_profile(directory)
    cluster = ["cluster.nodes=1", "cluster.gpus_per_node=4", f"cluster.gpu={gpu}", f"plan.out={out}"]
    if strategy == "unequal":
        groups = f"[{{nodes: 1, gpu: {gpu}}}, {{nodes: 1, gpu: {host_profile(directory, slowness=1.5)}}}]"
        cluster[:3] = ["cluster.gpus_per_node=2", f"cluster.groups={groups}", "placement.strategy=colocate"]
    search = [] if strategy in ("exact", "unequal") else ["plan.fixed=config", f"placement.strategy={strategy}"]
    planned = planned_by(capsys, *tasks.settings(directory / "none", STEPS, *CASES["ppo"].overrides(), *cluster, *search))
    check_against_one_rank(directory, train(directory, strategy, f"plan={out}"))
    file = plan.read_plan(str(out))
    seconds = measured_seconds(read_trace(file, str(directory / strategy)))
    assert all(seconds[name] > 0 for name in file.calls), "the run made the plan's calls"
    events = json.loads((directory / strategy / "trace.json").read_text())["traceEvents"]
    computed = [event for event in events if event.get("ph") == "X" and event["cat"] == "compute"]
    for name, call in planned["calls"].items():
        assert {event["pid"] for event in computed if event["name"] == name} == set(call["ranks"]), name
    placement = yaml.safe_load((directory / strategy / "config.yaml").read_text())["placement"]
    if strategy == "unequal":
        assert placement["speeds"][:2] == [1.0, 1.0]
        assert 0.444 < placement["speeds"][2] == placement["speeds"][3] < 0.5  # the optimizer is equally fast
        assert placement["generation_speeds"][:2] == [1.0, 1.0]
        assert 0.44 < placement["generation_speeds"][2] == placement["generation_speeds"][3] < 0.7
    else:
        assert placement["speeds"] == placement["generation_speeds"] == []


@pytest.mark.parametrize(
    ("speeds", "fault"),
    [
        ("[1.0, 0.5]", "there are none"),
        ("{0-1: 1.0}", "they end with rank 1"),
        ("{0-1: 1.0, 2-3: 0}", "the entry '2-3: 0' is wrong where rank 2 comes next"),
        ("{0-1: 1.0, 3: 0.5}", "the entry '3: 0.5' is wrong where rank 2 comes next"),
        ("{0-1: 1.0, 1-3: 0.5}", "the entry '1-3: 0.5' is wrong where rank 2 comes next"),
        ("{2-3: 1.0, 0-1: 0.5}", "the entry '2-3: 1.0' is wrong where rank 0 comes next"),
        ("{0-3: fast}", "the entry '0-3: fast' is wrong where rank 0 comes next"),
    ],
)
def test_speeds_of_a_plan_are_checked(tmp_path: Path, speeds: str, fault: str) -> None:
    path = tmp_path / "edited.yaml"
    call = "{ranks: 0-3, dp: 4, home: true}"
    path.write_text(f"ranks: 4\nspeeds: {speeds}\ncalls:\n  actor.update_actor: {call}\n")
    line = rf"edited\.yaml: speeds must have a number above 0 for all 4 ranks in order, as 0-7: 1\.0; {fault}$"
    with pytest.raises(ValueError, match=line):
        plan.read_plan(str(path))
    path.write_text(f"ranks: 4\nspeeds: {{0-2: 1.0, 3: 0.5}}\ncalls:\n  actor.update_actor: {call}\n")
    file = plan.read_plan(str(path))
    assert file.speeds == (1.0, 1.0, 1.0, 0.5) and file.generation_speeds == ()
    again = tmp_path / "again.yaml"
    again.write_text(file.to_yaml())
    assert plan.read_plan(str(again)) == file


def test_unequal_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is compared with that of a call's own ranks: a small device elsewhere neither shrinks a cache nor fills the others."""
    settings = [*large("actor", "reward"), "cluster.gpus_per_node=8", "plan.fixed=config"]
    settings += [f"models.{role}.layout.zero=3" for role in ("actor", "critic", "reference", "reward")]
    pools = "{fast: [0,1,2,3,4,5,6,7], rest: [8,9,10,11,12,13,14,15]}"
    settings += [f"placement.pools={pools}", "models.actor.calls.generate_sequences={pool: fast}", "models.reward.pool=rest"]
    seconds = []
    for other in ("h200", "l40s"):
        groups = f"cluster.groups=[{{nodes: 1, gpu: h200}}, {{nodes: 1, gpu: {other}}}]"
        with contextlib.suppress(SystemExit):  # what trains on all ranks may not fit the small ones
            plan.main(["--config", PPO, *settings, groups, "--json"])
        seconds.append(json.loads(capsys.readouterr().out)["calls"]["actor.generate_sequences"]["seconds"])
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)
    preset = str(CONFIGS / "presets" / "ppo_llama3.1_8b_8gpu.yaml")
    planned = planned_by(capsys, "cluster.groups=[{nodes: 1, gpu: h100}, {nodes: 1, gpu: v100}]", config=preset)
    assert 0 < planned["memory_gb"] <= 1.1 * planned["room_gb"], "of the same ranks"


def test_plans_of_other_settings_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    preset, out = str(CONFIGS / "presets" / "ppo_llama3.1_8b_8gpu.yaml"), tmp_path / "plan.yaml"
    groups = "cluster.groups=[{{nodes: {}, gpu: h100}}, {{nodes: 1, gpu: a100}}]"
    planned_by(capsys, groups.format(1), "plan.search=grid", f"plan.out={out}", config=preset)
    mixed = groups.format(1)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(out.read_text().replace("actor.update_actor", "actor.updat_actor"))
    cases = (
        ([mixed, f"plan.fixed={misspelt}"], "there is no actor.updat_actor; did you mean 'actor.update_actor'?"),
        ([groups.format(2), f"plan.fixed={out}"], "is for 16 ranks, and the cluster has 24"),
        (["cluster.nodes=1", "placement.speeds=[1.0, 0.5]"], "placement.speeds has 2 numbers, this job has 8 ranks"),
        ([mixed, f"placement.speeds={[1.0] * 7 + [0.1] + [0.4] * 8}", "plan.fixed=config"], "have different speeds"),
        (["cluster.nodes=1", "plan.fixed=config", "rollout.max_staleness=1"], "take placement.strategy=separate"),
        (
            ["cluster.nodes=1", "plan.fixed=config", "data.train_batch_size=4", "algorithm.ppo_mini_batch_size=4"],
            "fewer than models.actor.layout.dp=8",
        ),
        (["cluster.nodes=1", "cluster.gpus_per_node=1", "rollout.max_staleness=1"], "needs ranks on which its role does not"),
        (["models.actor.lora={rank: 16, bits: 4}", "rollout.max_staleness=1"], "its weights have few bits or"),
        (["cluster.groups=[{gpu: H100}]"], "cluster.groups: gpu='H100' is not known; did you mean 'h100'?"),
        (["cluster.groups=[{gpus_per_node: 8}, {gpus_per_node: 4}]"], "need equally many devices, and groups have 8 and 4"),
    )
    for arguments, message in cases:
        with pytest.raises(SystemExit) as ending:
            plan.main(["--config", preset, *arguments])
        (line,) = capsys.readouterr().err.splitlines()
        assert ending.value.code == 2 and message in line, line


def test_prompts_in_flight_need_an_algorithm_that_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    models = [setting for setting in large("actor") if setting.startswith("models.")]
    with pytest.raises(SystemExit):
        plan.main(["--config", str(CONFIGS / "quickstart_remax.yaml"), *models, "cluster.nodes=1", "rollout.in_flight=128"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.in_flight=128, algorithm.name=remax: this algorithm takes no prompts in flight" in line


def test_validation_keeps_a_version_more_of_weights_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*large("actor", "reward"), "cluster.nodes=2", "plan.fixed=config", "placement.strategy=separate"]
    settings += [
        "rollout.max_staleness=1",
        *(f"models.{role}.layout.zero=3" for role in ("actor", "critic", "reference", "reward")),
    ]
    planned = [planned_by(capsys, *settings, f"run.test_freq={steps}")["calls"] for steps in (0, 10)]
    without, validated = (calls["actor.generate_sequences"]["memory_gb"] for calls in planned)
    assert validated - without == pytest.approx(8.03e9 * 2 / GIB, rel=0.01)
    assert planned[0]["actor.update_actor"] == planned[1]["actor.update_actor"]


SEARCH = """
from dataclasses import replace
from pathlib import Path

from rlhf_spmd.planner.search import exact


def search(problem, limit, seed):
    with Path(__file__).with_suffix(".txt").open("a") as limits:
        print(limit, file=limits)
    return replace(exact.search(problem, limit), timed=True)
"""


def test_all_attempts_have_one_time_limit(tmp_path: Path) -> None:
    """The optimizer of 8B on one GPU rests in host memory, and its copy does not fit there: a second search knows. A run that plans
    itself does not take what a search that ran out of time found, even if it is the best."""
    path = tmp_path / "limits.py"
    path.write_text(SEARCH)
    models = [setting for setting in large("actor") if setting.startswith("models.")]
    settings = [*models, "cluster.nodes=1", "cluster.gpus_per_node=1", f"plan.search={path}", "plan.time_limit_s=80"]
    config = str(CONFIGS / "quickstart_grpo.yaml")
    with pytest.raises(ValueError, match="no plan fits"):
        plan.search_plan(plan.read_request(config, [*settings, "cluster.host_memory_gb=128"]))
    limits = [float(limit) for limit in path.with_suffix(".txt").read_text().split()]
    attempts = sorted(set(limits), reverse=True)
    assert len(attempts) > 1 and attempts[0] == pytest.approx(limits[0]) and sum(attempts) * len(limits) / len(attempts) < 160
    run = plan.read_request(config, [*settings, "run.background_save=false"])
    checked = (run.config, run.calls, run.unplaced_roles, run.step(), *run.target)
    assert checked_plan(*checked, name=str(path)).search.optimal
    with pytest.raises(ValueError, match="no plan was proved to be the best in time"):
        checked_plan(*checked, proved=True, name=str(path))


def test_prompts_that_end_and_those_in_flight_are_dealt_evenly() -> None:
    arguments = ["data.train_batch_size=24", "rollout.in_flight=32", "sampling.n=2", "algorithm.ppo_mini_batch_size=24"]
    preset = str(CONFIGS / "presets" / "grpo_qwen2.5_7b_8gpu.yaml")
    generate, *others = plan.read_request(preset, [*arguments, "cluster.nodes=1"]).calls
    assert generate.kind == "generate" and generate.num_dealt_units == 8
    assert (generate.work.rows, generate.work.in_flight, generate.work.recomputed) == (48, 64, 16)
    assert all((call.work.rows, call.work.in_flight) == (48, 0) for call in others)


def test_a_plan_replaces_the_speeds_of_the_configuration() -> None:
    file = {"placement": {"speeds": [1.0, 0.5], "generation_speeds": [1.0, 0.5]}}
    call = PlacedCall("0-1", dp=2, home=True)
    placement = apply_plan(file, PlanFile(2, 2, {}, {"actor.update_actor": call}))["placement"]
    assert "speeds" not in placement and "generation_speeds" not in placement
    placement = apply_plan(file, PlanFile(2, 2, {}, {"actor.update_actor": call}, speeds=(1.0, 0.2)))["placement"]
    assert placement["speeds"] == [1.0, 0.2] and "generation_speeds" not in placement


@pytest.mark.long
def test_a_thousand_ranks_of_three_kinds_are_proved(capsys: pytest.CaptureFixture[str]) -> None:
    groups = "cluster.groups=[{nodes: 64, gpu: h100}, {nodes: 32, gpu: a100}, {nodes: 32, gpu: h200}]"
    rows = ("data.train_batch_size=8192", "algorithm.ppo_mini_batch_size=1024", "sampling.n=1")
    planned = planned_by(capsys, *large("actor", "reward"), groups, *rows, "plan.time_limit_s=600")
    assert planned["optimal"] is True and planned["fits"] is True
    assert len({rank for call in planned["calls"].values() for rank in call["ranks"]}) == 1024


def test_a_cluster_of_several_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its plan is proved, and lies between those of clusters that have only the slow or only the fast kind. A configuration without
    speeds gives all ranks as many rows, so the slow ones set the time."""
    settings = large("actor", "reward")

    def seconds(*cluster: str) -> float:
        planned = planned_by(capsys, *settings, "cluster.gpus_per_node=8", *cluster)
        assert "plan.fixed=config" in cluster or planned["optimal"] is True
        return float(planned["step_seconds"])

    mixed = "cluster.groups=[{nodes: 1, gpu: h100}, {nodes: 1, gpu: a100}]"
    slow = seconds("cluster.nodes=2", "cluster.gpu=a100")
    fast = seconds("cluster.nodes=2", "cluster.gpu=h100")
    assert fast < seconds(mixed) < 0.8 * slow
    configured = "plan.fixed=config", *(f"models.{role}.layout.zero=3" for role in ("actor", "critic", "reference", "reward"))
    alike = seconds(mixed, *configured)
    assert alike == pytest.approx(seconds("cluster.nodes=2", "cluster.gpu=a100", *configured), rel=1e-6)
    speeds = f"placement.speeds={[1.0] * 8 + [0.4] * 8}"
    assert seconds(mixed, *configured, speeds) < 0.9 * alike


def test_a_plan_for_other_ranks_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = directory / "two.yaml"
    cluster = ["cluster.nodes=1", "cluster.gpus_per_node=2", f"cluster.gpu={host_profile(directory)}", f"plan.out={out}"]
    planned_by(capsys, *tasks.settings(directory / "none", STEPS, *CASES["ppo"].overrides(), *cluster, "plan.fixed=config"))
    for name, why in (
        ("actor.update_actor", "ran on 4 ranks, not on 0-1; it followed another plan"),
        ("x", "has none of the plan's"),
    ):
        events = [{"ph": "X", "cat": "compute", "name": name, "pid": rank, "dur": 1, "args": {"step": 1}} for rank in range(4)]
        (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
        with pytest.raises(ValueError, match=why):
            read_trace(plan.read_plan(str(out)), str(directory))
    with pytest.raises(ValueError, match="is for 2 ranks, this job has 4"):
        prepare(PPO, tasks.settings(directory / "none", STEPS, *CASES["ppo"].overrides(), f"plan={out}"), 4)


def test_graphs_are_planned_where_the_generator_can_capture_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On GPUs that are not here. Of experts: where one launch computes them."""
    cluster = ("cluster.nodes=2", f"plan.out={tmp_path / 'plan.yaml'}")
    generation = "models={actor: {generation: {attention: triton, enforce_eager: false, steps_per_sync: 8}}}"
    for more, captured in (("sampling.top_p=0.9", True), ("models.actor.generation.attention=torch", False)):
        planned = planned_by(capsys, *large("actor", "reward"), *cluster, "cluster.gpu=h200", generation, more)
        call = planned["calls"]["actor.generate_sequences"]
        assert call["graphs"] is (captured and call["pp"] == 1), more
    for preset, gpu, dtype, captured in (
        ("qwen3_30b_a3b_16gpu", "h200", "bfloat16", True),
        ("qwen3_30b_a3b_16gpu", "a100", "bfloat16", False),
        ("qwen3_30b_a3b_16gpu", "h200", "float32", False),
        ("deepseek_v2_lite_16gpu", "h200", "bfloat16", True),
    ):
        settings = (f"cluster.gpu={gpu}", "plan.fixed=config", "models.actor.generation.tp=1", f"models.actor.dtype={dtype}")
        with contextlib.suppress(SystemExit):  # not all of them fit
            plan.main(["--config", str(CONFIGS / "presets" / f"grpo_{preset}.yaml"), *cluster, *settings, "--json"])
        planned = json.loads(capsys.readouterr().out)
        assert planned["calls"]["actor.generate_sequences"]["graphs"] is captured, (preset, gpu, dtype)


def test_between_hosts_a_profile_takes_the_network(tmp_path: Path) -> None:
    profile = read_profile(host_profile(tmp_path, size=2))
    shape = shape_of(read_spec(tasks.task() / "actor"), "lm")
    far = Machine(4, 2, profile.device, (8.0 * GIB,) * 4, profile.device.link / 10)
    near = replace(far, local_size=4)
    how = call_settings([(1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 1, 2)], zero=[0, 3])
    work = Workload(64, 12, (12.0,))
    for call in ("train_seconds", "infer_seconds"):
        slow, fast = (getattr(ProfileTimes(profile, machine), call)(shape, work, how) for machine in (far, near))
        crosses = (how.dp * how.tp > 2) & ((how.zero == 3) | (call == "train_seconds")) | (how.pp > 1)
        assert ((slow > fast) == (crosses & (how.size > 2))).all()


def test_profiles_are_read_as_they_were_written(tmp_path: Path) -> None:
    one_rank = read_profile(host_profile(tmp_path, size=1))
    write_profile(replace(one_rank, size=8), tmp_path / "again.json")
    assert read_profile(str(tmp_path / "again.json")) == replace(one_rank, size=8)
    with pytest.raises(ValueError, match="the profile is of one rank"):
        one_rank.check_ranks(2, "cluster.gpu")


def measured_profile(world: Any, directory: str) -> float:
    from rlhf_spmd.preflight.plan_profile import profile

    spec = read_spec(tasks.task() / "actor")
    measured = profile(world, {(spec, "lm"): GenerationConfig()}, Workload(4, 12, (12.0,), group=2), 64, torch.float32)
    if world.rank == 0:
        write_profile(measured, Path(directory) / "measured.json")
    return measured.layers[-1].forward[-1]


@pytest.mark.long  # tests/training/test_plan_profile.py measures layers on two ranks, too
def test_a_measured_profile(tmp_path: Path) -> None:
    seconds = run_ranks(2, measured_profile, str(tmp_path))
    measured = read_profile(str(tmp_path / "measured.json"))
    assert seconds[0] == seconds[1] > 0, "all ranks agree on the slowest one's time"
    assert (
        sorted({layer.tp for layer in measured.layers}) == [1, 2] and measured.device.on_host and measured.device.itemsize == 4
    )
    assert all(min(layer.forward + layer.both + layer.decode) > 0 for layer in measured.layers)
