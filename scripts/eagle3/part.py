"""What of a part's hidden states is finished: rows in batch files, shards that are whole, rows that were rejected.

In: the rows of the part's token shards and its open store. Out: the rows that are missing, and finished shard files.
Nothing in the store is trusted: a damaged file is dropped, with a line on screen, and its rows count as missing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.eagle3.batches import TokenRow
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import sha256_file, sha256_json
from scripts.eagle3.shards import Shard, StateRow, write_shard
from scripts.eagle3.store import Store


class Part:
    """The rows of one part, what of them is finished in this part's store and in others', and what is missing."""

    def __init__(self, store: Store, shards: Sequence[Sequence[TokenRow]], provenance: dict[str, Any]) -> None:
        """Reads and checks what is finished; `shards` are the rows of the token shards, in order."""
        self.store, self.shards, self.provenance = store, shards, provenance
        self.layer_ids: list[int] = provenance["layer_ids"]
        self.rows = {row.key: row for shard in shards for row in shard}
        self.batches_folder, self.shards_folder = store.folder / "batches", store.folder / "shards"
        for folder in (self.batches_folder, self.shards_folder):
            folder.mkdir(exist_ok=True)
        self.checksums, self.rejected, self.proofs = (store.records(name) for name in ("shards", "rejected", "proof"))
        self._found: dict[str, tuple[Shard, int]] = {}
        self.finished = [self._find_finished(number) for number in range(len(shards))]
        wanted = {row.key for number in self.open_shards() for row in shards[number]}
        for folder in [store.folder, *store.others()] if wanted else []:
            for path in sorted([*folder.glob("batches/*.pt"), *folder.glob("shards/*.pt")]):
                self._scan(path, wanted, own=folder == store.folder)

    def open_shards(self) -> list[int]:
        """Numbers of the shards whose file is not finished."""
        return [number for number, path in enumerate(self.finished) if path is None]

    def missing(self, shard: int | None = None) -> set[str]:
        """Keys of rows that have to be computed, of one shard or of all."""
        numbers = self.open_shards() if shard is None else [shard]
        keys = {row.key for number in numbers for row in self.shards[number]}
        return {key for key in keys if key not in self._found and key not in self.rejected}

    def rejections(self) -> dict[str, dict[str, Any]]:
        """The part's rejected rows: key -> {"layer", "reason"}."""
        found = {key: self.rejected.get(key) for key in self.rows}
        return {key: record for key, record in found.items() if record is not None}

    def expected_keys(self, shard: int) -> list[str]:
        """Keys of the rows of a shard file: those of the token shard in its order, less the rejected ones."""
        return [row.key for row in self.shards[shard] if row.key not in self.rejected]

    def take(self, result: dict[str, Any]) -> None:
        """Enters a written batch: {"path", "rejected": [[row_key, layer, reason]]}."""
        for key, layer, reason in result["rejected"]:
            self.rejected.put(key, {"layer": layer, "reason": reason})
        path = Path(result["path"])
        if path.is_file():  # absent where every row was rejected
            shard = Shard(path, self.provenance, self.layer_ids)
            self._found |= {key: (shard, index) for index, key in enumerate(shard.row_keys)}

    def assemble(self, shard: int) -> Path | None:
        """Writes the file of a shard whose rows are all there, verifies it, and deletes the batches that it holds.

        Needs memory for one shard. None where every row was rejected: the part fails, but after finishing the rest.
        """
        path = self._path(shard)
        rows = [self._state_row(self.rows[key]) for key in self.expected_keys(shard)]
        if not rows:
            return None
        write_shard(path, rows, self.layer_ids, self.provenance)
        self._verify(path, shard)
        self.finished[shard] = path
        self._delete_batches(shard)
        return path

    def _state_row(self, row: TokenRow) -> StateRow:
        # the key is the hash of the ids; the mask is the token shard's, whatever it was when the states were computed
        shard, index = self._found[row.key]
        found = shard.row(index)
        return StateRow(row.key, found.token_ids, torch.from_numpy(row.loss_mask.copy()), found.hidden_states)

    def _path(self, shard: int) -> Path:
        rows = [self.rows[key] for key in self.expected_keys(shard)]
        content = [[row.key, np.packbits(row.loss_mask).tobytes().hex()] for row in rows]
        return self.shards_folder / f"{sha256_json(content)[:24]}.pt"

    def _find_finished(self, shard: int) -> Path | None:
        path = self._path(shard)
        if not path.is_file():
            return None
        try:
            if self.checksums.get(path.stem) is None:  # killed between the file and its record
                self._verify(path, shard)
            elif self.checksums.get(path.stem) != sha256_file(path):
                raise StageError(f"{path}: checksum differs from the recorded one")
        except StageError as error:
            _drop(path, error)
            return None
        self._delete_batches(shard)
        return path

    def _verify(self, path: Path, shard: int) -> None:
        written = Shard(path, self.provenance, self.layer_ids)
        keys = [row.key for row in written]
        if keys != self.expected_keys(shard):
            raise StageError(f"{path}: holds {len(keys)} rows, not the {len(self.expected_keys(shard))} of token shard {shard}")
        self.checksums.put(path.stem, sha256_file(path))

    def _scan(self, path: Path, wanted: set[str], own: bool) -> None:
        try:
            shard = Shard(path, self.provenance, self.layer_ids)
            new = {key: index for index, key in enumerate(shard.row_keys) if key in wanted and key not in self._found}
            for index in new.values():
                shard.row(index)
        except StageError as error:
            if own:
                _drop(path, error)
            else:
                print(f"not used: {error}", file=sys.stderr, flush=True)
            return
        self._found |= {key: (shard, index) for key, index in new.items()}

    def _delete_batches(self, shard: int) -> None:
        held = {row.key for row in self.shards[shard]}
        for path in self.batches_folder.glob("*.pt"):
            try:
                if held.issuperset(Shard(path).row_keys):
                    path.unlink()
            except StageError as error:
                _drop(path, error)


def _drop(path: Path, error: StageError) -> None:
    print(f"dropped, its rows are computed again: {error}", file=sys.stderr, flush=True)
    path.unlink(missing_ok=True)
