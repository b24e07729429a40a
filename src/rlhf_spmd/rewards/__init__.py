"""Scoring text: reward functions, and the processes that run them under a time limit.

Floor F1. A reward function is ``f(prompt, response, row) -> float | dict``; a built-in one is a file here that exports
``score``. :class:`runner.RewardRunner` calls it in its own worker processes, which can be killed: a function that
raises, hangs or crashes costs its row the configured default and nothing else. Knows no models, batches, ranks or
tensors. Nothing here imports torch, because the workers import this package and must start fast and small.

Public names: ``config.RewardConfig``, ``config.resolve_reward``, ``runner.RewardRunner``, ``results.RewardResult``,
``results.RewardError``.
"""
