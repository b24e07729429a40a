"""Where roles and calls should run. Pure, but for reading and writing plans and profiles.

Floor F5. This package must not know workers, algorithms or any role's name.

Placement, from settings to ranks:

- ``cluster``: what a placement strategy gets and returns
- ``strategies/<name>``: one function ``place`` each
- ``placement``: ranks of each role, from ``placement.pools`` or a strategy

Plans, from the calls of a step to the fastest plan. ``best_plan`` does it in four steps: the *calls* of a traced step get *options*,
which are layouts and settings with predicted seconds and bytes; both make a *problem*; a *search* picks ranks and an option for
each call; the choices are written as ``plan.yaml``.

- ``problem``: the nouns of a plan (option, home, movable call), the search problem, and the simulation of a plan
- ``machine``: devices, hosts and links
- ``shapes``: a model's sizes, a call's rows and its settings, which costs and memory count
- ``costs``, ``profile``: seconds of a call, by formulas or from measured layers
- ``memory``: bytes of a role on a rank; ``preflight/memory_estimate`` adds them up over the roles of a run
- ``model_call``: a call that is planned, and its layouts
- ``device_times``: seconds of a call on ranks of several kinds, among which rows are dealt by speed
- ``options``: the options of a call
- ``search/<name>``: one function ``search`` each
- ``plan_file``, ``plan_summary``: ``plan.yaml``, and a plan for people
- ``planning``: ``best_plan``, from calls to a plan file
"""
