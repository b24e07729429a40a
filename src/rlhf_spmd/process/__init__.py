"""The life of a rank, from its arguments to its exit code.

Floor F3. This package must not know models, roles or algorithms.

In reading order. From the command line to a rank:

- ``arguments``, ``command_line``: the options of all programs; ``arguments`` needs no torch
- ``launcher``: starts the ranks of one machine
- ``program``: the process boundary (``run_program``): runs a program and turns any ending into an exit code

Before the program's body:

- ``startup_checks``, ``input_digests``: all ranks agree that their input is good and the same
- ``messages``: signed texts in the store that all ranks share

Failures:

- ``board``: the error board: publishes this rank's heartbeat and the one failure that ends the job
- ``failure_detector``: judges the heartbeats of the ranks
- ``exit``: classes of endings, lines for people, the exit itself

When a rank dies:

1. ``program``: a rank whose connection to the dead rank breaks raises an exception. ``_fail`` classifies it and waits in
   ``Board.await_verdict`` for the real cause, up to 15 s. It marks the job as suspect in the store, so 6 s of silence suffice
   instead of 20 s. Only if no cause comes does it post its own failure.
2. ``failure_detector``: rank 0 misses the heartbeats of the dead rank, and ``Watch.judge`` returns a ``Finding``. Under
   ``launcher``, ``_Job.handle_ended_ranks`` sees the process end first.
3. ``board``: ``Board._post`` puts the failure into the store; the first one counts. The rank that posted it prints one line
   and writes exit_status.json (``exit.announce``, ``exit.record_status``).
4. ``board``: the thread of every rank reads the failure within half a second. ``Board._end_from_thread`` writes stacks, kills a
   stopped process on the same host, and waits up to 3 s for the main thread and the other ranks.
5. ``exit``: ``end_process`` ends each rank with the failure's exit code.
"""
