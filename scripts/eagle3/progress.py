"""Progress on screen: one line every few seconds with count, rate and time left.

In: how many units there are and how many are done. Out: lines on standard error.
"""

import sys
import time


class Progress:
    """Counts rows and tokens; prints at most one line per `every_s` seconds, and a last one from `finish`."""

    def __init__(self, what: str, total: int, unit: str = "rows", done: int = 0, every_s: float = 10.0) -> None:
        self.what, self.total, self.unit, self.every_s = what, total, unit, every_s
        self.done, self.already_done = done, done
        self.tokens = 0
        self.started = self.printed = time.monotonic()
        if done:
            print(f"{what}: {done}/{total} {unit} were finished by an earlier run", file=sys.stderr, flush=True)

    def advance(self, count: int = 1, tokens: int = 0, note: str = "") -> None:
        """`count` more units with `tokens` tokens are finished; `note` is appended to the line."""
        self.done += count
        self.tokens += tokens
        if time.monotonic() - self.printed >= self.every_s:
            self._print(note)

    def finish(self, note: str = "") -> None:
        """Prints the closing line."""
        self._print(note)

    def _print(self, note: str) -> None:
        self.printed = time.monotonic()
        elapsed = max(self.printed - self.started, 1e-9)
        new = self.done - self.already_done
        rate = f", {self.tokens / elapsed:.0f} tok/s" if self.tokens else ""
        # the first units of a batch finish together, late: an estimate from a few of them misleads
        known = self.done < self.total and new >= max(1, self.total // 20)
        left = f", {(self.total - self.done) * elapsed / new / 60:.1f} min left" if known else ""
        suffix = f", {note}" if note else ""
        print(f"{self.what}: {self.done}/{self.total} {self.unit}{rate}{left}{suffix}", file=sys.stderr, flush=True)
