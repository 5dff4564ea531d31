"""Channels: one way in which a program reads state that is written between two of its calls.

A case is a small program, as text, and the writes that happen to it, as text. Building a case
makes a world of its own: a new Python module with its own globals, classes and objects, so that
nothing that one run did is seen by the next. The program's text lies in a file, so that lines
can be shown.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

CALLS = 3  # before the first write and after each: one that traces, one that hits, one more

_PRELUDE = "import torch\nfrom torch import nn\n"
_FOLDER = tempfile.TemporaryDirectory(prefix="channels-")
_NUMBERS = itertools.count()


class Arguments(NamedTuple):
    """What one call is given."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


class Program(NamedTuple):
    """A program in a world of its own, and what happens to that world between calls."""

    call: Callable[..., Any]  # what gets compiled
    calls: Callable[[int, int], Arguments]  # of the nth call, which is in the given phase
    writes: list[Callable[[], None]]  # one between two phases
    unrelated: list[Callable[[], None]]  # written beside what was read: these retire nothing
    state: Callable[[], Any]  # what the outside can see of the program's effects
    phases: int
    world: ModuleType
    neighbour: str  # the name of the module beside it, if there is one


@dataclass(frozen=True)
class Case:
    """One channel."""

    family: str
    name: str
    build: Callable[[], Program]
    changes: bool  # each write, each other form of the arguments, changes what calls return
    writes: int  # how many there are
    unrelated: int  # how many unrelated ones

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


class Family:
    """Cases of one kind, in the order of their definition."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cases: list[Case] = []

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases)

    def case(
        self,
        name: str,
        source: str,
        *,
        writes: Sequence[str] = (),
        inputs: Sequence[str] = ("x",),
        unrelated: Sequence[str] = (),
        state: str = "None",
        neighbour: str = "",
        changes: bool = True,
    ) -> None:
        """Add a case.

        The source defines `call`. Writes are statements in the source's module. Inputs are
        what stands between a call's parentheses, where `x` and `y` are vectors of four and `m`
        is a matrix, all different in each call, and `n` is the call's number: the program is
        called with each form of inputs in turn, all of them twice. `neighbour` is the source
        of a second module, which can be imported by that name (each world's has its own name in
        truth: compilers may remember modules by name).
        """

        def build() -> Program:
            torch.default_generator.manual_seed(0)
            number = next(_NUMBERS)
            beside = f"neighbour_{number}"

            def named(text: str) -> str:
                return re.sub(r"\bneighbour\b", beside, text)

            if neighbour:
                _build_module(beside, f"{case}, neighbour", neighbour)
            world = _build_module(f"world_{number}", str(case), named(source))
            forms = [compile(f"_take({text})", "<inputs>", "eval") for text in inputs]
            shown = compile(state, "<state>", "eval")
            return Program(
                call=world.call,
                calls=lambda n, phase: _build_arguments(world, forms[phase % len(forms)], n),
                writes=[_build_write(world, named(text)) for text in writes],
                unrelated=[_build_write(world, named(text)) for text in unrelated],
                state=lambda: eval(shown, world.__dict__),
                phases=max(1 + len(writes), 2 * len(forms) if len(forms) > 1 else 1),
                world=world,
                neighbour=beside,
            )

        case = Case(self.name, name, build, changes, len(writes), len(unrelated))
        self._cases.append(case)

    def everywhere(self, name: str, made: str, body: str, *, before: str = "", **more: Any) -> None:
        """Add a case four times: its `state` is reached in four ways, and written as `STATE`."""
        body = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
        start = f"{textwrap.dedent(before)}\nSTATE = {made}\n"
        ways = {
            "a global": f"def call(x):\n        state = STATE\n{body}\n",
            "an argument": f"def call(x, state):\n{body}\n",
            "a closure": (
                f"def build(state):\n    def call(x):\n{body}\n    return call\n"
                "call = build(STATE)\n"
            ),
            "an attribute": (
                "class Net(nn.Module):\n    def __init__(self):\n"
                "        super().__init__()\n        self.state = STATE\n"
                f"    def forward(self, x):\n        state = self.state\n{body}\n"
                "call = Net()\n"
            ),
        }
        for way, text in ways.items():
            form = "x, STATE" if way == "an argument" else "x"
            full = f"{name}, through {way}"
            self.case(full, start + text, inputs=[form], **more)


def _build_module(name: str, title: str, source: str) -> ModuleType:
    """Run a source text as a module, from a file of its own."""
    stem = "".join(c if c.isalnum() else "_" for c in title)
    path = Path(_FOLDER.name, f"{stem}_{next(_NUMBERS)}.py")
    path.write_text(text := _PRELUDE + textwrap.dedent(source))
    world = ModuleType(name)
    world.__file__ = str(path)
    world.modes = contextlib.ExitStack()
    sys.modules[name] = world
    exec(compile(text, str(path), "exec", dont_inherit=True), world.__dict__)
    return world


def _build_write(world: ModuleType, text: str) -> Callable[[], None]:
    text = textwrap.dedent(text).strip() + "\n"
    name = f"<write {next(_NUMBERS)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec", dont_inherit=True)
    return lambda: exec(code, world.__dict__)


def _build_arguments(world: ModuleType, form: Any, n: int) -> Arguments:
    generator = torch.Generator().manual_seed(n)
    x, y, m = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((4,), (4,), (4, 4))
    )
    space = {**world.__dict__, "x": x, "y": y, "m": m, "n": n, "_take": _take}
    return eval(form, space)


def _take(*args: Any, **kwargs: Any) -> Arguments:
    return Arguments(args, kwargs)
