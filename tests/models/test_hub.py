"""Models by their names on the hub: the client's own code, against a server of ours that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tasks
from places import ROOT
from rlhf_spmd.models.hub import FOLDERS, SMALL, local_directory

COMMIT, NAME = "a" * 40, "someone/tiny"


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub(files: Path, asked: list[str]) -> Iterator[str]:
    """Serves the files of one model; ``asked``: what was asked of it."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            name = self.path.rpartition("/")[2]
            if NAME in self.path:
                asked.append(name)
            if self.path.startswith(f"/api/models/{NAME}/tree/"):
                entries = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.read_bytes())}
                    for file in files.iterdir()
                ]
                self.reply(json.dumps(entries).encode())
            elif self.path.startswith(f"/api/models/{NAME}"):
                siblings = [{"rfilename": file.name} for file in files.iterdir()]
                self.reply(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
            elif self.path.startswith(f"/{NAME}/resolve/") and (files / name).is_file():
                self.reply((files / name).read_bytes())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()

        def reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD = answer

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def look_up(cache: Path, endpoint: str, weights: bool = True, name: str = NAME, **environment: str) -> tuple[int, str]:
    """Exit status and what was printed by a process that asks for the model."""
    code = (
        "import sys; from rlhf_spmd.models.hub import local_directory\n"
        f"try: print(local_directory({name!r}, 'models.actor.path', {weights}))\n"
        "except ValueError as error: sys.exit(f'refused: {error}')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    env |= environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, (done.stdout or done.stderr.splitlines()[-1]).strip()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    shutil.copytree(tasks.task() / "actor", tmp_path / "files")
    (tmp_path / "files/pytorch_model.bin").write_bytes(b"a pickle")
    return tmp_path / "files"


def test_a_model_is_downloaded_once(files: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    with hub(files, asked) as endpoint:
        status, small = look_up(tmp_path / "cache", endpoint, weights=False)
        assert status == 0, small
        assert (Path(small) / "config.json").read_bytes() == (files / "config.json").read_bytes()
        assert not [name for name in asked if name.endswith(".safetensors")]
        status, found = look_up(tmp_path / "cache", endpoint)
        assert status == 0 and (Path(found) / "model.safetensors").read_bytes() == (files / "model.safetensors").read_bytes()
        assert (Path(found) / "tokenizer.json").exists() and not (Path(found) / "pytorch_model.bin").exists()
    assert look_up(tmp_path / "cache", endpoint) == (0, found), "from the cache, without a network"
    assert look_up(tmp_path / "cache", endpoint, HF_HUB_OFFLINE="1") == (0, found)


def test_of_folders_only_that_of_named_templates_is_downloaded() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "additional_chat_templates/tool_use.jinja"]
    there = [*wanted, "onnx/config.json", "awq/config.json", "additions/x.jinja", "onnx/model.onnx"]
    assert [*filter_repo_objects(there, allow_patterns=SMALL, ignore_patterns=FOLDERS)] == wanted


def test_processes_of_a_host_download_together_once(files: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    with hub(files, asked) as endpoint:
        look_up(tmp_path / "of_one", endpoint)
        by_one = sorted(asked)
        asked.clear()
        threads = [threading.Thread(target=look_up, args=(tmp_path / "cache", endpoint)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(asked) == by_one, "of all processes one asks the hub"


def test_what_cannot_be_had_is_said_in_one_line(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with hub(files, []) as endpoint:
        status, line = look_up(tmp_path / "cache", endpoint, name="someone/else")
    assert status == 1 and "models.actor.path=someone/else is neither a directory nor a model on the hub" in line
    status, line = look_up(tmp_path / "cache", "http://127.0.0.1:9")
    assert status == 1 and f"hf download {NAME} --local-dir DIR" in line and "cannot be downloaded" in line
    status, line = look_up(tmp_path / "cache", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert status == 1 and "HF_HUB_OFFLINE is set" in line
    (Path(NAME).parent).mkdir()
    # a slip in a path is no name
    for name, words in ((NAME, "where no directory ORGANISATION is here"), ("/nowhere/at/all", "nor the name of a model")):
        with pytest.raises(ValueError, match=words):
            local_directory(name, "models.actor.path", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"base_model_name_or_path": "base"}', "holds adapters of base, not a model"),
        ("{", r"adapter_config\.json: not readable as JSON: Expecting"),
        ("[]", r"adapter_config\.json: holds a JSON list, not an object"),
        ("[" * 900 + "]" * 900, r"adapter_config\.json: not readable as JSON: nested more than 100 levels deep"),
    ],
)
def test_a_directory_of_adapters_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^[^\n]*{words}[^\n]*$"):
        local_directory(str(tmp_path), "model.path")
