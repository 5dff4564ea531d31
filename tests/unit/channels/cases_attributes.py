"""Names and attributes: globals, closures, instances, classes, metaclasses, Python modules."""

from unit.channels.channel import Family

FAMILY = Family("attributes")
case, everywhere = FAMILY.case, FAMILY.everywhere

# --- globals, builtins, closures ----------------------------------------------------------------

case(
    "global float replaced",
    """
    SCALE = 2.0
    def call(x):
        return x * SCALE
    """,
    writes=["SCALE = 3.0", "SCALE = 2.0"],
    unrelated=["OTHER = 1", "call.note = 'seen'"],
)
case(
    "global tensor replaced",
    """
    BIAS = torch.ones(4)
    def call(x):
        return x + BIAS
    """,
    writes=["BIAS = torch.full((4,), 2.0)", "BIAS = torch.ones(4, dtype=torch.float64)"],
    unrelated=["OTHER = torch.ones(4)"],
)
case(
    "global tensor changed in place",
    """
    BIAS = torch.ones(4)
    def call(x):
        return x + BIAS
    """,
    writes=["BIAS.add_(1)", "BIAS[0] = 9"],
)
case(
    "global tensor resized in place",
    """
    BIAS = torch.ones(4)
    def call(x):
        return x.sum() + BIAS * BIAS.shape[0]
    """,
    writes=["BIAS.resize_(2)", "BIAS.data = torch.ones(3)"],
)
case(
    "global deleted",
    """
    SCALE = 2.0
    def call(x):
        return x * SCALE
    """,
    writes=["del SCALE", "SCALE = 4.0"],
)
case(
    "global over a builtin",
    """
    def call(x):
        return x * max(2, 3)
    """,
    writes=["def max(a, b): return a", "del max"],
    unrelated=["def min(a, b): return a"],
)
case(
    "name found among the builtins",
    """
    import builtins
    builtins.CHANNEL_LIMIT = 2.0
    modes.callback(delattr, builtins, "CHANNEL_LIMIT")
    def call(x):
        return x * CHANNEL_LIMIT
    """,
    writes=["builtins.CHANNEL_LIMIT = 3.0", "CHANNEL_LIMIT = 4.0", "del CHANNEL_LIMIT"],
)
case(
    "globals() asked by name",
    """
    SCALE = 2.0
    def call(x):
        return x * globals()["SCALE"]
    """,
    writes=["SCALE = 3.0"],
)
case(
    "global set by a function of the same module",
    """
    SCALE = 2.0
    def call(x):
        return x * SCALE
    def set_scale(value):
        global SCALE
        SCALE = value
    """,
    writes=["set_scale(3.0)"],
)
case(
    "closure cell rebound",
    """
    def build():
        beta, other = 2.0, 0
        def call(x):
            return x * beta
        def set_beta(value):
            nonlocal beta
            beta = value
        def set_other(value):
            nonlocal other
            other = value
        return call, set_beta, set_other
    call, set_beta, set_other = build()
    """,
    writes=["set_beta(3.0)", "call.__closure__[0].cell_contents = 4.0"],
    unrelated=["set_other(1)"],
)
case(
    "closure cell emptied",
    """
    def build():
        beta = 2.0
        def call(x):
            return x * beta
        return call
    call = build()
    """,
    writes=["del call.__closure__[0].cell_contents"],
)
case(
    "closure cell of a helper",
    """
    def build():
        beta = 2.0
        def helper(x):
            return x * beta
        def set_beta(value):
            nonlocal beta
            beta = value
        return helper, set_beta
    helper, set_beta = build()
    def call(x):
        return helper(x) + 1
    """,
    writes=["set_beta(3.0)"],
)

# --- instances ----------------------------------------------------------------------------------

_BAG = """
class Bag:
    scale = 5.0
    def __init__(self):
        self.scale = 2.0
        self.other = 0
"""
everywhere(
    "instance attribute replaced",
    "Bag()",
    "return x * state.scale",
    before=_BAG,
    writes=["STATE.scale = 3.0", "STATE.__dict__['scale'] = 4.0"],
    unrelated=["STATE.other = 1", "STATE.new = 1", "Bag.new = 2"],
)
everywhere(
    "instance attribute deleted, its class's left",
    "Bag()",
    "return x * state.scale",
    before=_BAG,
    writes=["del STATE.scale", "Bag.scale = 6.0", "STATE.scale = 7.0"],
)
case(
    "attribute deleted from instance and class",
    """
    class Bag:
        scale = 2.0
    bag = Bag()
    def call(x):
        return x * bag.scale
    """,
    writes=["del Bag.scale", "Bag.scale = 3.0"],
)
case(
    "attribute of a module deleted",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["del call.scale", "call.scale = 3.0"],
)
case(
    "instance attribute of a module replaced",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["call.scale = 3.0", "call.__dict__['scale'] = 4.0"],
    unrelated=["call.other = 1", "call.__dict__['more'] = 1", "Net.more = 2"],
)
case(
    "instance attribute over a class's",
    """
    class Net(nn.Module):
        scale = 2.0
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["call.scale = 3.0", "del call.scale"],
    unrelated=["call.other = 3.0"],
)
case(
    "tensor attribute of a plain object replaced",
    """
    class Bag: pass
    bag = Bag()
    bag.bias = torch.ones(4)
    def call(x):
        return x + bag.bias
    """,
    writes=["bag.bias = torch.zeros(4)", "bag.bias.add_(2)"],
    unrelated=["bag.other = torch.ones(4)"],
)
case(
    "attribute in the middle of a path replaced",
    """
    from types import SimpleNamespace as Space
    root = Space(a=Space(b=Space(c=2.0)))
    def call(x):
        return x * root.a.b.c
    """,
    writes=["root.a.b.c = 3.0", "root.a.b = Space(c=4.0)", "root.a = Space(b=Space(c=5.0))"],
    unrelated=["root.other = 1", "root.a.other = 1"],
)
case(
    "__dict__ replaced",
    """
    class Bag: pass
    bag = Bag()
    bag.scale = 2.0
    def call(x):
        return x * bag.scale
    """,
    writes=["bag.__dict__ = {'scale': 3.0}", "bag.scale = 4.0", "bag.__dict__.update(scale=5.0)"],
)
case(
    "__dict__ of a module replaced",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["call.__dict__ = {**call.__dict__, 'scale': 3.0}", "call.scale = 4.0"],
)
case(
    "__class__ replaced",
    """
    class Net(nn.Module):
        def forward(self, x):
            return x * self.factor()
        def factor(self):
            return 2.0
    class Other(Net):
        def factor(self):
            return 3.0
    call = Net()
    """,
    writes=["call.__class__ = Other", "call.__class__ = Net"],
)
case(
    "__class__ of an argument replaced",
    """
    class Left:
        scale = 2.0
    class Right:
        scale = 3.0
    bag = Left()
    def call(x, bag):
        return x * bag.scale
    """,
    inputs=["x, bag"],
    writes=["bag.__class__ = Right"],
)
case(
    "object.__setattr__ past a class's own",
    """
    class Locked:
        def __init__(self):
            object.__setattr__(self, "scale", 2.0)
        def __setattr__(self, name, value):
            raise AttributeError(name)
    locked = Locked()
    def call(x):
        return x * locked.scale
    """,
    writes=["object.__setattr__(locked, 'scale', 3.0)"],
    unrelated=["object.__setattr__(locked, 'other', 3.0)"],
)
case(
    "slot replaced",
    """
    class Slots:
        __slots__ = ("scale", "other")
    slots = Slots()
    slots.scale = 2.0
    def call(x):
        return x * slots.scale
    """,
    writes=["slots.scale = 3.0", "Slots.scale.__set__(slots, 4.0)"],
    unrelated=["slots.other = 1"],
)
case(
    "slot emptied",
    """
    class Slots:
        __slots__ = ("scale",)
    slots = Slots()
    slots.scale = 2.0
    def call(x):
        return x * slots.scale
    """,
    writes=["del slots.scale"],
)
case(
    "absent attribute asked by hasattr and getattr",
    """
    class Bag: pass
    bag = Bag()
    def call(x):
        if hasattr(bag, "bias"):
            x = x + bag.bias
        return x * getattr(bag, "scale", 2.0)
    """,
    writes=["bag.scale = 3.0", "bag.bias = 1.0", "del bag.scale", "Bag.scale = 4.0"],
    unrelated=["bag.other = 1"],
)
case(
    "vars() of an object iterated",
    """
    class Bag: pass
    bag = Bag()
    bag.a, bag.b = 2.0, 3.0
    def call(x):
        for name, value in vars(bag).items():
            x = x * value + len(name)
        return x
    """,
    writes=["bag.a = 4.0", "bag.longer = 2.0", "del bag.a"],
)

# --- classes and metaclasses --------------------------------------------------------------------

case(
    "class attribute replaced",
    """
    class Net(nn.Module):
        depth = 2.0
        other = 0
        def forward(self, x):
            return x * self.depth + Net.depth
    call = Net()
    """,
    writes=["Net.depth = 3.0"],
    unrelated=["Net.other = 1", "Net.new = 1", "call.new = 2"],
)
case(
    "base class attribute replaced, then shadowed below",
    """
    class Base:
        scale = 2.0
    class Middle(Base): pass
    class Leaf(Middle): pass
    leaf = Leaf()
    def call(x):
        return x * leaf.scale
    """,
    writes=["Base.scale = 3.0", "Middle.scale = 4.0", "Leaf.scale = 5.0", "del Leaf.scale"],
    unrelated=["Middle.other = 1"],
)
case(
    "bases of a class replaced",
    """
    class A:
        scale = 2.0
    class B:
        scale = 3.0
    class Leaf(A): pass
    leaf = Leaf()
    def call(x):
        return x * leaf.scale
    """,
    writes=["Leaf.__bases__ = (B,)"],
)
case(
    "class attribute read through type()",
    """
    class Net(nn.Module):
        depth = 2.0
        def forward(self, x):
            return x * type(self).depth
    call = Net()
    """,
    writes=["Net.depth = 3.0"],
)
case(
    "metaclass attribute replaced, then shadowed by the class",
    """
    class Meta(type):
        scale = 2.0
    class Net(metaclass=Meta): pass
    def call(x):
        return x * Net.scale
    """,
    writes=["Meta.scale = 3.0", "Net.scale = 4.0"],
    unrelated=["Meta.other = 1", "Net.other = 1"],
)
case(
    "metaclass property",
    """
    class Meta(type):
        @property
        def scale(cls):
            return cls._scale
    class Net(metaclass=Meta):
        _scale = 2.0
    def call(x):
        return x * Net.scale
    """,
    writes=["Net._scale = 3.0", "Meta.scale = property(lambda cls: 4.0)"],
)
case(
    "list held by a class",
    """
    class Net(nn.Module):
        scales = [2.0, 3.0]
        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return x
    call = Net()
    """,
    writes=["Net.scales.append(4.0)", "call.scales = [5.0]"],
)

# --- Python modules -----------------------------------------------------------------------------

case(
    "attribute of a Python module replaced",
    """
    import neighbour
    def call(x):
        return x * neighbour.SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["neighbour.SCALE = 3.0", "vars(neighbour)['SCALE'] = 4.0"],
    unrelated=["neighbour.OTHER = 1"],
)
case(
    "attribute of a Python module deleted",
    """
    import neighbour
    def call(x):
        return x * neighbour.SCALE
    """,
    neighbour="SCALE = 2.0",
    writes=["del neighbour.SCALE"],
)
case(
    "global of a helper in another module",
    """
    from neighbour import helper
    import neighbour
    def call(x):
        return helper(x)
    """,
    neighbour="""
    SCALE = 2.0
    def helper(x):
        return x * SCALE
    """,
    writes=["neighbour.SCALE = 3.0"],
    unrelated=["neighbour.OTHER = 3.0", "SCALE = 9.0"],
)
case(
    "module-level __getattr__",
    """
    import neighbour
    def call(x):
        return x * neighbour.SCALE
    """,
    neighbour="""
    TABLE = {"SCALE": 2.0}
    def __getattr__(name):
        return TABLE[name]
    """,
    writes=["neighbour.TABLE['SCALE'] = 3.0", "neighbour.SCALE = 4.0"],
)
case(
    "module bound to a name replaced by another",
    """
    import math, types
    lib = math
    def call(x):
        return x * lib.floor(2.5)
    """,
    writes=["lib = types.SimpleNamespace(floor=math.ceil)"],
)

# --- names with two underscores -------------------------------------------------------------------

case(
    "containers and objects in a class, under names with two underscores",
    """
    class Options:
        k = 2.0
    class C:
        __table__ = {"a": 2.0}
        __row__ = [3.0]
        __options__ = Options()
    def call(x): return x * C.__table__["a"] * C.__row__[0] * C.__options__.k
    """,
    writes=["C.__table__['a'] = 5.0", "C.__row__[0] = 7.0", "C.__options__.k = 11.0"],
    unrelated=["C.__other__ = 1"],
)
case(
    "configuration in a module's class, under a name with two underscores",
    """
    class Net(nn.Module):
        __config__ = {"k": 2.0}
        def forward(self, x):
            return x * self.__config__["k"]
    call = Net()
    """,
    writes=["Net.__config__['k'] = 3.0", "Net.__config__ = {'k': 4.0}"],
)
