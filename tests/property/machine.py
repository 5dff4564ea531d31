"""The law machine: draws scenarios, plays them, and shrinks what breaks a law to a script.

`python -m property.machine --steps 200000` in tests/ runs it by itself, a process for each core,
with a progress bar (a line every minute where there is no terminal). The script is printed;
LAWS_SAVE=folder in the environment keeps it there, as a test. `--about NAME` draws programs of one
production only; `--awaiting` plays each that awaits repair and tells which still break a law.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

import click
import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyFailure
from hypothesis.internal.conjecture import engine
from hypothesis.strategies import SearchStrategy
from property.grammar import _AWAITING_REPAIR, BACKENDS, NAMES, scenarios
from property.twins import Difference, Figures, Scenario, check
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

BATCH = 200  # scenarios drawn from one seed: hypothesis remembers all of a batch
SHRINKING = 60  # seconds at most
STEPS = 6  # of a scenario, about


class LawBroken(AssertionError):
    """A scenario whose compiled twin differs, as small as it got."""

    def __init__(self, scenario: Scenario, reason: str, seed: int) -> None:
        self.scenario = scenario
        self.script = write_script(scenario, reason, seed)
        super().__init__(f"\n{self.script}")
        if folder := os.environ.get("LAWS_SAVE"):
            path = Path(folder, f"test_law_{seed}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.script)


def write_script(scenario: Scenario, reason: str, seed: int) -> str:
    """A test that fails as the scenario did."""
    told = "\n".join(f"# {line}" for line in reason.splitlines())
    return (
        f"# Found by the law machine, seed {seed}. Runs with PYTHONPATH=tests.\n{told}\n"
        f"from property.twins import Back, Call, Do, Scenario, check\n\n{scenario}\n\n"
        "def test_twins_agree() -> None:\n    check(SCENARIO)\n\n\n"
        'if __name__ == "__main__":\n    test_twins_agree()\n'
    )


def run(
    budget: int,
    seed: int,
    *,
    shrink: bool = True,
    tell: Callable[[Figures], None] = lambda figures: None,
    about: str = "",
    backends: tuple[str, ...] = BACKENDS,
) -> Figures:
    """Play scenarios until this many steps were taken. Raises LawBroken."""
    drawn = scenarios(about, backends)
    figures = Figures()
    while figures.steps < budget:
        gc.unfreeze()  # so that what earlier batches left, and nobody needs, goes
        _set_aside()
        _run_batch(drawn, figures, budget, seed, shrink, tell)
        seed += 1
    return figures


def _set_aside() -> None:
    """Hide all that is alive from the collector: programs collect garbage, and it is theirs.

    Done after each program: libraries are imported on the way, and whoever asks the collector who
    holds an object (tripwire does, for open numbers) waits until it has gone through all of them.
    1,200 steps took 36 s of processor time without, and take 24.
    """
    gc.collect()
    gc.freeze()


def _run_batch(
    drawn: SearchStrategy[Scenario],
    figures: Figures,
    budget: int,
    seed: int,
    shrink: bool,
    tell: Callable[[Figures], None],
) -> None:
    broken: list[tuple[Scenario, str]] = []

    @hypothesis.seed(seed)
    @settings(
        database=None,
        deadline=None,
        max_examples=min(BATCH, (budget - figures.steps) // STEPS + 1),
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn)
    def play(scenario: Scenario) -> None:
        figures.scenarios += 1
        # Hypothesis times the collector, and a run in which that happens reads a clock.
        others, gc.callbacks[:] = gc.callbacks[:], []
        try:
            check(scenario, figures)
        except Difference as difference:
            broken.append((scenario, str(difference)))
            raise
        finally:
            gc.callbacks[:] = others
        _set_aside()
        tell(figures)

    try:
        # Half of all programs would be another one's again, with one part changed.
        with (
            patch.object(engine.ConjectureRunner, "generate_mutations_from", lambda *_: None),
            patch.object(engine, "MAX_SHRINKING_SECONDS", SHRINKING),
        ):
            play()
    except (Difference, FlakyFailure):
        scenario, reason = broken[-1]  # hypothesis plays the smallest last
        raise LawBroken(scenario, reason, seed) from None


# --- by itself ---------------------------------------------------------------------------------


def work(steps: int, seed: int, about: str, parent: Connection) -> None:
    """One process's share. Sends its figures as it goes, or the script of what broke a law."""
    logging.disable(logging.WARNING)  # refusals are part of the play
    torch.set_num_threads(1)
    try:
        run(steps, seed, tell=parent.send, about=about)
    except LawBroken as broken:
        parent.send(str(broken))


def start(workers: int, share: int, seed: int, about: str) -> dict[Connection, Figures]:
    """This many processes, each with seeds of its own."""
    context = multiprocessing.get_context("spawn")
    told = {}
    for number in range(workers):
        mine, theirs = context.Pipe(duplex=False)
        args = (share, seed + number * share, about, theirs)
        context.Process(target=work, args=args, daemon=True).start()
        theirs.close()  # so that the end of the process is the end of the pipe
        told[mine] = Figures()
    return told


def follow(told: dict[Connection, Figures], share: int) -> Iterator[Figures]:
    """What all have done so far, each time that one of them tells. Ends with the processes."""
    waiting = set(told)
    while waiting:
        for one in wait(waiting):
            try:
                news = one.recv()
            except EOFError:  # not before: what breaks a law is told after it was made small
                waiting.discard(one)
                if told[one].steps < share:
                    raise SystemExit("a process died; what it said is above") from None
                continue
            if isinstance(news, str):
                raise SystemExit(news)
            told[one] = news
        yield sum(told.values(), Figures())


def try_awaiting(steps: int, seed: int) -> Iterator[str]:
    """A line for each production that awaits repair."""
    for name in sorted(_AWAITING_REPAIR):
        try:
            yield f"{name}: nothing wrong in {run(steps, seed, about=name, shrink=False)}"
        except LawBroken as broken:
            yield f"{name}: BREAKS A LAW\n{broken.script}"


@click.command()
@click.option("--steps", default=200_000, show_default=True, help="How many to take.")
@click.option("--seed", type=int, default=None, help="Where to begin; a fresh one by default.")
@click.option("--workers", default=os.cpu_count(), show_default=True, help="How many processes.")
@click.option("--about", type=click.Choice(NAMES), default=None, help="One production.")
@click.option("--awaiting", is_flag=True, help="Each production that awaits repair, one by one.")
def main(steps: int, seed: int | None, workers: int, about: str | None, awaiting: bool) -> None:
    """Look for programs whose compiled twins differ."""
    first = random.randrange(10**6) if seed is None else seed
    console = Console()
    if awaiting:
        logging.disable(logging.WARNING)
        for line in try_awaiting(steps, first):
            click.echo(line)
        return
    console.print(f"law machine: {steps} steps from seed {first}, {workers} processes")
    share = -(-steps // workers)
    figures, spoken = Figures(), time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=steps)
        for figures in follow(start(workers, share, first, about or ""), share):
            progress.update(task, completed=figures.steps, description=str(figures))
            if not console.is_terminal and time.monotonic() > spoken + 60:
                spoken = time.monotonic()
                console.print(str(figures), highlight=False)
    console.print(f"{figures}; refusals: {dict(figures.slugs)}")


if __name__ == "__main__":
    main()
