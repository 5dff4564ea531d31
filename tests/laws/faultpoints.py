"""Faults at every statement of tripwire's own: tripwire is imported with a point before each.

So are the guards that it writes; a back end has two, one where it compiles, one where it is called.
A point is a place that was passed in a run without faults. Each is visited again, in a fresh
scene, and raises there; afterwards the process must be as it was, and the same callable must work
and be right. New code is covered as it comes: nothing names a function of tripwire here.

Run as a script, in a process of its own: `faultpoints.py PLAN [+ PLAN ...]`, where a plan is the
options that `--help` names. Prints figures and what went wrong, a line of JSON for each plan.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import faulthandler
import functools
import gc
import importlib.machinery
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

# --- points ------------------------------------------------------------------------------------

_POINTS: list[str] = []  # by number: where it is
_NUMBERS: dict[str, int] = {}
_PACKAGE = Path(__file__).parents[2] / "src" / "tripwire"


class _Points(ast.NodeTransformer):
    """Puts a call before every statement of every function."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._depth = self._cleaning = 0

    def _visit_function(self, node: Any) -> Any:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        node.body = self._with_points(node.body)
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_Try(self, node: ast.Try) -> ast.AST:
        for name in ("body", "handlers", "orelse"):
            setattr(node, name, [self.visit(part) for part in getattr(node, name)])
        self._cleaning += 1
        node.finalbody = [self.visit(part) for part in node.finalbody]
        self._cleaning -= 1
        return self._add_points(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        return self._add_points(node)

    def _add_points(self, node: ast.AST) -> ast.AST:
        if self._depth and not _is_function(node):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    cleans = field == "finalbody" or _catches_all(node) or self._cleaning > 0
                    setattr(node, field, self._with_points(block, cleans=cleans))
        return node

    def _with_points(self, block: list[ast.stmt], *, cleans: bool = False) -> list[ast.stmt]:
        """A block with points. Python interrupts where a function begins or a call ends: never
        in a `finally` before its first call.
        """
        found: list[ast.stmt] = []
        for number, statement in enumerate(block):
            if cleans and not any(map(_calls, block[:number])):
                found.append(statement)
                continue
            docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            declared = isinstance(statement, (ast.Global, ast.Nonlocal))
            if not (docstring or declared):
                found.append(self._point(statement))
            found.append(statement)
        return found

    def _point(self, at: ast.stmt) -> ast.stmt:
        number = _number(f"{self._file}:{at.lineno}")
        call = ast.Call(ast.Name("__fault__", ast.Load()), [ast.Constant(number)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), at))


def _number(place: str) -> int:
    """A point's number. Guards are written anew for each entry, and have the same ones."""
    if place not in _NUMBERS:
        _NUMBERS[place] = len(_POINTS)
        _POINTS.append(place)
    return _NUMBERS[place]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))


def _catches_all(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and (
        node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "BaseException")
    )


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        tree = _Points(str(Path(path).relative_to(_PACKAGE))).visit(tree)
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "tripwire":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def put_points_into_guards() -> None:
    from tripwire.validity import guards, table

    @functools.cache  # scenes are alike, and so are their guards
    def compile_with_points(source: str, name: str, mode: str) -> CodeType:
        tree = _Points(name).visit(ast.parse(source))
        return compile(tree, name, mode, dont_inherit=True)

    for module in (guards, table):
        module.compile = compile_with_points  # type: ignore[attr-defined]  # found before Python's own


def backend_with_points(module: Any, examples: Any) -> Callable[..., Any]:
    __fault__(_number("back end: compiles"))  # type: ignore[name-defined]  # noqa: F821

    def run(*inputs: Any) -> Any:
        __fault__(_number("back end: is called"))  # type: ignore[name-defined]  # noqa: F821
        return module.forward(*inputs)

    return run


class Injected(MemoryError):
    """What is raised at a point, as Python may raise it at any."""


class _Switch:
    """What `__fault__` does. Lies in tripwire's folder, by its name, so that no run observes it."""

    def __init__(self) -> None:
        self.passed: Counter[int] = Counter()
        self.target = -1
        self.left = 0
        self.error: type[BaseException] = Injected
        space = {"switch": self, "get_ident": threading.get_ident, "main": threading.get_ident()}
        code = compile(_FAULT, str(_PACKAGE / "faults.py"), "exec")
        exec(code, space)
        builtins.__fault__ = space["fault"]

    @contextlib.contextmanager
    def armed(self, point: int, occurrence: int, error: type[BaseException]) -> Iterator[None]:
        self.error, self.left, self.target = error, occurrence, point
        try:
            yield
        finally:
            self.target = -1


_FAULT = """
def fault(point):
    if switch.target == point and get_ident() == main:
        switch.left -= 1
        if switch.left == 0:
            switch.target = -1
            raise switch.error(f"at point {point}")
    elif switch.target == -2:
        switch.passed[point] += 1
"""


def find_passed(switch: _Switch, play: Callable[[], None]) -> Counter[int]:
    """The points that a scene passes, with how often."""
    switch.passed.clear()
    switch.target = -2
    try:
        play()
    finally:
        switch.target = -1
    return Counter(switch.passed)


# --- the process ---------------------------------------------------------------------------------


class Process:
    """What must be as it was."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        self._owners = [
            builtins,
            os._Environ,
            importlib._bootstrap,
            torch,
            torch.overrides,
            torch.Tensor,
            nn.Module,
            torch.nn.modules.module,
            torch._C.ScriptFunction,
            torch.amp.autocast_mode.autocast,
            torch.autograd.function._SingleLevelFunction,
            torch.autograd.grad_mode.inference_mode,
            torch.utils.checkpoint,
        ]
        self._patched = [dict(vars(owner)) for owner in self._owners]
        self._rest = self._sample()

    def _sample(self) -> dict[str, Any]:
        import torch

        from tripwire.tracing import hooks, observe
        from tripwire.tracing.state import CURRENT

        tools = getattr(sys, "monitoring", None)
        return {
            "profile function": sys.getprofile(),
            "trace function": sys.gettrace(),
            "monitoring tools": tools and [tools.get_tool(number) for number in range(6)],
            "observers": len(observe._at_work),
            "users of patches": (len(hooks._OF_TORCH._users), len(hooks._OF_PYTHON._users)),
            "collector": (gc.isenabled(), gc.get_threshold()),
            "callbacks of the collector": len(gc.callbacks),
            "function modes": torch._C._len_torch_function_stack(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "state of tracing": CURRENT.state,
            "tracing": CURRENT.tracing,
            "kept": CURRENT.kept,
            "open spans": _count_open_spans(),
            "threads": threading.active_count(),
            "open files": _list_files(),
        }

    def find_changes(self) -> list[str]:
        changes = []
        for owner, before in zip(self._owners, self._patched, strict=True):
            now = vars(owner)
            for name in before.keys() | now.keys():
                if name != "__fault__" and before.get(name) is not now.get(name):
                    changes.append(f"{getattr(owner, '__name__', owner)}.{name}")
        now = self._sample()
        changes += [f"{k}: {v} → {now[k]}" for k, v in self._rest.items() if v != now[k]]
        return changes

    def accept_files(self) -> None:
        """Nobody can close them: told once."""
        self._rest["open files"] = _list_files()


def _count_open_spans() -> int:
    from tripwire.telemetry import threads

    return len(threads.local.state.stack)


def _list_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in found if not name.startswith("/proc/"))


# --- scenes --------------------------------------------------------------------------------------


class Scene:
    """A callable, compiled, its plain twin, and what is done with them."""

    backend: Any = "eager"

    def __init__(self) -> None:
        import torch

        import tripwire

        net, inputs = make_net(), torch.arange(6.0).reshape(2, 3)
        self.net, self.x = net, inputs
        self.compiled = tripwire.compile(net, backend=self.backend)

    def play(self) -> None:
        """A trace, a hit, a retirement, a second entry, and the first again."""
        for scale in (2.0, 2.0, 3.0, 3.0, 2.0):
            self.net.config["scale"] = scale
            self.compiled(self.x)

    def check(self) -> str | None:
        """Whether the callable still works, and is right; None, or what is wrong."""
        import torch

        for scale in (2.0, 2.0, 5.0, 5.0, 3.0):
            self.net.config["scale"] = scale
            twin = copy.deepcopy(self.net)
            expected, got = twin(self.x), self.compiled(self.x)
            if not torch.equal(expected, got):
                return f"{got} in place of {expected}"
            if twin.calls != self.net.calls or not torch.equal(twin.total, self.net.total):
                return f"effects: {self.net.calls}, {self.net.total}"
        return None

    def close(self) -> None:
        """Leave nothing."""


class BackendScene(Scene):
    """The same with a back end that fails now and then."""

    backend = staticmethod(backend_with_points)


class LogScene(Scene):
    """The same while events are logged into a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="faults")

    def play(self) -> None:
        from tripwire.telemetry import log

        try:
            log.start_log(self.folder)
            super().play()
            log.stop_log()
        finally:
            log.stop_log()  # the first may have been hit

    def close(self) -> None:
        shutil.rmtree(self.folder)


class RecordScene(Scene):
    """A call that fails leaves a record in a folder."""

    def __init__(self) -> None:
        import torch

        import tripwire

        self.folder = tempfile.mkdtemp(prefix="faults")
        self.net, self.x = make_net(), torch.arange(6.0).reshape(2, 3)
        self.compiled = tripwire.compile(self.net, backend="eager", record_on_error=self.folder)

    def play(self) -> None:
        import torch

        self.compiled(self.x)
        with contextlib.suppress(RuntimeError):
            self.compiled(torch.ones(2, 4))  # shapes don't fit: the call raises

    def close(self) -> None:
        left = [path for path in Path(self.folder).rglob("*") if path.suffix != ".tripwire"]
        shutil.rmtree(self.folder)
        files = [path.name for path in left if path.is_file()]
        if files:
            raise AssertionError(f"files are left: {files}")


class WatchScene(Scene):
    """A listener on an object, by tripwire.watch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def play(self) -> None:
        import tripwire

        class Watched:
            value = 0

        watched = Watched()
        plain = dict(vars(Watched))
        self.watched = Watched, plain
        handle = tripwire.watch(watched, self.seen.append)
        watched.value = 1
        watched.value = 2
        handle.cancel()
        del handle, watched

    def close(self) -> None:
        cls, plain = self.watched
        self.watched = None
        if dict(vars(cls)) != plain:
            gc.collect()  # the frames of the interrupted call may go in circles
            if dict(vars(cls)) != plain:
                raise AssertionError("the class is still patched")


def make_net() -> Any:
    import torch
    from torch import nn

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            self.register_buffer("total", torch.zeros(3))
            self.config = {"scale": 2.0}
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            is_large = bool((x > 100).any())
            with torch.no_grad():
                self.total += x[0]
            with torch.autocast("cpu", enabled=False):
                y = Doubled.apply(self.inner(x))
            if is_large:
                y = y + 1
            return y * self.config["scale"] + getattr(self, "total").sum()

    torch.manual_seed(0)
    return Net()


SCENES = {
    "calls": Scene,
    "backend": BackendScene,
    "log": LogScene,
    "records": RecordScene,
    "watch": WatchScene,
}


# --- visits --------------------------------------------------------------------------------------


class Visits:
    def __init__(self, scene: str, switch: _Switch) -> None:
        self.make = SCENES[scene]
        self.switch = switch
        self.wrong: list[str] = []
        self.raised = self.swallowed = self.missed = 0
        for _ in range(3):  # what is imported and cached on the first calls
            first = self.make()
            first.play()
            first.check()
            first.close()
        if first.compiled.statistics().hits == 0:
            raise AssertionError("the scene runs no compiled code")
        leave_alone_what_is_there()
        self.process = Process()

    def visit(self, point: int, occurrence: int, error: type[BaseException]) -> None:
        """One fault."""
        scene = self.make()
        where = f"{_POINTS[point]} #{occurrence} {error.__name__}"
        changes: list[str] = []
        try:
            with self.switch.armed(point, occurrence, error):
                scene.play()
                fired = self.switch.left <= 0
            self.swallowed += fired
            self.missed += not fired
        except BaseException as raised:
            self.raised += 1
            if not _is_injected(raised, error):
                self.wrong.append(f"{where}: {type(raised).__name__}: {raised}"[:300])
            # While the exception lives, as it does in a shell, where its frames do, too. They may
            # hold a file.
            changes = [c for c in self.process.find_changes() if not c.startswith("open files")]
        changes = changes or self.process.find_changes()
        if "telemetry/spans.py" in where:  # whoever closes a span was hit: that one stays open
            changes = [change for change in changes if not change.startswith("open spans")]
        if changes:
            self.wrong.append(f"{where}: {'; '.join(changes)}"[:300])
        try:
            wrong = scene.check()
            scene.close()
        except Exception as later:
            wrong = f"later {type(later).__name__}: {later}"
        if wrong:
            self.wrong.append(f"{where}: {wrong}"[:300])
        repair()
        self.process.accept_files()

    def interrupt(self, chance: random.Random, longest: float) -> None:
        """One KeyboardInterrupt, at a random moment."""
        scene = self.make()
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))
        changes: list[str] = []
        try:
            try:
                scene.play()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            self.missed += 1
        except KeyboardInterrupt:
            self.raised += 1
            # Telemetry's part may wait for the exception to go: a generator is closed then.
            changes = [c for c in self.process.find_changes() if not c.startswith(_TELEMETRY)]
        except BaseException as raised:
            if _is_injected(raised, KeyboardInterrupt):
                self.raised += 1
            else:
                self.wrong.append(f"interrupt: {type(raised).__name__}: {raised}"[:300])
        changes = changes or self.process.find_changes()
        # Plain code can lose these, too: an interrupt may hit torch's own `no_grad.__exit__`.
        changes = [c for c in changes if not c.startswith(("grad mode", "autocast:"))]
        wrong = scene.check()
        scene.close()
        if changes or wrong:
            self.wrong.append(f"interrupt: {'; '.join(changes)} {wrong}"[:300])
        repair()


_TELEMETRY = ("callbacks of the collector", "open spans")


def repair() -> None:
    """Go on from a clean process: each fault is told once."""
    import torch

    from tripwire.telemetry import threads
    from tripwire.tracing.state import CURRENT

    threads.local.state.stack.clear()
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    sys.setprofile(None)
    gc.enable()
    gc.callbacks.clear()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    CURRENT.state, CURRENT.tracing = None, False


def _is_injected(error: BaseException | None, wanted: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, wanted):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave_alone_what_is_there() -> None:
    """Or each collection, and each search for holders, goes through all of torch and its tests."""
    gc.collect()
    gc.freeze()


def count_alive() -> Counter[str]:
    """What was watched and compiled since, and is still there."""
    gc.collect()
    wanted = {"Sentry", "Entry", "_FreshEntry", "Dispatcher", "Plan", "Standing"}
    wanted |= {"TracingState", "Net"}
    return Counter(
        type(item).__name__ for item in gc.get_objects() if type(item).__name__ in wanted
    )


def read_plans() -> list[argparse.Namespace]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scene", choices=SCENES, default="calls")
    parser.add_argument("--share", type=float, default=1.0, help="of all points, by chance")
    parser.add_argument("--part", default="1/1", help="k/n: of all points, every nth from the kth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interrupts", type=int, default=0, help="signals in place of points")
    parser.add_argument("--both", action="store_true", help="each point with both errors")
    parser.add_argument("--only", default="", help="points whose place has this in it")
    groups: list[list[str]] = [[]]
    for argument in sys.argv[1:]:
        if argument == "+":
            groups.append([])
        else:
            groups[-1].append(argument)
    plans = [parser.parse_args(group) for group in groups]
    if len({plan.interrupts > 0 for plan in plans}) > 1:
        parser.error("plans of one process have points, or none")
    return plans


def main() -> int:
    plans = read_plans()
    faulthandler.enable()
    faulthandler.dump_traceback_later(3600, exit=True)
    os.environ["TRIPWIRE_RECORD_CHECK"] = "0"
    switch = _Switch()
    if not plans[0].interrupts:
        sys.meta_path.insert(0, _Finder)
        put_points_into_guards()
    import torch._dynamo

    leave_alone_what_is_there()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    fine = True
    for plan in plans:
        figures = follow(plan, switch)
        print(json.dumps(figures), flush=True)
        fine = fine and not figures["wrong"] and not figures["left alive"]
    return 0 if fine else 1


def follow(plan: argparse.Namespace, switch: _Switch) -> dict[str, Any]:
    """Visit what a plan says; its figures."""
    visits = Visits(plan.scene, switch)
    before = count_alive()
    chance = random.Random(plan.seed)
    if plan.interrupts:
        longest = _time_of(visits)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for _ in range(plan.interrupts):
            visits.interrupt(chance, longest)
        visited = plan.interrupts
    else:
        scene = visits.make()
        passed = find_passed(switch, scene.play)
        scene.close()
        del scene
        targets = [
            (point, occurrence)
            for point, times in passed.items()
            for occurrence in dict.fromkeys((1, times))
            if plan.only in _POINTS[point]
        ]
        part, parts = map(int, plan.part.split("/"))
        targets = [t for t in targets[part - 1 :: parts] if chance.random() < plan.share]
        errors = (Injected, KeyboardInterrupt)
        for number, (point, occurrence) in enumerate(targets):
            for error in errors if plan.both else (errors[number % 2],):
                visits.visit(point, occurrence, error)
        visited = len(targets) * (1 + plan.both)
    # One of each may be kept: the latest call that failed, for tripwire.record_last.
    left = {name: n for name, n in (count_alive() - before).items() if n > 1}
    return {
        "scene": plan.scene,
        "visited": visited,
        "raised": visits.raised,
        "swallowed": visits.swallowed,
        "missed": visits.missed,
        "left alive": left,
        "wrong": len(visits.wrong),
        "first": visits.wrong[:40],
    }


def _time_of(visits: Visits) -> float:
    import time

    scene = visits.make()
    start = time.perf_counter()
    scene.play()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
