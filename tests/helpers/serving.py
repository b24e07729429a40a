"""``serve`` as a program that is asked over HTTP, and as a service in this process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import tasks
from generators import alone
from rlhf_spmd import serve
from rlhf_spmd.agents.http import error_answer, read_body
from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.openai_forms import Dialect
from rlhf_spmd.inference.requests import RequestProcessor

KEY = "a secret of this test"


@contextlib.contextmanager
def program(model: Path, *settings: str, **environment: str) -> Iterator[str]:
    """Yields the address of a program on two ranks, which ends afterwards."""
    command = [
        sys.executable,
        "-m",
        "rlhf_spmd",
        "serve",
        "--nproc-per-node",
        "2",
        f"model.path={model}",
        "port=0",
        "layout.tp=2",
    ]
    process = subprocess.Popen([*command, *settings], env=tasks.environment() | environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        yield next(line for line in lines if "http://" in line).split()[-1]
        process.send_signal(signal.SIGTERM)
        *_, last_line = lines
        assert last_line == "ended\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def ask(address: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def service_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> services.Service:
    """With a step of the generator in each turn."""
    monkeypatch.setattr(services, "TURN_S", 1e-9)
    monkeypatch.setattr(services, "IDLE_S", 1e-3)
    world, settings = alone()[0], [f"model.path={model}", "generation.max_num_seqs=4", "generation.page_size=8"]
    return services.Service(RequestProcessor(serve.prepare(None, settings, world.launch), world), "small")


def arrive(service: services.Service, number: int, dialect: Dialect = "completion", **body: Any) -> Queue[services.Part]:
    """As the endpoint puts it."""
    return arrive_raw(service, number, json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode(), dialect)


def arrive_raw(service: services.Service, number: int, raw: bytes, dialect: Dialect) -> Queue[services.Part]:
    reply: Queue[services.Part] = Queue()
    service.replies[number] = reply.put
    try:
        service.arrivals.put((number, service.read(read_body(raw), dialect)))
    except ValueError as error:
        reply.put(error_answer(error))
    return reply


def turn_until_idle(service: services.Service) -> None:
    while service.running or service.waiting:
        service.turn()


def choices_of(service: services.Service, dialect: Dialect = "completion", **body: Any) -> list[dict[str, Any]]:
    """The first choice in each part of an answer, from its arrival to its end."""
    reply, choices = arrive(service, 0, dialect, **body), list[dict[str, Any]]()
    while True:
        while reply.empty():
            service.turn()
        part = reply.get()
        if part is None:
            return choices
        assert part[0] == 200, part
        choices.append(part[1]["choices"][0])
