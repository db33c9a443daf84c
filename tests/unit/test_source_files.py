"""The code of a rule decides its rerun: all of what Python loads for it counts, and nothing but what the code does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.eagle3.source_files import _read, code_digest, source_files

ROOT = Path(__file__).parents[2]
RULES = {path: path.read_text() for path in sorted((ROOT / "rules").glob("*.smk"))}
LISTED = sorted({script for text in RULES.values() for script in re.findall(r'code\("(\w+)"\)', text)})


def test_every_rule_watches_the_script_that_it_runs():
    for path, text in RULES.items():
        for rule in re.split(r"^rule ", text, flags=re.MULTILINE)[1:]:
            if "    output:" not in rule:  # runs whenever it is asked for
                continue
            assert re.findall(r'code\("(\w+)"\)', rule) == re.findall(
                r"python -m (?:scripts\.per_gpu )?scripts\.(\w+)", rule
            ), path


@pytest.mark.parametrize("script", LISTED)
def test_watched_sources_hold_every_module_that_the_script_loads(script):
    program = (
        f"import sys; import scripts.{script}; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('scripts.') and m.__file__), sep='\\n')"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = {str(Path(line).relative_to(ROOT)) for line in printed.splitlines() if not line.endswith("__init__.py")}
    assert f"scripts/{script}.py" in loaded
    assert loaded <= set(source_files(script, ROOT))


def test_only_what_the_code_does_changes_its_digest(tmp_path):
    (tmp_path / "scripts/eagle3").mkdir(parents=True)
    script, module = tmp_path / "scripts/stage.py", tmp_path / "scripts/eagle3/shared.py"
    script.write_text("def run():\n    from scripts.eagle3 import shared\n\n    return shared.VALUE\n")
    module.write_text("VALUE = 1\n")

    def digest() -> str:
        _read.cache_clear()
        return code_digest("stage", tmp_path)

    assert source_files("stage", tmp_path) == ["scripts/eagle3/shared.py", "scripts/stage.py"]
    first = digest()
    script.write_text(
        '"""What it does."""\n\n\ndef run():\n    """Runs."""\n    from scripts.eagle3 import shared  # a comment\n\n'
        "    return (shared.VALUE)\n"
    )
    assert digest() == first
    module.write_text("VALUE = 2\n")
    assert digest() != first
