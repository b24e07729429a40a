"""What breaks each rule of ``data``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.prompts import DataConfig

CASES = [
    (
        lambda: check_tree(EncodingConfig(system_prompt="Be brief.", apply_chat_template=False), "data"),
        "data.system_prompt=Be brief., data.apply_chat_template=false: only a chat template writes a system message; set the second "
        "to true, or to auto with chat messages",
    ),
    (
        lambda: check_tree(DataConfig(path="x", gen_batch_size=8, train_batch_size=16), "data"),
        "data.gen_batch_size=8, data.train_batch_size=16: the first counts the prompts in flight, of which a step takes the second; "
        "raise the first or leave it out",
    ),
]
