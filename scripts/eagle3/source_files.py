"""The code of a stage: its script and, transitively, the modules of this repository that it imports.

In: the script's name and the repository's root. Out: their paths, and a digest that comments, docstrings, formatting and file
times do not change. Runs while the workflow is parsed, so it reads syntax trees and imports nothing.

Why a digest in `params` and not the files as rule inputs: Snakemake reruns everything below a job that ran, whatever the job
left, so an edited comment in the extraction would train again.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path


def source_files(script: str, root: Path) -> list[str]:
    """E.g. `source_files("draft_config", root)` -> ["scripts/draft_config.py", "scripts/eagle3/config.py", ...]."""
    found: set[str] = set()
    frontier = {f"scripts/{script}.py"}
    while frontier:
        found |= frontier
        frontier = {imported for path in frontier for imported in _read(root, path)[0]} - found
    return sorted(found)


def code_digest(script: str, root: Path) -> str:
    """16 hex digits over what the source files of a stage do."""
    code = [(path, _read(root, path)[1]) for path in source_files(script, root)]
    return hashlib.sha256(repr(code).encode()).hexdigest()[:16]


@cache
def _read(root: Path, path: str) -> tuple[frozenset[str], str]:
    """(files that the file imports, its syntax tree as text without docstrings)."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    files = {name.replace(".", "/") + ".py" for name in names if name.startswith("scripts")}
    return frozenset(file for file in files if (root / file).is_file()), ast.dump(tree)
