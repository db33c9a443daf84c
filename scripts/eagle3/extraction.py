"""Hidden states of token rows: run the target over planned batches, prove the alignment, keep every finished row.

In: the rows of a part's token shards and an open store. Out: one shard file per token shard, rows in the same order.
Finished rows come from the store, also from other parts' (a new part count computes nothing anew); an engine starts only
for what is missing.
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.eagle3.alignment import HEAD_TOKENS, Proof, engine_view, proof_rows, prove
from scripts.eagle3.batches import Batch, TokenRow, plan_batches, resume_plan
from scripts.eagle3.capture import EXTENSION, refuse_uncapturable
from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware, engine_version, load_engine, unload_engine
from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.part import Part, shard_tokens
from scripts.eagle3.progress import Progress
from scripts.eagle3.shards import DTYPES, FORMAT_VERSION, Shard, StateRow, create_shard
from scripts.eagle3.target import fingerprint, text_config


def states_provenance(target: Target, dtype: str, final_states: str = "all") -> dict[str, Any]:
    """What hidden states are made from: consumers compare it before they read a shard.

    final_states: of which tokens they are stored; `all` is not named, as in shards from before there was a choice.
    """
    apart = {} if final_states == "all" else {"final_states": final_states}
    return apart | {
        "target": fingerprint(target),
        "layer_ids": captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers),
        "dtype": dtype,
        "engine": engine_version(),
        "format_version": FORMAT_VERSION,
    }


class Feed:
    """Gives an engine the next batch of rows while it computes the one before: it never waits for rows, and holds no more."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self._fed = 0
        self._unfinished: deque[set[str]] = deque()  # names of the requests of each batch

    def put(self, rows: Sequence[TokenRow]) -> None:
        """Returns when nothing but these rows is left to compute."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        names = [f"row-{self._fed + number}" for number in range(len(rows))]
        self._fed += len(rows)
        for name, row in zip(names, rows, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": row.input_ids.tolist()}, parameters)
        self._unfinished.append(set(names))
        self._compute(1)

    def drain(self) -> None:
        """Computes what is left."""
        self._compute(0)

    def batches(self) -> int:
        """How many of the last batches are not computed."""
        return len(self._unfinished)

    def _compute(self, left: int) -> None:
        """Until no more than the last `left` batches are unfinished."""
        while len(self._unfinished) > left:
            for output in self.engine.step():
                if output.finished:
                    for names in self._unfinished:
                        names.discard(output.request_id)
            while self._unfinished and not self._unfinished[0]:
                self._unfinished.popleft()


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
        self._feed = Feed(llm)

    def start(self, rows: Sequence[TokenRow], path: Path, indices: Sequence[int], **sampling: Any) -> list[Any]:
        """Computes `rows` into the places `indices` of the shard file at `path`; returns the engine's outputs.

        The states are written in the background. Places may be those of some of the rows: the others keep them company.
        """
        from vllm import SamplingParams

        self._expect({path: indices})
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **sampling)
        prompts = [{"prompt_token_ids": row.input_ids.tolist()} for row in rows]
        outputs: list[Any] = self.llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

    def feed(self, rows: Sequence[TokenRow], places: Mapping[Path, Sequence[int]]) -> None:
        """As `start`, but into several files and without outputs; returns when nothing but these rows is left to compute."""
        self._expect(places)
        self._feed.put(rows)

    def _expect(self, places: Mapping[Path, Sequence[int]]) -> None:
        self.llm.collective_rpc("capture_expect", args=({str(path): list(indices) for path, indices in places.items()},))

    def drain(self) -> None:
        """Computes what was fed."""
        self._feed.drain()

    def results(self, wait: bool = False) -> list[dict[str, Any]]:
        """Of the oldest computed batches: those that are written, or all. StageError where one failed.

        A result is {"paths", "keys", "rejected": [[row_key, layer, reason]]}.
        """
        answers = self.llm.collective_rpc("capture_results", args=(wait, self._feed.batches()))
        results: list[dict[str, Any]] = next((answer for answer in answers if answer), [])
        for result in results:
            if "error" in result:
                raise StageError(result["error"])
        return results

    def clear_cache(self) -> None:
        """After an overflow: so that it reaches no row of a later batch."""
        self.llm.collective_rpc("capture_clear_cache")

    def write(self, rows: Sequence[TokenRow], path: Path, **sampling: Any) -> list[Any]:
        """Computes `rows` into a new shard file; returns the engine's outputs. StageError for a rejected row."""
        outputs, rejected = self._write_new(rows, path, self.provenance["dtype"], **sampling)
        for rejection in rejected:
            raise _not_finite(rejection)
        return outputs

    def prove(self, rows: Sequence[TokenRow], folder: Path) -> Proof:
        """The alignment proof over heads of the longest rows; StageError where it fails. `folder` is for its files.

        Rows that overflow are left out: they are rejected in their turn. StageError where there are no others.
        """
        path, candidates = folder / "proof.pt", proof_rows(rows)
        dtype = self.target.dtype  # float8 would hide what is proven behind its rounding
        for start in range(0, len(candidates), len(HEAD_TOKENS)):
            chosen = candidates[start : start + len(HEAD_TOKENS)]
            outputs, rejected = self._write_new(chosen, path, dtype, logprobs=2, prompt_logprobs=2)
            if rejected:
                self.clear_cache()
            if len(rejected) < len(chosen):
                break
        else:
            path.unlink()
            raise _not_finite(rejected[0])
        shard = Shard(path)
        good = [index for index in range(len(shard)) if shard.written(index)]
        together = [shard.row(index).hidden_states.clone() for index in good]
        views = [engine_view(outputs[index]) for index in good]
        alone = []
        for index in good:
            self._write_new([chosen[index]], path, dtype)
            alone.append(Shard(path).row(0).hidden_states.clone())
        path.unlink()
        return prove(self.target, views, together, alone, self.layer_ids)

    def _write_new(self, rows: Sequence[TokenRow], path: Path, dtype: str, **sampling: Any) -> tuple[list[Any], list[Any]]:
        """Outputs and rejections [row_key, layer, reason] of rows that are computed into a new shard file of this dtype."""
        tokens, provenance = [shard_tokens(row) for row in rows], {**self.provenance, "dtype": dtype}
        create_shard(path, tokens, self.layer_ids, self.hidden_size, DTYPES[dtype], provenance)
        outputs = self.start(rows, path, range(len(rows)), **sampling)
        return outputs, [rejection for result in self.results(wait=True) for rejection in result["rejected"]]


def _not_finite(rejection: Sequence[Any]) -> StageError:
    key, layer, reason = rejection
    return StageError(f"state {layer} of row {key} is {reason}; the engine's numbers overflow: check target.dtype and weights")


@contextmanager
def open_engine(target: Target, hardware: Hardware, longest: int, **options: Any) -> Iterator[Any]:
    """Loads the target so that it can be captured from, with rows of up to `longest` tokens, and unloads it at the end."""
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
        yield llm
    finally:
        unload_engine(llm)


@contextmanager
def capturing(llm: Any, target: Target, dtype: str) -> Iterator[Extractor]:
    """Hooks an engine of `open_engine`, and ends what runs beside it."""
    extractor = Extractor(llm, target, dtype)
    try:
        yield extractor
    finally:
        llm.collective_rpc("capture_close")


@contextmanager
def open_extractor(target: Target, hardware: Hardware, longest: int, dtype: str, **options: Any) -> Iterator[Extractor]:
    """A target that is loaded by `open_engine`, and captured from."""
    with open_engine(target, hardware, longest, **options) as llm, capturing(llm, target, dtype) as extractor:
        yield extractor


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
            print(f"extract_hidden_states: {proof}", file=sys.stderr, flush=True)
            run_batches(part, extractor, batches)
    part.clean()


def run_batches(part: Part, extractor: Extractor, batches: Sequence[Batch]) -> None:
    """Computes batch after batch; writing them, and finishing a shard, overlaps with the next ones.

    An overflowing row can spoil others that come into its place in the engine's cache: what was not finite is computed again
    at the end, each row alone, and only that rejects it.
    """
    progress = Progress("extract_hidden_states", len(part.rows), done=len(part.rows) - len(part.missing()))
    missing = {shard: part.missing(shard) for shard in {shard for batch in batches for shard in batch.shards}}
    finished: list[Future[Path | None]] = []
    doubtful: list[Batch] = []
    running: deque[Batch] = deque()

    with ThreadPoolExecutor(1, thread_name_prefix="finish") as finisher:

        def settle(batch: Batch, keys: set[str]) -> None:
            """These rows of the batch are in their files."""
            done = set[str]()
            for shard in batch.shards:
                found = missing[shard] & keys
                missing[shard] -= found
                done |= found
                if found and not missing[shard]:
                    finished.append(finisher.submit(part.finish, shard))
            progress.advance(len(done), tokens=sum(len(part.rows[key]) for key in done))

        def enter(results: Sequence[dict[str, Any]], again: bool = True) -> None:
            """Takes written batches; with `again`, what was not finite is put off instead of rejected."""
            for result in results:
                batch = running.popleft()
                overflowed = {key for key, *_ in result["rejected"]} if again else set()
                if overflowed:
                    extractor.clear_cache()
                    doubtful.extend(Batch(batch.shards, (key,)) for key in batch.keys if key in overflowed)
                    result = {**result, "rejected": []}
                part.take(result)
                settle(batch, set(batch.keys) - overflowed)
            for future in finished:
                if future.done():
                    future.result()  # a full disk must not wait for the last batch

        def feed(batch: Batch, grown: Sequence[tuple[Path, dict[str, list[int]]]]) -> None:
            places = {path: [place for key in batch.keys for place in lacking.get(key, [])] for path, lacking in grown}
            asked = {path: found for path, found in places.items() if found}
            if not asked:  # found or rejected in the meantime: a row may stand in several shards
                settle(batch, set(batch.keys))
                return
            running.append(batch)
            extractor.feed([part.rows[key] for key in batch.keys], asked)

        for shards, together in groupby(batches, key=lambda batch: batch.shards):
            grown = [part.grow(shard) for shard in shards if missing[shard]]
            for batch in together:
                feed(batch, grown)
                enter(extractor.results())
        extractor.drain()
        enter(extractor.results(wait=True))
        for batch in doubtful:
            extractor.clear_cache()
            feed(batch, [part.grow(shard) for shard in batch.shards if not missing[shard].isdisjoint(batch.keys)])
            extractor.drain()
            enter(extractor.results(wait=True), again=False)
    for future in finished:
        future.result()
    progress.finish()
