"""``torchrun ... -m rlhf_spmd.sft --config configs/X.yaml key=value ...``: :mod:`rlhf_spmd.train` with ``algorithm.name=sft``."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_spmd.train import main as train_main


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: ``--config FILE`` and overrides such as ``models.actor.optim.lr=1e-3``."""
    train_main(argv, name="sft", default="sft")


if __name__ == "__main__":
    main()
