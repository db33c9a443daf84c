"""Hidden states of token rows: run the target over planned batches, prove the alignment, keep every finished row.

In: the rows of a part's token shards and an open store. Out: one shard file per token shard, rows in the same order.
Finished rows come from the store, also from other parts' (a new part count computes nothing anew); an engine starts only
for what is missing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.eagle3.alignment import MAX_ROW_TOKENS, MAX_ROWS, EngineView, Proof, engine_view, prove
from scripts.eagle3.batches import Batch, TokenRow, make_row, plan_batches, resume_plan
from scripts.eagle3.capture import EXTENSION, refuse_uncapturable
from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware, engine_version, load_engine, unload_engine
from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.part import Part, shard_tokens
from scripts.eagle3.progress import Progress
from scripts.eagle3.shards import DTYPES, FORMAT_VERSION, Shard, StateRow, create_shard
from scripts.eagle3.target import fingerprint, text_config


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
        itemsize = max(DTYPES[name].itemsize for name in (dtype, target.dtype))  # the proof is made in the target's
        self.hidden_size = int(text_config(target)["hidden_size"])
        arguments = (list(target.aux_layer_ids), target.num_hidden_layers, len(self.layer_ids) * self.hidden_size * itemsize)
        answers = llm.collective_rpc("capture_install", args=arguments)
        for answer in answers:
            if "error" in answer:
                raise StageError(f"{target.path}: {answer['error']}")
        self.installed: dict[str, str] = answers[0]

    def start(self, rows: Sequence[TokenRow], path: Path, indices: Sequence[int], **sampling: Any) -> list[Any]:
        """Computes `rows` into the places `indices` of the shard file at `path`; returns the engine's outputs.

        The states are written in the background. Places may be those of some of the rows: the others keep them company.
        """
        from vllm import SamplingParams

        self.llm.collective_rpc("capture_expect", args=(str(path), list(indices)))
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **sampling)
        prompts = [{"prompt_token_ids": row.input_ids.tolist()} for row in rows]
        outputs: list[Any] = self.llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

    def results(self, wait: bool = False) -> list[dict[str, Any]]:
        """Of the oldest started batches: those that are written, or all. StageError where one failed.

        A result is {"path", "keys", "rejected": [[row_key, layer, reason]]}.
        """
        answers = self.llm.collective_rpc("capture_results", args=(wait,))
        results: list[dict[str, Any]] = next((answer for answer in answers if answer), [])
        for result in results:
            if "error" in result:
                raise StageError(result["error"])
        return results

    def write(self, rows: Sequence[TokenRow], path: Path, dtype: str | None = None, **sampling: Any) -> list[Any]:
        """Computes `rows` into a new shard file; returns the engine's outputs. StageError for a rejected row.

        dtype: of the states in the file, instead of the extractor's own.
        """
        provenance = {**self.provenance, "dtype": dtype or self.provenance["dtype"]}
        tokens = [shard_tokens(row) for row in rows]
        create_shard(path, tokens, self.layer_ids, self.hidden_size, DTYPES[provenance["dtype"]], provenance)
        outputs = self.start(rows, path, range(len(rows)), **sampling)
        for result in self.results(wait=True):
            for key, layer, reason in result["rejected"]:
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
        dtype = self.target.dtype  # float8 would hide what is proven behind its rounding
        outputs = self.write(chosen, path, dtype, logprobs=2, prompt_logprobs=2)
        views: list[EngineView] = [engine_view(output) for output in outputs]
        together = [row.hidden_states.clone() for row in Shard(path)]
        alone = []
        for row in chosen[:2]:
            self.write([row], path, dtype)
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
        extractor = Extractor(llm, target, dtype)
        try:
            yield extractor
        finally:
            llm.collective_rpc("capture_close")
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
            part.grow(shard)
            part.finish(shard)
    missing = part.missing()
    if missing:
        plan = part.store.folder / "plan.json"
        batches = resume_plan(plan, part.shards, missing, hardware.batch_tokens, hardware.max_num_seqs)
        longest = max(len(row) for row in part.rows.values())
        with open_extractor(target, hardware, longest, dtype) as extractor:
            # the same rows whatever is missing, so that a job that goes on writes the same manifest
            proof = extractor.prove(list(part.rows.values()), part.store.folder / "proof")
            part.proofs.put("proof", proof.record())
            run_batches(part, extractor, batches)
    part.clean()


def run_batches(part: Part, extractor: Extractor, batches: Sequence[Batch]) -> None:
    """Computes batch after batch; writing them, and finishing a shard, overlaps with the next ones."""
    progress = Progress("extract_hidden_states", len(part.rows), done=len(part.rows) - len(part.missing()))
    finished: list[Future[Path]] = []
    missing = {shard: part.missing(shard) for shard in {batch.shard for batch in batches}}

    with ThreadPoolExecutor(1, thread_name_prefix="finish") as finisher:
        running: deque[Batch] = deque()

        def enter(results: Sequence[dict[str, Any]]) -> None:
            for result in results:
                batch = running.popleft()
                part.take(result)
                missing[batch.shard] -= set(batch.keys)
                progress.advance(len(batch.keys), tokens=sum(len(part.rows[key]) for key in batch.keys))
                if not missing[batch.shard]:
                    finished.append(finisher.submit(part.finish, batch.shard))
            for future in finished:
                if future.done():
                    future.result()  # a full disk must not wait for the last batch

        for shard, of_shard in groupby(batches, key=lambda batch: batch.shard):
            path, lacking = part.grow(shard)
            for batch in of_shard:
                places = [place for key in batch.keys for place in lacking.get(key, [])]
                extractor.start([part.rows[key] for key in batch.keys], path, places)
                running.append(batch)
                enter(extractor.results())
        enter(extractor.results(wait=True))
    for future in finished:
        future.result()
    progress.finish()
