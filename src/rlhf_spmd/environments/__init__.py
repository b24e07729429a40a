"""Environments that answer a model between its turns: tools, simulated users, games.

Floor F1. An environment is an object with ``reset(row)`` and ``step(text)`` (``config.Environment``), one per row. A
built-in one is a file here that exports its class as ``environment``. If there are several, a row's column
``environment`` names its own. This package must not know tokens, batches, ranks or tensors.

Read in this order:

- ``config``: the protocol (``Environment``), settings (``EnvironmentConfig``), and which environment a row has
- ``libraries``: the form ``LIBRARY:NAME`` of rows and environments of other projects
- ``runner``: calls the environments of many rows in threads (``EnvironmentRunner``)

Environments:

- ``calculator``: an example, for word problems
- ``tool_calls``: reads the calls of tools in a turn, in the form of the model's family
- ``tools``: functions that the model calls, and tools of MCP servers (``mcp``)
- ``reasoning_gym``, ``gem``, ``openenv``: those of libraries; ``verifiers``: theirs as an agent
"""
