"""Telling: what the dispatcher says to telemetry and to `explain`.

A compile is a block of telemetry's: spans and figures inside it are its own. The log gets its
graph, guards, wires and reads where somebody logs; nothing here is done otherwise.
"""

from __future__ import annotations

import atexit
import linecache
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import fx

from tripwire.phases import HAS_TELEMETRY
from tripwire.ranges import Frame
from tripwire.reading.reads import Place, Read
from tripwire.rulebook.refusals import Refusal
from tripwire.tracing.result import Trace
from tripwire.validity.wires import Cause
from tripwire.values.callables import find_code
from tripwire.values.classes import isinstance

if HAS_TELEMETRY:
    from tripwire import telemetry
    from tripwire.telemetry import schema

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Balance, Entry, Wire


@dataclass(frozen=True, slots=True)
class Callee:
    """The callable that is compiled, for people: its name and where it is written."""

    name: str
    file: str
    line: int
    frame_id: int

    @staticmethod
    def of(name: str, target: Any) -> Callee:
        """What is known of a callable."""
        code = find_code(target)
        number = telemetry.new_frame_id() if HAS_TELEMETRY else 0
        if code is None:
            return Callee(name, "", 0, number)
        return Callee(name, code.co_filename, code.co_firstlineno, number)


def compiling(callee: Callee, number: int, backend: str) -> AbstractContextManager[object]:
    """What runs inside is one compile."""
    if not HAS_TELEMETRY:
        return nullcontext()
    return telemetry.compiling(
        telemetry.CompileId(callee.frame_id, number),
        function=callee.name,
        file=callee.file,
        line=callee.line,
        backend=backend,
    )


def wants_reasons() -> bool:
    """Whether somebody wants to know why a call was traced again."""
    return HAS_TELEMETRY and telemetry.is_enabled()


def tell_miss(callee: Callee, reasons: list[str]) -> None:
    """No entry admitted a call, and why."""
    if not HAS_TELEMETRY or not telemetry.is_enabled():
        return
    contexts = telemetry.collect_user_contexts()
    _set(recompile_reason="; ".join(reasons), recompile_user_contexts=contexts)
    telemetry.emit(
        schema.Recompiled,
        function=callee.name,
        reasons=tuple(reasons),
        user_contexts=tuple(contexts),
    )


def tell_entry(entry: Entry, trace: Trace, entries: int) -> None:
    """A compile came to an entry."""
    if not HAS_TELEMETRY or not telemetry.is_enabled():
        return
    plan = entry.summary
    parameters = [t for t in entry.state if isinstance(t, torch.nn.Parameter)]
    _set(
        has_guarded_code=True,
        cache_size=entries,
        guard_count=plan.guards,
        wire_count=plan.wires,
        branch_count=len(trace.branches),
        effect_count=len(trace.effects),
        graph_op_count=plan.ops,
        graph_node_count=plan.nodes,
        graph_input_count=len(trace.inputs),
        param_count=len(parameters),
        param_numel=sum(p.numel() for p in parameters),
        param_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )
    if telemetry.is_logging():
        telemetry.emit(schema.GraphCaptured, nodes=tuple(map(_describe_node, trace.graph.nodes)))
        telemetry.emit(schema.GuardsBuilt, source=entry.source, count=plan.guards)
        telemetry.emit(schema.WiresArmed, wires=tuple(map(_row, entry.list_wires())))
        telemetry.emit(schema.ReadsSeen, reads=tuple(map(_row, trace.reads)))


def tell_refusal(callee: Callee, refusal: Refusal) -> None:
    """A run couldn't become an entry."""
    if not HAS_TELEMETRY or not telemetry.is_enabled():
        return
    place = refusal.where.place if refusal.where is not None else None
    file, line = (place.file, place.line) if place is not None else ("", 0)
    _set(
        has_guarded_code=False,
        refusal=refusal.slug,
        fail_type="Refusal",
        fail_reason=refusal.reason,
        fail_user_frame_filename=file or None,
        fail_user_frame_lineno=line or None,
    )
    telemetry.count("refusals", refusal.slug)
    telemetry.emit(
        schema.Refused,
        slug=refusal.slug,
        reason=refusal.reason,
        function=callee.name,
        file=file,
        line=line,
        excerpt=place.text if place is not None else "",
    )


class Counted:
    """Something whose hits telemetry counts. A hit itself tells nobody: it is asked later."""

    told = (0, 0, 0)

    def count_hits(self) -> int:
        """How many there were so far."""
        raise NotImplementedError

    def find_balance(self) -> Balance | None:
        """What they saved and cost so far."""
        raise NotImplementedError

    def tell_hits(self) -> None:
        """Count what is new."""
        balance = self.find_balance()
        saved, lost = balance or (0, 0)
        now = self.count_hits(), saved // 1000, lost // 1000
        before, self.told = self.told, now
        if HAS_TELEMETRY and now[0] > before[0]:
            telemetry.count("frames", "hit", now[0] - before[0])
        if HAS_TELEMETRY and balance is not None:  # nought is a figure as well
            telemetry.count("frames", "saved_us", now[1] - before[1])
            telemetry.count("frames", "lost_us", now[2] - before[2])

    def __del__(self) -> None:
        if HAS_TELEMETRY and not sys.is_finalizing():
            self.tell_hits()


_counted: WeakSet[Counted] = WeakSet()


def follow(counted: Counted) -> None:
    """Ask for its hits from now on."""
    _counted.add(counted)


def count_frame(what: str) -> None:
    """A call that was no hit."""
    if HAS_TELEMETRY:
        telemetry.count("frames", what)


def count_hits() -> None:
    """Bring telemetry's count of hits up to date."""
    for counted in list(_counted):
        counted.tell_hits()


if HAS_TELEMETRY:
    atexit.register(count_hits)  # before telemetry leaves its counters in the log


def tell_retired(cause: Cause, compile_id: str | None) -> None:
    """The entry that a compile came to was retired."""
    if not HAS_TELEMETRY:
        return
    telemetry.count("entries", "retired")
    writer = cause.writer
    telemetry.emit(
        schema.Retired,
        source=str(cause.source),
        old=cause.old,
        new=cause.new,
        file=writer.file if writer else "",
        line=writer.line if writer else 0,
        function=writer.function if writer else "",
        compile_id=compile_id,
        excerpt=linecache.getline(writer.file, writer.line).strip() if writer else "",
    )


def _set(**figures: object) -> None:
    context = telemetry.get_metrics_context()
    if context.in_progress():
        context.update({k: v for k, v in figures.items() if v is not None}, overwrite=True)


def _row(seen: Wire | Read) -> schema.Row:
    where = seen.where or Place("", 0)
    return schema.Row(
        source=str(seen.source),
        seen=str(seen.seen),
        file=where.file,
        line=where.line,
        text=where.text,
    )


def _describe_node(node: fx.Node) -> schema.GraphNode:
    facts = node.meta.get("tripwire")
    place = facts.where.place if facts is not None and facts.where is not None else None
    target = node.target if isinstance(node.target, str) else _name(node.target)
    return schema.GraphNode(
        name=node.name,
        op=node.op,
        target=target,
        inputs=tuple(n.name for n in node.all_input_nodes),
        scope=str(facts.scope) if facts is not None else "",
        file=place.file if place is not None else "",
        line=place.line if place is not None else 0,
        function=place.function if place is not None else "",
        text=place.text if place is not None else "",
        shape=str(facts.value) if facts is not None and facts.value is not None else "",
        excerpt=_mark(place) if place is not None else "",
    )


def _mark(place: Frame) -> str:
    """The user's line, with the call marked below."""
    line = linecache.getline(place.file, place.line).rstrip()
    if place.columns is None or not line:
        return ""
    indent = len(line) - len(line.lstrip())
    first, last = place.columns
    return telemetry.underline([line[indent:]], first - indent, last - indent)


def _name(target: Callable[..., Any]) -> str:
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{getattr(target, '__name__', target)}".removeprefix("builtins.")
