"""A real Slurm on this machine: one controller and two nodes with eight pretended GPUs each, on loopback only.

In: root rights and Debian's slurm-wlm, which is installed when missing. Out: a running cluster, its jobs as Slurm itself
tells them, and nothing of it after the end. Slurm's configuration belongs to the whole system: jobs lose SLURM_CONF on
their way, so it must lie in /etc/slurm. A file there that this module did not write is never touched.

By hand, to try a profile: `python -m tests.slurm.slurm` runs the cluster until Ctrl-C.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

NODES = {"b300-node01": 26818, "b300-node02": 26819}  # name -> port of its slurmd
GPUS = 8
MARKER = "# Written by the tests of eagle3-flow, which remove it when they end."
FILES = ("slurm.conf", "gres.conf", "cgroup.conf")
START_S, END_S = 60, 90
NULL_DEVICE = os.makedev(1, 3)

# auth/none and cred/none need no key, so only loopback may reach the daemons. linuxproc: a container has no cgroups.
# config_overrides: believe the CPUs and the memory that a node declares. MinJobAge: ended jobs can be asked for an hour.
SLURM_CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MinJobAge=3600
KillWait=30
GresTypes=gpu
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=ALL MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000000 Gres=gpu:b300:{gpus}"
GRES = "NodeName={name} Name=gpu Type=b300 File={root}/gpu[0-{last}]"


class SlurmError(Exception):
    """The cluster cannot be started or stopped; one line that says why and what to do."""


@dataclass(frozen=True)
class SlurmJob:
    """One job as `scontrol show job` tells it; `name` is what Snakemake calls it, e.g. rule_train_draft_wildcards_0."""

    id: int
    name: str
    state: str
    node: str
    start: datetime | None
    end: datetime | None
    memory_mb: int
    gpus: int
    output: Path

    @property
    def rule(self) -> str:
        return self.name.removeprefix("rule_").split("_wildcards_")[0]

    def overlaps(self, other: "SlurmJob") -> bool:
        """Whether both ran at the same time; Slurm counts whole seconds, ends are taken as before starts."""
        assert self.start and self.end and other.start and other.end
        return self.start < other.end and other.start < self.end


class Slurm:
    """The cluster; `etc` and `root` (its state, logs and devices) differ from the defaults only where nothing is started."""

    def __init__(self, etc: Path = Path("/etc/slurm"), root: Path = Path("/run/eagle3-flow-slurm")) -> None:
        self.etc, self.root = etc, root
        self._lock: IO[str] | None = None

    def start(self) -> None:
        """Starts all daemons and waits until both nodes are idle; clears what a killed session of these tests left."""
        self.refuse_foreign_configuration()
        self._take_lock()
        try:
            self._clear()
            self._write()
            _call("slurmctld", "-i", "-c")
            for name in NODES:
                _call("slurmd", "-N", name, "-c")
            wait_for(lambda: self._node_states() == {"idle"}, START_S, self._trouble)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all jobs and daemons, then removes every file that `start` made."""
        try:
            self._clear()
        finally:
            if self._lock is not None:
                self._lock.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def refuse_foreign_configuration(self) -> None:
        """SlurmError where a configuration exists that these tests did not write."""
        for name in FILES:
            path = self.etc / name
            if path.exists() and MARKER not in path.read_text(errors="replace").splitlines()[:1]:
                raise SlurmError(
                    f"{path}: expected no Slurm configuration, found one that these tests did not write; nothing was "
                    "changed. Run the tests on a machine without Slurm"
                )

    def jobs(self, after: int = 0) -> list[SlurmJob]:
        """All jobs with a number above `after`, running and ended, in the order of their submission."""
        lines = _call("scontrol", "show", "job", "-o").splitlines()
        jobs = [_parse_job(line) for line in lines if line.startswith("JobId=")]
        return sorted((job for job in jobs if job.id > after), key=lambda job: job.id)

    def last_job(self) -> int:
        """The number of the newest job, 0 where there is none."""
        return max((job.id for job in self.jobs()), default=0)

    def queue(self) -> list[str]:
        """The jobs that wait, run or are being ended."""
        return _call("squeue", "-h", "-o", "%i %T %k").splitlines()

    def cancel(self, job: SlurmJob) -> None:
        """What a user does: scancel."""
        _call("scancel", str(job.id))

    def _take_lock(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.root / "lock", "a")  # noqa: SIM115 - held as long as the cluster runs
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SlurmError(f"{self.root}: another session of these tests runs its cluster; wait for its end") from None

    def _write(self) -> None:
        host = socket.gethostname().split(".")[0]
        for name in NODES:
            (self.root / "spool" / name).mkdir(parents=True)
        for name in ("state", "log"):
            (self.root / name).mkdir()
        for number in range(GPUS):
            # Slurm hands out a GPU only where its file is a device; the content is never looked at
            os.mknod(self.root / f"gpu{number}", 0o666 | stat.S_IFCHR, NULL_DEVICE)
        nodes = "\n".join(NODE.format(name=name, host=host, port=port, gpus=GPUS) for name, port in NODES.items())
        gres = "\n".join(GRES.format(name=name, root=self.root, last=GPUS - 1) for name in NODES)
        contents = (
            SLURM_CONF.format(host=host, root=self.root, nodes=nodes),
            f"AutoDetect=off\n{gres}\n",
            "CgroupAutomount=no\n",
        )
        self.etc.mkdir(exist_ok=True)
        for name, content in zip(FILES, contents, strict=True):
            (self.etc / name).write_text(f"{MARKER}\n{content}")

    def _clear(self) -> None:
        """Ends what runs and removes what was written, by this session or by one that was killed."""
        if self._daemon("slurmctld"):
            with contextlib.suppress(SlurmError):  # a controller that does not answer is stopped below
                _call("scancel", "--user=root")
                wait_for(lambda: not self.queue(), END_S, lambda: f"jobs do not end: {self.queue()}")
        for name in [*(f"slurmd-{node}" for node in NODES), "slurmctld"]:
            pid = self._daemon(name)
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda name=name: self._daemon(name) is None, END_S, lambda pid=pid: f"daemon {pid} does not end")
        for name in FILES:
            (self.etc / name).unlink(missing_ok=True)
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _daemon(self, name: str) -> int | None:
        """The process id of a daemon of ours that lives."""
        try:
            pid = int((self.root / f"{name}.pid").read_text())
            # empty where it has ended and its parent has not asked how
            program = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
        except (OSError, ValueError):
            return None
        return pid if os.path.basename(program) == name.split("-")[0] else None

    def _node_states(self) -> set[str]:
        with contextlib.suppress(SlurmError):  # the controller may not answer yet
            lines = _call("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").splitlines()
            if len(lines) == len(NODES):
                return {line.split()[1] for line in lines}
        return set()

    def _trouble(self) -> str:
        logs = "\n".join(f"{path}:\n" + path.read_text()[-1500:] for path in sorted(self.root.glob("log/*.log")))
        return f"nodes are {self._node_states()}, expected idle\n{logs}"


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """The cluster for as long as the block runs."""
    slurm = Slurm()
    slurm.start()
    try:
        yield slurm
    finally:
        slurm.stop()


def install() -> None:
    """Debian's slurm-wlm, where its programs are missing."""
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")):
        return
    if not shutil.which("apt-get"):
        raise SlurmError(
            "Slurm is not installed and there is no apt-get; install slurmctld, slurmd and Slurm's client programs"
        )
    _call("apt-get", "update", "-qq")
    _call("apt-get", "install", "-y", "-qq", "--no-install-recommends", "slurm-wlm")


def wait_for(condition: Callable[[], bool], deadline_s: float, trouble: Callable[[], str], interval_s: float = 0.2) -> None:
    """Polls until the condition holds; SlurmError with what `trouble` tells after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise SlurmError(f"after {deadline_s:.0f} s: {trouble()}")
        time.sleep(interval_s)


def _call(*command: str) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # a daemon would hold a pipe open for ever; these write to their logs
    daemon = command[0] in ("slurmctld", "slurmd")
    output = subprocess.DEVNULL if daemon else subprocess.PIPE
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, env=environment)
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stderr or '').strip()[-2000:]}")
    return done.stdout or ""


def _parse_job(line: str) -> SlurmJob:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    gpus = re.search(r"gpu(?::\w+)?[:=](\d+)", fields.get("TresPerJob", "") or fields.get("TresPerNode", ""))
    return SlurmJob(
        id=int(fields["JobId"]),
        name=fields.get("Comment", ""),
        state=fields["JobState"],
        node=fields["NodeList"],
        start=_time(fields["StartTime"]),
        end=_time(fields["EndTime"]),
        memory_mb=_megabytes(fields["MinMemoryNode"]),
        gpus=int(gpus[1]) if gpus else 0,
        output=Path(fields["StdOut"]),
    )


def _megabytes(text: str) -> int:
    unit = {"M": 1, "G": 1024, "T": 1024**2}.get(text[-1])
    return round(float(text[:-1]) * unit) if unit else 0  # 0: the job asked for nothing


def _time(text: str) -> datetime | None:
    return None if text == "Unknown" else datetime.fromisoformat(text)


if __name__ == "__main__":
    install()
    with running() as cluster, contextlib.suppress(KeyboardInterrupt):
        print(_call("sinfo", "-N", "-o", "%N %P %T %c %m %G"), end="")
        signal.pause()
