"""Bodies: what is known about the code inside a recorded call before it runs.

The `apply` of a custom autograd function is one node, and a compiled call runs the forward again.
So what it reads needs no watch, as long as no size depends on it. For sizes to be trusted, a
forward must be simple enough to be judged by its bytecode: it and the functions that it names touch
tensors, plain values and dicts of them, torch and `math`, and write to nothing but tensors and
their context. Then they are watched like the rest of the run, and the torch calls inside are looked
at as they happen.
A compiler may look inside if the backward is as simple, doesn't change its context and reads no
global number: the compiler runs both once, and keeps the outcome. See docs/design/0010.

The graph of a scripted function shows all that it does: a size can only depend on a tensor's
values through an operator that says so, or that takes a number out of a tensor. Operators that
aren't known to do neither make a function opaque.
"""

from __future__ import annotations

import dis
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from sys import getrefcount
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverloadPacket
from torch.autograd.function import FunctionMeta

from tripwire.env import is_library_module
from tripwire.reading.names import find_steps
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.rulebook.purity import find_impurity
from tripwire.rulebook.rules import SIZED_BY_DATA, is_seeded, words
from tripwire.values.classes import NUMPY_FLOAT, ids_of, is_exactly, isinstance, module_of
from tripwire.values.contents import all_codes
from tripwire.values.identity import is_library_class, is_library_function
from tripwire.values.numbers import plain

Functions = tuple[FunctionType, ...]

_VALUES = ids_of(int, float, bool, str, type(None), torch.dtype, torch.device)
_BUILTINS = words(
    "int float bool len range min max abs sum tuple list zip enumerate isinstance round slice "
    "reversed divmod"
)
_REFUSED = words(
    "STORE_GLOBAL DELETE_GLOBAL IMPORT_NAME LOAD_BUILD_CLASS LOAD_NAME STORE_NAME LOAD_DEREF "
    "STORE_DEREF LOAD_CLASSDEREF"
)
_ABSENT = object()
_OF_NUMPYS = frozenset(dir(NUMPY_FLOAT)).difference(dir(float))  # a float of Python's has no `item`
# What a compiler's tensors answer otherwise than the call's.
_OF_TENSORS = words(
    "requires_grad grad_fn grad is_leaf _version _base _is_view data_ptr is_inference"
)
# What returns its argument where it has nothing to do, and a compiler makes a copy. A forward
# shows it as it runs.
_COPIED = words("dropout")
# Questions for a class: a compiler's tensors are neither parameters nor of another class.
OF_CLASSES = words("isinstance issubclass type __class__")
# What torch's symbols answer otherwise than the numbers that they stand for.
_OF_NUMBERS = words("int round trunc format") | OF_CLASSES
_OF_TENSORS_TOO = words("int round trunc type")  # methods that numbers don't have
# Where torch's functions compute and nothing else; others seed generators and set defaults.
_COMPUTING = words(
    "torch.functional torch.nn.functional torch.nn.modules.utils torch._jit_internal "
    "torch._linalg_utils torch._lowrank"
)
# What a forward asks of autograd that a compiler answers otherwise.
_OF_AUTOGRAD = words("mark_dirty set_materialize_grads")


def find_functions(cls: Any, args: tuple[Any, ...]) -> Functions | None:
    """All Python functions that `cls.apply(*args)` can run; None where they aren't simple."""
    if type(cls) is not FunctionMeta or not all(map(_is_plain_argument, args)):
        return None
    refused = _OF_TENSORS | {"needs_input_grad"}
    if any(is_exactly(arg, NUMPY_FLOAT) for arg in args):  # where it is open, it is a plain float
        refused |= _OF_NUMPYS
    found = _find_all(_starts_of(cls), refused)
    if found is None or not any(type(arg) is dict for arg in args):
        return found
    # Its backward may keep the dict; and it must write to nothing but tensors.
    codes = [code for function in found for code in all_codes(function.__code__)]
    return None if torch.is_grad_enabled() or any(map(_may_write_items, codes)) else found


def find_backward(cls: Any, forward: Functions) -> Functions | None:
    """All that its backward can run; None where a compiler may not look inside."""
    for function in forward:
        if any(_OF_AUTOGRAD.intersection(code.co_names) for code in all_codes(function.__code__)):
            return None
    if cls.vjp is not torch.autograd.Function.vjp:  # the other name of a backward
        return None
    # It reads globals and torch's state when it runs, and they may be others by then.
    found = _find_all({cls.backward: None}, _OF_TENSORS | _COPIED | OF_CLASSES, may_read=False)
    if found is None:
        return None
    codes = [code for function in found for code in all_codes(function.__code__)]
    if any(map(_asks_for_state, codes)):
        return None
    if any(map(_writes_in_place, codes)):
        return None  # a compiler keeps what the forward saved, and lets nobody change it
    return found


def computes_with_symbols(cls: Any, forward: Functions) -> bool:
    """Whether its code does with torch's symbols what it does with numbers."""
    backward = _find_all({cls.backward: None}, frozenset()) or ()  # else no compiler sees it
    codes = [code for f in (*forward, *backward) for code in all_codes(f.__code__)]
    return not any(map(_asks_numbers, codes))


def _asks_numbers(code: CodeType) -> bool:
    """Whether torch's symbols may answer a code otherwise: `round(n)`; not so `torch.round(x)`."""
    owner: object = None  # the global on top of the stack
    for step in find_steps(code):
        name, is_global = step.argval, step.opname == "LOAD_GLOBAL"
        if step.opname.startswith("FORMAT"):
            return True
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _OF_TENSORS_TOO:
            if name == "trunc" and owner not in (None, "torch"):  # `math.trunc(n)`
                return True
        elif step.opname.startswith("LOAD_") and name in _OF_NUMBERS:
            return True
        owner = name if is_global else None
    return False


def find_names(functions: Functions) -> set[tuple[int, str]]:
    """Globals that functions read and that a run may write, each with its namespace's identity."""
    return {
        (id(function.__globals__), step.argval)
        for function in functions
        for code in all_codes(function.__code__)
        for step in find_steps(code)
        if step.opname == "LOAD_GLOBAL"
        and step.argval in function.__globals__
        and not isinstance(function.__globals__[step.argval], ModuleType)
    }


def _asks_for_state(code: CodeType) -> bool:
    """Whether a code names what tells of torch's state, such as `is_autocast_enabled`."""
    return any(name.startswith("get_") or name.endswith("_enabled") for name in code.co_names)


class Baked:
    """What a compiler made a backward of. Plain autograd looks all of it up when it runs."""

    def __init__(self, cls: Any) -> None:
        self.function = cls
        found = _find_all({cls.backward: None}, frozenset(), may_read=False) or ()
        self._backward = cls.backward
        self._codes = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in found]
        self._names = [
            (f.__globals__, i.argval, f.__globals__.get(i.argval, _ABSENT))
            for f in found
            for code in all_codes(f.__code__)
            for i in find_steps(code)
            if i.opname == "LOAD_GLOBAL"
        ]

    def is_current(self) -> bool:
        """Whether a backward that runs now would run the same code."""
        return (
            self.function.backward is self._backward
            and all(
                f.__code__ is code and f.__defaults__ is some and f.__kwdefaults__ is others
                for f, code, some, others in self._codes
            )
            and all(space.get(name, _ABSENT) is value for space, name, value in self._names)
        )


def _writes_in_place(code: CodeType) -> bool:
    """Whether a code says `x.add_(1)` or `x += 1`; what is put into `x[i]` is mostly its own."""
    return any(name.endswith("_") and not name.endswith("__") for name in code.co_names) or any(
        i.opname == "BINARY_OP" and i.argrepr.endswith("=") for i in dis.get_instructions(code)
    )


def _may_write_items(code: CodeType) -> bool:
    """Whether a code may change a dict: `x[i] = 1`, `x |= y`, or by a method of its own."""
    steps = {step.opname for step in find_steps(code)}
    names = _CHANGE_DICTS.isdisjoint(code.co_names)
    return not (names and _ITEM_STORES.isdisjoint(steps)) or _writes_in_place(code)


_ITEM_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_CHANGE_DICTS = words("update pop popitem setdefault clear __setitem__ __delitem__ __ior__")


def _find_all(
    contexts: dict[Any, str | None], refused: frozenset[str], *, may_read: bool = True
) -> Functions | None:
    """These functions, and all that they name; each may write to its context.

    may_read: plain values among globals.
    """
    found: dict[FunctionType, None] = {}
    open_: list[Any] = list(contexts)
    while open_:
        function = open_.pop()
        if function in found:
            continue
        if not _is_simple(function):
            return None
        found[function] = None
        for code in all_codes(function.__code__):
            if refused.intersection(code.co_names):
                return None
            named = _find_named(code, function.__globals__, contexts.get(function), may_read)
            if named is None:
                return None
            open_ += named
    return tuple(found)


def find_contexts(cls: Any) -> dict[int, str | None]:
    """The names of contexts, by the identity of the code that has them."""
    return {id(getattr(f, "__code__", None)): name for f, name in _starts_of(cls).items()}


def _starts_of(cls: Any) -> dict[Any, str | None]:
    """Forward and its like, each with the name of its context."""
    forward, setup = cls.forward, cls.setup_context
    if setup is torch.autograd.Function.setup_context:
        return {forward: _first_argument(forward)}
    return {forward: None, setup: _first_argument(setup)}


def _first_argument(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else None


def _is_plain_argument(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain_argument, value))
    if type(value) is dict:
        return all(_is_value(key) and _is_value(item) for key, item in value.items())
    return id(type(value)) in PLAIN_TENSORS or _is_value(value) or is_exactly(value, NUMPY_FLOAT)


def _is_value(value: object) -> bool:
    return id(type(value)) in _VALUES


def _is_simple(function: Any) -> bool:
    """Whether a function has no state of its own."""
    if type(function) is not FunctionType or function.__closure__ or function.__dict__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(map(_is_value, defaults))


def _find_named(
    code: CodeType, namespace: Mapping[str, Any], context: str | None, may_read: bool
) -> list[FunctionType] | None:
    """The user's functions that a code names; None where it does more than is simple."""
    found: list[FunctionType] = []
    before: dis.Instruction | None = None
    module: object = None  # on top of the stack
    for instruction in find_steps(code):
        name = instruction.opname
        if name in ("CACHE", "EXTENDED_ARG"):
            continue
        if name in _REFUSED or (name.startswith("STORE_FAST") and context == instruction.argval):
            return None
        if name in ("STORE_ATTR", "DELETE_ATTR"):
            if instruction.is_jump_target or not _loads(before, context):
                return None
        value: object = None
        if name == "LOAD_GLOBAL":
            value = namespace.get(instruction.argval, _ABSENT)
            if _is_value(value) and not may_read:
                return None
            if value is _ABSENT and instruction.argval in _BUILTINS:
                value = None
        elif isinstance(module, ModuleType):  # torch.nn.functional.relu
            value = vars(module).get(instruction.argval, _ABSENT)
        if isinstance(value, FunctionType) and not is_library_function(value):
            found.append(value)
        elif not _is_harmless(value):
            return None
        module, before = value, instruction
    return found


def _loads(instruction: dis.Instruction | None, name: str | None) -> bool:
    """Whether an instruction leaves a variable on top of the stack."""
    if instruction is None or not instruction.opname.startswith("LOAD_FAST"):
        return False
    return name is not None and instruction.argval == name


def _is_harmless(value: object) -> bool:
    if isinstance(value, BuiltinFunctionType):
        if getattr(torch, value.__name__, None) is value:
            return find_impurity(value, False) is None  # `torch.set_num_threads` isn't
        value = value.__self__ or _ABSENT  # a module, a class, or what it is bound to
    if isinstance(value, ModuleType):
        return value.__name__ == "math" or _is_torchs(value.__name__)
    if isinstance(value, FunctionType):  # of a library
        return value.__module__ in _COMPUTING or value is torch.is_tensor
    if isinstance(value, type):
        return is_library_class(value) and _is_torchs(module_of(value))
    return _is_value(value) or isinstance(value, OpOverloadPacket)


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch" and is_library_module(module)


# --- scripted functions ---


_STRUCTURE = words(
    "Constant If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex "
    "unchecked_cast RaiseException Uninitialized device dtype layout is_cuda is_cpu min max"
)
_METADATA = words("size dim len numel is_floating_point is_complex __is__ __isnot__")
_ARITHMETIC = words(
    "add sub mul div floordiv remainder neg pow sqrt log exp abs ceil floor round min max eq ne lt "
    "le gt ge __and__ __or__ __xor__ __not__ __is__ __isnot__ Int Float Bool len slice append "
    "__getitem__ __contains__ __range_length __derive_index"
)
_KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_plain_sizes(function: Any) -> bool:
    """Whether the sizes of what a scripted function returns follow from its arguments' shapes.

    It holds no tensor of its own, either, and draws nothing: what it returns is new, or an
    argument's.
    """
    found = _KNOWN.get(function)
    if found is None:
        found = _KNOWN[function] = _is_plain(function.inlined_graph)
    return found


def follows_from_shapes(function: Any) -> bool:
    """Whether a scripted function makes what it returns of its tensors' shapes alone."""
    return has_plain_sizes(function) and all(
        use.user.kind().partition("::")[2] in _METADATA
        for value in function.inlined_graph.inputs()
        if _has_tensor(value)
        for use in value.uses()
    )


def _is_plain(block: Any) -> bool:
    return all(
        _is_plain_node(node) and all(map(_is_plain, node.blocks())) for node in block.nodes()
    )


def _is_plain_node(node: Any) -> bool:
    space, _, name = node.kind().partition("::")
    makes_tensor = any(map(_has_tensor, node.outputs()))
    if space == "prim":
        return name in _STRUCTURE and not (name == "Constant" and makes_tensor)
    if space != "aten":
        return False
    if makes_tensor:
        return not (_is_sized_by_data(name, node.schema()) or is_seeded(name))
    if any(map(_has_tensor, node.inputs())):
        return name in _METADATA
    return name in _ARITHMETIC


def _has_tensor(value: Any) -> bool:
    return "Tensor" in str(value.type())


def _is_sized_by_data(name: str, schema: str) -> bool:
    overload = schema.partition("(")[0].partition(".")[2] or "default"
    if (name, overload) == ("where", "self"):
        return False
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    tags = [] if operator is None else operator.tags
    return name in SIZED_BY_DATA or torch.Tag.dynamic_output_shape in tags


# --- what code that isn't followed is given ------------------------------------------------------
# It may ask what its arguments are, keep them or change them. So it gets plain numbers, and the
# very lists and dicts of the call.


class Passed:
    """The lists and dicts that code was given: one that something new refers to was kept.

    `ctx.given = given` shows in no other way.
    """

    def __init__(self, given: object) -> None:
        self._containers = [*iter_containers(given)]
        self._counts = [*map(getrefcount, self._containers)]

    def find_kept(self) -> list[object]:
        """Those that the code kept, now that it has run."""
        now = [*map(getrefcount, self._containers)]
        pairs = zip(self._containers, self._counts, now, strict=True)
        return [one for one, before, after in pairs if after > before]


def iter_containers(value: Any) -> Iterator[Any]:
    """Lists and dicts in the arguments of a call."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) not in seen and is_exactly(value, tuple, list, dict):
            seen.add(id(value))
            left += value.values() if type(value) is dict else value
            if type(value) is not tuple:
                yield value


@contextmanager
def lending(value: Any) -> Iterator[Any]:
    """A call's arguments with plain numbers. Their lists and dicts hold plain numbers meanwhile."""
    lent: list[_Lent] = []
    try:
        yield _lend(value, lent)
    finally:
        for container, key, held, lent_out in lent:
            if isinstance(container, dict):
                if dict.get(container, key) is lent_out:
                    dict.__setitem__(container, key, held)
            elif key < list.__len__(container) and list.__getitem__(container, key) is lent_out:
                list.__setitem__(container, key, held)


_Lent = tuple[Any, Any, object, object]  # a list or a dict, a key, what it holds, and its stand-in


def _lend(value: Any, lent: list[_Lent]) -> Any:
    if isinstance(value, tuple):
        items = [_lend(item, lent) for item in tuple.__iter__(value)]
        if all(map(operator.is_, items, tuple.__iter__(value))):
            return value
        return torch.Size(items) if is_exactly(value, torch.Size) else _make_alike(value, items)
    if isinstance(value, list):
        _lend_items(value, [*enumerate(list.__iter__(value))], list.__setitem__, lent)
    elif isinstance(value, dict):
        _lend_items(value, [*dict.items(value)], dict.__setitem__, lent)
    elif is_exactly(value, slice):
        return slice(*map(plain, (value.start, value.stop, value.step)))
    return plain(value)


def _lend_items(
    container: Any, items: list[tuple[Any, Any]], put: Callable[..., None], lent: list[_Lent]
) -> None:
    for key, item in items:
        closed = _lend(item, lent)
        if closed is not item:
            put(container, key, closed)
            lent.append((container, key, item, closed))


def _make_alike(value: Any, items: list[Any]) -> Any:
    """A tuple of the same class, with what else it has."""
    made = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made
