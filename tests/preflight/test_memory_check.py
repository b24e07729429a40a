"""What fits and what does not: known models on clusters, refusals and their remedies, through plans and through ranks."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tasks
from known_models import KEYS, MODELS
from ranks import Program, run_ranks
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.controller import RankSpeeds
from rlhf_spmd.generation.kv_cache import room_on_device
from rlhf_spmd.kernels.devices import container_bytes, total_bytes
from rlhf_spmd.models.activations import keep_layer, recompute_layer, recompute_part
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight import memory_check
from rlhf_spmd.preflight.banner import run_banner
from rlhf_spmd.preflight.memory_check import check_memory, decide_checkpointing, with_checkpointing
from rlhf_spmd.preflight.memory_estimate import estimate_memory, step_facts
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.preflight.role_memory import StepFacts
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.telemetry.run_dir import create_run_dir
from rlhf_spmd.train import train
from rlhf_spmd.training.run_plan import RunPlan
from role_workers import build

SMALL = str(tasks.task() / "ppo.json")
GIB = 1 << 30
H100, H200 = 79.2 * GIB, 139.8 * GIB  # as their drivers report them
ROLES = {"sft": ("actor",), "ppo": ("actor", "critic", "reference"), **dict.fromkeys(("dpo", "grpo"), ("actor", "reference"))}
NUM_ROWS, LONG = 256, 2048  # rows; tokens of those that are trained on as they are


def directory(root: Path, model: str) -> Path:
    """A model's config.json, in ``root``, with the tokenizer of ``tasks``."""
    path = root / model
    if not path.exists():
        shutil.copytree(tasks.task() / "actor", path, ignore=shutil.ignore_patterns("*.safetensors"))
        family, *sizes, tied = MODELS[model]
        config = {"model_type": family, **dict(zip(KEYS, sizes, strict=True)), "tie_word_embeddings": tied}
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768, "eos_token_id": 1}))
    return path


def rows(root: Path, algorithm: str) -> Path:
    """A file of rows: prompts of 12 tokens; of SFT and DPO together with their responses ``LONG``."""
    path, rng = root / f"{algorithm}.jsonl", random.Random(0)
    if not path.exists():
        answers = {"sft": ("response",), "dpo": ("chosen", "rejected")}.get(algorithm, ())
        with path.open("w") as file:
            for _ in range(NUM_ROWS):
                row = {"prompt": "".join(rng.choices(tasks.VOCABULARY[1:], k=12))}
                row |= {key: "".join(rng.choices(tasks.VOCABULARY[1:], k=LONG - 13)) for key in answers}
                file.write(json.dumps(row) + "\n")
    return path


def overrides(root: Path, algorithm: str, model: str, *more: str) -> list[str]:
    """256 prompts of up to 1,024 tokens, a response each of up to 1,024 (GRPO: 8 responses to 128), mini-batches of 256 rows; all other
    settings are the defaults."""
    settings = [f"algorithm.name={algorithm}", f"data.path={rows(root, algorithm)}", "run.dir=" + str(root / "run")]
    if algorithm in ("sft", "dpo"):
        settings += ["data.max_length=4096", "data.train_batch_size=256"]
    else:
        responses = 8 if algorithm == "grpo" else 1
        settings += ["data.max_prompt_length=1024", "data.max_response_length=1024", f"sampling.n={responses}"]
        settings += [f"data.train_batch_size={128 if responses > 1 else 256}", "reward.function=tasks:even_share"]
        settings.append(f"algorithm.ppo_mini_batch_size={256 // responses}")
    for role in ROLES[algorithm]:
        settings += [f"models.{role}.path={directory(root, model)}", f"models.{role}.random_init=true"]
    return [*settings, *more]


def everyone(algorithm: str, **values: int) -> list[str]:
    """A layout for all of an algorithm's roles; dp is what it leaves."""
    return [f"models.{role}.layout.{key}={value}" for role in ROLES[algorithm] for key, value in values.items()]


@dataclass(frozen=True)
class Fit:
    """``needed``: GiB of the fullest rank, by the arithmetic of docs/planner.md. ``remedy``: what the refusal names, or ""."""

    algorithm: str
    model: str
    gpus: int
    memory: float
    more: tuple[str, ...]
    needed: float
    remedy: str = ""

    def checked(self, root: Path, *more: str) -> tuple[RunPlan, StepFacts]:
        settings = overrides(root, self.algorithm, self.model, *self.more, *more)
        ready = prepare(None, settings, self.gpus, local_size=min(self.gpus, 8))
        return ready, step_facts(ready, trace(ready), torch.device("cuda"))


SLICED = {name: (*everyone(name, zero=1, tp=8), "models.actor.generation.tp=8") for name in ("grpo", "ppo")}
NONE = tuple(f"models.{role}.activation_checkpointing=none" for role in ("actor", "critic"))
FITS = [  # docs/planner.md has the arithmetic
    Fit("sft", "qwen2.5_0.5b", 1, H100, (), 27.3),
    Fit("sft", "qwen2.5_7b", 1, H100, (), 136.4, "models.actor.optim.offload=true"),
    Fit("sft", "qwen2.5_7b", 1, H200, (), 136.4),
    Fit("dpo", "llama3.1_8b", 8, H100, (), 159.4, "models.actor.layout.zero=2"),
    Fit("dpo", "llama3.1_8b", 8, H100, (*everyone("dpo", zero=2),), 43.7),
    Fit("ppo", "qwen2.5_7b", 8, H100, NONE, 309.6, "models.actor.activation_checkpointing=full"),
    Fit("ppo", "qwen2.5_7b", 8, H100, (*everyone("ppo", zero=3),), 45.7),
    Fit("grpo", "qwen2.5_32b", 8, H200, (*everyone("grpo", zero=3),), 132.2),
    Fit("grpo", "llama3.1_70b", 64, H100, SLICED["grpo"], 91.8, "algorithm.ppo_max_token_len_per_gpu=4096"),
    Fit("ppo", "llama3.1_70b", 16, H100, SLICED["ppo"], 197.7, "models.critic.optim.offload=true"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


def judged(case: Fit, root: Path, *more: str) -> tuple[Any, StepFacts]:
    """Plans with ``auto`` decided, as the program has them."""
    ready, facts = case.checked(root, *more)
    return with_checkpointing(ready.roles, decide_checkpointing(ready.roles, facts, case.memory)), facts


@pytest.mark.parametrize("case", FITS, ids=lambda case: f"{case.algorithm}-{case.model}-{case.gpus}")
def test_ten_configurations_are_judged_right(case: Fit, root: Path) -> None:
    """What does not fit is refused, and does fit when it is prepared again with the settings that the refusal names."""
    plans, facts = judged(case, root)
    assert float(estimate_memory(plans, facts).peaks.max()) / GIB == pytest.approx(case.needed, rel=0.005)
    if not case.remedy:
        assert check_memory(plans, facts, case.memory, 8) is None
        return
    with pytest.raises(ValueError, match="it would fit with") as refused:
        check_memory(plans, facts, case.memory, 8)
    line = str(refused.value)
    assert "\n" not in line and f"would need {float(estimate_memory(plans, facts).peaks.max()) / GIB:.1f} GiB" in line
    words = line.split("it would fit with ")[1].split()
    assert case.remedy in words
    again, facts = judged(case, root, *words)
    assert check_memory(again, facts, case.memory, 8) is None


@pytest.mark.parametrize(
    ("number", "more", "remedy"),
    [
        (3, (), "models.actor.layout.zero=2"),  # zero=1 is not enough
        (3, ("models.actor.layout.zero=3", "models.actor.layout.zero_size=1"), "models.actor.layout.zero_size=null"),
        (  # the token budget, tried before, is not named
            5,
            (),
            "models.actor.activation_checkpointing=full models.critic.activation_checkpointing=full"
            " models.actor.layout.zero=2 models.critic.layout.zero=2",
        ),
    ],
)
def test_no_milder_remedy_of_the_same_kind_would_do(root: Path, number: int, more: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(ValueError, match=f"fit with {re.escape(remedy)}$"):
        check_memory(*judged(FITS[number], root, *more), FITS[number].memory, 8)


def test_what_cannot_fit_is_told_how_much_is_missing(root: Path) -> None:
    plans, facts = judged(Fit("ppo", "llama3.1_70b", 2, H100, (), 0.0), root)
    with pytest.raises(ValueError, match=r"pp [\d.]+ GiB per rank are missing: start about \d+ ranks, or use") as refused:
        check_memory(plans, facts, H100, 2)
    ranks = int(re.findall(r"about (\d+) ranks", str(refused.value))[0])
    assert 3 <= ranks <= 16


def test_within_the_model_s_error_a_run_is_warned_not_refused(root: Path) -> None:
    plans, facts = judged(FITS[0], root)
    peak = float(estimate_memory(plans, facts).peaks.max())
    assert check_memory(plans, facts, peak * 1.001, 8) is None
    warning = check_memory(plans, facts, peak / 1.09, 8)
    assert warning is not None and "that may be too much" in warning
    with pytest.raises(ValueError, match="rank 0 would need"):
        check_memory(plans, facts, peak / 1.11, 8)
    assert check_memory(plans, facts, [peak / 2], 8, rank=1) is None  # another rank, which is not in the plan


def test_states_that_a_host_cannot_hold_are_refused(root: Path) -> None:
    """12 bytes of each of 7.6 * 10^9 parameters over all ranks of a host, and 2 GiB beside each of them."""
    offloaded = ("models.actor.layout.zero=1", "models.actor.optim.offload=true")
    plans, facts = judged(Fit("sft", "qwen2.5_7b", 8, H100, offloaded, 0.0), root)
    host = estimate_memory(plans, facts).host
    assert host is not None and host.by_host(8)[0] / GIB == pytest.approx(12 * 7.616e9 / GIB + 16, rel=0.01)
    assert check_memory(plans, facts, H100, 8, host_memory=102 * GIB) is None
    warning = check_memory(plans, facts, H100, 8, host_memory=95 * GIB)
    assert warning is not None and "GiB of host memory" in warning and "that may be too much" in warning
    for rank in (None, 5):
        with pytest.raises(ValueError, match=r"^host 0, ranks 0 to 7, would need 101\.\d GiB .* has 80\.0: of rank 0 actor"):
            check_memory(plans, facts, H100, 8, rank, host_memory=80 * GIB)
    assert check_memory(plans, facts, H100, 4, host_memory=60 * GIB) is None, "half of it on each of two hosts"
    resident, facts = judged(Fit("sft", "qwen2.5_7b", 8, H100, offloaded[:1], 0.0), root)
    assert estimate_memory(resident, facts).host is None


def test_copies_of_what_is_saved_count_where_they_lie(root: Path) -> None:
    """14 bytes of each of 7.6 * 10^9 parameters over the ranks, if checkpoints are written in the background."""
    saved = ("models.actor.layout.zero=1", "run.save_freq=10")
    case = Fit("sft", "qwen2.5_7b", 8, H100, saved, 0.0)
    plans, facts = judged(case, root)
    host = estimate_memory(plans, facts).host
    assert host is not None and host.by_host(8)[0] / GIB == pytest.approx(14 * 7.616e9 / GIB + 16, rel=0.01)
    with pytest.raises(ValueError, match=r"of rank 0 actor checkpoint copy 12\.4.* or run\.background_save=false$"):
        check_memory(plans, facts, H100, 8, host_memory=80 * GIB)
    there, at_once = judged(case, root, "run.background_save=false")
    assert estimate_memory(there, at_once).host is None
    on_cpu = replace(facts, device=torch.device("cpu"))
    peaks = [float(estimate_memory(plans, step).peaks.max()) for step in (replace(on_cpu, copied=frozenset()), on_cpu)]
    assert peaks[1] - peaks[0] == pytest.approx(12 * 7.616e9 / 8, rel=0.01)  # fp32 there
    with pytest.raises(ValueError, match=r"it would fit with run\.background_save=false$"):
        check_memory(plans, on_cpu, peaks[0] * 1.001, 8)


def test_generation_leaves_its_share_of_a_gpu_free(root: Path) -> None:
    """As vLLM: weights, cache, what a step works with and what training has left there take no more than that share."""
    case = Fit("grpo", "llama3.1_8b", 2, H200, ("models.actor.generation.gpu_memory_utilization=0.3",), 0.0)
    report, name = estimate_memory(*judged(case, root)), "actor.generate_sequences"
    taken = sum(float(each[0]) for each in (*report.resident.values(), *report.call_bytes[name].values()))
    assert report.memory_limits == {name: 0.3} and report.peaks[0] == pytest.approx(taken / 0.3)
    assert f"{name} left free by gpu_memory_utilization" in dict(report.largest(0))
    usual = estimate_memory(*judged(replace(case, more=()), root))
    assert usual.memory_limits == {name: 0.9} and usual.peaks[0] < report.peaks[0]
    both = r"fit with models\.actor\.generation\.gpu_memory_utilization=0\.9 models\.actor\.activation_checkpointing=full$"
    with pytest.raises(ValueError, match=both):
        check_memory(*judged(case, root), float(usual.peaks[0]) + 1, 8)
    fixed = estimate_memory(*judged(replace(case, more=("models.actor.generation.num_pages=40",)), root))
    assert fixed.memory_limits == {}, "so many pages as are asked for"


IN_FLIGHT = (
    *everyone("grpo", zero=3),
    "rollout.in_flight=256",
    "data.max_response_length=8192",
    "models.actor.activation_checkpointing=selective",
)


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pages_that_stay_while_training_runs_count(root: Path, device: str, share: float) -> None:
    """A call's need is the least memory with which it fits beside the cache that the generator takes there."""
    settings = ("models.actor.generation.kv_cache=keep", f"models.actor.generation.gpu_memory_utilization={share}")
    ready, facts = Fit("grpo", "qwen2.5_0.5b", 8, H100, (*IN_FLIGHT, *settings), 0.0).checked(root)
    report = estimate_memory(ready.roles, replace(facts, device=torch.device(device)))
    resident = sum(float(size[0]) for size in report.resident.values())
    calls = {call: {part: float(size[0]) for part, size in parts.items()} for call, parts in report.call_bytes.items()}
    generating = calls.pop("actor.generate_sequences")
    # 256 rows of 144 pages of 64 tokens; 24 layers, 2 heads of 64 numbers, keys and values
    largest = 256 * 144 * 64 * 24 * 2 * 64 * 2 * (2 if device == "cuda" else 4)

    def cache(memory: float) -> float:
        before = resident + generating["weights"]
        if device == "cuda":
            room = room_on_device(share, memory, before, memory - before, generating["work"])
        else:
            room = share * (memory - report.reserve - before)
        return min(max(room, generating["cache"]), largest)

    for call, parts in calls.items():
        others = report.reserve + resident + sum(parts.values()) - parts["pages between steps"]
        needed = float(report._during(call)[0])
        assert others + cache(needed) == pytest.approx(needed), call
        assert parts["pages between steps"] == generating["cache"] or others + cache(0.99 * needed) > 0.99 * needed, call


def test_a_run_that_keeps_pages_is_refused_where_training_lacks_them(root: Path) -> None:
    case = Fit("grpo", "qwen2.5_7b", 8, H100, IN_FLIGHT, 0.0)
    assert check_memory(*judged(case, root), H100, 8) is None
    keep, remedy = (f"models.actor.generation.kv_cache={value}" for value in ("keep", "offload"))
    with pytest.raises(ValueError, match=rf"actor\.update pages between steps .* fit with {remedy}$"):
        check_memory(*judged(case, root, keep), H100, 8)
    assert check_memory(*judged(case, root, remedy), H100, 8) is None


def test_roles_on_pools_of_their_own(root: Path) -> None:
    """The critic's ranks hold nothing of the actor; a method elsewhere has weights only while it runs, or what ``delta`` keeps."""
    pools = ["placement.pools={a: [0,1], b: [2,3]}", "models.critic.pool=b", "models.actor.pool=a", "models.reference.pool=a"]
    case = Fit("ppo", "qwen2.5_0.5b", 4, H100, tuple(pools), 0.0)
    plans, facts = judged(case, root)
    report = estimate_memory(plans, facts)
    assert sorted(ranks.tolist() for ranks in report.ranks) == [[0, 1], [2, 3]]
    actor, critic = (next(k for k, ranks in enumerate(report.ranks) if rank in ranks) for rank in (0, 2))
    assert report.resident["actor weights"][critic] == 0 < report.resident["actor weights"][actor]
    assert report.resident["critic optimizer"][actor] == 0 < report.resident["critic optimizer"][critic]
    elsewhere = "models.actor.calls.generate_sequences.pool=b"
    lent = estimate_memory(*judged(case, root, elsewhere))
    weights = lent.call_bytes["actor.generate_sequences"]["weights"]
    assert weights.max() == report.resident["actor weights"][actor] and sorted(weights > 0) == [False, True]
    kept = estimate_memory(*judged(case, root, elsewhere, "models.actor.calls.generate_sequences.delta=true"))
    assert (
        kept.resident["actor.generate_sequences weights"].max()
        == kept.resident["actor as sent to generate_sequences"].max()
        > 0
    )
    assert "weights" not in kept.call_bytes["actor.generate_sequences"]


def test_copies_of_weights_that_are_on_their_way_count(root: Path) -> None:
    """Ahead of training: one to generate with, ``max_staleness`` that come, one more after a validation, and one with ``delta``."""
    ahead = ("placement.strategy=separate", "rollout.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true")
    case = Fit("ppo", "qwen2.5_0.5b", 4, H100, ahead, 0.0)
    copies = {}
    for delta in ("false", "true"):
        plans, facts = judged(case, root, f"models.actor.calls.generate_sequences.delta={delta}")
        assert facts.versions == 2, "nothing is validated"
        for validates in (False, True):
            report = estimate_memory(plans, replace(facts, versions=2 + validates))
            there, home = report.resident["actor.generate_sequences weights"].max(), report.resident["actor weights"].max()
            copies[delta, validates] = round(float(there / home), 2)
    assert copies == {("false", False): 2, ("false", True): 3, ("true", False): 3, ("true", True): 4}


def test_rows_count_as_they_are_dealt(root: Path) -> None:
    """A rank that is four times as fast gets 1.6 times the mean of the rows, the other one 0.4 times; generation by its own speeds."""
    case = Fit("ppo", "qwen2.5_0.5b", 2, H100, (), 0.0)
    plans, facts = judged(case, root)
    calls = ("actor.generate_sequences", "actor.update")

    def work(speeds: RankSpeeds) -> list[dict[str, float]]:
        """The part of each call that grows with its rows, on ranks 0 and 1, against that of equal ranks."""
        report = estimate_memory(plans, replace(facts, speeds=speeds, limits=replace(facts.limits, max_tokens=1 << 20)))
        ranks = {int(rank): kind for kind, ranks in enumerate(report.ranks) for rank in ranks}
        parts = dict(zip(calls, ("work", "activations"), strict=True))
        return [{call: report.call_bytes[call][part][ranks[rank]] for call, part in parts.items()} for rank in (0, 1)]

    alike = work(RankSpeeds())
    assert alike == work(RankSpeeds([2.0, 2.0]))
    fast, slow = work(RankSpeeds([1.0, 0.25]))
    assert fast["actor.update"] / alike[0]["actor.update"] == pytest.approx(1.6, rel=0.01)
    assert slow["actor.update"] / alike[1]["actor.update"] == pytest.approx(0.4, rel=0.02)
    assert fast["actor.generate_sequences"] > alike[0]["actor.generate_sequences"] > slow["actor.generate_sequences"]
    generates_alike = work(RankSpeeds([1.0, 0.25], [1.0, 1.0]))
    assert [part["actor.generate_sequences"] for part in generates_alike] == [
        part["actor.generate_sequences"] for part in alike
    ]
    assert generates_alike[0]["actor.update"] == fast["actor.update"]


def test_an_episode_of_agents_is_generated_as_one_row(tmp_path: Path) -> None:
    ready = prepare(SMALL, tasks.settings(tmp_path, 2), 1)
    graph = trace(ready)
    agents = replace(ready, config=replace(ready.config, agent=AgentConfig(command="true", max_rows=4)))

    def num_rows(plan: RunPlan, kind: str) -> float:
        (call,) = (call for call in graph.nodes if call.spec.kind == kind and call.role.name == "actor")
        return step_facts(plan, graph, torch.device("cpu")).workload(call, np.ones(1)).rows

    assert num_rows(ready, "generate") == 4 * num_rows(agents, "generate") > 4
    assert num_rows(ready, "train") == num_rows(agents, "train")


def test_weights_that_come_early_lie_beside_the_call_before(root: Path) -> None:
    case = Fit("ppo", "qwen2.5_0.5b", 2, H100, ("models.reference.offload=true", "models.critic.offload=true"), 0.0)
    without = estimate_memory(*judged(case, root))
    report = estimate_memory(*judged(case, root, "models.reference.prefetch=true"))
    own = {
        name: parts.keys() - without.call_bytes[name].keys()
        for name, parts in report.call_bytes.items()
        if parts != without.call_bytes[name]
    }
    assert [*own.values()] == [{"beside reference weights"}]
    (before,) = own
    early = report.call_bytes[before]["beside reference weights"]
    assert (early == report.call_bytes["reference.compute_ref_log_prob"]["weights back"]).all() and early.min() > 0


@pytest.mark.parametrize(
    "files",
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_container_leaves(files: tuple[str, str, str], tmp_path: Path) -> None:
    limit, used, cached = files
    assert container_bytes(tmp_path) == math.inf
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("700\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 500\n{cached} 150\n")
    assert container_bytes(tmp_path) == 450
    (tmp_path / limit).write_text("max\n")
    assert container_bytes(tmp_path) == math.inf


def test_ranks_refuse_a_model_that_is_too_large_for_this_machine(tmp_path: Path) -> None:
    """In seconds, before anything of it exists: one line, and the exit status of bad input."""
    room = total_bytes(torch.device("cpu"), 2)
    if room > 200 * GIB:
        pytest.skip(f"each of two ranks has {room / GIB:.0f} GiB here")
    settings = overrides(tmp_path, "grpo", "llama3.1_70b", "models.actor.activation_checkpointing=none")
    program = Program(2, settings, tmp_path / "output.txt", tasks.environment())
    assert tasks.finish(program, tmp_path) == 2
    (line,) = [line for line in (tmp_path / "output.txt").read_text().splitlines() if "would need" in line]
    assert re.match(r"^.*rank [01] \(and 1 like it\) would need [\d.]+ GiB of memory and has", line)
    assert "it would fit with" in line or "GiB per rank are missing" in line
    assert json.loads((tmp_path / "run" / "exit_status.json").read_text())["class"] == "config"


def modes(world: World, chosen: list[str], *settings: str) -> list[Any]:
    """How the layers of actor and reference run where each rank would decide by itself."""
    _, models = build(world, *settings, checkpointing=chosen[world.rank])
    return [[chunk._run_layer.__name__, chunk.layers[0].run_part.__name__] for chunk in models.actor.engine.chunks]


def test_ranks_of_a_role_recompute_alike() -> None:
    """The one that has least memory decides for all."""
    assert run_ranks(2, modes, ["none", "none"]) == [[[keep_layer.__name__, "keep_part"]]] * 2
    assert run_ranks(2, modes, ["none", "selective"]) == [[[keep_layer.__name__, recompute_part.__name__]]] * 2
    assert run_ranks(2, modes, ["full", "none"]) == [[[recompute_layer.__name__, "keep_part"]]] * 2
    fixed = "models.actor.activation_checkpointing=selective"
    assert run_ranks(2, modes, ["none", "full"], fixed) == [[[keep_layer.__name__, recompute_part.__name__]]] * 2


def test_auto_takes_the_first_that_fits(root: Path) -> None:
    case = FITS[0]
    ready, facts = case.checked(root)
    peaks = [
        float(estimate_memory(with_checkpointing(ready.roles, mode), facts).peaks.max())
        for mode in ("none", "selective", "full")
    ]
    assert peaks[0] > peaks[1] > peaks[2]
    for peak, mode in zip(peaks, ("none", "selective", "full"), strict=True):
        assert decide_checkpointing(ready.roles, facts, peak + 1) == mode
    assert decide_checkpointing(ready.roles, facts, peaks[2] / 2) == "full"
    fixed, facts = case.checked(root, "models.actor.activation_checkpointing=none")
    assert with_checkpointing(fixed.roles, "full")["actor"].config.activation_checkpointing == "none"


def small_run(world: World, run_dir: str, room: float) -> str:
    """A run of the small task on devices of ``room`` bytes; returns what it begins with."""
    memory_check.total_bytes = lambda *_: room
    try:
        ready = prepare(SMALL, tasks.settings(Path(run_dir), 2), world.size, launch=world.launch)
    finally:
        memory_check.total_bytes = total_bytes
    create_run_dir(ready.config.run.dir)
    train(ProgramContext(world, Board(world.launch, world.store), ready))
    return run_banner(ready, world)


def test_a_run_that_recomputes_for_want_of_memory_gives_the_same_bits(tmp_path: Path) -> None:
    ready = prepare(SMALL, tasks.settings(tmp_path, 2), 2)
    facts = step_facts(ready, trace(ready), torch.device("cpu"))
    none, full = (float(estimate_memory(with_checkpointing(ready.roles, mode), facts).peaks.max()) for mode in ("none", "full"))
    assert full < none
    enough = run_ranks(2, small_run, str(tmp_path / "enough"), none + 1)
    assert "activation_checkpointing" not in enough[0]
    small = run_ranks(2, small_run, str(tmp_path / "small"), full / 1.05)
    assert "warning: rank 0" in small[0] and "that may be too much" in small[0] and "auto: full" in small[0]
    assert tasks.read_run(tmp_path / "enough").metrics == tasks.read_run(tmp_path / "small").metrics
