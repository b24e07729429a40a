"""Where roles and calls should run (F5): from placement settings to ranks, and from the calls of a step to the fastest plan. Pure.

Placement: ``cluster`` has what a strategy gets and returns, each ``strategies/<name>.py`` is one function ``place``, and ``placement``
joins a strategy's answer with the pools that the configuration names.

Plans: ``planning`` turns calls into a ``problem`` and a found plan into a ``plan_file``; ``plan_page`` shows it. Each
``search/<name>.py`` is one function ``search``. ``costs`` and ``profile`` have seconds, ``memory`` has bytes, both over ``shapes``;
``machine`` describes devices.

This package must not know workers, algorithms or any role's name.
"""
