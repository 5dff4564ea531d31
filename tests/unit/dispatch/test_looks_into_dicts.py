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
def test_what_a_property_stands_before(name, is_passed, backend, tmp_path) -> None:
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
