"""Where the tests run Triton's kernels: compiled on a CUDA device, else on the CPU in Triton's interpreter, mended.

``conftest`` sets TRITON_INTERPRET before anything imports triton.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'rlhf_spmd[triton]'")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("a GPU that torch cannot use: neither compiled kernels nor the interpreter", allow_module_level=True)
if DEVICE.type == "cpu":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from quick_interpreter import speed_up

    convert_float = interpreter._convert_float
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        """Triton 3.6 calls int() on arrays of one element where a loop needs its bounds, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def values(x: Any) -> Any:
        """The interpreter keeps bfloat16 as its 16 bits."""
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Like a tensor core, and unlike NumPy's product, it does not care in which row of ``a`` something stands."""
        product = np.einsum("mk,kn->mn", values(a), values(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def convert(x: Any, given: Any, wanted: Any, mode: Any) -> Any:
        """Compiled kernels round to the nearest bfloat16, ties to even; the interpreter cuts off."""
        if given == tl.float32 and wanted == tl.bfloat16:
            return torch.from_numpy(np.array(x)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if given == tl.bfloat16 and wanted == tl.float32:  # the same bits, which Triton takes apart and puts together again
            return x.astype(np.uint32) << 16
        return convert_float(x, given, wanted, mode)

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot
    speed_up()
