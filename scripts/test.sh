#!/usr/bin/env bash
# Set up, check style and types, run the tests: the short tier, or with --all every test. Other arguments go to pytest:
# bash scripts/test.sh -k controller
set -euo pipefail
EXTRAS=dev source "$(dirname "$0")/environment.sh"
# Torch for CPUs comes without Triton (188 MB); the tests run its kernels in its interpreter, and skip them where it cannot be had.
python -c 'import triton' 2>/dev/null || pip install -q triton==3.6.0 || true
unset PYTHONDONTWRITEBYTECODE  # or each of a thousand processes compiles the sources again
tier=(-m "not long")
if [ "${1:-}" = --all ]; then tier=() && shift; fi
ruff check src tests scripts examples
ruff format --check src tests scripts examples
mypy &
types=$!
trap 'kill $types 2>/dev/null || true' EXIT
# Ranks of tests are CPU ranks, also where there are GPUs. Two files at a time: a test with one rank leaves a core idle. The longest
# files come first (tests/conftest.py), which pytest would put behind those of more tests.
CUDA_VISIBLE_DEVICES= python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${tier[@]}" "$@"
wait $types
if [ -e /dev/nvidiactl ]; then python -m pytest tests/workers/test_gpu.py tests/generation/test_triton.py; fi
