"""What a signal's handler raises, or a thread throws into another, is no failure of a back end."""

from __future__ import annotations

import ctypes
import functools
import signal
import threading

import pytest
import torch

import tripwire

X = torch.ones(3)


class Timeout(Exception):
    """As servers raise it: an Exception."""


def raise_timeout(number, frame):
    raise Timeout("too late")


class Handler:
    def __call__(self, number, frame):
        self.handle(number)

    def handle(self, number, frame=None):
        raise Timeout("too late")


HANDLERS = {
    "function": raise_timeout,
    "method": Handler().handle,
    "object": Handler(),
    "partial": functools.partial(raise_timeout),
}


@pytest.fixture
def handled(request):
    before = signal.signal(signal.SIGALRM, HANDLERS[getattr(request, "param", "function")])
    yield
    signal.signal(signal.SIGALRM, before)


def by_a_signal() -> None:
    signal.raise_signal(signal.SIGALRM)


def by_a_thread() -> None:
    me = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(Timeout))
    for _ in range(2):
        pass


def directly(interrupt) -> None:
    interrupt()


def wrapped(interrupt) -> None:
    try:
        interrupt()
    except Timeout as error:
        raise RuntimeError("the compiler failed") from error


def wrapped_untold(interrupt) -> None:
    try:
        interrupt()
    except Timeout as error:  # as Inductor does
        raise RuntimeError("failed").with_traceback(error.__traceback__) from None


WAYS = [directly, wrapped, wrapped_untold]


def double(x):
    return x * 2


@pytest.mark.parametrize("handled", HANDLERS, indirect=True)
def test_a_handlers_timeout_in_compiled_code_is_raised(handled) -> None:
    check_hit_is_interrupted(by_a_signal, directly)


@pytest.mark.parametrize("interrupt", [by_a_signal, by_a_thread])
@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_in_compiled_code_is_raised(handled, interrupt, way) -> None:
    check_hit_is_interrupted(interrupt, way)


def check_hit_is_interrupted(interrupt, way) -> None:
    runs = []

    def backend(module, inputs):
        def run(*inputs):
            runs.append(1)
            if len(runs) == 3:
                way(interrupt)
            return module.forward(*inputs)

        return run

    compiled = tripwire.compile(double, backend=backend)
    for _ in range(2):
        assert compiled(X).tolist() == [2.0] * 3
    with pytest.raises(Timeout):
        while len(runs) < 5:
            compiled(X)
    assert len(runs) == 3
    assert compiled(X).tolist() == [2.0] * 3
    assert len(runs) == 4
    assert not tripwire.explain(compiled).refusals


@pytest.mark.parametrize("interrupt", [by_a_signal, by_a_thread])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("instead", ["raise", "eager"])
def test_a_timeout_in_a_compiler_is_raised(handled, interrupt, way, instead) -> None:
    asked = []

    def backend(module, inputs):
        asked.append(1)
        if len(asked) == 1:
            way(interrupt)
        return module.forward

    compiled = tripwire.compile(double, backend=backend, on_backend_error=instead)
    with pytest.raises(Timeout):
        compiled(X)
    for _ in range(2):
        assert compiled(X).tolist() == [2.0] * 3
    assert len(asked) == 2
    assert compiled.statistics().hits == 1


def test_a_timeout_leaves_what_a_call_writes_as_plain_code_may(handled) -> None:
    total = torch.zeros(3)
    runs = []

    def backend(module, inputs):
        def run(*inputs):
            runs.append(1)
            found = module.forward(*inputs)
            if len(runs) == 2:
                by_a_signal()
            return found

        return run

    def add(x):
        total.add_(x)
        return total * 2

    compiled = tripwire.compile(add, backend=backend)
    for _ in range(2):
        compiled(X)
    with pytest.raises(Timeout):
        compiled(X)
    assert compiled(X).tolist() == [8.0] * 3
    assert len(runs) == 3


class Own(Exception):
    """A back end's own error."""


@pytest.mark.parametrize("error", [Own, Own("no such luck"), RuntimeError, RuntimeError("no")])
def test_a_back_ends_own_error_is_its_failure(handled, error) -> None:
    def backend(module, inputs):
        def run(*inputs):
            raise error

        return run

    compiled = tripwire.compile(double, backend=backend)
    try:
        by_a_signal()
    except Timeout:  # which is over, and has nothing to do with the call
        for _ in range(3):
            assert compiled(X).tolist() == [2.0] * 3


@pytest.mark.parametrize("error", [Own, Own("no such luck"), RuntimeError, RuntimeError("no")])
def test_a_compilers_own_error_is_its_failure(handled, error) -> None:
    def backend(module, inputs):
        raise error

    compiled = tripwire.compile(double, backend=backend)
    try:
        by_a_signal()
    except Timeout:
        with pytest.raises(tripwire.BackendFailed):
            compiled(X)
