"""Functions as state: what is called, its code, its defaults, and what wraps it."""

from unit.channels.channel import Family

FAMILY = Family("functions")
case, everywhere = FAMILY.case, FAMILY.everywhere

# --- what is called -----------------------------------------------------------------------------

case(
    "global function replaced",
    """
    def helper(x):
        return x * 2
    def call(x):
        return helper(x)
    """,
    writes=["def helper(x): return x * 3"],
    unrelated=["def other(x): return x"],
)
case(
    "helper of a helper replaced",
    """
    def inner(x):
        return x * 2
    def middle(x):
        return inner(x) + 1
    def call(x):
        return middle(x)
    """,
    writes=["def inner(x): return x * 3", "def middle(x): return inner(x) - 1"],
)
case(
    "torch function behind a global name",
    """
    act = torch.relu
    def call(x):
        return act(x)
    """,
    writes=["act = torch.tanh", "act = nn.functional.gelu"],
)
case(
    "method replaced on the class",
    """
    class Net(nn.Module):
        def forward(self, x):
            return self.scaled(x)
        def scaled(self, x):
            return x * 2
    call = Net()
    """,
    writes=["Net.scaled = lambda self, x: x * 3", "call.scaled = lambda x: x * 4"],
    unrelated=["Net.other = lambda self, x: x"],
)
case(
    "inherited method overridden below",
    """
    class Base(nn.Module):
        def scaled(self, x):
            return x * 2
    class Net(Base):
        def forward(self, x):
            return self.scaled(x)
    call = Net()
    """,
    writes=["Base.scaled = lambda self, x: x * 3", "Net.scaled = lambda self, x: x * 4"],
    unrelated=["Net.other = lambda self, x: x"],
)
case(
    "method of a plain object replaced",
    """
    class Scaler:
        def scaled(self, x):
            return x * 2
    scaler = Scaler()
    def call(x):
        return scaler.scaled(x)
    """,
    writes=["Scaler.scaled = lambda self, x: x * 3", "scaler.scaled = lambda x: x * 4"],
)
case(
    "super()'s method replaced",
    """
    class Base(nn.Module):
        def forward(self, x):
            return x * 2
    class Net(Base):
        def forward(self, x):
            return super().forward(x) + 1
    call = Net()
    """,
    writes=["Base.forward = lambda self, x: x * 3"],
    unrelated=["Base.other = 1"],
)
case(
    "staticmethod replaced",
    """
    class Net(nn.Module):
        @staticmethod
        def scaled(x):
            return x * 2
        def forward(self, x):
            return self.scaled(x)
    call = Net()
    """,
    writes=["Net.scaled = staticmethod(lambda x: x * 3)"],
)
case(
    "classmethod replaced; the class that it gets is written",
    """
    class Net(nn.Module):
        scale = 2.0
        @classmethod
        def scaled(cls, x):
            return x * cls.scale
        def forward(self, x):
            return self.scaled(x)
    call = Net()
    """,
    writes=["Net.scale = 3.0", "Net.scaled = classmethod(lambda cls, x: x - cls.scale)"],
)
case(
    "forward replaced on the class, on the instance, and restored",
    """
    class Net(nn.Module):
        def forward(self, x):
            return x * 2
    call = Net()
    """,
    writes=[
        "Net.forward = lambda self, x: x * 3",
        "call.forward = lambda x: x * 4",
        "del call.forward",
    ],
    unrelated=["call.backward = None"],
)
case(
    "forward of a submodule replaced",
    """
    class Inner(nn.Module):
        def forward(self, x):
            return x * 2
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
        def forward(self, x):
            return self.inner(x)
    call = Net()
    """,
    writes=["Inner.forward = lambda self, x: x * 3", "call.inner.forward = lambda x: x * 4"],
)
case(
    "bound method kept in an attribute",
    """
    class Scaler:
        scale = 2.0
        def scaled(self, x):
            return x * self.scale
    scaler, other = Scaler(), Scaler()
    other.scale = 9.0
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.op = scaler.scaled
        def forward(self, x):
            return self.op(x)
    call = Net()
    """,
    writes=["scaler.scale = 3.0", "call.op = other.scaled"],
)
case(
    "function found in a table",
    """
    TABLE = {"relu": torch.relu, "double": lambda x: x * 2}
    name = "double"
    def call(x):
        return TABLE[name](x)
    """,
    writes=["TABLE['double'] = lambda x: x * 3", "name = 'relu'"],
)
case(
    "function attribute",
    """
    def helper(x):
        return x * helper.scale
    helper.scale = 2.0
    def call(x):
        return helper(x)
    """,
    writes=["helper.scale = 3.0"],
    unrelated=["helper.other = 1"],
)
case(
    "lambdas in a list",
    """
    STEPS = [lambda x: x * 2, lambda x: x + 1]
    def call(x):
        for step in STEPS:
            x = step(x)
        return x
    """,
    writes=["STEPS[0] = lambda x: x * 3", "STEPS.reverse()", "STEPS.append(torch.neg)"],
)
case(
    "singledispatch gets another implementation",
    """
    import functools
    @functools.singledispatch
    def scale(key):
        return 2.0
    def call(x):
        return x * scale("a")
    """,
    writes=["scale.register(str, lambda key: 3.0)"],
)

# --- code and defaults --------------------------------------------------------------------------

case(
    "__code__ of a helper replaced",
    """
    def helper(x):
        return x * 2
    def other(x):
        return x * 3
    def call(x):
        return helper(x)
    """,
    writes=["helper.__code__ = other.__code__"],
    unrelated=["helper.note = 1", "helper.__doc__ = 'seen'"],
)
case(
    "__code__ of the compiled function replaced",
    """
    def other(x):
        return x * 3
    def call(x):
        return x * 2
    """,
    writes=["call.__code__ = other.__code__"],
)
case(
    "__code__ of a method replaced",
    """
    class Net(nn.Module):
        def forward(self, x):
            return self.scaled(x)
        def scaled(self, x):
            return x * 2
    def other(self, x):
        return x * 3
    call = Net()
    """,
    writes=["Net.scaled.__code__ = other.__code__"],
)
case(
    "defaults of a helper replaced",
    """
    def helper(x, scale=2.0, *, shift=1.0):
        return x * scale + shift
    def call(x):
        return helper(x)
    """,
    writes=["helper.__defaults__ = (3.0,)", "helper.__kwdefaults__ = {'shift': 2.0}"],
)
case(
    "defaults of the compiled function replaced",
    """
    def call(x, scale=2.0, *, shift=1.0):
        return x * scale + shift
    """,
    writes=["call.__defaults__ = (3.0,)", "call.__kwdefaults__['shift'] = 2.0"],
)
case(
    "mutable default changed",
    """
    def helper(x, scales=[2.0], *, table={"shift": 1.0}):
        for scale in scales:
            x = x * scale
        return x + table["shift"]
    def call(x):
        return helper(x)
    """,
    writes=["helper.__defaults__[0].append(3.0)", "helper.__kwdefaults__['table']['shift'] = 2.0"],
)
case(
    "tensor as a default",
    """
    def helper(x, bias=torch.ones(4)):
        return x + bias
    def call(x):
        return helper(x)
    """,
    writes=["helper.__defaults__[0].add_(1)", "helper.__defaults__ = (torch.zeros(4),)"],
)
case(
    "defaults of forward replaced",
    """
    class Net(nn.Module):
        def forward(self, x, scale=2.0):
            return x * scale
    call = Net()
    """,
    writes=["Net.forward.__defaults__ = (3.0,)"],
)

# --- what wraps a function ----------------------------------------------------------------------

case(
    "partial replaced; its keywords changed",
    """
    import functools
    def helper(x, scale):
        return x * scale
    step = functools.partial(helper, scale=2.0)
    def call(x):
        return step(x)
    """,
    writes=["step.keywords['scale'] = 3.0", "step = functools.partial(helper, scale=4.0)"],
)
case(
    "partial compiled",
    """
    import functools
    BIAS = torch.ones(4)
    def helper(bias, x, scale=1.0):
        return x * scale + bias
    call = functools.partial(helper, BIAS, scale=2.0)
    """,
    writes=["BIAS.add_(1)", "call.keywords['scale'] = 3.0"],
)
case(
    "partialmethod on a class",
    """
    import functools
    class Net(nn.Module):
        def scaled(self, x, scale):
            return x * scale
        double = functools.partialmethod(scaled, scale=2.0)
        def forward(self, x):
            return self.double(x)
    call = Net()
    """,
    writes=["Net.double = functools.partialmethod(Net.scaled, scale=3.0)"],
)
case(
    "decorator with closure state",
    """
    import functools
    def scaled_by(table):
        def decorate(fn):
            @functools.wraps(fn)
            def wrapped(*args, **kwargs):
                return fn(*args, **kwargs) * table["scale"]
            return wrapped
        return decorate
    TABLE = {"scale": 2.0}
    @scaled_by(TABLE)
    def call(x):
        return x + 1
    """,
    writes=["TABLE['scale'] = 3.0"],
)
case(
    "decorated function: the inner one's global",
    """
    import functools
    SHIFT = 1.0
    def doubled(fn):
        @functools.wraps(fn)
        def wrapped(x):
            return fn(x) * 2
        return wrapped
    @doubled
    def call(x):
        return x + SHIFT
    """,
    writes=["SHIFT = 2.0"],
)
case(
    "lru_cache keeps what it has until it is cleared",
    """
    import functools
    SCALE = 2.0
    @functools.lru_cache
    def scale():
        return SCALE
    def call(x):
        return x * scale()
    """,
    writes=["SCALE = 3.0", "scale.cache_clear()"],
)
case(
    "cache keyed by an argument",
    """
    import functools
    SCALE = 2.0
    @functools.cache
    def scaled(k):
        return SCALE * k
    def call(x, k):
        return x * scaled(k)
    """,
    inputs=["x, 1", "x, 2"],
    writes=["SCALE = 3.0", "scaled.cache_clear()", "SCALE = 4.0"],
    changes=False,  # the first write is seen only where the cache is empty
)
case(
    "callable object compiled",
    """
    class Scaler:
        def __init__(self):
            self.scale = 2.0
        def __call__(self, x):
            return x * self.scale
    call = Scaler()
    """,
    writes=["call.scale = 3.0", "Scaler.__call__ = lambda self, x: x - self.scale"],
    unrelated=["call.other = 1"],
)
case(
    "bound method compiled",
    """
    class Scaler:
        scale = 2.0
        def scaled(self, x):
            return x * self.scale
    scaler = Scaler()
    call = scaler.scaled
    """,
    writes=["scaler.scale = 3.0", "Scaler.scale = 9.0; del scaler.scale"],
)
case(
    "cell that holds a function",
    """
    def build(step):
        def call(x):
            return step(x) + 1
        return call
    call = build(lambda x: x * 2)
    """,
    writes=["call.__closure__[0].cell_contents = torch.neg"],
)
case(
    "autograd function's forward replaced",
    """
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            return grad * 2
    def call(x):
        return Double.apply(x)
    """,
    writes=["Double.forward = staticmethod(lambda ctx, x: x * 3)"],
)
case(
    "attribute that a function under vmap reads",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
        def forward(self, x):
            return torch.vmap(lambda row: row * self.scale)(x)
    call = Net()
    """,
    writes=["call.scale = 3.0"],
)
case(
    "global that a function under grad reads",
    """
    rates = [2.0, 0.5]
    def energy(x):
        return (x * x).sum() * rates[0]
    def call(x):
        return torch.func.grad(energy)(x)
    """,
    writes=["rates[0] = 3.0", "rates = [4.0]", "energy = lambda x: x.sum()"],
)
