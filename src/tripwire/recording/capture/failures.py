"""Failures: a call that raises leaves a record.

Whatever goes wrong with the record is logged; the call's own exception is what is raised.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from tripwire.backends.registry import eager, find_known, name_of, takes_graphs_as_they_are
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.dispatcher import Dispatcher
from tripwire.dispatch.entry import Entry
from tripwire.errors import BadOption, CannotReplay
from tripwire.phases import RECORD
from tripwire.recording.capture.calls import Beginning, Writing, log, name_of_error
from tripwire.recording.capture.gradients import (
    Gone,
    Gradients,
    differentiate,
    hold,
    watch_backward,
)
from tripwire.recording.capture.outcomes import check_record, describe_error, describe_result
from tripwire.recording.capture.shelf import future_flags
from tripwire.recording.capture.wrapped import RECORDED
from tripwire.recording.format.file import copy_record
from tripwire.recording.format.manifest import Compiled, Outcome, Returned
from tripwire.telemetry.log import emit
from tripwire.telemetry.schema import RecordWritten
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import isinstance
from tripwire.values.contents import name_callable

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
FAILED = (Exception, KeyboardInterrupt)  # an interrupt tells where a call was stuck


@dataclass(frozen=True, slots=True)
class FailureRecorder:
    """Records the failing calls of compiled callables (dispatch.pipeline.Failures)."""

    writing: Writing

    @staticmethod
    def into(place: str | os.PathLike[str] | OnError) -> FailureRecorder:
        """Records go into a folder, each under a name of its own."""
        return FailureRecorder(place.writing if isinstance(place, OnError) else Writing.to(place))

    def run(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        beginning = Beginning(dispatcher.target, args, kwargs, self.writing.policy)
        try:
            CURRENT.kept = beginning
            result = dispatcher(*args, **kwargs)
        except FAILED as error:
            CURRENT.kept = None
            record_failure(self.writing, beginning, dispatcher.name, error, dispatcher)
            raise
        finally:
            CURRENT.kept = None
        alone = beginning.code_error
        if alone is not None:
            record_failure(self.writing, beginning, dispatcher.name, alone, dispatcher, hit=True)
        else:
            beginning.succeed()
        _watch_backward(self.writing, beginning, dispatcher.name, result, dispatcher)
        return result


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that is over, and all that a record of it needs."""

    beginning: Beginning
    name: str
    outcome: Outcome
    compiled: Compiled | None = None
    backend: object = None

    @staticmethod
    def by(
        error: BaseException,
        beginning: Beginning,
        name: str,
        dispatcher: Dispatcher | None,
        hit: bool = False,
    ) -> Ended:
        """A call that raised. hit: it was compiled code that did, if that isn't to be seen."""
        run = Entry.run.__code__
        frames = traceback.walk_tb(error.__traceback__)
        hit = hit or any(frame.f_code is run for frame, _ in frames)
        outcome = describe_error(error, None if hit else beginning.target)
        return Ended(beginning, name, outcome, *_describe_compiled(dispatcher, hit))

    def write(self, writing: Writing) -> Path:
        """Write its record. Raises what the file system raises."""
        with RECORD:
            built = self.beginning.build(self.name, self.outcome, self.compiled, self.backend)
            path = built.write(writing.find_path(self.name, self.outcome))
            if writing.check:
                try:
                    check_record(path)
                except OSError as error:  # a full disk, say: the record is whole without it
                    log.warning("The record %s has no verdict: %s", path, error)
        raised = name_of_error(self.outcome)
        emit(RecordWritten, path=str(path), function=self.name, exception=raised)
        return path


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call whose record is in a file: its arguments may have changed since."""

    path: Path
    name: str
    outcome: Outcome

    def write(self, writing: Writing) -> Path:
        """Write its record again."""
        return copy_record(self.path, writing.find_path(self.name, self.outcome))


def _describe_compiled(
    dispatcher: Dispatcher | None, hit: bool = False
) -> tuple[Compiled | None, object]:
    if dispatcher is None:
        return None, None
    options = dispatcher.options
    name = name_of(options.backend)
    own = None if find_known(name) is options.backend else options.backend
    return Compiled(name, options.fullgraph, hit, options.check), own


def record_failure(
    writing: Writing,
    beginning: Beginning,
    name: str,
    error: BaseException,
    dispatcher: Dispatcher | None = None,
    hit: bool = False,
) -> Path | None:
    """Write the record of a call that raised, and say so in a note on the exception.

    Nobody waits for the replay of a call that was interrupted: it may take as long again.
    """
    if not isinstance(error, Exception):
        writing = replace(writing, check=False)
    try:
        ended = Ended.by(error, beginning, name, dispatcher, hit)
        note_last(ended, error)
        path = ended.write(writing)
        note_last(WrittenCall(path, name, ended.outcome), error)
        with contextlib.suppress(Exception):  # an exception of the user's may take no notes
            command = f"tripwire replay {shlex.quote(str(path))} --trust"
            error.add_note(f"tripwire recorded this call. See it again: {command}")
    except OSError as trouble:
        log.error("The failing call of %s could not be recorded: %s", name, trouble)
        return None
    except Exception:
        log.exception("The failing call of %s could not be recorded.", name)
        return None
    return path


# --- plain callables ---


def run_recorded(
    writing: Writing, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a plain callable; record the call if it raises."""
    if CURRENT.kept is not None or CURRENT.tracing:  # whoever is outside records
        return target(*args, **kwargs)
    beginning = CURRENT.kept = Beginning(target, args, kwargs, writing.policy)
    try:
        result = beginning.run_plainly(target, args, kwargs)
    except FAILED as error:
        CURRENT.kept = None
        record_failure(writing, beginning, name_of_callable(target), error)
        raise
    finally:
        CURRENT.kept = None
    beginning.succeed()
    _watch_backward(writing, beginning, name_of_callable(target), result)
    return result


def _watch_backward(
    writing: Writing,
    called: Beginning,
    name: str,
    result: object,
    dispatcher: Dispatcher | None = None,
) -> None:
    """Record the call if a backward from its results raises. The record makes both again."""
    if not torch.is_grad_enabled():
        return
    chosen = eager if dispatcher is None else dispatcher.options.backend
    # The backward of the graph's own calls is the plain one. A user's own back end has no name.
    is_plain = chosen is eager or takes_graphs_as_they_are(chosen)
    backend = None if is_plain else name_of(chosen)

    try:
        find_call = hold((called.target, called.args, called.kwargs), result)
    except TypeError:  # something that can't be referred to weakly
        return
    copies, policy = called.copies, writing.policy

    def failed(error: BaseException, gradients: Gradients) -> None:
        try:
            target, args, kwargs = find_call()
        except Gone:
            log.info("A backward of %s failed, and what it was called with is gone.", name)
            return
        parts = target, args, kwargs, gradients, backend
        beginning = Beginning(differentiate, parts, {}, policy)
        beginning.copies, beginning.shown, beginning.late = copies, target, True
        record_failure(writing, beginning, name, error)

    watch_backward(result, (called.args, called.kwargs), failed)


def name_of_callable(target: Any) -> str:
    """What records call it."""
    return name_callable(target, "__qualname__")


@dataclass(frozen=True, slots=True)
class OnError:
    """Records the calls of a function that raise (`tripwire.record_on_error`)."""

    writing: Writing

    def __call__(self, function: _F) -> _F:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise BadOption(
                f"{name_of_callable(function)} is a generator or a coroutine function: its code "
                "runs after the call. Record the function that does the work.",
                slug="not-recordable",
            )
        writing = self.writing

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return run_recorded(writing, function, args, kwargs)

        setattr(recorded, RECORDED, function)
        return recorded  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Runs one call and writes its record, however the call ends (`tripwire.record_call`)."""

    writing: Writing

    def __call__(self, fn: Callable[_P, Any], /, *args: _P.args, **kwargs: _P.kwargs) -> Path:
        """Where the record is. What the call raises is in the record, and isn't raised here."""
        dispatcher = find_dispatcher(fn)
        target = fn if dispatcher is None else dispatcher.target
        name = name_of_callable(target) if dispatcher is None else dispatcher.name
        beginning = Beginning(target, args, kwargs, self.writing.policy)
        outer, CURRENT.kept = CURRENT.kept, beginning
        try:
            beginning.before_run()
            if dispatcher is None:
                result = beginning.run_plainly(fn, args, kwargs)
            else:
                result = dispatcher(*args, **kwargs)
        except Exception as error:
            ended = Ended.by(error, beginning, name, dispatcher)
        else:  # trouble with describing it isn't the call's
            ended = Ended(beginning, name, describe_result(result), *_describe_compiled(dispatcher))
        finally:
            CURRENT.kept = outer
        return ended.write(self.writing)


# --- the latest failure ---

_last: Ended | WrittenCall | None = None
_lock = threading.Lock()


def note_last(ended: Ended | WrittenCall, error: BaseException) -> None:
    """Keep a failed call, in place of the one before, so that it can be recorded later."""
    global _last
    with _lock:
        _last = None if _ran_out_of_memory(error) else ended


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: keeping the call would keep its tensors alive."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # on the CPU
            return True
        error = error.__cause__
    return False


def note_failed(
    dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """A compiled call that nobody armed raised (dispatch.pipeline.Witness)."""
    try:
        beginning = Beginning(dispatcher.target, args, kwargs)
        beginning.late = True
        note_last(Ended.by(error, beginning, dispatcher.name, dispatcher), error)
    except Exception:
        log.exception("The failing call of %s could not be kept.", dispatcher.name)


def record_last(path: str | os.PathLike[str]) -> Path:
    """Write a record of the latest call of a compiled or decorated function that raised.

    Returns the record's path. The call is kept until then, or until another one fails. If the call
    wasn't set up to be recorded, the values are those that it left behind, and the record says so.
    """
    global _last
    with _lock:
        ended, _last = _last, None
    if ended is None:
        raise CannotReplay(
            "There is no failed call to record: no compiled or decorated function has raised, "
            "or its failure was recorded already.",
            slug="nothing-failed",
        )
    return ended.write(Writing.to(path))


# --- blocks ---


class InBlock:
    """Records the body of a `with` statement, however it ends (`tripwire.record_block`)."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self.path: Path | None = None  # of the record, once it is written

    def __enter__(self) -> InBlock:
        function, variables = build_block(sys._getframe(1))
        self._beginning = Beginning(function, (), variables, self._writing.policy)
        self._beginning.before_run()
        self._outer, CURRENT.kept = CURRENT.kept, self._beginning
        self._mode = self._beginning.keeping()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        CURRENT.kept = self._outer
        if isinstance(error, Exception):
            self.path = record_failure(self._writing, self._beginning, "block", error)
        elif error is None:
            try:
                ended = Ended(self._beginning, "block", Returned(""))
                self.path = ended.write(self._writing)
            except OSError as trouble:
                log.error("The block could not be recorded: %s", trouble)
            except Exception:
                log.exception("The block could not be recorded.")


# --- the block as a function ---


def build_block(frame: FrameType) -> tuple[FunctionType, dict[str, object]]:
    """A function that does what the `with` block at this frame does, and its arguments."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(file, frame.f_globals)
    block = _find_block(ast.parse("".join(lines)), line) if lines else None
    if block is None:
        raise _not_recordable(f"the source of {file}:{line} can't be found")
    later = block.items[_find_item(block, frame) + 1 :]
    parts: list[ast.AST] = [*later, *block.body]
    for why, node in _find_obstacles(parts, in_loop=False):
        raise _not_recordable(f"{why} at line {node.lineno}")
    names = {node.id for part in parts for node in _names_in(part)}
    known = {} if frame.f_locals is frame.f_globals else frame.f_locals
    variables = {name: known[name] for name in sorted(names) if name in known}
    assigned = sorted(_assigned(parts) & _globals_of(frame))
    text = _write(block, later, lines, list(variables), assigned)
    shown = f"<block in {file}>"
    linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
    space: dict[str, object] = {}
    exec(compile(text, shown, "exec", dont_inherit=True, flags=future_flags(frame.f_code)), space)
    made = space["block"]
    assert isinstance(made, FunctionType)
    return FunctionType(made.__code__, frame.f_globals, "block"), variables


# --- finding it ---


def _find_block(tree: ast.Module, line: int) -> ast.With | None:
    """The innermost `with` statement whose header is at a line."""
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.lineno <= line <= _last_of_header(node):
            found = node
    return found


def _find_item(block: ast.With, frame: FrameType) -> int:
    """Which manager of a header a frame is about to enter."""
    if len(block.items) == 1:
        return 0
    steps = list(dis.get_instructions(frame.f_code))
    here = next(step.positions for step in steps if step.offset == frame.f_lasti)
    assert here is not None
    for number, item in enumerate(block.items):  # from Python 3.13 on it is told so
        place = item.context_expr.lineno, item.context_expr.col_offset
        if place == (here.lineno, here.col_offset):
            return number
    entered = [
        step
        for step in steps
        if step.opname == "BEFORE_WITH" and step.positions == here and step.offset < frame.f_lasti
    ]
    return len(entered) % len(block.items)  # a `finally` is compiled more than once


def _last_of_header(block: ast.With) -> int:
    ends = [item.context_expr.end_lineno or 0 for item in block.items]
    return max(ends)


def _first_of_body(block: ast.With) -> int:
    first = block.body[0]
    decorators: list[ast.expr] = getattr(first, "decorator_list", [])
    return min([first.lineno, *(decorator.lineno for decorator in decorators)])


# --- what can't be a function ---

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SUSPENDS = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


def _find_obstacles(
    nodes: Iterable[ast.AST], in_loop: bool
) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """What would leave the block, suspend it, or mean something else in a function."""
    for node in nodes:
        if isinstance(node, _SUSPENDS):
            yield "`yield`, `await` or `async` suspends it", node
        elif isinstance(node, ast.Break | ast.Continue) and not in_loop:
            yield "`break` or `continue` leaves it", node
        elif isinstance(node, ast.Name) and node.id == "super":
            yield "it uses super()", node
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield "it uses a private name of a class", node
        elif isinstance(node, ast.For | ast.While):
            head = [node.target, node.iter] if isinstance(node, ast.For) else [node.test]
            yield from _find_obstacles(iter(head), in_loop)
            yield from _find_obstacles(node.body, True)
            yield from _find_obstacles(node.orelse, in_loop)
            continue
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            yield from _find_obstacles(ast.iter_child_nodes(node), in_loop)


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


# --- names ---


def _names_in(part: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(part) if isinstance(node, ast.Name))


def _assigned(parts: Iterable[ast.AST]) -> set[str]:
    """Names that parts of a block bind, themselves or in functions inside them."""
    found: set[str] = set()
    for node in (node for part in parts for node in ast.walk(part)):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(a.asname or a.name).partition(".")[0] for a in names}
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


def _globals_of(frame: FrameType) -> set[str]:
    """Names that are global in a frame, if code there assigns to them."""
    code = frame.f_code
    if frame.f_locals is frame.f_globals:  # a module's own lines
        return set(code.co_names)
    if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
        return set()
    return set(code.co_names) - {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


# --- writing it ---


def _write(
    block: ast.With,
    later: list[ast.withitem],
    lines: list[str],
    names: list[str],
    assigned: list[str],
) -> str:
    """The function's text: the body where it was, a `def` above it."""
    first, column = _first_of_body(block), block.body[0].col_offset
    indent, rest = _part(lines[first - 1], column)
    is_inline = bool(indent.strip())  # `with record_block(path): f(x)`
    head = f"def block({', '.join(names)}):"
    given = f"global {', '.join(assigned)}" if assigned else ""
    if later:
        outer = _indent_of_header(block, lines, None if is_inline else indent)
        first_lines = [head, f"{outer}{given}", ""] if given else [head, ""]
        text = _above(block.lineno - len(first_lines) + 1) + "\n".join(first_lines)
        text = _write_items(f"{text}{outer}with (", later, "".join(lines))
    elif is_inline:
        text = f"{_above(first)}{head} {given};" if given else f"{_above(first)}{head} "
    elif given:
        text = f"{_above(_last_of_header(block) - 1)}{head}\n{indent}{given}"
    else:
        text = f"{_above(_last_of_header(block))}{head}"
    below = "".join(lines[first : block.body[-1].end_lineno])
    if is_inline:
        return _reach(text, first, column) + rest + below
    return _reach(f"{text}\n", first, 0) + lines[first - 1] + below


def _above(line: int) -> str:
    """The lines before one."""
    if line < 1:
        raise _not_recordable("there are too few lines above it", "Nest the with statements")
    return "\n" * (line - 1)


def _indent_of_header(block: ast.With, lines: list[str], body: str | None) -> str:
    """Where a header goes that stands between a `def` and the body."""
    indent, _ = _part(lines[block.lineno - 1], block.col_offset)
    if not indent and body is not None and not body.startswith("  "):
        why = "its body is indented by less than two spaces"
        raise _not_recordable(why, "Nest the with statements")
    return indent or " "


def _write_items(text: str, items: list[ast.withitem], source: str) -> str:
    """The managers of a header, each where it was."""
    for item in items:
        expression = item.context_expr
        text = _reach(text, expression.lineno, expression.col_offset)
        shown = ast.get_source_segment(source, expression)
        text += f"({shown})" if isinstance(expression, ast.NamedExpr) else f"{shown}"
        target = item.optional_vars
        if target is not None:
            text = _reach(f"{text} as ", target.lineno, target.col_offset)
            text += f"{ast.get_source_segment(source, target)}"
        text += ","
    return f"{text}):"


def _part(line: str, column: int) -> tuple[str, str]:
    """A line before and from a column, which counts bytes."""
    data = line.encode()
    return data[:column].decode(), data[column:].decode()


def _reach(text: str, line: int, column: int) -> str:
    """The text, with newlines and spaces added up to a place in the file."""
    text += "\n" * (line - 1 - text.count("\n"))
    return text + " " * (column - len(text.rpartition("\n")[2].encode()))


def _not_recordable(why: str, advice: str = "Put it into a function, and record that") -> BadOption:
    return BadOption(f"This block can't be recorded: {why}. {advice}.", slug="not-recordable")
