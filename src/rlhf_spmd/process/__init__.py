"""The life of a rank, from its arguments to its exit code.

Floor F3. This package must not know models, roles or algorithms.

- ``arguments``, ``command_line``: the command line of all programs; ``arguments`` needs no torch
- ``launcher``: starts the ranks of one machine
- ``startup_checks``: all ranks agree that their input is good and the same
- ``program``: the process boundary: runs a program and turns any ending into an exit code
- ``board``, ``failure_detector``: heartbeats, and the failure that ends the job
- ``messages``: sealed texts in the store that all ranks share
- ``exit``: classes of endings, lines for people, the exit itself
"""
