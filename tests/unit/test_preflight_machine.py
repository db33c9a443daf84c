"""Preflight's lines about GPUs, disks and the production server: each with its fault planted. The driver is a script."""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from scripts.eagle3 import checks_place
from scripts.eagle3.checks import check, table
from scripts.eagle3.checks_gpus import Asked, check_gpus, check_scheduler, gpu_lines
from scripts.eagle3.checks_place import disk_lines, production_lines
from scripts.eagle3.config import Production, Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_json
from scripts.eagle3.gpus import lease
from scripts.preflight import check_sources, check_training_memory, leased_gpus
from tests.preflight_case import assert_red, config_for, copy_target, line

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an nvidia-smi on PATH that lists what it is called with: (name, MiB, MiB in use, driver, capability)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus: tuple[str, int, int, str, str], processes: str = "", code: int = 0) -> None:
        rows = [
            f"{index}, GPU-{index}{index}{index}, {name}, {total}, {used}, {version}, {capability}"
            for index, (name, total, used, version, capability) in enumerate(gpus)
        ]
        folder = tmp_path / "driver"
        folder.mkdir()
        (folder / "gpus").write_text("\n".join(rows) + "\n")
        (folder / "processes").write_text(processes)
        script = folder / "nvidia-smi"
        script.write_text(
            f"#!/bin/bash\nif [ {code} != 0 ]; then echo 'no communication with the driver' >&2; exit {code}; fi\n"
            f'case "$1" in *-gpu=*) cat {folder}/gpus;; *-compute-apps=*) cat {folder}/processes;; *) exit 1;; esac\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return install


def gpu(total: int = 97887, used: int = 4, version: str = "580.95.05", name: str = RTX, capability: str = "12.0"):
    return name, total, used, version, capability


def ask(target: Target | None, gpus: int, min_gpus: int = 0, **more):
    return gpu_lines(target, Asked(gpus, min_gpus, **more))


def with_weights(target: Target, folder: Path, size: float) -> Target:
    """The target with a hole of `size` bytes as one more file of weights."""
    copy = copy_target(target, folder)
    with open(folder / "more.safetensors", "wb") as file:
        file.truncate(int(size))
    return copy


# -- GPUs -------------------------------------------------------------------------------------------------------------


def test_eight_free_gpus_of_one_kind_are_green_and_named(driver, tiny_llama):
    driver(*[gpu()] * 8)
    lines = ask(tiny_llama, 8, 8)
    assert [each.state for each in lines] == ["green"] * 4
    assert f"8 x {RTX}, 97887 MiB each, compute capability 12.0" in line(lines, "GPUs").found


@pytest.mark.parametrize("visible", ["0,0", "0,all"])
def test_what_names_no_devices_is_red(driver, tiny_llama, monkeypatch, visible):
    driver(*[gpu()] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert_red(line(ask(tiny_llama, 2), "GPUs"), "CUDA_VISIBLE_DEVICES", "nvidia-smi -L")


def test_fewer_gpus_than_a_job_gets_are_red(driver, tiny_llama):
    driver(*[gpu()] * 6)
    assert_red(line(ask(tiny_llama, 8), "GPUs"), "6 GPUs", "8", "nvidia-smi -L")


def test_only_visible_devices_count(driver, tiny_llama, monkeypatch):
    driver(*[gpu()] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-333")
    assert_red(line(ask(tiny_llama, 4), "GPUs"), "2 GPUs", "CUDA_VISIBLE_DEVICES=0,GPU-333")
    assert line(ask(tiny_llama, 2), "GPUs").state == "green"


def test_profile_with_fewer_gpus_than_the_config_wants_is_red(tiny_llama):
    assert_red(line(ask(tiny_llama, 1, min_gpus=8), "GPUs"), "target.min_gpus is 8", "profile")


def test_gpus_of_two_kinds_are_red(driver, tiny_llama):
    driver(gpu(), gpu(name="NVIDIA H200", total=143771, capability="9.0"))
    assert_red(line(ask(tiny_llama, 2), "GPUs"), RTX, "NVIDIA H200")


def test_driver_that_does_not_answer_is_red(driver, tiny_llama):
    driver(code=9)
    (only,) = ask(tiny_llama, 8)
    assert_red(only, "no communication with the driver", "mend the driver")


def test_machine_without_a_gpu_is_red_unless_jobs_run_elsewhere_or_devices_are_pretended(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert_red(line(ask(tiny_llama, 8), "GPUs"), "0 GPUs")
    assert line(ask(tiny_llama, 8, elsewhere=True), "GPUs").state == "skipped"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert line(ask(tiny_llama, 8), "GPUs").state == "skipped"
    assert_red(line(ask(tiny_llama, 9), "GPUs"))


def test_no_gpu_asked_for_is_skipped(tiny_llama):
    (only,) = ask(tiny_llama, 0)
    assert (only.name, only.state) == ("GPUs", "skipped")


def test_weights_that_do_not_fit_are_red_and_fit_on_more_gpus(driver, tiny_llama, tmp_path):
    target = with_weights(tiny_llama, tmp_path / "large", 547e9)
    driver(*[gpu()] * 8)
    assert line(ask(target, 8), "GPU memory").state == "green"
    assert_red(line(ask(target, 4), "GPU memory"), "547.0 GB of weights", "4 GPUs")


def test_memory_is_not_asked_without_the_target(driver):
    driver(gpu())
    assert line(ask(None, 1), "GPU memory").state == "skipped"


def test_gpus_in_use_are_red_with_their_holder_unless_production_will_stop(driver, tiny_llama):
    driver(gpu(used=70000), gpu(), processes="4242, python3, 69000 MiB\n")
    assert_red(line(ask(tiny_llama, 2), "GPUs in use"), "GPU 0: 70000 MiB", "4242 python3")
    found = line(ask(tiny_llama, 2, production=True), "GPUs in use")
    assert found.state == "green" and "production server is stopped" in found.found


def test_gpus_of_other_jobs_are_waited_for(driver, tiny_llama, tmp_path):
    driver(gpu(used=70000), gpu())
    with lease(["0"], 1, tmp_path / "leases"):
        leased = leased_gpus(tmp_path / "leases")
        assert leased == {"0"}
        assert "new ones wait" in line(ask(tiny_llama, 2, leased=leased), "GPUs in use").found
    assert leased_gpus(tmp_path / "leases") == frozenset()


def test_old_driver_is_red(driver, tiny_llama):
    driver(gpu(version="550.54.15"))
    assert_red(line(ask(tiny_llama, 1), "driver"), "550.54.15", "CUDA 13.0", "580")


def test_driver_for_a_cuda_that_is_not_known_is_skipped(driver, tiny_llama, monkeypatch):
    driver(gpu())
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    assert line(ask(tiny_llama, 1), "driver").state == "skipped"


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([gpu(), gpu(name="NVIDIA H200")], "several kinds"),
        ([gpu()] * 3, "cannot be divided over 3 GPUs"),
        ([gpu(total=2000)] * 2, "GB of weights"),
        ([gpu(version="470.1")] * 2, "driver 470.1"),
    ],
)
def test_gpu_job_stops_at_its_head(driver, tiny_llama, gpus, words):
    driver(*gpus)
    with pytest.raises(StageError, match=words):
        check_gpus(tiny_llama)


def test_gpu_job_goes_on_quickly_and_without_cuda(driver, tiny_llama):
    driver(*[gpu(used=70000)] * 2)  # in use: `bin/on-gpus` has waited for that
    begun = time.monotonic()
    check_gpus(tiny_llama)
    assert time.monotonic() - begun < 3
    assert not torch.cuda.is_initialized()


# -- disks ------------------------------------------------------------------------------------------------------------


def test_writable_folders_are_green_and_stay_empty(tmp_path):
    lines = disk_lines(tmp_path / "results/run", tmp_path / "states")
    assert [each.state for each in lines] == ["green", "green"]
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_red(tmp_path):
    lines = disk_lines(tmp_path, Path("/proc/states"))
    assert_red(line(lines, "hidden states"), "/proc cannot be written to", "let")
    assert line(lines, "run folder").state == "green"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
def test_read_only_disk_is_named(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    assert os.system(f"mount -t tmpfs -o ro tmpfs {place}") == 0
    try:
        assert_red(line(disk_lines(place / "results/run", tmp_path), "run folder"), "mounted read-only")
    finally:
        os.system(f"umount {place}")


def test_file_in_place_of_the_folder_is_red(tmp_path):
    (tmp_path / "results").touch()
    assert_red(line(disk_lines(tmp_path / "results/run", tmp_path), "run folder"), "is a file")


def test_disk_that_the_plan_overfills_is_red(tmp_path):
    run = tmp_path / "run"
    write_json(run / "plan.json", {"disks": [{"path": str(run), "needed": 1e18, "free": 0}]})
    lines = disk_lines(run, tmp_path / "states")
    assert_red(line(lines, "run folder"), "plan.json", "1000000000.0 GB")
    write_json(run / "plan.json", {"disks": [{"path": str(run), "needed": 1e6, "free": 0}]})
    assert "needed by plan.json" in line(disk_lines(run, tmp_path), "run folder").found


def test_nearly_full_disk_is_red_without_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(checks_place, "LEAST_BYTES", 1e18)
    assert_red(line(disk_lines(tmp_path, tmp_path), "run folder"), "make room")


# -- production server ------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A real server behind /health."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/health"
    http.shutdown()
    thread.join()
    http.server_close()


def production(health: str = "http://127.0.0.1:1/health", **commands: str) -> Production:
    return Production(**{"stop": "sleep 0", "start": "sleep 0", "health": health, **commands})


def test_no_production_server_is_one_skipped_line():
    (only,) = production_lines(None)
    assert only.state == "skipped"


def test_server_that_is_up_or_down_is_information(server):
    up, down = (line(production_lines(production(url)), "server") for url in (server, "http://127.0.0.1:1/health"))
    assert up.state == down.state == "green"
    assert "is stopped before the first GPU job" in up.found and "does not answer" in down.found


@pytest.mark.parametrize("name", ["stop", "start"])
@pytest.mark.parametrize(
    ("command", "words"), [("sytemctl stop vllm", "sytemctl is no command"), ("echo 'open", "cannot read it"), ("", "empty")]
)
def test_command_that_cannot_be_run_is_red(name, command, words):
    assert_red(line(production_lines(production(**{name: command})), f"{name} command"), words)


def test_shell_expression_is_not_judged():
    assert line(production_lines(production(stop="cd /srv && ./stop")), "stop command").state == "skipped"
    assert line(production_lines(production(stop="GPUS=8 ./stop")), "stop command").state == "skipped"


def test_commands_of_another_machine_are_not_looked_up():
    lines = production_lines(production(stop="no-such-command", host="another-machine"))
    assert line(lines, "stop command").state == "skipped"


# -- table ------------------------------------------------------------------------------------------------------------


def test_table_says_what_to_do_below_each_red_line(tmp_path):
    lines = [*disk_lines(tmp_path, Path("/proc/states")), *production_lines(None)]
    rows = table(lines).splitlines()
    assert len(rows) == len(lines) + 1
    assert rows[1].startswith("disk        hidden states  red      /proc")
    assert rows[2].strip().startswith("-> let")


def test_a_run_under_slurm_needs_its_commands_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_red(check("machine", "scheduler", check_scheduler), "sbatch", "Slurm's commands")
    for command in ("sbatch", "squeue", "sacct", "scancel"):
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    assert check("machine", "scheduler", check_scheduler).state == "green"


def test_a_source_that_is_not_there_is_red(tiny_llama):
    config = config_for(tiny_llama)
    assert check_sources(config) == "2 sources"
    missing = config_for(
        tiny_llama, conversations={"train": [{"path": "prompts.jsonl"}], "evaluation": {"suite": {"path": "/nowhere"}}}
    )
    assert_red(check("conversations", "sources", lambda: check_sources(missing)), "prompts.jsonl: no such file", "mend")


def test_training_that_does_not_fit_on_a_gpu_is_red_with_the_needed_figure(driver, monkeypatch, tiny_llama):
    config = config_for(tiny_llama, training={"batch_tokens": 8192})

    def asked():
        return check("draft", "training memory", lambda: check_training_memory(tiny_llama, config, False))

    assert asked().state == "skipped"
    driver(gpu(), gpu(total=64))
    assert asked().state == "skipped"  # jobs run in the CPU environment
    monkeypatch.setenv("EAGLE3_ENV", "cuda")
    assert_red(
        asked(), "batch_tokens 8192 needs about 0.2 GB", "on each of 2 GPUs", "one has 0.1 GB", "lower training.batch_tokens"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert asked().state == "green"
