"""Code that watches an object is invalidated once, after the object was changed."""

import collections
import gc
import logging
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from tripwire.writes import sentry, subscriptions
from tripwire.writes.subscriptions import ensure_patched
from tripwire.writes.trackers import MutationTracker, watch


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    gc.collect()
    assert subscriptions.statistics() == (0, 0)
    assert MutationTracker.pinned == {}


class Code:
    """Stands for compiled code."""

    def __init__(self, look=lambda: None):
        self.told = []
        self.look = look

    def invalidate(self, ref):
        assert ref() is self
        self.told.append(self.look())


class Thing:
    pass


def check_untouched(cls) -> None:
    assert not {"__setattr__", "__delattr__"} & set(vars(cls))


def test_code_is_told_after_the_write_and_once() -> None:
    thing = Thing()
    thing.x = 1
    code = Code(lambda: thing.x)
    tracker = watch(thing, code)
    assert tracker.mutation_count == 0
    thing.x = 2
    thing.x = 3
    assert code.told == [2]
    assert tracker.mutation_count == 2  # the second was found when somebody asked
    assert tracker is MutationTracker.db[thing]


def test_code_that_is_told_can_ask_who_wrote() -> None:
    thing = Thing()
    code = Code(lambda: tracker.writer)
    tracker = watch(thing, code)
    thing.x = 2
    (writer,) = code.told
    assert (writer.file, writer.line, writer.text) == (
        __file__,
        test_code_that_is_told_can_ask_who_wrote.__code__.co_firstlineno + 4,
        "thing.x = 2",
    )


def test_without_watchers_a_check_finds_a_write_and_not_who_wrote(monkeypatch) -> None:
    monkeypatch.setattr(sentry, "TELLS", False)
    thing = Thing()
    code = Code()
    tracker = watch(thing, code)
    vars(thing)["x"] = 3  # no method sees it
    assert tracker.check()
    assert tracker.writer is None


def test_the_class_is_as_it_was_once_all_code_is_told() -> None:
    thing = Thing()
    first, second = Code(), Code()
    watch(thing, first)
    watch(thing, second)
    assert "__setattr__" in vars(Thing)
    thing.x = 1
    assert first.told == second.told == [None]
    check_untouched(Thing)


def test_the_class_is_as_it_was_once_all_code_is_dead() -> None:
    thing = Thing()
    first, second = Code(), Code()
    tracker = watch(thing, first)
    watch(thing, second)
    del first
    assert "__setattr__" in vars(Thing)
    del second
    check_untouched(Thing)
    assert tracker.watchers == []
    thing.x = 1


def test_the_class_is_as_it_was_once_the_object_is_dead() -> None:
    code = Code()
    thing = Thing()
    thing.itself = thing
    watch(thing, code)
    del thing
    gc.collect()
    check_untouched(Thing)
    assert code.told == []
    assert len(MutationTracker.db) == 0


def test_code_can_watch_again_after_it_was_told() -> None:
    thing = Thing()
    code = Code()
    tracker = watch(thing, code)
    thing.x = 1
    assert watch(thing, code) is tracker
    thing.x = 2
    assert len(code.told) == 2
    assert tracker.mutation_count == 2


def test_a_deletion_is_a_mutation_and_a_write_of_the_same_is_none() -> None:
    thing = Thing()
    thing.x = [1]
    code = Code()
    watch(thing, code)
    thing.x = thing.x
    assert code.told == []
    del thing.x
    assert len(code.told) == 1


def test_a_subclass_with_its_own_setattr_does_not_escape() -> None:
    class Base:
        pass

    class Own(Base):
        def __setattr__(self, name, value):
            self.__dict__[name] = value

    code, other = Code(), Code()
    base, own = Base(), Own()
    watch(base, other)
    watch(own, code)
    own.x = 1
    assert len(code.told) == 1
    assert other.told == []


# --- writes that no method sees ---

told_at_once = pytest.mark.skipif(
    not sentry.TELLS, reason="dicts tell of writes from Python 3.12 on, to the C module"
)


def register(module) -> None:
    module.register_forward_hook(print)


UNSEEN = {
    "dict": (lambda: {"a": 1}, lambda t: t.update(a=2)),
    "dict of numbers": (lambda: {1: 1}, lambda t: t.__setitem__(1, 2)),
    "dict that is cleared": (lambda: {"a": 1}, lambda t: t.clear()),
    "class": (lambda: type("Net", (), {"x": 1}), lambda t: setattr(t, "x", 2)),
    "module": (lambda: types.ModuleType("cfg"), lambda t: setattr(t, "x", 2)),
    "__dict__": (Thing, lambda t: t.__dict__.update(x=2)),
    "hook": (lambda: nn.Linear(1, 1), register),
    "table": (lambda: nn.Linear(1, 1), lambda t: t._parameters.update(bias=None)),
}
NEVER_TOLD = {
    "list": (lambda: [1], lambda t: t.append(2)),
    "set": (lambda: {1}, lambda t: t.add(2)),
    "deque": (lambda: collections.deque([1]), lambda t: t.append(2)),
}


@pytest.mark.parametrize("name", UNSEEN | NEVER_TOLD)
def test_writes_that_no_method_sees_are_found_by_a_check(monkeypatch, name) -> None:
    monkeypatch.setattr(sentry, "TELLS", False)
    make, write = (UNSEEN | NEVER_TOLD)[name]
    target, code = make(), Code()
    tracker = watch(target, code)
    assert not tracker.check()
    write(target)
    assert code.told == []
    assert tracker.check()
    assert len(code.told) == 1
    assert not tracker.check()
    assert MutationTracker.find([]) is None


@told_at_once
@pytest.mark.parametrize("name", UNSEEN)
def test_writes_to_dicts_are_told_before_the_next_function_starts(name) -> None:
    make, write = UNSEEN[name]
    target, code = make(), Code()
    tracker = watch(target, code)
    write(target)
    assert count_told(code) == 1
    assert tracker.mutation_count == 1
    assert tracker.writer is not None
    user = register if name == "hook" else write
    assert (tracker.writer.file, tracker.writer.line) == (
        __file__,
        user.__code__.co_firstlineno + (name == "hook"),
    )
    write(target)
    assert count_told(code) == 1


def count_told(code) -> int:
    return len(code.told)


@told_at_once
def test_code_is_told_of_a_dict_write_when_it_was_made() -> None:
    target = {"a": 1}
    code = Code(lambda: dict(target))
    tracker = watch(target, code)
    target["a"] = 2
    assert count_told(code) == 1
    assert code.told == [{"a": 2}]
    assert tracker.mutation_count == 1
    target["a"] = 3
    del target["a"]
    assert tracker.mutation_count == 2  # nobody is told, and what differs is found when asked


@told_at_once
def test_a_value_that_is_written_again_is_no_mutation() -> None:
    target, code = {"a": 1}, Code()
    tracker = watch(target, code)
    target["a"] = 1
    assert count_told(code) == 0
    target["a"] = 2
    assert count_told(code) == 1
    assert tracker.writer.text == 'target["a"] = 2'


@told_at_once
def test_an_object_whose_dict_is_exchanged_is_listened_to_still() -> None:
    thing, code = Thing(), Code()
    thing.x = 1
    watch(thing, code)
    thing.__dict__ = {"x": 1}  # the same
    assert count_told(code) == 0
    thing.__dict__["x"] = 2
    assert count_told(code) == 1


@told_at_once
def test_a_write_in_several_steps_is_told_when_it_is_over() -> None:
    module = nn.Linear(1, 1)
    module.scale = 2.0
    code = Code(lambda: module.scale)
    watch(module, code)
    module.scale = nn.Parameter(torch.ones(1))  # leaves one table, then enters another
    assert [type(scale) for scale in code.told] == [nn.Parameter]


@told_at_once
def test_code_that_writes_when_it_is_told_comes_to_an_end() -> None:
    target = {"a": 1}
    code = Code(lambda: target.update(a=target["a"] + 1))
    tracker = watch(target, code)
    target["a"] = 2
    assert count_told(code) == 1
    for _ in range(10):
        count_told(code)
    assert target == {"a": 3}
    assert tracker.mutation_count == 2


@told_at_once
def test_what_another_thread_writes_is_told() -> None:
    target, code = {"a": 1}, Code()
    tracker = watch(target, code)
    thread = threading.Thread(target=lambda: target.update(a=2))
    thread.start()
    thread.join()
    assert count_told(code) == 1
    assert tracker.writer.function.endswith("<lambda>")


@told_at_once
def test_code_whose_invalidation_raises_disturbs_nobody(caplog) -> None:
    def fail():
        raise ValueError("no")

    target, code, other = {"a": 1}, Code(fail), Code()
    watch(target, code)
    watch(target, other)
    target["a"] = 2
    assert count_told(other) == 1
    assert "raised" in caplog.text


@told_at_once
def test_many_dicts_that_are_written_at_once_are_all_told() -> None:
    targets = [{"a": 1} for _ in range(200)]
    codes = [Code() for _ in targets]
    trackers = [watch(target, code) for target, code in zip(targets, codes)]
    [target.update(a=2) for target in targets]
    assert sum(count_told(code) for code in codes) == 200
    assert len(trackers) == 200


@told_at_once
def test_a_watched_dict_is_let_go_when_its_code_is() -> None:
    inner = Thing()
    gone = weakref.ref(inner)
    code = Code()
    tracker = watch({"a": inner}, code)
    del inner, code, tracker
    assert gone() is None


def test_a_list_is_let_go_when_its_code_is() -> None:
    inner = Thing()
    gone = weakref.ref(inner)
    code = Code()
    tracker = watch([inner], code)
    del inner
    assert gone() is not None
    del code, tracker
    gc.collect()
    assert gone() is None


def test_a_modules_parameter_is_seen() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    net = Net()
    code = Code()
    watch(net, code)
    net.weight = net.weight
    assert code.told == []
    net.weight = nn.Parameter(torch.ones(1))
    assert len(code.told) == 1
    check_untouched(Net)


def test_code_that_raises_keeps_nobody_from_being_told(caplog) -> None:
    class Broken:
        def invalidate(self, ref):
            raise ValueError

    thing = Thing()
    broken, code = Broken(), Code()
    watch(thing, broken)
    watch(thing, code)
    with caplog.at_level(logging.WARNING, "tripwire.watch"):
        thing.x = 1
    assert len(code.told) == 1
    assert thing.x == 1
    assert len(caplog.records) == 1


def test_what_can_not_be_watched_leaves_nothing() -> None:
    with pytest.raises(TypeError, match="can't be watched"):
        watch(3, Code())
    with pytest.raises(TypeError, match="can't be watched"):
        watch(torch.ones(1), Code())


def test_a_tracker_works_by_hand_as_well() -> None:
    tracker = MutationTracker()
    code = Code()
    tracker.track(code)
    tracker.on_mutation("x")
    tracker.on_mutation("x")
    assert tracker.mutation_count == 2
    assert len(code.told) == 1
    tracker.track(Code())  # dies at once
    assert tracker.watchers == []


def test_ensure_patched_patches_once_until_the_last_lets_go() -> None:
    first = ensure_patched(Thing)
    patched = vars(Thing)["__setattr__"]
    second = ensure_patched(Thing)
    assert vars(Thing)["__setattr__"] is patched
    first()
    first()
    assert vars(Thing)["__setattr__"] is patched
    second()
    check_untouched(Thing)


def test_ensure_patched_puts_the_classs_own_methods_back() -> None:
    class Own:
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

        def __delattr__(self, name):
            object.__delattr__(self, name)

    before = dict(vars(Own))
    let_go = ensure_patched(Own)
    assert vars(Own)["__setattr__"] is not before["__setattr__"]
    assert Own.__setattr__.__name__ == "__setattr__"
    let_go()
    assert dict(vars(Own)) == before


@pytest.mark.parametrize("cls", [int, dict, types.ModuleType, object])
def test_a_built_in_class_can_not_be_patched(cls) -> None:
    with pytest.raises(TypeError, match="can't be patched"):
        ensure_patched(cls)


def test_a_thousand_pieces_of_code_leave_nothing() -> None:
    thing = Thing()
    for _ in range(1000):
        watch(thing, Code())
    tracker = MutationTracker.db[thing]
    assert tracker.watchers == []
    check_untouched(Thing)


def test_threads_that_watch_and_write_tell_each_code_once() -> None:
    thing = Thing()
    codes = [[Code() for _ in range(50)] for _ in range(4)]

    def work(mine):
        for number, code in enumerate(mine):
            watch(thing, code)
            thing.x = (id(mine), number)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in codes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    thing.x = None
    assert all(len(code.told) == 1 for mine in codes for code in mine)
    check_untouched(Thing)


def test_mutations_go_on_counting_when_nobody_is_left_to_tell() -> None:
    thing = Thing()
    code = Code()
    tracker = watch(thing, code)
    thing.x = 1
    check_untouched(Thing)
    for value, count in ((2, 2), (2, 2), (3, 3)):
        thing.x = value
        assert tracker.mutation_count == count
        assert tracker.mutation_count == count
    thing.__dict__["y"] = 1
    del thing.x
    assert tracker.mutation_count == 5
    assert watch(thing, code) is tracker
    thing.x = 5
    assert tracker.mutation_count == 6
    assert len(code.told) == 2


@pytest.mark.parametrize("name", NEVER_TOLD | {"dict": UNSEEN["dict"]})
def test_mutations_of_a_container_go_on_counting(name) -> None:
    make, _ = (NEVER_TOLD | UNSEEN)[name]
    target, code = make(), Code()
    tracker = watch(target, code)
    target.clear()
    tracker.check()
    assert len(code.told) == tracker.mutation_count == 1
    getattr(target, "update" if name in ("dict", "set") else "extend")(make())
    assert tracker.mutation_count == 2


def test_mutations_of_containers_and_modules_go_on_counting() -> None:
    module = nn.Linear(2, 2)
    code = Code()
    of_module, of_class = watch(module, code), watch(Thing, code)
    module.bias = None
    module.training = False
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert of_module.mutation_count == 3
    Thing.extra = 1
    of_class.check()  # where Python doesn't tell
    assert of_class.mutation_count == 1
    Thing.extra = 2
    assert of_class.mutation_count == 2
    del Thing.extra
    assert of_class.mutation_count == 3
