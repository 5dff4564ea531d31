"""A table of checks admits what the guard function's text admits, and nothing else."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import gc
import sys
import weakref
from typing import Any

import pytest
import torch

import tripwire
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.validity import table

pytestmark = pytest.mark.skipif(table.Table is None, reason="_table isn't built")


class Text(str):
    __slots__ = ()


class Listed(list):
    pass


class Keyed(dict):
    pass


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    name: str = "a"


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self, one: object, two: object) -> None:
        self.one, self.two = one, two


Pair = collections.namedtuple("Pair", "a b")


def compile_for(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The guards of the entry that a call makes."""
    compiled = tripwire.compile(function, backend="eager", fullgraph=True)
    compiled(*args, **kwargs)
    compiled(*args, **kwargs)
    assert compiled.statistics().hits == 1
    entry = find_dispatcher(compiled).entries[0]
    guards = entry.standing.plan.guards
    assert type(guards.admits) is table.Table
    return compiled, guards


def check_alike(guards: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Ask both, and return whether they admit the call."""
    by_table, by_text = (f(args, kwargs or {}) for f in (guards.admits, guards.compile_text()))
    assert (by_table is None) == (by_text is None), guards.source
    if by_table is not None:
        assert len(by_table) == len(by_text)
        assert all(a is b or a == b for a, b in zip(by_table, by_text, strict=True))
    return by_table is not None


def of(shape: tuple[int, ...] = (2, 3), **kwargs: Any) -> torch.Tensor:
    return torch.ones(shape, **kwargs)


def tagged(name: str) -> torch.Tensor:
    tensor = of()
    setattr(tensor, name, 1)
    return tensor


def made_for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return of()


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*quant")
def test_tensors_are_told_by_class_and_form() -> None:
    _, guards = compile_for(lambda x: x.sin() if not hasattr(x, "tag") else x, of())
    assert check_alike(guards, (of(),))
    assert check_alike(guards, (torch.zeros(10)[4:].view(2, 3),))
    assert check_alike(guards, (tagged("other"),))
    others = [
        *(of((3, 2)), of((2, 3, 1)), of((3, 2)).t(), of().double(), of(device="meta")),
        *(of(requires_grad=True), torch.nn.Parameter(of(), requires_grad=False), tagged("tag")),
        *(of().to_sparse(), made_for_inference(), torch._to_functional_tensor(of())),
        *(torch._efficientzerotensor((2, 3)), None, 3, [of()], of().numpy()),
        *(of().to_sparse_csr(), of().to_sparse_csc(), of().to_sparse_bsr((1, 1)), of().to_mkldnn()),
        torch.nested.nested_tensor([of((3,)), of((2,))]),
        torch.nested.nested_tensor([of((3,)), of((2,))], layout=torch.jagged),
        torch.quantize_per_tensor(of(), 0.1, 10, torch.quint8),
        *(
            torch.nn.UninitializedParameter(),
            torch.nn.Buffer(of()),
            of((2, 3)).to_sparse().to_dense(),
        ),
    ]
    assert check_alike(guards, (others.pop(),))
    assert check_alike(guards, (others.pop(),))
    assert not any(check_alike(guards, (other,)) for other in others)


def test_conjugated_and_negated_tensors_are_others() -> None:
    plain = of(dtype=torch.complex64)
    _, guards = compile_for(lambda x: x * 2, plain)
    assert check_alike(guards, (plain.clone(),))
    assert not check_alike(guards, (plain.conj(),))
    assert not check_alike(guards, (plain._neg_view(),))


def test_leaves_that_want_gradients_are_told_from_others() -> None:
    _, guards = compile_for(lambda x: x * 2, of(requires_grad=True))
    assert check_alike(guards, (of(requires_grad=True),))
    assert not check_alike(guards, (of(requires_grad=True) * 1,))
    assert not check_alike(guards, (of(),))
    _, guards = compile_for(lambda x: x * 2, of(requires_grad=True) * 1)
    assert check_alike(guards, (of(requires_grad=True) * 1,))
    assert not check_alike(guards, (of(requires_grad=True),))
    with torch.no_grad():
        assert not check_alike(guards, (of(requires_grad=True) * 1,))


def test_a_view_of_which_autograd_refuses_to_say_is_no_leaf() -> None:
    base = of((6,), requires_grad=True) * 1
    with torch.no_grad():
        view = base.view(2, 3)
    with torch.no_grad():
        base.mul_(2)
    _, guards = compile_for(lambda x: x * 2, of(requires_grad=True))
    assert not check_alike(guards, (view,))


def test_need_for_a_gradient_counts_without_grad() -> None:
    with torch.no_grad():
        _, guards = compile_for(lambda x: x * 2, of())
        assert check_alike(guards, (of(),))
        assert not check_alike(guards, (of(requires_grad=True),))


def test_inference_tensors_are_others_in_inference_mode() -> None:
    normal = of()
    with torch.inference_mode():
        _, guards = compile_for(lambda x: x * 2, normal)
        assert check_alike(guards, (normal,))
        assert not check_alike(guards, (of(),))


def test_autocast_is_part_of_what_is_asked() -> None:
    _, guards = compile_for(lambda x: x * 2, of())
    with torch.autocast("cpu"):
        assert not check_alike(guards, (of(),))
    with torch.autocast("cpu"):
        _, guards = compile_for(lambda x: x * 2, of())
        assert check_alike(guards, (of(),))
    assert not check_alike(guards, (of(),))


def test_calls_are_told_by_their_shape() -> None:
    x = of()
    _, guards = compile_for(lambda x, y=None, *, z=1: x * z, x, z=2)
    assert check_alike(guards, (x,), {"z": 2})
    for args, kwargs in [
        *(((x,), {}), ((x, None), {"z": 2}), ((), {"x": x, "z": 2}), ((x,), {"z": 2, "y": 1})),
        *(((x,), {"y": 2}), ((x,), {"z": 3}), ((x,), {"z": True}), ((x,), {"z": 2.0})),
    ]:
        assert not check_alike(guards, args, kwargs)
    _, guards = compile_for(lambda x, **more: [x * v for v in more.values()], x, a=1, b=2)
    assert check_alike(guards, (x,), {"a": 1, "b": 2})
    assert not check_alike(guards, (x,), {"b": 2, "a": 1})
    assert not check_alike(guards, (x,), {"a": 1, "c": 2})


PLAIN = [
    *(None, True, False, 0, 1, 2, -1, 10**30, 0.0, -0.0, 1.0, float("nan"), 1j, "a", "b", b"a"),
    *(..., range(3), range(4), torch.float32, torch.device("cpu"), slice(1, 2), ()),
]


@pytest.mark.parametrize("seen", range(len(PLAIN)))
def test_plain_values_are_told_by_type_and_bits(seen: int) -> None:
    x = of()
    _, guards = compile_for(lambda x, value: (x * 2, value), x, PLAIN[seen])
    admitted = [i for i, value in enumerate(PLAIN) if check_alike(guards, (x, value))]
    assert admitted == [seen]
    assert not check_alike(guards, (x, Text("a")))


def test_containers_are_told_by_class_length_keys_and_elements() -> None:
    def read(x: torch.Tensor, c: Any) -> Any:
        items = c.items() if isinstance(c, dict) else enumerate(c)
        return [x * len(items) if False else (x, k, v) for k, v in list(items)]

    x, y = of(), of()
    values = [
        *([x, y], [y, x], [x], [x, x], (x, y), (1, 2), [1, 2], [1, 2.0], Listed([1, 2])),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}, {"a": 1, "b": 3}, Keyed(a=1, b=2)),
        *(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1), {1: 2}, {"a": x}),
        *(Pair(1, 2), [[1, 2], [3]], [[1, 2], [4]], [(1, 2), [3]], {Text("a"): 1, "b": 2}),
        *({"a": {"b": [1]}}, {"a": {"b": [2]}}, [], (), {}, [None], {"a": None}, {True: 2}),
        *(collections.deque([1, 2]), collections.deque([1, 2], 2)),
    ]
    for seen, value in enumerate(values):
        try:
            _, guards = compile_for(read, x, value)
        except tripwire.CannotTrace:
            continue
        admitted = [i for i, other in enumerate(values) if check_alike(guards, (x, other))]
        assert seen in admitted
        check_alike(guards, (x, 3))
        check_alike(guards, (x, None))


def test_objects_are_told_by_class_attributes_and_slots() -> None:
    x = of()
    _, guards = compile_for(lambda x, c: x * c.scale, x, Config())
    assert check_alike(guards, (x, Config()))
    assert check_alike(guards, (x, Config(name="b")))
    for other in (Config(3.0), Config(2), None, Slotted(1, 2), Config):  # type: ignore[arg-type]
        assert not check_alike(guards, (x, other))
    bare = Config()
    del bare.scale
    check_alike(guards, (x, bare))
    _, guards = compile_for(lambda x, c: x * c.one, x, Slotted(2.0, 3))
    assert check_alike(guards, (x, Slotted(2.0, 3)))
    assert not check_alike(guards, (x, Slotted(3.0, 3)))
    assert not check_alike(guards, (x, object.__new__(Slotted)))


def test_what_was_one_object_stays_one_and_two_stay_two() -> None:
    x, y = of(), of()
    _, guards = compile_for(lambda a, b: a * b, x, y)
    assert check_alike(guards, (y, x))
    assert not check_alike(guards, (x, x))
    _, guards = compile_for(lambda a, b: a * b, x, x)
    assert check_alike(guards, (y, y))
    assert not check_alike(guards, (x, y))
    many = [of() for _ in range(20)]
    _, guards = compile_for(lambda ts: sum(ts), many)
    assert check_alike(guards, ([of() for _ in range(20)],))
    for i, j in ((0, 1), (0, 19), (7, 13), (18, 19)):
        twice = [of() for _ in range(20)]
        twice[i] = twice[j]
        assert not check_alike(guards, (twice,))
    same = [1, 2]
    _, guards = compile_for(lambda x, a, b: x * a[0] * b[1], x, same, same)
    assert check_alike(guards, (x, same, same))
    assert not check_alike(guards, (x, same, [1, 2]))


def test_an_argument_that_is_state_as_well_is_another() -> None:
    state = of((3, 3))
    _, guards = compile_for(lambda x: x @ state, of((3, 3)))
    assert check_alike(guards, (of((3, 3)),))
    assert not check_alike(guards, (state,))


SWITCH: contextvars.ContextVar[object] = contextvars.ContextVar("SWITCH")
ROWS = [3, 4]
NAMES = {"a", "b"}


def test_what_no_sentry_watches_is_compared_as_the_text_does() -> None:
    scale, kept = 2.0, Slotted(3.0, 4)

    def call(x: torch.Tensor) -> torch.Tensor:
        rest = x * ROWS[0] * len(NAMES) * (2 if "a" in NAMES else 3)
        return rest * scale * kept.one * (1 if SWITCH.get(None) is None else 2)

    compiled, guards = compile_for(call, of())
    x = of()
    assert check_alike(guards, (x,))

    def check_undone(admitted: bool) -> None:
        assert check_alike(guards, (x,)) is admitted
        assert torch.equal(compiled(x), call(x))

    scale = float("2.0")  # equal, and another object
    check_undone(True)
    scale = 3.0
    check_undone(False)
    scale = 2.0
    kept.one = 4.0
    check_undone(False)
    kept.one = 3.0
    ROWS[0] = 5
    check_undone(False)
    ROWS[0] = 3
    NAMES.add("c")
    check_undone(False)
    NAMES.discard("c")
    token = SWITCH.set(1)
    check_undone(False)
    SWITCH.reset(token)
    del kept.one
    assert not check_alike(guards, (x,))


def test_an_argument_whose_attributes_raise_is_not_admitted_or_raises_as_in_the_text() -> None:
    class Odd:
        def __init__(self) -> None:
            self.value = 2.0

        def __getattribute__(self, name: str) -> Any:
            if name == "value" and Odd.error is not None:
                raise Odd.error
            return object.__getattribute__(self, name)

        error: BaseException | None = None

    compiled, guards = compile_for(lambda x, o: x * o.value, of(), Odd())
    Odd.error = AttributeError("x")
    check_alike(guards, (of(), Odd()))


def test_a_table_takes_a_tuple_and_a_dict_alone() -> None:
    _, guards = compile_for(lambda x: x * 2, of())
    for given in ((), ((),), ([], {}), ((), None), ((), {}, 1)):
        with pytest.raises(TypeError):
            guards.admits(*given)
    with pytest.raises(ValueError, match="no row"):
        table.Table((("unknown", 0, 0, 0, None, None, None, (), ()),), 1, (ValueError,))


def test_tables_die_with_their_entries() -> None:
    def compile_and_drop() -> Any:
        mark = Config()
        compile_for(lambda x: x * mark.scale, of())
        return weakref.ref(mark)

    ref = compile_and_drop()
    gc.collect()
    assert ref() is None


def test_open_sizes_are_asked_as_the_text_asks() -> None:
    compiled = tripwire.compile(lambda x: x * x.shape[0], backend="eager", dynamic=True)
    compiled(of((4, 3)))
    guards = find_dispatcher(compiled).entries[0].standing.plan.guards
    assert check_alike(guards, (of((4, 3)),))
    assert check_alike(guards, (of((5, 7)),))
    for other in (of((1, 3)), of((4, 3, 1)), of((3, 4)).t(), of((4, 3)).double(), None):
        check_alike(guards, (other,))


def test_a_name_that_is_assigned_again_is_as_in_the_text() -> None:
    row = table.TableRow("tensor", "x", x=torch.Tensor, y=frozenset(), z=table.HAS_FORM)
    lines = (
        table.Assignment("x", "args[0]", (table.TableRow("arg"),)),
        table.Check("", "type(x) is Tensor", "", "''", (row,)),
        table.Assignment("number", "args[1]"),
        table.Assignment("other", "args[2]", (table.TableRow("arg", n=2),)),
        table.Assignment("number", "args[2]"),
        table.Assignment("last", "number + 1"),
    )
    guards = table.build_guards(lines, ("number", "last", "other"), {"Tensor": torch.Tensor})
    given = of()
    held = sys.getrefcount(given)
    for _ in range(3):
        assert check_alike(guards, (given, 3, 5))
        assert guards.admits((given, 3, 5), {}) == (5, 6, 5)
    assert sys.getrefcount(given) == held
