"""Writes functions and classes of a notebook as the text of a file, from which other processes and a resumed run import them."""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from rlhf_spmd.config.schema import ConfigError

HEAD = '"""What was given to rlhf_spmd.train as an object, with what it uses, as it was then."""\n\n'
ANNOTATIONS = "from __future__ import annotations\n\n"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def importable_name(value: Any) -> str | None:
    """Return ``package.module:name`` or ``file.py:name`` of a function or class that any process can import, else None."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if module is None or module.__name__ == "__main__" or not isinstance(name, str) or getattr(module, name, None) is not value:
        return None
    if module.__spec__ is None:  # made by code, not imported
        return None
    home = str(module.__file__) if "@" in module.__name__ else module.__name__  # see registry: a file's module
    return f"{home}:{name}"


def source_of(value: Any, where: str) -> tuple[str, str]:
    """Return the name of a function or class, and the text of a module that defines it.

    The text has the imports, functions and constants of its module that it uses. ``where``: the key of the configuration, for
    messages.

    Raises ConfigError, one line, for a value that no text can stand for: a lambda, a partial, an object, a function with variables of
    the function around it, or one that uses an object which is neither imported nor a plain value.
    """
    source = _Source(where)
    source.define(value)
    head = HEAD + ANNOTATIONS * source.postpones + "".join(f"{line}\n" for line in source.imports)
    return value.__name__, "\n\n".join([head, *source.parts])


class _Source:
    """The text of a module, each definition after those that it uses.

    - postpones: the text begins with ``from __future__ import annotations``
    - names: the objects that the global names of the text stand for
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.postpones = False
        self.imports: dict[str, None] = {}
        self.parts: list[str] = []
        self.names: dict[str, Any] = {}

    def refusal(self, what: str, name: str = "NAME", remedy: str = "") -> ConfigError:
        return ConfigError(f"{self.where}: {what}; {remedy}write it into a file and give FILE.py:{name}")

    def define(self, value: Any) -> None:
        """Add a function or a class. Raises ConfigError."""
        name = str(getattr(value, "__name__", type(value).__name__))
        functions = _functions(value)
        if functions is None:
            kind = f"an object of type {type(value).__name__}"
            raise self.refusal(f"{kind} has no source of its own", remedy="give a function or a class, or ")
        if name == "<lambda>":
            raise self.refusal("a lambda has no name by which other processes could find it", remedy="define it with def, or ")
        if self.names.get(name, value) is not value:
            raise self.refusal(f"it uses different objects named {name}")
        text, functions = _definition(name, functions)
        if not functions:
            of_class = ": a class is found by its methods" if isinstance(value, type) else ""
            raise self.refusal(f"the source of {name} is not there{of_class}", name)
        outer = sorted({free for function in functions for free in function.__code__.co_freevars} - {"__class__"})
        if outer:
            raise self.refusal(f"{name} uses {outer[0]} of the function around it, which its source does not have", name)
        flag = __future__.annotations.compiler_flag
        self.postpones = self.postpones or any(function.__code__.co_flags & flag for function in functions)
        self.names[name] = value
        scope = functions[0].__globals__
        for used in sorted(_global_names(ANNOTATIONS * self.postpones + text)):
            if used.startswith("__"):
                continue
            if used in scope:
                self.use(used, scope[used], text, name)
            elif not hasattr(builtins, used):
                raise self.refusal(f"{name} uses {used}, which is not defined", name)
        self.parts.append(text)

    def use(self, name: str, value: Any, text: str, user: str) -> None:
        """Add the global ``name`` for ``value``, which ``user``, whose source is ``text``, uses. Raises ConfigError."""
        is_module = isinstance(value, ModuleType) and value.__spec__ is not None and value.__name__ != "__main__"
        if is_module:
            for inner in _submodules(name, value, text):
                self.imports[f"import {inner}"] = None
            self.imports[f"import {value.__name__}" + f" as {name}" * (name != value.__name__)] = None
        if name in self.names:
            if self.names[name] is not value:
                raise self.refusal(f"it uses different objects named {name}")
            return
        self.names[name] = value
        if is_module:
            return
        module, _, inner = (importable_name(value) or "").rpartition(":")
        if module and not module.endswith(".py"):
            self.imports[f"from {module} import {inner}" + f" as {name}" * (name != inner)] = None
        elif _functions(value) is not None:
            self.define(value)
            if value.__name__ != name:
                self.parts.append(f"{name} = {value.__name__}\n")
        elif isinstance(value, re.Pattern):
            self.use("re", re, "", user)
            self.parts.append(f"{name} = re.compile({value.pattern!r}, {value.flags})\n")
        elif _is_plain(value):
            self.parts.append(f"{name} = {value!r}\n")
        else:
            kind = f"an object of type {type(value).__name__}"
            raise self.refusal(f"{user} uses {name}, {kind}, which has no text", user, f"make it in {user}, or ")


def _functions(value: Any) -> list[FunctionType] | None:
    """Return a function without its decorators, or the functions in the body of a class; None for anything else."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, type):
        members = (getattr(member, "__func__", member) for member in vars(value).values())
        return [member for member in members if isinstance(member, FunctionType) and member.__module__ == value.__module__]
    return [value] if isinstance(value, FunctionType) else None


def _definition(name: str, functions: list[FunctionType]) -> tuple[str, list[FunctionType]]:
    """Return the source of the function, or of the class with these functions, with decorators, and the functions in the source.

    Generated functions, such as those of a dataclass, are not in the source. Empty if there is no source.
    """
    for file in dict.fromkeys(function.__code__.co_filename for function in functions):
        lines = linecache.getlines(file)
        for node in _definitions("".join(lines)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            span = range(first, (node.end_lineno or first) + 1)
            inside = [f for f in functions if f.__code__.co_filename == file and f.__code__.co_firstlineno in span]
            if node.name == name and inside:
                return textwrap.dedent("".join(lines[first - 1 : span.stop - 1])).rstrip() + "\n", inside
    return "", []


@functools.lru_cache(maxsize=4)
def _definitions(text: str) -> list[Definition]:
    """Return the definitions in the text, the innermost first."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, Definition)][::-1]


def _global_names(text: str) -> set[str]:
    """Return the global names that a module with this text uses, also those that it defines itself."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() if table.get_type() == "module" else symbol.is_global():
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(text, "<source>", "exec"))) - {"annotations"}


def _submodules(name: str, module: ModuleType, text: str) -> list[str]:
    """Return the submodules of ``module`` that the text uses, such as ``xml.etree``: importing ``xml`` alone need not import them."""
    imported: list[str] = []
    for node in ast.walk(ast.parse(text)):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == name:
            dotted = [".".join([module.__name__, *path[:length]]) for length in range(1, len(path) + 1)]
            imported += [module_name for module_name in dotted if module_name in sys.modules]
    return list(dict.fromkeys(imported))


def _is_plain(value: Any) -> bool:
    """Return True if Python's text of ``value`` evaluates to ``value``."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False
