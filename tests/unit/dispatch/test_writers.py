"""Who wrote: for each kind of thing that a call reads, which line a retirement names.

docs/explain.md has the table. A program reads something, is called, writes it at the line that
begins with `yield`, and is called again: compiled and plain must agree, and each cause must name
that line or nobody, as its row says.
"""

import contextvars
import os
import re
import types
from pathlib import Path

import pytest
import torch
from support import check_same
from torch import nn

import tripwire
from tripwire.writes import sentry

pytestmark = pytest.mark.skipif(not sentry.IS_COMPILED, reason="the twin knows no writers")

X = torch.arange(6.0).reshape(2, 3)
SCALE = 2.0
CONFIG = types.ModuleType("config")
CONFIG.scale = 2.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)
VARIABLE_NAME = "TRIPWIRE_TEST_WRITERS"


class Box:
    factor = 2.0

    def __init__(self):
        self.scale = 2.0

    def apply(self, x):
        return self.help(x) * self.scale * self.factor

    def help(self, x):
        return x + 1


class Other(Box):
    def help(self, x):
        return x + 2


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0

    def apply(self, x):
        return x * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.last = nn.ReLU()
        self.register_buffer("mean", torch.ones(3))
        self.scale = 2.0

    def forward(self, x):
        return self.last(self.drop(self.inner(x))) * self.scale + self.mean


def scale_by_global(x):
    return x * SCALE


ROWS = {}  # by name: the program, and since when the writer is known


def row(known):
    def add(program):
        ROWS[program.__name__] = program, known
        return program

    return add


ALWAYS, FROM_312, NEVER = "always", "from 3.12", "never"


# --- objects and classes ---


@row(FROM_312)
def an_attribute():
    box = Box()
    yield box.apply
    yield setattr(box, "scale", 3.0)


@row(FROM_312)
def a_deleted_attribute():
    box = Box()
    box.factor = 5.0
    yield box.apply
    yield delattr(box, "factor")


@row(FROM_312)
def an_attribute_in_its_dict():
    box = Box()
    yield box.apply
    yield vars(box).update(scale=3.0)


@row(ALWAYS)
def a_whole_dict():
    box = Box()
    yield box.apply
    yield setattr(box, "__dict__", {"scale": 3.0})


@row(ALWAYS)
def an_objects_class():
    box = Box()
    yield lambda x: box.apply(x)
    yield setattr(box, "__class__", Other)


@row(FROM_312)
def a_class_attribute():
    class Own(Box):
        factor = 3.0

    yield Own().apply
    yield setattr(Own, "factor", 4.0)


@row(FROM_312)
def a_method():
    class Own(Box):
        def help(self, x):
            return x + 3

    yield Own().apply
    yield setattr(Own, "help", lambda self, x: x + 4)


@row(NEVER)
def a_slot():
    slotted = Slotted()
    yield slotted.apply
    yield setattr(slotted, "scale", 3.0)


# --- names ---


@row(FROM_312)
def a_global():
    yield scale_by_global
    yield globals().update(SCALE=SCALE + 1)


@row(FROM_312)
def an_attribute_of_a_python_module():
    yield lambda x: x * CONFIG.scale
    yield setattr(CONFIG, "scale", CONFIG.scale + 1)


@row(NEVER)
def a_closure():
    beta = 2.0

    def scaled(x):
        return x * beta

    yield scaled
    yield (beta := 3.0)


@row(NEVER)
def a_default():
    def scaled(x, by=2.0):
        return x * by

    yield scaled
    yield setattr(scaled, "__defaults__", (3.0,))


@row(NEVER)
def a_functions_code():
    def scaled(x):
        return x * 2

    yield scaled
    yield setattr(scaled, "__code__", (lambda x: x * 3).__code__)


@row(FROM_312)
def an_environment_variable():
    os.environ[VARIABLE_NAME] = "2"
    yield lambda x: x * float(os.environ[VARIABLE_NAME])
    yield os.environ.update({VARIABLE_NAME: "3"})
    del os.environ[VARIABLE_NAME]


@row(NEVER)
def a_context_variable():
    yield lambda x: x * VARIABLE.get()
    yield VARIABLE.set(VARIABLE.get() + 1)


# --- containers ---


@row(FROM_312)
def an_item_of_a_dict():
    options = {"scale": 2.0}
    yield lambda x: x * options["scale"]
    yield options.update(scale=3.0)


@row(FROM_312)
def an_item_under_a_number():
    options = {5: 2.0, 6: 3.0}
    yield lambda x: x * options[5] + options[6]
    yield options.update({6: 4.0})


@row(FROM_312)
def an_item_under_a_tuple():
    options = {(5, 6): 2.0}
    yield lambda x: x * options[5, 6]
    yield options.update({(5, 6): 4.0})


@row(FROM_312)
def a_dict_that_is_cleared():
    options = {"scale": 2.0}
    yield lambda x: x * options.get("scale", 3.0)
    yield options.clear()


@row(NEVER)
def an_element_of_a_list():
    scales = [2.0, 3.0]
    yield lambda x: x * scales[0]
    yield scales.__setitem__(0, 3.0)


@row(NEVER)
def a_list_that_grows():
    scales = [2.0, 3.0]
    yield lambda x: x * sum(scales)
    yield scales.append(3.0)


@row(NEVER)
def a_set():
    scales = {2.0, 3.0}
    yield lambda x: x * sum(scales)
    yield scales.add(4.0)


# --- modules of torch ---


@row(ALWAYS)
def an_attribute_of_a_module():
    net = Net()
    yield net
    yield setattr(net, "scale", 3.0)


@row(ALWAYS)
def an_attribute_through_the_compiled_module():
    net = Net()
    compiled = tripwire.compile(net, dynamic=False)
    yield compiled
    yield setattr(compiled, "scale", 3.0)


@row(ALWAYS)
def a_parameter():
    net = Net()
    yield net
    yield setattr(net.inner, "weight", nn.Parameter(torch.ones(3, 3), requires_grad=False))


@row(ALWAYS)
def the_form_of_a_parameter():
    net = Net()
    yield net
    yield setattr(net.inner.bias, "data", torch.ones(1))


@row(ALWAYS)
def a_frozen_parameter():
    net = Net()
    yield net
    yield net.requires_grad_(False)


@row(ALWAYS)
def a_buffer():
    net = Net()
    yield net
    yield setattr(net, "mean", torch.zeros(1))  # one of the same form would be taken in


@row(FROM_312)
def a_buffer_that_is_registered():
    net = Net()
    yield net
    yield net.register_buffer("mean", torch.zeros(1))


@row(ALWAYS)
def a_submodule():
    net = Net()
    yield net
    yield setattr(net, "last", nn.Tanh())


@row(FROM_312)
def a_submodule_in_its_table():
    net = Net()
    yield net
    yield net._modules.update(last=nn.Tanh())


@row(FROM_312)
def a_submodule_more():
    net = nn.Sequential(nn.Linear(3, 3))
    yield net
    yield net.append(nn.Tanh())


@row(ALWAYS)
def a_forward_of_its_own():
    net = Net()
    yield net
    yield setattr(net, "forward", lambda x: x * 2)


@row(ALWAYS)
def eval_mode():
    net = Net()
    yield net
    yield net.eval()


@row(ALWAYS)
def a_loaded_state():
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["mean"] = state["mean"].double()
    yield net
    yield net.load_state_dict(state, assign=True)


@row(FROM_312)
def a_moved_buffer():
    net = nn.BatchNorm1d(3, affine=False).eval()
    yield lambda x: net(x.to(net.running_mean.dtype))
    yield net.double()


@row(FROM_312)
def a_hook():
    net = Net()
    yield net
    yield net.inner.register_forward_hook(lambda module, args, result: result + 1)


@row(FROM_312)
def a_hook_that_is_removed():
    net = Net()
    handle = net.inner.register_forward_hook(lambda module, args, result: result + 1)
    yield net
    yield handle.remove()


@row(FROM_312)
def a_hook_of_all_modules():
    net = Net()
    yield net
    handles = []
    yield handles.append(nn.modules.module.register_module_forward_hook(lambda m, a, r: r + 1))
    handles[0].remove()


@pytest.mark.parametrize("name", ROWS)
def test_a_retirement_names_the_line_that_wrote_or_nobody(name) -> None:
    program, known = ROWS[name]
    steps = program()
    plain = next(steps)
    compiled = tripwire.compile(plain, dynamic=False)
    plain = getattr(plain, "_orig_mod", plain)
    for _ in range(2):
        check_same(plain(X), compiled(X))
    next(steps)
    line = steps.gi_frame.f_lineno
    check_same(plain(X), compiled(X))
    causes = compiled.statistics().causes
    assert compiled.statistics().retired == 1
    list(steps)
    is_known = known == ALWAYS or (known == FROM_312 and sentry.TELLS)
    told = {(w.file, w.line) if (w := cause.writer) else None for cause in causes}
    assert told == ({(__file__, line)} if is_known else {None})


def test_the_page_says_which_lines_are_told() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (always|from 3\.12|never) \|$", page, re.MULTILINE)
    rows = [(whats.replace("'", "").lower(), known) for whats, known in rows]
    told = {what: known for whats, known in rows for what in whats.split(", ")}
    assert told == {name.replace("_", " "): known for name, (_, known) in ROWS.items()}


# --- each its own ---


@pytest.mark.skipif(not sentry.TELLS, reason="dict watchers came with Python 3.12")
def test_each_item_has_its_own_writer() -> None:
    options = {"a": 2.0, 5: 3.0, b"c": 4.0}
    compiled = tripwire.compile(lambda x: x * options["a"] * options[5] * options[b"c"])
    compiled(X)
    first = test_each_item_has_its_own_writer.__code__.co_firstlineno + 6
    options["a"] = 5.0
    options[5] = 6.0
    options[b"c"] = 7.0
    compiled(X)
    told = {cause.new: cause.writer.line - first for cause in compiled.statistics().causes}
    assert told == {"5.0": 0, "6.0": 1, "7.0": 2}


@pytest.mark.skipif(not sentry.TELLS, reason="dict watchers came with Python 3.12")
def test_of_two_writers_under_keys_that_are_not_noted_none_is_blamed() -> None:
    options = {(1,): 2.0, (2,): 3.0}
    compiled = tripwire.compile(lambda x: x * options[1,] * options[2,])
    compiled(X)
    options[1,] = 5.0
    options[2,] = 6.0
    compiled(X)
    assert {cause.writer for cause in compiled.statistics().causes} == {None}


def test_every_element_of_a_list_that_changed_is_told() -> None:
    scales = [2.0, 3.0, 4.0]
    compiled = tripwire.compile(lambda x: x * scales[0] * scales[1] * scales[2], dynamic=False)
    compiled(X)
    scales[0] = scales[2] = 7.0
    compiled(X)
    told = {str(cause.source): cause.old for cause in compiled.statistics().causes}
    assert told == {"C['scales'][0]": "2.0", "C['scales'][2]": "4.0"}


def test_what_was_written_before_something_died_is_told_too() -> None:
    net = Net()
    compiled = tripwire.compile(net)
    compiled(X)
    net.drop.training = False
    net.scale = 3.0
    net.last = nn.Tanh()  # the old one dies, and the entry with it
    compiled(X)
    told = {str(cause.source): cause.new for cause in compiled.statistics().causes}
    assert {"L['self'].scale": "3.0", "L['self'].last": "Tanh object"}.items() <= told.items()
    assert "L['self'].drop.training" in told
