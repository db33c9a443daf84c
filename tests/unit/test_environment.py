"""The environment that the tests run in is the locked one, without what breaks it."""

import importlib.metadata
import importlib.util
import re
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "envs/cpu.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_builds_for_another_torch_stay_out(name):
    # they exist for the CUDA build of torch only, and break the import of whoever finds them
    assert name not in LOCK
    assert importlib.util.find_spec(name) is None


def test_installed_versions_are_the_locked_ones():
    # of the environment's own folder: setuptools, once imported, adds its vendored packages to sys.path
    found = importlib.metadata.distributions(path=[sysconfig.get_paths()["purelib"]])
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in found}
    wrong = {name: (version, installed.get(name)) for name, version in LOCK.items() if installed.get(name) != version}
    assert len(LOCK) > 100
    assert wrong == {}


def test_locks_are_hashed_and_name_no_address():
    for lock in sorted((ROOT / "envs").glob("*.lock")):
        text = lock.read_text()
        requirements = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in requirement for requirement in requirements), lock
        assert "://" not in text, lock
