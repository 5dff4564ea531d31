"""Explain: why something was traced, retired or refused, and where the time went.

`explain(compiled)` reads what a dispatcher knows; nothing runs. `preview(fn, *args)` runs the
call once, observed, and says what compiling would start from: the traced graph and what was read.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

from tripwire import telemetry
from tripwire.dispatch.compiled import find_calls, find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry, Summary, Wire
from tripwire.dispatch.pipeline import check_drawn
from tripwire.dispatch.tally import Saving
from tripwire.env import is_library_file
from tripwire.errors import BadOption
from tripwire.redaction import Redactor
from tripwire.rulebook.purity import DRAWS
from tripwire.rulebook.refusals import Refused
from tripwire.tracing import Refusal, Run, Trace, Tracer
from tripwire.tracing.open.draws import CAN_DRAW
from tripwire.tracing.open.opening import Opening
from tripwire.tracing.session import TOLD
from tripwire.values.classes import short_name_of
from tripwire.values.contents import name_callable

_P = ParamSpec("_P")
Row = tuple[str, str, str]  # a source, what was seen of it, and the line that reads it


@dataclass(frozen=True, slots=True)
class WireView:
    """What an entry depends on, what was seen of it, and the user's line that reads it."""

    source: str
    seen: str
    place: str  # `file:line`; empty where no line names it
    text: str  # what stands there


@dataclass(frozen=True, slots=True)
class EntryView:
    """One entry."""

    number: int
    state: str  # "in use", "retired" or "gone"; and whether it waits to be compiled
    hits: int
    summary: Summary
    guards: str  # source of the function that admits a call
    wires: tuple[WireView, ...]
    saving: Saving | None  # None before enough hits were timed


@dataclass(frozen=True, slots=True)
class RefusalView:
    """Why calls were refused, and how often."""

    slug: str
    reason: str
    place: str
    text: str  # the user's line
    count: int


@dataclass(frozen=True, slots=True)
class CompileView:
    """One compile: how long each phase took, in microseconds, and why it was needed."""

    number: str
    duration: int
    phases: dict[str, int]
    reason: str
    refusal: str
    made_entry: bool | None  # None: a thread may still make it


@dataclass(frozen=True, slots=True)
class InnerView:
    """A module inside a refused callable that is compiled on its own."""

    name: str
    calls: int
    hits: int
    entries: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {_count(self.calls, 'call')}, {_count(self.hits, 'hit')}, "
            f"{_count(self.entries, 'entry')}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of one compiled callable. Prints as a report; `data()` is plain data."""

    name: str
    place: str
    calls: int
    hits: int
    traces: int
    saved_us: int | None  # an estimate, see `Saving`; None before enough hits were timed
    entries: tuple[EntryView, ...]
    retirements: tuple[str, ...]
    refusals: tuple[RefusalView, ...]
    closed: tuple[str, ...]  # what varies and isn't left open, with the line that needed its value
    resting: tuple[str, ...]  # why calls run as plain Python for now, and when they are tried again
    modules: tuple[InnerView, ...]  # compiled on their own, since calls were refused
    compiles: tuple[CompileView, ...]

    def data(self) -> dict[str, Any]:
        """Everything, in dicts, lists, strings and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        lines = [
            f"{self.name}{f' at {self.place}' if self.place else ''}",
            f"  {_count(self.calls, 'call')}: {_count(self.hits, 'hit')}, {self.traces} traced, "
            f"{_count(len(self.entries), 'entry')}, {_count(len(self.retirements), 'retirement')}",
        ]
        if self.saved_us is not None:
            lines.append(f"  {_saved(self.saved_us)}, estimated: see each entry")
        for entry in self.entries:
            lines += _entry_lines(entry)
        lines += _block("varies, but isn't left open", list(self.closed))
        lines += _block("retired", _each_once(self.retirements))
        for refusal in self.refusals:
            lines += _refusal_lines(refusal)
        lines += _block("runs as plain Python for now", list(self.resting))
        lines += _block("compiled on their own inside", list(map(str, self.modules)))
        lines += _block("compiles", [_compile_line(one) for one in self.compiles])
        return lines


def _entry_lines(entry: EntryView) -> list[str]:
    made = entry.summary
    lines = [
        f"  entry {entry.number}: {entry.state}, {_count(entry.hits, 'hit')}; "
        f"{_count(made.ops, 'op')}, {_count(made.inputs, 'input')}, "
        f"{_count(made.guards, 'guard')}, {_count(len(entry.wires), 'wire')}"
    ]
    if entry.saving is not None:
        lines.append(f"    {_saving_line(entry.saving)}")
    lines += [f"    {line}" for line in _branch_lines(made.branches)]
    lines += [f"    open: {', '.join(made.open)}"] if made.open else []
    lines += [f"    {decision}" for decision in made.decisions]
    lines += [f"    repeats the write of {effect}" for effect in made.effects]
    # A name that the user's code reads tells more than what torch's own code reads below it.
    rows = _own_rows(entry.wires)[:_SHOWN]
    rest = _rest(len(entry.wires) - len(rows), rows, "wire", ".entries[i].wires")
    return lines + [f"  {line}" for line in (*_table(rows), *rest)]


def _count(number: int, noun: str) -> str:
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def _each_once(lines: Iterable[str]) -> list[str]:
    """Equal lines once, with how many there were."""
    return [f"{line} ×{n}" if n > 1 else line for line, n in Counter(lines).items()]


def _branch_lines(branches: Iterable[str]) -> list[str]:
    """What an entry holds for: of many that one line asks for alike, the first."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for branch in dict.fromkeys(branches):
        asks, _, place = branch.partition("(")[0], *branch.rpartition(" at ")[1:]
        alike[asks, place].append(branch)
    lines = []
    for (asks, _), found in alike.items():
        shown = found if len(found) <= _ALIKE else found[:1]
        lines += [f"holds for {branch}" for branch in shown]
        if len(shown) < len(found):
            more = f"{len(found) - 1} more of {asks}()"
            lines.append(f"  ... and {more} there (.entries[i].summary.branches)")
    return lines


def _rest(number: int, rows: list[Row], noun: str, where: str) -> list[str]:
    more = "more " if rows else ""
    return [f"  ... and {_count(number, f'{more}{noun}')} ({where})"] if number else []


def _own_rows(wires: Iterable[WireView]) -> list[Row]:
    """What the user's lines read: first what they name, then what that leads to, torch's last."""
    own = sorted(filter(_is_users, wires), key=lambda wire: (_rank(wire), *_line_of(wire)))
    return list(dict.fromkeys(map(_wire_row, own)))


def _rank(wire: WireView) -> int:
    name = (_NAMES.findall(wire.source) or [""])[-1]
    if name.startswith("_") or wire.source.startswith(("T[", "G[torch")):
        return 2
    return 0 if name in _NAMES.findall(wire.text) else 1


def _is_users(wire: WireView) -> bool:
    return bool(wire.place) and not is_library_file(_line_of(wire)[0])


def _line_of(wire: WireView) -> tuple[str, int]:
    file, _, line = wire.place.rpartition(":")
    return file, int(line)


_SHOWN = 12
_ALIKE = 3  # branches of one kind at one line that are all shown
_NAMES = re.compile(r"[^\W\d]\w*")


def _wire_row(wire: WireView) -> Row:
    where = wire.place.rpartition("/")[2]
    return wire.source, wire.seen, f"{where}: {wire.text}" if wire.text else where


def _table(rows: list[Row]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]


def _saved(us: float) -> str:
    return f"{'saved at least' if us >= 0 else 'cost'} {abs(us) / 1000:.3f} ms"


def _saving_line(saving: Saving) -> str:
    """A hit beside the plain call, of which only torch's calls are known (see `Saving`)."""
    most, least = saving.torch_ns, saving.torch_ns - saving.once_ns
    if saving.ns > 0:
        plain = f"at least {least / 1000:.1f} us"
    elif saving.ns < 0:
        plain = f"at most {most / 1000:.1f} us"
    else:
        plain = f"between {least / 1000:.1f} and {most / 1000:.1f} us"
    return (
        f"{_saved(saving.ns / 1000)} in {_count(saving.hits, 'hit')}: one takes "
        f"{saving.hit_ns / 1000:.1f} us, and its torch calls in plain Python {plain} (estimated "
        f"from {saving.timed} hits)"
    )


def _refusal_lines(refusal: RefusalView) -> list[str]:
    often = "once" if refusal.count == 1 else f"{refusal.count} times"
    lines = [f"  refused {often} [{refusal.slug}]: {refusal.reason}"]
    if refusal.place:
        lines.append(f"    {refusal.place}: {refusal.text}")
    return lines


def _compile_line(one: CompileView) -> str:
    phases = ", ".join(f"{name} {us / 1000:.1f}" for name, us in one.phases.items())
    why = f"; because {one.reason}" if one.reason else ""
    refused = f"; refused: {one.refusal}" if one.refusal else ""
    is_void = one.made_entry is False and not one.refusal
    none = "; no entry: a later trace leaves something else open" if is_void else ""
    return f"{one.number}: {one.duration / 1000:.1f} ms ({phases}){why}{refused}{none}"


def _block(title: str, lines: list[str]) -> list[str]:
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else []


# --- compiled callables ---


def explain(compiled: Any, /) -> Explanation:
    """What is known of a compiled function, method or module. Nothing runs."""
    dispatcher = find_calls(compiled)
    if dispatcher is None:
        given = name_callable(compiled, "__qualname__")
        raise BadOption(
            f"explain takes what tripwire.compile returned, not {given}. "
            "For a plain function or module use tripwire.preview(fn, *args).",
            slug="not-compiled",
        )
    return _explain(dispatcher)


def _explain(dispatcher: Dispatcher) -> Explanation:
    known = dispatcher.statistics()
    callee = dispatcher.callee
    redactor = Redactor()  # people paste what they are shown into issues
    return Explanation(
        name=dispatcher.name,
        place=f"{callee.file}:{callee.line}" if callee is not None and callee.file else "",
        calls=known.calls,
        hits=known.hits,
        traces=known.traces,
        saved_us=known.saved_us,
        entries=tuple(_view(i, entry, redactor) for i, entry in enumerate(dispatcher.entries)),
        retirements=tuple(redactor.clean(str(cause)) for cause in known.causes),
        refusals=tuple(_describe(r, count, redactor) for r, count in dispatcher.refusals.items()),
        closed=tuple(map(redactor.clean, dispatcher.closed)),
        resting=tuple(
            redactor.clean(f"{refusal} [{refusal.slug}]: tried again in {math.ceil(seconds)} s")
            for refusal, seconds in dispatcher.rests
        ),
        modules=tuple(_view_modules(dispatcher)),
        compiles=_find_compiles(
            -1 if callee is None else callee.frame_id, dispatcher.options.background, redactor
        ),
    )


def _view_modules(dispatcher: Dispatcher) -> Iterator[InnerView]:
    for inner in dispatcher.inner:
        known = inner.statistics()
        yield InnerView(inner.name, known.calls, known.hits, len(inner.entries))
        yield from _view_modules(inner)


def _view(number: int, entry: Entry, redactor: Redactor) -> EntryView:
    state = str(entry.standing) + ("" if entry.is_compiled else ", compiled when first hit")
    return EntryView(
        number,
        state,
        entry.hits,
        entry.summary,
        redactor.clean_guards(entry.source),
        tuple(_view_wire(wire, redactor) for wire in entry.list_wires()),
        entry.find_saving(),
    )


def _view_wire(wire: Wire, redactor: Redactor) -> WireView:
    where = wire.where
    source, seen = redactor.clean(wire.source), redactor.clean_at(wire.seen, wire.source)
    if where is None:
        return WireView(source, seen, "", "")
    return WireView(source, seen, f"{where.file}:{where.line}", redactor.clean(where.text))


def _describe(refusal: Refusal, count: int, redactor: Redactor) -> RefusalView:
    place = refusal.where.place
    where = f"{place.file}:{place.line}" if place is not None else ""
    text = redactor.clean(place.text) if place is not None else ""
    return RefusalView(refusal.slug, redactor.clean(refusal.reason), where, text, count)


def _find_compiles(
    frame_id: int, in_background: bool, redactor: Redactor
) -> tuple[CompileView, ...]:
    return tuple(
        CompileView(
            found.compile_id or "",
            found.duration_us or 0,
            {name.removesuffix("_us"): us for name, us in found.phases.items()},
            redactor.clean(found.recompile_reason or ""),
            found.refusal or "",
            found.has_guarded_code is True or (None if in_background else False),
        )
        for found in telemetry.get_compilation_metrics()
        if (found.compile_id or "").startswith(f"{frame_id}/")
    )


# --- plain callables ---


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """What was captured of a call, or why it would be refused."""

    name: str
    trace: Trace | None
    refusal: RefusalView | None
    reads: tuple[Row, ...]
    own: tuple[Row, ...]  # those that a line of the user's names
    draws: tuple[str, ...]  # random numbers that compiled code draws again on each call
    result: object

    def data(self) -> dict[str, Any]:
        """Everything but the trace and the result, in plain data."""
        return {
            "name": self.name,
            "ops": None if self.trace is None else self.trace.statistics().ops,
            "branches": [] if self.trace is None else list(map(str, self.trace.branches)),
            "effects": [] if self.trace is None else list(map(str, self.trace.effects)),
            "draws": list(self.draws),
            "refusal": None if self.refusal is None else asdict(self.refusal),
            "reads": [list(row) for row in self.reads],
        }

    def __str__(self) -> str:
        if self.trace is None:
            assert self.refusal is not None
            lines = [f"{self.name} would run as plain Python:", *_refusal_lines(self.refusal)]
            return "\n".join(lines)
        ops = self.trace.statistics().ops
        made = f"{_count(ops, 'op')}, {_count(len(self.reads), 'read')}"
        lines = [f"{self.name} can be captured: {made}"]
        lines += [f"  {line}" for line in _branch_lines(map(str, self.trace.branches))]
        lines += [f"  repeats the write of {effect}" for effect in self.trace.effects]
        lines += [f"  draws {one} again on each call" for one in self.draws]
        rows = list(self.own[:_SHOWN])
        lines += _table(rows)
        lines += _rest(len(self.reads) - len(rows), rows, "read", ".reads")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def preview(target: Callable[_P, Any], /, *args: _P.args, **kwargs: _P.kwargs) -> Preview:
    """Run a call once, observed, and say what was captured, or why it can't be.

    Of something compiled the original runs; compiled code stays as it is. `compile` may still
    refuse what is captured here, for reasons that only guards, a back end or later calls show:
    tensor-branch, not-functional, volatile-source, keeps-changing.
    """
    dispatcher = find_dispatcher(target)
    if dispatcher is not None:
        target = dispatcher.target
    if not callable(target):
        raise BadOption(
            f"preview takes a function or a module, not {short_name_of(type(target))}.",
            slug="not-callable",
        )
    # What `compile` leaves open once a run has drawn it.
    run = Tracer().run(target, args, kwargs, complete=True, opening=Opening(draws=CAN_DRAW))
    name = name_callable(target, "__qualname__")
    redactor = Redactor()
    refusal = _find_refusal(run)
    if run.trace is None or refusal is not None:
        assert refusal is not None
        return Preview(name, None, _describe(refusal, 1, redactor), (), (), (), run.result)
    draws: tuple[str, ...] = ()
    if run.trace.shadow is not None:
        draws = tuple(redactor.clean(str(one)) for one in run.trace.shadow.drawn.values())
        run.trace.shadow.forget()
    rows = [
        WireView(
            redactor.clean(str(read.source)),
            redactor.clean_at(str(read.seen), str(read.source)),
            f"{read.where.file}:{read.where.line}" if read.where else "",
            redactor.clean(read.where.text) if read.where else "",
        )
        for read in run.trace.reads
    ]
    reads = tuple((row.source, row.seen, row.place.rpartition("/")[2]) for row in rows)
    own = tuple(_own_rows(rows))
    return Preview(name, run.trace, None, reads, own, draws, run.result)


def _find_refusal(run: Run) -> Refusal | None:
    """Why `compile` would refuse a run in which draws are open."""
    if run.trace is None:
        if run.refusal is not None and run.refusal.slug == TOLD:  # then no draw is left open
            return Refusal(DRAWS.slug, DRAWS.reason, run.refusal.where)
        return run.refusal
    try:
        check_drawn(run.trace)
    except Refused as refused:
        return refused.refusal
    return None
