"""Capture of hidden states inside vLLM's workers, in the way that serving makes them.

In: the rows asked for, by their token ids. Out: a small shard file per batch, written by tensor-parallel rank 0.
The target's own EAGLE-3 interface returns the auxiliary states; a hook on the top-level model takes them off again, so
that the model runner sees what it always sees. A row is recognised by content: positions restart at 0 at each row, and a
segment is stored only where its token ids equal a row that was asked for. vLLM 0.22 to 0.32, model runner V1 and V2.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.plain_head import check_plain_head
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import DTYPES, StateRow, write_shard
from scripts.eagle3.target import resolve_folder, text_config

EXTENSION = "scripts.eagle3.capture.CaptureExtension"
# These models leave a layer's all-reduce to the norm of the next layer: between layers, a rank's stream is a partial sum.
DEFERRED_ALL_REDUCE = {
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-DSA",
    "minimax_m3": "MiniMax-M3",
    "minimax_m3_text": "MiniMax-M3",
    "minimax_m3_vl": "MiniMax-M3",
    "kimi_k3": "Kimi-K3",
}
DEFERRED_ARCHITECTURES = ("DeepseekV32", "GlmMoeDsa", "MiniMaxM3", "KimiK3")
PARALLEL_SIZES = {
    "pipeline_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism",
    "prefill_context_parallel_size": "prefill context parallelism",
    "decode_context_parallel_size": "decode context parallelism",
}


def refuse_uncapturable(target: Target, longest: int = 0) -> None:
    """Raises StageError for what cannot be captured, from config.json alone: before anything is loaded.

    longest: tokens of the longest row; the engine wants room for one more.
    """
    path = resolve_folder(target) / "config.json"
    config, text = read_json(path), text_config(target)
    stretched = text.get("rope_scaling") or (text.get("rope_parameters") or {}).get("factor")
    limit = text.get("max_position_embeddings")
    if limit and longest >= limit and not stretched:
        raise StageError(f"{path}: takes {limit} tokens, the longest row has {longest}; set rows.max_length below {limit}")
    architectures = [*config.get("architectures", []), *text.get("architectures", [])]
    for model_type in (config.get("model_type"), text.get("model_type")):
        if model_type in DEFERRED_ALL_REDUCE:
            raise StageError(_deferred(path, f"{DEFERRED_ALL_REDUCE[model_type]} (model_type {model_type})"))
    for architecture in architectures:
        if architecture.startswith(DEFERRED_ARCHITECTURES):
            raise StageError(_deferred(path, architecture))
    check_plain_head(text, path)


def _deferred(path: Path, name: str) -> str:
    return f"{path}: {name} defers its all-reduce across the layer boundary, its states are partial sums; no EAGLE-3 extraction"


@dataclass
class Step:
    """One forward pass: ids and positions [tokens], states [tokens, layers, hidden], finite [tokens, layers]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    finite: torch.Tensor
    copied: Any = None  # CUDA event: the tensors above are complete


class CaptureExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); its methods are called by `llm.collective_rpc`.

    Order of calls: capture_install once; then per batch capture_expect, `llm.generate`, capture_write; capture_wait last.
    capture_clear_cache between two batches, after one with an overflow.
    """

    def capture_install(self, aux_layer_ids: Sequence[int], num_hidden_layers: int, dtype: str) -> dict[str, str]:
        """Hooks the loaded model; states are kept as `dtype`. Returns the names of what runs, or {"error": one line}."""
        from vllm.distributed import get_tensor_model_parallel_rank

        model = self.get_model()  # type: ignore[attr-defined]
        problem = unsupported(self.vllm_config, model)  # type: ignore[attr-defined]
        if problem:
            return {"error": problem}
        body = decoder(model)
        assert body is not None  # else it is unsupported
        if len(body.layers) != num_hidden_layers:
            return {"error": f"{type(model).__name__} has {len(body.layers)} layers, expected {num_hidden_layers}"}
        stores = get_tensor_model_parallel_rank() == 0
        self._capture = _Capture(list(aux_layer_ids), DTYPES[dtype], stores)
        self._capture.hook(model, body)
        runner = type(self.model_runner)  # type: ignore[attr-defined]
        return {"model": type(model).__name__, "runner": f"{runner.__module__}.{runner.__name__}"}

    def capture_expect(self, rows: Sequence[Sequence[int]]) -> None:
        """The token ids of the rows that the next `generate` computes; forgets whatever was captured before."""
        self._capture.expect(rows)

    def capture_clear_cache(self) -> None:
        """Zeroes the KV cache. Attention reads whole blocks of it, and what an overflowing row left behind is not finite:
        beyond the end of the next row to get the block it has weight 0, and 0 * NaN is NaN."""
        for cache in _tensors(self.model_runner.kv_caches):  # type: ignore[attr-defined]
            cache.zero_()

    def capture_write(self, path: str, masks: Sequence[Sequence[bool]], provenance: dict[str, Any]) -> dict[str, Any] | None:
        """Writes the expected rows to `path` in the background, each with its loss mask; returns `capture_wait()` of before."""
        done = self.capture_wait()
        self._capture.write(Path(path), masks, provenance)
        return done

    def capture_wait(self) -> dict[str, Any] | None:
        """Waits for the last `capture_write`: {"path", "rejected": [[row_key, layer, reason]]} or {"error": one line}; None
        where nothing was written (other ranks, or no write pending)."""
        return self._capture.wait()


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """The tensors of a runner's list of caches, which nests where a layer has several."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def unsupported(vllm_config: Any, model: Any) -> str | None:
    """What forbids capturing in this engine, in one line."""
    for attribute, name in PARALLEL_SIZES.items():
        if getattr(vllm_config.parallel_config, attribute, 1) > 1:
            return (
                f"{name} is {getattr(vllm_config.parallel_config, attribute)}, states are captured with tensor parallelism only"
            )
    if getattr(vllm_config.parallel_config, "enable_dbo", False):
        return "dual-batch overlap is on, states are captured without it only"
    if vllm_config.model_config.dtype == torch.float16:
        return "the engine computes in float16, whose range hidden states leave; use bfloat16"
    if vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is on: states of a cached prefix would be missing"
    if not vllm_config.model_config.enforce_eager:
        return "the engine is compiled, states are captured in eager mode only"
    if not hasattr(model, "set_aux_hidden_state_layers"):
        return (
            f"{type(model).__name__} lacks vLLM's EAGLE-3 interface (SupportsEagle3); this target cannot be accelerated with it"
        )
    if decoder(model) is None:
        return f"{type(model).__name__} has no embed_tokens, layers and norm where they are expected"
    return None


@dataclass(frozen=True)
class Decoder:
    """The modules of a model that are hooked or counted."""

    embed_tokens: Any
    layers: Any
    norm: Any


def decoder(model: Any) -> Decoder | None:
    """The decoder stack: inside a wrapper for images (Kimi-K2.5) and inside the model with the head; None where it is not."""
    inner = model
    while hasattr(inner, "language_model"):
        inner = inner.language_model
    inner = getattr(inner, "model", inner)
    embedding = getattr(inner, "embed_tokens", getattr(inner, "embedding", None))  # gpt-oss has the other name
    if embedding is None or not all(hasattr(inner, name) for name in ("layers", "norm")):
        return None
    return Decoder(embedding, inner.layers, inner.norm)


class _Capture:
    """Hooks and captured steps of one worker."""

    def __init__(self, aux_layer_ids: list[int], dtype: torch.dtype, stores: bool) -> None:
        self.aux_layer_ids, self.dtype, self.stores = aux_layer_ids, dtype, stores
        self.layer_ids: list[int] = []
        self._ids: list[torch.Tensor] = []
        self._final: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []
        self._steps: list[Step] = []
        self._problem: str | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="capture_write")
        self._pending: Future[dict[str, Any]] | None = None
        self._stream: Any = None

    def hook(self, model: Any, body: Any) -> None:
        self.layer_ids = [*self.aux_layer_ids, len(body.layers)]
        # on every rank: the ranks run one program, and each one's runner must see hidden states only
        model.set_aux_hidden_state_layers(tuple(self.aux_layer_ids))
        if self.stores:
            # called in the forward pass, or before it by runners that hand embeddings to a multimodal model
            body.embed_tokens.register_forward_pre_hook(lambda _, args: self._ids.append(args[0].detach()))
            body.norm.register_forward_pre_hook(lambda _, args: self._take_final(*args))
        model.register_forward_hook(self._take_output, with_kwargs=True)

    def expect(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = [torch.tensor(row, dtype=torch.int32) for row in rows]
        self._steps, self._problem = [], None
        self._ids.clear()

    def _take_final(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        self._final = hidden.clone() if residual is None else hidden + residual

    def _take_output(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, tuple) or len(output) != 2:
            self._problem = self._problem or "the model returned no auxiliary states"
            return output
        hidden, aux = output
        if self.stores:
            ids, self._ids, final, self._final = self._ids, [], self._final, None
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            self._problem = self._problem or self._keep(ids, positions, list(aux), final)
        return hidden

    def _keep(self, ids: list[torch.Tensor], positions: torch.Tensor, aux: list[torch.Tensor], final: Any) -> str | None:
        """Keeps one forward pass; returns what is wrong with it, if anything."""
        if not ids or final is None:
            return "a forward pass went by the embedding's or the final norm's hook"
        if len(aux) != len(self.aux_layer_ids):
            return f"the model returned {len(aux)} auxiliary states, expected {len(self.aux_layer_ids)}"
        token_ids = torch.cat(ids) if len(ids) > 1 else ids[0]
        if positions.ndim > 1:  # multimodal rotary positions: text has the same number in every row
            positions = positions[0]
        rows = {*(state.shape[0] for state in aux), final.shape[0], positions.shape[0]}
        if rows != {positions.shape[0]} or token_ids.shape[0] > positions.shape[0]:
            given = f"{positions.shape[0]} positions and {token_ids.shape[0]} token ids"
            return f"a forward pass of {given} gave states of {sorted(rows)} rows"
        tokens = token_ids.shape[0]  # beyond them there is padding
        states = torch.stack([state[:tokens] for state in [*aux, final]], dim=1)
        finite = torch.isfinite(states).all(dim=-1)
        self._steps.append(self._to_host(Step(token_ids, positions[:tokens], states.to(self.dtype), finite)))
        return None

    def _to_host(self, step: Step) -> Step:
        tensors = (step.token_ids, step.positions, step.states, step.finite)
        if not step.states.is_cuda:
            # ids and positions are the runner's buffers and change with the next step
            return Step(step.token_ids.clone(), step.positions.clone(), step.states, step.finite)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        ids, positions = (tensor.clone() for tensor in tensors[:2])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # pinned memory comes from torch's caching allocator: from the second step on it is reused
            host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (ids, positions, *tensors[2:])]
            for target, source in zip(host, (ids, positions, *tensors[2:]), strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Step(host[0], host[1], host[2], host[3], copied)

    def write(self, path: Path, masks: Sequence[Sequence[bool]], provenance: dict[str, Any]) -> None:
        if self.stores:
            batch = (self._rows, self._steps, self._problem)
            self._pending = self._writer.submit(self._write, path, masks, provenance, *batch)
        self._rows, self._steps, self._problem = [], [], None

    def wait(self) -> dict[str, Any] | None:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _write(
        self,
        path: Path,
        masks: Sequence[Sequence[bool]],
        provenance: dict[str, Any],
        rows: list[torch.Tensor],
        steps: list[Step],
        problem: str | None,
    ) -> dict[str, Any]:
        if problem:
            return {"error": problem}
        try:
            found = match_rows(rows, steps)
            kept, rejected = [], []
            for row, mask in zip(rows, masks, strict=True):
                key = row_key(row.numpy())
                states, finite = found[key]
                if bool(finite.all()):
                    kept.append(StateRow(key, row, torch.tensor(mask, dtype=torch.bool), states))
                else:
                    layer = self.layer_ids[int((~finite).any(dim=0).nonzero()[0])]
                    rejected.append([key, layer, "not finite"])
            if kept:
                write_shard(path, kept, self.layer_ids, provenance)
        except StageError as error:
            return {"error": str(error)}
        return {"path": str(path), "rejected": rejected}


def match_rows(rows: Sequence[torch.Tensor], steps: Sequence[Step]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Finds each row by its token ids: row key -> (states [tokens, layers, hidden], finite [tokens, layers]).

    A row's segment begins at a position 0 and counts up without a gap. The segment may be longer than the row where padding
    follows. Raises StageError where a row was not computed in one piece.
    """
    wanted = {row_key(row.numpy()): row for row in rows}
    lengths = sorted({len(row) for row in rows}, reverse=True)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in steps:
        if step.copied is not None:
            step.copied.synchronize()
        ids, positions = step.token_ids.to(torch.int32), step.positions
        # a boundary is wherever the position does not continue the one before
        breaks = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten() + 1
        edges = [0, *breaks.tolist(), len(ids)]
        for start, end in pairwise(edges):
            if int(positions[start]) != 0:
                continue
            for length in (n for n in lengths if n <= end - start):
                if length < end - start and end < len(ids):
                    continue  # only the last segment can run into padding
                key = row_key(ids[start : start + length].numpy())
                if key in wanted:
                    found[key] = (step.states[start : start + length], step.finite[start : start + length])
                    break
    missing = [key for key in wanted if key not in found]
    if missing:
        raise StageError(
            f"capture: {len(missing)} of {len(wanted)} rows were not computed in one piece, e.g. {missing[0]} of "
            f"{len(wanted[missing[0]])} tokens; the engine cut or cached a row, nothing of this batch is kept"
        )
    return found
