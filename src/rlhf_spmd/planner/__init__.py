"""Where roles run (F5): from placement settings, and the calls of a step, to the ranks of every role and call. Pure.

``cluster`` has what a strategy gets and gives, ``strategies/<name>.py`` is one function ``place`` each, ``placement`` puts its answer
and the pools that the configuration names together. ``problem`` has what is searched for a plan, ``simulate`` when a plan's calls run,
``search/<name>.py`` is one function ``search`` each. This package must not know workers, algorithms or any role's name.
"""
