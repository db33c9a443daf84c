"""Which source files a stage consists of: its script and, transitively, the modules of this repository that it imports.

In: the script's name and the repository's root. Out: paths relative to the root, sorted. Runs while the workflow is parsed, so
it reads the imports from the syntax tree and imports nothing.
"""

import ast
from functools import cache
from pathlib import Path


def source_files(script: str, root: Path) -> list[str]:
    """E.g. `source_files("draft_config", root)` -> ["scripts/draft_config.py", "scripts/eagle3/config.py", ...]."""
    found: set[str] = set()
    frontier = {f"scripts/{script}.py"}
    while frontier:
        found |= frontier
        frontier = {imported for path in frontier for imported in _imports(root, path)} - found
    return sorted(found)


@cache
def _imports(root: Path, path: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = {name.replace(".", "/") + ".py" for name in names if name.startswith("scripts.")}
    return frozenset(file for file in files if (root / file).is_file())
