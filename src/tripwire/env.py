"""Facts about Python and torch versions, each with its evidence.

Nothing else in tripwire compares versions. tests/unit/test_env.py tests every fact by name.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType

import torch
import typing_extensions
from torch import fx, nn

# On a newer Python every call runs as plain Python. The bytecode of 3.14 is known (3.14.9 passes
# tests/unit/reading/test_uses.py), but the C modules were never built there.
IS_KNOWN_PYTHON = sys.version_info < (3, 14)

# sys.monitoring reports the first run of each code object and can then be switched off for
# that code (PEP 669). Before 3.12 sys.setprofile is the only hook, and it stays on.
HAS_MONITORING = sys.version_info >= (3, 12)
# Whether `in` may look into a set or a dict without calling what its class says: by instructions
# into which CPython turns CONTAINS_OP (tests/unit/dispatch/test_open_members.py).
HAS_QUICK_IN = sys.version_info >= (3, 13)

# Before 3.13 `frame.f_locals` is a copy of a function's variables, to be written back (PEP 667).
LOCALS_ARE_COPIES = sys.version_info < (3, 13)

# fx.Graph keeps its nodes in these; torch 2.11 and 2.13 have them, and a test compares a graph
# built through them with one built by create_node. Without them create_node is used.
CAN_APPEND_NODES = all(
    hasattr(fx.Graph(), name)
    for name in ("_graph_namespace", "_insert", "_find_nodes_lookup_table", "_len")
)

# In torch 2.11 a compiler's form of an LSTM that trains returns its last states with a dimension
# more (`one_layer_lstm` in torch/_decomp squeezes another dimension); 2.13 has it right.
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
LSTM_KEEPS_ITS_SHAPE = _TORCH >= (2, 13)

# Called when the main thread ends, before Python waits for other threads; `atexit` comes after.
# concurrent.futures depends on it from 3.9 on. Python 3.11 to 3.14 have it.
call_before_threads_end: Callable[[Callable[[], None]], None] = threading._register_atexit  # type: ignore[attr-defined]


# fx replaces these methods of nn.Module while it traces, for all threads. torch's compilers trace
# with make_fx, whose tracer does nothing but call what was there.
_FX_WRAPPERS = frozenset({"module_call_wrapper", "module_getattr_wrapper"})


def find_wrapped(function: FunctionType) -> FunctionType | None:
    """The method of nn.Module that fx has replaced by this function; None for other functions."""
    code = function.__code__
    if code.co_name not in _FX_WRAPPERS or code.co_filename != fx._symbolic_trace.__file__:
        return None
    wrapped = function.__dict__.get("__wrapped__")
    return wrapped if type(wrapped) is FunctionType else None


def passes_on(wrapper: FunctionType) -> bool:
    """Whether what `find_wrapped` takes only calls what it wraps: it is make_fx's."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    make_fx = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return make_fx is not None and type(cells["self"].cell_contents) is make_fx.PythonKeyTracer


def is_fx_tracing() -> bool:
    """Whether torch.fx traces symbolically, or with make_fx, in this thread.

    Its own question warns each time.
    """
    return _is_fx_tracing() and not _traces_elsewhere()


# A global in torch 2.11 and 2.13; in 2.15 each thread has its own, and a function asks for it.
_is_fx_tracing: Callable[[], bool] = getattr(
    fx._symbolic_trace, "_get_is_fx_tracing", lambda: fx._symbolic_trace._is_fx_tracing_flag
)


def _traces_elsewhere() -> bool:
    """Whether it is make_fx that traces, and not here, where its mode would be active."""
    wrapper = vars(nn.Module)["__call__"]
    if type(wrapper) is not FunctionType or find_wrapped(wrapper) is None:
        return False
    has_modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return passes_on(wrapper) and not has_modes


OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_ROOT = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# torch needs it, and on 3.12 it takes the place of parts of `typing`: `Union[int, str]` runs it.
_TYPING_FILE = os.path.abspath(typing_extensions.__file__)
_STDLIB_ROOTS = tuple(
    {os.path.abspath(sysconfig.get_path(key)) + os.sep for key in ("stdlib", "platstdlib")}
)
# Third-party packages live below the standard library's folder, and aren't part of it.
_SITE_ROOTS = tuple(
    {
        os.path.abspath(path) + os.sep
        for path in (*site.getsitepackages(), sysconfig.get_path("purelib"))
    }
)


# Whose code a file is, by how its name begins; the first that fits. False: the user's.
LIBRARY_ROOTS: tuple[tuple[str, bool], ...] = (
    (OWN_FOLDER, True),
    (_TORCH_ROOT, True),
    (_TYPING_FILE, True),
    *((root, False) for root in _SITE_ROOTS),
    *((root, True) for root in _STDLIB_ROOTS),
    ("<frozen ", True),
)


@cache
def is_own_file(filename: str) -> bool:
    """Whether a file is part of tripwire itself."""
    return filename.startswith(OWN_FOLDER)


# torch functions written in Python hand themselves to a torch-function mode through this file;
# a plain call doesn't pass through it.
_DISPATCH_FILE = os.path.abspath(torch.overrides.__file__)


def is_dispatch_file(filename: str) -> bool:
    """Whether a file is on the stack only because torch calls are observed."""
    return filename == _DISPATCH_FILE or is_own_file(filename)


@cache
def is_library_file(filename: str) -> bool:
    """Whether a file belongs to torch or the standard library: constant code, never the user's."""
    others = LIBRARY_ROOTS[1:]  # without tripwire itself
    return next((is_librarys for root, is_librarys in others if filename.startswith(root)), False)


@cache
def is_installed_file(filename: str) -> bool:
    """Whether a file is Python's, or of a package that was installed: nobody's own program."""
    known = is_library_file(filename) or is_own_file(filename)
    return known or filename.startswith(_SITE_ROOTS)


@cache
def is_numpys_file(filename: str) -> bool:
    """Whether a file is NumPy's, whose functions ask what they get for functions of its own."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and filename.startswith(os.path.dirname(str(numpy.__file__)) + os.sep)


def torch_path(filename: str) -> str | None:
    """A file's path inside torch, with forward slashes; None for other files."""
    if not filename.startswith(_TORCH_ROOT):
        return None
    return filename.removeprefix(_TORCH_ROOT).replace(os.sep, "/")


def is_library_module(name: str) -> bool:
    """Whether a module, by name, is torch or part of the standard library."""
    top = name.partition(".")[0]
    if top not in ("torch", "typing_extensions") and top not in sys.stdlib_module_names:
        return False
    return not _is_users_module(top)


def _is_users_module(top: str) -> bool:
    """Whether somebody's own file has the name of a library's module."""
    file = getattr(sys.modules.get(top), "__file__", None)
    return isinstance(file, str) and top != "__main__" and not is_library_file(file)


def is_stdlib_module(name: str) -> bool:
    """Whether a module, by name, is part of the standard library."""
    return is_library_module(name) and name.partition(".")[0] in sys.stdlib_module_names


def is_own_code(code: CodeType) -> bool:
    """Whether a code object was compiled from a file of tripwire."""
    return is_own_file(code.co_filename)
