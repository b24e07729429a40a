#!/usr/bin/env bash
# What to run first on a machine with a GPU, in two parts whose time limits add up to 8.3 and 9.3 minutes:
#
#   bash scripts/gpu_day.sh OUT first         kernels attention nano train_1.7b
#   bash scripts/gpu_day.sh OUT second        grpo prime ppo train_8b nano_8b
#   bash scripts/gpu_day.sh OUT nano ppo      some of them
#   bash scripts/gpu_day.sh --wheels DIR      beforehand, on a machine with a network: what the other one may lack, as wheels
#                                             for Python 3.12 on x86-64 Linux
#
# kernels: those in Triton, compiled, against float64. attention: decoding and prompts alone. nano: nano-vllm's workload with the defaults
# and without graphs. grpo: one step of 0.6B by phase. prime: the shapes that prime-rl publishes. ppo: the quickstart, which learns.
# tests and agreement, which are in neither part: tests/workers/test_gpu.py, and generation's log-probs against training's.
#
# OUT gets summary.txt (a line per part: name, exit status, seconds), a log per part, and results.json with all figures.
# A part that fails or meets its time limit (status 124) does not stop the next one. Packages that the GPU machine lacks come from
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
first=(kernels attention nano train_1.7b) second=(grpo prime ppo train_8b nano_8b)
parts=("${first[@]}" "${second[@]}" tests agreement)
case ${1:-first} in
  first) set -- "${first[@]}" ;;
  second) set -- "${second[@]}" ;;
esac
for part in "$@"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "no part '$part'; there are: ${parts[*]}" >&2; exit 2; }
done
parts=("$@")
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

middle=(qwen3_1.7b) large=(llama_8b:8) served=(qwen3_0.6b) larger=(llama_8b) grown=qwen3_0.6b lora=(qwen3_4b) long=(8 8192 8192) longer=(4 16384 16384)
quick=() steps=() device=cuda peers=(packed_sdpa)
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  middle=(S) large=(S) served=(S) larger=(S) grown=tiny lora=(S) long=(2 64 64) longer=(2 64 64)
  quick=(--quick) steps=(run.steps=2) device=cpu peers=(padded)
fi

launch() { "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m "$@"; }
pytest_here() {
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
  cd "$root" && "$python" -m pytest -p no:cacheprovider -q -rs --durations=10 "${parallel[@]}" "$@"
}
kernels() { pytest_here tests/generation/test_triton.py tests/generation/test_triton_draw.py tests/kernels/test_triton_layers.py tests/kernels/test_head.py; }
tests() { pytest_here tests/workers/test_gpu.py; }
attention() { "$python" "$bench/device.py" attention --device $device "${quick[@]}" --out "$results/attention.json"; }
ppo() {
  "$python" -m rlhf_spmd.data.sort_digits --out runs/quickstart/task || return
  launch rlhf_spmd.sft --config "$root/configs/quickstart_sft.yaml" "${steps[@]}" || return
  launch rlhf_spmd.train --config "$root/configs/quickstart_ppo.yaml" "${steps[@]}"
  local status=$?
  "$python" -m rlhf_spmd.summary runs/quickstart/ppo
  return $status
}
agreement() { "$python" "$bench/device.py" agreement "${quick[@]}" --out "$results/agreement.json"; }
train_1.7b() {
  "$python" "$bench/update.py" --models "${middle[@]}" --dtypes bfloat16 --out "$results/train_1.7b.json" \
    --peers "${peers[@]}" --seconds 5 --timeout 100
}
train_8b() {
  "$python" "$bench/update.py" --models "${large[@]}" --dtypes bfloat16 --optimizer no_masters --micro-tokens 4096 \
    --out "$results/train_8b.json" --peers --seconds 5 --timeout 100
}
prime() {
  local options=(--dtypes bfloat16 --peers --seconds 3 --timeout 60)
  "$python" "$bench/update.py" --models "${served[@]}" --rows "${long[@]}" "${options[@]}" --out "$results/prime_sft.json"
  "$python" "$bench/update.py" --models "${served[@]}" --rows "${longer[@]}" --micro-tokens 16384 "${options[@]}" --out "$results/prime_rl.json"
  "$python" "$bench/update.py" --models "${lora[@]}" --rows "${longer[@]}" --micro-tokens 16384 --lora 16 "${options[@]}" \
    --out "$results/prime_lora.json"
}
grpo() { "$python" "$bench/train.py" step --model $grown --ranks 1 --programs grpo --steps 3 --out "$results/grpo.json"; }
serve_rows() {
  "$python" "$bench/generation.py" --workload nano --dtypes bfloat16 --modes sampled --repeats 1 --seconds 0 --timeout 140 "$@"
}
nano() {
  serve_rows --models "${served[@]}" --engines ours --out "$results/nano.json" && \
    serve_rows --models "${served[@]}" --engines ours --ours enforce_eager=true,steps_per_sync=1 --out "$results/nano_eager.json"
}
nano_8b() { serve_rows --models "${larger[@]}" --engines ours --out "$results/nano_8b.json"; }
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

declare -A limits=([kernels]=120 [attention]=60 [nano]=150 [train_1.7b]=170 [grpo]=120 [prime]=110 [ppo]=120 [train_8b]=90 [nano_8b]=120
  [tests]=300 [agreement]=150)
for part in "${parts[@]}"; do
  limit=${limits[$part]}
  [ "${LIMIT:-$limit}" -ge "$limit" ] || limit=$LIMIT
  started=$SECONDS
  # torchrun ends its ranks within 30 seconds of the signal
  timeout -k 45 "$limit" bash -c "$(declare -p root python bench results middle large served larger grown lora long longer quick steps device peers)
    $(declare -f launch pytest_here serve_rows "$part")
    $part" >"$out/$part.log" 2>&1
  echo "$part $? $((SECONDS - started))" | tee -a "$out/summary.txt"
  gather
done
