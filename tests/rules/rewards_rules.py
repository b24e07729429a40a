"""What breaks each rule of ``rewards``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.judge import JudgeConfig

CASES = [
    (
        lambda: check_tree(RewardConfig(data_sources=[]), "reward"),
        "reward.data_sources=[]: no row is scored; name a data source, or leave it out for all",
    ),
    (
        lambda: check_tree(RewardConfig(judge=JudgeConfig("{response}"), retokenize=False), "rewards.quality"),
        "rewards.quality.retokenize=false: a judge reads text through its own tokenizer; leave it out",
    ),
    (
        lambda: check_tree(RewardConfig(strip_reasoning=True, retokenize=False), "reward"),
        "reward.retokenize=false, reward.strip_reasoning=true: a model reads the text that is left; leave the first out",
    ),
    (
        lambda: check_tree(RewardConfig(strip_reasoning=True, function="format"), "reward"),
        "reward.strip_reasoning=true, reward.function=format: no tags are left for the function to find; leave the first out",
    ),
    (
        lambda: check_tree(RewardConfig(function="length", kwargs={"max_length": 5, "min_length": 6}), "reward"),
        "reward.kwargs.min_length=6, reward.kwargs.max_length=5: no response could be as long; lower the first or raise the second",
    ),
    (
        lambda: check_tree(RewardConfig(function="length:overlong", kwargs={"max_length": 5, "buffer": 6}), "reward"),
        "reward.kwargs.buffer=6, reward.kwargs.max_length=5: the penalty would begin below length 0; lower the first or raise the "
        "second",
    ),
    (
        lambda: RewardConfig(function="gsm8k", timeout_s=20.0).check_together("rewards.cost", 20.0),
        "rewards.cost.timeout_s=20.0: other ranks wait for a call, and no longer than run.timeout_s=20.0; lower the first or raise the "
        "second",
    ),
]
