"""The environment that the tests run in is the locked one; envs/install.sh makes environments that jobs need nothing else for.

What install.sh does with a whole lock it does here with one small package, in a folder that holds nothing but its files.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "envs/cpu.lock").read_text(), re.MULTILINE))
PACKAGE = "iniconfig"


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


# -- installing


def make_clone(folder: Path) -> Path:
    """A folder with what installs and enters environments, and a lock of one package for the environment `tiny`."""
    for name in ("bin/in-env", "envs/install.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (block,) = re.findall(rf"^{PACKAGE}==.*\n(?:    --hash.*\n?)+", (ROOT / "envs/cpu.lock").read_text(), re.MULTILINE)
    (folder / "envs/tiny.lock").write_text(block)
    return folder


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """The variables of a user whose home is `folder`, without what the tests' own environment sets."""
    ours = ("EAGLE3_ENV", "EAGLE3_CACHE", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KMP_")) and name not in ours}
    return {**kept, "HOME": str(folder), **settings}


def call(clone: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=clone, env=environment(clone, **settings), capture_output=True, text=True)


def install(clone: Path, **settings: str) -> None:
    done = call(clone, "envs/install.sh", "tiny", **settings)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def namespaces() -> tuple[str, ...]:
    """Runs a command without network; `sh -c` in it may mount."""
    command = ("unshare", "--map-root-user", "--net", "--mount")
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces (unshare)")
    return command


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A shared folder with the environment `tiny`, as the first clone left it."""
    folder = tmp_path_factory.mktemp("cluster")
    install(make_clone(folder / "first"), EAGLE3_CACHE="../shared")  # from its own folder, as typed in a shell
    return folder / "shared"


def test_environment_lies_in_the_shared_folder(shared):
    link = shared.parent / "first/.venvs/tiny"
    assert link.readlink().is_absolute()
    assert link.resolve().parent == shared / "envs"
    assert not (shared.parent / "first/.cache").exists()


def test_job_in_a_shared_environment_needs_no_network_and_writes_nothing(shared, namespaces):
    before = sorted(path.relative_to(shared) for path in shared.rglob("*") if path.suffix != ".pyc")
    program = f"import sys, {PACKAGE}; print(sys.prefix, {PACKAGE}.__file__)"
    job = ("bin/in-env", "python", "-c", program)
    printed = call(shared.parent / "first", *namespaces, *job, EAGLE3_ENV="tiny").stdout.split()
    assert printed[0].endswith(".venvs/tiny") and Path(printed[1]).resolve().is_relative_to(shared)
    assert sorted(path.relative_to(shared) for path in shared.rglob("*") if path.suffix != ".pyc") == before


def test_second_clone_takes_a_shared_environment_that_it_may_only_read(shared, namespaces, tmp_path):
    clone = make_clone(tmp_path / "second")
    read_only = f"mount --bind {shared} {shared} && mount -o remount,ro,bind {shared} && ! touch {shared}/new"
    done = call(clone, *namespaces, "sh", "-c", f"{read_only} && envs/install.sh tiny", EAGLE3_CACHE=str(shared))
    assert done.returncode == 0, done.stderr
    assert (clone / ".venvs/tiny").resolve().parent == shared / "envs"
    assert call(clone, "bin/in-env", "python", "-c", f"import {PACKAGE}", EAGLE3_ENV="tiny").returncode == 0


def test_linked_environment_stays_when_the_folder_is_not_named_again(shared):
    clone = shared.parent / "first"
    before = (clone / ".venvs/tiny").readlink()
    install(clone)
    assert (clone / ".venvs/tiny").readlink() == before
    assert not (clone / ".cache").exists()


def test_other_hash_is_refused_and_the_environment_does_not_count_as_built(tmp_path):
    clone = make_clone(tmp_path)
    lock = clone / "envs/tiny.lock"
    lock.write_text(re.sub(r"sha256:....", "sha256:0000", lock.read_text()))
    done = call(clone, "envs/install.sh", "tiny")
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr and "envs/install.sh: pip could not install tiny" in done.stderr
    job = call(clone, "bin/in-env", "true", EAGLE3_ENV="tiny")
    assert (job.returncode, job.stdout) == (3, "")
    assert job.stderr.rstrip().endswith(f"is not built in {clone}; build it with: make env ENV=tiny")


def test_killed_installation_starts_anew(tmp_path):
    clone = make_clone(tmp_path)
    building = subprocess.Popen(
        ["envs/install.sh", "tiny"], cwd=clone, env=environment(clone), stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (found := list(clone.glob(".cache/eagle3-flow/envs/tiny-*/bin/python"))):
            assert time.monotonic() < deadline and building.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(building.pid, 9)
        building.wait()
    (tmp_path / "rest").touch()
    shutil.move(tmp_path / "rest", found[0].parent / "rest")
    assert call(clone, "bin/in-env", "true", EAGLE3_ENV="tiny").returncode == 3
    install(clone)
    assert not (found[0].parent / "rest").exists()
    assert call(clone, "bin/in-env", "python", "-c", f"import {PACKAGE}", EAGLE3_ENV="tiny").returncode == 0


def test_unknown_environment_is_refused_with_those_that_exist(tmp_path):
    done = call(make_clone(tmp_path), "envs/install.sh", "tinny")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "envs/install.sh: expected one of: tiny; got 'tinny'\n"


# -- entering


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({"EAGLE3_ENV": "cuda"}, "make env ENV=cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "make env ENV=cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "make env"),
        ({"EAGLE3_ENV": "cpu", "CUDA_VISIBLE_DEVICES": "0"}, "make env"),
    ],
)
def test_job_without_its_environment_stops_with_the_command_that_builds_it(tmp_path, settings, command):
    clone = make_clone(tmp_path)
    job = call(clone, "bin/in-env", "touch", "ran", **settings)
    assert job.returncode == 3 and not (clone / "ran").exists()
    assert job.stderr.rstrip().endswith(f"; build it with: {command}")


@pytest.mark.parametrize(("name", "bound"), [("cpu", True), ("cpu-vllm-0.31", True), ("cuda", False)])
def test_settings_for_the_engine_on_cpus_are_those_of_every_cpu_environment(shared, tmp_path, name, bound):
    clone = make_clone(tmp_path)
    (clone / ".venvs").mkdir()
    (clone / ".venvs" / name).symlink_to((shared.parent / "first/.venvs/tiny").readlink())
    job = call(clone, "bin/in-env", "env", EAGLE3_ENV=name)
    assert job.returncode == 0, job.stderr
    assert ("VLLM_CPU_OMP_THREADS_BIND=nobind" in job.stdout.splitlines()) is bound


@pytest.mark.slow
def test_engine_needs_no_network(namespaces):
    test = "tests/contract/test_capture.py::test_llama_states_equal_hugging_face"
    job = f"ip link set lo up && bin/in-env python -m pytest -q {test}"  # loopback: ranks of one job talk over it
    done = subprocess.run(
        [*namespaces, "sh", "-c", job], cwd=ROOT, env={**os.environ, "EAGLE3_ENV": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]


def test_job_of_an_image_runs_inside_it_once(shared, tmp_path):
    # a stand-in: Apptainer itself does not run where these tests do
    clone = make_clone(tmp_path / "clone")
    (clone / ".venvs").mkdir()
    (clone / ".venvs/cuda").symlink_to((shared.parent / "first/.venvs/tiny").readlink())
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(
        f'#!/bin/bash\necho "${{@:1:5}}" >>{tmp_path}/calls\nexport APPTAINER_CONTAINER="$5" EAGLE3_ENV=cuda\nexec "${{@:6}}"\n'
    )
    apptainer.chmod(0o755)
    search = {"PATH": f"{apptainer.parent}:{os.environ['PATH']}", "EAGLE3_IMAGE": "/images/cuda.sif"}
    program = "import sys; print(sys.prefix, sys.argv[1:])"
    job = call(clone, "bin/in-env", "bin/in-env", "python", "-c", program, "two words", CUDA_VISIBLE_DEVICES="", **search)
    assert job.returncode == 0, job.stderr
    assert job.stdout == f"{clone}/.venvs/cuda ['two words']\n"
    assert (tmp_path / "calls").read_text() == f"exec --nv --bind {clone} /images/cuda.sif\n"
