"""Supervised fine-tuning: ``train`` with ``algorithm.name=sft``. After ``scripts/quickstart.sh``, which makes data and a model:

rlhf-spmd sft --nproc-per-node 2 --config configs/quickstart_sft.yaml run.dir=runs/mine models.actor.optim.lr=5e-4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_spmd import train
from rlhf_spmd.config.keys import Key


def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
    """See :func:`train.keys`."""
    return train.keys(overrides, "sft")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: ``--config FILE`` and overrides such as ``models.actor.optim.lr=1e-3``."""
    train.main(argv, name="sft", about=__doc__, default="sft")


if __name__ == "__main__":
    main()
