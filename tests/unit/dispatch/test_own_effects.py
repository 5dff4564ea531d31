"""Effects that a run itself may read again: from the end of a list, in the order of a dict."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

PROGRAMS: dict[str, tuple[str, str]] = {  # name: source, state
    "list in a list, appended to and measured from the end": (
        """
L = [[]]
def call(x):
    L[-1].append(1)
    if len(L[-1]) == 2:
        L.append([])
    return x * 2
""",
        "L",
    ),
    "dict in a list, counted from the end": (
        """
L = [{}]
def call(x):
    L[-1]["n"] = L[-1].get("n", 0) + 1
    return x * L[-1]["n"]
""",
        "L",
    ),
    "order of a dict": (
        """
D = {"a": 1.0, "b": 2.0}
def call(x):
    first = next(iter(D.values()))
    D["a"] = D.pop("a")
    return x * first
""",
        "list(D)",
    ),
    "order of an OrderedDict": (
        """
D = OrderedDict(a=1.0, b=2.0)
def call(x):
    D.move_to_end(next(iter(D)))
    return x * next(iter(D.values()))
""",
        "list(D)",
    ),
    "order that nothing reads": (
        """
D = OrderedDict(a=1.0, b=2.0)
def call(x):
    D.move_to_end(next(iter(D)))
    return x * D["a"]
""",
        "list(D)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_state_are_those_of_plain_code(sentry, name) -> None:
    source, state = PROGRAMS[name]
    seen = []
    for is_compiled in (False, True):
        space: dict[str, Any] = {"OrderedDict": OrderedDict, "__name__": __name__}
        exec(source, space)
        call = tripwire.compile(space["call"], backend="eager") if is_compiled else space["call"]
        calls = [(call(torch.ones(1)).item(), repr(eval(state, space))) for _ in range(7)]
        seen.append(calls)
    assert seen[0] == seen[1]


_LAST = {
    "items": """
D = {"a": 2.0}
def call(x):
    for key, value in D.items():
        x = x * value + len(key)
    D["last"] = x
    return x
""",
    "attributes": """
class Holder: pass
holder = Holder()
D = vars(holder)
holder.a = 2.0
def call(x):
    for key, value in vars(holder).items():
        x = x * value + len(key)
    holder.last = x
    return x
""",
}


@pytest.mark.parametrize("form", _LAST)
def test_the_place_of_what_a_run_writes_among_the_others(sentry, form) -> None:
    seen = []
    for is_compiled in (False, True):
        space: dict[str, Any] = {"__name__": __name__}
        exec(_LAST[form], space)
        call = tripwire.compile(space["call"], backend="eager") if is_compiled else space["call"]
        results = [call(torch.ones(1)).item() for _ in range(4)]
        space["D"]["a"] = space["D"].pop("a")  # the same values, in another order
        seen.append(results + [call(torch.ones(1)).item() for _ in range(4)])
    assert seen[0] == seen[1]


# --- what is stored, and what it was before ----------------------------------------------------

_STORED = {
    "list": "[y]",
    "tuple": "(y, [y])",
    "dict": '{"y": y, "n": 3}',
    "numbers": "[1, 2]",
    "leaf": "[torch.ones(2, requires_grad=True)]",
    "object": "Box(y)",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("base", ["object", "nn.Module"])
@pytest.mark.parametrize("form", _STORED)
def test_what_is_stored_and_not_read_is_no_hindrance(form, base, backend, tmp_path) -> None:
    program = f"""
class Box:
    def __init__(self, y):
        self.y = y

class Net({base}):
    def __init__(self):
        super().__init__()
        self.kept = None

    def __call__(self, x):
        y = x * 2
        self.kept = {_STORED[form]}
        return y + 1

net = Net()

def call(x):
    return net(x)

def go(f, see):
    for i in range(3):
        see(f(T(i)), net.kept, vars(net.kept) if type(net.kept) is Box else 0)
    before = net.kept
    for kept in (None, 5, [T(1)]):
        net.kept = kept
        see(f(T(7)), net.kept, kept is net.kept)
    see(before)
    del net.kept
    see(f(T(8)), net.kept)
"""
    check_twins(program, backend, tmp_path, hits=5)


_DELETED = {
    "statement": "del self.k",
    "function": 'delattr(self, "k")',
    "computed": 'delattr(self, "k"[:])',
    "of object": 'object.__delattr__(self, "k")',
    "of super": 'super().__delattr__("k")',
    "dict": 'self.__dict__.pop("k")',
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", ["self.k = [x]", "pass"])
@pytest.mark.parametrize("form", _DELETED)
def test_what_is_deleted_must_be_there(form, stored, backend, tmp_path) -> None:
    program = f"""
class Net:
    def __init__(self):
        self.k = [1]

    def run(self, x):
        {_DELETED[form]}
        {stored}
        return x * 2

net = Net()

def call(x):
    return net.run(x)

def go(f, see):
    for write in ("pass", "net.k = [1]", "net.k = 5", "vars(net).pop('k', None)", "net.k = 3"):
        exec(write, globals())
        for i in range(3):
            try:
                see(f(T(i)), vars(net))
            except (AttributeError, KeyError) as error:
                see(str(error), vars(net))
"""
    check_twins(program, backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_setter_of_the_users_finds_is_read(backend, tmp_path) -> None:
    program = """
class Logged:
    def __init__(self):
        object.__setattr__(self, "log", [])
        object.__setattr__(self, "k", 0)

    def __setattr__(self, name, value):
        self.log.append(type(object.__getattribute__(self, name)).__name__)
        object.__setattr__(self, name, value)

o = Logged()

def call(x):
    o.k = [x]
    return x * 2

def go(f, see):
    for i in range(8):
        if i == 4:
            o.k = "text"
        see(f(T(i)), o.k, o.log)
"""
    check_twins(program, backend, tmp_path)


# --- context variables, and what can't be written again ----------------------------------------

_CONTEXT = """
import contextvars

A = contextvars.ContextVar("A", default=None)
EMPTY = contextvars.ContextVar("EMPTY")
S = types.SimpleNamespace(var=A)

def swap(value):
    return S.var.set(value)
"""
_SET = {
    "number": ("A.set(5)", "x * 2"),
    "number that is read then": ("A.set(5)", "x * A.get()"),
    "text, by a helper that forgets the token": ("swap('on')", "x * 2"),
    "tuple": ("A.set((1, 2))", "x * 2"),
    "dict made in the run": ("A.set({'n': x.shape[0]})", "x * 2"),
    "tensor": ("A.set(x * 3)", "x * 2"),
    "tensor that is read then": ("A.set(x * 3)", "x * A.get()"),
    "one that had no value": ("EMPTY.set(2)", "x * EMPTY.get()"),
    "set twice, reset once": ("A.set(1); A.reset(A.set(2))", "x * A.get()"),
    "counted": ("A.set((A.get() or 0) + 1 if type(A.get()) is int else 1)", "x * A.get()"),
    "set and reset": ("A.reset(A.set(7))", "x * 2"),
    "list that is appended to": ("A.set([]); A.get().append(x.shape[0])", "x * 2"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _SET)
def test_what_a_run_leaves_in_a_context_variable_every_call_leaves_there(
    form, backend, tmp_path
) -> None:
    statement, result = _SET[form]
    program = f"""{_CONTEXT}
def call(x):
    {statement}
    return {result}

def play(f, see):
    for value in (None, None, None, 40, 40, 40, 5, 5, 5, "on", T(1), {{}}):
        A.set(value)
        for i in range(2):
            see(f(T(i)), A.get(), EMPTY.get(0))

def go(f, see):
    contextvars.copy_context().run(play, f, see)
"""
    check_twins(program, backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_variable_that_is_set_to_a_number_is_compiled(backend, tmp_path) -> None:
    program = f"""{_CONTEXT}
def call(x):
    A.set(5)
    return x * 2

def play(f, see):
    for value in (5, None, 40) * 3:
        A.set(value)
        see(f(T(1)), A.get())

def go(f, see):
    contextvars.copy_context().run(play, f, see)
"""
    check_twins(program, backend, tmp_path, hits=6)


_PASSED = {
    "itself": ("A", "return x * given.get()[0]"),
    "in a list": ("[A]", "return x * given[0].get()[0]"),
    "on an object": ("types.SimpleNamespace(var=A)", "return x * given.var.get()[0]"),
    "its method": ("A.get", "return x * given()[0]"),
    "and a global": ("A", "return x * A.get()[0]"),
    "with a default of its own": ("OWN", "return x * given.get()[0]"),
    "or unset": ("EMPTY", "return x * given.get([7])[0]"),
    "that the call sets": (
        "A",
        "old = given.get()\n    given.set([old[0] + 1])\n    return x * old[0]",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _PASSED)
def test_a_context_variable_that_is_passed_is_compared_by_what_it_is_set_to(
    form, backend, tmp_path
) -> None:
    given, body = _PASSED[form]
    program = f"""{_CONTEXT}
OWN = contextvars.ContextVar("OWN", default=[1])

def call(x, given):
    {body}

def play(f, see):
    for value in (2, 3.0, False, 2):
        for variable in (A, OWN, EMPTY):
            variable.set([value])
        for i in range(3):
            see(f(T(i), {given}))
        for variable in (A, OWN, EMPTY):
            variable.get()[0] = 9
        see(f(T(1), {given}), A.get())

def go(f, see):
    A.set([4])
    see(f(T(0), {given}), f(T(1), {given}))
    OWN.get()[0] = 6
    see(f(T(1), {given}))
    contextvars.copy_context().run(play, f, see)
    see(f(T(1), {given}), f(T(1), {given}), A.get())
"""
    check_twins(program, backend, tmp_path, hits=4)


_CLEARED = {
    "cleared at the end": "y = x * double(2); double.cache_clear()",
    "cleared by a helper": "y = x * 2; forget()",
    "cleared between two uses": "y = x * double(2); double.cache_clear(); y = y + double(3)",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _CLEARED)
def test_a_cache_that_a_run_clears_is_cleared_by_every_call(form, backend, tmp_path) -> None:
    program = f"""
@functools.lru_cache(maxsize=None)
def double(n):
    return n * 2

def forget():
    double.cache_clear()

def call(x):
    {_CLEARED[form]}
    return y

def go(f, see):
    for i in range(8):
        double(5)
        see(f(T(i)), double.cache_info().currsize)
"""
    check_twins(program, backend, tmp_path)


def test_what_a_descriptor_holds_is_written_past_it() -> None:
    class Box:
        def __init__(self):
            self.value = 2.0

    class Special(Box):
        pass

    class Shared:
        def __get__(self, instance, owner):
            return self.held

    class Owner:
        box = Shared()

    def run(compile):
        vars(Owner)["box"].held = Box()
        owner = Owner()

        def call(x):
            owner.box.calls = getattr(owner.box, "calls", 0) + 1
            return x * owner.box.value

        made, seen = compile(call), []
        for turn in range(9):
            if turn == 4:
                owner.box.__class__ = Special
            if turn == 7:
                vars(Owner)["box"].held = Box()
            seen.append((made(torch.ones(2)).tolist(), owner.box.calls, type(owner.box)))
        return seen

    assert run(lambda call: tripwire.compile(call, backend="eager")) == run(lambda call: call)


MADE_INSIDE = {
    "an attribute": ("held.box = Box(t.detach())", "held.box.value = 4.2"),
    "through a setter": ("held.box = Box(t.detach())", "held.box.tenfold = 4.2"),
    "an item": ("held.box = {'k': t.detach()}", "held.box['k'] = 4.2"),
    "an element": ("held.box = [t.detach()]", "held.box.append(4.2)"),
    "further down": ("held.box = Box([Box(1.0)])", "held.box.value[0].value = 4.2"),
    "a slot": ("held.box = Slots(t.detach())", "held.box.value = 4.2"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_what_a_custom_function_made_is_changed_after_it(name, backend, tmp_path) -> None:
    make, change = MADE_INSIDE[name]
    source = f"""
class Box:
    def __init__(self, value): self.value = value
    @property
    def tenfold(self): return self.value
    @tenfold.setter
    def tenfold(self, value): self.value = value * 10

class Slots:
    __slots__ = ("value",)
    def __init__(self, value): self.value = value

held = types.SimpleNamespace(box=None)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        {make}
        return t * 2

    @staticmethod
    def backward(ctx, g): return g * 2

def call(x):
    t = Double.apply(x)
    {change}
    return t * 2

def go(f, see):
    for i in range(4):
        result = f(T(i))
        box = held.box
        value = box.value if hasattr(box, "value") else box
        see(result, [one.value for one in value] if name == "further down" else value)
"""
    check_twins(
        source.replace('name == "further down"', str(name == "further down")), backend, tmp_path
    )


def test_what_a_custom_function_made_may_be_too_large_to_follow(tmp_path) -> None:
    source = """
held = types.SimpleNamespace(box=None)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        held.box = [[n] for n in range(3000)]
        return t * 2

    @staticmethod
    def backward(ctx, g): return g * 2

def call(x):
    t = Double.apply(x)
    held.box[0][0] += 7
    return t * 2

def go(f, see):
    for i in range(4):
        see(f(T(i)), held.box[0])
"""
    check_twins(source, "eager", tmp_path)


OF_BUILTINS = {  # name: what is there, what a call does to it, what another writes
    "attribute": (
        "types.SimpleNamespace(v=2.0)",
        "law.v = law.v * 2; x = x * law.v",
        "law.v = 3.0",
    ),
    "replaced list": (
        "types.SimpleNamespace(v=[2.0])",
        "law.v.append(1.0); x = x * law.v[0]",
        "law.v = [5.0]",
    ),
    "list": ("[2.0]", "law.append(1.0); x = x * law[0]", "law[0] = 4.0"),
    "dict": ("{}", "law['n'] = law.get('n', 0) + 1; x = x * law['n']", "law['n'] = 7"),
    "tensor": ("torch.ones(2)", "law.add_(x); x = x * law", "law.mul_(3)"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OF_BUILTINS)
def test_what_a_program_puts_among_the_builtins_is_written_and_read(
    name, backend, tmp_path
) -> None:
    made, body, write = OF_BUILTINS[name]
    program = f"""
import builtins
builtins.law = {made}
def call(x):
    {body}
    return x
def go(f, see):
    try:
        for i in range(9):
            see(f(torch.full((2,), 1.0 + i)), law if isinstance(law, (list, dict)) else str(law))
            if i in (1, 3, 6):
                {write}
    finally:
        del builtins.law
"""
    check_twins(program, backend, tmp_path, hits=0 if name == "list" else 2)


_BEHIND_PROXY = {
    "attribute": "P.n = P.n + 1; y = x * P.n",
    "attribute that is only stored": "P.last = x.shape[0]; y = x * 2",
    "attribute of what it holds": "P.inner.n += 1; y = x * 2",
    "item": "P.table['k'] = P.table.get('k', 0) + 1; y = x * P.table['k']",
    "item that a default gives": "y = x * P.missing['k']",
    "list": "P.log.append(x.shape[0]); y = x * 2",
    "tensor": "P.kept = x * 2; y = x + P.kept",
    "deleted": "P.gone = 1; del P.gone; y = x * 2",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _BEHIND_PROXY)
def test_what_a_run_writes_behind_a_weak_proxy_every_call_writes(form, backend, tmp_path) -> None:
    program = f"""
import collections, weakref

class Owner: pass

O = Owner()
O.n, O.inner, O.table, O.log = 0, types.SimpleNamespace(n=0), {{}}, []
O.missing = collections.defaultdict(lambda: 7.0)
P = weakref.proxy(O)

def call(x):
    {_BEHIND_PROXY[form]}
    return y

def go(f, see):
    for i in range(9):
        see(f(T(i)), {{**vars(O), "inner": O.inner.n}})
        if i == 5:
            O.missing.clear()
            O.n, O.table = 0, {{}}
"""
    check_twins(program, backend, tmp_path, hits=2)


_GROWS = {
    "lambda": ("[]", "lambda v: L.append(v)", "g(x.mean()); y = x * 2"),
    "part of a tuple": ("[]", "lambda v: (L.append(3), v * 2)[1]", "y = g(x)"),
    "left of an or": ("[]", "lambda v: L.append(3) or v * 3", "y = g(x)"),
    "hook": ("[]", "lambda m, i, o: L.append(o.shape[0])", "y = NET(x)"),
    "asked for": ("[]", "lambda v: L.extend([1, 2]) is None", "y = x * (2 if g(x) else 3)"),
    "deque": ("collections.deque()", "lambda v: L.append(3)", "g(x); y = x * 2"),
    "set": ("set()", "lambda v: L.add(3)", "g(x); y = x * 2"),
    "list that returns itself": ("Fluent()", "lambda v: L.append(3)[0]", "y = x * g(x)"),
    "object that returns itself": ("Box()", "lambda v: L.append(3).items", "y = x * len(g(x))"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _GROWS)
def test_what_append_returns_may_be_used(form, backend, tmp_path) -> None:
    made, function, body = _GROWS[form]
    program = f"""
import collections

class Fluent(list):
    def append(self, value):
        super().append(value)
        return self

class Box:
    def __init__(self):
        self.items = []
    def append(self, value):
        self.items.append(value)
        return self
    def clear(self):
        self.items.clear()

L = {made}
g = {function}
NET = torch.nn.Linear(1, 1)
with torch.no_grad():
    NET.weight.fill_(2.0), NET.bias.zero_()
NET.register_forward_hook(g)

def call(x):
    {body}
    return y

def go(f, see):
    global L
    for i in range(12):
        see(f(torch.full((2, 1), float(i))), [*getattr(L, "items", L)])
        if i == 5:
            L.clear()
        if i == 8:
            L = {made}
"""
    check_twins(program, backend, tmp_path, hits=0 if "itself" in form else 9)


_BUILTIN = {
    "of a text": ("'abc'.upper", "'abd'.upper", "x * len(g()) * (2 if g() == 'ABC' else 3)"),
    "of a number": ("(5).bit_length", "(25).bit_length", "x * g()"),
    "of a tuple": ("(1, 2, 2).count", "(2,).count", "x * g(2)"),
    "of a tensor": ("W.mul", "V.mul", "g(x)"),
    "of the argument": ("x.mul", "x.add", "g(2)"),
    "of a pattern": ("re.compile('a').match", "re.compile('b').match", "x * bool(g('a'))"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", _BUILTIN)
def test_a_builtin_method_that_is_passed_is_compared_by_its_object_and_name(
    form, backend, tmp_path
) -> None:
    first, second, body = _BUILTIN[form]
    program = f"""
import re

W, V = torch.tensor(2.0), torch.tensor(3.0)

def call(x, g):
    return {body}

def go(f, see):
    for i in range(4):
        x = T(i)
        see(f(x, {first}))
    for i in range(4):
        x = T(i)
        see(f(x, {second}), f(x, {first}))
"""
    check_twins(program, backend, tmp_path, hits=9)
