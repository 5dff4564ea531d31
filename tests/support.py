"""What the tests share: one helper per idea."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tripwire
from tripwire import Trace, Tracer, TracerWarning
from tripwire.reading.sources import Local
from tripwire.reading.structure import Planner, build_skeleton, find_difference


def tensors_of(value: object) -> list[torch.Tensor]:
    """Every tensor in a nested value, in order."""
    planner = Planner(lambda _: None)
    planner.plan(value)
    return planner.tensors


def quiet_trace(
    fn: Callable[..., Any], *args: Any, tracer: Tracer | None = None, **kwargs: Any
) -> Trace:
    """Trace without the warnings about branches and effects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return (tracer or Tracer()).trace(fn, *args, **kwargs)


def check_same(expected: object, got: object) -> None:
    """Equal structure, equal tensors to the last bit, equal need for gradients."""
    shapes = [build_skeleton(v, Local("value"), identity=False) for v in (expected, got)]
    assert shapes[0] == shapes[1], find_difference(shapes[0], shapes[1], "value")
    left, right = tensors_of(expected), tensors_of(got)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b)
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def check_traces(
    fn: Callable[..., Any],
    make: Callable[[int], tuple[Any, ...]],
    *,
    tracer: Tracer | None = None,
    grads: bool = True,
) -> Trace:
    """The law of this package: the graph on other inputs does what the function does on them.

    `make(seed)` makes arguments. Compared: the tracing call's own result, results on two other
    sets of inputs, what happens to the arguments, and gradients of arguments and parameters.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        _seed()
        expected = fn(*make(0))
        _seed()
        trace = (tracer or Tracer()).trace(fn, *make(0))
    trace.check()
    check_same(expected, trace.result)
    for seed in (1, 2):
        plain_args, graph_args = make(seed), make(seed)
        _seed()
        plain = fn(*plain_args)
        _seed()
        got = trace(*graph_args)
        check_same(plain, got)
        check_same(plain_args, graph_args)
        if grads:
            _check_gradients(fn, plain, plain_args, got, graph_args)
    return trace


def _seed() -> None:
    torch.manual_seed(7)


def _check_gradients(
    fn: Callable[..., Any], plain: object, plain_args: object, got: object, graph_args: object
) -> None:
    weights = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    sides = []
    for result, args in ((plain, plain_args), (got, graph_args)):
        leaves = [t for t in tensors_of(args) + weights if t.requires_grad and t.is_leaf]
        outputs = [t for t in tensors_of(result) if t.requires_grad]
        if not leaves or not outputs:
            return
        total = sum((t * torch.arange(1, t.numel() + 1).reshape(t.shape)).sum() for t in outputs)
        sides.append(torch.autograd.grad(total, leaves, allow_unused=True))
    for a, b in zip(*sides, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def refusal_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The slug with which a trace is refused."""
    try:
        quiet_trace(fn, *args, **kwargs)
    except tripwire.CannotTrace as error:
        return error.slug
    raise AssertionError("it was traced")


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(30)
    return found[0]


def run_python(code: str, env: dict[str, str] | None = None) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_FORKS = """
import importlib, json, os, sys, tempfile
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
task = json.loads(line)
for number, path in enumerate([os.devnull, *task["out"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
os.chdir(task["cwd"])
os.environ.clear()
os.environ.update(task["env"])
tempfile.tempdir = None
def run(code, space):
    for name in [name for name in space if not name.startswith("__")]:
        del space[name]
    exec(code, space)
run(task["code"], globals())
"""


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs programs in processes of their own, in which these modules are imported already.

    They are forks of one process: torch takes seconds to import, and Inductor more.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", _FORKS, *modules]
    # Not a TemporaryDirectory: from Python 3.13 on, workers that multiprocessing forks drop what
    # atexit knows, and with it this generator. They may not remove the folder.
    folder = tempfile.mkdtemp()
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(
            code: str, env: Mapping[str, str] = os.environ, cwd: Path | str = "."
        ) -> subprocess.CompletedProcess[str]:
            out = [Path(folder, name) for name in ("stdout", "stderr")]
            for path in out:
                path.write_bytes(b"")
            where = {"out": list(map(str, out)), "cwd": str(cwd)}
            process.stdin.write(json.dumps({**where, "code": code, "env": dict(env)}) + "\n")
            process.stdin.flush()
            code_of_exit = int(process.stdout.readline())
            return subprocess.CompletedProcess(
                command, code_of_exit, *(path.read_text() for path in out)
            )

        yield run
    shutil.rmtree(folder)


@functools.cache
def _forks_with_torch() -> Callable[..., subprocess.CompletedProcess[str]]:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forking("torch"))


def run_with_torch(code: str, env: dict[str, str] | None = None) -> str:
    """What a program prints in a process of its own that has imported torch, and nothing else."""
    done = _forks_with_torch()(code, {**os.environ, **(env or {})})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Write:
    """A step of `check_compiles` that writes instead of calling."""

    obj: Any
    name: Any
    value: Any

    def apply(self) -> None:
        """Write: an item of a dict, else an attribute."""
        if isinstance(self.obj, dict):
            self.obj[self.name] = self.value
        else:
            setattr(self.obj, self.name, self.value)


def write(obj: Any, name: Any, value: Any) -> Write:
    """Between two calls, `obj.name = value`; for a dict, `obj[name] = value`."""
    return Write(obj, name, value)


def check_compiles(
    fn: Callable[..., Any], calls: list[Any], *, traces: int, **options: Any
) -> Callable[..., Any]:
    """Every call returns what the plain callable returns, and this many of them are traced.

    A call is its argument, or a tuple of arguments; among the calls stand `write` steps. The
    callable has no effects: it runs plainly beside each call. The compiled one is returned.
    """
    compiled: Any = tripwire.compile(fn, **{"fullgraph": True, **options})
    for step in calls:
        if isinstance(step, Write):
            step.apply()
            continue
        args = step if isinstance(step, tuple) else (step,)
        _seed()
        expected = fn(*args)
        _seed()
        check_same(expected, compiled(*args))
    assert compiled.statistics().traces == traces
    return compiled


class Nameless(type):
    """A class that doesn't tell its name."""

    def __getattribute__(cls, name):
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("it isn't told")
        return super().__getattribute__(name)


class Unnamed(Exception, metaclass=Nameless):
    """An exception of such a class."""
