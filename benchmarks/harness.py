"""Measurements that each run in a process of their own, with a time limit: a GPU is empty again after each.

In: steps (function, arguments, environment, limit). Out: a JSON line each in `{output}/results.jsonl` and on the screen.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

RESULT = "RESULT "
KEPT_CHARACTERS = 1500
# tells the logs of steps that run side by side apart
NUMBERS = itertools.count()


class Step(NamedTuple):
    """One measurement: the function's name, its arguments, environment variables, seconds that it may take."""

    name: str
    arguments: dict[str, Any]
    limit_s: int
    environment: Mapping[str, str] = {}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder in memory: target and states, up to 30 GB")
    parser.add_argument("--output", type=Path, required=True, help="folder for results.jsonl and the logs of failures")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def run_steps(module: str, steps: list[Step], work: Path, output: Path, keep_going: bool, parallel: int = 1) -> None:
    """Runs each step with `python -m {module} --work --output --one STEP`, `parallel` of them at a time.

    The first failure ends it once those that run are done, unless `keep_going`.
    """
    output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(parallel) as pool:
        measured = [pool.submit(_measure, module, step, work, output) for step in steps]
        for result in measured:
            if not result.result() and not keep_going:
                pool.shutdown(cancel_futures=True)
                sys.exit(1)


def run_one(step: str, work: Path, functions: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """In the step's own process: measures and prints."""
    from scripts.eagle3.engine import device_name, engine_version

    name, arguments = json.loads(step)
    result = functions[name](work, **arguments)
    print(RESULT + json.dumps({**result, "engine": engine_version(), "device": device_name()}), flush=True)


def _measure(module: str, step: Step, work: Path, output: Path) -> bool:
    command = [sys.executable, "-m", module, "--work", str(work), "--output", str(output)]
    command += ["--one", json.dumps([step.name, step.arguments])]
    began, log = time.perf_counter(), output / f"{step.name}-{int(time.time())}-{next(NUMBERS)}.log"
    with open(log, "wb") as screen:  # a file: what was said stays, whoever ends this process
        try:
            environment = {**os.environ, **step.environment}
            code = subprocess.run(command, env=environment, stdout=screen, stderr=screen, timeout=step.limit_s).returncode
        except subprocess.TimeoutExpired:
            code = 124
    said = log.read_text(errors="replace")
    found = [line for line in said.splitlines() if line.startswith(RESULT)]
    record = {"measurement": step.name, **step.arguments, **step.environment}
    record["wall_s"] = round(time.perf_counter() - began, 1)
    if code == 0 and found:
        record |= json.loads(found[-1].removeprefix(RESULT))
        log.unlink()
    else:
        record["failed"] = code
        print(said[-KEPT_CHARACTERS:])
    with open(output / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)
    return code == 0 and bool(found)
