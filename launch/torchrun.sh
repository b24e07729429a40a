#!/bin/bash
# One job on one node or on several: starts torchrun with this node's ranks. Every node of the job runs this same command.
#
#   launch/torchrun.sh configs/X.yaml run.dir=runs/x key=value ...                       # one node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 launch/torchrun.sh configs/X.yaml ...         # on host0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 launch/torchrun.sh configs/X.yaml ...         # on host1
#
# Every rank sees all GPUs of its node and takes the one of its number (LOCAL_RANK).
#
# Environment:
#   NPROC_PER_NODE  ranks on this node                     default: its GPUs, or 1 without any
#   NNODES          nodes of the job                       default: 1
#   NODE_RANK       this node's number from 0              default: 0; global ranks follow it, so rank 0 is on node 0
#   MASTER_ADDR     host name or address of node 0         default: 127.0.0.1
#   MASTER_PORT     a port that is free on node 0          default: 29500; two jobs on one host need two ports
#   PROGRAM         Python module (or a .py file) to run   default: rlhf_spmd.train
#   PYTHON          the interpreter of the environment     default: python3 if it has rlhf_spmd, else that of .venv beside launch/
#   SAVE_SECONDS    time for saving after SIGTERM          default: 600; torchrun's own default kills after 30 s
#   START_SECONDS   time in which node 0 must answer       default: 300; torchrun itself would wait for ever
#   CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_ALLOC_CONF, NCCL_GRAPH_REGISTER  for CUDA, see docs/gpus.md; left alone where they are set
#   RLHF_SPMD_KEY   a secret, the same on all nodes        default: ranks share one through a file of run.dir, if it is given
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

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
  has='import importlib.util, sys; sys.exit(importlib.util.find_spec("rlhf_spmd") is None)'
  python3 -c "$has" 2>/dev/null || if [[ -x $venv ]]; then
    PYTHON=$venv
  else
    echo "config error: python3 has no rlhf_spmd, and there is no $venv; activate the environment, or give PYTHON=/path/to/venv/bin/python" >&2
    exit 2
  fi
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # results depend on the thread count, and ranks on one host share its cores
# Before CUDA's first use; the programs set the same for themselves where nothing is set. kernels/devices.py says why.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-32} # hardware queues for the streams of a rank
if [[ -z ${PYTORCH_ALLOC_CONF+set}${PYTORCH_CUDA_ALLOC_CONF+set} ]]; then
  export PYTORCH_ALLOC_CONF=expandable_segments:True NCCL_GRAPH_REGISTER=${NCCL_GRAPH_REGISTER-0}
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-600}

# The store of all ranks lies in torchrun on node 0, with two connections to each: more than the usual 1,024 files from 500 ranks on
ulimit -Sn "$(ulimit -Hn)"

# The port must be free on node 0, and on the other nodes answer as a store does once node 0 has started
where=$MASTER_ADDR:$MASTER_PORT
if ((NODE_RANK == 0)); then
  ! (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null || {
    echo "config error: MASTER_PORT=$MASTER_PORT: another program listens on $where; give a port that is free on node 0" >&2
    exit 2
  }
else
  START_SECONDS=${START_SECONDS:-300}
  connect='import datetime, sys; from torch.distributed import TCPStore as S; host, port, limit = sys.argv[1:]; S(host, int(port), None, False, datetime.timedelta(seconds=int(limit)), False)'
  said=$(timeout "$((START_SECONDS + 60))" "$PYTHON" -c "$connect" "$MASTER_ADDR" "$MASTER_PORT" "$START_SECONDS" 2>&1 >/dev/null) || {
    echo "node $NODE_RANK: no store at $where within $START_SECONDS s; is node 0 started, and does nothing else listen there? Last line: $(tail -n 1 <<<"$said")" >&2
    exit 5
  }
fi

# exec: a signal sent to this script must reach torchrun, which passes SIGTERM on to the ranks
# shellcheck disable=SC2086  # PROGRAM is "-m module" or one path
exec "$PYTHON" -m torch.distributed.run \
  --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
  $PROGRAM ${config[@]+"${config[@]}"} "$@"
