"""background=True: plain Python serves while the compiler works, and an entry takes over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support import check_same, elsewhere
from torch import fx, nn

import tripwire
from tripwire.dispatch import dispatcher
from tripwire.dispatch.turns import Background

X = torch.arange(6.0).reshape(2, 3)


class Gate:
    """A back end that waits until it may go on, and keeps what it saw."""

    def __init__(self) -> None:
        self.compiled = 0
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.saw: Any = None
        self.fails = False

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        self.compiled += 1
        self.saw = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            threading.current_thread().name,
        )
        self.begun.set()
        assert self.may_end.wait(30)
        if self.fails:
            raise ValueError("no luck")
        return module.forward


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.may_end.set()
    finish()


def finish() -> None:
    """All that was submitted is done."""
    done = threading.Event()
    dispatcher.BACKGROUND.submit(done.set)
    assert done.wait(60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = 2.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.scale


def test_calls_run_plainly_until_the_entry_is_there(gate: Gate) -> None:
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    compiled = tripwire.compile(net, backend=gate, background=True)
    for _ in range(5):
        check_same(plain(X), compiled(X))
    assert gate.begun.wait(30)
    assert tripwire.statistics(compiled).traces == 1
    assert tripwire.statistics(compiled).hits == 0
    gate.may_end.set()
    finish()
    for _ in range(3):
        check_same(plain(X), compiled(X))
    assert plain.calls == net.calls == 8
    assert tripwire.statistics(compiled).hits == 3
    assert gate.compiled == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_back_ends_of_torch_work_in_the_background(backend: str) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=backend, background=True)
    for _ in range(3):  # the first may only import the compiler
        torch.testing.assert_close(compiled(X), net(X))
        finish()
    for _ in range(3):
        result = compiled(X)
        torch.testing.assert_close(result, net(X))
        result.sum().backward()
    assert tripwire.statistics(compiled).hits >= 3


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["plain", "inference", "autocast"])
def test_the_compiler_finds_torch_as_the_call_did(gate: Gate, grad: bool, mode: str) -> None:
    gate.may_end.set()
    compiled: Any = tripwire.compile(lambda x: x @ x.T, backend=gate, background=True)
    contexts = {
        "plain": torch.enable_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    with torch.set_grad_enabled(grad), contexts[mode]:
        compiled(X)
        finish()
        saw = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            "tripwire compiles",
        )
        assert gate.saw == saw
        for _ in range(2):
            check_same(X @ X.T, compiled(X))
    assert compiled.statistics().hits == 2


def test_a_default_device_is_a_mode_and_is_compiled_for_in_the_call(gate: Gate) -> None:
    gate.may_end.set()
    compiled: Any = tripwire.compile(lambda x: x + torch.ones(3), backend=gate, background=True)
    with torch.device("cpu"):
        for _ in range(3):
            check_same(X + 1, compiled(X))
    assert gate.saw[-1] == threading.current_thread().name
    assert compiled.statistics().hits == 2


def test_what_is_written_meanwhile_retires_the_entry(gate: Gate) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=gate, background=True)
    compiled(X)
    assert gate.begun.wait(30)
    net.scale = 3.0
    gate.may_end.set()
    finish()
    for _ in range(3):
        check_same(net.layer(X) * 3, compiled(X))
        finish()


def test_an_input_that_becomes_another_meanwhile_costs_the_entry(gate: Gate) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend=gate, background=True)
    compiled(X)
    assert gate.begun.wait(30)
    net.layer.weight.requires_grad_(False)
    gate.may_end.set()
    finish()
    assert tripwire.statistics(compiled).entries == 0
    for _ in range(3):
        result = compiled(X)
        check_same(net(X), result)
        finish()
    assert tripwire.statistics(compiled).hits == 2


def test_what_fails_there_is_logged_and_raised_by_the_next_call(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.fails = True
    gate.may_end.set()
    compiled: Any = tripwire.compile(lambda x: x + 1, backend=gate, background=True)
    check_same(X + 1, compiled(X))
    finish()
    assert "isn't compiled in the background" in caplog.text
    assert "no luck" in caplog.text
    with pytest.raises(tripwire.BackendFailed, match="no luck"):
        compiled(X)
    gate.fails = False
    for _ in range(3):
        check_same(X + 1, compiled(X))
        finish()
    assert compiled.statistics().hits == 2


def test_what_nobody_holds_any_more_is_not_compiled(gate: Gate) -> None:
    first: Any = tripwire.compile(lambda x: x + 1, backend=gate, background=True)
    other = Gate()
    second: Any = tripwire.compile(lambda x: x + 2, backend=other, background=True)
    first(X)
    second(X)
    gone = weakref.ref(second._dispatcher)
    del second
    gate.may_end.set()
    finish()
    assert gone() is None
    assert other.compiled == 0


def test_the_calls_result_may_die_while_it_is_compiled(gate: Gate) -> None:
    compiled: Any = tripwire.compile(lambda x: x + 1, backend=gate, background=True)
    result = compiled(X)
    gone = weakref.ref(result)
    assert gate.begun.wait(30)
    del result
    assert gone() is None


@pytest.mark.parametrize("option", ["wait", "check"])
def test_nobody_waits_for_what_is_in_the_background(option: str) -> None:
    options: Any = {option: True}
    with pytest.raises(tripwire.BadOption, match=f"background=True and {option}=True"):
        tripwire.compile(lambda x: x, background=True, **options)


# --- the thread ---


def test_the_thread_ends_with_its_work_and_comes_back() -> None:
    background, found = Background(), []
    for n in range(3):
        done = threading.Event()
        background.submit(lambda n=n: found.append(n))  # type: ignore[misc]
        background.submit(done.set)
        assert done.wait(30)
        thread = background._thread
        if thread is not None:
            thread.join(30)
    assert found == [0, 1, 2]
    assert background._thread is None


def test_work_that_raises_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(), threading.Event()

    def fail() -> None:
        raise ValueError("no luck")

    background.submit(fail)
    background.submit(done.set)
    assert done.wait(30)
    assert "no luck" in caplog.text


_ENDLESS = """
import time
import torch
import tripwire

def backend(module, inputs):
    print("begun", flush=True)
    while True:
        time.sleep(0.01)

compiled = tripwire.compile(lambda x: x + 1, backend=backend, background=True)
later = tripwire.compile(lambda x: x + 2, backend=backend, background=True)
compiled(torch.ones(2))
later(torch.ones(2))
time.sleep(0.5)
print("ended", flush=True)
"""


def test_a_program_ends_while_a_compiler_works() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _ENDLESS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "begun\nended\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_child_compiles_what_its_parent_has_begun(gate: Gate) -> None:
    compiled: Any = tripwire.compile(lambda x: x + 1, backend=gate, background=True)
    compiled(X)
    assert gate.begun.wait(30)
    child = os.fork()
    if child == 0:
        gate.may_end.set()
        for _ in range(3):
            compiled(X)
            finish()
        os._exit(0 if compiled.statistics().hits == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- generators ---


def test_what_other_threads_draw_while_a_compiler_works_is_not_drawn_again() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    drawn: list[float] = []

    def compile_forward(module: fx.GraphModule, inputs: Any) -> Any:
        drawn.append(elsewhere(lambda: torch.rand(()).item()))
        return make_boxed_func(module.forward)

    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    compiled: Any = tripwire.compile(
        lambda x: x + 1, backend=aot_autograd(fw_compiler=compile_forward)
    )
    torch.manual_seed(0)
    for _ in range(2):
        drawn.append(torch.rand(()).item())
        check_same(X + 1, compiled(X))
    drawn.append(torch.rand(()).item())
    ended.set()
    other.join()
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in range(4)]
