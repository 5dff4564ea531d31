"""Rerun: the call of a record that somebody trusts is built, and runs again.

Its objects are made without their constructors, except NumPy's generators: the `__new__` of the C
type that an instance is built on makes it, and its attributes are put into its dict and its slots
directly. rebuild.py makes functions, classes and modules, and finds libraries.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn, cast

import msgspec

from tripwire.errors import FLAG, CannotReplay, Kind, TripwireError, check_kinds
from tripwire.recording.capture.origin import Patch, applied
from tripwire.recording.capture.outcomes import (
    Replayed,
    describe_error,
    describe_result,
    entered,
    is_same,
    tell_redacted,
)
from tripwire.recording.capture.record import SHOWN, check_path
from tripwire.recording.capture.shelf import Shelf
from tripwire.recording.capture.wrapped import build_generator, is_generator, restore_generator
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import StoredBlobs
from tripwire.recording.format.decode import Decoder
from tripwire.recording.format.file import Record
from tripwire.recording.format.manifest import Manifest, Outcome, encode_json
from tripwire.recording.format.nodes import AnyNode, Slot, find_hook_ids
from tripwire.recording.format.views import Value, module_state
from tripwire.recording.replay.rebuild import Rebuilder
from tripwire.values.classes import class_dict, is_kind, isinstance, mro
from tripwire.values.contents import own_dict

logger = logging.getLogger("tripwire.recording")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The call of a record, alive."""

    manifest: Manifest
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: Any
    generators: dict[str, Any]
    rebuilder: Rebuilder
    patches: list[Patch]

    def prepare(self, backend: str | None = None) -> Callable[[], Any]:
        """What runs it in its environment. `backend`: another one, or "none" to run plainly."""
        call = self._compile(backend)
        return lambda: self._run(call, backend)

    def _run(self, call: Callable[..., Any], backend: str | None) -> Any:
        compiled = self.manifest.compiled
        with (
            _generators_put_back(any(name.startswith("cuda:") for name in self.generators)),
            self.rebuilder.importable(),
            entered(self.manifest.environment),
            applied(self.patches),
        ):
            if compiled is not None and compiled.hit and backend != "none":
                # Compiled code raised: an earlier call made it, from values like these.
                self._set_generators()
                args, kwargs = self._copy_arguments()
                call(*args, **kwargs)
            self._set_generators()
            if compiled is None or not compiled.hit or backend == "none":
                return call(*self.args, **self.kwargs)
            return self._run_hit(call)

    def _run_hit(self, call: Callable[..., Any]) -> Any:
        """Run compiled code, and raise what it raises, also where the plain call returns."""
        from tripwire.recording.capture.calls import Beginning
        from tripwire.tracing.state import CURRENT

        beginning = CURRENT.kept = Beginning(self.target, self.args, self.kwargs)
        try:
            result = call(*self.args, **self.kwargs)
        finally:
            CURRENT.kept = None
        if beginning.code_error is not None:
            raise beginning.code_error
        return result

    def _copy_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments. `deepcopy` refuses tensors that autograd made."""
        import torch

        memo: dict[int, Any] = {}
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone().requires_grad_() * 1
        return copy.deepcopy((self.args, self.kwargs), memo)

    def _compile(self, backend: str | None) -> Callable[..., Any]:
        compiled = self.manifest.compiled
        if backend == "none" or (backend is None and compiled is None):
            return self.target
        from tripwire.backends.registry import find_backend
        from tripwire.dispatch.compiled import compile_callable
        from tripwire.dispatch.pipeline import Options

        chosen = backend or self.backend or (compiled.backend if compiled else "eager")
        fullgraph = compiled is not None and compiled.fullgraph
        options = Options(  # without `failures`: the record is there already
            find_backend(chosen),
            fullgraph,
            eager_on_backend_error=not (fullgraph or callable(chosen)),
            check=compiled is not None and compiled.check,
            waits=fullgraph,
        )
        made: Callable[..., Any] = compile_callable(
            self.target, self.manifest.function.name, options
        )
        return made

    def _set_generators(self) -> None:
        if "python" in self.generators:
            random.setstate(self.generators["python"])
        if "numpy" in self.generators:
            import numpy

            numpy.random.set_state(self.generators["numpy"])
        if "torch" in self.generators:
            import torch

            torch.default_generator.set_state(self.generators["torch"])
        for name, state in self.generators.items():
            if name.startswith("cuda:"):
                import torch

                number = int(name.partition(":")[2])
                if torch.cuda.is_available() and number < torch.cuda.device_count():
                    torch.cuda.set_rng_state(state, number)


@contextlib.contextmanager
def _generators_put_back(cuda: bool) -> Iterator[None]:
    """Put the generators of this process back after a replay. `cuda`: it draws there, too."""
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            stack.callback(numpy.set_state, numpy.get_state(legacy=False))
        torch = sys.modules.get("torch")
        if torch is not None:
            own = [torch.default_generator]
            if cuda and torch.cuda.is_available():
                torch.cuda.init()
            if torch.cuda.is_initialized():
                own += torch.cuda.default_generators
            for generator in own:
                stack.callback(generator.set_state, generator.get_state())
        yield


def check_trust(trust: bool) -> None:
    """A record's code runs only if somebody says that it may."""
    if not trust:
        raise CannotReplay(
            "A replay runs the code in the record. Look at the record first: "
            "tripwire.load_record(path) and `tripwire show` run nothing of it. If you trust it, "
            "pass trust=True, or --trust.",
            slug="replay-untrusted",
        )


@contextlib.contextmanager
def rebuilding(path: str | os.PathLike[str]) -> Iterator[Rebuilt]:
    """A record's call, built from its own code. Only for files that are trusted."""
    with Record.open(path) as record:
        shelf = Shelf(record.table, record.read, record.manifest.python.magic)
        rebuilder = Rebuilder(record.table, shelf)
        needed = {name: slot for name, slot in record.table.roots.items() if name not in SHOWN}
        table = msgspec.structs.replace(record.table, roots=needed)
        with rebuilder.importable():
            roots: dict[str, Any] = rebuild(table, record.blobs, rebuilder)
        _reserve_hook_ids(find_hook_ids(record.table))
        if "call" not in roots:
            raise CannotReplay("This record holds values, but no call.", slug="replay-no-call")
        yield Rebuilt(
            record.manifest,
            roots["call"],
            tuple(roots.get("args") or ()),
            dict(roots.get("kwargs") or {}),
            roots.get("backend"),
            dict(roots.get("generators") or {}),
            rebuilder,
            list(roots.get("patches") or ()),
        )


def _reserve_hook_ids(taken: Iterable[int]) -> None:
    """Let hooks that the call registers have other ids than those that are recorded."""
    highest = max(taken, default=-1)
    if highest >= 0:
        from torch.utils.hooks import RemovableHandle

        RemovableHandle.next_id = max(RemovableHandle.next_id, highest + 1)


_KINDS: dict[str, Kind] = {
    "trust": FLAG,
    "backend": ((str, Callable, NoneType), "a back end's name, a callable or None"),
}


def replay(path: str | os.PathLike[str], *, trust: bool = False, backend: str | None = None) -> Any:
    """Run a record's call again: returns what it returns, raises what it raises.

    trust: must be True, since the code in the record runs.
    backend: compile it with this back end; "none" runs it as plain Python.
    """
    check_path(path)
    check_kinds({"trust": trust, "backend": backend}, _KINDS)
    check_trust(trust)
    with rebuilding(path) as call:
        if call.manifest.redacted:
            logger.warning("%s: %s", path, tell_redacted(call.manifest.redacted))
        return call.prepare(backend)()


def find_outcome(path: str | os.PathLike[str]) -> Outcome:
    """Run a trusted record's call, and say how it ended. Raises CannotReplay where it can't run."""
    with rebuilding(path) as call:
        try:
            result = call.prepare()()
        except Exception as error:
            outcome = describe_error(error, call.target)
            if isinstance(error, CannotReplay) and not is_same(call.manifest.outcome, outcome):
                raise
            return outcome
        return describe_result(result)


# --- in a process that checks a record ---


def _replay_and_tell(path: str) -> Replayed:
    """Replay a record that this user's own process wrote a moment ago."""
    try:
        outcome = find_outcome(path)
    except TripwireError as error:
        why = str(error).removesuffix(f" [{error.slug}]").partition("\n")[0]
        return Replayed(None, why.rstrip("."))
    torch = sys.modules.get("torch")
    return Replayed(outcome, "", "" if torch is None else str(torch.__version__))


def print_replayed() -> None:
    """What a process that checks a record runs: the path is its argument."""
    replayed = _replay_and_tell(sys.argv[1])
    sys.stdout.flush()  # what the replay prints comes before; the last line is ours
    sys.stdout.buffer.write(b"\n" + encode_json(replayed))


# --- live objects ---


def rebuild(table: nodes.Table, blobs: StoredBlobs, rebuilder: Rebuilder) -> dict[str, object]:
    """The roots of a record that is trusted, as live objects."""
    return Decoder(table, blobs, ObjectMaker(rebuilder)).roots()


class ObjectMaker:
    """The maker of a decoder for trusted files."""

    live = True

    def __init__(self, rebuilder: Rebuilder) -> None:
        self._rebuilder = rebuilder

    def needs(self, node: AnyNode) -> Iterable[Slot]:
        match node:
            case nodes.Object():
                return (node.cls, node.content)
            case nodes.ModuleForm():
                return (node.cls,)
            case nodes.ModuleObject():
                return (node.form,)
            case nodes.EnumMember():
                return (node.cls, node.value)
            case nodes.NamedTuple():
                return (node.cls, *node.items)
            case nodes.CallNode():
                return (node.function, *node.args)
            case nodes.Withheld() | nodes.Opaque():
                return ()
            case _:
                return self._rebuilder.needs(node)

    def make(self, node: AnyNode, value: Value) -> object:
        match node:
            case nodes.Object():
                return build_instance(cast("type", value(node.cls)), value(node.content))
            case nodes.ModuleForm():
                return Form(cast("type", value(node.cls)), node)
            case nodes.ModuleObject():
                return build_instance(cast("Form", value(node.form)).cls, None)
            case nodes.EnumMember():
                return _find_member(cast("Any", value(node.cls)), node.name, value(node.value))
            case nodes.NamedTuple():
                return _build_tuple(cast("type", value(node.cls)), map(value, node.items))
            case nodes.CallNode():
                return cast("Any", value(node.function))(*map(value, node.args))
            case nodes.Withheld():
                return _build_withheld(node)
            case nodes.Opaque():
                return MissingObject(node.cls, node.reason)
            case _:
                return self._rebuilder.make(node, value)

    def fill(self, node: AnyNode, made: object, value: Value) -> None:
        match node:
            case nodes.Object():
                _fill_instance(node, made, value)
            case nodes.ModuleObject():
                _fill_module(cast("Form", value(node.form)), node, made, value)
            case nodes.EnumMember() | nodes.NamedTuple() | nodes.CallNode() | nodes.ModuleForm():
                pass
            case nodes.Withheld() | nodes.Opaque():
                pass
            case _:
                self._rebuilder.fill(node, made, value)

    def take(self, node: nodes.Object, made: object, content: object) -> None:
        if is_generator(type(made)):
            restore_generator(made, content)
            return
        for base, fill in _TAKES:
            if is_kind(type(made), base):
                fill(made, content)
                return

    def explain(self, node: AnyNode, error: Exception) -> TripwireError:
        return CannotReplay(
            f"A value of the record ({type(node).__name__}) can't be made here: "
            f"{type(error).__name__}: {error}.\n"
            "Replay with the Python and the packages that `tripwire show` names.",
            slug="replay-cannot-build",
        )


# --- instances ---

_GIVEN_AT_BIRTH = (tuple, str, int, float, complex, bytes, frozenset)


def build_instance(cls: type, content: object) -> object:
    """An instance without attributes; its constructor doesn't run."""
    if is_generator(cls):
        return build_generator(cls, content)
    for base in _GIVEN_AT_BIRTH:
        if is_kind(cls, base):
            return cast("Any", base).__new__(cls, content)
    args = cast("tuple[object, ...]", content) if is_kind(cls, BaseException) else ()
    for k in mro(cls):
        new = class_dict(k).get("__new__")
        if type(new) is types.BuiltinMethodType:  # of a C type: a class statement's is a function
            return new(cls, *args)
    return object.__new__(cls)


@dataclass(frozen=True, slots=True)
class Form:
    """What modules of one class have in common."""

    cls: type
    node: nodes.ModuleForm


def _fill_module(form: Form, node: nodes.ModuleObject, made: object, value: Value) -> None:
    import torch

    state = own_dict(made)
    if state is None or not is_kind(type(made), torch.nn.Module):
        raise ValueError(f"{type(made).__name__} is no nn.Module here")
    state.update(vars(torch.nn.Module()))
    state.update(module_state(form.node, map(value, node.values)))


def _fill_instance(node: nodes.Object, made: object, value: Value) -> None:
    state = own_dict(made)
    if state is not None:
        state.update(zip(node.names, map(value, node.values), strict=True))
    elif node.names:
        raise ValueError(f"{type(made).__name__} has no attributes here")
    for name, slot in zip(node.slots, node.slot_values, strict=True):
        _find_member_descriptor(type(made), name).__set__(made, value(slot))


def _find_member_descriptor(cls: type, name: str) -> types.MemberDescriptorType:
    for k in mro(cls):
        found = class_dict(k).get(name)
        if type(found) is types.MemberDescriptorType:
            return found
    raise ValueError(f"{cls.__name__} has no slot {name!r} here")


def _take_deque(made: Any, content: Any) -> None:
    collections.deque.__init__(made, content, content.maxlen)


def _take_ordered(made: Any, content: Any) -> None:
    for key, item in content.items():
        collections.OrderedDict.__setitem__(made, key, item)


def _take_default(made: Any, content: Any) -> None:
    dict.update(made, content)
    collections.defaultdict.__dict__["default_factory"].__set__(made, content.default_factory)


# How an instance of a subclass takes what it holds; the first base that fits.
_TAKES: tuple[tuple[type, Callable[[Any, Any], object]], ...] = (
    (list, list.extend),
    (set, set.update),
    (collections.deque, _take_deque),
    (collections.OrderedDict, _take_ordered),
    (collections.defaultdict, _take_default),
    (dict, dict.update),
    (bytearray, bytearray.extend),
    (random.Random, random.Random.setstate),
)


def _find_member(cls: Any, name: str | None, content: object) -> object:
    member = cls._member_map_.get(name) if name is not None else None
    return member if member is not None else cls(content)


def _build_tuple(cls: type, items: Iterable[object]) -> object:
    if any("n_sequence_fields" in class_dict(k) for k in mro(cls)):
        return cls(tuple(items))  # a struct sequence of C's has no other way
    return tuple.__new__(cls, items)


def _build_withheld(node: nodes.Withheld) -> object:
    if node.policy == "redacted":
        kind = "array" if node.kind == "array" else "tensor"
        raise CannotReplay(
            f"An input of shape {list(node.shape)} (a {kind}) was redacted when this was "
            "recorded.\nRecord again with another policy for it.",
            slug="replay-redacted",
        )
    if node.kind == "array":
        import numpy as np

        return np.zeros(node.shape, dtype=np.dtype(node.dtype))
    from tripwire.recording.format.torchvalues import build_withheld

    return build_withheld(node)


# --- what a record doesn't hold ---


class MissingObject:
    """Stands where a record holds nothing; raises when it is used."""

    __slots__ = ("_cls", "_reason")

    def __init__(self, cls: str, reason: str) -> None:
        self._cls = cls
        self._reason = reason

    def __repr__(self) -> str:
        return f"<missing {self._cls}: {self._reason}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # Python's own questions
        raise _missing(self)


def _missing(stand_in: MissingObject) -> CannotReplay:
    return CannotReplay(
        f"The call uses a {stand_in._cls} that the record doesn't hold: {stand_in._reason}.\n"
        "Pass what is needed of it as a plain value, and record again.",
        slug="replay-missing-value",
    )


def _use(self: MissingObject, *args: object, **kwargs: object) -> NoReturn:
    raise _missing(self)


_OPERATIONS = (
    "call len iter next getitem setitem delitem contains enter exit bool int float index "
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul lt le gt ge neg"
)
for _name in _OPERATIONS.split():
    setattr(MissingObject, f"__{_name}__", _use)
