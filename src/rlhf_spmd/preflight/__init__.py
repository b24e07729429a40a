"""Before a run: from a configuration to a checked ``RunPlan``, before any process group exists.

Floor F8. Nothing here communicates. This package must not know the programs, nor an algorithm by its name.

``prepare.STAGES`` is the list of what happens, in order. Read beside it:

- ``roles``: each role with its model; ``placing``: its ranks and layouts
- ``checks``: rules between sections of the configuration
- ``data``: tokenizers and rows; ``exactness``: whether generation's log-probs serve training
- ``step_graph``: the calls of a step
- ``memory_estimate``: bytes that each rank needs, role by role and call by call (``measure``)
- ``memory_check``: compares these bytes with the devices; decides ``activation_checkpointing=auto``; names settings that would fit
- ``disk``: room for checkpoints
- ``banner``: prints what was decided

Plans, for ``rlhf-spmd plan`` and ``placement.strategy=auto`` (the search itself is in ``planner``):

- ``plan_roles``: calls to plan from roles, and roles as a plan places them
- ``plan_stand_ins``: stand-ins for data, tokenizers and weights, which a plan can do without
- ``plan_profile``: measures this machine
"""
