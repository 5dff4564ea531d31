"""What Python makes of a class or a dict: views, annotations, fields of dataclasses."""

from __future__ import annotations

import inspect

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

PROGRAMS = {
    "MappingProxyType argument": """
def call(m, x):
    return x * m["a"]

def go(f, see):
    d = {"a": 2}
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d["a"] = 3
    for i in range(3):
        see(f(m, T(1)))
    for i in range(3):
        see(f(types.MappingProxyType({"a": 5}), T(1)))
    for i in range(3):
        see(f(types.MappingProxyType({"a": 3}), T(1)))
""",
    "MappingProxyType tensor": """
def call(m, x):
    return x * m["a"]

def go(f, see):
    d = {"a": T(2)}
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d["a"] = T(3)
    for i in range(3):
        see(f(m, T(1)))
    for i in range(3):
        see(f(types.MappingProxyType({"a": T(5)}), T(1)))
""",
    "MappingProxyType in object": """
class O:
    pass

def call(o, x):
    return x * o.m["a"] + len(o.m)

def go(f, see):
    o = O()
    d = {"a": 2}
    o.m = types.MappingProxyType(d)
    for i in range(3):
        see(f(o, T(1)))
    d["a"] = 3
    for i in range(3):
        see(f(o, T(1)))
    d["b"] = 3
    for i in range(3):
        see(f(o, T(1)))
""",
    "MappingProxyType state": """
d = {"a": 2}
m = types.MappingProxyType(d)

def call(x):
    return x * m["a"]

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    d["a"] = 3
    for i in range(3):
        see(f(T(1)))
""",
    "MappingProxyType iterated": """
def call(m, x):
    for k, v in m.items():
        x = x * v
    return x

def go(f, see):
    d = {"a": 2}
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d["b"] = 3
    for i in range(3):
        see(f(m, T(1)))
""",
    "MappingProxyType same twice": """
def call(m, n, x):
    return x * (m["a"] if m is n else 7)

def go(f, see):
    d = {"a": 2}
    m = types.MappingProxyType(d)
    n = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, m, T(1)))
    for i in range(3):
        see(f(m, n, T(1)))
    for i in range(3):
        see(f(m, m, T(1)))
""",
    "MappingProxyType of a userdict": """
def call(m, x):
    return x * m["a"]

def go(f, see):
    d = collections.UserDict(a=2)
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d["a"] = 3
    for i in range(3):
        see(f(m, T(1)))
""",
    "class annotations": """
class C:
    a: int

def call(x):
    return x * len(C.__annotations__)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
    C.__annotations__ = {}
    for i in range(3):
        see(f(T(1)))
""",
    "class annotations items": """
class C:
    a: int

def call(x):
    return x * (2 if C.__annotations__["a"] is int else 3)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["a"] = float
    for i in range(3):
        see(f(T(1)))
""",
    "function annotations": """
def g(a: int):
    pass

def call(x):
    return x * len(g.__annotations__)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    g.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
    g.__annotations__ = {}
    for i in range(3):
        see(f(T(1)))
""",
    "get_type_hints": """
class C:
    a: int

def call(x):
    return x * len(typing.get_type_hints(C))

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "dataclass fields": """
@dataclasses.dataclass
class C:
    a: int = 2

def call(x):
    return x * len(dataclasses.fields(C)) * dataclasses.fields(C)[0].default

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__dataclass_fields__["a"].default = 9
    for i in range(3):
        see(f(T(1)))
    C.__dataclass_fields__["b"] = C.__dataclass_fields__["a"]
    for i in range(3):
        see(f(T(1)))
""",
    "dataclass fields attr": """
@dataclasses.dataclass
class C:
    a: int = 2

def call(x):
    return x * len(C.__dataclass_fields__)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__dataclass_fields__["b"] = C.__dataclass_fields__["a"]
    for i in range(3):
        see(f(T(1)))
""",
    "dataclass asdict": """
@dataclasses.dataclass
class C:
    a: int = 2

c = C()

def call(x):
    return x * dataclasses.asdict(c)["a"]

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    c.a = 5
    for i in range(3):
        see(f(T(1)))
""",
    "dataclass argument fields metadata": """
@dataclasses.dataclass
class C:
    a: int = dataclasses.field(default=2, metadata={"s": 3})

def call(c, x):
    return x * dataclasses.fields(c)[0].metadata["s"]

def go(f, see):
    c = C()
    for i in range(3):
        see(f(c, T(1)))
    C.__dataclass_fields__["a"].metadata = types.MappingProxyType({"s": 7})
    for i in range(3):
        see(f(c, T(1)))
""",
    "dataclass replace": """
@dataclasses.dataclass
class C:
    a: int = 2
    b: int = 3

c = C()

def call(x):
    d = dataclasses.replace(c, a=4)
    return x * d.a * d.b

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    c.b = 5
    for i in range(3):
        see(f(T(1)))
""",
    "method annotations of instance": """
class C:
    a: int

    def m(self) -> int:
        pass

c = C()

def call(x):
    return x * len(c.__annotations__) * len(c.m.__annotations__)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
    C.m.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "module annotations": """
z: int = 4

def call(x):
    return x * len(__annotations__)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    __annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "proxy of proxy": """
def call(m, x):
    return x * m["a"]

def go(f, see):
    d = {"a": 2}
    for i in range(3):
        see(f(types.MappingProxyType(types.MappingProxyType(d)), T(1)))
    d["a"] = 3
    for i in range(3):
        see(f(types.MappingProxyType(types.MappingProxyType(d)), T(1)))
""",
    "vars of class argument": """
class C:
    a = 2

def call(m, x):
    return x * m["a"]

def go(f, see):
    for i in range(3):
        see(f(vars(C), T(1)))
    C.a = 3
    for i in range(3):
        see(f(vars(C), T(1)))
""",
    "proxy of ordered": """
def call(m, x):
    for k, v in m.items():
        x = x * v + 1
    return x

def go(f, see):
    d = collections.OrderedDict(a=2, b=3)
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d.move_to_end("a")
    for i in range(3):
        see(f(m, T(1)))
""",
    "proxy get/in/len": """
def call(m, x):
    return x * m.get("a", 7) * (2 if "b" in m else 3) * len(m)

def go(f, see):
    d = {"a": 2}
    m = types.MappingProxyType(d)
    for i in range(3):
        see(f(m, T(1)))
    d["b"] = 1
    for i in range(3):
        see(f(m, T(1)))
    del d["a"]
    for i in range(3):
        see(f(m, T(1)))
""",
    "proxy written by run": """
D = {"a": 1.0}

def call(m, x):
    y = x * m["a"]
    D["a"] = D["a"] + 1
    return y

def go(f, see):
    m = types.MappingProxyType(D)
    for i in range(5):
        see(f(m, T(1)), D)
""",
    "result proxy": """
def call(m, x):
    return m, x * 2

def go(f, see):
    for i in range(3):
        m = types.MappingProxyType({"a": 2})
        r, _ = f(m, T(1))
        see(r is m)
""",
    "late annotations": """
class C:
    a: int

def h(x):
    return x * len(C.__annotations__)

def call(x):
    y = x * (1 if C else 2)
    return h(y)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "inspect signature annotations": """
import inspect

def g(a: int, b: float):
    pass

def call(x):
    return x * sum(p.annotation is int for p in inspect.signature(g).parameters.values())

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    g.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "getattr annotations": """
class C:
    a: int

def call(x, n="__annotations__"):
    return x * len(getattr(C, n))

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "fields of base": """
@dataclasses.dataclass
class A:
    a: int = 1

class B(A):
    pass

def call(b, x):
    return x * len(dataclasses.fields(b))

def go(f, see):
    b = B()
    for i in range(3):
        see(f(b, T(1)))
    A.__dataclass_fields__["z"] = A.__dataclass_fields__["a"]
    for i in range(3):
        see(f(b, T(1)))
""",
    "class made dataclass params": """
@dataclasses.dataclass
class A:
    a: int = 1

def call(x):
    return x * (2 if A.__dataclass_params__.frozen else 3)

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    A.__dataclass_params__.frozen = True
    for i in range(3):
        see(f(T(1)))
""",
    "inspect annotations of a class": """
import inspect

class A:
    a: int

class B(A):
    b: int

def call(x):
    return x * (len(inspect.get_annotations(A)) + 2 * len(inspect.get_annotations(B)))

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    A.__annotations__["z"] = str
    for i in range(3):
        see(f(T(1)))
    B.__annotations__ = {}
    for i in range(3):
        see(f(T(1)))
""",
    "inspect annotations of a class that is first met by an argument": """
import inspect

class A:
    a: int

def call(a, x):
    return x * len(inspect.get_annotations(type(a)))

def go(f, see):
    a = A()
    for i in range(3):
        see(f(a, T(1)))
    A.__annotations__["z"] = str
    for i in range(3):
        see(f(a, T(1)))
""",
    "inspect signature of a method": """
import inspect

class A:
    def m(self, a: int, b: str):
        pass

def call(a, x):
    return x * sum(p.annotation is int for p in inspect.signature(a.m).parameters.values())

def go(f, see):
    a = A()
    for i in range(3):
        see(f(a, T(1)))
    A.m.__annotations__["b"] = int
    for i in range(3):
        see(f(a, T(1)))
""",
    "inspect signature of what a dict of another module holds": """
import inspect

def g(a: int, b: str):
    pass

import sys
table = sys.modules.setdefault("table_of_annotations", types.ModuleType("table_of_annotations"))
table.held = {"g": [g]}

def call(x):
    import table_of_annotations
    (found,) = table_of_annotations.held["g"]
    return x * sum(p.annotation is int for p in inspect.signature(found).parameters.values())

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    g.__annotations__["b"] = int
    for i in range(3):
        see(f(T(1)))
""",
    "inspect annotations of a module": """
import inspect
import sys

N: int = 1
me = sys.modules[__name__]

def call(x):
    return x * len(inspect.get_annotations(me))

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    me.__annotations__["z"] = str
    for i in range(3):
        see(f(T(1)))
""",
}
BEHIND_INDUCTOR = ["MappingProxyType argument"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_python_made_is_followed(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path)


@pytest.mark.parametrize("name", BEHIND_INDUCTOR)
def test_inductor_agrees_that_what_python_made_is_followed(name, tmp_path) -> None:
    check_twins(PROGRAMS[name], "inductor", tmp_path, hits=1)


def test_annotations_of_what_inspect_was_not_asked_for_are_no_reads() -> None:
    def asked(a: int) -> None: ...
    def other(a: int) -> None: ...

    def call(x):
        return x * len(inspect.signature(asked).parameters) + (other is not None)

    compiled = tripwire.compile(call, backend="eager")
    compiled(torch.ones(2))
    other.__annotations__["z"] = int
    compiled(torch.ones(2))
    assert tripwire.explain(compiled).traces == 1
    asked.__annotations__["z"] = int
    compiled(torch.ones(2))
    assert tripwire.explain(compiled).traces == 2
