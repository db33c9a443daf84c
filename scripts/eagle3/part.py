"""What of a part's hidden states is finished: shards that are whole, one that grows row by row, rows that were rejected.

In: the rows of the part's token shards and its open store. Out: the rows that are missing, places for them in a growing
shard, and finished shard files. Nothing in the store is trusted: each row is verified, and a damaged one counts as missing,
with a line on screen.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.eagle3.batches import TokenRow
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import cannot_write, sha256_json, sync
from scripts.eagle3.row_key import final_positions
from scripts.eagle3.shards import (
    DTYPES,
    SUPERVISED,
    RowTokens,
    Shard,
    ShardWriter,
    StateRow,
    create_shard,
    whole_provenance,
    write_shard,
)
from scripts.eagle3.store import Store

# threads that verify rows: a checksum takes longer than the disk that it reads from
READERS = 4


def shard_tokens(row: TokenRow) -> RowTokens:
    """A row of a token shard as a shard of states holds it."""
    return RowTokens(row.key, torch.from_numpy(row.input_ids.copy()), torch.from_numpy(row.loss_mask.copy()))


class Part:
    """The rows of one part, what of them is finished in this part's store and in others', and what is missing."""

    def __init__(
        self, store: Store, shards: Sequence[Sequence[TokenRow]], provenance: dict[str, Any], hidden_size: int
    ) -> None:
        """Reads and checks what is finished; `shards` are the rows of the token shards, in order."""
        self.store, self.shards, self.provenance, self.hidden_size = store, shards, provenance, hidden_size
        self.layer_ids: list[int] = provenance["layer_ids"]
        self._origin = whole_provenance(provenance)
        self.rows = {row.key: row for shard in shards for row in shard}
        self.growing_folder, self.shards_folder = store.folder / "growing", store.folder / "shards"
        for folder in (self.growing_folder, self.shards_folder):
            folder.mkdir(exist_ok=True)
        self.checksums, self.rejected, self.proofs = (store.records(name) for name in ("shards", "rejected", "proof"))
        self._found: dict[str, tuple[Shard, int]] = {}  # by `_states_name`
        self._growing: dict[Path, tuple[ShardWriter, list[str]]] = {}  # with `_states_name` of each row
        self.finished = [self._find_finished(number) for number in range(len(shards))]
        wanted = {self._states_name(row) for number in self.open_shards() for row in shards[number]}
        for folder in [store.folder, *store.others()] if wanted else []:
            for path in sorted([*folder.glob("growing/*.pt"), *folder.glob("shards/*.pt")]):
                self._scan(path, wanted, own=folder == store.folder)

    def open_shards(self) -> list[int]:
        """Numbers of the shards whose file is not finished."""
        return [number for number, path in enumerate(self.finished) if path is None]

    def missing(self, shard: int | None = None) -> set[str]:
        """Keys of rows that have to be computed, of one shard or of all; none of a finished one."""
        numbers = [number for number in self.open_shards() if shard in (None, number)]
        rows = [row for number in numbers for row in self.shards[number]]
        return {row.key for row in rows if self._states_name(row) not in self._found and row.key not in self.rejected}

    def rejections(self) -> dict[str, dict[str, Any]]:
        """The part's rejected rows: key -> {"layer", "reason"}."""
        found = {key: self.rejected.get(key) for key in self.rows}
        return {key: record for key, record in found.items() if record is not None}

    def expected_keys(self, shard: int) -> list[str]:
        """Keys of the rows of a shard file: those of the token shard in its order, less the rejected ones."""
        return [row.key for row in self.shards[shard] if row.key not in self.rejected]

    def grow(self, shard: int) -> tuple[Path, dict[str, list[int]]]:
        """The file that the shard grows in, made where it is not there, with the rows that other files have.

        Returns its path, and the places of the rows that it lacks by their keys; rejected ones are not waited for.
        """
        path, rows = self._growing_path(shard), self.shards[shard]
        if not path.is_file():
            dtype = DTYPES[self.provenance["dtype"]]
            create_shard(path, [shard_tokens(row) for row in rows], self.layer_ids, self.hidden_size, dtype, self.provenance)
        writer, names = self._growing[path] = ShardWriter(path), [self._states_name(row) for row in rows]
        lacking: dict[str, list[int]] = {}
        try:
            for index, row in enumerate(rows):
                source, place = self._found.get(names[index], (None, 0))
                if source is None:
                    if row.key not in self.rejected:
                        lacking.setdefault(row.key, []).append(index)
                elif source.path != path or place != index:
                    # the key is the hash of the ids; the mask is the token shard's, whatever it was there, where that asks for
                    # the same states
                    found = source.stored_row(place)
                    writer.put(index, found.hidden_states, found.scales)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._enter(path, [index for index, name in enumerate(names) if name in self._found])
        return path, lacking

    def take(self, result: dict[str, Any]) -> None:
        """Enters a written batch: {"paths", "keys", "rejected": [[row_key, layer, reason]]}."""
        for key, layer, reason in result["rejected"]:
            self.rejected.put(key, {"layer": layer, "reason": reason})
        for path in map(Path, result["paths"]):
            indices = self._growing[path][0].indices
            self._enter(path, [index for key in result["keys"] for index in indices.get(key, [])])

    def finish(self, shard: int) -> Path | None:
        """Makes the finished file of a shard whose rows are all there.

        None where every row was rejected: the part fails, but after finishing the rest.
        """
        growing, path = self._growing_path(shard), self._path(shard)
        if not self.expected_keys(shard):
            growing.unlink()
            self._growing.pop(growing, None)
            return None
        if growing.name == path.name:
            try:
                sync(growing)
                os.replace(growing, path)
                sync(self.shards_folder)
            except OSError as error:
                raise cannot_write(path, error) from error
        else:  # without the rejected rows
            grown = Shard(growing)
            kept = [index for index, key in enumerate(grown.row_keys) if key not in self.rejected]
            write_shard(path, [grown.stored_row(index) for index in kept], self.layer_ids, self.provenance)
            growing.unlink()
        self._record(path, shard)
        self._growing.pop(growing, None)
        self.finished[shard] = path
        return path

    def clean(self) -> None:
        """Deletes growing files whose rows are all in finished shards."""
        for path in self.growing_folder.glob("*.pt"):
            try:
                shard = Shard(path)
                held = [key for index, key in enumerate(shard.row_keys) if shard.written(index)]
            except StageError:
                held = []
            if self.rows.keys() >= set(held) and not self.open_shards():
                path.unlink()

    def growing_bytes(self) -> int:
        """What the growing files have on the disk by now."""
        return sum(path.stat().st_blocks * 512 for path in self.growing_folder.glob("*.pt"))

    def _enter(self, path: Path, indices: Sequence[int]) -> None:
        """These rows of a growing file are written."""
        writer, names = self._growing[path]
        self._found |= {names[index]: (writer.shard, index) for index in indices}

    def _states_name(self, row: TokenRow | RowTokens) -> str:
        """What stored states must be of to serve for a row: its ids, and its final states where not all are stored."""
        if self.provenance.get("final_states") != SUPERVISED:
            return row.key
        return f"{row.key} {np.packbits(final_positions(np.asarray(row.loss_mask))).tobytes().hex()}"

    def _growing_path(self, shard: int) -> Path:
        return self.growing_folder / _file_name(self.shards[shard])

    def _path(self, shard: int) -> Path:
        return self.shards_folder / _file_name([row for row in self.shards[shard] if row.key not in self.rejected])

    def _find_finished(self, shard: int) -> Path | None:
        path = self._path(shard)
        if not path.is_file():
            return None
        try:
            found = Shard(path, self._origin, self.layer_ids)
            if any(row is None for row in _verified(found, range(len(found)))):
                return None  # its good rows are taken from it
            if self.checksums.get(path.stem) is None:  # killed between the file and its record
                self._record(path, shard)
            elif self.checksums.get(path.stem) != found.digest():
                raise StageError(f"{path}: checksum differs from the recorded one")
        except StageError as error:
            _drop(path, error)
            return None
        return path

    def _record(self, path: Path, shard: int) -> None:
        written = Shard(path, self._origin, self.layer_ids)
        expected = self.expected_keys(shard)
        if written.row_keys != expected or not all(map(written.written, range(len(written)))):
            raise StageError(f"{path}: does not hold the {len(expected)} rows of token shard {shard}; delete it and run again")
        self.checksums.put(path.stem, written.digest())

    def _scan(self, path: Path, wanted: set[str], own: bool) -> None:
        """Enters the wanted rows of one file that are verified; of a key that two files have, the first one's."""
        try:
            shard = Shard(path, self._origin, self.layer_ids)
        except StageError as error:
            if own:
                _drop(path, error)
            else:
                print(f"not used: {error}", file=sys.stderr, flush=True)
            return
        names = [self._states_name(shard.tokens(index)) for index in range(len(shard))]
        new = [i for i, name in enumerate(names) if name in wanted and name not in self._found and shard.written(i)]
        good = [index for index, row in zip(new, _verified(shard, new), strict=True) if row is not None]
        self._found |= {names[index]: (shard, index) for index in reversed(good)}


def _verified(shard: Shard, indices: Sequence[int]) -> Iterator[StateRow | None]:
    """The rows, None for a damaged one, of which a line is printed."""

    def read(index: int) -> StateRow | None:
        try:
            return shard.stored_row(index)
        except StageError as error:
            print(f"not used, its row is computed again: {error}", file=sys.stderr, flush=True)
            return None

    with ThreadPoolExecutor(READERS, thread_name_prefix="verify") as readers:
        yield from readers.map(read, indices)


def _file_name(rows: Sequence[TokenRow]) -> str:
    """Named by content: equal rows with equal masks have one file."""
    content = [[row.key, np.packbits(row.loss_mask).tobytes().hex()] for row in rows]
    return f"{sha256_json(content)[:24]}.pt"


def _drop(path: Path, error: StageError) -> None:
    print(f"dropped, its rows are computed again: {error}", file=sys.stderr, flush=True)
    path.unlink(missing_ok=True)
