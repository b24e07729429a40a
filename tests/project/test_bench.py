"""The benchmark scripts run at their smallest size and write what they promise; the figures themselves are not judged.

Each row of ``SCRIPTS`` has a command, what it prints, and what must be true of its report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

pytestmark = pytest.mark.long
Report = dict[str, Any]


def estimates_well(report: Report) -> bool:
    everything, *others = report["terms"]
    fewer = [term for term in others if term["terms"].startswith("without")]
    assert len(fewer) == 5 and all(term["left_out"] > everything["left_out"] for term in fewer), "a term that does nothing"
    other_plan = [abs(call["other_plan"]) for call in report["calls"]]
    assert sum(other_plan) / len(other_plan) < 0.15
    return (len(report["calls"]), len(report["steps"])) == (14, 4) and everything["mean"] <= everything["left_out"] < 0.1


def gains(report: Report) -> bool:
    rows = report["rows"]
    assert all(1.0 <= row["gain_at_once"] <= row["gain"] for row in rows), "one layout is among the plans"
    for row in rows:
        starts = {call["call"]: (call["start"], call["ranks"]) for call in row["plan"]}
        if row["algorithm"] == "remax":  # the calls of generation run side by side
            (start, ranks), (other_start, other_ranks) = (starts[f"actor.generate_{name}"] for name in ("sequences", "greedy"))
            assert start == other_start == 0 and ranks != other_ranks
    return {call["start"] for row in rows for call in row["heuristic_plan"][:1]} == {0.0}


def scales(report: Report) -> bool:
    few, many = report["rows"]
    assert many["seconds"] < few["seconds"] and 0 < many["static_share"] < few["static_share"] < 1
    return many["linear"] < 1


def improves_step_by_step(report: Report) -> bool:
    seconds = [row["ours"] for row in report["rows"]]
    return len(seconds) == 5 and seconds == sorted(seconds, reverse=True)


def moves_weights(report: Report) -> bool:
    one_layout, *others = report["rows"]
    assert "reallocate" not in one_layout and all(row["reallocate"] > 0 for row in others)
    return len(others) == 3 and all(row["step"] > 0 for row in report["rows"])


def has_phases(report: Report) -> bool:
    (run,) = report["runs"]
    phases = " ".join(run["phases_s"])
    assert all(phase in phases for phase in ("generate_sequences", "compute_values", "update_actor"))
    assert "compute_log_prob" not in phases  # on CPU the rollout's log-probs are the training forward's
    return max(run["phases_s"].values()) < run["step_s"] and min(run["tokens_per_s"], run["peak_gb"]) > 0


def compares_updates(report: Report) -> bool:
    assert all("error" not in case and min(case["step_s"], case["peak_mib"]) > 0 for case in report["cases"]), report["cases"]
    names = [case["name"] for case in report["cases"]]
    assert set(names) in ({"ours", "sorted", "packed_sdpa", "ours, tp2"}, {"ours, full", "compiled_sorted, full"})
    return report["ratios"][0]["float32"]["loss_difference"] < 1e-5  # all have the same weights


def compares_generators(report: Report) -> bool:
    assert all("error" not in case and case["tokens_per_s"] > 0 and not case["short"] for case in report["cases"]), report[
        "cases"
    ]
    ours, peer = report["cases"]
    settings = {"attention": "torch", "enforce_eager": True, "steps_per_sync": 4}
    assert ours["engine"] == "ours" or (ours["settings"], ours["workload"]) == (settings, "nano")
    return peer["engine"] == "transformers" and ours["agreement"] == {"rows": 1.0, "tokens": 1.0}


def counts_what_formulas_say(report: Report) -> bool:
    assert len({(row["layout"], row["engine"]) for row in report["rows"]}) == 9
    for row in report["rows"]:
        assert row["exact"] and row["counted_bytes"] == row["formula_bytes"] > 0
        assert 0 <= row["beyond_bytes"] == row["counted_peak_bytes"] - row["formula_peak_bytes"] <= row["bucket_bytes"]
    return True


def has_all_systems(report: Report) -> bool:
    (row,) = report["rows"]
    baselines = ("deepspeed_chat", "openrlhf", "nemo_aligner", "nemo_no_cache")
    assert all(row[name] > row["hybridflow"] > 0 for name in baselines), row
    assert row["nemo_no_cache"] > 10 * row["nemo_aligner"]  # each token takes a pass over its row
    return {gain["baseline"] for gain in report["gains"]} == set(baselines)


def is_colocated(report: Report) -> bool:
    (row,) = report["rows"]
    assert row["colocate"] < row["split"] < row["standalone"]
    return row["paper"] == row["ours"] == "colocate" and set(row["calls"]) == {"colocate", "split", "apart", "standalone"}


def moves_least(report: Report) -> bool:
    for row in report["rows"]:
        assert 0 < row["zero_redundancy"] < row["naive_groups"] <= row["full_gather"] < row["openrlhf"], row
    return 0 < report["mean"] < report["most"] < 1


def has_a_fastest_tp(report: Report) -> bool:
    seconds = [row["generation_s"] for row in report["rows"]]
    transitions = [row["transition_s"] for row in report["rows"]]
    return transitions == sorted(transitions, reverse=True) and min(seconds) < min(seconds[0], seconds[-1])


def maps_to_the_optimum(report: Report) -> bool:
    (row,) = report["rows"]
    return row["gap"] < 1e-9 and row["exact_step"] <= row["enumerate_step"] and row["options_s"] > 0


def strategies_of(report: Report) -> dict[str, Report]:
    return {row["strategy"]: row for row in report["rows"]}


def interleaves(report: Report) -> bool:
    rows = strategies_of(report)
    one, in_our_order = rows["interleave 1"]["same_batch"], rows["interleave 1, our order"]["same_batch"]
    larger_batch_pays = rows["flattening"]["same_batch"] < one
    return len(rows) == 5 and larger_batch_pays and in_our_order < one and rows["flattening"]["paper"] == 16.12


def separates(report: Report) -> bool:
    """A weights' gather for each token is most of the step; a hybrid engine or separation spares it."""
    gather, hybrid, separation = report["rows"]
    assert gather["generation_share"] > 0.9 > max(hybrid["generation_share"], separation["generation_share"])
    return min(hybrid["ours_ratio"], separation["ours_ratio"]) > 3 and separation["paper_ratio"] > 5


def places_for_real(report: Report) -> bool:
    assert [row["strategy"] for row in report["rows"]] == ["flattening", "ahead"]
    return all(row["seconds"] > 0 and row["times_as_fast"] > 0 for row in report["rows"])


SCRIPTS: dict[str, tuple[str, Callable[[Report], bool]]] = {
    "controller.py --ranks 2 --repeats 2 --starts 1": (
        "controller.any_rank",
        lambda report: all(case.get("received_by_rank_0", 0) == 0 < case["median_us"] for case in report["cases"]),
    ),
    "paper_hybridflow.py end_to_end --algorithms ppo --models 7B --gpus 8": ("| openrlhf | ppo |", has_all_systems),
    "paper_hybridflow.py crossover --gpus 16": ("1 of 1 as published", is_colocated),
    "paper_hybridflow.py transition": ("less time: mean", moves_least),
    "paper_hybridflow.py generation_tp --models 7B": ("less than tp 8", has_a_fastest_tp),
    "paper_hybridflow.py mapping --gpus 16": ("| 16 | 7B |", maps_to_the_optimum),
    "planner_runs.py unequal --model tiny --steps 4 --names searched": (
        "| searched |",
        lambda report: report["rows"][0]["measured"] > 0 < report["rows"][0]["planned"] and report["share"] == 0.5,
    ),
    "paper_real_calls.py": ("off: mean error 6.6%, 14 of 14 within 25 %", estimates_well),
    "paper_real.py gain --actors 70B --contexts 8192": ("| 70B | 128 | 8192 | 788.3 | 518.3 | 335.2 |", gains),
    "paper_real.py algorithms --names remax dpo --actor 7B --gpus 16": ("| remax | 16 |", gains),
    "paper_real.py scaling --actors 7B --gpus 8 16": ("| 7B | 16 |", scales),
    "paper_real.py breakdown --actors 7B": ("| 7B | with CUDA graphs | 122.6 |", improves_step_by_step),
    "paper_real.py search --cases one_host_short --limits 0.2": (
        "| one_host_short | 8 |",
        lambda report: all(row["gap"] < 1e-9 and row["mcmc_0.2"] >= 0 for row in report["rows"]),
    ),
    "paper_real.py reallocation --model tiny --prompts 8 --prompt-length 6 --response-length 6 --steps 2": (
        "trainings side by side",
        moves_weights,
    ),
    "paper_app.py interleaving --gpus 8 --models 7B --batches 24": ("interleave 2, all generate", interleaves),
    "paper_app.py separation --gpus 32 --models 33B --batches 12": ("| separation |", separates),
    "paper_app.py heterogeneous --batches 12": (
        "8 V100",
        lambda report: len(report["rows"]) == 5 and all(row["ours"] > 0 for row in report["rows"]),
    ),
    "paper_app.py trlx --gpus 8 --models 7B --batches 24": (
        "trlX",
        lambda report: all(row["ours"] < strategies_of(report)["flattening"]["ours"] for row in report["rows"][5:7]),
    ),
    "paper_app.py shared --models 7B --batches 8": (
        "one model",
        lambda report: report["rows"][1]["same_peak_gib"] < report["rows"][0]["same_peak_gib"],
    ),
    "paper_app.py lengths --models 7B --gpus 8 --rows 48 --responses 128 --shares 0.5": (
        "fastest",
        lambda report: min(report["rows"][0][name] for name in ("colocate", "interleave", "separate_0.5", "ahead_0.5")) > 0,
    ),
    "paper_app.py placements --ranks 2 --model tiny --responses 8 --prompts 8 --steps 4 --strategies flattening ahead": (
        "times as fast",
        places_for_real,
    ),
    "train.py step --model tiny --ranks 1 --steps 2 --programs ppo": ("step_s", has_phases),
    "update.py --models tiny --seconds 0 --least 1 --peers sorted packed_sdpa --layouts tp2": ("packed_sdpa", compares_updates),
    "update.py --device cpu --models tiny:1 --no-files --rows 4 8 24 --checkpointing full --optimizer no_masters "
    "--peers compiled_sorted --compile-backend eager --seconds 0 --least 1": ("", compares_updates),
    "device.py --quick --device cpu --families llama gemma2 --tokens 8": (
        "| gemma2 |",  # and exact on CPUs
        lambda report: all(not each["worse"] and each["generator"] == each["training"] for each in report["families"].values()),
    ),
    "generation.py --models tiny --dtypes float32 --rows 6 --longest 24 --repeats 1 --seconds 0 --engines ours transformers": (
        "| transformers |",
        compares_generators,
    ),
    "generation.py --device cpu --models tiny:1 --no-files --workload nano --rows 4 --longest 24 --engines ours transformers "
    "--ours attention=torch,enforce_eager=true,steps_per_sync=4 --dtypes float32 --repeats 1 --seconds 0": (
        "",
        compares_generators,
    ),
    "activations.py --hidden 128 --layers 2 --vocab 20000 --rows 2 --length 400 --repeats 1": (
        "linear_cross_entropy",
        lambda report: report["layers"] == sorted(report["layers"], key=lambda case: -case["kept_mib"]),
    ),
    "memory.py --cycles 130 --settled 90 --samples 13 --ranks 2": (
        "",  # one KV page a cycle would be 4 KiB
        lambda report: all(
            row["storages"][0] == row["storages"][1] and abs(row["heap_kib_per_cycle"]) < 2.0 for row in report["rows"]
        ),
    ),
    "data.py --rows 600 --ranks 2": (
        "again ",
        lambda report: all(rank["examples"] == 100 for ranks in report["cases"].values() for rank in ranks),
    ),
    "agents.py --episodes 16 --steps 1 --hidden 32": ("over http", lambda report: report["steps"][0]["share"] > 0),
    "serve_soak.py --minutes 0.1 --clients 8": ("0 failures", lambda report: report["probe"] > 0 and report["failures"] == []),
    "reshard.py --sizes 2 --repeats 1": ("9 of 9 rows; beyond the formula one bucket at most", counts_what_formulas_say),
}
# torch's record of the last collectives and its caches are smaller, so that all that is kept by design is there after 90 cycles
SMALL_CACHES = {"TORCH_FR_BUFFER_SIZE": "50", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_writes_its_report(command: str, tmp_path: Path) -> None:
    text, is_right = SCRIPTS[command]
    script, *arguments = command.split()
    out = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= SMALL_CACHES if "--cycles" in arguments else {}
    run = [sys.executable, str(ROOT / "scripts" / "bench" / script), *arguments, "--out", str(out)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text())
    assert text in done.stdout and is_right(report), report
