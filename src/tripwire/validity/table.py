"""Table: the guard function of an entry: its text, and rows that C checks instead of the text.

The text is the specification: a row checks what its line checks; lines without a row run in Python.
Without the C module, or with TRIPWIRE_PURE=1 in the environment, the text itself is compiled and
run. Arguments cost 0.1 µs a tensor instead of 1, bench_dispatch.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Container, Sequence, Set
from types import FunctionType
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from tripwire.imports import find_native
from tripwire.reading.names import fingerprint
from tripwire.reading.tensors import TensorMeta, Traits, meta_of, quietly, traits_of
from tripwire.rulebook.refusals import Cause, Mismatch
from tripwire.values.classes import isinstance, name_of
from tripwire.values.contents import spell_key

STATE_IDS = "_state"  # among a guard function's globals: identities of what is state

# What isn't there, or can't be computed from this call's numbers: a division by a size of zero.
CAUGHT = (LookupError, AttributeError, RuntimeError, TypeError, ValueError, ArithmeticError)


class TableRow(Struct, frozen=True):
    """What C does for one line. Which fields count is up to the operation: see `_table.c`."""

    op: str
    of: str = ""  # the variable that it looks at
    n: int = 0
    flag: bool = False
    x: object = None
    y: object = None
    z: object = None
    all_of: tuple[str, ...] = ()  # the variables, of what is about several
    ids: tuple[int, ...] = ()


class Assignment(Struct, frozen=True):
    """A variable for what an expression gives."""

    name: str
    expression: str
    rows: tuple[TableRow, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} = {self.expression}"


Table: Any = getattr(find_native("validity._table"), "Table", None)
_NAME = re.compile(r"[^\W\d]\w*")
_SIZES = re.compile(r"\b(\w+)\.(size|stride)\(\)")


class _WithRows(Protocol):
    """A line of the text: `str` gives it."""

    @property
    def rows(self) -> tuple[TableRow, ...]:
        """What C does for it; none where it can't."""


def build_table(lines: Sequence[_WithRows], returned: Sequence[str], space: dict[str, Any]) -> Any:
    """What admits calls as a function of these lines would."""
    return _TableRows(space).build(lines, returned)


# --- tensors ---

# torch's own comparison of a tensor's class, dispatch keys, dtype, device, need for a gradient,
# sizes and strides: part of its C core, and there from 2.0 on. It takes 60 ns a tensor. The
# dispatch keys alone take 370 when Python asks for them.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_compare: Any = getattr(_guards, "TensorGuards", None)


# Asked of each tensor before: a nested one has no strides, and raises an error of C++'s in there,
# which ends the process. Other layouts don't (test_table.py has each of them).
HAS_FORM = (torch._C.TensorBase.is_nested, False)


def compare_forms(
    forms: Sequence[tuple[torch.Tensor, list[int | None], list[int | None]]],
) -> Callable[..., bool]:
    """Whether tensors are like these, whose sizes and strides are None where they don't matter."""
    tensors, sizes, strides = (list(column) for column in zip(*forms, strict=True))
    made = _compare(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return made.check  # type: ignore[no-any-return]


@functools.cache
def can_compare_forms() -> bool:
    """Whether torch's comparison is there, and tells what it must."""
    if _compare is None:
        return False
    one, other = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.complex64)
    unlike = [
        *(torch.zeros(2, 4), torch.zeros(3, 2).t(), torch.zeros(2, 3, 1), one.double()),
        *(other, torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, requires_grad=True)),
        torch.nn.Parameter(one, requires_grad=False),
    ]
    is_like = compare_forms([(one, [2, 3], [3, 1])])
    is_open = compare_forms([(one, [None, None], [None, None])])
    is_plain = compare_forms([(other, [2, 3], [3, 1])])
    with torch.no_grad():  # the need for a gradient counts in there, too
        told = not any(map(is_like, unlike)) and is_like(torch.ones(2, 3))
    is_any = is_open(torch.zeros(4, 2).t()) and not is_open(torch.zeros(3))
    return told and is_any and is_plain(other.clone()) and not is_plain(other.conj())


dispatch_keys = torch._C._dispatch_keys


def select_form(meta: TensorMeta, traits: Traits) -> tuple[object, ...]:
    """What of a tensor's form compiled code depends on."""
    return meta, traits.is_leaf if meta.requires_grad else None


@quietly
def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same of a tensor as it is now."""
    return *select_form(meta_of(tensor), traits_of(tensor)), dispatch_keys(tensor)


def ask(tensor: torch.Tensor, query: str) -> object:
    """The answer; or what kind of error, from a tensor that can't be asked."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return getattr(tensor, query)()
    except Exception as error:  # torch has no one class for "not of such a tensor"
        return type(error)


def describe_tensor(value: object) -> str:
    """A tensor for people; or whatever is there in its place."""
    if not isinstance(value, torch.Tensor):
        return str(fingerprint(value))
    traits = traits_of(value)
    leaf = "" if traits.is_leaf else ", no leaf"
    return f"{name_of(traits.cls)} {meta_of(value).full}{leaf}"


class _TableRows:
    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._registers: dict[str, int] = {}
        self._n_registers = 0  # more than names, where one is assigned again
        self._rows: list[tuple[object, ...]] = []
        self._pending: list[_WithRows] = []  # lines without rows that follow one another

    def build(self, lines: Sequence[_WithRows], returned: Sequence[str]) -> Any:
        for line in lines:
            if not line.rows:
                self._pending.append(line)
                continue
            self._flush()
            for row in line.rows:
                self._add(row, line.name if isinstance(line, Assignment) else "")
        names = list(returned)
        for index, one in enumerate(names):
            if one not in self._registers:  # an expression, or a name that is pending
                names[index] = f"given{index}"
                self._pending.append(Assignment(names[index], one))
        self._flush()
        self._add(TableRow("give", all_of=tuple(names)))
        return Table(tuple(self._rows), self._n_registers, CAUGHT)

    def _register(self, name: str) -> int:
        if name not in self._registers:
            self._add_registers([name])
        return self._registers[name]

    def _add_registers(self, names: Collection[str]) -> None:
        """One after the other, whatever else has one of these names."""
        first = self._n_registers
        self._registers.update((name, first + index) for index, name in enumerate(names))
        self._n_registers += len(names)

    def _add(self, row: TableRow, assigned: str = "") -> None:
        known = self._registers
        of = known[row.of] if row.of else 0
        a, b = (self._register(assigned), of) if assigned else (of, int(row.flag))
        registers = tuple(known[name] for name in row.all_of)
        self._rows.append((row.op, a, b, row.n, row.x, row.y, row.z, registers, row.ids))

    def _flush(self) -> None:
        """The pending lines as one function of what they use, which gives what they assign."""
        if not self._pending:
            return
        lines = self._pending
        self._pending = []
        assigned = dict.fromkeys(line.name for line in lines if isinstance(line, Assignment))
        words = {word for line in lines for word in _NAME.findall(str(line))}
        used = [name for name in words if name in self._registers]
        body = _ask_once("".join(f"    {line}\n" for line in lines), assigned)
        given = ", ".join(["args", "kwargs", *used])
        results = "".join(f"{name}, " for name in assigned)
        source = f"def stretch({given}):\n{body}    return ({results})\n"
        exec(compile(source, "<tripwire guards>", "exec"), self._space)
        first = self._n_registers
        registers = tuple(self._registers[name] for name in used)
        self._add_registers(assigned)
        stretch = self._space.pop("stretch")
        self._rows.append(("python", 0, first, 0, stretch, None, None, registers, ()))


def _ask_once(body: str, assigned: Container[str]) -> str:
    """The same lines, where each tensor is asked for its sizes and strides once."""
    found = dict.fromkeys(pair for pair in _SIZES.findall(body) if pair[0] not in assigned)
    for tensor, what in found:
        body = body.replace(f"{tensor}.{what}()", f"{tensor}_{what}")
    asked = "".join(f"    {tensor}_{what} = {tensor}.{what}()\n" for tensor, what in found)
    return asked + body


# --- the guard function ---


class Check(Struct, frozen=True):
    """One condition, and how to tell why it failed."""

    path: str  # in the user's words: L['x'].scale
    condition: str  # an expression over the guard's variables
    expected: str
    found: str  # an expression for what is there now
    rows: tuple[TableRow, ...] = ()

    def __str__(self) -> str:
        return f"if not ({self.condition}): return None"

    def tell(self, found: object) -> Cause | Mismatch | None:
        """The failure; a check of a wire finds a cause. None where the check says nothing."""
        if isinstance(found, Cause):
            return found
        return Mismatch(self.path, self.expected, spell_key(found, str)) if self.path else None


Line = Assignment | Check

Admits = Callable[[tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor, ...] | None]


class Guards(Struct, frozen=True):
    """The checks of one entry, compiled."""

    lines: tuple[Line, ...]  # in their order
    # The tensors that come with the call, or None where it isn't for this entry.
    admits: Admits
    _space: dict[str, Any]  # its globals
    _returns: tuple[str, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks alone."""
        return tuple(line for line in self.lines if isinstance(line, Check))

    @property
    def source(self) -> str:
        """The text of the function."""
        body = "".join(f"        {line}\n" for line in self.lines)
        return (
            f"def admits(args, kwargs):\n    try:\n{body}"
            f"        return {_tuple(self._returns)}\n    except {_CAUGHT}: return None\n"
        )

    def compile_text(self) -> Admits:
        """The function of this text, whatever is run in its place."""
        exec(compile(self.source, "<tripwire guards>", "exec"), self._space)
        return self._space["admits"]  # type: ignore[no-any-return]

    def and_also(self, checks: Sequence[Check]) -> Guards:
        """The same with more checks, after all others."""
        return build_guards((*self.lines, *checks), self._returns, self._space)

    def ask(self, is_quiet: Callable[[], bool]) -> None:
        """Ask this sentry from now on."""
        self._space["_quiet"] = is_quiet
        if not isinstance(self.admits, FunctionType):
            self.admits.ask(is_quiet)  # type: ignore[attr-defined]  # it is a table

    def swap_state(self, gone: Set[int], come: Set[int]) -> None:
        """Take other objects for state from now on, by identity: no argument may be one of them."""
        if STATE_IDS in self._space:
            now = self._space[STATE_IDS] = (self._space[STATE_IDS] - gone) | come
            if not isinstance(self.admits, FunctionType):
                self.admits.swap_others(tuple(now))  # type: ignore[attr-defined]  # it is a table

    def find_failures(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Cause | Mismatch]:
        """Which checks fail, with expected and found values."""
        if "explain" not in self._space:  # few entries are ever asked
            exec(compile(self._write_explain(), "<tripwire guards>", "exec"), self._space)
        failed: list[tuple[int, object]] = self._space["explain"](args, kwargs)
        checks = self.checks
        told = (checks[index].tell(one) for index, found in failed for one in _list_found(found))
        return [failure for failure in told if failure is not None]

    def _write_explain(self) -> str:
        """The same checks, each on its own: what can't be reached is passed over."""
        lines = ["def explain(args, kwargs):", "    failed = []"]
        number = 0
        for line in self.lines:
            lines.append("    try:")
            if isinstance(line, Assignment):
                lines.append(f"        {line}")
            else:
                failed = f"failed.append(({number}, {line.found}))"
                lines.append(f"        if not ({line.condition}): {failed}")
                number += 1
            lines.append(f"    except ({_CAUGHT[1:-1]}, NameError): pass")
        return "\n".join([*lines, "    return failed", ""])


def _list_found(found: object) -> tuple[object, ...]:
    """What a check found: one value, or all that changed below a wire."""
    if isinstance(found, tuple) and all(isinstance(one, Cause) for one in found):
        return found
    return (found,)


def build_guards(
    lines: tuple[Line, ...], returned: tuple[str, ...], space: dict[str, Any]
) -> Guards:
    """Lines as a function, or as a table."""
    if Table is not None:
        return Guards(lines, build_table(lines, returned, space), space, returned)
    text = Guards(lines, admit_nothing, space, returned)
    return replace(text, admits=text.compile_text())


def admit_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The guard function of an entry that isn't planned yet, or is gone."""


_CAUGHT = f"({', '.join(error.__name__ for error in CAUGHT)})"

_ARGUMENT = re.compile(r"args\[(\d+)(:?)\]")

_KEYWORD = re.compile(r"kwargs\['(\w+)'\]")


def find_row(expression: str) -> TableRow | None:
    """How C comes to an argument."""
    found = _ARGUMENT.fullmatch(expression)
    if found is not None:
        return TableRow("rest" if found[2] else "arg", n=int(found[1]))
    found = _KEYWORD.fullmatch(expression)
    return None if found is None else TableRow("keyword", x=found[1])


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"
