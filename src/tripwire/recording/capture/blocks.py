"""Blocks: the body of a `with` statement is recorded as a function.

Its text is written anew with a `def` above the body. Each line and column stays where it was, so
tracebacks show the user's file.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType

from tripwire.errors import BadOption
from tripwire.recording.capture.calls import Beginning, Writing, log
from tripwire.recording.capture.failures import Ended, record_failure
from tripwire.recording.capture.shelf import first_line, future_flags, show_source
from tripwire.recording.format.manifest import Returned
from tripwire.tracing.state import CURRENT
from tripwire.values.classes import isinstance


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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
    show_source(shown, text.splitlines(keepends=True))
    flags = future_flags(frame.f_code) | ast.PyCF_ONLY_AST
    tree = ast.increment_lineno(compile(text, shown, "exec", dont_inherit=True, flags=flags), -1)
    space: dict[str, object] = {}
    exec(compile(tree, shown, "exec", dont_inherit=True, flags=future_flags(frame.f_code)), space)
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
    return max(item.context_expr.end_lineno or 0 for item in block.items)


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
    """The function's text: the body where it was, a `def` above it.

    It begins with a line 0, which has the `def` if there is no other room above the body.
    """
    first, column = first_line(block.body[0]), block.body[0].col_offset
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
    """So many empty lines that what follows stands in this line."""
    if line < 0:
        raise _not_recordable("it stands in the first line", "Put an empty line above it")
    return "\n" * line


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
    text += "\n" * (line - text.count("\n"))
    return text + " " * (column - len(text.rpartition("\n")[2].encode()))


def _not_recordable(why: str, advice: str = "Put it into a function, and record that") -> BadOption:
    return BadOption(f"This block can't be recorded: {why}. {advice}.", slug="not-recordable")
