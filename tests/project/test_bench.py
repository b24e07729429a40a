"""The benchmark scripts run at their smallest size and write what they promise; the figures themselves are not judged."""

from __future__ import annotations

from pathlib import Path

from bench_runs import run_script


def test_control_writes_a_figure_for_every_case(tmp_path: Path) -> None:
    report, printed = run_script("control.py", tmp_path / "control.json", "--ranks", "2", "--repeats", "2")
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
        assert case["calls"] > 0 and 0 < case["median_us"] <= case["p90_us"] and case["own_cpu_us"] > 0
        assert case["case"] in printed


def test_step_writes_phases_and_tokens_per_second(tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--ranks", "1", "--steps", "2", "--programs", "ppo")
    report, printed = run_script("step.py", tmp_path / "step.json", *arguments)
    (run,) = report["runs"]
    assert (run["program"], run["ranks"], run["steps"]) == ("ppo", 1, 1)
    assert run["tokens_per_s"] > 0 and run["peak_gb"] > 0
    phases = " ".join(run["phases_s"])
    assert all(phase in phases for phase in ("generate_sequences", "compute_values", "update_actor"))
    assert "compute_log_prob" not in phases  # on CPU the rollout's log-probs are the training forward's
    assert max(run["phases_s"].values()) < run["step_s"]
    assert "whole step" in printed


def test_train_step_compares_the_same_work(tmp_path: Path) -> None:
    arguments = ("--quick", "--peers", "sorted", "packed_sdpa", "--layouts", "tp2")
    report, printed = run_script("train_step.py", tmp_path / "train_step.json", *arguments)
    cases = {case["name"]: case for case in report["cases"]}
    assert set(cases) == {"ours", "sorted", "packed_sdpa", "ours, tp2"}
    for name, case in cases.items():
        assert "error" not in case, f"{name}: {case['error']}"
        assert name in printed and case["step_s"] > 0 and case["cpu_s"] > 0 and case["peak_mib"] > 0
    assert report["ratios"][0]["float32"]["loss_difference"] < 1e-5
    sent = [part["mib_sent"] for part in cases["ours, tp2"]["communication"]]
    assert len(sent) == 2 and all(part["attention"] > 0 and part["mlp"] > 0 for part in sent)


def test_train_step_draws_weights_in_place(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--models", "tiny:1", "--no-files", "--rows", "4", "8", "24", "--checkpointing", "full"]
    arguments += ["--optimizer", "no_masters", "--peers", "compiled_sorted", "--compile-backend", "eager"]
    report, _ = run_script("train_step.py", tmp_path / "train.json", *arguments, "--seconds", "0", "--least", "1")
    cases = {case["name"]: case for case in report["cases"]}
    assert set(cases) == {"ours, full", "compiled_sorted, full"}
    for name, case in cases.items():
        assert "error" not in case, f"{name}: {case['error']}"
        assert case["tokens"] == cases["ours, full"]["tokens"] and 0 < case["mfu"] < 1
    assert report["ratios"][0]["float32"]["loss_difference"] < 1e-5  # both drew the same weights
    assert report["machine"]["device"] == "cpu"


def test_agreement_measures_distances_from_float32(tmp_path: Path) -> None:
    arguments = ("--quick", "--device", "cpu", "--families", "llama", "gemma2", "--tokens", "8")
    report, printed = run_script("agreement.py", tmp_path / "agreement.json", *arguments)
    for family in ("llama", "gemma2"):
        found = report["families"][family]
        assert not found["worse"] and 0 < found["rows"] <= found["tokens"] <= 1 and f"| {family} |" in printed
        assert found["generator"] == found["training"]  # exact on CPUs
        assert all(0 < found[name]["mean"] <= found[name]["max"] < 0.5 for name in ("training", "transformers"))


def test_generation_compares_the_same_tokens(tmp_path: Path) -> None:
    report, printed = run_script("generation.py", tmp_path / "generation.json", "--quick")
    cases = {case["engine"]: case for case in report["cases"]}
    assert set(cases) == {"ours", "transformers"}
    for engine, case in cases.items():
        assert "error" not in case, f"{engine}: {case['error']}"
        assert case["tokens_per_s"] > 0 and case["startup_s"] > 0 and case["peak_mib"] > 0 and not case["short"]
        assert 0 < case["roofline"] < 1 and f"| {engine} |" in printed
    assert cases["ours"]["agreement"] == {"rows": 1.0, "tokens": 1.0}
    assert cases["ours"]["group_sampling"]["ratio"] > 0
    assert set(report["ratios"][0]["ours_over"]) == {"transformers"}


def test_generation_takes_settings_and_draws_weights_in_place(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--models", "tiny:1", "--no-files", "--workload", "nano", "--rows", "4", "--longest", "24"]
    arguments += ["--ours", "attention=torch,enforce_eager=true,steps_per_sync=4", "--engines", "ours", "transformers"]
    arguments += ["--dtypes", "float32", "--repeats", "1", "--seconds", "0"]
    report, _ = run_script("generation.py", tmp_path / "generation.json", *arguments)
    ours, peer = report["cases"]
    assert "error" not in ours and "error" not in peer, (ours, peer)
    assert ours["engine"] == "ours attention=torch enforce_eager=True steps_per_sync=4" and peer["engine"] == "transformers"
    assert ours["settings"] == {"attention": "torch", "enforce_eager": True, "steps_per_sync": 4} and ours["workload"] == "nano"
    assert ours["agreement"] == {"rows": 1.0, "tokens": 1.0} and not ours["short"] and ours["tokens_per_s"] > 0


def test_pipeline_measures_every_schedule_beside_its_formula(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--forward-ms", "3", "--repeats", "1")
    report, printed = run_script("pipeline.py", tmp_path / "pipeline.json", *arguments)
    assert {case["schedule"] for case in report["cases"]} == {"forward", "1F1B", "interleaved"}
    for case in report["cases"]:
        assert case["ragged"] or abs(case["replayed"] - case["formula"]) < 1e-3
        assert case["measured"] > case["replayed"] / 2  # loaded machines make it more; sleeps that last too long, a little less
        assert f"{case['measured']:.3f}" in printed
    assert sum(case["ragged"] for case in report["cases"]) == 3


def test_reallocation_receives_what_it_lacks(tmp_path: Path) -> None:
    report, printed = run_script("reallocation.py", tmp_path / "reallocation.json", "--repeats", "1", "--plans", "1")
    assert len(report["rows"]) == 6
    for row in report["rows"]:
        assert row["received_bytes"] == row["lacked_bytes"] and row["seconds"] > 0 and row["pair"] in printed
    (plan,) = report["plans"]
    assert plan["mean_received_bytes"] > 0 and plan["from_other_hosts"] == 0 and 1 <= plan["busiest"] < 1.5


def test_activations_writes_memory_of_layers_and_head(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "layers": 2, "vocab": 20000, "rows": 2, "length": 400, "repeats": 1}
    arguments = [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    report, printed = run_script("activations.py", tmp_path / "activations.json", *arguments)
    kept = [case["kept_mib"] for case in report["layers"]]
    assert [case["case"] for case in report["layers"]] == ["none", "selective", "full"] and kept == sorted(kept, reverse=True)
    ours, whole = (next(case for case in report["head"] if case["case"] == name) for name in ("ours", "whole logits"))
    assert 0.8 < ours["chunks"] < 1.1 and whole["peak_mib"] > 3 * ours["peak_mib"] and "linear_cross_entropy" in printed


def test_memory_predicts_and_measures_every_phase(tmp_path: Path) -> None:
    report, printed = run_script("memory.py", tmp_path / "memory.json", "--model", "tiny")
    assert list(report["phases"]) == ["load", "generate", "log_probs", "update", "step"]
    for name, phase in report["phases"].items():
        assert phase["measured"] > 0 and min(phase["parts"].values()) > 0 and f"| {name} |" in printed


def test_data_writes_every_rank_of_every_case(tmp_path: Path) -> None:
    report, printed = run_script("data.py", tmp_path / "data.json", "--rows", "600", "--ranks", "2")
    assert report["rows"] == 600 and set(report["cases"]) == {"without", "first", "again"} and report["file_mib"] > 0
    for case, ranks in report["cases"].items():
        assert len(ranks) == 2 and printed.count(f"{case} ") >= 2
        assert all(its["seconds"] > 0 and its["peak"] > 0 and its["examples"] == 100 for its in ranks)
