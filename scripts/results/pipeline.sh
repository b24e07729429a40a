#!/usr/bin/env bash
# From a pretrained model to RLHF on real samples: SFT, a reward model, PPO with it (Ouyang et al. 2022, arXiv 2203.02155); then Safe-RLHF
# (Dai et al. 2023, arXiv 2310.12773) with a learned reward and a learned cost. What the models never see, a count of words, judges.
#     bash scripts/results/pipeline.sh DATA MODEL STORIES [sft reward ppo | helpful cost safe]
# DATA: as for preferences.sh, with prompts_{train,test}.jsonl; MODEL: a small story model; STORIES: jsonl with "text".
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
data=$1 model=$2 stories=$3
shift 3
export CUDA_VISIBLE_DEVICES=
root=runs/results
seed=${SEED:-0}
launch() { torchrun --standalone --nproc-per-node "${RANKS:-2}" -m "$@"; }

sample() { # name, configuration, steps, further settings: PPO-like training on the story prompts
    local name=$1 config=$2 steps=$3
    shift 3
    rm -rf "$root/$name"
    launch rlhf_spmd.train --config "configs/quickstart_$config.yaml" run.name="$name" run.dir="$root/$name" run.steps="$steps" \
        run.test_freq=10 run.save_freq=0 run.seed="$seed" data.path="$data/prompts_train.jsonl" data.val_path="$data/prompts_test.jsonl" \
        data.train_batch_size=32 data.max_prompt_length=64 data.max_response_length=48 models.actor.path="$root/sft/export" \
        models.actor.optim.lr=3.0e-4 algorithm.ppo_mini_batch_size=16 reward.function=null "$@"
}

judge() { # name, model: mean score of the words that nobody trained on
    rm -rf "$root/judged_$1"
    launch rlhf_spmd.evaluate model.path="$2" data.path="$data/prompts_test.jsonl" reward.function=happy_words \
        sampling.n=4 sampling.max_response_length=48 out="$root/judged_$1"
}

for what in "${@:-sft reward ppo helpful cost safe}"; do
    for one in $what; do
        case $one in
        sft)
            rm -rf "$root/sft"
            launch rlhf_spmd.sft --config configs/quickstart_sft.yaml run.name=sft run.dir="$root/sft" run.steps=60 run.test_freq=0 \
                run.seed="$seed" data.path="$stories" data.text_key=text data.max_length=256 data.train_batch_size=32 \
                models.actor.path="$model" models.actor.random_init=false models.actor.optim.lr=2.0e-4 \
                algorithm.stop_at_reward=null val_prompts=null reward.function=null
            ;;
        reward | helpful | cost) bash "$(dirname "$0")/preferences.sh" "$data" "$model" "$one" ;;
        ppo)
            judge before "$root/sft/export"
            sample ppo ppo 60 reward.model="$root/reward/export" algorithm.kl_ctrl.kl_coef=0.02
            judge ppo "$root/ppo/export"
            ;;
        safe)
            sample safe safe_rlhf 80 reward.model="$root/helpful/export" rewards.cost.model="$root/cost/export" \
                ptx.path="$stories" ptx.text_key=text ptx.max_length=256 ptx.train_batch_size=16 algorithm.kl_ctrl.kl_coef=0.02 \
                algorithm.threshold=-0.5
            ;;
        *) echo "no such part: $one; there are sft, reward, ppo, helpful, cost, safe" >&2 && exit 2 ;;
        esac
    done
done
