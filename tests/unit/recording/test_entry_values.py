"""Values at entry: what a call changes before it fails is in the record as it was before."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from replaying import check_reproduces, fail, only
from support import check_same
from torch import nn

import tripwire
from tripwire.recording.beginning import Beginning
from tripwire.recording.rerun import rebuilding

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


def draw_from_numpy(generator, x, fails):
    number = generator.random(2)
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
    draw_from_numpy: lambda: (np.random.default_rng(5), vector()),
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
        with tripwire.record(folder):
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
