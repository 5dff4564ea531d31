"""Memory and odd sizes: nothing grows that should not, and large worlds are borne."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import run_with_torch
from torch import nn

import tripwire

X = torch.ones(3)


def count_alive() -> Counter[str]:
    """Sentries, entries and the like that are there."""
    gc.collect()
    wanted = {"Sentry", "Entry", "_FreshEntry", "Dispatcher", "Plan", "Standing"}
    wanted |= {"DictWire", "ObjectWire"}
    found = (type(item) for item in gc.get_objects())
    return Counter(cls.__name__ for cls in found if cls.__name__ in wanted)


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def cycle(world: SimpleNamespace) -> None:
    """Compile, call, retire, call again, drop: a function and a module."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * world.scale

    compiled = tripwire.compile(scaled, backend="eager")
    for _ in range(2):
        world.scale += 1.0
        assert torch.equal(compiled(X), X * world.scale)


def cycle_module() -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(2):
        net.scale += 1.0
        compiled(X)


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("modules", [False, True], ids=["functions", "modules"])
def test_cycles_of_compiling_retiring_and_dropping_leave_nothing(modules, times) -> None:
    world = SimpleNamespace(scale=0.0)
    one = cycle_module if modules else lambda: cycle(world)
    for _ in range(30):
        one()
    before, objects, resident = count_alive(), len(gc.get_objects()), resident_megabytes()
    subclasses = len(nn.Module.__subclasses__()) + len(Net.__subclasses__())
    for _ in range(times):
        one()
    assert count_alive() == before
    assert len(gc.get_objects()) - objects < times  # some caches hold weak references
    assert len(nn.Module.__subclasses__()) + len(Net.__subclasses__()) == subclasses
    assert resident_megabytes() - resident < 16  # the allocator's own ups and downs


def test_watches_that_are_dropped_leave_their_class_as_it_was() -> None:
    class Watched:
        pass

    plain = dict(vars(Watched))
    for _ in range(1000):
        watched = Watched()
        watch = tripwire.watch(watched, lambda change: None)
        watched.value = 1
        watch.cancel()
    gc.collect()
    assert dict(vars(Watched)) == plain


def test_entries_that_are_retired_again_and_again_hold_one_value_at_a_time() -> None:
    world = SimpleNamespace(weight=torch.zeros(3))
    compiled = tripwire.compile(lambda x: x + world.weight, backend="eager", cache_size=4)
    alive = []
    for value in range(50):
        world.weight = torch.full((3,), float(value))
        alive.append(torch._C._WeakTensorRef(world.weight))
        assert torch.equal(compiled(X), X + value)
    gc.collect()
    assert sum(not ref.expired() for ref in alive) == 1


# --- fork and exit -------------------------------------------------------------------------------

_COMPILED = """
import os, sys, threading, torch, tripwire
from types import SimpleNamespace
torch.set_num_threads(1)
world = SimpleNamespace(scale=2.0)
x = torch.ones(2)
f = tripwire.compile(lambda x: x * world.scale, backend="eager")
def check(value):
    world.scale = value
    for _ in range(3):
        assert f(x).tolist() == [value] * 2, (f(x), value)
check(2.0)
"""


def test_a_fork_while_watched_leaves_two_processes_that_work() -> None:
    printed = run_with_torch(
        _COMPILED + "child = os.fork()\n"
        "check(3.0 if child else 4.0)\n"
        "check(2.0)\n"
        "check(5.0 if child else 6.0)\n"
        "if not child:\n"
        "    os._exit(0 if tripwire.statistics(f).hits > 4 else 1)\n"
        "print(os.waitpid(child, 0)[1], tripwire.statistics(f).hits > 4)"
    )
    assert printed == "0 True"


def test_a_fork_in_the_midst_of_a_trace_leaves_the_child_right() -> None:
    printed = run_with_torch(
        _COMPILED + "net = torch.nn.Linear(2, 2)\n"
        "pids = []\n"
        "def forks(module, args):\n"
        "    pids.append(os.fork())\n"
        "handle = net.register_forward_pre_hook(forks)\n"
        "g = tripwire.compile(net, backend='eager')\n"
        "g(x)\n"
        "handle.remove()\n"
        "for _ in range(3):\n"
        "    assert torch.equal(g(x), net(x))\n"
        "check(7.0)\n"
        "assert sys.getprofile() is None\n"
        "if not pids[0]:\n"
        "    os._exit(0)\n"
        "print(os.waitpid(pids[0], 0)[1])"
    )
    assert printed == "0"


@pytest.mark.parametrize(
    "ending",
    [
        "keep = [f, tripwire.watch(world, print)]",
        "import builtins; builtins.keep = f",
        "sys.modules['keep'] = f",
        "class Late:\n    def __del__(self):\n        world.scale = 9.0; f(x)\nworld.late = Late()",
        "def write():\n    while True:\n        world.scale += 1.0\n"
        "threading.Thread(target=write, daemon=True).start(); f(x)",
        "sys.exit(0)",
    ],
)
def test_the_interpreter_exits_while_things_are_watched(ending) -> None:
    assert run_with_torch(_COMPILED + ending + "\nprint('end')" * ("exit" not in ending)) in (
        "end",
        "",
    )


# --- depth ---------------------------------------------------------------------------------------


def test_a_deep_module_is_compiled() -> None:
    net: nn.Module = nn.Tanh()
    for _ in range(100):
        net = nn.Sequential(net)
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), torch.tanh(X))
    assert tripwire.statistics(compiled).hits == 2


def test_recursion_without_an_end_raises_as_plain_code_does() -> None:
    def endless(x: torch.Tensor) -> torch.Tensor:
        return endless(x + 1)

    compiled = tripwire.compile(endless, backend="eager")
    for _ in range(3):
        with pytest.raises(RecursionError):
            compiled(X)
    assert sys.getprofile() is None
    assert torch._C._len_torch_function_stack() == 0
    check_scaled()


def check_scaled() -> None:
    world = SimpleNamespace(scale=2.0)
    compiled = tripwire.compile(lambda x: x * world.scale, backend="eager")
    for scale in (2.0, 2.0, 3.0, 3.0):
        world.scale = scale
        assert torch.equal(compiled(X), X * scale)
    assert tripwire.statistics(compiled).hits == 2


def test_a_stack_that_is_almost_full_gives_the_result_or_a_recursion_error() -> None:
    world = SimpleNamespace(scale=2.0)
    compiled = tripwire.compile(lambda x: x * world.scale, backend="eager")
    builtins_before = dict(
        vars(__builtins__) if not isinstance(__builtins__, dict) else __builtins__
    )

    def at_depth(depth: int) -> Any:
        return at_depth(depth - 1) if depth else compiled(X)

    limit, base = sys.getrecursionlimit(), len(_frames())
    outcomes: Counter[str] = Counter()
    for room in range(1, 120):
        world.scale += 1.0  # a retirement and a trace each time
        try:
            got = at_depth(limit - base - room - 2)
        except RecursionError:
            outcomes["raised"] += 1
        else:
            outcomes["right"] += 1
            assert torch.equal(got, X * world.scale)
        assert sys.getprofile() is None
        assert torch._C._len_torch_function_stack() == 0
        assert gc.isenabled()
        assert torch.equal(compiled(X), X * world.scale)
        now = vars(__builtins__) if not isinstance(__builtins__, dict) else __builtins__
        assert all(now[name] is value for name, value in builtins_before.items() if name != "_")
    assert outcomes["raised"]
    assert outcomes["right"]
    check_scaled()


def _frames() -> list[Any]:
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


# --- large worlds --------------------------------------------------------------------------------


def check_many(count: int) -> None:
    world = SimpleNamespace(scale=2.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * world.scale

    many = [tripwire.compile(scaled, backend="eager") for _ in range(count)]
    for scale in (2.0, 2.0, 3.0):
        world.scale = scale
        for compiled in many:
            assert torch.equal(compiled(X), X * scale)
    assert all(tripwire.statistics(compiled).retired == 1 for compiled in many)


def test_hundreds_of_entries_on_one_dict_are_retired_by_one_write() -> None:
    check_many(200)


@pytest.mark.slow
def test_ten_thousand_entries_on_one_dict_are_retired_by_one_write() -> None:
    check_many(10_000)


def test_a_class_of_five_thousand_attributes() -> None:
    body = {f"value{number}": float(number) for number in range(5000)}
    wide = type("Wide", (), body)
    held = wide()
    for number in range(5000):
        setattr(held, f"own{number}", float(number))
    compiled = tripwire.compile(lambda x: x * held.value7 + held.own9, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), X * 7 + 9)
    held.own4000 = wide.value4000 = -1.0  # of no concern
    assert torch.equal(compiled(X), X * 7 + 9)
    assert tripwire.statistics(compiled).retired == 0
    held.own9 = 10.0
    assert torch.equal(compiled(X), X * 7 + 10)
    wide.value7 = 8.0
    assert torch.equal(compiled(X), X * 8 + 10)
    held.value7 = 9.0  # shadows the class's
    assert torch.equal(compiled(X), X * 9 + 10)


def test_a_dict_of_a_hundred_thousand_keys_of_which_one_is_read() -> None:
    table = {number: float(number) for number in range(100_000)}
    compiled = tripwire.compile(lambda x: x * table[7], backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), X * 7)
    table[8] = -1.0
    assert torch.equal(compiled(X), X * 7)
    assert tripwire.statistics(compiled).retired == 0
    table[7] = 9.0
    assert torch.equal(compiled(X), X * 9)
