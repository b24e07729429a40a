"""A transfer protocol: two functions and a number of parts."""

from rlhf_spmd.controller import Protocol

LAST_FIRST = Protocol(  # every rank is a data-parallel rank, and the last one takes the first part
    "LAST_FIRST",
    parts=lambda shape: shape.size,
    distribute=lambda shape, index: shape.size - 1 - index,
    collect=lambda shape: list(reversed(range(shape.size))),
)
