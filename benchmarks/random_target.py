"""A target of real widths with random weights that lie on no disk: vLLM draws them on the device when it loads.

In: the shape (`make`), or a stage to run on such a folder (`python -m benchmarks.random_target scripts.canary ...`). Out: a
folder in Hugging Face format that holds the tokenizer, the config and only the three tensors that a draft shares with its
target; every other tensor is drawn from a seed of its name, so that each load gives the same model. In the engine's process.
"""

import json
import runpy
import sys
import zlib
from pathlib import Path
from typing import Any

from scripts import make_tiny_target
from scripts.eagle3.files import read_json, write_atomically, write_json, write_text
from scripts.eagle3.target import EMBEDDING_NAMES, HEAD_NAMES, NORM_NAMES

MARK = "random_weights"
WEIGHTS = "model-00001-of-00001.safetensors"
# moonshotai/Kimi-K2.5's text model
WIDTHS = {
    **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 163840},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
    **{"max_position_embeddings": 262144, "rope_theta": 50000.0},
    "rope_scaling": {
        **{"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
# vLLM 0.22 takes the image processor from the target's folder, as code; no row here has an image
IMAGE_PROCESSOR = """from transformers.image_processing_utils import BaseImageProcessor


class NoImages(BaseImageProcessor):
    num_frames_per_chunk = 1

    def media_tokens_calculator(self, chunk):
        return 1
"""
# shapes whose weights are written, so that any program can load them
SHAPES = {
    "kimi-k2.5": {},
    "smollm2": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True},
    },
    "llama-8b": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    },
}
GROUP = 32
# only the routed experts are quantised
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
                **{"dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None},
            },
        }
    },
}
# standard deviation of an even draw from -8..7
INT4_STD = 4.61
# how strongly a tensor's output adds to the stream; the routed experts little: rounding may choose another one
GAINS = {"o_proj.weight": 0.8, "down_proj.weight": 1.3, "w2_weight": 0.4, "mlp.gate.weight": 2.0}
# the same for about 30 layers in which rounding adds up
DEEP_GAIN = 0.4
LOGIT_STD = 3.0


def make(folder: Path, layers: int, experts: int, quantized: bool, device: str) -> None:
    """Writes a Kimi-K2.5 of real widths with `layers` layers and `experts` routed experts, INT4 ones where `quantized`.

    Tokenizer and chat template are the tiny target's; ids that it does not know have a logit of 0 and are never chosen.
    """
    import torch
    from safetensors.torch import save_file

    make_tiny_target.run("tiny-kimi", folder)
    (folder / "model.safetensors").unlink()
    config = read_json(folder / "config.json")
    text = config["text_config"] = {**config["text_config"], **WIDTHS, "num_hidden_layers": layers, "n_routed_experts": experts}
    if quantized:
        text["quantization_config"] = QUANTIZATION
    config[MARK] = True
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, std: float = 1.0) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * std

    head = draw(text["vocab_size"], text["hidden_size"], std=LOGIT_STD / text["hidden_size"] ** 0.5)
    head[make_tiny_target.VOCAB_SIZE :] = 0
    tensors = {
        EMBEDDING_NAMES[1]: draw(text["vocab_size"], text["hidden_size"]).cpu(),
        NORM_NAMES[1]: (1 + draw(text["hidden_size"], std=0.2)).cpu(),
        HEAD_NAMES[1]: head.cpu(),
    }
    write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors, WEIGHTS)}
    write_json(folder / "model.safetensors.index.json", index)
    write_text(folder / "no_images.py", IMAGE_PROCESSOR)
    processor = read_json(folder / "preprocessor_config.json")
    processor |= {"image_processor_type": "NoImages", "auto_map": {"AutoImageProcessor": "no_images.NoImages"}}
    write_json(folder / "preprocessor_config.json", processor)
    write_json(folder / "config.json", config)


def place(shape: str, folder: Path) -> None:
    """Makes `folder` a target of this shape (8 layers of kimi-k2.5), or a link to the target's folder that `shape` names."""
    import torch

    if (folder / "config.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if shape not in SHAPES:
        folder.symlink_to(Path(shape).resolve())
    elif shape == "kimi-k2.5":
        make(folder, 8, 384, True, device)
    else:
        make_llama(folder, SHAPES[shape], device)


def make_llama(folder: Path, shape: dict[str, Any], device: str) -> None:
    """Writes a Llama of this shape in bfloat16, drawn as the tiny target is; its tokenizer is the tiny target's."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_target.run("tiny-llama", folder)
    config = read_json(folder / "config.json") | shape | {"torch_dtype": "bfloat16", "max_position_embeddings": 8192}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(LlamaConfig(**config)).state_dict().items()}
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, size in shapes.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        gain = DEEP_GAIN if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
        if len(size) > 1:
            tensor.normal_(0, gain / (1.0 if "embed" in name else size[-1] ** 0.5), generator=generator)
        tensors[name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def register() -> None:
    """Lets vLLM draw the weights of marked folders; other folders (drafts) are read as ever."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class RandomWeights(DefaultModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            folder = Path(model_config.model)
            if json.loads((folder / "config.json").read_text()).get(MARK):
                fill(model, folder)
            else:
                super().load_weights(model, model_config)

    register_model_loader("auto")(RandomWeights)


def fill(model: Any, folder: Path) -> None:
    """Fills every parameter of a model that is created but not yet processed for its kernels."""
    import torch
    from safetensors.torch import load_file

    shared = {tuple(name.rsplit(".", 2)[-2:]): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
            own = shared.get(tuple(name.rsplit(".", 2)[-2:]))
            if own is not None and own.shape[1:] == tensor.shape[1:] and not name.startswith("vision"):
                tensor[: len(own)].copy_(own)  # the engine's may be padded
            elif name.endswith("weight_packed"):
                for part in tensor:  # one expert at a time
                    part.random_(-(2**31), 2**31 - 1, generator=generator)
            elif name.endswith("weight_scale"):
                fan_in = tensor.shape[1] * GROUP
                tensor.fill_(_gain(name.replace("_scale", "")) / (INT4_STD * fan_in**0.5))
            elif tensor.is_floating_point() and tensor.ndim > 1:
                for part in tensor if tensor.ndim > 2 else (tensor,):
                    part.normal_(0, _gain(name) / part.shape[-1] ** 0.5, generator=generator)
            elif tensor.is_floating_point():
                tensor.fill_(float(name.endswith("norm.weight")))


def _gain(name: str) -> float:
    return next((gain for ending, gain in GAINS.items() if name.endswith(ending)), 1.0)


if __name__ == "__main__":
    register()
    del sys.argv[0]  # what follows sees its own command line
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
