"""`torch.Tensor(...)` and its kin are recorded as torch's functions that make the same."""

from __future__ import annotations

import threading

import pytest
import torch

import tripwire
from tripwire.tracing import casts

needs_c = pytest.mark.skipif(casts._casts is None, reason="needs the C module")


@pytest.fixture(autouse=True)
def no_classes_are_left_changed():
    before = [type(torch.Tensor).__call__, type(torch.FloatTensor).__call__]
    yield
    assert [type(torch.Tensor).__call__, type(torch.FloatTensor).__call__] == before
    assert type(torch.Tensor([1.0])) is torch.Tensor


MAKERS = {
    "numbers": lambda x, n: x + torch.Tensor([1.0, 2.0, 3.0]),
    "rows of numbers": lambda x, n: x + torch.Tensor(((1, 2, 3), (4, 5, 6))),
    "nothing": lambda x, n: (torch.Tensor(), x + 1),
    "an empty list": lambda x, n: (torch.Tensor([]), x + 1),
    "a varying number": lambda x, n: x * torch.Tensor([n, 2 * n, 1]),
    "sizes": lambda x, n: torch.Tensor(2, 3).zero_() + x,
    "a size": lambda x, n: torch.Tensor(3).fill_(2.0) + x,
    "a shape": lambda x, n: torch.Tensor(x.shape).fill_(2.0) * x,
    "values out of tensors": lambda x, n: x + torch.Tensor([x.sum(), x.max(), 1.0]),
    "ints": lambda x, n: x[torch.LongTensor([0, 2])],
    "bools": lambda x, n: torch.BoolTensor([True, False, True]) & (x > 0),
    "halves": lambda x, n: x.half() * torch.HalfTensor([1, 2, 3]),
    "in place": lambda x, n: torch.FloatTensor([1, 2, 3]).add_(x),
    "by another name": lambda x, n: x * make([1.0, 2.0, 3.0]),
    "with gradients": lambda x, n: torch.Tensor([1.0, 2.0, 3.0]) * WEIGHT + x,
    "of an argument": lambda x, n: torch.Tensor(x) * 2,
    "of an argument, returned": lambda x, n: (torch.Tensor(x), x + 1),
    "of an argument, written": lambda x, n: (torch.Tensor(x).add_(1), x * 2),
    "of state": lambda x, n: torch.Tensor(WEIGHT) * x,
    "of a tensor with another dtype": lambda x, n: torch.Tensor((x > 1).long()).view(-1) * x,
    "of a tensor with its dtype": lambda x, n: torch.LongTensor((x > 1).long()) * x,
}
make, WEIGHT = torch.Tensor, torch.ones(3, requires_grad=True)


@needs_c
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MAKERS)
def test_what_torchs_classes_make_is_recorded(name, backend) -> None:
    program = MAKERS[name]
    compiled = tripwire.compile(program, backend=backend)
    for number in range(5):
        found = [
            call(torch.arange(3.0) + number, number / 2 if name == "a varying number" else 0)
            for call in (program, compiled)
        ]
        torch.testing.assert_close(*found, rtol=0, atol=0)
    assert compiled.statistics().hits >= 3


@needs_c
def test_a_class_that_takes_no_such_tensor_raises_as_ever() -> None:
    compiled = tripwire.compile(lambda x: torch.LongTensor(x), backend="eager")
    for _ in range(3):
        with pytest.raises(TypeError, match="expected TensorOptions"):
            compiled(torch.ones(3))


@needs_c
def test_the_default_dtype_of_the_call_counts() -> None:
    def build(x):
        return x.double() + torch.Tensor([0.1])

    compiled = tripwire.compile(build, backend="eager")
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(compiled(torch.ones(1)), build(torch.ones(1)))
        finally:
            torch.set_default_dtype(torch.float32)


@needs_c
def test_the_default_device_doesnt_count() -> None:
    def build(x):
        return torch.Tensor([1.0]).device.type, x * 2

    with torch.device("meta"):
        expected = build(torch.ones(1, device="cpu"))[0]
        compiled = tripwire.compile(build, backend="eager")
        assert [compiled(torch.ones(1, device="cpu"))[0] for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("args", [([1.0, [2.0]],), ("text",), (1.5,), ([1], [2])])
def test_what_torch_refuses_raises_as_in_plain_code(args) -> None:
    def build(x):
        return x + torch.Tensor(*args)

    with pytest.raises(Exception) as plain:
        build(torch.ones(1))
    with pytest.raises(plain.type) as compiled:
        tripwire.compile(build, backend="eager")(torch.ones(1))
    assert str(compiled.value) == str(plain.value)


def test_subclasses_make_themselves() -> None:
    class Before(torch.Tensor):
        pass

    def build(x):
        class Inside(torch.Tensor):
            pass

        return type(Before([1.0])).__name__, type(Inside([1.0])).__name__, x * 2

    compiled = tripwire.compile(build, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1))[:2] == ("Before", "Inside")


class Plain(torch.Tensor):
    pass


class Own(torch.Tensor):
    def __new__(cls, *args):
        return super().__new__(cls, *args)


class Below(Plain):
    def __new__(cls, *args):
        return super().__new__(cls, *args)


@pytest.mark.parametrize("cls", [Plain, Own, Below])
def test_subclasses_may_call_the_constructor_of_their_base(cls) -> None:
    def build(x):
        return type(cls([1.0, 2.0])).__name__, cls.__new__(cls, [1.0]).tolist(), x * 2

    compiled = tripwire.compile(build, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1))[:2] == (cls.__name__, [1.0])


def test_other_threads_make_theirs() -> None:
    made: list[torch.Tensor] = []

    def build(x):
        thread = threading.Thread(target=lambda: made.append(torch.Tensor([1.0, 2.0])))
        thread.start()
        thread.join()
        return x * 2

    tripwire.compile(build, backend="eager")(torch.ones(1))
    assert made[0].tolist() == [1.0, 2.0]
