"""One page about a run, or about several beside each other: curves, phases, timelines, samples.

rlhf-spmd report runs/quickstart/ppo                                        writes runs/quickstart/ppo/report.html
rlhf-spmd report runs/quickstart/ppo runs/quickstart/grpo out=both.html     compares the two
rlhf-spmd report runs/sweep                                                 compares the runs in a folder: runs/sweep/report.html
rlhf-spmd report --serve runs/quickstart/ppo                                follows it in the browser, until Ctrl-C
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_spmd.process.arguments import Parser, ignore_closed_pipes
from rlhf_spmd.process.command_line import refuse
from rlhf_spmd.telemetry.report import open_server, read_run, render
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE, EXIT_STATUS_FILE, METRICS_FILE, REPORT_FILE, atomic_write_text


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code. Ends the process with 2 and one line for a directory that is no run, an ``out`` that cannot be
    written, or a port that is taken.
    """
    ignore_closed_pipes()
    parser = Parser("report", __doc__)
    parser.add_argument("run", nargs="*", help="a run.dir, finished or not, or a folder of them; out=FILE: where the page goes")
    parser.add_argument(
        "--serve", action="store_true", help="write nothing: show the page on this machine and keep it up to date"
    )
    parser.add_argument("--port", type=int, default=8421, help="of --serve (default: %(default)s; 0: a free one)")
    try:
        arguments = parser.parse_intermixed_args(argv)
    except ValueError as error:
        refuse(error)
    outs = [value.removeprefix("out=") for value in arguments.run if value.startswith("out=")]
    runs = [value for value in arguments.run if not value.startswith("out=")]
    keys = [value for value in runs if "=" in value and not Path(value).exists()]
    try:
        if keys:
            raise ValueError(
                f"{keys[0]}: there is no such key, and no such run directory; allowed are run directories and out=FILE"
            )
        if not runs:
            raise ValueError("no run directory; give the run.dir of a run, as in rlhf-spmd report runs/quickstart/ppo")
        if arguments.serve and outs:
            raise ValueError(f"out={outs[-1]}: --serve writes nothing; leave one of the two out")
        if len(runs) > 1 and not outs and not arguments.serve:
            raise ValueError(f"{len(runs)} directories and no out=FILE; give out=FILE for a page of several")
        directories = [run for folder in runs for run in runs_in(folder)]
        if arguments.serve:
            return serve(directories, arguments.port)
        page = render([read_run(run) for run in directories])
        path = Path(outs[-1] if outs else Path(runs[0]) / REPORT_FILE)
        try:
            atomic_write_text(path, page)
        except OSError as error:
            raise ValueError(f"out={path}: {error.strerror}; give a file in a directory that is there") from error
    except (ValueError, OSError) as error:
        refuse(error)
    print(path)
    return 0


def runs_in(directory: str | Path) -> list[str]:
    """Return the directory of a run itself, or the runs in a folder and one level below. Raises ValueError if there is none."""
    marks = CONFIG_FILE, METRICS_FILE, EXIT_STATUS_FILE
    if not (folder := Path(directory)).is_dir():
        raise ValueError(f"run directory {folder} does not exist; give the run.dir of a run")
    runs = list[str]()
    for depth in ("", "*/", "*/*/"):
        directories = {file.parent for mark in marks for file in folder.glob(depth + mark) if file.is_file()}
        runs += sorted(str(run) for run in directories if not any(run.is_relative_to(outer) for outer in runs))
    if runs:
        return runs
    raise ValueError(
        f"{folder} is no run's directory: it has none of {', '.join(marks)}, nor have folders in it; give a run.dir"
    )


def serve(runs: Sequence[str], port: int) -> int:
    """Serve the page until the user interrupts it."""
    try:
        server = open_server(runs, port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port}: {error}; give another one, or 0 for a free one") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
