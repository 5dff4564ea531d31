"""Python itself: what a program is made of, each with some state that is written."""

from unit.channels.channel import Family

FAMILY = Family("python")
case = FAMILY.case

# --- functions and classes made inside ----------------------------------------------------------

case(
    "function defined inside",
    """
    SCALE = 2.0
    def call(x):
        shift = SCALE + 1
        def inner(v, scale=SCALE):
            return v * scale + shift
        return inner(x)
    """,
    writes=["SCALE = 3.0"],
)
case(
    "closures over a loop variable",
    """
    SCALES = [1.0, 2.0, 3.0]
    def call(x):
        late = [lambda v: v * scale for scale in SCALES]
        early = [lambda v, scale=scale: v * scale for scale in SCALES]
        return sum(f(x) for f in late) + early[0](x)
    """,
    writes=["SCALES[-1] = 5.0", "SCALES[0] = 7.0"],
)
case(
    "class created inside",
    """
    SCALE = 2.0
    def call(x):
        class Inner:
            scale = SCALE
            def apply(self, v):
                return v * self.scale
        return Inner().apply(x)
    """,
    writes=["SCALE = 3.0"],
)
case(
    "object made inside",
    """
    class Accumulator:
        START = 1.0
        def __init__(self):
            self.total = self.START
        def add(self, v):
            self.total = self.total + v
            return self
    def call(x):
        return Accumulator().add(x).add(x * 2).total
    """,
    writes=[
        "Accumulator.START = 2.0",
        """
        def add(self, v):
            self.total = self.total - v
            return self
        Accumulator.add = add
        """,
    ],
)
case(
    "nonlocal inside one call",
    """
    STEP = 1
    def call(x):
        count = 0
        def bump(v):
            nonlocal count
            count += STEP
            return v * count
        return bump(x) + bump(x)
    """,
    writes=["STEP = 2"],
)
case(
    "decorator applied inside",
    """
    import functools
    SCALE = 2.0
    def scaled(fn):
        @functools.wraps(fn)
        def wrapped(*args):
            return fn(*args) * SCALE
        return wrapped
    def call(x):
        return scaled(lambda v: v + 1)(x)
    """,
    writes=["SCALE = 3.0"],
)
case(
    "recursion",
    """
    DEPTH = 2
    def walk(x, depth):
        return x if depth == 0 else walk(x * 2 + 1, depth - 1)
    def call(x):
        return walk(x, DEPTH)
    """,
    writes=["DEPTH = 3", "DEPTH = 0"],
)
case(
    "mutual recursion through a replaced function",
    """
    def even(x, n):
        return x if n == 0 else odd(x + 1, n - 1)
    def odd(x, n):
        return -x if n == 0 else even(x * 2, n - 1)
    def call(x):
        return even(x, 3)
    """,
    writes=["def odd(x, n): return x"],
)

# --- comprehensions and generators --------------------------------------------------------------

case(
    "generator expression",
    """
    SCALES = [1.0, 2.0]
    def call(x):
        return sum(x * scale for scale in SCALES)
    """,
    writes=["SCALES.append(3.0)"],
)
case(
    "generator function",
    """
    SCALES = (1.0, 2.0)
    def parts(x):
        for scale in SCALES:
            yield x * scale
        yield x
    def call(x):
        return torch.stack(list(parts(x)))
    """,
    writes=["SCALES = (3.0,)"],
)
case(
    "yield from and send",
    """
    START = 1.0
    def inner(x):
        got = yield x * START
        yield x + got
    def outer(x):
        yield from inner(x)
    def call(x):
        steps = outer(x)
        return next(steps) + steps.send(2.0)
    """,
    writes=["START = 2.0"],
)
case(
    "comprehensions with conditions",
    """
    TABLE = {"a": 1.0, "b": 2.0}
    SKIP = {"b"}
    def call(x):
        kept = {k: x * v for k, v in TABLE.items() if k not in SKIP}
        return [kept[k] for k in sorted(kept)], {len(k) for k in kept}
    """,
    writes=["SKIP.clear()", "TABLE['c'] = 3.0"],
)
case(
    "map, filter, reduce",
    """
    import functools, operator
    SCALES = [1.0, 0.0, 2.0]
    def call(x):
        return functools.reduce(operator.add, map(x.mul, filter(None, SCALES)))
    """,
    writes=["SCALES[1] = 4.0", "SCALES.pop()"],
)
case(
    "sorted by a key function",
    """
    ORDER = {"a": 2, "b": 1}
    def call(x):
        for i, name in enumerate(sorted(ORDER, key=ORDER.get)):
            x = x * 2 + (i if name == "a" else 5)
        return x
    """,
    writes=["ORDER['a'] = 0", "ORDER['c'] = 9"],
)

# --- exceptions and contexts --------------------------------------------------------------------

case(
    "try around a Python error",
    """
    TABLE = {}
    def call(x):
        try:
            scale = TABLE["scale"]
        except KeyError:
            scale = 2.0
        finally:
            x = x + 1
        return x * scale
    """,
    writes=["TABLE['scale'] = 3.0", "TABLE.clear()"],
)
case(
    "try around a torch error",
    """
    def call(x, y):
        try:
            return x + y
        except RuntimeError:
            return x * 2
    """,
    inputs=["x, y", "x, y[:3]"],
)
case(
    "raised for some inputs only",
    """
    def call(x, k):
        if k > 2:
            raise ValueError(f"too many: {k}")
        return x * k
    """,
    inputs=["x, 1", "x, 3", "x, 2"],
)
case(
    "raised for some values only",
    """
    def call(x):
        if x.max() > 10:
            raise ValueError("too large")
        return x * 2
    """,
    inputs=["x", "x.abs() + 20"],
)
case(
    "raised once a limit was written",
    """
    LIMIT = 10
    def call(x):
        if x.shape[0] > LIMIT:
            raise ValueError(f"more than {LIMIT}")
        return x * 2
    """,
    writes=["LIMIT = 2", "LIMIT = 3", "LIMIT = 10"],
)
case(
    "assert on a size",
    """
    WIDTH = 4
    def call(x):
        assert x.shape[-1] == WIDTH, "width"
        return x * 2
    """,
    writes=["WIDTH = 5", "WIDTH = 4"],
)
case(
    "context manager written by the user",
    """
    class Scope:
        depth = 0
        def __enter__(self):
            Scope.depth += 1
            return Scope.depth + self.offset
        def __exit__(self, *args):
            Scope.depth -= 1
            return False
        offset = 1
    def call(x):
        with Scope() as a, Scope() as b:
            return x * a + b
    """,
    writes=["Scope.offset = 2", "Scope.depth = 5"],
    state="Scope.depth",
)
case(
    "contextlib's context manager",
    """
    import contextlib
    stack = [1.0]
    @contextlib.contextmanager
    def pushed(value):
        stack.append(value)
        try:
            yield stack
        finally:
            stack.pop()
    def call(x):
        with pushed(2.0) as values:
            for value in values:
                x = x * value + 1
        return x
    """,
    writes=["stack[0] = 3.0", "stack.append(4.0)"],
    state="stack",
)
case(
    "exception that a context manager swallows",
    """
    import contextlib
    TABLE = {}
    def call(x):
        with contextlib.suppress(KeyError):
            x = x * TABLE["scale"]
        return x + 1
    """,
    writes=["TABLE['scale'] = 3.0"],
)
case(
    "torch contexts inside",
    """
    TRACK = False
    layer = nn.Linear(4, 4)
    def call(x):
        with torch.set_grad_enabled(TRACK):
            y = layer(x)
        return y * 2
    """,
    writes=["TRACK = True"],
)

# --- imports and syntax -------------------------------------------------------------------------

case(
    "import inside the function",
    """
    import sys
    def call(x):
        import neighbour
        return x * neighbour.SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["sys.modules['neighbour'].SCALE = 3.0"],
    unrelated=["sys.modules['neighbour'].OTHER = 3.0"],
)
case(
    "from-import inside the function",
    """
    import neighbour
    def call(x):
        from neighbour import scaled
        return scaled(x)
    """,
    neighbour="""
    def scaled(x):
        return x * 2
    """,
    writes=["neighbour.scaled = torch.neg"],
)
case(
    "module swapped in sys.modules",
    """
    import sys, types
    def call(x):
        import neighbour
        return x * neighbour.SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["sys.modules['neighbour'] = types.SimpleNamespace(SCALE=3.0)"],
)
case(
    "match statement",
    """
    SHAPE = {"kind": "scale", "by": 2.0}
    def call(x):
        match SHAPE:
            case {"kind": "scale", "by": by}:
                return x * by
            case {"kind": "shift", "by": by}:
                return x + by
            case _:
                return -x
    """,
    writes=["SHAPE['by'] = 3.0", "SHAPE['kind'] = 'shift'", "SHAPE.clear()"],
)
case(
    "walrus, chained comparison, conditional expression",
    """
    LOW, HIGH = 1, 5
    def call(x):
        return x * k if LOW < (k := x.shape[0]) < HIGH else -x
    """,
    writes=["HIGH = 3", "HIGH = 9", "LOW = 4"],
)
case(
    "star unpacking",
    """
    PARTS = [1.0, 2.0, 3.0]
    def helper(x, first, *rest, last=0.0):
        return x * first + len(rest) + last
    def call(x):
        head, *tail = PARTS
        return helper(x, *tail, last=head)
    """,
    writes=["PARTS[0] = 5.0", "PARTS.append(4.0)", "PARTS[1] = 6.0"],
)
case(
    "formatted strings as keys",
    """
    TABLE = {"layer_0": 2.0, "layer_1": 3.0}
    DEPTH = 1
    def call(x):
        for i in range(DEPTH):
            x = x * TABLE[f"layer_{i}"]
        return x
    """,
    writes=["DEPTH = 2", "TABLE['layer_1'] = 4.0"],
)
case(
    "eval of a string",
    """
    EXPRESSION = "x * 2"
    def call(x):
        return eval(EXPRESSION)
    """,
    writes=["EXPRESSION = 'x * 3'"],
)
case(
    "super() and properties across three classes",
    """
    class A(nn.Module):
        @property
        def scale(self):
            return 2.0
        def forward(self, x):
            return x * self.scale
    class B(A):
        def forward(self, x):
            return super().forward(x) + 1
    class C(B):
        @property
        def scale(self):
            return super().scale * 2
    call = C()
    """,
    writes=["A.scale = property(lambda self: 3.0)", "B.scale = property(lambda self: 5.0)"],
)
case(
    "weak reference",
    """
    import weakref
    class Bag:
        scale = 2.0
    bag = Bag()
    ref = weakref.ref(bag)
    def call(x):
        target = ref()
        return x if target is None else x * target.scale
    """,
    writes=["bag.scale = 3.0", "del bag"],
)
