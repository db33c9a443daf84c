"""The cluster of the tests, one for the whole session."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.slurm import Slurm, install, running


def skip_without_root() -> None:
    """Slurm's daemons, its configuration and device files need root."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: needs root")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running Slurm: two nodes of eight GPUs."""
    skip_without_root()
    # before anything is installed: a machine that has a Slurm keeps it as it is
    Slurm().refuse_foreign_configuration()
    install()
    with running() as cluster:
        yield cluster
