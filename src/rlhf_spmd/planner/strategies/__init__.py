"""Placement strategies: one function ``place(graph, cluster, roles)`` each, which returns the ranks of every role. Pure.

``graph()`` traces a step; ``planner/cluster.py`` describes the arguments. From the simplest on:

- ``colocate``: every role on all ranks
- ``separate``: generation on other ranks than all else
- ``split``: the policy's side and the other side
- ``standalone``: every model on its own ranks
- ``interleave``: generation on all ranks; roles that do not wait for each other on disjoint ranks
"""
