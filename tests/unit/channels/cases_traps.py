"""Traps: programs that once fooled a part of tripwire, or looked as if they could."""

from unit.channels.channel import Family

FAMILY = Family("traps")
case = FAMILY.case


def effect(name: str, source: str, *, state: str = "None", **more: object) -> None:
    """A case in which the calls themselves write."""
    more.setdefault("changes", bool(more.get("writes")))
    case(name, source, state=state, **more)


# --- references and identity --------------------------------------------------------------------

case(
    "tensor attribute that dies and becomes None",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = torch.ones(4)
        def forward(self, x):
            return x * 2 if self.mask is not None else x * 3
    call = Net()
    """,
    writes=["call.mask = None"],
)
case(
    "callback argument that becomes None",
    "def call(x, f=None): return x * 2 if f is None else f(x)",
    inputs=["x, lambda x: x * 5", "x, None"],
)
case(
    "argument that is also state, then only equal",
    """
    class Config:
        scale = 2.0
    CURRENT = Config()
    SEEN = [CURRENT]
    def call(x, c): return x * 2 if c is CURRENT and c in SEEN else x * 3
    """,
    inputs=["x, CURRENT", "x, Config()"],
)
case(
    "two sources of a tensor that the run replaces",
    """
    H = torch.ones(4)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = H
        def forward(self, x):
            self.h = self.h + 1
            return self.h + H
    call = Net()
    """,
    writes=["H = torch.zeros(4)"],
)

# --- what a run changes in place ------------------------------------------------------------------

case(
    "shape read before it is changed",
    """
    def call(t):
        n = t.shape[0]
        t.unsqueeze_(0)
        return t * n
    """,
    inputs=["x", "m[:1]"],
)
effect(
    "attribute counted on a tensor",
    """
    T = torch.ones(4)
    def call(x):
        T.seen = getattr(T, "seen", 0) + 1
        return x * 2
    """,
    state="T.seen",
)
for _operator in ("*= 2", "^= 1", "//= 2", "%= 3", "<<= 1"):
    effect(
        f"counter that is updated by {_operator}",
        f"""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.n = 100
            def forward(self, x):
                self.n {_operator}
                return x * 2
        call = Net()
        """,
        state="call.n",
    )
effect(
    "deque that grows on the left",
    """
    from collections import deque
    D = deque()
    def call(x):
        D.appendleft(float(len(D)))
        return x * 2
    """,
    state="list(D)",
)
effect(
    "set that gets what it has",
    """
    S = {"a"}
    def call(x):
        S.add("a")
        return x * 2
    """,
    writes=["S.clear()"],
    state="sorted(S)",
    changes=False,
)
effect(
    "list that gets what it has",
    """
    L = [5]
    def call(x):
        L[0] = 5
        return x * 2
    """,
    writes=["L[0] = 0"],
    state="L",
    changes=False,
)
effect(
    "items swapped in an argument",
    """
    def call(x, d):
        d["a"], d["b"] = d["b"], d["a"]
        return x * 2
    """,
    inputs=["x, {'a': [1], 'b': [2]}"],
)
effect(
    "object taken out of an argument and returned",
    """
    def call(x, d):
        o = d.pop("o")
        return x * 2, o
    """,
    inputs=["x, {'o': [1]}"],
)
effect(
    "object written after its path moved",
    """
    class Box:
        def __init__(self, n): self.n = n
    class Pair:
        def __init__(self): self.box, self.other = Box(1), Box(2)
    def call(x, o):
        b = o.box
        o.box = o.other
        b.n = 5
        return x * 2, b, o.other
    """,
    inputs=["x, Pair()"],
)
effect(
    "counter inside a custom autograd function",
    """
    class Double(torch.autograd.Function):
        calls = 0
        @staticmethod
        def forward(ctx, x):
            Double.calls += 1
            return x * 2
        @staticmethod
        def backward(ctx, g): return g * 2
    def call(x): return Double.apply(x)
    """,
    state="Double.calls",
)
effect(
    "error on a hit, after effects and random numbers",
    """
    SEEN = []
    def call(x, i):
        SEEN.append(1)
        return x * torch.rand(4) + torch.ones(3)[i]
    """,
    inputs=["x, torch.tensor([0])", "x, torch.tensor([9])", "x, torch.tensor([1])"],
    state="len(SEEN), torch.get_rng_state().sum()",
)
effect(
    "error on a hit, after a write in place and effects",
    """
    SEEN, TOTAL = [], torch.zeros(3)
    def call(x, i):
        SEEN.append(1)
        TOTAL.add_(1)
        y = x + torch.ones(3)[i]
        SEEN.append(2)
        TOTAL.mul_(2)
        return y
    """,
    inputs=["x, torch.tensor([0])", "x, torch.tensor([9])", "x, torch.tensor([1])"],
    state="list(SEEN), TOTAL",
)

# --- what is handed out --------------------------------------------------------------------------

effect(
    "mutable objects made by the call",
    """
    from collections import Counter
    KEPT = []
    def call(x):
        made = bytearray(b"ab"), Counter("aab"), [1]
        KEPT.append(made[0])
        return x * 2, *made
    """,
    state="len({id(k) for k in KEPT})",
)
effect(
    "closure made by the call",
    """
    def call(x):
        n = [0]
        def tick():
            n[0] += 1
            return n[0]
        return x * 2, tick() + tick()
    """,
)

# --- values and containers -----------------------------------------------------------------------

case(
    "subclasses of numbers and strings",
    """
    class F(float): pass
    class S(str): pass
    def call(x, f, s): return x * f + len(s)
    """,
    inputs=["x, F(2.0), S('a')", "x, F(3.0), S('a')", "x, F(3.0), S('abc')"],
)
case(
    "range and slice that only equal",
    "def call(x, r, s): return x * r.stop + isinstance(s.stop, bool)",
    inputs=["x, range(0, 3, 2), slice(0, 1)", "x, range(0, 4, 2), slice(0, True)"],
)
case(
    "defaults that only equal",
    """
    def helper(x, k=1): return x * 2 if type(k) is int else x * 3
    def call(x): return helper(x)
    """,
    writes=["helper.__defaults__ = (1.0,)"],
)
case(
    "dict of twenty thousand",
    """
    TABLE = {i: float(i) for i in range(20_000)}
    def call(x): return x * TABLE[15_000]
    """,
    writes=["TABLE[15_000] = 3.0"],
    unrelated=["TABLE[1] = 3.0"],
)
case(
    "unread tensors in arguments",
    "def call(batch): return batch['x'] * 2",
    inputs=["{'x': x, 'y': y}", "{'x': y, 'y': x}"],
)
case(
    "dict subclass that counts its reads",
    """
    READS = []
    class D(dict):
        def __getitem__(self, key):
            READS.append(key)
            return dict.__getitem__(self, key)
    def call(x, d): return x * d["a"]
    """,
    inputs=["x, D(a=2.0)", "x, D(a=3.0)"],
    state="len(READS)",
)
case(
    "IntEnum in a global",
    """
    import enum
    class E(enum.IntEnum):
        A = 1
        B = 2
    MODE = E.A
    def call(x): return x * 2 if MODE is E.A else x * 3
    """,
    writes=["MODE = E.B"],
)

# --- names in disguise ---------------------------------------------------------------------------

case(
    "getattr under another name",
    """
    fetch = getattr
    class Config: pass
    CONFIG = Config()
    CONFIG.scale = 2.0
    NAME = "sc" + "ale"
    def call(x): return x * fetch(CONFIG, NAME)
    """,
    writes=["CONFIG.scale = 3.0"],
)
case(
    "property that adds up its object's dict",
    """
    class Config:
        def __init__(self): self.a = 2.0
        @property
        def total(self): return sum(self.__dict__.values())
    CONFIG = Config()
    def call(x): return x * CONFIG.total
    """,
    writes=["CONFIG.a = 3.0", "CONFIG.b = 1.0"],
)
case(
    "weak proxy",
    """
    import weakref
    class Config:
        scale = 2.0
    CONFIG = Config()
    PROXY = weakref.proxy(CONFIG)
    def call(x): return x * PROXY.scale
    """,
    writes=["CONFIG.scale = 3.0"],
)
case(
    "Python module reached through a closure",
    """
    import types
    def build():
        config = types.ModuleType("config")
        config.scale = 2.0
        def call(x): return x * config.scale
        return call, config
    call, config = build()
    """,
    writes=["config.scale = 3.0"],
    unrelated=["config.other = 1"],
)

# --- torch ---------------------------------------------------------------------------------------

case(
    "method of a class of torch's replaced",
    """
    call = nn.Sequential(nn.LayerNorm(4))
    plain = nn.LayerNorm.forward
    modes.callback(setattr, nn.LayerNorm, "forward", plain)
    """,
    writes=[
        "nn.LayerNorm.forward = lambda self, x: plain(self, x) * 2",
        "nn.LayerNorm.forward = plain",
    ],
)
case(
    "random value taken under another name",
    "def call(x): return x * torch.binomial(torch.full((1,), 10.0), torch.full((1,), 0.5)).item()",
    state="torch.get_rng_state().sum()",
    changes=False,
)
case(
    "autocast dtype set outside of autocast",
    """
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    LAYER = nn.Linear(4, 4)
    def call(x):
        with torch.autocast("cpu"):
            return LAYER(x).dtype == torch.bfloat16
    """,
    writes=[
        "torch.set_autocast_dtype('cpu', torch.float16)",
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
    ],
)

# --- state of the library's ----------------------------------------------------------------------

case(
    "attribute put on a module of torch's",
    """
    torch.trap_scale = 2.0
    def call(x): return x * torch.trap_scale
    """,
    writes=["torch.trap_scale = 3.0", "del torch.trap_scale; torch.trap_scale = 4.0"],
    unrelated=["torch.trap_other = 1"],
)
case(
    "attribute put on a module of the standard library's",
    """
    import math
    math.trap_scale = 2.0
    def call(x): return x * math.trap_scale
    """,
    writes=["math.trap_scale = 3.0"],
    unrelated=["math.trap_other = 1"],
)
case(
    "function of the standard library's replaced",
    """
    import math
    math.trap_floor = math.floor
    def call(x): return x * math.trap_floor(2.5)
    """,
    writes=["math.trap_floor = math.ceil", "math.trap_floor = lambda v: 7.0"],
)
case(
    "attribute put on the class of tensors",
    """
    torch.Tensor.trap_scale = 2.0
    def call(x): return x * x.trap_scale
    """,
    writes=["torch.Tensor.trap_scale = 3.0"],
    unrelated=["torch.Tensor.trap_other = 1"],
)
case(
    "attribute put on a class of the standard library's",
    """
    import argparse
    argparse.Namespace.trap_scale = 2.0
    ARGS = argparse.Namespace()
    def call(x): return x * ARGS.trap_scale
    """,
    writes=["argparse.Namespace.trap_scale = 3.0"],
)
case(
    "command line",
    """
    import sys
    sys.argv[:] = ["prog"]
    def call(x): return x * (3 if "--triple" in sys.argv else 2)
    """,
    writes=["sys.argv.append('--triple')", "sys.argv = ['prog']"],
)
case(
    "module found in sys.modules",
    """
    import sys
    import neighbour
    NAME = neighbour.__name__
    def call(x): return x * sys.modules[NAME].SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["neighbour.SCALE = 3.0"],
)
case(
    "module imported by a computed name",
    """
    import importlib
    import neighbour
    NAME = neighbour.__name__
    def call(x): return x * importlib.import_module(NAME).SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["neighbour.SCALE = 3.0"],
)
case(
    "presence of a module",
    """
    import sys
    sys.modules.pop("trap_plugin", None)
    def call(x): return x * (3 if "trap_plugin" in sys.modules else 2)
    """,
    writes=["sys.modules['trap_plugin'] = sys", "del sys.modules['trap_plugin']"],
)
case(
    "decimal context",
    """
    import decimal
    decimal.getcontext().prec = 3
    def call(x): return x * float(decimal.Decimal(1) / decimal.Decimal(3))
    """,
    writes=["decimal.getcontext().prec = 1", "decimal.getcontext().prec = 28"],
)
case(
    "anomaly mode",
    """
    torch.autograd.set_detect_anomaly(False)
    def call(x): return x * (3 if torch.is_anomaly_enabled() else 2)
    """,
    writes=["torch.autograd.set_detect_anomaly(True)", "torch.autograd.set_detect_anomaly(False)"],
)
case(
    "deterministic algorithms that only warn",
    """
    torch.use_deterministic_algorithms(True)
    def call(x): return x * torch.get_deterministic_debug_mode()
    """,
    writes=[
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.use_deterministic_algorithms(False)",
    ],
)
case(
    "autocast's cache",
    """
    torch.set_autocast_cache_enabled(True)
    def call(x): return x * (3 if torch.is_autocast_cache_enabled() else 2)
    """,
    writes=["torch.set_autocast_cache_enabled(False)", "torch.set_autocast_cache_enabled(True)"],
)
case(
    "warnings always",
    """
    torch.set_warn_always(False)
    def call(x): return x * (3 if torch.is_warn_always_enabled() else 2)
    """,
    writes=["torch.set_warn_always(True)", "torch.set_warn_always(False)"],
)
case(
    "NumPy's error state",
    """
    import numpy
    numpy.seterr(over="warn")
    def call(x): return x * (3 if numpy.geterr()["over"] == "ignore" else 2)
    """,
    writes=["numpy.seterr(over='ignore')", "numpy.seterr(over='warn')"],
)
case(
    "environment in bytes",
    """
    import os
    os.environ["TRAP_SCALE"] = "2"
    def call(x): return x * float(os.environb[b"TRAP_SCALE"])
    """,
    writes=["os.environ['TRAP_SCALE'] = '3'", "os.environb[b'TRAP_SCALE'] = b'4'"],
)
case(
    "recursion limit",
    """
    import sys
    OLD = sys.getrecursionlimit()
    def call(x): return x * (sys.getrecursionlimit() - OLD + 1)
    """,
    writes=["sys.setrecursionlimit(OLD + 5)", "sys.setrecursionlimit(OLD)"],
)
effect(
    "method that C code calls",
    """
    OUT = []
    def call(x):
        list(map(OUT.append, [1, 2]))
        return x * 2
    """,
    state="list(OUT)",
)
effect(
    "draw by C code",
    """
    import random
    R = random.Random(3)
    def call(x):
        return x * sum(map(R.uniform, [0, 0], [1, 1]))
    """,
    state="R.getstate()[1][-1]",
    changes=False,
)
effect(
    "NumPy generator of the user's",
    """
    import numpy
    R = numpy.random.default_rng(3)
    def call(x): return x * R.random()
    """,
    state="R.bit_generator.state['state']['state']",
    changes=False,
)
effect(
    "NumPy generator behind an attribute",
    """
    import numpy
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.draws = numpy.random.default_rng(3)
        def forward(self, x):
            return x * float(self.draws.normal())
    call = Net()
    """,
    state="call.draws.bit_generator.state['state']['state']",
    changes=False,
)

# --- functions of torch's that others stand in for ------------------------------------------------

for _owner, _name, _new, _body in (
    ("torch.Tensor", "relu", "lambda s: OLD(s) * 2", "x.relu()"),
    ("torch.Tensor", "add_", "lambda s, o: OLD(s, o * 3)", "x.add_(1)"),
    ("torch.Tensor", "norm", "lambda s: OLD(s) * 2", "x.norm()"),
    ("torch.Tensor", "mT", "property(lambda s: OLD.__get__(s) * 2)", "x.view(2, 2).mT"),
    ("torch", "relu", "lambda s: OLD(s) * 2", "torch.relu(x)"),
    ("torch.nn.functional", "relu", "lambda s: OLD(s) * 2", "nn.functional.relu(x)"),
    ("torch.nn.functional", "silu", "functools.wraps(OLD)(lambda s, **_: OLD(s) * 2)", "NET(x)"),
):
    effect(
        f"{_owner}.{_name} replaced by what calls it",
        f"""
        import functools
        NET = nn.SiLU()
        OLD = {_owner}.{_name}
        WAS = vars({_owner}).get("{_name}")
        def put(value):
            if value is None:
                del {_owner}.{_name}
            else:
                {_owner}.{_name} = value
        def call(x): return {_body} + 1
        """,
        writes=[f"put({_new}); modes.callback(put, WAS)", "modes.close()"],
        changes=False,
    )

# --- what is no plain object ----------------------------------------------------------------------

case(
    "proxy of an object that dies",
    """
    import weakref
    class Config: scale = 2.0
    C = Config()
    P = weakref.proxy(C)
    def call(x):
        try:
            return x * P.scale
        except ReferenceError:
            return x
    """,
    writes=["C.scale = 3.0", "del C", "C = Config(); P = weakref.proxy(C)"],
)
case(
    "scripted module that nothing uses",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.old = torch.jit.script(nn.Linear(4, 4))
            self.scale = 2.0
        def forward(self, x): return x * self.scale
    call = Net()
    """,
    writes=["call.scale = 3.0"],
)
effect(
    "scripted module inside",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.jit.script(nn.Linear(4, 4))
        def forward(self, x): return self.inner(x) * 2
    call = Net()
    """,
    writes=["call.inner.weight.data.fill_(1.0)", "call.inner = nn.Linear(4, 4)"],
)
effect(
    "scripted module as a whole",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2
        def forward(self, x): return x * self.scale
    call = torch.jit.script(Net())
    """,
    writes=["call.scale = 3"],
)
_MODULE = """
    import types
    class Lazy(types.ModuleType):
        base = 2.0
        {}
    cfg = Lazy("cfg")
    def call(x): return x * cfg.scale
    """
case(
    "property of a Python module's class",
    _MODULE.format("scale = property(lambda self: self.base)"),
    writes=["Lazy.base = 3.0", "Lazy.scale = property(lambda self: 5.0)"],
)
case(
    "__getattr__ of a Python module's class",
    _MODULE.format("def __getattr__(self, name): return self.base"),
    writes=["Lazy.base = 3.0", "Lazy.__getattr__ = lambda self, name: 5.0", "cfg.scale = 7.0"],
)
case(
    "class of a Python module replaced",
    """
    import types
    cfg = types.ModuleType("cfg")
    cfg.scale = 2.0
    class Fixed(types.ModuleType):
        scale = property(lambda self: 5.0)
    def call(x): return x * cfg.scale
    """,
    writes=["cfg.__class__ = Fixed", "Fixed.scale = property(lambda self: 7.0)"],
)

# --- state behind a function or a class -----------------------------------------------------------

for _name, _write in {
    "a logger": "logging.getLogger('above.below').setLevel(logging.INFO)",
    "the logger above": "logging.getLogger('above').setLevel(logging.INFO)",
    "all loggers": "logging.disable(logging.CRITICAL)",
}.items():
    case(
        f"level of {_name}",
        """
        import logging
        def reset():
            for name, level in ("above", logging.WARNING), ("above.below", logging.NOTSET):
                logging.getLogger(name).setLevel(level)
            logging.disable(logging.NOTSET)
        reset()
        modes.callback(reset)
        LOG = logging.getLogger("above.below")
        def call(x):
            on = LOG.isEnabledFor(logging.INFO) * 2 + LOG.isEnabledFor(logging.ERROR)
            return x * (on + 1)
        """,
        writes=[_write, "reset()"],
    )
for _name, _before, _three in (
    ("another name", "from decimal import Decimal as D", "D"),
    ("a class", "class Config: D = decimal.Decimal", "Config.D"),
):
    case(
        f"decimal context, through {_name}",
        f"""
        import decimal
        {_before}
        def call(x): return x * float({_three}(1) / {_three}(3))
        """,
        writes=["decimal.getcontext().prec = 3", "decimal.getcontext().prec = 28"],
    )
for _name, _ratio in {
    "a scalar": "np.float64(1) / np.float64(0)",
    "a class": "D(1) / D(0)",
    "an array": "(A / A[1])[0]",
}.items():
    case(
        f"NumPy's error state, through {_name}",
        f"""
        import numpy as np
        D, A = np.float64, np.array([1.0, 0.0])
        modes.enter_context(np.errstate(all="ignore"))
        def call(x):
            try:
                return x * min(float({_ratio}), 5.0)
            except FloatingPointError:
                return x
        """,
        writes=["np.seterr(all='raise')", "np.seterr(all='ignore')"],
    )
case(
    "partial that gets other arguments",
    """
    import functools
    def scaled(scale, x, *, shift): return x * scale + shift
    P = functools.partial(scaled, 2.0, shift=1.0)
    def call(x): return P(x)
    """,
    writes=[
        "P.keywords['shift'] = 2.0",
        "P.__setstate__((scaled, (3.0,), {'shift': 2.0}, {}))",
        "P.__setstate__((lambda a, x, **_: x - a, (3.0,), {}, {}))",
    ],
)
case(
    "name that a library's module gets later",
    """
    import math
    modes.callback(vars(math).pop, "scale", None)
    def call(x): return x * math.scale if hasattr(math, "scale") else x
    """,
    writes=["math.scale = 2.0", "del math.scale"],
)
effect(
    "global that another value takes for a while",
    """
    SCALE = 2.0
    def scaled(x): return x * SCALE
    def call(x):
        global SCALE
        before = SCALE
        SCALE = 5.0
        try:
            return scaled(x)
        finally:
            SCALE = before
    """,
    writes=["SCALE = 3.0"],
    state="SCALE",
)

# --- what things are called -----------------------------------------------------------------------

case(
    "name of a class as a key",
    """
    class Plain: pass
    SCALES = {"Plain": 2.0, "Other": 3.0, "Third": 4.0}
    thing = Plain()
    def call(x): return x * SCALES[type(thing).__name__]
    """,
    writes=["Plain.__name__ = 'Other'", "Plain.__name__ = 'Third'"],
    unrelated=["Plain.__qualname__ = 'Elsewhere'"],
)
case(
    "qualified name, module and text of a class",
    """
    class Plain:
        "Text."
    def call(x): return x * len(Plain.__qualname__ + Plain.__module__ + Plain.__doc__)
    """,
    writes=["Plain.__qualname__ = 'P'", "Plain.__module__ = 'm'", "Plain.__doc__ = ''"],
)
case(
    "name of a function that is passed in",
    """
    def twice(x): return x * 2
    def call(x, f): return f(x) if f.__name__ == "twice" else x
    """,
    inputs=["x, twice"],
    writes=["twice.__name__ = 'other'", "twice.__name__ = 'twice'"],
)
case(
    "names and text of a function that doesn't run",
    """
    def told(x): "Text."
    told.__module__ = "somewhere"
    def call(x):
        return x * len(told.__name__ + told.__qualname__ + told.__module__ + told.__doc__)
    """,
    writes=[
        "told.__name__ = 't'",
        "told.__qualname__ = 't'",
        "told.__module__ = 'm'",
        "told.__doc__ = 'Another text.'",
    ],
    unrelated=["told.__annotations__ = {'x': int}"],
)
case(
    "annotations of a function",
    """
    def told(x: int): pass
    def call(x): return x * len(told.__annotations__)
    """,
    writes=["told.__annotations__ = {'x': int, 'return': int}"],
)

# --- the order of sets, and objects that only equal -----------------------------------------------

case(
    "equal sets with another order",
    """
    def call(x, found):
        for number in found:
            x = x * 2 + number
        return x
    """,
    inputs=["x, {8, 0}", "x, {0, 8}", "x, frozenset([8, 0])", "x, frozenset([0, 8])"],
)
case(
    "set that is filled again in another order",
    """
    FOUND = {8, 0}
    def call(x):
        for number in FOUND:
            x = x * 2 + number
        return x
    """,
    writes=["FOUND.clear(); FOUND.add(0); FOUND.add(8)"],
)
case(
    "equal numbers and strings that are one object or two",
    """
    A, B = int("100000"), int("100000")
    S, T = "".join(["a b", "c"]), "".join(["a", " bc"])
    def call(x, a, b): return x * 2 if a is b else x * 3
    """,
    inputs=["x, A, A", "x, A, B", "x, S, S", "x, S, T", "x, 2.5, float('2.5')"],
    changes=False,
)
case(
    "string that is the default object, or only equals it",
    """
    import operator
    DEFAULT = "".join(["a b", "c"])
    EQUAL = "".join(["a", " bc"])
    def call(x, mode): return x * 2 if operator.is_(mode, DEFAULT) else x * 3
    """,
    inputs=["x, DEFAULT", "x, EQUAL"],
)

# --- what a run leaves on modules and classes -----------------------------------------------------

effect(
    "attribute that a call puts on a module of the user's",
    """
    import neighbour as beside
    def call(x):
        beside.last = x * 2
        return x * 3
    """,
    neighbour="scale = 2.0",
    state="beside.last",
)
effect(
    "attribute that a call puts on a library's module",
    """
    import json
    modes.callback(vars(json).pop, "last_of_a_call", None)
    def call(x):
        json.last_of_a_call = x * 2
        return x * 3
    """,
    state="json.last_of_a_call",
)
effect(
    "attribute that a call puts on a library's class",
    """
    import json
    def forget():
        if "calls_so_far" in vars(json.JSONDecoder):
            del json.JSONDecoder.calls_so_far
    modes.callback(forget)
    def call(x):
        json.JSONDecoder.calls_so_far = getattr(json.JSONDecoder, "calls_so_far", 0) + 1
        return x * 3
    """,
    state="json.JSONDecoder.calls_so_far",
)
