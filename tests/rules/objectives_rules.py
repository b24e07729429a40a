"""What breaks each rule of ``objectives``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.objectives.rollout_correction import RolloutCorrectionConfig


def adaptive(**settings: float) -> None:
    check_tree(KLControlConfig(type="adaptive", **settings), "kl_ctrl")  # type: ignore[arg-type]


def corrected(**settings: object) -> None:
    check_tree(RolloutCorrectionConfig(**settings), "corr")  # type: ignore[arg-type]


CASES = [
    (
        lambda: adaptive(kl_coef=0.0),
        "kl_ctrl.kl_coef=0.0, kl_ctrl.type=adaptive: a coefficient of 0 stays 0; start above 0, or set type=fixed",
    ),
    (
        lambda: corrected(bypass_mode=True, rollout_token_veto_threshold=1e-4),
        "corr.bypass_mode=true, corr.rollout_is=null, corr.rollout_rs=null, corr.rollout_token_veto_threshold=0.0001: the "
        "rollout's log-probs are taken for training's, so a correction finds no difference; leave bypass_mode or the "
        "corrections out",
    ),
    (
        lambda: corrected(rollout_rs="token_k1"),
        "corr.rollout_rs=token_k1, corr.rollout_rs_threshold=null: a rejection needs a bound; set rollout_rs_threshold",
    ),
    (
        lambda: corrected(rollout_rs="token_k3", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.1),
        "corr.rollout_rs_threshold_lower=0.1, corr.rollout_rs=token_k3: only a ratio, with _k1, has a lower bound; leave "
        "rollout_rs_threshold_lower out",
    ),
    (
        lambda: corrected(rollout_rs="token_k1", rollout_rs_threshold=0.5),
        "corr.rollout_rs_threshold_lower=null, corr.rollout_rs_threshold=0.5: a row that is right has the ratio 1, which these "
        "bounds reject; let the bounds include 1",
    ),
]
