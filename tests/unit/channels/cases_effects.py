"""Effects: what a call writes is written by every call, compiled or not, and is read again."""

from unit.channels.channel import Family

FAMILY = Family("effects")
case = FAMILY.case


def effect(name: str, source: str, *, state: str = "None", **more: object) -> None:
    """A case whose results depend on its earlier calls; nothing need be written between them."""
    more.setdefault("changes", bool(more.get("writes")))
    case(name, source, state=state, **more)


# --- counters and toggles -----------------------------------------------------------------------

effect(
    "counter that nothing reads",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            return x * 2
    call = Net()
    """,
    state="call.calls",
)
effect(
    "counter that the result reads",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            return x * self.calls
    call = Net()
    """,
    writes=["call.calls = 10"],
    state="call.calls",
)
effect(
    "global counter",
    """
    count = 0
    def call(x):
        global count
        count += 1
        return x * 2
    """,
    writes=["count = 100"],
    state="count",
)
effect(
    "nonlocal counter",
    """
    def build():
        count = 0
        def call(x):
            nonlocal count
            count += 1
            return x + count
        return call, lambda: count
    call, count = build()
    """,
    state="count()",
)
effect(
    "class counter",
    """
    class Net(nn.Module):
        calls = 0
        def forward(self, x):
            Net.calls += 1
            return x * 2
    call = Net()
    """,
    state="Net.calls",
)
effect(
    "state that toggles",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.flag = False
        def forward(self, x):
            self.flag = not self.flag
            return x * 2 if self.flag else x * 3
    call = Net()
    """,
    writes=["call.flag = not call.flag"],
    state="call.flag",
)
effect(
    "initialised on the first call",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = None
        def forward(self, x):
            if self.scale is None:
                self.scale = 2.0
            return x * self.scale
    call = Net()
    """,
    writes=["call.scale = 5.0", "call.scale = None"],
    changes=False,  # the last write leads back to what was
    state="call.scale",
)
effect(
    "tensor made on the first call, then kept",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None
        def forward(self, x):
            if self.mask is None or self.mask.shape[0] != x.shape[0]:
                self.mask = torch.arange(x.shape[0]).float()
            return x * self.mask
    call = Net()
    """,
    inputs=["x", "x[:2]"],
    state="call.mask",
)

# --- containers ---------------------------------------------------------------------------------

effect(
    "list that gets each output",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []
        def forward(self, x):
            y = x * 2
            self.seen.append(y)
            return y
    call = Net()
    """,
    writes=["call.seen.clear()"],
    state="call.seen",
)
effect(
    "global list that gets a number",
    """
    SEEN = []
    def call(x):
        SEEN.append(x.shape[0])
        return x * 2
    """,
    writes=["SEEN.clear()"],
    inputs=["x", "x[:2]"],
    state="SEEN",
)
effect(
    "dict item set",
    """
    LAST = {}
    def call(x):
        LAST["out"] = x * 2
        LAST["size"] = x.shape[0]
        return LAST["out"] + 1
    """,
    writes=["LAST.clear()", "LAST['more'] = 1"],
    changes=False,  # what is cleared is set again
    state="LAST",
)
effect(
    "set that grows",
    """
    SIZES = set()
    def call(x):
        SIZES.add(x.shape[0])
        return x * 2
    """,
    inputs=["x", "x[:2]"],
    state="SIZES",
)
effect(
    "memo keyed by a constant",
    """
    MEMO = {}
    SCALE = 2.0
    def call(x):
        if "scale" not in MEMO:
            MEMO["scale"] = SCALE * 3
        return x * MEMO["scale"]
    """,
    writes=["SCALE = 4.0", "MEMO.clear()", "MEMO['scale'] = 1.0"],
    state="MEMO",
)
effect(
    "memo keyed by a size, that holds tensors",
    """
    MEMO = {}
    def call(x):
        k = x.shape[0]
        if k not in MEMO:
            MEMO[k] = torch.arange(k).float()
        return x + MEMO[k]
    """,
    inputs=["x", "x[:2]"],
    state="MEMO",
)
effect(
    "cache that grows by concatenation",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys = torch.zeros(0, 4)
        def forward(self, x):
            self.keys = torch.cat([self.keys, x[None]])
            return self.keys.sum(0)
    call = Net()
    """,
    writes=["call.keys = torch.zeros(0, 4)"],
    state="call.keys",
)
effect(
    "argument list appended to",
    """
    def call(x, out):
        out.append(x * 2)
        return len(out)
    """,
    inputs=["x, []", "x, [y]"],
)
effect(
    "argument dict written",
    """
    def call(batch):
        batch["out"] = batch.pop("x") * 2
        return batch
    """,
    inputs=["{'x': x}", "{'x': x, 'y': y}"],
)
effect(
    "argument object written",
    """
    from types import SimpleNamespace as Space
    SHARED = Space(calls=0)
    def call(x, bag):
        bag.calls += 1
        bag.out = x * 2
        return bag.out + 1
    """,
    inputs=["x, SHARED"],
    state="vars(SHARED)",
)
effect(
    "deque with a limit",
    """
    from collections import deque
    WINDOW = deque(maxlen=3)
    def call(x):
        WINDOW.append(x.sum())
        return sum(WINDOW)
    """,
    state="WINDOW",
)

# --- tensors ------------------------------------------------------------------------------------

effect(
    "attribute that holds the last output",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.zeros(4)
        def forward(self, x):
            y = x + self.last
            self.last = y
            return y
    call = Net()
    """,
    writes=["call.last = torch.ones(4)"],
    state="call.last",
)
effect(
    "buffer updated in place",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))
        def forward(self, x):
            self.total.add_(x)
            return x - self.total
    call = Net()
    """,
    writes=["call.total.zero_()", "call.total = torch.ones(4)"],
    state="call.total",
)
effect(
    "buffer replaced by each call",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
        def forward(self, x):
            self.mean = self.mean * 0.9 + x * 0.1
            return x - self.mean
    call = Net()
    """,
    writes=["call.mean = torch.ones(4)"],
    state="call.mean",
)
effect(
    "global tensor written in place",
    """
    TOTAL = torch.zeros(4)
    def call(x):
        TOTAL.add_(x)
        return x * 2
    """,
    writes=["TOTAL = torch.ones(4)"],
    state="TOTAL",
)
effect(
    "argument tensor changed in place",
    """
    def call(x):
        x.mul_(2)
        x[0] = 7
        return x + 1
    """,
    inputs=["x", "m[0]"],
)
effect(
    "argument written through a view, then returned",
    """
    def call(x):
        x.view(2, 2)[0].zero_()
        return x
    """,
    inputs=["x", "x.clone()"],
)
effect(
    "result that is state",
    """
    STATE = torch.zeros(4)
    def call(x):
        STATE.add_(x)
        return STATE
    """,
    state="STATE",
)
effect(
    "out= into a global",
    """
    OUT = torch.zeros(4)
    def call(x):
        return torch.add(x, 1, out=OUT) * 2
    """,
    state="OUT",
)
effect(
    "attribute deleted by the call",
    """
    class Bag: pass
    bag = Bag()
    def call(x):
        had = hasattr(bag, "scale")
        if had:
            del bag.scale
        return x * 2 if had else x
    """,
    writes=["bag.scale = 1"],
)
effect(
    "iterator in a global",
    """
    import itertools
    COUNT = itertools.count(1)
    def call(x):
        return x * next(COUNT)
    """,
)
effect(
    "generator in a global",
    """
    def scales():
        scale = 1.0
        while True:
            yield scale
            scale *= 2
    SCALES = scales()
    def call(x):
        return x * next(SCALES)
    """,
)
effect(
    "written before an exception",
    """
    LOG = []
    def call(x, fail):
        LOG.append(len(LOG))
        if fail:
            raise ValueError("failed")
        return x * 2
    """,
    inputs=["x, False", "x, True"],
    state="LOG",
)
effect(
    "gradients accumulated by a step inside",
    """
    weight = nn.Parameter(torch.ones(4))
    def call(x):
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()
    """,
    state="weight.grad",
)
