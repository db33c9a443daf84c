"""Writes what is derived from the typed configuration: config/schema.json for editors, docs/configuration.md for people.

In: scripts/eagle3/config.py. Out: the two files; `--check` only compares and fails when one is stale.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import json_schema
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_text
from scripts.eagle3.stage import run_stage

INTRODUCTION = """# Configuration

Generated from `scripts/eagle3/config.py` by `python -m scripts.make_schema`. One YAML file describes a run;
`config/config.yaml` is the demo's and is read only when no other `--configfile` is given. Unknown keys and wrong types stop
the workflow before anything runs, with the key's name. `config/schema.json` is the same for editors that know JSON schema.

What stands here changes results, so a change reruns what depends on it. What only changes where and how fast (GPUs, memory
shares, batch sizes of the engine) stands in `resources` of the rules and in profiles, and reruns nothing.

| key | type | default | meaning |
|---|---|---|---|
"""


def documented_keys(schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, description) for every key; `*` stands for a name and `[]` for a list item."""
    yield from _walk(schema, schema, "")


def run(root: Path, check: bool) -> None:
    """Writes, or with `check` compares, both files under `root`; a stale one is a StageError."""
    schema = json_schema()
    table = "".join(f"| `{key}` | {kind} | {default} | {text} |\n" for key, kind, default, text in documented_keys(schema))
    for path, text in (
        (root / "config" / "schema.json", json.dumps(schema, indent=2) + "\n"),
        (root / "docs" / "configuration.md", INTRODUCTION + table),
    ):
        if not check:
            write_text(path, text)
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise StageError(f"{path}: stale; run `python -m scripts.make_schema`")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    run(Path("."), parser.parse_args(argv).check)


def _walk(schema: dict[str, Any], node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    required = node.get("required", [])
    for name, item in node["properties"].items():
        key = f"{prefix}{name}"
        default = "required" if name in required else _default(schema, item)
        yield (
            key,
            _type(schema, item),
            default,
            item.get("description") or _resolve(schema, item).get("description", ""),
        )
        for suffix, child in _children(schema, item):
            yield from _walk(schema, child, f"{key}{suffix}.")


def _resolve(schema: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][item["$ref"].rsplit("/", 1)[1]] if "$ref" in item else item


def _children(schema: dict[str, Any], item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for option in item.get("anyOf", [item]):
        resolved = _resolve(schema, option)
        if "properties" in resolved:
            yield "", resolved
        for suffix, part in (("[]", resolved.get("items")), (".*", _named_values(resolved))):
            if part and "properties" in _resolve(schema, part):
                yield suffix, _resolve(schema, part)


def _named_values(item: dict[str, Any]) -> dict[str, Any] | None:
    values = item.get("additionalProperties") or next(iter(item.get("patternProperties", {}).values()), None)
    return values if isinstance(values, dict) else None


def _type(schema: dict[str, Any], item: dict[str, Any]) -> str:
    names = []
    for option in item.get("anyOf", [item]):
        if "$ref" in option:
            names.append("section")
        elif "enum" in option or "const" in option:
            names += [json.dumps(value).strip('"') for value in option.get("enum", [option.get("const")])]
        elif option.get("type") == "array":
            names.append(f"list of {_type(schema, option['items'])}")
        elif option.get("type") == "object":
            names.append("name: section")
        else:
            names.append(option.get("type", ""))
    return " or ".join(names)


def _default(schema: dict[str, Any], item: dict[str, Any]) -> str:
    if "default" not in item:
        return ""
    return "`" + json.dumps(item["default"]) + "`" if not isinstance(item["default"], dict) else ""


if __name__ == "__main__":
    run_stage(main)
