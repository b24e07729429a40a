"""Scoring text: reward functions, and the processes that run them under a time limit.

Floor F1. A reward function is ``f(prompt, response, row) -> float | dict``; a built-in one is a file here that exports
``score``. :class:`runner.RewardRunner` calls it in its own worker processes, which can be killed: a function that
raises, hangs or crashes costs its row the configured default and nothing else. Knows no models, batches, ranks or
tensors. Nothing here imports torch, because the workers import this package and must start fast and small.

Read in this order:

- ``config``: ``reward.*`` (``RewardConfig``); ``binding``: a function's arguments by their names, of this project, verl or TRL
- ``runner``: :class:`~runner.RewardRunner` deals rows to worker processes; ``worker``: one of them; ``results``: what comes back
- built-in rewards: ``gsm8k``, ``math``, ``aime``, ``multiple_choice``, ``exact_match`` and others, on ``answers`` and ``latex``;
  they return a ``Verdict``, a score with the answer that was read
- ``auto``: the reward that a row's ``data_source`` names
- ``code``: tests of programs; ``sandbox`` and ``code_judge`` run them
- ``http``: scores from a server; ``eval_metrics``: pass@k and its kind
"""
