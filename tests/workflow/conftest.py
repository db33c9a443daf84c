"""A copy of the repository to run Snakemake in: nothing of the developer's own results is touched, nor seen."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("Snakefile", "bin", "config", "envs", "profiles", "rules", "scripts")
LINKS = ("local-rtx6000", "b300-cluster")


class Checkout:
    """The copy; `snakemake` runs the workflow in it with the workflow environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, root / name)
        for name in LINKS:
            (root / name).symlink_to((ROOT / name).readlink())
        (root / ".venvs").symlink_to(ROOT / ".venvs")

    def command(self, *arguments: str) -> list[str]:
        return [str(ROOT / ".venvs/workflow/bin/snakemake"), *arguments]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "EAGLE3_ENV": "cpu", "PATH": f"{ROOT}/.venvs/workflow/bin:{os.environ['PATH']}"}

    def snakemake(
        self, *arguments: str, succeeds: bool = True, timeout_s: int = 900, environment: Mapping[str, str] | None = None
    ) -> str:
        """Runs to the end; returns what was printed on both streams."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env={**self.environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert (done.returncode == 0) is succeeds, done.stdout[-6000:]
        return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))
