"""No trace left behind: whatever happens, every patch and hook is gone afterwards."""

import gc
import os
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch
from support import quiet_trace, refusal_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack

import tripwire
from tripwire.rulebook.rules import RULES
from tripwire.tracing import hooks, observe, pythonhooks
from tripwire.tracing.state import get_tracing_state

X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def nothing_stays():
    patched = (*hooks.PATCHES, *pythonhooks.find_patches())
    before = [vars(p.owner).get(p.name) for p in patched]
    codes = [getattr(value, "__code__", None) for value in before]
    profile = sys.getprofile()
    yield
    assert [vars(p.owner).get(p.name) for p in patched] == before
    assert all(getattr(v, "__code__", None) is c for v, c in zip(before, codes, strict=True))
    assert sys.getprofile() is profile
    assert _get_current_function_mode_stack() == []
    assert get_tracing_state() is None
    assert observe._at_work == {}
    if sys.version_info >= (3, 12):
        assert not any(sys.monitoring.get_tool(i) == "tripwire" for i in range(6))


class Boom(Exception):
    pass


def explode(x):
    y = x + 1
    raise Boom(y)


def test_an_exception_comes_out_unchanged_with_its_own_traceback() -> None:
    class Net(nn.Module):
        def forward(self, x):
            return explode(x)

    with pytest.raises(Boom) as caught:
        tripwire.trace(Net(), X)
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    inner = files[max(i for i, file in enumerate(files) if "/tripwire/" in file) + 1 :]
    assert [f for f in inner if f == __file__] == [__file__] * 2  # forward, explode
    assert isinstance(caught.value.args[0], torch.Tensor)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_an_exception_of_torch_comes_out_unchanged() -> None:
    def f(x):
        return x @ torch.ones(3)

    plain = pytest.raises(RuntimeError, f, X)
    traced = pytest.raises(RuntimeError, tripwire.trace, f, X)
    assert str(traced.value) == str(plain.value)
    assert type(traced.value) is type(plain.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_through(error) -> None:
    def f(x):
        with torch.autocast("cpu"):
            raise error

    with pytest.raises(error):
        tripwire.trace(f, X)
    assert not torch.is_autocast_enabled("cpu")


def test_a_trace_inside_a_trace_is_a_clear_error() -> None:
    with pytest.raises(tripwire.CannotTrace) as caught:
        tripwire.trace(lambda x: tripwire.trace(torch.sin, x).result, X)
    assert caught.value.slug == "nested-trace"


def test_a_trace_after_another_works_inside_the_same_function() -> None:
    def f():
        return [len(tripwire.trace(torch.sin, X).rows) for _ in range(2)]

    assert f() == [2, 2]


def test_two_threads_trace_at_once() -> None:
    both = threading.Barrier(2, timeout=60)
    found: dict[int, object] = {}

    class Net(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(depth))

        def forward(self, x):
            both.wait()  # inside both runs at once
            for layer in self.layers:
                x = layer(x).relu()
            both.wait()
            return x

    def work(depth):
        try:
            found[depth] = tripwire.trace(Net(depth), X)
        except BaseException as error:
            found[depth] = error

    threads = [threading.Thread(target=work, args=(depth,)) for depth in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for depth in (3, 5):
        trace = found[depth]
        assert isinstance(trace, tripwire.Trace), trace
        assert trace.statistics().ops == 2 * depth
        assert trace.rows[-2].scope == f"layers.{depth - 1}"


def test_other_threads_are_not_recorded() -> None:
    def f(x):
        results = []
        thread = threading.Thread(target=lambda: results.append(nn.ReLU()(torch.ones(2, 2))))
        thread.start()
        thread.join()
        return x + 1

    assert quiet_trace(f, X).statistics().ops == 1


def test_work_of_another_thread_that_enters_the_run_is_of_unknown_origin() -> None:
    def f(x):
        results = []
        thread = threading.Thread(target=lambda: results.append(x * 2))
        thread.start()
        thread.join()
        return x + results[0]

    assert refusal_of(f, X) == "unknown-origin"


def test_a_python_profile_function_is_kept_and_called() -> None:
    seen = []

    def profile(frame, event, arg):
        if event == "call":
            seen.append(frame.f_code.co_name)

    def visible(x):
        return x + 1

    sys.setprofile(profile)
    try:
        tripwire.trace(visible, X)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert "visible" in seen


def test_a_profiler_in_c_is_kept() -> None:
    import cProfile

    profiler = cProfile.Profile()

    def visible(x):
        return x + 1

    profiler.enable()
    try:
        trace = tripwire.trace(visible, X)
    finally:
        profiler.disable()
    assert trace.statistics().ops == 1
    names = {entry.code.co_name for entry in profiler.getstats() if hasattr(entry.code, "co_name")}
    assert "visible" in names


def test_another_mode_around_the_trace_sees_every_call() -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Outer(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Outer():
        trace = tripwire.trace(lambda x: x.sin().cos(), X)
    assert {"sin", "cos"} <= set(seen)
    assert trace.statistics().ops == 2


def test_a_context_of_the_default_device_is_no_call() -> None:
    def f(x):
        with torch.device("cpu"):
            return x + torch.zeros(2)

    assert quiet_trace(f, X).statistics().ops == 2


REFUSED = {
    "function-transform": [
        lambda x: torch.func.functionalize(torch.sin)(x),
        lambda x: torch.func.grad(lambda t: t.sum() if t.max() > 0 else t.prod())(x),
        lambda x: torch.func.grad(lambda t: t.sum() * t.max().item())(x),
        lambda x: torch.func.grad(lambda t: t[t > 0].sum() * len(t[t > 0]))(x),
    ],
    "higher-order-operator": [
        lambda x: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)),
        lambda x: torch.while_loop(lambda t: t.sum() < 9, lambda t: (t + 1,), (x,))[0],
        lambda x: torch._higher_order_ops.scan(lambda c, row: (c + row, c * row), x[0], x)[1],
        lambda x: flex_attention(*[x.view(1, 1, 2, 2)] * 3),
    ],
    "tensor-memory": [lambda x: x * x.data_ptr(), lambda x: (x.untyped_storage(), x + 1)[1]],
    "callable-argument": [lambda x: x.clone().apply_(lambda v: v + 1)],
    "generator-reseeded": [
        lambda x: (torch.manual_seed(0), x + torch.rand(2))[1],
        lambda x: (torch.random.set_rng_state(torch.random.get_rng_state()), x + 1)[1],
    ],
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("slug", REFUSED)
def test_what_cant_be_followed_is_refused_with_its_line(slug) -> None:
    for fn in REFUSED[slug]:
        with pytest.raises(tripwire.CannotTrace) as caught:
            quiet_trace(fn, torch.ones(2, 2))
        assert caught.value.slug == slug
        assert f"{__file__}:" in str(caught.value)


def test_a_function_that_the_graph_cant_hold_is_refused_with_what_to_do() -> None:
    for fn, advice in (
        (lambda x: (x * 2).apply_(lambda v: v + 1), "Write it with functions of tensors"),
        (lambda x: (x * 2).register_hook(lambda g: g), "Register it outside the traced function"),
    ):
        with pytest.raises(tripwire.CannotTrace, match=advice) as caught:
            quiet_trace(fn, torch.ones(2, requires_grad="Register" in advice))
        assert caught.value.slug == "callable-argument"


def test_a_condition_that_is_a_bool_is_a_branch_of_python() -> None:
    def f(x):
        return torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,))

    compiled = tripwire.compile(f, fullgraph=True, backend="eager")
    for rows in (2, 3, 4, 2, 5, 6):
        x = torch.ones(rows)
        assert torch.equal(compiled(x), f(x))
    assert compiled.statistics().hits >= 2


def test_a_refused_run_still_ends_and_has_its_result() -> None:
    done = []

    def f(x):
        y = torch.func.functionalize(torch.sin)(x)
        done.append(True)
        return y

    run = tripwire.Tracer().run(f, (X,), {})
    assert done == [True]
    assert run.trace is None
    torch.testing.assert_close(run.result, X.sin())
    assert run.refusal.slug == "function-transform"


def test_a_compiled_function_inside_runs_and_is_refused() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    run = tripwire.Tracer().run(lambda x: compiled(x) + 1, (X,), {})
    assert run.refusal.slug == "torch-compile-inside"
    torch.testing.assert_close(run.result, X.sin() + 1)


# --- memory ------------------------------------------------------------------------------------


def test_intermediates_die_as_early_as_in_eager() -> None:
    alive: list[list[bool]] = []

    def f(x):
        a = x + 1
        ref = weakref.ref(a)
        b = a * 2
        del a
        alive[-1].append(ref() is not None)
        c = [b + i for i in range(3)]
        refs = [weakref.ref(t) for t in c]
        total = sum(c)
        c.clear()
        alive[-1].append(any(r() is not None for r in refs))
        return total

    for run in (f, lambda x: quiet_trace(f, x)):
        alive.append([])
        with torch.no_grad():
            run(X)
    assert alive[0] == alive[1] == [False, False]


def test_state_that_the_run_replaces_dies_as_early_as_in_eager() -> None:
    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.ones(2, 2)
            self.alive = None

        def forward(self, x):
            before = weakref.ref(self.kept)
            self.kept = x * 2
            self.alive = before() is not None
            return x + 1

    for run in (lambda keeper: keeper(X), lambda keeper: quiet_trace(keeper, X)):
        keeper = Keeper()
        run(keeper)
        assert keeper.alive is False


def test_traces_that_are_dropped_leave_nothing() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x).relu()

    net = Net()
    watched = weakref.ref(net)
    trace = tripwire.trace(net, X)
    trace(X)
    graph = weakref.ref(trace.graph)
    del trace, net
    gc.collect()
    assert watched() is None
    assert graph() is None


# --- what a run sees of it -----------------------------------------------------------------------

_CALL, _ENTER, _ENVIRON = nn.Module.__call__, torch.autocast.__enter__, type(os.environ)
_GET = _ENVIRON.__getitem__


class _Plain(nn.Module):
    def forward(self, x):
        return x * 2


_PLAIN = _Plain()
_LOOKS = {
    "on the class": lambda: nn.Module.__call__ is _CALL,
    "on a subclass": lambda: _Plain.__call__ is _CALL,
    "on a module's class": lambda: type(_PLAIN).__call__ is _CALL,
    "on a module": lambda: _PLAIN.__call__.__func__ is _CALL,
    "in the class's dict": lambda: nn.Module.__dict__["__call__"] is _CALL,
    "by getattr": lambda: getattr(nn.Module, "__call__") is _CALL,  # noqa: B009
    "its name": lambda: nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl",
    "a context's method": lambda: torch.autocast.__enter__ is _ENTER,
    "the environment's method": lambda: _ENVIRON.__getitem__ is _GET,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("look", _LOOKS.values(), ids=list(_LOOKS))
def test_a_run_sees_the_functions_of_torch_and_python_as_they_are(look, backend) -> None:
    def f(x):
        return _PLAIN(x) + 1 if look() else x - 1

    compiled = tripwire.compile(f, backend=backend)
    for n in range(3):
        assert compiled(X + n).tolist() == f(X + n).tolist() == (2 * (X + n) + 1).tolist()
    assert tripwire.explain(compiled).hits == 2


def test_a_call_of_modules_that_somebody_replaced_is_seen_and_followed(monkeypatch) -> None:
    factor = [3]

    def call(self, *args, **kwargs):
        return _CALL(self, *args, **kwargs) * factor[0]

    def f(x):
        return _PLAIN(x) + (1 if nn.Module.__call__ is _CALL else 0)

    compiled = tripwire.compile(f, backend="eager")
    for replaced in (False, True, False):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(nn.Module, "__call__", call)
            for n in range(3):
                assert compiled(X + n).tolist() == f(X + n).tolist()
            factor[0] += 1
            for n in range(3):
                assert compiled(X + n).tolist() == f(X + n).tolist()


def test_modules_that_another_thread_calls_are_no_part_of_a_run() -> None:
    inside, done = threading.Event(), threading.Event()
    seen = []

    def other():
        inside.wait(60)
        seen.append((nn.Module.__call__ is _CALL, _PLAIN(X).tolist()))
        done.set()

    def f(x):
        inside.set()
        done.wait(60)
        return _PLAIN(x)

    thread = threading.Thread(target=other)
    thread.start()
    trace = quiet_trace(f, X)
    thread.join()
    assert seen == [(True, (X * 2).tolist())]
    assert len([row for row in trace.rows if "mul" in str(row)]) == 1


def test_what_recording_looks_up_is_no_read_of_the_run() -> None:
    for met in (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.requires_grad.__get__):
        RULES.pop(met, None)  # as in a process in which no trace has met them
    reads = quiet_trace(lambda x: x * 2 if x.requires_grad else x.mul(3), X).reads
    assert not reads.labels
    assert "mul" in reads.names
    assert "__file__" not in reads.names


@pytest.fixture
def plain_threshold():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_collections_are_rarer_while_a_run_is_observed_and_no_longer(plain_threshold) -> None:
    seen = tripwire.trace(lambda x: (x + 1, gc.get_threshold()), X).result[1]
    assert seen == (plain_threshold[0] * 10, *plain_threshold[1:])
    assert gc.get_threshold() == plain_threshold


def test_a_compiled_function_that_asks_for_the_threshold_gets_the_plain_one(
    plain_threshold,
) -> None:
    compiled = tripwire.compile(lambda x: (x + 1, gc.get_threshold()), backend="eager")
    assert [compiled(X)[1] for _ in range(3)] == [plain_threshold] * 3


def test_garbage_of_the_run_is_collected_while_it_goes_on(plain_threshold) -> None:
    gc.set_threshold(700, 10, 10)
    gc.collect()  # or what others made before is due just when the knot is made, and it grows old

    class Knot:
        def __init__(self):
            self.itself = self

    def forward(x):
        knot = weakref.ref(Knot())
        made = [[] for _ in range(20_000)]
        return x + len(made), knot() is None

    assert tripwire.trace(forward, X).result[1]


def test_a_threshold_that_the_run_sets_stays(plain_threshold) -> None:
    def forward(x):
        gc.set_threshold(500, 5, 5)
        return x + 1

    tripwire.trace(forward, X)
    assert gc.get_threshold() == (500, 5, 5)


def test_patches_made_while_another_thread_compiles_are_gone_when_both_are_done() -> None:
    """torch's compilers replace `nn.Module.__call__` for all threads, and put it back."""
    user = hooks.installed(object())

    def enter(x):
        user.__enter__()
        return x + 1

    make_fx(enter)(X)
    user.__exit__(None, None, None)


def test_what_somebody_put_in_the_place_of_a_patch_stays(monkeypatch) -> None:
    def before(*args):
        raise AssertionError

    def after(*args):
        raise AssertionError

    with monkeypatch.context() as patching:
        patching.setattr(nn.Module, "__call__", before)  # a user's: it is replaced, too
        with hooks.installed(object()):
            assert nn.Module.__call__ is not before
            nn.Module.__call__ = after
        assert nn.Module.__call__ is after


# --- Dynamo, which knows Python's functions by their identity -------------------------------------


_IMPORTING = """
import sys, torch, tripwire
from torch.utils.checkpoint import checkpoint
class Scale:
    value = 3
def call(x):
    {call}
def ask(x):
    return x * getattr(Scale, "value") + hasattr(Scale, "other")
x = torch.ones(2, requires_grad=True)
compiled = tripwire.compile(call, backend="eager")
assert "torch._dynamo" not in sys.modules
compiled(x), compiled(x)
assert "torch._dynamo" in sys.modules
asked = torch.compile(ask, backend="eager", fullgraph=True)
assert asked(x).tolist() == [3.0, 3.0]
"""


@pytest.mark.parametrize(
    "call",
    [
        "return checkpoint(torch.sin, x, use_reentrant=False)",
        "return torch.func.grad(lambda t: t.sum())(x)",
        "import torch._dynamo; return x + 1",
        "return torch.compile(torch.sin, backend='eager')(x)",
        "return torch.optim.SGD([torch.zeros(2)]) and x + 1",
    ],
    ids=["checkpoint", "torch.func", "import", "torch.compile", "optimizer"],
)
def test_dynamo_that_a_run_imports_works_as_ever(call) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTING.format(call=call)],
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(tripwire.__file__))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
