"""What ranks compare before they begin: settings, rows and weights, wherever these lie on their hosts."""

from __future__ import annotations

import json
from pathlib import Path

import tasks
from rlhf_spmd.runtime.alike import run_digests
from rlhf_spmd.train import prepare


def digests(directory: Path, rows: list[dict[str, object]], *more: str) -> dict[str, str]:
    directory.mkdir()
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = tasks.settings(directory / "run", 2, f"data.path={directory / 'prompts.jsonl'}", "data.train_batch_size=4", *more)
    return run_digests(prepare(str(tasks.task() / "ppo.json"), given, 1))


def test_what_ranks_must_have_the_same_of(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"{i}{i}>", "answer": str(i)} for i in range(8)]
    one, same = digests(tmp_path / "a", rows), digests(tmp_path / "b", rows)
    assert one == same  # copies elsewhere
    for name, there, more in (
        ("set of rows (prompts)", [*rows[1:], rows[0]], ()),
        ("set of rows (prompts)", [{**rows[0], "answer": "9"}, *rows[1:]], ()),  # tokens alone do not tell
        ("models.actor.optim.lr", rows, ("models.actor.optim.lr=0.5",)),
        ("models.critic.path (its weights)", rows, (f"models.critic.path={tasks.task() / 'reference'}",)),
    ):
        other = digests(tmp_path / f"{len(list(tmp_path.iterdir()))}", there, *more)
        assert {key for key in {**one, **other} if one.get(key) != other.get(key)} == {name}
