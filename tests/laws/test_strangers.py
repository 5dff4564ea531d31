"""Strangers: others who trace, profile, transform or run code at the same time.

Compiled code works there or runs plainly, with a reason; never a wrong result, and whoever had
put a hook in place finds it again, and has seen what it would have seen.
"""

from __future__ import annotations

import asyncio
import cProfile
import importlib.util
import linecache
import logging
import pstats
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from support import check_same, run_with_torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import tripwire

X = torch.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.inner(x)) * self.scale


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """A compiled module and its plain twin."""
    return tripwire.compile(Net(), backend="eager"), Net()


def check_calls(compiled: Any, plain: Any, *args: Any) -> None:
    """A trace, a hit, a retirement and another hit, all of them right."""
    for scale in (2.0, 2.0, 3.0, 3.0):
        compiled.scale = plain.scale = scale
        check_same(plain(*args), compiled(*args))


def hits_of(compiled: Any) -> int:
    return tripwire.statistics(compiled).hits


# --- those who trace Python ----------------------------------------------------------------------


class Debugger:
    """A trace function, as a debugger or a coverage tool sets one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if event == "line" and frame.f_code.co_filename == __file__:
            self.lines.append((frame.f_code.co_name, frame.f_lineno))
        return self


def test_a_debuggers_trace_function_stays_and_sees_every_line_of_a_traced_call(pair) -> None:
    compiled, plain = pair
    seen: list[list[tuple[str, int]]] = []
    before = sys.gettrace()
    for net in (plain, compiled):
        debugger = Debugger()
        sys.settrace(debugger)
        try:
            got = net(X)
            assert sys.gettrace() is debugger
        finally:
            sys.settrace(before)
        seen.append([line for line in debugger.lines if line[0] in ("forward", "helper")])
    check_same(plain(X), got)
    assert seen[0] == seen[1]
    check_calls(compiled, plain, X)
    assert hits_of(compiled)


def test_calls_under_a_trace_function_are_compiled_and_right(pair) -> None:
    compiled, plain = pair
    debugger, before = Debugger(), sys.gettrace()
    sys.settrace(debugger)
    try:
        check_calls(compiled, plain, X)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert hits_of(compiled)


def test_a_profile_function_stays_and_sees_the_calls_of_a_traced_run(pair) -> None:
    compiled, plain = pair
    calls: list[str] = []

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        got = compiled(X)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert calls == ["forward", "helper"]
    check_same(plain(X), got)
    check_calls(compiled, plain, X)


def test_cprofile_stays_and_counts(pair, caplog) -> None:
    compiled, plain = pair
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        check_calls(compiled, plain, X)
    finally:
        profiler.disable()
    counted = {name[2] for name in pstats.Stats(profiler).stats}
    assert "forward" in counted
    check_calls(compiled, plain, X)  # and without it
    if sys.version_info < (3, 12):
        assert "not-observed" in caplog.text


def test_torch_profiler_sees_the_ops_of_traces_and_hits(pair) -> None:
    compiled, plain = pair
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            check_same(plain(X), compiled(X))
        ops = {event.key: event.count for event in profiler.key_averages()}
        assert ops["aten::tanh"] == 2
    assert hits_of(compiled) == 1


@pytest.mark.skipif(importlib.util.find_spec("coverage") is None, reason="coverage is absent")
@pytest.mark.parametrize("core", ["ctrace", "pytrace"])
def test_coverage_counts_the_lines_of_a_traced_call(tmp_path, core) -> None:
    script = tmp_path / "covered.py"
    script.write_text(
        "import torch, tripwire\n"
        "def f(x):\n"
        "    if x.dim() == 2:\n"
        "        return x + 1\n"
        "    return x - 1\n"
        "g = tripwire.compile(f, backend='eager')\n"
        "for _ in range(3):\n"
        "    assert torch.equal(g(torch.ones(2, 2)), torch.ones(2, 2) + 1)\n"
        "assert tripwire.statistics(g).hits == 2\n"
    )
    command = [sys.executable, "-m", "coverage", "run", f"--include={script}", str(script)]
    environment = {**_environment(), "COVERAGE_FILE": str(tmp_path / "data"), "COVERAGE_CORE": core}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    command = [sys.executable, "-m", "coverage", "report", "-m"]
    report = subprocess.run(
        command, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert report.split()[-1] == "91%" or " 5" in report.splitlines()[2], report


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# --- modes ---------------------------------------------------------------------------------------


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_class", [CountFunctions, CountOps])
@pytest.mark.parametrize("warm", [False, True])
def test_a_mode_of_others_sees_what_it_sees_of_plain_code(pair, mode_class, warm) -> None:
    compiled, plain = pair
    if warm:
        check_calls(compiled, plain, X)
    seen = []
    for net in (plain, compiled):
        net.scale = 2.0
        with mode_class() as mode:
            got = net(X)
        seen.append(mode.seen)
    check_same(plain(X), got)
    assert seen[0] == seen[1]
    check_calls(compiled, plain, X)


def test_a_mode_that_changes_results_changes_compiled_ones(pair) -> None:
    compiled, plain = pair

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    check_calls(compiled, plain, X)
    with Doubles():
        check_same(plain(X), compiled(X))
    check_same(plain(X), compiled(X))


# --- transforms and other compilers --------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f)(X),
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.jacrev(f)(X[0]),
        lambda f: torch.func.jvp(f, (X,), (X,)),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X),
        lambda f: torch.autograd.functional.jacobian(f, X),
    ],
    ids=["vmap", "grad", "jacrev", "jvp", "vmap of grad", "jacobian"],
)
def test_function_transforms_of_a_compiled_module_are_right(pair, transform, warm) -> None:
    compiled, plain = pair
    if warm:
        check_calls(compiled, plain, X)
    for _ in range(2):
        check_same(transform(plain), transform(compiled))
    check_calls(compiled, plain, X)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_code_runs_inside_torch_compile(pair, warm) -> None:
    compiled, plain = pair
    if warm:
        check_calls(compiled, plain, X)
    torch._dynamo.reset()
    outer = torch.compile(lambda x: compiled(x) * 2, backend="eager")
    for scale in (2.0, 2.0, 3.0, 3.0):
        compiled.scale = plain.scale = scale
        check_same(plain(X) * 2, outer(X))
    assert compiled.statistics().hits >= 2  # what is inside is tripwire's
    check_calls(compiled, plain, X)


def test_a_function_inside_torch_compile() -> None:
    compiled = tripwire.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    outer = torch.compile(lambda x: compiled(x * 3) * 2, backend="eager")
    for _ in range(3):
        check_same(((X * 3).sin() + 1) * 2, outer(X))
    assert compiled.statistics().hits == 2


def test_torch_compile_of_the_whole_graph_says_what_it_leaves_alone(pair) -> None:
    compiled, plain = pair
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tripwire compiles it"):
        torch.compile(lambda x: compiled(x) * 2, backend="eager", fullgraph=True)(X)
    check_calls(compiled, plain, X)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("function", [False, True], ids=["module", "function"])
def test_around_torch_compile(pair, fullgraph, function) -> None:
    _, plain = pair
    torch._dynamo.reset()
    inner = torch.compile(
        plain.forward if function else plain, backend="eager", fullgraph=fullgraph
    )
    outer = tripwire.compile(lambda x: inner(x) * 2, backend="eager")
    for scale in (2.0, 2.0, 2.0, 2.0, 3.0, 3.0):  # until it is tried no more, and after
        plain.scale = scale
        expected = plain(X) * 2
        check_same(expected, outer(X))
        check_same(expected, inner(X) * 2)
    (refusal,) = tripwire.explain(outer).data()["refusals"]
    assert refusal["slug"] == "torch-compile-inside"


@pytest.mark.filterwarnings("ignore")
def test_torch_export_of_a_module_whose_forward_is_compiled(pair) -> None:
    compiled, plain = pair
    net = compiled._orig_mod
    net.forward = tripwire.compile(net.forward, backend="eager")
    check_calls(net, plain, X)
    check_same(plain(X), torch.export.export(net, (X,)).module()(X))
    check_calls(net, plain, X)


@pytest.mark.filterwarnings("ignore")
def test_export_refuses_or_is_right(pair) -> None:
    compiled, plain = pair
    try:
        program = torch.export.export(compiled, (X,))
    except Exception as error:  # a clear word is enough; a wrong program isn't
        assert str(error)
    else:
        check_same(plain(X), program.module()(X))
    check_calls(compiled, plain, X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warm", [False, True])
def test_jit_trace_of_a_compiled_module_is_right(pair, warm) -> None:
    compiled, plain = pair
    for net in pair:
        net.requires_grad_(False)  # else torch refuses, see below
    if warm:
        check_calls(compiled, plain, X)
        compiled.scale = plain.scale = 2.0
    traced = torch.jit.trace(lambda x: compiled(x), (X,), check_trace=False)
    for x in (X, X + 1):
        torch.testing.assert_close(traced(x), plain(x))
    check_calls(compiled, plain, X)


def test_what_torch_jit_trace_refuses_is_refused_without_a_crash() -> None:
    printed = run_with_torch(
        "import torch, tripwire\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "f = tripwire.compile(lambda x: torch.tanh(x * weight) + weight, backend='eager')\n"
        "for warm in range(3):\n"
        "    try:\n"
        "        torch.jit.trace(lambda x: f(x), (torch.ones(3),), check_trace=False)\n"
        "    except RuntimeError as error:\n"
        "        print('requires grad' in str(error))\n"
        "    f(torch.ones(3))\n"
    )
    assert printed.split() == ["True"] * 3


@pytest.mark.filterwarnings("ignore")
def test_symbolic_trace_refuses_or_is_right(pair) -> None:
    compiled, plain = pair
    try:
        traced = torch.fx.symbolic_trace(compiled)
    except Exception as error:
        assert str(error)
    else:
        check_same(plain(X), traced(X))
    check_calls(compiled, plain, X)


def test_make_fx_records_a_compiled_module(pair) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    compiled, plain = pair
    check_calls(compiled, plain, X)
    check_same(plain(X), make_fx(lambda x: compiled(x))(X)(X))
    check_calls(compiled, plain, X)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of plain code too
def test_fake_tensors_pass_through_a_compiled_module(pair) -> None:
    from torch._subclasses import FakeTensorMode

    compiled, plain = pair
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(X)
            got = compiled(fake)
            assert type(got) is type(fake)
            assert got.shape == X.shape
        outside = compiled(fake)  # fake inputs, and no mode
        assert type(outside) is type(fake)
        check_calls(compiled, plain, X)


class Tagged(torch.Tensor):
    """A subclass with an attribute, and results of its own class."""


class Logged(torch.Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("cls", [Tagged, Logged, nn.Parameter])
def test_calls_with_tensor_subclasses_agree(pair, cls) -> None:
    compiled, plain = pair
    x = X.clone().as_subclass(cls) if cls is not nn.Parameter else nn.Parameter(X)
    check_calls(compiled, plain, X)
    check_calls(compiled, plain, x)
    check_calls(compiled, plain, X)


def test_a_subclass_that_wraps_tensors_comes_out_as_itself(pair) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    compiled, plain = pair
    for _ in range(3):
        expected, got = plain(TwoTensor(X, X + 1)), compiled(TwoTensor(X, X + 1))
        check_same((expected.a, expected.b), (got.a, got.b))
        check_same(plain(X), compiled(X))


# --- those who run code elsewhere ----------------------------------------------------------------


class Computed(Dataset):
    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.compiled(X + index)


@pytest.mark.parametrize("warm", [False, True])
def test_workers_of_a_data_loader_run_compiled_code(pair, warm) -> None:
    compiled, plain = pair
    if warm:
        check_calls(compiled, plain, X)
        plain.scale = compiled.scale = 2.0
    loader = DataLoader(Computed(compiled), batch_size=2, num_workers=2)
    with torch.no_grad():
        expected = torch.stack([plain(X + index) for index in range(8)])
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)
    check_calls(compiled, plain, X)


REQUEST: ContextVar[float] = ContextVar("request", default=1.0)


def test_asyncio_tasks_each_have_their_context() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * REQUEST.get()

    compiled = tripwire.compile(scaled, backend="eager")

    async def serve(number: int) -> list[torch.Tensor]:
        REQUEST.set(float(number))
        results = []
        for _ in range(5):
            results.append(compiled(X))
            await asyncio.sleep(0)
        return results

    async def serve_all() -> list[list[torch.Tensor]]:
        return await asyncio.gather(*map(serve, range(4)))

    for number, results in enumerate(asyncio.run(serve_all())):
        for result in results:
            check_same(X * float(number), result)


def test_a_compiled_function_inside_a_coroutine_and_to_thread(pair) -> None:
    compiled, plain = pair

    async def work() -> list[torch.Tensor]:
        jobs = [asyncio.to_thread(compiled, X + number) for number in range(8)]
        return [compiled(X), *await asyncio.gather(*jobs)]

    first, *others = asyncio.run(work())
    check_same(plain(X), first)
    for number, got in enumerate(others):
        check_same(plain(X + number), got)


def test_thread_pools_share_a_compiled_module(pair) -> None:
    compiled, plain = pair
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(compiled, [X + number for number in range(32)]))
    for number, result in enumerate(got):
        check_same(plain(X + number), result)


def test_threading_profile_of_others_reaches_their_threads(pair) -> None:
    compiled, plain = pair
    calls: list[str] = []

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            calls.append(frame.f_code.co_name)

    threading.setprofile(profile)
    try:
        thread = threading.Thread(target=compiled, args=(X,))
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert calls == ["forward", "helper"]
    check_calls(compiled, plain, X)


# --- notebooks -----------------------------------------------------------------------------------


class Notebook:
    """Cells as IPython runs them: each has a file of its own name, known to linecache alone."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "tripwire": tripwire}
        self.count = 0

    def run(self, text: str) -> Any:
        self.count += 1
        name = f"/tmp/ipykernel_1/{self.count}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), self.space)
        return self.space.get("_")


def test_a_notebook_whose_cells_are_run_again() -> None:
    book = Notebook()
    book.run("SCALE = 2.0\nx = torch.ones(2)")
    define = "def f(x):\n    return helper(x) * SCALE\n"
    book.run("def helper(x):\n    return x + 1\n")
    book.run(define + "g = tripwire.compile(f, backend='eager')")
    assert book.run("_ = [g(x) for _ in range(3)]")[-1].tolist() == [4.0, 4.0]
    book.run("SCALE = 3.0")
    assert book.run("_ = [g(x) for _ in range(3)]")[-1].tolist() == [6.0, 6.0]
    book.run("def helper(x):\n    return x + 2\n")  # the cell is changed and run again
    assert book.run("_ = [g(x) for _ in range(3)]")[-1].tolist() == [9.0, 9.0]
    book.run("def f(x):\n    return x\n")  # another f: g keeps its own
    assert book.run("_ = [g(x) for _ in range(3)]")[-1].tolist() == [9.0, 9.0]
    linecache.clearcache()
    book.run("SCALE = 1.0")
    assert book.run("_ = [g(x) for _ in range(3)]")[-1].tolist() == [3.0, 3.0]
    assert hits_of(book.space["g"]) >= 7


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is absent")
def test_globals_of_an_ipython_cell_are_watched() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_cell("import torch, tripwire\nSCALE = 2.0")
    shell.run_cell("@tripwire.compile(backend='eager')\ndef g(x):\n    return x * SCALE")
    for scale in (2.0, 3.0):
        shell.run_cell(f"SCALE = {scale}")
        shell.run_cell("found = [g(torch.ones(1)).item() for _ in range(3)]")
        assert shell.user_ns["found"] == [scale] * 3


def test_a_console_whose_code_has_no_source() -> None:
    printed = run_with_torch(
        "import torch, tripwire, code\n"
        "console = code.InteractiveConsole({'torch': torch, 'tripwire': tripwire})\n"
        "for line in ['S = 2.0', 'f = lambda x: x * S',"
        " 'g = tripwire.compile(f, backend=\"eager\")',"
        " 'a = [g(torch.ones(1)).item() for _ in range(2)]', 'S = 3.0',"
        " 'a += [g(torch.ones(1)).item() for _ in range(2)]', 'print(a)']:\n"
        "    console.push(line)"
    )
    assert printed.splitlines()[-1] == "[2.0, 2.0, 3.0, 3.0]"


def test_a_file_that_changes_on_disk_after_its_import(tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "changing_module.py"
    module.write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    found = importlib.import_module("changing_module")
    compiled = tripwire.compile(found.f, backend="eager")
    module.write_text("# another line\n# and another\ndef f(x):\n    return x + 2\n")
    linecache.checkcache()
    for _ in range(3):
        check_same(X + 1, compiled(X))


@pytest.fixture(autouse=True)
def _quiet(caplog) -> None:
    caplog.set_level(logging.WARNING, "tripwire.refusals")
