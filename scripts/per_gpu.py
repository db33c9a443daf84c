"""Runs a stage in one process for each GPU that its job has: `python -m scripts.per_gpu scripts.train_draft --target ...`.

torchrun's library starts the processes (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and watches them. Out: exit
code 0 when all ended with it; 1 when one failed, with a line that names it, after the others were ended too (NCCL alone would
wait for it); 128 + n after signal n, when all have saved what they had. Without a second GPU the stage runs in this process.

Over several nodes (bin/on-nodes sets EAGLE3_NODES and EAGLE3_RENDEZVOUS, host:port) one launcher on each node starts the
processes of its node. They find each other at the port, which the launcher on that host opens.
"""

import argparse
import os
import socket
import sys
import uuid
from collections.abc import Sequence

from scripts.eagle3.engine import visible_gpus
from scripts.eagle3.errors import StageError
from scripts.eagle3.stage import run_stage

# Seconds that processes which were told to end get to save their state: as long as Snakemake's own wait lets them.
SAVING_S = 3600
# Seconds that the launchers of all nodes get to find each other: environments are read from a shared file system.
JOIN_S = 300


def run(processes: int, module: str, arguments: Sequence[str]) -> None:
    """Runs `python -m module` in `processes` processes of this machine; StageError where one fails."""
    command = ["-m", module, *arguments]
    nodes = int(os.environ.get("EAGLE3_NODES", "1"))
    if processes * nodes == 1:
        os.execv(sys.executable, [sys.executable, *command])
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // processes))
    # read by torch 2.12 and later; before, processes get 30 s
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    meeting = os.environ["EAGLE3_RENDEZVOUS"] if nodes > 1 else "127.0.0.1:0"
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=meeting if nodes > 1 else uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting,
        rdzv_configs={"timeout": JOIN_S},
        local_addr="127.0.0.1" if nodes == 1 else None,  # no host name to look up
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {-failure.exitcode}"
        where = f"{processes * nodes}, on {node_name()}," if nodes > 1 else f"{processes}"
        raise StageError(f"{module}: process {rank} of {where} ended first, with {ended}; the others were ended") from None
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except RendezvousError as error:
        raise StageError(
            f"{module}: {node_name()} did not meet {nodes} nodes at {meeting} within {JOIN_S} s ({type(error).__name__}); "
            "look at what the others said, and let all nodes reach that port"
        ) from error


def node_name() -> str:
    """As Slurm calls this machine, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="default: one for each visible GPU")
    parser.add_argument("module", help="the stage, e.g. scripts.train_draft")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")
    options = parser.parse_args(argv)
    run(options.processes or max(1, visible_gpus()), options.module, options.arguments)


if __name__ == "__main__":
    run_stage(main)
