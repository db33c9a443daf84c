"""GPUs are granted to one job at a time, with real processes and pretended devices; no process outlives its job."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.eagle3 import gpus
from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import start_time
from tests.production_case import wait_until

ROOT = Path(__file__).parents[2]
POOL = [str(device) for device in range(8)]

# Takes devices again and again; a device that somebody else has taken meanwhile makes the exclusive creation fail.
TAKER = """
import sys, time
from collections.abc import Iterator
from pathlib import Path
from scripts.eagle3.gpus import lease
folder, count, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(times):
    with lease([str(device) for device in range(8)], count, folder / "leases") as devices:
        assert len(set(devices)) == count
        for device in devices:
            open(folder / f"taken-{device}", "x").close()
        time.sleep(0.02)
        for device in devices:
            (folder / f"taken-{device}").unlink()
"""

HOLDER = """
import sys, time
from collections.abc import Iterator
from pathlib import Path
from scripts.eagle3.gpus import lease
with lease(sys.argv[3].split(","), int(sys.argv[2]), Path(sys.argv[1])) as devices:
    print(",".join(devices), flush=True)
    time.sleep(600)
"""


def python(text: str, *arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


@pytest.fixture
def environment(tmp_path) -> Iterator[dict[str, str]]:
    """Eight pretended devices that no other process on this machine knows."""
    devices = [f"{tmp_path.parent.name}-{tmp_path.name}-{device}" for device in POOL]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    yield {**kept, "EAGLE3_ENV": "cpu", "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    for device in devices:
        (gpus.LEASES / f"gpu-{device}").unlink(missing_ok=True)


def on_gpus(environment: dict[str, str], count: int, required: int, *command: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [str(ROOT / "bin/on-gpus"), str(count), str(required), *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def finished(process: subprocess.Popen) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def test_concurrent_leases_never_share_a_device_and_all_get_their_turn(tmp_path):
    takers = [python(TAKER, tmp_path, count, 6) for count in (8, 8, 5, 3, 3, 1)]
    for taker in takers:
        code, printed = finished(taker)
        assert code == 0, printed


def test_a_killed_holder_frees_its_devices_and_who_waits_says_so_once(tmp_path):
    holder = python(HOLDER, tmp_path, 8, ",".join(POOL))
    assert holder.stdout.readline().strip() == ",".join(POOL)
    waiting = python(HOLDER, tmp_path, 2, ",".join(POOL))
    assert waiting.stdout.readline().startswith("waiting for 2 of the GPUs 0,1,2,3,4,5,6,7")
    assert f"pid {holder.pid} in" in (tmp_path / "gpu-0").read_text()
    holder.kill()
    assert waiting.stdout.readline().strip() == "0,1"
    waiting.kill()
    finished(holder)
    assert finished(waiting)[1] == ""


def test_a_small_job_does_not_overtake_a_large_one_that_waits(tmp_path):
    first = python(HOLDER, tmp_path, 1, ",".join(POOL))
    assert first.stdout.readline().strip() == "0"
    large = python(HOLDER, tmp_path, 8, ",".join(POOL))
    assert "waiting for 8" in large.stdout.readline()
    small = python(HOLDER, tmp_path, 1, ",".join(POOL))
    assert "waiting for 1" in small.stdout.readline()
    first.kill()
    assert large.stdout.readline().strip() == ",".join(POOL)
    for process in (first, large, small):
        process.kill()
        process.wait()


def test_the_command_sees_the_granted_devices_also_when_they_are_all(environment):
    code, printed = finished(on_gpus(environment, 8, 8, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"))
    assert (code, printed.splitlines()[-1]) == (0, environment["CUDA_VISIBLE_DEVICES"])
    assert f": 8 of {os.uname().nodename}" in printed.splitlines()[0]


def test_two_jobs_get_different_devices(environment):
    first = on_gpus(environment, 3, 0, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES; read", stdin=subprocess.PIPE)
    first.stdout.readline()
    devices = first.stdout.readline().strip().split(",")
    _, printed = finished(on_gpus(environment, 5, 0, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"))
    assert sorted(devices + printed.splitlines()[-1].split(",")) == sorted(environment["CUDA_VISIBLE_DEVICES"].split(","))
    assert finished(first)[0] == 1  # `read` at the end of its input


def test_without_a_reservation_nothing_is_hidden_or_held(environment):
    with subprocess.Popen([sys.executable, "-c", HOLDER, gpus.LEASES, "8", environment["CUDA_VISIBLE_DEVICES"]], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE) as holder:  # fmt: skip
        holder.stdout.readline()
        code, printed = finished(on_gpus(environment, 0, 8, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"))
        holder.kill()
    assert (code, printed.splitlines()[-1]) == (0, environment["CUDA_VISIBLE_DEVICES"])


def test_no_gpu_means_no_line_and_no_waiting(environment):
    assert finished(on_gpus({**environment, "CUDA_VISIBLE_DEVICES": ""}, 0, 0, "echo", "done")) == (0, "done\n")


@pytest.mark.parametrize(
    ("count", "required", "visible", "line"),
    [
        (4, 8, "0,1,2,3,4,5,6,7", "4 GPUs were granted"),
        (0, 8, "0,1,2,3", "4 GPUs were granted"),
        (8, 0, "0,1,2,3", "8 GPUs are asked for"),
        (1, 0, "", "1 GPUs are asked for"),
    ],
)
def test_too_few_gpus_are_refused_before_the_command_starts(environment, tmp_path, count, required, visible, line):
    code, printed = finished(
        on_gpus({**environment, "CUDA_VISIBLE_DEVICES": visible}, count, required, "touch", str(tmp_path / "ran"))
    )
    assert code == 1
    assert printed.startswith("on_gpus: error: ") and line in printed and printed.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,0,1", "device 0 is named 2 times"),
        ("0,-1,1", "'-1' is no device"),
        ("00,0", "'00' is no device"),
        ("0,,1", "'' is no device"),
        ("a b", "'a b' is no device"),
        ("all", "'all' is no device"),
        ("none", "'none' is no device"),
        ("GPU-abc/def", "'GPU-abc/def' is no device"),
        ("x" * 300, f"'{'x' * 40}' is no device"),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
def test_what_names_no_devices_is_refused_at_once(environment, visible, found, count):
    code, printed = finished(on_gpus({**environment, "CUDA_VISIBLE_DEVICES": visible}, count, 0, "true"))
    assert code == 1
    assert printed.startswith("on_gpus: error: CUDA_VISIBLE_DEVICES on ") and printed.count("\n") == 1
    assert found in printed and "`nvidia-smi -L` lists them" in printed


@pytest.mark.parametrize(
    "device", ["0", "17", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932f9", "MIG-GPU-8932f937/1/0", "pretended_0.a-1"]
)
def test_each_kind_of_name_is_granted(monkeypatch, tmp_path, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with gpus.granted(1, 1, tmp_path) as devices:
        assert devices == [device]


def test_one_gpu_under_two_names_is_refused(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\necho 'GPU-8932f937-d72c, 3'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StageError, match="3,GPU-8932 name a device twice"), gpus.lease(["3", "GPU-8932"], 1, tmp_path):
        pass


def test_leases_that_cannot_be_kept_say_where(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StageError, match=rf"{tmp_path}/file/order: cannot open the lock \(File exists\); .* must be a folder"):
        gpus.open_shared(tmp_path / "file", "order")
    with pytest.raises(StageError, match=r"cannot open the lock \(File name too long\)"):
        gpus.open_shared(tmp_path, "x" * 300)


def test_a_lock_holds_on_a_full_disk(tmp_path):
    with open("/dev/full", "r+", encoding="utf-8") as file:
        assert gpus.take(file)


def test_slurm_devices_are_taken_as_they_are(environment, tmp_path):
    # two jobs on one node may both see devices 0 to 7, each its own
    with python(HOLDER, gpus.LEASES, 8, environment["CUDA_VISIBLE_DEVICES"]) as holder:
        holder.stdout.readline()
        code, printed = finished(on_gpus({**environment, "SLURM_JOB_ID": "7"}, 8, 8, "true"))
        holder.kill()
    assert code == 0 and ": 8 of" in printed
    assert finished(on_gpus({**environment, "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"}, 8, 8, "true"))[0] == 1


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_the_exit_code_is_that_of_the_command(environment, script, code):
    assert finished(on_gpus(environment, 0, 0, "bash", "-c", script))[0] == code


def left_behind(marker: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", marker], capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("ending", ["exit 0", "kill -9 $$"])
def test_orphans_in_other_sessions_are_killed_when_the_command_ends(environment, tmp_path, ending):
    marker = f"orphan-{os.getpid()}-{time.time_ns()}"
    worker = f"exec -a {marker} sleep 600"
    script = f"setsid bash -c '{worker}' & (setsid bash -c '{worker}' &); while [[ $(pgrep -cf ^{marker}) != 2 ]]; do :; done"
    finished(on_gpus(environment, 0, 0, "bash", "-c", f"{script}; {ending}", stdin=subprocess.DEVNULL))
    assert left_behind(f"^{marker}") == []


def test_asked_to_end_the_command_saves_before_its_workers_are_killed(environment, tmp_path):
    script = f"trap 'sleep 0.5; touch {tmp_path}/saved; exit 9' TERM; setsid sleep 600 & echo $!; wait"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = on_gpus({**environment, "CUDA_VISIBLE_DEVICES": ""}, 0, 0, "bash", "-c", script)
        worker = int(process.stdout.readline())
        process.send_signal(number)
        process.send_signal(number)
        assert finished(process)[0] == 9
        assert start_time(worker) is None
        (tmp_path / "saved").unlink()


# What the driver's tool would say: the file holds MiB, one line per GPU.
DRIVER = """#!/bin/bash
case "$*" in
*compute-apps*) echo "4711, python, 70000" ;;
*memory.used*) cat {memory} ;;
esac
"""


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Path:
    """A stand-in for nvidia-smi, for machines without a GPU; `-m gpu` asks the real one."""
    memory = tmp_path / "memory"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(DRIVER.format(memory=memory))
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return memory


def test_a_job_waits_for_the_memory_of_its_gpus(driver, environment, tmp_path):
    driver.write_text("3\n80000\n")
    environment = {**environment, "PATH": os.environ["PATH"], "EAGLE3_ENV": "cuda"}
    command = [sys.executable, "-m", "scripts.on_gpus", "--gpus", "2", "--min-gpus", "0", "--", "echo", "started"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        first, second = environment["CUDA_VISIBLE_DEVICES"].split(",")[:2]
        assert process.stdout.readline().startswith(f"GPUs {first},{second}: 2 of")
        assert process.stdout.readline() == f"waiting for memory: GPU {second}: 80000 MiB in use\n"
        driver.write_text("3\n300\n")
        assert process.stdout.readline() == "started\n"
    assert process.returncode == 0


def test_memory_that_is_never_freed_names_gpu_amount_and_process(driver):
    driver.write_text("2\n70003\n")
    with pytest.raises(StageError, match=r"GPU 5: 70003 MiB in use on .* after 0 s.*4711 python 70000"):
        gpus.wait_for_memory(["4", "5"], 0)


ALLOCATE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8 << 30)) == 0
print("allocated", flush=True)
sys.stdin.readline()
"""


@pytest.mark.gpu
def test_memory_of_a_real_gpu_is_waited_for():
    device = gpus.visible_devices()[0]
    gpus.wait_for_memory([device], 10)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    holder = python(ALLOCATE, env=environment, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "allocated\n"
    with pytest.raises(StageError, match=rf"GPU {device}: (8|9)\d\d\d MiB in use"):
        gpus.wait_for_memory([device], 1)
    holder.communicate("\n", timeout=60)
    gpus.wait_for_memory([device], 60)
    wait_until(lambda: holder.poll() is not None, "the end of the holder")
