"""Write constraints.txt: the exact version of everything that the extra `dev` installs, and what needs it.

    make constraints

The versions are those of the environment that runs this. To raise them, upgrade that environment first:

    PIP_CONSTRAINT= .venv/bin/python -m pip install --upgrade --upgrade-strategy eager --editable '.[dev]'
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
HEADER = """\
# The exact set that this project is tested with, written by `make constraints`. Users are free within the ranges of
# pyproject.toml. torch is pinned to the CPU build that pip finds on our machines.
"""


def dependencies(extra: str) -> dict[str, set[str]]:
    """Return the installed distributions that an extra of this project needs, each with what needs it directly.

    An extra of another distribution counts as that distribution; an extra of ours is named as `[extra]`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, extras = canonicalize_name(project["name"]), project["optional-dependencies"]
    needed_by: dict[str, set[str]] = defaultdict(set)
    seen: set[tuple[str, str]] = set()
    waiting = [(own, "", needed) for needed in project["dependencies"]]
    waiting += [(own, extra, needed) for needed in extras.get(extra, ())]
    while waiting:
        parent, of_extra, text = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name != own:
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue  # such as what the CPU build of torch does not need
            needed_by[name].add(parent if parent != own else f"[{of_extra}]" if of_extra else own)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            inner: Iterable[str] = extras[wanted] if name == own and wanted else ()
            if name != own:
                inner = distribution.requires or ()
            waiting += [(name, wanted, needed) for needed in inner]
    return needed_by


def render() -> str:
    """Return the content of constraints.txt for the running environment."""
    lines = [
        f"{name}=={Version(metadata.version(name)).public}  # needed by: {', '.join(sorted(parents))}"
        for name, parents in sorted(dependencies("dev").items())
    ]
    return HEADER + "\n".join(lines) + "\n"


def main() -> int:
    """Write the file and say what changed."""
    before = set(FILE.read_text().splitlines())
    FILE.write_text(render())
    changed = set(FILE.read_text().splitlines()) ^ before
    print(f"{FILE.name}: {len(FILE.read_text().splitlines()) - 2} versions, {len(changed)} lines differ from before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
