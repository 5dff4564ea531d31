"""Qwen3-0.6B's shape on a CUDA device: tripwire beside torch.compile and eager, part by part.

Random weights, bfloat16. Needs torch and transformers; nothing else has to be installed, tripwire
is imported from `src` (build its C modules first: `python setup.py build_ext --inplace`).

Every side is a process of its own with new cache folders. The sides of a part compile at the same
time; then they are timed in turn, a round of each after the other, and wait meanwhile. A side that
fails or isn't ready in time has an error in its row, and the others go on without it. At most:

    decode     110 s  28 layers, one token into a StaticCache: milliseconds a token, in the modes
                      "default" and "reduce-overhead".
    start      120 s  28 layers, 16 tokens, one process at a time: seconds from `compile` to the
                      first result, with cold caches and with warm ones; then the second and third
                      call. Nothing ran on the device before.
    training   110 s  28 layers, 4 x 512 tokens, fused AdamW: milliseconds a step, peak memory.
    prompts     60 s  6 layers, eight lengths: milliseconds for all eight.
    generate    70 s  6 layers, 16 tokens and 32 more, `generate` with growing and static caches.

Together less than eight minutes; `--seconds` ends it sooner. Results are compared with eager's.

    python benchmarks/gpu.py [--parts decode start ...] [--sides tripwire ...] [--rounds N]
                             [--seconds N] [--json PATH]
    python benchmarks/gpu.py --small --device cpu     # to try it anywhere, however long
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import logging
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from side_by_side import Figures, describe_machine, print_table, write_json

EAGER, DYNAMO, TRIPWIRE = "eager", "torch.compile", "tripwire"
MODES = ("default", "reduce-overhead")
LENGTHS = (16, 33, 48, 71, 100, 128, 190, 256)
TOKENS, NEW = 16, 32
NEAR = 0.05  # of the largest logit: bfloat16 through all layers, fused and not


@dataclass(frozen=True, slots=True)
class Where:
    """What every process is told."""

    device: str
    small: bool

    def build(self, layers: int) -> Any:
        """The model."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        sizes = (256, 64, 128, 4, 2, 16) if self.small else (151_936, 1024, 3072, 16, 8, 128)
        vocabulary, hidden, inner, heads, pairs, head = sizes
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=2 if self.small else layers,
            num_attention_heads=heads,
            num_key_value_heads=pairs,
            head_dim=head,
            tie_word_embeddings=True,
        )
        with torch.device(self.device):
            return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()

    def draw(self, *shape: int) -> torch.Tensor:
        """Tokens."""
        return torch.randint(0, 250, shape, device=self.device)

    def wait(self) -> None:
        """For the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def find_peak(self) -> int:
        """Bytes."""
        if self.device != "cpu":
            return torch.cuda.max_memory_allocated()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(slots=True)
class Prepared:
    """A side that is ready: a round of it, and how many calls that is."""

    run: Callable[[], object]
    calls: int
    facts: dict[str, Any] = field(default_factory=dict)
    look: Callable[[], dict[str, Any]] = dict  # at the end


def find_compiler(side: str) -> Callable[..., Any]:
    """How a side compiles: `eager` not at all. A name may go on with a mode."""
    name, _, mode = side.partition(", ")
    options = {"mode": mode} if mode in MODES else {}
    if name == DYNAMO:
        return functools.partial(torch.compile, **options)
    if name == TRIPWIRE:
        import tripwire

        return functools.partial(tripwire.compile, **options)
    return lambda model: model


def tell(compiled: Any) -> dict[str, Any]:
    """What tripwire did; nothing of other sides."""
    if TRIPWIRE not in type(compiled).__module__ and not hasattr(compiled, "statistics"):
        return {}
    import tripwire

    found = tripwire.statistics(compiled)
    return {name: getattr(found, name) for name in ("traces", "hits", "refusals")}


def take_calls(where: Where, call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of the first calls."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        where.wait()
        took.append(time.perf_counter() - began)
    return took


def compare(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart, in the largest of what is wanted; raises where that is much."""
    off = ((given.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    if not off <= NEAR:
        raise AssertionError(f"off by {off:.3f}")
    return off


# --- parts: what each side prepares, in a process of its own ----------------------------------


def decode(where: Where, side: str) -> Prepared:
    """One token after the other into a cache that doesn't grow."""
    from transformers import StaticCache

    model, prompt, token = where.build(28), where.draw(1, TOKENS), where.draw(1, 1)
    compiled = find_compiler(side)(model)
    takes_position = "cache_position" in inspect.signature(model.forward).parameters

    def begin() -> tuple[Any, dict[str, Any]]:
        cache = StaticCache(config=model.config, max_cache_len=1024)
        more: dict[str, Any] = {}
        if takes_position:
            more["cache_position"] = torch.arange(TOKENS, device=where.device)
        model(prompt, past_key_values=cache, use_cache=True, **more)
        if takes_position:
            more["cache_position"] = torch.tensor([TOKENS], device=where.device)
        return cache, more

    def step(model: Any, cache: Any, more: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = model(token, past_key_values=cache, use_cache=True, **more).logits
        for position in more.values():
            position.add_(1)
        return logits

    plain, ours = begin(), begin()
    wanted = [step(model, *plain).clone() for _ in range(5)]
    given: list[torch.Tensor] = []
    took = take_calls(where, lambda: given.append(step(compiled, *ours).clone()), 5)
    off = max(map(compare, given, wanted))
    return Prepared(
        lambda: [step(compiled, *ours) for _ in range(20)],
        20,
        {"first s": took[0], "second s": took[1], "third s": took[2], "off": off},
        lambda: tell(compiled),
    )


def start(where: Where, side: str) -> Prepared:
    """The first calls of a process."""
    model, tokens = where.build(28), where.draw(1, TOKENS)
    where.wait()
    given: list[torch.Tensor] = []
    began = time.perf_counter()
    compiled = find_compiler(side)(model)
    took = take_calls(where, lambda: given.append(compiled(tokens, use_cache=False).logits), 3)
    took[0] += time.perf_counter() - began - sum(took)  # the compiler's own import
    told = tell(compiled)
    off = max(compare(one, model(tokens, use_cache=False).logits) for one in given)
    facts = {"first s": took[0], "second s": took[1], "third s": took[2], "off": off, **told}
    return Prepared(lambda: None, 1, facts)


def training(where: Where, side: str) -> Prepared:
    """Steps of an optimizer."""
    model, tokens = where.build(28).train(), where.draw(4, 32 if where.small else 512)
    compiled = find_compiler(side)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    losses: list[float] = []

    def step() -> torch.Tensor:
        loss: torch.Tensor = compiled(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch.enable_grad():
        took = take_calls(where, lambda: losses.append(step().item()), 4)
        if where.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
    facts = {"first s": took[0], "second s": took[1], "third s": took[2], "losses": losses}

    def run() -> None:
        with torch.enable_grad():
            for _ in range(5):
                step()

    return Prepared(run, 5, facts, lambda: {**tell(compiled), "peak MB": where.find_peak() >> 20})


def prompts(where: Where, side: str) -> Prepared:
    """One prompt of each length."""
    model = where.build(6)
    asked = [where.draw(1, length) for length in LENGTHS]
    compiled = find_compiler(side)(model)

    def run(model: Any) -> list[torch.Tensor]:
        return [model(tokens, use_cache=False).logits for tokens in asked]

    wanted, given = run(model), []
    took = take_calls(where, lambda: given.extend(run(compiled)), 2)
    off = max(map(compare, given, wanted * 2))
    facts = {"first eight s": took[0], "second eight s": took[1], "off": off}
    return Prepared(lambda: run(compiled), 1, facts, lambda: tell(compiled))


def generate(where: Where, side: str) -> Prepared:
    """`generate`, with the model's forward compiled."""
    model, prompt = where.build(6), where.draw(1, TOKENS)
    kind = side.rpartition(", ")[2]
    more = {} if kind == "growing" else {"cache_implementation": kind}

    def run() -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            disable_compile=True,  # transformers compiles by itself with a static cache
            **more,
        )
        return tokens

    wanted = run()
    model.forward = compiled = find_compiler(side)(model.forward)
    given: list[torch.Tensor] = []
    took = take_calls(where, lambda: given.append(run()), 2)
    same = min(int((one == wanted).sum()) - TOKENS for one in given)
    facts = {"first s": took[0], "second s": took[1], "tokens as eager's": same}
    return Prepared(run, NEW, facts, lambda: tell(compiled))


@dataclass(frozen=True, slots=True)
class Part:
    """What its sides prepare, and for how long all of it may go on."""

    prepare: Callable[[Where, str], Prepared]
    sides: Sequence[str]
    seconds: float
    title: str
    one_by_one: bool = False


BOTH = (TRIPWIRE, DYNAMO)
ALL = (EAGER, *BOTH)
PARTS = {
    "decode": Part(
        decode,
        (EAGER, *(f"{side}, {mode}" for mode in MODES for side in BOTH)),
        110,
        "28 layers, a token into a static cache",
    ),
    "start": Part(start, BOTH, 120, "28 layers, first calls of a process", one_by_one=True),
    "training": Part(training, ALL, 110, "28 layers, 4 x 512 tokens, a training step"),
    "prompts": Part(prompts, ALL, 60, f"6 layers, prompts of {len(LENGTHS)} lengths, all of them"),
    "generate": Part(
        generate,
        [f"{side}, {kind}" for kind in ("growing", "static") for side in ALL],
        70,
        f"6 layers, generate, a token of {NEW}",
    ),
}


# --- a side's process ------------------------------------------------------------------------


def serve(part: str, side: str, where: Where) -> None:
    """Prepare; then a round for each line that comes, and at the end what there is to tell."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes with the errors
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    try:
        with torch.no_grad():
            prepared = PARTS[part].prepare(where, side)
            print(json.dumps({"facts": prepared.facts}), file=out)
            for _ in sys.stdin:
                if _.strip() == "end":
                    break
                where.wait()
                began = time.perf_counter()
                prepared.run()
                where.wait()
                value = (time.perf_counter() - began) / prepared.calls
                print(json.dumps({"value": value}), file=out)
            print(json.dumps({"facts": prepared.look()}), file=out)
    except BaseException as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:100]}), file=out)


# --- all of them -----------------------------------------------------------------------------


class Side:
    """A side's process, and what it told."""

    def __init__(self, part: str, label: str, caches: Path, where: Where, threads: int) -> None:
        self.row = Figures(label)
        self.facts: dict[str, Any] = {}
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRIPWIRE_CACHE_DIR": str(caches / "own"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "TRIPWIRE_PROGRESS": "0",
        }
        command = [sys.executable, __file__, "--serve", part, label, "--device", where.device]
        self.errors = (caches.parent / f"{caches.name}.log").open("w+")
        self.process = subprocess.Popen(
            command + ["--small"] * where.small,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
        )

    def ask(self, line: str) -> None:
        """Have the process do something."""
        if self.row.error is None and self.process.stdin is not None:
            try:
                print(line, file=self.process.stdin, flush=True)
            except OSError:
                self.fail()

    def hear(self, seconds: float) -> None:
        """Take one answer, or note why there is none."""
        if self.row.error is not None or self.process.stdout is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(max(seconds, 0)) else None
        if line is None:
            self.row.values, self.row.error = [], "not in time"
            self.process.kill()
            return
        told = json.loads(line) if line else {"error": ""}
        self.facts |= told.get("facts", {})
        if "value" in told:
            self.row.values.append(told["value"])
        if "error" in told:
            self.fail(told["error"])

    def fail(self, why: str = "") -> None:
        """Note an error."""
        if not why:
            self.errors.seek(0)
            why = (self.errors.read().strip().splitlines() or ["died"])[-1][:100]
        self.row.values, self.row.error = [], why

    def end(self) -> None:
        """Let it go."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.errors.close()


def run_part(
    name: str, labels: list[str], where: Where, rounds: int, seconds: float, folder: Path
) -> list[Side]:
    """Have all sides compile, then time them in turn."""
    ends, sides = time.monotonic() + seconds, []
    threads = max(1, (os.cpu_count() or 1) // len(labels))
    try:
        for number, label in enumerate(labels):
            sides.append(Side(name, label, folder / f"{name}-{number}", where, threads))
        for side in sides:
            side.hear(ends - time.monotonic() - seconds / 6)
        for _ in range(1 + rounds):
            for side in sides:
                side.ask("go")
                side.hear(ends - time.monotonic())
        for side in sides:
            side.row.values = side.row.values[1:]  # the first round isn't counted
            side.ask("end")
            side.hear(ends - time.monotonic() + 5)
    finally:
        for side in sides:
            side.end()
    return sides


def run_starts(
    name: str, labels: list[str], where: Where, seconds: float, folder: Path
) -> list[Side]:
    """One process after the other: each side cold, then warm."""
    ends, threads, found = time.monotonic() + seconds, os.cpu_count() or 1, []
    for heat in ("cold", "warm"):
        for number, label in enumerate(labels):
            side = Side(name, label, folder / f"{name}-{number}", where, threads)
            try:
                side.hear(ends - time.monotonic())
            finally:
                side.end()
            side.row.label = f"{label}, {heat}"
            if side.row.error is None:
                side.row.values = [side.facts["first s"]]
            found.append(side)
    return found


def show(name: str, sides: list[Side], took: float) -> None:
    """Print a part's table, and what its sides told."""
    is_start = PARTS[name].one_by_one
    title = f"{name}: {PARTS[name].title} ({took:.0f} s)"
    rows = [side.row for side in sides if side.row.values or side.row.error]
    reference = next((row.label for row in rows if row.label.startswith(TRIPWIRE)), EAGER)
    unit, scale = ("s", 1) if is_start else ("ms", 1e3)
    print_table(title, rows, reference, unit=unit, scale=scale)
    for side in sides:
        facts = [f"{key} {_round(value)}" for key, value in side.facts.items()]
        print(f"    {side.row.label}: {', '.join(facts) or 'nothing told'}")
    sys.stdout.flush()


def _round(value: object) -> object:
    if isinstance(value, list):
        return [_round(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Run the parts, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sides", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="for all parts together (470)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="two narrow layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("PART", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    where = Where(options.device, options.small)
    if options.serve:
        serve(*options.serve, where)
        return
    device = options.device if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{describe_machine()}, {device}", flush=True)
    ends, figures = time.monotonic() + (options.seconds or (3600 if where.small else 470)), {}
    for name in options.parts:
        began = time.monotonic()
        labels = [one for one in PARTS[name].sides if one.split(", ")[0] in options.sides]
        seconds = min(ends - began, 3600 if where.small else PARTS[name].seconds)
        if seconds < 10:
            print(f"\n{name}: no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
            try:
                if PARTS[name].one_by_one:
                    sides = run_starts(name, labels, where, seconds, Path(folder))
                else:
                    sides = run_part(name, labels, where, options.rounds, seconds, Path(folder))
                show(name, sides, time.monotonic() - began)
            except Exception:  # the other parts go on
                traceback.print_exc()
                continue
        figures[name] = [{"row": side.row, "facts": side.facts} for side in sides]
        if options.json:  # part by part: a run that is broken off leaves what it had
            write_json(options.json, "gpu", {"device": device, "small": options.small}, figures)


if __name__ == "__main__":
    main()
