"""Python modules of the user's that code looks at as a whole: `vars(config)`, `dir(config)`."""

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

_LOOKS = {
    "vars": "total(vars(M))",
    "names": "len(dir(M))",
    "values under names": "sum(getattr(M, n) for n in dir(M) if n.startswith('opt_'))",
    "dict": "total(M.__dict__)",
    "dict, by a helper": "total(space_of(M))",
    "members": "sum(v for n, v in inspect.getmembers(M) if n.startswith('opt_'))",
    "name in vars": "(2 if 'opt_z' in vars(M) else 1)",
    "name got from vars": "vars(M).get('opt_z', 0.5)",
    "held by an object": "total(vars(HOLDER.module))",
    "in a list": "total(vars([HOLDER.module][0]))",
    "imported inside": "imported()",
    "among the loaded": "total(vars(sys.modules['whole_module']))",
    "vars under another name": "total(look(M))",
    "members under another name": "len(members(M))",
    "attrgetter": "sum(operator.attrgetter('opt_' + n)(M) for n in 'ab')",
    "lookup by its method": "M.__getattribute__('opt_' + 'a')",
    "counted by the call": "(count(), total(vars(M)))[1]",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("look", _LOOKS)
def test_what_a_module_gets_is_seen_by_code_that_looks_at_all_of_it(
    look, backend, tmp_path
) -> None:
    program = f"""
import inspect, operator, sys
from inspect import getmembers as members

M = types.ModuleType("whole_module")
exec("opt_a, opt_b, opt_n = 1.0, 2.0, 0", vars(M))  # with builtins, as modules of files have
HOLDER = types.SimpleNamespace(module=M)
look = vars

def total(space):
    return sum(value for name, value in space.items() if name.startswith("opt_"))

def space_of(module):
    return module.__dict__

def imported():
    import whole_module
    return total(vars(whole_module))

def count():
    M.opt_n += 1

def call(x):
    return x * {_LOOKS[look]}

def go(f, see):
    sys.modules["whole_module"] = M
    writes = [
        lambda: None,
        lambda: setattr(M, "opt_a", 4.0),
        lambda: setattr(M, "opt_z", 1.0),
        lambda: vars(M).pop("opt_z"),
        lambda: vars(M).update(opt_y=7.0, opt_x=1.5),
        lambda: setattr(M, "opt_b", True),
    ]
    for write in writes:
        write()
        for i in range(3):
            see(f(T(i)), M.opt_n)
    del sys.modules["whole_module"]
"""
    check_twins(program, backend, tmp_path, hits=0 if "counted" in look or "members" in look else 6)
