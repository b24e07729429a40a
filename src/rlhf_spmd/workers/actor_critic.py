"""Actor and critic in one model (APP's AC-share): one trunk with two heads, and one update of both."""

from __future__ import annotations

from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.critic import CriticWorker


class ActorCriticWorker(ActorWorker, CriticWorker):
    """The value head starts at zero. It is in checkpoints, not in exports."""

    head = "both"
