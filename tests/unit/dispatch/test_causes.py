"""Each retirement has a cause: what was written, from what to what, by whom. A miss says why."""

import logging
import os
import sys
import types

import pytest
import torch
from support import check_same
from torch import nn

import tripwire
from tripwire.reading.sources import Local
from tripwire.validity import Writer
from tripwire.writes import twin

pytestmark = pytest.mark.usefixtures("sentry")

X = torch.arange(6.0).reshape(2, 3)
SCALE = 2.0
CONFIG = types.ModuleType("config")

names_dict_writers = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="dict watchers, which see the writer, came with Python 3.12"
)


class Box:
    """Something to hang attributes on."""

    factor = 2.0

    def __init__(self):
        self.scale = 2.0

    def apply(self, x):
        return x * self.scale * self.factor


class OtherBox(Box):
    def apply(self, x):
        return x + self.scale


def add_one(x):
    return x + 1


def scale_by_global(x):
    return x * SCALE


def scale_by_config(x):
    return x * CONFIG.scale


def cause_of(call, change):
    """The cause of the retirement that a write brings."""
    compiled = tripwire.compile(call, fullgraph=True)
    check_same(call(X), compiled(X))
    change()
    check_same(call(X), compiled(X))
    assert compiled.statistics().retired == 1
    (cause,) = compiled.statistics().causes
    return cause


def set_attribute(obj, name, value):
    def write():
        setattr(obj, name, value)

    return write


# --- source, old and new ---


def test_an_attribute_is_named_with_both_values() -> None:
    box = Box()
    cause = cause_of(box.apply, set_attribute(box, "scale", 3.0))
    assert (str(cause.source), cause.old, cause.new) == ("L['self'].scale", "2.0", "3.0")


def test_a_deleted_attribute_is_named(monkeypatch) -> None:
    box = Box()
    monkeypatch.setattr(Box, "scale", 5.0, raising=False)
    cause = cause_of(box.apply, lambda: delattr(box, "scale"))
    assert str(cause.source) == "L['self'].scale"
    assert cause.old == "2.0"


def test_an_attribute_that_shadows_a_class_attribute_is_named() -> None:
    box = Box()
    cause = cause_of(box.apply, set_attribute(box, "factor", 3.0))
    assert (str(cause.source), cause.old, cause.new) == ("L['self'].factor", "nothing", "3.0")


def test_a_global_is_named_with_both_values(monkeypatch) -> None:
    cause = cause_of(scale_by_global, lambda: monkeypatch.setattr(f"{__name__}.SCALE", 3.0))
    assert (str(cause.source), cause.old, cause.new) == ("G['SCALE']", "2.0", "3.0")


def test_a_class_attribute_is_named_with_both_values(monkeypatch) -> None:
    cause = cause_of(Box().apply, lambda: monkeypatch.setattr(Box, "factor", 3.0))
    assert "factor" in str(cause.source)
    assert str(cause.source).startswith("T[")
    assert (cause.old, cause.new) == ("2.0", "3.0")


def test_an_attribute_of_a_python_module_is_named(monkeypatch) -> None:
    monkeypatch.setattr(CONFIG, "scale", 2.0, raising=False)
    cause = cause_of(scale_by_config, set_attribute(CONFIG, "scale", 3.0))
    assert (str(cause.source), cause.old, cause.new) == ("G['CONFIG'].scale", "2.0", "3.0")


def test_a_parameter_is_named_with_its_path() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    cause = cause_of(net, set_attribute(net[1], "weight", weight))
    assert str(cause.source) == "L['self'][1].weight"
    assert cause.old == "tensor float32[2, 3]"
    assert cause.new == "tensor float32[2, 3], another object"


def test_requires_grad_is_named_with_what_changed() -> None:
    net = nn.Linear(3, 2)
    cause = cause_of(net, lambda: net.weight.requires_grad_(False))
    assert str(cause.source) == "L['self'].weight"
    assert "requires grad" in cause.old
    assert "requires grad" not in cause.new


def test_training_is_named() -> None:
    net = nn.Dropout(0.0)
    cause = cause_of(net, net.eval)
    assert (str(cause.source), cause.old, cause.new) == ("L['self'].training", "True", "False")


def test_an_item_of_a_dict_is_named() -> None:
    options = {"scale": 2.0}
    cause = cause_of(lambda x: x * options["scale"], lambda: options.update(scale=3.0))
    assert (str(cause.source), cause.old, cause.new) == ("C['options']['scale']", "2.0", "3.0")


def test_a_module_dict_write_is_named() -> None:
    net = nn.Module()
    net.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ReLU()})
    old = net.parts["b"]  # held, so that there is something to compare with
    net.forward = lambda x: net.parts["b"](net.parts["a"](x))
    cause = cause_of(net, lambda: net.parts.update({"b": nn.Tanh()}))
    assert str(cause.source).endswith("['b']")
    assert (cause.old, cause.new) == ("ReLU object", "Tanh object")
    assert old is not net.parts["b"]


def test_a_submodule_that_somebody_else_holds_is_named_when_replaced() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    old = net[1]
    cause = cause_of(net, set_attribute(net, "1", nn.Tanh()))
    assert (str(cause.source), cause.old, cause.new) == (
        "L['self'][1]",
        "ReLU object",
        "Tanh object",
    )
    assert old is not net[1]


def test_a_submodule_that_dies_when_replaced_is_named() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    cause = cause_of(net, set_attribute(net, "1", nn.Tanh()))
    assert str(cause.source) == "L['self'][1]"


def test_a_hook_is_named_with_its_table() -> None:
    net = nn.Linear(3, 2)
    cause = cause_of(net, lambda: net.register_forward_hook(lambda module, args, output: output))
    assert "_forward_hooks" in str(cause.source)


def test_an_environment_variable_is_named(monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_TEST_SCALE", "2")
    cause = cause_of(
        lambda x: x * int(os.environ["TRIPWIRE_TEST_SCALE"]),
        lambda: monkeypatch.setenv("TRIPWIRE_TEST_SCALE", "3"),
    )
    assert "TRIPWIRE_TEST_SCALE" in str(cause.source)
    assert ("2" in cause.old, "3" in cause.new) == (True, True)


def test_an_element_of_a_list_is_named() -> None:
    scales = [2.0, 5.0]
    cause = cause_of(lambda x: x * scales[0], lambda: scales.__setitem__(0, 3.0))
    assert (str(cause.source), cause.old, cause.new) == ("C['scales'][0]", "2.0", "3.0")


# --- the writer ---


def test_the_writer_of_a_class_is_known(sentry) -> None:
    box = Box()

    def write():
        box.__class__ = OtherBox

    cause = cause_of(lambda x: box.apply(x), write)
    assert (cause.old, cause.new) == ("Box object", "OtherBox object")
    check_writer(cause, write, sentry)


def test_the_writer_of_code_is_not_guessed(sentry) -> None:
    def grow(x):
        return x + 1

    def write():
        grow.__code__ = (lambda x: x + 2).__code__

    cause = cause_of(grow, write)
    assert "code of" in cause.old
    assert cause.writer is None


def test_who_wrote_something_else_is_not_blamed_for_defaults(sentry) -> None:
    def grow(x, by=1):
        return x + by

    def write():
        grow.__dict__ = grow.__dict__  # told, and the same
        grow.__defaults__ = (2,)

    cause = cause_of(grow, write)
    assert "(1,)" in cause.old and "(2,)" in cause.new
    assert cause.writer is None
    assert "writer unknown" in str(cause)


def test_the_writer_of_requires_grad_is_known(sentry) -> None:
    net = nn.Linear(3, 2)

    def write():
        net.weight.requires_grad = False

    check_writer(cause_of(net, write), write, sentry)


@names_dict_writers
def test_the_writer_of_an_attribute_is_known(sentry) -> None:
    box = Box()

    def write():
        box.scale = 3.0

    check_writer(cause_of(box.apply, write), write, sentry)


@names_dict_writers
def test_the_writer_of_a_global_is_known(sentry) -> None:
    def write():
        globals()["SCALE"] = 3.0

    try:
        check_writer(cause_of(scale_by_global, write), write, sentry)
    finally:
        globals()["SCALE"] = 2.0


@names_dict_writers
def test_the_writer_of_a_dict_item_is_known(sentry) -> None:
    options = {"scale": 2.0}

    def write():
        options["scale"] = 3.0

    check_writer(cause_of(lambda x: x * options["scale"], write), write, sentry)


def turn(state):
    """The same values with other strides."""
    return {name: weight.t().contiguous().t() for name, weight in state.items()}


class Dropping(nn.Module):
    """Reads what the methods of torch below write."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.inner(x))


@pytest.mark.parametrize(
    "write",
    [
        lambda net: net.eval(),
        lambda net: net.train(False),
        lambda net: net.inner.register_parameter("bias", None),
        lambda net: net.apply(lambda module: setattr(module, "training", False)),
        lambda net: net.inner.requires_grad_(False),
        lambda net: net.load_state_dict(turn(net.state_dict()), assign=True),
        lambda net: net.register_forward_hook(add_to_result),
        lambda net: net.inner.register_forward_pre_hook(double_input),
        lambda net: setattr(net, "drop", nn.Identity()),
        lambda net: net.inner.__dict__.update(training=False, bias=None),
    ],
    ids=[
        "eval",
        "train",
        "register",
        "apply",
        "requires_grad",
        "load",
        "hook",
        "pre_hook",
        "setattr",
        "__dict__",
    ],
)
def test_what_torch_writes_is_its_callers_doing(sentry, write) -> None:
    net = Dropping()
    compiled = tripwire.compile(net)
    check_same(net(X), compiled(X))
    write(net)
    check_same(net(X), compiled(X))
    causes = compiled.statistics().causes
    assert causes
    writers = {cause.writer for cause in causes}
    if sentry is twin.Sentry:
        assert writers == {None}
        return
    if sys.version_info < (3, 12):
        writers -= {None}  # of what isn't an attribute of a module
    for writer in writers:
        assert writer is not None
        assert writer.file == __file__, writer
        assert "<lambda>" in writer.function


def add_to_result(module, args, result):
    return result + 1


def double_input(module, args):
    return (args[0] * 2,)


@names_dict_writers
def test_the_writer_of_an_environment_variable_is_the_user(sentry, monkeypatch) -> None:
    monkeypatch.setenv("SCALE_OF_TEST", "2")

    def write():
        os.environ["SCALE_OF_TEST"] = "3"

    cause = cause_of(lambda x: x * float(os.environ["SCALE_OF_TEST"]), write)
    check_writer(cause, write, sentry)


def test_every_change_is_told() -> None:
    net = Dropping()
    compiled = tripwire.compile(net)
    compiled(X)
    net.inner.weight = nn.Parameter(torch.ones(3, 3))
    net.inner.bias = None
    net.drop.p = 0.5
    net.eval()
    compiled(X)
    told = {str(cause.source) for cause in compiled.statistics().causes}
    assert {
        "L['self'].inner.weight",
        "L['self'].inner.bias",
        "L['self'].drop.p",
        "L['self'].drop.training",
    } <= told
    assert compiled.statistics().retired == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on the writer is known")
def test_a_writer_that_python_311_cannot_tell_is_unknown() -> None:
    box = Box()
    cause = cause_of(box.apply, set_attribute(box, "scale", 3.0))
    assert cause.writer is None
    assert str(cause) == "L['self'].scale: 2.0 → 3.0 (writer unknown)"


def check_writer(cause, write, sentry) -> None:
    """The cause names the function that wrote, and its line; the twin says that it can't tell."""
    if sentry is twin.Sentry:
        assert cause.writer is None
        assert "writer unknown" in str(cause)
        return
    code = write.__code__
    assert cause.writer == Writer(code.co_filename, code.co_firstlineno + 1, code.co_qualname)
    assert f"written at {code.co_filename}:{code.co_firstlineno + 1}" in str(cause)


# --- how they add up ---


def test_causes_come_in_the_order_of_retirements() -> None:
    box = Box()
    compiled = tripwire.compile(box.apply, fullgraph=True, dynamic=False)
    for scale in (2.0, 3.0, 4.0):
        box.scale = scale
        compiled(X)
    assert [cause.new for cause in compiled.statistics().causes] == ["3.0", "4.0"]


def test_only_the_latest_causes_are_kept() -> None:
    box = Box()
    compiled = tripwire.compile(box.apply, fullgraph=True, dynamic=False)
    compiled(X)
    for _ in range(30):
        box.scale = 3.0
        compiled(X)
        box.scale = 2.0
        compiled(X)
    statistics = compiled.statistics()
    assert statistics.traces == 2
    assert len(statistics.causes) == 16
    assert statistics.retired > 16


def test_a_cause_holds_no_object_of_the_users() -> None:
    net = nn.Linear(3, 2)
    frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    cause = cause_of(net, set_attribute(net, "weight", frozen))
    assert isinstance(cause.source.base, Local)
    assert isinstance(cause.old, str)
    assert isinstance(cause.new, str)


def test_a_value_that_came_back_before_the_next_call_is_no_cause() -> None:
    box = Box()
    compiled = tripwire.compile(box.apply, fullgraph=True)
    compiled(X)
    box.scale = 3.0
    box.scale = 2.0
    compiled(X)
    assert compiled.statistics().causes == ()
    assert compiled.statistics().hits == 1


# --- the log ---


def test_a_miss_is_told_in_one_line_with_expected_and_found_shapes(caplog) -> None:
    compiled = tripwire.compile(add_one)
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(torch.ones(2))
        assert caplog.messages == []
        compiled(torch.ones(3))
    (message,) = caplog.messages
    assert "\n" not in message
    assert message.startswith("add_one is traced again: L['x']: Tensor float32[2]")
    assert "→ Tensor float32[3]" in message


def test_a_miss_is_told_with_the_old_and_the_new_value(caplog, monkeypatch) -> None:
    compiled = tripwire.compile(scale_by_global)
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(X)
        monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
        compiled(X)
    assert "G['SCALE']: 2.0 → 3.0" in caplog.messages[0]


def test_a_miss_names_every_wire_that_tripped_once(caplog) -> None:
    net = nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.5))
    compiled = tripwire.compile(net)
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(X)
        compiled(X[:1])
        net.eval()
        compiled(X)
    for name in ("L['self'][0].training", "L['self'][1].training"):
        assert caplog.messages[-1].count(f"{name}: True → False") == 1  # of two entries


def test_a_miss_of_plain_values_is_told_with_both(caplog) -> None:
    compiled = tripwire.compile(lambda x, scale, name: x * scale)
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(X, 2.0, "a")
        compiled(X, 3.0, "a\nb")
    (message,) = caplog.messages
    assert "L['scale']: 2.0 → 3.0" in message
    assert "\n" not in message


def test_a_secret_that_changes_is_in_no_message(caplog) -> None:
    class Client(nn.Module):
        api_key = "first-1"

        def forward(self, x):
            return x + len(self.api_key)

    client = Client()
    compiled = tripwire.compile(client, dynamic=False, backend="eager")
    with caplog.at_level(logging.INFO, logger="tripwire"):
        for number in range(120):
            client.api_key = f"secret-{number:03}"
            compiled(X)
    assert any("keeps-changing" in message for message in caplog.messages)
    assert any("is traced again" in message for message in caplog.messages)
    assert "secret-" not in caplog.text + str(tripwire.explain(compiled))
    assert "api_key: <redacted" in caplog.text.replace("'", "")


def test_a_miss_of_a_probed_value_is_told_with_its_line(caplog) -> None:
    def pick(x, index):
        return x[int(index)]

    compiled = tripwire.compile(pick)
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(X, torch.tensor(0))
        compiled(X, torch.tensor(1))
    (message,) = caplog.messages
    line = pick.__code__.co_firstlineno + 1
    assert f"at test_causes.py:{line}: 0 → 1" in message


def test_a_miss_because_of_a_gradient_is_told_in_one_line(caplog) -> None:
    def grow(x):
        return x + 1 if x.grad is None else x + 2

    compiled = tripwire.compile(grow)
    x = X.clone().requires_grad_()
    with caplog.at_level(logging.INFO, logger="tripwire.recompiles"):
        compiled(x)
        x.sum().backward()
        compiled(x)
    assert all("\n" not in message for message in caplog.messages)


def test_hits_log_nothing(caplog) -> None:
    net = nn.Linear(3, 2)
    compiled = tripwire.compile(net)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            compiled(X)
            compiled(X[:1])
        caplog.clear()
        for _ in range(3):
            compiled(X)
            compiled(X[:1])
    assert caplog.messages == []


def test_an_entry_that_comes_back_logs_nothing(caplog) -> None:
    net = nn.Dropout(0.5)
    compiled = tripwire.compile(net)
    with caplog.at_level(logging.DEBUG):
        for switch in (net.train, net.eval):
            switch()
            compiled(X)
        caplog.clear()
        for switch in (net.train, net.eval, net.train):
            switch()
            compiled(X)
    assert caplog.messages == []
    assert compiled.statistics().retired > 2


def _by_cholesky(x):
    return x if torch.linalg.cholesky(torch.eye(2) * x[0]).sum() > 1 else -x


def _by_index(x):
    return x if torch.arange(3.0)[x[:1].long()].sum() > 1 else -x


def _by_reshape(x):
    return x if torch.ones(4)[: int(x[0])].reshape(2, -1).sum() > 1 else -x


def _by_split(x):
    return x if torch.ones(2).split([int(x[0]), 0])[0].sum() > 1 else -x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inner", [_by_cholesky, _by_index, _by_reshape, _by_split])
def test_a_miss_whose_values_cant_be_computed_is_a_miss(inner, backend) -> None:
    """A call that goes another way need not have the values of the first one."""

    def f(x):
        return inner(x) if x.sum() > 2 else x * 2

    compiled = tripwire.compile(f, backend=backend)
    for value in (2.0, 2.0, -7.0, -7.0, 2.0, 0.5, -7.0, 2.0):
        x = torch.full((2,), value)
        torch.testing.assert_close(compiled(x), f(x))
    assert tripwire.explain(compiled).hits >= 2
