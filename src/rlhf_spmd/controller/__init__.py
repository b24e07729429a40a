"""The in-process controller (F4): every rank runs the same script, and data travel from the ranks of one call to those of the next.

There is no controller process. Every rank makes the same calls in the same order, so each derives alone what it sends and receives.
One step, with the actor on ranks 0 and 1 and the reward on rank 2::

                ranks 0 and 1 (actor)                               rank 2 (reward)
    trace       script(): calls record nodes, nothing is computed   the same graph: generate -> score -> update
    run         script() again, for real                            script() again, for real
    compute     generate, rows 0 to 7                               generate returns a reference at once; score waits for rows
    push        response_ids and token counts  -------------------> score has all it lacks
    compute     update waits for scores                             score, rows 0 to 7
    push        update has all it lacks  <------------------------- scores
    compute     update                                              update returns at once; the script has ended
    release     no variable refers to the rows any more: their data are freed; all sends have been received

Words:

- *role*: a part of an algorithm, such as the actor: a :class:`Worker`, the same object on every rank. *pool*: the ranks on which it
  lives. *member*: one of these ranks; it holds a part of the role's model.
- *script*: the Python function that makes the calls of a step, such as ``step`` in ``algorithms/ppo.py``.
- *call*: one use of a role's registered method. Every rank makes it, members compute it. ``seq`` is its number in the run, ``node``
  its place in the traced graph.
- *reference*: what a call returns at once: ids of rows with fields, without data (:class:`Reference`).
- *row*: a prompt, or a prompt with one response; found by its id. *group*: the rows of one prompt. *field*: a value for each row, by
  name. *shard*: the rows of a field that one call made.
- *producer*: the call that made a field. *consumer*: a call that takes it.
- *replica*: the members that together hold one copy of the model. *part*: the rows that one replica computes in a call. *holder*: a
  rank that has a part's results after the call.
- *mini-batch*: the groups of one optimizer step. *chunk*: the groups that leave generation together, while the rest are generated.

Files in reading order. They import each other in this direction only.

Which rank computes what:

- ``protocols``: pools; which part of a call's rows each member computes
- ``rows``: which row is in which part and mini-batch

What the script says:

- ``signature``: what a method takes and makes
- ``call``: the record of a call: its inputs, its data; the graph of a script
- ``reference``: operations on rows and fields that touch no data
- ``versions``: which weights a generate call takes

How data move:

- ``transport``: messages between ranks
- ``data_router``: what is pushed or pulled, from whom to whom
- ``streaming``: calls on rows that are still being generated

What runs:

- ``controller``: traces and runs a script; opens with the rules that hold
- ``worker``: ``@register``, which makes a method a call

Rank 0 gets reports, and passes on what a script reads with :meth:`Controller.get` and :meth:`Controller.get_field`; other data
never go through it. This package knows rows, ranks and layouts. It must not know models, losses or weights.
"""

from rlhf_spmd.controller.call import CallRecord, CallStats, Graph
from rlhf_spmd.controller.controller import Controller, ordered_values
from rlhf_spmd.controller.protocols import (
    ALL_TO_ALL,
    DP,
    MICRO_DP,
    ONE_TO_ALL,
    PP_AS_DP,
    PP_ONLY,
    RANK_ZERO,
    THREE_D,
    GroupShape,
    Protocol,
    RankSpeeds,
    ResourcePool,
)
from rlhf_spmd.controller.reference import Reference, source
from rlhf_spmd.controller.rows import PartitionSpec
from rlhf_spmd.controller.signature import InputSpec, MethodSpec, Signature
from rlhf_spmd.controller.worker import Worker, register
