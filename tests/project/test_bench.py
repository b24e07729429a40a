"""The benchmark scripts run at their smallest size and write what they promise; the figures themselves are not judged.

``ran``: the report and the printed text of the run that the mark names (tests/project/conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest

Ran = tuple[dict[str, Any], str]


@pytest.mark.script("controller.py calls --ranks 2 --repeats 2 --starts 1")
def test_control_writes_a_figure_for_every_case(ran: Ran) -> None:
    report, printed = ran
    assert report["ranks"] == 2 and {"python", "torch", "cores"} <= set(report["machine"])
    names = [case["case"] for case in report["cases"]]
    for wanted in (
        "empty call to all",
        "chain on one pool",
        "pool(1) to pool(1)",
        "bare gloo",
        "controller.get",
        "controller.decide",
    ):
        assert any(wanted in name for name in names), names
    for case in report["cases"]:
        assert case["calls"] > 0 and 0 < case["median_us"] <= case["p90_us"] and 0 < case["own_cpu_us"] < case["all_cpu_us"]
        assert case["case"] in printed
        assert case.get("received_by_rank_0", 0) == 0, "rows of others pass rank 0"
    for kind in ("bare", "ours"):
        (start,) = report["start"][kind]
        assert start["program_s"] > 0 and start["cpu_s"] > 0
    assert "start to first call" in printed and printed.count("no --verl-python was given") == 2


@pytest.mark.script("controller.py startup --ranks 128")
def test_startup_counts_what_a_rank_connects(ran: Ran) -> None:
    report, printed = ran
    assert [case["placement"] for case in report["counted"]] == ["all roles on all ranks", "two pools of half the ranks"]
    for case in report["counted"]:
        assert 0 < case["groups"] < 16 and max(case["largest_groups"]) == 128 <= case["connections"] < 1024
        assert case["store_messages"] == 2 * case["connections"] + 3 * case["groups"] and case["placement"] in printed


@pytest.mark.script("planner.py estimator")
def test_planner_estimates_published_calls(ran: Ran) -> None:
    report, printed = ran
    assert len(report["calls"]) == 14 and len(report["steps"]) == 4 and "14 of 14 within 25 %" in printed
    everything, *others = report["terms"]
    assert everything["terms"] == "all terms" and everything["mean"] <= everything["left_out"] < 0.1
    fewer = [term for term in others if term["terms"].startswith("without")]
    assert len(fewer) == 5 and all(term["left_out"] > everything["left_out"] for term in fewer), "a term that does nothing"


@pytest.mark.script("train.py step --model tiny --ranks 1 --steps 2 --programs ppo")
def test_step_writes_phases_and_tokens_per_second(ran: Ran) -> None:
    report, printed = ran
    (run,) = report["runs"]
    assert (run["program"], run["ranks"], run["steps"]) == ("ppo", 1, 1)
    assert run["tokens_per_s"] > 0 and run["peak_gb"] > 0
    phases = " ".join(run["phases_s"])
    assert all(phase in phases for phase in ("generate_sequences", "compute_values", "update_actor"))
    assert "compute_log_prob" not in phases  # on CPU the rollout's log-probs are the training forward's
    assert max(run["phases_s"].values()) < run["step_s"]
    assert "step_s" in printed


@pytest.mark.script("placement.py streaming --chunks 1 2 --steps 2 --rounds 1 --prompts 4 --response 8 --at-once 4")
def test_streaming_measures_how_long_rows_wait(ran: Ran) -> None:
    report, printed = ran
    assert [run["chunks"] for run in report["runs"]] == [1, 2] and "chunks | reward |" in printed
    for run in report["runs"]:
        assert 0 < run["reward"] <= run["both"] and 0 < run["reference"] <= run["both"]  # of the same responses: it looks


@pytest.mark.script("update.py --models tiny --seconds 0 --least 1 --peers sorted packed_sdpa --layouts tp2")
def test_train_step_compares_the_same_work(ran: Ran) -> None:
    report, printed = ran
    cases = {case["name"]: case for case in report["cases"]}
    assert set(cases) == {"ours", "sorted", "packed_sdpa", "ours, tp2"}
    for name, case in cases.items():
        assert "error" not in case, f"{name}: {case['error']}"
        assert name in printed and case["step_s"] > 0 and case["cpu_s"] > 0 and case["peak_mib"] > 0
    assert report["ratios"][0]["float32"]["loss_difference"] < 1e-5
    sent = cases["ours, tp2"]["mib_sent"]
    assert len(sent) == 2 and all(part["attention"] > 0 and part["mlp"] > 0 for part in sent)


@pytest.mark.script(
    "update.py --device cpu --models tiny:1 --no-files --rows 4 8 24 --checkpointing full --optimizer "
    "no_masters --peers compiled_sorted --compile-backend eager --seconds 0 --least 1"
)
def test_train_step_draws_weights_in_place(ran: Ran) -> None:
    report, _ = ran
    cases = {case["name"]: case for case in report["cases"]}
    assert set(cases) == {"ours, full", "compiled_sorted, full"}
    for name, case in cases.items():
        assert "error" not in case, f"{name}: {case['error']}"
        assert case["tokens"] == cases["ours, full"]["tokens"] and 0 < case["mfu"] < 1
    assert report["ratios"][0]["float32"]["loss_difference"] < 1e-5  # both drew the same weights
    assert report["machine"]["device"] == "cpu"


@pytest.mark.script("device.py agreement --quick --device cpu --families llama gemma2 --tokens 8")
def test_agreement_measures_distances_from_float32(ran: Ran) -> None:
    report, printed = ran
    for family in ("llama", "gemma2"):
        found = report["families"][family]
        assert not found["worse"] and 0 < found["rows"] <= found["tokens"] <= 1 and f"| {family} |" in printed
        assert found["generator"] == found["training"]  # exact on CPUs
        assert all(0 < found[name]["mean"] <= found[name]["max"] < 0.5 for name in ("training", "transformers"))


@pytest.mark.script(
    "generation.py --models tiny --dtypes float32 --rows 6 --longest 24 --repeats 1 --seconds 0 --engines ours transformers"
)
def test_generation_compares_the_same_tokens(ran: Ran) -> None:
    report, printed = ran
    cases = {case["engine"]: case for case in report["cases"]}
    assert set(cases) == {"ours", "transformers"}
    for engine, case in cases.items():
        assert "error" not in case, f"{engine}: {case['error']}"
        assert case["tokens_per_s"] > 0 and case["startup_s"] > 0 and case["peak_mib"] > 0 and not case["short"]
        assert 0 < case["roofline"] < 1 and f"| {engine} |" in printed
    assert cases["ours"]["agreement"] == {"rows": 1.0, "tokens": 1.0}
    assert set(report["ratios"][0]["ours_over"]) == {"transformers"}


@pytest.mark.script(
    "generation.py --device cpu --models tiny:1 --no-files --workload nano --rows 4 --longest 24 --ours "
    "attention=torch,enforce_eager=true,steps_per_sync=4 --engines ours transformers --dtypes float32 "
    "--repeats 1 --seconds 0"
)
def test_generation_takes_settings_and_draws_weights_in_place(ran: Ran) -> None:
    report, _ = ran
    ours, peer = report["cases"]
    assert "error" not in ours and "error" not in peer, (ours, peer)
    assert ours["engine"] == "ours attention=torch enforce_eager=True steps_per_sync=4" and peer["engine"] == "transformers"
    assert ours["settings"] == {"attention": "torch", "enforce_eager": True, "steps_per_sync": 4} and ours["workload"] == "nano"
    assert ours["agreement"] == {"rows": 1.0, "tokens": 1.0} and not ours["short"] and ours["tokens_per_s"] > 0


@pytest.mark.script("pipeline.py --ranks 2 --forward-ms 3 --repeats 1")
def test_pipeline_measures_every_schedule_beside_its_formula(ran: Ran) -> None:
    report, printed = ran
    assert {case["schedule"] for case in report["cases"]} == {"forward", "1F1B", "interleaved"}
    for case in report["cases"]:
        assert case["ragged"] or abs(case["replayed"] - case["formula"]) < 1e-3
        assert case["measured"] > case["replayed"] / 2  # loaded machines make it more; sleeps that last too long, a little less
        assert f"{case['measured']:.4g}" in printed
    assert sum(case["ragged"] for case in report["cases"]) == 3


@pytest.mark.script("reallocation.py --repeats 1 --plans 1")
def test_reallocation_receives_what_it_lacks(ran: Ran) -> None:
    report, printed = ran
    assert len(report["rows"]) == 6
    for row in report["rows"]:
        assert row["received_bytes"] == row["lacked_bytes"] and row["seconds"] > 0 and row["pair"] in printed
    (plan,) = report["plans"]
    assert plan["mean_received_bytes"] > 0 and plan["from_other_hosts"] == 0 and 1 <= plan["busiest"] < 1.5


@pytest.mark.script("activations.py --hidden 128 --layers 2 --vocab 20000 --rows 2 --length 400 --repeats 1")
def test_activations_writes_memory_of_layers_and_head(ran: Ran) -> None:
    report, printed = ran
    kept = [case["kept_mib"] for case in report["layers"]]
    assert [case["case"] for case in report["layers"]] == ["none", "selective", "full"] and kept == sorted(kept, reverse=True)
    ours, whole = (next(case for case in report["head"] if case["case"] == name) for name in ("ours", "whole logits"))
    assert 0.8 < ours["chunks"] < 1.1 and whole["peak_mib"] > 3 * ours["peak_mib"] and "linear_cross_entropy" in printed


@pytest.mark.script("memory.py phases --model tiny")
def test_memory_predicts_and_measures_every_phase(ran: Ran) -> None:
    report, printed = ran
    assert list(report["phases"]) == ["load", "generate", "log_probs", "update", "step"]
    for name, phase in report["phases"].items():
        assert 0 < phase["in_use"] < phase["measured"] and min(phase["parts"].values()) > 0 and f"| {name} |" in printed


@pytest.mark.script("data.py --rows 600 --ranks 2")
def test_data_writes_every_rank_of_every_case(ran: Ran) -> None:
    report, printed = ran
    assert report["rows"] == 600 and set(report["cases"]) == {"without", "first", "again"} and report["file_mib"] > 0
    for case, ranks in report["cases"].items():
        assert len(ranks) == 2 and printed.count(f"{case} ") >= 2
        assert all(its["seconds"] > 0 and its["peak_mib"] > 0 and its["examples"] == 100 for its in ranks)


@pytest.mark.script("rollout.py --model tiny --scale 0.1 --updates 2 --repeats 1")
def test_rollout_compares_every_option_with_itself_turned_off(ran: Ran) -> None:
    report, printed = ran
    cases = {(case["part"], case["case"]): case for case in report["cases"]}
    assert {part for part, _ in cases} == {"pipeline", "replicas", "guesses", "groups"}
    for (part, name), case in cases.items():
        assert f"| {name} |" in printed and case["wall_s"] > 0 and 0 <= case["idle"] < 1
        assert case["drawn"] == next(other["drawn"] for other in report["cases"] if other["part"] == part) or part == "guesses"
    assert cases["replicas", "long ones together, rebalance_steps=8"]["moved_rows"] > 0
    assert cases["pipeline", "micro_batches=2"]["steps"] > 1.5 * cases["pipeline", "micro_batches=1"]["steps"]
    shared, alone = (cases["groups", f"enable_prefix_caching={on}"]["prefill"] for on in (True, False))
    assert 0 < 8 * shared <= alone


@pytest.mark.script(
    "memory.py cycles --cycles 130 --settled 90 --samples 13 --ranks 2",
    TORCH_FR_BUFFER_SIZE="50",  # torch's record of the last collectives
    ONEDNN_PRIMITIVE_CACHE_CAPACITY="16",
    LRU_CACHE_CAPACITY="16",
)
def test_memory_stays_over_many_cycles(ran: Ran) -> None:
    """Two ranks; the figures of 1,000 cycles are in docs/benchmarks.md. One KV page a cycle would be 4 KiB. Some 90 cycles pass
    until all that is kept by design is there, with what torch keeps made smaller."""
    report, printed = ran
    assert len(report["rows"]) == 2
    for row in report["rows"]:
        for key in ("storages", "bytes_in_them"):
            least, most = row[key]
            assert 0 < least == most and str(least) in printed
        assert abs(row["heap_kib_per_cycle"]) < 2.0
