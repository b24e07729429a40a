"""Where roles and calls should run. Pure.

Floor F5. This package must not know workers, algorithms or any role's name.

Placement, from settings to ranks:

- ``cluster``: what a placement strategy gets and returns
- ``strategies/<name>``: one function ``place`` each
- ``placement``: ranks of each role, from ``placement.pools`` or a strategy

Plans, from the calls of a step to the fastest plan; read in this order:

- ``problem``: the nouns of a plan (option, home, movable call), the search problem, and the simulation of a plan
- ``machine``: devices, hosts and links
- ``shapes``: a model's sizes, a call's rows and its settings, which costs and memory count
- ``costs``, ``profile``: seconds of a call, by formulas or from measured layers
- ``memory``: bytes of a role on a rank; ``preflight/memory_estimate`` adds them up over the roles of a run
- ``planning``: from calls to a problem, and from the best plan to a plan file (``best_plan``)
- ``search/<name>``: one function ``search`` each
- ``plan_file``, ``plan_summary``: ``plan.yaml``, and a plan for people
"""
