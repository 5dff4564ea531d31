"""What the law machine found, shrunk: each was a wrong result, or an object kept alive."""

import pytest
from twins import Call, Do, Figures, check_twins

CALL = Call("new(4), new(4)", times=3)
FOUND = {
    "list that is a context variable's default": (
        "v = contextvars.ContextVar('v', default=[2.0, 3.0])\n"
        "def call(x, y): return x * sum(v.get())",
        ["v.get().append(2.5)", "v.set([1.0])", "v.get().append(1.0)"],
    ),
    "parameter that a module without any gets": (
        "net = nn.Sequential(nn.ReLU())\n"
        "def call(x, y): return x + sum([p.sum() for p in net.parameters()])",
        ["net.weight = nn.Parameter(torch.ones(4))", "net[0].bias = nn.Parameter(torch.ones(2))"],
    ),
    "attribute that a function gets later": (
        "def helper(x): return x * 2\n"
        "def call(x, y): return helper(x) * getattr(helper, 'scale', 1.0)",
        ["helper.scale = 3.0", "del helper.scale"],
    ),
    "form of a tensor that no torch call gets": (
        "a = torch.ones(4)\ndef call(x, y): return x * a.shape[0] + (1 if a.requires_grad else 0)",
        [
            "a.unsqueeze_(0)",
            "a.requires_grad_()",
            "a = torch.ones(3)",
            "a.mul_(torch.ones(3, requires_grad=True))",
        ],
    ),
    "form of a parameter that no torch call gets": (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(4, 4)\n"
        "    def forward(self, x, y): return x * 2 if self.inner.weight.requires_grad else x\n"
        "call = Net()",
        ["call.requires_grad_(False)", "call.inner.weight.requires_grad = True"],
    ),
    "tensor below a cached property": (
        "class Config:\n"
        "    @functools.cached_property\n"
        "    def scale(self): return self.held\n"
        "o = Config()\no.held = torch.ones(4)\n"
        "def call(x, y): return x * 2 if o.scale.requires_grad else x",
        ["o.scale.requires_grad_()", "o.scale.requires_grad_(False)"],
    ),
    "list that somebody put into builtins": (
        "builtins.law = [2.0]\nmodes.callback(vars(builtins).pop, 'law')\n"
        "def call(x, y): return x * sum(law)",
        ["law.append(3.0)", "builtins.law = [4.0]", "law = [5.0]", "law.append(1.0)", "del law"],
    ),
    "object with slots that is let go": (
        "class Slotted: __slots__ = ('__weakref__', 'scale')\n"
        "o = Slotted()\no.scale = 2.0\n"
        "def call(x, y): return x * o.scale",
        ["w = weakref.ref(o); o = copy.copy(o)"],
    ),
    "order of a dict that the run writes to": (
        "d = {'a': 2.0}\n"
        "def call(x, y):\n"
        "    for key, value in d.items(): x = x * value + len(key)\n"
        "    d['last'] = x.detach()\n"
        "    return x",
        ["d['a'] = d.pop('a')", "d.pop('last')", "d['last'] = d.pop('last')"],
    ),
}


OF_ARGUMENTS = {
    "list of an argument's class": (
        "class Config: scales = [2.0, 3.0]\no = Config()\n"
        "def call(x, y, o): return x * sum(o.scales)",
        ["Config.scales.append(4.0)", "o.scales = [1.0]", "del o.scales"],
    ),
    "tensors of an argument's class": (
        "class Config: scales = [torch.ones(4), torch.ones(4)]\no = Config()\n"
        "def call(x, y, o): return x * o.scales[0] + o.scales[1]",
        ["Config.scales[0] = torch.zeros(4)", "Config.scales = [torch.ones(4)] * 2"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_twins_agree_about(name) -> None:
    program, writes = FOUND[name]
    check_twins(program, [CALL, *[step for text in writes for step in (Do(text), CALL)]])


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_twins_agree_about_the(name) -> None:
    program, writes = OF_ARGUMENTS[name]
    call = Call("new(4), new(4), o", times=3)
    check_twins(program, [call, *[step for text in writes for step in (Do(text), call)]])


def test_gradients_are_asked_for_without_grad_mode() -> None:
    program = "d = {'k': torch.ones(4)}\ndef call(x, y): return x * d['k'].requires_grad, d['k']\n"
    call = Call("new(4), new(4)", around="torch.no_grad()", times=3)
    check_twins(program, [call, Do("d['k'].mul_(torch.ones(4).requires_grad_())"), call])


def test_a_tensor_that_hides_a_class_attribute_is_compiled() -> None:
    figures = Figures()
    program = (
        "class Config: mask = None\no = Config()\no.mask = torch.ones(4)\n"
        "def call(x, y): return x if o.mask is None else x * o.mask\n"
    )
    check_twins(
        program, [CALL, Do("o.mask = torch.zeros(4)"), CALL, Do("del o.mask"), CALL], figures
    )
    assert figures.hits == 6
