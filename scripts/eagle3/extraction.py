"""Hidden states of token rows: run the target over planned batches, prove the alignment, keep every finished row.

In: the rows of a part's token shards and an open store. Out: one verified shard file per token shard, in the same order.
Finished rows come from the store, also from other parts' (a new part count computes nothing anew); an engine starts only
for what is missing.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.eagle3.alignment import MAX_ROW_TOKENS, MAX_ROWS, EngineView, Proof, engine_view, prove
from scripts.eagle3.batches import Batch, TokenRow, make_row, plan_batches, resume_plan
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

    def write(self, rows: Sequence[TokenRow], path: Path, **sampling: Any) -> list[Any]:
        """Computes `rows` and writes them to `path` now; returns the engine's outputs. StageError for a rejected row."""
        outputs, _ = self.start(rows, path, **sampling)
        result = self.finish()
        for key, layer, reason in result["rejected"] if result else []:
            raise StageError(
                f"state {layer} of row {key} is {reason}; the engine's numbers overflow: check target.dtype and weights"
            )
        return outputs

    def prove(self, rows: Sequence[TokenRow], folder: Path) -> Proof:
        """The alignment proof over the heads of the longest rows; StageError where it fails. `folder` is for its files."""
        folder.mkdir(parents=True, exist_ok=True)
        longest = sorted(rows, key=lambda row: -min(len(row), MAX_ROW_TOKENS))  # stable: equal rows, equal choice
        heads = {row.key: row for row in (make_row(row.input_ids[:MAX_ROW_TOKENS].tolist()) for row in longest[: 4 * MAX_ROWS])}
        chosen = list(heads.values())[:MAX_ROWS]
        path = folder / "proof.pt"
        outputs = self.write(chosen, path, logprobs=2, prompt_logprobs=2)
        views: list[EngineView] = [engine_view(output) for output in outputs]
        together = [row.hidden_states.clone() for row in Shard(path)]
        alone = []
        for row in chosen[:2]:
            self.write([row], path)
            alone.append(Shard(path).row(0).hidden_states.clone())
        path.unlink()
        return prove(self.target, views, together, alone, self.layer_ids)


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
        _run_batches(part, extractor, batches)


def _run_batches(part: Part, extractor: Extractor, batches: Sequence[Batch]) -> None:
    """Computes batch after batch; writing overlaps with the next batch, and assembling a shard with the next shard."""
    progress = Progress("extract_hidden_states", len(part.rows), done=len(part.rows) - len(part.missing()))
    assembled: list[Future[Path]] = []

    with ThreadPoolExecutor(1, thread_name_prefix="assemble") as assembler:
        running: Batch | None = None

        def enter(result: dict[str, Any] | None) -> None:
            if running is None or result is None:
                return
            part.take(result)
            progress.advance(len(running.keys), tokens=sum(len(part.rows[key]) for key in running.keys))
            if not part.missing(running.shard):
                assembled.append(assembler.submit(part.assemble, running.shard))

        for batch in batches:
            rows = [part.rows[key] for key in batch.keys]
            _, result = extractor.start(rows, part.batches_folder / batch.file_name)
            enter(result)
            running = batch
            for future in assembled:
                if future.done():
                    future.result()  # a full disk must not wait for the last batch
        enter(extractor.finish())
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
