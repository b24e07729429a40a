"""Environments that answer a model between its turns: tools, simulated users, games.

Floor 1. An environment is an object with ``reset(row)`` and ``step(text)`` (:class:`base.Environment`), one for each row. A built-in
one is a file here that exports its class as ``environment``. A row's column ``environment`` says which one it has, if there are
several. :class:`runner.EnvironmentRunner` calls them in threads. Knows no tokens, batches, ranks or tensors.

Public names: ``base.Environment``, ``config.EnvironmentConfig``, ``config.named_environments``,
``config.environment_of``, ``config.resolve_class``, ``tools.Tools``, ``runner.EnvironmentRunner``,
``runner.EnvironmentFailure``.
"""
