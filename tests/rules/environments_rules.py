"""What breaks each rule of ``environments``."""

from __future__ import annotations

from rlhf_spmd.environments.config import EnvironmentConfig

GAME = EnvironmentConfig(cls="calculator", timeout_s=20.0)
CASES = [
    (
        lambda: GAME.check_together("environment", 20.0),
        "environment.timeout_s=20.0: other ranks wait for it, and no longer than the program's timeout_s=20.0; lower the first or "
        "raise the second",
    ),
    (
        lambda: GAME.check_together("environment", 60.0, partial=True),
        "environment.cls=calculator: its rows end in the step that began them, and rollout.in_flight is above data.train_batch_size; "
        "leave rollout.in_flight out",
    ),
]
