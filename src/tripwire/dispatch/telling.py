"""Telling: what is reported about one compiled callable, to the user's log and to telemetry.

Each warning is given once. A compile is a block of telemetry: spans and figures inside it belong to
it. If there is a log, it gets the compile's graph, guards, wires and reads; otherwise nothing is
collected.

On a terminal, a line shows what a compiler works on and for how long (`showing`): not in the first
two seconds, not in logs, and not with TRIPWIRE_PROGRESS=0. The line is erased at the end.
"""

from __future__ import annotations

import atexit
import linecache
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic, perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from msgspec import Struct
from torch import fx

from tripwire import telemetry
from tripwire.backends.dynamo import count_copies, metering
from tripwire.backends.registry import backend_name
from tripwire.env import is_dispatch_file, is_library_file
from tripwire.imports import PROGRESS
from tripwire.ranges import Frame, underline
from tripwire.reading.names import Read, ReadLine
from tripwire.rulebook.purity import DRAWS, NUMPY_DRAWS
from tripwire.rulebook.refusals import Cause, Mismatch, Refusal
from tripwire.telemetry import compiles, log, metrics, schema
from tripwire.telemetry.compiles import BACKWARD, add_figures, note_figures
from tripwire.tracing.result import Trace
from tripwire.tracing.state import FACTS
from tripwire.validity.plan import OPEN_SIZES
from tripwire.values.classes import isinstance
from tripwire.values.contents import find_code

if TYPE_CHECKING:
    from tripwire.dispatch.entry import Entry, Wire
    from tripwire.dispatch.pipeline import Options
    from tripwire.dispatch.tally import Balance

recompiles = logging.getLogger("tripwire.recompiles")
refusals = logging.getLogger("tripwire.refusals")
_SHAPES = 100  # nodes whose forms are told
_TORCHS = frozenset({"aten", "prims", "prim", "quantized", "torchvision", "_c10d_functional"})
_TOLD = ("fullgraph", "dynamic", "cache_size", "recompile_limit", "check", "background", "waits")
_FOR_DEVELOPERS = ("Use tlparse to see", "Set TORCHDYNAMO_VERBOSE=1", "Set TORCH_LOGS=")
_DRAWS = (DRAWS.slug, NUMPY_DRAWS.slug)
_LINES, _WIDTH = 6, 300  # of what a back end says: so many from its beginning and its end


class Callee(Struct, frozen=True):
    """The callable that is compiled, for people: its name and where it is written."""

    name: str
    file: str
    line: int
    frame_id: int

    @staticmethod
    def of(name: str, target: Any) -> Callee:
        """What is known of a callable."""
        code = find_code(target)
        number = compiles.new_frame_id()
        if code is None:
            return Callee(name, "", 0, number)
        return Callee(name, code.co_filename, code.co_firstlineno, number)


class Teller:
    """Reports on one callable."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.callee: Callee | None = None  # once it was traced
        self.refusals: Counter[Refusal] = Counter()  # why calls were refused, and how often
        self._told: set[str] = set()

    def compiling(
        self, target: Callable[..., Any], number: int, options: Options
    ) -> AbstractContextManager[object]:
        """What runs inside is one compile."""
        if self.callee is None:
            self.callee = Callee.of(self.name, target)
        return self._compiling(number, options, is_forward=True)

    @contextmanager
    def compiling_backward(self, number: int, options: Options) -> Iterator[None]:
        """What runs inside makes a backward: a part of its forward's compile, or one of its own."""
        if compiles.current_compile_id() is not None:
            with BACKWARD:
                yield
            return
        with self._compiling(number, options, is_forward=False), BACKWARD, telling_phases():
            yield

    def _compiling(
        self, number: int, options: Options, *, is_forward: bool
    ) -> AbstractContextManager[object]:
        if not telemetry.is_enabled():
            return nullcontext()
        assert self.callee is not None
        return compiles.compiling(
            compiles.CompileId(self.callee.frame_id, number),
            function=self.name,
            file=self.callee.file,
            line=self.callee.line,
            backend=backend_name(options.backend),
            frame_key=str(self.callee.frame_id),
            is_forward=is_forward,
            stack_trace=_list_stack(),
            tripwire_config=", ".join(f"{name}={getattr(options, name)!r}" for name in _TOLD),
            backend_config=", ".join(
                f"{name}={value!r}" for name, value in options.backend_options
            ),
        )

    def tell_miss(
        self,
        entries: Sequence[Entry],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probed: dict[object, Any],
    ) -> None:
        """No entry admitted a call, and why."""
        is_told = telemetry.is_enabled()
        if not is_told and not recompiles.isEnabledFor(logging.INFO):
            return
        reasons = explain_misses(entries, args, kwargs, probed)
        recompiles.info("%s is traced again: %s", self.name, " | ".join(reasons))
        if is_told:
            contexts = compiles.collect_user_contexts()
            note_figures(recompile_reason="; ".join(reasons), recompile_user_contexts=contexts)
            telemetry.emit(
                schema.Recompiled,
                function=self.name,
                reasons=tuple(reasons),
                user_contexts=tuple(contexts),
            )

    def count_refusal(self, refusal: Refusal) -> None:
        """A run couldn't become an entry."""
        self.refusals[refusal] += 1
        tell_refusal(self.name, refusal)

    def warn_plain(self, refusal: Refusal) -> None:
        """A call runs as plain Python, and why."""
        if refusal.slug in _DRAWS and self._has_told(refusal.slug):
            return  # the same draws, now that they aren't left open
        self.warn_once("%s runs as plain Python: %s [%s]", self.name, refusal, refusal.slug)

    def warn_resting(self, refusal: Refusal) -> None:
        """Calls run as plain Python for a while, for a reason that passes."""
        self.warn_once(
            "%s runs as plain Python for a moment, then it is tried again: %s [%s]",
            self.name,
            refusal,
            refusal.slug,
        )

    def warn_cut(self, refusal: Refusal) -> None:
        """A graph is compiled in parts, and why."""
        self.warn_once("%s is compiled in parts: %s [%s]", self.name, refusal, refusal.slug)

    def _has_told(self, slug: str) -> bool:
        return any(told.endswith(f"[{slug}]") for told in self._told)

    def warn_once(self, message: str, *parts: object) -> bool:
        """Warn the user, unless the same was said before; whether it wasn't."""
        told = message % parts
        is_new = told not in self._told
        if is_new:
            self._told.add(told)
            refusals.warning("%s", told)
        return is_new


def explain_misses(
    entries: Sequence[Entry],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    probed: dict[object, Any],
) -> list[str]:
    """Why none of some entries is for a call. What several of them ask for is told once."""
    reasons: list[str] = []
    told: set[str] = set()
    for entry in entries:
        why = "an object that it read is gone" if entry.standing.is_gone else "no reason found"
        failures = list(map(str, find_failures(entry, args, kwargs, probed))) or [why]
        new = [failure for failure in failures if failure not in told]
        told.update(new)
        if new:
            reasons.append("; ".join(new))
    return reasons


def find_failures(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], probed: dict[object, Any]
) -> list[Cause | Mismatch]:
    """Why an entry isn't for a call, as far as that can be told."""
    found = entry.standing.find_failures(args, kwargs)
    if not found and entry.probe is not None and entry.probe.key in probed:
        change = entry.probe.find_mismatch(probed[entry.probe.key])
        found = [] if change is None else [change]
    return found or ([probed[entry]] if entry in probed else [])


def tell_entry(entry: Entry, trace: Trace, entries: int, options: Options) -> None:
    """A compile came to an entry."""
    if not telemetry.is_enabled():
        return
    plan = entry.summary
    parameters = [t for t in entry.held.tensors if isinstance(t, torch.nn.Parameter)]
    on_sizes = 0
    if entry.standing.plan is not None:
        checks = entry.standing.plan.guards.checks
        on_sizes = sum(check.path == OPEN_SIZES for check in checks)
    note_figures(
        has_guarded_code=True,
        cache_size=entries,
        guard_count=plan.guards,
        shape_env_guard_count=on_sizes,
        symbol_count=len(plan.open),
        decision_count=len(plan.decisions),
        wire_count=plan.wires,
        branch_count=len(trace.branches),
        effect_count=len(trace.effects),
        graph_op_count=plan.ops,
        graph_node_count=plan.nodes,
        graph_input_count=len(trace.inputs),
        graph_output_count=len(trace.graph.output_node().all_input_nodes),
        probe_count=int(entry.probe is not None),
        accumulated_cache_size=sum(one.count_entries() for one in list_followed()),
        param_count=len(parameters),
        param_numel=sum(p.numel() for p in parameters),
        param_bytes=sum(p.numel() * p.element_size() for p in parameters),
        feature_usage={
            "open numbers": bool(plan.open),
            "value guards": entry.probe is not None,
            "compiled when first hit": not entry.is_compiled,
            "background": options.background,
            "checked": options.check,
            "recorded": options.failures is not None,
        },
        **_measure_graph(trace.graph),
    )
    telemetry.count("ops", "total", plan.ops)
    if log.is_logging():
        telemetry.emit(schema.GraphCaptured, nodes=tuple(map(_describe_node, trace.graph.nodes)))
        telemetry.emit(schema.GuardsBuilt, source=entry.source, count=plan.guards)
        telemetry.emit(schema.WiresArmed, wires=tuple(map(_row, entry.list_wires())))
        telemetry.emit(schema.ReadsSeen, reads=tuple(map(_row, trace.reads)))


def tell_guards(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """How long a new entry looks at a call, where it admits the one that it was made of."""
    if not telemetry.is_enabled():
        return
    admits = entry.standing.admits
    if admits(args, kwargs) is not None:  # for the first time, when Python is slower
        began = perf_counter_ns()
        admits(args, kwargs)
        note_figures(guard_latency_us=(perf_counter_ns() - began) / 1000)


def _measure_graph(graph: fx.Graph) -> dict[str, object]:
    """How often a graph calls what, the forms of its first values, and users' own operators."""
    counts: Counter[str] = Counter()
    shapes: list[str] = []
    custom: dict[bool, set[str]] = {True: set(), False: set()}  # by whether torch calls it sound
    for node in graph.nodes:
        facts = node.meta.get(FACTS)
        if facts is not None and facts.value is not None and len(shapes) < _SHAPES:
            shapes.append(f"{node.name}: {facts.value}")
        if node.op.startswith("call_"):
            counts[node.target if isinstance(node.target, str) else _name(node.target)] += 1
            operator = _find_overload(node.target)
            if operator is not None and operator.namespace not in _TORCHS:
                is_sound = torch.Tag.pt2_compliant_tag in operator.tags
                custom[is_sound].add(operator._schema.name)
    return {
        "graph_op_counts": dict(counts),
        "graph_node_shapes": "; ".join(shapes),
        "compliant_custom_ops": custom[True] or None,
        "non_compliant_ops": custom[False] or None,
    }


def _find_overload(target: object) -> torch._ops.OpOverload | None:
    """The operator of `torch.ops` that is called, if one is; of a packet, its first."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]  # torch
    return target if isinstance(target, torch._ops.OpOverload) else None


@contextmanager
def telling_phases() -> Iterator[None]:
    """What torch's compilers do inside goes to the compile's metrics."""
    if not telemetry.is_enabled():
        yield
        return
    figures: dict[str, Any] = {}
    before = count_copies()
    try:
        with metering(figures):
            yield
    finally:
        copies = {name: n - before.get(name, 0) for name, n in count_copies().items()}
        if any(copies.values()):
            from tripwire.telemetry.pytorch.events import add_missed

            add_missed({name: n for name, n in copies.items() if n > 0})
        add_figures(**{name: n for name, n in figures.items() if isinstance(n, int)})
        note_figures(**{name: v for name, v in figures.items() if not isinstance(v, int)})


def tell_refusal(function: str, refusal: Refusal) -> None:
    """A run of a function couldn't become an entry."""
    if not telemetry.is_enabled():
        return
    place = refusal.where.place if refusal.where is not None else None
    file, line = (place.file, place.line) if place is not None else ("", 0)
    note_figures(
        has_guarded_code=False,
        refusal=refusal.slug,
        fail_type="Refusal",
        fail_reason=refusal.reason,
        fail_user_frame_filename=file or None,
        fail_user_frame_lineno=line or None,
    )
    telemetry.count("refusals", refusal.slug)
    telemetry.emit(
        schema.RunRefused,
        slug=refusal.slug,
        reason=refusal.reason,
        function=function,
        file=file,
        line=line,
        excerpt=place.text if place is not None else "",
    )


def tell_failure(error: Exception) -> None:
    """A back end raised, and its graph runs as it is."""
    stack = metrics.list_frames(error.__traceback__)
    note_figures(fail_type=type(error).__name__, exception_stack_trace=stack)


class Followed:
    """Something whose hits telemetry counts. A hit reports nothing itself: it is counted later."""

    told = (0, 0, 0)

    def count_hits(self) -> int:
        """How many there were so far."""
        raise NotImplementedError

    def find_balance(self) -> Balance | None:
        """What they saved and cost so far."""
        raise NotImplementedError

    def count_entries(self) -> int:
        """How many it has."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was compiled."""
        raise NotImplementedError

    def tell_hits(self) -> None:
        """Count what is new."""
        balance = self.find_balance()
        saved, lost = balance or (0, 0)
        now = self.count_hits(), saved // 1000, lost // 1000
        before, self.told = self.told, now
        if now[0] > before[0]:
            telemetry.count("frames", "hit", now[0] - before[0])
        if balance is not None:  # nought is a figure as well
            telemetry.count("frames", "saved_us", now[1] - before[1])
            telemetry.count("frames", "lost_us", now[2] - before[2])

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_over():  # a default: at the very end this module's names are gone
            self.tell_hits()


# No WeakSet: that one is iterated in Python, and fails when another thread compiles or lets go of
# something meanwhile. A set of references is added to, taken from and copied in one step each.
_followed: set[ref[Followed]] = set()


def follow(followed: Followed) -> None:
    """Ask for its hits from now on."""
    _followed.add(ref(followed, _followed.discard))


def list_followed() -> list[Followed]:
    """All that were traced and are alive."""
    return [one for each in _followed.copy() if (one := each()) is not None]


def count_frame(what: str) -> None:
    """A call that was no hit."""
    telemetry.count("frames", what)


def count_hits() -> None:
    """Bring telemetry's count of hits up to date."""
    for followed in list_followed():
        followed.tell_hits()


atexit.register(count_hits)  # before telemetry leaves its counters in the log


def tell_retired(causes: tuple[Cause, ...], compile_id: str | None) -> None:
    """The entry that a compile came to was retired."""
    telemetry.count("entries", "retired")
    cause, *others = causes
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
        others=tuple(map(str, others)),
    )


def _list_stack() -> list[str]:
    """The call that is compiled, and its callers: the user's lines, innermost first."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < metrics.LONGEST_STACK:
        code = frame.f_code
        if not is_library_file(code.co_filename) and not is_dispatch_file(code.co_filename):
            lines.append(f"{code.co_filename}({frame.f_lineno}): {code.co_qualname}")
        frame = frame.f_back
    return lines


def _row(seen: Wire | Read) -> schema.ReadRow:
    where = seen.where or ReadLine("", 0)
    return schema.ReadRow(
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
    return underline([line[indent:]], first - indent, last - indent)


def _name(target: Callable[..., Any]) -> str:
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{getattr(target, '__name__', target)}".removeprefix("builtins.")


def in_few_lines(error: Exception) -> str:
    """What an error says. A C++ compiler's may be of thousands of lines; the last say why."""
    lines = _list_lines(str(error))
    left_out = len(lines) - 2 * _LINES
    if left_out > 0:
        lines[_LINES:-_LINES] = [f"[{left_out:,} more lines]"]
    return "\n".join(line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in lines)


def _list_lines(text: str) -> list[str]:
    """The lines of what torch says, without empty ones and what it offers to its developers."""
    lines = text.replace("Original traceback:\nNone\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith(_FOR_DEVELOPERS)]


# --- a line for those who wait ---


LONG = 2.0  # seconds


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Say what goes on inside, once it takes long, where somebody may see it."""
    show = _find_way()
    if show is None:
        yield
        return
    done, began = threading.Event(), monotonic()

    def describe() -> str:
        return f"tripwire: {what}, {monotonic() - began:.0f} s"

    def wait() -> None:
        if not done.wait(LONG):
            show(describe, done)

    thread = threading.Thread(target=wait, name=PROGRESS, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


Show = Callable[[Callable[[], str], threading.Event], None]


def _find_way() -> Show | None:
    if os.environ.get("TRIPWIRE_PROGRESS") == "0":
        return None
    if _is_notebook():
        return _show_in_notebook
    # None, or an object of the user's, has no terminal behind it.
    is_terminal = getattr(sys.stderr, "isatty", None)
    return _show_on_terminal if is_terminal is not None and is_terminal() else None


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _show_on_terminal(describe: Callable[[], str], done: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots")

    def render() -> Spinner:
        spinner.update(text=describe())
        return spinner

    # Other threads may print: their streams stay what they are.
    with Live(
        console=Console(stderr=True),
        get_renderable=render,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        done.wait()


def _show_in_notebook(describe: Callable[[], str], done: threading.Event) -> None:
    display: Any = sys.modules["IPython"].display.display
    shown = display({"text/plain": describe()}, raw=True, display_id=True)
    while not done.wait(0.5):
        shown.update({"text/plain": describe()}, raw=True)
    shown.update({"text/plain": ""}, raw=True)


def reset() -> None:
    """Forget everything that was compiled in this process; files on disk stay.

    `torch.compiler.reset()` does it, too, once Dynamo is imported, as Inductor does.
    """
    for followed in list_followed():
        followed.reset()
