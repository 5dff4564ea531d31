"""Block: the body of a `with` statement as a function, so that it can be recorded and replayed.

The function has the body's own lines, at their own numbers and columns, and takes the local
variables that the body reads. What the body assigns to locals is its own: functions that were
there before don't see it. Globals are globals.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from types import FrameType, FunctionType

from tripwire.errors import BadOption


def build_block(frame: FrameType) -> tuple[FunctionType, dict[str, object]]:
    """A function that does what the `with` block at this frame does, and its arguments."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(file, frame.f_globals)
    block = _find_block(ast.parse("".join(lines)), line) if lines else None
    if block is None:
        raise _not_recordable(f"the source of {file}:{line} isn't at hand")
    for why, node in _find_obstacles(block.body, in_loop=False):
        raise _not_recordable(f"{why} at line {node.lineno}")
    names = {node.id for part in block.body for node in _names_in(part)}
    known = {} if frame.f_locals is frame.f_globals else frame.f_locals
    variables = {name: known[name] for name in sorted(names) if name in known}
    text = _write(block, lines, list(variables), sorted(_assigned(block) & _globals_of(frame)))
    shown = f"<block in {file}>"
    linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
    space: dict[str, object] = {}
    exec(compile(text, shown, "exec", dont_inherit=True, flags=_future_flags(frame)), space)
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
    nodes: Iterator[ast.AST] | list[ast.stmt], in_loop: bool
) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """What would leave the block, suspend it, or mean something else in a function."""
    for node in nodes:
        if isinstance(node, _SUSPENDS):
            yield "it suspends the block", node
        elif isinstance(node, ast.Break | ast.Continue) and not in_loop:
            yield "it leaves the block", node
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


def _names_in(part: ast.stmt) -> Iterator[ast.Name]:
    return (node for node in ast.walk(part) if isinstance(node, ast.Name))


def _assigned(block: ast.With) -> set[str]:
    """Names that the body binds, itself or in functions inside it."""
    found: set[str] = set()
    for node in (node for part in block.body for node in ast.walk(part)):
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


def _future_flags(frame: FrameType) -> int:
    """`from __future__ import annotations` and its like."""
    import __future__

    known = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    flags = 0
    for flag in known:
        flags |= flag & frame.f_code.co_flags
    return flags


# --- writing it ---


def _write(block: ast.With, lines: list[str], names: list[str], assigned: list[str]) -> str:
    """The function's text: the body where it was, a `def` where the header ended."""
    first, last = _first_of_body(block), block.body[-1]
    header = f"def block({', '.join(names)}):"
    given = f"global {', '.join(assigned)}" if assigned else ""
    end = _last_of_header(block)
    assert last.end_lineno is not None
    if first <= end:  # `with record(path): f(x)`
        rest = lines[first - 1].encode()[block.body[0].col_offset :].decode()
        text = f"{header} {given};{rest}" if given else f"{header} {rest}"
        return "\n" * (first - 1) + text + "".join(lines[first : last.end_lineno])
    body = "".join(lines[first - 1 : last.end_lineno])
    if given:
        # The line before holds the `def`: no module begins with a `with` of ours.
        indent = " " * block.body[0].col_offset
        header, end = f"{header}\n{indent}{given}", end - 1
    above = "\n" * (end - 1) + header + "\n"
    return above + "\n" * (first - 1 - above.count("\n")) + body


def _not_recordable(why: str) -> BadOption:
    return BadOption(
        f"This block can't be recorded: {why}. Put it into a function, and record that.",
        slug="not-recordable",
    )
