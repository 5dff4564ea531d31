"""Policy: how much of each tensor a record keeps.

A tensor shares its bytes with every other one of the same storage, so the strictest treatment
of any of them counts for all. A gradient is treated at least as strictly as its tensor. Bytes that
a policy holds back are held back wherever they lie: an array over a tensor's memory shows no more
than the tensor may.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from tripwire.errors import BadOption
from tripwire.recording.format.blobs import NewBlob
from tripwire.recording.format.manifest import Omission


class Treatment(enum.IntEnum):
    """How much is kept, from everything to nothing."""

    FULL = 0
    STATISTICS = 1
    SHAPE = 2
    REDACTED = 3

    @staticmethod
    def of(name: str | Treatment) -> Treatment:
        """The treatment of that name: "full", "statistics", "shape" or "redacted"."""
        if isinstance(name, Treatment):
            return name
        if name.upper() not in Treatment.__members__:
            raise BadOption(
                f"{name!r} is not a way to keep a tensor. Use full, statistics, shape or redacted.",
                slug="bad-option",
            )
        return Treatment[name.upper()]

    @property
    def label(self) -> str:
        return self.name.lower()


Chooser = Callable[[str, object], "str | Treatment"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A treatment for each tensor by its path, and a cap on the bytes of all together.

    `choose` is a treatment for every tensor, a mapping from patterns of paths (as in
    `fnmatch`, the first that fits counts; none means full), or a function of the path and the
    tensor. Where the cap is passed, the largest tensors are kept as statistics only.
    """

    choose: str | Mapping[str, str] | Chooser = "full"
    cap: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choose, str):
            Treatment.of(self.choose)
        elif isinstance(self.choose, Mapping):
            for name in self.choose.values():
                Treatment.of(name)

    def treat(self, path: str, tensor: object) -> Treatment:
        """What is kept of a tensor."""
        if callable(self.choose):
            return Treatment.of(self.choose(path, tensor))
        if isinstance(self.choose, str):
            return Treatment.of(self.choose)
        for pattern, name in self.choose.items():
            if fnmatch.fnmatchcase(path, _literal_brackets(pattern)):
                return Treatment.of(name)
        return Treatment.FULL

    def describe(self) -> str:
        """The policy in words, for the manifest."""
        if callable(self.choose):
            chosen = "chosen by a function"
        elif isinstance(self.choose, str):
            chosen = self.choose
        else:
            chosen = ", ".join(f"{pattern}: {name}" for pattern, name in self.choose.items())
        return chosen if self.cap is None else f"{chosen}; at most {self.cap} bytes of tensors"


def _literal_brackets(pattern: str) -> str:
    """Paths are full of brackets (`args[0]`), so here they mean themselves."""
    return pattern.replace("[", "[[]")


KEEP_ALL = Policy()


# --- which bytes are kept, decided when all of them are known ---


Key = tuple[str, int]  # a device and an address on it


class KeptBytes(Protocol):
    """Bytes that may become a blob: a storage, or an array."""

    treatment: Treatment
    why: str  # a treatment that isn't full
    blob: int
    shares: bool  # what shares its memory shares it again

    @property
    def memory(self) -> tuple[int, int]:
        """Where they lie in this process: from, to."""

    @property
    def size(self) -> int:
        """How many they are."""

    def settle(self) -> None:
        """All users are known: find the strictest treatment and the extent."""

    def form(self) -> tuple[str, tuple[int, ...]]:
        """Their dtype and shape in tensors.safetensors."""

    def paths(self) -> list[str]:
        """How they were reached."""

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Them, piece by piece."""

    def keep(self) -> None:
        """Have those of now, where nothing tells of a later write."""


class Blobs:
    """The storages and arrays that a record keeps."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.settled: list[NewBlob] = []
        self.left_out: list[Omission] = []
        self._kept: list[KeptBytes] = []
        self._by_key: dict[Key, KeptBytes] = {}

    def add(self, kept: KeptBytes) -> None:
        """Bytes of their own."""
        self._kept.append(kept)

    def find(self, key: Key) -> KeptBytes | None:
        """The bytes that were added under a key."""
        return self._by_key.get(key)

    def add_once(self, key: Key, kept: KeptBytes) -> None:
        """Bytes that others may use as well."""
        self._by_key[key] = kept
        self.add(kept)

    def arrays(self) -> list[KeptBytes]:
        """Those that aren't storages of tensors."""
        return [kept for kept in self._kept if not kept.shares]

    def keep(self) -> None:
        """Have the bytes of now, where nothing tells of a later write."""
        for kept in self._kept:
            kept.keep()

    def settle(self) -> None:
        """Decide what is kept, number the blobs, say what is left out."""
        for kept in self._kept:
            kept.settle()
        self._guard_shared_memory()
        self._apply_cap()
        self._tell_of_shared_arrays()
        full = [kept for kept in self._kept if kept.treatment is Treatment.FULL]
        forms: dict[object, int] = {}
        # Those of one form lie together, in the order in which forms were met.
        for kept in sorted(full, key=lambda kept: forms.setdefault(kept.form(), len(forms))):
            kept.blob = len(self.settled)
            self.settled.append(NewBlob(*kept.form(), kept.size, kept))
        for kept in self._kept:
            if kept.treatment is not Treatment.FULL:
                why = f"values left out by {kept.why}: {kept.treatment.label} only"
                self.left_out += [Omission(path, why) for path in kept.paths()]

    def _guard_shared_memory(self) -> None:
        strict = [(kept.memory, kept.treatment) for kept in self._kept if kept.treatment]
        for kept in self._kept if strict else ():
            low, high = kept.memory
            for (first, last), treatment in strict:
                if first < high and low < last:
                    kept.treatment = max(kept.treatment, treatment)

    def _tell_of_shared_arrays(self) -> None:
        """An array over memory that something else has comes back with memory of its own."""
        for kept in self._kept:
            low, high = kept.memory
            if kept.shares or low == high:
                continue
            others = (other.memory for other in self._kept if other is not kept)
            if any(first < high and low < last for first, last in others):
                why = "it shares memory with another value; at replay it has memory of its own"
                self.left_out += [Omission(path, why) for path in kept.paths()]

    def _apply_cap(self) -> None:
        cap = self.policy.cap
        if cap is None:
            return
        full = [kept for kept in self._kept if kept.treatment is Treatment.FULL]
        total = sum(kept.size for kept in full)
        for kept in sorted(full, key=lambda kept: -kept.size):
            if total <= cap:
                break
            kept.treatment = Treatment.STATISTICS
            kept.why = f"the cap of {cap} bytes"
            total -= kept.size
