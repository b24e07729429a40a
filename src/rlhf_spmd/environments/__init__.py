"""Environments that answer a model between its turns: tools, simulated users, games.

Floor F1. An environment is an object with ``reset(row)`` and ``step(text)`` (:class:`config.Environment`), one per row.
A built-in one is a file here that exports its class as ``environment``. If there are several, a row's column
``environment`` names its own. :class:`runner.EnvironmentRunner` calls them in threads. Knows no tokens, batches, ranks
or tensors.

Read in this order:

- ``config``: the protocol (``Environment``), settings (``EnvironmentConfig``), and which environment a row has (``environment_of``)
- ``calculator``: an example; ``tools``: functions that the model calls; ``tool_calls``: the calls in a turn, by family
- ``runner``: many rows at once (``EnvironmentRunner``, ``EnvironmentFailure``)
"""
