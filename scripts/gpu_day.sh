#!/usr/bin/env bash
# What to run on a machine with a GPU, in two parts whose time limits add up to 460 and 240 seconds:
#
#   bash scripts/gpu_day.sh OUT first         kernels ranks_pp2 ranks_ep2 ranks_cp2 ranks_tp2 mixtures
#   bash scripts/gpu_day.sh OUT second        train_8b grpo
#   bash scripts/gpu_day.sh OUT nano tests    some of them, or of those that are in neither part
#   bash scripts/gpu_day.sh --wheels DIR      beforehand, on a machine with a network: what the other one may lack, as wheels
#                                             for Python 3.12 on x86-64 Linux
#
# kernels: those in Triton that no GPU has run, compiled, against float64. ranks_*: two ranks on the one GPU over NCCL (2.30 or later;
# NCCL names the library) in one layout, in processes of their own; tp2 with CUDA graphs. mixtures: an update and decoding of four layers
# of Qwen3-30B-A3B. train_8b: with FlashAttention 2, then 3 if it is installed. grpo: steps of 1.7B by phase.
# In neither part: nano, nano_8b and train_1.7b, the benchmarks; tests, tests/workers/test_gpu.py; agreement, generation's log-probs
# against training's.
#
# OUT gets summary.txt (a line per part: name, exit status, seconds), a log per part, and results.json with all figures.
# A part that fails or meets its time limit (status 124) does not stop the next one. Packages that the GPU machine lacks come from
# WHEELS (default: wheels/ here) and go into a directory of their own. PYTHON names the interpreter; LIMIT=SECONDS shortens every part.
# Without a GPU the same parts run on small models, which shows that they start.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -s "$python") # of a virtual environment, whose links say where it is

packages=(omegaconf datasets dill multiprocess xxhash hypothesis sortedcontainers pytest iniconfig pluggy) # each imports as it is named

if [ "${1:-}" = --wheels ]; then
  exec "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "${2:?bash scripts/gpu_day.sh --wheels DIR}" "${packages[@]}"
fi

[[ $# -gt 0 && $1 != -* ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
first=(kernels ranks_pp2 ranks_ep2 ranks_cp2 ranks_tp2 mixtures) second=(train_8b grpo)
parts=("${first[@]}" "${second[@]}" nano nano_8b train_1.7b tests agreement)
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

middle=(qwen3_1.7b) large=(llama_8b:8) served=(qwen3_0.6b) larger=(llama_8b) grown=qwen3_1.7b mixture=(qwen3_30b_a3b:4)
quick=() device=cuda peers=(packed_sdpa) dtype=bfloat16
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  middle=(S) large=(S) served=(S) larger=(S) grown=tiny mixture=(mixture) quick=(--quick) device=cpu peers=(padded) dtype=float32
fi
mkdir -p "$work/site" # FLASH=FA3: torch's attention by another implementation, in every process
cat >"$work/site/sitecustomize.py" <<'END'
import os
if os.environ.get("FLASH"):
    from torch.nn.attention import activate_flash_attention_impl
    activate_flash_attention_impl(os.environ["FLASH"])
END

pytest_here() {
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
  cd "$root" && "$python" -m pytest -p no:cacheprovider -q -rs --durations=10 "${parallel[@]}" "$@"
}
kernels() {
  pytest_here tests/kernels/test_triton_delta.py tests/kernels/test_experts.py tests/kernels/test_routing.py tests/kernels/test_flash_gpu.py \
    tests/generation/test_triton.py
}
two_ranks() {
  RLHF_SPMD_SHARED_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 LD_PRELOAD="${NCCL:-}" pytest_here -s tests/workers/test_two_ranks_gpu.py -k "$1"
}
ranks_pp2() { two_ranks pp2; }
ranks_ep2() { two_ranks ep2; }
ranks_cp2() { two_ranks cp2; }
ranks_tp2() { two_ranks tp2; }
mixtures() {
  "$python" "$bench/update.py" --models "${mixture[@]}" --dtypes $dtype --out "$results/mixtures_update.json" --peers --seconds 3 --timeout 45
  serve_rows --models "${mixture[@]}" --engines ours --out "$results/mixtures_decode.json"
}
tests() { pytest_here tests/workers/test_gpu.py; }
agreement() { "$python" "$bench/device.py" "${quick[@]}" --out "$results/agreement.json"; }
train_1.7b() {
  "$python" "$bench/update.py" --models "${middle[@]}" --dtypes bfloat16 --out "$results/train_1.7b.json" \
    --peers "${peers[@]}" --seconds 5 --timeout 100
}
train_8b() {
  for implementation in "" FA3; do
    FLASH=$implementation "$python" "$bench/update.py" --models "${large[@]}" --dtypes bfloat16 --optimizer no_masters --micro-tokens 4096 \
      --out "$results/train_8b$implementation.json" --peers --seconds 5 --timeout 60
  done
}
grpo() { "$python" "$bench/train.py" step --model $grown --ranks 1 --programs grpo --steps 3 --out "$results/grpo.json"; }
serve_rows() {
  "$python" "$bench/generation.py" --workload nano --dtypes bfloat16 --modes sampled --repeats 1 --seconds 0 --timeout 140 "$@"
}
nano() { serve_rows --models "${served[@]}" --engines ours --out "$results/nano.json"; }
nano_8b() { serve_rows --models "${larger[@]}" --engines ours --out "$results/nano_8b.json"; }
gather() { # all figures so far into one file; what a time limit cut off in the middle stays text
  "$python" - "$results" "$out/results.json" <<'END'
import json, sys
from pathlib import Path
def read(path):
    try:
        return json.loads(path.read_text())
    except ValueError:
        return path.read_text()
Path(sys.argv[2]).write_text(json.dumps({path.stem: read(path) for path in sorted(Path(sys.argv[1]).iterdir())}, indent=1))
END
}

declare -A limits=([kernels]=110 [ranks_pp2]=65 [ranks_ep2]=65 [ranks_cp2]=65 [ranks_tp2]=65 [mixtures]=90 [train_8b]=130 [grpo]=110
  [nano]=80 [nano_8b]=120 [train_1.7b]=170 [tests]=300 [agreement]=150)
for part in "${parts[@]}"; do
  limit=${limits[$part]}
  [ "${LIMIT:-$limit}" -ge "$limit" ] || limit=$LIMIT
  started=$SECONDS
  # torchrun ends its ranks within 30 seconds of the signal
  GPU_DAY_PART=$$-$part timeout -k 45 "$limit" bash -c "$(declare -p root python bench results middle large served larger grown mixture quick device peers dtype)
    $(declare -f pytest_here serve_rows two_ranks "$part")
    $part" >"$out/$part.log" 2>&1
  echo "$part $? $((SECONDS - started))" | tee -a "$out/summary.txt"
  for process in /proc/[0-9]*; do # what has a session of its own heard no signal, and would share the GPU with the next part
    ! grep -qsz "^GPU_DAY_PART=$$-$part\$" "$process/environ" || kill -KILL "${process#/proc/}" 2>/dev/null
  done
  gather
done
