"""Environments of verifiers 0.4, which ask the model over HTTP: each is an agent. ``environment=verifiers:NAME``.

``args`` is the library's own block ``env``: ``taskset``, ``agent`` and so on. ``select`` chooses tasks, as the library's does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from threading import Lock, Thread
from typing import Any

from rlhf_spmd.environments.libraries import LIBRARIES, Source, import_library, read_source, source_of

MODEL = "actor"
LOCK = Lock()
NO_KEY = "RLHF_SPMD_NO_KEY"  # a variable that nobody sets: the secret of an episode is in its address


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a taskset."""
    for task in _tasks(str(source)):
        yield {"prompt": task.data.prompt_text or task.data.name or source.name, "answer": None}


async def run(base_url: str, row: Mapping[str, Any]) -> float:
    """Run an episode; the agent of ``agent.run``. Returns the mean reward of its trained traces.

    Raises RuntimeError for an episode that failed.
    """
    with LOCK:  # each agent has a thread and a loop of its own
        loop = _loop()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_episode(base_url, row), loop))


async def _episode(base_url: str, row: Mapping[str, Any]) -> float:
    vf, source, index = _library(), source_of(row), row["index"]
    environment = vf.load_environment(_config(source))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
    async with environment.serving():
        episode = await environment.run_episode(_tasks(str(source))[index], vf.ModelContext(model=MODEL, client=client))
    if not episode.ok:
        errors = [error for part in (episode, *episode.traces) for error in part.errors]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error is given"
        raise RuntimeError(f"task {index} of {source} failed: {reason}")
    rewards = [float(trace.reward) for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        raise RuntimeError(f"task {index} of {source} has no trace that may be trained on")
    return sum(rewards) / len(rewards)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all episodes: the library's locks belong to one."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _library() -> Any:
    return import_library("verifiers.v1", LIBRARIES["verifiers"])


def _config(source: Source) -> Any:
    """Return the library's configuration of an environment. Raises pydantic's ValueError."""
    args = {key: value for key, value in source.args.items() if key != "select"}
    taskset = {**args.pop("taskset", {}), "id": source.name}
    return _library().resolve_env_config({**args, "taskset": taskset})


@lru_cache
def _tasks(path: str) -> list[Any]:
    """Return the tasks of a source. Raises ValueError for endless ones."""
    vf, source = _library(), read_source(path)
    taskset = vf.load_taskset(_config(source).taskset).select(vf.SelectConfig(**source.args.get("select", {})))
    if not taskset.bounded:
        raise ValueError(f"{path} has no end; give environment.args.select.limit")
    return list(taskset)
