"""Checkpoints: any layout in, any layout out, bit for bit; damage and interruption are seen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import save_checkpoint
from ranks import run_ranks
from rlhf_spmd.checkpoint import directory, files, load, save
from rlhf_spmd.checkpoint.directory import committed, read_manifest
from rlhf_spmd.checkpoint.load import find_resumable, load_checkpoint, read_role, verify_checkpoint
from rlhf_spmd.checkpoint.manifest import CheckpointError, StoredBox
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.models.sharding import tensor_shapes
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import RECORDER, Group, solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.telemetry.run_dir import newest_checkpoint
from saved_models import flip_bit, rank_shards

SPEC = ModelSpec("llama", 37, 24, 40, 4, 4, 2, 6, attention_bias=True, tie_word_embeddings=True)
UNTIED = ModelSpec("llama", 37, 24, 40, 4, 4, 2, 6)
KINDS = ("exp_avg", "exp_avg_sq")
STATE = {"loader": {"epoch": 1, "row": 17}, "kl": 0.1 + 0.2, "steps": {"actor": 3}}


def global_value(kind: str, name: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, kind + name)) * 7 + salt)
    return torch.randn(shape, generator=generator)


def filled(shards: dict[str, ParamShard], kind: str, salt: int = 0) -> dict[str, Tensor]:
    tensors = {}
    for name, shard in shards.items():
        tensors[name] = torch.full(shard.shape, torch.nan)
        for box in shard.boxes:
            tensors[name][box.local_slices] = global_value(kind, box.name, box.shape, salt)[box.global_slices]
    return tensors


def by_name(by_kind: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    names = dict.fromkeys(name for tensors in by_kind.values() for name in tensors)
    return {name: {kind: tensors[name] for kind, tensors in by_kind.items() if name in tensors} for name in names}


def state_of(shards: dict[str, ParamShard], salt: int = 0) -> RoleState:
    return RoleState(shards, filled(shards, "param", salt), by_name({kind: filled(shards, kind, salt) for kind in KINDS}))


def blank(shards: dict[str, ParamShard]) -> RoleState:
    def zeros() -> dict[str, Tensor]:
        return {name: torch.zeros(shard.shape) for name, shard in shards.items()}

    return RoleState(shards, zeros(), by_name({kind: zeros() for kind in KINDS}))


def assert_equal(a: RoleState, b: RoleState) -> None:
    for kind, tensors in a.kinds().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, b.kinds()[kind][name]), (kind, name)


def save_alone(run_dir: Path, step: int, spec: ModelSpec = SPEC, keep: int | None = 2, salt: int = 0) -> Path:
    roles = {"actor": state_of(rank_shards(spec, "lm", Layout(), 0), salt)}
    return save_checkpoint(run_dir, step, roles, STATE, solo(), keep)


def save_on_ranks(world: World, run_dir: Path, layout: Layout, spec: ModelSpec) -> str:
    roles = {"actor": state_of(rank_shards(spec, "lm", layout, world.rank))}
    if world.rank >= world.size // 2:  # a role that lives on part of the ranks
        roles["critic"] = state_of(rank_shards(spec, "value", Layout(tp=world.size // 2), world.rank - world.size // 2), salt=5)
    return str(save_checkpoint(run_dir, 3, roles, STATE, world.all))


def load_on_ranks(world: World, directory: Path, layout: Layout, spec: ModelSpec) -> bool:
    shards = rank_shards(spec, "lm", layout, world.rank)
    target = blank(shards)
    load_checkpoint(directory, "actor", target, world.all)
    assert_equal(target, state_of(shards))
    return True


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (UNTIED, Layout()),
        (SPEC, Layout(tp=2)),
        (SPEC, Layout(pp=2, tp=2, dp=2)),
        (SPEC, Layout(dp=3, zero=3)),
        (SPEC, Layout(tp=2, dp=5, zero=1)),
        (SPEC, Layout(pp=2, dp=2, zero=2)),
    ],
    ids=str,
)
def test_any_layout_reads_it(tmp_path: Path, spec: ModelSpec, layout: Layout) -> None:
    """Also a step that was saved before with other values."""
    save_alone(tmp_path, 7, spec, salt=3)
    path = save_alone(tmp_path, 7, spec)
    assert path == tmp_path / "checkpoints" / "step_7" and (tmp_path / "checkpoints" / "latest").read_text() == "step_7"
    assert [c.path for c in committed(tmp_path)] == [path]
    manifest = read_manifest(path)
    assert manifest.state == STATE and manifest.step == 7
    stored = manifest.pieces_of("actor", "param")
    assert {name: pieces[0].shape for name, pieces in stored.items()} == tensor_shapes(spec, "lm")
    for index in range(layout.size):
        shards = rank_shards(spec, "lm", layout, index)
        target = blank(shards)
        read_role(path, manifest, "actor", target)
        assert_equal(target, state_of(shards))


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2, zero=3)], ids=str)
def test_ranks_write_and_others_read(tmp_path: Path, layout: Layout) -> None:
    """Each piece once, and each is verified by one rank, however many there are."""
    path = Path(run_ranks(4, save_on_ranks, tmp_path, layout, SPEC)[0])
    manifest = read_manifest(path)
    assert manifest.roles == ["actor", "critic"] and manifest.world_size == 4
    for kind in ("param", *KINDS):
        for name, pieces in manifest.pieces_of("actor", kind).items():
            assert len({(p.start, p.size) for p in pieces}) == len(pieces), name
    assert all(run_ranks(4, load_on_ranks, path, Layout(pp=4), SPEC))
    critic = blank(rank_shards(SPEC, "value", Layout(), 0))
    load_checkpoint(path, "critic", critic, solo())
    assert_equal(critic, state_of(critic.shards, salt=5))  # type: ignore[arg-type]
    every_piece = sorted(piece for key in manifest.lines for piece in manifest.pieces_in(key))
    for num_ranks in (1, 3, 40, 1000):
        assert sorted(pieces_verified(path, num_ranks)) == every_piece


def pieces_verified(path: Path, num_ranks: int) -> list[StoredBox]:
    read: list[StoredBox] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "read_pieces", lambda _, pieces: read.extend(pieces) or ())
        patch.setattr(load, "run_and_agree", lambda _, work: work())
        for rank in range(num_ranks):
            verify_checkpoint(path, Group("of these", tuple(range(num_ranks)), rank))
    return read


def test_low_precision_and_partial_optimizer_state(tmp_path: Path) -> None:
    shards = rank_shards(UNTIED, "lm", Layout(), 0)
    params = {name: t.bfloat16() for name, t in filled(shards, "param").items()}
    master = {name: t for name, t in filled(shards, "master").items() if "norm" not in name}
    path = save_checkpoint(tmp_path, 1, {"actor": RoleState(shards, params, by_name({"master": master}))}, {}, solo())
    target = RoleState(
        shards,
        {name: torch.zeros_like(t) for name, t in params.items()},
        {name: {"master": torch.zeros_like(t)} for name, t in master.items()},
    )
    load_checkpoint(path, "actor", target, solo())
    assert_equal(target, RoleState(shards, params, by_name({"master": master})))
    wrong = RoleState(shards, {name: t.float() for name, t in params.items()})
    with pytest.raises(CheckpointError, match=r"is BF16, the model's is F32; resume with the dtype"):
        load_checkpoint(path, "actor", wrong, solo())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    for spec, message in (
        (replace(SPEC, num_hidden_layers=5), r"model\.layers\.4\..* lacks"),
        (replace(SPEC, num_hidden_layers=3), r"tensors that the model lacks, such as model\.layers\.3"),
        (replace(SPEC, vocab_size=39), r"embed_tokens\.weight is \(37, 24\), the model's is \(39, 24\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, "actor", blank(rank_shards(spec, "lm", Layout(), 0)), solo())
    shards = rank_shards(SPEC, "lm", Layout(), 0)
    with pytest.raises(CheckpointError, match="holds no role 'critic'; it holds: actor"):
        load_checkpoint(path, "critic", blank(shards), solo())
    master = by_name({"master": filled(shards, "x")})
    with pytest.raises(CheckpointError, match="holds no 'master' of role 'actor'; it holds: exp_avg, exp_avg_sq, param"):
        load_checkpoint(path, "actor", RoleState(shards, filled(shards, "param"), master), solo())
    with pytest.raises(ValueError, match="must be plain JSON"):
        save_checkpoint(tmp_path, 2, {}, {"a": (1, 2)}, solo())
    with pytest.raises(ValueError, match="keep=1 must be at least 2"):
        save_checkpoint(tmp_path, 2, {}, {}, solo(), keep=1)


def test_a_manifest_in_memory_is_read_again_when_its_file_has_changed(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 7)
    manifest = read_manifest(path)
    assert read_manifest(path) is manifest
    text = (path / "manifest.jsonl").read_bytes()
    (path / "manifest.jsonl").write_bytes(text[:-2] + b"  ")
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(path)
    (path / "manifest.jsonl").write_bytes(text)
    os.utime(path / "manifest.jsonl", ns=(0, 0))
    assert read_manifest(path) is not manifest
    (path / next(iter(manifest.files))).write_bytes(b"")
    del manifest
    with pytest.raises(CheckpointError, match="0 bytes instead of"):
        read_manifest(path)


def damage(path: Path, how: str) -> None:
    file = next(path.glob("*.safetensors"))
    if how == "one bit":
        flip_bit(file)
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 4)
    elif how == "file missing":
        file.unlink()
    elif how == "zero tail":
        size = file.stat().st_size
        os.truncate(file, size - 64)
        os.truncate(file, size)
    elif how == "header":
        data = bytearray(file.read_bytes())
        data[20] ^= 1
        file.write_bytes(data)
    elif how == "manifest":
        flip_bit(path / "manifest.jsonl", 40)
    elif how == "commit missing":
        (path / "COMMIT").unlink()
    elif how == "commit a directory":
        (path / "COMMIT").unlink()
        (path / "COMMIT").mkdir()
    elif how in COMMITS:
        (path / "COMMIT").write_bytes(COMMITS[how])
    elif how == "no files":
        shutil.rmtree(path)
        path.mkdir()


COMMITS = {
    "commit garbage": b"\xff\x00{",
    "commit without serial": b'{"step": 2, "manifest_sha256": ""}',
    "commit a list": b"[2]",
    "commit deep": b"[" * 5000 + b"]" * 5000,
}
KINDS_OF_DAMAGE = ["one bit", "truncated", "file missing", "zero tail", "header", "manifest", "no files"]
KINDS_OF_DAMAGE += ["commit missing", "commit a directory", *COMMITS]


@pytest.mark.parametrize("how", KINDS_OF_DAMAGE)
def test_damage_of_every_kind(tmp_path: Path, how: str) -> None:
    first, second = save_alone(tmp_path, 1), save_alone(tmp_path, 2)
    assert find_resumable(tmp_path, solo()).directory == second
    damage(second, how)
    with pytest.raises(CheckpointError, match=str(second)):
        verify_checkpoint(second, solo())
    resumable = find_resumable(tmp_path, solo())
    assert resumable.directory == first
    (warning,) = resumable.warnings
    assert warning.startswith(f"passing over {second}: ") and "\n" not in warning
    for step in (3, 4, 5):  # the run goes on: what is damaged stays for whoever can mend it, and takes no good one's place
        save_checkpoint(tmp_path, step, {}, {}, solo(), keep=2, damaged=resumable.damaged)
        assert first.is_dir() == (step == 3), "of the two that are kept both can be read"
    assert second.is_dir() and [c.step for c in committed(tmp_path) if c.path != second] == [5, 4]
    for path in (tmp_path / "checkpoints").glob("step_[345]"):
        shutil.rmtree(path)
    first = save_alone(tmp_path, 1)
    damage(first, how)
    with pytest.raises(CheckpointError, match=rf"^no checkpoint of {tmp_path} can be read: .*; begin anew in another"):
        find_resumable(tmp_path, solo())


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_first_save_is_no_checkpoint(tmp_path: Path) -> None:
    first = save_alone(tmp_path, 1)
    os.rename(first, first.with_name("step_1.tmp"))
    assert find_resumable(tmp_path, solo()).directory is None  # also where ``latest`` names what somebody has removed
    (first.parent / "latest").unlink()
    assert find_resumable(tmp_path, solo()).directory is None


def test_a_damaged_step_that_is_saved_again_counts_as_kept(tmp_path: Path) -> None:
    first, second = save_alone(tmp_path, 1), save_alone(tmp_path, 2)
    flip_bit(next(second.glob("*.safetensors")))
    damaged = find_resumable(tmp_path, solo()).damaged
    for step in (2, 3):
        save_checkpoint(tmp_path, step, {}, {}, solo(), keep=2, damaged=damaged)
    assert not first.exists() and [c.step for c in committed(tmp_path)] == [3, 2]
    save_checkpoint(tmp_path, 4, {}, {}, solo(), keep=2, damaged=damaged)
    assert [c.step for c in committed(tmp_path)] == [4, 3], "a good checkpoint was kept for ever"


def test_the_good_one_of_a_step_stays_until_another_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that was killed left step_1.old beside step_1, which was damaged then: the run goes on from step_1.old."""
    first = save_alone(tmp_path, 1)
    good = first.with_name("step_1.old")
    shutil.copytree(first, good)
    mark = json.loads((first / "COMMIT").read_text())
    (first / "COMMIT").write_text(json.dumps({**mark, "serial": 2}))
    flip_bit(next(first.glob("*.safetensors")))
    resumable = find_resumable(tmp_path, solo())
    assert resumable.directory == good
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        for step in (2, 1):
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, step, {}, {}, solo(), 2, resumable.damaged)
            assert find_resumable(tmp_path, solo()).directory == good, "the only good one was deleted"
    save_checkpoint(tmp_path, 1, {}, {}, solo(), 2, resumable.damaged)
    assert find_resumable(tmp_path, solo()).directory == first and not good.exists()


def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_alone(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_alone(tmp_path, 3)
    resumable = find_resumable(tmp_path, solo())
    assert resumable.directory == tmp_path / "checkpoints" / "step_3" and resumable.warnings == ()
    save_alone(tmp_path, 4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_3", "step_4"]


def test_links_and_a_stray_manifest(tmp_path: Path) -> None:
    """Checkpoints on another disk, one of them moved to a third, and a manifest of format 1 beside the right one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    moved = save_alone(tmp_path / "run", 1)
    shutil.move(moved, tmp_path / "third")
    moved.symlink_to(tmp_path / "third")
    (moved / "manifest.json").write_text("{}")
    assert find_resumable(tmp_path / "run", solo()).directory == moved
    for step in (1, 2, 3, 4):
        save_alone(tmp_path / "run", step)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["latest", "step_3", "step_4"]
    verify_checkpoint(tmp_path / "third", solo())  # only the link was removed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root.write_text(""), r"checkpoints is not a directory that this user can write to; move it away$"),
        (lambda root: root.symlink_to(root.parent / "gone"), r"is a link to \S+/gone, which does not exist; make that"),
        (lambda root: (root / "latest").mkdir(parents=True), r"latest is a directory, and the run writes a file of"),
    ],
)
def test_what_lies_in_the_way_of_checkpoints_is_told_before_the_first_step(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=message):
        find_resumable(tmp_path, solo())


@pytest.mark.parametrize("content", [b"", b"step_9", b"/", b"../checkpoints/step_1", b"\xff\xfe\x00", None])
def test_what_latest_says_is_not_trusted(tmp_path: Path, content: bytes | None) -> None:
    path = save_alone(tmp_path, 1)
    latest = path.with_name("latest")
    assert directory.named_checkpoint(latest) == path and newest_checkpoint(tmp_path) == path
    latest.unlink()
    if content is None:
        latest.symlink_to("gone")
    else:
        latest.write_bytes(content)
    assert directory.named_checkpoint(latest) in (latest, path.with_name("step_9"))
    assert newest_checkpoint(tmp_path) == find_resumable(tmp_path, solo()).directory == path
    second = save_alone(tmp_path, 2)
    assert directory.named_checkpoint(latest) == second


def forge(path: Path, old: str, new: str) -> None:
    """As one who makes COMMIT fit it."""
    text = (path / "manifest.jsonl").read_text()
    assert old in text
    text = text.replace(old, new)
    (path / "manifest.jsonl").write_text(text)
    mark = {"step": 1, "serial": 1, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / "COMMIT").write_text(json.dumps(mark))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("actor.rank_00000.safetensors", "../x.safetensors", r"manifest\.jsonl: .*'\.\./x\.safetensors' is not a plain"),
        ('["actor", "param", "actor.rank_00000', '["actor", "param", "actor.rank_00001', "lines of other files: .*rank_00001"),
        (
            '\n["actor","param","actor.rank_00000',
            '\n["actor","param","actor.rank_00001',
            "line of 'param' in .*: it has 50 boxes",
        ),
        ("[37,24],[0,0],[37,24]", "[37,24],[1,0],[37,24]", r"piece 'exp_avg/\S+embed_tokens\.weight@1,0\S+ is not possible"),
        ("[37,24],[0,0],[37,24]", "[37,24],[0],[37,24]", "not a line of boxes"),
        ('"F32"', '"F33"', "is not possible"),
        ("[37,24],[0,0],[37,24]", "[1e999,24],[0,0],[37,24]", "not a line of boxes"),
        ('safetensors",[[', f'safetensors",{"[" * 100_000}', "not a line of boxes"),
        ('"step": 1,', '"step": 1e999,', "not a checkpoint manifest"),
        ('"step": 1,', '"step": 7,', "of step 7, which is not the one in COMMIT"),
        ('"world_size": 1,', f'"world_size": {"[" * 100_000},', "not a checkpoint manifest"),
        ('"format": 2', '"format": 3', r"manifest\.jsonl: format 3, but this program reads format 2"),
        ('"lines": [', '"lines": [["actor", "x", "actor.rank_00000.safetensors"], ', "not a checkpoint manifest"),
        ("model.norm.weight", "../x", "unreadable .*exp_avg/../x@0"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = save_alone(tmp_path, 1)
    forge(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(path, solo())


def test_a_line_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Of two with one key the pieces of one would be left out."""
    path = save_alone(tmp_path, 1)
    head, first, *_ = (path / "manifest.jsonl").read_text().splitlines()
    forge(path, f"\n{first}\n", f"\n{first}\n{first}\n")
    key = json.dumps(json.loads(head)["lines"][0])
    forge(path, f'"lines": [{key}', f'"lines": [{key}, {key}')
    with pytest.raises(CheckpointError, match="a line that is there twice"):
        verify_checkpoint(path, solo())


def test_a_checkpoint_of_format_1_is_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    (path / "manifest.jsonl").rename(path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"step_1: format 1, but this program reads format 2$"):
        read_manifest(path)
    with pytest.raises(CheckpointError, match="step_1 is of format 1, which this program does not read; begin anew in another"):
        find_resumable(tmp_path, solo())


def test_interrupted_saves_never_look_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save_alone(tmp_path, 1)
    rename = os.rename

    def interrupt_second(source: Path, target: Path) -> None:
        """The old save of a step is out of the way, and the new one is not yet in its place."""
        interrupt() if str(source).endswith(".tmp") else rename(source, target)

    for step, name, function in ((2, "fsync", interrupt), (2, "rename", interrupt), (1, "rename", interrupt_second)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, function)
            with pytest.raises(KeyboardInterrupt):
                save_alone(tmp_path, step, salt=9)
        there = first if step == 2 else first.with_name("step_1.old")
        assert [c.path for c in committed(tmp_path)] == [there] and find_resumable(tmp_path, solo()).directory == there
        assert (tmp_path / "checkpoints" / f"step_{step}.tmp").is_dir()
    second = save_alone(tmp_path, 2)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_1.old", "step_2"] and find_resumable(tmp_path, solo()).directory == second


def test_a_file_system_that_does_not_sync_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network ones: renames are atomic there all the same, so a save goes through."""
    real = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    verify_checkpoint(save_alone(tmp_path, 1), solo())


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 5):  # 5: a run that fell back and went on from there
        save_alone(tmp_path, step, keep=3)
    assert [c.step for c in committed(tmp_path)] == [5, 30, 20]
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "checkpoints", copied / "checkpoints")
    assert [c.step for c in committed(copied)] == [5, 30, 20]
    save_alone(copied, 6, keep=None)
    assert [c.step for c in committed(copied)] == [6, 5, 30, 20]
    save_alone(tmp_path, 6)
    assert [c.step for c in committed(tmp_path)] == [6, 5]


def fail_on_one_rank(world: World, run_dir: Path) -> str:
    def write(path: Path, *args: Any) -> list[str]:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(save, "write_safetensors", write)
        with pytest.raises(CheckpointError) as failure:
            save_on_ranks(world, run_dir, Layout(dp=2, zero=1), SPEC)
    return str(failure.value)


def test_a_full_disk_on_one_rank_fails_on_all_and_harms_nothing(tmp_path: Path) -> None:
    first = Path(run_ranks(2, save_on_ranks, tmp_path, Layout(dp=2), SPEC)[0])
    messages = run_ranks(2, fail_on_one_rank, tmp_path)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1: ") and "No space left on device" in messages[0] and "intact" in messages[0]
    assert [c.path for c in committed(tmp_path)] == [first] and not list((tmp_path / "checkpoints").glob("*.tmp"))
    verify_checkpoint(first, solo())


def test_a_long_save_is_seen_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk that is written or read counts as progress, and each line of a manifest: a file may take longer than ranks may
    stand still."""
    monkeypatch.setattr(files, "_CHUNK", 64)
    specs = [files.Spec("a", torch.float32, (40,)), files.Spec("b", torch.float32, (3,))]
    before = RECORDER.ticks
    files.write_safetensors(tmp_path / "x", specs, lambda spec: torch.ones(spec.shape))
    assert RECORDER.ticks == before + 4
    files.hash_tensor(torch.ones(40))
    assert RECORDER.ticks == before + 7
    path = save_alone(tmp_path, 1)
    before = RECORDER.ticks
    read_manifest(path)
    assert RECORDER.ticks == before + len((path / "manifest.jsonl").read_bytes().splitlines())
