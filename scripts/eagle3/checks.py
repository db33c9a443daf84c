"""The table of preflight: each check asks one question and makes one line of it.

In: a question, which returns what it found, or raises Fault (red) or Skipped. Out: lines, and the table as text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from scripts.eagle3.errors import StageError

State = Literal["green", "red", "skipped"]
COLOURS = {"green": "\033[32m", "red": "\033[31m", "skipped": "\033[2m"}


@dataclass(frozen=True)
class Line:
    """One line of the table; `advice` says what to do about a red one."""

    section: str
    name: str
    state: State
    found: str
    advice: str = ""


class Fault(StageError):
    """What makes a line red: what was found, and what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.found, self.advice = found, advice


class Skipped(Exception):
    """The question cannot be asked here or now; its text is the reason."""


def check(section: str, name: str, question: Callable[[], str]) -> Line:
    """Asks. A check that breaks is red: nothing that was not seen to be in order is green."""
    try:
        return Line(section, name, "green", question())
    except Skipped as reason:
        return Line(section, name, "skipped", str(reason))
    except Fault as fault:
        return Line(section, name, "red", fault.found, fault.advice)
    except StageError as error:
        found, _, advice = str(error).rpartition("; ")
        return Line(section, name, "red", found or str(error), advice if found else "mend what it names")
    except Exception as error:
        return Line(section, name, "red", f"the check itself broke: {first_line(error)}", "mend what it names, or report it")


def first_line(error: BaseException) -> str:
    """`Type: first line of the message`."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def some(items: Sequence[str], shown: int = 3) -> str:
    """The first few of many, and how many more there are."""
    rest = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {rest} more" if rest > 0 else "")


def table(lines: Sequence[Line], colour: bool = False) -> str:
    """The lines as text in columns; below each red one, what to do."""
    widths = [max((len(getattr(line, column)) for line in lines), default=0) for column in ("section", "name", "state")]
    rows = []
    for line in lines:
        state = line.state.ljust(widths[2])
        if colour:
            state = f"{COLOURS[line.state]}{state}\033[0m"
        rows.append(f"{line.section.ljust(widths[0])}  {line.name.ljust(widths[1])}  {state}  {line.found}")
        if line.state == "red":
            rows.append(f"{' ' * (sum(widths) + 6)}-> {line.advice}")
    return "\n".join(rows)


def refuse_red(what: str, lines: Sequence[Line]) -> None:
    """StageError that names the red lines, if there are any."""
    red = [f"{line.name} ({line.found})" for line in lines if line.state == "red"]
    if red:
        raise StageError(f"{what}: {len(red)} of {len(lines)} lines are red: {', '.join(red)}; what to do stands in the table")
