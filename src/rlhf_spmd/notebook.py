"""``rlhf_spmd.train(config)``: training in a process that goes on afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.parallel.program import run_program
from rlhf_spmd.parallel.world import Launch, choose_matmul, read_launch


def train(config: Mapping[str, Any]) -> Path:
    """The run that ``config`` describes, nested as a YAML file is, on this process alone. Returns its directory.

    Raises ConfigError, ValueError or DataError for bad input, later what ended the run.
    """
    from rlhf_spmd import train as program  # it imports this module

    if read_launch().size > 1:
        raise ValueError(
            "train(config) is for one rank; under torchrun start the program: torchrun ... -m rlhf_spmd.train --config FILE"
        )
    choose_matmul()
    ready = program.prepare(config, (), 1, launch=Launch())
    try:
        run_program(lambda: ready, program.train, program.settings_of, saves_on_signal=True)
    except SystemExit as ending:  # how a program of one rank ends, after a line about why
        why = ending.__context__
        if isinstance(why, SystemExit):  # of the user's code: the caller must not end well by it
            raise RuntimeError(f"the run was left before its end by SystemExit: {why}") from None
        raise why or ending from None
    return Path(ready.config.run.dir)
