"""The text side of a Kimi-K2.5 folder, without weights: tokenizer, chat template and configs, all synthetic.

In: nothing. Out: a folder with the files that the published one has, special tokens at their real ids. The published files
were not at hand: ids and format are public knowledge, the template and the Python module are written here.
"""

import base64
import itertools
import shutil
import string
from pathlib import Path
from typing import Any

from scripts.eagle3.files import write_json, write_text

HERE = Path(__file__).parent
ASSETS = (HERE / "tokenization_tiny_kimi.py", HERE / "chat_template.jinja")
FIRST_SPECIAL, VOCAB_SIZE = 163584, 163840
# id -> (text, special); tool and thinking marks are plain added tokens, so that decoding keeps them (not verified)
SPECIAL_TOKENS = {
    163584: ("[BOS]", True),
    163585: ("[EOS]", True),
    163586: ("<|im_end|>", True),
    163587: ("<|im_user|>", True),
    163588: ("<|im_assistant|>", True),
    163590: ("<|start_header_id|>", True),
    163591: ("<|end_header_id|>", True),
    163593: ("[EOT]", True),
    163594: ("<|im_system|>", True),
    163595: ("<|tool_calls_section_begin|>", False),
    163596: ("<|tool_calls_section_end|>", False),
    163597: ("<|tool_call_begin|>", False),
    163598: ("<|tool_call_argument_begin|>", False),
    163599: ("<|tool_call_end|>", False),
    163601: ("<|im_middle|>", True),
    163602: ("<|media_begin|>", True),
    163603: ("<|media_content|>", True),
    163604: ("<|media_end|>", True),
    163605: ("<|media_pad|>", True),
    163606: ("<think>", False),
    163607: ("</think>", False),
    163838: ("[UNK]", True),
    163839: ("[PAD]", True),
}
BOS, EOS, IM_END, MEDIA_PAD, PAD = 163584, 163585, 163586, 163605, 163839
# config.json's figures of the text model: nothing is built from them here
TEXT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_tokenizer_folder(output: Path, word_starts: list[str], vision_config: dict[str, Any]) -> None:
    """Writes all files; `word_starts` are the pairs of letters that are one token with the space before them."""
    write_text(output / "tiktoken.model", _ranks(word_starts))
    for asset in ASSETS:
        shutil.copyfile(asset, output / asset.name)
    write_json(output / "tokenizer_config.json", _tokenizer_config())
    # eos_token_id differs between the two configs in the published files too
    write_json(output / "generation_config.json", {"eos_token_id": IM_END, "temperature": 0.6, "max_length": 262144})
    config: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": TEXT_CONFIG,
        "vision_config": vision_config,
        "media_placeholder_token_id": MEDIA_PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_json(output / "config.json", config)


def _ranks(word_starts: list[str]) -> str:
    """`tiktoken.model`: bytes, then pairs of letters, then word starts that end right below the special tokens."""
    pairs = [first + second for first, second in itertools.product(string.ascii_lowercase, repeat=2)]
    starts = [f" {letter}" for letter in string.ascii_lowercase] + [f" {word}" for word in word_starts]
    tokens = [bytes([value]) for value in range(256)] + [pair.encode() for pair in pairs]
    numbered = [*enumerate(tokens), *enumerate((start.encode() for start in starts), start=FIRST_SPECIAL - len(starts))]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in numbered)


def _tokenizer_config() -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(number): {"content": text, **flags, "special": special} for number, (text, special) in SPECIAL_TOKENS.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_tiny_kimi.TinyKimiTokenizer", None]},
        "tokenizer_class": "TinyKimiTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "additional_special_tokens": [
            text for number, (text, special) in SPECIAL_TOKENS.items() if special and IM_END <= number <= MEDIA_PAD
        ],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
    }
