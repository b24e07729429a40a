"""The program that ``sandbox`` starts: the tester, which runs a row's tests, and the program under test in its own process.

Both are restrained first. The tester never runs the program, and the program's process never sees a test: it is forked before tests
are read. Tests run in the tester, where proxies (:class:`Remote`) stand for the program's names. A call is sent to the program by
value, and the result is compared in the tester. So a program can give wrong answers, but cannot claim that they are right.

The two processes exchange lines of JSON::

    tester                                             program under test
    Program.ask  -- [operation, target, arguments, keywords] -->  serve
                 <-- [error or null, result, arguments] --

The arguments come back for functions that change them. An object that is no plain value stays in the program's process; the tester
has a number for it.

This file imports nothing of the package: a program starts in some 40 ms.
"""

from __future__ import annotations

import ast
import builtins
import collections
import ctypes
import importlib
import json
import operator
import os
import resource
import struct
import sys
from types import ModuleType
from typing import Any, BinaryIO

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000  # user, network, processes, IPC, mounts
MS_BIND, MS_PRIVATE, MS_REC, AT_RECURSIVE = 1 << 12, 1 << 18, 1 << 14, 0x8000
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 442, 444, 445, 446  # system calls
MAY_WRITE = 0x1FF2  # Landlock's rights to write, remove and make files
MAY_WRITE_FILE = 1 << 1
MAY_TRUNCATE = 1 << 14
SOCKET_CALLS = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}  # audit's number; socket, socketpair
IO_URING_SETUP = 425  # io_uring can make sockets too


# -- what restrains both processes


def isolate() -> bool:
    """Enter new namespaces, where all mounts but this directory are read-only. Return False if that is refused."""
    if _libc.unshare(NAMESPACES):
        return False
    directory = os.getcwd().encode()
    read_only, writable = struct.pack("=4Q", 1, 0, 0, 0), struct.pack("=4Q", 0, 1, 0, 0)  # struct mount_attr: set, clear
    succeeded = (
        _libc.mount(None, b"/", None, ctypes.c_ulong(MS_PRIVATE | MS_REC), None) == 0
        and _libc.mount(directory, directory, None, ctypes.c_ulong(MS_BIND), None) == 0
        and _libc.syscall(MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, read_only, ctypes.c_size_t(32)) == 0
        and _libc.syscall(MOUNT_SETATTR, -100, directory, 0, writable, ctypes.c_size_t(32)) == 0
    )
    os.chdir(directory)  # into the mount
    return bool(succeeded)


def limit(limits: dict[str, Any], isolated: bool) -> None:
    """Limit the resources of this process and of all that it starts, and drop the rights of root."""
    limits_by_resource = {
        resource.RLIMIT_CPU: int(limits["time_s"]) + 1,
        resource.RLIMIT_AS: limits["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # else all of the user's processes count, and there may be more already
        limits_by_resource[resource.RLIMIT_NPROC] = limits["processes"]
    for kind, value in limits_by_resource.items():
        resource.setrlimit(kind, (value, value))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no new rights by what it executes
    _libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))


def forbid_writing() -> None:
    """Allow writes below this directory only (Landlock).

    A process that has called this twice cannot inspect a process that has called it once.
    """
    version = _libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    rights = MAY_WRITE | (MAY_TRUNCATE if version >= 3 else 0)
    ruleset = _libc.syscall(LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(rights)), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return
    for place, allowed in ((".", rights), ("/dev/null", rights & (MAY_WRITE_FILE | MAY_TRUNCATE))):
        place_fd = os.open(place, os.O_PATH)
        _libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, place_fd), 0)
        os.close(place_fd)
    _libc.syscall(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def forbid_sockets() -> bool:
    """Forbid sockets to this process and all that it starts, except stream pairs, whose ends reach only each other.

    Return False if seccomp is refused. :func:`limit` must have been called.
    """
    if os.uname().machine not in SOCKET_CALLS:
        return False
    architecture, socket, socketpair = SOCKET_CALLS[os.uname().machine]
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x54, 0x06
    code = [  # operation, jump if true, jump if false, operand
        (load, 0, 0, 4),  # the architecture
        (equal, 0, 9, architecture),
        (load, 0, 0, 0),  # the system call
        (at_least, 7, 0, 0x40000000),  # x32's
        (equal, 6, 0, socket),
        (equal, 5, 0, IO_URING_SETUP),
        (equal, 0, 3, socketpair),
        (load, 0, 0, 24),  # its second argument
        (bits, 0, 0, 0xF),
        (equal, 0, 1, 1),  # SOCK_STREAM
        (answer, 0, 0, 0x7FFF0000),  # allowed
        (answer, 0, 0, 0x00050000 | 97),  # EAFNOSUPPORT
    ]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    program = struct.pack("HP", len(code), ctypes.addressof(steps))
    return _libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0


# -- values between them

TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
DECODERS = {**SEQUENCES, "dict": dict, "complex": lambda parts: complex(*parts), "bytes": bytes, "type": TYPES.__getitem__}


def encode(value: Any, keep: Any) -> Any:
    """Return the value as JSON. ``keep(object)`` returns a number for an object that is no plain value."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return (int if isinstance(value, int) else float)(value)
    if isinstance(value, list):
        return [encode(entry, keep) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(entry, keep)] for key, entry in value.items()]}
    sequence = next((name for name, kind in SEQUENCES.items() if isinstance(value, kind)), None)
    if sequence:
        return {sequence: [encode(entry, keep) for entry in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, type) and value in TYPES.values():
        return {"type": value.__name__}
    if hasattr(value, "tolist"):  # NumPy's
        return encode(value.tolist(), keep)
    return {"object": keep(value)}


def decode(value: Any, find: Any) -> Any:
    """Return the value that :func:`encode` made JSON of. ``find(number)`` returns an object that is no plain value."""
    if isinstance(value, list):
        return [decode(entry, find) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return find(content) if kind == "object" else DECODERS[kind](decode(content, find))


# -- the tester


class Remote:
    """An object of the program, by its number. Equal only to itself."""

    def __init__(self, program: Program, number: int) -> None:
        self.__dict__.update(_program=program, _number=number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._program.ask("call", self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("attribute", self._number, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._number, (name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self._number, (key,))

    def __len__(self) -> int:
        return int(self._program.ask("length", self._number))

    def __bool__(self) -> bool:
        return bool(self._program.ask("truth", self._number))

    def __iter__(self) -> Any:
        return iter(self._program.ask("list", self._number))


class Program:
    """The connection to the program under test."""

    def __init__(self, calls: BinaryIO, answers: BinaryIO) -> None:
        self.calls = calls
        self.answers = answers

    def ask(
        self, operation: str, target: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Return the program's answer. Raises the exception that it reports, and EOFError if it has ended."""
        request = [operation, target, encode(list(arguments), self._number), encode(keywords or {}, self._number)]
        self.calls.write(json.dumps(request).encode() + b"\n")
        line = self.answers.readline()
        if not line:
            raise EOFError("the program has ended")
        error, result, changed_arguments = json.loads(line)
        if error is not None:
            kind = getattr(builtins, str(error[0]), RuntimeError)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(str(error[1]))
        for argument, changed in zip(arguments, decode(changed_arguments, self._object), strict=False):
            if isinstance(argument, list) and isinstance(changed, list):
                argument[:] = changed
            elif isinstance(argument, dict | set) and isinstance(changed, type(argument)):
                argument.clear()
                argument.update(changed)
        return decode(result, self._object)

    def _object(self, number: int) -> Remote:
        return Remote(self, number)

    def _number(self, value: object) -> int:
        if isinstance(value, Remote):
            return int(value.__dict__["_number"])
        raise TypeError(f"a test cannot give the program a {type(value).__name__}")


class Scope(dict[str, Any]):
    """Names in tests: Python's own, standard modules whose attributes a test uses, else the program's.

    ``program_names``: names that are always the program's.
    """

    def __init__(self, program: Program, tests: list[str], program_names: list[str]) -> None:
        super().__init__(__name__="tests")
        self.program = program
        self.program_names = set(program_names)
        self.modules = set[str]()
        for test in tests:
            nodes = list(ast.walk(ast.parse(test)))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
            self.modules |= bases & sys.stdlib_module_names
            if all(hasattr(builtins, name) for name in names - self.modules):  # the program's function shadows a built-in
                called = [node.func for node in nodes if isinstance(node, ast.Call)]
                self.program_names |= {function.id for function in called if isinstance(function, ast.Name)}

    def __missing__(self, name: str) -> Any:
        if name not in self.program_names:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            if name in self.modules:
                return importlib.import_module(name)
        return self.program.ask("name", name)


def run_tests(program: Program, task: dict[str, Any], verdict_fd: int) -> None:
    """Run each test once, and write the number of each test that passes to ``verdict_fd``; 0 is the set-up."""
    scope = Scope(program, task["tests"], task["names"])
    for number, test in enumerate([task["set_up"], *task["tests"]]):
        try:
            program.ask("wait", 0)  # until its own lines have run: a program that has ended passes nothing
            exec(compile(test, "test.py", "exec"), scope)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
        else:
            os.write(verdict_fd, b"%d\n" % number)


# -- the program


def serve(scope: dict[str, Any], calls: BinaryIO, answers: BinaryIO) -> None:
    """Answer the requests of the tester. ``scope``: the program's names."""
    objects: list[Any] = []

    def keep(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    def look_up(name: str) -> Any:
        if name in scope:
            return scope[name]
        if "Solution" not in scope:
            raise NameError(f"name {name!r} is not defined")
        return getattr(scope["Solution"](), name)

    operations: dict[str, Any] = {"call": operator.call, "attribute": getattr, "set": setattr, "item": operator.getitem}
    operations |= {"length": len, "truth": bool, "list": list}
    for line in calls:
        operation, target, encoded, keywords = json.loads(line)
        arguments = decode(encoded, objects.__getitem__)
        try:
            if operation == "wait":
                result = None
            elif operation == "name":
                result = look_up(target)
            else:
                result = operations[operation](objects[target], *arguments, **decode(keywords, objects.__getitem__))
            answer = [None, encode(result, keep), encode(arguments if operation == "call" else [], keep)]
        except BaseException as error:
            answer = [[type(error).__name__, str(error)[:500]], None, []]
        answers.write(json.dumps(answer).encode() + b"\n")


def run_program(name: str, parts: list[str]) -> dict[str, Any]:
    """Run the program as the module ``name`` and return its names."""
    sys.argv[:] = ["program.py"]
    module = sys.modules[name] = ModuleType(name)
    for part in parts:
        exec(compile(part, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


# -- both


def main(job_fd: int, tests_fd: int, verdict_fd: int) -> None:
    """Restrain this process, fork the program, and test it. End with the program's exit code.

    The first line of the verdict says that the tester has started: ``[isolated, without sockets]``.
    """
    with os.fdopen(job_fd) as file:
        job = json.load(file)
    _libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    isolated = isolate()
    limit(job["limits"], isolated)
    forbid_writing()
    without_sockets = forbid_sockets()
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of this user may look into the tester
    (calls_out, calls_in), (answers_out, answers_in) = os.pipe(), os.pipe()
    start_out, start_in = os.pipe()
    program = os.fork()
    if program == 0:
        os.close(start_in)
        os.read(start_out, 1)  # the program may kill the tester, but only after the tester has reported its start
        for number in (tests_fd, verdict_fd, calls_in, answers_out, start_out):
            os.close(number)
        _libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        forbid_writing()
        scope = run_program(job["name"], job["program"])
        serve(scope, os.fdopen(calls_out, "rb"), os.fdopen(answers_in, "wb", 0))
        return
    os.write(verdict_fd, json.dumps([isolated, without_sockets]).encode() + b"\n")
    for number in (calls_out, answers_in, start_out, start_in):
        os.close(number)
    with os.fdopen(tests_fd) as file, os.fdopen(calls_in, "wb", 0) as calls, os.fdopen(answers_out, "rb") as answers:
        run_tests(Program(calls, answers), json.load(file), verdict_fd)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) & 255)


if __name__ == "__main__":
    _this = sys.modules["__main__"]  # the program's module takes its place
    main(*map(int, sys.argv[1:]))
