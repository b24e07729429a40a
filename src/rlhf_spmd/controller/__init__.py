"""The in-process controller (F4): how model function calls meet.

Every rank runs the same script against the same role objects. A call returns a :class:`Reference` at once; data stay on the
ranks that made them and travel rank to rank, pushed at production along the traced graph, only the fields that the consumer
declares. What goes through rank 0 is control: :meth:`Controller.get`, :meth:`Controller.get_field` and :meth:`Controller.decide`.

Public names: Controller, Worker, ResourcePool, register, Signature, Stream, Protocol and the eight protocols, Reference, Cut, Graph.
This package knows rows, ranks and layouts; it must not know models, losses or weights.
"""

from rlhf_spmd.controller.controller import Controller, ordered_values
from rlhf_spmd.controller.graph import CallStats, Graph
from rlhf_spmd.controller.pool import GroupShape, ResourcePool
from rlhf_spmd.controller.protocols import ALL_TO_ALL, DP, MICRO_DP, ONE_TO_ALL, PP_AS_DP, PP_ONLY, RANK_ZERO, THREE_D, Protocol
from rlhf_spmd.controller.reference import CallRecord, Reference, source
from rlhf_spmd.controller.rows import PartitionSpec
from rlhf_spmd.controller.worker import MethodSpec, Signature, Stream, Worker, register
