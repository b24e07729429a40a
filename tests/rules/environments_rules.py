"""What breaks each rule of ``environments``."""

from __future__ import annotations

from rlhf_spmd.environments.config import EnvironmentConfig

GAME = EnvironmentConfig(cls="calculator", timeout_s=20.0)
CASES = [
    (
        lambda: GAME.check_together("environment", 20.0, 0),
        "environment.timeout_s=20.0: other ranks wait for it, and no longer than the program's timeout_s=20.0; lower the first or "
        "raise the second",
    ),
    (
        lambda: GAME.check_together("environments.game", 60.0, 4),
        "environments.game.cls=calculator: its rows stay on their replica, and generation.rebalance_steps=4 moves rows; set the second "
        "to 0",
    ),
    (
        lambda: GAME.check_together("environment", 60.0, 0, partial=True),
        "environment.cls=calculator: its rows end in the step that began them, and data.gen_batch_size is above data.train_batch_size; "
        "leave data.gen_batch_size out",
    ),
]
