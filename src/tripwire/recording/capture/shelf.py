"""Shelf: the code objects of a record, marshalled and as source: how they are stored and loaded.

Source is kept as segments, those of one file in one member. A segment is whole lines as they stand
in the file, indented as they are: from the first decorator of a `def` to its end, or the statement
around a `lambda`. Compiled by itself it gives the code that compiling the whole file gave, with the
same lines and columns: same name, same free variables, same class for `__private` names. When a
function is recorded this is checked; a segment whose code differs isn't kept, as the file was
changed after it was imported.

On the interpreter that wrote the record the codes are the very ones that ran. On another one the
segments are compiled there. Tracebacks show the record's lines, whether or not the files are here.
"""

from __future__ import annotations
import __future__

import ast
import bisect
import copy
import importlib.util
import io
import linecache
import marshal
import os
import tokenize
import zipimport
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any, cast

from tripwire.errors import CannotReplay
from tripwire.recording.format.nodes import Code, Table
from tripwire.values.classes import isinstance
from tripwire.values.contents import all_codes

Space = dict[str, object]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# `nested_scopes` and `generators` are always on, and their flags mean something else by now.
_FUTURES = __future__.annotations.compiler_flag | __future__.barry_as_FLUFL.compiler_flag


def future_flags(code: CodeType) -> int:
    """What the file imports from `__future__`, as flags for `compile`."""
    return code.co_flags & _FUTURES


@dataclass(frozen=True, slots=True)
class Segment:
    """Lines `first` to `last` of a file, and where in them the `def` or `lambda` stands."""

    first: int
    last: int
    place: tuple[int, int]


class SourceFile:
    """The text of one file, and the functions in it.

    `lines` begins with line 0: "", but for a block in a file's first line (`show_source`).
    """

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self._tree = _parse("".join(lines))
        if self._tree is not None and lines[0]:
            ast.increment_lineno(self._tree, -1)
        self._imports = _imported_names(self._tree)

    def find(self, code: CodeType) -> Segment | None:
        """The segment that gives this code; None if none does."""
        found = [
            (node, around)
            for line in {0, code.co_firstlineno}  # Python counts from 1, whatever the line is
            for node, around in _definitions_at(self._tree, line)
            if _name_of(node) == code.co_name and self._gives(node, code)
        ]
        if len(found) > 1:  # lambdas in one line that do the same: columns tell them apart
            columns = list(code.co_positions())
            exact = [one for one in found if self._columns(one[0], code) == columns]
            found = exact or found
        return self._segment(*found[0]) if found else None

    def _compile_like(self, node: _Definition, code: CodeType) -> CodeType | None:
        return compile_definition(
            node,
            code.co_filename,
            code.co_qualname,
            code.co_freevars,
            future_flags(code),
            self._imports,
        )

    def _gives(self, node: _Definition, code: CodeType) -> bool:
        made = self._compile_like(node, code)
        if made is None:
            return False
        return _is_rewritten(code) or _is_same(made, code)

    def _columns(self, node: _Definition, code: CodeType) -> list[object]:
        made = self._compile_like(node, code)
        return list(made.co_positions()) if made is not None else []

    def _segment(self, node: _Definition, around: tuple[ast.stmt, ...]) -> Segment | None:
        place = node.lineno, node.col_offset
        for statement in reversed(around):
            first, last = _lines_of(statement)
            if find_definition(self.lines[first : last + 1], first, place) is not None:
                return Segment(first, last, place)
        return None


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imported_names(tree: ast.Module | None) -> tuple[str, ...]:
    """Names that a file imports outside of its functions and classes."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree] if tree is not None else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            waiting += ast.iter_child_nodes(node)
    return tuple(sorted(found - {"*"}))


def first_line(node: ast.stmt | ast.Lambda) -> int:
    """The line where Python says that it begins: decorators count."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    return first_line(statement), statement.end_lineno or statement.lineno


def _definitions_at(
    tree: ast.Module | None, line: int
) -> Iterator[tuple[_Definition, tuple[ast.stmt, ...]]]:
    """What begins in a line, each with the statements around it, the outermost first.

    Only statements that have the line in them are looked into. A walk through all of a file takes
    as long as reading it does.
    """
    waiting: list[tuple[ast.AST, tuple[ast.stmt, ...]]] = [(tree, ())] if tree is not None else []
    for node, around in waiting:
        if isinstance(node, ast.stmt):
            first, last = _lines_of(node)
            if not first <= line <= last:
                continue
            around = (*around, node)
        if isinstance(node, _Definition) and first_line(node) == line:
            yield node, around
        waiting += [(child, around) for child in ast.iter_child_nodes(node)]


def _name_of(node: _Definition) -> str:
    return "<lambda>" if isinstance(node, ast.Lambda) else node.name


def find_definition(lines: list[str], line: int, place: tuple[int, int]) -> _Definition | None:
    """The `def` or `lambda` at a place in a file, of which some lines from `line` on are here."""
    found = _find_definitions(lines, line)
    return next((node for node in found if _place_of(node) == place), None)


def find_moved(
    before: list[str], after: list[str], line: int, place: tuple[int, int]
) -> tuple[int, int] | None:
    """Where a definition stands after texts in its lines became longer or shorter."""
    old, new = (list(map(_place_of, _find_definitions(lines, line))) for lines in (before, after))
    return new[old.index(place)] if place in old and len(old) == len(new) else None


def _find_definitions(lines: list[str], line: int) -> list[_Definition]:
    """Every `def` and `lambda` in lines of a file, from `line` on; none in what is no Python."""
    text = "".join(lines)
    indented = text[:1] in (" ", "\t", "\f")
    tree = _parse("if 1:\n" + text if indented else text)
    if tree is None:
        return []
    ast.increment_lineno(tree, line - 1 - indented)
    return [node for node in ast.walk(tree) if isinstance(node, _Definition)]


def _place_of(node: _Definition) -> tuple[int, int]:
    return node.lineno, node.col_offset


# --- compiling one function ---


def compile_definition(
    node: _Definition,
    file: str,
    qualname: str,
    free: tuple[str, ...],
    flags: int,
    imports: tuple[str, ...] = (),
) -> CodeType | None:
    """The code of one function, as if the whole file were compiled; None if it can't be.

    Around the function stand only the class that mangles its names and a function whose
    parameters are its free variables. Names that the file imports get other instructions,
    which do the same; they matter where code is compared.
    """
    if not all(map(str.isidentifier, free)):
        return None
    inner = _bare(node)
    owner = _class_around(qualname)
    cells = [name for name in free if owner is None or name != "__class__"]
    try:
        if owner is not None:
            inner = _around(f"class {owner}: pass", inner)
        if cells:
            bound = owner or _name_of(node)
            # What the file's own scope binds under this name, the function finds as a global.
            note = f"global {bound}" if bound.isidentifier() and bound not in free else "pass"
            inner = _around(f"def outer({', '.join(cells)}):\n {note}", inner)
        module = ast.parse("".join(f"import {name}\n" for name in imports))
        module.body.append(inner)
        made = compile(module, file, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for _ in range(1 + (owner is not None) + bool(cells)):
        made = next(const for const in made.co_consts if isinstance(const, CodeType))
    if set(made.co_freevars) != set(free):
        return None
    return _renamed(made, made.co_qualname, qualname)


def _bare(node: _Definition) -> ast.stmt:
    """The function without what runs when it is defined: defaults, annotations, decorators."""
    bare: Any = copy.copy(node)
    bare.args = copy.copy(node.args)
    for group in ("posonlyargs", "args", "kwonlyargs"):
        setattr(bare.args, group, [_unannotated(arg) for arg in getattr(node.args, group)])
    for one in ("vararg", "kwarg"):
        arg = getattr(node.args, one)
        setattr(bare.args, one, arg and _unannotated(arg))
    bare.args.defaults = []
    bare.args.kw_defaults = [None] * len(node.args.kwonlyargs)
    if isinstance(node, ast.Lambda):
        return ast.copy_location(ast.Expr(bare), node)
    # The first decorator's line is the code's first line.
    bare.decorator_list = [ast.copy_location(ast.Constant(None), d) for d in node.decorator_list]
    bare.returns = None
    bare.type_params = []  # Python 3.12 and later
    return cast("ast.stmt", bare)


def _unannotated(arg: ast.arg) -> ast.arg:
    bare = copy.copy(arg)
    bare.annotation = None
    return bare


def _around(text: str, inner: ast.stmt) -> ast.stmt:
    """A class or function statement with `inner` as its body."""
    outer = ast.parse(text).body[0]
    assert isinstance(outer, (ast.ClassDef, ast.FunctionDef))
    outer.body[1:] = [inner]
    return outer


def _class_around(qualname: str) -> str | None:
    """The class whose name mangles `__private` names, told from a code's qualified name."""
    parts = qualname.split(".")
    for name, after in zip(parts[-2::-1], parts[:0:-1], strict=True):
        if name != "<locals>" and after != "<locals>" and name.isidentifier():
            return name
    return None


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """The code under another qualified name, nested code included."""
    consts = tuple(
        _renamed(const, old, new) if isinstance(const, CodeType) else const
        for const in code.co_consts
    )
    return code.replace(co_consts=consts, co_qualname=new + code.co_qualname.removeprefix(old))


# --- comparing ---


def _is_rewritten(code: CodeType) -> bool:
    """Whether pytest rewrote the assertions in it: its code differs from its source's."""
    return any("@pytest_ar" in one.co_names for one in all_codes(code))


def _is_same(a: CodeType, b: CodeType) -> bool:
    """Whether both do the same, wherever they stand."""
    return (
        a.co_code == b.co_code
        and a.co_names == b.co_names
        and a.co_varnames == b.co_varnames
        and a.co_freevars == b.co_freevars
        and a.co_cellvars == b.co_cellvars
        and a.co_argcount == b.co_argcount
        and a.co_posonlyargcount == b.co_posonlyargcount
        and a.co_kwonlyargcount == b.co_kwonlyargcount
        and len(a.co_consts) == len(b.co_consts)
        and all(map(_is_same_constant, a.co_consts, b.co_consts))
    )


def _is_same_constant(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _is_same(a, b)
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        return a == b
    return type(a) is type(b) and repr(a) == repr(b)  # 0.0 isn't -0.0, nan is nan


# --- put there ---


class Codes:
    """The code objects of one record, and the lines that they come from."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        self._segments: list[Segment | None] = []
        self._numbers: dict[int, int] = {}  # by identity: code objects compare by content
        self._files: dict[str, SourceFile] = {}

    def add(self, code: CodeType, space: Space | None = None) -> int:
        """The number of a code object in the table; `space` is the namespace that it runs in."""
        number = self._numbers.get(id(code))
        if number is None:
            segment = self._file(code.co_filename, space).find(code)
            number = self._numbers[id(code)] = len(self._codes)
            self._codes.append(code)
            self._segments.append(segment)
        return number

    @property
    def all(self) -> tuple[CodeType, ...]:
        """The code objects themselves."""
        return tuple(self._codes)

    def table(self) -> tuple[Code, ...]:
        """Every code, for the record's table."""
        placed = {name: _lay_out(segments) for name, segments in self._by_file().items()}
        members = {name: f"src/{i}.py" for i, name in enumerate(placed)}
        return tuple(
            _code_node(code, segment, members.get(code.co_filename), placed.get(code.co_filename))
            for code, segment in zip(self._codes, self._segments, strict=True)
        )

    def sources(self) -> dict[str, bytes]:
        """The files of the record that hold source."""
        found = {}
        for i, (name, segments) in enumerate(self._by_file().items()):
            lines = _lay_out(segments).cut(self._files[name].lines)
            found[f"src/{i}.py"] = "".join(lines).encode("utf-8", "surrogatepass")
        return found

    def marshalled(self, clean: Callable[[CodeType], CodeType]) -> dict[str, bytes]:
        """The file that holds marshalled code, each as `clean` leaves it."""
        if not self._codes:
            return {}
        return {_MARSHALLED: marshal.dumps(tuple(_marshallable(clean(c)) for c in self._codes))}

    def _by_file(self) -> dict[str, list[Segment]]:
        found: dict[str, list[Segment]] = {}
        for code, segment in zip(self._codes, self._segments, strict=True):
            if segment is not None:
                found.setdefault(code.co_filename, []).append(segment)
        return found

    def _file(self, name: str, space: Space | None) -> SourceFile:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = SourceFile(
                [_above.get(name, ""), *_read_lines(name, space)]
            )
        return found


_MARSHALLED = "code/0"
_above: dict[str, str] = {}  # the line 0 of files that have one
_replayed: set[str] = set()  # files whose lines in tracebacks are a record's


def show_source(file: str, lines: list[str]) -> None:
    """Let tracebacks print these lines of a file that isn't there. The first is its line 0."""
    _above[file] = lines[0] if lines[0].strip() else ""
    linecache.cache[file] = (sum(map(len, lines)), None, lines[1:], file)


def _read_lines(file: str, space: Space | None) -> list[str]:
    """The lines of a file, as the traceback module would show them.

    Not those of a replay (`Shelf._show`), which are another file's, or without secrets.
    """
    if file in _replayed and os.path.isfile(file):
        with tokenize.open(file) as opened:
            return opened.readlines()
    loader = dict.get(space, "__loader__") if space is not None else None
    if type(loader) in (SourceFileLoader, zipimport.zipimporter):  # no loader of the user's runs
        return linecache.getlines(file, space)
    return linecache.getlines(file)


def _marshallable(code: CodeType) -> CodeType | None:
    try:
        marshal.dumps(code)
    except ValueError:  # constants that no compiler makes
        return None
    return code


def _lay_out(segments: list[Segment]) -> Layout:
    return Layout((segment.first, segment.last) for segment in segments)


def _code_node(
    code: CodeType, segment: Segment | None, member: str | None, layout: Layout | None
) -> Code:
    marshalled = _MARSHALLED if _marshallable(code) is not None else None
    if segment is None or layout is None:
        line, further, lines = code.co_firstlineno, (0, 0), (0, 0)
        member = None
    else:
        line, (at, column) = segment.first, segment.place
        further = at - line, column
        lines = layout.before(segment.first), segment.last - segment.first + 1
    return Code(
        name=code.co_qualname,
        file=code.co_filename,
        line=line,
        source=member,
        further=further,
        marshalled=marshalled,
        free=code.co_freevars,
        flags=future_flags(code),
        lines=lines,
    )


class Layout:
    """Lines of a file one after the other, without those between them; what overlaps, once."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        """Each span has a first and a last line."""
        self._spans: list[tuple[int, int]] = []
        self._before: list[int] = []  # how many lines stand before each
        for first, last in sorted(spans):
            if self._spans and first <= self._spans[-1][1]:
                start, end = self._spans[-1]
                self._spans[-1] = start, max(end, last)
                continue
            count = 0
            if self._spans:
                start, end = self._spans[-1]
                count = self._before[-1] + end - start + 1
            self._spans.append((first, last))
            self._before.append(count)

    def cut(self, lines: list[str]) -> list[str]:
        """These lines, of all that the file has, from line 0 on."""
        return [line for first, last in self._spans for line in lines[first : last + 1]]

    def before(self, line: int) -> int:
        """How many of them stand before a line that is one of them."""
        at = bisect.bisect_right(self._spans, line, key=lambda span: span[0]) - 1
        return self._before[at] + line - self._spans[at][0]


# --- taken again ---


class Shelf:
    """Code by its number in a table. `read` gives the record's members; `magic` its interpreter."""

    def __init__(self, table: Table, read: Callable[[str], bytes], magic: str) -> None:
        self._codes = table.codes
        self._read = read
        self._same = magic == importlib.util.MAGIC_NUMBER.hex()
        self._made: dict[int, CodeType] = {}
        self._marshalled: dict[str, object] = {}
        self._sources: dict[str, list[str]] = {}
        self._shown: dict[str, dict[int, str]] = {}

    def code(self, number: int) -> CodeType:
        """One code object; raises `CannotReplay` if it can't be had on this interpreter."""
        made = self._made.get(number)
        if made is None:
            if number >= len(self._codes):
                raise ValueError("a function's code isn't there")
            node = self._codes[number]
            made = self._load(number, node) or self._compile(node)
            if made is None:
                raise _no_code(node, self._same)
            self._made[number] = made
            self._show(node)
        return made

    def _load(self, number: int, node: Code) -> CodeType | None:
        if not self._same or node.marshalled is None:
            return None
        if node.marshalled not in self._marshalled:
            try:
                found = marshal.loads(self._read(node.marshalled))
            except (ValueError, EOFError, TypeError):
                found = ()
            self._marshalled[node.marshalled] = found
        codes = self._marshalled[node.marshalled]
        code = codes[number] if isinstance(codes, tuple) and number < len(codes) else None
        if isinstance(code, CodeType) and code.co_freevars == node.free:
            return code
        return None

    def _compile(self, node: Code) -> CodeType | None:
        lines = self._lines(node)
        found = find_definition(lines, node.line, node.place) if lines else None
        if found is None:
            return None
        return compile_definition(found, node.file, node.name, node.free, node.flags)

    def _lines(self, node: Code) -> list[str]:
        if node.source is None:
            return []
        if node.source not in self._sources:
            text = self._read(node.source).decode("utf-8", "surrogatepass")
            self._sources[node.source] = io.StringIO(text).readlines()
        before, count = node.lines
        return self._sources[node.source][before : before + count]

    def _show(self, node: Code) -> None:
        """Let tracebacks print the record's lines, where the file here hasn't the same."""
        lines = self._lines(node)
        there = ["", *linecache.getlines(node.file)][node.line : node.line + len(lines)]
        if not lines or there == lines:
            return
        shown = self._shown.setdefault(node.file, {})
        shown.update(enumerate(lines, node.line))
        text = [shown.get(number, "\n") for number in range(1, max(shown) + 1)]
        # Without a time the entry is never compared with a file.
        linecache.cache[node.file] = (sum(map(len, text)), None, text, node.file)
        _replayed.add(node.file)


def _no_code(node: Code, same: bool) -> CannotReplay:
    if node.source is None:
        why = "its source wasn't known when it was recorded"
        if not same:
            why += ", and another interpreter wrote the record"
    else:
        why = "this interpreter can't compile its source"
    return CannotReplay(
        f"{node.file}:{node.line}: {node.name} can't be built here: {why}.\n"
        "Replay with the Python version that the record's manifest names.",
        slug="replay-no-code",
    )
