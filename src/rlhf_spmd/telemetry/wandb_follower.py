"""The W&B process, started by logger.py: follows ``metrics.jsonl`` and hands every line to wandb. Imports no other module here.

Standard input: one line of JSON with the order, later one with the exit code. It ends with that line, or when the training
process is gone, and never lives longer than the time limit after that.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

POLL_S = 0.5
LOCAL_TIMEOUT_S = 30.0  # starting offline asks nobody: only a machine that is far too busy makes it slow


def main() -> int:
    """The order comes as the first line of standard input, or after a restart as the argument."""
    order = json.loads(sys.argv[1] if len(sys.argv) > 1 else next_line(timeout_s=None) or "null")
    if order is None:
        return 0
    if len(sys.argv) == 1:
        os.nice(5)  # the ranks of a CPU run need the cores more
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    run = start(order)
    if run is None:
        return 1
    exit_code = follow(run, Path(order["metrics"]), order["offset"])
    # wandb's own limit for the upload exists only in newer versions; what is not uploaded lies in the directory wandb/
    deadline = threading.Timer(order["timeout_s"], _give_up, [order["timeout_s"]])
    deadline.daemon = True
    deadline.start()
    run.finish(exit_code=exit_code)
    deadline.cancel()
    return 0


def start(order: dict[str, Any]) -> Any:
    """A wandb run in the ordered mode; where online does not come up in time, this process begins again offline.

    None without wandb.
    """
    try:
        import wandb
    except ImportError:
        warn("not installed (pip install wandb, or logger.wandb=disabled); metrics go to metrics.jsonl only")
        return None
    mode = order["mode"]
    limit_s = order["timeout_s"] if mode == "online" else max(LOCAL_TIMEOUT_S, order["timeout_s"])
    try:
        run = wandb.init(
            mode=mode,
            project=order["project"],
            entity=order["entity"],
            name=order["name"],
            id=run_id(Path(order["metrics"]).parent),
            resume="allow" if mode == "online" else None,
            dir=str(Path(order["metrics"]).parent),
            config=order["config"],
            settings=wandb.Settings(init_timeout=limit_s, console="off", silent=True),
        )
    except Exception as error:  # a process boundary: whatever wandb raises must not end more than wandb
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        if mode == "online":
            warn(f"online failed ({reason}); going on offline")
            _restart({**order, "mode": "offline"}, wandb.teardown)
        warn(f"{mode} failed ({reason}); metrics go to metrics.jsonl only")
        return None
    if mode == "online":
        print(f"wandb: {run.url}", file=sys.stderr)
    return run


def run_id(run_dir: Path) -> str:
    """The same W&B run after a resume: the id is kept in the run directory."""
    path = run_dir / "wandb" / "run_id"
    if path.exists() and (known := path.read_text().strip()):
        return known
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = os.urandom(5).hex()
    path.write_text(fresh + "\n")
    return fresh


def follow(run: Any, metrics: Path, offset: int) -> int:
    """Log every whole line from byte ``offset`` on until the training process says that it ended, or is gone."""
    parent = os.getppid()
    ended: str | None = None
    with metrics.open("rb") as file:
        file.seek(offset)
        rest = b""
        while True:
            lines = (rest + file.read()).split(b"\n")
            rest = lines.pop()
            for line in lines:
                values = json.loads(line)
                run.log({key: value for key, value in values.items() if value is not None}, step=values["step"])
            if ended is not None:
                return int(json.loads(ended)["exit_code"]) if ended else 1
            ended = next_line(POLL_S)
            if ended is None and os.getppid() != parent:  # a forked child of the training process may hold the pipe open
                ended = ""


def warn(message: str) -> None:
    print(f"wandb: {message}", file=sys.stderr, flush=True)


def next_line(timeout_s: float | None) -> str | None:
    """Of standard input: the next line, "" at its end, None when the time is over. Unbuffered: nothing is read ahead."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return None
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _restart(order: dict[str, Any], teardown: Callable[[], object]) -> NoReturn:
    """This program anew in this process: wandb's service holds on to the id of a run whose start failed."""
    ending = threading.Thread(target=teardown, daemon=True)
    ending.start()
    ending.join(timeout=2.0)
    os.execv(sys.executable, [sys.executable, "-P", __file__, json.dumps(order)])


def _give_up(timeout_s: float) -> None:
    warn(f"upload not finished after {timeout_s:g} s; 'wandb sync' on the run directory's wandb/ sends the rest")
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as failure:  # a process boundary: one line, not a traceback among the lines of the run
        warn(f"stopped ({type(failure).__name__}: {failure}); metrics.jsonl has every step")
        sys.exit(1)
