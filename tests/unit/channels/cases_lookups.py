"""Lookups that run code: properties, descriptors, `__getattr__`, operators, isinstance, is."""

from unit.channels.channel import Family

FAMILY = Family("lookups")
case, everywhere = FAMILY.case, FAMILY.everywhere

# --- properties and descriptors -----------------------------------------------------------------

everywhere(
    "property whose getter reads another attribute",
    "Bag()",
    "return x * state.scale",
    before="""
    class Bag:
        def __init__(self):
            self._scale = 2.0
        @property
        def scale(self):
            return self._scale + 1
    """,
    writes=["STATE._scale = 3.0", "Bag.scale = property(lambda self: self._scale)"],
    unrelated=["STATE.other = 1"],
)
case(
    "property of a module replaced by a value",
    """
    class Net(nn.Module):
        @property
        def scale(self):
            return 2.0
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["Net.scale = property(lambda self: 3.0)", "Net.scale = 4.0"],
    unrelated=["Net.other = property(lambda self: 3.0)"],
)
case(
    "property that reads a global",
    """
    SCALE = 2.0
    class Net(nn.Module):
        @property
        def scale(self):
            return SCALE
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["SCALE = 3.0"],
)
case(
    "descriptor without __set__, shadowed by the instance",
    """
    class Constant:
        def __init__(self, value):
            self.value = value
        def __get__(self, instance, owner):
            return self.value
    class Bag:
        scale = Constant(2.0)
    bag = Bag()
    def call(x):
        return x * bag.scale
    """,
    writes=["Bag.__dict__['scale'].value = 3.0", "bag.scale = 4.0", "del bag.scale"],
)
case(
    "descriptor with __set__",
    """
    class Stored:
        def __get__(self, instance, owner):
            return instance.__dict__["stored"]
        def __set__(self, instance, value):
            instance.__dict__["stored"] = value * 2
    class Bag:
        scale = Stored()
    bag = Bag()
    bag.scale = 2.0
    def call(x):
        return x * bag.scale
    """,
    writes=["bag.scale = 3.0", "Stored.__get__ = lambda self, instance, owner: 7.0"],
)
case(
    "cached_property stays cached",
    """
    import functools
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = 2.0
        @functools.cached_property
        def scale(self):
            return self.base + 1
        def forward(self, x):
            return x * self.scale
    call = Net()
    """,
    writes=["call.base = 3.0", "del call.scale", "call.scale = 9.0"],
    state="call.__dict__.get('scale')",
)
case(
    "__getattr__ and the attribute that hides it",
    """
    class Config:
        def __init__(self):
            self.table = {"scale": 2.0}
        def __getattr__(self, name):
            return self.table[name]
    config = Config()
    def call(x):
        return x * config.scale
    """,
    writes=[
        "config.table['scale'] = 3.0",
        "Config.__getattr__ = lambda self, name: 4.0",
        "config.scale = 5.0",
        "del config.scale",
        "Config.scale = 6.0",
    ],
    unrelated=["config.other = 1"],
)
case(
    "__getattribute__ replaced",
    """
    class Config:
        def __init__(self):
            self.scale = 2.0
        def __getattribute__(self, name):
            value = object.__getattribute__(self, name)
            return value + 1 if name == "scale" else value
    config = Config()
    def call(x):
        return x * config.scale
    """,
    writes=["config.scale = 4.0", "del Config.__getattribute__"],
)
case(
    "attrgetter and methodcaller",
    """
    import operator
    class Bag:
        scale = 2.0
        def shift(self):
            return 1.0
    bag = Bag()
    get, ask = operator.attrgetter("scale"), operator.methodcaller("shift")
    def call(x):
        return x * get(bag) + ask(bag)
    """,
    writes=["bag.scale = 3.0", "Bag.shift = lambda self: 2.0"],
)
case(
    "__slots__ beside a property",
    """
    class Point:
        __slots__ = ("_scale",)
        def __init__(self):
            self._scale = 2.0
        @property
        def scale(self):
            return self._scale
    point = Point()
    def call(x):
        return x * point.scale
    """,
    writes=["point._scale = 3.0", "Point.scale = property(lambda self: self._scale * 2)"],
)

# --- operators of user objects, replaced on the class -------------------------------------------

_OPERATORS = {
    "__bool__": ("x if thing else -x", "True", "False"),
    "__len__": ("x * len(thing)", "2", "3"),
    "__eq__": ("x if thing == 1 else -x", "True", "False"),
    "__call__": ("x * thing(1)", "2", "3"),
    "__contains__": ("x if 1 in thing else -x", "True", "False"),
    "__getitem__": ("x * thing[0]", "2", "3"),
    "__iter__": ("x * sum(thing)", "iter([1, 2])", "iter([4])"),
    "__float__": ("x * float(thing)", "2.0", "3.0"),
    "__index__": ("x[: range(4)[thing]]", "2", "3"),
    "__lt__": ("x if thing < 1 else -x", "True", "False"),
    "__add__": ("x * (thing + 1)", "2", "3"),
    "__radd__": ("x * (1 + thing)", "2", "3"),
    "__enter__": ("use(x)", "2", "3"),
}
for _name, (_body, _before, _after) in _OPERATORS.items():
    case(
        f"{_name} replaced on the class",
        f"""
        class Thing:
            def {_name}(self, *args):
                return {_before}
            def __exit__(self, *args): pass
        thing = Thing()
        def use(x):
            with thing as factor:
                return x * factor
        def call(x):
            return {_body}
        """,
        writes=[f"Thing.{_name} = lambda self, *args: {_after}"],
        unrelated=["Thing.other = lambda self: 1"],
    )
case(
    "__len__ that reads state; truth that falls back on it",
    """
    class Thing:
        def __init__(self):
            self.items = [1]
        def __len__(self):
            return len(self.items)
    thing = Thing()
    def call(x):
        return x * len(thing) if thing else -x
    """,
    writes=["thing.items.append(2)", "thing.items.clear()", "Thing.__bool__ = lambda self: True"],
)
case(
    "__eq__ of a dataclass compares fields",
    """
    import dataclasses
    @dataclasses.dataclass
    class Point:
        a: float
        b: float
    one, two = Point(1.0, 2.0), Point(1.0, 2.0)
    def call(x):
        return x if one == two else -x
    """,
    writes=["two.b = 3.0", "one.b = 3.0", "Point.__eq__ = lambda self, other: False"],
)

# --- what something is --------------------------------------------------------------------------

case(
    "isinstance against a class that others register with",
    """
    import abc
    class Shape(abc.ABC): pass
    class Square: pass
    square = Square()
    def call(x):
        return x if isinstance(square, Shape) else -x
    """,
    writes=["Shape.register(Square)"],
)
case(
    "__instancecheck__ of a metaclass",
    """
    class Meta(type):
        ANSWER = False
        def __instancecheck__(cls, instance):
            return Meta.ANSWER
    class Shape(metaclass=Meta): pass
    class Square: pass
    square = Square()
    def call(x):
        return x if isinstance(square, Shape) else -x
    """,
    writes=["Meta.ANSWER = True", "Meta.__instancecheck__ = lambda cls, instance: False"],
)
case(
    "__subclasshook__'s answer is cached until anybody registers with anything",
    """
    import abc, collections.abc
    class Shape(abc.ABC):
        @classmethod
        def __subclasshook__(cls, other):
            return hasattr(other, "area")
    class Square: pass
    def call(x):
        return x if issubclass(Square, Shape) else -x
    """,
    writes=["Square.area = 1", "collections.abc.Sized.register(type('Any', (), {}))"],
)
case(
    "isinstance against a runtime protocol",
    """
    import typing
    @typing.runtime_checkable
    class Scaled(typing.Protocol):
        scale: float
    class Bag: pass
    bag = Bag()
    def call(x):
        return x * 2 if isinstance(bag, Scaled) else x
    """,
    writes=["bag.scale = 1.0", "del bag.scale"],
)
case(
    "type of an object asked for",
    """
    class A: pass
    class B(A): pass
    thing = A()
    def call(x):
        return x * 2 if type(thing) is A else x * 3 if isinstance(thing, A) else x
    """,
    writes=["thing = B()", "thing = 1", "thing = A()"],
)
everywhere(
    "two attributes are one object, then two",
    "Pair()",
    "return x * 2 if state.a is state.b else x * 3",
    before="""
    class Pair:
        def __init__(self):
            self.a = self.b = [1]
    """,
    writes=["STATE.b = [1]", "STATE.b = STATE.a"],
)
case(
    "is against a sentinel",
    """
    DEFAULT = object()
    value = DEFAULT
    def call(x):
        return x if value is DEFAULT else x * 2
    """,
    writes=["value = object()", "DEFAULT = value", "value = None"],
)
case(
    "object replaced by an equal one",
    """
    first = (1, 2.5)
    keep = first
    def call(x):
        return x if first is keep else -x
    """,
    writes=["first = tuple([1, 2.5])", "keep = first"],
)
case(
    "ids met again in new objects",
    """
    class Bag:
        def __init__(self, scale):
            self.scale = scale
    def call(x, bag):
        return x * bag.scale
    """,
    inputs=["x, Bag(2.0)", "x, Bag(3.0)", "x, Bag(float(n))"],
)
