"""Rows on their way to the engine, as Parquet: conversations, responses, token rows.

In and out: lists of dicts with the columns below; the file's metadata carries the provenance and the stage's counts as JSON.
A file is whole or absent, and its columns are checked when it is read.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_atomically
from scripts.eagle3.row_key import row_key as row_key

# Beside role and content null where a message has none; tool_calls is JSON text: a list in OpenAI's form with objects as
# arguments.
MESSAGE = pa.struct(
    [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")]
)
TURN = pa.struct([("prompt_ids", pa.list_(pa.int32())), ("response_ids", pa.list_(pa.int32())), ("finish_reason", pa.string())])
# split: train, val or eval; tools is JSON text: the list of declared tools, or null
CONVERSATIONS = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
    ]
)
# one row per conversation; turns[i].prompt_ids is the whole rendered prompt of that answer, history included
RESPONSES = pa.schema(
    [("conversation_id", pa.string()), ("source", pa.string()), ("split", pa.string()), ("turns", pa.list_(TURN))]
)
TOKENS = pa.schema(
    [
        ("row_key", pa.string()),
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


def write_rows(
    path: Path, rows: list[dict[str, Any]], schema: pa.Schema, provenance: dict[str, Any], counts: dict[str, Any]
) -> None:
    """Writes one Parquet file atomically; equal rows and provenance give equal bytes."""
    metadata = {"provenance": json.dumps(provenance, sort_keys=True), "counts": json.dumps(counts, sort_keys=True)}
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata))
    write_atomically(path, lambda unfinished: pq.write_table(table, unfinished, compression="zstd"))


def read_rows(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """All rows; StageError where the file is missing, damaged or lacks a column."""
    return _read_table(path, schema).to_pylist()


def read_provenance(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(provenance, counts) of a file written by `write_rows`."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata[b"provenance"]), json.loads(metadata[b"counts"])
    except FileNotFoundError as error:
        raise StageError(f"{path}: no such file") from error
    except (pa.ArrowInvalid, KeyError) as error:
        raise StageError(f"{path}: no provenance in it; it was not made by this workflow, or it is damaged") from error


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise StageError(f"{path}: no such file") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise StageError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); remake it") from error
    for field in schema:
        if field.name not in table.column_names:
            raise StageError(f"{path}: column {field.name} is missing, found {', '.join(table.column_names)}")
    return table.select(schema.names).cast(schema)
