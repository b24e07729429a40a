"""State at rest: checkpoints that are either complete and verified or not there. Floor 4.

A checkpoint is a new directory per step: safetensors files of pieces (boxes of global tensors), a JSON manifest with
the hash of every piece, and a COMMIT file written last. It is written in one layout and read in any other. No pickle is
ever read or written.

Public: :func:`save_checkpoint`, :func:`load_checkpoint` with :class:`RoleState`; :func:`find_resumable`,
:func:`verify_checkpoint`, :func:`read_manifest` (its ``state``); :func:`export_hugging_face`; :class:`CheckpointError`.
It does not know models, engines or roles: it takes shards (boxes) and tensors by name.
"""

from rlhf_spmd.checkpoint.directory import committed, read_manifest, step_directory
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.checkpoint.load import Resumable, find_resumable, load_checkpoint, verify_checkpoint
from rlhf_spmd.checkpoint.manifest import CheckpointError, Manifest
from rlhf_spmd.checkpoint.save import RoleState, save_checkpoint

__all__ = [
    "CheckpointError",
    "Manifest",
    "Resumable",
    "RoleState",
    "committed",
    "export_hugging_face",
    "find_resumable",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "step_directory",
    "verify_checkpoint",
]
