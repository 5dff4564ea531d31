"""Views: inert descriptions of what a record holds besides data: functions, classes, objects.

A view can't become a live object. It knows names and holds other views, so a record can be looked
through without trust.
"""

from __future__ import annotations

import io
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import msgspec

from tripwire.errors import TripwireError
from tripwire.recording.format import nodes
from tripwire.recording.format.container import damaged
from tripwire.recording.format.nodes import Slot
from tripwire.recording.format.rows import most_memory

Value = Callable[[Slot], object]


class View(msgspec.Struct, frozen=True, eq=False):
    """Something of a record that isn't data. Compared by identity."""


class LibraryView(View, frozen=True):
    """Something of an installed library."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{'.'.join(filter(None, (self.module, self.name)))}>"


class ClassView(View, frozen=True):
    """A class of the user's."""

    name: str
    module: str
    attributes: dict[str, object] = {}
    bases: list[object] = []

    def __repr__(self) -> str:
        return f"<class {self.module}.{self.name}>"


class FunctionView(View, frozen=True):
    """A function of the user's."""

    name: str
    file: str
    line: int
    source: str | None
    details: dict[str, object] = {}  # defaults, closure, ...

    def __repr__(self) -> str:
        return f"<function {self.name} at {self.file}:{self.line}>"


class ModuleView(View, frozen=True):
    """A module of the user's, or the globals of one: the names that recorded code uses."""

    name: str
    attributes: dict[str, object] = {}

    def __repr__(self) -> str:
        return f"<module {self.name} with {_count(self.attributes, 'name')}>"


class PartsView(View, frozen=True):
    """A thing made of others: a method, a partial, a cell, a call."""

    form: str
    parts: list[object] = []

    def __repr__(self) -> str:
        return f"<{self.form} of {len(self.parts)}>"


class ObjectView(View, frozen=True):
    """An instance, with its attributes; `parts` is what it holds if it is a list, dict, ..."""

    cls: object
    attributes: dict[str, object] = {}
    parts: list[object] = []

    def __repr__(self) -> str:
        return in_short(self)


class FormView(View, frozen=True):
    """What modules of one class have in common."""

    cls: object
    node: nodes.ModuleForm


class MemberView(View, frozen=True):
    """A member of an enum."""

    cls: object
    name: str | None
    value: list[object] = []

    def __repr__(self) -> str:
        return f"<member {self.name} of {self.cls!r}>"


class TupleView(View, frozen=True):
    """A namedtuple."""

    cls: object
    items: tuple[object, ...]

    def __repr__(self) -> str:
        return f"<namedtuple of {self.cls!r} with {_count(self.items, 'item')}>"


class WithheldView(View, frozen=True):
    """A tensor or an array without its values."""

    policy: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    statistics: tuple[float, ...] | None


class AbsentView(View, frozen=True):
    """A tensor, an array or another value of a library that isn't installed here."""

    node: nodes.AnyNode

    def __repr__(self) -> str:
        return f"<{type(self.node).__name__} of a library that isn't installed here>"


class OpaqueView(View, frozen=True):
    """Something that the record doesn't hold."""

    cls: str
    reason: str

    def __repr__(self) -> str:
        return f"<missing {self.cls}: {self.reason}>"


def module_state(form: nodes.ModuleForm, values: Iterable[object]) -> dict[str, object]:
    """The attributes of an nn.Module of that form."""
    given = tuple(values)
    if sum(count for _, count in form.tables) != len(form.keys) or len(given) != len(
        form.names
    ) + len(form.keys):
        raise ValueError("a module has another number of values than of names")
    rest, keys = iter(given), iter(form.keys)
    state: dict[str, object] = {name: next(rest) for name in form.names}
    for table, count in form.tables:
        state[table] = {key: next(rest) for key in itertools.islice(keys, count)}
    return state


def _form_of(node: nodes.ModuleObject, value: Value) -> FormView | OpaqueView:
    form = value(node.form)
    if not isinstance(form, (FormView, OpaqueView)):
        raise ValueError("a module has a form that isn't one")
    return form


class Viewer:
    """Makes views: the maker of a decoder for files that nobody trusts."""

    live = False

    def __init__(
        self, codes: tuple[nodes.Code, ...], read: Callable[[str], bytes] | None = None
    ) -> None:
        self._codes = codes
        self._read = read
        self._lines: dict[str, list[str]] = {}
        self._texts: dict[tuple[str, int, int], str] = {}
        self._stored = self._shown = 0  # characters of source in the file, and of functions

    def needs(self, node: nodes.AnyNode) -> Iterator[Slot]:
        match node:
            case nodes.Object(cls=cls) | nodes.EnumMember(cls=cls) | nodes.ModuleForm(cls=cls):
                yield cls
            case nodes.ModuleObject(form=form):
                yield form
            case nodes.NamedTuple(cls=cls, items=items):
                yield cls
                yield from items

    def make(self, node: nodes.AnyNode, value: Value) -> object:
        match node:
            case nodes.Library(module, name):
                return LibraryView(module, name)
            case nodes.Class():
                return ClassView(node.qualname, node.module)
            case nodes.Function():
                return self._function(node)
            case nodes.Namespace(module=name) | nodes.Module(name=name):
                return ModuleView(name)
            case nodes.Wrapped(form=form):
                return PartsView(form)
            case nodes.CellNode():
                return PartsView("cell")
            case nodes.CallNode():
                return PartsView("call")
            case nodes.Object():
                return ObjectView(value(node.cls))
            case nodes.ModuleForm():
                return FormView(value(node.cls), node)
            case nodes.ModuleObject():
                shape = _form_of(node, value)
                return ObjectView(shape.cls) if isinstance(shape, FormView) else shape
            case nodes.EnumMember():
                return MemberView(value(node.cls), node.name)
            case nodes.NamedTuple():
                return TupleView(value(node.cls), tuple(map(value, node.items)))
            case nodes.Withheld():
                return WithheldView(
                    node.policy, node.dtype, node.shape, node.device, node.statistics
                )
            case nodes.Opaque():
                return OpaqueView(node.cls, node.reason)
        raise ValueError(type(node).__name__)

    def _function(self, node: nodes.Function) -> FunctionView:
        if node.code >= len(self._codes):
            raise ValueError("a function without code")
        code = self._codes[node.code]
        return FunctionView(node.qualname, code.file, code.line, self._source(code))

    def _source(self, code: nodes.Code) -> str | None:
        if code.source is None or self._read is None:
            return None
        lines = self._lines.get(code.source)
        if lines is None:
            text = self._read(code.source).decode("utf-8", "replace")
            self._stored += len(text)
            lines = self._lines[code.source] = io.StringIO(text).readlines()
        before, count = code.lines
        at = code.source, before, count
        if at not in self._texts:  # functions of one code share it
            text = self._texts[at] = "".join(lines[before : before + count] if count else lines)
            self._shown += len(text)
            if self._shown > most_memory(self._stored):  # functions may lie in one another
                raise ValueError("more source than a record has")
        return self._texts[at]

    def fill(self, node: nodes.AnyNode, made: object, value: Value) -> None:
        match node, made:
            case nodes.Class(), ClassView():
                made.attributes.update(zip(node.names, map(value, node.values), strict=True))
                made.bases.extend(map(value, node.bases))
            case nodes.Function(), FunctionView():
                made.details["defaults"] = value(node.defaults)
                made.details["kwdefaults"] = value(node.kwdefaults)
                made.details["closure"] = [value(cell) for cell in node.closure]
                made.details["globals"] = value(node.namespace)
                made.details["attributes"] = value(node.attributes)
            case ((nodes.Namespace() | nodes.Module()), ModuleView()):
                made.attributes.update(zip(node.names, map(value, node.values), strict=True))
            case nodes.Wrapped(), PartsView():
                made.parts.extend(map(value, node.parts))
            case nodes.CellNode(), PartsView():
                made.parts.extend([] if node.empty else [value(node.content)])
            case nodes.CallNode(), PartsView():
                made.parts.extend([value(node.function), *map(value, node.args)])
            case nodes.Object(), ObjectView():
                names, values = node.names + node.slots, node.values + node.slot_values
                made.attributes.update(zip(names, map(value, values), strict=True))
                if node.content is not None:
                    made.parts.append(value(node.content))
            case nodes.ModuleObject(), ObjectView():
                form = value(node.form)
                if isinstance(form, FormView):
                    made.attributes.update(module_state(form.node, map(value, node.values)))
            case nodes.EnumMember(), MemberView():
                made.value.append(value(node.value))

    def take(self, node: nodes.Object, made: object, content: object) -> None:
        """Views hold their content as a part."""

    def explain(self, node: nodes.AnyNode, error: Exception) -> TripwireError:
        return damaged(f"a {type(node).__name__} node makes no sense ({error})")


# --- in one line ---

_LONGEST = 160  # characters
_MOST_ATTRIBUTES = 8  # of an object that is shown with them


def in_short(value: object) -> str:
    """A value of a record in one line."""
    shape = _tell_shape(value)
    if shape is not None:
        return shape
    text = " ".join(_Short().repr(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _tell_shape(value: object) -> str | None:
    """A tensor or an array in short; None for anything else."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return None
    return f"{value.dtype} {tuple(shape)}".removeprefix("torch.")


def _name_of(cls: object) -> str:
    return f"{cls.module}.{cls.name}" if isinstance(cls, ClassView | LibraryView) else repr(cls)


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


class _Short(reprlib.Repr):
    """A few items of a few levels: a whole repr may be too deep, or never end.

    A small object is shown with its attributes, but not another object inside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_object = False
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxdeque, self.maxlong = 12, 100
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 4096:  # Python writes no more than 4,300 digits
            return f"<int of {x.bit_length()} bits>"
        return super().repr_int(x, level)

    def repr_slice(self, x: slice, level: int) -> str:
        return f"slice{self.repr_tuple((x.start, x.stop, x.step), level)}"

    def repr_ObjectView(self, x: ObjectView, level: int) -> str:  # noqa: N802
        attributes = x.attributes
        if self._in_object or not 0 < len(attributes) + len(x.parts) <= _MOST_ATTRIBUTES:
            return f"<object of {x.cls!r} with {_count(attributes, 'attribute')}>"
        self._in_object = True
        shown = [self.repr1(part, level - 1) for part in x.parts]
        for name, value in attributes.items():
            known = name if name.isidentifier() else repr(name)
            shown.append(f"{known}={self.repr1(value, level - 1)}")
        self._in_object = False
        return f"{_name_of(x.cls)}({', '.join(shown)})"

    def repr1(self, x: Any, level: int) -> str:
        return (_tell_shape(x) if self._in_object else None) or super().repr1(x, level)

    def _repr_kind_of_dict(self, x: dict[object, object], level: int) -> str:
        return f"{type(x).__name__}({self.repr_dict(x, level)})"

    repr_OrderedDict = repr_defaultdict = repr_Counter = _repr_kind_of_dict  # noqa: N815
