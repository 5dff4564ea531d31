"""Uses: what a code object may read and write, as facts; bytecode.py finds them.

A `Use` may say too much, never too little: a value that can't be followed counts as used as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from msgspec import Struct

from tripwire.values.classes import is_exactly, isinstance


class StepKind(Enum):
    """By what a value was loaded last."""

    ATTRIBUTE = "attribute"
    GLOBAL = "global"
    FREE = "free variable"
    LOCAL = "argument"
    ITEM = "constant key"

    __hash__ = object.__hash__  # Enum's is written in Python: a step's hash 0.35 → 0.16 µs


class Computed(Enum):
    """Stands among keys for those that the code computes: `v[name] = ...`.

    Among keys that aren't stored: `v[name].append(...)`. For anything else that happens to
    `v[name]`, `v` is used as a whole.
    """

    KEY = "a computed key"


# Methods of containers that add to them and return None.
GROWING = frozenset({"append", "extend", "add"})
_GETS = frozenset({"get", "setdefault"})  # and those that find an item, or that there is none

# Of `a is b`, what the code names: globals, from which attributes may lead on (account.py).
Operands = tuple[tuple[str, ...], ...]


class Step(NamedTuple):
    """The last step to a value: `.cfg`, the global `CFG`, `["scale"]`."""

    kind: StepKind
    name: object  # a str, or any constant where the kind is ITEM


@dataclass(frozen=True, slots=True)
class Use:
    """How the values behind one step are used, all occurrences together.

    A key is a key of a mapping, or an index of a list; for any other value it means that the value
    is read as a whole.
    """

    # v["k"], v.get("k"), "k" in v; Computed.KEY for v[name].append(...)
    keys: frozenset[object] = frozenset()
    # v["k"] = ..., del v["k"]; Computed.KEY for v[name] = ...
    stored_keys: frozenset[object] = frozenset()
    attributes: frozenset[str] = frozenset()  # v.name, v.name = ..., v.method(), getattr(v, "name")
    appended: bool = False  # v.append(...) and the like, see GROWING
    updated: bool = False  # v += 1, v = v + 1: nothing else sees the old or the new value
    tested: bool = False  # whether it is there: `"v" in d`, `hasattr(o, "v")`
    whole: bool = False  # everything else: iterated, passed on, stored, returned, called, ...
    # The same, but for methods of it that are called.
    escapes: bool = field(default=False, compare=False)
    # Whole only because of what `v.append(...)` returned, which is None if `v` is a list.
    only_grown: bool = False

    @property
    def holds_matter(self) -> bool:
        """Whether what a container holds, or a method of it, is asked for; adding isn't asking."""
        return bool(self.whole or self.keys or self.attributes or self.stored_keys)

    @property
    def is_any(self) -> bool:
        """Whether the value is used in any way but for what is stored in it."""
        changed = self.appended or self.updated
        return bool(self.whole or self.tested or changed or self.keys or self.attributes)

    @property
    def taken(self) -> frozenset[str]:
        """The attributes that code takes from a Python module: `add` and `get` may be its own."""
        grown = GROWING if self.appended else frozenset()
        return self.attributes | grown | (_GETS if self.keys else frozenset())


class Uses(Struct, frozen=True):
    """What one code object may read and write. Lines are those of the first occurrence."""

    attributes: dict[str, int]  # loaded by instruction, or spelled by a string constant
    globals: dict[str, int]
    stored_attributes: frozenset[str]
    stored_globals: frozenset[str]
    imports: frozenset[str]  # as written, relative ones with their dots
    has_dynamic_names: bool  # attributes are read or written under computed names
    opens_self: bool  # the same, but of `self` only: `self.__dict__`, `super().__setattr__(k, v)`
    refused: tuple[str, int] | None  # reaches code, frames or objects behind our back; its offset
    passed: dict[str, int]  # globals and attributes that are handed to a call
    steps: dict[Step, Use]
    computes_names: bool = False  # `getattr` and its kin are given names that aren't constants
    # `a is b`, where neither is None, True, False or `...`: which of the two are variables.
    asked: frozenset[tuple[Step, ...]] = frozenset()
    identities: frozenset[Operands] = frozenset()  # such questions, which may be about numbers
    replaced: frozenset[Step] = frozenset()  # stored other than by a sum of what was there
    replaced_of_self: frozenset[str] = frozenset()  # the same, by `self.name = ...`


def merge(a: Use, b: Use) -> Use:
    """Used as `a` says in one place and as `b` says in another."""
    return Use(
        a.keys | b.keys,
        a.stored_keys | b.stored_keys,
        a.attributes | b.attributes,
        a.appended or b.appended,
        a.updated or b.updated,
        a.tested or b.tested,
        a.whole or b.whole,
        a.escapes or b.escapes,
        (a.only_grown or b.only_grown) and all(use.only_grown or not use.whole for use in (a, b)),
    )


def may_name_others(use: Use, container: object = None) -> bool:
    """Whether a computed key may be a key that the code spells elsewhere, or an object."""
    if Computed.KEY not in use.stored_keys:
        return False
    is_spelled = bool(use.keys - {Computed.KEY}) or len(use.stored_keys) > 1
    keys = dict.keys(container) if isinstance(container, dict) else ()
    return is_spelled or not all(is_exactly(key, str, int, float, bool, type(None)) for key in keys)


def join(uses: Iterable[Uses]) -> Uses:
    """The uses of many code objects together; of lines and refusals, the first one counts."""
    found = tuple(uses)
    attributes: dict[str, int] = {}
    names: dict[str, int] = {}
    passed: dict[str, int] = {}
    steps: dict[Step, Use] = {}
    for one in found:
        passed |= one.passed
        for name, line in one.attributes.items():
            attributes.setdefault(name, line)
        for name, line in one.globals.items():
            names.setdefault(name, line)
        for step, use in one.steps.items():
            known = steps.get(step)
            if known is None:
                steps[step] = use
            elif known != use or known.escapes != use.escapes:
                steps[step] = merge(known, use)

    def gather(field: str) -> frozenset[Any]:
        return frozenset().union(*(getattr(one, field) for one in found))

    return Uses(
        attributes,
        names,
        gather("stored_attributes"),
        gather("stored_globals"),
        gather("imports"),
        any(one.has_dynamic_names for one in found),
        any(one.opens_self for one in found),
        next((one.refused for one in found if one.refused), None),
        passed,
        steps,
        any(one.computes_names for one in found),
        gather("asked"),
        gather("identities"),
        gather("replaced"),
        gather("replaced_of_self"),
    )
