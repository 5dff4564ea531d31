"""A watch tells every change once, after it, and leaves nothing behind."""

import abc
import collections
import copy
import dataclasses
import enum
import gc
import logging
import math
import pickle
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from tripwire.writes import subscriptions
from tripwire.writes.snapshots import ABSENT, GONE, ORDER
from tripwire.writes.watching import Change, watch


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    gc.collect()
    assert subscriptions.statistics() == (0, 0)
    assert not subscriptions._due


class Thing:
    scale = 1

    def __init__(self, **values):
        self.__dict__.update(values)


def short(changes):
    return [(change.name, change.old, change.new) for change in changes]


def here() -> int:
    return sys._getframe(1).f_lineno


def check_untouched(cls, names=("__setattr__", "__delattr__")) -> None:
    for name in names:
        assert name not in vars(cls)


# --- the object dies -----------------------------------------------------------------------------


def test_a_dead_objects_watch_ends_without_a_call_and_its_class_is_as_before() -> None:
    told = []
    thing = Thing(x=1)
    watched = watch(thing, told.append)
    assert "__setattr__" in vars(Thing)
    del thing
    check_untouched(Thing)
    assert not watched.active
    assert watched.check() == ()
    assert told == []


def test_an_object_at_a_dead_ones_address_is_not_watched() -> None:
    told = []
    keeper = Thing()
    kept = watch(keeper, told.append)  # keeps the class patched
    reused = 0
    for _ in range(200):
        thing = Thing(x=1)
        address = id(thing)
        watched = watch(thing, told.append)
        del thing
        other = Thing(x=1)
        reused += id(other) == address
        other.x = 2
        assert watched.check() == ()
        del other
    assert told == []
    assert reused
    kept.cancel()


def test_a_watch_that_nobody_holds_goes_on_and_goes_with_its_object() -> None:
    told = []
    thing = Thing(x=1)
    watch(thing, told.append)
    gc.collect()
    thing.x = 2
    assert short(told) == [("x", 1, 2)]
    del thing
    check_untouched(Thing)


def test_an_object_that_holds_itself_dies_though_it_is_watched() -> None:
    thing = Thing()
    thing.itself = thing
    thing.children = [Thing(parent=thing)]  # a list can't be held weakly
    thing.watch = watch(thing, print)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
    check_untouched(Thing)


def test_a_dead_objects_listener_is_let_go() -> None:
    class Listener:
        def __call__(self, change):
            pass

    listener = Listener()
    gone = weakref.ref(listener)
    thing = Thing()
    watched = watch(thing, listener)
    del listener
    assert gone() is not None
    del thing
    gc.collect()
    assert gone() is None
    assert not watched.active


def test_a_dead_objects_lists_are_let_go() -> None:
    inner = Thing()
    gone = weakref.ref(inner)
    thing = Thing(items=[inner])
    watched = watch(thing, print)
    del thing, inner
    assert gone() is None
    assert not watched.active


def test_values_are_not_kept_alive_by_a_watch() -> None:
    told = []
    thing = Thing(x=torch.ones(2))
    gone = weakref.ref(thing.x)
    watched = watch(thing, told.append)
    thing.__dict__["x"] = 2
    assert gone() is None
    watched.check()
    assert short(told) == [("x", GONE, 2)]
    watched.cancel()


# --- attribute writes ----------------------------------------------------------------------------


def test_a_write_is_told_after_it_with_the_writers_line() -> None:
    told = []
    thing = Thing(x=1)

    def listener(change):
        told.append((change, thing.x))

    with watch(thing, listener):
        line = here() + 1
        thing.x = 2
    ((change, seen),) = told
    assert seen == 2
    assert short([change]) == [("x", 1, 2)]
    assert change.where.file == __file__
    assert change.where.line == line
    assert change.where.function.endswith("the_writers_line")
    assert str(change) == f"x: 1 -> 2, at {__file__}:{line}"


def test_a_change_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Change("x", 1, 2, None).name = "y"


def test_additions_and_deletions_are_told() -> None:
    told = []
    thing = Thing(x=1)
    with watch(thing, told.append):
        thing.y = 2
        del thing.x
        setattr(thing, "x", 3)
        delattr(thing, "y")
    assert short(told) == [("y", ABSENT, 2), ("x", 1, ABSENT), ("x", ABSENT, 3), ("y", 2, ABSENT)]
    assert all(change.where.file == __file__ for change in told)


def test_a_write_of_the_same_object_or_an_equal_plain_value_is_not_told() -> None:
    told = []
    big, items = 10**30, [1]
    thing = Thing(n=big, items=items, nan=math.nan, zero=0.0, one=1, text="ab", pair=(1, "a"))
    with watch(thing, told.append):
        thing.n = int("1" + "0" * 30)
        thing.items = items
        thing.nan = float("nan")
        thing.text = "".join(["a", "b"])
        thing.pair = tuple(iter([1, "a"]))
        assert told == []
        thing.zero = -0.0
        thing.one = True
        thing.pair = (1.0, "a")
        thing.items = [1]
    assert [change.name for change in told] == ["zero", "one", "pair", "items"]


def test_a_write_that_fails_is_not_told_and_raises_as_before() -> None:
    class Strict:
        def __setattr__(self, name, value):
            if name == "bad":
                raise ValueError("no")
            object.__setattr__(self, name, value)

        def __delattr__(self, name):
            raise KeyError(name)

    told = []
    thing = Strict()
    thing.x = 1
    with watch(thing, told.append):
        with pytest.raises(ValueError, match="no") as caught:
            thing.bad = 1
        assert caught.value.__context__ is None
        with pytest.raises(KeyError):
            del thing.x
        with pytest.raises(AttributeError):
            object.__delattr__(thing, "nothing")
    assert told == []


def test_what_a_failing_write_did_store_is_told() -> None:
    class Half:
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)
            raise ValueError

    told = []
    thing = Half()
    with watch(thing, told.append), pytest.raises(ValueError):
        thing.x = 1
    assert short(told) == [("x", ABSENT, 1)]


def test_a_subclass_with_its_own_setattr_that_never_calls_super_is_seen() -> None:
    class Base:
        def __setattr__(self, name, value):
            raise AssertionError("not called")

    class Own(Base):
        def __setattr__(self, name, value):
            self.__dict__["_" + name] = value

    own = vars(Own)["__setattr__"]
    told = []
    thing = Own()
    with watch(thing, told.append):
        line = here() + 1
        thing.x = 1
        assert "x" not in vars(thing)
    assert short(told) == [("_x", ABSENT, 1)]
    assert told[0].where.line == line
    assert vars(Own)["__setattr__"] is own
    assert "__delattr__" not in vars(Own)


def test_an_attribute_behind_a_property_is_told_once_by_the_name_that_stores_it() -> None:
    class Behind:
        @property
        def x(self):
            return self._x

        @x.setter
        def x(self, value):
            self._x = value

    told = []
    thing = Behind()
    with watch(thing, told.append) as watched:
        thing.x = 1
        watched.check()
    assert short(told) == [("_x", ABSENT, 1)]


def test_slots_are_watched_with_and_without_weak_references() -> None:
    class Slots:
        __slots__ = ("a", "b")

    class Weak(Slots):
        __slots__ = ("__weakref__", "c")

    for cls in (Slots, Weak):
        told = []
        thing = cls()
        thing.a = 1
        with watch(thing, told.append) as watched:
            thing.a = 2
            thing.b = 3
            del thing.a
            object.__setattr__(thing, "b", 4)
            watched.check()
        assert short(told) == [("a", 1, 2), ("b", ABSENT, 3), ("a", 2, ABSENT), ("b", 3, 4)]
        assert [change.where is None for change in told] == [False] * 3 + [True]
        check_untouched(cls)


def test_an_object_without_weak_references_is_let_go_by_cancel() -> None:
    class Slots:
        __slots__ = ("a",)

    thing = Slots()
    thing.a = inner = Thing()
    gone = weakref.ref(inner)
    watched = watch(thing, print)
    del thing, inner
    assert gone() is not None
    watched.cancel()
    assert gone() is None


def test_a_frozen_dataclass_stays_frozen_and_its_back_door_is_seen() -> None:
    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int

    told = []
    point = Point(1)
    with watch(point, told.append) as watched:
        with pytest.raises(dataclasses.FrozenInstanceError):
            point.x = 2
        object.__setattr__(point, "x", 3)
        assert told == []
        assert short(watched.check()) == [("x", 1, 3)]
        assert watched.check() == ()
    assert len(told) == 1


def test_writes_to_the_dict_are_told_at_the_next_check_or_seen_write() -> None:
    told = []
    thing = Thing(x=1, y=1)
    with watch(thing, told.append) as watched:
        thing.__dict__["x"] = 2
        assert told == []
        assert short(watched.check()) == [("x", 1, 2)]
        vars(thing).update(x=3)
        thing.y = 2
    assert short(told) == [("x", 1, 2), ("x", 2, 3), ("y", 1, 2)]
    assert [change.where is None for change in told] == [True, True, False]


def test_a_replaced_dict_is_told_by_name_with_the_line() -> None:
    told = []
    thing = Thing(x=1, y=1)
    with watch(thing, told.append):
        thing.__dict__ = {"x": 2, "z": 3}
    assert sorted(short(told), key=str) == [("x", 1, 2), ("y", 1, ABSENT), ("z", ABSENT, 3)]
    assert all(change.where is not None for change in told)


def test_lists_that_take_each_others_address_are_told_apart() -> None:
    told = []
    thing = Thing(items=[1])
    with watch(thing, told.append) as watched:
        for _ in range(50):
            thing.__dict__["items"] = [1]
            thing.__dict__["items"] = [1]  # without care, often where the first one was
            assert len(watched.check()) == 1


def test_an_object_that_gets_another_class_stays_watched() -> None:
    class Other(Thing):
        pass

    told = []
    thing = Thing(x=1)
    with watch(thing, told.append) as watched:
        thing.__class__ = Other
        check_untouched(Thing)
        thing.x = 2
        object.__setattr__(thing, "__class__", Thing)
        watched.check()
        check_untouched(Other)
        thing.x = 3
    names = [change.name for change in told]
    assert names == ["__class__", "x", "__class__", "x"]
    assert told[1].where is not None
    assert told[3].where is not None


# --- classes and their patches -------------------------------------------------------------------


def test_a_users_setattr_put_on_a_watched_class_stays() -> None:
    class Net:
        pass

    told = []
    thing = Net()
    watched = watch(thing, told.append)

    def users(self, name, value):
        object.__setattr__(self, name, value * 2)

    Net.__setattr__ = users
    thing.x = 2
    assert short(watched.check()) == [("x", ABSENT, 4)]
    watched.cancel()
    assert vars(Net)["__setattr__"] is users
    assert "__delattr__" not in vars(Net)
    with watch(thing, told.append):
        thing.x = 3
    assert vars(Net)["__setattr__"] is users
    assert short(told) == [("x", ABSENT, 4), ("x", 4, 6)]


def test_a_users_setattr_that_wraps_ours_works_after_the_watch() -> None:
    class Net:
        pass

    told = []
    thing = Net()
    watched = watch(thing, told.append)
    ours = Net.__setattr__

    def users(self, name, value):
        ours(self, name, value)

    Net.__setattr__ = users
    thing.x = 1
    watched.cancel()
    thing.x = 2
    assert vars(Net)["__setattr__"] is users
    with watch(thing, told.append):
        thing.x = 3
    assert short(told) == [("x", ABSENT, 1), ("x", 2, 3)]


def test_a_setattr_that_the_user_deletes_stays_deleted() -> None:
    class Net:
        def __setattr__(self, name, value):
            raise AssertionError

    thing = Net()
    watched = watch(thing, print)
    del Net.__setattr__
    watched.cancel()
    check_untouched(Net)


def test_a_base_class_may_change_under_a_patch() -> None:
    class Base:
        pass

    class Below(Base):
        pass

    told = []
    thing = Below()
    with watch(thing, told.append):

        def doubled(self, name, value):
            object.__setattr__(self, name, value * 2)

        Base.__setattr__ = doubled
        thing.x = 1
        del Base.__setattr__
        thing.x = 1
    assert short(told) == [("x", ABSENT, 2), ("x", 2, 1)]


def test_a_class_and_its_base_can_both_be_patched_and_undone_in_any_order() -> None:
    class Base:
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    class Below(Base):
        pass

    class Mixed(Below, Base):
        pass

    own = vars(Base)["__setattr__"]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        told = []
        things = [Base(), Below(), Mixed()]
        watches = [watch(thing, told.append) for thing in things]
        for thing in things:
            thing.x = 1
        assert short(told) == [("x", ABSENT, 1)] * 3
        for index in order:
            watches[index].cancel()
        assert vars(Base)["__setattr__"] is own
        check_untouched(Below)
        check_untouched(Mixed)
        things[2].x = 5
        assert len(told) == 3


def test_a_mixin_between_a_patched_class_and_object_still_runs() -> None:
    class Left:
        pass

    class Right:
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value + 1)

    class Both(Left, Right):
        pass

    with watch(Left(), print):  # patches Left, which Both passes through
        pass
    left, both = Left(), Both()
    with watch(left, print):
        both.x = 1
    assert both.x == 2


def test_a_method_called_by_hand_does_what_it_did() -> None:
    class Net:
        pass

    thing, other = Net(), Thing()
    with watch(thing, print):
        Net.__setattr__(other, "x", 1)  # object's own, in truth
        Net.__delattr__(other, "x")
        thing.__setattr__("y", 2)
        with pytest.raises(TypeError):
            Net.__setattr__(thing)
    assert vars(other) == {}
    assert vars(thing) == {"y": 2}


def test_many_watches_on_one_class_patch_it_once_and_each_sees_its_own_object() -> None:
    told = collections.defaultdict(list)
    things = [Thing(x=0) for _ in range(50)]
    watches = [watch(thing, told[i].append) for i, thing in enumerate(things)]
    patched = vars(Thing)["__setattr__"]
    assert subscriptions.statistics() == (1, 50)
    for i, thing in enumerate(things):
        thing.x = i + 1
    for i in range(50):
        assert short(told[i]) == [("x", 0, i + 1)]
    for watched in watches[:-1]:
        watched.cancel()
    assert vars(Thing)["__setattr__"] is patched
    watches[-1].cancel()
    check_untouched(Thing)


def test_several_watches_on_one_object_are_all_told_once() -> None:
    told = []
    thing = Thing(x=1)
    with (
        watch(thing, lambda change: told.append(("a", change.new))),
        watch(thing, lambda change: told.append(("b", change.new))),
    ):
        thing.x = 2
    assert told == [("a", 2), ("b", 2)]


def test_objects_of_a_patched_class_that_nobody_watches_are_left_alone() -> None:
    told = []
    thing, other = Thing(), Thing()
    with watch(thing, told.append):
        other.x = 1
    assert told == []


def test_a_class_with_a_metaclass_is_patched_and_restored() -> None:
    class Meta(type):
        pass

    class Net(metaclass=Meta):
        pass

    told = []
    thing = Net()
    with watch(thing, told.append):
        thing.x = 1
    assert short(told) == [("x", ABSENT, 1)]
    check_untouched(Net)


def test_a_metaclass_that_guards_its_classes_never_notices() -> None:
    class Guarding(type):
        def __setattr__(cls, name, value):
            raise AssertionError(name)

        __delattr__ = __setattr__

    class Net(metaclass=Guarding):
        pass

    class Colour(enum.Enum):
        RED = 1

    told = []
    thing = Net()
    with watch(thing, told.append) as watched:
        thing.x = 1
        assert short(watched.check()) == [("x", ABSENT, 1)]
    with watch(Colour.RED, told.append):
        Colour.RED.note = "warm"
    assert short(told[1:]) == [("note", ABSENT, "warm")]


def test_watched_objects_are_copied_and_pickled_as_they_are() -> None:
    told = []
    thing = Thing(x=[1])
    before = pickle.dumps(thing)
    with watch(thing, told.append):
        assert pickle.dumps(thing) == before
        twins = [copy.copy(thing), copy.deepcopy(thing), pickle.loads(before)]
        for twin in twins:
            assert set(vars(twin)) == {"x"}
            twin.x = 2
    assert told == []


def test_a_thousand_watches_leave_nothing() -> None:
    def cycle() -> None:
        thing = Thing(x=1, items=[1])
        for _ in range(1000):
            watch(thing, len).cancel()
        for _ in range(1000):
            watch(Thing(), len)
        check_untouched(Thing)

    cycle()
    gc.collect()
    before = len(gc.get_objects())
    cycle()
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert len(subscriptions._replaced) == 0


# --- modules of torch ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.scale = 2.0


def test_a_modules_parameters_buffers_submodules_and_attributes_are_told_at_once() -> None:
    told = []
    net = Net()
    weight, mean, linear = net.weight, net.mean, net.linear
    with watch(net, told.append):
        net.weight = new_weight = nn.Parameter(torch.zeros(2))
        net.mean = new_mean = torch.ones(2)
        net.linear = new_linear = nn.Linear(2, 2)
        net.scale = 3.0
        line = here() + 1
        net.eval()
        del net.mean
    assert [change.name for change in told] == [
        *("weight", "mean", "linear", "scale", "training", "mean")
    ]
    for change, old, new in zip(told, (weight, mean, linear), (new_weight, new_mean, new_linear)):
        assert change.old is old
        assert change.new is new
    assert told[4].where.line == line  # the user's, not torch's
    assert told[5].new is ABSENT
    check_untouched(Net)


def test_a_name_that_moves_between_a_modules_tables_is_one_change() -> None:
    told = []
    net = Net()
    with watch(net, told.append):
        net.scale = new = nn.Parameter(torch.ones(1))
    assert len(told) == 1
    assert (told[0].name, told[0].old) == ("scale", 2.0)
    assert told[0].new is new


def test_what_is_registered_past_setattr_is_found_by_a_check() -> None:
    told = []
    net = Net()
    with watch(net, told.append) as watched:
        net.register_parameter("bias", nn.Parameter(torch.ones(1)))
        net.add_module("act", nn.ReLU())
        net._buffers["mean"] = None
        handle = net.register_forward_hook(lambda *_: None)
        watched.check()
        handle.remove()
        watched.check()
    names = [change.name for change in told]
    assert names == ["bias", "mean", "act", *[f"_forward_hooks[{handle.id}]"] * 2]


def test_a_hook_that_moves_to_another_table_is_two_changes() -> None:
    net = Net()
    hook = net.register_forward_hook(lambda *_: None)
    with watch(net, print) as watched:
        net._forward_pre_hooks[hook.id] = net._forward_hooks.pop(hook.id)
        names = [change.name for change in watched.check()]
    assert sorted(names) == [f"_forward_hooks[{hook.id}]", f"_forward_pre_hooks[{hook.id}]"]


def test_the_order_of_submodules_is_something_that_is_held() -> None:
    told = []
    net = nn.Sequential(nn.ReLU(), nn.Tanh())
    with watch(net, told.append) as watched:
        net._modules["0"] = net._modules.pop("0")
        watched.check()
    assert short(told) == [("_modules", ("0", "1"), ("1", "0"))]


def test_a_watch_is_one_level_deep() -> None:
    told = []
    net = Net()
    with watch(net, told.append):
        net.linear.weight = nn.Parameter(torch.ones(2, 2))
        net.weight.data.add_(1)
    assert told == []


def test_a_watched_module_computes_saves_and_copies_as_before() -> None:
    net = Net()
    x = torch.ones(1, 2)
    want = net.linear(x)
    keys = list(net.state_dict())
    with watch(net, print), watch(net.linear, print):
        assert torch.equal(net.linear(x), want)
        assert list(net.state_dict()) == keys
        net.load_state_dict(net.state_dict())
        twin = copy.deepcopy(net)
        assert torch.equal(pickle.loads(pickle.dumps(net)).weight, net.weight)
        net.to(torch.float64).to(torch.float32)
    assert list(twin.state_dict()) == keys
    for cls in (Net, nn.Linear, nn.Module):
        assert not {"__setattr__", "__delattr__"} & set(vars(cls)) or cls is nn.Module


# --- containers ----------------------------------------------------------------------------------


def changes_of(target, write):
    told = []
    with watch(target, told.append) as watched:
        write(target)
        assert watched.check() == tuple(told)
        assert watched.check() == ()
    assert all(change.where is None for change in told)
    return short(told)


def test_items_of_a_dict_are_compared() -> None:
    def write(d):
        d["a"] = 2
        del d["b"]
        d["c"] = 3
        d["same"] = d["same"]

    target = {"a": 1, "b": 1, "same": [1]}
    assert changes_of(target, write) == [("a", 1, 2), ("b", 1, ABSENT), ("c", ABSENT, 3)]


def test_keys_that_are_equal_but_not_the_same_are_told_apart() -> None:
    def write(d):
        del d[1]
        d[True] = "x"

    assert changes_of({1: "x"}, write) == [(1, "x", ABSENT), (True, ABSENT, "x")]


def test_keys_that_compare_as_they_like_are_never_asked() -> None:
    class Key:
        asked = False

        def __hash__(self):
            return 1

        def __eq__(self, other):
            Key.asked = True
            return True

    a, b = Key(), Key()
    target = {a: 1}
    Key.asked = False
    with watch(target, print) as watched:
        target[2] = 2  # another hash
        assert not Key.asked
        watched.check()
        assert not Key.asked
        dict.clear(target)
        target[b] = 1
        changes = watched.check()
        assert not Key.asked
    assert [(c.name is a, c.name is b) for c in changes] == [
        *((True, False), (False, False), (False, True))
    ]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.Counter])
def test_another_order_of_the_same_items_is_a_change(kind) -> None:
    def write(d):
        d["a"] = d.pop("a")

    assert changes_of(kind({"a": 1, "b": 2}), write) == [(ORDER, ("a", "b"), ("b", "a"))]


def test_an_ordered_dict_that_moves_an_item_is_seen() -> None:
    def write(d):
        d.move_to_end("a")

    target = collections.OrderedDict(a=1, b=2)
    assert changes_of(target, write) == [(ORDER, ("a", "b"), ("b", "a"))]


def test_elements_of_lists_and_deques_are_compared_by_position() -> None:
    for kind in (list, collections.deque):
        assert changes_of(kind([1, 2, 3]), lambda v: v.append(4)) == [(3, ABSENT, 4)]
        assert changes_of(kind([1, 2, 3]), lambda v: v.insert(0, 0)) == [(0, ABSENT, 0)]
        assert changes_of(kind([1, 2, 3]), lambda v: v.remove(1)) == [(0, 1, ABSENT)]
        assert changes_of(kind([1, 2, 3]), lambda v: v.__setitem__(1, 9)) == [(1, 2, 9)]
        assert changes_of(kind([1, 2, 3]), lambda v: v.reverse()) == [(0, 1, 3), (2, 3, 1)]
        assert changes_of(kind([1, 1]), lambda v: v.clear()) == [(0, 1, ABSENT), (1, 1, ABSENT)]
        assert changes_of(kind([0.0, 1]), lambda v: v.__setitem__(0, -0.0)) == [(0, 0.0, -0.0)]


def test_elements_of_a_set_are_compared() -> None:
    def write(s):
        s.add("c")
        s.discard("a")

    assert changes_of({"a", "b"}, write) == [("a", "a", ABSENT), ("c", ABSENT, "c")]
    assert changes_of({1}, lambda s: (s.clear(), s.add(True))) == [
        *((1, 1, ABSENT), (True, ABSENT, True))
    ]


def test_a_container_of_a_users_class_is_compared_past_the_users_methods() -> None:
    class Odd(dict):
        def __iter__(self):
            raise AssertionError

        items = keys = values = __len__ = __getitem__ = __eq__ = __iter__

    told = []
    odd = Odd(a=1)
    with watch(odd, told.append) as watched:
        odd.note = 1
        assert told[0].where is not None
        odd["note"] = 2
        watched.check()
    assert short(told) == [("note", ABSENT, 1), ("note", ABSENT, 2)]


def test_a_container_is_held_by_its_watch_only() -> None:
    inner = Thing()
    gone = weakref.ref(inner)
    watched = watch([inner], print)
    del inner
    assert gone() is not None
    watched.cancel()
    assert gone() is None
    assert not watched.active


def test_a_dead_set_ends_its_watch() -> None:
    target = {1}
    watched = watch(target, print)
    assert watched.active
    del target
    assert not watched.active
    assert watched.check() == ()


# --- classes, modules of Python, functions -------------------------------------------------------


def test_attributes_of_a_class_are_compared() -> None:
    class Net:
        scale = 1

        def forward(self):
            pass

    forward = Net.forward
    told = []
    with watch(Net, told.append) as watched:
        Net.scale = 2
        Net.forward = replaced = lambda self: 1
        Net.new = 3
        watched.check()
        del Net.new
        watched.check()
    assert short(told) == [
        ("scale", 1, 2),
        ("forward", forward, replaced),
        ("new", ABSENT, 3),
        ("new", 3, ABSENT),
    ]


def test_a_class_attribute_is_no_change_of_its_instances() -> None:
    class Net:
        scale = 1

    told = []
    thing = Net()
    with watch(thing, told.append) as watched:
        Net.scale = 2
        assert watched.check() == ()
        thing.scale = 2
    assert short(told) == [("scale", ABSENT, 2)]


def test_our_own_patches_are_no_change_of_a_watched_class() -> None:
    class Net:
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    told = []
    first = Net()
    inner = watch(first, print)
    with watch(Net, told.append) as watched:
        assert watched.check() == ()
        inner.cancel()
        assert watched.check() == ()
        with watch(first, print):
            assert watched.check() == ()
        own = Net.__setattr__
        Net.__setattr__ = replaced = lambda self, name, value: None
        assert short(watched.check()) == [("__setattr__", own, replaced)]


def test_asking_a_class_for_its_annotations_is_no_change() -> None:
    class Net:
        pass

    with watch(Net, print) as watched:
        assert Net.__annotations__ == {}
        assert watched.check() == ()


def test_another_base_is_a_change_of_a_class() -> None:
    class A:
        pass

    class B:
        pass

    class Net(A):
        pass

    with watch(Net, print) as watched:
        Net.__bases__ = (B,)
        assert short(watched.check()) == [("__bases__", (A,), (B,))]


def test_attributes_of_a_class_with_a_metaclass_are_told_at_once() -> None:
    class Meta(type):
        pass

    class Net(metaclass=Meta):
        pass

    class Abstract(abc.ABC):
        pass

    told = []
    before = dict(vars(abc.ABCMeta))
    with watch(Net, told.append), watch(Abstract, told.append):
        with watch(Net(), print):  # patches a class whose metaclass is patched
            Net.x = 1
            assert told[0].where is not None
        Abstract.y = 2
    assert short(told) == [("x", ABSENT, 1), ("y", ABSENT, 2)]
    check_untouched(Meta)
    check_untouched(Net)
    assert dict(vars(abc.ABCMeta)) == before


def test_a_class_that_dies_ends_its_watch() -> None:
    class Net:
        x = 1

        def forward(self):
            pass

    watched = watch(Net, print)
    del Net
    gc.collect()
    assert not watched.active


def test_names_of_a_python_module_are_compared() -> None:
    module = types.ModuleType("cfg")
    exec("scale = 1\ndef write():\n    global scale\n    scale = 2", module.__dict__)
    told = []
    with watch(module, told.append) as watched:
        module.write()
        watched.check()
        module.new = 3
        watched.check()
        module.__dict__["__warningregistry__"] = {}
        assert watched.check() == ()
    assert short(told) == [("scale", 1, 2), ("new", ABSENT, 3)]


def test_a_functions_code_defaults_and_closure_are_compared() -> None:
    def make(n):
        def f(a=1):
            return n + a

        def rebind(value):
            nonlocal n
            n = value

        return f, rebind

    f, rebind = make(1)
    with watch(f, print) as watched:
        rebind(2)
        f.__defaults__ = (2,)
        f.note = "x"
        found = short(watched.check())
    assert sorted(found, key=str) == sorted(
        [("__closure__['n']", 1, 2), ("__defaults__", (1,), (2,)), ("note", ABSENT, "x")], key=str
    )


@pytest.mark.parametrize("wrong", [1, "x", None, (1, 2), object(), torch.ones(1), b"", iter(())])
def test_what_can_not_be_watched_says_so(wrong) -> None:
    with pytest.raises(TypeError, match="can't be watched"):
        watch(wrong, print)


def test_a_listener_must_be_callable() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        watch(Thing(), "print")


def test_an_object_that_lies_about_its_class_is_taken_for_what_it_is() -> None:
    class Liar:
        @property
        def __class__(self):
            return dict

    told = []
    thing = Liar()
    with watch(thing, told.append):
        thing.x = 1
    assert short(told) == [("x", ABSENT, 1)]


def test_reading_an_object_runs_none_of_its_code() -> None:
    class Touchy:
        def __getattribute__(self, name):
            raise AssertionError(name)

        __eq__ = __hash__ = __bool__ = __len__ = __repr__ = None

    told = []
    thing = Touchy()
    holder = Thing(thing=thing)
    with watch(thing, told.append), watch(holder, told.append):
        object.__setattr__(thing, "x", 1)
        holder.thing = thing
        thing.y = 2
    assert short(told) == [("x", ABSENT, 1), ("y", ABSENT, 2)]


# --- listeners -----------------------------------------------------------------------------------


def test_a_listener_that_raises_is_dropped_and_logged_once(caplog) -> None:
    told = []

    def broken(change):
        told.append(change)
        raise ValueError("broken")

    thing = Thing(x=1)
    others = []
    with caplog.at_level(logging.WARNING, "tripwire.watch"):
        watched = watch(thing, broken)
        with watch(thing, others.append):
            thing.x = 2
            thing.x = 3
    assert len(told) == 1
    assert len(others) == 2
    assert thing.x == 3
    assert not watched.active
    (record,) = caplog.records
    assert record.name == "tripwire.watch"
    assert "'x'" in record.getMessage()
    assert record.exc_info[0] is ValueError


def test_a_listener_that_writes_is_not_told_of_that_and_others_are() -> None:
    told, others = [], []
    thing = Thing(x=1, count=0)

    def counting(change):
        told.append(change)
        thing.count += 1

    with watch(thing, counting), watch(thing, others.append) as watched:
        thing.x = 2
        thing.x = 3
        assert watched.check() == ()
    assert [change.name for change in told] == ["x", "x"]
    assert [change.name for change in others] == ["x", "count", "x", "count"]
    assert all(change.where.file == __file__ for change in others)


def test_what_a_listener_writes_unseen_is_told_once_at_the_next_check() -> None:
    target = {}

    def listener(change):
        target["count"] = target.get("count", 0) + 1

    with watch(target, listener) as watched:
        target["x"] = 1
        assert [len(watched.check()) for _ in range(3)] == [1, 1, 1]
        assert target["count"] == 3


def test_two_listeners_that_answer_each_other_come_to_an_end() -> None:
    thing = Thing(a=0, b=0)

    def first(change):
        thing.a += 1

    def second(change):
        thing.b += 1

    with watch(thing, first), watch(thing, second):
        thing.start = True
    assert 1 <= thing.a <= 3
    assert 1 <= thing.b <= 3


def test_a_listener_may_cancel_check_and_watch() -> None:
    told = []
    thing = Thing(x=1)

    def once(change):
        told.append(change)
        assert watched.check() == ()
        watched.cancel()
        later.append(watch(thing, told.append))

    later = []
    watched = watch(thing, once)
    thing.__dict__ = {"x": 2, "y": 2}
    assert len(told) == 1
    thing.x = 3
    assert len(told) == 2
    later[0].cancel()


def test_cancelling_twice_and_checking_after_do_nothing() -> None:
    told = []
    thing = Thing(x=1)
    watched = watch(thing, told.append)
    watched.cancel()
    watched.cancel()
    thing.x = 2
    assert watched.check() == ()
    assert told == []
    assert repr(watched) == "<Watch, over>"
    assert "Thing" in repr(watch(thing, print))


def test_leaving_by_an_exception_undoes_the_patches() -> None:
    thing = Thing()
    with pytest.raises(ZeroDivisionError), watch(thing, print):
        1 / 0
    check_untouched(Thing)


# --- threads -------------------------------------------------------------------------------------


def run_threads(count, work):
    failures = []
    start = threading.Barrier(count)

    def run(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_writes_of_several_threads_are_each_told_once_with_their_own_line() -> None:
    told = []
    thing = Thing()

    def even(name, value):
        setattr(thing, name, value)

    def odd(name, value):
        setattr(thing, name, value)

    def work(number):
        for i in range(40):
            (odd if number % 2 else even)(f"a{number}_{i}", i)

    with watch(thing, told.append) as watched:
        run_threads(4, work)
        assert watched.check() == ()
    assert len(told) == 160
    assert len({change.name for change in told}) == 160
    for change in told:
        writer = "odd" if int(change.name[1]) % 2 else "even"
        assert change.where.function.endswith(writer)


def test_a_listener_that_writes_misses_nothing_of_other_threads() -> None:
    told = []
    thing = Thing()

    def listener(change):
        told.append(change.name)
        thing.latest = object()

    def work(number):
        for i in range(40):
            setattr(thing, f"a{number}_{i}", i)

    with watch(thing, listener) as watched:
        run_threads(4, work)
        watched.check()
    names = [name for name in told if name != "latest"]
    assert sorted(names) == sorted(f"a{n}_{i}" for n in range(4) for i in range(40))


def test_threads_that_check_at_once_tell_once() -> None:
    told = []
    target = {}
    with watch(target, told.append) as watched:

        def work(number):
            for i in range(50):
                target[number, i] = i
                watched.check()

        run_threads(4, work)
        watched.check()
    assert len(told) == len({change.name for change in told}) == 200


def test_threads_that_watch_and_cancel_leave_the_class_as_it_was() -> None:
    def work(number):
        thing = Thing(x=0)
        for i in range(100):
            told = []
            watched = watch(thing, told.append)
            thing.x = i + 1
            watched.cancel()
            assert short(told) == [("x", i, i + 1)]
            watch(Thing(), print)  # dies at once

    run_threads(4, work)
    check_untouched(Thing)


# --- interrupts ---


def interrupted_at(monkeypatch, owner, name: str) -> None:
    plain = getattr(owner, name)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(owner, name, plain)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("name", ["_settle", "_set_observers", "Patch", "can_refer"])
def test_an_interrupt_while_a_watch_begins_leaves_the_class_as_it_was(monkeypatch, name) -> None:
    class Plain:
        pass

    before, obj = dict(vars(Plain)), Plain()
    interrupted_at(monkeypatch, subscriptions, name)
    with pytest.raises(KeyboardInterrupt):
        watch(obj, lambda change: None)
    assert dict(vars(Plain)) == before


def test_an_interrupt_while_a_watch_is_told_keeps_nothing_alive(monkeypatch) -> None:
    class Plain:
        pass

    def write() -> weakref.ref:
        obj = Plain()
        watching = watch(obj, lambda change: None)
        interrupted_at(monkeypatch, type(watching._watcher), "after")
        with pytest.raises(KeyboardInterrupt):
            obj.value = 1
        return weakref.ref(obj)

    found = write()
    gc.collect()
    assert found() is None
    assert "__setattr__" not in vars(Plain)
