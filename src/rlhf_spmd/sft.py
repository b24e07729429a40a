"""Supervised fine-tuning: ``train``, with ``algorithm.name=sft`` where none is named. After ``scripts/quickstart.sh``, which makes
data and a model:

rlhf-spmd sft --nproc-per-node 2 --config configs/quickstart_sft.yaml run.dir=runs/mine models.actor.optim.lr=5e-4
"""

from __future__ import annotations

from functools import partial

from rlhf_spmd.train import keys as train_keys
from rlhf_spmd.train import main as train_main

keys = partial(train_keys, default="sft")
main = partial(train_main, name="sft", about=__doc__, default="sft")

if __name__ == "__main__":
    main()
