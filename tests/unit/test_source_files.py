"""A rule lists its script and what the script imports: compared here with what Python really loads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.eagle3.source_files import source_files

ROOT = Path(__file__).parents[2]
RULES = {path: path.read_text() for path in sorted((ROOT / "rules").glob("*.smk"))}
LISTED = sorted({script for text in RULES.values() for script in re.findall(r'code\("(\w+)"\)', text)})


def test_every_rule_lists_the_script_that_it_runs():
    for path, text in RULES.items():
        for rule in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]:
            assert re.findall(r'code\("(\w+)"\)', rule) == re.findall(r"python -m scripts\.(\w+)", rule), path


@pytest.mark.parametrize("script", LISTED)
def test_listed_sources_hold_every_module_that_the_script_loads(script):
    program = (
        f"import sys; import scripts.{script}; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('scripts.') and m.__file__), sep='\\n')"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = {str(Path(line).relative_to(ROOT)) for line in printed.splitlines() if not line.endswith("__init__.py")}
    assert f"scripts/{script}.py" in loaded
    assert loaded <= set(source_files(script, ROOT))
