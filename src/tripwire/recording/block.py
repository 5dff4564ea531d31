"""Block: the body of a `with` statement as a function, so that it can be recorded and replayed.

The function has the body's own lines, at their own numbers, and takes the variables that the
body reads. What the body assigns is its own; it isn't seen by functions that read globals.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
from types import FrameType, FunctionType

from tripwire.errors import BadOption


def build_block(frame: FrameType) -> tuple[FunctionType, dict[str, object]]:
    """A function that does what the `with` block at this frame does, and its arguments."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    lines = linecache.getlines(file, frame.f_globals)
    block = _find_block(ast.parse("".join(lines)), line) if lines else None
    if block is None:
        raise _not_recordable(f"the source of {file}:{line} isn't at hand")
    for node in ast.walk(ast.Module(block.body, [])):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Break | ast.Continue):
            raise _not_recordable(f"it leaves or suspends the block at line {node.lineno}")
    names = {n.id for n in ast.walk(block) if isinstance(n, ast.Name)} | _assigned(block)
    variables = {name: frame.f_locals[name] for name in sorted(names) if name in frame.f_locals}
    text = _write(block, lines, list(variables))
    shown = f"<block in {file}>"
    linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
    space: dict[str, object] = {}
    exec(compile(text, shown, "exec"), space)
    made = space["block"]
    assert isinstance(made, FunctionType)
    return FunctionType(made.__code__, frame.f_globals, "block"), variables


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


def _assigned(block: ast.With) -> set[str]:
    return {
        node.name for node in ast.walk(block) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _write(block: ast.With, lines: list[str], names: list[str]) -> str:
    """The function's text: the body where it was, a `def` where the header ended."""
    first, last = block.body[0], block.body[-1]
    header = f"def block({', '.join(names)}):"
    assert last.end_lineno is not None
    if first.lineno <= _last_of_header(block):  # `with record(path): f(x)`
        rest = lines[first.lineno - 1].encode()[first.col_offset :].decode()
        return "\n" * (first.lineno - 1) + f"{header} {rest}"
    body = textwrap.dedent("".join(lines[first.lineno - 1 : last.end_lineno]))
    between = first.lineno - _last_of_header(block) - 1
    start = "\n" * (_last_of_header(block) - 1) + header + "\n" + "\n" * between
    return start + textwrap.indent(body, "    ")


def _not_recordable(why: str) -> BadOption:
    return BadOption(
        f"This block can't be recorded: {why}. Put it into a function, and record that.",
        slug="not-recordable",
    )
