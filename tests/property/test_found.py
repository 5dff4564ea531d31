"""What the law machine found, shrunk: each was a wrong result, or an object kept alive."""

import pytest
from twins import Call, Do, check_twins

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
}


@pytest.mark.parametrize("name", FOUND)
def test_twins_agree_about(name) -> None:
    program, writes = FOUND[name]
    check_twins(program, [CALL, *[step for text in writes for step in (Do(text), CALL)]])
