"""The in-process controller (F4): how model function calls meet.

Every rank runs the same script on the same role objects. A call returns a :class:`Reference` at once. Data stay on the ranks that
made them and travel from rank to rank, pushed when they are made along the traced graph, only the fields that the consumer
declares. Only control goes through rank 0: :meth:`Controller.get`, :meth:`Controller.get_field` and :meth:`Controller.decide`.

Modules import each other in one direction: protocols < rows < signature < call < reference, data_router < streaming < controller <
worker. This package knows rows, ranks and layouts. It must not know models, losses or weights.
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
    ResourcePool,
)
from rlhf_spmd.controller.reference import Reference, source
from rlhf_spmd.controller.rows import PartitionSpec
from rlhf_spmd.controller.signature import InputSpec, MethodSpec, Signature
from rlhf_spmd.controller.worker import Worker, register
