"""A custom function gets what the program passed to it: of its class, and the thing itself."""

from __future__ import annotations

import pytest
from property.twins import Back, Call, Do, Figures, Scenario, check

BEHIND = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
CALL = Call("new(4).requires_grad_(), new(4)", times=3)
_GRAD = "torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)"

# What is passed, what forward and backward make of it, and writes.
HANDED = {
    "a size": ("", "x.shape", "s.numel()", ()),
    "part of a size": ("", "x.shape[:1]", "s.numel()", ()),
    "a size in a tuple": ("", "(x.shape, 2)", "s[0].numel()", ()),
    "a list's subclass": (
        "class Rows(list): k = 2.0\nrows = Rows([1.0])",
        "rows",
        "s.k * s[0]",
        ("Rows.k = 3.0", "rows[0] = 2.0", "rows[0] = 5.0", "rows.k = 9.0", "rows = Rows([4.0])"),
    ),
    "a tuple's subclass": (
        "class Rows(tuple): k = 2.0\nrows = Rows([1.0])",
        "rows",
        "s.k * s[0]",
        ("Rows.k = 3.0", "rows = Rows([4.0])", "rows = Rows([5.0])", "rows = Rows([6.0])"),
    ),
    "a config": (
        "class Config(dict): __getattr__ = dict.__getitem__\nconfig = Config(k=1.0)",
        "config",
        "s.k",
        ("config['k'] = 2.0", "config['k'] = 5.0", "config = Config(k=7.0)"),
    ),
    "a dict in order": (
        "table = collections.OrderedDict(a=1.0, b=2.0)",
        "table",
        "next(iter(s.values())) * len(type(s).__name__)",
        ("table.move_to_end('a')", "table['a'] = 5.0", "table['b'] = 6.0", "table['b'] = 7.0"),
    ),
    "a dict that counts": (
        "counts = collections.Counter('aab')",
        "counts",
        "s['a'] + s['absent']",
        ("counts['a'] = 4", "counts['a'] = 5", "counts['b'] = 7"),
    ),
    "a named tuple": (
        "Pair = collections.namedtuple('Pair', 'a b')\npair = Pair(1.0, 2.0)",
        "pair",
        "s.a + s.b",
        ("pair = Pair(3.0, 2.0)", "pair = Pair(4.0, 2.0)", "pair = Pair(5.0, 2.0)"),
    ),
}


def _write(setup: str, given: str, used: str) -> str:
    return (
        "class Scaled(torch.autograd.Function):\n    @staticmethod\n"
        f"    def forward(ctx, t, s):\n        ctx.s = s\n        return t * ({used})\n"
        "    @staticmethod\n    def backward(ctx, g):\n        s = ctx.s\n"
        f"        return g * ({used}), None\n{setup}\n"
        f"def call(x, y): return Scaled.apply(x * 1, {given})\n"
    )


@BEHIND
@pytest.mark.parametrize("name", HANDED)
def test_a_custom_function_gets_an_argument_of_the_class_that_was_passed(backend, name) -> None:
    setup, given, used, writes = HANDED[name]
    steps = [CALL, *(step for write in writes for step in (Do(write), CALL))]
    figures = Figures()
    check(Scenario(_write(setup, given, used), tuple(steps), backend), figures)
    assert figures.hits > len(steps) // 2


@BEHIND
@pytest.mark.parametrize(
    ("setup", "used", "writes"),
    [
        ("held = [1.0]", "sum(s)", ("held[0] = 2.0", "held[0] = 3.0", "held.append(4.0)")),
        ("held = {'k': 1.0}", "s['k']", ("held['k'] = 2.0", "held['k'] = 3.0", "held['k'] = 4.0")),
    ],
    ids=["a list", "a dict"],
)
def test_a_late_backward_sees_what_was_written_to_a_container_since(
    backend, setup, used, writes
) -> None:
    late = Call(CALL.arguments, late=True, times=2)
    steps = [late, late, *(step for write in writes for step in (Do(write), Back(_GRAD), late))]
    check(Scenario(_write(setup, "held", used), tuple(steps), backend))
