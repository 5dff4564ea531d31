"""Names, scopes and source ranges: a node is told in the user's own words."""

import functools

import torch
from support import quiet_trace
from torch import nn
from torch.nn import functional as F

import tripwire
from tripwire import Tracer

X = torch.ones(2, 2)


def names(fn, *args):
    trace = quiet_trace(fn, *(args or (X,)))
    return [row.name for row in trace if row.node.op not in ("placeholder", "get_attr")]


# --- names -------------------------------------------------------------------------------------


def test_names_come_from_the_users_variables() -> None:
    def f(x):
        hidden = F.relu(x)
        hidden = hidden + 1
        result = hidden * 2
        return result

    assert names(f) == ["hidden", "hidden_1", "result"]


def test_unpacked_results_take_their_own_names() -> None:
    def f(x):
        left, right = x.split(1)
        best, where = x.max(dim=0)
        return left + right + best + where

    assert [n for n in names(f) if not n.startswith("add")] == [
        "split",
        "left",
        "right",
        "max_1",
        "best",
        "where",
    ]


def test_a_returned_value_takes_the_name_at_the_caller() -> None:
    def helper(x):
        return F.gelu(x)

    class Net(nn.Module):
        def forward(self, x):
            return helper(x)

    net = Net()

    def f(x):
        activated = helper(x)
        outcome = net(activated)
        return outcome

    assert names(f) == ["activated", "outcome"]


def test_values_without_a_variable_take_the_functions_name() -> None:
    assert names(lambda x: torch.sin(x.cos()) + 1) == ["cos", "sin", "add"]
    assert names(lambda x: (x.T, x[0], 1 - x)) == ["T", "getitem", "rsub"]


def test_names_of_attributes_globals_and_cells() -> None:
    class Box:
        pass

    box = Box()
    seen = None

    def f(x):
        nonlocal seen
        box.kept = x + 1
        seen = x * 2
        return box.kept + seen

    assert names(f)[:2] == ["kept", "seen"]


def test_a_naming_function_can_be_set() -> None:
    def f(x):
        y = x + 1
        return y * 2

    trace = Tracer(name_fn=lambda t: f"value{t.dim()}").trace(f, X)
    assert [n.name for n in trace.graph.nodes][1:3] == ["value2", "value2_1"]


# --- scopes ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 2)

    def forward(self, x):
        return self.proj(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.act(self.attn(x))
        return self.act(x) + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x)


def test_scopes_follow_module_calls() -> None:
    trace = quiet_trace(Net(), X)
    scopes = [row.scope for row in trace if row.node.op != "placeholder"]
    assert scopes == [
        "blocks.0.attn.proj",
        "blocks.0.act",
        "blocks.0.act@1",
        "blocks.0",
        "blocks.1.attn.proj",
        "blocks.1.act",
        "blocks.1.act@1",
        "blocks.1",
        "heads.a",
    ]


NET = Net()


def test_scopes_of_modules_in_globals_closures_and_arguments() -> None:
    net = Net()
    assert quiet_trace(lambda x: NET(x), X).rows[-1].scope == "NET.heads.a"
    assert quiet_trace(lambda x: net(x), X).rows[-1].scope == "net.heads.a"
    assert quiet_trace(lambda x, model: model(x), X, net).rows[-1].scope == "model.heads.a"


def test_a_module_made_by_the_run_is_named_by_its_class() -> None:
    def f(x):
        return nn.ReLU()(x)

    assert quiet_trace(f, X).rows[-1].scope == "/ReLU"


# --- ranges ------------------------------------------------------------------------------------


def test_a_range_is_the_whole_stack_innermost_first() -> None:
    trace = quiet_trace(Net(), X)
    frames = trace.find("linear").where.frames
    assert frames[0].function == "Linear.forward"
    assert frames[0].library
    users = [frame.function for frame in frames if not frame.library]
    assert users[:3] == ["Attention.forward", "Block.forward", "Net.forward"]
    assert users[3:5] == ["quiet_trace", "test_a_range_is_the_whole_stack_innermost_first"]
    assert not any("tripwire/src" in frame.file for frame in frames)
    assert str(frames[0]).endswith("): Linear.forward")


def test_the_place_is_the_users_line_with_columns() -> None:
    def f(x):
        return (x + 1).sin() * 2

    trace = quiet_trace(f, X)
    for name, text in (("add", "x + 1"), ("sin", "(x + 1).sin()"), ("mul", "(x + 1).sin() * 2")):
        place = trace.find(name).where.place
        with open(place.file) as file:
            line = file.read().splitlines()[place.line - 1]
        assert line[slice(*place.columns)] == text


def test_columns_count_characters_not_bytes() -> None:
    def f(x):
        größe = {"ß": x}
        return größe["ß"] + x.cos()  # ä

    place = quiet_trace(f, X).find("cos").where.place
    with open(place.file, encoding="utf-8") as file:
        line = file.read().splitlines()[place.line - 1]
    assert line[slice(*place.columns)] == "x.cos()"


def test_a_call_over_several_lines_has_no_columns() -> None:
    def f(x):
        return torch.add(
            x,
            1,
        )

    assert quiet_trace(f, X).find("add").where.place.columns is None


def test_code_without_a_file_has_a_place() -> None:
    space = {}
    exec("def f(x):\n    return x + 1\n", space)
    place = quiet_trace(space["f"], X).find("add").where.place
    assert (place.file, place.line, place.text) == ("<string>", 2, "")


def test_decorators_and_library_frames_are_kept() -> None:
    def loud(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args)

        return wrapper

    @loud
    def f(x):
        return F.dropout(x, 0.1)

    frames = quiet_trace(f, X).find("dropout").where.frames
    assert [frame.library for frame in frames[:3]] == [True, False, False]
    assert frames[3].function == "quiet_trace"


# --- printing ----------------------------------------------------------------------------------


def test_a_trace_prints_one_row_per_node() -> None:
    def scale(x):
        doubled = x * 2
        return doubled

    trace = tripwire.trace(scale, X)
    title, header, first, second = str(trace).splitlines()
    assert title == "trace of scale: 1 ops, 1 inputs, 1 scopes, 0 branches"
    assert header.split() == ["name", "op", "value", "scope", "where"]
    assert first.split() == ["x", "input", "float32[2,", "2]", "-", "-"]
    assert second.startswith("doubled  .mul(x, 2)")
    assert second.endswith(f"test_places.py:{scale.__code__.co_firstlineno + 1}")
    assert trace.format(source=True).splitlines()[-1].endswith("doubled = x * 2")


def test_a_graph_module_runs_prints_and_lints() -> None:
    trace = tripwire.trace(Net(), X)
    module = trace.graph_module
    assert module is trace.graph_module
    assert "def forward(self, x, blocks_0_attn_proj_weight" in module.code
    module.graph.lint()
    flat = trace.fetch(trace.bind(X))
    (result,) = module(*flat)
    torch.testing.assert_close(result, trace.result)
