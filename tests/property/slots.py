"""Slots: a place in the world that a program reads, and what it holds.

Places and contents are two tables; every place can hold every content. Texts in them have
blanks: `%n` is the slot's number, `%v` a value, `%r` the slot as the program reads it, `%o` the
same as seen from outside. Beside each stand the writes that can happen to it between calls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Somewhere that a value can be."""

    name: str
    read: str
    setup: str = ""
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # moves, copies, deaths, and writes beside what is read
    scope: str = ""  # where the read is valid: anywhere, or in `call` alone, of one form
    outside: str = ""  # as steps see it, where that differs
    only: tuple[str, ...] = ()  # contents; empty: any

    @property
    def path(self) -> str:
        """The slot as steps see it."""
        return self.outside or self.read


@dataclass(frozen=True)
class Content:
    """Something that a place can hold."""

    name: str
    values: tuple[str, ...]
    uses: tuple[str, ...]  # statements that make another `t` of `t`
    changes: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()  # statements that write to it


@dataclass(frozen=True)
class Slot:
    """A place that holds something."""

    number: int
    place: Place
    content: Content

    def fill(self, text: str, value: str = "") -> str:
        """A text without blanks."""
        text = text.replace("%v", value).replace("%r", self.place.read)
        return text.replace("%o", self.place.path).replace("%n", str(self.number))


_PLAIN = ("number", "likeness", "maybe", "text", "tuple")

_COPIES = (
    "o%n = copy.copy(o%n)",
    "o%n = copy.deepcopy(o%n)",
    "o%n = pickle.loads(pickle.dumps(o%n))",
    "w%n = weakref.ref(o%n); o%n = copy.copy(o%n); gc.collect()",
    "kept%n, o%n = o%n, copy.copy(o%n)",
    "o%n.beside = 1.0",
)

# A package and a module in it, which functions import while they run.
_PACKAGE = """
import sys
p%n, m%n = types.ModuleType('laws%n'), types.ModuleType('laws%n.sub')
p%n.__path__, p%n.sub = [], m%n
sys.modules.update({'laws%n': p%n, 'laws%n.sub': m%n})
modes.callback(sys.modules.pop, 'laws%n', None)
modes.callback(sys.modules.pop, 'laws%n.sub', None)
"""
_NEW_MODULE = "m%n = types.ModuleType('laws%n.sub'); m%n.a = %v; sys.modules['laws%n.sub'] = m%n"

PLACES = (
    Place(
        "imported inside",
        "f%n()",
        _PACKAGE + "m%n.a = %v\ndef f%n():\n    from laws%n.sub import a\n    return a",
        ("m%n.a = %v", "vars(m%n).update(a=%v)", _NEW_MODULE),
        ("del m%n.a", "sys.modules.pop('laws%n.sub', None)"),
        ("m%n.beside = 1", "p%n.beside = 1"),
    ),
    Place(
        "package around an import",
        "f%n()",
        _PACKAGE + "p%n.a = %v\ndef f%n():\n    import laws%n.sub\n    return laws%n.a",
        ("p%n.a = %v",),
        ("del p%n.a",),
        ("m%n.beside = 1", "p%n.beside = 1"),
    ),
    Place(
        "relative import",
        "f%n()",
        _PACKAGE + "m%n.a = %v\n__package__ = 'laws%n'\n"
        "def f%n():\n    from .sub import a\n    return a",
        ("m%n.a = %v", _NEW_MODULE),
        ("del m%n.a",),
        ("m%n.beside = 1",),
    ),
    Place(
        "global",
        "g%n",
        "g%n = %v",
        ("g%n = %v", "globals()['g%n'] = %v"),
        ("del g%n",),
        ("beside%n = 1", "g%n = copy.copy(g%n)", "g%n = pickle.loads(pickle.dumps(g%n))"),
    ),
    Place(
        "builtin",
        "law%n",
        "builtins.law%n = %v\nmodes.callback(vars(builtins).pop, 'law%n', None)",
        ("builtins.law%n = %v", "law%n = %v"),
        ("del law%n", "del builtins.law%n"),
    ),
    Place(
        "attribute",
        "o%n.a",
        "class C%n: pass\no%n = C%n()\no%n.a = %v",
        (
            "o%n.a = %v",
            "o%n.__dict__['a'] = %v",
            "object.__setattr__(o%n, 'a', %v)",
            "vars(o%n).update(a=%v)",
            "o%n.__dict__ = {'a': %v}",
            "C%n.a = %v",
            "C%n.a = property(lambda self: %v)",
        ),
        ("del o%n.a", "o%n.__dict__.clear()", "vars(o%n).pop('a', None)"),
        _COPIES,
    ),
    Place(
        "attribute of a copy",
        "copy.copy(o%n).a",
        "class C%n: pass\no%n = C%n()\no%n.a = %v",
        ("o%n.a = %v", "o%n.__dict__['a'] = %v", "o%n.__dict__ = {'a': %v}", "C%n.a = %v"),
        ("del o%n.a", "o%n.__dict__.clear()"),
        _COPIES,
    ),
    Place(
        "attribute of an object's state",
        "o%n.__getstate__()['a']",
        "class C%n: pass\no%n = C%n()\no%n.a = %v",
        ("o%n.a = %v", "vars(o%n).update(a=%v)", "C%n.__getstate__ = lambda self: {'a': %v}"),
        ("del o%n.a",),
        _COPIES,
    ),
    Place(
        "number that an object gives",
        "float(o%n)",
        "class C%n:\n    def __float__(self): return self.h\no%n = C%n()\no%n.h = %v",
        ("o%n.h = %v", "C%n.__float__ = lambda self: %v"),
        ("del o%n.h",),
        _COPIES,
        only=_PLAIN,
    ),
    Place(
        "deep attribute",
        "o%n.a.b.c",
        "class C%n: pass\no%n = C%n()\no%n.a = C%n()\no%n.a.b = C%n()\no%n.a.b.c = %v",
        (
            "o%n.a.b.c = %v",
            "o%n.a.b = types.SimpleNamespace(c=%v)",
            "o%n.a = copy.deepcopy(o%n.a); o%n.a.b.c = %v",
        ),
        ("del o%n.a.b.c", "o%n.a = None"),
        (*_COPIES, "o%n.a.b = copy.copy(o%n.a.b)"),
    ),
    Place(
        "class attribute, inherited",
        "o%n.k",
        "class B%n: k = %v\nclass C%n(B%n): pass\no%n = C%n()",
        (
            "B%n.k = %v",
            "C%n.k = %v",
            "o%n.k = %v",
            "C%n.__bases__ = (type('X%n', (B%n,), {'k': %v}),)",
            "o%n.__class__ = type('Y%n', (C%n,), {'k': %v})",
            "C%n.k = property(lambda self: %v)",
        ),
        ("del C%n.k", "del o%n.k", "del B%n.k"),
        (*_COPIES, "C%n.beside = 1"),
    ),
    Place(
        "base class",
        "o%n.k",
        "class A%n: k = %v\nclass B%n(A%n): pass\nclass C%n(B%n): pass\no%n = C%n()",
        (
            "B%n.__bases__ = (type('X%n', (A%n,), {'k': %v}),)",
            "C%n.__bases__ = (type('Y%n', (B%n,), {'k': %v}),)",
            "A%n.k = %v",
        ),
        ("del A%n.k",),
        ("o%n = C%n()", "o%n = type('Z%n', (C%n,), {})()"),
    ),
    Place(
        "class attribute",
        "C%n.k",
        "class C%n: k = %v",
        ("C%n.k = %v", "type.__setattr__(C%n, 'k', %v)", "C%n = type('C%n', (), {'k': %v})"),
        ("del C%n.k",),
        ("C%n.beside = 1",),
    ),
    Place(
        "class dict",
        "C%n.__dict__['k']",
        "class C%n: k = %v",
        ("C%n.k = %v", "type.__setattr__(C%n, 'k', %v)", "C%n = type('C%n', (), {'k': %v})"),
        ("del C%n.k",),
        ("C%n.beside = 1",),
    ),
    Place(
        "behind a property",
        "o%n.__dict__['p']",
        "class C%n:\n    p = property(lambda self: 9.0)\no%n = C%n()\no%n.__dict__['p'] = %v",
        ("o%n.__dict__['p'] = %v", "vars(o%n).update(p=%v)", "C%n.p = property(lambda self: %v)"),
        ("del o%n.__dict__['p']", "del C%n.p"),
        _COPIES,
    ),
    Place(
        "metaclass",
        "C%n.k",
        "class K%n(type): k = %v\nclass C%n(metaclass=K%n): pass",
        ("K%n.k = %v", "C%n.k = %v"),
        ("del C%n.k",),
    ),
    Place(
        "method",
        "o%n.m()",
        "class B%n:\n    def m(self): return %v\nclass C%n(B%n):\n"
        "    def m(self): return super().m()\no%n = C%n()",
        (
            "B%n.m = lambda self: %v",
            "C%n.m = lambda self: %v",
            "o%n.m = lambda: %v",
            "B%n.m.__code__ = (lambda self: %v).__code__",
            "C%n.m = classmethod(lambda cls: %v)",
            "C%n.m = staticmethod(lambda: %v)",
        ),
        ("del C%n.m", "del o%n.m"),
        _COPIES,
        only=_PLAIN,
    ),
    Place(
        "property",
        "o%n.p",
        "class C%n:\n    p = property(lambda self: self.h)\no%n = C%n()\no%n.h = %v",
        ("o%n.h = %v", "C%n.p = property(lambda self: %v)", "C%n.p = %v"),
        ("del o%n.h", "del C%n.p"),
        _COPIES,
    ),
    Place(
        "descriptor",
        "o%n.p",
        "class D%n:\n    def __get__(self, obj, cls): return self.h\nclass C%n: p = D%n()\n"
        "vars(C%n)['p'].h = %v\no%n = C%n()",
        (
            "vars(C%n)['p'].h = %v",
            "o%n.__dict__['p'] = %v",
            "D%n.__get__ = lambda self, obj, cls: %v",
            "D%n.__set__ = lambda self, obj, value: None",
        ),
        others=_COPIES,
    ),
    Place(
        "__getattr__",
        "o%n.p",
        "class C%n:\n    def __getattr__(self, name):\n"
        "        if name != 'p': raise AttributeError(name)\n        return self.h\n"
        "o%n = C%n()\no%n.h = %v",
        ("o%n.h = %v", "o%n.p = %v", "C%n.p = %v", "C%n.__getattr__ = lambda self, name: %v"),
        ("del o%n.p", "del C%n.p", "del C%n.__getattr__"),
    ),
    Place(
        "slot",
        "o%n.a",
        "class C%n:\n    __slots__ = ('a', '__weakref__')\no%n = C%n()\no%n.a = %v",
        ("o%n.a = %v", "C%n.a.__set__(o%n, %v)"),
        ("del o%n.a",),
        ("o%n = copy.copy(o%n)", "w%n = weakref.ref(o%n); o%n = copy.copy(o%n); gc.collect()"),
    ),
    Place(
        "dataclass",
        "o%n.a",
        "@dataclasses.dataclass\nclass C%n:\n    a: object\n    b: int = 1\no%n = C%n(%v)",
        ("o%n.a = %v", "o%n = C%n(%v)", "o%n = dataclasses.replace(o%n, a=%v)"),
        others=_COPIES,
    ),
    Place(
        "Python module",
        "m%n.k",
        "m%n = types.ModuleType('m%n')\nm%n.of_the_world = True\nm%n.k = %v",
        ("m%n.k = %v", "vars(m%n)['k'] = %v", "m%n = types.SimpleNamespace(k=%v)"),
        ("del m%n.k",),
        ("m%n.beside = 1",),
    ),
    Place(
        "dict item",
        "d%n['k']",
        "d%n = {'k': %v, 'z': 1}",
        ("d%n['k'] = %v", "d%n.update(k=%v)", "d%n |= {'k': %v}", "d%n = {'k': %v}"),
        ("del d%n['k']", "d%n.clear()", "d%n.pop('k', None)"),
        ("d%n['beside'] = 1", "d%n = dict(d%n)", "d%n['k'] = d%n.pop('k')"),
    ),
    Place(
        "item of a dict that fills gaps",
        "d%n.get('k', 7.0)",
        "d%n = collections.defaultdict(float, k=%v, z=1.0)",
        ("d%n['k'] = %v", "d%n = collections.defaultdict(float, k=%v)"),
        ("d%n.clear()", "d%n.pop('k', None)"),
        ("d%n['beside'] = 1", "d%n.pop('z', None)", "d%n = d%n.copy()"),
    ),
    Place(
        "ordered dict item",
        "next(iter(d%n.values()))",
        "d%n = collections.OrderedDict(k=%v, z=1.0)",
        ("d%n['k'] = %v", "d%n = collections.OrderedDict(k=%v)"),
        ("d%n.clear()",),
        ("d%n.move_to_end('k'); d%n.move_to_end('z')", "d%n['y'] = 1.0"),
    ),
    Place(
        "mapping proxy",
        "r%n['k']",
        "d%n = {'k': %v}\nr%n = types.MappingProxyType(d%n)",
        ("d%n['k'] = %v", "r%n = types.MappingProxyType({'k': %v})"),
        ("d%n.clear()",),
    ),
    Place(
        "list item",
        "l%n[0]",
        "l%n = [%v, 1.0]",
        ("l%n[0] = %v", "l%n[:] = [%v, 1.0]", "l%n.insert(0, %v)", "l%n = [%v]"),
        ("l%n.clear()",),
        ("l%n = list(l%n)", "l%n.append(1.0)", "l%n[1:] = [2.0]"),
    ),
    Place(
        "tuple item",
        "t%n[0]",
        "t%n = (%v, 1.0)",
        ("t%n = (%v, 1.0)",),
        ("t%n = ()",),
        ("t%n = (*t%n, 1.0)",),
    ),
    Place(
        "deque item",
        "q%n[0]",
        "q%n = collections.deque([%v, 1.0], maxlen=3)",
        ("q%n[0] = %v", "q%n.appendleft(%v)", "q%n = collections.deque([%v])"),
        ("q%n.clear()",),
        ("q%n.append(2.0)", "q%n = copy.copy(q%n)"),
    ),
    Place(
        "object in a container",
        "d%n['k'][0].a",
        "class C%n: pass\no%n = C%n()\no%n.a = %v\nd%n = {'k': [o%n]}",
        ("o%n.a = %v", "d%n['k'][0] = types.SimpleNamespace(a=%v)"),
        ("del o%n.a", "d%n['k'].pop()"),
        ("o%n = C%n()", "d%n = copy.deepcopy(d%n)", "d%n['k'] = list(d%n['k'])"),
    ),
    Place(
        "cell of a helper",
        "get%n()",
        "def make%n(v):\n    def get(): return v\n    def put(w):\n        nonlocal v\n"
        "        v = w\n    return get, put\nget%n, put%n = make%n(%v)",
        ("put%n(%v)", "get%n.__closure__[0].cell_contents = %v", "get%n, put%n = make%n(%v)"),
        ("del get%n.__closure__[0].cell_contents",),
    ),
    Place(
        "default",
        "f%n()",
        "def f%n(d=%v): return d",
        (
            "f%n.__defaults__ = (%v,)",
            "f%n = lambda d=%v: d",
            "f%n = functools.partial(lambda d: d, %v)",
        ),
        ("f%n.__defaults__ = None",),
    ),
    Place(
        "keyword default",
        "f%n()",
        "def f%n(*, d=%v): return d",
        ("f%n.__kwdefaults__ = {'d': %v}", "f%n.__kwdefaults__['d'] = %v"),
        ("f%n.__kwdefaults__.clear()",),
    ),
    Place(
        "code",
        "f%n()",
        "def f%n(): return %v",
        ("f%n.__code__ = (lambda: %v).__code__", "f%n = lambda: %v"),
        only=_PLAIN,
    ),
    Place(
        "partial",
        "f%n()",
        "def give%n(v): return v\nf%n = functools.partial(give%n, %v)",
        (
            "f%n = functools.partial(give%n, %v)",
            "f%n.__setstate__((give%n, (%v,), {}, {}))",
            "give%n = 1; f%n = lambda: %v",
        ),
    ),
    Place(
        "function attribute",
        "f%n.k",
        "def f%n(): pass\nf%n.k = %v",
        ("f%n.k = %v", "f%n.__dict__['k'] = %v"),
        ("del f%n.k",),
        ("f%n.beside = 1",),
    ),
    Place(
        "cached function",
        "f%n()",
        "g%n = %v\n@functools.lru_cache\ndef f%n(): return g%n",
        ("g%n = %v", "g%n = %v; f%n.cache_clear()"),
        ("f%n.cache_clear()",),
        only=_PLAIN,
    ),
    Place(
        "cached property",
        "o%n.p",
        "class C%n:\n    @functools.cached_property\n    def p(self): return self.h\n"
        "o%n = C%n()\no%n.h = %v",
        ("o%n.h = %v", "o%n.p = %v", "o%n.h = %v; vars(o%n).pop('p', None)"),
        ("vars(o%n).pop('p', None)",),
        _COPIES,
    ),
    Place(
        "behind a weak reference",
        "w%n().a",
        "class C%n: pass\no%n = C%n()\no%n.a = %v\nw%n = weakref.ref(o%n)",
        ("o%n.a = %v", "o%n = C%n(); o%n.a = %v; w%n = weakref.ref(o%n); gc.collect()"),
        ("del o%n.a", "o%n = None; gc.collect()"),
    ),
    Place(
        "environment",
        "float(os.environ['LAW_%n'])",
        "os.environ['LAW_%n'] = str(%v)",
        ("os.environ['LAW_%n'] = str(%v)", "os.environ.update(LAW_%n=str(%v))"),
        ("os.environ.pop('LAW_%n', None)",),
        ("os.environ['LAW_BESIDE'] = '1'",),
        only=("number", "likeness"),
    ),
    Place(
        "context variable",
        "v%n.get()",
        "v%n = contextvars.ContextVar('v%n', default=%v)",
        ("v%n.set(%v)", "v%n = contextvars.ContextVar('v%n', default=%v)"),
    ),
    Place(
        "thread's own",
        "getattr(z%n, 'a', 1.0)",
        "z%n = threading.local()\nz%n.a = %v",
        ("z%n.a = %v",),
        ("del z%n.a",),
        only=("number", "likeness"),
    ),
    Place(
        "nn.Module attribute",
        "n%n.sub.a",
        "class M%n(nn.Module): pass\nn%n = M%n()\nn%n.sub = M%n()\nn%n.sub.a = %v",
        ("n%n.sub.a = %v", "n%n.sub.__dict__['a'] = %v", "n%n.sub = M%n(); n%n.sub.a = %v"),
        ("del n%n.sub.a", "del n%n.sub"),
        ("n%n = copy.deepcopy(n%n)", "n%n.sub.beside = 1", "n%n.sub = copy.copy(n%n.sub)"),
    ),
    Place(
        "closure of the call",
        "c%n",
        scope="closure",
        outside="get%n()",
        writes=("put%n(%v)",),
    ),
    Place(
        "self",
        "self.s%n",
        scope="self",
        outside="me.s%n",
        writes=("me.s%n = %v", "me.__dict__['s%n'] = %v", "type(me).s%n = %v"),
        deletes=("del me.s%n",),
        others=("me.beside = 1",),
    ),
    Place(
        "class of self",
        "self.k%n",
        "class Base%n:\n    k%n = %v",
        scope="self",
        outside="me.k%n",
        writes=("Base%n.k%n = %v", "type(me).k%n = %v", "me.k%n = %v"),
        deletes=("del me.k%n", "del type(me).k%n"),
    ),
    Place(
        "keyword default of the call",
        "e%n",
        scope="default",
        outside="plain.__kwdefaults__['e%n']",
        writes=(
            "plain.__kwdefaults__['e%n'] = %v",
            "plain.__kwdefaults__ = {**plain.__kwdefaults__, 'e%n': %v}",
        ),
    ),
    Place("argument", "p%n", scope="argument", outside="a%n", setup="a%n = %v"),
    Place(
        "argument's attribute",
        "p%n.a",
        "class C%n: pass\na%n = C%n()\na%n.a = %v",
        ("a%n.a = %v", "a%n.__dict__['a'] = %v", "C%n.a = %v", "a%n = C%n(); a%n.a = %v"),
        ("del a%n.a",),
        (
            "a%n = copy.copy(a%n)",
            "a%n.beside = 1",
            "a%n = pickle.loads(pickle.dumps(a%n))",
            "C%n.a = a%n.a; del a%n.a",  # now it isn't there: that is a read, too
            "C%n.a = a%n.a; a%n = C%n()",
        ),
        scope="argument",
        outside="a%n.a",
    ),
    Place(
        "argument's item",
        "p%n['k']",
        "a%n = {'k': %v, 'z': 1.0}",
        ("a%n['k'] = %v", "a%n = {'k': %v}"),
        ("a%n.clear()",),
        ("a%n['beside'] = 1", "a%n = dict(a%n)"),
        scope="argument",
        outside="a%n['k']",
    ),
    Place(
        "argument's item, of a dict that fills gaps",
        "p%n.get('k', 7.0)",
        "a%n = collections.defaultdict(float, k=%v, z=1.0)",
        ("a%n['k'] = %v", "a%n = collections.defaultdict(float, k=%v)"),
        ("a%n.clear()", "a%n.pop('k', None)"),
        ("a%n['beside'] = 1", "a%n.pop('z', None)", "a%n = a%n.copy()"),
        scope="argument",
        outside="a%n.get('k', 7.0)",
    ),
)

CONTENTS = (
    Content(
        "number",
        ("2.0", "3.0", "-1.5", "2", "True", "0.0", "-0.0", "float('nan')", "7.25", "5", "11"),
        (
            "t = t * %r",
            "t = t + %r",
            "if %r > 1:\n    t = t + 1",
            "if isinstance(%r, int):\n    t = t - 1",
            "t = t + math.copysign(1.0, %r)",
            "t = t * (2 if %r else 3)",
            "t = t + len(str(%r))",
            "t = t * 0.9 ** %r",
            "t = t + math.cos(%r) * (%r % 1.5)",
            "t = t + (int(%r * 0.7) if %r == %r else 1)",
            "t = torch.full_like(t, %r) + t",
            "t = t.clamp(max=%r)",
            "t = t.masked_fill(t > 0, %r)",
            "t = t * f\"{%r}\".count('2')",
            "t = t * (1 if math.isnan(%r) else 2)",
            "for _ in range(int(%r > 0) + 1):\n    t = t + 1",
        ),
    ),
    Content(
        "likeness",  # equal is not the same
        ("1.0", "True", "1", "0.0", "-0.0"),
        (
            "t = t + len(repr(%r))",
            "t = t * len(type(%r).__name__)",
            "t = t + math.copysign(1.0, %r)",
            "if isinstance(%r, bool):\n    t = t * 7",
        ),
    ),
    Content(
        "maybe",
        ("2.0", "None", "3.0", "0"),
        (
            "if %r is None:\n    t = t * 2\nelse:\n    t = t * %r",
            "t = t * (%r or 5.0)",
            "t = t + (1.0 if %r is not None else 0.0)",
        ),
    ),
    Content(
        "text",
        ("'sin'", "'cos'", "'relu'"),
        (
            "t = getattr(torch, %r)(t)",
            "t = t * {'sin': 2.0}.get(%r, 3.0)",
            "if %r == 'sin':\n    t = t + 1",
            "t = t + len(%r)",
            "match %r:\n    case 'sin': t = t + 2\n    case _: t = t * 2",
            "t = t + ord(%r[0])",
            "if %r in ('sin', 'cos'):\n    t = t * 2",
        ),
    ),
    Content(
        "tuple",
        ("(2.0, 3.0)", "(2.0,)", "(2, 3.0)", "(3.0, 2.0)"),
        (
            "for v in %r:\n    t = t * v",
            "t = t * %r[0]",
            "t = t + len(%r)",
            "a, *b = %r\nt = t * a + len(b)",
            "if 3.0 in %r:\n    t = t - 1",
            "t = t + sum([v * 2 for v in %r])",
        ),
    ),
    Content(
        "list",
        ("[2.0, 3.0]", "[1.0]", "[]", "[2, 3.0]"),
        (
            "for v in %r:\n    t = t * v",
            "t = t + sum(%r)",
            "t = t + len(%r)",
            "t = sum([t * v for v in %r], t)",
            "t = t * %r[0]",
            "t = t * (%r[-1] if %r else 1)",
            "if 3.0 in %r:\n    t = t + 1",
            "t = t + torch.tensor(%r).sum()",
            "t = t + max(%r, default=0)",
            "t = functools.reduce(lambda a, v: a * v, %r, t)",
            "t = t + sum(map(float, %r))",
            "t = t + sum({v for v in %r})",
            "t = t * [*%r, 1.0][0]",
        ),
        (
            "%o.append(2.5)",
            "%o.pop()",
            "%o[0] = 4.0",
            "%o[0] = 2",
            "%o.clear()",
            "%o.reverse()",
            "%o.insert(0, 1.5)",
            "%o[:] = [5.0]",
        ),
        ("%r.append(1.0)", "%r[:] = [2.0, float(t.dim())]", "%r[-1:] = [7.0]"),
    ),
    Content(
        "tensors",
        (
            "[torch.ones(4), torch.full((4,), 2.0)]",
            "[torch.ones(4)] * 2",
            "[torch.ones(4).requires_grad_()]",
            "[torch.arange(4.0), torch.ones(4, dtype=torch.float64)]",
        ),
        (
            "for v in %r:\n    t = t + v",
            "t = t * torch.stack([v.float() for v in %r]).sum(0)",
            "t = t + %r[0] * len(%r)",
            "t = t * (2 if %r[0] is %r[-1] else 3)",
            "if %r[0].sum() > 4:\n    t = t + 1",
            "if any(v.requires_grad for v in %r):\n    t = t * 2",
        ),
        (
            "%o[0] = torch.full((4,), 3.0)",
            "%o.append(torch.ones(4))",
            "%o.reverse()",
            "%o[0].data.fill_(3.0)",
            "%o[0] = %o[-1]",
            "%o[0].data = %o[0].data.double()",
            "%o[0].requires_grad_(not %o[0].requires_grad)",
            "%o.pop()",
        ),
        ("%r[0] = t.detach().clone()", "%r.append(x)", "%r[0].detach().add_(1)"),
    ),
    Content(
        "dict",
        ("{'a': 2.0, 'b': 3.0}", "{'b': 3.0, 'a': 2.0}", "{'a': 2.0}", "{'a': 2}"),
        (
            "t = t * %r['a']",
            "t = t * %r.get('b', 4.0)",
            "if 'c' in %r:\n    t = t + 1",
            "for k, v in %r.items():\n    t = t * v + len(k)",
            "t = t + sum(%r.values())",
            "t = t + len(%r)",
            "t = t * (3 if next(iter(%r), '') == 'a' else 1)",
            "t = (lambda a=1.0, b=1.0, **more: t * a + b + len(more))(**%r)",
            "t = t + sum({k: v * 2 for k, v in %r.items()}.values())",
            "try:\n    t = t * %r['c']\nexcept KeyError:\n    t = t + 1",
        ),
        (
            "%o['a'] = 5.0",
            "%o['a'] = 2",
            "%o.pop('a', None)",
            "%o['c'] = 1.0",
            "%o.pop('b', None)",
            "%o['a'] = %o.pop('a', 1.0)",
            "%o.clear()",
            "%o.setdefault('c', 2.0)",
            "%o.update(b=7.0)",
        ),
        ("%r['last'] = t.detach()", "%r['n'] = len(%r)", "%r.pop('b', None)", "%r.update(a=2.0)"),
    ),
    Content(
        "set",
        ("{1, 2}", "{1, 2, 3}", "set()"),
        (
            "t = t + len(%r)",
            "if 3 in %r:\n    t = t * 2",
            "t = t * sum(sorted(%r))",
            "for v in sorted(%r):\n    t = t + v",
        ),
        ("%o.add(3)", "%o.discard(1)", "%o.clear()", "%o.add(1.5)", "%o.update({4, 5})"),
        ("%r.add(x.dim())", "%r.discard(2)"),
    ),
    Content(
        "tensor",
        (
            "torch.ones(4)",
            "torch.full((4,), 2.0)",
            "torch.ones(4, dtype=torch.float64)",
            "torch.ones(4).requires_grad_()",
            "torch.arange(8.0)[::2]",
            "nn.Parameter(torch.ones(4))",
            "torch.ones(1, 4)",
            "torch.tensor([1, 2, 3, 4])",
        ),
        (
            "t = t + %r",
            "t = torch.mul(t, %r)",
            "if %r.requires_grad:\n    t = t * 2",
            "if %r.dtype == torch.float64:\n    t = t + 1",
            "t = t * %r.shape[0]",
            "t = t + %r.sum()",
            "if %r.sum() > 4:\n    t = t + 1",
            "t = t + getattr(%r, 'tag', 1.0)",
            "t = t * (2 if %r is y else 1)",
            "t = %r.view(-1)[:1] + t",
            "t = t * %r.stride(-1)",
            "t = t * (2 if %r.is_leaf else 3)",
            "t = torch.stack([t, t + %r]).sum(0)",
        ),
        (
            "%o.data.fill_(3.0)",
            "%o.data = torch.full((4,), 5.0)",
            "%o.detach().mul_(2)",
            "%o.requires_grad_(not %o.requires_grad)",
            "%o.tag = 2.0",
            "%o.data = %o.data.double()",
            "%o.data[0] = 7.0",
            "%o.data = torch.arange(8.0)[::2]",
            "%o.unsqueeze_(0)",
        ),
        ("%r.detach().add_(1)", "with torch.no_grad():\n    %r.mul_(2)", "%r.data[0] = 5.0"),
    ),
    Content(
        "form",  # of a tensor that nothing is computed with
        (
            "torch.ones(4)",
            "torch.ones(4).requires_grad_()",
            "torch.ones(2, 4)",
            "torch.ones(4, dtype=torch.float64)",
        ),
        (
            "t = t * (1 + %r.dim() + 3 * %r.requires_grad + 5 * (%r.dtype == torch.float64))",
            "t = t * (len(%r) + (7 if %r.is_leaf else 0))",
            "t = t + sum(%r.shape) * sum(%r.stride()) * (2 if %r.requires_grad else 1)",
        ),
        (
            "%o.requires_grad_(not %o.requires_grad)",
            "%o.requires_grad = not %o.requires_grad",
            "%o.data = %o.data.double()",
            "%o.data = torch.ones(3, 4)",
            "%o.unsqueeze_(0)",
            "%o.detach_()",
            "%o.mul_(torch.ones(4).requires_grad_())",
        ),
    ),
    Content(
        "object",
        ("Box(2.0)", "Box(3.0)", "Special(2.0)"),
        (
            "t = %r.scaled(t)",
            "t = t * %r.value",
            "if isinstance(%r, Special):\n    t = t + 1",
            "t = t + %r.bonus",
            "t = t + sum(%r.items)",
            "if hasattr(%r, 'extra'):\n    t = t * 2",
            "t = t * len(%r)",
            "if %r:\n    t = t - 1",
            "t = t + %r.twice",
            "t = t + getattr(%r, 'extra', 3.0)",
            "t = %r(t)",
        ),
        (
            "%o.value = 4.0",
            "%o.value = 2",
            "%o.bonus = 5.0",
            "Box.bonus = 3.0",
            "Special.bonus = 6.0",
            "Box.scaled = lambda self, t: t * 7",
            "Special.scaled = lambda self, t: t - 7",
            "del Special.scaled",
            "%o.__class__ = Special",
            "%o.__class__ = Box",
            "%o.items.append(1.0)",
            "%o.extra = 1.0",
            "Box.extra = 2.0",
            "del %o.value",
            "%o.scaled = lambda t: t * 9",
            "%o.__init__(6.0)",
            "Box.__len__ = lambda self: 5",
            "Special.__bool__ = lambda self: False",
            "Box.twice = property(lambda self: 8.0)",
            "Special.__call__ = lambda self, t: t * 4",
            "Box.__getattr__ = lambda self, name: 7.0",
            "Special.__bases__ = (type('Mid', (Box,), {'twice': 9.0, '__len__': lambda s: 9}),)",
        ),
        (
            "%r.last = t.detach()",
            "%r.value = 4.0",
            "%r.calls = getattr(%r, 'calls', 0) + 1",
            "%r.items.append(1.0)",
            "type(%r).bonus = 2.5",
        ),
    ),
    Content(
        "class",
        ("Box", "Special"),
        (
            "t = %r(2.0).scaled(t)",
            "t = t + %r.bonus",
            "if issubclass(%r, Special):\n    t = t + 1",
            "t = t + len(%r.__name__)",
            "t = %r.made().scaled(t)",
        ),
        (
            "Box.bonus = 3.0",
            "Special.bonus = 6.0",
            "Box.__init__ = lambda self, value: self.__dict__.update(value=value + 1)",
            "Special.scaled = lambda self, t: t - 7",
            "Special.__bases__ = (type('Mid', (Box,), {'made': classmethod(lambda c: c(9.0))}),)",
        ),
    ),
    Content(
        "function",
        (
            "double",
            "triple",
            "lambda t: t * 5",
            "functools.partial(double, k=7.0)",
            "torch.sin",
            "Box(2.0).scaled",
            "triple.__call__",
        ),
        (
            "t = %r(t)",
            "t = [f(t) for f in (%r, double)][0]",
            "t = next(map(%r, [t]))",
        ),
        (
            "double.__code__ = triple.__code__",
            "double.__defaults__ = (6.0,)",
            "triple = double",
            "double = triple",
            "Box.scaled = lambda self, t: t * 7",
        ),
    ),
    Content(
        "module",
        (
            "nn.Linear(4, 4)",
            "Layer(2.0)",
            "nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Layer(3.0))",
            "nn.Dropout(0.5)",
            "nn.BatchNorm1d(4)",
            "nn.ModuleList([nn.Linear(4, 4)])[0]",
        ),
        (
            "t = %r(t)",
            "t = %r(t) + %r(t * 2)",
            "if %r.training:\n    t = t * 2",
            "t = t + sum([p.sum() for p in %r.parameters()])",
            "t = t + len(list(%r.children()))",
        ),
        (
            "%o.train(not %o.training)",
            "%o.eval()",
            "handle = %o.register_forward_hook(lambda m, a, o: o * 2)",
            "handle = %o.register_forward_pre_hook(lambda m, a: (a[0] + 1,))",
            "handle.remove()",
            "%o.double()",
            "%o.float()",
            "%o.requires_grad_(False)",
            "%o.requires_grad_()",
            "for p in %o.parameters(): p.data.mul_(2)",
            "for p in %o.parameters(): p.grad = torch.ones_like(p)",
            "%o.forward = lambda t: t * 3",
            "del %o.forward",
            "Layer.forward = lambda self, t: t * 11",
            "Layer.gain = 9.0",
            "%o.weight = nn.Parameter(torch.eye(4))",
            "%o.load_state_dict({k: v * 0 + 1 for k, v in %o.state_dict().items()})",
            "%o.bias = None",
            "modes.callback(nn.modules.module.register_module_forward_hook("
            "lambda m, a, o: o + 1).remove)",
            "modes.callback(nn.modules.module.register_module_forward_pre_hook("
            "lambda m, a: None).remove)",
            "%o.append(nn.ReLU())",
            "%o[0] = nn.Linear(4, 4)",
        ),
    ),
    Content(
        "modules by name",  # that no line of the program names
        (
            "nn.Sequential(collections.OrderedDict(conv=nn.Linear(4, 4), act=nn.LeakyReLU(0.1)))",
            "Stages(collections.OrderedDict(conv=nn.Linear(4, 4), act=nn.ELU(0.5)))",
            "nn.Sequential(Stages(collections.OrderedDict(conv=nn.Linear(4, 4), act=nn.ELU())))[0]",
            "nn.ModuleDict({'conv': nn.Linear(4, 4), 'act': nn.LeakyReLU(0.1)})",
            "Branches(conv=nn.Linear(4, 4), act=nn.LeakyReLU(0.1))",
        ),
        (
            "for m in %r.children():\n    t = m(t)",
            "for m in %r._modules.values():\n    t = m(t)",
            "for name, m in %r.named_children():\n    t = m(t) + len(name)",
            "t = functools.reduce(lambda v, m: m(v), %r.children(), t)",
            "t = %r(t)",
            "for m in (%r.values() if hasattr(%r, 'values') else %r):\n    t = m(t)",
            "t = sum([m(t) for m in list(%r.modules())[1:]])",
            "t = t + sum([p.sum() for p in %r.parameters()])",
            "t = next(%r.children())(t)",
            "t = t * len(list(%r.modules()))",
        ),
        (
            "%o.conv.bias = nn.Parameter(torch.full((4,), 5.0))",
            "%o.conv.weight = nn.Parameter(torch.eye(4))",
            "%o.conv._parameters['bias'] = nn.Parameter(torch.full((4,), 7.0))",
            "%o.conv.bias = None",
            "%o.conv.bias.requires_grad_(False)",
            "%o.conv = nn.Linear(4, 4)",
            "%o._modules['conv'] = nn.Identity()",
            "%o.act.negative_slope = 0.5",
            "%o.act.alpha = 2.0",
            "%o.act = nn.Tanh()",
            "%o.add_module('last', nn.Sigmoid())",
            "del %o._modules['act']",
            "%o.conv.forward = lambda t: t * 3",
            "handle = %o.conv.register_forward_hook(lambda m, a, o: o * 2)",
            "handle = %o.act.register_forward_pre_hook(lambda m, a: (a[0] + 1,))",
            "handle.remove()",
            "%o.conv.__class__ = type('Conv', (nn.Linear,), {'forward': lambda self, t: t * 5})",
            "Stages.forward = lambda self, t: t * 11",
            "%o.conv.weight.data.mul_(2)",
            "%o.double()",
        ),
        ("%r.conv.calls = getattr(%r.conv, 'calls', 0) + 1",),
    ),
    Content(
        "dtype",
        ("torch.float32", "torch.float64", "torch.bfloat16"),
        ("t = t.to(%r)", "t = t + torch.ones(4, dtype=%r)", "if t.dtype is %r:\n    t = t * 2"),
    ),
)

# What programs have in common, each part present where one of its names is used.
COMMON = {
    ("Box", "Special"): """\
class Box:
    bonus = 1.0
    def __init__(self, value):
        self.value = value
        self.items = [value]
    def scaled(self, t):
        return t * self.value + self.bonus
    def __len__(self):
        return len(self.items) + 1
    def __call__(self, t):
        return self.scaled(t) * 2
    @property
    def twice(self):
        return self.value * 2
    @classmethod
    def made(cls):
        return cls(cls.bonus)
class Special(Box):
    bonus = 2.0
    def scaled(self, t):
        return super().scaled(t) - 1
    def __bool__(self):
        return self.value > 2
""",
    ("double", "triple"): """\
def double(t, k=2.0): return t * k
def triple(t, k=3.0): return t * k
""",
    ("Low", "High", "Leaf", "leaf"): """\
class Low:
    bonus = 2.0
    def __init__(self, value, **others):
        self.value = value
        self.__dict__.update(others)
    def apply(self, t):
        return t * self.value
class High(Low):
    bonus = 3.0
    def apply(self, t):
        return t + self.value
class Leaf(Low): pass
leaf = Leaf(2.0)
""",
    ("Stages",): "class Stages(nn.Sequential): pass\n",
    ("Branches",): """\
class Branches(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
    def forward(self, t):
        for part in self.children():
            t = part(t)
        return t
""",
    ("knob",): "knob = contextvars.ContextVar('knob', default=2.0)\n",
    ("rows",): "rows = [[1.0], [2.0]]\n",
    ("ranks",): "ranks = collections.OrderedDict(a=1.0, b=2.0)\n",
    ("Layer", "layer"): """\
class Layer(nn.Module):
    gain = 2.0
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.full((4,), scale))
        self.register_buffer("count", torch.zeros(()))
    def forward(self, t):
        if self.training:
            t = t * self.gain
        return t * self.weight + self.scale
layer = Layer(2.0)
""",
}
