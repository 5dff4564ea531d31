"""A repro is a script that runs where tripwire can't be imported."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cornershop import prices
from replaying import fail
from support import forking
from torch import nn

import tripwire
from tripwire.recording.capture.record import load_record
from tripwire.recording.format.manifest import Raised
from tripwire.recording.replay.show import write_repro

ALONE = """
import sys
sys.modules["tripwire"] = sys.modules["msgspec"] = sys.modules["cornershop"] = None
sys.path[:] = [p for p in sys.path if "tests" not in p]
sys.argv[:] = [{script!r}]
with open({script!r}) as file:
    exec(compile(file.read(), {script!r}, "exec"), {{"__name__": "__main__"}})
"""

SCALE = 3
TABLE = {"a": [1, 2.5], "b": collections.OrderedDict(x=float("nan"))}


def helper(x, *, factor=2):
    return x * factor * SCALE


def fails(x, limits):
    y = helper(x)
    if y.sum() > limits["low"]:
        raise ValueError(f"too large: {y.tolist()} {TABLE['a']}")
    return y


def make_closure():
    offset = torch.ones(2)
    count = [0]

    def inner(x):
        nonlocal offset
        count[0] += 1
        return (x + offset) / [][count[0]]

    return inner


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.__check(self.inner(x))

    def __check(self, x):
        raise ArithmeticError(f"{x.shape}")


class Net(Base):
    @property
    def size(self):
        return 2

    def forward(self, x):
        return super().forward(x[: self.size])


class Shop:
    def __init__(self) -> None:
        self.stock = {"apples": 3}
        self.me = self

    def sell(self, x, *names):
        return [self.me.stock[name] for name in names]


def in_place(x, view):
    x.mul_(2)
    raise IndexError(str(view.tolist()))


def draws(x):
    raise RuntimeError(str((torch.rand(2) + x).tolist()))


def shared() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(6.0)
    return base, base[2:4]


CALLS = {
    "function": (fails, (torch.ones(2), {"low": 1})),
    "closure": (make_closure(), (torch.ones(2),)),
    "module": (Net(), (torch.ones(3, 2),)),
    "method": (Shop().sell, (torch.ones(2), "apples", "pears")),
    "aliases": (in_place, shared()),
    "random": (draws, (torch.ones(2),)),
    "user module": (prices.check_price, (torch.full((4,), 100.0),)),
    "lambda": (lambda x, y=0: x / y, (1,)),
    "no_grad": (torch.no_grad()(lambda x: x.missing), (torch.ones(1),)),
}


@pytest.fixture(scope="module")
def run_alone() -> Iterator[Callable[[Path, Path], subprocess.CompletedProcess[str]]]:
    """Runs a record's script where there is torch, and no tripwire."""

    def run(path: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
        text, why = write_repro(path)
        assert not why
        script = tmp_path / "repro.py"
        script.write_text(text)
        return fork(ALONE.format(script=str(script)), cwd=tmp_path)

    with forking("torch") as fork:
        yield run


@pytest.mark.parametrize("case", CALLS)
def test_a_script_shows_the_same_exception_without_tripwire(
    case, tmp_path, monkeypatch, run_alone
) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    call, args = CALLS[case]
    path = tripwire.record_call(tmp_path / "x.rec")(call, *args)
    outcome = load_record(path).manifest.outcome
    assert isinstance(outcome, Raised)
    done = run_alone(path, tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1].removeprefix(f"{outcome.module}.")
    assert last == f"{outcome.type}: {outcome.message}".rstrip()
    assert f'"{outcome.file}", line {outcome.line}' in done.stderr


def test_a_script_shows_the_same_result(tmp_path, monkeypatch, run_alone) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(1, 3)
    path = tripwire.record_call(tmp_path / "x.rec")(model, x)
    done = run_alone(path, tmp_path)
    assert done.stdout.strip() == str(model(x)), done.stderr


def test_a_user_exception_of_a_compiled_call_needs_no_tripwire(
    tmp_path, monkeypatch, run_alone
) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    fail(tripwire.compile(fails, record_on_error=tmp_path / "r"), torch.ones(2), {"low": 1})
    (path,) = (tmp_path / "r").iterdir()
    assert "ValueError: too large" in run_alone(path, tmp_path).stderr


def tells(x):
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    raise RuntimeError(f"{is_deterministic} {'torch._inductor' in sys.modules}")


@pytest.mark.parametrize("wanted", [False, True])
def test_a_script_asks_for_deterministic_algorithms_only_if_the_call_had_them(
    wanted, tmp_path, monkeypatch, run_alone
) -> None:
    """torch imports its compilers to set that: 1.3 s."""
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    torch.use_deterministic_algorithms(wanted)
    try:
        path = tripwire.record_call(tmp_path / "x.rec")(tells, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert f"RuntimeError: {wanted} {wanted}" in run_alone(path, tmp_path).stderr


@dataclass
class Order:
    count: int

    def price(self, x):
        return x / self.count


def test_what_cannot_be_written_so_says_that_it_needs_tripwire(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    path = tripwire.record_call(tmp_path / "x.rec")(Order(0).price, 1)
    text, why = write_repro(path)
    assert why == "it holds the dataclass class Order"
    assert text.splitlines()[1] == f"# Needs tripwire (pip install tripwire), since {why}."
    assert "RECORD = (" in text


def test_what_a_record_lacks_is_named(tmp_path) -> None:
    record = tripwire.record_call(tmp_path, check=False)
    with open(__file__) as stream:
        path = record(lambda x, it: x + 1, torch.ones(2), stream)
    text, why = write_repro(path)
    assert why.startswith("the record lacks a TextIOWrapper that the call uses: ")
    assert why in text


def test_a_refusal_needs_tripwire(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")

    def branches(x):
        return x if (x * torch.rand(2)).sum() > 0 else -x

    fail(tripwire.compile(branches, fullgraph=True, record_on_error=tmp_path), torch.ones(2))
    (path,) = tmp_path.iterdir()
    assert write_repro(path)[1] == "the exception is tripwire's own"
