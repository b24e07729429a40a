"""A few lines about a run: reward before and after, samples, where its report and its model are.

rlhf-spmd summary runs/quickstart/ppo
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_spmd.process.arguments import Parser, ignore_closed_pipes
from rlhf_spmd.report import runs_in
from rlhf_spmd.telemetry.summary import summarize


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    ignore_closed_pipes()
    parser = Parser("summary", __doc__)
    parser.add_argument("run_dir", help="the run.dir of a run, finished or not")
    try:
        run_dir = parser.parse_args(argv).run_dir
        if (runs := runs_in(run_dir)) != [str(Path(run_dir))]:
            raise ValueError(f"{run_dir} is no run's directory; runs below it: {', '.join(runs)}")
        print(summarize(run_dir))
    except ValueError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
