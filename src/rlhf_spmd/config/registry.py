"""Name = module: ``algorithm: grpo`` is the module ``rlhf_spmd.algorithms.grpo``.

A dotted name is the user's own module, and a name that ends in ``.py`` is a file. ``:function`` after either names something in it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from rlhf_spmd.config.words import first_line, nearest

IMPORT_LIMIT_S = 120.0  # for the user's own module


def find(kind: str, package: str, name: str, required_attribute: str, other_names: Sequence[str] = ()) -> ModuleType:
    """Return the module that ``name`` stands for: ``package.name``, or for a dotted name or a file that module itself.

    - kind: what messages call it: ``algorithm``, ``reward``
    - required_attribute: an attribute of every such module; modules of the package without it are neither returned nor listed
    - other_names: names that the caller handles itself, for the list in messages

    Raises ValueError that lists what exists, nearest first.
    """
    if "." in name:
        name, inner = split_name(name)
        if inner:
            raise ValueError(f"{kind} '{name}:{inner}' stands for the whole module; leave :{inner} out")
        module = _import(kind, name)
        if not hasattr(module, required_attribute):
            lack = f"module {module.__name__} has no '{required_attribute}'"
            raise ValueError(f"{kind} '{name}': {lack}, which every {kind} must define")
        return module
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
        module = importlib.import_module(f"{package}.{name}")
        if hasattr(module, required_attribute):
            return module
    known = sorted([*available(package, required_attribute), *other_names])
    hint = nearest(name.lower(), known) or ";"
    or_own = "(or your own module: its dotted name, or a file.py)"
    raise ValueError(f"unknown {kind} '{name}'{hint} available: {', '.join(known) or 'none'} {or_own}")


def available(package: str, required_attribute: str) -> list[str]:
    """Return the public modules of a package that define ``required_attribute``, sorted. Imports all of them."""
    root = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(root.__path__) if not info.name.startswith("_"))
    return [name for name in names if hasattr(importlib.import_module(f"{package}.{name}"), required_attribute)]


def resolve(kind: str, package: str, name: str, required_attribute: str) -> Callable[..., Any]:
    """Return the function or class that ``name`` stands for.

    ``name`` is a built-in one (``gsm8k``, ``gsm8k:flexible``), ``package.module:function`` or ``file.py:function``. Without a function
    it stands for the module's ``required_attribute``. Raises ValueError that names ``kind``, the value and what exists.
    """
    module_name, function_name = split_name(name)
    if "." not in module_name and (not function_name or module_name in available(package, required_attribute)):
        module_name = find(kind, package, module_name, required_attribute).__name__
    return resolve_function(f"{module_name}:{function_name or required_attribute}", kind)


def resolve_function(name: str, kind: str = "function") -> Callable[..., Any]:
    """Return the function ``package.module:function`` or ``file.py:function``. Raises ValueError for any other name."""
    module_name, function_name = split_name(name)
    if not function_name.isidentifier():
        raise ValueError(f"{kind} '{name}' is not of the form package.module:function or file.py:function")
    module = _import(kind, module_name)
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
    if function is not None:
        raise ValueError(f"{kind} '{name}': {function_name} is a {type(function).__name__}, not a function")
    raise ValueError(
        f"{kind} '{name}': module {module_name} has no function '{function_name}'"
        f"{nearest(function_name, functions) or ';'} it has: {', '.join(functions) or 'none'}"
    )


def split_name(name: str) -> tuple[str, str]:
    """Split ``module:function`` into the module's name or file, and the function's name, which may be empty.

    A file's path may contain colons.
    """
    module, _, function = name.rpartition(":")
    return (module, function) if module and not name.endswith(".py") else (name, "")


@contextmanager
def noting_user_line(kind: str, name: str, module: ModuleType) -> Iterator[None]:
    """Add the line of its file as a note to an exception from the user's ``module``.

    A SystemExit from there becomes a RuntimeError, since the user's module must not end a run. ``kind``, ``name``: for the note.
    """
    try:
        yield
    # The boundary to the user's code: whatever it raises goes on.
    except (Exception, SystemExit) as error:
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == module.__file__]
        if not lines or module.__name__.startswith("rlhf_spmd."):
            raise
        failure = RuntimeError(f"SystemExit: {error}") if isinstance(error, SystemExit) else error
        failure.add_note(f"{kind} '{name}', {module.__file__}:{lines[-1]}")
        raise failure from error.__cause__


def _import(kind: str, name: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file:
        _check_file(kind, name)
    try:
        with _time_limit(IMPORT_LIMIT_S):
            return _import_file(name) if is_file else importlib.import_module(name)
    # The boundary to the user's code: whatever its module raises when it is imported, sys.exit() included.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        absent = error.name if isinstance(error, ModuleNotFoundError) and not is_file else None
        hint = "; is it on PYTHONPATH?" if absent and f"{name}.".startswith(f"{absent}.") else ""
        outer, _, inner = name.rpartition(".")
        if absent == name and outer in sys.modules and not hasattr(sys.modules[outer], "__path__"):
            hint = f"; {outer} is a module: write {outer}, or {outer}:{inner} for what is in it"
        raise ValueError(f"{kind} '{name}' cannot be imported: {reason}{hint}") from error


def _check_file(kind: str, name: str) -> None:
    """Raise ValueError for a file that does not exist, with the nearest one that does."""
    path = Path(name).expanduser()
    if path.is_file():
        return
    neighbours = [str(Path(name).with_name(file.name)) for file in path.parent.glob("*.py")]
    state = "is a directory" if path.is_dir() else "does not exist"
    directory = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise ValueError(f"{kind} '{name}': the file {state}{directory}{nearest(str(Path(name)), neighbours)}")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body when it takes longer, and again each second in case the body catches it.

    Only the main thread can be interrupted, and C code that does not return cannot.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it has not ended after {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def forget_files() -> None:
    """Let the modules of files be read anew when they are next named."""
    for name in [name for name in sys.modules if "@" in name]:
        del sys.modules[name]


def _import_file(name: str) -> ModuleType:
    """Import the module in a file, once per path."""
    path = Path(name).expanduser().resolve()
    full_name = f"{path.stem}@{path}"  # no module on sys.path has an @ in its name
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        sys.modules[full_name] = module = importlib.util.module_from_spec(spec)  # before it runs: dataclasses look there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full_name]
            raise
    return sys.modules[full_name]
