"""ExecutionRecord and its recorder: what PyTorch has, finished. To open a record runs nothing."""

from __future__ import annotations

import functools
import io
import math
import os.path
import sys
import types
from typing import Any

import pytest
import torch
from replaying import fail
from torch import nn

import tripwire
from tripwire import DummyModule, ExecutionRecord, ExecutionRecorder, ModuleRecord
from tripwire.recording.capture.record import DummyModule as Dummy
from tripwire.recording.capture.record import load_record

RAN: list[str] = []
LIMIT = 3


class Loud:
    """Says so when anything of it runs."""

    def __init__(self):
        self.x = 1

    def __getattribute__(self, name):
        RAN.append(name)
        return object.__getattribute__(self, name)

    def __repr__(self):
        RAN.append("repr")
        return "loud"

    def __reduce__(self):
        RAN.append("reduce")
        return (RAN.append, ("unpickled",))


def area(radius, loud=None):
    if radius > LIMIT:
        raise ValueError(radius)
    return math.pi * radius


def recorder_of(function: Any) -> ExecutionRecorder:
    return ExecutionRecorder(code=function.__code__, closure=function.__closure__ or ())


# --- load ---


def test_load_runs_nothing_and_imports_nothing(tmp_path) -> None:
    path = tripwire.record_call(tmp_path)(area, 5, Loud())
    RAN.clear()
    modules = set(sys.modules)
    events: list[str] = []
    sys.addaudithook(lambda name, args: events.append(name) if watching else None)
    watching = True
    record = load_record(path)
    watching = False
    assert RAN == []
    assert set(sys.modules) == modules
    assert not {"exec", "import", "compile", "marshal.loads", "code.__new__"} & set(events)
    assert record.args[0] == 5


def test_a_loaded_record_shows_code_variables_and_globals(tmp_path) -> None:
    record = load_record(tripwire.record_call(tmp_path)(area, 5))
    assert isinstance(record, ExecutionRecord)
    assert record.code.name == "area"
    assert record.locals == {"radius": 5}
    assert record.globals["LIMIT"] == 3
    assert "RAN" not in record.globals
    assert record.args == (5,)
    assert record.kwargs == {}
    assert "def area(radius, loud=None):" in record.sources[__file__]
    assert record.manifest.outcome.message == "5"


def test_a_loaded_record_shows_the_closure(tmp_path) -> None:
    weight = torch.tensor([2.0])

    def scaled(x):
        return x * weight

    record = load_record(tripwire.record_call(tmp_path)(scaled, torch.ones(1)))
    assert len(record.closure) == 1


def test_a_loaded_record_of_a_librarys_module_shows_its_state(tmp_path) -> None:
    record = load_record(tripwire.record_call(tmp_path)(nn.Linear(2, 3), torch.ones(2)))
    assert record.locals["input"].tolist() == [1.0, 1.0]
    assert record.code is None  # torch's own
    assert record.call.attributes["in_features"] == 2


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale + LIMIT


class Deeper(Scaled):
    pass


@pytest.mark.parametrize(
    "call",
    [Scaled(2.0), Deeper(2.0), Scaled(2.0).forward, tripwire.compile(Scaled(2.0), backend="eager")],
    ids=["module", "inherited", "method", "compiled"],
)
def test_a_loaded_record_of_a_module_shows_code_and_globals(tmp_path, call) -> None:
    record = load_record(tripwire.record_call(tmp_path)(call, torch.ones(2)))
    assert record.code.name == "Scaled.forward"
    assert "x * self.scale" in record.code.source
    assert record.globals == {"LIMIT": 3}
    assert record.locals["x"].tolist() == [1.0, 1.0]


def test_a_loaded_record_can_be_dumped_again(tmp_path) -> None:
    path = tripwire.record_call(tmp_path / "a.rec")(area, 2)
    load_record(path).dump(tmp_path / "again.rec")
    assert (tmp_path / "again.rec").read_bytes() == path.read_bytes()
    with open(path, "rb") as file:
        record = ExecutionRecord.load(file)
    path.unlink()
    out = io.BytesIO()
    record.dump(out)
    assert out.getvalue() == (tmp_path / "again.rec").read_bytes()


def test_a_record_without_code_is_not_dumped(tmp_path) -> None:
    assert type(fail(ExecutionRecord(None).dump, tmp_path / "x.rec")) is TypeError


def test_a_file_that_is_no_record_is_a_bad_record(tmp_path) -> None:
    (tmp_path / "x.rec").write_bytes(b"no")
    assert isinstance(fail(load_record, tmp_path / "x.rec"), tripwire.BadRecord)


# --- dump ---


def collected() -> ExecutionRecord:
    recorder = recorder_of(area)
    recorder.add_local_var("radius", 2)
    recorder.add_global_var("LIMIT", LIMIT)
    recorder.add_global_var("math", math)
    recorder.record_module_access(math, "pi", math.pi)
    recorder.code_options["co_name"] = "area"
    recorder.builtins["len"] = len
    return recorder.get_record()


def test_a_record_goes_to_a_path_and_comes_back(tmp_path) -> None:
    path = tmp_path / "area.rec"
    collected().dump(path)
    record = ExecutionRecord.load(path)
    assert record.code.name == "area"
    assert record.locals == {"radius": 2}
    assert record.globals["LIMIT"] == 3
    assert record.code_options == {"co_name": "area"}
    assert record.builtins.keys() == {"len"}


def test_a_record_goes_to_a_file_and_comes_back() -> None:
    file = io.BytesIO()
    collected().dump(file)
    file.seek(0)
    assert ExecutionRecord.load(file).locals == {"radius": 2}


def test_a_record_goes_to_a_file_that_was_written_to_before() -> None:
    file = io.BytesIO()
    collected().dump(file)
    size = file.tell()
    assert size == len(file.getvalue())


def test_a_dump_never_writes_over_a_file(tmp_path) -> None:
    path = tmp_path / "area.rec"
    path.write_bytes(b"mine")
    collected().dump(path)
    assert path.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dumped_record_replays_with_the_locals_that_are_arguments(tmp_path) -> None:
    path = tmp_path / "area.rec"
    recorder = recorder_of(area)
    recorder.add_local_var("radius", 2)
    recorder.add_local_var("loud", None)
    recorder.add_global_var("LIMIT", LIMIT)
    recorder.add_global_var("math", math)
    recorder.record_module_access(math, "pi", math.pi)
    recorder.get_record().dump(path)
    assert tripwire.replay(path, trust=True) == area(2)
    assert load_record(path).args == (2, None)


def takes_all(a, /, b, *rest, c, d=4, **named):
    return a, b, rest, c, d, named


def test_arguments_of_every_kind_are_found_among_the_locals(tmp_path) -> None:
    recorder = recorder_of(takes_all)
    known = {"a": 1, "b": 2, "rest": (3, 4), "c": 5, "d": 6, "named": {"e": 7}}
    for name, value in known.items():
        recorder.add_local_var(name, value)
    recorder.get_record().dump(tmp_path / "x.rec")
    found = tripwire.replay(tmp_path / "x.rec", trust=True)
    assert found == takes_all(1, 2, 3, 4, c=5, d=6, e=7)


def test_a_dumped_record_without_an_argument_says_which_is_missing(tmp_path) -> None:
    recorder_of(area).get_record().dump(tmp_path / "x.rec")
    error = fail(tripwire.replay, tmp_path / "x.rec", trust=True)
    assert isinstance(error, TypeError)
    assert "radius" in str(error)


# --- the recorder ---


def test_a_plain_global_is_kept_as_it_is() -> None:
    recorder = recorder_of(area)
    recorder.add_global_var("LIMIT", 3)
    recorder.add_local_var("x", [1])
    assert recorder.globals == {"LIMIT": 3}
    assert recorder.locals == {"x": [1]}


def test_a_module_becomes_one_shared_record_per_name() -> None:
    recorder = recorder_of(area)
    recorder.add_global_var("m", math)
    recorder.add_local_var("n", math)
    assert isinstance(recorder.globals["m"], ModuleRecord)
    assert recorder.globals["m"] is recorder.locals["n"]
    assert recorder.name_to_modrec == {"math": recorder.globals["m"]}
    record = recorder.get_record()
    assert record.globals["m"] is record.locals["n"]


def test_a_local_module_lands_among_the_globals() -> None:
    recorder = recorder_of(area)
    recorder.add_local_mod("m", math)
    assert recorder.locals == {}
    assert isinstance(recorder.globals["m"], ModuleRecord)


def test_only_modules_are_local_modules() -> None:
    with pytest.raises(TypeError, match="not a module"):
        recorder_of(area).add_local_mod("m", 3)


def test_an_access_of_an_unknown_module_is_kept_only_if_it_gave_a_module() -> None:
    recorder = recorder_of(area)
    recorder.record_module_access(math, "pi", math.pi)
    assert recorder.name_to_modrec == {}
    recorder.record_module_access(os, "path", os.path)
    assert recorder.name_to_modrec.keys() == {"os", os.path.__name__}


def test_accessed_attributes_come_out_nested() -> None:
    recorder = recorder_of(area)
    recorder.add_global_var("os", os)
    recorder.record_module_access(os, "path", os.path)
    recorder.record_module_access(os.path, "sep", os.path.sep)
    recorder.record_module_access(os, "name", os.name)
    dummy = recorder.get_record().globals["os"]
    assert isinstance(dummy, DummyModule)
    assert (dummy.name, dummy.__name__) == (os.name, "os")
    assert isinstance(dummy.path, DummyModule)
    assert dummy.path.sep == os.path.sep
    assert not hasattr(dummy, "getcwd")


def test_modules_that_lead_in_circles_resolve() -> None:
    a, b = types.ModuleType("a"), types.ModuleType("b")
    recorder = recorder_of(area)
    recorder.add_global_var("a", a)
    recorder.record_module_access(a, "b", b)
    recorder.record_module_access(b, "a", a)
    dummy = recorder.get_record().globals["a"]
    assert dummy.b.a is dummy


def test_torch_is_known_as_such() -> None:
    recorder = recorder_of(area)
    recorder.add_global_var("torch", torch)
    recorder.record_module_access(torch, "nn", nn)
    dummy = recorder.get_record().globals["torch"]
    assert dummy.is_torch
    assert dummy.value is torch
    assert dummy.nn.is_torch


def test_an_attribute_called_like_a_field_doesnt_take_its_place() -> None:
    shop = types.ModuleType("shop")
    recorder = recorder_of(area)
    recorder.add_global_var("shop", shop)
    recorder.record_module_access(shop, "name", "corner")
    recorder.record_module_access(shop, "value", 3)
    dummy = recorder.get_record().globals["shop"]
    assert dummy.__name__ == "shop"
    assert (dummy.name, dummy.value) == ("corner", 3)


def test_a_dummy_shows_its_name() -> None:
    assert "shop" in repr(Dummy("shop"))
    assert Dummy("shop").__name__ == "shop"


def uses_modules(x):
    return shop.price * x + shop.inner.tax  # noqa: F821


def test_dummies_come_back_from_a_file_with_their_attributes(tmp_path) -> None:
    shop, inner = types.ModuleType("shop"), types.ModuleType("shop.inner")
    recorder = recorder_of(uses_modules)
    recorder.add_global_var("shop", shop)
    recorder.record_module_access(shop, "price", 5)
    recorder.record_module_access(shop, "unread", 6)
    recorder.record_module_access(shop, "inner", inner)
    recorder.record_module_access(inner, "tax", 2)
    path = tmp_path / "m.rec"
    recorder.get_record().dump(path)
    found = load_record(path).globals["shop"]
    assert found.name == "shop"
    assert found.attributes["price"] == 5
    assert found.attributes["inner"].attributes == {"tax": 2}


def test_the_closure_is_kept(tmp_path) -> None:
    limit = [7]

    def check(x):
        return x < limit[0]

    path = tmp_path / "c.rec"
    recorder_of(check).get_record().dump(path)
    (cell,) = load_record(path).closure
    assert cell.parts == [[7]]


# --- one model ---


def largest(x):
    """Names builtins, in a function inside it too, and attributes that are called like some."""
    parts = [len(row) for row in x.tolist()] if x.sum() else sorted(x.all())
    return max(parts) + LIMIT


class Largest(nn.Module):
    def forward(self, x):
        return largest(x) if isinstance(x, torch.Tensor) else abs(x)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (largest, {"len", "sorted", "max"}),
        (functools.partial(largest), {"len", "sorted", "max"}),
        (functools.cache(largest), {"len", "sorted", "max"}),
        (tripwire.record_on_error("unused")(largest), {"len", "sorted", "max"}),
        (Largest(), {"isinstance", "abs"}),
        (Largest().forward, {"isinstance", "abs"}),
        (tripwire.compile(Largest(), backend="eager"), {"isinstance", "abs"}),
        (nn.ReLU(), set()),
    ],
    ids=["function", "partial", "cached", "recorded", "module", "method", "compiled", "library"],
)
def test_a_loaded_record_shows_the_builtins_that_its_code_names(tmp_path, call, names) -> None:
    record = load_record(tripwire.record_call(tmp_path)(call, torch.ones(1, 2)))
    assert record.builtins.keys() == names
    assert (record.code is None) == (not names)
    assert all(repr(record.builtins[name]) == f"<builtins.{name}>" for name in names)


def spells(x):
    return ascii(x)


def test_what_somebody_put_into_builtins_is_among_the_globals(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("builtins.ascii", lambda x: "mine")
    record = load_record(tripwire.record_call(tmp_path)(spells, 2))
    assert (record.globals.keys(), record.builtins) == ({"ascii"}, {})


def test_a_loaded_record_shows_what_a_replay_needs_beside_the_call(tmp_path, monkeypatch) -> None:
    def draws(x):
        return x * torch.rand(2) + math.floor(2.5)

    monkeypatch.setattr(math, "floor", lambda x: 7)
    compiled = tripwire.compile(draws, backend=lambda graph, inputs: graph)
    record = load_record(tripwire.record_call(tmp_path)(compiled, torch.ones(2)))
    assert record.generators.keys() == {"torch"}
    assert [name for _, name, _ in record.patches] == ["floor"]
    assert record.backend.name.endswith("<lambda>")


def test_a_builtin_of_ones_own_counts_at_replay(tmp_path) -> None:
    recorder = recorder_of(largest)
    recorder.add_local_var("x", torch.ones(1, 2))
    recorder.add_global_var("LIMIT", LIMIT)
    recorder.builtins.update(len=lambda row: 40, max=max)
    recorder.get_record().dump(tmp_path / "x.rec")
    assert load_record(tmp_path / "x.rec").builtins.keys() == {"len", "max"}
    assert tripwire.replay(tmp_path / "x.rec", trust=True) == 43


def test_a_call_can_be_put_into_a_record_by_hand(tmp_path) -> None:
    ExecutionRecord(None, call=area, args=(2,)).dump(tmp_path / "x.rec")
    assert tripwire.replay(tmp_path / "x.rec", trust=True) == area(2)
    assert load_record(tmp_path / "x.rec").code.name == "area"


def scaled_by(weight):
    def scaled(x):
        return max(x.tolist()[0]) * weight * LIMIT

    return scaled


@pytest.mark.parametrize(
    "call",
    [largest, Largest(), Largest().forward, functools.partial(largest), scaled_by(2.0)],
    ids=["function", "module", "method", "partial", "closure"],
)
def test_a_recorder_of_a_call_collects_what_the_record_of_that_call_shows(tmp_path, call) -> None:
    x = torch.ones(1, 2)
    collected = ExecutionRecorder.of_call(call, (x,)).get_record()
    collected.dump(tmp_path / "by_hand.rec")
    by_hand = load_record(tmp_path / "by_hand.rec")
    recorded = load_record(tripwire.record_call(tmp_path)(call, x))
    assert by_hand.code.name == recorded.code.name == collected.code.co_qualname
    assert len(by_hand.closure) == len(recorded.closure) == len(collected.closure)
    assert by_hand.locals.keys() == recorded.locals.keys() == collected.locals.keys()
    assert by_hand.builtins.keys() == recorded.builtins.keys() == collected.builtins.keys()
    assert by_hand.globals.keys() == recorded.globals.keys()
    assert tripwire.replay(tmp_path / "by_hand.rec", trust=True) == call(x)


def looks_into_modules(x):
    def inner(y):
        return torch.nn.functional.relu(y) * math.pi

    return inner(x) + len(SCALES) * math.tau


SCALES = [1.0]


def test_a_file_lists_what_the_code_takes_from_python_modules(tmp_path) -> None:
    by_hand = ExecutionRecorder.of_call(looks_into_modules, (torch.ones(1),)).get_record()
    by_hand.dump(tmp_path / "by_hand.rec")
    recorded = tripwire.record_call(tmp_path / "recorded.rec")(looks_into_modules, torch.ones(1))
    for path in (recorded, tmp_path / "by_hand.rec"):
        found = load_record(path)
        assert found.accessed == {"math": ("pi", "tau"), "torch": ("nn.functional.relu",)}
        assert set(found.builtins) == {"len"}
        found.dump(tmp_path / f"again-{path.name}")
        assert load_record(tmp_path / f"again-{path.name}").accessed == found.accessed


def test_modules_in_a_closure_are_listed_by_the_names_that_the_code_has_for_them(tmp_path) -> None:
    import math as numbers

    def looking(x):
        return later if x is None else x * numbers.pi

    recorder = ExecutionRecorder.of_call(looking, (torch.ones(1),))
    recorder.get_record().dump(tmp_path / "by_hand.rec")
    tripwire.record_call(tmp_path / "recorded.rec")(looking, torch.ones(1))
    for name in ("by_hand.rec", "recorded.rec"):
        assert load_record(tmp_path / name).accessed == {"numbers": ("pi",)}
    later = 1.0


def test_the_recorder_of_a_call_has_records_of_the_modules_that_its_code_looks_into() -> None:
    recorder = ExecutionRecorder.of_call(looks_into_modules, (torch.ones(1),))
    assert set(recorder.globals) == {"torch", "math", "SCALES"}
    assert recorder.globals["math"] is recorder.name_to_modrec["math"]
    assert recorder.name_to_modrec["math"].accessed_attrs == {"pi": math.pi, "tau": math.tau}
    nested = recorder.name_to_modrec["torch.nn"].accessed_attrs["functional"]
    assert nested is recorder.name_to_modrec["torch.nn.functional"]
    assert nested.accessed_attrs == {"relu": torch.nn.functional.relu}
    shown = recorder.get_record().globals
    assert shown["SCALES"] is SCALES
    assert (shown["math"].pi, shown["torch"].nn.functional.relu) == (
        math.pi,
        torch.nn.functional.relu,
    )


NAMELESS = types.ModuleType("gone")
NAMELESS.scale = 2.0
del NAMELESS.__name__


def uses_nameless(x):
    return x * NAMELESS.scale


def test_a_module_without_a_name_is_no_hindrance(tmp_path) -> None:
    recorder = ExecutionRecorder.of_call(uses_nameless, (1.0,))
    assert recorder.globals == {"NAMELESS": NAMELESS}
    assert recorder.name_to_modrec == {}


def test_the_record_of_a_call_and_its_file_have_the_same_globals(tmp_path) -> None:
    collected = ExecutionRecorder.of_call(looks_into_modules, (torch.ones(1),)).get_record()
    loaded = load_record(tripwire.record_call(tmp_path)(looks_into_modules, torch.ones(1)))
    assert loaded.globals.keys() == collected.globals.keys()
    collected.dump(tmp_path / "by_hand.rec")
    again = tripwire.replay(tmp_path / "by_hand.rec", trust=True)
    torch.testing.assert_close(again, looks_into_modules(torch.ones(1)))


def test_a_replay_needs_nothing_that_a_record_only_shows(tmp_path) -> None:
    record = ExecutionRecord(None, call=area, args=(2,))
    record.builtins["gone"] = os.getcwd
    record.dump(tmp_path / "x.rec")
    shown = load_record(tmp_path / "x.rec").builtins["gone"]
    assert (shown.module, shown.name) == ("posix", "getcwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("posix.getcwd")
        assert tripwire.replay(tmp_path / "x.rec", trust=True) == area(2)


SHOP = types.ModuleType("corner_shop")
SHOP.price, SHOP.unread = 5, 6


class Buying(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.unread = 2, 3

    def forward(self, x):
        return x * SHOP.price * self.count


def buys(x):
    return x * SHOP.price * 2


@pytest.mark.parametrize("call", [buys, Buying(), Buying().forward], ids=["f", "module", "method"])
def test_a_loaded_record_shows_the_attributes_of_modules_that_code_names(tmp_path, call) -> None:
    record = load_record(tripwire.record_call(tmp_path)(call, torch.ones(2)))
    assert record.globals["SHOP"].attributes == {"price": 5}


def test_a_loaded_record_shows_the_attributes_of_an_nn_module_that_code_names(tmp_path) -> None:
    record = load_record(tripwire.record_call(tmp_path)(Buying(), torch.ones(2)))
    assert record.call.attributes["count"] == 2
    assert "unread" not in record.call.attributes
