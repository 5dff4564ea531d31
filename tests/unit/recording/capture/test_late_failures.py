"""What fails in a backward, by an interrupt, or in compiled code alone leaves a record, too."""

from __future__ import annotations

import collections
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import tripwire

SCALE = 2.0


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError(f"no gradient, with scale {SCALE}")


def one(x):
    return Refusing.apply(x.sin()).sum()


def several(x, *, by):
    y = Refusing.apply(x * by)
    return {"kept": y.detach(), "both": (y.sum(), x.cos())}


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * self.weight
        y.register_hook(self.stop)
        return y + 1

    def stop(self, grad):
        raise ArithmeticError(f"stopped at {float(grad.sum())}")


def run_one(compiled):
    compiled(torch.ones(3, requires_grad=True)).backward()


def run_several(compiled):
    result = compiled(torch.ones(3, requires_grad=True), by=3.0)
    (result["both"][0] + result["both"][1].sum()).backward()


def run_hooked(compiled):
    (compiled(torch.ones(3)) * 5).sum().backward()


BACKWARDS = [
    (one, run_one, ValueError, "with scale 2.0"),
    (several, run_several, ValueError, "with scale 2.0"),
    (Hooked(), run_hooked, ArithmeticError, "stopped at 15.0"),
]


def find_record(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(("function", "run", "kind", "text"), BACKWARDS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_failing_backward_leaves_a_record_of_the_call_and_the_backward(
    tmp_path, function, run, kind, text, backend, calls
) -> None:
    place = tripwire.record_on_error(tmp_path, check=False)
    compiled = tripwire.compile(function, backend=backend, record_on_error=place)
    with torch.no_grad():
        for _ in range(calls - 1):  # no gradient comes: nothing is kept
            if function is several:
                compiled(torch.ones(3), by=3.0)
            elif not isinstance(function, Hooked):
                compiled(torch.ones(3))
    with pytest.raises(kind, match=text) as raised:
        run(compiled)
    assert "tripwire recorded this call" in raised.value.__notes__[0]
    path = find_record(tmp_path)
    record = tripwire.load_record(path)
    assert record.manifest.function.file == record.code.file == __file__
    if function is not BACKWARDS[-1][0]:
        assert "Refusing" in record.globals
    for _ in range(2):
        with pytest.raises(kind, match=text):
            tripwire.replay(path, trust=True)


def test_a_failing_backward_of_a_decorated_function_is_recorded(tmp_path) -> None:
    decorated = tripwire.record_on_error(tmp_path, check=False)(one)
    with pytest.raises(ValueError, match="no gradient"):
        decorated(torch.ones(3, requires_grad=True)).backward()
    with pytest.raises(ValueError, match="no gradient"):
        tripwire.replay(find_record(tmp_path), trust=True)


def test_backwards_that_work_leave_nothing_and_torchs_engine_is_as_it_was(tmp_path) -> None:
    gc.collect()
    engine = torch.autograd.graph._engine_run_backward
    code = engine.__code__
    place = tripwire.record_on_error(tmp_path, check=False)
    compiled = tripwire.compile(lambda x: (x * 2).sin(), backend="eager", record_on_error=place)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        y = compiled(x)
        assert engine.__code__ is not code
        y.sum().backward()
    torch.testing.assert_close(x.grad, 6 * torch.cos(2 * torch.ones(3)))
    with pytest.raises(RuntimeError, match="second time"):  # another call's results: not this one's
        z = x.exp().sum()
        z.backward()
        z.backward()
    del y, z
    gc.collect()
    assert engine.__code__ is code
    assert list(tmp_path.iterdir()) == []


def test_a_backward_that_fails_before_the_call_is_no_failure_of_the_calls(tmp_path) -> None:
    place = tripwire.record_on_error(tmp_path, check=False)
    compiled = tripwire.compile(lambda x: x * 2, backend="eager", record_on_error=place)
    for _ in range(3):
        with pytest.raises(ValueError, match="no gradient"):
            compiled(Refusing.apply(torch.ones(3, requires_grad=True))).sum().backward()
    assert list(tmp_path.iterdir()) == []


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.last = x * self.weight
        return self.last


@pytest.mark.parametrize("make", ["module", "list", "in place"])
def test_what_a_call_leads_to_dies_as_it_would(tmp_path, make) -> None:
    place = tripwire.record_on_error(tmp_path, check=False)
    if make == "module":
        kept = Keeping()
        compiled = tripwire.compile(kept, backend="eager", record_on_error=place)
        for _ in range(3):
            compiled(torch.ones(3)).sum().backward()
    elif make == "list":
        kept = collections.UserList()
        compiled = tripwire.compile(append, backend="eager", record_on_error=place)
        for _ in range(3):
            compiled(torch.ones(3, requires_grad=True), kept)
    else:
        compiled = tripwire.compile(lambda x: x.mul_(2), backend="eager", record_on_error=place)
        for _ in range(3):
            kept = torch.ones(3, requires_grad=True) * 1
            compiled(kept)
    ref = weakref.ref(kept)
    del kept, compiled
    gc.collect()
    assert ref() is None


def append(x, out):
    out.append(x * 2)
    return out[-1]


# --- interrupts ---


class Stuck(nn.Module):
    def forward(self, x):
        for step in range(10):
            if step == 3:
                raise KeyboardInterrupt
            x = x + step
        return x


def interrupted(x):
    x.add_(1)
    raise KeyboardInterrupt("by hand")


def interrupt_below(x):
    return [interrupted(x * part) for part in (1, 2)]


@pytest.mark.parametrize("function", [Stuck(), interrupted, interrupt_below])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_interrupt_leaves_a_record_which_nobody_waits_for(tmp_path, function, backend) -> None:
    compiled = tripwire.compile(function, backend=backend, record_on_error=tmp_path)
    x = torch.ones(3)
    with pytest.raises(KeyboardInterrupt):
        compiled(x)
    path = find_record(tmp_path)
    assert "KeyboardInterrupt" in path.name
    record = tripwire.load_record(path)
    assert record.manifest.verdict.outcome == "not checked"
    torch.testing.assert_close(record.locals["x"], torch.ones(3))  # as it was before
    with pytest.raises(KeyboardInterrupt):
        tripwire.replay(path, trust=True)


# --- compiled code that fails where plain Python doesn't ---


def failing(module, examples):
    def run(*inputs):
        raise RuntimeError("the kernel is broken")

    return run


def failing_late(module, examples):
    calls = []

    def run(*inputs):
        calls.append(1)
        if len(calls) > 0:
            raise IndexError(f"out of registers for {len(inputs)} inputs")
        return module(*inputs)

    return run


def failing_wide(module, examples):
    def run(*inputs):
        return module(*inputs)[5]

    return run


def plain(x):
    return x.sin() + SCALE


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(failing, RuntimeError), (failing_late, IndexError), (failing_wide, IndexError)],
)
def test_compiled_code_that_raises_alone_is_recorded_once(tmp_path, backend, kind) -> None:
    place = tripwire.record_on_error(tmp_path, check=False)
    compiled = tripwire.compile(plain, backend=backend, record_on_error=place)
    for _ in range(4):
        torch.testing.assert_close(compiled(torch.ones(3)), plain(torch.ones(3)))
    path = find_record(tmp_path)
    record = tripwire.load_record(path)
    assert record.manifest.compiled.hit
    with pytest.raises(kind):
        tripwire.replay(path, trust=True)
    plainly = tripwire.replay(path, trust=True, backend="none")
    torch.testing.assert_close(plainly, plain(torch.ones(3)))
