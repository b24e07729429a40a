#!/usr/bin/env bash
# Reward models of what people wrote: sentiment (film reviews, a positive against a negative one) and harmlessness (hh-rlhf's dialogues).
#     bash scripts/results/real_pairs.sh REVIEWS DIALOGUES MODEL
# REVIEWS: a directory with {train,test}.jsonl.gz of "text" and "label" (1 positive); DIALOGUES: one with
# harmless_{train,test}.jsonl.gz of "chosen" and "rejected". SEED=1 is taken from the environment.
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
reviews=$1 dialogues=$2 model=$3
export CUDA_VISIBLE_DEVICES=
root=runs/results
mkdir -p $root/reviews
python - "$reviews" $root/reviews <<'PY'
import gzip, json, sys
for split in ("train", "test"):
    with gzip.open(f"{sys.argv[1]}/{split}.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    good, bad = ([row["text"] for row in rows if row["label"] == label] for label in (1, 0))
    with open(f"{sys.argv[2]}/{split}.jsonl", "w") as out:
        for chosen, rejected in zip(good, bad):
            print(json.dumps({"prompt": "Review: ", "chosen": chosen, "rejected": rejected}), file=out)
PY

train() { # name, training data, held-out data, steps, further settings
    local name=$1 data=$2 held=$3 steps=$4
    shift 4
    rm -rf "$root/$name"
    torchrun --standalone --nproc-per-node "${RANKS:-2}" -m rlhf_spmd.train --config configs/quickstart_reward_model.yaml \
        run.name="$name" run.dir="$root/$name" run.steps="$steps" run.test_freq="$((steps / 3))" run.seed="${SEED:-0}" \
        data.train_batch_size=32 data.path="$data" data.val_path="$held" models.reward.path="$model" \
        models.reward.optim.weight_decay=0.01 "$@"
    python -m rlhf_spmd.summary "$root/$name"
}

train sentiment $root/reviews/train.jsonl $root/reviews/test.jsonl 300 models.reward.optim.lr=5.0e-4
train harmless "$dialogues/harmless_train.jsonl.gz" "$dialogues/harmless_test.jsonl.gz" 111 models.reward.optim.lr=3.0e-4 \
    data.max_length=512
