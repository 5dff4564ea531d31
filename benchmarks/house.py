"""The house in figures: how much a reader has to find the way through.

Prints the table of docs/design/0011-the-house.md; `--write` puts it there. "At first" is the tree
before packages were layers.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tripwire"
PAGE = ROOT / "docs/design/0011-the-house.md"
AT_FIRST = ("172", "36,487", "1,052", "54", "70", "33, 29, 15 and 107", "357")


def read_modules() -> dict[tuple[str, ...], str]:
    """Each module's path below the package, and its text."""
    found = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).with_suffix("").parts: path.read_text() for path in found}


def find_room(parts: tuple[str, ...]) -> str:
    """The package that a module is in; recording is three."""
    return ".".join(parts[: 2 if parts[0] == "recording" and len(parts) > 2 else 1])


def count_levels(modules: dict[tuple[str, ...], str]) -> tuple[int, int]:
    """How many packages the longest way of imports leads through; and with modules beside them."""
    tops = {find_room(parts) for parts in modules}
    below: dict[str, set[str]] = {}
    for parts, text in modules.items():
        text = re.sub(r"^if TYPE_CHECKING:\n(    .*\n|\n)+", "", text, flags=re.MULTILINE)
        named = re.findall(r"^ *from tripwire\.([\w.]+) import", text, re.MULTILINE)
        rooms = {find_room((*name.split("."), "")) for name in named} & tops
        below.setdefault(find_room(parts), set()).update(rooms - {find_room(parts)})
    below.pop("__init__", None)  # what users import
    alone = {parts[0] for parts in modules if len(parts) == 1}
    packages: dict[str, int] = {}
    levels: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(below).static_order():
        under = below.get(room, ())
        packages[room] = (room not in alone) + max((packages[one] for one in under), default=0)
        levels[room] = 1 + max((levels[one] for one in under), default=0)
    return max(packages.values()), max(levels.values())


def count_exported(package: str) -> int:
    """Names in the `__all__` of a package."""
    for node in ast.parse((SOURCE / package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def build_table() -> str:
    """Figures of today beside those of the tree at first."""
    modules = read_modules()
    lengths = {"/".join(parts): text.count("\n") for parts, text in modules.items()}
    longest = max(lengths, key=lengths.__getitem__)
    rooms = Counter("/".join(parts[:-1]) for parts in modules if parts[-1] != "__init__")
    room, count = max(rooms.items(), key=lambda item: item[1])
    exported = [count_exported(name) for name in ("", "tracing", "writes", "telemetry")]
    figures = {
        "modules": f"{len(modules)}",
        "lines": f"{sum(lengths.values()):,}",
        "lines of the longest module": f"{lengths[longest]} (`{longest}`)",
        "modules of the largest package": f"{count} (`{room}`)",
        "import levels": "{} packages, {} with the modules beside them".format(
            *count_levels(modules)
        ),
        "names exported by `tripwire`, `tracing`, `writes` and `telemetry`": (
            f"{', '.join(map(str, exported[:-1]))} and {exported[-1]}"
        ),
        "lines of README.md": f"{len((ROOT / 'README.md').read_text().splitlines())}",
    }
    rows = zip(figures, AT_FIRST, figures.values(), strict=True)
    table = "".join(f"| {name} | {old} | {new} |\n" for name, old, new in rows)
    return f"| | at first | now |\n|---|---|---|\n{table}"


def main() -> None:
    """Print the table, and put it into its page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    table = build_table()
    print(table, end="")
    if parser.parse_args().write:
        pattern = re.compile(r"^\| \| at first \| now \|\n(\|.*\n)+", re.MULTILINE)
        PAGE.write_text(pattern.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
