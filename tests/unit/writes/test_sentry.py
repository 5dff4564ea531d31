"""What a sentry owes its caller, on both implementations: no write goes unseen."""

import ctypes
import functools
import importlib
import sys
import types
import weakref
from pathlib import Path

import pytest
from support import run_with_torch

from tripwire.writes import sentry, twin

HAS_WATCHERS = sys.version_info >= (3, 12)

in_c = pytest.mark.skipif(
    sentry.Sentry is twin.Sentry, reason="_watch isn't built: python setup.py build_ext --inplace"
)


@pytest.fixture(params=[pytest.param("c", marks=in_c), "python"])
def sentry_class(request):
    return sentry.Sentry if request.param == "c" else twin.Sentry


@pytest.fixture(params=[pytest.param("c", marks=in_c), "python"])
def hits(request):
    """The module that has what a hit needs beside the sentry."""
    name = "_watch" if request.param == "c" else "twin"
    return importlib.import_module(f"tripwire.writes.{name}")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def named(touches):
    return [(touch.is_dict, touch.index) for touch in touches]


def check_seen(sentry_class, write, *, dicts=(), objects=(), names):
    """The write is seen and named; in C nothing else is, and it is quiet before and after."""
    guard = sentry_class(dicts, objects)
    is_exact = sentry_class is not twin.Sentry
    if is_exact:
        assert guard.is_quiet()
    write()
    assert not guard.is_quiet()
    taken = named(guard.take())
    assert set(names) <= set(taken)
    if is_exact:
        assert taken == names
        assert guard.is_quiet()
        assert guard.take() == []
    guard.close()


def a_function(x, y=1, *, z=2):
    return x


def another_function(x):
    return x


class Plain:
    pass


class Other:
    pass


class OnlyDict:
    __slots__ = ("__dict__",)


class OfList(list):
    pass


class Failure(Exception):
    pass


class Slotted:
    __slots__ = ("value",)


class AlsoSlotted:
    __slots__ = ("value",)


def assign_all(target, other):
    target |= other


def set_by_c_api(target):
    ctypes.pythonapi.PyDict_SetItemString(ctypes.py_object(target), b"a", ctypes.py_object("new"))


DICT_WRITES = {
    "stored": lambda d: d.__setitem__("a", "new"),
    "stored by dict's own method": lambda d: dict.__setitem__(d, "a", "new"),
    "deleted": lambda d: d.__delitem__("a"),
    "popped": lambda d: d.pop("a"),
    "popped as the last": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "updated": lambda d: d.update(a="new"),
    "merged": lambda d: assign_all(d, {"a": "new"}),
    "initialised again": lambda d: d.__init__(a="new"),
    "executed as globals": lambda d: exec("a = 'new'", d),
    "stored by the C API": set_by_c_api,
    "renamed": lambda d: d.__setitem__("b", d.pop("a")),
}

ADDITIONS = {
    "stored": lambda d: d.__setitem__("a", 1),
    "set by default": lambda d: d.setdefault("a", 1),
    "cloned": lambda d: d.update({"a": 1}),
    "inserted among others": lambda d: d.update({"b": 1, "a": 1, "c": 1}),
}

ATTRIBUTE_WRITES = {
    "assigned": lambda o: setattr(o, "a", "new"),
    "assigned past the class": lambda o: object.__setattr__(o, "a", "new"),
    "deleted": lambda o: delattr(o, "a"),
    "stored in __dict__": lambda o: o.__dict__.__setitem__("a", "new"),
}


@pytest.mark.parametrize("keys", [frozenset({"a"}), None], ids=["keyed", "all"])
@pytest.mark.parametrize("write", DICT_WRITES.values(), ids=DICT_WRITES)
def test_change_of_an_item_is_seen_by_whatever_means(sentry_class, write, keys):
    target = {"x": 0, "a": 1}
    check_seen(
        sentry_class, lambda: write(target), dicts=[({}, None), (target, keys)], names=[(True, 1)]
    )


@pytest.mark.parametrize("write", ADDITIONS.values(), ids=ADDITIONS)
@pytest.mark.parametrize("start", [{}, {"x": 0}], ids=["empty", "filled"])
def test_new_item_under_a_watched_key_is_seen(sentry_class, start, write):
    target = dict(start)
    check_seen(
        sentry_class,
        lambda: write(target),
        dicts=[(target, frozenset({"a"}))],
        names=[(True, 0)],
    )


@pytest.mark.parametrize("write", ATTRIBUTE_WRITES.values(), ids=ATTRIBUTE_WRITES)
@pytest.mark.parametrize("kind", [Plain, OnlyDict, OfList, Failure])
def test_change_of_an_attribute_is_seen_by_whatever_means(sentry_class, kind, write):
    target = kind()
    target.a = 1
    check_seen(
        sentry_class,
        lambda: write(target),
        dicts=[(vars(target), frozenset({"a"}))],
        names=[(True, 0)],
    )


def test_attribute_store_is_seen_each_time_after_the_interpreter_specialised_it(sentry_class):
    target = Plain()
    target.a = 0
    guard = sentry_class([(vars(target), frozenset({"a"}))], [])
    for value in range(1, 200):
        target.a = value
        assert not guard.is_quiet()
        assert named(guard.take()) == [(True, 0)]


def test_global_store_is_seen_each_time_after_the_interpreter_specialised_it(sentry_class):
    module = types.ModuleType("module")
    exec("def write(value):\n    global scale\n    scale = value", vars(module))
    module.write(0)
    guard = sentry_class([(vars(module), frozenset({"scale"}))], [])
    for value in range(1, 200):
        module.write(value)
        assert not guard.is_quiet()
        assert named(guard.take()) == [(True, 0)]


def test_module_attribute_store_is_seen(sentry_class):
    module = types.ModuleType("module")
    module.scale = 1
    check_seen(
        sentry_class,
        lambda: setattr(module, "scale", 2),
        dicts=[(vars(module), frozenset({"scale"}))],
        names=[(True, 0)],
    )


def test_key_of_another_type_counts_as_any_key(sentry_class):
    class Name(str):
        pass

    target = {}
    check_seen(
        sentry_class,
        lambda: target.__setitem__(Name("a"), 1),
        dicts=[(target, frozenset({"a"}))],
        names=[(True, 0)],
    )


def test_string_subclass_among_the_keys_watches_all_keys(sentry_class):
    class Name(str):
        pass

    target = {}
    check_seen(
        sentry_class,
        lambda: target.__setitem__("a", 1),
        dicts=[(target, frozenset({Name("b")}))],
        names=[(True, 0)],
    )


@in_c
def test_write_under_another_key_is_told_apart_where_python_has_watchers():
    target = {"a": 1}
    guard = sentry.Sentry([(target, frozenset({"a"}))], [])
    target["b"] = 2
    del target["b"]
    assert guard.is_quiet() == HAS_WATCHERS
    assert named(guard.take()) == ([] if HAS_WATCHERS else [(True, 0)])
    assert guard.is_quiet()


@in_c
def test_reading_and_writing_elsewhere_leaves_a_sentry_quiet():
    watched, other = Plain(), Plain()
    target = {"a": 1}
    guard = sentry.Sentry([(target, None)], [watched, a_function])
    assert (target["a"], len(target), list(target), dict(target)) is not None
    assert watched.__class__ is Plain and watched.__dict__ == {}
    assert a_function.__defaults__ == (1,)
    other.__class__ = Other
    other.__dict__ = {}
    assert guard.is_quiet()


@in_c
def test_two_places_of_one_dict_are_touched_each_by_its_own_keys():
    target = {}
    guard = sentry.Sentry([(target, frozenset({"a"})), (target, frozenset({"b"}))], [])
    target["b"] = 1
    assert (True, 1) in named(guard.take())
    target["a"] = 1
    assert (True, 0) in named(guard.take())


@pytest.mark.parametrize(
    ("kind", "new"), [(Plain, Other), (OnlyDict, OnlyDict), (Slotted, AlsoSlotted)]
)
def test_assigned_class_is_seen(sentry_class, kind, new):
    target = kind()
    check_seen(
        sentry_class,
        lambda: setattr(target, "__class__", new),
        objects=[Plain, target],
        names=[(False, 1)],
    )


@pytest.mark.parametrize(
    "build",
    [Plain, OnlyDict, OfList, Failure, lambda: functools.partial(a_function), lambda: lambda: 0],
    ids=["plain", "slots", "list", "exception", "partial", "function"],
)
def test_replaced_dict_is_seen(sentry_class, build):
    target = build()
    check_seen(
        sentry_class, lambda: setattr(target, "__dict__", {}), objects=[target], names=[(False, 0)]
    )


def test_deleted_dict_is_seen(sentry_class):
    target = Plain()
    check_seen(
        sentry_class, lambda: delattr(target, "__dict__"), objects=[target], names=[(False, 0)]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__code__", another_function.__code__),
        ("__defaults__", (5,)),
        ("__defaults__", None),
        ("__kwdefaults__", {"z": 5}),
        ("__name__", "another name"),
        ("__qualname__", "another name"),
        ("__module__", "another module"),
        ("__doc__", "another text"),
        ("__annotations__", {"x": int}),
    ],
)
def test_changed_function_is_seen(sentry_class, name, value):
    target = types.FunctionType(a_function.__code__, {}, "target", (1,))
    check_seen(
        sentry_class, lambda: setattr(target, name, value), objects=[target], names=[(False, 0)]
    )


@pytest.mark.parametrize("name", ["__name__", "__qualname__"])
def test_renamed_class_is_seen(sentry_class, name):
    target = type("Target", (), {})
    check_seen(
        sentry_class, lambda: setattr(target, name, "Other"), objects=[target], names=[(False, 0)]
    )


def test_changed_function_is_seen_though_the_new_value_has_an_old_address(sentry_class):
    target = types.FunctionType(a_function.__code__, {}, "target", (object(),))
    guard = sentry_class([], [target])
    for _ in range(100):  # a freed tuple's address goes to the next one
        target.__defaults__ = (object(),)
        target.__defaults__ = (object(),)
        assert not guard.is_quiet()
        assert named(guard.take()) == [(False, 0)]


def test_nothing_is_kept_of_a_changed_function_once_it_was_taken(sentry_class):
    kept = Plain()
    reference = weakref.ref(kept)
    target = types.FunctionType(a_function.__code__, {}, "target", (kept,))
    guard = sentry_class([], [target])
    del kept
    target.__defaults__ = ()
    guard.take()
    assert reference() is None
    guard.close()


def test_a_function_that_died_is_not_looked_at(sentry_class):
    target = types.FunctionType(a_function.__code__, {}, "target", (1,))
    guard = sentry_class([], [target])
    del target
    assert not guard.is_quiet()
    guard.take()


def test_the_finalizer_of_old_defaults_can_take_and_close(sentry_class):
    class Closing:
        def __del__(self):
            guard.take()
            guard.close()

    target = types.FunctionType(a_function.__code__, {}, "target", (Closing(),))
    guard = sentry_class([], [target])
    target.__defaults__ = ()
    assert not guard.is_quiet()
    guard.take()
    target.__defaults__ = (1,)
    assert not guard.is_quiet()
    guard.close()
    assert guard.take() == []


TENSOR_WRITES = {
    "data": lambda t, torch: setattr(t, "data", torch.zeros(3)),
    "data of a descriptor": lambda t, torch: torch.Tensor.data.__set__(t, torch.zeros(3)),
    "requires_grad": lambda t, torch: setattr(t, "requires_grad", True),
    "requires_grad_": lambda t, torch: t.requires_grad_(),
    "detach_": lambda t, torch: t.detach_(),
    "torch.detach_": lambda t, torch: torch.detach_(t),
    "torch.detach_ by name": lambda t, torch: torch.detach_(input=t),
    "set_": lambda t, torch: t.set_(torch.zeros(3)),
    "resize_": lambda t, torch: t.resize_(1, 4),
    "resize_ of a bound method": lambda t, torch: (lambda bound: bound(1, 4))(t.resize_),
    "resize_as_": lambda t, torch: t.resize_as_(torch.zeros(4)),
    "torch.resize_as_": lambda t, torch: torch.resize_as_(t, torch.zeros(4)),
    "as_strided_": lambda t, torch: t.as_strided_((1,), (1,)),
    "torch.as_strided_": lambda t, torch: torch.as_strided_(t, (1,), (1,)),
    "t_": lambda t, torch: t.t_(),
    "transpose_": lambda t, torch: t.transpose_(0, 1),
    "swapaxes_": lambda t, torch: t.swapaxes_(0, 1),
    "swapdims_": lambda t, torch: t.swapdims_(0, 1),
    "squeeze_": lambda t, torch: t.squeeze_(),
    "squeeze_ of one dimension": lambda t, torch: t.squeeze_(dim=0),
    "unsqueeze_": lambda t, torch: t.unsqueeze_(0),
    "_swap_tensor_impl": lambda t, torch: torch._C._swap_tensor_impl(t, torch.zeros(3)),
    "class": lambda t, torch: setattr(t, "__class__", torch.nn.Parameter),
    "dict": lambda t, torch: setattr(t, "__dict__", {}),
    "aten.resize_": lambda t, torch: torch.ops.aten.resize_(t, [1]),
    "aten.resize_.default": lambda t, torch: torch.ops.aten.resize_.default(t, [1]),
    "aten.set_.source_Tensor": lambda t, torch: torch.ops.aten.set_.source_Tensor(
        t, torch.zeros(3)
    ),
    "module moved": lambda t, torch: move_parameter(t, torch),
}


def move_parameter(tensor, torch):
    module = torch.nn.Module()
    module.register_buffer("buffer", tensor)
    module._parameters["weight"] = module._buffers.pop("buffer")
    torch.nn.Module._apply(module, lambda t: t.to(torch.float64))


@pytest.mark.parametrize("write", TENSOR_WRITES.values(), ids=TENSOR_WRITES)
def test_changed_tensor_is_seen(sentry_class, torch, write):
    target, other = torch.zeros(1, 2), torch.zeros(1, 2)
    check_seen(
        sentry_class, lambda: write(target, torch), objects=[other, target], names=[(False, 1)]
    )


def test_changed_parameter_is_seen(sentry_class, torch):
    weight = torch.nn.Linear(2, 3).weight
    check_seen(
        sentry_class,
        lambda: setattr(weight, "data", torch.zeros(3)),
        objects=[weight],
        names=[(False, 0)],
    )


@in_c
def test_arithmetic_on_a_watched_tensor_leaves_a_sentry_quiet(torch):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    guard = sentry.Sentry([], [weight])
    (weight.t() @ weight.detach().squeeze(0)).sum().backward()
    with torch.no_grad():
        weight.add_(1)
    assert weight.data.shape == weight.shape and weight.requires_grad
    assert guard.is_quiet()


@in_c
def test_write_under_a_function_mode_is_seen_after_the_mode_let_it_through(torch):
    class Taking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            guard.take()
            return func(*args, **(kwargs or {}))

    target = torch.zeros(1, 2)
    guard = sentry.Sentry([], [target])
    with Taking():
        target.resize_(3)
    assert named(guard.take()) == [(False, 0)]


@in_c
def test_every_writer_of_objects_is_hooked():
    assert sentry.UNHOOKED == ()


@in_c
def test_writer_is_the_code_and_line_that_wrote():
    target, thing = {"a": 1}, Plain()
    guard = sentry.Sentry([(target, None)], [thing])
    line = sys._getframe().f_lineno
    target["a"] = 2
    thing.__class__ = Other
    of_dict, of_object = guard.take()
    here = sys._getframe().f_code
    assert of_dict.writer == ((here, line + 1) if HAS_WATCHERS else None)
    assert of_object.writer == (here, line + 2)


def test_a_watched_dict_stays_the_objects_own_in_its_order(sentry_class):
    thing = Plain()
    for name in "cab":
        setattr(thing, name, name)
    space = vars(thing)
    guard = sentry_class([(space, None)], [thing])
    assert vars(thing) is space
    assert list(space) == ["c", "a", "b"]
    thing.b = 2
    assert space["b"] == 2
    space["a"] = 3
    assert thing.a == 3
    del thing.c
    assert space == {"a": 3, "b": 2}
    assert not guard.is_quiet()
    guard.close()


@in_c
def test_the_dict_of_an_object_without_attributes_is_quiet_until_each_write():
    thing = Plain()
    space = vars(thing)
    guard = sentry.Sentry([(space, None)], [])
    assert vars(thing) is space and space == {}
    for number in range(100):  # often enough to be specialised
        assert guard.is_quiet()
        thing.a = number
        assert named(guard.take()) == [(True, 0)]
    assert space == {"a": 99}


@in_c
def test_of_several_writers_since_the_last_take_none_is_blamed_for_all():
    thing = Plain()
    guard = sentry.Sentry([], [thing])
    line = sys._getframe().f_lineno
    thing.__class__ = Other
    thing.__class__ = Plain
    assert [touch.writer for touch in guard.take()] == [None]
    for cls in (Other, Plain):
        thing.__class__ = cls
    assert [touch.writer[1] for touch in guard.take()] == [line + 5]


@in_c
@pytest.mark.skipif(not HAS_WATCHERS, reason="dict watchers came with Python 3.12")
def test_writers_are_noted_by_key_where_keys_are_plain():
    target = {"a": 1, 5: 1, b"c": 1, (6,): 1}
    guard = sentry.Sentry([(target, None)], [])
    line = sys._getframe().f_lineno
    target["a"] = 2
    target[5] = 2
    target[b"c"] = 2
    target[6,] = 2
    del target["a"]
    target.clear()
    (touch,) = guard.take()
    noted = [(key, at - line) for key, _, at in touch.writers]
    assert noted == [("a", 1), (5, 2), (b"c", 3), ("a", 5), (None, 6)]


def test_twin_knows_no_writers_and_suspects_everything():
    guard = twin.Sentry([({}, None), ({}, frozenset())], [Plain()])
    for _ in range(2):
        assert not guard.is_quiet()
        assert guard.take() == [
            twin.Touch(True, 0, None),
            twin.Touch(True, 1, None),
            twin.Touch(False, 0, None),
        ]


def test_closed_sentry_is_never_quiet_and_has_nothing_to_take(sentry_class):
    target, thing = {"a": 1}, Plain()
    guard = sentry_class([(target, None)], [thing])
    target["a"] = 2
    guard.close()
    guard.close()
    thing.__class__ = Other
    assert not guard.is_quiet()
    assert guard.take() == []


def test_closing_one_sentry_leaves_the_others_watching(sentry_class):
    target, thing = {"a": 1}, Plain()
    first, second = (sentry_class([(target, None)], [thing]) for _ in range(2))
    first.close()
    target["a"] = 2
    thing.__class__ = Other
    assert named(second.take()) == [(True, 0), (False, 0)]


def test_dead_object_leaves_a_sentry_that_suspects_everything_for_ever(sentry_class):
    thing = Plain()
    guard = sentry_class([({}, None)], [Plain, thing])
    del thing
    for _ in range(2):
        assert not guard.is_quiet()
        assert named(guard.take()) == [(True, 0), (False, 0), (False, 1)]
    assert guard.is_spent == (sentry_class is not twin.Sentry)
    guard.close()
    assert not guard.is_spent


@in_c
def test_dead_dict_spends_its_sentry_where_python_tells_of_it_and_is_kept_elsewhere():
    value = Plain()
    target, alive = {"value": value}, weakref.ref(value)
    guard = sentry.Sentry([(globals(), frozenset()), (target, None)], [Plain])
    assert guard.is_quiet()
    del target, value
    if HAS_WATCHERS:
        assert alive() is None
        for _ in range(2):
            assert not guard.is_quiet()
            assert named(guard.take()) == [(True, 0), (True, 1), (False, 0)]
    else:
        assert alive() is not None
        assert guard.is_quiet()
    assert guard.is_spent == HAS_WATCHERS


@in_c
def test_dead_object_frees_what_the_watched_dicts_held():
    owner, value = Plain(), Plain()
    owner.value = value
    guard = sentry.Sentry([(vars(owner), None)], [owner])
    alive = weakref.ref(value)
    del owner, value
    assert alive() is None
    assert guard.is_spent


@in_c
def test_listing_weakrefs_shows_none_of_a_sentry_and_spends_it():
    thing = Plain()
    guard = sentry.Sentry([], [thing])
    assert weakref.getweakrefs(thing) == []
    assert not guard.is_quiet()
    assert guard.is_spent


@in_c
def test_watched_tensors_can_be_swapped(torch):
    target, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(3))
    guard = sentry.Sentry([], [target])
    torch.utils.swap_tensors(target, other)
    assert target.shape == (3,)
    assert named(guard.take()) == [(False, 0)]


@pytest.mark.parametrize("wrong", [[{}], [({}, {"a"})], [(1, None)], [({},)], 3])
@in_c
def test_wrong_dicts_are_a_type_error_and_leave_nothing_behind(wrong):
    before = {"a": 1}
    with pytest.raises(TypeError):
        sentry.Sentry([(before, None), *wrong] if isinstance(wrong, list) else wrong, [])
    before["a"] = 2


def setter_of(descriptor):
    """The address of the C function behind a getset descriptor."""
    word = ctypes.sizeof(ctypes.c_void_p)
    getset = ctypes.c_void_p.from_address(id(descriptor) + object.__basicsize__ + 3 * word).value
    return ctypes.c_void_p.from_address(getset + 2 * word).value


@in_c
def test_hooks_are_in_place_only_while_an_object_is_watched():
    """In a process of its own: compiled functions of other tests may still be watched here."""
    folder, tests = str(Path(__file__).parent), str(Path(__file__).parents[2])
    paths = f"import sys; sys.path[:0] = [{folder!r}, {tests!r}]"
    run_with_torch(f"{paths}; import test_sentry as t; t.check_hooks()")


def check_hooks():
    descriptors = [vars(object)["__class__"], vars(Plain)["__dict__"], vars(OnlyDict)["__dict__"]]
    sentry.Sentry([], [Plain(), OnlyDict()]).close()
    before = [setter_of(descriptor) for descriptor in descriptors]
    thing, other = Plain(), OnlyDict()
    first, second = sentry.Sentry([], [thing]), sentry.Sentry([({}, None)], [other])
    during = [setter_of(descriptor) for descriptor in descriptors]
    assert all(a != b for a, b in zip(before, during, strict=True))
    first.close()
    assert [setter_of(descriptor) for descriptor in descriptors] == during
    second.close()
    assert [setter_of(descriptor) for descriptor in descriptors] == before


# --- what else a hit does in C ---------------------------------------------------------------


class Item:
    """Something to refer to weakly."""


def test_a_list_is_the_same_while_it_holds_the_very_objects(hits):
    item, word = Item(), "".join(["a", "word"])
    items = [item, word, None, 1.5]
    kept = (weakref.ref(item), word, None, items[3])
    assert hits.same_items(items, kept)
    assert hits.same_items([], ())
    assert not hits.same_items(items[:3], kept)
    assert not hits.same_items([*items, None], kept)
    assert not hits.same_items([Item(), *items[1:]], kept)
    assert not hits.same_items([item, "".join(["a", "word"]), *items[2:]], kept)


def test_nothing_is_the_same_as_what_died(hits):
    item = Item()
    kept = (weakref.ref(item),)
    del item
    assert not hits.same_items([None], kept)
    assert not hits.same_items([Item()], kept)


def test_a_call_hands_over_both_tuples_in_order(hits):
    def collect(*args):
        return args

    class Callable:
        def method(self, *args):
            return self, *args

    owner = Callable()
    assert hits.call(collect, (1, 2), (3,)) == (1, 2, 3)
    assert hits.call(collect, (), ()) == ()
    assert hits.call(owner.method, (1,), (2, 3)) == (owner, 1, 2, 3)
    assert hits.call(functools.partial(collect, 0), (1,), (2,)) == (0, 1, 2)
    assert hits.call(max, (1,), (3, 2)) == 3
    with pytest.raises(ZeroDivisionError):
        hits.call(divmod, (1,), (0,))


def test_a_call_keeps_and_leaves_its_arguments(hits):
    item = Item()
    first, rest = (item,), (item,)
    count = sys.getrefcount(item)
    hits.call(lambda *args: None, first, rest)
    assert sys.getrefcount(item) == count


@in_c
def test_wrong_arguments_are_refused():
    watch = importlib.import_module("tripwire.writes._watch")
    for wrong in [(), ([],), ((), ()), ([], []), ([], (), ())]:
        with pytest.raises(TypeError, match="same_items"):
            watch.same_items(*wrong)
    for wrong in [(), (max,), (max, (), []), (max, [], ())]:
        with pytest.raises(TypeError, match=r"call\(\) takes"):
            watch.call(*wrong)
