"""Twins: one program in two worlds, plain and compiled, that must never differ.

A scenario is a program's text and steps, as text. It is played twice, each time in a new
Python module with state of its own: first plainly, then with `call` compiled. After every step
all that the outside can see is written down: results, arguments, the world, gradients, torch's
state, the exception. The first line that differs breaks a law.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import linecache
import os
import re
import sys
import tempfile
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from property.transcript import Numbers, Writer, find_difference, is_close
from torch.nn.modules import module as nn_module

import tripwire
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.recording.capture import failures

WORLD = "law_world"
DROPPED = "None"  # the text of a step back that lets a call's results die
PRELUDE = """\
import builtins, collections, contextlib, contextvars, copy, dataclasses, functools, gc, math
import os, pickle, threading, types, weakref
import torch
from torch import nn
from torch.nn import functional as F
"""
VARIABLES = ("LAW_0", "LAW_1", "LAW_2", "LAW_3", "LAW_BESIDE")  # of the environment, for programs
_FOLDER = tempfile.TemporaryDirectory(prefix="laws-")
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Call:
    """A step that calls: with these arguments, inside these contexts, perhaps in a thread."""

    arguments: str
    around: str = ""
    times: int = 1
    thread: bool = False
    late: bool = False  # its backward comes in a later step, if it comes


@dataclass(frozen=True)
class Back:
    """A step that asks for gradients of what a late call returned, perhaps in a thread.

    The text sees `total`, a loss of all results; `first`, a loss of the first; and `leaves`, all
    that the call could have reached. Which one: counted from the last late call.
    """

    text: str
    which: int = 0
    around: str = ""
    thread: bool = False


@dataclass(frozen=True)
class Do:
    """A step that does anything else. It sees `outs`: results of the last late call."""

    text: str


Step = Call | Back | Do


@dataclass(frozen=True)
class Scenario:
    """A program and what happens to it."""

    program: str
    steps: tuple[Step, ...]
    backend: str = "eager"
    calm: bool = False  # no step retires anything: all calls hit but the first

    def __str__(self) -> str:
        steps = "".join(f"    {step!r},\n" for step in self.steps)
        return (
            f'PROGRAM = """\n{self.program}"""\nSTEPS = [\n{steps}]\n'
            f'SCENARIO = Scenario(PROGRAM, tuple(STEPS), "{self.backend}", calm={self.calm})\n'
        )


@dataclass
class Figures:
    """What was done so far."""

    scenarios: int = 0
    steps: int = 0
    calls: int = 0
    hits: int = 0
    traces: int = 0
    raised: int = 0
    slugs: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """The share of calls that ran compiled code, of those that didn't raise in plain Python."""
        return self.hits / max(1, self.calls - self.raised)

    def __add__(self, other: Figures) -> Figures:
        names = [one.name for one in fields(self)]
        return Figures(*(getattr(self, name) + getattr(other, name) for name in names))

    def __str__(self) -> str:
        return (
            f"{self.scenarios} programs, {self.steps} steps, {self.calls} calls: "
            f"{self.share:.0%} compiled, {self.traces} traced, {self.raised} raised"
        )


class Difference(AssertionError):
    """The twins differ."""


def check_twins(program: str, steps: list[Step], figures: Figures | None = None) -> None:
    """Nothing that the outside can see differs between a program and its compiled twin."""
    check(Scenario(program, tuple(steps)), figures)


def check(scenario: Scenario, figures: Figures | None = None) -> None:
    """The same, behind the scenario's back end."""
    figures = figures if figures is not None else Figures()
    plain = list(play(scenario))
    compile_ = functools.partial(tripwire.compile, backend=scenario.backend)
    missed = figures.calls - figures.hits
    with contextlib.closing(play(scenario, compile_, figures)) as compiled:
        for number, step in enumerate(scenario.steps):
            got = next(compiled)
            if scenario.backend != "eager" and _saves_otherwise(scenario, number, plain, got):
                return  # AOTAutograd saves other values than plain autograd does: docs/laws.md
            if scenario.backend != "eager" and any(words in str(got) for words in _REFUSED):
                return  # a compiled backward that isn't plain autograd's, and says so
            if not _is_same(plain[number], got, scenario):
                same = functools.partial(_is_same, scenario=scenario)
                where = find_difference(plain[number], got, same)
                raise Difference(f"after step {number}, {step!r}: {where}")
            if scenario.calm and figures.calls - figures.hits > missed + 1:
                raise Difference(f"step {number}, {step!r}: ran no compiled code")


_REFUSED = (
    "This compiled backward function is being run with torch.use_deterministic_algorithms(True)",
    "[backward-changed]",
)
_CHANGED = "needed for gradient computation has been modified by an inplace operation"
_SAVED = (_CHANGED, "Trying to backward through the graph a second time")
_IN_PLACE = re.compile(r"\w_\(|step\(|load_state_dict|\.data\b|[-+*/]=|\.(double|float|half)\(")


def _saves_otherwise(scenario: Scenario, number: int, plain: list[Any], got: object) -> bool:
    """Whether a step, or its compiled twin alone, fails for what autograd saved or has freed.

    Calls alone, whatever they write, are no excuse: each leaves what the one before it saved.
    """
    if any(words in str(plain[number]) for words in _SAVED):
        return True
    steps = scenario.steps[: number + 1]
    is_late = isinstance(steps[-1], Back)  # it may ask for what plain autograd has not freed
    is_written = any(isinstance(step, Do) and _IN_PLACE.search(step.text) for step in steps)
    return any(
        words in str(got) and (is_late or words not in str(plain))
        for words in _SAVED
        if is_written or words is not _CHANGED
    )


def _is_same(plain: Any, compiled: Any, scenario: Scenario) -> bool:
    """AOTAutograd adds up gradients in an order of its own; nothing else may differ by a bit.

    Under autocast plain code adds up the gradients of a weight that is used twice in bfloat16:
    autocast keeps the copy. AOTAutograd makes two copies, and adds up in float32. A batch norm that
    trains divides by a deviation, which may be small: the last bits become larger ones.
    """
    if plain == compiled or scenario.backend == "eager":
        return bool(plain == compiled)
    share = 2.0**-16 if "BatchNorm" in str(scenario) else 0.0
    if "autocast" in str(scenario):
        share = torch.finfo(torch.bfloat16).eps
    return is_close(plain, compiled, share)


def play(
    scenario: Scenario,
    wrap: Callable[[Any], Any] = lambda call: call,
    figures: Figures | None = None,
) -> Iterator[Any]:
    """What the outside sees after each step."""
    with _kept_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = _World(scenario.program, figures)
        with world.modes:
            world.modes.callback(world.count_refusals)
            world.space["call"] = wrap(world.space["call"])
            for number, step in enumerate(scenario.steps):
                yield world.take(number, step)


@dataclass(frozen=True)
class _Late:
    """A call that waits for its backward: what went in and came out, and where gradients go."""

    found: list[Any]
    wanted: list[torch.Tensor]
    leaves: list[torch.Tensor]


class _World:
    def __init__(self, program: str, figures: Figures | None) -> None:
        self.module = types.ModuleType(WORLD)
        self.module.of_the_world = True
        self.space = self.module.__dict__
        self.modes = contextlib.ExitStack()
        self._figures = figures
        self._count = 0
        self._late: list[_Late] = []
        path = Path(_FOLDER.name, f"program_{next(_NUMBERS)}.py")
        text = PRELUDE + program
        path.write_text(text)
        linecache.getlines(str(path))
        path.unlink()
        self.modes.callback(linecache.cache.pop, str(path), None)
        self.module.__file__ = str(path)
        self.space |= {"new": self._new, "tagged": _tag, "modes": self.modes, "take": _take}
        self.space["outs"] = []
        sys.modules[WORLD] = self.module
        self.modes.callback(sys.modules.pop, WORLD, None)
        torch.default_generator.manual_seed(0)
        exec(compile(text, str(path), "exec", dont_inherit=True), self.space)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor with values that no earlier one had, short in binary: sums are exact."""
        self._count += 1
        numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int64)
        values = (numbers * 7919 + self._count * 104729) % 17 - 8
        return (values / 4).to(dtype).reshape(shape)

    def take(self, number: int, step: Step) -> Any:
        """Do one step; what is seen then."""
        if self._figures is not None:
            self._figures.steps += 1
        outcomes: list[Any] = []
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self._take(number, step, outcomes)
        return (*outcomes, said.getvalue(), self._write_world())

    def _take(self, number: int, step: Step, outcomes: list[Any]) -> None:
        if isinstance(step, Do):
            outcomes.append(self._try(lambda: self._exec(step.text)))
        elif isinstance(step, Back):
            outcomes.append(self._go_back(step))
        else:
            for turn in range(step.times):
                torch.default_generator.manual_seed(100 * number + turn)
                _, outcome = self._call(step)
                outcomes.append(outcome)

    def _try(self, act: Callable[[], Any]) -> str:
        try:
            act()
        except Exception as error:
            failures._last = None  # `record_last` would keep the arguments alive, see docs/laws.md
            return _spell(error)
        return ""

    def _exec(self, text: str) -> None:
        name = f"<step {next(_NUMBERS)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        self.modes.callback(linecache.cache.pop, name, None)
        exec(compile(text, name, "exec", dont_inherit=True), self.space)

    def _call(self, step: Call) -> tuple[Any, Any]:
        found: list[Any] = []

        def run() -> None:
            around = eval(f"({step.around},)" if step.around else "()", self.space)
            with contextlib.ExitStack() as stack:
                args, kwargs = eval(f"take({step.arguments})", self.space)
                for context in around:
                    stack.enter_context(context)
                found.append((args, kwargs))
                found.append(self.space["call"](*args, **kwargs))

        before = _counts(self.space["call"]) if self._figures is not None else None
        raised = self._try_in_thread(run) if step.thread else self._try(run)
        if self._figures is not None and before is not None:
            hits, traces = (now - old for now, old in zip(_counts(self.space["call"]), before))
            self._figures.calls += 1
            self._figures.hits += max(hits, 0)
            self._figures.traces += max(traces, 0)
            self._figures.raised += bool(raised)
        seen = Writer(WORLD).write(found[::-1])  # the result first, then the arguments
        if step.late:
            self._wait(found)
            return raised, (raised, seen)
        return raised, (raised, seen, self._write_gradients(found))

    def _try_in_thread(self, run: Callable[[], Any]) -> str:
        raised: list[str] = []
        context = copy_context()
        thread = threading.Thread(target=lambda: raised.append(context.run(self._try, run)))
        thread.start()
        thread.join()
        return raised[0]

    def _wait(self, found: list[Any]) -> None:
        if len(found) == 2:
            self._late.append(_Late(found, *self._find_ends(found)))
            self.space["outs"] = self._late[-1].wanted

    def _go_back(self, step: Back) -> Any:
        if step.which >= len(self._late):
            return ()
        late = self._late[-1 - step.which]
        made: list[Any] = []

        def run() -> None:
            with torch.enable_grad():
                losses = _write_losses(late.wanted)
            local = {"total": sum(losses), "first": losses[0], "leaves": late.leaves}
            with contextlib.ExitStack() as stack:
                for context in eval(f"({step.around},)" if step.around else "()", self.space):
                    stack.enter_context(context)
                made.append(eval(step.text, self.space, local))

        torch.default_generator.manual_seed(step.which)
        ready = late.wanted and late.leaves
        raised = (self._try_in_thread(run) if step.thread else self._try(run)) if ready else ""
        if step.text == DROPPED:
            del self._late[-1 - step.which]
            self.space["outs"] = []
            late = _Late([], [], [])
            gc.collect()
        return raised, Writer(WORLD).write([made, late.found[::-1], late.leaves])

    def _find_ends(self, found: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results that have gradients, and all leaves that those can be for."""
        results, everything = Writer(WORLD), Writer(WORLD)
        results.write(found[1])
        wanted = [t for t in results.tensors if t.requires_grad and t.is_floating_point()]
        everything.write([found[0], self.module])
        return wanted, [t for t in everything.tensors if t.requires_grad and t.is_leaf]

    def _write_gradients(self, found: list[Any]) -> Any:
        wanted, leaves = self._find_ends(found) if len(found) == 2 else ([], [])
        if not wanted or not leaves:
            return ()
        try:
            with torch.enable_grad():
                total = sum(_write_losses(wanted))
                given = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
                return tuple(None if g is None else (str(g.dtype), Numbers.of(g)) for g in given)
        except Exception as error:
            return _spell(error)

    def _write_world(self) -> Any:
        flags = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")),
            str(torch.get_default_dtype()),
            torch.are_deterministic_algorithms_enabled(),
            torch.default_generator.get_state().sum().item(),
            [os.environ.get(key) for key in VARIABLES],
        )
        return Writer(WORLD).write(self.module), str(flags)

    def count_refusals(self) -> None:
        """Note why calls were refused."""
        dispatcher = find_dispatcher(self.space["call"])
        if self._figures is not None and dispatcher is not None:
            for refusal, count in dispatcher.refusals.items():
                self._figures.slugs[refusal.slug] += count


def _write_losses(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """A number of each result, in which all of its elements count otherwise."""
    weights = [torch.arange(1.0, 1 + t.numel()).reshape(t.shape) for t in results]
    return [(t.float() * w).sum() for t, w in zip(results, weights, strict=True)]


def _tag(tensor: torch.Tensor, tag: float) -> torch.Tensor:
    tensor.tag = tag
    return tensor


def _take(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _counts(call: Any) -> tuple[int, int]:
    dispatcher = find_dispatcher(call)
    if dispatcher is None:
        return 0, 0
    statistics = dispatcher.statistics()
    return statistics.hits, statistics.traces


def _spell(error: BaseException) -> str:
    if isinstance(error, RecursionError):  # where exactly it ends is nobody's business
        return "RecursionError"
    text = re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
    return re.sub(r"program_\d+", "program", text)


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    generator = torch.default_generator.get_state()
    autocast = torch.get_autocast_dtype("cpu")
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", autocast)
        for key in VARIABLES:
            os.environ.pop(key, None)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.default_generator.set_state(generator)
        for name in _GLOBAL_HOOKS:
            getattr(nn_module, name).clear()
