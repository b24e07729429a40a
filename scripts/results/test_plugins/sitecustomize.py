"""Two experiments on the tests. Every Python process runs this before anything else, if its folder is on PYTHONPATH.

With ``OTHER_PRODUCTS=1`` in the environment, torch's matrix products on CPUs add in another order, which depends on the number of rows.
Tests that fail then assume bits that processors do not promise. Batches of products (attention) stay as they are, because
``is_batch_invariant`` does not try them.

With ``REACH`` in the environment, a directory, each block of a function of src/rlhf_spmd (its body, a branch, a loop, a handler) gets
a probe when its module is imported. A probe that is passed for the first time adds ``module.py:line`` to a file of that directory,
named after the test file. Kernels that Triton compiles get none. Use a copy of the source without __pycache__: modules are compiled
with the probes.
"""

from __future__ import annotations

import ast
import builtins
import os
from importlib.machinery import SourceFileLoader
from typing import Any

REACH, SOURCE = os.environ.get("REACH"), "/src/rlhf_spmd/"
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler, ast.AsyncFor, ast.AsyncWith)
PASSED: set[str] = set()


def test_file() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "none").partition("::")[0].replace("/", "+")


def note(place: str) -> None:
    PASSED.add(place)
    assert REACH is not None
    with open(f"{REACH}/{test_file()}", "a") as file:
        file.write(place + "\n")


class Probes(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self.module, self.depth = module, 0

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        statements = [self.visit(statement) for statement in body]
        first = 0
        while first < len(body) and (isinstance(body[first], ast.Global | ast.Nonlocal) or self._is_text(body[first])):
            first += 1
        if first == len(body):
            return statements
        line, place = body[first].lineno, f"{self.module}:{body[first].lineno}"
        probe = ast.parse(f"{place!r} in _reached or _note_reached({place!r})").body[0]
        for node in ast.walk(probe):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line
        return [*statements[:first], probe, *statements[first:]]

    @staticmethod
    def _is_text(statement: ast.stmt) -> bool:
        return (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        )

    def visit_FunctionDef(self, node: Any) -> Any:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return node
        self.depth += 1
        node.body = self.block(node.body)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node: Any) -> Any:
        if not self.depth or not isinstance(node, BLOCKS):
            return super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if getattr(node, name, None):
                setattr(node, name, self.block(getattr(node, name)))
        for handler in getattr(node, "handlers", ()):
            self.visit(handler)
        return node


if REACH:
    vars(builtins).update(_reached=PASSED, _note_reached=note)
    plain = SourceFileLoader.source_to_code

    def source_to_code(loader: SourceFileLoader, data: Any, path: Any, **options: Any) -> Any:
        name = os.fspath(path)
        if SOURCE not in name or isinstance(data, ast.AST):
            return plain(loader, data, path, **options)
        tree = Probes(name.partition(SOURCE)[2]).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]

if os.environ.get("OTHER_PRODUCTS") == "1":
    import torch
    from torch import Tensor

    def product(a: Tensor, b: Tensor) -> Tensor:
        """[B, m, k] @ [B, k, n] by numpy, in two parts of k, the second one first."""
        wide = torch.promote_types(a.dtype, torch.float32) if a.is_floating_point() else a.dtype
        # copies: torch cannot resize the storage of a tensor that numpy has seen
        left, right = (x.detach().to(wide, copy=True).numpy() for x in (a, b))
        first = a.shape[1] % max(a.shape[2], 1)
        late = left[:, :, first:] @ right[:, first:]
        summed = late + left[:, :, :first] @ right[:, :first] if first else late
        return torch.from_numpy(summed).to(a.dtype, copy=True)  # whose storage torch can resize

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return product(a[None], b[None])[0]

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return mm(a, b) * alpha + (total * beta if beta else 0)

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(mm(a, b))

    def addmm_out(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor) -> Tensor:
        return out.copy_(addmm(total, a, b, beta=beta, alpha=alpha))

    def addmm_in_place(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return total.copy_(addmm(total, a, b, beta=beta, alpha=alpha))

    library = torch.library.Library("aten", "IMPL")
    functions = {"mm": mm, "mm.out": mm_out, "addmm": addmm, "addmm.out": addmm_out, "addmm_": addmm_in_place}
    for name, function in functions.items():
        library.impl(name, function, "CPU")
