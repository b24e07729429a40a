"""Placement strategies: ``place(graph, cluster, roles)`` of each says where every role runs. ``graph()`` traces a step."""
