"""Every algorithm, from its file in configs/, is the same run on one rank and on several: responses, metrics, weights. The several are
in a layout, or placed as a file of configs/placements says; these files are all strategies and the papers' baselines.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import yaml

import tasks
from algorithm_cases import CASES, CONFIGS, ROLLOUTS, Case, assert_same_run
from overrides import ONE_SCORER, layout

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "dp2": {"dp": 2, "zero": 2},
    "cp2": {"cp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2, "zero": 1},
    "cp2 dp2": {"cp": 2, "dp": 2, "zero": 3},
}
PLACEMENTS = sorted(path.stem for path in (CONFIGS / "placements").glob("*.yaml"))
# three ranks and one
UNEQUAL = {
    "split 1 + 3": "{strategy: split, ratios: {actor: 0.25}}",
    "separate 1 + 3": "{strategy: separate, ratios: {actor.generate_sequences: 0.25}}",
    "interleave 3 + 1": "{strategy: interleave, ratios: {actor: 0.75}}",
}
FIVE_MODELS = (  # of which two share ranks with others
    "placement.pools={last: [3]}",
    *(f"models.{role}.pool=last" for role in ("reference", "cost", "cost_critic")),
)
# Each algorithm once. Those with roles, rows or losses of another kind are in stages, or in cp; the others need rows on several ranks.
SHORT = {
    "ppo": "app_interleave",
    "ppo, one model": "pp2 dp2",
    "grpo": "cp2 dp2",
    "dr_grpo": "dp2",
    "rloo": "real_heuristic",
    "reinforce_plus_plus": "deepspeed_chat",
    "reinforce_plus_plus_baseline": "app_flattening",
    "gspo": "cp2",
    "cispo": "app_separate",
    "remax": "hybridflow_v",
    "dapo": "pp2 dp2",
    "distill": "dp2",
    "reward_model": "pp2 dp2",
    "cost_model": "tp2",
    "dpo": "cp2 dp2",
    "kto": "pp2 dp2",
    "orpo": "dp2",
    "simpo": "tp2",
    "online_dpo": "nemo_aligner",
    "safe_rlhf": "openrlhf",
}
LONG = [
    *(("ppo", where) for where in ("tp2 dp2", "app_separate", "deepspeed_chat", "openrlhf", "nemo_aligner", *UNEQUAL)),
    *(("safe_rlhf", where) for where in ("tp2 dp2", "pp2 dp2", "app_separate", "hybridflow_v", "nemo_aligner")),
    *(("kto", "cp2 dp2"), ("distill", "tp2 dp2"), ("dapo", "tp2 dp2"), ("reward_model", "tp2 dp2"), ("remax", "app_separate")),
    *((name, "pp2 dp2") for name in ("ppo", "remax", "gspo", "cispo", "dpo", "online_dpo")),
]


def overrides_of(case: Case, where: str) -> tuple[int, list[str]]:
    """Ranks and overrides."""
    if where in LAYOUTS:
        axes = LAYOUTS[where]
        overrides = [key for role in case.roles for key in layout(role, **axes)]
        overrides += [*(ONE_SCORER if ROLLOUTS[0] in case.more else ()), *(case.cut if "dp" in axes else ())]
        return math.prod(n for axis, n in axes.items() if axis != "zero"), overrides
    if where in UNEQUAL:
        return 4, [f"placement={UNEQUAL[where]}"]
    config = yaml.safe_load((CONFIGS / "placements" / f"{where}.yaml").read_text())
    overrides = [f"placement.strategy={config['placement']['strategy']}"]
    overrides += [f"placement.ratios={{{call}: {ratio}}}" for call, ratio in config["placement"].get("ratios", {}).items()]
    for role in (*case.roles, *case.frozen):
        layouts = config["models"].get("critic" if role == "cost_critic" else role, {})
        for section in ("layout", "generation"):
            overrides += [f"models.{role}.{section}.{key}={value}" for key, value in layouts.get(section, {}).items()]
    return 4, overrides + list(FIVE_MODELS if where == "openrlhf" and "cost_critic" in case.roles else ())


@functools.cache
def run_on_one_rank(directory: Path, name: str) -> tasks.Run:
    return CASES[name].train(directory / f"{name} on one rank".replace(" ", "_"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


def test_every_algorithm_and_every_placement_is_here() -> None:
    assert {Path(CASES[name].file).stem for name in SHORT} | {"quickstart_sft"} == {
        p.stem for p in CONFIGS.glob("quickstart_*")
    }
    assert {*PLACEMENTS, *LAYOUTS} - {"tp2 dp2"} == {*SHORT.values()}


@pytest.mark.parametrize(("name", "where"), [*SHORT.items(), *(pytest.param(*run, marks=pytest.mark.long) for run in LONG)])
def test_the_same_run(directory: Path, name: str, where: str) -> None:
    """Every update has moved the weights, so that more than a start is compared."""
    one = run_on_one_rank(directory, name)
    assert sum(row["step"] > 0 for row in one.metrics) == CASES[name].steps
    norms = [row[key] for row in one.metrics for key in row if key.endswith("/grad_norm")]
    assert len(norms) >= CASES[name].steps and min(norms) > 1e-6
    ranks, overrides = overrides_of(CASES[name], where)
    assert_same_run(one, CASES[name].train(directory / f"{name} {where}".replace(" ", "_"), *overrides, ranks=ranks))


def test_the_multiplier_of_safe_rlhf_is_in_checkpoints(directory: Path) -> None:
    """And it moves. That a resumed run reads a role's state is in test_extensions."""
    run = run_on_one_rank(directory, "safe_rlhf")
    multipliers = [row["safe_rlhf/lambda"] for row in run.metrics]
    assert len(set(multipliers)) == len(multipliers) and run.state["roles"]["lagrange"] == {"lambda": multipliers[-1]}
    assert {"cost/mean", "cost_critic/vf_loss", "critic/vf_loss", "actor/kl"} <= run.metrics[0].keys()
