#!/usr/bin/env bash
# Tests with the oldest and with the newest versions that pyproject.toml allows; prints the rows of docs/figures/versions.json.
# Both have an environment of their own in runs/versions, made by uv (pip install uv).
#
#   UV_TORCH_BACKEND=cpu bash scripts/versions.sh    # uv's own setting: torch from PyTorch's index of builds for CPUs
#   TORCH=2.13.0+cpu bash scripts/versions.sh        # this torch in both, where no other build for CPUs can be had
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
tests=(config data/test_data.py models/test_families.py models/test_models_weights.py generation/test_generation.py
  programs/test_notebook.py programs/test_command.py checkpoint/test_checkpoint_export.py telemetry/test_telemetry_report.py)
packages=(torch transformers safetensors datasets omegaconf wandb numpy tqdm math-verify starlette uvicorn)
out=runs/versions
mkdir -p "$out"
echo "${TORCH:+torch==$TORCH}" >"$out/constraints.txt"

failed=0
for which in oldest newest; do
  resolution=highest
  [[ $which == newest ]] || resolution=lowest-direct
  python=$out/$which/bin/python
  uv venv -q --clear --python "${PYTHON:-python3}" "$out/$which"
  uv pip install -q --python "$python" --resolution "$resolution" --constraints "$out/constraints.txt" -e .
  uv pip install -q --python "$python" --constraints "$out/constraints.txt" pytest hypothesis
  "$python" -m pytest -p no:cacheprovider "${tests[@]/#/tests/}" >"$out/$which.log" 2>&1 || failed=1
  "$python" -c 'import json, sys; from importlib.metadata import version
which, tests, *packages = sys.argv[1:]
print(json.dumps([which, *map(version, packages), "%d.%d.%d" % sys.version_info[:3], tests]))' \
    "$which" "$(tail -n 1 "$out/$which.log")" "${packages[@]}"
done
exit $failed
