"""Writes envs/{workflow,cpu,cuda}.yaml, the conda files that rules name, from the locks.

in: envs/NAME.lock; out: envs/NAME.yaml. With --check nothing is written: exit 1 if a file is not what its lock says.
Standard library only: it runs before any environment exists.
"""

import argparse
import re
import sys
from pathlib import Path

ENVS = Path(__file__).resolve().parent
NAMES = ("workflow", "cpu", "cuda")
PIN = re.compile(r"^([A-Za-z0-9._-]+==[^\s\\;]+)", re.MULTILINE)

HEADER = """\
# Generated from {name}.lock by conda_yaml.py (`make lock`); do not edit.
# For `snakemake --software-deployment-method conda`. `make env` needs no conda, checks hashes, and is what is tested.
# pip resolves nothing here: export PIP_NO_DEPS=1 DS_BUILD_OPS=0 before conda creates the environment.
"""
TORCH_CPU = """\
# torch's CPU build is on an index of its own: export PIP_EXTRA_INDEX_URL with the value of TORCH_CPU_INDEX (Makefile).
"""


def render(name: str, lock: str) -> str:
    """The conda file for the environment `name`, from the text of its lock."""
    pins = PIN.findall(lock)
    if not pins:
        raise ValueError(f"{name}.lock holds no line of the form name==version; run `make lock`")
    header = HEADER.format(name=name) + (TORCH_CPU if any("+cpu" in pin for pin in pins) else "")
    lines = [f"name: eagle3-flow-{name}", "channels:", "  - conda-forge", "dependencies:", "  - python=3.11", "  - pip"]
    lines += ["  - pip:", *(f"      - {pin}" for pin in pins)]
    return header + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs from its lock")
    check = parser.parse_args(argv).check

    status = 0
    for name in NAMES:
        path = ENVS / f"{name}.yaml"
        text = render(name, (ENVS / f"{name}.lock").read_text())
        if not check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            print(f"envs/{name}.yaml is not what envs/{name}.lock says; run `make lock`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
