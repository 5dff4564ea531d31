"""The grammar: programs that read state through slots, and what happens to them between calls.

A program is one callable in one of several forms, whose body makes a tensor `t` of its
arguments, statement by statement. Statements use a slot, use torch, have an effect, or wrap
others in control flow. Everything is text: what was drawn can be read, saved and run again.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from slots import COMMON, CONTENTS, PLACES, Place, Slot
from twins import Call, Do, Scenario, Step

FREE = (
    "t = t.sin()",
    "t = torch.relu(t)",
    "t = t.flip(-1)",
    "t = t + y",
    "t = x",
    "t = x * 1",
    "t = x.view_as(x)",
    "t = t.detach()",
    "t = t * torch.ones(4)",
    "t = t + torch.rand(4)",
    "t = F.dropout(t, 0.5)",
    "t = t.to(torch.float64)",
    "t = F.linear(t, torch.eye(4, dtype=t.dtype))",
    "t = t + t.numel()",
    "if t.dim() > 1:\n    t = t.sum(0)",
    "if x.sum() > 0:\n    t = t - 1",
    "t = t * (2 if bool(y[0] > 0) else 3)",
    "t = t.clone()\nt[..., 0] = 5.0",
    "v = t.clone()\nv[..., :2].mul_(2)\nt = v",
    "t = t.clone()\nt.mul_(2).add_(1)",
    "t = torch.cat([t, t], -1)[..., 2:6]",
    "a, b = t.chunk(2, -1)\nt = torch.cat([b, a], -1)",
    "t = t.unsqueeze(0).squeeze(0)",
    "t = torch.where(t > 0, t, -t)",
    "t = Double.apply(t)",
    "assert x.dim() < 4, 'too deep'",
    "if x.shape[0] == 3:\n    raise ValueError(f'{x.shape[0]} rows')",
    "t = t + sum([i * 2 for i in range(3)])",
    "t = t + math.floor(2.5)",
    "t = (lambda v, *rest, k=1: v * k + len(rest))(t, 1, 2, k=3)",
    "while t.dim() < 2:\n    t = t[None]",
)

BLOCKS = (
    "for _ in range(2):\n    %b",
    "for i in range(3):\n    if i == 1:\n        continue\n    %b",
    "with torch.no_grad():\n    %b",
    "with torch.enable_grad():\n    %b",
    "with torch.autocast('cpu', torch.bfloat16):\n    %b",
    "with contextlib.nullcontext():\n    %b",
    "with scope():\n    %b",
    "try:\n    %b\nexcept (LookupError, AttributeError, NameError, TypeError):\n    t = t - 1",
    "try:\n    %b\nfinally:\n    t = t * 2",
    "def inner(t):\n    %b\n    return t\nt = inner(t)",
    "def inner(t):\n    %b\n    return t\nt = sum([inner(t) for _ in range(2)])",
    "def turns(t):\n    %b\n    yield t\nt = next(turns(t))",
    "if x.shape[0] > 2:\n    %b",
    "if x.dim() == 1:\n    %b\nelse:\n    t = t + 3",
    "if torch.is_grad_enabled():\n    %b",
    "if y.sum() > 0:\n    %b",
)

# Outside of the call: what the block reads must be readable there.
HELPERS = (
    ("def h%n(t, x, y):\n    %b\n    return t", "t = h%n(t, x, y)"),
    ("def h%n(t, x, y):\n    %b\n    return t", "t = functools.partial(h%n, y=y)(t, x)"),
    (
        "class H%n:\n    def run(self, t, x, y):\n        %b\n        return t\nh%n = H%n()",
        "t = h%n.run(t, x, y)",
    ),
    (
        "class G%n:\n    def run(self, t, x, y):\n        %b\n        return t\n"
        "class H%n(G%n):\n    def run(self, t, x, y):\n        return super().run(t, x, y) + 1\n"
        "h%n = H%n()",
        "t = h%n.run(t, x, y)",
    ),
    (
        "class H%n(nn.Module):\n    def forward(self, t, x, y):\n        %b\n        return t\n"
        "h%n = H%n()",
        "t = h%n(t, x, y)",
    ),
    (
        "class H%n:\n    @staticmethod\n    def run(t, x, y):\n        %b\n        return t",
        "t = H%n.run(t, x, y)",
    ),
    (
        "def twice%n(f):\n    @functools.wraps(f)\n    def both(*a, **k):\n"
        "        return f(*a, **k) + f(*a, **k)\n    return both\n"
        "@twice%n\ndef h%n(t, x, y):\n    %b\n    return t",
        "t = h%n(t, x, y)",
    ),
)
HELPER_SITES = ("h%n = lambda t, x, y: t * 13", "H%n.run = lambda *a: a[-3] * 13")


@dataclass(frozen=True)
class Effect:
    """A statement that writes, and what else may write there."""

    setup: str
    statement: str
    sites: tuple[str, ...] = ()


_STATE = "class State:\n    n = 0\nstate = State()"
_STATES = ("state.n = 10", "state = State()", "state.__dict__.clear()", "State.n = 5")
EFFECTS = (
    Effect("log = []", "log.append(1.0)", ("log.clear()", "log = []", "log.append(None)")),
    Effect("log = []", "log.append(t.detach())", ("log.clear()", "log = []")),
    Effect("log = []", "log[:] = [t.detach(), len(t.shape)]", ("log.clear()",)),
    Effect(_STATE, "state.n += 1", (*_STATES, "state.n = 1.5", "state.n = None")),
    Effect(_STATE, "state.n += 1\nt = t * state.n", _STATES),
    Effect(_STATE, "State.n = State.n + 1", _STATES),
    Effect(_STATE, "state.last = t.detach()", _STATES),
    Effect(_STATE, "state.last, state.n = x, [t, 1.0]", _STATES),
    Effect(_STATE, "state.flag = not getattr(state, 'flag', False)", _STATES),
    Effect(
        _STATE, "if not hasattr(state, 'ready'):\n    state.ready = True\n    t = t + 1", _STATES
    ),
    Effect(_STATE, "state.tmp = 1\ndel state.tmp", _STATES),
    Effect("table = {}", "table['last'] = tuple(t.shape)", ("table.clear()", "table = {'b': 1}")),
    Effect("table = {'z': 1}", "table['t'] = t", ("table.clear()",)),
    Effect("table = {'z': 1}", "table.pop('z', None)", ("table['z'] = 2", "table = {'z': 1}")),
    Effect("seen = set()", "seen.add(x.dim())", ("seen.clear()", "seen = {1}")),
    Effect(
        "count = 0\ndef bump():\n    global count\n    count += 1",
        "bump()",
        ("count = 10", "count = 1.5", "bump = lambda: None"),
    ),
    Effect(
        "def counter():\n    n = 0\n    def tick():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return tick\ntick = counter()",
        "tick()",
        ("tick = counter()",),
    ),
    Effect("total = torch.zeros(4)", "total.add_(1)", ("total = torch.ones(4)", "total.zero_()")),
    Effect(
        "total = torch.zeros(4)",
        "with torch.no_grad():\n    total.add_(t.sum())",
        ("total = torch.ones(4, dtype=torch.float64)", "total.zero_()"),
    ),
    Effect("total = torch.zeros(4)", "total.add_(1)\nt = t + total", ("total = torch.ones(4)",)),
    Effect(
        "total = torch.zeros(4)\ndef add(v):\n    global total\n    total = total + v",
        "add(1.0)\nt = t + total",
        ("total = torch.ones(4)", "total = torch.ones(2, 4)"),
    ),
    Effect("", "x.add_(1)"),
    Effect("", "x.mul_(2)\nt = t + y"),
    Effect("", "y[0] = 3.0\nt = t + y"),
    Effect(
        "ring = collections.deque([0.0, 1.0], maxlen=2)",
        "ring.append(1.0)",
        ("ring.clear()", "ring.append(5.0)"),
    ),
)


@dataclass(frozen=True)
class Trait:
    """Something of a call's arguments or of torch's state that Python can ask for.

    A program that asks is called with each of the forms, and inside each of the contexts.
    """

    name: str
    statements: tuple[str, ...]
    forms: tuple[str, ...] = ("new(4), new(4)",)
    around: tuple[str, ...] = ("",)
    sites: tuple[str, ...] = ()


TRAITS = (
    Trait(
        "dtype",
        ("if x.dtype == torch.float64:\n    t = t + 1", "t = t * x.element_size()"),
        ("new(4), new(4)", "new(4, dtype=torch.float64), new(4)"),
    ),
    Trait(
        "shape",
        (
            "t = t * x.shape[0]",
            "t = t + x.numel()",
            "for row in x:\n    t = t + row.sum()",
            "t = t + len(x)",
            "t = t.reshape(x.shape[0], -1)",
            "if x.dim() == 1:\n    t = t * 2",
            "t = t + torch.ones(x.size(0), 4).sum()",
        ),
        ("new(2, 4), new(4)", "new(3, 4), new(4)", "new(4), new(4)", "new(0, 4), new(4)"),
    ),
    Trait(
        "stride",
        ("t = t + x.stride(0)", "if x.is_contiguous():\n    t = t * 2"),
        ("new(2, 4), new(4)", "new(4, 2).t(), new(4)", "new(1, 4).expand(2, 4), new(4)"),
    ),
    Trait("offset", ("t = t + x.storage_offset()",), ("new(8)[:4], new(4)", "new(8)[4:], new(4)")),
    Trait(
        "need for gradients",
        ("if x.requires_grad:\n    t = t * 2", "t = t + (x * 2).requires_grad"),
        ("new(4), new(4)", "new(4).requires_grad_(), new(4)"),
    ),
    Trait(
        "leaf",
        ("t = t * (2 if x.is_leaf else 3)",),
        ("new(4).requires_grad_(), new(4)", "new(4).requires_grad_() * 1, new(4)"),
    ),
    Trait(
        "class of a tensor",
        ("if isinstance(x, nn.Parameter):\n    t = t * 2",),
        ("new(4).requires_grad_(), new(4)", "nn.Parameter(new(4)), new(4)"),
    ),
    Trait(
        "attribute of a tensor",
        ("t = t * getattr(x, 'tag', 1.0)",),
        ("new(4), new(4)", "tagged(new(4), 2.0), new(4)", "tagged(new(4), 3.0), new(4)"),
    ),
    Trait(
        "object as argument",
        (
            "t = x.tag.apply(t)",
            "t = t * x.tag.bonus",
            "t = t * x.tag.value if hasattr(x.tag, 'extra') else t - x.tag.value",
        ),
        (
            "tagged(new(4), Low(2.0)), new(4)",
            "tagged(new(4), High(2.0)), new(4)",
            "tagged(new(4), Low(2.0, bonus=7.0)), new(4)",
            "tagged(new(4), Low(2.0, extra=1.0)), new(4)",
        ),
    ),
    Trait(
        "identity",
        ("if x is y:\n    t = t * 3", "t = t * (2 if y is not x else 5)"),
        ("new(4), new(4)", "(z := new(4)), z"),
    ),
    Trait(
        "memory",
        (
            "x.mul_(2)\nt = t + y",
            "y[0] = 3.0\nt = t + x * 2",
            "y.add_(x)\nx.add_(y)",
        ),
        (
            "new(4), new(4)",
            "(z := new(8))[:4], z[2:6]",
            "(z := new(4)), z.view(4)",
            "(z := new(4)), z.detach()",
        ),
    ),
    Trait(
        "value",
        (
            "if (x > 0).all():\n    t = t * 2",
            "if x.sum() > 0:\n    t = t - 1",
            "t = t * (2 if bool(x[..., 0].sum() > 0) else 3)",
            "t = t + int((x > 0).sum())",
            "while t.sum() < 0:\n    t = t + 10",
            "assert x.min() > -9, 'too small'",
            "t = t[t > 0].sum() + y",
            "if x.sum().item() > 0:\n    t = t + 1",
            "t = t * (x.max() > 0).item()",
        ),
        ("new(4).abs() + 1, new(4)", "-new(4).abs() - 1, new(4)"),
    ),
    Trait(
        "grad mode",
        ("if torch.is_grad_enabled():\n    t = t + 1", "t = t * (t * 2).requires_grad"),
        ("new(4).requires_grad_(), new(4)",),
        ("", "torch.no_grad()", "torch.enable_grad()"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"),
    ),
    Trait(
        "inference mode",
        (
            "if torch.is_inference_mode_enabled():\n    t = t + 1",
            "t = t * (1 if (t * 2).is_inference() else 2)",
        ),
        around=("torch.no_grad()", "torch.inference_mode()"),  # they differ in nothing else
    ),
    Trait(
        "autocast",
        (
            "if torch.is_autocast_enabled('cpu'):\n    t = t + 1",
            "if (t @ torch.eye(4)).dtype == torch.bfloat16:\n    t = t * 2",
            "t = t * (2 if torch.get_autocast_dtype('cpu') == torch.float16 else 1)",
        ),
        around=(
            "",
            "torch.autocast('cpu', torch.bfloat16)",
            "torch.autocast('cpu', torch.float16)",
        ),
    ),
    Trait(
        "default dtype",
        (
            "if torch.get_default_dtype() == torch.float64:\n    t = t + 1",
            "if torch.ones(4).dtype == torch.float64:\n    t = t + 1",
            "t = t * torch.tensor(2.0).element_size()",
        ),
        sites=("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    ),
    Trait(
        "other flags",
        (
            "if torch.are_deterministic_algorithms_enabled():\n    t = t + 1",
            "t = t + len(torch.get_float32_matmul_precision())",
        ),
        sites=(
            "torch.use_deterministic_algorithms(True)",
            "torch.use_deterministic_algorithms(False)",
            "torch.set_float32_matmul_precision('high')",
        ),
    ),
    Trait(
        "tables of a module",
        ("t = layer(t)", "t = t * layer.weight.sum()", "t = t + layer.count"),
        sites=(
            "layer.weight = nn.Parameter(torch.full((4,), 5.0))",
            "layer._parameters['weight'] = nn.Parameter(torch.full((4,), 7.0))",
            "layer.count = torch.ones(())",
            "layer._buffers['count'] = torch.full((), 3.0)",
        ),
    ),
    Trait(
        "bases of a class",
        ("t = leaf.apply(t)", "t = t * Leaf.bonus", "t = t + len(Leaf.__mro__)"),
        sites=("Leaf.__bases__ = (High,)", "Leaf.__bases__ = (Low,)"),
    ),
    Trait(
        "order of a dict",
        (
            "for v in ranks.values():\n    t = t * 2 + v",
            "t = t * next(iter(ranks.values()))",
            "t = t + list(ranks).index('a')",
        ),
        sites=("ranks.move_to_end('a')", "ranks.move_to_end('b')", "ranks['a'] = ranks.pop('a')"),
    ),
    Trait(
        "context variable",
        ("t = t * knob.get()", "if knob.get() > 2:\n    t = t + 1"),
        sites=("knob.set(3.0)", "knob.set(2.0)", "knob.set(7.0)"),
    ),
    Trait(
        "end of a list",
        ("t = t * rows[-1][-1]", "rows[-1].append(1.0)\nt = t * len(rows[-1])"),
        sites=("rows[1][0] = 3.0", "rows.append([5.0])", "rows[-1].append(7.0)", "rows.reverse()"),
    ),
    Trait(
        "builtins",
        ("t = t + len([1, 2]) * abs(-2)", "t = t * max(1, 2) + round(2.6)"),
        sites=(
            "len = lambda v: 7",
            "abs = lambda v: 9.0",
            "max = lambda *a, **k: 5.0",
            "round = lambda v: 4",
            "del len, abs, max, round",
            "__builtins__ = {**vars(__import__('builtins'))}",
        ),
    ),
)

RETURNS = (
    "t",
    "t, x",
    "{'t': t, 'shape': x.shape}",
    "[t, t]",
    "x",
    "t.view(-1)",
    "t, t.detach()",
    "t.unbind(-1)",
    "collections.OrderedDict(y=y, t=t)",
    "(t, y[:2])",
)
VECTORS = (
    "new(4)",
    "new(2, 4)",
    "new(3, 4)",
    "new(4, 4)",
    "new(4, dtype=torch.float64)",
    "new(4, 2).t()",
    "new(8)[::2]",
    "new(8)[4:]",
    "new(1, 4).expand(2, 4)",
    "new(4).requires_grad_()",
    "new(4).requires_grad_() * 1",
    "nn.Parameter(new(4))",
    "new(4).abs() + 1",
    "-new(4).abs() - 1",
    "torch.ones(4, dtype=torch.int64)",
)
AROUND = (
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.autocast('cpu', torch.bfloat16)",
    "torch.enable_grad()",
)
GENERAL_SITES = ("gc.collect()", "call = copy.copy(call)", "call = copy.deepcopy(call)")
MODULE_SITES = (
    "call = pickle.loads(pickle.dumps(call))",
    "call.train(not call.training)",
    "handle = call.register_forward_hook(lambda m, a, o: (o, 1))",
    "handle = me.register_forward_pre_hook(lambda m, a: (a[0] + 1, *a[1:]))",
    "handle.remove()",
    "Net.forward = lambda self, x, y, *a, **k: x + y",
    "me.forward = lambda x, y, *a, **k: x - y",
    "del me.forward",
    "call.double()",
)
METHOD_SITES = ("me.__class__ = type('Net2', (Net,), {})", "me = copy.deepcopy(me); call = me.run")

FORMS = ("function", "closure", "module", "method")


@dataclass
class Program:
    """A program that is being written."""

    form: str
    slots: list[Slot]
    traits: list[Trait]
    before: list[str] = field(default_factory=list)  # definitions ahead of the call
    sites: list[str] = field(default_factory=list)
    deletes: list[tuple[Slot, str]] = field(default_factory=list)
    helpers: int = 0


def _fits(place: Place, form: str) -> bool:
    match place.scope:
        case "closure":
            return form == "closure"
        case "self":
            return form in ("module", "method")
        case "default":
            return form == "function"
    return True


def _weight(place: Place) -> int:
    """Places that stand for a whole row of the channel table come more often."""
    return 4 if place.name == "argument" else 2 if place.scope or place.name == "slot" else 1


_PLACES = {form: [p for p in PLACES if _fits(p, form) for _ in range(_weight(p))] for form in FORMS}
_CONTENTS = {p.name: [c for c in CONTENTS if not p.only or c.name in p.only] for p in PLACES}


def _draw_subjects(draw: st.DrawFn, form: str) -> Program:
    """What the program is about: slots, or traits, or both."""
    n_slots, n_traits = draw(
        st.sampled_from([(1, 0), (0, 1), (2, 0), (0, 3), (3, 0), (1, 2), (2, 1), (0, 2)])
    )
    slots = []
    for number in range(n_slots):
        place = draw(st.sampled_from(_PLACES[form]))
        content = draw(st.sampled_from(_CONTENTS[place.name]))
        if slots and not place.only and draw(st.integers(0, 2)) == 2:
            content = slots[0].content
        slots.append(Slot(number, place, content))
    return Program(form, slots, [draw(st.sampled_from(TRAITS)) for _ in range(n_traits)])


def _write_block(draw: st.DrawFn, program: Program, slots: list[Slot], depth: int) -> str:
    return "\n".join(
        _write_statement(draw, program, slots, depth) for _ in range(draw(st.integers(1, 2)))
    )


def _write_use(draw: st.DrawFn, program: Program, slots: list[Slot]) -> str:
    """A statement about one of the program's subjects."""
    subject = draw(st.sampled_from([*slots, *program.traits]))
    twins = [slot for slot in slots if slot is not subject and _are_alike(slot, subject)]
    if twins and twins[0].content.changes and draw(st.booleans()):
        return f"if {subject.fill('%r')} is {twins[0].fill('%r')}:\n    t = t * 5"
    return _write_use_of(draw, subject)


def _are_alike(slot: Slot, subject: Slot | Trait) -> bool:
    """Whether two slots can hold one object."""
    return isinstance(subject, Slot) and slot.content is subject.content


def _write_use_of(draw: st.DrawFn, subject: Slot | Trait) -> str:
    if isinstance(subject, Trait):
        return draw(st.sampled_from(subject.statements))
    return subject.fill(draw(st.sampled_from(subject.content.uses)))


def _write_statement(draw: st.DrawFn, program: Program, slots: list[Slot], depth: int) -> str:
    kind = draw(st.integers(0, 9 if depth else 5))
    if kind <= 3 and (slots or program.traits):
        return _write_use(draw, program, slots)
    if kind <= 5:
        text = draw(st.sampled_from(FREE))
        if "Double" in text:
            _add(program, _DOUBLE)
        return text
    if kind == 6:
        own = [slot.fill(text) for slot in slots for text in slot.content.effects]
        if own and draw(st.booleans()):
            return draw(st.sampled_from(own))
        effect = draw(st.sampled_from(EFFECTS))
        _add(program, effect.setup)
        program.sites += effect.sites
        return effect.statement
    if kind <= 8:
        text = draw(st.sampled_from(BLOCKS))
        if "scope()" in text:
            _add(program, _SCOPE)
        return _nest(text, _write_block(draw, program, slots, depth - 1))
    definition, use = draw(st.sampled_from(HELPERS))
    anywhere = [slot for slot in slots if not slot.place.scope]
    block = _write_block(draw, program, anywhere, depth - 1)
    number, program.helpers = str(program.helpers), program.helpers + 1
    program.before.append(_nest(definition, block).replace("%n", number))
    program.sites += [site.replace("%n", number) for site in HELPER_SITES]
    return use.replace("%n", number)


_DOUBLE = (
    "class Double(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, t):\n"
    "        return t * 2\n    @staticmethod\n    def backward(ctx, g):\n        return g * 3"
)
_SCOPE = "@contextlib.contextmanager\ndef scope():\n    with torch.no_grad():\n        yield"


def _add(program: Program, definition: str) -> None:
    if definition and definition not in program.before:
        program.before.append(definition)


def _nest(text: str, block: str) -> str:
    """Put a block where `%b` stands, indented alike."""
    lines = []
    for line in text.splitlines():
        if line.strip() == "%b":
            lines.append(textwrap.indent(block, line.removesuffix("%b")))
        else:
            lines.append(line)
    return "\n".join(lines)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A program, and steps."""
    form = draw(st.sampled_from(FORMS))
    program = _draw_subjects(draw, form)
    block = [_write_use_of(draw, subject) for subject in [*program.traits, *program.slots]]
    for _ in range(draw(st.integers(0, 3))):
        statement = _write_statement(draw, program, program.slots, 2)
        block.insert(draw(st.integers(0, len(block))), statement)
    first = [draw(st.sampled_from(slot.content.values[:3])) for slot in program.slots]
    body = "\n".join(["t = x", *block, f"return {_write_return(draw, program)}"])
    used = [slot for slot in program.slots if slot.fill("%r") in body + "\n".join(program.before)]
    setups = [
        slot.fill(slot.place.setup, value)
        for slot, value in zip(program.slots, first, strict=True)
        if slot in used and slot.place.setup
    ]
    values = {slot.number: value for slot, value in zip(program.slots, first, strict=True)}
    text = "\n".join([*setups, *program.before, _write_call(form, used, values, body)]) + "\n"
    steps = _draw_steps(draw, program, used, values)
    return Scenario(_add_common(text, steps) + text, tuple(steps))


def _write_return(draw: st.DrawFn, program: Program) -> str:
    if program.slots and draw(st.integers(0, 5)) == 5:
        return f"(t, {draw(st.sampled_from(program.slots)).fill('%r')})"
    return draw(st.sampled_from(RETURNS))


def _add_common(text: str, steps: list[Step]) -> str:
    text += "\n".join(map(repr, steps))
    return "".join(
        part
        for names, part in COMMON.items()
        if any(re.search(rf"\b{name}\b", text) for name in names)
    )


def _write_call(form: str, slots: list[Slot], values: dict[int, str], body: str) -> str:
    parameters = ["x", "y"]
    parameters += [f"p{s.number}" for s in slots if s.place.scope == "argument"]
    defaults = [f"e{s.number}={values[s.number]}" for s in slots if s.place.scope == "default"]
    if defaults:
        parameters += ["*", *defaults]
    mine = [s for s in slots if s.place.scope == "self"]
    own = [s for s in mine if not s.place.setup]
    bases = [f"Base{s.number}" for s in mine if s.place.setup]
    inits = [f"        self.s{s.number} = {values[s.number]}" for s in own]
    indented = textwrap.indent(body, "    ")
    listed = ", ".join(parameters)
    match form:
        case "function":
            return f"def call({listed}):\n{indented}\nplain = call"
        case "closure":
            cells = [s for s in slots if s.place.scope == "closure"]
            names = [f"c{s.number}" for s in cells]
            lines = [f"def build({', '.join(names)}):", f"    def call({listed}):"]
            lines.append(textwrap.indent(indented, "    "))
            given = ["call"]
            for s in cells:
                n = s.number
                lines.append(f"    def get{n}(): return c{n}")
                lines.append(f"    def put{n}(v):\n        nonlocal c{n}\n        c{n} = v")
                given += [f"get{n}", f"put{n}"]
            lines.append(f"    return {', '.join(given)}{',' if len(given) == 1 else ''}")
            made = ", ".join(values[s.number] for s in cells)
            targets = ", ".join(given) + ("," if len(given) == 1 else "")
            lines.append(f"{targets} = build({made})")
            return "\n".join(lines)
        case "module":
            head = f"class Net({', '.join([*bases, 'nn.Module'])}):\n    def __init__(self):\n"
            start = "\n".join(["        super().__init__()", *inits])
            run = f"    def forward(self, {listed}):\n{textwrap.indent(indented, '    ')}"
            return f"{head}{start}\n{run}\ncall = Net()\nme = call"
    head = f"class Net({', '.join(bases) or 'object'}):\n    def __init__(self):\n"
    start = "\n".join(["        pass", *inits])
    run = f"    def run(self, {listed}):\n{textwrap.indent(indented, '    ')}"
    return f"{head}{start}\n{run}\nme = Net()\ncall = me.run"


def _draw_steps(
    draw: st.DrawFn, program: Program, slots: list[Slot], values: dict[int, str]
) -> list[Step]:
    """Calls, and between them one change at a time: of what is called with, or of the world."""
    forms = _draw_forms(draw, program, slots)
    around = [context for trait in program.traits for context in trait.around]
    if len(set(around)) < 2:
        around = ["", *AROUND] if draw(st.integers(0, 3)) == 3 else [""]
    sites = [site for trait in program.traits for site in trait.sites]
    if program.form == "module":
        program.sites += MODULE_SITES
    if program.form == "method":
        program.sites += METHOD_SITES
    changes = ["other"]
    changes += ["form"] * 3 * (len(forms) > 1) + ["around"] * 2 * (len(around) > 1)
    changes += ["slot"] * 5 * bool(slots) + ["site"] * 3 * bool(sites)
    call = Call(forms[0], around[0], draw(st.integers(2, 4)))
    steps: list[Step] = [call]
    for _ in range(draw(st.integers(1, 5))):
        match draw(st.sampled_from(changes)):
            case "form":
                others = [form for form in forms if form != call.arguments]
                call = replace(call, arguments=draw(st.sampled_from(others or forms)))
            case "around":
                others = [context for context in around if context != call.around]
                call = replace(call, around=draw(st.sampled_from(others)))
            case "slot":
                steps += _draw_write(draw, slots, values, call)
            case "site":
                steps.append(Do(draw(st.sampled_from(sites))))
            case _:
                steps.append(Do(draw(st.sampled_from([*GENERAL_SITES, *program.sites]))))
        threaded = draw(st.integers(0, 11)) == 11
        steps.append(replace(call, times=draw(st.integers(3, 8)), thread=threaded))
    return steps


def _draw_forms(draw: st.DrawFn, program: Program, slots: list[Slot]) -> list[str]:
    """Arguments to call with: in all the forms of a trait, or of one tensor or two."""
    if program.traits:
        several = [trait for trait in program.traits if len(trait.forms) > 1]
        vectors = list(draw(st.sampled_from(several or program.traits)).forms)
    else:
        some = draw(st.lists(st.sampled_from(VECTORS), min_size=1, max_size=2))
        vectors = [f"{vector}, new(4)" for vector in some]
    if any(slot.place.scope == "argument" for slot in slots):
        vectors = [vectors[0]] * 3
    return [_draw_arguments(draw, vector, slots) for vector in vectors]


def _draw_write(
    draw: st.DrawFn, slots: list[Slot], values: dict[int, str], call: Call
) -> list[Step]:
    """A write to a slot; what was deleted comes back after a call."""
    slot = draw(st.sampled_from(slots))
    place, content = slot.place, slot.content
    options = [(text, "write") for text in place.writes]
    options += [(text, "change") for text in content.changes]
    options += [(text, "other") for text in place.others]
    options += [(text, "delete") for text in place.deletes]
    if not options:
        return []
    text, kind = draw(st.sampled_from(options))
    if kind == "write":
        others = [other for other in slots if other is not slot and _are_alike(other, slot)]
        found = [other.fill("%o") for other in others]  # one object in two places
        return [Do(slot.fill(text, draw(st.sampled_from([*content.values, *found]))))]
    steps: list[Step] = [Do(slot.fill(text))]
    if kind == "delete":
        steps.append(replace(call, times=2))
        if place.writes:
            steps.append(Do(slot.fill(draw(st.sampled_from(place.writes)), values[slot.number])))
    return steps


def _draw_arguments(draw: st.DrawFn, vectors: str, slots: list[Slot]) -> str:
    given = [vectors]
    for slot in slots:
        if slot.place.scope == "argument":
            given.append(_draw_argument(draw, slot))
    return ", ".join(given)


def _draw_argument(draw: st.DrawFn, slot: Slot) -> str:
    name = f"p{slot.number}"
    if slot.place.name == "argument" and draw(st.booleans()):
        return f"{name}={draw(st.sampled_from(slot.content.values))}"
    return f"{name}=a{slot.number}"
