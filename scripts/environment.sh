# Sourced by the other scripts: a virtual environment in .venv with this package, made once and brought up to date when
# pyproject.toml changes. PYTHON names the interpreter (3.11 or later) to build it with; EXTRAS=dev adds what the tests need.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; set PYTHON" >&2; exit 2; }
stamp=.venv/stamp-$(cat pyproject.toml scripts/environment.sh | cksum | cut -d' ' -f1)
if [ ! -e "$stamp${EXTRAS:+-$EXTRAS}" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    # An exact version first: where an index offers a CPU build of it, that is the one taken, and not gigabytes of CUDA.
    .venv/bin/pip install -q torch==2.13.0 || .venv/bin/pip install -q 'torch>=2.11'
  fi
  .venv/bin/pip install -q -e ".${EXTRAS:+[$EXTRAS]}"
  [ -e "$stamp" ] || rm -f .venv/stamp-*
  touch "$stamp" "$stamp${EXTRAS:+-$EXTRAS}"
fi
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1
