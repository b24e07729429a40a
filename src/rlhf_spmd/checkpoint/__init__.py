"""State at rest: checkpoints that are either complete and verified or not there. Floor 4.

A checkpoint is a new directory per step: safetensors files of pieces (boxes of global tensors), a manifest of JSON lines with
the hash of every piece, and a COMMIT file written last. It is written in one layout and read in any other. No pickle is
ever read or written.

Public: ``save.save_checkpoint``, ``load.load_checkpoint`` with ``save.RoleState``; ``load.find_resumable``,
``load.verify_checkpoint``, ``directory.read_manifest`` (its ``state``); ``export.export_hugging_face``; ``manifest.CheckpointError``.
It proves that the run directory is still this job's (``telemetry.run_lock``) before it writes there. It does not know engines or
roles: it takes shards (boxes) and tensors by name; ``adapters`` alone knows models, with which it merges.
"""
