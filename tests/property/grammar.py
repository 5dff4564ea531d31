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
from property import traits
from property.corners import CORNERS
from property.delays import BACKS, BACKS_AROUND, DELAYS
from property.habits import HABITS
from property.layers import LAYERS
from property.slots import COMMON, CONTENTS, PLACES, Content, Place, Slot
from property.traits import FOUR, Trait
from property.twins import Back, Call, Do, Scenario, Step

from tripwire.reading.reader import Reader, Twin

# Productions that break a law today. They are drawn only where asked for: `machine.py --about`.
_AWAITING_REPAIR: frozenset[str] = frozenset()

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
    "t = t + x.split(max(1, x.shape[0] // 2))[0].sum()",
    "t = t / (10 / (x.shape[0] - 1) if x.shape[0] > 1 else 1)",
    "t = t * (x.shape[0] % 2 + x.shape[-1] // 3) - x.size(0) * 0.1",
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
    "if x.dim() > 7:\n    %b",  # never: what is read there isn't read
)


@dataclass(frozen=True)
class Helper:
    """A definition around a block, outside of the call: what it reads must be readable there."""

    name: str
    definition: str
    use: str


HELPERS = (
    Helper("helper function", "def h%n(t, x, y):\n    %b\n    return t", "t = h%n(t, x, y)"),
    Helper(
        "partial",
        "def h%n(t, x, y):\n    %b\n    return t",
        "t = functools.partial(h%n, y=y)(t, x)",
    ),
    Helper(
        "method of an object",
        "class H%n:\n    def run(self, t, x, y):\n        %b\n        return t\nh%n = H%n()",
        "t = h%n.run(t, x, y)",
    ),
    Helper(
        "inherited method",
        "class G%n:\n    def run(self, t, x, y):\n        %b\n        return t\n"
        "class H%n(G%n):\n    def run(self, t, x, y):\n        return super().run(t, x, y) + 1\n"
        "h%n = H%n()",
        "t = h%n.run(t, x, y)",
    ),
    Helper(
        "nn.Module",
        "class H%n(nn.Module):\n    def forward(self, t, x, y):\n        %b\n        return t\n"
        "h%n = H%n()",
        "t = h%n(t, x, y)",
    ),
    Helper(
        "static method",
        "class H%n:\n    @staticmethod\n    def run(t, x, y):\n        %b\n        return t",
        "t = H%n.run(t, x, y)",
    ),
    Helper(
        "decorated function",
        "def twice%n(f):\n    @functools.wraps(f)\n    def both(*a, **k):\n"
        "        return f(*a, **k) + f(*a, **k)\n    return both\n"
        "@twice%n\ndef h%n(t, x, y):\n    %b\n    return t",
        "t = h%n(t, x, y)",
    ),
    Helper(
        "forward of a Function",
        "class H%n(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, t, x, y):\n"
        "        t = t * 1\n        %b\n        return t * 1\n"
        "    @staticmethod\n    def backward(ctx, g): return g * 3, None, None",
        "t = H%n.apply(t, x, y)",
    ),
    Helper(
        "backward of a Function",
        "class H%n(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, t, x, y):\n"
        "        ctx.save_for_backward(x, y)\n        return t * 2\n"
        "    @staticmethod\n    def backward(ctx, t):\n        x, y = ctx.saved_tensors\n"
        "        %b\n        return t * 1, None, None",
        "t = H%n.apply(t, x, y)",
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
    Effect(
        "counts = [0, 5]",
        "counts[0] += 1\nt = t * counts[0] + counts[1]",
        ("counts[0] = 7", "counts[1] = 2.5", "counts = [0, 5]", "counts.append(1)", "counts.pop()"),
    ),
    Effect(
        "pair = (0, 1.0)\ndef advance():\n    global pair\n    pair = (pair[0] + 1, pair[1] * 0.5)",
        "advance()\nt = t * pair[1] + pair[0]",
        ("pair = (3, 2.0)", "pair = (1, 2)", "pair = (2, 4.0, 1)"),
    ),
    Effect(
        "bag = {'n': 0, 'w': [0.5, 2]}",
        "bag['n'] += 1\nbag['w'][0] *= 0.5\nt = t * bag['w'][0] + bag['n']",
        ("bag['n'] = 9", "bag['w'] = [1.5, 1]", "bag = {'n': 1, 'w': [2.0, 3]}", "bag['n'] = 0.5"),
    ),
    Effect(
        "cache = [torch.zeros(4), torch.ones(4)]",
        "cache[0] = cache[0] + t.detach().sum()\nt = t + (cache[0] * cache[1]).sum()",
        ("cache[0] = torch.ones(4)", "cache[1] = torch.zeros(4)", "cache.reverse()"),
    ),
    Effect(
        "queue = collections.deque([1.0, 2.0], 2)",
        "queue.append(queue[-1] * 0.5 + 1)\nt = t * queue[0]",
        ("queue.extend([3.0, 4.0])", "queue[0] = 2"),
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
    "new(1, 4)",
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

# What AOTAutograd makes of a graph differs from the graph: aliases, writes in place, autograd.
BACKENDS = ("eager", "eager", "aot_eager")
DRAWS = "random numbers behind aot_eager"
_DRAWS = re.compile(r"rand|[dD]ropout")
# AOTAutograd may save a weight where plain autograd saves what was made of it: docs/laws.md.
_UNSEEN = re.compile(r"\.data\b|Do\(text='[^']*\.(double|float|half)\(\)|call\.(double|float)\(\)")

# Names in code that doesn't run: writes behind them retire nothing, and nothing is refused.
CALM = "names that aren't read"
_IS_PRECISE = Reader is not Twin  # which tells reads by the names in code
_ATTRIBUTES = (
    "attribute",
    "deep attribute",
    "self",
    "class attribute",
    "class attribute, inherited",
    "metaclass",
    "base class",
    "property",
    "slot",
    "dataclass",
    "nn.Module attribute",
)
_NOT_RUN = (
    "if quiet.on:\n    %b",
    "if not quiet.on:\n    t = t * 2\nelse:\n    %b",
    "while quiet.on:\n    %b",
    "if x.dim() > 7:\n    %b",
    "def unused(t):\n    %b\n    return t",
    "try:\n    t = t * 2\nexcept ValueError:\n    %b",
    "for _ in range(x.dim() - 1):\n    %b",
    "if quiet.on and helper(t) is None:\n    t = t + 1",
)
# Which object a global names, and of which class and bases it is, counts wherever code names it.
_OF_STRUCTURE = re.compile(r"^\w+%n = |__bases__|__class__|__dict__ = ")
_NOT_COMPILED = (
    "t = t * random.random()",
    "t = t * np.sqrt(2) * random.random()",
    "t = t + time.time()",
    "print(t)",
    "t = t * len(open('/proc/self/status').read())",
)
_RUN = ("t = t * 2", "t = t.sin()", "t = t + y", "t = t.view(-1)")
_QUIET = (
    "import random, time\nimport numpy as np\nclass Quiet: on = False\nquiet = Quiet()\n"
    "def helper(t):\n    return quiet.scale * random.random()"
)

TRAITS = (*traits.TRAITS, *CORNERS, *HABITS, *DELAYS, *LAYERS)
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
_ANY = {form: [p for p in PLACES if _fits(p, form) and not p.only] for form in FORMS}
_DRAWN = [c for c in CONTENTS if c.name not in _AWAITING_REPAIR]
_CONTENTS = {p.name: [c for c in _DRAWN if not p.only or c.name in p.only] for p in PLACES}
_TRAITS = [t for t in TRAITS if t.name not in _AWAITING_REPAIR]
_HELPERS = [h for h in HELPERS if h.name not in _AWAITING_REPAIR]
_CALM = {form: [p for p in _ANY[form] if p.name in _ATTRIBUTES] for form in FORMS}
PRODUCTIONS = {one.name: one for one in (*HELPERS, *TRAITS, *CONTENTS)}
assert len(PRODUCTIONS) == len(HELPERS) + len(TRAITS) + len(CONTENTS)
NAMES = (*PRODUCTIONS, CALM, DRAWS)  # of all that can be asked for, or await repair
assert frozenset(NAMES) >= _AWAITING_REPAIR


def _draw_subjects(draw: st.DrawFn, form: str, about: str) -> Program:
    """What the program is about: slots, or traits, or both."""
    wanted = PRODUCTIONS.get(about)
    if isinstance(wanted, Trait):
        return Program(form, [], [wanted])
    mixed = [(1, 0), (0, 1), (2, 0), (0, 3), (3, 0), (1, 2), (2, 1), (0, 2)]
    n_slots, n_traits = draw(st.sampled_from([(1, 0), (2, 0)] if wanted else mixed))
    slots = []
    for number in range(n_slots):
        place = draw(st.sampled_from(_PLACES[form]))
        content = draw(st.sampled_from(_CONTENTS[place.name]))
        if isinstance(wanted, Content):
            place, content = draw(st.sampled_from(_ANY[form])), wanted
        if slots and not place.only and draw(st.integers(0, 2)) == 2:
            content = slots[0].content
        slots.append(Slot(number, place, content))
    return Program(form, slots, [draw(st.sampled_from(_TRAITS)) for _ in range(n_traits)])


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
    return _write_use_of(draw, program, subject)


def _are_alike(slot: Slot, subject: Slot | Trait) -> bool:
    """Whether two slots can hold one object."""
    return isinstance(subject, Slot) and slot.content is subject.content


def _write_use_of(draw: st.DrawFn, program: Program, subject: Slot | Trait) -> str:
    if isinstance(subject, Slot):
        return subject.fill(draw(st.sampled_from(subject.content.uses)))
    _add(program, subject.setup)
    statement = draw(st.sampled_from(subject.statements))
    return _write_helper(program, *subject.helper, statement) if subject.helper else statement


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
    return _draw_helper(draw, program, draw(st.sampled_from(_HELPERS)), slots, depth)


def _draw_helper(
    draw: st.DrawFn, program: Program, helper: Helper, slots: list[Slot], depth: int
) -> str:
    anywhere = [slot for slot in slots if not slot.place.scope]
    block = _write_block(draw, program, anywhere, depth - 1)
    return _write_helper(program, helper.definition, helper.use, block)


def _write_helper(program: Program, definition: str, use: str, block: str) -> str:
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
def scenarios(draw: st.DrawFn, about: str = "", backends: tuple[str, ...] = BACKENDS) -> Scenario:
    """A program, and steps. It is about a production, or about any."""
    form = draw(st.sampled_from(FORMS))
    if about == CALM or (_IS_PRECISE and _is_drawn(draw, CALM)):
        return _draw_calm(draw, form, backends)
    program = _draw_subjects(draw, form, about)
    subjects = [*program.traits, *program.slots]
    block = [_write_use_of(draw, program, subject) for subject in subjects]
    if isinstance(wanted := PRODUCTIONS.get(about), Helper):
        block.append(_draw_helper(draw, program, wanted, program.slots, 2))
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
    text = _add_common(text, steps) + text
    backend = draw(st.sampled_from(backends))
    if DRAWS in _AWAITING_REPAIR and about != DRAWS and _DRAWS.search(text):
        backend = "eager"
    if "autograd.Function" in text and _DRAWS.search(text):  # a known gap, see docs/laws.md
        backend = "eager"
    backs = [step for step in steps if isinstance(step, Back)]
    if backs and _UNSEEN.search(f"{text}{steps}"):
        backend = "eager"
    if any("autocast" in back.around for back in backs):  # a known gap, too: also of strides
        backend = "eager"
    return Scenario(text, tuple(steps), backend)


def _is_drawn(draw: st.DrawFn, name: str) -> bool:
    return name not in _AWAITING_REPAIR and draw(st.integers(0, 15)) == 15


def _draw_calm(draw: st.DrawFn, form: str, backends: tuple[str, ...]) -> Scenario:
    """A program whose calls all hit but the first, whatever is written behind unread names."""
    slots = [
        Slot(number, draw(st.sampled_from(_CALM[form])), draw(st.sampled_from(CONTENTS)))
        for number in range(draw(st.integers(1, 2)))
    ]
    values = {slot.number: draw(st.sampled_from(slot.content.values)) for slot in slots}
    body = [draw(st.sampled_from(_RUN)) for _ in range(draw(st.integers(1, 2)))]
    for slot in slots:
        texts = [*slot.content.uses, *slot.content.effects]
        block = slot.fill(draw(st.sampled_from(texts)))
        if draw(st.booleans()):
            block += "\n" + draw(st.sampled_from(_NOT_COMPILED))
        body.append(_nest(draw(st.sampled_from(_NOT_RUN)), block))
    setups = [_QUIET, *[s.fill(s.place.setup, values[s.number]) for s in slots]]
    call = _write_call(form, slots, values, "\n".join(["t = x", *body, "return t"]))
    kept = [slot.fill(slot.place.path) for slot in slots]  # the death of an object counts, too
    text = "\n".join([*setups, call, f"kept = [{', '.join(kept)}]"]) + "\n"
    turn = Call("new(4), new(4)", times=2)
    steps: list[Step] = [turn]
    for _ in range(draw(st.integers(1, 4))):
        slot = draw(st.sampled_from(slots))
        value = draw(st.sampled_from(slot.content.values))
        writes = [text for text in slot.place.writes if not _OF_STRUCTURE.search(text)]
        steps += [Do(slot.fill(draw(st.sampled_from(writes)), value)), turn]
    backend = draw(st.sampled_from(backends))
    return Scenario(_add_common(text, steps) + text, tuple(steps), backend, calm=True)


def _write_return(draw: st.DrawFn, program: Program) -> str:
    if made := [text for trait in program.traits for text in trait.returns]:
        return draw(st.sampled_from(made))
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
    late = any(trait.late for trait in program.traits) or draw(st.integers(0, 5)) == 5
    forms = _draw_forms(draw, program, slots)
    if late:
        forms = [form.replace(FOUR[0], "new(4).requires_grad_(), new(4)", 1) for form in forms]
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
    call = Call(forms[0], around[0], draw(st.integers(2, 4)), late=late)
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
        if late:
            steps += _draw_backs(draw, replace(call, thread=threaded))
        else:
            steps.append(replace(call, times=draw(st.integers(3, 8)), thread=threaded))
    return steps


def _draw_backs(draw: st.DrawFn, call: Call) -> list[Step]:
    """Backwards of earlier calls, and calls, in any order: what was drawn before is in between."""
    steps: list[Step] = []
    for kind in draw(st.sampled_from(["b", "bc", "cb", "bbc", "bcb", "c"])):
        if kind == "c":
            steps.append(replace(call, times=draw(st.integers(1, 3))))
            continue
        which = draw(st.sampled_from([0, 0, 0, 1, 2]))
        around = draw(st.sampled_from(BACKS_AROUND))
        threaded = draw(st.integers(0, 7)) == 7
        steps.append(Back(draw(st.sampled_from(BACKS)), which, around, threaded))
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
