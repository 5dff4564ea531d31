"""A sentry outlives what it watches, and dies anywhere, without a crash and without a lost write.

Each program runs in a process of its own, with Python's debugging allocator, so that a write to
freed memory ends it. It loads only the sentry: no torch, hence 0.1 s instead of 3.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tripwire.writes import sentry, twin

PRELUDE = """
import faulthandler, gc, sys, types, weakref
faulthandler.enable()
sys.modules["torch"] = None
for name, folder in (("tripwire", {root!r}), ("tripwire.writes", {root!r} + "/writes")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from tripwire.writes.sentry import Sentry
from tripwire.writes import twin

IS_TWIN = Sentry is twin.Sentry

class Plain:
    pass

class Other:
    pass

def named(touches):
    return [(touch.is_dict, touch.index) for touch in touches]
"""

in_c = pytest.mark.skipif(
    sentry.Sentry is twin.Sentry, reason="_watch isn't built: python setup.py build_ext --inplace"
)


@pytest.fixture(params=[pytest.param("c", marks=in_c), "python"])
def check_survives(request):
    """Run a program to its end; it asserts for itself."""
    prelude = PRELUDE.format(root=str(Path(twin.__file__).parents[1]))
    environment = os.environ | {
        "PYTHONMALLOC": "debug",
        "TRIPWIRE_PURE": "1" if request.param == "python" else "0",
    }

    def check(program, times=1):
        for _ in range(times):
            done = subprocess.run(
                [sys.executable, "-c", prelude + textwrap.dedent(program)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert (done.returncode, done.stderr) == (0, "")

    return check


def test_interpreter_exits_with_live_sentries(check_survives):
    check_survives(
        """
        scale = 1
        things = [Plain() for _ in range(50)]
        kept = [Sentry([(vars(t), None), (globals(), frozenset({"scale"}))], [t]) for t in things]
        sys.kept = Sentry([(vars(sys), None), (sys.modules, None)], [sys, Plain, named])
        __builtins__.kept = Sentry([(vars(__builtins__), None)], [__builtins__])
        cycle = Plain()
        cycle.sentry = Sentry([(vars(cycle), None)], [cycle])
        gc.disable()

        class Late:
            def __del__(self, sentry=sys.kept, things=things, Other=Other):
                for thing in things:
                    thing.value = 1
                    thing.__class__ = Other
                sentry.is_quiet(), sentry.take(), sentry.close()

        sys.late = Late()
        late = Late()
        """,
        times=10,
    )


def test_address_that_is_used_again_belongs_to_the_new_object_only(check_survives):
    check_survives(
        """
        reused = 0
        for _ in range(1000):
            if reused > 10:
                break
            thing = Plain()
            address = id(thing)
            old = Sentry([], [thing])
            del thing
            assert not old.is_quiet()
            others = []  # memory comes back when the allocator likes
            while id(thing := Plain()) != address and len(others) < 1000:
                others.append(thing)
            reused += id(thing) == address
            new = Sentry([], [thing])
            assert IS_TWIN or new.is_quiet()
            thing.__class__ = Other
            assert not new.is_quiet()
            assert named(new.take()) == [(False, 0)]
            old.close()
            assert IS_TWIN or new.is_quiet()
        assert reused
        """
    )


def test_object_that_a_finalizer_revives_leaves_its_sentry_suspicious(check_survives):
    check_survives(
        """
        revived = []

        class Phoenix:
            def __del__(self):
                revived.append(self)

        for make_cycle in (False, True):
            thing = Phoenix()
            guard = Sentry([(globals(), frozenset())], [thing])
            if make_cycle:
                thing.me = thing
            del thing
            gc.collect()
            thing = revived.pop()
            thing.__class__ = type("Ash", (), {})
            assert not guard.is_quiet()
            assert (False, 0) in named(guard.take())
        """
    )


def test_writes_by_finalizers_during_collection_are_seen(check_survives):
    check_survives(
        """
        target, thing = {}, Plain()

        class Writer:
            def __init__(self, number):
                self.me, self.number = self, number

            def __del__(self):
                target["a"] = self.number
                thing.__class__ = Other if type(thing) is Plain else Plain

        for number in range(300):
            guard = Sentry([(target, frozenset({"a"}))], [thing])
            Writer(number)
            gc.collect()
            assert target["a"] == number
            assert named(guard.take()) == [(True, 0), (False, 0)]
        """
    )


def test_finalizer_of_a_replaced_value_can_take_and_close(check_survives):
    check_survives(
        """
        class Taker:
            def __init__(self, act):
                self.act = act

            def __del__(self):
                self.act()

        for act in (lambda: guard.take(), lambda: guard.close(), lambda: [g.close() for g in all]):
            for write in (
                lambda: target.__setitem__("a", 1),
                lambda: target.pop("a"),
                lambda: target.clear(),
                lambda: setattr(thing, "__dict__", {}),
            ):
                thing = Plain()
                target = vars(thing)
                target["a"] = Taker(act)
                all = [Sentry([(target, frozenset({"a"}))], [thing]) for _ in range(5)]
                guard = all[2]
                write()
                for each in all:
                    each.take(), each.close()
        """
    )


def test_sentry_in_a_cycle_with_what_it_watches_is_collected(check_survives):
    check_survives(
        """
        gc.disable()
        for _ in range(300):
            thing = Plain()
            thing.sentry = Sentry([(vars(thing), None), (target := {}, None)], [thing, Plain])
            target["sentry"] = thing.sentry
            alive = weakref.ref(thing)
            del thing, target
            gc.collect()
            assert alive() is None
        """
    )


def test_sentries_dropped_without_close_leave_nothing_behind(check_survives):
    check_survives(
        """
        target, thing = {"a": 1}, Plain()

        def churn():
            for value in range(500):
                guard = Sentry([(target, frozenset({"a"}))], [thing, [], Plain()])
                target["a"] = value
                thing.__class__ = Other if value % 2 else Plain
                guard.take()
                guard.is_quiet()

        churn()
        gc.collect()
        before = sys.getallocatedblocks()
        references = sys.getrefcount(target), sys.getrefcount(None)
        churn()
        gc.collect()
        assert sys.getallocatedblocks() - before < 50
        assert sys.getrefcount(target) == references[0]
        assert abs(sys.getrefcount(None) - references[1]) < 50 or sys.version_info >= (3, 12)
        """
    )


def test_thousands_of_sentries_share_one_dict_and_one_object(check_survives):
    check_survives(
        """
        target, thing = {}, Plain()
        guards = [Sentry([(target, frozenset({"a"}))], [thing]) for _ in range(5000)]
        target["a"] = 1
        thing.__class__ = Other
        assert all(named(guard.take()) == [(True, 0), (False, 0)] for guard in guards)
        for guard in guards[::2]:
            guard.close()
        target["a"] = 2
        assert all(named(guard.take())[0] == (True, 0) for guard in guards[1::2])
        del thing
        assert not any(guard.is_quiet() for guard in guards)
        """
    )


def test_one_sentry_watches_ten_thousand_dicts_and_objects(check_survives):
    check_survives(
        """
        targets = [{"a": 0} for _ in range(10_000)]
        things = [Plain() for _ in range(10_000)]
        guard = Sentry([(target, frozenset({"a"})) for target in targets], things)
        guard.take()
        targets[7777]["a"] = 1
        things[6666].__class__ = Other
        assert not guard.is_quiet()
        taken = named(guard.take())
        assert len(taken) == 20_000 if IS_TWIN else taken == [(True, 7777), (False, 6666)]
        guard.close()
        """
    )


def test_writes_of_several_threads_are_seen(check_survives):
    check_survives(
        """
        import threading

        sys.setswitchinterval(1e-5)
        targets, things = [{"a": 0} for _ in range(4)], [Plain() for _ in range(4)]
        stop = threading.Event()
        failures = []

        def write(number):
            # Each thread has its own sentry on what it alone writes, beside the shared one.
            guard = Sentry([(targets[number], frozenset({"a"}))], [things[number]])
            for value in range(1, 3000):
                targets[number]["a"] = value
                things[number].__class__ = Other if value % 2 else Plain
                if guard.is_quiet() or named(guard.take()) != [(True, 0), (False, 0)]:
                    failures.append((number, value))

        shared = Sentry([(target, None) for target in targets], things)
        writers = [threading.Thread(target=write, args=[number]) for number in range(4)]
        for writer in writers:
            writer.start()
        seen = [0] * 4
        while any(writer.is_alive() for writer in writers):
            if not shared.is_quiet():
                for touch in shared.take():
                    seen[touch.index] = targets[touch.index]["a"]
            Sentry([(targets[0], None)], things).close()
        for touch in shared.take():
            seen[touch.index] = targets[touch.index]["a"]
        assert seen == [2999] * 4 and not failures, (seen, failures)
        """
    )


def test_sentry_works_on_both_sides_of_a_fork(check_survives):
    check_survives(
        """
        import os

        target, thing = {"a": 0}, Plain()
        guard = Sentry([(target, frozenset({"a"}))], [thing])
        child = os.fork()
        if not child:
            target["a"] = 1
            thing.__class__ = Other
            os._exit(0 if named(guard.take()) == [(True, 0), (False, 0)] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert IS_TWIN or guard.is_quiet()
        target["a"] = 2
        assert not guard.is_quiet()
        """
    )


def test_half_built_sentry_is_taken_apart(check_survives):
    check_survives(
        """
        target, thing = {}, Plain()
        for wrong in ([(target, None), 3], [(target, None), ({}, {"a"})]):
            for _ in range(100):
                try:
                    Sentry(wrong, [thing])
                except TypeError:
                    pass
                else:
                    assert IS_TWIN
        target["a"] = 1
        thing.__class__ = Other
        """
    )


def test_dict_of_an_instance_stays_watched_when_its_owner_dies(check_survives):
    check_survives(
        """
        thing = Plain()
        thing.a = 1
        attributes = vars(thing)
        guard = Sentry([(attributes, frozenset({"a"}))], [])
        del thing
        attributes["a"] = 2
        assert named(guard.take()) == [(True, 0)]
        """
    )


def test_dict_of_an_instance_stays_watched_when_reads_of_it_are_specialised(check_survives):
    check_survives(
        """
        for _ in range(50):
            thing = Plain()
            thing.a = 0
            guard = Sentry([(vars(thing), frozenset({"a"}))], [thing])
            program = {}
            exec("def read(thing):\\n    return thing.a", program)
            for _ in range(100):
                program["read"](thing)
            assert IS_TWIN or guard.is_quiet()
            thing.a = 1
            assert not guard.is_quiet()
            assert (True, 0) in named(guard.take())
        """
    )
