"""Run PyTorch's own Dynamo tests over tripwire, and note every assertion that fails.

    python benchmarks/peers/run.py SIDE OUT.json [--only REGEX] FILE...      (FILE: test_misc ...)

SIDE is `tripwire`, or `plain`: tripwire's wrappers, whose calls run the plain target. The tests are
in the folder that DYNAMO_TESTS names. Each call is made on copies of its arguments first, so that
the call whose result a test looks at is a hit; random generators are put back in between. What
OUT.json already has isn't run again. judge.py says what the notes mean.

Each file has a process of its own, and another one after a test that ended or blocked it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import importlib
import json
import linecache
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = os.environ.get("DYNAMO_TESTS", "")
PER_TEST = 60  # seconds
TO_START = 150  # seconds, for imports
ENDED = ("killed", "worker-died")

Row = dict[str, Any]


# --- the parent ----------------------------------------------------------------------------------


def main() -> None:
    """Run files one after another; the results are written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=["plain", "tripwire"])
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for file in options.files:
        start = time.monotonic()
        found = results.setdefault(file, {})
        names, error = _list_tests(file)
        if not names:
            found["_import_error"] = {"outcome": "import-error", "notes": [], "err": error}
        todo = [n for n in names if n not in found and re.search(options.only, n)]
        while todo:
            found.update(_run_some(options.side, file, todo, options.out))
            _save(options.out, results)
            todo = [name for name in todo if name not in found]
        _save(options.out, results)
        print(f"{file}: {len(found)} tests, {time.monotonic() - start:.0f} s", flush=True)


def _save(path: Path, results: dict[str, dict[str, Row]]) -> None:
    """Write the whole or nothing: somebody may read it meanwhile."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(results))
    whole.replace(path)


def _list_tests(file: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, __file__, "--list", file], capture_output=True, text=True, check=False
    )
    return [n[2:] for n in done.stdout.splitlines() if n.startswith("T ")], done.stderr[-1500:]


def _run_some(side: str, file: str, names: list[str], out: Path) -> dict[str, Row]:
    """Rows of the tests that a worker got through; the one that ended it is among them."""
    todo, rows = out.with_suffix(f".{file}.todo"), out.with_suffix(f".{file}.rows")
    todo.write_text("\n".join(names))
    rows.write_text("")
    command = [sys.executable, __file__, "--work", side, file, str(todo), str(rows)]
    with out.with_suffix(f".{file}.log").open("a") as log:
        worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        _wait(worker, rows)
    found: dict[str, Row] = {}
    current = ""
    for line in rows.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut off
            row = json.loads(line)
            current = row.get("start", "")
            if not current:
                found[row["test"]] = row
    if current or not found:
        for name in [current] if current else names:
            outcome = ENDED[0] if current else ENDED[1]
            found[name] = {"test": name, "outcome": outcome, "notes": [], "compiled": []}
    todo.unlink()
    rows.unlink()
    return found


def _wait(worker: subprocess.Popen[bytes], rows: Path) -> None:
    """Until it is done, or nothing was heard of it for too long."""
    size, heard = 0, time.monotonic()
    while worker.poll() is None:
        time.sleep(0.5)
        now = rows.stat().st_size
        if now != size:
            size, heard = now, time.monotonic()
        if time.monotonic() - heard > 2 * PER_TEST + (0 if size else TO_START):
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


# --- the worker ----------------------------------------------------------------------------------


@dataclass
class Notes:
    """What one test has shown so far."""

    rows: list[Row] = field(default_factory=list)  # assertions that failed, and exceptions
    compiled: list[Row] = field(default_factory=list)  # callables, and what was refused
    compiles: int = 0
    is_full: bool = False  # fullgraph was asked for by the compile that goes on
    is_inside: bool = False  # an assertion runs, or a call before the call

    def clear(self) -> None:
        self.rows.clear()
        self.compiled.clear()
        self.compiles = 0


NOTES = Notes()


class TookTooLong(BaseException):
    """A test ran out of its seconds."""


def _list(file: str) -> None:
    _set_up("plain")
    print(*(f"T {name}" for name in _load(file)), sep="\n", flush=True)
    os._exit(0)  # some tests leave threads


def _work(side: str, file: str, todo: str, rows: str) -> None:
    faulthandler.enable()
    _set_up(side)
    tests = _load(file)
    signal.signal(signal.SIGALRM, _raise_too_long)
    with open(rows, "a") as out:
        current: type[unittest.TestCase] | None = None
        for name in Path(todo).read_text().split("\n"):
            print(json.dumps({"start": name}), file=out, flush=True)
            test = tests[name]
            if current is not type(test):
                current = type(test)
                current.setUpClass()
            print(json.dumps(_run(name, test), default=str), file=out, flush=True)
    sys.stdout.flush()
    os._exit(0)


def _raise_too_long(*_: object) -> None:
    raise TookTooLong


def _load(file: str) -> dict[str, unittest.TestCase]:
    found: dict[str, unittest.TestCase] = {}
    waiting = [unittest.TestLoader().loadTestsFromModule(importlib.import_module(file))]
    while waiting:
        for test in waiting.pop():
            if isinstance(test, unittest.TestSuite):
                waiting.append(test)
            else:
                found[f"{type(test).__name__}.{test._testMethodName}"] = test
    return found


def _run(name: str, test: unittest.TestCase) -> Row:
    NOTES.clear()
    result = _Result()
    outcome = "ran"
    signal.alarm(PER_TEST)
    try:
        test.run(result)
    except TookTooLong:
        outcome = "timeout"
    except BaseException as error:
        _note_error(error)
    finally:
        signal.alarm(0)
    if any(note.get("type", "").endswith(TookTooLong.__name__) for note in NOTES.rows):
        outcome = "timeout"
    return {
        "test": name,
        "outcome": "skip" if result.was_skipped else outcome,
        "compiles": NOTES.compiles,
        "notes": list(NOTES.rows),
        "compiled": list(NOTES.compiled),
    }


class _Result(unittest.TestResult):
    was_skipped = False

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802  # unittest's name
        self.was_skipped = True

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            _note_error(err[1])

    def _note(self, test: Any, err: Any) -> None:
        _note_error(err[1])

    addError = addFailure = addExpectedFailure = _note  # noqa: N815


def _note_error(error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if f.filename.startswith(TESTS)), None)
    NOTES.rows.append(
        {
            "k": "exc",
            "type": f"{type(error).__module__}.{type(error).__name__}",
            "slug": getattr(error, "slug", None),
            "line": place.lineno if place else None,
            "text": place.line if place else "",
            "msg": str(error)[:600],
            "tb": [f"{f.filename}:{f.lineno} {f.name}: {f.line}" for f in frames[-6:]],
        }
    )


# --- torch.compile, replaced ---------------------------------------------------------------------


def _set_up(side: str) -> None:
    sys.path[:0] = [str(HERE), TESTS, os.path.dirname(TESTS), str(HERE.parents[1] / "src")]
    os.environ.setdefault("TRIPWIRE_RECORD_CHECK", "0")
    import torch
    import torch._dynamo
    import torch._dynamo.test_case
    import torch._dynamo.testing
    import torch.testing._internal.common_utils as common

    torch.set_num_threads(1)
    logging.getLogger("tripwire").setLevel(logging.ERROR)
    _patch_dispatcher(side)
    dynamo: Any = torch._dynamo

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        return model if options.get("disable") else _compile(model, **options)

    def optimize(backend: Any = "inductor", *_: Any, nopython: bool = False, **options: Any) -> Any:
        if options.get("disable"):
            return lambda fn: fn
        return lambda fn: _compile(fn, backend=backend, fullgraph=nopython)

    def optimize_assert(backend: Any, *_: Any, **options: Any) -> Any:
        return lambda fn: _compile(fn, backend=backend, fullgraph=True)

    torch.compile = compile
    dynamo.optimize = optimize
    dynamo.optimize_assert = dynamo.testing.optimize_assert = optimize_assert
    common.make_dynamo_test = _make_dynamo_test
    for cls in (common.TestCase, dynamo.test_case.TestCase):
        _soften(cls, cls is common.TestCase)


def _compile(fn: Any, backend: Any = "inductor", fullgraph: bool = False, **_: Any) -> Any:
    """Inductor is replaced by the plain graph: its numbers are others, and it takes long."""
    import tripwire

    NOTES.compiles += 1
    NOTES.is_full = fullgraph
    plain = backend in ("inductor", "eager_noexcept", None)
    try:
        return tripwire.compile(fn, backend="eager" if plain else backend)
    finally:
        NOTES.is_full = False


def _make_dynamo_test(fn: Any = None) -> Any:
    """Theirs compiles a function of no tensors, of which there is no graph; this one has some."""
    if fn is None:
        return _make_dynamo_test

    @functools.wraps(fn)
    def test_fn(self: Any, **kwargs: Any) -> None:
        import torch

        def dummy(x: Any) -> Any:
            fn(self, **kwargs)
            return x + 1

        x = torch.ones(2)
        dummy(x)
        if not torch.equal(_compile(dummy, fullgraph=True)(x), x + 1):
            raise AssertionError("dummy differs")

    return test_fn


# What tripwire's own file is named for isn't observed as the user's code is.
_CALLS = """
def call_twice(self, *args, **kwargs):
    if not (CURRENT.tracing or NOTES.is_inside):
        NOTES.is_inside = True
        try:
            call_before(self, args, kwargs, inner)
        finally:
            NOTES.is_inside = False
    return inner(self, *args, **kwargs)
def call_plainly(self, *args, **kwargs):
    return self.target(*args, **kwargs)
def assert_softly(self, *args, **kwargs):
    if CURRENT.tracing:
        return plain(self, *args, **kwargs)
    return soften(self, *args, **kwargs)
"""


def _build_call(name: str, **names: Any) -> Any:
    """One of the functions above, as if it were tripwire's."""
    from tripwire.dispatch import dispatcher
    from tripwire.tracing.state import CURRENT

    space = {"CURRENT": CURRENT, "NOTES": NOTES, **names}
    exec(compile(_CALLS, dispatcher.__file__, "exec"), space)
    return space[name]


def _patch_dispatcher(side: str) -> None:
    """Note what is refused, and make each call twice."""
    from tripwire.dispatch.dispatcher import Dispatcher
    from tripwire.dispatch.telling import Teller

    init, count = Dispatcher.__init__, Teller.count_refusal

    def noting_init(self: Any, target: Any, name: Any, options: Any) -> None:
        init(self, target, name, options)
        self._teller.row = {"name": str(name), "full": NOTES.is_full, "refused": {}}
        NOTES.compiled.append(self._teller.row)

    def noting_count(self: Any, refusal: Any) -> Any:
        refused = self.row["refused"]
        refused[refusal.slug] = refused.get(refusal.slug, 0) + 1
        return count(self, refusal)

    patched: Any = Dispatcher
    teller: Any = Teller
    patched.__init__, teller.count_refusal = noting_init, noting_count
    inner = _build_call("call_plainly") if side == "plain" else Dispatcher.__call__
    patched.__call__ = _build_call("call_twice", inner=inner, call_before=_call_before)


def _call_before(self: Any, args: Any, kwargs: Any, inner: Callable[..., Any]) -> None:
    import numpy
    import torch

    memo: dict[int, tuple[Any, Any]] = {}
    copies = [_copy(value, memo) for value in args]
    named = {name: _copy(value, memo) for name, value in kwargs.items()}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        with contextlib.suppress(Exception):
            inner(self, *copies, **named)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def _copy(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """Tensors and containers anew, shared where they were; the rest as it is."""
    import torch

    if id(value) in memo:
        return memo[id(value)][0]
    made = value
    if type(value) is torch.Tensor:
        made = _copy_tensor(value, memo)
    elif type(value) is tuple:
        made = tuple(_copy(item, memo) for item in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        with contextlib.suppress(Exception):
            made = type(value)(*(_copy(item, memo) for item in value))
    elif type(value).__name__ in _CONTAINERS and type(value).__module__ in _PYTHONS:
        made = copy.copy(value)
        memo[id(value)] = made, value
        if isinstance(made, dict):
            made.update({key: _copy(item, memo) for key, item in value.items()})
        elif type(value) is list:
            made[:] = [_copy(item, memo) for item in value]
    memo[id(value)] = made, value
    return made


_CONTAINERS = ("list", "dict", "set", "OrderedDict", "defaultdict", "deque")
_PYTHONS = ("builtins", "collections")


def _copy_tensor(tensor: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return tensor
    try:
        with torch.no_grad():
            made = _copy_values(tensor, memo)
        if tensor.requires_grad:
            made.requires_grad_(True)
            made = made if tensor.is_leaf else made.clone()
    except Exception:  # a tensor that can't be asked: fake, lazy, wrapped
        return tensor
    return made


def _copy_values(tensor: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    import torch

    base = tensor._base
    if type(base) is torch.Tensor and not tensor.requires_grad:
        memo.setdefault(id(base), (_copy_tensor(base, memo), base))
        there = memo[id(base)][0]
        return there.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj() or (0 in tensor.stride() and tensor.numel() > 1):
        return tensor.detach().clone()
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.copy_(tensor.detach())


# --- assertions, softened ------------------------------------------------------------------------

_BLOCKS = "Raises RaisesRegex Warns WarnsRegex Logs NoLogs"
_ASSERTIONS = (
    "Equal NotEqual True False Is IsNot IsNone IsNotNone In NotIn IsInstance NotIsInstance Greater "
    "GreaterEqual Less LessEqual AlmostEqual Regex NotRegex ExpectedInline Expected "
    "ExpectedInlineMunged ExpectedRaisesInline DictEqual ListEqual TupleEqual SetEqual "
    f"SequenceEqual MultiLineEqual CountEqual ObjectIn EqualIgnoreType {_BLOCKS}"
)


def _soften(cls: Any, inherits: bool) -> None:
    """Let a failed assertion be noted, and the test go on. In a trace the plain one runs."""
    names = [f"assert{name}" for name in _ASSERTIONS.split()] + ["fail"]
    for name in names:
        if name in vars(cls) or (inherits and hasattr(cls, name)):
            plain = getattr(cls, name)
            softly = _build_call("assert_softly", plain=plain, soften=_build_soft(name, plain))
            softly.__name__ = name
            setattr(cls, name, softly)


def _build_soft(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    is_block = name.removeprefix("assert") in _BLOCKS.split()

    def soft(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running.inside:
            return plain(self, *args, **kwargs)
        line, text = _find_place()
        _running.inside = True
        try:
            result = plain(self, *args, **kwargs)
        except AssertionError as error:
            NOTES.rows.append({"k": name, "line": line, "text": text, "msg": str(error)[:500]})
            return None
        finally:
            _running.inside = False
        return _Block(result, line, text) if is_block and result is not None else result

    return soft


class _Running(threading.local):
    """Whether an assertion runs in this thread: it may use others."""

    inside = False


_running = _Running()


def _find_place() -> tuple[int, str]:
    """Line and text of the innermost frame of a test file."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(TESTS):
        frame = frame.f_back
    if frame is None:
        return 0, ""
    first, last, *_ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    start, end = first or frame.f_lineno, last or frame.f_lineno
    lines = range(start, min(end, start + 6) + 1)
    text = " ".join(linecache.getline(frame.f_code.co_filename, n).strip() for n in lines)
    return start, text[:400]


class _Block:
    """`with self.assertRaises(...)`: what it finds is noted."""

    def __init__(self, plain: Any, line: int, text: str) -> None:
        self.plain, self.line, self.text = plain, line, text

    def __enter__(self) -> Any:
        entered = self.plain.__enter__()
        return self if entered is self.plain else entered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["plain"], name)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if kind is not None and issubclass(kind, TookTooLong):
            return False
        try:
            accepted = self.plain.__exit__(kind, error, trace)
        except AssertionError as failed:
            self._note("raises", str(failed)[:300], failed)
            return True
        if kind is not None and not accepted:
            self._note("raises-other", f"{kind.__module__}.{kind.__name__}: {error}"[:400], error)
            return True
        return accepted

    def _note(self, how: str, message: str, error: BaseException) -> None:
        NOTES.rows.append({"k": how, "line": self.line, "text": self.text, "msg": message})
        with contextlib.suppress(Exception):
            self.plain.exception = getattr(self.plain, "exception", error)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--list", file]:
            _list(file)
        case ["--work", *rest]:
            _work(*rest)
        case _:
            main()
