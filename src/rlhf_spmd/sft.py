"""Supervised fine-tuning: ``train`` with ``algorithm.name=sft``. After ``scripts/quickstart.sh``, which makes data and a model:

torchrun --nproc-per-node 2 -m rlhf_spmd.sft --config configs/quickstart_sft.yaml run.dir=runs/mine models.actor.optim.lr=5e-4
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_spmd.train import main as train_main


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: ``--config FILE`` and overrides such as ``models.actor.optim.lr=1e-3``."""
    train_main(argv, name="sft", about=__doc__, default="sft")


if __name__ == "__main__":
    main()
