"""Numbers that Python takes out of tensors stay open: scales, histories, means, optimizers."""

import contextlib
import math
import threading

import pytest
import torch
from torch import nn

import tripwire
from tripwire.tracing import casts
from tripwire.values.numbers import is_open

BACKENDS = ["eager", "aot_eager"]
CALLS = 12


def scale(x):
    return x * x.mean().item()


def several(x):
    return x * 2, x.sum().item(), x.max().item() * 2 + 1


def spread(x):
    low, high = x[:2].tolist()
    return x * low + high


def branch(x):
    mean = x.mean().item()
    if mean > 0:
        return x * mean
    return x - mean


def write_later(x):
    x = x.clone()
    total = x.sum().item()
    x.mul_(2)
    return x * total


def take_from_rows(x):
    return x * x.mean(0, keepdim=True).item() + x[None, :1].item()


def clip(x):
    norm = x.norm().item()
    return x / max(norm, 1.0)


def count(x):
    positive = (x > 0).sum().item()
    return x * positive / (positive + 1)


def size(x):
    """A size is fixed by each value of it."""
    positive = (x > 0).sum().item()
    return x[:positive].sum() + positive


def power(x):
    exponent = x.abs().mean().item()
    return x * (1 - 0.9**exponent) ** 0.5


def average(x):
    return x.mean().item()


def measure(x):
    hits, size = (x > 0).sum().item(), x.shape[0]
    precision = hits / (hits + 2)
    return precision, float(x.std()), 2 * precision / (precision + 1), size


def perplexity(x):
    return math.exp(x.abs().mean().item())


class Best(nn.Module):
    def __init__(self):
        super().__init__()
        self.best = -5.0

    def forward(self, x):
        mean = x.mean().item()
        if mean > self.best:
            self.best = mean
        return x * self.best


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 0.5

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return x - self.mean


def spread_rows(x):
    rows = x.view(2, 3).tolist()
    return [sum(row) for row in rows], x * rows[1][0]


def pick_grids(x):
    grids = (x.view(3, 2).abs() * 3 + 2).int().tolist()
    return torch.cat([torch.arange(height * width) for height, width in grids])


def choose(x):
    largest = max(x.tolist())
    return x / max(largest, 1.5), min(x[0].item(), x[1].item(), 0.25), largest


def pad_to_longest(x):
    lengths = (x[:3].abs() * 4 + 2).int().tolist()
    return x.new_zeros(3, max(lengths)) + 1


MAKERS = {
    "a scale": lambda: scale,
    "the larger one": lambda: choose,
    "the longest": lambda: pad_to_longest,
    "a list of lists": lambda: spread_rows,
    "sizes in a list of lists": lambda: pick_grids,
    "several results": lambda: several,
    "a list": lambda: spread,
    "a branch": lambda: branch,
    "a tensor that is written later": lambda: write_later,
    "of one element, with dimensions": lambda: take_from_rows,
    "a clip": lambda: clip,
    "an int": lambda: count,
    "a power": lambda: power,
    "a number alone": lambda: average,
    "metrics": lambda: measure,
    "a number of a number": lambda: perplexity,
    "the best so far": Best,
    "a running mean": Mean,
}


def check_close(expected, found):
    if isinstance(expected, tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            check_close(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert type(found) is type(expected)
        assert found == pytest.approx(expected, rel=1e-6)


def play(make, backend="eager", calls=CALLS):
    torch.manual_seed(0)
    plain, target = make(), make()
    compiled = tripwire.compile(target, backend=backend)
    for _ in range(calls):
        x = torch.randn(6)
        check_close(plain(x), compiled(x))
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MAKERS)
def test_numbers_out_of_tensors_run_compiled_code(name, backend) -> None:
    statistics = play(MAKERS[name], backend)
    assert statistics.traces <= 4
    assert statistics.hits == CALLS - statistics.traces


@pytest.mark.parametrize(
    "name",
    [
        "a branch",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("a scale", "a list", "a power")),
    ],
)
def test_inductor_compiles_numbers_out_of_tensors(name) -> None:
    statistics = play(MAKERS[name], "inductor", calls=6)
    assert statistics.hits >= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_size_out_of_a_tensor_is_closed(backend) -> None:
    play(lambda: size, backend)


def test_a_history_gets_this_calls_number() -> None:
    history, expected = [], []

    def call(x, history):
        loss = (x**2).mean()
        history.append(loss.item())
        return loss * 2

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(CALLS):
        x = torch.randn(6)
        assert torch.equal(call(x, expected), compiled(x, history))
    assert history == expected
    assert not any(map(is_open, history))
    assert compiled.statistics().traces == 2


class Normed(nn.Module):
    """Writes to its buffers before Python takes a number, so that no probe can compute it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.losses = []

    def forward(self, x):
        loss = (self.norm(x) ** 2 + x).mean()
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_the_next_trace_leaves_open_is_no_refusal(fullgraph, backend, caplog) -> None:
    torch.manual_seed(0)
    plain, model = Normed(), Normed()
    compiled = tripwire.compile(model, backend=backend, fullgraph=fullgraph)
    for _ in range(CALLS):
        x = torch.randn(6, 3)
        torch.testing.assert_close(compiled(x), plain(x))
    assert model.losses == pytest.approx(plain.losses, rel=1e-6)
    statistics = tripwire.statistics(compiled)
    assert (statistics.traces, statistics.hits, statistics.refusals) == (2, CALLS - 2, 0)
    assert not caplog.messages


def test_a_number_that_can_not_be_open_is_refused_at_once() -> None:
    compiled = tripwire.compile(Normed(), backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(tripwire.CannotTrace, match="can't compute that value before"):
        compiled(torch.randn(6, 3))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_runs_compiled_code_while_its_rate_falls(name) -> None:
    sides = []
    for _ in range(2):
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        sides.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    (plain, own, _), (model, optimizer, _) = sides
    compiled = tripwire.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(CALLS):
        x = torch.randn(5, 4)
        for net, step in ((plain, own.step), (model, compiled)):
            net.zero_grad()
            (net(x) ** 2).mean().backward()
            step()
        for _, _, schedule in sides:
            schedule.step()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
    assert compiled.statistics().traces <= 3
    assert compiled.statistics().hits >= CALLS - 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_dividing_by_a_number_out_of_a_tensor_that_is_zero_raises(backend) -> None:
    def call(x):
        return x * (1.0 / x.sum().item())

    compiled = tripwire.compile(call, backend=backend)
    for x in (torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)):
        torch.testing.assert_close(compiled(x), call(x))
    with pytest.raises(ZeroDivisionError):
        compiled(torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(compiled(torch.full((2,), 5.0)), call(torch.full((2,), 5.0)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_by_a_number_as_in_plain_code(backend) -> None:
    def call(x):
        return (x * x.mean().item()).sum()

    compiled = tripwire.compile(call, backend=backend)
    for _ in range(6):
        x = torch.randn(4)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        call(one).backward()
        compiled(other).backward()
        torch.testing.assert_close(other.grad, one.grad)
    assert compiled.statistics().hits >= 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.0])
def test_numbers_that_are_not_finite_or_zero_are_this_calls(value) -> None:
    def call(x):
        number = x.sum().item()
        return x * number, number, number > 1

    compiled = tripwire.compile(call, backend="eager")
    for x in (torch.ones(1), torch.full((1,), 2.0), torch.full((1,), value), torch.full((1,), 3.0)):
        assert repr(compiled(x)) == repr(call(x))


def test_what_python_needs_as_a_plain_number_is_asked_again() -> None:
    table = {1: "one", 2: "two", 3: "three"}

    def call(x):
        return x + 1, table[x.sum().int().item()], f"{x.sum().item():.1f}"

    compiled = tripwire.compile(call, backend="eager")
    for value in (1.0, 2.0, 3.0, 2.0, 1.0, 3.0):
        x = torch.full((1,), value)
        assert repr(compiled(x)) == repr(call(x))
    assert compiled.statistics().hits >= 2


def test_a_back_end_that_takes_no_such_numbers_still_gets_open_sizes() -> None:
    def backend(module, examples):
        if any(node.target == "item" for node in module.graph.nodes):
            raise RuntimeError("no numbers out of tensors")
        return module.forward

    def call(x, flag):
        return x * flag.item() + x.shape[0]

    compiled = tripwire.compile(call, backend=backend)
    for size in range(2, 12):
        x, flag = torch.randn(size), torch.tensor(float(size % 2))
        assert torch.equal(call(x, flag), compiled(x, flag))
    assert compiled.statistics().traces <= 5
    assert compiled.statistics().hits >= 5


# --- float(t), int(t), math --------------------------------------------------------------------


def keep_history(x, history):
    loss = (x**2).mean()
    history.append(float(loss))
    return loss * 2


def keep_total(x, state):
    state["total"] += float((x**2).sum())
    return x * state["total"]


def keep_several(x, history):
    history.append({"loss": float(x.mean()), "count": int((x > 0).sum())})
    return x + float(x[0])


def take_floats(x, history):
    low, high = float(x[0]), float(x[1])
    return x * low + high, sum(map(float, x[:3]))


def take_ints(x, history):
    count = int((x > 0).sum())
    return x * count, int(x.sum() * 10), float(count) / 4


def round_off(x, history):
    history.append(round(float(x.mean()), 4))
    return x + 1, round(float(x.sum())), math.floor(float(x[0]) * 3), math.ceil(float(x[1]))


def compute_perplexity(x, history):
    loss = (x**2).mean()
    history.append(math.exp(float(loss)))
    return loss * math.sqrt(loss.item()), math.log(float(loss))


def ask_whether_it_is_a_number(x, history):
    loss = float(x.mean())
    if math.isnan(loss) or not math.isfinite(loss):
        return x * 0
    return x * loss


def take_of_classes(x, history):
    value = float(x.mean())
    assert isinstance(value, float)
    assert not isinstance(value, int)
    scale = torch.tensor([1, 2], dtype=float)
    return x * value, scale * value, float.fromhex("0x1p3") * value, float("1.5"), int("7", 8)


def take_of_kinds(x, history):
    half, small, whole = x[:1].half(), x[:1].bfloat16(), (x[:1] * 100).to(torch.int8)
    history.append((float(half), float(small), int(whole), float(whole), int(x[0] * 100)))
    return x * float(half), x * int(whole)


def take_of_one_element_with_dimensions(x, history):
    return x * float(x[None, :1]) + int(x.sum().reshape(1, 1))


CASTS = {
    function.__name__.replace("_", " "): function
    for function in (
        *(keep_history, keep_total, keep_several, take_floats, take_ints, round_off),
        *(compute_perplexity, ask_whether_it_is_a_number, take_of_classes, take_of_kinds),
        take_of_one_element_with_dimensions,
    )
}


def check_cast(name, backend, calls):
    function = CASTS[name]
    torch.manual_seed(0)
    expected, found = ({"total": 0.5}, {"total": 0.5}) if name == "keep total" else ([], [])
    compiled = tripwire.compile(function, backend=backend)
    for _ in range(calls):
        x = torch.randn(6)
        check_close(function(x, expected), compiled(x, found))
    if backend != "inductor":
        assert found == expected
    for one in found.values() if isinstance(found, dict) else found:
        assert not is_open(one)
    return compiled.statistics()


needs_c = pytest.mark.skipif(casts._casts is None, reason="the C module isn't built")


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASTS)
def test_float_and_int_of_tensors_run_compiled_code(name, backend) -> None:
    statistics = check_cast(name, backend, 20)
    assert statistics.traces <= 3
    assert statistics.hits >= 17


@needs_c
@pytest.mark.parametrize(
    "name",
    ["keep history", "take of kinds"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("take floats", "take ints", "compute perplexity")
    ],
)
def test_inductor_compiles_float_and_int_of_tensors(name) -> None:
    statistics = check_cast(name, "inductor", 6)
    assert statistics.traces <= 3
    assert statistics.hits >= 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_that_asks_for_a_numbers_type_gets_plain_ones(backend) -> None:
    def call(x):
        return x + 1, type(float(x.sum())) is float, type(x.sum().item()).__name__

    compiled = tripwire.compile(call, backend=backend)
    for _ in range(4):
        x = torch.randn(3)
        check_equal(call(x), compiled(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_larger_one_is_the_one_that_python_takes(backend) -> None:
    def call(x, big):
        one, other = x.tolist()
        return x * max(one, other), max(other, one), min(one, other), max(big.tolist())

    compiled = tripwire.compile(call, backend=backend)
    nan = float("nan")
    pairs = [(1.0, 2.0), (2.0, 1.0), (nan, 1.0), (1.0, nan), (0.0, -0.0), (-0.0, 0.0), (3.0, 3.0)]
    for place, pair in enumerate(pairs):
        x, big = torch.tensor(pair), torch.tensor([2**60 + place, 2**60 + 3])
        check_equal(call(x, big), compiled(x, big))
    assert compiled.statistics().traces == 2


def check_equal(expected, found):
    assert repr(found) == repr(expected)


RAISING = {
    "log": lambda x: x * math.log(x.sum().item()),
    "sqrt": lambda x: (x + 1, math.sqrt(x.sum().item())),
    "exp": lambda x: x * math.exp(x.sum().item() * 1000),
    "int": lambda x: (x + 1, int(x.sum().item() / (x.sum().item() + 1) * 1e200 * 1e200)),
    "int of a tensor": lambda x: x * int(x.sum() / x.sum().clamp(min=0)),
    "a power": lambda x: x * (x.sum().item() ** -2),
    "a root of what is negative": lambda x: (x + 1, abs(x.sum().item() ** 0.5)),
    "a root of what is negative, used": lambda x: (x.sum().item() ** 0.5) * x,
    "modulo": lambda x: x * (7 % x.sum().int().item()),
    "a division that nobody uses": lambda x: (1 / x.sum().item(), x + 1)[1],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAISING)
def test_what_python_raises_for_some_values_is_raised(name, backend) -> None:
    call = RAISING[name]
    compiled = tripwire.compile(call, backend=backend)
    for value in (0.5, 0.25, 0.6, 0.0, -1.0, 0.3, 0.0):
        x = torch.full((2,), value)
        outcomes = []
        for side in (call, compiled):
            try:
                outcomes.append(repr(side(x)))
            except (ArithmeticError, ValueError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]


@needs_c
def test_ints_beyond_64_bits_are_pythons() -> None:
    def call(x):
        count = int(x.sum())
        return x + 1, count * count * count, (x * 0 + count * count) / 3

    for backend in (*BACKENDS, "inductor"):
        compiled = tripwire.compile(call, backend=backend)
        for value in (3, 5, 7, 2_000_000, 2**40, 2**31, 4):
            x = torch.tensor([value])
            try:
                expected = repr(call(x))
            except (RuntimeError, OverflowError) as error:
                with pytest.raises(type(error)):
                    compiled(x)
            else:
                assert repr(compiled(x)) == expected
        assert compiled.statistics().hits >= 2


@needs_c
def test_an_exception_after_a_cast_leaves_what_was_stored() -> None:
    def call(x, history):
        history.append(float(x.sum()))
        if float(x.max()) > 5:
            raise KeyError("too large")
        return x * history[-1]

    expected, found = [], []
    compiled = tripwire.compile(call, backend="eager")
    for value in (1.0, 2.0, 3.0, 9.0, 4.0, 7.0):
        x = torch.full((2,), value)
        for side, history in ((call, expected), (compiled, found)):
            try:
                side(x, history)
            except KeyError:
                history.append("raised")
    assert found == expected
    assert not any(map(is_open, found))


@needs_c
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_between_a_cast_and_its_use_changes_nothing(backend) -> None:
    def call(x):
        x = x.clone()
        first = float(x[0])
        x.zero_()
        second = int(x[0] + 3)
        x.add_(first)
        return x, first, second * first

    compiled = tripwire.compile(call, backend=backend)
    for _ in range(6):
        x = torch.randn(4)
        check_equal(call(x), compiled(x))
    assert compiled.statistics().traces <= 3


@needs_c
def test_float_and_int_are_themselves_again_after_a_run() -> None:
    before = float, int, math.exp, math.isnan

    def call(x, fails):
        value = float(x.sum())
        if fails:
            raise ValueError
        return x * value

    compiled = tripwire.compile(call, backend="eager")
    for fails in (False, False, True, True):
        with contextlib.suppress(ValueError):
            compiled(torch.randn(3), fails)
        assert (float, int, math.exp, math.isnan) == before
        assert type(float(torch.ones(1))) is float
        assert type(int(torch.ones(1))) is int
        assert int("11", base=2) == 3
        assert type(math.exp(1)) is float


@needs_c
def test_another_threads_casts_are_plain_while_a_run_has_numbers_open() -> None:
    seen, turns = [], threading.Barrier(2)

    def look():
        turns.wait()
        seen.append(type(float(torch.ones(1))))
        seen.append(type(int(torch.ones(1))))
        turns.wait()

    def call(x, wait):
        value = float(x.sum())
        if wait is not None:
            wait()
        return x * value

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(3):
        compiled(torch.randn(2), None)
    thread = threading.Thread(target=look)
    thread.start()

    def wait():
        turns.wait()
        turns.wait()

    compiled(torch.randn(2), wait)
    thread.join()
    assert seen == [float, int]


@needs_c
def test_a_function_that_casts_gives_gradients_as_plain_code() -> None:
    def call(x):
        return (x * float(x.detach().mean()) + int(x.detach().sum() * 10)).sum()

    for backend in BACKENDS:
        compiled = tripwire.compile(call, backend=backend)
        for _ in range(6):
            x = torch.randn(4)
            one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            call(one).backward()
            compiled(other).backward()
            torch.testing.assert_close(other.grad, one.grad)
        assert compiled.statistics().hits >= 4


# --- graphs in parts ---------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        chosen = hidden[hidden.sum(1) > 0.5]
        return self.second(chosen).sum() + hidden.mean(), hidden * 2


def pick_positive(x):
    doubled = x * 2
    chosen = doubled[doubled > 0]
    return chosen.sum(), (doubled + 1).cumsum(0) * doubled.shape[0]


def find_places(x):
    mean = x.mean().item()
    return (x * mean).sum(0), torch.nonzero(x > 0), x * x.shape[0]


def pick_above_mean(x):
    mean = float(x.mean())
    return x[x > mean] * mean, x * mean + x.shape[0]


def join_chosen(x):
    chosen = x[0][x[0] > 0]
    joined = torch.cat([x[:, 0], chosen])
    return joined * joined.shape[0], x + 1


PARTS = {
    "a gate": Gate,
    "what is positive": lambda: pick_positive,
    "places": lambda: find_places,
    "above the mean": lambda: pick_above_mean,
    "joined": lambda: join_chosen,
}


def play_parts(name, backend, calls):
    torch.manual_seed(0)
    plain, target = PARTS[name](), PARTS[name]()
    if isinstance(plain, nn.Module):
        target.load_state_dict(plain.state_dict())
    compiled = tripwire.compile(target, backend=backend)
    wants = name == "a gate"
    for size in range(3, 3 + calls):
        x = torch.randn(size, 4)
        one, other = x.clone().requires_grad_(wants), x.clone().requires_grad_(wants)
        expected, found = plain(one), compiled(other)
        torch.testing.assert_close(found, expected)
        if wants:
            sum(part.sum() for part in expected).backward()
            sum(part.sum() for part in found).backward()
            torch.testing.assert_close(other.grad, one.grad)
    return compiled.statistics()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PARTS)
def test_sizes_stay_open_where_values_decide_on_others(name, backend) -> None:
    statistics = play_parts(name, backend, 20)
    if name != "joined":  # whose size is asked for
        assert statistics.traces <= 3
        assert statistics.hits >= 17


def test_inductor_compiles_parts_with_open_sizes() -> None:
    assert play_parts("a gate", "inductor", 5).hits >= 2


def test_a_size_that_values_decide_on_is_no_part_of_an_open_one() -> None:
    def call(x, z):
        joined = torch.cat([z, x[x > 0]])
        return joined * joined.shape[0]

    compiled = tripwire.compile(call, backend="eager")
    torch.manual_seed(0)
    for turn in range(10):
        x, z = torch.randn(6), torch.randn(3 + turn % 5)
        assert torch.equal(compiled(x, z), call(x, z))


def _write(x, place):
    x[:, place] = 7.0
    return x


PLACES = {
    "index": lambda x, n: x[:, min(int(x.argmax().item()), n - 1)] * 2,
    "slice": lambda x, n: x[:, : int(x.argmax().item()) + 1] * n,
    "repeat": lambda x, n: x.repeat(x.argmax().item() + 1, n),
    "arange": lambda x, n: torch.arange(int(x.argmax())) * n,
    "write": lambda x, n: _write(x.clone(), int(x.argmax())) * n,
    "select": lambda x, n: x.select(1, x.argmax().item()) * n,
    "list": lambda x, n: [x, x * 2, x * 3, x + 1, x + 2][x.argmax().item()] * n,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PLACES)
def test_a_value_that_is_a_place_is_fixed_in_the_graph(name, backend, caplog) -> None:
    place = PLACES[name]
    compiled = tripwire.compile(place, backend=backend)
    for index in (0, 1, 2, 3, 1, 2, 3, 0, 1):
        x = nn.functional.one_hot(torch.tensor([index]), 5).float()
        for n in (4, 3):
            torch.testing.assert_close(compiled(x, n), place(x, n), rtol=0, atol=0)
    assert tripwire.statistics(compiled).traces <= 6
    assert "failed" not in caplog.text
