"""Environments that answer a model between its turns: tools, simulated users, games.

Floor 1. An environment is an object with ``reset(row)`` and ``step(text)`` (:class:`base.Environment`), one for each row. A built-in
one is a file here that exports its class as ``environment``. :class:`runner.EnvironmentRunner` calls them in threads. Knows no
tokens, batches, ranks or tensors.

Public names: ``base.Environment``, ``config.EnvironmentConfig``, ``config.resolve_class``, ``runner.EnvironmentRunner``,
``runner.EnvironmentFailure``.
"""
