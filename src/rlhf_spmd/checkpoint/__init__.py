"""State at rest: a checkpoint is either complete and verified, or it does not exist.

Floor F4. This package does not know engines or roles: it takes shards (boxes) and tensors by name. Only ``adapters`` and ``export``
know models.

A checkpoint is a new directory per step: safetensors files of boxes of global tensors, a manifest of JSON lines with the hash of every
box, and a COMMIT file written last. It is written in one layout and read in any other. No pickle is ever read or written.

Read in this order:

Checkpoints on disk:

- ``manifest``: what a checkpoint holds, box by box; which rank writes which box; ``CheckpointError``
- ``files``: safetensors files, written and hashed one tensor at a time
- ``directory``: drafts, COMMIT and the rename; which checkpoints there are; old ones are removed

Tensors to checkpoints and back, in any layout:

- ``save``: ``prepare_checkpoint`` of roles (``RoleState``) makes a ``Draft``, whose ``write`` may run beside a step. Before it
  writes, it checks that the run directory is still this job's
- ``load``: ``load_checkpoint``, ``find_resumable``, ``verify_checkpoint``

Checkpoints to Hugging Face directories:

- ``adapters``: low-rank adapters, in PEFT's form or added to the weights
- ``export``: a role's model
"""
