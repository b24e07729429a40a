#!/bin/bash
# One job on one node or on several: starts torchrun with this node's ranks. Every node of the job runs this same command.
#
#   launch/torchrun.sh configs/X.yaml run.dir=runs/x key=value ...                       # one node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 launch/torchrun.sh configs/X.yaml ...         # on host0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 launch/torchrun.sh configs/X.yaml ...         # on host1
#
# Environment:
#   NPROC_PER_NODE  ranks on this node                     default: its GPUs, or 1 without any
#   NNODES          nodes of the job                       default: 1
#   NODE_RANK       this node's number from 0              default: 0; global ranks follow it, so rank 0 is on node 0
#   MASTER_ADDR     host name or address of node 0         default: 127.0.0.1
#   MASTER_PORT     a port that is free on node 0          default: 29500; two jobs on one host need two ports
#   PROGRAM         Python module (or a .py file) to run   default: rlhf_spmd.train
#   PYTHON          the interpreter of the environment     default: python3
#   SAVE_SECONDS    time for saving after SIGTERM          default: 600; torchrun's own default kills after 30 s
set -euo pipefail

if (($# == 0)); then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
  exit 2
fi
config=()
if [[ $1 != *=* && $1 != -* ]]; then # the first argument is the configuration file, the others are overrides
  [[ -f $1 ]] || { echo "config error: $1: no such file; give a configuration file, then overrides such as run.steps=20" >&2; exit 2; }
  config=(--config "$1")
  shift
fi

NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
if [[ -z ${NPROC_PER_NODE:-} ]]; then
  NPROC_PER_NODE=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
  ((NPROC_PER_NODE > 0)) || NPROC_PER_NODE=1
fi
PROGRAM=${PROGRAM:-rlhf_spmd.train}
[[ $PROGRAM == *.py ]] || PROGRAM="-m $PROGRAM"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # results depend on the thread count, and ranks on one host share its cores
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-600}

# The store of all ranks lies in torchrun on node 0, with two connections to each: more than the usual 1,024 files from 500 ranks on
ulimit -Sn "$(ulimit -Hn)"

# exec: a signal sent to this script must reach torchrun, which passes SIGTERM on to the ranks
# shellcheck disable=SC2086  # PROGRAM is "-m module" or one path
exec "${PYTHON:-python3}" -m torch.distributed.run \
  --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
  $PROGRAM ${config[@]+"${config[@]}"} "$@"
