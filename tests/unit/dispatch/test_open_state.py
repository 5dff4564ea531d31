"""Numbers that the world holds, and that vary: annealed ones, counters, running means."""

import collections
import concurrent.futures
import functools
import threading
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import tripwire
from tripwire.reading import kinds, reader
from tripwire.values.numbers import is_open

BACKENDS = ["eager", "aot_eager"]
CALLS = 14


@dataclass
class Config:
    scale: float = 1.0
    shift: int = 3
    extra: dict = field(default_factory=lambda: {"power": 2})


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau = 1.0
        self.config = Config()

    def forward(self, x):
        return torch.softmax(x / self.tau, -1) * self.config.scale + self.config.shift


class Step(nn.Module):
    """A module that counts its calls, and goes by the count."""

    def __init__(self, use):
        super().__init__()
        self.step = 0
        self.use = use

    def forward(self, x):
        self.step += 1
        return self.use(x, self.step)


def every_fourth(x, step):
    if step % 4 == 0:
        return x * 2
    return x + 1


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 0.5

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.shape[0]
        return x - self.mean


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += x.shape[0]
        return x / self.seen


class Shared(nn.Module):
    count = 0

    def forward(self, x):
        type(self).count += 1
        return x * self.count


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return x + self.count


class Hidden:
    """A counter behind a property."""

    def __init__(self):
        self._count = 0

    @property
    def count(self):
        return self._count * 2

    def __call__(self, x):
        self._count += 1
        return x + self.count


def count_in_closure():
    count = 0

    def call(x):
        nonlocal count
        count += 1
        return x * count

    return call


def count_in_dict():
    state = {"step": 0, "rate": 1.0}

    def call(x):
        state["step"] += 1
        state["rate"] *= 0.9
        return x * state["rate"] / state["step"]

    return call


def count_and_reset():
    class State:
        left = 0

    state = State()
    state.left = 3

    def call(x):
        state.left -= 1
        if state.left == 0:
            state.left = 3
            return x * 10
        return x * state.left

    return call


COUNTING = {
    "a schedule": lambda: Step(lambda x, step: x * (step * 0.1)),
    "a warm-up": lambda: Step(lambda x, step: x * min(1.0, step / 5)),
    "every fourth call": lambda: Step(every_fourth),
    "a size": lambda: Step(lambda x, step: x[: step % 3 + 1].sum() + step),
    "a running mean": Running,
    "a sum of sizes": Seen,
    "a class's": lambda: type("Own", (Shared,), {"count": 0})(),
    "in a slot": Slotted,
    "behind a property": Hidden,
    "in a closure": count_in_closure,
    "in a dict": count_in_dict,
    "that starts again": count_and_reset,
}


def check_twins(make, between=lambda target, index: None, *, traces, backend="eager", calls=CALLS):
    """Plain and compiled do the same, call by call, with few traces."""
    plain, target = make(), make()
    compiled = tripwire.compile(target, backend=backend)
    for index in range(calls):
        x = torch.randn(3, 4)
        assert torch.allclose(plain(x), compiled(x), atol=1e-6), index
        for one in (plain, target):
            between(one, index)
    statistics = compiled.statistics()
    assert statistics.traces <= traces
    assert statistics.hits == calls - statistics.traces
    return plain, target, compiled


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COUNTING)
def test_counters_that_a_run_reads_run_compiled_code(name, backend) -> None:
    traces = 4 if name == "a size" else 3  # three sizes, one of them first found by the plain trace
    check_twins(COUNTING[name], traces=traces, backend=backend)


@pytest.mark.parametrize("name", ["a schedule", "a running mean", "in a dict"])
def test_inductor_compiles_counters(name) -> None:
    check_twins(COUNTING[name], traces=3, backend="inductor", calls=6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_attribute_that_is_annealed_from_outside_is_open(backend) -> None:
    def anneal(target, index):
        target.tau *= 0.9
        target.config.scale += 0.1
        target.config.shift += 1

    check_twins(Annealed, anneal, traces=2, backend=backend)


def test_what_a_run_leaves_behind_is_what_plain_code_leaves() -> None:
    plain, target, _ = check_twins(COUNTING["a sum of sizes"], traces=3)
    assert (target.seen, type(target.seen)) == (plain.seen, int)
    plain, target, _ = check_twins(Running, traces=3)
    assert (target.mean, type(target.mean)) == (plain.mean, float)


def apply_config(x, config):
    return x * config.scale + config.shift


def apply_nested(x, config):
    return x ** config.extra["power"] * config.scale


def apply_dict(x, options):
    return x * options["scale"] + options["shift"]


PASSED = {
    "a dataclass": (apply_config, lambda i: Config(0.5 + i / 10, i + 2)),
    "a dict": (apply_dict, lambda i: {"scale": 0.5 + i / 10, "shift": i}),
    "a dict in a dataclass": (apply_nested, lambda i: Config(1.0 + i, 2, {"power": i % 3 + 2.0})),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PASSED)
def test_numbers_in_what_is_passed_are_open(name, backend) -> None:
    function, make = PASSED[name]
    compiled = tripwire.compile(function, backend=backend)
    for index in range(CALLS):
        x = torch.rand(3, 4)
        assert torch.allclose(function(x, make(index)), compiled(x, make(index)))
    assert compiled.statistics().traces <= (5 if "power" in function.__code__.co_consts else 2)


def test_what_was_passed_is_as_it_was() -> None:
    compiled = tripwire.compile(apply_dict, backend="eager")
    for index in range(4):
        options = {"scale": 0.5 + index, "shift": 1000 + index}
        shift = options["shift"]
        compiled(torch.ones(2), options)
        assert options == {"scale": 0.5 + index, "shift": 1000 + index}
        assert options["shift"] is shift
        assert list(map(type, options.values())) == [float, int]


class Resets(nn.Module):
    """The run leaves a number that may be, or not, the one that it found."""

    def __init__(self):
        super().__init__()
        self.left = 3

    def forward(self, x):
        self.left += 1
        try:
            return x * self.left
        finally:
            self.left = 3


def test_a_number_that_is_set_to_what_it_was_by_chance_is_set() -> None:
    def disturb(target, index):
        target.left = 3 if index % 2 else index

    plain, target, _ = check_twins(Resets, disturb, traces=3)
    x = torch.ones(2)
    for value in (7, 3, 9):
        target.left = value
        tripwire.compile(target, backend="eager")(x)
        assert target.left == 3


def test_a_run_that_raises_leaves_plain_numbers() -> None:
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.fails = 0, False

        def forward(self, x):
            self.step += 1
            if self.fails:
                raise ValueError(f"step {self.step}")
            return x * self.step

    net = Fails()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(4):
        compiled(torch.ones(2))
    net.fails = True
    with pytest.raises(ValueError, match="step 5"):
        compiled(torch.ones(2))
    assert (net.step, type(net.step)) == (5, int)


def test_a_refused_run_leaves_plain_numbers() -> None:
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = 0

        def forward(self, x):
            self.step += 1
            if self.step > 3:
                torch.manual_seed(self.step)
            return x * self.step

    net = Refused()
    compiled = tripwire.compile(net, backend="eager")
    for index in range(6):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), index + 1.0))
        assert (net.step, type(net.step)) == (index + 1, int)


def test_a_number_that_must_be_closed_stays_closed() -> None:
    net = Step(lambda x, step: x * len(f"{step}"))
    compiled = tripwire.compile(net, backend="eager")
    for index in range(6):
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    decisions = [
        text for entry in tripwire.explain(compiled).entries for text in entry.summary.decisions
    ]
    assert all("closed at test_open_state.py" in text for text in decisions)


def test_explain_names_numbers_of_the_world_that_are_open() -> None:
    net = Step(lambda x, step: x * step)
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    (entry,) = tripwire.explain(compiled).entries
    assert any(text.startswith("L['self'].step = ") for text in entry.summary.open)


def test_a_change_of_kind_is_a_miss() -> None:
    net = Step(lambda x, step: x * step)
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    net.step = 2.5
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.5))
    net.step = True
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_dynamic_false_opens_nothing() -> None:
    net = Annealed()
    compiled = tripwire.compile(net, backend="eager", dynamic=False)
    for index in range(4):
        net.tau = index + 1.0
        compiled(torch.ones(2))
    assert compiled.statistics().traces == 4


def count_in(local):
    local.steps += 1
    return local.steps


def count_in_its_dict(local):
    vars(local)["steps"] += 1
    local.steps += 1
    return local.steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [count_in, count_in_its_dict])
def test_each_thread_has_numbers_of_its_own_in_a_thread_local(count, backend) -> None:
    local, twin = threading.local(), threading.local()
    compiled = tripwire.compile(lambda x: x * count(local), backend=backend)

    def calls(start, dtype):
        local.steps = twin.steps = start
        for number in range(4):
            x = torch.ones(3, dtype=dtype) + number
            assert torch.equal(compiled(x), x * count(twin))
            assert local.steps == twin.steps
            assert not is_open(local.steps)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        calls(1, torch.float32)
        pool.submit(calls, 50, torch.float32).result()
        calls(7, torch.float32)
        assert compiled.statistics().traces == 2
        pool.submit(calls, 90, torch.float64).result()
        calls(20, torch.float64)


def test_a_thread_local_with_a_class_of_its_own_keeps_its_numbers_closed() -> None:
    class Local(threading.local):
        def __init__(self):
            self.steps = 0

    local = Local()
    compiled = tripwire.compile(lambda x: x * count_in(local), backend="eager")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for run in (lambda f, x: f(x), lambda f, x: pool.submit(f, x).result()):
            for number in range(5):
                assert torch.equal(run(compiled, torch.ones(3)), torch.full((3,), number + 1.0))


def test_two_objects_of_one_class_have_two_numbers() -> None:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Config(), Config()

        def forward(self, x):
            return x * self.one.scale + self.two.scale

    def disturb(target, index):
        target.one.scale = 1.0 + index
        target.two.scale = 1.0 + index * index

    check_twins(Pair, disturb, traces=2)


def test_another_thread_reads_plain_values_while_a_run_goes_on() -> None:
    seen = []

    def look(net):
        thread = threading.Thread(target=lambda: seen.append((net.step + 1, net.step == 1)))
        thread.start()
        thread.join()

    net = Step(lambda x, step: x * step)
    compiled = tripwire.compile(net, backend="eager")
    compiled(torch.ones(2))
    hook = net.register_forward_pre_hook(lambda net, args: look(net))
    compiled(torch.ones(2))
    hook.remove()
    assert seen == [(2, True)]
    assert not any(map(is_open, seen[0]))


def test_threads_of_libraries_that_wait_leave_numbers_open() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread waits from now on, as Inductor's do
        net = Step(lambda x, step: x * step)
        compiled = tripwire.compile(net, backend="eager")
        for step in range(1, CALLS):
            torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2) * step)
        assert compiled.statistics().traces == 2


@pytest.mark.parametrize("swap", [reader._swap, reader.swap], ids=["Python", "C"])
@pytest.mark.parametrize("name", ["dict", "list", "deque", "cell", "slot", "class"])
def test_a_number_is_swapped_only_for_the_one_that_is_there(name, swap) -> None:
    class Slotted:
        __slots__ = ("n",)
        shared = 1000

    value, other, new = int("1000"), int("1000"), int("3000")
    n = value

    def closure():
        return n

    slotted = Slotted()
    slotted.n = Slotted.shared = value
    owner, kind, key = {
        "dict": ({"n": value}, kinds.ITEMS, "n"),
        "list": ([value], kinds.ELEMENTS, 0),
        "deque": (collections.deque([value]), kinds.ELEMENTS, 0),
        "cell": (closure, kinds.CELLS, "n"),
        "slot": (slotted, kinds.SLOTS, "n"),
        "class": (Slotted, kinds.CLASS_DICT, "shared"),
    }[name]
    assert not swap(*kind.slot(owner, key), other, new)
    assert kind.get(owner, key) is value
    assert swap(*kind.slot(owner, key), value, new)
    assert kind.get(owner, key) is new


def test_what_a_custom_function_writes_is_not_taken_for_what_was_there() -> None:
    box = Config()

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            box.shift = 0
            for _ in range(3):
                box.shift += 1
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    def call(x):
        x = Writes.apply(x) + box.shift
        box.shift = -1
        return x

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(5):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))


def test_an_int_of_more_than_32_bits_is_not_open() -> None:
    net = Step(lambda x, step: x * step)
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    net.step = 2**40
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0**40 + 1))


def test_zero_keeps_its_sign() -> None:
    config = Config()

    def call(x):
        return x + len(repr(config.scale)), config.scale

    compiled = tripwire.compile(call, backend="eager")
    for scale in (1.5, 0.0, -0.0, 2.5, 0.0, -0.0):
        config.scale = scale
        assert repr(compiled(torch.ones(2))) == repr(call(torch.ones(2)))


def test_a_number_that_a_memo_keeps_is_plain_to_later_calls() -> None:
    config = Config(2.0)

    @functools.lru_cache
    def double(name):
        return config.scale * 2

    def call(x, name):
        return x * double(name) * config.scale

    compiled = tripwire.compile(call, backend="eager")
    for index, name in enumerate("aabbcc"):
        config.scale = 2.0 + index
        double.cache_clear()
        expected = call(torch.ones(2), name)
        double.cache_clear()
        assert torch.equal(compiled(torch.ones(2), name), expected)
        assert torch.equal(torch.ones(2) * double(name), torch.ones(2) * config.scale * 2)


def test_errors_speak_of_ints_and_floats() -> None:
    config = Config()

    def call(x):
        if config.shift > 5:
            return config.scale.view(-1)
        return x * config.scale + config.shift

    compiled = tripwire.compile(call, backend="eager")
    for shift in (3, 4, 5):
        config.scale, config.shift = 1.0 + shift, shift
        compiled(torch.ones(2))
    config.shift = 6
    with pytest.raises(AttributeError, match="'float' object has no attribute 'view'"):
        compiled(torch.ones(2))


class InSlot:
    __slots__ = ("table",)


class Scaled(nn.Module):
    shared = {"scale": 1.0}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.table = {"scale": 1.0}

    def forward(self, x):
        return x * self.table["scale"] + self.shared["scale"]


def held_by_reference():
    owner = Scaled()
    reference = weakref.ref(owner)
    return lambda x: x * reference().table["scale"], owner.table, owner


def held_by_slot():
    owner = InSlot()
    owner.table = {"scale": 1.0}
    return lambda x: x * owner.table["scale"], owner.table, owner


def held_by_class():
    owner = Scaled()
    return owner, Scaled.shared, owner


def held_by_child():
    owner = nn.Sequential(Scaled(), Scaled())
    return owner, owner[1].table, owner


def held_by_function():
    def call(x):
        return x * call.table["scale"]

    call.table = {"scale": 1.0}
    return call, call.table, None


def held_by_partial():
    table = {"scale": 1.0}
    return functools.partial(lambda t, x: x * t["scale"], table), table, None


def held_by_cell_of_a_callee():
    table = {"scale": 1.0}

    def scale(x):
        return x * table["scale"]

    return lambda x: scale(x) + 1, table, None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "hold",
    [
        held_by_reference,
        held_by_slot,
        held_by_class,
        held_by_child,
        held_by_function,
        held_by_partial,
        held_by_cell_of_a_callee,
    ],
)
def test_a_number_in_a_dict_stays_open_whatever_holds_the_dict(hold, backend) -> None:
    call, table, _owner = hold()
    compiled = tripwire.compile(call, backend=backend)
    for index in range(CALLS):
        table["scale"] = 1.0 + index
        assert torch.equal(compiled(torch.ones(2)), call(torch.ones(2)))
    assert tripwire.statistics(compiled).traces == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "schedule",
    [
        functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=CALLS),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
        functools.partial(torch.optim.lr_scheduler.LinearLR, total_iters=5),
    ],
)
def test_a_step_whose_rate_a_scheduler_sets_is_traced_twice(schedule, optimizer, backend) -> None:
    def train(compile):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = optimizer(model.parameters(), lr=0.1)
        scheduler = schedule(opt)
        step = compile(opt.step)
        for index in range(CALLS):
            opt.zero_grad()
            model(torch.full((2, 3), 0.1 * index)).pow(2).sum().backward()
            step()
            scheduler.step()
        return step, [*model.parameters()]

    _, expected = train(lambda step: step)
    compiled, found = train(lambda step: tripwire.compile(step, backend=backend))
    assert tripwire.statistics(compiled).traces <= 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
