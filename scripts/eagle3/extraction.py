"""Hidden states of token rows: run the target over planned batches, prove the alignment, keep every finished row.

In: the rows of a part's token shards and an open store. Out: one verified shard file per token shard, in the same order.
Finished rows come from the store, also from other parts' (a new part count computes nothing anew); an engine starts only
for what is missing.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.eagle3.alignment import HEAD_TOKENS, Proof, engine_view, proof_rows, prove
from scripts.eagle3.batches import Batch, TokenRow, plan_batches, resume_plan
from scripts.eagle3.capture import EXTENSION, refuse_uncapturable
from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware, engine_version, load_engine, unload_engine
from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.part import Part
from scripts.eagle3.progress import Progress
from scripts.eagle3.shards import FORMAT_VERSION, Shard, StateRow
from scripts.eagle3.target import fingerprint


def states_provenance(target: Target, dtype: str) -> dict[str, Any]:
    """What hidden states are made from: consumers compare it before they read a shard."""
    return {
        "target": fingerprint(target),
        "layer_ids": captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers),
        "dtype": dtype,
        "engine": engine_version(),
        "format_version": FORMAT_VERSION,
    }


class Extractor:
    """A loaded target whose states are captured."""

    def __init__(self, llm: Any, target: Target, dtype: str) -> None:
        """Hooks the engine; StageError where it cannot be captured from."""
        self.llm, self.target = llm, target
        self.layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
        self.provenance = states_provenance(target, dtype)
        arguments = (list(target.aux_layer_ids), target.num_hidden_layers, dtype)
        answers = llm.collective_rpc("capture_install", args=arguments)
        for answer in answers:
            if "error" in answer:
                raise StageError(f"{target.path}: {answer['error']}")
        self.installed: dict[str, str] = answers[0]

    def start(self, rows: Sequence[TokenRow], path: Path, **sampling: Any) -> tuple[list[Any], dict[str, Any] | None]:
        """Computes `rows` and starts writing them to `path`; returns the engine's outputs and the result of the write before.

        A result is {"path", "rejected": [[row_key, layer, reason]]}; rejected rows are not in the file.
        """
        from vllm import SamplingParams

        ids = [row.input_ids.tolist() for row in rows]
        self.llm.collective_rpc("capture_expect", args=(ids,))
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **sampling)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in ids], parameters, use_tqdm=False)
        masks = [row.loss_mask.tolist() for row in rows]
        written = self.llm.collective_rpc("capture_write", args=(str(path), masks, self.provenance))
        return outputs, _result(written)

    def finish(self) -> dict[str, Any] | None:
        """Waits for the last write and returns its result."""
        return _result(self.llm.collective_rpc("capture_wait"))

    def clear_cache(self) -> None:
        """After an overflow: so that it reaches no row of a later batch."""
        self.llm.collective_rpc("capture_clear_cache")

    def write(self, rows: Sequence[TokenRow], path: Path, **sampling: Any) -> list[Any]:
        """Computes `rows` and writes them to `path` now; returns the engine's outputs. StageError for a rejected row."""
        outputs, _ = self.start(rows, path, **sampling)
        result = self.finish()
        for rejection in result["rejected"] if result else []:
            raise _not_finite(rejection)
        return outputs

    def prove(self, rows: Sequence[TokenRow], folder: Path) -> Proof:
        """The alignment proof over heads of the longest rows; StageError where it fails. `folder` is for its files.

        Rows that overflow are left out: they are rejected in their turn. StageError where there are no others.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, candidates = folder / "proof.pt", proof_rows(rows)
        path.unlink(missing_ok=True)
        for start in range(0, len(candidates), len(HEAD_TOKENS)):
            chosen = candidates[start : start + len(HEAD_TOKENS)]
            outputs, _ = self.start(chosen, path, logprobs=2, prompt_logprobs=2)
            rejected = (self.finish() or {})["rejected"]
            if rejected:
                self.clear_cache()
            if path.is_file():  # absent where every row was rejected
                break
        else:
            raise _not_finite(rejected[0])
        together = {row.key: row.hidden_states.clone() for row in Shard(path)}
        views = [engine_view(output) for row, output in zip(chosen, outputs, strict=True) if row.key in together]
        alone = []
        for row in chosen:
            if row.key in together:
                self.write([row], path)
                alone.append(Shard(path).row(0).hidden_states.clone())
        path.unlink()
        return prove(self.target, views, list(together.values()), alone, self.layer_ids)


def _not_finite(rejection: Sequence[Any]) -> StageError:
    key, layer, reason = rejection
    return StageError(f"state {layer} of row {key} is {reason}; the engine's numbers overflow: check target.dtype and weights")


@contextmanager
def open_extractor(target: Target, hardware: Hardware, longest: int, dtype: str, **options: Any) -> Iterator[Extractor]:
    """Loads the target for extraction of rows of up to `longest` tokens, and unloads it at the end."""
    refuse_uncapturable(target, longest)
    llm = load_engine(
        target,
        hardware,
        max_model_len=longest + 1,
        eager=True,
        worker_extension=EXTENSION,
        **{"enable_chunked_prefill": False, **options},
    )
    try:
        yield Extractor(llm, target, dtype)
    finally:
        unload_engine(llm)


def extract_rows(target: Target, hardware: Hardware, rows: Sequence[TokenRow], dtype: str, folder: Path) -> list[StateRow]:
    """States of a few rows, proven and in the order given: for evaluation and the canary, without a store.

    `folder` gets the files that the returned rows are mapped from. A row that is rejected is a StageError.
    """
    with open_extractor(target, hardware, max(map(len, rows)), dtype) as extractor:
        extractor.prove(rows, folder)
        by_key = {row.key: row for row in rows}
        found: dict[str, StateRow] = {}
        for batch in plan_batches([rows], hardware.batch_tokens, hardware.max_num_seqs):
            extractor.write([by_key[key] for key in batch.keys], folder / batch.file_name)
            found |= {row.key: row for row in Shard(folder / batch.file_name, extractor.provenance)}
    return [found[row.key] for row in rows]


def extract_part(part: Part, target: Target, hardware: Hardware, dtype: str) -> None:
    """Finishes every shard of the part; starts an engine only where rows are missing."""
    for shard in part.open_shards():
        if not part.missing(shard):
            part.assemble(shard)
    missing = part.missing()
    if not missing:
        return
    batches = resume_plan(part.store.folder / "plan.json", part.shards, missing, hardware.batch_tokens, hardware.max_num_seqs)
    longest = max(len(row) for row in part.rows.values())
    with open_extractor(target, hardware, longest, dtype) as extractor:
        # the same rows whatever is missing, so that a job that goes on writes the same manifest
        proof = extractor.prove(list(part.rows.values()), part.store.folder / "proof")
        part.proofs.put("proof", proof.record())
        print(f"extract_hidden_states: {proof}", file=sys.stderr, flush=True)
        _run_batches(part, extractor, batches)


def _run_batches(part: Part, extractor: Extractor, batches: Sequence[Batch]) -> None:
    """Computes batch after batch; writing overlaps with the next batch, and assembling a shard with the next shard.

    An overflowing row can spoil others that come into its place in the engine's cache: what was not finite is computed again
    at the end, each row alone, and only that rejects it.
    """
    progress = Progress("extract_hidden_states", len(part.rows), done=len(part.rows) - len(part.missing()))
    assembled: list[Future[Path | None]] = []
    doubtful: list[Batch] = []

    with ThreadPoolExecutor(1, thread_name_prefix="assemble") as assembler:

        def enter(batch: Batch | None, result: dict[str, Any] | None, again: bool = True) -> None:
            """Takes a written batch; with `again`, what was not finite is put off instead of rejected."""
            if batch is None or result is None:
                return
            overflowed = [key for key, *_ in result["rejected"]] if again else []
            if overflowed:
                extractor.clear_cache()
                doubtful.extend(Batch(batch.shard, (key,)) for key in overflowed)
                result = {**result, "rejected": []}
            part.take(result)
            done = [key for key in batch.keys if key not in overflowed]
            progress.advance(len(done), tokens=sum(len(part.rows[key]) for key in done))
            if not part.missing(batch.shard):
                assembled.append(assembler.submit(part.assemble, batch.shard))

        running: Batch | None = None
        for batch in batches:
            _, result = extractor.start([part.rows[key] for key in batch.keys], part.batches_folder / batch.file_name)
            enter(running, result)
            running = batch
            for future in assembled:
                if future.done():
                    future.result()  # a full disk must not wait for the last batch
        enter(running, extractor.finish())
        for batch in doubtful:
            extractor.clear_cache()
            extractor.start([part.rows[batch.keys[0]]], part.batches_folder / batch.file_name)
            enter(batch, extractor.finish(), again=False)
    for future in assembled:
        future.result()
    progress.finish()


def _result(answers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The storing rank's answer; its error as a StageError."""
    for answer in answers:
        if answer is not None:
            if "error" in answer:
                raise StageError(answer["error"])
            return answer
    return None
