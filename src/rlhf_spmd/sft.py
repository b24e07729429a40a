"""Supervised fine-tuning: ``train``, with ``algorithm.name=sft`` where none is named. After ``scripts/quickstart.sh``, which makes
data and a model:

rlhf-spmd sft --nproc-per-node 2 --config configs/quickstart_sft.yaml run.dir=runs/mine models.actor.optim.lr=5e-4
"""

from __future__ import annotations

from functools import partial

from rlhf_spmd import train

keys = partial(train.keys, default="sft")
main = partial(train.main, name="sft", about=__doc__, default="sft")

if __name__ == "__main__":
    main()
