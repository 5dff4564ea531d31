"""Purity: a C function is refused unless it is known to answer the same next time.

Python functions show what they read when they run. A C function shows nothing, so the tables
here say which ones depend on their arguments alone: those are pure. What prints, warns, reads
a clock, a file, a socket or a random generator is refused in words of its own, and a function
that is in no table is refused as unknown (L2, L3). Functions of torch are pure here: whoever
records them judges them.

A function is known by the module and class that define it, since a bound method is a new
object at every call.
"""

from __future__ import annotations

import functools
import sys
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from tripwire.env import is_library_module
from tripwire.rulebook.rules import Refuse
from tripwire.values.classes import (
    can_be_written,
    class_dict,
    is_heap_type,
    isinstance,
    module_of,
    mro,
    name_of,
)

_PRINTS = Refuse(
    "prints",
    "writes output here in a way that compiled code can't repeat. Call `print(...)` by its own "
    "name, which compiled code repeats, or write outside the traced function.",
)
_WARNS = Refuse(
    "warns", "warns, and compiled code wouldn't warn again. Warn outside the traced function."
)
_CLOCK = Refuse(
    "reads-clock",
    "reads the clock or waits for it, and compiled code would keep this run's time. Read it "
    "outside the traced function, and pass the time in.",
)
_FILE = Refuse(
    "reads-file",
    "reads or writes a file, a stream or the file system, and compiled code wouldn't do it "
    "again. Do it outside the traced function, and pass in what is read.",
)
_SOCKET = Refuse(
    "reads-socket",
    "uses a socket, and compiled code wouldn't use it again. Do it outside the traced function, "
    "and pass in what is read.",
)
_PYTHON_RANDOM = Refuse(
    "python-random",
    "draws from, makes or seeds a random generator that isn't torch's, in a way that compiled code "
    "can't repeat. It repeats draws of `random` and of generators that globals or attributes hold. "
    "Draw with torch, or outside the traced function.",
)
_NUMPY_RANDOM = Refuse(
    "numpy-random",
    "draws from, makes or seeds a random generator of NumPy's in a way that compiled code can't "
    "repeat. It repeats single numbers of `numpy.random`'s own generator. Draw with torch, or "
    "outside the traced function.",
)
_PROCESS = Refuse(
    "process-state",
    "reads or changes the state of the process, and compiled code wouldn't do it again. Do it "
    "outside the traced function, and pass in what is read.",
)
_COMMUNICATES = Refuse(
    "communicates",
    "communicates with other processes, and compiled code wouldn't do it again. Compile the module "
    "inside, not the wrapper that talks to other processes.",
)
_RESEEDS = Refuse(
    "generator-reseeded",
    "sets the state of a random generator, and compiled code wouldn't set it again. Do it outside "
    "the traced function.",
)
_FLAGS = Refuse(
    "torch-state-changed",
    "sets one of torch's flags, and compiled code wouldn't set it again. Set it outside the "
    "traced function. For autocast, use `with torch.autocast(...)`.",
)
_HIDDEN = Refuse(
    "process-state",
    "reads internal state of Python, and nothing tells tripwire when that changes. Do it "
    "outside the traced function, and pass in what is read.",
)
_MODES = Refuse(
    "process-state",
    "asks for torch-function modes, and while a run is observed, tripwire's is among them. Ask "
    "outside the traced function, or write `torch.overrides.has_torch_function(...)`.",
    of_modes=True,
)
_LOCKING = Refuse(
    "process-state",
    "takes, frees or asks a lock, and compiled code wouldn't. Write `with lock:`, or do it outside "
    "the traced function.",
)
_IDENTITY = Refuse(
    "reads-identity",
    "returns a number that depends on which object it gets, and the next call may pass another "
    "object. Compare with `is`, or give the object a name of its own.",
)
_UNKNOWN = Refuse(
    "unknown-c-function",
    "is a C function, and tripwire doesn't know what it reads or changes. Call it outside the "
    "traced function, and pass its result in.",
)

LOGS = Refuse(
    "logs",
    "a logger writes a message here in a way that compiled code can't repeat. Log outside the "
    "traced function, or raise the logger's level.",
)


class _ForUsers(Struct, frozen=True):
    """Pure if torch or the standard library calls it."""

    refuse: Refuse


_Verdict = Refuse | _ForUsers | None  # a reason goes on after the function's name; None: pure


class _ModuleRules(Struct, frozen=True):
    """What a module's functions and classes do; a class's entry holds for its methods."""

    otherwise: _Verdict
    listed: dict[str, _Verdict] = field(default_factory=dict)

    def find(self, name: str) -> _Verdict:
        """The verdict on `function` or `Class.method`."""
        if name in self.listed:
            return self.listed[name]
        return self.listed.get(name.partition(".")[0], self.otherwise)


def _module(otherwise: _Verdict, *listed: tuple[_Verdict, str]) -> _ModuleRules:
    return _ModuleRules(
        otherwise, {name: verdict for verdict, text in listed for name in text.split()}
    )


def _modules(verdict: _Verdict, names: str) -> dict[str, _ModuleRules]:
    return dict.fromkeys(names.split(), _ModuleRules(verdict))


_IN_POSIX = _module(
    _FILE,
    (None, "fspath strerror _path_normpath _path_splitroot _path_splitroot_ex"),
    (_PYTHON_RANDOM, "urandom getrandom"),
    (
        _PROCESS,
        "getpid getppid getpgid getpgrp getsid getuid geteuid getgid getegid getgroups getlogin "
        "getresuid getresgid getpriority getloadavg cpu_count sched_getaffinity times uname "
        "sysconf getcwd getcwdb get_terminal_size putenv unsetenv umask nice kill killpg system "
        "fork forkpty execv execve posix_spawn posix_spawnp waitpid wait wait3 wait4 _exit abort "
        "register_at_fork sched_yield",
    ),
)


def _find_setters() -> str:
    """Functions of torch's that set a flag; grad mode is recorded, and two are a tensor's own."""
    others = {"_set_grad_enabled", "_set_conj", "_set_neg"}
    return " ".join(n for n in dir(torch._C) if n.startswith("_set_") and n not in others)


# By the module that a function or its class says it is from; a package's entry holds for what
# is below it.
_TABLE: dict[str, _ModuleRules] = {
    **_modules(
        None,
        "math cmath _operator operator itertools _functools functools _collections "
        "collections collections.abc _struct _sre re _string string unicodedata _decimal decimal "
        "fractions numbers _json json binascii _hashlib _md5 _sha1 _sha2 _sha256 _sha512 _sha3 "
        "_blake2 zlib _abc abc _weakref weakref types _typing typing _contextvars contextvars "
        "_bisect _heapq _statistics _codecs errno _stat _opcode enum copy copyreg",
    ),
    **_modules(_CLOCK, "_uuid"),
    **_modules(_FILE, "fcntl mmap termios pwd grp sqlite3 _sqlite3 syslog _posixshmem readline"),
    **_modules(_SOCKET, "_socket socket _ssl ssl select"),
    **_modules(_PYTHON_RANDOM, "_random random"),
    **_modules(_NUMPY_RANDOM, "numpy.random"),
    **_modules(
        _PROCESS,
        "gc _signal signal atexit faulthandler _tracemalloc _locale _posixsubprocess resource "
        "_xxsubinterpreters _interpreters _lsprof",
    ),
    "torch": _module(
        None,
        (_ForUsers(_FLAGS), "set_anomaly_enabled set_flush_denormal set_num_threads"),
        (_ForUsers(_FLAGS), "set_num_interop_threads set_autocast_enabled set_autocast_dtype"),
        (_ForUsers(_FLAGS), "set_autocast_cpu_enabled set_autocast_cpu_dtype"),
        (_ForUsers(_FLAGS), "set_autocast_gpu_dtype set_autocast_cache_enabled"),
        (_ForUsers(_FLAGS), "set_autocast_xla_enabled set_autocast_xla_dtype"),
        (_ForUsers(_FLAGS), "set_autocast_ipu_enabled set_autocast_ipu_dtype"),
        (_ForUsers(_FLAGS), "autocast_increment_nesting autocast_decrement_nesting"),
        (_ForUsers(_FLAGS), "clear_autocast_cache"),
    ),
    "torch._C": _module(
        None,
        (_ForUsers(_FLAGS), _find_setters()),
        (
            _ForUsers(_MODES),
            "_has_torch_function _has_torch_function_unary _has_torch_function_variadic "
            "_len_torch_function_stack _get_function_stack_at _is_torch_function_mode_enabled",
        ),
        (
            _ForUsers(_RESEEDS),
            "Generator.manual_seed Generator.seed Generator.set_state Generator.set_offset "
            "Generator.graphsafe_set_state",
        ),
    ),
    "functools": _module(None, (_ForUsers(_HIDDEN), "_lru_cache_wrapper.cache_info")),
    "_contextvars": _module(None, (_ForUsers(_HIDDEN), "copy_context")),
    "_weakref": _module(None, (_ForUsers(_HIDDEN), "getweakrefcount getweakrefs")),
    "torch._C._distributed_c10d": _module(
        _COMMUNICATES,
        # What a group is doesn't change while it lives.
        (None, "rank size name group_name group_desc _get_backend_name get_group_name getRank"),
        (None, "_resolve_process_group __eq__ __hash__ __int__ __repr__ __str__ __ne__"),
    ),
    **_modules(_COMMUNICATES, "torch._C._distributed_rpc torch._C._distributed_autograd"),
    "builtins": _module(
        None,
        (_PRINTS, "print"),
        (_FILE, "input open"),
        (_PROCESS, "breakpoint"),
        (_ForUsers(_IDENTITY), "id"),
        (_ForUsers(_HIDDEN), "type.__subclasses__"),
        (_UNKNOWN, "memoryview"),  # memory that nobody compares
    ),
    "_io": _module(_FILE, (None, "text_encoding")),
    "io": _module(_FILE, (None, "text_encoding")),
    "posix": _IN_POSIX,
    "nt": _IN_POSIX,
    "os": _IN_POSIX,
    "time": _module(_CLOCK, (None, "struct_time")),
    "datetime": _module(
        None,
        (_CLOCK, "datetime.now datetime.utcnow date.today"),
        # The local time zone comes from the process.
        (_PROCESS, "datetime.fromtimestamp date.fromtimestamp datetime.timestamp"),
        (_PROCESS, "datetime.astimezone"),
    ),
    "_warnings": _module(_WARNS, (None, "_filters_mutated _acquire_lock _release_lock")),
    "_thread": _module(
        _PROCESS,
        (None, "allocate_lock allocate lock LockType RLock _local _is_main_interpreter"),
        (_ForUsers(_LOCKING), "lock.acquire lock.release lock.locked lock.acquire_lock"),
        (_ForUsers(_LOCKING), "lock.release_lock lock.locked_lock RLock.acquire RLock.release"),
        (_ForUsers(_PROCESS), "get_ident get_native_id _get_main_thread_ident"),
    ),
    "sys": _module(
        _PROCESS,
        (None, "exc_info exception intern getsizeof getrecursionlimit getdefaultencoding"),
        (None, "getfilesystemencoding getfilesystemencodeerrors is_finalizing audit"),
        (None, "_getframe _getframemodulename"),  # what is read of frames shows in Python code
        (_ForUsers(_PROCESS), "getprofile gettrace"),  # observing changes what they answer
    ),
    "numpy": _module(None, (_FILE, "fromfile ndarray.tofile ndarray.dump")),
}

# C functions and classes that were judged pure for every caller, met so far: by themselves
# where they last, and by (class, name) where a call makes a bound method. Nothing of the user's
# is held. A look into these is what most calls cost: 36 layers make 3,000 calls to 50 functions.
PURE: set[object] = set()
PURE_METHODS: set[tuple[type, str]] = set()

_DESCRIPTORS = (
    MethodDescriptorType,
    WrapperDescriptorType,
    ClassMethodDescriptorType,
    MethodWrapperType,
)
# Kinds whose hash and equality are Python's own, and that can be in PURE.
LASTING = frozenset(
    {BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType}
    | {type}
)


def find_impurity(callee: object, library: bool) -> Refuse | None:
    """Why a call of `callee` can't be in a trace; None where nothing speaks against it.

    `library` says that the caller is code of torch or the standard library.
    """
    kind = type(callee)
    if kind is FunctionType or (kind in LASTING and callee in PURE):
        return None
    found = _find_origin(callee)
    if found is None:
        return None
    module, name = found
    verdict = _find_verdict(module, name)
    if verdict is None:
        _remember(callee)
        return None
    if isinstance(verdict, _ForUsers):
        if library:
            return None
        verdict = verdict.refuse
    if verdict is _FILE and _is_standard_stream(getattr(callee, "__self__", None)):
        verdict = _PRINTS
    return _refuse(_spell(module, name), verdict)


def _refuse(name: str, why: Refuse) -> Refuse:
    return replace(why, reason=f"`{name}` {why.reason}")


DRAWS = _refuse("random", _PYTHON_RANDOM)
NUMPY_DRAWS = _refuse("numpy.random", _NUMPY_RANDOM)


def refuse_draw(name: str) -> Refuse:
    """Why a draw of this function can't be repeated."""
    is_numpys = name.startswith("numpy.")
    return _refuse(name, _NUMPY_RANDOM if is_numpys else _PYTHON_RANDOM)


def is_draw(callee: Any) -> bool:
    """Whether it is one of the two functions that all draws of Python's generators go through."""
    return _find_origin(callee) in _DRAWS


_DRAWS = (("_random", "Random.random"), ("_random", "Random.getrandbits"))


def _find_verdict(module: str, name: str) -> _Verdict:
    while module:
        if module in _TABLE:
            return _TABLE[module].find(name)
        module = module.rpartition(".")[0]
    return _UNKNOWN


# --- where a callable comes from ------------------------------------------------------------


def _find_origin(callee: Any) -> tuple[str, str] | None:
    """The module of a C function, and its name there with its class; None for Python code."""
    kind = type(callee)
    if kind is FunctionType:
        return None
    if kind is MethodType:
        return _find_origin(callee.__func__)
    if kind is BuiltinFunctionType:
        return _origin_of_builtin(callee)
    if isinstance(callee, _DESCRIPTORS):
        return _origin_of_method(callee.__objclass__, callee.__name__)
    if isinstance(callee, type):
        return None if _is_python_class(callee) else (module_of(callee), name_of(callee))
    if isinstance(callee, functools.partial):
        return _find_origin(callee.func)
    return _origin_of_instance(callee)


def _origin_of_builtin(callee: Any) -> tuple[str, str]:
    owner, name = callee.__self__, callee.__name__
    if isinstance(callee.__module__, str):  # a function of a module
        return callee.__module__, name
    if isinstance(owner, ModuleType):
        return owner.__name__, name
    if isinstance(owner, type):
        definer = _find_definer(owner, name) or _find_definer(type(owner), name) or owner
    else:
        definer = _find_definer(type(owner), name) or type(owner)
    return _origin_of_method(definer, name)


def _origin_of_method(owner: type, name: str) -> tuple[str, str]:
    return module_of(owner), f"{name_of(owner)}.{name}"


def _find_definer(cls: type, name: str) -> type | None:
    """The first class in line that defines a name in C."""
    for base in mro(cls):
        if not isinstance(class_dict(base).get(name), (NoneType, FunctionType, property)):
            return base
    return None


def _origin_of_instance(callee: Any) -> tuple[str, str] | None:
    cls = type(callee)
    if name_of(cls) in _CYTHON:  # one class for all its functions, which know their module
        return callee.__module__, callee.__qualname__
    for base in mro(cls):
        call = class_dict(base).get("__call__")
        if type(call) is BuiltinFunctionType:
            return _find_origin(call)
        if call is not None:
            return None if _is_python_class(base) else _origin_of_method(base, "__call__")
    return None


_CYTHON = frozenset({"cython_function_or_method", "fused_cython_function"})


def _is_python_class(cls: type) -> bool:
    """Whether a `class` statement made it: what its construction runs is then seen."""
    if not can_be_written(cls):
        return False
    module = sys.modules.get(module_of(cls))
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    if file is None:  # the main module, or one built into the interpreter
        return module_of(cls) not in sys.builtin_module_names
    return not file.endswith((".so", ".pyd", ".dylib"))


def _is_standard_stream(owner: object) -> bool:
    return owner is not None and any(
        owner is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    )


def _remember(callee: Any) -> None:
    if type(callee) not in LASTING:
        return
    if type(callee) is not BuiltinFunctionType:
        owner = callee if isinstance(callee, type) else callee.__objclass__
        if _lasts(owner):
            PURE.add(callee)
        return
    owner = callee.__self__
    if isinstance(callee.__module__, str) or isinstance(owner, ModuleType):
        PURE.add(callee)
    elif isinstance(owner, type):
        if _lasts(owner):
            PURE.add(callee)
    elif _lasts(type(owner)):
        PURE_METHODS.add((type(owner), callee.__name__))


def _lasts(cls: type) -> bool:
    return not is_heap_type(cls) or is_library_module(module_of(cls))


def _spell(module: str, name: str) -> str:
    """The name under which a user knows a function."""
    if module in ("builtins", "io", "_io"):
        return name
    return f"{_KNOWN_AS.get(module) or module.lstrip('_')}.{name}"


_KNOWN_AS = {"posix": "os", "nt": "os", "_thread": "threading"}


# --- generators whose draws no call shows ---------------------------------------------------


class GlobalGenerators:
    """The global generators of Python and NumPy, compared with what they were.

    NumPy's functions are Cython's, of which Python 3.11 reports no call; and C code such as
    `map` calls C functions without an event on any version.
    """

    def __init__(self) -> None:
        self._python = _python_state()
        self._numpy = _numpy_state()

    def find_draw(self) -> Refuse | None:
        """The refusal, if one of them has moved."""
        return self.find_numpy_draw() or (DRAWS if _python_state() != self._python else None)

    def look_again(self) -> None:
        """Compare them with what they are now."""
        self._python, self._numpy = _python_state(), _numpy_state()

    def find_numpy_draw(self) -> Refuse | None:
        """The refusal, if NumPy's has moved."""
        return None if _numpy_state() == self._numpy else NUMPY_DRAWS


# Functions of `numpy.random` that give a number, unless they are asked for an array.
OF_NUMPY = (
    *("rand", "randn", "random", "random_sample", "uniform", "normal", "standard_normal", "beta"),
    *("gamma", "exponential", "lognormal", "triangular", "randint"),
)


def is_global_generator(value: object) -> bool:
    """Whether functions of `random`, or of `numpy.random`, draw from it."""
    python, numpy = sys.modules.get("random"), sys.modules.get("numpy.random")
    is_pythons = python is not None and value is python._inst
    return is_pythons or (numpy is not None and value is numpy.mtrand._rand)


def draws_from_numpy(value: object) -> bool:
    """Whether it is one of those functions: all that it does shows in the generator."""
    if not isinstance(value, MethodType) or not is_global_generator(value.__self__):
        return False
    return getattr(value.__func__, "__name__", "") in OF_NUMPY


def _python_state() -> object:
    random = sys.modules.get("random")
    return None if random is None else random.getstate()


def _numpy_state() -> object:
    if "numpy" not in sys.modules:
        return None
    import numpy.random  # numpy itself puts it off until somebody asks

    state = numpy.random.get_state(legacy=False)
    assert isinstance(state, dict)
    inner = {
        name: part.tobytes() if isinstance(part, numpy.ndarray) else part
        for name, part in state["state"].items()
    }
    return {**state, "state": inner}


def may_draw_from_numpy(names: tuple[str, ...], namespace: dict[str, Any]) -> bool:
    """Whether code with these names can reach NumPy's generator through its globals."""
    return "numpy" in names or any(
        name in namespace and _belongs_to_numpy(namespace[name]) for name in names
    )


def _belongs_to_numpy(value: object) -> bool:
    if type(value) is ModuleType:
        return value.__name__.partition(".")[0] == "numpy"
    owner = value.__self__ if type(value) is MethodType else None
    return module_of(type(owner)).startswith("numpy.random")
