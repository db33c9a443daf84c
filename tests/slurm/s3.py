"""An S3 server on this machine: moto in a process of its own, on loopback, gone with the block that started it.

In: the workflow environment, whose lock holds moto and boto3. Out: what a user types and sets for it, and what lies in the
bucket. It keeps its objects in memory.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.workflow.conftest import ROOT

PYTHON = ROOT / ".venvs/workflow/bin/python"
BUCKET, PREFIX = "drafts", "team/eagle3"
END_S = 20

# the port is the server's own choice, so that two sessions never want the same; the end of its stdin ends it
SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
CLIENT = """
import json, pathlib, sys
import boto3
endpoint, name, prefix, folder, *keys = sys.argv[1:]
session = boto3.session.Session("access", "secret", region_name="us-east-1")
bucket = session.resource("s3", endpoint_url=endpoint).Bucket(name)
for key in keys:
    bucket.download_file(prefix + key, pathlib.Path(folder, pathlib.Path(key).name))
json.dump({entry.key: entry.size for entry in bucket.objects.all()}, sys.stdout)
"""


@dataclass(frozen=True)
class S3:
    """A running server, and one prefix in one bucket for results."""

    endpoint: str

    @property
    def options(self) -> list[str]:
        """What a user adds to the command line, or to a profile."""
        return ["--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/{PREFIX}"]

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets in the environment; the server takes any keys."""
        return {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": self.endpoint,
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": "access",
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": "secret",
        }

    def objects(self) -> dict[str, int]:
        """Key -> bytes, of everything in the bucket; keys below the prefix without it."""
        listing: dict[str, int] = json.loads(self._client(Path()))
        return {key.removeprefix(f"{PREFIX}/"): size for key, size in listing.items()}

    def download(self, folder: Path, *keys: str) -> None:
        """Copies objects into one folder."""
        self._client(folder, *keys)

    def _client(self, folder: Path, *keys: str) -> str:
        command = [str(PYTHON), "-c", CLIENT, self.endpoint, BUCKET, f"{PREFIX}/", str(folder), *keys]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


@contextlib.contextmanager
def running() -> Iterator[S3]:
    """The server for as long as the block runs."""
    process = subprocess.Popen([str(PYTHON), "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        address = process.stdout.readline().split()
        assert len(address) == 2, "the S3 server did not start; its last words are above"
        yield S3(f"http://{address[0]}:{address[1]}")
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
