#!/usr/bin/env bash
# Reward, helpfulness and cost models and DPO on pairs of real samples, each with its held-out accuracy.
#     bash scripts/results/preferences.sh DATA MODEL [reward helpful cost dpo]
# DATA: a directory with happy_{train,test}.jsonl.gz (prompt, chosen, rejected) and safe_{train,test}.jsonl.gz (PKU-SafeRLHF's fields);
# MODEL: the Hugging Face model that wrote the samples. RANKS=2 and SEED=1 are taken from the environment.
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
data=$1 model=$2
shift 2
export CUDA_VISIBLE_DEVICES=

train() { # name, configuration, role, pairs, steps, learning rate
    local dir="runs/results/$1"
    rm -rf "$dir"
    torchrun --standalone --nproc-per-node "${RANKS:-1}" -m rlhf_spmd.train --config "configs/quickstart_$2.yaml" \
        run.name="$1" run.dir="$dir" run.steps="$5" run.test_freq="$(($5 / 3))" run.seed="${SEED:-0}" data.train_batch_size=32 \
        data.path="$data/$4_train.jsonl.gz" data.val_path="$data/$4_test.jsonl.gz" data.append_eos="${EOS:-true}" \
        models."$3".path="$model" models."$3".optim.lr="$6" models."$3".optim.weight_decay=0.01
    python - "$dir" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
for row in rows:
    found = {key: round(row[key], 4) for key in row if key.startswith("val/") and "accurac" in key or key == "val/loss"}
    if found:
        print(sys.argv[1], "step", int(row["step"]), found)
PY
}

for what in "${@:-reward helpful cost dpo}"; do
    for one in $what; do
        case $one in
        reward) train reward reward_model reward happy 288 5.0e-4 ;;
        helpful) train helpful reward_model reward safe 426 5.0e-4 ;;
        cost) train cost cost_model cost safe 426 5.0e-4 ;;
        dpo) train dpo dpo actor happy 288 2.0e-4 ;;
        *) echo "no such run: $one; there are reward, helpful, cost, dpo" >&2 && exit 2 ;;
        esac
    done
done
