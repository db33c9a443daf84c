"""Capture of hidden states inside vLLM's workers, in the way that serving makes them.

In: shard files with the rows asked for. Out: their states in them, written by tensor-parallel rank 0 (capture_writer).
The target's own EAGLE-3 interface returns the auxiliary states; a hook on the top-level model takes them off again, so
that the model runner sees what it always sees. vLLM 0.22 to 0.32, model runner V1 and V2.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.capture_writer import CaptureWriter
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.plain_head import check_plain_head
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


class CaptureExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); its methods are called by `llm.collective_rpc`.

    Order of calls: capture_install once; per batch capture_expect, its rows into the engine, capture_results; capture_close.
    capture_clear_cache between two batches, after one with an overflow.
    """

    def capture_install(self, aux_layer_ids: Sequence[int], num_hidden_layers: int, state_bytes: int) -> dict[str, str]:
        """Hooks the loaded model; `state_bytes`: of one token's states, at most. Returns the names of what runs, or
        {"error": one line}."""
        from vllm.distributed import get_tensor_model_parallel_rank

        model = self.get_model()  # type: ignore[attr-defined]
        problem = unsupported(self.vllm_config, model)  # type: ignore[attr-defined]
        if problem:
            return {"error": problem}
        body = decoder(model)
        assert body is not None  # else it is unsupported
        if len(body.layers) != num_hidden_layers:
            return {"error": f"{type(model).__name__} has {len(body.layers)} layers, expected {num_hidden_layers}"}
        max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens  # type: ignore[attr-defined]
        stores = get_tensor_model_parallel_rank() == 0
        writer = CaptureWriter(max_tokens, len(aux_layer_ids) + 1, state_bytes) if stores else None
        self._capture = _Capture(list(aux_layer_ids), writer)
        self._capture.hook(model, body)
        runner = type(self.model_runner)  # type: ignore[attr-defined]
        memory = "pinned" if writer and writer.pinned else "pageable"
        return {"model": type(model).__name__, "runner": f"{runner.__module__}.{runner.__name__}", "host_memory": memory}

    def capture_expect(self, rows: Mapping[str, Sequence[int]]) -> None:
        """The engine is given the rows with these numbers of the shards at these paths next, a batch; they get their states."""
        self._capture.expect({Path(path): indices for path, indices in rows.items()})

    def capture_results(self, wait: bool, computing: int) -> list[dict[str, Any]]:
        """Of the batches whose writing has ended, or of all: {"paths", "keys", "rejected": [[row_key, layer, reason]]} or
        {"error": one line}. The newest `computing` are not through the engine yet. Other ranks than the first have none."""
        return self._capture.writer.results(wait, computing) if self._capture.writer else []

    def capture_clear_cache(self) -> None:
        """Zeroes the KV cache. Attention reads whole blocks of it, and what an overflowing row left behind is not finite:
        beyond the end of the next row to get the block it has weight 0, and 0 * NaN is NaN."""
        for cache in _tensors(self.model_runner.kv_caches):  # type: ignore[attr-defined]
            cache.zero_()

    def capture_close(self) -> None:
        """Ends what was started beside the engine."""
        if self._capture.writer:
            self._capture.writer.close()


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
    """The hooks of one worker; `writer` is None on ranks that store nothing."""

    def __init__(self, aux_layer_ids: list[int], writer: CaptureWriter | None) -> None:
        self.aux_layer_ids, self.writer = aux_layer_ids, writer
        self.layer_ids: list[int] = []
        self._ids: list[torch.Tensor] = []
        self._final: torch.Tensor | None = None

    def hook(self, model: Any, body: Any) -> None:
        self.layer_ids = [*self.aux_layer_ids, len(body.layers)]
        # on every rank: the ranks run one program, and each one's runner must see hidden states only
        model.set_aux_hidden_state_layers(tuple(self.aux_layer_ids))
        if self.writer:
            # called in the forward pass, or before it by runners that hand embeddings to a multimodal model
            body.embed_tokens.register_forward_pre_hook(lambda _, args: self._ids.append(args[0].detach()))
            body.norm.register_forward_pre_hook(lambda _, args: self._take_final(*args))
        model.register_forward_hook(self._take_output, with_kwargs=True)

    def expect(self, rows: Mapping[Path, Sequence[int]]) -> None:
        self._ids.clear()
        if self.writer:
            self.writer.expect(rows, self.layer_ids)

    def _take_final(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        self._final = hidden.clone() if residual is None else hidden + residual

    def _take_output(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, tuple) or len(output) != 2:
            if self.writer:
                self.writer.fail("the model returned no auxiliary states")
            return output
        hidden, aux = output
        if self.writer:
            ids, self._ids, final, self._final = self._ids, [], self._final, None
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            problem = self._keep(self.writer, ids, positions, list(aux), final)
            if problem:
                self.writer.fail(problem)
        return hidden

    def _keep(
        self, writer: CaptureWriter, ids: list[torch.Tensor], positions: torch.Tensor, aux: list[torch.Tensor], final: Any
    ) -> str | None:
        """Hands one forward pass to the writer; returns what is wrong with it, if anything."""
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
        writer.take(token_ids, positions[:tokens], [state[:tokens] for state in [*aux, final]])
        return None
