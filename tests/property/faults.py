"""Faults: one guard, wire, branch or effect broken at a time. The law machine must notice each.

A fault patches tripwire from outside, for as long as pytest's monkeypatch holds. Each names the
row of the channel table, or the law, that it breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from pytest import MonkeyPatch

from tripwire.dispatch import entry as entries
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry
from tripwire.dispatch.originals import Saved
from tripwire.reading import effects, kinds
from tripwire.reading.torchstate import ALWAYS
from tripwire.tracing import bodies, outside, recorder
from tripwire.validity import admission, guards, kept, plan, table, wires
from tripwire.validity.admission import Admission
from tripwire.validity.guards import GuardWriter
from tripwire.validity.probes import Probe
from tripwire.validity.ways import Crossing
from tripwire.validity.wires import ObjectWire, PulledWire

Patch = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """Something broken on purpose."""

    row: str  # of the channel table, or a law
    name: str
    apply: Patch

    def __str__(self) -> str:
        return f"{self.row}: {self.name}"


def _never(*_: Any, **__: Any) -> None:
    """Stands in for what is left out."""


CONDITIONS: list[str] = []  # what is left out of guards, as patterns


def _without_condition(pattern: str) -> Patch:
    """Guards whose conditions leave out what matches."""
    CONDITIONS.append(pattern)

    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = GuardWriter.check

        def check(
            self: Any, path: str, condition: str, expected: str, found: str, *rows: Any
        ) -> None:
            less = re.sub(pattern, "True", condition)
            whole(self, path, less, expected, found, *(rows if less == condition else ()))

        monkeypatch.setattr(GuardWriter, "check", check)

    return apply


def _without_method(owner: Any, name: str) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, _never)


def _without_torch_flag(name: str) -> Patch:
    index = [flag.name for flag in ALWAYS].index(name)

    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = admission.spell_quickly

        def spell(state: tuple[object, ...], constant: Callable[[object], str]) -> str:
            parts = whole(state, constant).split(" and ")
            return " and ".join([*parts[:index], "True", *parts[index + 1 :]])

        monkeypatch.setattr(admission, "spell_quickly", spell)
        # torch's own check of tensors sees autocast, too.
        monkeypatch.setattr(table, "can_compare_forms", lambda: False)

    return apply


def _without_wires(is_dropped: Callable[[Any], bool]) -> Patch:
    """No wires on dicts of a kind."""

    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = plan._join

        def join(spaces: Any, space: Any, wanted: Any, step: Any, ignored: Any) -> None:
            kind = getattr(step.func, "__self__", None)
            whole(spaces, space, frozenset() if is_dropped(kind) else wanted, step, ignored)

        monkeypatch.setattr(plan, "_join", join)

    return apply


def _without_pulled(*kinds: type) -> Patch:
    """What no sentry can watch isn't looked at."""

    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = Admission._write_pulled

        def write(self: Any, writer: GuardWriter, wire: PulledWire) -> None:
            if not isinstance(wire._kind, kinds):
                whole(self, writer, wire)

        monkeypatch.setattr(Admission, "_write_pulled", write)

    return apply


def _without_objects(is_dropped: Callable[[object], bool]) -> Patch:
    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = ObjectWire.find_cause

        def find(self: ObjectWire, writers: Any) -> Any:
            value = self.value
            return None if value is None or is_dropped(value) else whole(self, writers)

        monkeypatch.setattr(ObjectWire, "find_cause", find)

    return apply


def _taking_equal_for_same(monkeypatch: MonkeyPatch) -> None:
    def equal(left: object, right: object) -> bool:
        return bool(left == right)

    for module in (guards, kept, wires):
        monkeypatch.setattr(module, "same_plain", equal)


def _with_results(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    def apply(monkeypatch: MonkeyPatch) -> None:
        whole = entries.call

        def call(*args: Any) -> Any:
            return [change(t) if isinstance(t, torch.Tensor) else t for t in whole(*args)]

        monkeypatch.setattr(entries, "call", call)

    return apply


def _running_twice(monkeypatch: MonkeyPatch) -> None:
    whole = Dispatcher._trace

    def trace(self: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        self.target(*args, **kwargs)
        return whole(self, args, kwargs, *rest)

    monkeypatch.setattr(Dispatcher, "_trace", trace)


def _without_effects(monkeypatch: MonkeyPatch) -> None:
    whole = Entry._prepare_result

    def prepare(self: Any, *args: Any) -> None:
        whole(self, *args)
        self._effects = ()

    monkeypatch.setattr(Entry, "_prepare_result", prepare)


def _without_hooks(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "HOOK_TABLES", ())
    monkeypatch.setattr(plan._PlanBuilder, "_watch_tables", _never)


def _reading_early(monkeypatch: MonkeyPatch) -> None:
    """A compiler may look inside a backward that names a global number."""
    whole = bodies._find_all

    def find(contexts: Any, refused: Any, *, may_read: bool = True) -> Any:
        return whole(contexts, refused, may_read=True)

    monkeypatch.setattr(bodies, "_find_all", find)
    monkeypatch.setattr(bodies.Baked, "is_current", lambda _: True)


_is = lambda *kinds: lambda kind: isinstance(kind, kinds)  # noqa: E731

FAULTS = (
    Fault("tensor arguments", "dtype", _without_condition(r"v\d+\.dtype is k\d+")),
    Fault("tensor arguments", "shape", _without_condition(r"v\d+\.shape == k\d+")),
    Fault("tensor arguments", "stride", _without_condition(r"v\d+\.stride\(\) == \(.*?\)")),
    Fault("tensor arguments", "offset", _without_condition(r"k\d+\(v\d+, 'storage_o.*")),
    Fault("tensor arguments", "requires_grad", _without_condition(r"v\d+\.requires_grad is \w+")),
    Fault("tensor arguments", "leaf", _without_condition(r"bool\(k\d+\(v\d+\)\) is \w+")),
    Fault("tensor arguments", "aliasing", _without_method(Admission, "_write_distinctness")),
    Fault("plain arguments", "values", _without_method(GuardWriter, "_add_plain")),
    Fault("plain arguments", "equal is same", _taking_equal_for_same),
    Fault("containers", "length", _without_condition(r"k\d+\(v\d+\) == \d+$")),
    Fault("containers", "keys of dicts", _without_method(GuardWriter, "_add_items")),
    Fault("containers", "members of sets", _without_method(GuardWriter, "_add_members")),
    Fault("objects as arguments", "class", _without_condition(r"^type\(v\d+\) is k\d+$")),
    Fault("objects as arguments", "attributes", _without_method(GuardWriter, "_add_attributes")),
    Fault("objects as arguments", "absences", _without_method(GuardWriter, "_check_absences")),
    Fault(
        "globals",
        "wires",
        _without_wires(lambda kind: isinstance(kind, kinds.NamesKind) and kind.module is not None),
    ),
    Fault("globals", "absences", _without_method(plan._PlanBuilder, "_watch_builtins")),
    Fault("cells, defaults, code", "cells", _without_pulled(kinds.CellsKind)),
    Fault(
        "cells, defaults, code",
        "code and defaults",
        _without_objects(lambda value: isinstance(value, FunctionType)),
    ),
    Fault("instance attributes", "wires", _without_wires(_is(kinds.AttributesKind))),
    Fault("instance attributes", "slots", _without_pulled(kinds.SlotsKind)),
    Fault("instance attributes", "tables of modules", _without_wires(_is(kinds.TableKind))),
    Fault("instance attributes", "hooks", _without_hooks),
    Fault(
        "instance attributes",
        "form of tensors",
        _without_objects(lambda value: isinstance(value, torch.Tensor)),
    ),
    Fault("class attributes", "wires", _without_wires(_is(kinds.ClassDictKind))),
    Fault(
        "class attributes",
        "class of an object",
        _without_objects(lambda value: not isinstance(value, (torch.Tensor, FunctionType, type))),
    ),
    Fault("class attributes", "bases", _without_objects(lambda value: isinstance(value, type))),
    Fault(
        "Python modules",
        "wires",
        _without_wires(lambda kind: isinstance(kind, kinds.NamesKind) and kind.module is None),
    ),
    Fault("containers", "items of dicts", _without_wires(_is(kinds.ItemsKind))),
    Fault("containers", "elements of lists", _without_pulled(kinds.ElementsKind)),
    Fault("containers", "members of sets that are state", _without_pulled(kinds.MembersKind)),
    Fault("containers", "order of dicts", _without_pulled(kinds.OrderKind)),
    Fault(
        "tensor values",
        "branches",
        lambda monkeypatch: monkeypatch.setattr(Probe, "agrees", lambda *_: True),
    ),
    Fault(
        "tensor values",
        "crossings",
        lambda monkeypatch: monkeypatch.setattr(Crossing, "__call__", _never),
    ),
    Fault("torch's state", "grad mode", _without_torch_flag("grad mode")),
    Fault("torch's state", "inference mode", _without_torch_flag("inference mode")),
    Fault("torch's state", "autocast", _without_torch_flag("autocast")),
    Fault("torch's state", "default dtype", _without_torch_flag("default dtype")),
    Fault("environment", "wires", _without_method(plan._PlanBuilder, "_watch_environment")),
    Fault("environment", "context variables", _without_pulled(kinds.ContextKind)),
    Fault("environment", "caches of functions", _without_pulled(kinds.MemoKind)),
    Fault("environment", "a thread's own", _without_pulled(kinds.ThreadLocalKind)),
    Fault("L3", "no effects", _without_effects),
    Fault(
        "L3",
        "nothing undone at a crossing",
        lambda monkeypatch: monkeypatch.setattr(Saved, "restore", lambda _: True),
    ),
    Fault("L3", "no attribute written", _without_method(effects.Put, "apply")),
    Fault("L3", "nothing appended", _without_method(effects.Extend, "apply")),
    Fault("L3", "nothing printed", _without_method(outside.Say, "apply")),
    Fault(
        "L3",
        "what torch runs inside a call isn't seen",
        lambda monkeypatch: monkeypatch.setattr(
            recorder, "_noting_python", lambda _: nullcontext([])
        ),
    ),
    Fault("L4", "the program runs twice", _running_twice),
    Fault("L1", "results are copies", _with_results(torch.clone)),
    Fault("L1", "results have no gradient", _with_results(torch.Tensor.detach)),
)
BEHIND_COMPILERS = (  # nothing is wrong behind "eager"
    Fault("L1", "globals that a backward reads are those of the call", _reading_early),
)
ROWS = (
    "tensor arguments",
    "plain arguments",
    "containers",
    "objects as arguments",
    "globals",
    "cells, defaults, code",
    "instance attributes",
    "class attributes",
    "Python modules",
    "tensor values",
    "torch's state",
    "environment",
    "L1",
    "L3",
    "L4",
)
FAULTS_BY_NAME = {str(fault): fault for fault in (*FAULTS, *BEHIND_COMPILERS)}
assert len(FAULTS_BY_NAME) == len(FAULTS) + len(BEHIND_COMPILERS)
