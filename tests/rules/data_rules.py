"""What breaks each rule of ``data``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.data.encoding import EncodingConfig

CASES = [
    (
        lambda: check_tree(EncodingConfig(system_prompt="Be brief.", apply_chat_template=False), "data"),
        "data.system_prompt=Be brief., data.apply_chat_template=false: only a chat template writes a system message; set the second "
        "to true, or to auto with chat messages",
    ),
]
