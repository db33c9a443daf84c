"""How a stage stops: one line that says what was expected, what was found, where, and what to do next.

In: a failed check anywhere in the library. Out: `StageError`, which `stage.run_stage` prints without a trace.
"""


class StageError(Exception):
    """A problem that the user can mend; its text is one line."""


def expect(expected: object, found: object, where: object, advice: str) -> None:
    """Raises StageError unless `expected == found`; `where` names the file or key, `advice` the next step."""
    if expected != found:
        raise StageError(f"{where}: expected {expected}, found {found}; {advice}")


class RowRejected(Exception):
    """One row cannot be used; its text is the reason that goes into the ledger. A stage counts it and goes on."""
