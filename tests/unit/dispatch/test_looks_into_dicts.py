"""What code finds in the `__dict__` of a class, or of an object behind a property, is followed."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

LOOKS = {
    "an item": "K.__dict__['v']",
    "get": "K.__dict__.get('gone', 0.0)",
    "whether it is there": "float('late' in K.__dict__)",
    "vars": "vars(K)['v']",
    "by another name": "(lambda d: d['v'])(K.__dict__)",
    "a computed key": "K.__dict__['V'.lower()]",
    "how many": "float(len(K.__dict__))",
    "of a base": "Below.__mro__[1].__dict__['v']",
    "of an object's class": "type(me).__dict__['v']",
    "by __class__": "me.__class__.__dict__.get('v', 0.0)",
    "of a walk": "sum(v for k, v in K.__dict__.items() if isinstance(v, float))",
    "through a metaclass": "M.__dict__['v']",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_looks_into_the_dict_of_a_class(look, backend, tmp_path) -> None:
    program = f"""
class K:
    v = 1.0
    gone = 2.0
class Below(K):
    pass
class Meta(type):
    pass
class M(metaclass=Meta):
    v = 1.0
me = K()
def call(x):
    return x * {look}
def go(f, see):
    for i in range(9):
        see(f(T(1 + i)))
        if i == 2:
            K.v = M.v = 5.0
        if i == 4:
            del K.gone
            K.late = 3.0
        if i == 6:
            K.v = M.v = 7.0
            del K.late
"""
    check_twins(program, backend, tmp_path, hits=1)


BEHIND = {  # name: what is kept, what a call does, what another writes
    "number": ("3.0", "x = x * D['v']", "D['v'] = D['v'] + 2.0"),
    "counter": ("3", "D['v'] += 1; x = x * D['v']", "D['v'] = 10"),
    "tensor": ("T(3)", "x = x * D['v']", "D['v'] = T(4)"),
    "tensor in place": ("T(3)", "D['v'].add_(x); x = x * D['v']", "D['v'].zero_()"),
    "form of a tensor": (
        "T(3)",
        "x = x * D['v'].dim() * (1 + D['v'].requires_grad)",
        "D['v'].requires_grad_(not D['v'].requires_grad)",
    ),
    "list": ("[1.0]", "D['v'].append(2.0); x = x * D['v'][0]", "D['v'] = [5.0]"),
    "text": ("'sin'", "x = getattr(x, D['v'])()", "D['v'] = 'cos'"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "state"])
@pytest.mark.parametrize("name", BEHIND)
def test_a_write_behind_a_property_is_seen(name, is_passed, backend, tmp_path) -> None:
    kept, body, write = BEHIND[name]
    program = f"""
asked = []
class Obj:
    def __init__(self):
        self.__dict__['v'] = {kept}
    @property
    def v(self):
        asked.append(1)
        return 999
one = Obj()
def call(x{", one" if is_passed else ""}):
    {body.replace("D[", "one.__dict__[")}
    return x
def go(f, see):
    D = one.__dict__
    for i in range(9):
        see(f(T(1 + i){", one" if is_passed else ""}), str(D['v']), len(asked))
        if i in (1, 3, 6):
            {write}
"""
    check_twins(program, backend, tmp_path)


TAKEN = {
    "copy": "copy.copy(me).v + copy.copy(me).d[0]",
    "deepcopy": "copy.deepcopy(me).v + copy.deepcopy(me).d[0]",
    "deepcopy of what holds it": "copy.deepcopy([me])[0].v",
    "copy of a dataclass": "copy.copy(data).v + copy.copy(data).d[0]",
    "copy of a namespace": "copy.copy(space).v + copy.deepcopy(space).d[0]",
    "copy of a module": "copy.copy(net).v + copy.copy(net).d[0]",
    "copy of one with slots": "copy.copy(slots).v + copy.copy(slots).d[0]",
    "its state": "me.__getstate__()['v'] + me.__getstate__()['d'][0]",
    "its state, by its class": "object.__getstate__(me)['v'] + object.__getstate__(me)['d'][0]",
    "its state, by another name": "take(me)['v'] + take(me)['d'][0]",
    "its state, by a base": "own.__getstate__()['v'] + own.__getstate__()['d'][0]",
    "its parts": "me.__reduce_ex__(4)[2]['v'] + me.__reduce__()[2]['d'][0]",
    "its parts, by its class": "object.__reduce_ex__(me, 4)[2]['v']",
    "its names": "float(len(me.__dir__()))",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_all_that_an_object_holds_taken_at_once(take, backend, tmp_path) -> None:
    program = f"""
import argparse, copy, dataclasses
from torch import nn
class K:
    def __init__(self):
        self.v, self.d = 1.0, [2.0]
class Own(K):
    def __getstate__(self):
        return dict(super().__getstate__())
@dataclasses.dataclass
class Data:
    v: float
    d: list
class Slots:
    __slots__ = ("v", "d", "late")
class Net(nn.Module):
    pass
me, own, data, space, slots, net = (
    K(), Own(), Data(1.0, [2.0]), argparse.Namespace(v=1.0, d=[2.0]), Slots(), Net()
)
slots.v, slots.d, net.v, net.d = 1.0, [2.0], 1.0, [2.0]
held = (me, own, data, space, slots, net)
take = object.__getstate__
def call(x):
    return x * ({take})
def go(f, see):
    for i in range(15):
        see(f(T(1 + i)))
        for one in held:
            if i == 2:
                one.v = 5.0
            if i == 5:
                one.d[0] = 7.0
            if i == 8:
                one.v, one.d = 9.0, [11.0]
            if i == 11:
                one.late = 1.0
"""
    check_twins(program, backend, tmp_path, hits=6)
