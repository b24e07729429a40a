"""Kernels in C++ for the CPU (floor F2): products, attention and small operations whose bits do not depend on the batch.

``ready(x)`` gives the :class:`Kernels` for a tensor, or None where the caller's torch path must serve: other devices and dtypes,
or a machine on which they do not build. The library is compiled at first use (a C++ compiler, some seconds), kept in
the user's cache directory and loaded with ctypes. Everything about a result's bits is in the headers of the sources.

Must not know: modules, models, autograd.
"""

from rlhf_spmd.kernels.library import Context, Kernels, page_elements, ready, suspended

__all__ = ["Context", "Kernels", "page_elements", "ready", "suspended"]
