#!/usr/bin/env bash
# Set up, check style and types, run the tests. Arguments go to pytest: bash scripts/test.sh -k controller
set -euo pipefail
source "$(dirname "$0")/environment.sh"
ruff check src tests scripts
ruff format --check src tests scripts
mypy
python -m pytest "$@"
