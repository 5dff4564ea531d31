"""One line per claim, from what the benchmarks wrote into results/; and the plots.

"A / B" is a ratio: how many times B's figure A's is. "rounds" shows it within each round, as median
(lowest–highest). "figure" is what an aim is held against, as the benchmark itself does: of calls
that take microseconds the ratio of both sides' lowest figures, which a busy machine disturbs
least; of whole runs of a model the median of the rounds. A claim whose benchmark wasn't run, or
whose side failed, says so. Nothing is measured here.

    python benchmarks/summary.py [--plots FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

import plots
from results import FOLDER, NoFigure, Place, SideFailed, describe_run, read_document
from side_by_side import spread_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
FILES = (
    "trace",
    "architectures",
    "dispatch",
    "start",
    "start-36",
    "steady",
    "memory",
    "telemetry",
    "record",
    "bystander",
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one side's figures another's are."""

    over: Place
    under: Place
    whole_runs: bool = False

    def take(self) -> tuple[float, list[float]]:
        """The ratio that counts, and that of each round."""
        over, under = self.over.read(), self.under.read()
        rounds = [a / b for a, b in zip(over, under, strict=True)]
        return median(rounds) if self.whole_runs else min(over) / min(under), rounds

    def show(self, value: float) -> str:
        """A ratio for people."""
        return f"{value:.2f}x"


@dataclass(frozen=True, slots=True)
class Microseconds:
    """A side's time, or by how much it is above another's; of one thing where it ran a batch."""

    of: Place
    above: Place | None = None

    def take(self) -> tuple[float, list[float]]:
        """By the lowest figures, and by each round."""
        values = self.of.read()
        others = [0.0] * len(values) if self.above is None else self.above.read()
        scale = 1e6 / read_document(self.of.file)["settings"].get("batch", 1)
        rounds = [scale * (a - b) for a, b in zip(values, others, strict=True)]
        return scale * (min(values) - min(others)), rounds

    def show(self, value: float) -> str:
        """A time for people."""
        return f"{value:.2f} µs"


@dataclass(frozen=True, slots=True)
class Worst:
    """The highest of many ratios: of each program in a file, by the median of its rounds."""

    file: str
    over: str
    under: str

    def take(self) -> tuple[float, list[float]]:
        """The median of the worst program, and each of its rounds."""
        titles = [title for title in read_document(self.file)["figures"] if title != "unit"]
        places = [
            (Place.of(self.file, t, self.over), Place.of(self.file, t, self.under)) for t in titles
        ]
        rounds = max((Ratio(*pair).take()[1] for pair in places), key=median)
        return median(rounds), rounds

    def show(self, value: float) -> str:
        """A ratio for people."""
        return f"{value:.2f}x"


@dataclass(frozen=True, slots=True)
class Average:
    """The geometric mean of many ratios: of each program under a title that has a figure."""

    file: str
    title: str
    over: str
    under: str

    def take(self) -> tuple[float, list[float]]:
        """The median of the rounds' means, and each of them."""
        programs = read_document(self.file)["figures"][self.title]
        ratios = []
        for program in programs:
            sides = (Place.of(self.file, self.title, program, s) for s in (self.over, self.under))
            with contextlib.suppress(SideFailed):
                ratios.append(Ratio(*sides).take()[1])
        if len(ratios) < 0.9 * len(programs):
            raise NoFigure(f"only {len(ratios)} of {len(programs)} have one")
        rounds = [geometric_mean(each) for each in zip(*ratios, strict=True)]
        return median(rounds), rounds

    def show(self, value: float) -> str:
        """A ratio for people."""
        return f"{value:.2f}x"


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the table. Without a bound it has no aim."""

    what: str
    measured: Ratio | Microseconds | Worst | Average
    low: float | None = None
    high: float | None = None

    def line(self) -> tuple[str, ...]:
        """What, the figure, the rounds, the aim, and whether it is met."""
        try:
            figure, rounds = self.measured.take()
        except NoFigure as reason:
            return self.what, str(reason), "", self._aim(), "NO FIGURE"
        show, seen = self.measured.show, spread_of(rounds)
        between = f"{show(seen.middle)} ({show(seen.low)}–{show(seen.high)})"
        holds = (self.low is None or self.low <= figure) and (
            self.high is None or figure <= self.high
        )
        verdict = "" if not self._aim() else "met" if holds else "MISSED"
        return self.what, show(figure), between, self._aim(), verdict

    def _aim(self) -> str:
        bounds = (self.low, self.high)
        match bounds:
            case (None, None):
                return ""
            case (low, None):
                return f"≥ {low:g}"
            case (None, high):
                return f"≤ {high:g}"
            case (low, high):
                return f"{low:g}–{high:g}"


def _of_whole_runs(over: Place, under: Place) -> Ratio:
    return Ratio(over, under, whole_runs=True)


def capture() -> list[Claim]:
    """A model becomes a graph."""
    ours = Place.of("trace", "qwen3", "tripwire.trace")
    claims = []
    for label, low in (("Dynamo capture", 40), ("torch.export", None), ("torch.jit.trace", None)):
        ratio = _of_whole_runs(Place.of("trace", "qwen3", label), ours)
        claims.append(Claim(f"capture, 36 layers: {label} / tripwire.trace", ratio, low=low))
    ratio = _of_whole_runs(
        Place.of("trace", "blocks", "Dynamo capture"), Place.of("trace", "blocks", "tripwire.trace")
    )
    claims.append(Claim("capture, 96 plain blocks: Dynamo capture / tripwire.trace", ratio))
    ratio = Ratio(
        Place.of("dispatch", "first", "Qwen3, 36 layers", "torch.compile, first call"),
        Place.of("dispatch", "first", "Qwen3, 36 layers", "tripwire, first call"),
    )
    claims.append(
        Claim("first call without a back end, 36 layers: torch.compile / tripwire", ratio)
    )
    for title, when in (("first", "library code not met before"), ("again", "met before")):
        ratio = Average("architectures", title, "torch.compile", "tripwire")
        what = f"first call without a back end, small models, {when}: torch.compile / tripwire"
        claims.append(Claim(what, ratio, low=10))
    return claims


def hits() -> list[Claim]:
    """A call that is compiled already, without the compiled code."""

    def hit(title: str, side: str = "tripwire") -> Place:
        return Place.of("dispatch", "hits", title, side)

    few, some, many = (f"Qwen3, {layers} layers" for layers in (9, 36, 72))
    claims = [
        Claim(
            "a hit, 36 layers: torch.compile / tripwire",
            Ratio(hit(some, "torch.compile"), hit(some)),
            low=20,
        ),
        Claim("a hit, 9 / 36 layers", Ratio(hit(few), hit(some)), low=0.9, high=1.1),
        Claim("a hit, 72 / 36 layers", Ratio(hit(many), hit(some)), low=0.9, high=1.1),
        Claim("a hit of one op", Microseconds(hit("one op")), high=6),
        Claim(
            "a hit of one op: torch.compile / tripwire",
            Ratio(hit("one op", "torch.compile"), hit("one op")),
        ),
    ]
    for title in ("refused function", "refused module"):
        added = Microseconds(hit(title, "refused"), above=hit(title, "plain"))
        claims.append(Claim(f"{title}: added to a call", added, high=2))
    return claims


def starts() -> list[Claim]:
    """The first call in a new process, with Inductor."""
    claims = []
    for file, layers, cold in (("start", 12, None), ("start-36", 36, 5)):
        for caches, what, low in (
            ("cold", "first call", cold),
            ("warm", "first call", 5),
            ("warm", "without imports", 5),
        ):
            ratio = _of_whole_runs(
                Place.of(file, caches, what, "torch.compile"),
                Place.of(file, caches, what, "tripwire"),
            )
            added = "" if what == "first call" else f", {what}"
            title = f"first call, {caches} caches{added}, {layers} layers: torch.compile / tripwire"
            claims.append(Claim(title, ratio, low=low))
    return claims


def steady() -> list[Claim]:
    """A call that runs Inductor's code."""
    claims = []
    for mode in ("inference", "training"):
        for layers in (12, 36):
            at = (mode, f"{layers} layers")
            ratio = _of_whole_runs(
                Place.of("steady", *at, "torch.compile"), Place.of("steady", *at, "tripwire")
            )
            title = f"steady {mode}, {layers} layers: torch.compile / tripwire"
            claims.append(Claim(title, ratio, low=1))
    return claims


def memory() -> list[Claim]:
    """Peaks."""
    claims = []
    for mode in ("inference", "training"):
        at = (mode, "resident set")
        ratio = _of_whole_runs(Place.of("memory", *at, "trace"), Place.of("memory", *at, "eager"))
        claims.append(Claim(f"peak memory of a traced run, {mode}: trace / eager", ratio, high=1.1))
    ratio = _of_whole_runs(
        Place.of("start", "cold", "peak memory", "torch.compile"),
        Place.of("start", "cold", "peak memory", "tripwire"),
    )
    claims.append(Claim("peak memory of a cold first call: torch.compile / tripwire", ratio))
    return claims


def telling() -> list[Claim]:
    """Telemetry, records, and those who use neither."""

    def side(label: str) -> Place:
        return Place.of("telemetry", "sides", label)

    def call(label: str) -> Place:
        return Place.of("record", "calls", "20 tensors", label)

    return [
        Claim("a span", Microseconds(side("span")), high=2),
        Claim("a span that is off", Microseconds(side("span off")), high=0.2),
        Claim("a span: dynamo_timed / tripwire", Ratio(side("dynamo_timed"), side("span"))),
        Claim(
            "a hit that records if it fails: added",
            Microseconds(call("armed"), above=call("unarmed")),
            high=5,
        ),
        Claim(
            "code that isn't compiled, the slowest of its statements: with tripwire / without",
            Worst("bystander", "live", "before"),
            high=1.05,
        ),
    ]


def print_claims(claims: list[Claim]) -> None:
    """Print the table."""
    rows = [("claim", "figure", "rounds", "aim", ""), *(claim.line() for claim in claims)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for what, *cells, verdict in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
        print("  ".join([what.ljust(widths[0]), *aligned, verdict]).rstrip())


def main() -> None:
    """Print the table, and draw."""
    parser = argparse.ArgumentParser(description="every claim, with what was measured.")
    parser.add_argument("--plots", type=Path, default=DOCS, help="a folder for the plots")
    options = parser.parse_args()
    print_claims([*capture(), *hits(), *starts(), *steady(), *memory(), *telling()])
    print()
    for file in FILES:
        if (FOLDER / f"{file}.json").exists():
            print(f"{file}.json: {describe_run(file)}")
    for path in plots.draw_all(options.plots):
        print(f"drawn: {path.name}")


if __name__ == "__main__":
    main()
