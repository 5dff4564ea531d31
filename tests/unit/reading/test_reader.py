"""The reader: what is told of attribute reads, and what it leaves behind."""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
import weakref

import pytest
import torch

from tripwire.env import OWN_FOLDER
from tripwire.reading.reader import Twin

_reader = pytest.importorskip("tripwire.reading._reader")


class Point:
    kind = "point"

    def __init__(self) -> None:
        self.x, self.items = 1, [1]

    @property
    def double(self) -> list[int]:
        return self.items * 2

    def method(self) -> int:
        return self.x


class Reading:
    """A reader at work, with what it told."""

    def __init__(
        self, *objects, accessors=(), tables=frozenset(), watched=(), waiting=(), on_read=None
    ) -> None:
        self.told: list[tuple[object, str, object]] = []
        self.named: list[str] = []
        self.reader = _reader.Reader(
            on_read or (lambda *read: self.told.append(read)),
            OWN_FOLDER,
            (),
            accessors,
            tables,
            self.named.append,
            dict.fromkeys(waiting),
        )
        for item in objects:
            self.reader.meet(item)
        for cls in watched:
            self.reader.watch(cls)

    def __enter__(self) -> Reading:
        self.reader.start()
        return self

    def __exit__(self, *_) -> None:
        self.reader.stop()

    def names_of(self, item) -> set[str]:
        return set(self.reader.names_of(item))


def test_every_name_is_noted_and_what_is_no_plain_value_is_told() -> None:
    point = Point()
    with Reading(point) as reading:
        for _ in range(3):
            assert point.x == 1
            assert point.items == [1]
    assert reading.names_of(point) == {"x", "items"}
    assert reading.told == [(point, "items", point.items)]


def test_absences_are_noted() -> None:
    point = Point()
    with Reading(point) as reading:
        assert not hasattr(point, "weight")
        assert getattr(point, "bias", 3) == 3
        with pytest.raises(AttributeError):
            point.height  # noqa: B018
    assert reading.names_of(point) == {"weight", "bias", "height"}


def test_class_attributes_methods_and_properties_are_noted() -> None:
    point = Point()
    with Reading(point) as reading:
        assert (point.kind, point.method(), point.double) == ("point", 1, [1, 1])
    assert reading.names_of(point) == {"kind", "method", "x", "double", "items"}


def test_computed_names_are_noted_once() -> None:
    point = Point()
    with Reading(point) as reading:
        for _ in range(100):
            getattr(point, "".join(["i", "tems"]))
    assert reading.names_of(point) == {"items"}
    assert len(reading.told) == 1


def test_an_object_that_was_not_met_is_not_noted() -> None:
    point, other = Point(), Point()
    with Reading(point) as reading:
        assert other.x == 1
    assert reading.names_of(other) == set()
    assert reading.names_of(point) == set()


def test_an_object_that_is_met_while_reading_is_noted_from_then_on() -> None:
    class Holder:
        def __init__(self) -> None:
            self.point = Point()

    holder = Holder()
    reading = Reading(holder, on_read=lambda owner, name, value: reading.reader.meet(value))
    with reading:
        assert holder.point.x == 1
    assert reading.names_of(holder.point) == {"x"}


def test_slots_are_noted() -> None:
    class Slotted:
        __slots__ = ("empty", "x")

    item = Slotted()
    item.x = 2
    with Reading(item) as reading:
        assert (item.x, hasattr(item, "empty")) == (2, False)
    assert reading.names_of(item) == {"x", "empty"}


def test_specialised_code_lets_go_and_comes_back() -> None:
    point = Point()

    def read() -> int:
        return point.x + point.x

    for _ in range(100):
        read()
    with Reading(point) as reading:
        read()
    assert reading.names_of(point) == {"x"}
    assert [read() for _ in range(100)] == [2] * 100


def test_a_class_that_answers_itself_stays_noted() -> None:
    """CPython replaces the slot of a class with `__getattribute__` alone at its first lookup."""

    class Answers:
        def __init__(self) -> None:
            self.x = 1

        def __getattribute__(self, name: str) -> object:
            return object.__getattribute__(self, name)

    item = Answers()
    with Reading(item) as reading:
        assert (item.x, item.x) == (1, 1)
        assert not hasattr(item, "y")
    assert reading.names_of(item) == {"x", "y"}
    assert not reading.reader.has_lost_sight


def test_a_class_whose_lookup_is_changed_is_lost_from_sight() -> None:
    class Changed:
        pass

    item = Changed()
    with Reading(item) as reading:
        Changed.__getattr__ = lambda self, name: 7
        assert item.x == 7
    assert reading.reader.has_lost_sight
    assert item.y == 7


def test_a_class_made_while_reading_is_as_others() -> None:
    point = Point()
    with Reading(point):

        class Below(Point):
            pass

        assert Below().x == 1
    below = Below()
    below.x = 5
    assert [below.x for _ in range(50)] == [5] * 50
    assert _reader.count_hooked() == 0


def test_nothing_is_hooked_afterwards_whatever_happens() -> None:
    point = Point()
    with pytest.raises(ZeroDivisionError), Reading(point):
        assert _reader.count_hooked() == 1
        1 / 0  # noqa: B018
    assert _reader.count_hooked() == 0


def test_a_reader_that_is_dropped_lets_go() -> None:
    reading = Reading(Point())
    reading.reader.start()
    del reading
    gc.collect()
    assert _reader.count_hooked() == 0


def test_classes_die_after_the_run() -> None:
    class Short:
        pass

    item = Short()
    with Reading(item) as reading:
        assert not hasattr(item, "x")
    reading.reader.close()
    gone = weakref.ref(Short)
    del Short, item, reading
    gc.collect()
    assert gone() is None


def test_other_threads_are_not_noted() -> None:
    point = Point()
    with Reading(point) as reading:
        thread = threading.Thread(target=lambda: [point.x, point.items])
        thread.start()
        thread.join()
    assert reading.names_of(point) == set()


def test_two_threads_read_at_once_each_for_itself() -> None:
    points = [Point(), Point()]
    both = threading.Barrier(2)
    found: dict[int, set[str]] = {}

    def run(index: int) -> None:
        with Reading(*points) as reading:
            both.wait()
            for _ in range(1000):
                getattr(points[index], ("x", "items")[index])
            both.wait()
        found[index] = reading.names_of(points[index]) | reading.names_of(points[1 - index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: {"x"}, 1: {"items"}}
    assert _reader.count_hooked() == 0


def test_an_error_in_telling_comes_out_and_nothing_stays_hooked() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    point = Point()
    with Reading(point, on_read=fail), pytest.raises(RuntimeError, match="broken"):
        point.items  # noqa: B018
    assert point.items == [1]
    assert _reader.count_hooked() == 0


def test_the_first_plain_value_is_kept() -> None:
    point = Point()
    with Reading(point) as reading:
        assert point.x == 1
        point.x = 2.5
        assert point.x == 2.5
        assert point.items
    assert reading.reader.first_of(point, "x", None) == 1
    assert reading.reader.first_of(point, "items", None) is None
    assert reading.reader.first_of(point, "never", None) is None


def test_accessors_look_for_one_name_and_others_take_all() -> None:
    def access(item: Point) -> object:
        return item.__dict__["x"]

    point, other = Point(), Point()
    with Reading(point, other, accessors=(access.__code__,)) as reading:
        access(point)
        vars(other)
    assert reading.names_of(point) == set()
    assert reading.names_of(other) == {"__dict__"}


def test_an_empty_table_is_noted_and_not_told() -> None:
    point = Point()
    point.hooks = {}
    with Reading(point, tables=frozenset({"hooks"})) as reading:
        assert point.hooks == {}
    assert reading.names_of(point) == {"hooks"}
    assert reading.told == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_keeps_no_reader_of_another_thread() -> None:
    point = Point()
    started, done = threading.Event(), threading.Event()

    def run() -> None:
        with Reading(point):
            started.set()
            done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    child = os.fork()
    if child == 0:
        os._exit(_reader.count_hooked())
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_twin_takes_for_read_what_the_names_in_the_code_could_read() -> None:
    told = []
    point = Point()
    twin = Twin(lambda *read: told.append(read))
    twin.meet(point)
    twin.see_names(frozenset({"items", "weight"}))
    assert told == [(point, "items", point.items)]
    assert twin.names_of(point) == {"items", "weight"}
    other = Point()
    twin.meet(other)
    assert told[1:] == [(other, "items", other.items)]


# --- classes that are watched ---


class Below(Point):
    extra = 1

    def method(self) -> int:
        return super().method()

    def fail(self) -> None:
        raise ValueError

    broken = property(fail)


class Meta(type):
    of_meta = 1


class WithMeta(metaclass=Meta):
    own = 2


def _ask_broken() -> None:
    with pytest.raises(ValueError):
        Below().broken  # noqa: B018


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda: Below().extra, "extra"),  # of an object that the run made
        (lambda: Below.kind, "kind"),
        (lambda: WithMeta.own, "own"),
        (lambda: WithMeta.of_meta, "of_meta"),
        pytest.param(
            lambda: super(Below, Below()).double,
            "double",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12),
                reason="LOAD_SUPER_ATTR passes super's own lookup by: code that names it counts",
            ),
        ),
        (lambda: hasattr(Below, "absent"), "absent"),
        (lambda: getattr(Below, "".join(["ki", "nd"])), "kind"),
        (lambda: operator.attrgetter("kind")(Below), "kind"),
        (_ask_broken, "broken"),
    ],
)
def test_a_watched_class_tells_whatever_it_was_asked_for(ask, name) -> None:
    for _ in range(100):  # bytecode specialises
        ask()
    with Reading(watched=[Below, WithMeta]) as reading:
        ask()
    assert name in reading.reader.names_looked_up
    for _ in range(100):
        ask()


def test_a_name_that_nobody_asks_for_is_not_looked_up() -> None:
    with Reading(watched=[Point]) as reading:
        if not Point().x:
            Point().method()
    assert "x" in reading.reader.names_looked_up
    assert "method" not in reading.reader.names_looked_up


def test_a_name_that_waits_is_told_once_before_the_first_lookup() -> None:
    with Reading(watched=[Point], waiting=["kind"]) as reading:
        assert (Point().x, reading.named) == (1, [])
        assert [Point.kind, Point().kind] == ["point"] * 2
    assert reading.named == ["kind"]


def test_metaclasses_whose_lookup_is_in_c_are_read_as_before() -> None:
    """pybind11's calls the slot of `type`, which is hooked, for its own classes."""
    kind = type(torch._C.Graph)
    assert kind is not type
    with Reading(watched=[Point, kind, torch._C.Graph]) as reading:
        assert torch._C.Graph.nodes
    assert "nodes" in reading.reader.names_looked_up


def test_type_and_super_are_as_before_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), Reading(watched=[Below]):

        class Late(Meta):
            pass

        made = Late("made", (), {"a": 1})
        1 / 0  # noqa: B018
    assert _reader.count_hooked() == 0
    assert [made.a for _ in range(50)] == [1] * 50
    assert [Below().method() for _ in range(50)] == [1] * 50


def test_watched_classes_die_after_the_run() -> None:
    class Short:
        pass

    with Reading(watched=[Short]) as reading:
        assert not hasattr(Short, "x")
    reading.reader.close()
    gone = weakref.ref(Short)
    del Short
    gc.collect()
    assert gone() is None
