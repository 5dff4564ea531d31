"""Attributes and classes of things that are known for something else: L1 for each of them.

A list has elements, a weak reference a referent, a module tables. Any of them may have attributes
of its own as well, or be an instance of a user's class, which has some.
"""

import importlib.util
import itertools
import textwrap

import pytest
import torch

import tripwire

_NUMBERS = itertools.count()
_IMPORTS = """
import abc, dataclasses, datetime, decimal, functools, logging, re, struct, threading, types
import weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""


def build(tmp_path, text: str):
    """A new Python module with that text."""
    name = f"own_attributes_{next(_NUMBERS)}"
    path = tmp_path / f"{name}.py"
    path.write_text(_IMPORTS + textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


READS = {
    "class of a parameter": (
        """
        class Quantised(nn.Parameter):
            bits = 4
            def scale(self): return 2.0 ** self.bits
        net = nn.Module()
        net.weight = Quantised(torch.ones(2))
        def call(x): return x * net.weight.scale()
        """,
        "Quantised.bits = 8",
    ),
    "method of a parameter's class": (
        """
        class Quantised(nn.Parameter):
            def scale(self): return 2.0
        net = nn.Module()
        net.weight = Quantised(torch.ones(2))
        def call(x): return x * net.weight.scale()
        """,
        "Quantised.scale = lambda self: 3.0",
    ),
    "slot of a module": (
        """
        class Net(nn.Module):
            __slots__ = ("k",)
            def __init__(self): super().__init__(); self.k = 2.0
            def forward(self, x): return x * self.k
        net = Net()
        def call(x): return net(x)
        """,
        "net.k = 3.0",
    ),
    "module that is a list": (
        """
        class Net(nn.Module, list):
            __hash__ = object.__hash__
            def __init__(self): nn.Module.__init__(self); list.append(self, 2.0)
            def forward(self, x): return x * self[0]
        net = Net()
        def call(x): return net(x)
        """,
        "net[0] = 3.0",
    ),
    "class of a thread's state": (
        """
        class State(threading.local): scale = 2.0
        state = State()
        def call(x): return x * state.scale
        """,
        "State.scale = 3.0",
    ),
    "attribute of a cached function": (
        """
        @functools.lru_cache
        def cached(n): return n
        cached.scale = 2.0
        def call(x): return x * cached.scale
        """,
        "cached.scale = 3.0",
    ),
    "attribute of a property": (
        """
        class Scaled(property):
            def __get__(self, instance, owner=None): return super().__get__(instance) * self.scale
        scaled = Scaled(lambda self: 2.0)
        scaled.scale = 2.0
        class Holder: value = scaled
        holder = Holder()
        def call(x): return x * holder.value
        """,
        "scaled.scale = 3.0",
    ),
    "attribute of a weak reference": (
        """
        class Reference(weakref.ref): pass
        class Thing: pass
        thing = Thing()
        reference = Reference(thing)
        reference.scale = 2.0
        def call(x): return x * reference.scale
        """,
        "reference.scale = 3.0",
    ),
    "class of a bytearray": (
        """
        class Data(bytearray): k = 2.0
        data = Data(b"a")
        def call(x): return x * data.k
        """,
        "Data.k = 3.0",
    ),
    "class of an array": (
        """
        class Image(np.ndarray): k = 2.0
        image = np.ones(3).view(Image)
        def call(x): return x * image.k
        """,
        "Image.k = 3.0",
    ),
    "mask of an array": (
        """
        M = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
        def call(x): return x * float(M.sum())
        """,
        "M.mask[0] = True",
    ),
    "polynomial": (
        """
        P = np.poly1d([1.0, 2.0])
        def call(x): return x * float(P(2.0))
        """,
        "P[0] = 5.0",
    ),
    "iterator over an array": (
        """
        A = np.ones(3)
        I = A.flat
        def call(x): return x * float(I[0])
        """,
        "A[0] = 4.0",
    ),
    "record that views an array": (
        """
        A = np.zeros(2, dtype=[("k", "f4")])
        R = A[0]
        def call(x): return x * float(R["k"])
        """,
        "A['k'][0] = 4.0",
    ),
    "object in a slice": (
        """
        class End:
            n = 1
            def __index__(self): return self.n
        end = End()
        part, numbers = slice(0, end), [1.0, 2.0, 3.0]
        def call(x): return x * sum(numbers[part])
        """,
        "end.n = 3",
    ),
    "class in an alias": (
        """
        class Config: k = 2.0
        alias = dict[str, Config]
        def call(x): return x * alias.__args__[1].k
        """,
        "Config.k = 3.0",
    ),
    "class in a union": (
        """
        class Config: k = 2.0
        union = Config | int
        def call(x): return x * union.__args__[0].k
        """,
        "Config.k = 3.0",
    ),
    "extra of a logger's adapter": (
        """
        adapter = logging.LoggerAdapter(logging.getLogger("own"), {"k": 2.0})
        def call(x): return x * adapter.extra["k"]
        """,
        "adapter.extra['k'] = 3.0",
    ),
    "attribute of a function that wraps torch's": (
        """
        @functools.wraps(F.gelu)
        def gelu(x, approximate="none"): return torch.sigmoid(gelu.a * x) * x
        gelu.a = 1.7
        def call(x): return gelu(x)
        """,
        "gelu.a = 1.0",
    ),
    "defaults of a function that wraps torch's": (
        """
        class Lin(nn.Linear):
            @functools.wraps(nn.Linear.forward)
            def forward(self, x, scale=2.0): return F.linear(x, self.weight) * scale
        net = Lin(2, 2)
        def call(x): return net(x)
        """,
        "Lin.forward.__defaults__ = (3.0,)",
    ),
    "table in a made dataclass": (
        """
        table = {"t": {"a": 2.0}}
        Config = dataclasses.make_dataclass("Config", [("v", float, 1.0)], namespace=table)
        config = Config()
        def call(x): return x * config.t["a"]
        """,
        "Config.t['a'] = 3.0",
    ),
    "table in a class that abc made": (
        """
        Config = abc.ABCMeta("Config", (), {"t": {"a": 2.0}})
        config = Config()
        def call(x): return x * config.t["a"]
        """,
        "Config.t['a'] = 3.0",
    ),
    "class without a module": (
        """
        space = {}
        exec("class Config: t = {'a': 2.0}", space)
        Config = space["Config"]
        config = Config()
        def call(x): return x * config.t["a"]
        """,
        "Config.t['a'] = 3.0",
    ),
    "namespace that somebody put on torch": (
        """
        torch.own_config = types.SimpleNamespace(k=2.0)
        def call(x): return x * torch.own_config.k
        """,
        "torch.own_config.k = 3.0",
    ),
    "module's __getattr__ that is replaced": (
        """
        other = types.ModuleType("other")
        def old(name): return 2.0
        other.__getattr__ = old
        def call(x): return x * other.scale
        """,
        "other.__getattr__ = lambda name: 3.0",
    ),
    "module's __getattr__ that is new": (
        """
        other = types.ModuleType("other")
        def call(x): return x * getattr(other, "scale", 7.0)
        """,
        "other.__getattr__ = lambda name: 3.0",
    ),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore::tripwire.TracerWarning")
def test_what_was_read_is_read_again_when_it_changes(name, tmp_path) -> None:
    text, write = READS[name]
    world = build(tmp_path, text)
    compiled = tripwire.compile(world.call, backend="eager")
    x = torch.ones(2)
    try:
        for _ in range(3):
            assert torch.equal(compiled(x), world.call(x))
        before = world.call(x)
        exec(write, vars(world))
        assert not torch.equal(before, world.call(x))
        for _ in range(3):
            assert torch.equal(compiled(x), world.call(x))
    finally:
        vars(torch).pop("own_config", None)


EFFECTS = {
    "class of a tensor": (
        """
        class Counting(torch.Tensor):
            n = 0
            def double(self):
                type(self).n += 1
                return self * 2
        weight = torch.ones(2).as_subclass(Counting)
        def call(x): return weight.double() * x
        """,
        "Counting.n",
    ),
    "slot of a module": (
        """
        class Net(nn.Module):
            __slots__ = ("n",)
            def __init__(self): super().__init__(); self.n = 0
            def forward(self, x): self.n += 1; return x * 2
        net = Net()
        def call(x): return net(x)
        """,
        "net.n",
    ),
    "function that wraps torch's": (
        """
        @functools.wraps(F.softmax)
        def soft(*args, **kwargs):
            soft.calls += 1
            return F.softmax(*args, **kwargs)
        soft.calls = 0
        def call(x): return soft(x, -1)
        """,
        "soft.calls",
    ),
    "cached function": (
        """
        @functools.lru_cache
        def cached(n): return n
        cached.calls = 0
        def call(x):
            cached.calls += 1
            return x * 2
        """,
        "cached.calls",
    ),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_was_written_is_written_by_each_call(name, tmp_path) -> None:
    text, count = EFFECTS[name]
    world = build(tmp_path, text)
    compiled = tripwire.compile(world.call, backend="eager")
    for calls in range(1, 5):
        compiled(torch.ones(2))
        assert eval(count, vars(world)) == calls


IMMUTABLE = {
    "pattern": ("re.compile('a+')", "len(V.findall('aabaa'))", "re.compile('a')"),
    "duration": ("datetime.timedelta(2)", "V.days", "datetime.timedelta(3)"),
    "date": ("datetime.date(2020, 1, 2)", "V.year", "datetime.date(2021, 1, 2)"),
    "decimal": ("decimal.Decimal('1.5')", "float(V / 3)", "decimal.Decimal('2.5')"),
    "struct": ("struct.Struct('i')", "V.size", "struct.Struct('ii')"),
    "qscheme": (
        "torch.per_tensor_affine",
        "(2 if V in (torch.per_tensor_affine,) else 3)",
        "torch.per_channel_affine",
    ),
    "qscheme in an object": (
        "types.SimpleNamespace(scheme=torch.per_tensor_affine)",
        "(2 if V.scheme == torch.per_tensor_affine else 3)",
        "types.SimpleNamespace(scheme=torch.per_tensor_symmetric)",
    ),
}


@pytest.mark.parametrize("name", IMMUTABLE)
def test_immutable_values_of_c_classes_are_compiled(name, tmp_path) -> None:
    first, use, second = IMMUTABLE[name]
    world = build(tmp_path, f"V = {first}\ndef call(x): return x * {use}\n")
    compiled = tripwire.compile(world.call, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for write in ("", f"V = {second}"):
        exec(write, vars(world))
        for _ in range(3):
            assert torch.equal(compiled(x), world.call(x))
    assert tripwire.statistics(compiled).hits == 4


def test_dataclasses_that_are_compared_are_compiled(tmp_path) -> None:
    world = build(
        tmp_path,
        """
        @dataclasses.dataclass
        class Config:
            k: int = 1
        one, other = Config(), Config()
        def call(x): return x * 2 if one == other else x
        """,
    )
    compiled = tripwire.compile(world.call, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for k in (1, 5, 1):
        world.other.k = k
        for _ in range(3):
            assert torch.equal(compiled(x), world.call(x))
    assert tripwire.statistics(compiled).hits >= 4
