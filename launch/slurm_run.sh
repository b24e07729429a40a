#!/bin/bash
# What both sbatch templates run: one torchrun on each node of the job, signals passed on, requeue and resume.
# Called inside a SLURM allocation with the arguments of launch/torchrun.sh.
#
# Environment (besides launch/torchrun.sh's): RUN_DIR       default: runs/<job name>-<job id>, or run.dir=... among the arguments
#                                             REQUEUE_ON    classes of exit_status.json that put the job back into the
#                                                           queue, default: preempted; "preempted lost" also restarts after
#                                                           a lost rank or node
#                                             MAX_REQUEUES  default: 50
#                                             CONTAINER     words before each node's command: pyxis' options of srun, or
#                                                           apptainer's command (docs/clusters.md); default: none
set -uo pipefail
[[ -n ${SLURM_JOB_ID:-} ]] || { echo "SLURM_JOB_ID is not set: this runs in a job; submit launch/slurm_one_node.sbatch or slurm_multi_node.sbatch" >&2; exit 2; }
cd "${SLURM_SUBMIT_DIR:-.}"

run_dir=${RUN_DIR:-runs/${SLURM_JOB_NAME:-rlhf}-$SLURM_JOB_ID} # a requeued job keeps its number
resume=(run.resume=auto) # a requeued job goes on from its last checkpoint; a new one finds none and starts
given_run_dir=
for argument in "$@"; do
  case $argument in
    run.dir=*) run_dir=${argument#run.dir=} given_run_dir=yes ;;
    run.resume=*) resume=() ;;
  esac
done
[[ -n $given_run_dir ]] || set -- "$@" "run.dir=$run_dir"
status_file=$run_dir/exit_status.json
rm -f "$status_file" # that of the previous start must not be taken for this one's

# Static rendezvous: node 0 of the allocation holds the store and rank 0; one port per job, as jobs may share a host.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
NPROC_PER_NODE=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export MASTER_ADDR MASTER_PORT NPROC_PER_NODE NNODES=$SLURM_JOB_NUM_NODES
# seals what the ranks tell each other: who can reach the store's port has not got it
RLHF_SPMD_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RLHF_SPMD_KEY
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not inherit it from sbatch

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $NNODES node(s) x $NPROC_PER_NODE rank(s), store at $MASTER_ADDR:$MASTER_PORT, run directory $run_dir"

# --kill-on-bad-exit: when one node's ranks have failed, the other nodes' are not left waiting
# shellcheck disable=SC2016,SC2086  # SLURM_NODEID is known on the node; CONTAINER is several words
srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 ${CONTAINER:-} \
  bash -c 'NODE_RANK=$SLURM_NODEID exec bash launch/torchrun.sh "$@"' torchrun "$@" ${resume[@]+"${resume[@]}"} &
step=$!

# The warning before the time limit (USR1), preemption and scancel (TERM): the ranks get SIGTERM, finish their step and save.
pass_on() {
  echo "job $SLURM_JOB_ID: got $1, telling the ranks to save"
  scancel --signal=TERM "$SLURM_JOB_ID" # without --batch: all steps, not this script
}
warned=
trap 'warned=yes; pass_on USR1' USR1
trap 'pass_on TERM' TERM

code=0
while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break # otherwise a signal ended the wait, not the step
done

class=none
if [[ -f $status_file ]]; then
  class=$(sed -n 's/.*"class": *"\([a-z]*\)".*/\1/p' "$status_file")
  code=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$status_file")
fi
if [[ $class == none && $code == 0 ]]; then
  code=1 # the ranks have all left before the end of the run
fi
echo "job $SLURM_JOB_ID ended: class $class, code $code"

# A job that is being cancelled, or that SLURM itself puts back, is no longer RUNNING: leave it alone.
state=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
again=
[[ " ${REQUEUE_ON:-preempted} " != *" $class "* ]] || again=yes
[[ $class != none && $class != signal || -z $warned ]] || again=yes # the warning came while the ranks were starting: nothing to save yet
if [[ -n $again && $state == RUNNING ]]; then
  if ((${SLURM_RESTART_COUNT:-0} < ${MAX_REQUEUES:-50})); then
    echo "job $SLURM_JOB_ID: requeued, it will go on from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # SLURM ends this script
  else
    echo "job $SLURM_JOB_ID: was requeued ${MAX_REQUEUES:-50} times, giving up"
  fi
fi
exit "$code"
