"""Script: a record's call as plain Python, for a process that has torch and not tripwire.

Each node becomes a variable. As in decode.py everything is made first, what can be filled later
as an empty shell; then shells are filled. Functions are compiled from the recorded lines, under
their own file names and lines, by the code that replays use, which is copied into the script. What
can't be written so raises `Unwritable`; then the script contains the record instead.
"""

from __future__ import annotations

import base64
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable

from tripwire.recording.capture import shelf
from tripwire.recording.capture.outcomes import is_switch
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import ITEM_SIZES, TORCH_NAMES
from tripwire.recording.format.checks import slots_of
from tripwire.recording.format.file import Record
from tripwire.recording.format.manifest import Environment, Raised
from tripwire.recording.format.nodes import AnyNode, Slot, find_hook_ids, read_dict

# What a function is given beside its code. Names that stand in the text are none of the file's.
_OF_FUNCTIONS = (
    "__defaults__", "__kwdefaults__", "__dict__", "__module__", "__doc__", "__annotations__",
)  # fmt: skip
_CALL = ("call", "args", "kwargs", "generators")  # the roots that a script needs
_MOST_BYTES = 32_000_000  # of tensors; more makes no file that somebody reads


class Unwritable(Exception):
    """Why a record can't become plain Python."""


def write_script(record: Record) -> str:
    """The script without its head; raises Unwritable."""
    compiled, outcome = record.manifest.compiled, record.manifest.outcome
    if compiled is not None:
        if compiled.hit or compiled.check or "backend" in record.table.roots:
            raise Unwritable("compiled code is part of what went wrong")
        if isinstance(outcome, Raised) and outcome.module.partition(".")[0] == "tripwire":
            raise Unwritable("the exception is tripwire's own")
    if "patches" in record.table.roots:
        raise Unwritable("it replaces functions of libraries")
    if "call" not in record.table.roots:
        raise Unwritable("it holds no call")
    return _ScriptWriter(record).write()


class _ScriptWriter:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._nodes = record.table.nodes
        self._made: dict[int, bool] = {}  # False while it is being made
        self._lines: list[str] = []
        self._fills: list[str] = []
        self._blobs: dict[int, None] = {}
        self._sources: dict[str, None] = {}

    def write(self) -> str:
        roots = self._record.table.roots
        for name in _CALL:
            self._reach(roots.get(name))
        data = "".join(f"BLOB_{n} = _bytes(\n{self._data(n)}\n)\n" for n in self._blobs)
        text = "".join(
            f"SOURCE_{name[4:-3]} = (\n{_literal_lines(self._record.read(name))}\n)\n"
            for name in self._sources
        )
        body = "\n".join([*self._lines, *self._fills])
        call = {name: _spell(roots.get(name)) for name in _CALL}
        return (
            f"{_SUPPORT}\n\n{_source_of(shelf)}\n\n# --- recorded source\n\n{text}\n"
            f"# --- recorded values\n\n{data}{body}\n\n\n"
            f"{_main(call, self._record.manifest.environment, self._next_hook())}"
        )

    def _next_hook(self) -> int:
        """The id that a hook may have that the call registers; 0 where it doesn't matter."""
        return max(find_hook_ids(self._record.table), default=-1) + 1

    # --- order ---

    def _reach(self, slot: Slot) -> None:
        """Make a node and all that it leads to."""
        waiting = [slot]
        met: set[int] = set()
        while waiting:
            at = waiting.pop()
            if type(at) is tuple and at[0] not in met:
                met.add(at[0])
                self._make(at[0])
                waiting.extend(slots_of(self._nodes[at[0]]))

    def _make(self, number: int) -> None:
        stack = [number]
        while stack:
            top = stack[-1]
            if self._made.get(top):
                stack.pop()
                continue
            node = self._nodes[top]
            needs = [s[0] for s in self._needs(node) if type(s) is tuple]
            missing = [need for need in needs if not self._made.get(need)]
            if top in self._made and missing:
                raise Unwritable("something contains itself")
            self._made[top] = False
            if missing:
                stack += missing
                continue
            self._write(top, node)
            self._made[top] = True
            stack.pop()

    def _needs(self, node: AnyNode) -> Iterable[Slot]:
        match node:
            case nodes.Tuple() | nodes.Wrapped() | nodes.CallNode() | nodes.Range() | nodes.Slice():
                return slots_of(node)
            case nodes.Set():
                return node.items if node.frozen else ()
            case nodes.TensorExtras():
                return (node.tensor,)
            case nodes.Object() | nodes.ModuleForm():
                return (node.cls,)
            case nodes.EnumMember():
                return (node.cls, node.value)
            case nodes.ModuleObject():
                return (node.form,)
            case nodes.Function():
                return (node.namespace, *node.closure)
            case nodes.Class():
                return (node.meta, *node.bases)
            case nodes.Module():
                return (node.namespace,)
        return ()

    # --- nodes ---

    def _write(self, number: int, node: AnyNode) -> None:
        write = _WRITERS.get(type(node))
        if isinstance(node, nodes.Opaque):
            raise Unwritable(f"the record lacks a {node.cls} that the call uses: {node.reason}")
        if write is None:
            raise Unwritable(f"the record has what only tripwire builds ({type(node).__name__})")
        made, *fills = write(self, node, f"v{number}")
        self._lines.append(f"v{number} = {made}")
        self._fills += fills

    def _data(self, number: int) -> str:
        return wrap_literal(base64.b64encode(self._record.blobs.read(number)).decode())

    def blob(self, number: int) -> str:
        self._blobs[number] = None
        if sum(self._record.blobs[n].size for n in self._blobs) > _MOST_BYTES:
            raise Unwritable("its tensors are too large for a text")
        return f"BLOB_{number}"

    def tensor(self, node: nodes.Tensor, _: str) -> list[str]:
        blob = self._record.blobs[node.blob]
        dtype, shape = TORCH_NAMES[blob.dtype], tuple(blob.shape)
        stride = nodes.default_strides(shape)
        return [self._tensor(node.blob, dtype, shape, stride, 0, node.device, node.kind)]

    def view(self, node: nodes.TensorView, _: str) -> list[str]:
        if node.conjugated or node.negated:
            raise Unwritable("it holds a conjugated tensor")
        first = node.first // ITEM_SIZES[node.dtype]
        offset = 0 if 0 in node.shape else node.offset - first
        form = (node.dtype, node.shape, node.strides, offset, node.device, node.kind)
        return [self._tensor(node.blob, *form)]

    def _tensor(
        self,
        blob: int,
        dtype: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        device: str,
        kind: str,
    ) -> str:
        if kind not in ("", "grad", "param", "frozen"):
            raise Unwritable(f"it holds a tensor of the kind {kind!r}")
        form = f"torch.{dtype}, {shape}, {stride}, {offset}, {device!r}, {kind!r}"
        return f"_tensor({self.blob(blob)}, {form})"

    def extras(self, node: nodes.TensorExtras, name: str) -> list[str]:
        if node.cls is not None:
            raise Unwritable("it holds a subclass of Tensor")
        fills = [] if node.grad is None else [f"{name}.grad = {_spell(node.grad)}"]
        fills += [
            f"setattr({name}, {_spell(one)}, {_spell(value)})"
            for one, value in zip(node.names, node.values, strict=True)
        ]
        return [_spell(node.tensor), *fills]

    def array(self, node: nodes.Array, _: str) -> list[str]:
        order = "F" if node.fortran else "C"
        form = f"{self.blob(node.blob)}, {node.dtype!r}, {tuple(node.shape)}, {order!r}"
        return [f"_array({form})" + ("[()]" if node.scalar else "")]

    def function(self, node: nodes.Function, name: str) -> list[str]:
        code = self._record.table.codes[node.code]
        if code.source is None:
            raise Unwritable(f"the source of {code.name} isn't known")
        self._sources[code.source] = None
        before, count = code.lines
        lines = f"SOURCE_{code.source[4:-3]}, {before}, {count}, {code.line}"
        cells = ", ".join(map(_spell, node.closure))
        form = f"{code.place}, {code.file!a}, {code.name!a}, {code.free}, {code.flags}"
        made = f"_function({lines}, {form}, {_spell(node.namespace)}, [{cells}], "
        fills = [f"{name}.__qualname__ = {node.qualname!a}"]
        for attribute, slot in (
            ("__defaults__", node.defaults),
            ("__kwdefaults__", node.kwdefaults),
            ("__dict__", node.attributes),
            *read_dict(self._record.table, node.special),
        ):
            if attribute not in _OF_FUNCTIONS:
                raise Unwritable(f"it sets the attribute {attribute!r} of a function")
            if slot is not None:
                fills.append(f"{name}.{attribute} = {_spell(slot)}")
        return [f"{made}{node.name!a})", *fills]

    def library(self, node: nodes.Library, _: str) -> list[str]:
        if node.module.partition(".")[0] == "tripwire":
            raise Unwritable("it uses tripwire itself")
        return [f"_library({node.module!a}, {node.name!a})"]

    def module_object(self, node: nodes.ModuleObject, name: str) -> list[str]:
        form = self._nodes[node.form[0]]
        assert isinstance(form, nodes.ModuleForm)  # the record was looked at before
        values, keys = iter(node.values), iter(form.keys)
        state = ", ".join(f"{one!a}: {_spell(next(values))}" for one in form.names)
        fills = [f"{name}.__dict__.update({{{state}}})"]
        for table, count in form.tables:
            inner = (f"{key!a}: {_spell(next(values))}" for key in itertools.islice(keys, count))
            fills.append(f"{name}.__dict__[{table!a}] = {{{', '.join(inner)}}}")
        return [f"_nn_module({_spell(form.cls)})", *fills]

    def namespace(self, node: nodes.Namespace, name: str) -> list[str]:
        if "__builtins__" in node.names:
            raise Unwritable("it has builtins of its own")
        fill = f"{name}.update({_mapping(node.names, node.values)})"
        return [f"_namespace({node.module!a})", fill]

    def module(self, node: nodes.Module, name: str) -> list[str]:
        fill = f"vars({name}).update({_mapping(node.names, node.values)})"
        return [f"_py_module({node.name!a}, {_spell(node.namespace)})", fill]

    def cls(self, node: nodes.Class, name: str) -> list[str]:
        if node.form != "plain" or node.detail is not None:
            raise Unwritable(f"it holds the {node.form} class {node.qualname}")
        bases = "".join(f"{_spell(base)}, " for base in node.bases)
        space = f"{{'__module__': {node.module!a}, '__qualname__': {node.qualname!a}}}"
        fills = [
            f"type.__setattr__({name}, {one!a}, {_spell(value)})"
            for one, value in zip(node.names, node.values, strict=True)
        ]
        made = f"{_spell(node.meta)}.__new__({_spell(node.meta)}, {node.name!a}, ({bases}), "
        return [f"{made}{space})", *fills]

    def object(self, node: nodes.Object, name: str) -> list[str]:
        if node.content is not None or node.slots:
            raise Unwritable("it holds an instance that is more than its attributes")
        fill = f"{name}.__dict__.update({_mapping(node.names, node.values)})"
        return [f"object.__new__({_spell(node.cls)})", *([fill] if node.names else [])]

    def wrapped(self, node: nodes.Wrapped, _: str) -> list[str]:
        parts = ", ".join(map(_spell, node.parts))
        made = {
            "method": f"types.MethodType({parts})",
            "builtin": f"getattr({parts})",
            "staticmethod": f"staticmethod({parts})",
            "classmethod": f"classmethod({parts})",
            "property": f"property({parts})",
            "partial": f"_partial({parts})",
            # The call's own exception comes of the plain callables.
            "recorded": _spell(node.parts[0]),
            "compiled": _spell(node.parts[0]),
        }.get(node.form)
        if made is None:
            raise Unwritable(f"it holds a {node.form}")
        return [made]

    def dict_(self, node: nodes.Dict, name: str) -> list[str]:
        empty = {
            "dict": "{}",
            "ordered": "collections.OrderedDict()",
            "default": "collections.defaultdict()",
            "counter": "collections.Counter()",
        }[node.form]
        pairs = "".join(
            f"({_spell(key)}, {_spell(value)}), "
            for key, value in zip(node.keys, node.values, strict=True)
        )
        fills = [f"dict.update({name}, ({pairs}))"] if pairs else []
        if node.form == "ordered" and pairs:
            fills = [f"{name}.update(({pairs}))"]
        if node.form == "default":
            fills.append(f"{name}.default_factory = {_spell(node.factory)}")
        return [empty, *fills]

    def set_(self, node: nodes.Set, name: str) -> list[str]:
        items = "".join(f"{_spell(item)}, " for item in node.items)
        if node.frozen:
            return [f"frozenset(({items}))"]
        return ["set()", *([f"{name}.update(({items}))"] if items else [])]

    def generator(self, node: nodes.Generator, name: str) -> list[str]:
        return [f"torch.Generator({node.device!r})", f"{name}.set_state({_spell(node.state)})"]

    def cell(self, node: nodes.CellNode, name: str) -> list[str]:
        fill = f"{name}.cell_contents = {_spell(node.content)}"
        return ["types.CellType()", *([] if node.empty else [fill])]


def _spell(slot: Slot) -> str:
    return f"v{slot[0]}" if type(slot) is tuple else ascii(slot)


def _mapping(names: Iterable[str], values: Iterable[Slot]) -> str:
    pairs = (f"{n!a}: {_spell(v)}" for n, v in zip(names, values, strict=True))
    return f"{{{', '.join(pairs)}}}"


def wrap_literal(text: str) -> str:
    """A long text of ASCII as the lines of a string in parentheses."""
    return "\n".join(f'    "{line}"' for line in textwrap.wrap(text, 92)) or '    ""'


def _literal_lines(data: bytes) -> str:
    lines = data.decode("utf-8", "surrogatepass").splitlines(keepends=True)
    return "\n".join(f"    {line!a}" for line in lines) or '    ""'


def _torch_value(_: _ScriptWriter, node: nodes.TorchValue, __: str) -> list[str]:
    match node.kind:
        case "size":
            if not all(size.isdecimal() for size in node.text.split(",") if node.text):
                raise Unwritable("it holds a size that is none")
            return [f"torch.Size([{node.text}])"]
        case "device":
            return [f"torch.device({node.text!a})"]
    return [f"getattr(torch, {node.text.removeprefix('torch.')!a})"]


def _bits(digits: str) -> str:
    return f"struct.unpack('>d', bytes.fromhex({digits!r}))[0]"


def _items(node: nodes.Tuple | nodes.List | nodes.Deque) -> str:
    return "".join(f"{_spell(item)}, " for item in node.items)


_WRITERS: dict[type, Callable[..., list[str]]] = {
    nodes.BigInt: lambda _, node, __: [f"int({node.digits!r}, 16)"],
    nodes.Bits: lambda _, node, __: [_bits(node.digits)],
    nodes.Complex: lambda _, n, __: [f"complex({_bits(n.real)}, {_bits(n.imag)})"],
    nodes.Text: lambda _, n, __: [f"{n.data!r}.decode('utf-8', 'surrogatepass')"],
    nodes.String: lambda _, node, __: [ascii(node.text)],
    nodes.Bytes: lambda _, n, __: [f"bytearray({n.data!r})" if n.mutable else f"{n.data!r}"],
    nodes.ConstantNode: lambda _, node, __: [node.name],
    nodes.Range: lambda _, n, __: [f"range({', '.join(map(_spell, slots_of(n)))})"],
    nodes.Slice: lambda _, n, __: [f"slice({', '.join(map(_spell, slots_of(n)))})"],
    nodes.Tuple: lambda _, node, __: [f"({_items(node)})"],
    nodes.List: lambda _, n, name: ["[]", *([f"{name}.extend(({_items(n)}))"] if n.items else [])],
    nodes.Deque: lambda _, n, name: [
        f"collections.deque(maxlen={n.limit})",
        *([f"{name}.extend(({_items(n)}))"] if n.items else []),
    ],
    nodes.Set: _ScriptWriter.set_,
    nodes.Dict: _ScriptWriter.dict_,
    nodes.Tensor: _ScriptWriter.tensor,
    nodes.TensorView: _ScriptWriter.view,
    nodes.TensorExtras: _ScriptWriter.extras,
    nodes.Array: _ScriptWriter.array,
    nodes.TorchValue: _torch_value,
    nodes.Generator: _ScriptWriter.generator,
    nodes.Object: _ScriptWriter.object,
    nodes.ModuleForm: lambda _, node, __: [_spell(node.cls)],
    nodes.ModuleObject: _ScriptWriter.module_object,
    nodes.CallNode: lambda _, n, __: [f"{_spell(n.function)}({', '.join(map(_spell, n.args))})"],
    nodes.EnumMember: lambda _, n, __: [f"{_spell(n.cls)}({_spell(n.value)})"],
    nodes.Library: _ScriptWriter.library,
    nodes.CellNode: _ScriptWriter.cell,
    nodes.Function: _ScriptWriter.function,
    nodes.Wrapped: _ScriptWriter.wrapped,
    nodes.Class: _ScriptWriter.cls,
    nodes.Namespace: _ScriptWriter.namespace,
    nodes.Module: _ScriptWriter.module,
}


# --- what every script has ---

_SUPPORT = """\
import ast
import base64
import collections
import contextlib
import copy
import functools
import importlib
import io
import linecache
import random
import struct
import sys
import types
from types import CodeType
from typing import cast

import torch

_MODULES = {}
_SHOWN = {}


def _bytes(text):
    return bytearray(base64.b64decode(text))


_STORAGES = {}


def _tensor(data, dtype, shape, stride, offset, device, kind):
    if device != "cpu" and not torch.accelerator.is_available():
        device = "cpu"
    key = id(data), device
    if key not in _STORAGES:
        whole = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        # A copy: storages over foreign memory can't be resized.
        _STORAGES[key] = whole.to(device, copy=True).untyped_storage()
    made = torch.empty(0, dtype=dtype, device=device)
    made.set_(_STORAGES[key], offset, shape, stride)
    if kind in ("param", "frozen"):
        return torch.nn.Parameter(made, requires_grad=kind == "param")
    return made.requires_grad_() if kind == "grad" else made


def _array(data, dtype, shape, order):
    import numpy

    return numpy.frombuffer(data, dtype=dtype).reshape(shape, order=order)


def _library(module, name):
    found = importlib.import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def _nn_module(cls):
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    return made


def _partial(function, args, names, values, attributes):
    made = functools.partial(function, *args, **dict(zip(names, values)))
    made.__dict__.update(attributes or {})
    return made


def _namespace(name):
    module = types.ModuleType(name)
    space = vars(module)
    space["__builtins__"] = __builtins__
    _MODULES[id(space)] = module
    if name not in sys.modules:
        sys.modules[name] = module
    return space


def _py_module(name, space):
    module = types.ModuleType(name) if space is None else _MODULES[id(space)]
    if name not in sys.modules:
        sys.modules[name] = module
    return module


def _set_generators(states):
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        importlib.import_module("numpy").random.set_state(states["numpy"])
    if "torch" in states:
        torch.default_generator.set_state(states["torch"])
    for name, state in states.items():
        if name.startswith("cuda:") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, name)


def _function(text, before, count, line, place, file, code_name, free, flags, space, cells, name):
    lines = io.StringIO(text).readlines()[before : before + count]
    node = find_definition(lines, line, place)
    code = compile_definition(node, file, code_name, free, flags)
    shown = _SHOWN.setdefault(file, {})
    shown.update(enumerate(lines, line))
    whole = [shown.get(number, "\\n") for number in range(1, max(shown) + 1)]
    linecache.cache[file] = (sum(map(len, whole)), None, whole, file)
    by_name = dict(zip(free, cells))
    order = tuple(by_name[one] for one in code.co_freevars)
    return types.FunctionType(code, space, name, None, order)
"""

_BORROWED = (
    "_parse", "_name_of", "_place_of", "_find_definitions", "find_definition", "compile_definition",
    "_bare", "_unannotated", "_around", "_class_around", "_renamed",
)  # fmt: skip


def _source_of(module: object) -> str:
    """The functions that compile one function of a file, as they are."""
    head = (
        "# --- how one function of a file is compiled, as tripwire does it\n\n"
        "_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda\nAny = object\n"
    )
    parts = [inspect.getsource(getattr(module, name)).rstrip() for name in _BORROWED]
    return head + "\n\n" + "\n\n\n".join(parts)


def _main(call: dict[str, str], wanted: Environment, next_hook: int) -> str:
    dtypes = (wanted.default_dtype, *(one.dtype for one in wanted.autocast.values()))
    flags = {**wanted.flags, **wanted.precisions}
    if not ITEM_SIZES.keys() >= set(dtypes) or not all(map(is_switch, flags)):
        raise Unwritable("its environment has names that torch doesn't have")
    lines = [
        f"torch.set_default_dtype(torch.{wanted.default_dtype})",
        f"torch.set_float32_matmul_precision({wanted.matmul_precision!r})",
        f"torch.set_autocast_cache_enabled({wanted.autocast_cache})",
    ]
    if wanted.deterministic or wanted.deterministic_warn_only:  # or torch imports its compilers
        only_warns = f"warn_only={wanted.deterministic_warn_only}"
        lines.append(f"torch.use_deterministic_algorithms({wanted.deterministic}, {only_warns})")
    if wanted.num_threads:
        lines.append(f"torch.set_num_threads({wanted.num_threads})")
    if next_hook:
        lines.append(f"torch.utils.hooks.RemovableHandle.next_id = {next_hook}")
    lines += ["_set_generators(GENERATORS or {})", "with contextlib.ExitStack() as stack:"]
    for name, value in flags.items():
        lines.append(f"    torch.backends.{name} = {value!r}")
    for kind, autocast in wanted.autocast.items():
        form = f"{kind!r}, torch.{autocast.dtype}, {autocast.enabled}"
        lines.append(f"    stack.enter_context(torch.autocast({form}))")
    if wanted.inference_mode:
        lines.append("    stack.enter_context(torch.inference_mode())")
    lines.append(f"    stack.enter_context(torch.set_grad_enabled({wanted.grad_mode}))")
    lines.append("    return CALL(*ARGS, **KWARGS)")
    body = "\n".join(f"    {line}" for line in lines)
    return (
        f"CALL = {call['call']}\nARGS = {call['args']} or ()\nKWARGS = {call['kwargs']} or {{}}\n"
        f"GENERATORS = {call['generators']}\n\n\ndef main():\n{body}\n\n\n"
        'if __name__ == "__main__":\n    print(main())\n'
    )
