"""The law machine: draws scenarios, plays them, and shrinks what breaks a law to a script.

`python tests/property/machine.py --steps 200000` runs it by itself, with a progress bar.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest.mock import patch

import hypothesis
from grammar import scenarios
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyFailure
from hypothesis.internal.conjecture.engine import ConjectureRunner
from twins import Difference, Figures, Scenario, check_twins

BATCH = 200  # scenarios drawn from one seed: hypothesis remembers all of a batch


class LawBroken(AssertionError):
    """A scenario whose compiled twin differs, as small as it got."""

    def __init__(self, scenario: Scenario, reason: str, seed: int) -> None:
        self.scenario = scenario
        self.script = write_script(scenario, reason, seed)
        super().__init__(f"\n{self.script}")


def write_script(scenario: Scenario, reason: str, seed: int) -> str:
    """A test that fails as the scenario did."""
    told = "\n".join(f"# {line}" for line in reason.splitlines())
    return (
        f"# Found by the law machine, seed {seed}.\n{told}\n"
        f"from twins import Call, Do, check_twins\n\n{scenario}\n\n"
        "def test_twins_agree() -> None:\n    check_twins(PROGRAM, STEPS)\n\n\n"
        'if __name__ == "__main__":\n    test_twins_agree()\n'
    )


def run(
    budget: int,
    seed: int,
    *,
    shrink: bool = True,
    tell: Callable[[Figures], None] = lambda figures: None,
) -> Figures:
    """Play scenarios until this many steps were taken. Raises LawBroken."""
    figures = Figures()
    gc.collect()
    gc.freeze()  # programs collect garbage: theirs
    try:
        while figures.steps < budget:
            _run_batch(figures, budget, seed, shrink, tell)
            seed += 1
    finally:
        gc.unfreeze()
    return figures


def _run_batch(
    figures: Figures, budget: int, seed: int, shrink: bool, tell: Callable[[Figures], None]
) -> None:
    broken: list[tuple[Scenario, str]] = []

    @hypothesis.seed(seed)
    @settings(
        database=None,
        deadline=None,
        max_examples=BATCH,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(scenarios())
    def play(scenario: Scenario) -> None:
        if figures.steps >= budget and not broken:
            return
        figures.scenarios += 1
        # Hypothesis times the collector, and a run in which that happens reads a clock.
        others, gc.callbacks[:] = gc.callbacks[:], []
        try:
            check_twins(scenario.program, list(scenario.steps), figures)
        except Difference as difference:
            broken.append((scenario, str(difference)))
            raise
        finally:
            gc.callbacks[:] = others
        tell(figures)

    try:
        # Half of all programs would be another one's again, with one part changed.
        with patch.object(ConjectureRunner, "generate_mutations_from", lambda *_: None):
            play()
    except (Difference, FlakyFailure):
        scenario, reason = broken[-1]  # hypothesis plays the smallest last
        raise LawBroken(scenario, reason, seed) from None
