# ruff: noqa: E501
"""Logs to make reports of: a small GPT in two ranks, as a real run would leave them.

python tests/unit/report/samples.py DIR    writes DIR/now and DIR/before, two runs to compare
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tripwire.ranges import underline
from tripwire.telemetry import CompilationMetrics
from tripwire.telemetry.schema import (
    MAJOR,
    MINOR,
    CompileFinished,
    CompileStarted,
    Counts,
    Event,
    GraphCaptured,
    GraphNode,
    GuardsBuilt,
    Header,
    Instant,
    ReadRow,
    ReadsSeen,
    Recompiled,
    RecordWritten,
    Retired,
    RunRefused,
    SpanDone,
    ThreadNamed,
    WiresArmed,
    encode_lines,
)

MODEL, TRAIN = "/home/ada/gpt/model.py", "/home/ada/gpt/train.py"
MS = 1_000_000
MAIN, WORKER = 140001, 140002


def header(pid: int, token: str, rank: int | None = None, **more: object) -> Header:
    fields = {
        "major": MAJOR,
        "minor": MINOR,
        "host": "node01",
        "pid": pid,
        "parent_pid": 4000,
        "token": token,
        "start_wall_ns": 1_760_000_000_000_000_000,
        "start_monotonic_ns": 5_000 * MS,
        "python": "3.12.4",
        "tripwire": "0.1.0",
        "torch": "2.13.0",
        "executable": "/usr/bin/python3",
        "argv": ("/home/ada/gpt/train.py", "--layers", "8"),
        "ranks": {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"},
    }
    return Header(**{**fields, **more})


class _Plenty:
    """An allowance that never ends."""

    def take(self, size: int) -> bool:
        return True

    def give_back(self, size: int) -> None:
        pass


PLENTY = _Plenty()


def write_log(directory: Path, head: Header | None, events: list[Event], tail: bytes = b"") -> Path:
    """One process's file, with `tail` behind its last whole line."""
    directory.mkdir(parents=True, exist_ok=True)
    pid, token = (head.pid, head.token) if head else (1, "00")
    path = directory / f"tripwire-node01-{pid}-{token}.jsonl"
    lines = [encode_lines(head)] if head else []
    path.write_bytes(b"".join([*lines, *map(encode_lines, events)]) + tail)
    return path


def span(
    start: int = 5_001 * MS, duration: int = 3 * MS, depth: int = 0, thread: int = MAIN
) -> SpanDone:
    return SpanDone(time_ns=start, thread=thread, name="trace", duration_ns=duration, depth=depth)


# --- the graph of a small GPT ---

# The lines of model.py that make nodes: number, function, source.
LINES = {
    "qkv": (31, "Attention.forward", "q, k, v = self.qkv(x).chunk(3, dim=-1)"),
    "view": (
        32,
        "Attention.forward",
        "q, k, v = (t.view(b, n, h, -1).transpose(1, 2) for t in (q, k, v))",
    ),
    "score": (35, "Attention.forward", "score = (q @ k.transpose(-2, -1)) * self.config.scale"),
    "mask": (36, "Attention.forward", "score = score.masked_fill(self.mask[:n, :n] == 0, -inf)"),
    "soft": (37, "Attention.forward", "y = self.drop(F.softmax(score, dim=-1)) @ v"),
    "out": (38, "Attention.forward", "return self.out(y.transpose(1, 2).reshape(b, n, -1))"),
    "mlp": (46, "MLP.forward", "return self.down(F.gelu(self.up(x)))"),
    "first": (58, "Block.forward", "x = x + self.attn(self.norm1(x))"),
    "second": (59, "Block.forward", "return x + self.mlp(self.norm2(x))"),
    "embed": (81, "GPT.forward", "x = self.embed(tokens) + self.position[: tokens.shape[1]]"),
    "head": (84, "GPT.forward", "return self.head(self.norm(x))"),
}
WIDE, HEADS, SQUARE = "float32[8, 256, 384]", "float32[8, 6, 256, 64]", "float32[8, 6, 256, 256]"

# name, target, inputs, scope in the block, line, part of the line, value
BLOCK = [
    ("norm1", "F.layer_norm", "IN", "norm1", "first", "self.norm1(x)", WIDE),
    ("qkv", "F.linear", "norm1", "attn.qkv", "qkv", "self.qkv(x)", "float32[8, 256, 1152]"),
    ("chunk", "Tensor.chunk", "qkv", "attn", "qkv", "self.qkv(x).chunk(3, dim=-1)", WIDE),
    *(
        row
        for t in "qkv"
        for row in (
            (t, "operator.getitem", "chunk", "attn", "qkv", "self.qkv(x).chunk(3, dim=-1)", WIDE),
            (f"{t}_v", "Tensor.view", t, "attn", "view", "t.view(b, n, h, -1)", HEADS),
            (f"{t}_t", "Tensor.transpose", f"{t}_v", "attn", "view", "t.view(b, n, h, -1).transpose(1, 2)", HEADS),
        )
    ),
    ("k_tt", "Tensor.transpose", "k_t", "attn", "score", "k.transpose(-2, -1)", HEADS),
    ("matmul", "operator.matmul", "q_t k_tt", "attn", "score", "q @ k.transpose(-2, -1)", SQUARE),
    ("score", "operator.mul", "matmul", "attn", "score", "(q @ k.transpose(-2, -1)) * self.config.scale", SQUARE),
    ("seen", "operator.getitem", "MASK", "attn", "mask", "self.mask[:n, :n]", "int64[256, 256]"),
    ("eq", "operator.eq", "seen", "attn", "mask", "self.mask[:n, :n] == 0", "bool[256, 256]"),
    ("masked", "Tensor.masked_fill", "score eq", "attn", "mask", "score.masked_fill(self.mask[:n, :n] == 0, -inf)", SQUARE),
    ("softmax", "F.softmax", "masked", "attn", "soft", "F.softmax(score, dim=-1)", SQUARE),
    ("dropped", "F.dropout", "softmax", "attn.drop", "soft", "self.drop(F.softmax(score, dim=-1))", SQUARE),
    ("y", "operator.matmul", "dropped v_t", "attn", "soft", "self.drop(F.softmax(score, dim=-1)) @ v", HEADS),
    ("y_t", "Tensor.transpose", "y", "attn", "out", "y.transpose(1, 2)", HEADS),
    ("reshape", "Tensor.reshape", "y_t", "attn", "out", "y.transpose(1, 2).reshape(b, n, -1)", WIDE),
    ("out", "F.linear", "reshape", "attn.out", "out", "self.out(y.transpose(1, 2).reshape(b, n, -1))", WIDE),
    ("mid", "operator.add", "IN out", "", "first", "x + self.attn(self.norm1(x))", WIDE),
    ("norm2", "F.layer_norm", "mid", "norm2", "second", "self.norm2(x)", WIDE),
    ("up", "F.linear", "norm2", "mlp.up", "mlp", "self.up(x)", "float32[8, 256, 1536]"),
    ("gelu", "F.gelu", "up", "mlp", "mlp", "F.gelu(self.up(x))", "float32[8, 256, 1536]"),
    ("down", "F.linear", "gelu", "mlp.down", "mlp", "self.down(F.gelu(self.up(x)))", WIDE),
    ("x", "operator.add", "mid down", "", "second", "x + self.mlp(self.norm2(x))", WIDE),
]  # fmt: skip


def _row(source: str, seen: str, line: int) -> ReadRow:
    texts = {number: text for number, _, text in LINES.values()}
    return ReadRow(source=source, seen=seen, file=MODEL, line=line, text=texts.get(line, ""))


def _node(name, target, inputs, scope, line, part, shape):
    number, function, text = LINES[line]
    begin = text.index(part)
    return GraphNode(
        name=name,
        op="call_function",
        target=target.replace("F.", "torch.nn.functional."),
        inputs=tuple(inputs),
        scope=scope,
        file=MODEL,
        line=number,
        function=function,
        text=text,
        shape=shape,
        excerpt=underline(["        " + text], begin + 8, begin + 8 + len(part)),
    )


MODULES = ("norm1", "attn.qkv", "attn.out", "norm2", "mlp.up", "mlp.down")


def _parameter(layer: int, module: str) -> GraphNode:
    name = f"blocks_{layer}_{module.replace('.', '_')}_weight"
    scope = f"blocks.{layer}.{module}"
    target = f"L['self'].blocks[{layer}].{module}.weight"
    return GraphNode(name=name, op="placeholder", target=target, scope=scope, shape="float32[384]")


def gpt_graph(layers: int, earlier: bool = False) -> tuple[GraphNode, ...]:
    """Thirty calls and six parameters a layer, in scopes `blocks.N.attn` and the like.

    An earlier one has no dropout, and relu where gelu is now.
    """
    whole = "self.embed(tokens) + self.position[: tokens.shape[1]]"
    nodes = [
        GraphNode(name="tokens", op="placeholder", target="L['tokens']", shape="int64[8, 256]"),
        GraphNode(name="mask", op="placeholder", target="L['self'].mask", shape="int64[256, 256]"),
        _node("embedding", "F.embedding", ["tokens"], "embed", "embed", "self.embed(tokens)", WIDE),
        _node("position", "operator.getitem", [], "", "embed", whole[21:], "float32[256, 384]"),
        _node("x", "operator.add", ["embedding", "position"], "", "embed", whole, WIDE),
    ]
    x = "x"
    for n in range(layers):
        outside = {"IN": x, "MASK": "mask"}
        for module in MODULES:
            nodes.append(_parameter(n, module))
        for name, target, inputs, scope, line, part, shape in BLOCK:
            if earlier and name == "dropped":
                continue
            if earlier:
                target = target.replace("gelu", "relu")
                inputs = inputs.replace("dropped", "softmax")
            names = [outside.get(i, f"{i}_{n}") for i in inputs.split()]
            names += [_parameter(n, scope).name] if scope in MODULES else []
            path = f"blocks.{n}.{scope}".rstrip(".")
            nodes.append(_node(f"{name}_{n}", target, names, path, line, part, shape))
        x = f"x_{n}"
    nodes += [
        _node("norm", "F.layer_norm", [x], "norm", "head", "self.norm(x)", WIDE),
        _node("logits", "F.linear", ["norm"], "head", "head", "self.head(self.norm(x))", "float32[8, 256, 50257]"),
        GraphNode(name="output", op="output", target="output", inputs=("logits",)),
    ]  # fmt: skip
    return tuple(nodes)


# --- a run ---

GUARDS = """def admits(self, tokens):
    if type(tokens) is not Tensor or tokens.dtype is not int64:
        return False
    if tokens.dim() != 2 or tokens.size(0) != 8 or tokens.size(1) != {length}:
        return False
    if tokens.device != device("cuda:0") or tokens.requires_grad:
        return False
    return self.training is {training} and len(self.blocks) == {layers}
"""
REASONS = {
    "hidden-state": "time.perf_counter() reads state that no dict holds; its value would be baked in.",
    "tensor-branch": "`if` on a tensor's value: this trace holds for one outcome only.",
    "unknown-origin": "a tensor is used that was not reached from the arguments, globals or closures.",
}
EXCERPTS = {
    "hidden-state": (
        "    started = time.perf_counter()",
        "time.perf_counter()",
        TRAIN,
        112,
        "log_step",
    ),
    "tensor-branch": ("    if loss.isnan():", "loss.isnan()", TRAIN, 97, "clip_and_step"),
    "unknown-origin": (
        "    return x + torch.from_numpy(_table)",
        "torch.from_numpy(_table)",
        MODEL,
        130,
        "lookup",
    ),
}


class Run:
    """One process as it writes its log; `speed` scales every time."""

    def __init__(self, rank: int, speed: float = 1.0, earlier: bool = False) -> None:
        self.random = random.Random(rank + 1)
        self.now = 5_010 * MS
        self.rank, self.speed, self.earlier = rank, speed, earlier
        self.events: list[Event] = [
            ThreadNamed(time_ns=self.now, thread=MAIN, name="MainThread"),
            ThreadNamed(time_ns=self.now, thread=WORKER, name="data-loader-0"),
        ]

    def _took(self, ms: float) -> int:
        return int(ms * MS * self.speed * self.random.uniform(0.85, 1.2))

    def _span(self, name, begin, duration, depth, compile_id=None, thread=MAIN, **more):
        self.events.append(
            SpanDone(
                time_ns=begin, thread=thread, compile_id=compile_id, name=name,
                duration_ns=duration, depth=depth, **more,
            )
        )  # fmt: skip

    def compile(self, compile_id, function, line, layers, length=256, refusal=None, file=MODEL):
        begin, ids = self.now, {"thread": MAIN, "compile_id": compile_id}
        self.events.append(
            CompileStarted(
                time_ns=begin, function=function, file=file, line=line, backend="inductor", **ids
            )
        )
        phases = {
            "trace": 38 + 9 * layers,
            "plan": 6,
            "arm": 3,
            "backend": 120 + 55 * layers,
            "first_run": 20,
        }
        if refusal:
            phases = {"trace": 22}
        metrics: dict[str, object] = {}
        at = begin + self._took(0.2)
        for phase, ms in phases.items():
            took = self._took(ms)
            if phase == "trace":
                self._span("observe", at + took // 10, took // 3, 2, compile_id)
                for layer in range(layers):
                    self._span(
                        f"reach blocks.{layer}",
                        at + took // 2 + layer * took // 40,
                        took // 50,
                        2,
                        compile_id,
                    )
            if phase == "backend":
                inside = at
                for name, share in (
                    ("joint graph", 0.12),
                    ("post grad", 0.1),
                    ("lowering", 0.28),
                    ("code generation", 0.2),
                    ("triton compile", 0.26),
                ):
                    self._span(name, inside, int(took * share), 2, compile_id)
                    inside += int(took * share)
            self._span(phase, at, took, 1, compile_id, error="CannotTrace" if refusal else None)
            metrics[f"{phase}_us"] = took // 1000
            at += took + self._took(0.3)
        if refusal:
            self.refuse(refusal, at, compile_id)
        else:
            self._capture(ids, at, layers, length, function)
            metrics |= {
                "guard_count": 9,
                "wire_count": 6 + 4 * layers,
            }
            metrics |= {
                "param_count": 12 * layers + 5,
                "param_bytes": 7_087_872 * layers,
                "gc_time_us": 1800,
            }
            metrics |= {
                "guard_latency_us": 1.4,
                "local_cache_miss_count": 1,
                "has_guarded_code": True,
            }
        duration = at - begin
        self._span(f"compile {function}", begin, duration, 0, compile_id)
        metrics["unattributed_us"] = duration // 1000 - sum(
            v for k, v in metrics.items() if k[:-3] in phases
        )
        if refusal:
            metrics |= {
                "fail_type": "CannotTrace",
                "fail_reason": REASONS[refusal],
                "refusal": refusal,
            }
        self.events.append(
            CompileFinished(
                time_ns=at,
                metrics=CompilationMetrics(
                    compile_id=compile_id, co_name=function, co_filename=file, co_firstlineno=line,
                    backend="inductor", duration_us=duration // 1000, **metrics,
                ),
                **ids,
            )
        )  # fmt: skip
        self.now = at + self._took(2)

    def _capture(self, ids, at, layers, length, function):
        if layers:
            nodes = gpt_graph(layers, self.earlier and function == "GPT.forward")
            self.events.append(GraphCaptured(time_ns=at, nodes=nodes, **ids))
        source = GUARDS.format(length=length, training=True, layers=layers)
        self.events.append(GuardsBuilt(time_ns=at, source=source, count=9, **ids))
        wires = [
            _row("G['config'].scale", "0.125", 35),
            _row("G['config'].dropout", "0.1", 37),
            _row("G['F']", "<module 'torch.nn.functional'>", 37),
            _row("G['Attention'].forward", "<function Attention.forward>", 28),
            _row("L['self'].training", "True", 80),
            _row("L['self'].head.weight", "<Parameter>", 84),
        ]
        for n in range(layers):
            for name in ("attn", "mlp", "norm1", "norm2"):
                wires.append(_row(f"L['self'].blocks[{n}].{name}", f"<{name} at layer {n}>", 58))
        self.events.append(WiresArmed(time_ns=at, wires=tuple(wires), **ids))
        reads = [
            *wires,
            *(_row(f"L['self'].blocks[{n}].attn.heads", "6", 32) for n in range(layers)),
        ]
        self.events.append(ReadsSeen(time_ns=at, reads=tuple(reads), **ids))

    def refuse(self, slug, at=None, compile_id=None):
        text, part, file, line, function = EXCERPTS[slug]
        begin = text.index(part)
        self.events.append(
            RunRefused(
                time_ns=at or self.now, thread=MAIN, compile_id=compile_id, slug=slug, reason=REASONS[slug],
                function=function, file=file, line=line, excerpt=underline([text], begin, begin + len(part)),
            )
        )  # fmt: skip

    def retire(self, compile_id, source, old, new, file, line, function, text):
        self.now += 4 * MS
        excerpt = underline([text], len(text) - len(text.lstrip()), len(text)) if text else ""
        self.events.append(
            Retired(
                time_ns=self.now, thread=MAIN, compile_id=compile_id, source=source, old=old, new=new,
                file=file, line=line, function=function, excerpt=excerpt,
            )
        )  # fmt: skip

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            took = self._took(11)
            self._span("forward", self.now, took // 3, 1)
            self._span("backward", self.now + took // 3, took // 2, 1, is_backward=True)
            self._span("optimizer.step", self.now + 5 * took // 6, took // 8, 1)
            self._span("step", self.now, took, 0, data={"step": number})
            self._span("load batch", self.now - took // 4, took // 2, 0, thread=WORKER)
            self.now += took + self._took(0.8)

    def count(self, hits: int, misses: int) -> None:
        groups = {
            "frames": {
                "hit": hits,
                "miss": misses,
                "total": hits + misses,
                "saved_us": 410 * hits,
                "lost_us": 1_500 * misses,
            },
            "guards": {"evaluated": hits + 3 * misses, "failed": misses},
        }
        self.events.append(Counts(time_ns=self.now, thread=MAIN, groups=groups))

    def recompile(self, compile_id, function, *reasons):
        self.now += 9 * MS
        self.events.append(
            Recompiled(
                time_ns=self.now, thread=MAIN, compile_id=compile_id, function=function,
                reasons=reasons, user_contexts=(f"epoch {compile_id[-1]}",),
            )
        )  # fmt: skip


def run_events(rank: int, speed: float = 1.0, earlier: bool = False) -> list[Event]:
    run = Run(rank, speed, earlier)
    layers = 6
    run.compile("0/0", "GPT.forward", 79, layers)
    run.compile("1/0", "clip_and_step", 91, 0, file=TRAIN, refusal="tensor-branch")
    run.steps(22)
    schedule = (
        "/home/ada/gpt/schedule.py",
        17,
        "anneal",
        "    config.dropout = max(0.0, config.dropout - 0.02)",
    )
    for n in range(0 if earlier else 3):
        run.retire(
            f"0/{n}",
            "G['config'].dropout",
            f"{0.1 - 0.02 * n:.2f}",
            f"{0.08 - 0.02 * n:.2f}",
            *schedule,
        )
        run.recompile(
            f"0/{n + 1}",
            "GPT.forward",
            f"entry 0/{n} retired: G['config'].dropout was written at schedule.py:17",
        )
        run.compile(f"0/{n + 1}", "GPT.forward", 79, layers)
        run.steps(12, 22 + 12 * n)
    run.retire(
        "2/0",
        "L['self'].head.weight",
        "<Parameter>",
        "<Parameter>",
        MODEL,
        121,
        "tie_weights",
        "        self.head.weight = self.embed.weight",
    )
    run.recompile(
        "0/4", "GPT.forward", "tokens.size(1) != 256: got 128", "tokens.size(0) != 8: got 4"
    )
    run.compile("0/4", "GPT.forward", 79, layers, length=128)
    run.steps(10, 60)
    run.compile("3/0", "sample", 140, 2)
    run.compile("4/0", "log_step", 110, 0, file=TRAIN, refusal="hidden-state")
    for _ in range(4 if rank else 9):
        run.refuse("hidden-state")
        run.now += 3 * MS
    if not earlier:
        run.refuse("unknown-origin")
        if rank == 1:
            run.compile("5/0", "lookup", 127, 0, refusal="unknown-origin")
            run.events.append(
                RecordWritten(
                    time_ns=run.now, thread=MAIN, path="/home/ada/gpt/records/lookup-0007.tripwire",
                    function="lookup", exception="IndexError: index 50257 is out of range for table of size 50257",
                )
            )  # fmt: skip
    else:
        run.compile("6/0", "old_eval", 150, 1)
    run.events.append(Instant(time_ns=run.now, thread=MAIN, name="checkpoint saved"))
    run.steps(20, 70)
    run.count(hits=1_204 if earlier else 1_136, misses=5 if earlier else 12)
    return run.events


def write_gpt_run(directory: Path, speed: float = 1.0, earlier: bool = False) -> Path:
    """Two ranks of one job."""
    for rank in (0, 1):
        events = run_events(rank, speed * (1 + 0.18 * rank), earlier)
        write_log(directory, header(4100 + rank, f"a{rank}", rank), events)
    return directory


def flat_graph(count: int) -> tuple[GraphNode, ...]:
    """A long graph without scopes: what is hard to draw."""
    nodes = [GraphNode(name="x", op="placeholder", target="L['x']")]
    for n in range(count):
        inputs = (nodes[-1].name, nodes[max(0, n - 7)].name)
        nodes.append(
            GraphNode(name=f"n{n}", op="call_function", target="operator.add", inputs=inputs)
        )
    return tuple(nodes)


HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\"'`${document.title='owned'}`\\",
    "‮gnp.exe‬",
    "&lt;b&gt;\u0000\u001b[31m red\u2028",
    "]]>{{policy}}<!-- data and scripts -->",
    "x" * 300_000,
    "日本語 ✓ 𝔘",
    "__proto__",
    "constructor",
)


def hostile_events() -> list[Event]:
    """Every text field of every event holds something nasty."""
    events: list[Event] = []
    for number, evil in enumerate(HOSTILE):
        at, ids = 5_001 * MS + number * MS, {"thread": number, "compile_id": f"{number}/0"}
        nodes = (
            GraphNode(name="x", op=evil, target=evil, scope=evil, file=evil, text=evil, shape=evil),
            GraphNode(
                name=evil,
                op="output",
                target=evil,
                inputs=("x",),
                scope=f"{evil}.a",
                function=evil,
                excerpt=evil,
                line=1,
            ),
        )
        row = ReadRow(source=evil, seen=evil, file=evil, line=2, text=evil)
        metrics = CompilationMetrics(
            co_name=evil,
            fail_type=evil,
            fail_reason=evil,
            duration_us=9000,
            trace_us=100,
            stack_trace=(evil,),
        )
        events += [
            ThreadNamed(time_ns=at, thread=number, name=evil),
            CompileStarted(time_ns=at, function=evil, file=evil, line=1, backend=evil, **ids),
            SpanDone(time_ns=at, name=evil, duration_ns=MS, error=evil, data={evil: evil}, **ids),
            Instant(time_ns=at, name=evil, data={evil: evil}, **ids),
            Counts(time_ns=at, groups={evil[:50] + str(n): {evil[:50]: 1} for n in range(2)} | {evil[:60]: {evil[:60]: 1}}),
            GraphCaptured(time_ns=at, nodes=nodes, **ids),
            GuardsBuilt(time_ns=at, source=evil, **ids),
            WiresArmed(time_ns=at, wires=(row,), **ids),
            ReadsSeen(time_ns=at, reads=(row,), **ids),
            CompileFinished(time_ns=at, metrics=metrics, **ids),
            Retired(time_ns=at, source=evil, old=evil, new=evil, file=evil, function=evil, excerpt=evil, **ids),
            RunRefused(time_ns=at, slug=evil, reason=evil, function=evil, file=evil, excerpt=evil, **ids),
            RecordWritten(time_ns=at, path=evil, function=evil, exception=evil, **ids),
            Recompiled(time_ns=at, function=evil, reasons=(evil, evil), user_contexts=(evil,), **ids),
        ]  # fmt: skip
    return events


if __name__ == "__main__":
    base = Path(sys.argv[1])
    write_gpt_run(base / "now", 1.15)
    write_gpt_run(base / "before", earlier=True)
