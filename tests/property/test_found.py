"""What the law machine found, shrunk: each was a wrong result, or an object kept alive."""

import contextlib
import functools

import pytest
import torch
from property.twins import Call, Do, Figures, Scenario, check, check_twins

import tripwire
from tripwire.reading import reader

CALL = Call("new(4), new(4)", times=3)
FOUND = {
    "list that is a context variable's default": (
        "v = contextvars.ContextVar('v', default=[2.0, 3.0])\n"
        "def call(x, y): return x * sum(v.get())",
        ["v.get().append(2.5)", "v.set([1.0])", "v.get().append(1.0)"],
    ),
    "parameter that a module without any gets": (
        "net = nn.Sequential(nn.ReLU())\n"
        "def call(x, y): return x + sum([p.sum() for p in net.parameters()])",
        ["net.weight = nn.Parameter(torch.ones(4))", "net[0].bias = nn.Parameter(torch.ones(2))"],
    ),
    "name of a function that dies": (
        "class C:\n    p = property(lambda self: 1)\n"
        "def call(x, y): return x * len(C.p.fget.__qualname__)",
        ["def longer(self): return 1\nC.p = property(longer); del longer; gc.collect()"],
    ),
    "name of a function in a list, which dies": (
        "fs = [lambda t: t]\ndef call(x, y): return x * len(fs[0].__name__)",
        ["def f(t): return t\nfs[0] = f; del f; gc.collect()", "fs[0].__name__ = 'another'"],
    ),
    "attribute that a function gets later": (
        "def helper(x): return x * 2\n"
        "def call(x, y): return helper(x) * getattr(helper, 'scale', 1.0)",
        ["helper.scale = 3.0", "del helper.scale"],
    ),
    "form of a tensor that no torch call gets": (
        "a = torch.ones(4)\ndef call(x, y): return x * a.shape[0] + (1 if a.requires_grad else 0)",
        [
            "a.unsqueeze_(0)",
            "a.requires_grad_()",
            "a = torch.ones(3)",
            "a.mul_(torch.ones(3, requires_grad=True))",
        ],
    ),
    "form of a parameter that no torch call gets": (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(4, 4)\n"
        "    def forward(self, x, y): return x * 2 if self.inner.weight.requires_grad else x\n"
        "call = Net()",
        ["call.requires_grad_(False)", "call.inner.weight.requires_grad = True"],
    ),
    "tensor below a cached property": (
        "class Config:\n"
        "    @functools.cached_property\n"
        "    def scale(self): return self.held\n"
        "o = Config()\no.held = torch.ones(4)\n"
        "def call(x, y): return x * 2 if o.scale.requires_grad else x",
        ["o.scale.requires_grad_()", "o.scale.requires_grad_(False)"],
    ),
    "list that somebody put into builtins": (
        "builtins.law = [2.0]\nmodes.callback(vars(builtins).pop, 'law')\n"
        "def call(x, y): return x * sum(law)",
        ["law.append(3.0)", "builtins.law = [4.0]", "law = [5.0]", "law.append(1.0)", "del law"],
    ),
    "object with slots that is let go": (
        "class Slotted: __slots__ = ('__weakref__', 'scale')\n"
        "o = Slotted()\no.scale = 2.0\n"
        "def call(x, y): return x * o.scale",
        ["w = weakref.ref(o); o = copy.copy(o)"],
    ),
    "order of a dict that the run writes to": (
        "d = {'a': 2.0}\n"
        "def call(x, y):\n"
        "    for key, value in d.items(): x = x * value + len(key)\n"
        "    d['last'] = x.detach()\n"
        "    return x",
        ["d['a'] = d.pop('a')", "d.pop('last')", "d['last'] = d.pop('last')"],
    ),
    "cached property that the first call fills": (
        "class C:\n    @functools.cached_property\n    def p(self): return self.h\n"
        "o = C()\no.h = (2.0, 3.0)\n"
        "def call(x, y):\n    for v in o.p: x = x * v\n    return x",
        ["o.p = (2.0,)", "del o.p", "o.h = (3.0,)", "del o.p"],
    ),
    "cached property of an nn.Module": (
        "class C(nn.Module):\n"
        "    @functools.cached_property\n    def p(self): return torch.float64\n"
        "o = C()\ndef call(x, y): return x.to(o.p)",
        ["o.p = torch.float32", "del o.p"],
    ),
    "attribute that `__getattr__` makes and keeps": (
        "class C:\n"
        "    def __getattr__(self, name):\n"
        "        if name != 'p': raise AttributeError(name)\n"
        "        self.p = [2.0, 3.0]\n        return self.p\n"
        "o = C()\ndef call(x, y): return x * sum(o.p)",
        ["o.p = [2.0, 3.0]", "o.p.append(1.0)", "del o.p"],
    ),
    "property that hides an attribute of its name": (
        "class C:\n"
        "    @property\n    def n(self): return self.__dict__['n'] * 2\n"
        "o = C()\no.__dict__['n'] = 2\n"
        "def call(x, y):\n    x = x * o.n\n    o.__dict__['n'] += 1\n    return x",
        ["o.__dict__['n'] = 1"],
    ),
    "attribute that a descriptor stores when it is asked": (
        "class Lazy:\n"
        "    def __get__(self, o, cls):\n"
        "        o.__dict__['p'] = (2.0, 3.0)\n        return o.p\n"
        "class C: p = Lazy()\n"
        "o = C()\ndef call(x, y): return x * sum(o.p)",
        ["o.p = (2.0,)", "del o.p"],
    ),
    "attribute that is read as an item of `__dict__`, then set": (
        "class C: pass\no = C()\no.n = 0\n"
        "def call(x, y):\n    x = x + o.__dict__['n']\n    o.n = 0\n"
        "    for _ in range(x.dim()): o.n += 1\n    return x",
        ["o.n = 4", "vars(o)['n'] = 2"],
    ),
    "tensor that a weak reference alone leads to": (
        "first = torch.ones(4)\nref = weakref.ref(first)\n"
        "def call(x, y): return x if ref() is None else x + ref()",
        ["first.mul_(2)", "first.requires_grad_()", "first = torch.ones(4); gc.collect()"],
    ),
    "tensors in an object that a weak reference alone leads to": (
        "class C: pass\no = C()\no.parts = [torch.ones(4), torch.ones(4)]\nref = weakref.ref(o)\n"
        "def call(x, y): return x if ref() is None else x + ref().parts[1]",
        ["w = weakref.ref(o.parts[1]); o.parts[1] = torch.zeros(4); gc.collect()", "o = C()"],
    ),
    "weak reference on the tensor of the last call": (
        "class Key: pass\nclass Keep: last = None\none, two, keep = Key(), Key(), Keep()\n"
        "key = one\n"
        "def call(x, y):\n"
        "    if x is keep.last: x = x * 3\n"
        "    keep.last, y.tag = y, weakref.ref(key)\n"
        "    return x * (2 if keep.last.tag() is None else 3)",
        ["key = two", "one = None; gc.collect()"],
    ),
    "mock that is looked up in a dict": (
        "from unittest import mock\nmocked = mock.NonCallableMagicMock()\nby_key = {}\n"
        "def call(x, y): return x * by_key.get(mocked, 1.0)",
        ["by_key[mocked] = 3.0", "by_key.clear()"],
    ),
}

# Each is called with an argument that makes its torch call raise after a flag was set.
OF_ERRORS = {
    "grad mode": "torch.set_grad_enabled(not torch.is_grad_enabled()); return x.add_(1)",
    "grad mode, in a module": (
        "torch.set_grad_enabled(not torch.is_grad_enabled()); return nn.Linear(3, 3)(x)"
    ),
    "autocast": (
        "torch.set_autocast_enabled('cpu', not torch.is_autocast_enabled('cpu')); return x @ y[:2]"
    ),
    "autocast, in a module": (
        "torch.set_autocast_enabled('cpu', not torch.is_autocast_enabled('cpu'))\n"
        "    return nn.Linear(3, 3)(x)"
    ),
    "the default dtype": "torch.set_default_dtype(torch.float64); return x @ y[:2]",
}

BEHIND_AOT = {
    "random numbers that nobody uses": (
        "g = 2.0\ndef call(x, y):\n    t = x + torch.rand(4)\n    return x * g"
    ),
    "random numbers that are drawn in place and dropped": (
        "def call(x, y):\n    torch.empty(4).uniform_().mul_(2)\n    return x * 2"
    ),
    "a dropout whose result is dropped": (
        "def call(x, y):\n    F.dropout(x, 0.5, True)\n    return x * 2 + torch.rand(4)"
    ),
    "random numbers of which some are used": (
        "def call(x, y):\n    a, b = torch.rand(2, 4)\n    torch.randn(2)\n    return x + a"
    ),
    "random numbers that go into an argument": (
        "def call(x, y):\n    y.copy_(torch.rand(4))\n    return x * 2"
    ),
    **{
        f"a backward that changes what its forward kept: {change}": (
            "b = torch.ones(4)\n"
            "class H(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, t, b):\n"
            "        ctx.b = b\n        ctx.save_for_backward(t)\n        return t * 2\n"
            "    @staticmethod\n    def backward(ctx, t):\n"
            f"        b, = ctx.b,\n        {change}\n        return t * b, None\n"
            "def call(x, y): return H.apply(x * 2, b)"
        )
        for change in ("b.mul_(2)", "b += 1", "torch.mul(b, 2, out=b)", "b[:2] = 3")
    },
    **{
        f"a forward that changes its argument: {change}": (
            "class H(torch.autograd.Function):\n"
            f"    @staticmethod\n    def forward(ctx, t, x, y):\n        {change}\n"
            "        return t * 1\n"
            "    @staticmethod\n    def backward(ctx, g): return g * 3, None, None\n"
            "def call(x, y):\n    t = x\n    for _ in range(2): t = H.apply(t, x, y)\n"
            "    return t + x"
        )
        for change in (
            "t = F.dropout(x, 0.5, training=False); t += y",
            "x += y",
            "x[1:].add_(1)",
            "ctx.mark_dirty(F.dropout(x, 0.5, False).mul_(2))",
            "F.relu(x, inplace=True)",
        )
    },
    "two results, one without a gradient": (
        "class H(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, t):\n"
        "        a, b = t.sin(), t * 2\n"
        "        ctx.mark_non_differentiable(b)\n        return a, b\n"
        "    @staticmethod\n    def backward(ctx, a, b): return a.cos()\n"
        "def call(x, y): return H.apply(x)"
    ),
    "views without gradients of leaves": (
        "def call(x, y):\n    with torch.no_grad(): t = x.unsqueeze(0).squeeze(0)\n    return t * 2"
    ),
    "views without gradients of results": (
        "def call(x, y):\n    t = x * 2\n    with torch.no_grad(): t = t[1:]\n    return t * 2"
    ),
    **{
        f"`{asked}` in the backward of a custom function": (
            "class H(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, t, x):\n"
            "        ctx.save_for_backward(x)\n        return t * 2\n"
            "    @staticmethod\n    def backward(ctx, t):\n"
            f"        x, = ctx.saved_tensors\n        return t * (2 if {asked} else 3), None\n"
            "def call(x, y): return H.apply(x * 2, x)"
        )
        for asked in ("x.is_leaf", "x.requires_grad", "x._version", "x.grad_fn is None")
    },
}


OF_ARGUMENTS = {
    "list of an argument's class": (
        "class Config: scales = [2.0, 3.0]\no = Config()\n"
        "def call(x, y, o): return x * sum(o.scales)",
        ["Config.scales.append(4.0)", "o.scales = [1.0]", "del o.scales"],
    ),
    "tensors of an argument's class": (
        "class Config: scales = [torch.ones(4), torch.ones(4)]\no = Config()\n"
        "def call(x, y, o): return x * o.scales[0] + o.scales[1]",
        ["Config.scales[0] = torch.zeros(4)", "Config.scales = [torch.ones(4)] * 2"],
    ),
}


# What a class holds and a branch names that doesn't run: a write to it retires nothing.
_QUIET = "class Quiet: on = False\nquiet = Quiet()\n"
UNREAD = {
    "attribute of an object's class": (
        "class C: k = 2.0\no = C()\ndef call(x, y): return x * o.k if quiet.on else x * 2",
        ["C.k = 3.0", "del C.k", "C.k = property(lambda self: 5.0)"],
    ),
    "attribute of a class of `self`": (
        "class Net(nn.Module):\n    k = 2.0\n    def forward(self, x, y):\n"
        "        if quiet.on: x = x * self.k\n        return x * 2\ncall = Net()",
        ["Net.k = 3.0", "Net.other = 1.0", "del Net.k"],
    ),
    "attribute that is asked of the class": (
        "class C:\n    k = 2.0\n"
        "def call(x, y):\n    try: return x * 2\n    except ValueError: return x * C.k",
        ["C.k = 3.0", "type.__setattr__(C, 'k', 4.0)"],
    ),
    "method of a base": (
        "class B:\n    def m(self, t): return t * 3\nclass C(B): pass\no = C()\n"
        "def call(x, y):\n    while quiet.on: x = o.m(x)\n    return x * 2",
        ["B.m = lambda self, t: t * 5", "C.m = lambda self, t: t * 7", "del C.m"],
    ),
    "property": (
        "class C:\n    p = property(lambda self: self.h)\nfirst, o = C.p, C()\no.h = 2.0\n"
        "def call(x, y):\n    for _ in range(x.dim() - 1): x = x * o.p\n    return x * 2",
        ["C.p = property(lambda self: 3.0)", "C.p = 4.0", "C.h = 5.0"],
    ),
    "property whose function dies, beside a name that isn't read": (
        "class C:\n    p = property(lambda self: self.h)\no = C()\no.h = 2.0\n"
        "def call(x, y):\n    if quiet.on: x = x * o.p * len(C.__name__)\n    return x * 2",
        ["C.p = property(lambda self: 3.0); gc.collect()", "del C.p; gc.collect()"],
    ),
    "method that dies, beside a text that isn't read": (
        "class C:\n    def m(self, t): return t\no = C()\n"
        "def call(x, y):\n    if quiet.on: x = o.m(x) * len(o.__doc__)\n    return x * 2",
        ["C.m = lambda self, t: t; gc.collect()", "C.m = 3; gc.collect()", "C.k = 1"],
    ),
    "class method that dies, beside its own name": (
        "class C:\n    @classmethod\n    def m(cls): return cls\n"
        "def call(x, y):\n    if quiet.on: x = x * len(C.m.__qualname__)\n    return x * 2",
        ["C.m = staticmethod(lambda: 3); gc.collect()"],
    ),
    "function in an object that dies, beside its own name": (
        "class C: pass\no = C()\no.f = lambda t: t\n"
        "def call(x, y):\n    if quiet.on: x = o.f(x) * len(o.f.__name__)\n    return x * 2",
        ["o.f = lambda t: t + 1; gc.collect()", "del o.f; gc.collect()"],
    ),
    "static method that dies, beside a module's name": (
        "class C:\n    p = staticmethod(lambda: 2.0)\no = C()\n"
        "def call(x, y):\n    if quiet.on: x = x * o.p() * len(C.__module__)\n    return x * 2",
        ["C.p = 3.0; gc.collect()"],
    ),
    "attribute of a metaclass": (
        "class K(type): k = 2.0\nclass C(metaclass=K): pass\n"
        "def call(x, y): return x * 2 if not quiet.on else x * C.k",
        ["K.k = 3.0", "C.k = 4.0"],
    ),
    "attribute that a function names which isn't called": (
        "class C: k = 2.0\no = C()\n"
        "def call(x, y):\n    def unused(t): return t * o.k\n    return x * 2",
        ["C.k = 3.0"],
    ),
}
# Ways to what a class holds past the objects that a run was given.
_KLASS = "class B: k = 2.0\nclass C(B): pass\n"
ASKED_OF_CLASSES = {
    "an object that the run made": "return x * C().k",
    "a subclass that the run made": "class D(C): pass\n    return x * D().k",
    "a subclass that the run made by a call": "return x * type('D', (C,), {})().k",
    "a subclass of a class that the run made": (
        "class D(C): pass\n    class E(D): pass\n    return x * E().k"
    ),
    "an object of a subclass that nobody names": "return x * hidden[0]().k",
    "its subclasses": "return x * C.__subclasses__()[0].k",
    "an object of its subclasses": "return x * B.__subclasses__()[0]().k",
    "`super` of the class": "return x * super(C, C()).k",
    "`super` under another name": "return x * up(C, C()).k",
    "a class under a computed name": "return x * getattr(Box, 'in' + 'ner')().k",
    "a class under a name that C code spells": "return x * attrgetter('inner')(Box)().k",
    "a class that a property makes": "return x * Made().p.k",
    "a lookup that raises": ("try: return x * Raises().p\n    except ValueError: return x * C().k"),
    "a class that answers itself": "return x * Answers().k",
    "a metaclass that answers itself": "return x * AnswersToo.k",
    "a lookup past the class's own": "return x * object.__getattribute__(C(), 'k')",
    "the class's dict": "return x * vars(B)['k']",
    "a pattern": "match C():\n        case C(k=k): return x * k",
    "a copy": "return x * copy.copy(made).k",
    "a generator": "return x * next(c().k for c in (C,))",
    "the forward of a Function": "return F1.apply(x)",
    "the backward of a Function": "return F2.apply(x)",
    "a context manager": "with Enter() as k: return x * k",
    "an operator": "return x * (Enter() @ 1)",
}
_WAYS = (
    f"{_KLASS}from operator import attrgetter\nup, made = super, C()\n"
    "class Hidden(C): pass\nhidden = [Hidden]\ndel Hidden\n"
    "class Box: inner = C\n"
    "class Made:\n    @property\n    def p(self): return C()\n"
    "class Raises:\n    @property\n    def p(self):\n        if C.k: raise ValueError\n"
    "class Enter:\n    def __enter__(self): return C.k\n    def __exit__(self, *a): pass\n"
    "    def __matmul__(self, v): return C().k\n"
    "class F1(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, t): return t * C().k\n"
    "    @staticmethod\n    def backward(ctx, g): return g\n"
    "class F2(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, t): return t * 2\n"
    "    @staticmethod\n    def backward(ctx, g): return g * C().k\n"
)


# State that hangs on an argument as well, under a name that the call doesn't read.
HANGING = {
    "object": ("class C: pass\ns = C()\ns.v = 2.0", "x * s.v", "s.v = 3.0"),
    "object with slots": (
        "class C: __slots__ = ('v', '__weakref__')\ns = C()\ns.v = 2.0",
        "x * s.v",
        "s.v = 3.0",
    ),
    "object in an object": (
        "class C: pass\ns = C()\ns.c = C()\ns.c.v = 2.0",
        "x * s.c.v",
        "s.c.v = 3.0",
    ),
    "list": ("s = [2.0]", "x * sum(s)", "s.append(3.0)"),
    "dict": ("s = {'a': 2.0}", "x * s['a']", "s['a'] = 3.0"),
    "set": ("s = {2.0}", "x * len(s)", "s.add(3.0)"),
    "deque": ("s = collections.deque([2.0])", "x * s[0]", "s.appendleft(3.0)"),
    "bytes": ("s = bytearray(b'ab')", "x * s[0]", "s[0] = 7"),
    "module": ("s = nn.Linear(4, 4)\ns.v = 2.0", "s(x) * s.v", "s.v = 3.0"),
    "tensor in an object": (
        "class C: pass\ns = C()\ns.v = torch.ones(4)",
        "x * s.v",
        "s.v = torch.zeros(4)",
    ),
    "function": ("def s(t, k=2.0): return t * k", "s(x)", "s.__defaults__ = (3.0,)"),
}

_ANSWERS = (
    "class Answers(C):\n    def __getattribute__(self, n): return super().__getattribute__(n)\n"
    "class Meta(type):\n"
    "    def __getattribute__(cls, n): return type.__getattribute__(cls, n)\n"
    "class AnswersToo(C, metaclass=Meta): pass\n"
)


@pytest.mark.parametrize("name", HANGING)
@pytest.mark.parametrize("place", ["{}", "[{}]", "types.SimpleNamespace(own={})"])
def test_state_that_hangs_on_an_argument_as_well_is_watched(name, place) -> None:
    setup, use, write = HANGING[name]
    call = Call(f"tagged(new(4), {place.format('s')}), new(4)", times=3)
    program = f"{setup}\ndef call(x, y): return {use}\n"
    check_twins(program, [call, Do(write), call, Do("s = copy.deepcopy(s)"), call])


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.skipif(reader.Reader is reader.Twin, reason="the twin tells by names")
def test_a_class_is_not_read_by_a_name_in_a_branch_that_did_not_run(name) -> None:
    program, writes = UNREAD[name]
    steps = (CALL, *[step for text in writes for step in (Do(text), CALL)])
    check(Scenario(_QUIET + program, steps, calm=True))


@pytest.mark.parametrize("way", ASKED_OF_CLASSES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_class_is_read_by_whatever_way(way, backend) -> None:
    body = ASKED_OF_CLASSES[way]
    setup = _WAYS + _ANSWERS if "Answers" in body else _WAYS
    program = f"{setup}def call(x, y):\n    {body}\n"
    call = Call("new(4).requires_grad_(), new(4)", times=3)
    writes = ["B.k = 3.0", "C.k = 4.0", "del C.k", "B.k = property(lambda self: 7.0)"]
    check(Scenario(program, (call, *[s for w in writes for s in (Do(w), call)]), backend))


@pytest.mark.parametrize("name", FOUND)
def test_twins_agree_about(name) -> None:
    program, writes = FOUND[name]
    check_twins(program, [CALL, *[step for text in writes for step in (Do(text), CALL)]])


_TALLY = "class Tally: pass\ntally = Tally()\ntally.n = 0\n"
_NUMBER = "class Number:\n    def __add__(self, other): return 7\n"
_COUNTS = "    {0}.n += 2\n    {0}.n -= 1\n    return x\n"
COUNTERS = {
    "attribute of what was exchanged": (_TALLY, "x, y", "tally", "tally = copy.copy(tally)"),
    "attribute of an argument": (_TALLY, "x, y, o=tally", "o", "o = tally"),
    "slot of an argument": (
        "class Tally: __slots__ = ('n',)\ntally = Tally()\ntally.n = 0\n",
        *("x, y, o=tally", "o", "o = tally"),
    ),
    "attribute below an argument": (
        _TALLY + "box = types.SimpleNamespace(inner=tally)\n",
        *("x, y, o=box", "o.inner", "o = box"),
    ),
    "attribute of an attribute that was exchanged": (
        _TALLY + "box = types.SimpleNamespace(inner=tally)\n",
        *("x, y", "box.inner", "box.inner = tally = copy.copy(tally)"),
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("became", ["del tally.n", "tally.n = Number()", "tally.n = 'none'"])
@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_is_none_any_more_is_not_counted_on(name, became, backend) -> None:
    setup, parameters, counter, first = COUNTERS[name]
    program = f"{setup}{_NUMBER}def call({parameters}):\n{_COUNTS.format(counter)}"
    given = ", o" if "o=" in parameters else ""
    call = Call(f"new(4), new(4){given}", times=3)
    figures = Figures()
    writes = Do(first), call, Do(became), call, Do("tally.n = 3"), call
    check(Scenario(program, (Do(first), call, *writes), backend), figures)
    assert figures.hits >= 4


# What a custom function writes, and how other code reads it: names, and what they lead to.
_MAKE = (
    "def make():\n    n = 1\n"
    "    def write():\n        nonlocal n\n        n = other\n"
    "    def use(t): return t * n\n    return write, use\nwrite, use = make()\n"
)
WRITTEN_INSIDE = {
    "global": ("n = 1", "global n; n = other", "t * n"),
    "counter": ("n = 1", "global n; n += 1", "t * n"),
    "attribute": ("o = types.SimpleNamespace(n=1)", "o.n = other", "t * o.n"),
    "class attribute": ("class o: n = 1", "o.n = other", "t * o.n"),
    "item of a dict": ("d = {'n': 1}", "d['n'] = other", "t * d['n']"),
    "item of a list": ("v = [1]", "v[0] = other", "t * v[0]"),
    "list that grows": ("v = [1]", "v.append(other)", "t * sum(v)"),
    "item further in": ("d = {'a': {'n': 1}}", "d['a']['n'] = other", "t * d['a']['n']"),
    "item of each": ("v = [[1]]", "for w in v: w[0] = other", "t * v[0][0]"),
    "one with two names": ("v = [1]\nw = v", "w[0] = other", "t * v[0]"),
    "one under a computed name": (
        "o = types.SimpleNamespace(n=1)\nname = 'n'",
        *("setattr(o, name, other)", "t * o.n"),
    ),
    "tensor": ("w = torch.ones(4)", "global w; w = w + other", "t * w"),
}
_WRITING = """other = 2
{0}
{1}class H(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        write()
        return t * 1
    @staticmethod
    def backward(ctx, g): return g * 3
def call(x, y):
    {2}t = H.apply(x)
    return {3}
"""


def check_written_inside(program, backend) -> None:
    writes = "other = 2", "other = 3", "other = 2"
    check(Scenario(program, (CALL, *[s for w in writes for s in (Do(w), CALL)]), backend))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("place", ["in the call", "in a function that starts later", "seen before"])
@pytest.mark.parametrize("name", WRITTEN_INSIDE)
def test_what_a_custom_function_writes_is_read_after_it(name, place, backend) -> None:
    setup, write, use = WRITTEN_INSIDE[name]
    functions = f"def write(): {write}\ndef use(t): return {use}\n"
    if "for " in write:
        functions = functions.replace("def write(): ", "def write():\n    ")
    before = "write(); " if place == "seen before" else ""
    after = use if place == "in the call" else "use(t)"
    check_written_inside(_WRITING.format(setup, functions, before, after), backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", ["", "write(); "])
def test_what_a_custom_function_writes_to_a_cell_is_read_after_it(before, backend) -> None:
    check_written_inside(_WRITING.format("", _MAKE, before, "use(t)"), backend)


def test_a_write_that_leaves_what_a_custom_function_left_is_not_lost() -> None:
    functions = "def write(): global n; n = other\ndef use(t): global n; n = 2; return t\n"
    check_written_inside(_WRITING.format("n = 1", functions, "", "use(t)"), "eager")


@pytest.mark.parametrize("write", ["d['n'] = other", "d[key] = other", "d.update(n=other)"])
def test_what_a_custom_function_writes_to_its_argument_is_read_after_it(write) -> None:
    program = _WRITING.format(
        "d, key = {'n': 1}, 'n'", f"def write(d): {write}\n", "", "t * d['n']"
    )
    program = program.replace("write()", "write(d)").replace("(ctx, t)", "(ctx, t, d)")
    program = program.replace("apply(x)", "apply(x, d)").replace("g * 3", "g * 3, None")
    check_written_inside(program, "eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "write", ["o.count += 1", "d['n'] += 1", "v.append(other)", "global n; n += 1"]
)
def test_what_only_a_custom_function_uses_is_its_own(write, backend) -> None:
    setup = "n, o, d, v = 0, types.SimpleNamespace(count=1, scale=2), {'n': 1, 'k': 2}, []"
    program = _WRITING.format(setup, f"def write(): {write}\n", "", "t * o.scale * d['k']")
    figures = Figures()
    check(Scenario(program, (CALL, CALL), backend), figures)
    assert figures.hits == 5


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_twins_agree_about_the(name) -> None:
    program, writes = OF_ARGUMENTS[name]
    call = Call("new(4), new(4), o", times=3)
    check_twins(program, [call, *[step for text in writes for step in (Do(text), call)]])


# A global tensor that is reached in another way as well: it dies when the global is replaced.
LET_GO = {
    "an argument, asked whether it is one": "return x * (2 if x is first else 3)",
    "an argument, asked by way of a weak reference": (
        "mine = weakref.ref(x)\n"
        "    t = x * (2 if mine() is first else 3)\n"
        "    return t * 3 if ref() is x else t"
    ),
    "an argument that is computed with": "return x * first",
    "an argument whose form is read": "return x + first.shape[0]",
    "what a weak reference leads to": "return (x if ref() is None else x + ref()) * first",
    "a weak reference's, asked whether it is one": (
        "return (x if ref() is None else x + ref()) * (2 if y is first else 3)"
    ),
    "a weak reference's, whose form is read": (
        "return x * (0 if ref() is None else ref().shape[0]) + first"
    ),
}


@pytest.mark.parametrize("name", LET_GO)
def test_a_replaced_tensor_dies_that_is(name) -> None:
    program = (
        f"first = torch.ones(4)\nref = weakref.ref(first)\ndef call(x, y):\n    {LET_GO[name]}\n"
    )
    calls = [Call("first, new(4)", times=3)] if "argument" in name else [CALL]
    replace = Do("first = torch.full((4,), 2.0); gc.collect()")
    check_twins(program, [*calls, replace, *calls, replace, CALL])


@pytest.mark.parametrize("flag", OF_ERRORS)
def test_an_error_leaves_what_the_run_set_before_it(flag) -> None:
    program = f"def call(x, y):\n    {OF_ERRORS[flag]}\n"
    call = Call("new(4).requires_grad_(), new(4)", times=2)
    reset = "torch.set_grad_enabled(True); torch.set_autocast_enabled('cpu', False)"
    check_twins(program, [call, Do(f"{reset}; torch.set_default_dtype(torch.float32)"), call])


WRITTEN = {
    "and then used without a gradient": "w.add_(1); return (x + w) * g",
    "and then used with a gradient": "w.add_(1); return g * w",
    "and then copied": "w.add_(1); v = w.clone(); return g * v * 2",
    "after its use": "t = x + w; w.add_(1); return t * g",
    "between two uses": "t = x * w; w.mul_(0.5); return t * g + w.exp() * g",
    "by a view": "w[:2].add_(1); return (x + w[1:].sum()) * g",
    "without grad mode": ("with torch.no_grad(): w.lerp_(x, 0.5)\n    return (x - w) * g"),
}


# Inductor takes seconds for each: one that has all of it, in each test run.
ONE = "between two uses"
BEHIND = [
    pytest.param(body, backend, marks=[pytest.mark.slow] * (backend == "inductor" and body != ONE))
    for body in WRITTEN
    for backend in ("aot_eager", "inductor")
]


def check_backwards(program, backend, waits, around=contextlib.nullcontext) -> None:
    def play(compile_) -> list[torch.Tensor]:
        g, w = torch.full((4,), 2.0, requires_grad=True), torch.ones(4)
        space = {"torch": torch, "g": g, "w": w}
        exec(program, space)
        call, losses = compile_(space["call"]), []
        for step in range(4):
            with around():
                result = call(torch.full((4,), float(step)))
            losses.append(result.sum())
            if not waits:
                losses.pop().backward()
        try:
            if waits:
                sum(losses).backward()
        except RuntimeError as error:  # plain autograd's: the next call wrote over what it needs
            assert "modified by an inplace operation" in str(error)
            return []
        return [g.grad, w]

    plain = play(lambda fn: fn)
    if plain:
        torch.testing.assert_close(
            play(functools.partial(tripwire.compile, backend=backend)), plain
        )


@pytest.mark.parametrize(("body", "backend"), BEHIND)
@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_finds_state_as_its_own_call_left_it(body, backend, waits) -> None:
    check_backwards(f"def call(x):\n    {WRITTEN[body]}\n", backend, waits)


@pytest.mark.parametrize(("body", "backend"), BEHIND)
@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_finds_state_where_the_call_alone_turns_gradients_on(
    body, backend, waits
) -> None:
    program = f"def call(x):\n  with torch.enable_grad():\n    {WRITTEN[body]}\n"
    check_backwards(program, backend, waits, around=torch.no_grad)


# A custom function that chooses the form of its result, and code that goes by it.
FORMS = {
    "dtype": "t = Pick.apply(x)\n    return t + 1 if t.dtype == torch.float32 else t - 1",
    "dtype, by way of `to`": "t = Pick.apply(x)\n    return t.to(torch.float64) * 2",
    "dtype, of what comes of it": "t = Pick.apply(x) * 2\n    return t.double() + t.element_size()",
    "need for a gradient": "t = Grads.apply(x)\n    return t * 2 if t.requires_grad else t * 3",
    "being None": "t = Nones.apply(x)[1]\n    return x if t is None else t * 2",
    "number": "t = Parts.apply(x)\n    return t[0] * len(t) if type(t) is tuple else t * 3",
    "number among its results": "t, n = Counts.apply(x)\n    return t * n if n > 3 else t - n",
    "dtype, the second of two": (
        "s = Pick.apply(x, torch.float16)\n    t = Pick.apply(s)\n"
        "    return t * s.element_size() - t.element_size()"
    ),
    "dtype, after a write in place": (
        "w.add_(1)\n    t = Pick.apply(x)\n    w.mul_(2)\n    return t * w * t.element_size()"
    ),
    "dtype, after a write to an attribute": (
        "t = Pick.apply(x)\n    o.last = t.element_size()\n    return t * o.last"
    ),
    "dtype, with random numbers around it": (
        "r = torch.rand(4)\n    t = Pick.apply(x + r)\n"
        "    return t * torch.rand(4) * t.element_size()"
    ),
    "dtype, with random numbers in it": (
        "t = Draws.apply(x + torch.rand(4))\n    t = Pick.apply(t)\n"
        "    return t * torch.rand(4) * t.element_size()"
    ),
}
_FORMS = "".join(
    f"class {name}(torch.autograd.Function):\n"
    f"    @staticmethod\n    def forward(ctx, t, {more}*a):\n"
    f"        log.append({name!r})\n        {body}\n"
    f"    @staticmethod\n    def backward(ctx, *g): return (None,) * {count}\n"
    for name, more, count, body in [
        ("Pick", "dtype=None, ", 2, "return (t * 2).to(dtype or C.dtype)"),
        (
            "Grads",
            "",
            1,
            "r = t * 3\n        if C.grads: ctx.mark_non_differentiable(r)\n        return r",
        ),
        ("Nones", "", 1, "return t * 2, None if C.none else t * 3"),
        ("Parts", "", 1, "return (t * 2, t * 3) if C.parts else t * 2"),
        ("Counts", "", 1, "return t * 2, 4 if C.parts else 3"),
        ("Draws", "", 1, "return t * torch.rand(4)"),
    ]
)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_goes_by_what_a_custom_function_returned_in_this_call(name, backend) -> None:
    program = (
        "class C: dtype, grads, none, parts = torch.float32, False, False, False\n"
        f"log = []\n{_FORMS}o, w = C(), torch.ones(4)\no.n = 1\n"
        f"def call(x, y):\n    {FORMS[name]}\n"
    )
    call = Call("new(4).requires_grad_(), new(4)", times=3)
    turns = ["torch.float64, True, True, True", "torch.float32, False, False, False"]
    writes = [Do(f"C.dtype, C.grads, C.none, C.parts = {turn}") for turn in turns]
    figures = Figures()
    check(Scenario(program, (call, writes[0], call, writes[1], call), backend), figures)
    assert figures.hits >= 4


# State that is computed anew in each call, and leads to one result only.
_STORED = "m.h = torch.tanh(m.w * m.h.detach() + x)"
HISTORIES = {
    "beside a result": f"t = x * m.w + m.h\n    {_STORED}\n    return t + m.h",
    "in two results": f"t = x * m.w + m.h\n    {_STORED}\n    return t, m.h",
    "by way of a view": f"t = x * m.w + m.h[:]\n    {_STORED}\n    return t",
    "behind a custom function": f"t = Once.apply(x * m.w + m.h)\n    {_STORED}\n    return t + m.h",
    "before a custom function": (
        f"t = x * m.w + m.h\n    {_STORED}\n    return Once.apply(t) * 2 + m.h"
    ),
    "beside a size that values decide": (
        f"t = (x * m.w + m.h)[x > 0]\n    {_STORED}\n    return t.sum() + m.h"
    ),
    "of another result": "t, m.h = Once.apply(m.h) + m.w, x * m.w\n    return t + m.h",
}
_ONCE = (
    "class M: pass\nm = M()\nm.w, m.h = nn.Parameter(torch.ones(4)), torch.zeros(4)\nlog = []\n"
    "class Once(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, t): return t * 2\n"
    "    @staticmethod\n    def backward(ctx, g):\n        log.append(1)\n        return g.sin()\n"
)


@pytest.mark.parametrize("name", HISTORIES)
def test_state_keeps_its_own_history_and_no_other_behind_a_compiler(name) -> None:
    program = f"{_ONCE}def call(x, y):\n    {HISTORIES[name]}\n"
    check(Scenario(program, (Call("new(4), new(4)", times=6),), "aot_eager"))


@pytest.mark.parametrize("name", HISTORIES)
def test_the_history_of_state_does_not_grow_with_each_call(name) -> None:
    space = {"torch": torch, "nn": torch.nn}
    exec(f"{_ONCE}def call(x):\n    {HISTORIES[name]}\n", space)
    call = tripwire.compile(space["call"], backend="aot_eager")
    x = torch.tensor([1.0, -1.0, 2.0, 0.5])
    counts = []
    for _ in range(6):
        call(x)
        counts.append(_count_nodes(space["m"].h.grad_fn))
    assert counts[3] == counts[4] == counts[5]


def _count_nodes(fn: object) -> int:
    met, open_ = set(), [fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in met:
            met.add(node)
            open_ += [before for before, _ in node.next_functions]
    return len(met)


# What a backward needs is computed from an input, wants no gradient itself, and the input changes.
USED_THEN_WRITTEN = {
    "with a view": "t = x.sin() * m.w + m.h\n    m.h = t.detach()\n    x[..., 1:3].add_(1)",
    "whole": "t = x.sin() * m.w\n    x.mul_(2)",
    "under no_grad": "with torch.no_grad(): s = x.sin()\n    t = s * m.w\n    x.add_(1)",
    "as state": "t = m.b.sin() * m.w + x\n    m.b.add_(1)",
    "by an item": "t = x.view(2, 2).sin().flatten() * m.w\n    x[0] = 7",
    "between two writes": "x.add_(1)\n    t = x.sin() * m.w\n    x.add_(1)",
    "after it was added to state": "m.b.add_(x)\n    t = x.sin() * m.w\n    x.add_(1)",
    "by way of new memory": "s = torch.zeros(4).add_(x)\n    t = s.sin() * m.w\n    x.add_(1)",
    "by way of a copy": "s = x.cos()\n    x.copy_(s * 2)\n    t = s * m.w",
    "by way of state": "m.b.copy_(x[0])\n    x.add_(1)\n    t = m.b.sin() * m.w",
    "beside statistics": (
        "t = F.batch_norm(x.view(2, 2), m.mean, m.var, training=True).view(4) * m.w\n    x.add_(1)"
    ),
}
WRITTEN_THEN_USED = {
    "once": "x.add_(1)\n    t = x.sin() * m.w",
    "in two steps": "x.mul_(2)\n    x[1:3].add_(1)\n    t = x.sin().cos() * m.w",
    "with what it was": "x.add_(x.sin())\n    t = x.sin() * m.w",
    "as a mean": "m.b.mul_(0.5).add_(x, alpha=0.5)\n    t = (x - m.b).tanh() * m.w",
    "as statistics, twice": (
        "s = F.batch_norm((x * m.w).view(2, 2), m.mean, m.var, training=True)\n"
        "    t = F.batch_norm(s.sin(), m.mean, m.var, training=True)"
    ),
}
_CHANGED = (
    "class M: pass\nm = M()\nm.w, m.h, m.b = nn.Parameter(torch.ones(4)), torch.zeros(4), "
    "torch.arange(4.0)\nm.mean, m.var = torch.zeros(2), torch.ones(2)\n"
)
_CHANGING = (
    Call("new(4), new(4)", around="torch.no_grad()", times=3),
    Call("new(4), new(4)", times=4),
)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(
            *(backend, name),
            marks=[pytest.mark.slow]
            * (backend == "inductor" and name not in ("whole", "as state")),
        )
        for backend in ("eager", "aot_eager", "inductor")
        for name in USED_THEN_WRITTEN
    ],
)
def test_a_backward_has_what_an_input_was(backend, name) -> None:
    program = f"{_CHANGED}def call(x, y):\n    {USED_THEN_WRITTEN[name]}\n    return t\n"
    check(Scenario(program, _CHANGING, backend))


@pytest.mark.parametrize("name", WRITTEN_THEN_USED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_an_input_is_after_its_last_write_is_used_in_compiled_code(backend, name) -> None:
    program = f"{_CHANGED}def call(x, y):\n    {WRITTEN_THEN_USED[name]}\n    return t\n"
    figures = Figures()
    check(Scenario(program, _CHANGING, backend), figures)
    assert figures.hits >= 5


@pytest.mark.parametrize("name", BEHIND_AOT)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_twins_agree_behind(backend, name) -> None:
    arguments = "new(4).requires_grad_()", "new(4)", "new(8)[:4].requires_grad_()"
    calls = [Call(f"{x}, new(4)", times=3) for x in arguments]
    check(Scenario(BEHIND_AOT[name], (*calls, Do("gc.collect()"), *calls), backend))


def test_gradients_are_asked_for_without_grad_mode() -> None:
    program = "d = {'k': torch.ones(4)}\ndef call(x, y): return x * d['k'].requires_grad, d['k']\n"
    call = Call("new(4), new(4)", around="torch.no_grad()", times=3)
    check_twins(program, [call, Do("d['k'].mul_(torch.ones(4).requires_grad_())"), call])


def test_a_tensor_that_hides_a_class_attribute_is_compiled() -> None:
    figures = Figures()
    program = (
        "class Config: mask = None\no = Config()\no.mask = torch.ones(4)\n"
        "def call(x, y): return x if o.mask is None else x * o.mask\n"
    )
    check_twins(
        program, [CALL, Do("o.mask = torch.zeros(4)"), CALL, Do("del o.mask"), CALL], figures
    )
    assert figures.hits == 7  # a mask of the same form takes the place of the other


# State that a call makes longer until it no longer does: a guard asks for its size, which is open.
GROWN = {
    "an attribute": (
        "class C: pass\nc = C()\nc.k = torch.zeros(1, 4)\n"
        "def call(x, y):\n    t = x + c.k.shape[0]\n"
        "    if c.k.shape[0] < 6: c.k = torch.cat([c.k, t])\n    return t",
        ["c.k = torch.ones(9, 4)", "c.k = torch.ones(2, 4)", "c.k.unsqueeze_(0)"],
    ),
    "a global": (
        "k = torch.zeros(1, 4)\ndef grow(t):\n    global k\n    k = torch.cat([k, t])\n"
        "def call(x, y):\n    t = x + k.sum(0)\n    if len(k) < 6: grow(t)\n"
        "    return t * k.shape[0]",
        ["k = torch.ones(9, 4)", "k = torch.ones(2, 4)", "k = torch.ones(7, 4).double()"],
    ),
    "an item of a dict": (
        "d = {'k': torch.zeros(1, 4)}\n"
        "def call(x, y):\n    if x.shape[0] == 2: d['k'] = torch.cat([d['k'], x])\n"
        "    return x.sum() + d['k'][: d['k'].shape[0] // 2].sum(0)",
        ["d['k'] = torch.ones(9, 4)", "d['k'] = torch.ones(4, 4)", "d['k'] = d['k'].clone()"],
    ),
    "an item of a list": (
        "l = [torch.zeros(1, 4), 0]\n"
        "def call(x, y):\n    t = x + len(l[0])\n"
        "    if y.sum() > 0: l[0] = torch.cat([l[0], t])\n    return t + l[0].shape[0]",
        ["l[0] = torch.ones(9, 4)", "l[0] = torch.ones(2, 4)", "l.reverse(); l.reverse()"],
    ),
    "a buffer": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('k', torch.zeros(1, 4))\n"
        "    def forward(self, x, y):\n"
        "        if self.training: self.k = torch.cat([self.k, x])\n"
        "        return x + self.k.mean(0) * self.k.size(0)\ncall = Net()",
        ["call.eval()", "call.k = torch.ones(5, 4)", "call.train()", "call.eval()"],
    ),
    "two attributes": (
        "class C: pass\nc = C()\nc.k, c.v = torch.zeros(1, 4), torch.zeros(1, 4)\n"
        "def call(x, y):\n"
        "    if x.shape[0] == 2: c.k, c.v = torch.cat([c.k, x]), torch.cat([c.v, x * 2])\n"
        "    return x.sum(0) + (c.k * c.v).sum(0) + (1 if c.k.shape == c.v.shape else 2)",
        ["c.v = c.v[:3]; c.k = c.k[:3]", "c.k = c.v"],
    ),
}


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_state_that_stops_growing_is(backend, name) -> None:
    program, writes = GROWN[name]
    two, three = Call("new(2, 4), new(4)", times=5), Call("new(3, 4), new(4)", times=3)
    calls = [two, three, Call("new(2, 4), -new(4).abs()", times=3), two]
    steps = [*calls, *[step for text in writes for step in (Do(text), *calls)]]
    figures = Figures()
    check(Scenario(program, tuple(steps), backend), figures)
    assert figures.share > 0.7


# A backward inside of a call lets go of what it went through, and of nothing else.
OTHER_PASTS = {
    "a result": "loss = (w * y).sum()\n    t = x * 2\n    loss.backward()\n    return t",
    "a result that needs saved values": (
        "loss = (w * y).sum()\n    t = (x * v).sin()\n    loss.backward()\n    return t"
    ),
    "a result between two": (
        "(w * y).sum().backward()\n    t = x * v\n    (w * 2).sum().backward()\n    return t"
    ),
    "another loss": (
        "a, b = (w * y).sum(), (v * x).sum()\n    a.backward()\n    b.backward()\n    return x * 2"
    ),
    "another loss that is used then": (
        "a, b = (w * y).sum(), (v * y).sum()\n    a.backward()\n    return x * b"
    ),
    "a result that is written": (
        "loss, t = (w * y).cos().sum(), torch.zeros(4)\n    t.add_(x * v)\n"
        "    loss.backward()\n    return t * 2"
    ),
    "state": "a = (w * y).sum()\n    kept.h = v * x\n    a.backward()\n    return kept.h.sum()",
}


@pytest.mark.parametrize("name", OTHER_PASTS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward_inside_keeps_the_past_of(backend, name) -> None:
    program = (
        "w, v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))\n"
        "class Kept: pass\nkept = Kept()\n"
        f"def call(x, y):\n    w.grad = v.grad = None\n    {OTHER_PASTS[name]}\n"
    )
    call = Call("new(4).requires_grad_(), new(4)", times=3)
    figures = Figures()
    check(Scenario(program, (call, call), backend), figures)
    assert figures.hits > 3


# AOTAutograd marks the results of a graph with open sizes, and state may be one of them.
RETURNED_STATE = {
    "a tensor": ("torch.ones(4)", "a"),
    "a parameter": ("nn.Parameter(torch.ones(4))", "a"),
    "a view": ("torch.ones(8)[:4]", "a"),
    "one that is written": ("torch.ones(4)", "a.add_(1)"),
    "one that is returned twice": ("torch.ones(4)", "[a, (a,)]"),
    "one beside its view": ("torch.ones(1, 4)", "(a, a[0])"),
}


@pytest.mark.parametrize("name", RETURNED_STATE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_mark_is_left_on_state_that_is_returned(backend, name) -> None:
    made, result = RETURNED_STATE[name]
    program = f"a = {made}\ndef call(x, y):\n    return x + a, {result}\n"
    calls = [Call(f"new({n}, 4), new(4)", times=2) for n in (2, 3, 4, 5)]
    figures = Figures()
    check(Scenario(program, tuple(calls), backend), figures)
    assert figures.hits > 3


# Code that looks past a class's own lookups reads all that was met: tensors in slots, too.
LOOKED_PAST = [
    "o.__getattribute__('k')",
    "object.__getattribute__(o, 'k')",
    "o.__getstate__()['k']",
]
OF_FORM = {
    "requires_grad": "o1.a.requires_grad_(not o1.a.requires_grad)",
    "dtype == torch.float64": "o1.a.data = o1.a.data.double()",
    "shape[0]": "o1.a.resize_(2)",
    "is_leaf": "o1.a = torch.ones(4, requires_grad=True) * 2",
}


@pytest.mark.parametrize("form", OF_FORM)
@pytest.mark.parametrize("past", LOOKED_PAST)
def test_the_form_of_a_tensor_in_a_slot_is_watched(past, form) -> None:
    program = (
        "class C: __slots__ = ('a', '__weakref__')\nclass D(C): __slots__ = ('b',)\n"
        "class P: pass\no, o1 = P(), D()\no.k, o1.a, o1.b = 2.0, torch.ones(4), 1.0\n"
        f"def call(x, y): return x * (1 + 3 * o1.a.{form}) * {past} * o1.b\n"
    )
    call = Call("new(4), new(4)", times=3)
    check(Scenario(program, (call, Do(OF_FORM[form]), call, Do("o1.b = 2.0"), call), "eager"))


# A float that varies is made an int twice; in between the int was closed.
MADE_INT = {
    "int": "int(o.k)",
    "floor": "math.floor(o.k)",
    "ceil": "math.ceil(o.k)",
    "round": "round(o.k)",
    "floor division": "int(o.k // 1)",
}


@pytest.mark.parametrize("made", MADE_INT)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_int_that_was_closed_is_made_again(backend, made) -> None:
    program = (
        "import math\nclass P: pass\no = P()\no.k = 2.0\n"
        "def call(x, y):\n"
        f"    for i in range({MADE_INT[made]}): x = x + i\n"
        f"    return x * sum(range({MADE_INT[made]})) + o.k\n"
    )
    call = Call("new(4), new(4)", times=3)
    writes = [step for k in (6.0, 7.5, 3.25, 6.0) for step in (Do(f"o.k = {k}"), call)]
    check(Scenario(program, (call, *writes), backend))


@pytest.mark.parametrize("write", ["w.data.mul_(0.5)", "w.data[1:].mul_(0.5)", "w.data[0] = y[0]"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_written_through_data_is_undone_where_a_call_turns_back(backend, write) -> None:
    program = (
        "w, steps = nn.Parameter(torch.arange(4.0)), [1.0]\n"
        f"def call(x, y):\n    {write}\n    x = x * w\n"
        "    x = x * (2 if bool(y[0] > 0) else 3)\n    steps.append(1.0)\n    return x\n"
    )
    check(Scenario(program, (Call("new(4), new(4)", times=8),), backend))


# Code of before torch 0.4 makes tensors so. A graph has a tuple for a size: that would be values.
MADE_NEW = (
    "x.new(x.size()).fill_(2.0)",
    "x.new(x.shape[-1:]).zero_() + 1",
    "x.new(torch.Size([2, x.shape[0]])).fill_(3.0).sum()",
    "x.new(x.sum().size()).fill_(4.0)",
    "x.new(x.shape[0], 4).fill_(5.0).sum()",
    "x.new((x.shape[0], 1.0)).sum()",
    "torch.distributions.Geometric(torch.full((4,), 0.5)).sample()",
    "torch.distributions.Multinomial(3, torch.ones(4)).sample()",
)


@pytest.mark.parametrize("made", MADE_NEW)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_new_tensor_of_a_given_size_has_that_size(backend, made) -> None:
    calls = [Call(f"new({n}, 4), new(4)", times=2) for n in (2, 3, 5, 6)]
    check(Scenario(f"def call(x, y): return x + {made}\n", tuple(calls), backend))


# Where a float varies, tripwire computes such a layer itself.
EMPTY = {
    "batch norm": ("nn.BatchNorm1d(4)", ("net.eps = 0.5", "net.eps = 0.25", "net.eps = 0.125")),
    "momentum": ("nn.BatchNorm1d(4)", ("net.momentum = 0.5", "net.momentum = 0.25")),
    "batch norm in double": ("nn.BatchNorm1d(4).double()", ("net.eps = 0.5", "net.eps = 0.25")),
    "group norm": ("nn.GroupNorm(2, 4)", ("net.eps = 0.5", "net.eps = 0.25")),
    "layer norm": ("nn.LayerNorm(4)", ("net.eps = 0.5", "net.eps = 0.25")),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_norm_of_nothing_moves_no_statistics(name) -> None:
    made, writes = EMPTY[name]
    program = f"net = {made}\ndef call(x, y): return net(x.to(net.weight.dtype))\n"
    calls = [Call(f"new({n}, 4), new(4)", times=2) for n in (2, 0, 0, 3)]
    steps = [*calls, *(step for write in writes for step in (Do(write), *calls))]
    check(Scenario(program, tuple(steps), "aot_eager"))


# `out=` gives its tensor another size, and nothing reports that.
RESIZED = {
    "out of empty state": (
        "torch.add(x, 1, out=held)\n    return x + held.shape[0]",
        ("held = torch.zeros(0)", "torch.add(torch.ones(3), 1, out=held)"),
    ),
    "a size that is read": (
        "return x + held.shape[0] + held.sum()",
        ("torch.add(torch.ones(3), 1, out=held)", "held.resize_(0)"),
    ),
    "a form alone": ("return x + len(held)", ("torch.add(torch.ones(3), 1, out=held)",)),
    "what is joined": (
        "return torch.cat([held, x.reshape(-1)])",
        ("torch.ones(3, out=held)", "held = torch.zeros(0)", "torch.cat([y0] * 2, out=held)"),
    ),
}


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_size_that_a_result_gives_to_state_is_seen(backend, name) -> None:
    body, writes = RESIZED[name]
    program = f"held, y0 = torch.zeros(0), torch.ones(4)\ndef call(x, y):\n    {body}\n"
    calls = [Call("new(4), new(4)", times=2), Call("new(2, 4), new(4)", times=2)]
    steps = [*calls, *calls, *(step for write in writes for step in (Do(write), *calls))]
    check(Scenario(program, tuple(steps), backend))


@pytest.mark.parametrize(
    "asked", ["torch.numel(input=x[x > 0])", "torch.is_floating_point(input=x)"]
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_question_whose_tensor_is_named_is_answered(backend, asked) -> None:
    calls = [Call(f"new({n}, 4), new(4)", times=2) for n in (2, 3, 4, 5)]
    program = f"def call(x, y):\n    n = x[x > 0].numel()\n    return x + {asked} + n\n"
    check(Scenario(program, tuple(calls), backend))


# No input of the graph leads to the value that decides: only code that reads or counts for itself.
_OF_THE_BACKWARD = "torch.autograd.grad(Own.apply(w := torch.ones(4, requires_grad=True)).sum(), w)"
OWN_STATE = {
    "a number that a forward reads": ("t * o.k", "g", "Own.apply(torch.ones(4))"),
    "a tensor that a forward reads": ("t * held", "g", "Own.apply(torch.ones(4))"),
    "what a forward draws": ("t * o.draw() * 8", "g", "Own.apply(torch.ones(4))"),
    "what a forward counts": ("t * o.count()", "g", "Own.apply(torch.ones(4))"),
    "a number that a backward reads": ("t * 2", "g * o.k", f"{_OF_THE_BACKWARD}[0]"),
    "a tensor that a backward reads": ("t * 2", "g * held", f"{_OF_THE_BACKWARD}[0]"),
    "what a backward counts": ("t * 2", "g * o.count()", f"{_OF_THE_BACKWARD}[0]"),
}


@pytest.mark.parametrize("used", ["x + (1 if made.sum() > 20 else 2)", "x * made.sum().item()"])
@pytest.mark.parametrize("name", OWN_STATE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_value_that_code_makes_of_state_of_its_own_is_not_the_same_each_time(
    backend, name, used
) -> None:
    forward, backward, made = OWN_STATE[name]
    program = (
        "class O:\n    k, n = 2.0, 0\n    def count(self):\n        self.n += 1\n"
        "        return self.n\n    def draw(self): return torch.rand(4, generator=own)\n"
        "o, held, own = O(), torch.ones(4), torch.Generator().manual_seed(3)\n"
        "class Own(torch.autograd.Function):\n    @staticmethod\n"
        f"    def forward(ctx, t): return {forward}\n    @staticmethod\n"
        f"    def backward(ctx, g): return {backward}\n"
        f"def call(x, y):\n    made = {made}\n    return {used}\n"
    )
    writes = ("o.k = 9.0", "held.fill_(9.0)", "o.k = 1.0", "o.n = 9", "held.fill_(1.0)")
    call = Call("new(4), new(4)", times=4)
    steps = [call, *(step for write in writes for step in (Do(write), call))]
    check(Scenario(program, tuple(steps), backend))
