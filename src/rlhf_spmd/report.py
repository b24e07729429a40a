"""One page about a run, or about several beside each other: curves, phases, timelines, samples.

python -m rlhf_spmd.report runs/quickstart/ppo                                        writes runs/quickstart/ppo/report.html
python -m rlhf_spmd.report runs/quickstart/ppo runs/quickstart/grpo out=both.html     compares the two
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_spmd.telemetry.report import read_run, render
from rlhf_spmd.telemetry.run_dir import REPORT_FILE, atomic_write_text


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 2 with one line for a directory that is not there, or an ``out`` that cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_spmd.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", help="the run.dir of a run, finished or not; out=FILE: where the page is written")
    given = parser.parse_args(argv).run
    outs = [value.removeprefix("out=") for value in given if value.startswith("out=")]
    runs = [value for value in given if not value.startswith("out=")]
    try:
        if not runs or (len(runs) > 1 and not outs):
            raise ValueError(
                f"{len(runs)} runs and no out=FILE; give out=FILE for a page of several runs" if runs else "no run directory"
            )
        page = render([read_run(run) for run in runs])
        path = Path(outs[-1] if outs else Path(runs[0]) / REPORT_FILE)
        atomic_write_text(path, page)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
