"""Before a run: from a configuration to a checked ``RunPlan``, before any process group exists.

Floor F8. No stage communicates; only ``plan_profile``, which the program ``plan`` calls, measures on ranks. This package must not
know the programs.

Read in this order. The stages and what they call:

- ``prepare``: ``STAGES`` lists what happens, in order
- ``roles``: each role with its model; ``placing``: its ranks and layouts
- ``checks``: rules between sections of the configuration
- ``data``: tokenizers, lengths and rows; ``exactness``: whether generation's log-probs serve training
- ``step_graph``: the calls of a step, and what they say about settings
- ``banner``: the lines that a run begins with

Whether the run fits:

- ``memory_check``: compares the memory that ranks need with their devices; decides ``activation_checkpointing=auto``; names settings
  that would fit
- ``memory_estimate``: adds up the memory of each rank over its roles; ``role_memory``: the memory of one role
- ``disk``: room for checkpoints and exports

Plans, for ``rlhf-spmd plan`` and ``placement.strategy=auto`` (the search itself is in ``planner``):

- ``plan_roles``: calls to plan from roles, and roles as a plan places them
- ``plan_stand_ins``: stand-ins for data, tokenizers and weights, which a plan can do without
- ``plan_profile``: measures this machine
"""
