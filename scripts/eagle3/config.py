"""The configuration as typed models: one definition for the JSON schema, the check before the DAG, and the stages' options.

In: the merged YAML. Out: `Config`, defaults filled, or a StageError that names the key. A section travels to its stage as
JSON (`--draft '{"num_hidden_layers": 1, ...}'`), so that Snakemake reruns what depends on it when it changes.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import check_aux_layer_ids, default_aux_layer_ids
from scripts.eagle3.presets import TARGET_VALUES, refuse_unknown, with_preset

Fraction = Annotated[float, Field(ge=0, le=1)]
NAME, NO_HOME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", r"^[^~]"
# what a pattern means, for those who missed it
PATTERNS = {NAME: "expected letters, digits, `.`, `_` and `-`", NO_HOME: "expected a whole path (`~` is not expanded)"}
Name = Annotated[str, Field(pattern=NAME, max_length=100)]
# (dtype, ZeRO stage) where DeepSpeed 0.19.8 clips the gradients before Muon; elsewhere it clips Muon's updates, whose norm is
# that of the matrices' ranks and says nothing
MUON_RUNS = (("bfloat16", 1), ("float32", 0))


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Target(Section):
    """The served model that the draft head accelerates."""

    path: str = Field(pattern=NO_HOME, description="Folder with the target's config.json, weights and tokenizer, or a hub id.")
    revision: str | None = Field(None, description="Commit, for a hub id.")
    architecture: str | None = Field(
        None, description="Expected among `architectures` of the target's config.json; null: any. Tells sister models apart."
    )
    num_hidden_layers: int = Field(ge=2, description="Decoder layers n; compared with the target's config.json.")
    aux_layer_ids: list[int] = Field(
        default_factory=list,
        description="Auxiliary states k (after k layers), ascending, 1 <= k < n. Empty means 2, n // 2, n - 3.",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="What the engine computes in; float32 is for CPUs.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the target. Off unless you read it.")
    min_gpus: int = Field(
        0,
        ge=0,
        exclude=True,
        description="A job that loads the target and is granted fewer GPUs stops.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_aux_layer_ids(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("aux_layer_ids") and isinstance(values.get("num_hidden_layers"), int):
            values = {**values, "aux_layer_ids": default_aux_layer_ids(values["num_hidden_layers"])}
        return values

    @model_validator(mode="after")
    def _check_aux_layer_ids(self) -> "Target":
        check_aux_layer_ids(self.aux_layer_ids, self.num_hidden_layers)
        return self


class Source(Section):
    """Where conversations come from: rows with `messages` (role, content) or ShareGPT `conversations` (from, value)."""

    path: str = Field(description="A .jsonl or .parquet file, a folder or id that `datasets.load_dataset` takes.")
    split: str = Field("train", description="Split, for a `datasets` id or folder.")
    revision: str | None = Field(None, description="Commit, for a `datasets` id.")
    limit: int | None = Field(None, ge=1, description="Take only the first rows.")


class Conversations(Section):
    """Prompts for training and evaluation."""

    train: list[Source] = Field(min_length=1, description="Sources of training conversations, in order.")
    evaluation: dict[Name, Source] = Field(min_length=1, description="Evaluation suites: name -> source; kept out of training.")
    validation_fraction: Fraction = Field(
        0.1, description="Share of the training conversations that is held out for validation."
    )
    decontamination_overlap: Fraction = Field(
        0.5,
        description="A training conversation is dropped when it holds at least this share of an evaluation prompt's 5-grams.",
    )
    max_rejected_fraction: Fraction = Field(0.001, description="Share of malformed rows above which a stage fails.")


class Regeneration(Section):
    """How the target answers the training prompts itself."""

    temperature: float | None = Field(
        None, ge=0, description="0 is greedy; null is what the target's generation_config.json says, else 1."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Nucleus sampling, 1 is off; null is as for temperature. Unused when greedy."
    )
    max_tokens: int = Field(2048, ge=1, description="Longest answer of one turn, in tokens.")
    seed: int = Field(0, description="Sampling seed of the run; each request derives its own. Unused when greedy.")
    thinking: Fraction | None = Field(
        None, description="Share of the conversations answered in thinking mode; null is the chat template's own default."
    )
    thinking_variable: str = Field(
        "thinking",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="The chat template's switch for thinking (Qwen: enable_thinking). Unused where `thinking` is null.",
    )
    cut_answers: Literal["keep", "drop"] = Field(
        "keep", description="Answers that reach max_tokens: keep them, or drop the turn and what follows it."
    )

    @model_validator(mode="after")
    def _forget_what_has_no_effect(self) -> "Regeneration":
        """Unused settings are checked and set back to their defaults, so that a change of them reruns nothing."""
        unused = ["thinking_variable"] if self.thinking is None else []
        unused += ["top_p", "seed"] if self.temperature == 0 else []
        for name in unused:
            object.__setattr__(self, name, type(self).model_fields[name].default)  # the model is frozen from here on
        return self


class Parts(Section):
    """How rows are dealt: engine loads, and files per load."""

    parts: int = Field(1, ge=1, description="Engine loads of the extraction, hence nodes that can work at once.")
    shards_per_part: int = Field(1, ge=1, description="Files of one part.")


class Rows(Section):
    """Training rows."""

    max_length: int = Field(4096, ge=16, description="Longest row in tokens; longer ones are cut and counted.")


class Extraction(Section):
    """How the target's hidden states are kept."""

    dtype: Literal["bfloat16", "fp8"] = Field(
        "bfloat16", description="fp8: e4m3 with a scale per token and layer, half the bytes and a rounding of up to 6 %."
    )
    final_states: Literal["all", "supervised"] = Field(
        "all",
        description="supervised: of answer tokens only, as training reads them; another loss mask then needs a new extraction.",
    )


class Vocabulary(Section):
    """The draft's vocabulary."""

    draft_vocab_size: int = Field(32000, ge=1, description="Tokens that the draft can propose.")
    min_coverage: Fraction = Field(0.95, description="Share of loss-masked validation tokens that must be in it.")


class Draft(Section):
    """Architecture of the draft head (Llama decoder); null means: as the target has it."""

    preset: str | None = Field(None, description="A file of config/draft/, without .json; what stands beside it here wins.")
    num_hidden_layers: int = Field(1, ge=1, le=4, description="Decoder layers of the draft.")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key and value heads.")
    head_dim: int | None = Field(None, ge=2, description="Width of a head.")
    intermediate_size: int | None = Field(None, ge=1, description="Width of the MLP.")
    norm_before_residual: bool = Field(True, description="The first layer's residual is the normed auxiliary projection.")
    norm_before_fc: bool = Field(False, description="RMSNorm over the concatenated auxiliary states before `fc`.")
    norm_output: bool = Field(False, description="Feed the normed output back (EAGLE-3.1); vLLM 0.22 ignores it.")
    target_values: dict[str, Any] = Field(
        default_factory=dict,
        description="LlamaConfig values that are compared with the target's and never taken; usually a preset's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, dict) and isinstance(values.get("preset"), str) else values

    @field_validator("target_values")
    @classmethod
    def _check_target_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        refuse_unknown(values, TARGET_VALUES, "draft.target_values")
        return values


class Rolling(Section):
    """Parts are extracted while others are trained, and deleted once trained: for states that no disk holds."""

    passes: int = Field(1, ge=1, description="Passes over each part before its states are deleted.")
    parts_on_disk: int = Field(
        2,
        ge=1,
        exclude=True,
        description="Parts whose states exist at the same time, validation apart; 1: extraction and training take turns.",
    )


class Training(Section):
    """The training run."""

    segments: int = Field(
        3, ge=1, description="Passes over the parts; each ends in a checkpoint. With `rolling` one for each part: leave it out."
    )
    rolling: Rolling | None = Field(None, description="One segment for each part, whose states go after it; null: all stay.")
    patience: int | None = Field(
        None,
        ge=1,
        description="Early stop: so many segments without a better acceptance length on the validation rows end the training; "
        "null: all segments are trained. Not with `rolling`.",
    )
    ttt_steps: int = Field(3, ge=1, description="Training-time test steps: how often the draft sees its own states.")
    step_loss_decay: float = Field(1.0, gt=0, le=1, description="Weight of TTT step i is this to the power i.")
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = Field("kl_div", description="Loss of speculators.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the matrices of `fc` and the decoder layers; AdamW for the norms."
    )
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate of AdamW.")
    muon_learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate of Muon, whose updates are scaled to the size of AdamW's; null: learning_rate.",
    )
    schedule: Literal["linear", "cosine", "constant", "wsd"] = Field(
        "linear", description="After the warm-up; wsd: constant, then linear over the last `decay_fraction`."
    )
    decay_fraction: Fraction = Field(0.2, description="wsd: share of all optimiser steps with a falling learning rate.")
    warmup_fraction: Fraction = Field(0.04, description="Share of all optimiser steps with a rising learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, decoupled.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping.")
    batch_tokens: int = Field(8192, ge=16, description="Tokens of one packed sequence: one micro-batch.")
    gradient_accumulation: int = Field(1, ge=1, description="Micro-batches per optimiser step.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="What the draft computes in; masters are float32.")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage.")
    seed: int = Field(0, description="Order of rows and initial weights.")
    initial_head: str | None = Field(
        None, description="Start from this head: a folder of an export or of a third-party EAGLE-3 head. Null: random weights."
    )
    loggers: list[Literal["tensorboard", "wandb"]] = Field(
        default=["tensorboard"], description="Besides the JSON lines, which are always written."
    )
    checkpoint_minutes: int = Field(
        15, ge=0, exclude=True, description="Minutes between states inside a segment, to go on from; 0: after every step."
    )
    keep_checkpoints: int = Field(
        0,
        ge=0,
        exclude=True,
        description="Only the weights of so many best checkpoints (acceptance length on validation rows) stay, beside the last "
        "two, which stay whole; 0: all stay.",
    )

    @model_validator(mode="after")
    def _check_patience(self) -> "Training":
        if self.patience is not None and self.rolling is not None:
            raise ValueError("patience and rolling exclude each other: each part is trained once; leave patience out")
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> "Training":
        found = (self.dtype, self.zero_stage)
        if found == ("bfloat16", 0):
            raise ValueError(
                "dtype bfloat16 with zero_stage 0: DeepSpeed keeps no float32 masters then; expected zero_stage 1, 2 or 3"
            )
        if self.optimizer == "muon" and found not in MUON_RUNS:
            known = " or ".join(f"dtype {dtype} with zero_stage {stage}" for dtype, stage in MUON_RUNS)
            raise ValueError(
                f"optimizer muon with dtype {found[0]} and zero_stage {found[1]}: DeepSpeed clips Muon's updates there instead "
                f"of the gradients; expected {known}, or optimizer adamw"
            )
        if self.optimizer != "muon" and self.muon_learning_rate is not None:
            raise ValueError("muon_learning_rate is for optimizer muon: set that, or leave it out")
        return self


class Method(Section):
    """One way to decode, measured on every evaluation suite."""

    kind: Literal["baseline", "eagle3", "ngram"] = Field(description="baseline: no drafting; ngram: prompt lookup.")
    num_speculative_tokens: int = Field(3, ge=1, description="K: tokens drafted per step.")
    model: str | None = Field(None, description="eagle3: a third-party head's folder; null is this run's export.")
    aux_layer_ids: list[int] | None = Field(
        None, description="model: its auxiliary states as target.aux_layer_ids counts them, where its config leaves doubt."
    )
    prompt_lookup_min: int = Field(2, ge=1, description="ngram: shortest match.")
    prompt_lookup_max: int = Field(4, ge=1, description="ngram: longest match.")

    @model_validator(mode="after")
    def _check_model(self) -> "Method":
        if self.aux_layer_ids is not None and (self.kind != "eagle3" or self.model is None):
            raise ValueError("aux_layer_ids is for a third-party head: set kind eagle3 and model, or leave it out")
        return self


class Evaluation(Section):
    """How methods are measured."""

    methods: dict[Name, Method] = Field(
        default_factory=lambda: {
            "baseline": Method(kind="baseline"),
            "eagle3": Method(kind="eagle3"),
            "ngram": Method(kind="ngram"),
        },
        description="Name -> method; `baseline` and `eagle3` must be there.",
    )
    max_tokens: int = Field(256, ge=1, description="New tokens per turn.")
    temperature: float = Field(0.0, ge=0, le=0, description="Greedy: outputs are compared token by token.")
    max_num_seqs: int = Field(16, ge=1, description="Requests that run together.")
    tie_logit_margin: float = Field(1e-4, ge=0, description="Outputs may differ where the two best logits are this close.")

    @model_validator(mode="after")
    def _check_methods(self) -> "Evaluation":
        for name in ("baseline", "eagle3"):
            if name not in self.methods or self.methods[name].kind != name:
                raise ValueError(f"needs a method named {name} of kind {name}")
        for name in ("simulated", "plots"):
            if name in self.methods:
                raise ValueError(f"a method cannot be named {name}: that folder of the evaluation is taken")
        return self


class Gate(Section):
    """What the summary must show; `check_gate` fails otherwise. Null switches a check off."""

    min_acceptance_length: float | None = Field(
        None, ge=1, description="Acceptance length of eagle3, over all suites together."
    )
    max_simulated_difference: float | None = Field(0.02, ge=0, description="Between simulated and served acceptance length.")
    max_position_difference: float | None = Field(
        0.01, ge=0, description="Between simulated and served acceptance at each position."
    )
    max_drafts_difference: Fraction | None = Field(
        0.01, description="Between simulated and served number of drafts, as a share of the served."
    )
    identical_outputs: bool = Field(True, description="Every output equals the baseline's, ties excepted.")


class Storage(Section):
    """Where bulk data lies."""

    hidden_states: str | None = Field(
        None, pattern=NO_HOME, description="Folder for states and their store, no `~`; null is the run's own folder."
    )


class Production(Section):
    """The server that usually has the GPUs: stopped before the first job that uses them, started when the run ends."""

    host: str | None = Field(None, description="Machine that it runs on, this one if null; needed under Slurm.")
    stop: str = Field(description="Shell command that stops it and returns when it is down.")
    start: str = Field(description="Shell command that starts it and returns at once; also run where it is up already.")
    health: str = Field(pattern=r"^https?://", description="URL that answers 200 when it serves.")
    timeout: int = Field(3600, ge=1, description="Seconds that a stop may take, and a start until it is healthy.")


class Config(Section):
    """The whole configuration of one run."""

    run: Name = Field(description="Name of the run: its results lie in results/{run}/.")
    target: Target
    conversations: Conversations
    responses: Regeneration | Literal["given"] = Field(
        default_factory=Regeneration, description="How the target answers, or `given`: keep the data set's answers."
    )
    rows: Rows = Field(default_factory=Rows)
    scatter: Parts = Field(default_factory=Parts)
    extraction: Extraction = Field(default_factory=Extraction)
    vocabulary: Vocabulary = Field(default_factory=Vocabulary)
    draft: Draft = Field(default_factory=Draft)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    gate: Gate = Field(default_factory=Gate)
    storage: Storage = Field(default_factory=Storage, exclude=True)
    production: Production | None = Field(None, exclude=True, description="The server that makes room; null: there is none.")
    canary_first: bool = Field(
        False, description="No answer is asked for before the canary has passed. Set it before the run begins, or leave it."
    )
    grace_s: int = Field(
        120, ge=1, exclude=True, description="Seconds that running jobs get to save and end when Snakemake is asked to stop."
    )

    @model_validator(mode="after")
    def _one_segment_for_each_part(self) -> "Config":
        training, parts = self.training, self.scatter.parts
        if training.rolling is not None and training.segments != parts:
            if "segments" in training.model_fields_set:
                raise ValueError(
                    f"training.segments is {training.segments}: with training.rolling a segment is one part, and "
                    f"scatter.parts is {parts}; leave training.segments out"
                )
            object.__setattr__(training, "segments", parts)  # the model is frozen from here on
        return self


def load_config(values: dict[str, Any]) -> Config:
    """Checks the merged YAML; raises StageError with one line per wrong key, its dotted name first."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise StageError("config: " + "; ".join(_explain(item) for item in error.errors())) from None


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key; see docs/configuration.md for the known ones"
    if item["type"] == "missing":
        return f"{key}: missing"
    if item["type"] == "value_error":  # of a check of ours, which says what it found
        return f"{key}: {item['msg'].removeprefix('Value error, ')}"
    if item["type"] == "model_type":
        return f"{key}: expected keys with values (docs/configuration.md), found {item['input']!r}"
    if item["type"] == "string_pattern_mismatch":
        expected = PATTERNS.get(item["ctx"]["pattern"], f"expected text like {item['ctx']['pattern']}")
        return f"{key}: {expected}, found {item['input']!r}"
    return f"{key}: {item['msg']}, found {item['input']!r}"


def json_schema() -> dict[str, Any]:
    """The JSON schema of the configuration (config/schema.json holds it; a test compares the two)."""
    return Config.model_json_schema()
