"""A production server for the tests: a process of its own behind /health, and counted commands that stop and start it."""

import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.eagle3.processes import start_time
from scripts.eagle3.production import is_healthy

# Both commands note themselves in `calls`; the server is the leader of a process group of its own.
CONTROL = """
cd {folder}
pid=$(cat pid 2>/dev/null || true)
echo {action} >> calls
case {action} in
start)
    if [[ -n $pid ]] && kill -0 -- "-$pid" 2>/dev/null; then exit 0; fi
    setsid nohup {server} > server.log 2>&1 &
    echo $! > pid ;;
stop)
    if [[ -n $pid ]]; then
        kill -TERM -- "-$pid" 2>/dev/null || exit 0
        while pgrep -g "$pid" > /dev/null; do sleep 0.1; done
    fi ;;
esac
"""


def wait_until(done: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def processes_in(folder: Path) -> list[int]:
    """Living processes whose working directory is `folder`, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and start_time(int(entry.name)):
            try:
                if Path(os.readlink(entry / "cwd")) == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class ServerCase:
    """`server` is the command of a server that answers /health on `port`."""

    def __init__(self, folder: Path, server: Callable[[int], list[str]], timeout_s: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for action in ("start", "stop"):
            text = CONTROL.format(folder=shlex.quote(str(folder)), action=action, server=shlex.join(server(port)))
            (folder / f"{action}.sh").write_text("set -euo pipefail\n" + text)
        self.health = f"http://127.0.0.1:{port}/health"
        self.section = {
            "stop": f"bash {folder}/stop.sh",
            "start": f"bash {folder}/start.sh",
            "health": self.health,
            "timeout": timeout_s,
        }

    def up(self) -> None:
        """Makes it serve, and forgets all calls."""
        os.system(self.section["start"])
        wait_until(lambda: self.healthy() or not self.runs(), "the server", self.section["timeout"])
        assert self.healthy(), (self.folder / "server.log").read_text()[-3000:]
        (self.folder / "calls").unlink()

    def runs(self) -> bool:
        return start_time(int((self.folder / "pid").read_text())) is not None

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def healthy(self) -> bool:
        return is_healthy(self.health)

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)


HEALTH_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def health_server(port: int) -> list[str]:
    """A server without a model, for what does not depend on one."""
    return [sys.executable, "-c", HEALTH_SERVER, str(port)]
