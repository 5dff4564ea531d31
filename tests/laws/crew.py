"""Crew: the threads of a long run work until its time is over, or until one of them fails."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Failed(Exception):
    """A call returned what no state during it gives."""


class Crew:
    def __init__(self, seconds: float, seed: int) -> None:
        self.ends = time.monotonic() + seconds
        self.seed = seed
        self.errors: list[str] = []

    def work(self, jobs: Iterable[Callable[[Any], None]]) -> None:
        """Each job in a thread of its own, until all are done."""
        threads = [
            threading.Thread(target=self.guarded, args=(job, number), daemon=True)
            for number, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def guarded(self, job: Callable[[int], None], number: int) -> None:
        try:
            job(number)
        except BaseException as error:
            self.note(error)

    def note(self, error: BaseException) -> None:
        self.errors.append("".join(traceback.format_exception(error)))
        self.ends = 0.0

    def is_on(self) -> bool:
        return time.monotonic() < self.ends


def begin(parser: argparse.ArgumentParser, *, grace: float) -> argparse.Namespace:
    """The options of a run. If it hangs for so many seconds more, it ends and says where."""
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(options.seconds + grace, exit=True)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return options
