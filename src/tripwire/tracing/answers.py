"""Answers: what custom functions returned in a call, kept in case it must be made again.

A custom autograd function with code of its own runs on each call, so what it reads isn't watched.
But the rest of the run may have branched on its result: a dtype, `requires_grad`, None. So each
result is compared with the traced one (`Own`). If its *form* differs, the compiled code stops
there, and the call is made again as plain Python. The same happens if compiled code raises: the
plain call writes what it writes before it raises. Functions that ran already don't run twice: what
they returned or raised the first time is returned or raised again.

That isn't possible if such a function writes to something that the run reads, changes its
arguments, returns views of them, or runs in a checkpoint. Then its `Own` has no place among the
answers, another form is an error, and an error is raised at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import fx

from tripwire.reading.tensors import iter_given, storage_of, version_of
from tripwire.rulebook.rules import Target
from tripwire.tracing.result import node_acts
from tripwire.values.classes import ids_of, isinstance, name_of

Form = tuple[object, ...]


class FormChanged(Exception):
    """A custom function returned something of another form than in the traced run."""

    def __init__(self, name: str, before: Form, now: Form) -> None:
        super().__init__(f"{name} returned {_spell(now)} where the traced run got {_spell(before)}")


class _Thrown(NamedTuple):
    """What a function raised, and where."""

    error: Exception
    traceback: TracebackType | None


class Answers:
    """What the custom functions of one call gave so far, each with its place among them."""

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._generators = generators  # that the rest of the call draws from
        self._given: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        self._asked = 0

    def add(self, place: int, value: Any) -> None:
        """A function returned, or raised; its place is among all calls of custom functions."""
        states = [generator.get_state() for generator in self._generators]
        self._given[place] = value, states

    def take(self) -> tuple[Any, ...]:
        """The answer of the function that is called now, if it has given one. Raises again."""
        place, self._asked = self._asked, self._asked + 1
        if place not in self._given:
            return ()
        value, states = self._given.pop(place)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        if isinstance(value, _Thrown):
            raise value.error.with_traceback(value.traceback)
        return (value,)


class _Here(threading.local):
    running: Answers | None = None  # of the compiled call that goes on
    again: Answers | None = None  # of a call that is made again


_HERE = _Here()


class Own(Target):
    """Calls a custom function, and compares the form of what comes back."""

    def __init__(self, call: Any, name: str, form: Form, place: int | None) -> None:
        super().__init__(call, name)
        self.form = form
        self.place = place  # among all calls of custom functions; None: it must run each time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answers, _HERE.running = _HERE.running, None  # what runs inside has answers of its own
        try:
            value = self.call(*args, **kwargs)
        except Exception as error:
            if answers is not None and self.place is not None:
                inside = error.__traceback__ and error.__traceback__.tb_next
                answers.add(self.place, _Thrown(error, inside))
            raise
        finally:
            _HERE.running = answers
        if answers is not None:
            if self.place is not None:
                answers.add(self.place, value)
            form = form_of(value)
            if form != self.form:
                raise FormChanged(self.__name__, self.form, form)
        return value


def form_of(value: Any) -> Form:
    """What Python can find out of a result without the values and sizes of tensors."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.device, value.layout, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value), *map(form_of, value)
    return type(value), repr(value) if id(type(value)) in _NUMBERS else None


_NUMBERS = ids_of(bool, int, float, str)


def _spell(form: Form) -> str:
    cls, *rest = form
    return " ".join([name_of(cls) if isinstance(cls, type) else str(cls), *map(str, rest)])


def changes(args: tuple[Any, ...], versions: list[int | None]) -> bool:
    """Whether a function changed an argument, whose versions before are given."""
    return [version_of(tensor) for tensor in iter_given(args)] != versions


def hands_out(args: Any, value: Any) -> bool:
    """Whether a function returned memory of its arguments."""
    mine, results = (
        {storage_of(tensor) for tensor in iter_given(held) if tensor.layout is torch.strided}
        for held in (args, value)
    )
    return not mine.isdisjoint(results)


def can_answer(graph: fx.Graph) -> bool:
    """Whether a call can be made again without running code of the user's twice."""
    return all(_can_answer(node) for node in graph.nodes if node.op.startswith("call_"))


def _can_answer(node: fx.Node) -> bool:
    if isinstance(node.target, Own):
        return node.target.place is not None
    return not node_acts(node)


def has_own(graph: fx.Graph) -> bool:
    """Whether there are custom functions whose results are compared."""
    return any(isinstance(node.target, Own) for node in graph.nodes)


def hands_out_numbers(graph: fx.Graph) -> bool:
    """Whether a custom function returns numbers as well, which the run may have gone by."""
    return any(isinstance(n.target, Own) and _has_number(n.target.form) for n in graph.nodes)


def _has_number(form: Any) -> bool:
    if isinstance(form[0], type) and id(form[0]) in _NUMBERS:
        return True
    return any(isinstance(part, tuple) and _has_number(part) for part in form[1:])


def begin(answers: Answers) -> Answers | None:
    """From now on the custom functions of this thread's compiled call are noted."""
    before, _HERE.running = _HERE.running, answers
    return before


def end(before: Answers | None) -> None:
    """The compiled call is over."""
    _HERE.running = before


@contextmanager
def giving(answers: Answers) -> Iterator[None]:
    """Inside, custom functions that ran already give the answers that they gave."""
    before, _HERE.again = _HERE.again, answers
    try:
        yield
    finally:
        _HERE.again = before


def find_answer() -> tuple[Any, ...]:
    """What the custom function that is called now returned before; empty where it has to run."""
    return () if _HERE.again is None else _HERE.again.take()
