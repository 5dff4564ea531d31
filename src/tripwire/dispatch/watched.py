"""Watched: torch.compile's own code, with tripwire's wires beside it. For those who stay there.

The first call of a kind, and the second after a change, run as plain Python and are observed: so
the wires know what to watch. All other calls are torch.compile's. Where a wire tripped, Dynamo
compiles again, and the cause is told with its writer; or it keeps its code. Then either it reads
the value anew in each call, or its results are stale: `check` finds out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tripwire.backends.dynamo import DynamoCompile, DynamoCompiles, find_plain
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.errors import BadOption
from tripwire.rulebook.refusals import Cause, Refusal, Refused
from tripwire.tracing import Tracer
from tripwire.tracing.state import CURRENT
from tripwire.validity.plan import build_plan
from tripwire.validity.standing import Standing
from tripwire.values.classes import isinstance, name_of

logger = logging.getLogger("tripwire.recompiles")
_KINDS_KEPT = 8  # of calls
_SEEN_KEPT = 256


@dataclass(frozen=True, slots=True)
class Sighting:
    """What torch.compile did in a call before which something had changed, or without that."""

    causes: tuple[Cause, ...]  # what was written; empty where no wire tripped
    compiles: tuple[DynamoCompile, ...]  # empty where it kept its code
    difference: str | None = None  # between its result and the plain one; None: not compared

    @property
    def is_stale(self) -> bool:
        """Whether the result was compared with the plain one, and was another."""
        return bool(self.difference)

    def __str__(self) -> str:
        changed = "; ".join(map(str, self.causes)) or "nothing that the plain call reads changed"
        if self.compiles:
            reasons = " | ".join(one.reason for one in self.compiles if one.reason)
            return f"torch.compile compiled again: {changed}. Dynamo says: {reasons or 'nothing'}"
        match self.difference:
            case None:
                verdict = "It reads this anew in each call, or its results are stale: check=True"
            case "":
                verdict = "Its result is right"
            case difference:
                verdict = f"Its result is STALE: {difference}"
        return f"torch.compile kept its code: {changed}. {verdict}"


class WatchedCompile:
    """What `watch_torch_compile` returns: called and used as the compiled callable itself."""

    def __init__(self, compiled: Callable[..., Any], check: bool) -> None:
        plain = None if find_dispatcher(compiled) else find_plain(compiled)
        if plain is None:
            raise BadOption(
                f"watch_torch_compile takes what torch.compile returned, not "
                f"{name_of(type(compiled))}. tripwire.compile watches by itself.",
                slug="not-compiled",
            )
        self._compiled = compiled
        self._plain = plain
        self._check = check
        self._standings: list[Standing] = []  # one for each kind of call
        self.sightings: list[Sighting] = []  # the latest
        self.refusal: Refusal | None = None  # why nothing is watched, where that is so

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call: torch.compile's, unless it is observed."""
        if self.refusal is not None or CURRENT.tracing:
            return self._compiled(*args, **kwargs)
        for standing in self._standings:
            if standing.admits(args, kwargs) is not None:
                return self._run(args, kwargs, ())
        retired = [standing for standing in self._standings if not standing.is_in_use]
        self._standings = [standing for standing in self._standings if standing.is_in_use]
        causes = tuple(dict.fromkeys(cause for one in retired for cause in one.causes))
        for standing in retired:
            standing.close()
        return self._run(args, kwargs, causes) if causes else self._observe(args, kwargs)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = Tracer().run(self._plain, args, kwargs, complete=True)
        self.refusal = run.refusal
        if run.trace is not None:
            standing = Standing(lambda causes, compile_id: None)
            try:
                build_plan(run.trace, run.torch_state, standing)
                self._standings = [standing, *self._standings[: _KINDS_KEPT - 1]]
            except Refused as refused:
                self.refusal = Refusal(refused.slug, refused.reason, refused.where)
        if self.refusal is not None:
            logger.warning("torch.compile isn't watched: %s [%s]", self.refusal, self.refusal.slug)
        return run.result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], causes: tuple[Cause, ...]) -> Any:
        expected = self._run_copy(args, kwargs) if causes and self._check else None
        with DynamoCompiles() as compiles:
            result = self._compiled(*args, **kwargs)
        again = tuple(one for one in compiles if one.reason)
        if causes or again:
            difference = None if expected is None else _find_difference(result, expected)
            self._note(Sighting(causes, again, difference))
        if compiles:  # Dynamo patches nn.Module while it compiles: that is nobody's write
            self._standings = [standing for standing in self._standings if standing.settle()]
        return result

    def _run_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """What the plain call returns, made with copies of everything that can be copied."""
        plain, args, kwargs = copy.deepcopy((self._plain, args, kwargs))
        with torch.random.fork_rng():
            return pytree.tree_leaves(plain(*args, **kwargs))

    def _note(self, sighting: Sighting) -> None:
        self.sightings = [*self.sightings[1 - _SEEN_KEPT :], sighting]
        level = logging.INFO if sighting.compiles else logging.WARNING
        logger.log(level, "%s", sighting)

    @property
    def stale(self) -> tuple[Sighting, ...]:
        """Calls in which torch.compile returned something else than the plain code."""
        return tuple(one for one in self.sightings if one.is_stale)


def _find_difference(result: object, expected: list[object]) -> str:
    found = pytree.tree_leaves(result)
    if len(found) != len(expected):
        return f"{len(found)} values, not {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, torch.Tensor):
            if one != other:
                return f"{one!r}, not {other!r}"
            continue
        try:
            torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            return str(error).splitlines()[0]
    return ""
