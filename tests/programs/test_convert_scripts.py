"""``scripts/results/convert_scripts.py`` on scripts in the style of verl's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

HEAD = "set -xeuo pipefail\nMODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}\nACTOR=(actor_rollout_ref.model.path=$MODEL_PATH MORE)\n"
RL = HEAD + 'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=ESTIMATOR data.train_files=/d.parquet "${ACTOR[@]}"\n'
SFT = "torchrun -m verl.trainer.sft_trainer data.train_files=/d.parquet model.path=/m data.messages_key=messages MORE\n"
SCRIPTS = {  # name: text, estimator, further settings
    "good/run.sh": (RL, "grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    "good/sft.sh": (SFT, "", "engine.fsdp_size=4"),
    "news.sh": (RL, "grpo", "actor_rollout_ref.actor.brand_new=1 critic.enable=False"),
    "estimator.sh": (RL, "no_such", ""),
    "fits_not.sh": (RL, "grpo", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"),
    "other.sh": ("python3 -m verl.trainer.main_generation data.path=/d\n", "", ""),
}


@pytest.mark.long
def test_a_directory_of_scripts(tmp_path: Path) -> None:
    for name, (text, estimator, more) in SCRIPTS.items():
        path = tmp_path / "scripts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("ESTIMATOR", estimator).replace("MORE", more))
    command = [sys.executable, str(ROOT / "scripts/results/convert_scripts.py"), str(tmp_path / "scripts")]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["rl", "5", "3", "3", "2", "1"] in lines and ["sft", "1", "1", "1", "1", "1"] in lines
    results = {script["script"]: script for script in json.loads((tmp_path / "out.json").read_text())}
    stopped = {name: script["stopped_by"] for name, script in results.items() if script["stopped_by"]}
    assert stopped == {
        "estimator.sh": "algorithm.adv_estimator",
        "fits_not.sh": "models.actor.generation.pp",  # its product with tp
        "other.sh": "no trainer",
    }
    assert results["news.sh"]["unknown"] == ["actor_rollout_ref.actor.brand_new"]
    assert ["1", "actor_rollout_ref.actor.brand_new"] in lines
