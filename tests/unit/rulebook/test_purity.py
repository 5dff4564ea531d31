"""A run that does what compiled code wouldn't repeat is told at its line; no other run is."""

from __future__ import annotations

import abc
import binascii
import cmath
import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import hashlib
import heapq
import io
import itertools
import json
import linecache
import logging
import marshal
import math
import operator
import os
import pathlib
import pprint
import random
import re
import secrets
import select
import socket
import string
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
import typing
import unicodedata
import uuid
import warnings
import weakref
import zlib
from collections.abc import Callable, Sized
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest

from tripwire.env import HAS_MONITORING, is_library_file, is_own_file
from tripwire.rulebook.purity import PURE, PURE_METHODS, find_impurity
from tripwire.rulebook.rules import Refuse, Target
from tripwire.tracing.observe import Observer, observing


class Heard:
    """A listener that notes the impure call, and the user's line at that moment."""

    def __init__(self) -> None:
        self.impure: list[Refuse] = []
        self.line = ""

    def on_start(self, code: CodeType, namespace: dict[str, Any]) -> None:
        pass

    def on_library_start(self, code) -> None:
        pass

    def on_refused(self, refuse: Refuse) -> None:
        raise AssertionError(refuse)

    def on_impure(self, refuse: Refuse) -> None:
        self.impure.append(refuse)
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not is_own_file(file) and not is_library_file(file):
                self.line = linecache.getline(file, frame.f_lineno).strip()
                break
            frame = frame.f_back


def hear(fn: Callable[..., object], *args: object) -> Heard:
    """Run once, and hear what is impure."""
    heard = Heard()
    with observing(heard, watch_calls=True):
        fn(*args)
    assert len(heard.impure) <= 1
    return heard


def slug_of(fn: Callable[..., object], *args: object) -> str | None:
    """The slug of the first impure call of a run."""
    impure = hear(fn, *args).impure
    return impure[0].slug if impure else None


# --- what is impure ----------------------------------------------------------------------------


def log_warning():
    logging.getLogger("test_purity").warning("said")


def log_by_the_root():
    logging.error("said")


def open_socket():
    with socket.socket() as made:
        made.getsockname()


def start_thread():
    thread = threading.Thread(target=len, args=("",))
    thread.start()
    thread.join()


def exit_and_catch():
    with contextlib.suppress(SystemExit):
        sys.exit()


def call_with(fn, args, kwargs):
    return fn(*args, **kwargs)


IMPURE: dict[str, dict[str, Callable[[], object]]] = {
    "prints": {
        "print": lambda: print("said"),
        "sys.stdout.write": lambda: sys.stdout.write("said"),
        "sys.stderr.write": lambda: sys.stderr.write("said"),
        "print in a comprehension": lambda: [print(i) for i in range(2)],
        "print by another name": lambda: call_with(print, ("a",), {"end": ""}),
        "pprint": lambda: pprint.pprint({"a": 1}),
    },
    "logs": {"a logger": log_warning, "the root logger": log_by_the_root},
    "warns": {"warnings.warn": lambda: warnings.warn("said", UserWarning, stacklevel=1)},
    "reads-clock": {
        "time": lambda: time.time(),
        "perf_counter": lambda: time.perf_counter(),
        "sleep": lambda: time.sleep(0),
        "strftime": lambda: time.strftime("%Y"),
        "datetime.now": lambda: datetime.datetime.now(),
        "datetime.now in a zone": lambda: datetime.datetime.now(datetime.UTC),
        "datetime.today": lambda: datetime.datetime.today(),
        "date.today": lambda: datetime.date.today(),
        "now of a subclass": lambda: type("Mine", (datetime.datetime,), {}).now(),
        "the class's method": lambda: (lambda now: now())(datetime.datetime.now),
    },
    "reads-file": {
        "open": lambda: open(os.devnull).close(),
        "StringIO": lambda buffer=io.StringIO("text"): buffer.read(),
        "Path.exists": lambda: pathlib.Path("/").exists(),
        "Path.read_text": lambda: pathlib.Path(__file__).read_text(),
        "Path.iterdir": lambda: list(pathlib.Path("/").iterdir()),
        "os.path.getsize": lambda: os.path.getsize(__file__),
        "os.listdir": lambda: os.listdir("/"),
        "os.stat": lambda: os.stat("/"),
    },
    "reads-socket": {
        "socket": open_socket,
        "gethostname": lambda: socket.gethostname(),
        "select": lambda: select.select([], [], [], 0),
    },
    "python-random": {
        "random": lambda: random.random(),
        "randint": lambda: random.randint(1, 6),
        "shuffle": lambda: random.shuffle([1, 2]),
        "choice": lambda: random.choice([1, 2]),
        "gauss": lambda: random.gauss(0, 1),
        "seed": lambda: random.seed(0),
        "a generator of one's own": lambda own=random.Random(0): own.random(),
        "a generator made inside": lambda: random.Random(0).random(),
        "through map": lambda: list(map(random.expovariate, [1.0])),
        "urandom": lambda: os.urandom(1),
        "SystemRandom": lambda: random.SystemRandom().random(),
        "secrets": lambda: secrets.token_hex(1),
        "uuid4": lambda: uuid.uuid4(),
    },
    "process-state": {
        "getpid": lambda: os.getpid(),
        "getcwd": lambda: os.getcwd(),
        "cpu_count": lambda: os.cpu_count(),
        "get_ident": lambda: threading.get_ident(),
        "thread": start_thread,
        "gc.collect": lambda: gc.collect(0),
        "setrecursionlimit": lambda: sys.setrecursionlimit(sys.getrecursionlimit()),
        "getprofile": lambda: sys.getprofile(),
        "exit": exit_and_catch,
        "system": lambda: os.system("true"),
        "environment": lambda: os.environ.update(TRIPWIRE_TEST="1"),
        "local time zone": lambda: datetime.datetime.fromtimestamp(0),
    },
    "reads-identity": {"id": lambda: id(object()), "ids": lambda: [id(x) for x in "ab"]},
    "unknown-c-function": {
        "marshal": lambda: marshal.dumps(1),
        "memoryview": lambda view=memoryview(b"ab"): view.tobytes(),
    },
}
CASES = [
    pytest.param(slug, fn, id=f"{slug}: {name}")
    for slug, cases in IMPURE.items()
    for name, fn in cases.items()
]


@pytest.mark.parametrize(("slug", "fn"), CASES)
@pytest.mark.filterwarnings("ignore:said")
def test_what_compiled_code_would_not_repeat_is_impure(slug: str, fn: Callable[[], object]) -> None:
    assert slug_of(fn) == slug


@pytest.mark.parametrize(("slug", "fn"), CASES)
@pytest.mark.filterwarnings("ignore:said")
def test_it_is_so_below_other_functions(slug: str, fn: Callable[[], object]) -> None:
    @contextlib.contextmanager
    def entered():
        yield fn()

    def run():
        with entered() as result:
            return functools.reduce(lambda a, b: a, [result])

    assert slug_of(functools.partial(run)) == slug


def test_a_file_that_was_open_is_impure() -> None:
    with Path(__file__).open() as file:
        assert slug_of(lambda: file.read(1)) == "reads-file"
        assert slug_of(lambda: file.buffer.readline()) == "reads-file"


def test_a_process_that_is_started_is_impure() -> None:
    assert slug_of(lambda: subprocess.run(["true"], check=True)) is not None


def test_the_reason_names_the_function_and_the_way_out() -> None:
    (refuse,) = hear(lambda: time.perf_counter()).impure
    assert refuse.reason.startswith("`time.perf_counter` reads the clock")
    assert "outside the traced function" in refuse.reason
    (refuse,) = hear(lambda: os.stat("/")).impure
    assert refuse.reason.startswith("`os.stat` ")
    (refuse,) = hear(lambda: print()).impure
    assert refuse.reason.startswith("`print` ")
    (refuse,) = hear(lambda: marshal.dumps(1)).impure
    assert refuse.reason.startswith("`marshal.dumps` is a C function, and tripwire doesn't know")
    (refuse,) = hear(log_warning).impure
    assert "a logger writes" in refuse.reason


def test_the_line_is_the_users() -> None:
    assert hear(log_warning).line == 'logging.getLogger("test_purity").warning("said")'
    assert hear(exit_and_catch).line == "sys.exit()"


def test_only_the_first_impure_call_is_reported() -> None:
    def run():
        time.time()
        print()
        random.random()

    assert [refuse.slug for refuse in hear(run).impure] == ["reads-clock"]


def build_module(folder: Path, name: str, source: str) -> ModuleType:
    """A module of its own, from a file that can be imported."""
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(source))
    module = ModuleType(name)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module


def test_a_helper_in_another_module_is_no_hiding_place(tmp_path: Path) -> None:
    helper = build_module(
        tmp_path,
        "helper",
        """
        import time

        def stamp(x):
            return x, time.monotonic()
        """,
    )
    heard = hear(lambda: helper.stamp(1))
    assert heard.impure[0].slug == "reads-clock"
    assert heard.line == "return x, time.monotonic()"


def test_an_impure_call_that_raises_is_impure_too() -> None:
    def run():
        with contextlib.suppress(OSError):
            os.stat("/no/such/file")

    assert slug_of(run) == "reads-file"


# --- what is pure ------------------------------------------------------------------------------


@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = 0
    tags: list[str] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def norm(self) -> float:
        return math.hypot(self.x, self.y)


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Flag(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Pair(NamedTuple):
    left: int
    right: int


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    def area(self) -> float:
        return 4.0


@typing.runtime_checkable
class HasArea(typing.Protocol):
    def area(self) -> float: ...


class Table(dict):
    def get(self, key, default=None):
        return super().get(key, default)

    def __missing__(self, key):
        self[key] = value = self.setdefault("made", []) or key
        return value


class Slotted:
    __slots__ = ("value", "__weakref__")

    def __init__(self, value):
        self.value = value


@functools.lru_cache
def double(x):
    return 2 * x


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)
LOCK = threading.Lock()


def use_generators():
    def count():
        received = yield 1
        while received is not None:
            received = yield received + 1

    made = count()
    next(made)
    made.send(2)
    made.close()
    return sum(x for x in range(3)), list(map(str, filter(None, [0, 1])))


def use_strings():
    text = "{:>8} {name!r}".format("a", name="b") + f"{3.14159:.2f}|{'x'!r:>5}"
    return (
        text.upper().split(),
        ",".join(["a", "b"]).partition(",")[2].encode().hex(),
        string.Template("$a").substitute(a=1),
        textwrap.dedent("  a").strip().casefold().isidentifier(),
        "a".translate(str.maketrans("a", "b")),
        unicodedata.normalize("NFC", "é"),
        ascii("é") + repr("a") + chr(ord("a")) + hex(255),
        b"ab".decode() + bytes.fromhex("00").hex() + str(bytearray(b"a").find(b"a")),
    )


def use_containers():
    rows = sorted([Point(2), Point(1)], key=operator.attrgetter("x"), reverse=True)
    rows.sort(key=lambda row: (row.x, -row.y))
    rows.extend(rows[:1])
    rows.pop()
    table = Table(a=1)
    table.get("b")
    table["c"]
    table.update(d=2)
    counted = collections.Counter("aab")
    queue = collections.deque([1, 2], maxlen=2)
    queue.appendleft(0)
    queue.rotate(1)
    ordered = collections.OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    grouped = collections.defaultdict(list)
    grouped["a"].append(1)
    chained = collections.ChainMap({}, {"a": 1})
    heap = [3, 1, 2]
    heapq.heapify(heap)
    heapq.heappush(heap, 0)
    return (
        counted.most_common(1),
        {1, 2} | frozenset([3]),
        {1}.union([2]).intersection({2}),
        dict.fromkeys("ab", 0).items() & {("a", 0)},
        list(zip([1], [2], strict=True)),
        min([1, 2], key=abs),
        any(x for x in (0, 1)),
        chained["a"],
        tuple(reversed(range(3))).index(2),
        slice(1, 2).indices(3),
        types.MappingProxyType({"a": 1}).get("a"),
        types.SimpleNamespace(a=1),
        heapq.nlargest(2, heap),
        [*itertools.chain.from_iterable([[1], [2]]), *itertools.islice(itertools.count(), 2)],
        list(itertools.product("ab", repeat=2)),
        list(itertools.groupby("aab")),
        list(itertools.accumulate([1, 2], operator.add)),
    )


def use_numbers():
    return (
        math.sqrt(2) + math.prod([1, 2]) + cmath.phase(1j) + round(2.5) + divmod(7, 2)[0],
        (255).bit_length() + (1.5).as_integer_ratio()[0] + int.from_bytes(b"a", "big"),
        float.fromhex("0x1p0") + complex(1, 2).conjugate().real + pow(2, 3, 5),
        decimal.Decimal("1.1").quantize(decimal.Decimal("1")),
        fractions.Fraction(1, 3) + 1,
        datetime.datetime(2020, 1, 1) + datetime.timedelta(days=1),
        datetime.date(2020, 1, 1).isoformat(),
        datetime.datetime.fromisoformat("2020-01-01").strftime("%Y"),
        struct.unpack("<i", struct.pack("<i", 1)),
        hashlib.sha256(b"a").hexdigest(),
        zlib.crc32(b"a") + len(zlib.compress(b"a")) + len(binascii.hexlify(b"a")),
    )


def use_patterns():
    found = re.compile(r"(?P<a>\w+)-(\d)").match("ab-1")
    assert found is not None
    return (
        found.group("a"),
        found.groupdict(),
        re.sub(r"\d+", lambda m: m.group(0) * 2, "a1"),
        re.findall("a|b", "ab"),
        re.split(",", "a,b"),
        [m.span() for m in re.finditer("a", "aa")],
    )


def use_classes():
    pair = Pair(1, 2)._replace(left=3)
    made = collections.namedtuple("made", "a b")(1, 2)
    return (
        dataclasses.replace(Point(1), y=2),
        dataclasses.asdict(Point(1, 2, ["a"])),
        dataclasses.fields(Point),
        Point(3, 4).norm,
        pair._asdict(),
        made._fields,
        Color.RED.name,
        Color(2),
        Color["RED"].value,
        list(Color),
        (Flag.A | Flag.B) & Flag.A,
        isinstance(Square(), Shape),
        issubclass(Square, Shape),
        isinstance([], Sized),
        isinstance(Square(), HasArea),
        type("Made", (Slotted,), {"a": 1})(1).value,
        getattr(Square(), "missing", None),
        hasattr(Square, "area"),
        vars(Point(1)),
        callable(Square),
        object.__new__(Square),
        Square.mro(),
        hash((1, "a")),
    )


def use_copies():
    nested = {"a": [1, (2, {3})], "b": Point(1, 2, ["x"])}
    return copy.copy(nested), copy.deepcopy(nested), copy.copy(Point(1)), nested.copy()


def use_functions():
    @functools.wraps(double)
    def wrapped(*args, **kwargs):
        return double(*args, **kwargs)

    @functools.singledispatch
    def show(x):
        return "any"

    show.register(int, lambda x: "int")
    return (
        functools.partial(divmod, 7)(2),
        functools.reduce(operator.mul, [1, 2, 3]),
        wrapped(3),
        double(3),
        show(1),
        sorted([2, 1], key=functools.cmp_to_key(lambda a, b: a - b)),
        operator.itemgetter(0)([1]),
        operator.methodcaller("upper")("a"),
        eval("1 + 1"),
        len(globals()),
    )


def use_contexts():
    @contextlib.contextmanager
    def entered():
        yield 1

    with contextlib.ExitStack() as stack, entered(), contextlib.suppress(KeyError), LOCK:
        stack.enter_context(contextlib.nullcontext())
        stack.callback(len, "")
        raise KeyError
    token = VARIABLE.set(VARIABLE.get() + 1)
    VARIABLE.reset(token)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
    with threading.RLock():
        pass
    try:
        raise ValueError("a") from None
    except ValueError as error:
        return error.args, error.with_traceback(None), sys.exc_info()[0]


def use_json():
    text = json.dumps({"a": [1, 2.5, None, "é"], "b": {"c": True}}, indent=1, sort_keys=True)
    return json.loads(text), json.dumps([1])


def use_typing():
    return (
        typing.get_origin(list[int]),
        typing.get_args(dict[str, int]),
        typing.cast(int, "a"),
        typing.get_type_hints(Point),
        int | None,
        isinstance(1, int | str),
        typing.Callable[[int], str],
        typing.TypeVar("T"),
    )


def use_weak_references():
    made = Slotted(1)
    kept = weakref.WeakKeyDictionary({made: 1})
    return weakref.ref(made)() is made, kept.get(made), weakref.WeakSet([made]), weakref.proxy(made)


def use_disabled_logging():
    logger = logging.getLogger("test_purity.quiet")
    logger.setLevel(logging.ERROR)
    logger.debug("not said %s", 1)
    logger.info("not said")
    logger.warning("not said")
    return logger.isEnabledFor(logging.INFO), logger.getEffectiveLevel()


def use_environment():
    return os.environ.get("HOME"), os.getenv("NOT_SET", "a"), os.path.join("a", "b"), os.sep


def use_paths():
    return pathlib.PurePosixPath("a") / "b", os.path.splitext("a.b"), os.fspath("a")


def use_threads_identity():
    return threading.current_thread(), threading.local()


def use_closures_and_loops():
    total = 0

    def add(x):
        nonlocal total
        total += x

    for index, (key, value) in enumerate({"a": 1}.items()):
        add(index + len(key) + value)
    while total < 10:
        total += 1
    squares = {x: x * x for x in range(3) if x % 2}
    matrix = [[i * j for j in range(2)] for i in range(2)]
    match matrix:
        case [[a, *_], *_] if isinstance(a, int):
            del squares[1]
    return total, squares, matrix


PURE_CODE = [value for name, value in list(globals().items()) if name.startswith("use_")]


@pytest.mark.parametrize("fn", PURE_CODE, ids=lambda fn: fn.__name__)
def test_ordinary_python_is_pure(fn: Callable[[], object]) -> None:
    assert hear(fn).impure == []  # and what it did in the first run is done
    assert hear(fn).impure == []


@pytest.mark.parametrize(
    "fn",
    [lambda: logging.getLogger("test_purity.new"), lambda: threading.current_thread().name],
    ids=["a new logger", "a thread's name"],
)
def test_the_standard_librarys_own_bookkeeping_is_pure(fn: Callable[[], object]) -> None:
    assert slug_of(fn) is None


def test_id_is_pure_in_the_standard_library_only() -> None:
    assert find_impurity(id, library=True) is None
    assert find_impurity(id, library=False) is not None
    assert id not in PURE
    assert slug_of(lambda: copy.deepcopy([[1]])) is None


# --- whose call it is --------------------------------------------------------------------------


def test_a_first_import_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import time\nprint('imported')\nSTARTED = time.time()\n"
    (tmp_path / "imported_inside.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def run():
        import imported_inside

        return imported_inside.STARTED

    assert slug_of(run) is None
    assert "imported_inside" in sys.modules
    del sys.modules["imported_inside"]


def test_what_follows_an_import_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_first.py").write_text("import time\nnow = time.time\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run():
        import imported_first

        return imported_first.now()

    assert slug_of(run) == "reads-clock"
    del sys.modules["imported_first"]


def test_a_run_that_is_part_of_an_import_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    import sys, time
    SLUG = sys.modules["test_purity"].slug_of(lambda: time.time())
    """
    (tmp_path / "runs_inside.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import runs_inside  # type: ignore[import-not-found]

    assert runs_inside.SLUG == "reads-clock"
    del sys.modules["runs_inside"]


def test_nothing_is_reported_while_paused() -> None:
    def run():
        time.time()

    heard = Heard()
    with observing(heard, watch_calls=True) as observer:
        observer.pause()
        run()
        observer.resume()
        assert heard.impure == []
        run()
    assert [refuse.slug for refuse in heard.impure] == ["reads-clock"]


def test_calls_are_watched_on_request_only() -> None:
    heard = Heard()
    with observing(heard):
        time.time()
        random.random()
    assert heard.impure == []


def test_other_threads_are_not_judged() -> None:
    done = threading.Event()
    go = threading.Event()

    def work() -> None:
        go.wait()
        time.time()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def run():
        go.set()
        done.wait()

    assert slug_of(run) is None
    thread.join()


def test_a_listener_may_stop_the_observer_from_inside() -> None:
    class Stops(Heard):
        def on_impure(self, refuse: Refuse) -> None:
            super().on_impure(refuse)
            observer.stop()

    def run():
        for _ in range(3):
            time.time()

    heard = Stops()
    before = sys.getprofile()
    with observing(heard, watch_calls=True) as observer:
        run()
        assert sys.getprofile() is before
    assert len(heard.impure) == 1
    assert slug_of(run) == "reads-clock"


def test_another_profile_function_gets_its_events() -> None:
    events: list[str] = []

    def profile(frame: types.FrameType, event: str, arg: object) -> None:
        events.append(event)

    sys.setprofile(profile)
    try:
        found = slug_of(lambda: time.time())
    finally:
        sys.setprofile(None)
    assert found == "reads-clock"
    assert {"call", "return", "c_call", "c_return"} <= set(events)


@pytest.mark.skipif(not HAS_MONITORING, reason="sys.monitoring is from 3.12 on")
def test_nothing_of_sys_monitoring_stays_behind() -> None:
    def run():
        return len("a")

    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    assert slug_of(run) is None
    assert monitoring.get_tool(4) is None
    monitoring.use_tool_id(4, "test")
    try:
        assert monitoring.get_local_events(4, run.__code__) == 0
        assert monitoring.get_events(4) == 0
    finally:
        monitoring.free_tool_id(4)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1>"])
def test_code_without_a_file_is_the_users(file: str) -> None:
    namespace: dict[str, Any] = {"time": time}
    exec(compile("def run(): return time.time()", file, "exec"), namespace)
    heard = Heard()
    with observing(heard, watch_calls=True) as observer:
        Target(namespace["run"], "run")()  # from a frame of tripwire's
    assert [refuse.slug for refuse in heard.impure] == ["reads-clock"]
    assert "run" in names_of(observer)


# --- which code started ------------------------------------------------------------------------


def names_of(observer: Observer) -> list[str]:
    return [code.co_name for code in observer.codes()]


def test_codes_are_the_users_and_the_librarys_in_order() -> None:
    def first():
        return textwrap.dedent(" a")

    def second():
        first()

    with observing(Heard()) as observer:
        second()
        first()
    names = names_of(observer)
    assert [n for n in names if n in ("first", "second", "dedent")] == ["second", "first", "dedent"]
    assert not any(is_own_file(code.co_filename) for code in observer.codes())


def test_codes_that_start_while_paused_are_missing_until_they_start_again() -> None:
    def user():
        return textwrap.dedent(" a")

    with observing(Heard()) as observer:
        observer.pause()
        user()
        observer.resume()
        assert not {"user", "dedent"} & set(names_of(observer))
        user()
        assert {"user", "dedent"} <= set(names_of(observer))


def test_codes_seen_by_a_profile_function_while_paused_are_missing() -> None:
    sys.setprofile(lambda *event: None)  # so that ours stays in place while paused
    try:
        with observing(Heard()) as observer:
            observer.pause()
            textwrap.dedent(" a")
            observer.resume()
    finally:
        sys.setprofile(None)
    assert "dedent" not in names_of(observer)


def test_a_generator_made_before_the_run_is_seen_when_it_goes_on() -> None:
    def clock():
        while True:
            yield time.time()

    made = clock()
    next(made)
    assert slug_of(lambda: next(made)) == "reads-clock"


# --- verdicts ----------------------------------------------------------------------------------


def test_a_bound_method_is_judged_by_the_class_that_defines_it() -> None:
    class Mine(random.Random):
        def getrandbits(self, k):
            return super().getrandbits(k)

    found = find_impurity(super(Mine, Mine(0)).getrandbits, library=False)
    assert found is not None
    assert found.slug == "python-random"
    assert find_impurity(Table().get, library=False) is None
    assert find_impurity(super(Table, Table()).get, library=False) is None
    assert find_impurity(Table.fromkeys, library=False) is None


def test_python_functions_and_classes_are_not_judged() -> None:
    for callee in (double, Square, Square().area, lambda: 0, random.Random, Square(), Color, Table):
        assert find_impurity(callee, library=False) is None


def test_classes_and_descriptors_of_c_have_the_verdict_of_their_methods() -> None:
    for callee in (dict, list.append, dict.get, {}.__len__, object.__init__, datetime.datetime):
        assert find_impurity(callee, library=False) is None
    for callee, slug in {
        io.FileIO: "reads-file",
        io.TextIOWrapper.write: "reads-file",
        socket.socket.recv: "reads-socket",
        random.Random.random: "python-random",
        functools.partial(time.time): "reads-clock",
        types.MethodType(print, 1): "prints",
        type("Mine", (), {"__call__": time.time})(): "reads-clock",
    }.items():
        found = find_impurity(callee, library=False)
        assert found is not None
        assert found.slug == slug


def test_the_tables_hold_nothing_of_the_users() -> None:
    class Mine(dict):
        pass

    def run(kind):
        kind().get(1)
        kind.fromkeys([1])
        return kind(a=1).items()

    assert slug_of(run, Mine) is None
    gone = weakref.ref(Mine)
    del Mine
    gc.collect()
    assert gone() is None
    assert (dict, "get") in PURE_METHODS or HAS_MONITORING


# --- NumPy -------------------------------------------------------------------------------------


def test_numpys_generator_is_impure() -> None:
    np = pytest.importorskip("numpy")
    rand = np.random.rand

    def draw():
        noise = np.random.rand(2)
        return sum(noise)

    def draw_by_name():
        return rand(2)

    def draw_without_a_name():
        return list(map(getattr(sys.modules["numpy.random"], "rand"), [1]))

    def seed():
        np.random.seed(0)

    assert slug_of(lambda: np.random.rand(2)) == "numpy-random"
    assert slug_of(draw) == slug_of(draw_by_name) == slug_of(seed) == "numpy-random"
    assert slug_of(draw_without_a_name) == "numpy-random"
    assert slug_of(np.random.rand) == "numpy-random"


def test_numpys_callables_have_a_verdict_of_their_own() -> None:
    np = pytest.importorskip("numpy")
    for callee in (np.random.rand, np.random.seed, np.random.default_rng(0).normal):
        found = find_impurity(callee, library=False)
        assert found is not None
        assert found.slug == "numpy-random"
    for callee in (np.sum, np.add, np.zeros, np.add.reduce, np.float32, np.ndarray, np.dtype):
        assert find_impurity(callee, library=False) is None


def test_the_line_of_a_numpy_draw_is_the_users(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    helper = build_module(
        tmp_path,
        "draws",
        """
        import numpy as np

        def draw(x):
            x = x + 1
            noise = x + len(np.random.rand(2))
            x = abs(x)
            return noise + x
        """,
    )
    heard = hear(helper.draw, 1)
    assert heard.impure[0].slug == "numpy-random"
    assert heard.line == "noise = x + len(np.random.rand(2))"


def test_numpy_outside_its_generator_is_pure() -> None:
    np = pytest.importorskip("numpy")

    def run():
        a = np.arange(6.0).reshape(2, 3)
        b = np.concatenate([a, np.zeros((2, 3))]).astype("float32")
        with np.errstate(all="ignore"):
            c = np.where(b > 1, np.sin(b), b.sum(axis=0, keepdims=True))
        return c.tolist(), np.linalg.norm(a), a.T.copy().max(), np.dtype("int8").newbyteorder()

    assert slug_of(run) is None
    assert slug_of(lambda: np.array(["a"]).tofile(os.devnull)) == "reads-file"


# --- torch -------------------------------------------------------------------------------------


def test_torchs_functions_are_left_to_the_recorder_unless_they_set_flags_or_ask_for_modes() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.GELU())

    def run():
        with torch.no_grad(), torch.autocast("cpu"):
            x = layer(torch.randn(3, 2)).relu_()
        return torch.nn.functional.layer_norm(x.float(), (2,)).sum().item(), x.shape, x.tolist()

    assert slug_of(run) is None
    for owner in (torch, torch.Tensor, torch.nn.functional, torch._C, torch._C._nn, torch.ops.aten):
        for name, value in vars(owner).items():
            belongs = getattr(value, "__module__", None) or "torch"
            if callable(value) and belongs.startswith("torch"):
                found = find_impurity(value, library=False)
                told = found is None or found.slug == "torch-state-changed"
                assert told or (found.slug == "process-state" and "function" in name), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_transformer_is_pure_throughout() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert hear(lambda: model(input_ids=tokens)).impure == []
        assert hear(lambda: model(input_ids=tokens, use_cache=False)).impure == []
