#!/usr/bin/env bash
# From nothing to a language model that PPO has improved: on two CPU ranks, without a network model, a GPU or an account.
# Everything it makes lies in runs/quickstart. SEED=1 bash scripts/quickstart.sh repeats it with another seed.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
seed=${SEED:-0}
export CUDA_VISIBLE_DEVICES=  # two CPU ranks, also where there are GPUs
rm -rf runs/quickstart

echo "1/3  task: sort 4 to 14 digits; data and an untrained 1.6 M parameter Llama"
python examples/sort_digits.py --out runs/quickstart/task --seed "$seed"
echo "2/3  SFT until about a quarter of the answers are right"
rlhf-spmd sft --nproc-per-node 2 --config configs/quickstart_sft.yaml run.seed="$seed"
echo "3/3  PPO with actor, critic and reference on two ranks, rewarded for right answers only"
rlhf-spmd train --nproc-per-node 2 --config configs/quickstart_ppo.yaml run.seed="$seed"
python -m rlhf_spmd.summary runs/quickstart/ppo
