"""What code reads of a function without calling it: cells, code, defaults, texts, attributes."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

_WORLD = """
import inspect, operator

def make(scale=1.0):
    def fn(a=1, *, k=2):
        "A text."
        return scale

    def put(value):
        nonlocal scale
        scale = value

    return fn, put

fn, put = make()

def other(a, b=1, c=2, *, k=5, z=6):
    "Another."
    return a

def few(a):
    return a

class C:
    def method(self, a=1):
        return a

    @property
    def prop(self):
        return 1

    @staticmethod
    def static(a=1):
        return a

    @classmethod
    def of_class(cls, a=1):
        return a

    @functools.cached_property
    def cached(self):
        return 3

o = C()
o.fn = fn
lists = make([1.0, 2.0])[0]
inner = make(fn)[0]
held = {"fn": fn}
short = lambda q=1: q
part = functools.partial(other, 1, k=2)

class S:
    __slots__ = ("p", "q")

s = S()
s.p, s.q = 1, 2

@functools.wraps(fn)
def wrapped(*args, **kwargs):
    return fn(*args, **kwargs)

@functools.lru_cache
def memo(a=1):
    return a
"""

CELLS = {
    "by name": ("fn.__closure__[0].cell_contents", "put(4.0)"),
    "through an object": ("o.fn.__closure__[0].cell_contents", "put(4.0)"),
    "through a dict": ("held['fn'].__closure__[0].cell_contents", "put(4.0)"),
    "in a loop": ("[cell.cell_contents for cell in fn.__closure__]", "put(4.0)"),
    "by getattr": ("getattr(fn, '__clo' + 'sure__')[0].cell_contents", "put(4.0)"),
    "by attrgetter": ("operator.attrgetter('__closure__')(fn)[0].cell_contents", "put(4.0)"),
    "by inspect": ("inspect.getclosurevars(fn).nonlocals['scale']", "put(4.0)"),
    "a tensor": ("fn.__closure__[0].cell_contents * 1", "put(T(4))", "put(T(5))", "put(7.0)"),
    "a list": ("lists.__closure__[0].cell_contents[1]", "lists()[1] = 5.0", "lists().clear()"),
    "a function's": ("inner.__closure__[0].cell_contents.__closure__[0].cell_contents", "put(4.0)"),
    "behind a wrapper": (
        "wrapped.__wrapped__.__closure__[0].cell_contents",
        *("put(4.0)", "wrapped.__wrapped__ = make(9.0)[0]"),
    ),
    "behind a partial": ("functools.partial(fn).func.__closure__[0].cell_contents", "put(4.0)"),
    "written by the run": (
        "setattr(fn.__closure__[0], 'cell_contents', fn.__closure__[0].cell_contents + 1)",
        *("put(4.0)", "see(fn())"),
    ),
}
CODE = {
    "counts and names": (
        "other.__code__.co_argcount, other.__code__.co_name, other.__code__.co_varnames",
        "other.__code__ = few.__code__",
    ),
    "a line": ("other.__code__.co_firstlineno", "other.__code__ = few.__code__"),
    "a lambda's": ("short.__code__.co_argcount", "short.__code__ = other.__code__"),
    "a method's": ("o.method.__code__.co_varnames", "C.method.__code__ = other.__code__"),
    "a class's": ("C.method.__code__.co_consts", "C.method.__code__ = other.__code__"),
    "a property's": ("C.prop.fget.__code__.co_name", "C.prop.fget.__code__ = few.__code__"),
    "a memo's": ("memo.__wrapped__.__code__.co_name", "memo.__wrapped__.__code__ = few.__code__"),
    "a partial's": ("part.func.__code__.co_name", "other.__code__ = few.__code__"),
    "in a loop": ("[f.__code__.co_name for f in (other, short)]", "short.__code__ = few.__code__"),
    "by getattr": ("getattr(other, '__co' + 'de__').co_name", "other.__code__ = few.__code__"),
    "in a condition": (
        "other.__code__.co_argcount > 2",
        "other.__code__ = few.__code__",
    ),
    "itself": ("other.__code__ is few.__code__", "other.__code__ = few.__code__"),
    "by inspect": (
        "inspect.isgeneratorfunction(other)",
        "other.__code__ = (lambda a: (yield)).__code__",
    ),
}
RENAMED = {
    "called": "fn()",
    "looked into": "fn.__closure__[0].cell_contents",
    "with names": "dict(zip(fn.__code__.co_freevars, [c.cell_contents for c in fn.__closure__]))",
    "through an object": "o.fn() + 1",
    "behind a wrapper": "wrapped()",
}
TEXTS = {
    "repr": ("repr(other).split()[1]", "other.__qualname__ = 'q'"),
    "in a text": ("f'{other}'.split()[1]", "other.__qualname__ = 'q'"),
    "a method's": ("str(o.method).split()[2]", "C.method.__qualname__ = 'q'"),
    "a class's": ("repr(C).split('.')[-1]", "C.__qualname__ = 'q'"),
    "an object's": ("repr(o).split()[0].split('.')[-1]", "C.__qualname__ = 'q'"),
    "in a list": ("str([other]).split()[1]", "other.__qualname__ = 'q'"),
}
SLOTS = {
    "a slot": ("S.p.__get__(s)", "s.p = 4"),
    "in the class's dict": ("S.__dict__['q'].__get__(s)", "s.q = 4", "S.q = S.p"),
    "with a class": ("S.p.__get__(s, S)", "s.p = 4"),
    "of type": ("type(S.p).__get__(S.p, s)", "s.p = 4"),
    "a property": ("C.prop.__get__(o)", "C.prop = property(lambda self: 5)"),
    "a function": ("C.method.__get__(o)()", "C.method.__defaults__ = (4,)"),
}
DEFAULTS = {
    "by position": ("str(fn.__defaults__)", "fn.__defaults__ = (7,)", "fn.__defaults__ = None"),
    "by keyword": (
        "(fn.__kwdefaults__ or {}).get('k')",
        *("fn.__kwdefaults__ = {'k': 9}", "fn.__kwdefaults__['k'] = 4", "fn.__kwdefaults__ = None"),
    ),
    "by getattr": ("str(getattr(fn, '__def' + 'aults__'))", "fn.__defaults__ = (7,)"),
    "a method's": ("o.method.__func__.__defaults__", "C.method.__defaults__ = (4,)"),
    "a static method's": ("C.static.__defaults__", "C.static.__defaults__ = (4,)"),
    "a partial's": ("part.func.__defaults__", "other.__defaults__ = (4, 5)"),
    "a cached property's": (
        "C.cached.func.__defaults__",
        *("C.cached.func = other", "other.__defaults__ = (5, 6)"),
    ),
    "a signature": (
        "str(inspect.signature(fn))",
        *(
            "fn.__defaults__ = (7,)",
            "fn.__kwdefaults__ = {'k': 9}",
            "fn.__annotations__['a'] = 1",
        ),
        *("fn.__signature__ = inspect.signature(other)", "del fn.__signature__"),
        "fn.__wrapped__ = other",
    ),
    "a method's signature": ("str(inspect.signature(o.method))", "C.method.__defaults__ = (7,)"),
    "a partial's signature": (
        "str(inspect.signature(part))",
        *("other.__kwdefaults__ = {'k': 1, 'z': 7}", "part.keywords['z'] = 8"),
    ),
    "a text": ("str(inspect.getdoc(other))", "other.__doc__ = 'q'"),
}
ATTRIBUTES = {
    "how many": ("len(other.__dict__)", "other.__dict__ = {'n': 1}", "other.m = 2"),
    "all": ("dict(vars(other))", "other.__dict__ = {'n': 1}", "other.__dict__ = {}"),
    "one that isn't there": ("getattr(other, 'n', 0)", "other.__dict__ = {'n': 1}", "other.n = 3"),
    "whether it is there": ("hasattr(other, 'n')", "other.__dict__ = {'n': 1}"),
    "through an object": ("getattr(o.fn, 'n', 5)", "fn.__dict__ = {'n': 1}", "fn.n = 2"),
    "a method's": ("getattr(o.method, 'n', 0)", "C.method.__dict__ = {'n': 7}"),
    "in a dict": ("'n' in other.__dict__", "other.__dict__ = {'n': 1}"),
    "a lambda's": ("sorted(short.__dict__)", "short.__dict__ = {'n': 1}"),
    "a partial's": ("len(part.__dict__)", "part.n = 2", "part.__dict__ = {'n': 1, 'z': 2}"),
    "a memo's": ("len(memo.__dict__)", "memo.n = 2", "memo.__dict__ = {'n': 1, 'z': 2}"),
}


def _check(read: str, writes: tuple[str, ...], backend: str, folder) -> tripwire.Explanation:
    return check_twins(
        _WORLD
        + f"""
def call(x):
    return x * 2, {read}

def go(f, see):
    for write in ("", "", *{writes!r}, "", ""):
        exec(write, globals(), {{"see": see}})
        try:
            see(f(T()))
        except IndexError as error:
            see(str(error))
""",
        backend,
        folder,
        hits=1,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_counts_as_read_where_code_looks_into_it(name, backend, tmp_path) -> None:
    read, *writes = CELLS[name]
    _check(read, tuple(writes), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CODE)
def test_who_reads_a_field_of_a_functions_code_sees_other_code(name, backend, tmp_path) -> None:
    read, *writes = CODE[name]
    _check(read, tuple(writes), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DEFAULTS)
def test_who_reads_defaults_and_signatures_sees_others(name, backend, tmp_path) -> None:
    read, *writes = DEFAULTS[name]
    _check(read, tuple(writes), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_who_reads_attributes_of_a_function_sees_another_dict(name, backend, tmp_path) -> None:
    read, *writes = ATTRIBUTES[name]
    _check(read, tuple(writes), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RENAMED)
def test_a_function_may_get_code_that_names_its_cells_otherwise(name, backend, tmp_path) -> None:
    renamed = "fn.__code__ = fn.__code__.replace(co_freevars=('other',))"
    _check(RENAMED[name], ("put(3.0)", renamed, "put(5.0)"), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TEXTS)
def test_who_shows_a_function_or_an_object_sees_another_name(name, backend, tmp_path) -> None:
    read, *writes = TEXTS[name]
    _check(read, tuple(writes), backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SLOTS)
def test_who_asks_a_descriptor_itself_reads_the_object(name, backend, tmp_path) -> None:
    read, *writes = SLOTS[name]
    _check(read, tuple(writes), backend, tmp_path)


def test_defaults_of_a_function_that_nobody_looks_into_may_change(tmp_path) -> None:
    explained = check_twins(
        """
def unused(a=1):
    return a

table = {"unused": unused}

def call(x):
    return x * len(table), table["unused"] is None

def go(f, see):
    for default in (1, 1, 2, 3, 4):
        unused.__defaults__ = (default,)
        see(f(T()))
""",
        "eager",
        tmp_path,
    )
    assert explained.hits == 4
