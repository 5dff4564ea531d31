from __future__ import annotations

import abc
import gc
import threading

import pytest
import torch
from support import run_python

import tripwire
from tripwire.imports import (
    PROGRESS,
    count_registrations,
    importing,
    uncounted_registrations,
)


def register() -> None:
    """A class with an abstract one."""
    kind = abc.ABCMeta("Kind", (), {})
    kind.register(type("Registered", (), {}))


def test_a_compilers_registrations_arent_counted_and_others_are() -> None:
    before = count_registrations()
    with uncounted_registrations():
        register()
    assert count_registrations() == before
    register()
    assert count_registrations() == before + 1


@pytest.mark.parametrize(("name", "counted"), [("a user's", 1), (PROGRESS, 0)])
def test_beside_other_threads_but_that_which_shows_progress_all_registrations_count(
    name, counted
) -> None:
    before, done = count_registrations(), threading.Event()
    thread = threading.Thread(target=done.wait, name=name)
    thread.start()
    try:
        with uncounted_registrations():
            register()
    finally:
        done.set()
        thread.join()
    assert count_registrations() == before + counted


class Shape(abc.ABC):  # noqa: B024  # a user's own
    pass


class Round:
    pass


def test_a_registration_while_a_compiler_works_retires_nothing_and_a_later_one_does() -> None:
    def compile_and_register(module, inputs):
        with uncounted_registrations():
            register()
        return module.forward

    one = Round()

    def f(x):
        return x * (2 if isinstance(one, Shape) else 3)

    compiled = tripwire.compile(f, backend=compile_and_register)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
    assert compiled.statistics().hits == 2
    Shape.register(Round)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [2.0] * 3


@pytest.mark.parametrize("was_on", [True, False])
def test_collections_are_as_before_after_an_error(was_on) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ZeroDivisionError), importing():
            assert not gc.isenabled()
            1 / 0  # noqa: B018
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_code_that_is_in_the_store_runs_without_the_compiler(tmp_path) -> None:
    code = (
        "import sys, torch, tripwire\n"
        "f = tripwire.compile(lambda x: x.sin() * 2.125, backend='inductor')\n"
        "with torch.no_grad():\n"
        "    given = [f(torch.ones(2))[0].item() for _ in range(3)]\n"
        "assert given[0] == given[1] == given[2]\n"
        "print(f.statistics().hits, f.statistics().traces)\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    env = {"TRIPWIRE_CACHE_DIR": str(tmp_path / "own")}
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # longer to compile than one kernel
    cold, warm = (run_python(code, env=env).split() for _ in range(2))
    assert cold == ["2", "1", "True"]
    assert warm == ["2", "1", "False"]


# Two threads import, the second while the first is in the midst of Dynamo.
IN_THE_MIDST = """
import sys, threading
import torch
import tripwire

midst, begins = threading.Event(), threading.Event()

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch._inductor.utils" and not midst.is_set():
            midst.set()
            begins.wait()
            threading.Event().wait(0.5)  # the other comes as far as it can
        return None

sys.meta_path.insert(0, Finder)
wide = tripwire.compile(lambda x: x * len(x), backend="eager", dynamic=True)

def optimizer():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1)

def opened():
    assert wide(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]

def inductor():
    tripwire.backends.registry.prepare(tripwire.backends.registry.inductor)

failed = []

def guarded(job, begun):
    begun.set()
    try:
        job()
    except BaseException as error:
        failed.append(f"{job.__name__}: {error!r}")

first = threading.Thread(target=guarded, args=(FIRST, threading.Event()))
first.start()
midst.wait()
second = threading.Thread(target=guarded, args=(SECOND, begins))
second.start()
first.join(), second.join()
assert not failed, failed
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("optimizer", "opened"),
        ("optimizer", "inductor"),
        ("profiler", "opened"),
    ],
)
def test_threads_that_import_parts_of_the_compiler_at_once_all_get_them_whole(
    first, second
) -> None:
    run_python(IN_THE_MIDST.replace("FIRST", first).replace("SECOND", second))


def test_what_open_sizes_import_retires_nothing() -> None:
    code = (
        "import collections.abc, torch, tripwire\n"
        "def f(x, by):\n"
        "    assert isinstance(by, collections.abc.Mapping)\n"
        "    return x * by['a'] * len([n for n in range(x.shape[0])])\n"
        "class Mine(dict): pass\n"
        "compiled = tripwire.compile(f, backend='eager')\n"
        "for size in (3, 4, 3):\n"
        "    compiled(torch.ones(size), Mine(a=2))\n"
        "print(compiled.statistics().hits, compiled.statistics().traces)\n"
    )
    assert run_python(code) == "1 2"
