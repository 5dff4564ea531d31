"""Values at entry: what a call changes before it fails is in the record as it was before."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import operator
import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replaying import check_reproduces, fail, only
from support import check_same, run_with_torch
from torch import nn

import tripwire
from tripwire.recording.capture.calls import Beginning
from tripwire.recording.replay.rerun import rebuilding

# --- functions that change something, and then fail with what they see ---


class Failed(Exception):
    pass


def stop(fails: bool, *seen: object) -> None:
    if fails:
        raise Failed(" ".join(map(show, seen)))


def show(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return str(value.tolist()) if isinstance(value, np.ndarray) else repr(value)


def op(x, fails):
    x.add_(1)
    stop(fails, x)
    return x


def operator_in_place(x, fails):
    x *= 3
    stop(fails, x)
    return x


def out(x, y, fails):
    torch.add(y, 1, out=x)
    stop(fails, x)
    return x


def setitem(x, fails):
    x[0] = x[0] + 7.0
    stop(fails, x)
    return x


def through_a_view(x, fails):
    x[1:].mul_(2)
    stop(fails, x)
    return x


def through_data(x, fails):
    x.data.add_(5)
    stop(fails, x)
    return x


def inplace_keyword(x, fails):
    F.relu(x - x, inplace=True)
    F.leaky_relu(x, 0.5, inplace=True)
    stop(fails, x)
    return x


def inplace_position(x, fails):
    F.leaky_relu(x, 0.5, True)
    stop(fails, x)
    return x


def shared_storage(x, y, fails):
    y.add_(1)
    stop(fails, x, y)
    return x


def twice(x, fails):
    x.add_(1)
    x.add_(x)
    stop(fails, x)
    return x


def many_at_once(x, y, fails):
    torch._foreach_add_([x, y], 1.0)
    stop(fails, x, y)
    return x


def copied_from(x, y, fails):
    x.copy_(y)
    y.zero_()
    stop(fails, x, y)
    return x


def through_numpy(x, fails):
    x.numpy()[0] += 9
    stop(fails, x)
    return x


def layers(model, x, fails):
    y = model(x)
    stop(fails, model[1].running_mean, model[1].num_batches_tracked, y)
    return y


def update_weights(weights, rate, fails):
    with torch.no_grad():
        for weight in weights:
            weight.sub_(rate * weight.sign())
    stop(fails, *weights)
    return weights[0] * 1


def train_step(model, x, fails):
    model(x).sum().backward()
    stop(fails, model.weight.grad)
    return x


def optimizer_step(model, optimizer, x, fails):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    stop(fails, model.weight, optimizer.state[model.weight]["momentum_buffer"])
    return x


def grow_list(items, x, fails):
    items.append(len(items))
    stop(fails, items)
    return x


def fill_dict(table, x, fails):
    table["n"] = table.get("n", 0) + 1
    stop(fails, table)
    return x


def grow_set(seen, x, fails):
    seen.add(len(seen))
    stop(fails, sorted(seen))
    return x


@dataclasses.dataclass
class Box:
    count: int = 0
    held: torch.Tensor | None = None


def set_attribute(box, x, fails):
    box.count += 1
    box.held = x * 2
    stop(fails, box.count)
    return x


COUNT = 0
SCALE = torch.tensor([1.0])


def set_global(x, fails):
    global COUNT
    COUNT = COUNT + 1
    stop(fails, COUNT)
    return x


def change_global_tensor(x, fails):
    SCALE.mul_(2)
    stop(fails, SCALE)
    return x * SCALE


def change_array(array, x, fails):
    array[0] += 1
    stop(fails, array)
    return x


def draw_torch(x, fails):
    y = torch.rand(2)
    stop(fails, y)
    return x + y[0]


def draw_dropout(x, fails):
    y = F.dropout(x, 0.5)
    stop(fails, y)
    return y


def draw_python(x, fails):
    number = random.random()
    stop(fails, number)
    return x


def draw_numpy(x, fails):
    number = np.random.rand(2)
    stop(fails, number)
    return x


def draw_from(generator, x, fails):
    y = torch.rand(2, generator=generator)
    stop(fails, y)
    return x + y[0]


def draw_from_random(generator, x, fails):
    number = generator.random()
    stop(fails, number)
    return x


def vector() -> torch.Tensor:
    return torch.tensor([-1.0, 2.0, 3.0])


def generator_of(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))


def trained() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.weight.grad = torch.ones(1, 3)
    return model, vector()


def optimized() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(vector()).sum().backward()
    optimizer.step()
    return model, optimizer, vector()


def sharing() -> tuple[Any, ...]:
    x = vector()
    return x, x[1:]


Make = Callable[[], tuple[Any, ...]]
CHANGES: dict[Callable[..., Any], Make] = {
    op: lambda: (vector(),),
    operator_in_place: lambda: (vector(),),
    out: lambda: (vector(), vector()),
    setitem: lambda: (vector(),),
    through_a_view: lambda: (vector(),),
    through_data: lambda: (vector(),),
    inplace_keyword: lambda: (vector(),),
    inplace_position: lambda: (vector(),),
    shared_storage: sharing,
    twice: lambda: (vector(),),
    many_at_once: lambda: (vector(), vector()),
    copied_from: lambda: (vector(), torch.zeros(3)),
    through_numpy: lambda: (vector(),),
    layers: lambda: (normed(), torch.arange(6.0).reshape(2, 3)),
    update_weights: lambda: ([vector(), vector()], 0.5),
    train_step: trained,
    optimizer_step: optimized,
    grow_list: lambda: ([5], vector()),
    fill_dict: lambda: ({"a": 1}, vector()),
    grow_set: lambda: ({9}, vector()),
    set_attribute: lambda: (Box(3), vector()),
    set_global: lambda: (vector(),),
    change_global_tensor: lambda: (vector(),),
    change_array: lambda: (np.arange(3), vector()),
    draw_torch: lambda: (vector(),),
    draw_dropout: lambda: (vector(),),
    draw_python: lambda: (vector(),),
    draw_numpy: lambda: (vector(),),
    draw_from: lambda: (generator_of(3), vector()),
    draw_from_random: lambda: (random.Random(4), vector()),
}

# --- ways to call them; each leaves one record ---


def on_the_tracing_call(function, make: Make, folder: Path) -> Exception:
    return fail(tripwire.compile(function, record_on_error=folder), *make(), True)


def after_a_hit(function, make: Make, folder: Path) -> Exception:
    compiled = tripwire.compile(function, record_on_error=folder)
    for _ in range(3):
        compiled(*make(), False)
    return fail(compiled, *make(), True)


def refused(function, make: Make, folder: Path) -> Exception:
    def reads_clock(*args):
        time.monotonic()
        return function(*args)

    compiled = tripwire.compile(reads_clock, record_on_error=folder)
    for _ in range(5):
        compiled(*make(), False)
    return fail(compiled, *make(), True)


def decorated(function, make: Make, folder: Path) -> Exception:
    return fail(tripwire.record_on_error(folder)(function), *make(), True)


def decorated_before(function, make: Make, folder: Path) -> Exception:
    recorded = tripwire.record_on_error(folder)(function)
    recorded(*make(), False)
    recorded(*make(), False)
    return fail(recorded, *make(), True)


def in_a_block(function, make: Make, folder: Path) -> Exception:
    args = make()

    def run():
        with tripwire.record_block(folder):
            function(*args, True)

    return fail(run)


WAYS = [on_the_tracing_call, after_a_hit, refused, decorated, decorated_before, in_a_block]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("function", CHANGES, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore::tripwire.TracerWarning")
def test_a_record_begins_with_the_values_at_entry(function, way, tmp_path) -> None:
    error = way(function, CHANGES[function], tmp_path)
    assert isinstance(error, Failed)
    record = check_reproduces(only(tmp_path))
    assert record.manifest.outcome.message == str(error)
    assert not record.manifest.omissions


# --- compiled code that fails ---


def write_and_take(x, index):
    x.add_(1)
    y = x * 2
    return y[index]


def draw_and_take(x, index):
    return (torch.rand(3) + x)[index]


def draw_own_and_take(generator, x, index):
    return (torch.rand(3, generator=generator) + x)[index]


def take(x, index):
    return (x * 2)[index]


INSIDE, OUTSIDE = torch.tensor([0, 1]), torch.tensor([0, 7])


def fail_on_a_hit(function, make: Make, folder: Path, **options: Any) -> Exception:
    compiled = tripwire.compile(function, fullgraph=True, record_on_error=folder, **options)
    compiled(*make(), INSIDE)
    compiled(*make(), INSIDE)
    assert compiled.statistics().hits == 1
    error = fail(compiled, *make(), OUTSIDE)
    assert compiled.statistics().traces == 1
    return error


HITS: dict[Callable[..., Any], Make] = {
    write_and_take: lambda: (vector(),),
    draw_and_take: lambda: (vector(),),
    take: lambda: (vector(),),
}


@pytest.mark.parametrize("function", HITS, ids=lambda function: function.__name__)
def test_a_hit_that_fails_is_recorded_with_the_line_that_the_plain_call_fails_at(
    function, tmp_path
) -> None:
    make = HITS[function]
    plain = fail(function, *make(), OUTSIDE)
    error = fail_on_a_hit(function, make, tmp_path)
    outcome = check_reproduces(only(tmp_path)).manifest.outcome
    assert plain.__traceback__ is not None
    at = plain.__traceback__.tb_next
    while at.tb_next is not None:
        at = at.tb_next
    assert (outcome.type, outcome.message) == (type(plain).__name__, str(plain))
    assert (type(error), str(error)) == (type(plain), str(plain))
    assert (outcome.file, outcome.line) == (__file__, at.tb_lineno)


def test_a_hit_that_writes_and_fails_is_recorded_with_the_values_before(tmp_path) -> None:
    fail_on_a_hit(write_and_take, HITS[write_and_take], tmp_path)
    with rebuilding(only(tmp_path)) as call:
        check_same(call.args, (vector(), OUTSIDE))
        assert call.manifest.compiled.hit


def test_a_hit_on_what_autograd_made_reproduces(tmp_path) -> None:
    make = lambda: (torch.ones(3, requires_grad=True) * 2,)
    fail_on_a_hit(write_and_take, make, tmp_path)
    check_reproduces(only(tmp_path))


def test_a_hit_that_draws_and_fails_is_recorded_with_the_state_before(tmp_path) -> None:
    torch.manual_seed(11)
    compiled = tripwire.compile(draw_and_take, record_on_error=tmp_path)
    compiled(vector(), INSIDE)
    before = torch.get_rng_state()
    fail(compiled, vector(), OUTSIDE)
    after = torch.get_rng_state()
    with rebuilding(only(tmp_path)) as call:
        assert torch.equal(call.generators["torch"], before)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_hit_that_draws_from_an_own_generator_is_recorded_with_its_state_before(
    tmp_path,
) -> None:
    generator = generator_of(3)
    compiled = tripwire.compile(draw_own_and_take, fullgraph=True, record_on_error=tmp_path)
    compiled(generator, vector(), INSIDE)
    compiled(generator, vector(), INSIDE)
    before = generator.get_state()
    fail(compiled, generator, vector(), OUTSIDE)
    after = generator.get_state()
    assert not torch.equal(before, after)
    with rebuilding(only(tmp_path)) as call:
        assert torch.equal(call.args[0].get_state(), before)
    assert torch.equal(generator.get_state(), after)


# --- what isn't done ---


def test_a_call_that_draws_nothing_records_no_generator(tmp_path) -> None:
    fail(tripwire.record_on_error(tmp_path)(take), vector(), OUTSIDE)
    with rebuilding(only(tmp_path)) as call:
        assert call.generators == {}


def copies_made(monkeypatch) -> list[int]:
    """Grows by a number of bytes with each storage that is copied."""
    made: list[int] = []
    real = torch.UntypedStorage.clone

    def clone(storage):
        made.append(storage.nbytes())
        return real(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone)
    return made


def add_all(*tensors):
    return sum(tensors)


def test_an_armed_hit_copies_no_tensor(monkeypatch, tmp_path) -> None:
    tensors = [torch.randn(4) for _ in range(20)]
    compiled = tripwire.compile(add_all, fullgraph=True, record_on_error=tmp_path)
    made = copies_made(monkeypatch)
    for _ in range(3):
        compiled(*tensors)
    assert compiled.statistics().hits == 2
    assert made == []


def test_an_armed_hit_looks_at_nothing_that_it_was_not_asked_for(monkeypatch, tmp_path) -> None:
    compiled = tripwire.compile(take, fullgraph=True, record_on_error=tmp_path)
    compiled(vector(), INSIDE)
    for name in ("before_run", "before_write", "before_draw", "_note_state", "_take_down"):
        monkeypatch.setattr(Beginning, name, None)
    compiled(vector(), INSIDE)
    assert compiled.statistics().hits == 1


def test_an_armed_hit_copies_just_what_its_graph_changes(monkeypatch, tmp_path) -> None:
    compiled = tripwire.compile(write_and_take, fullgraph=True, record_on_error=tmp_path)
    compiled(vector(), INSIDE)
    made = copies_made(monkeypatch)
    compiled(vector(), INSIDE)
    assert made == [vector().untyped_storage().nbytes()]


def test_a_decorated_call_copies_no_tensor(monkeypatch, tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path)(add_all)
    made = copies_made(monkeypatch)
    for _ in range(3):
        recorded(vector(), vector())
    assert made == []


def test_a_decorated_call_copies_only_what_is_the_callers(monkeypatch, tmp_path) -> None:
    def works_on_its_own(x):
        y = x * 2
        y.add_(1)
        return y

    recorded = tripwire.record_on_error(tmp_path)(works_on_its_own)
    made = copies_made(monkeypatch)
    recorded(vector())
    assert made == []


# --- what is known of a function from its earlier calls ---


def call(layer, x, fails):
    y = layer(x)
    stop(fails, *layer.buffers(), y)
    return y


@pytest.mark.filterwarnings("ignore::tripwire.TracerWarning")
@pytest.mark.parametrize(
    "later",
    [
        lambda: nn.BatchNorm1d(3),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Embedding(3, 3, max_norm=0.1),
    ],
    ids=["statistics", "in place", "max_norm"],
)
def test_a_function_that_was_harmless_with_one_layer_is_watched_with_another(
    later, tmp_path
) -> None:
    recorded = tripwire.record_on_error(tmp_path)(call)
    recorded(nn.Linear(3, 3), torch.ones(2, 3), False)
    recorded(nn.Linear(3, 3), torch.ones(2, 3), False)
    layer = later()
    x = torch.tensor([0, 1]) if isinstance(layer, nn.Embedding) else -torch.ones(2, 3)
    error = fail(recorded, layer, x, True)
    assert check_reproduces(only(tmp_path)).manifest.outcome.message == str(error)


def test_a_layer_that_is_put_into_training_after_a_harmless_call_is_watched(tmp_path) -> None:
    layer = nn.BatchNorm1d(3).eval()
    recorded = tripwire.record_on_error(tmp_path)(call)
    recorded(layer, torch.ones(2, 3), False)
    layer.train()
    fail(recorded, layer, torch.ones(2, 3), True)
    check_reproduces(only(tmp_path))


def helper(x):
    return x * 1


def doubles(x):
    return x.mul_(2)


def uses_helper(x, fails):
    helper(x)
    if fails:
        raise Failed(str(x.tolist()))
    return x


def draws_only(x, fails):
    y = x + torch.rand(3)
    if fails:
        raise Failed(str(y.tolist()))
    return y


def test_a_call_known_to_change_nothing_isnt_taken_down_and_reproduces(
    monkeypatch, tmp_path
) -> None:
    recorded = tripwire.record_on_error(tmp_path)(draws_only)
    recorded(vector(), False)
    monkeypatch.setattr(Beginning, "before_run", None)
    fail(recorded, vector(), True)
    check_reproduces(only(tmp_path))


def test_a_helper_that_was_replaced_by_one_that_writes_is_told_of(monkeypatch, tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path)(uses_helper)
    recorded(vector(), False)
    monkeypatch.setitem(globals(), "helper", doubles)
    fail(recorded, vector(), True)
    with rebuilding(only(tmp_path)) as found:
        (omission,) = found.manifest.omissions
    assert "replaced since" in omission.why


# --- the world around ---


def find_precision():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "told apart"


def set_conv_precision(value):
    torch.backends.mkldnn.conv.fp32_precision = value


def set_mm_precision(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


def what_is_set(x, fails):
    seen = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.empty(0).device,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        find_precision(),
        torch.backends.mkldnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
    )
    stop(fails, *map(str, seen), torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
    return x


class Flag:
    """A setting, for a while."""

    def __init__(self, set_, get, value):
        self.set, self.before, self.value = set_, get(), value

    def __enter__(self):
        self.set(self.value)

    def __exit__(self, *_):
        self.set(self.before)


def set_cudnn_deterministic(value):
    torch.backends.cudnn.deterministic = value


ENVIRONMENTS = {
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: Flag(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: Flag(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "matmul precision": lambda: Flag(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium"
    ),
    "precision of convolutions": lambda: Flag(
        set_conv_precision, lambda: torch.backends.mkldnn.conv.fp32_precision, "bf16"
    ),
    "precision of one back end": lambda: Flag(
        set_mm_precision, lambda: torch.backends.mkldnn.matmul.fp32_precision, "bf16"
    ),
    "cudnn": lambda: Flag(
        set_cudnn_deterministic, lambda: torch.backends.cudnn.deterministic, True
    ),
}


@pytest.mark.filterwarnings("ignore::tripwire.TracerWarning")
@pytest.mark.parametrize(
    "way", [on_the_tracing_call, refused, decorated, decorated_before], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_replay_has_the_settings_of_the_call_and_leaves_none(name, way, tmp_path) -> None:
    with ENVIRONMENTS[name]():
        error = way(what_is_set, lambda: (torch.ones(2, device="cpu"),), tmp_path)
    assert isinstance(error, Failed)
    before = str(fail(what_is_set, None, True))
    assert before != str(error)
    check_reproduces(only(tmp_path))
    assert str(fail(what_is_set, None, True)) == before


def test_a_replay_sets_no_deterministic_algorithms_that_are_set_so(tmp_path, monkeypatch) -> None:
    """torch imports its compilers to set them: 1.3 s."""
    fail(tripwire.record_on_error(tmp_path)(what_is_set), torch.ones(2), True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)
    check_reproduces(only(tmp_path))


# --- writes that the code doesn't show ---

MEAN, VARIANCE, TOTAL = torch.zeros(2), torch.ones(2), torch.zeros(2)
NOTES: list[int] = []
note = functools.partial(list.append, NOTES)
METHODS = {"add": torch.Tensor.add_}


@dataclasses.dataclass(frozen=True)
class Tally:
    n: int = 0

    def up(self) -> None:
        object.__setattr__(self, "n", self.n + 1)


TALLY = Tally()


def keeps_statistics(x):
    F.batch_norm(x, MEAN, VARIANCE, None, None, True)
    return MEAN.tolist()


def is_told_to_write(x):
    F.leaky_relu(x, 0.1, True)
    return x.tolist()


def counts(x):
    TALLY.up()
    return TALLY.n


def notes(x):
    note(1)
    return list(NOTES)


def adds_by_name(x):
    operator.iadd(NOTES, [1])
    return list(NOTES)


def writes_through_a_table(x):
    METHODS["add"](TOTAL, 1)
    return TOTAL.tolist()


def writes_through_a_made_name(x):
    getattr(TOTAL, "add" + "_")(1)
    return TOTAL.tolist()


@pytest.mark.parametrize(
    "write",
    [
        keeps_statistics,
        is_told_to_write,
        counts,
        notes,
        adds_by_name,
        writes_through_a_table,
        writes_through_a_made_name,
    ],
    ids=lambda write: write.__name__,
)
def test_a_second_call_whose_code_hides_what_it_writes(write, tmp_path) -> None:
    def call(x, fails):
        seen = write(x)
        if fails:
            raise Failed(str(seen))

    recorded = tripwire.record_on_error(tmp_path)(call)
    recorded(torch.tensor([[1.0, -2.0], [3.0, -4.0]]), False)
    fail(recorded, torch.tensor([[1.0, -2.0], [3.0, -4.0]]), True)
    check_reproduces(only(tmp_path))


def test_a_write_by_another_thread_is_told(tmp_path) -> None:
    def call(x):
        thread = threading.Thread(target=x.add_, args=(1,))
        thread.start()
        thread.join()
        raise Failed(str(x.tolist()))

    fail(tripwire.record_on_error(tmp_path)(call), torch.zeros(2))
    (omission,) = tripwire.load_record(only(tmp_path)).manifest.omissions
    assert omission.what == "values at the beginning" and "not by a torch call" in omission.why


def test_numpys_generator_that_is_first_used_inside(tmp_path) -> None:
    program = f"""
import sys, numpy as np, torch, tripwire
assert "numpy.random" not in sys.modules
def call(x): raise ValueError(np.random.rand())
try:
    tripwire.record_on_error({str(tmp_path)!r}, check=False)(call)(torch.ones(2))
except ValueError as error:
    print(error)
"""
    seen = run_with_torch(program)
    with pytest.raises(ValueError, match=seen):
        tripwire.replay(only(tmp_path), trust=True)


# --- settings that a record doesn't keep ---


def warns(x):
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def prints(x):
    raise Failed(str(x / 3))


def divides(x):
    return np.ones(2) / np.zeros(2)


_USUAL = np.geterr()


def warn_loudly():
    warnings.simplefilter("error")


@pytest.mark.parametrize(
    ("call", "set_", "undo", "told"),
    [
        (warns, warn_loudly, lambda: None, "warnings.filters"),
        (
            prints,
            lambda: torch.set_printoptions(precision=2),
            lambda: torch.set_printoptions(profile="default"),
            "torch.set_printoptions",
        ),
        (divides, lambda: np.seterr(all="raise"), lambda: np.seterr(**_USUAL), "numpy.seterr"),
        (
            prints,
            lambda: setattr(decimal.getcontext(), "prec", 3),
            lambda: setattr(decimal.getcontext(), "prec", 28),
            "decimal.getcontext()",
        ),
    ],
    ids=["warnings", "printing", "numpy", "decimal"],
)
def test_settings_that_arent_kept_are_told(call, set_, undo, told, tmp_path) -> None:
    with warnings.catch_warnings():
        set_()
        try:
            fail(tripwire.record_on_error(tmp_path, check=False)(call), torch.ones(2))
        finally:
            undo()
    assert told in [
        omission.what for omission in tripwire.load_record(only(tmp_path)).manifest.omissions
    ]


def test_the_environment_isnt_kept_and_that_is_told(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRICT_MODE", "1")

    def call(x):
        if os.environ.get("STRICT_MODE"):
            raise Failed("strict")

    fail(tripwire.record_on_error(tmp_path)(call), torch.ones(2))
    manifest = tripwire.load_record(only(tmp_path)).manifest
    assert [omission.what for omission in manifest.omissions] == ["os.environ"]


def test_a_tensor_that_the_call_resizes_is_kept_as_it_was(tmp_path) -> None:
    def call(x):
        x.resize_(100).fill_(7)
        raise Failed(str(x.sum()))

    fail(tripwire.record_on_error(tmp_path)(call), torch.ones(2))
    record = check_reproduces(only(tmp_path))
    assert record.manifest.omissions == ()


class Unlooked:
    """Raises when it is asked what it is."""

    @property
    def __class__(self):
        raise RuntimeError("not to be asked")


def test_an_object_that_cant_be_looked_at_doesnt_stop_a_call(tmp_path) -> None:
    recorded = tripwire.record_on_error(tmp_path)(lambda x, thing: x + 1)
    for _ in range(3):
        assert recorded(torch.ones(1), Unlooked()).item() == 2.0
    assert list(tmp_path.iterdir()) == []
