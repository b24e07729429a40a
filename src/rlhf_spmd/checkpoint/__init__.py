"""State at rest: a checkpoint is either complete and verified, or it does not exist.

Floor F4. This package does not know engines or roles: it takes shards (boxes) and tensors by name. Only ``adapters`` and ``export``
know models.

A checkpoint is a new directory per step: safetensors files of boxes of global tensors, a manifest of JSON lines with the hash of every
box, and a COMMIT file written last. It is written in one layout and read in any other. No pickle is ever read or written.

Read in this order:

- ``manifest``: what a checkpoint holds, piece by piece; ``CheckpointError``
- ``files``: writes that survive a crash
- ``directory``: drafts, COMMIT and the rename; old checkpoints are removed
- ``save``: ``prepare_checkpoint`` of roles (``RoleState``) makes a ``Draft``, whose ``write`` may run beside a step. Before it
  writes, it proves that the run directory is still this job's
- ``load``: ``load_checkpoint`` into any layout, ``find_resumable``, ``verify_checkpoint``
- ``export``, ``adapters``: Hugging Face directories; adapters in PEFT's form
"""
