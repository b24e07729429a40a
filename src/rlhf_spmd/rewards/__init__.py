"""Scoring text: reward functions, and the processes that run them under a time limit.

Floor 1. A reward function is ``f(prompt, response, row) -> float | dict``; a built-in one is a file here that exports
``score``. :class:`runner.RewardRunner` calls it in worker processes of its own, which can be killed, so that a function that
raises, hangs or crashes costs its row the configured default and nothing else. Knows no models, batches, ranks or tensors;
nothing here imports torch, since the workers import this package and must start fast and small.

Public names: ``config.RewardConfig``, ``config.resolve_reward``, ``runner.RewardRunner``, ``results.RewardResult``,
``results.RewardError``.
"""
