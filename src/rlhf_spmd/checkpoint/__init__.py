"""State at rest (F4): a checkpoint is either complete and verified, or it does not exist.

A checkpoint is a new directory per step: safetensors files of boxes of global tensors, a manifest of JSON lines with the hash of every
box, and a COMMIT file written last. It is written in one layout and read in any other. No pickle is ever read or written.

Public: ``save.save_checkpoint``, ``load.load_checkpoint`` with ``save.RoleState``; ``load.find_resumable``, ``load.verify_checkpoint``,
``directory.read_manifest`` (its ``state``); ``export.export_hugging_face``; ``manifest.CheckpointError``. Before writing, it proves
that the run directory still belongs to this job (``telemetry.run_lock``). It does not know engines or roles: it takes shards
(boxes) and tensors by name. Only ``adapters`` and ``export`` know models.
"""
