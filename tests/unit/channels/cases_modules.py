"""nn.Module: parameters, buffers, submodules, modes, hooks, parametrizations."""

from unit.channels.channel import Family

FAMILY = Family("modules")
case = FAMILY.case

_LINEAR = """
call = nn.Linear(4, 4)
other = nn.Linear(4, 4)
"""
_SCALED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("bias", torch.ones(4))
    def forward(self, x):
        bias = 0 if self.bias is None else self.bias
        return x.to(self.weight.dtype) * self.weight + bias
call = Net()
"""

# --- parameters ---------------------------------------------------------------------------------

case(
    "parameter replaced",
    _LINEAR,
    writes=["call.weight = nn.Parameter(torch.eye(4))", "call._parameters['bias'] = None"],
    unrelated=["call.note = 1", "call.register_buffer('unused', torch.ones(1))"],
)
case(
    "parameter changed in place",
    _LINEAR,
    writes=["with torch.no_grad(): call.weight.mul_(2)", "nn.init.zeros_(call.bias)"],
)
case(
    "parameter's data swapped",
    _LINEAR,
    writes=[
        "call.weight.data = torch.eye(4)",
        "call.weight.data = torch.eye(4)[:2]; call.bias = None",
    ],
)
case(
    "parameter's data of another shape and dtype",
    _SCALED,
    writes=["call.weight.data = torch.ones(1)", "call.weight.data = torch.ones(4).double()"],
)
case(
    "requires_grad flipped",
    _LINEAR,
    writes=["call.requires_grad_(False)", "call.bias.requires_grad = True"],
)
case(
    "weights tied, untied",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        def forward(self, x):
            return self.b(self.a(x)), self.a.weight is self.b.weight
    call = Net()
    """,
    writes=["call.b.weight = call.a.weight", "call.b.weight = nn.Parameter(torch.eye(4))"],
)
case(
    "moved to another dtype",
    _SCALED,
    writes=["call.to(torch.float64)", "call.half()", "call.float()"],
)
case(
    "state loaded",
    _LINEAR,
    writes=[
        "call.load_state_dict(other.state_dict())",
        "call.load_state_dict({'weight': torch.eye(4), 'bias': torch.ones(4)}, assign=True)",
    ],
)
case(
    "parameter deleted, registered again",
    _SCALED,
    writes=["del call.weight", "call.register_parameter('weight', nn.Parameter(torch.ones(4)))"],
)
case(
    "own dict over a parameter",
    _SCALED,
    writes=["call.__dict__['weight'] = torch.full((4,), 7.0)", "del call.__dict__['weight']"],
)
case(
    "parameters() looped over",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(4))
        def forward(self, x):
            for name, p in self.named_parameters():
                x = x * p + len(name)
            return x
    call = Net()
    """,
    writes=["call.second = nn.Parameter(torch.full((4,), 3.0))", "del call.a"],
)
case(
    "ParameterList and ParameterDict",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(4) * 2])
            self.shifts = nn.ParameterDict({"a": torch.ones(4)})
        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return x + self.shifts["a"]
    call = Net()
    """,
    writes=[
        "call.scales.append(torch.ones(4) * 3)",
        "call.shifts['a'] = nn.Parameter(torch.zeros(4))",
    ],
)
case(
    "gradient read by the program",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
        def forward(self, x):
            return x * self.weight if self.weight.grad is None else x - self.weight.grad
    call = Net()
    """,
    writes=[
        "call.weight.grad = torch.ones(4)",
        "call.weight.grad.add_(1)",
        "call.weight.grad = None",
    ],
)

# --- buffers ------------------------------------------------------------------------------------

case(
    "buffer replaced",
    _SCALED,
    writes=[
        "call.bias = torch.full((4,), 3.0)",
        "call.bias = None",
        "call.register_buffer('bias', torch.full((4,), 5.0))",
    ],
    unrelated=["call.register_buffer('unused', torch.ones(4))"],
)
case("buffer deleted", _SCALED, writes=["del call.bias"])
case(
    "buffer changed in place",
    _SCALED,
    writes=["call.bias.add_(1)", "call.bias.data = torch.arange(4.0)", "call.bias.resize_(1)"],
)
case(
    "buffer dict written directly",
    _SCALED,
    writes=["call._buffers['bias'] = torch.zeros(4)"],
)

# --- submodules ---------------------------------------------------------------------------------

_TWO = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
call = Net()
"""
case(
    "submodule replaced",
    _TWO,
    writes=[
        "call.a = nn.Identity()",
        "call.b = nn.Linear(4, 2)",
        "del call.b; call.b = torch.neg",
    ],
    unrelated=["call.c = nn.Identity()"],
)
case("submodule removed", _TWO, writes=["del call.b", "call.b = nn.Tanh()"])
case(
    "submodules looped over",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x
    call = Net()
    """,
    writes=["call.add_module('second', nn.Tanh())", "del call.first"],
)
case(
    "named_modules() looped over",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Tanh())
        def forward(self, x):
            for name, module in self.named_modules():
                x = x * len(name) + module.training
            return x
    call = Net()
    """,
    writes=["call.inner.append(nn.ReLU())", "call.inner.eval()", "call.inner = nn.Identity()"],
)
case(
    "ModuleList changed",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    call = Net()
    """,
    writes=[
        "call.layers.append(nn.Tanh())",
        "call.layers.insert(0, nn.ReLU())",
        "call.layers.pop(1)",
        "del call.layers[0]",
        "call.layers[0] = nn.Sigmoid()",
    ],
)
case(
    "ModuleList sliced and indexed",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
            self.depth = 2
        def forward(self, x):
            for layer in self.layers[: self.depth]:
                x = layer(x)
            return self.layers[-1](x)
    call = Net()
    """,
    writes=["call.depth = 1", "call.layers.append(nn.ReLU())", "call.layers[0] = nn.Sigmoid()"],
)
case(
    "Sequential changed",
    """
    call = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    """,
    writes=[
        "call.append(nn.Linear(4, 2))",
        "call[1] = nn.Tanh()",
        "call.insert(0, nn.ReLU())",
        "del call[0]",
        "call.pop(-1)",
    ],
    unrelated=["call.note = 'seen'"],
)
case(
    "ModuleDict changed",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleDict({"act": nn.ReLU()})
            self.choice = "act"
        def forward(self, x):
            x = self.steps[self.choice](x)
            return self.steps["last"](x) if "last" in self.steps else x
    call = Net()
    """,
    writes=[
        "call.steps['act'] = nn.Tanh()",
        "call.steps['last'] = nn.Linear(4, 4)",
        "call.choice = 'last'",
        "call.steps.pop('last'); call.choice = 'act'",
    ],
)
case(
    "attributes of library modules",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.LayerNorm(4), nn.LeakyReLU(0.1)
        def forward(self, x):
            return self.act(self.norm(x))
    call = Net()
    """,
    writes=["call.norm.eps = 1.0", "call.act.negative_slope = 0.5"],
    unrelated=["call.norm.note = 1"],
)
case(
    "submodule shared, then split",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)
        def forward(self, x):
            return self.b(self.a(x))
    call = Net()
    """,
    writes=["call.b = nn.Linear(4, 4)", "with torch.no_grad(): call.a.weight.mul_(2)"],
)
case(
    "modules kept in a plain list",
    """
    LAYERS = [nn.Linear(4, 4), nn.ReLU()]
    def call(x):
        for layer in LAYERS:
            x = layer(x)
        return x
    """,
    writes=["LAYERS[1] = nn.Tanh()", "LAYERS.pop(0)", "LAYERS[0].forward = torch.neg"],
)

# --- training and evaluation --------------------------------------------------------------------

case(
    "train() and eval() with dropout",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(1.0)
        def forward(self, x):
            return self.drop(x)
    call = Net()
    """,
    writes=[
        "call.eval()",
        "call.train()",
        "call.drop.eval()",
        "call.drop.train()",
        "call.drop.p = 0.0",
    ],
)
case(
    "random dropout",
    """
    call = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    """,
    writes=["call[1].p = 0.25", "call.eval()"],
)
case(
    "batch norm: statistics in training, constants in evaluation",
    """
    call = nn.BatchNorm1d(4)
    """,
    inputs=["m"],
    writes=["call.eval()", "call.running_mean.add_(1)", "call.train()", "call.momentum = 0.5"],
    state="call.running_mean.tolist(), call.num_batches_tracked.item()",
)
case(
    "training read by the program",
    """
    class Net(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x
    call = Net()
    """,
    writes=["call.eval()", "call.training = True"],
)

# --- hooks --------------------------------------------------------------------------------------

case(
    "forward hook added, removed",
    _TWO,
    writes=[
        "handle = call.a.register_forward_hook(lambda module, args, out: out * 2)",
        "handle.remove()",
    ],
)
case(
    "forward hook on the compiled module",
    _TWO,
    writes=[
        "handle = call.register_forward_hook(lambda module, args, out: out * 2)",
        "first = call.register_forward_hook(lambda m, args, out: out + 1, prepend=True)",
        "handle.remove()",
    ],
)
case(
    "forward pre-hook that changes the input",
    _TWO,
    writes=[
        "handle = call.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))",
        "handle.remove()",
    ],
)
case(
    "state that a hook reads",
    _TWO
    + """
SCALE = 2.0
call.a.register_forward_hook(lambda module, args, out: out * SCALE)
""",
    writes=["SCALE = 3.0"],
)
case(
    "hook with keywords",
    """
    class Inner(nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
        def forward(self, x):
            return self.inner(x, scale=2.0)
    call = Net()
    def double(module, args, kwargs):
        return args, {"scale": kwargs["scale"] * 2}
    """,
    writes=["call.inner.register_forward_pre_hook(double, with_kwargs=True)"],
)
case(
    "hook on all modules",
    _TWO
    + """
from torch.nn.modules.module import register_module_forward_hook as on_forward
from torch.nn.modules.module import register_module_forward_pre_hook as on_call
""",
    writes=[
        "handle = on_forward(lambda module, args, out: out * 2)",
        "handle.remove()",
        "handle = on_call(lambda module, args: (args[0] + 1,))",
        "handle.remove()",
    ],
)
case(
    "backward hook added, removed",
    _TWO,
    writes=[
        "handle = call.a.register_full_backward_hook(lambda module, given, grads: None)",
        "handle.remove()",
    ],
    changes=False,
)

# --- parametrizations ---------------------------------------------------------------------------

case(
    "parametrization registered, removed",
    """
    from torch.nn.utils import parametrize
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
        def forward(self, x):
            return self.inner(x)
    call = Net()
    """,
    writes=[
        "parametrize.register_parametrization(call.inner, 'weight', Double())",
        "parametrize.remove_parametrizations(call.inner, 'weight', leave_parametrized=False)",
    ],
)
case(
    "parametrization's own state",
    """
    from torch.nn.utils import parametrize
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
        def forward(self, weight):
            return weight * self.scale
    call = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(call[0], "weight", Scale())
    """,
    writes=[
        "call[0].parametrizations.weight[0].scale = 3.0",
        "with torch.no_grad(): call[0].parametrizations.weight.original.mul_(2)",
    ],
)
