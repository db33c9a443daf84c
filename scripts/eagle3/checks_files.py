"""The small files of the target's folder: each has the form that everything after it takes for granted.

In: the folder. Out: StageError that names the file, the key, and what to do, before anything else reads them. Only forms are
checked here (kinds of values, numbers above 0); whether they fit each other is asked by the other lines of preflight.
"""

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.target import FETCH_AGAIN, INDEX, chat_template

# what transformers 5 and vLLM 0.22 to 0.32 know, `su` and `mrope` being older names
ROPE_TYPES = (
    "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk", "mllama4", "openpangu", "su", "mrope",
    "bailing_mrope", "deepseek_yarn", "deepseek_llama_scaling",
)  # fmt: skip
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _ids(value: Any) -> Any:
    ids = value if isinstance(value, list) else [value]
    if value is not None and not (ids and all(type(each) is int and each >= 0 for each in ids)):
        raise ValueError(f"expected a token id or a list of them, found {json.dumps(value)[:60]}")
    return value


Count = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenIds = Annotated[int | list[int] | None, BeforeValidator(_ids)]
FormT = TypeVar("FormT", bound="Form")


class Form(BaseModel):
    """Keys that are read somewhere; a file may have others. Strict: a number in quotes is text."""

    model_config = ConfigDict(strict=True)


class TextConfig(Form):
    """config.json of the text model: sizes and rotary embeddings."""

    model_type: str | None = None
    hidden_size: Count
    vocab_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Number | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenIds = None
    rope_theta: Number | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    n_shared_experts: Annotated[int, Field(ge=0)] | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 0

    @field_validator("rope_parameters", "rope_scaling")
    @classmethod
    def _known_type(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        # one set for all layers, or one for each kind of layer
        for one in [value or {}, *(each for each in (value or {}).values() if isinstance(each, dict))]:
            kind = one.get("rope_type", one.get("type", "default"))
            if kind not in ROPE_TYPES:
                raise ValueError(f"expected a type of {', '.join(ROPE_TYPES)}, found {kind}")
            if "rope_theta" in one and not (isinstance(one["rope_theta"], int | float) and one["rope_theta"] > 0):
                raise ValueError(f"expected a rope_theta above 0, found {one['rope_theta']!r}")
        return value

    @model_validator(mode="after")
    def _heads(self) -> "TextConfig":
        missing = [name for name in LATENT if getattr(self, name) is None]
        if self.kv_lora_rank is not None and missing:
            raise ValueError(f"kv_lora_rank is {self.kv_lora_rank} and {missing[0]} is missing")
        if self.num_attention_heads > self.hidden_size:
            raise ValueError(f"num_attention_heads is {self.num_attention_heads}, hidden_size {self.hidden_size}")
        return self


class Wrapper(Form):
    """config.json around a text model, or the text model's own."""

    architectures: list[str] | None = None
    model_type: str | None = None
    tie_word_embeddings: bool | None = None


class GenerationConfig(Form):
    """generation_config.json."""

    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class Index(Form):
    """The index of a sharded checkpoint."""

    weight_map: Annotated[dict[str, str], Field(min_length=1)]
    metadata: dict[str, Any] | None = None


class TokenizerConfig(Form):
    """tokenizer_config.json."""

    chat_template: str | list[Any] | dict[str, Any] | None = None
    auto_map: dict[str, Any] | None = None
    added_tokens_decoder: dict[str, Any] | None = None


def check_small_files(folder: Path) -> str:
    """All of them; says which. StageError names the first that is not as it should be."""
    config = folder / "config.json"
    whole = _read(config)
    form(config, Wrapper, whole)
    if "text_config" in whole:
        form(config, TextConfig, whole["text_config"], "text_config")
    else:
        form(config, TextConfig, whole)
    others: dict[str, type[Form]] = {
        "generation_config.json": GenerationConfig,
        INDEX: Index,
        "tokenizer_config.json": TokenizerConfig,
    }
    found = {name: model for name, model in others.items() if (folder / name).exists()}
    for name, model in found.items():
        form(folder / name, model, _read(folder / name))
    check_template(folder)
    return f"{', '.join(['config.json', *found])} in order"


def form(path: Path, model: type[FormT], value: object, key: str = "") -> FormT:
    """`value` (below `key` of the file) as the model; StageError names file, key and what was found."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        where, said = first_fault(error, key)
        raise StageError(f"{path}: {where}{said}; mend the file, or {FETCH_AGAIN}") from None


def first_fault(error: ValidationError, key: str = "") -> tuple[str, str]:
    """(`key: ` or nothing, what is wrong and what was found) of the first fault."""
    first = error.errors()[0]
    names = [str(part) for part in (key, *first["loc"]) if part != ""]
    said = {"missing": "is missing", "model_type": "expected an object", "extra_forbidden": "unknown key"}.get(
        first["type"], first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    )
    told = first["type"] in ("missing", "value_error")  # the message holds what was found
    found = "" if told else f", found {json.dumps(first['input'], default=str)[:60]}"
    return f"{'.'.join(names)}: " if names else "", said + found


def check_template(folder: Path) -> None:
    """The chat template is text that mentions the conversation; StageError. That there is one is asked elsewhere."""
    path = folder / "chat_template.jinja"
    advice = f"mend the chat template, or {FETCH_AGAIN}"
    if path.exists() and not path.is_file():
        raise StageError(f"{path}: expected a file, found a folder; {advice}")
    if not path.is_file():
        path = folder / "tokenizer_config.json"
        if not path.is_file() or not read_json(path).get("chat_template"):
            return
    try:
        text = chat_template(folder)
    except UnicodeDecodeError as error:
        raise StageError(f"{path}: the chat template is not UTF-8 ({error.reason}); {advice}") from error
    if "messages" not in text:
        what = "never mentions `messages`, so that all conversations look the same" if text.strip() else "is empty"
        raise StageError(f"{path}: the chat template {what}; {advice}")


def _read(path: Path) -> Any:
    if not path.is_file():
        raise StageError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'none'}; {FETCH_AGAIN}")
    try:
        value = read_json(path)
    except OSError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror}); mend its permissions") from error
    except StageError as error:
        raise StageError(f"{error}; {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise StageError(f"{path}: expected a JSON object, found {json.dumps(value)[:60]}; mend the file, or {FETCH_AGAIN}")
    return value
