"""Scoring text: reward functions, and the processes that run them under a time limit.

Floor F1. A reward function is ``f(prompt, response, row) -> float | dict``; a built-in one is a file here that exports
``score``. :class:`runner.RewardRunner` calls it in its own worker processes, which can be killed: a function that
raises, hangs or crashes costs its row the configured default and nothing else. Knows no models, batches, ranks or
tensors. Nothing here imports torch, because the workers import this package and must start fast and small.

Read in this order:

1. Settings. ``config``: ``reward.*`` (:class:`~config.RewardConfig`); ``judge``: a model that judges responses.
2. A function's arguments. ``binding``: by their names, of this project, verl or TRL; ``row_values``: what a row offers for them.
3. Calls. ``runner``: :class:`~runner.RewardRunner` deals rows to workers; ``worker``: a worker, as the rank sees it;
   ``worker_process``: the program of its process; ``results``: what comes back, and whether a run can go on with it.
4. Answers. ``answers``: the right ones of a row, and the one that a response states; ``latex``: their spelling. On these: ``math``,
   ``aime``, ``gsm8k``, ``multiple_choice``, ``exact_match``, ``regex``. They return a :class:`~answers.Verdict`, a score with the
   answer that was read. ``auto``: the reward that a row's ``data_source`` names.
5. Programs. ``code``: a row's tests; ``sandbox``: starts and watches a program that is not trusted; ``code_tester``: the program that
   it starts, which restrains itself and runs the tests and the program under test.
6. The rest. ``http``: scores from a server; ``format``, ``length``, ``json_schema``, ``happy_words``; ``eval_metrics``: pass@k
   and similar metrics.
"""
