#!/usr/bin/env bash
# What to run first on a machine with a GPU, most valuable first, in at most 25 minutes:
#
#   bash scripts/gpu_day.sh OUT               all parts: tests ppo agreement train_1.7b train_8b nano
#   bash scripts/gpu_day.sh OUT tests ppo     some of them, for a machine that ends every command after some minutes
#   bash scripts/gpu_day.sh --wheels DIR      beforehand, on a machine with a network: what the other one may lack, as wheels
#
# OUT gets summary.txt (a line per part: name, exit status, seconds), a log per part, and results.json with all figures; eight files at
# most. A part that fails or meets its time limit (status 124) does not stop the next one. Packages that the GPU machine lacks come from
# WHEELS (default: wheels/ here) and go into a directory of their own. PYTHON names the interpreter; LIMIT=SECONDS shortens every part.
# Without a GPU the same parts run on small models, which shows that they start.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

packages=(omegaconf datasets dill multiprocess xxhash hypothesis sortedcontainers pytest iniconfig pluggy) # each imports as it is named

if [ "${1:-}" = --wheels ]; then
  exec "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "${2:?bash scripts/gpu_day.sh --wheels DIR}" "${packages[@]}"
fi

[[ $# -gt 0 && $1 != -* ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
parts=(tests ppo agreement train_1.7b train_8b nano)
for part in "$@"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "no part '$part'; there are: ${parts[*]}" >&2; exit 2; }
done
[ $# -eq 0 ] || parts=("$@")
wheels=$(realpath -m "${WHEELS:-$root/wheels}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/results" && cd "$work" || exit 2
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$root/src:$root/tests:$work/site"
bench="$root/scripts/bench" results="$work/results"

lacking=$("$python" -c 'import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if not u.find_spec(n)))' "${packages[@]}")
if [ -n "$lacking" ]; then
  # shellcheck disable=SC2086
  "$python" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels" --target "$work/site" $lacking
fi
{
  echo "# $(date -u +%FT%TZ), $(cd "$root" && git rev-parse --short HEAD 2>/dev/null); installed: ${lacking:-nothing}"
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | sed 's/^/# /' || echo "# no GPU: small models"
  "$python" -c 'import sys, torch, transformers, numpy
print("# python", sys.version.split()[0], *(f"{m.__name__} {m.__version__}" for m in (torch, transformers, numpy)))'
  echo "# part, exit status (124: time limit), seconds"
} | tee "$out/summary.txt"

middle=(qwen3_1.7b) large=(llama_8b) served=(qwen3_0.6b llama_8b) quick=() steps=()
ours=(--ours attention=triton --ours attention=triton,enforce_eager=false,steps_per_sync=8)
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  middle=(S) large=(S) served=(S) quick=(--quick) steps=(run.steps=2) ours=()
fi

launch() { "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m "$@"; }
tests() {
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
  cd "$root" && "$python" -m pytest -p no:cacheprovider -v -rs --durations=0 "${parallel[@]}" tests/workers/test_gpu.py tests/generation/test_triton.py
}
ppo() {
  "$python" -m rlhf_spmd.data.sort_digits --out runs/quickstart/task || return
  launch rlhf_spmd.sft --config "$root/configs/quickstart_sft.yaml" "${steps[@]}" || return
  launch rlhf_spmd.train --config "$root/configs/quickstart_ppo.yaml" "${steps[@]}"
  local status=$?
  "$python" -m rlhf_spmd.summary runs/quickstart/ppo
  return $status
}
agreement() { "$python" "$bench/agreement.py" "${quick[@]}" --out "$results/agreement.json"; }
train_1.7b() {
  "$python" "$bench/train_step.py" --models "${middle[@]}" --dtypes bfloat16 --out "$results/train_1.7b.json" \
    --peers padded packed_sdpa packed_flex compiled_sorted compiled_packed_flex --timeout 150
}
train_8b() {
  "$python" "$bench/train_step.py" --models "${large[@]}" --dtypes bfloat16 --optimizer no_masters --micro-tokens 4096 \
    --out "$results/train_8b.json" --peers sorted compiled_sorted compiled_packed_flex --timeout 150
}
nano() {
  "$python" "$bench/generation.py" --models "${served[@]}" --workload nano --dtypes bfloat16 --modes sampled --out "$results/nano.json" \
    --engines ours transformers_cb "${ours[@]}" --repeats 1 --seconds 0 --timeout 140
}
gather() { # all figures so far into one file; what a time limit cut off in the middle stays text
  cp runs/quickstart/ppo/metrics.jsonl "$results/ppo.jsonl" 2>/dev/null
  "$python" - "$results" "$out/results.json" <<'END'
import json, sys
from pathlib import Path
def read(path):
    text = path.read_text()
    try:
        return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    except ValueError:
        return text
Path(sys.argv[2]).write_text(json.dumps({path.stem: read(path) for path in sorted(Path(sys.argv[1]).iterdir())}, indent=1))
END
}

declare -A limits=([tests]=300 [ppo]=240 [agreement]=150 [train_1.7b]=270 [train_8b]=240 [nano]=300)
for part in "${parts[@]}"; do
  limit=${limits[$part]}
  [ "${LIMIT:-$limit}" -ge "$limit" ] || limit=$LIMIT
  started=$SECONDS
  # torchrun ends its ranks within 30 seconds of the signal
  timeout -k 45 "$limit" bash -c "$(declare -p root python bench results middle large served quick steps ours)
    $(declare -f launch "$part")
    $part" >"$out/$part.log" 2>&1
  echo "$part $? $((SECONDS - started))" | tee -a "$out/summary.txt"
  gather
done
