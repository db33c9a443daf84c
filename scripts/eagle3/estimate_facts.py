"""Facts that a plan rests on: machines and measured rates from config/hardware.yaml, the target, the size of the draft.

In: the table, the `target:` section. Out: typed facts, and the rate of a stage, which says whether it was measured or
scaled and from what. A target whose folder is not on this machine comes from the table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from scripts.draft_config import decoder_config
from scripts.eagle3.checks_files import TextConfig, check_small_files, first_fault
from scripts.eagle3.config import Draft, Section, Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.target import text_config
from scripts.eagle3.training_cost import DraftShape

Stage = Literal["decode", "prefill", "train"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# of hardware and targets: compared without regard to case
Name = Annotated[str, StringConstraints(to_lower=True, min_length=1)]


class Machine(Section):
    """One kind of hardware; for `cpu` a device is the whole machine."""

    source: str
    memory_bytes_per_s: Positive
    flops: Positive
    price_per_gpu_hour: Amount | None = None
    price_source: str = ""
    engine_start_s: Amount
    weight_bytes_per_s: Positive
    job_start_s: Amount
    training_start_s: Amount


class MeasuredRate(Section):
    """Tokens per second of one stage on `gpus` devices (0: a CPU machine).

    work: active parameters of the target; for `train` the parameters that a token passes in the draft, over all TTT steps.
    """

    stage: Stage
    hardware: Name
    gpus: Annotated[int, Field(ge=0)]
    target: Name
    work: Positive
    tokens_per_s: Positive
    concurrency: Annotated[int, Field(gt=0)] | None = None
    source: str


class Text(Section):
    """How a target writes: tokens of its chat template, characters per token, mean length of an answer without a limit."""

    source: str
    characters_per_token: Positive
    template_tokens_per_conversation: Amount
    template_tokens_per_turn: Amount
    # None: not known, every answer is taken to be as long as responses.max_tokens allows
    mean_answer_tokens: Positive | None = None
    rewrites_history: bool = False


class KnownTarget(Section):
    """A target that may not be on this machine: the keys of its config.json that sizes depend on, and its weights."""

    source: str
    weight_bytes: Positive
    config: dict[str, Any]
    text: Text

    @field_validator("config")
    @classmethod
    def _form(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            TextConfig.model_validate(value)
        except ValidationError as error:
            raise ValueError("".join(first_fault(error))) from None
        return value


class Disk(Section):
    """Bytes of files whose size is not plain arithmetic."""

    source: str
    file: Amount
    conversation_per_character: Amount
    response_per_token: Amount
    answer_record_per_token: Amount
    answer_record: Amount
    row_per_token: Amount
    row: Amount
    evaluation_per_token: Amount
    metrics_per_step: Amount
    count_per_distinct_token: Amount
    job: Amount
    report: Amount


class CpuWork(Section):
    """Rates of the stages that load no model, on one core."""

    source: str
    fetch_demo_target_s: Amount
    collect_rows_per_s: Positive
    tokenize_tokens_per_s: Positive
    read_bytes_per_s: Positive


class Scaling(Section):
    """How a measured speed is carried over."""

    safety: Annotated[float, Field(gt=0, le=1)]
    validation_speedup: Positive


class Capture(Section):
    """The writer of hidden states: one in each extraction, whatever the number of GPUs."""

    bytes_per_s: Positive
    source: str


class Table(Section):
    """config/hardware.yaml."""

    scaling: Scaling
    hardware: dict[Name, Machine]
    rates: list[MeasuredRate]
    capture: Capture
    targets: dict[Name, KnownTarget]
    unknown_text: Text
    disk: Disk
    cpu_work: CpuWork

    @model_validator(mode="after")
    def _rates_of_known_hardware(self) -> "Table":
        for number, entry in enumerate(self.rates):
            if entry.hardware not in self.hardware:
                raise ValueError(f"rates.{number}: no hardware named {entry.hardware}, there are {', '.join(self.hardware)}")
        return self

    def machine(self, model: str) -> Machine:
        """The entry of a GPU model, or of `cpu`."""
        if model.lower() not in self.hardware:
            known = ", ".join(self.hardware)
            raise StageError(f"config/hardware.yaml: no hardware named {model}, there are {known}; add an entry for it")
        return self.hardware[model.lower()]


def read_table(path: Path) -> Table:
    """The table; a wrong entry is a StageError that names it."""
    try:
        return Table.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror}); it is a file of the repository: restore it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())[:200]
        raise StageError(f"{path}: not valid YAML ({said}); mend it, or restore it from the repository") from error
    except ValidationError as error:
        where, said = first_fault(error)
        raise StageError(f"{path}: {where}{said}; mend this entry") from None


@dataclass(frozen=True)
class TargetFacts:
    """What sizes and times depend on. config: keys of the text model's config.json."""

    name: str
    source: str
    config: Mapping[str, Any]
    weight_bytes: int
    head_itemsize: int
    text: Text

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])


def target_facts(target: Target, table: Table) -> TargetFacts:
    """From the target's folder where it is on this machine, else from the table; StageError where it is in neither."""
    name = Path(target.path).name.lower()
    known, folder = table.targets.get(name), Path(target.path)
    text = known.text if known else table.unknown_text
    if (folder / "config.json").is_file():
        check_small_files(folder)
        config = text_config(target)
        wide = "float32" in str(config.get("dtype") or config.get("torch_dtype"))
        return TargetFacts(name, f"{folder}/config.json", config, weight_bytes(folder), 4 if wide else 2, text)
    if known is None:
        raise StageError(
            f"target.path {target.path}: no config.json there, and config/hardware.yaml knows no target {name} (it knows "
            f"{', '.join(table.targets)}); put the target's config.json into that folder, or add an entry under `targets:`"
        )
    if known.config["num_hidden_layers"] != target.num_hidden_layers:
        raise StageError(
            f"target.num_hidden_layers is {target.num_hidden_layers}: config/hardware.yaml says "
            f"{known.config['num_hidden_layers']} for {name}; mend one of the two"
        )
    return TargetFacts(name, f"config/hardware.yaml: {known.source}", known.config, int(known.weight_bytes), 2, text)


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint: what its index says, else its files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        said = (read_json(index).get("metadata") or {}).get("total_size")
        if isinstance(said, int | float):
            return int(said)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def active_parameters(config: Mapping[str, Any]) -> float:
    """Parameters that one token passes: attention, its own experts or MLP, and the head; of Llama and DeepSeek types."""
    hidden, heads, layers = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if config.get("kv_lora_rank"):
        nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries = config.get("q_lora_rank") or hidden
        attention = (queries * hidden if config.get("q_lora_rank") else 0) + queries * heads * (nope + rope)
        attention += hidden * (config["kv_lora_rank"] + rope) + config["kv_lora_rank"] * heads * (nope + value)
        attention += heads * value * hidden
    else:
        width = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * width * (heads + (config.get("num_key_value_heads") or heads))
    dense = config.get("first_k_dense_replace", 0) if config.get("n_routed_experts") else layers
    experts = (config.get("num_experts_per_tok") or 0) + (config.get("n_shared_experts") or 0)
    routed = experts * (config.get("moe_intermediate_size") or 0)
    mlp = 3 * hidden * (dense * (config.get("intermediate_size") or 0) + (layers - dense) * routed)
    return float(layers * attention + mlp + hidden * config["vocab_size"])


@dataclass(frozen=True)
class DraftSize:
    """Parameters of a draft: trained ones, and those that a token passes in one TTT step."""

    trained: int
    passed: int


def draft_size(facts: TargetFacts, draft: Draft, draft_vocab_size: int, aux_layers: int) -> DraftSize:
    """From the same decoder configuration that draft_config writes."""
    layer = decoder_config({"rms_norm_eps": 0, "max_position_embeddings": 0, **facts.config}, draft)
    ids = range(aux_layers)
    shape = DraftShape.of(
        {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": ids, "draft_vocab_size": draft_vocab_size}
    )
    norms = 2 * shape.layers + 2 + (aux_layers if draft.norm_before_fc else 0)
    trained = shape.layer_weights + shape.fc_weights + norms * shape.hidden
    return DraftSize(trained, trained + shape.hidden * draft_vocab_size)


class Rate(NamedTuple):
    """Tokens per second of one job, and where the figure comes from; `how`: this run, measured, or scaled."""

    tokens_per_s: float
    how: Literal["this run", "measured", "scaled"]
    source: str


def rate(
    table: Table, stage: Stage, hardware: str, gpus: int, target: str, work: float, concurrency: int | None = None
) -> Rate:
    """The best figure of the table for a job of `gpus` GPUs.

    Taken is the entry that is nearest in work, then on the same hardware, then nearest in concurrency, then the slowest.
    It is multiplied by its own work over this one, by GPUs over its GPUs, by the ratio of memory bandwidth (decode) or of
    arithmetic (prefill, train), by concurrency below its own, and, on other hardware or for another size, by `safety`; that
    more GPUs than measured train as many times as fast is not known either.
    """
    machine = table.machine(hardware)
    hardware = hardware.lower()
    entries = [entry for entry in table.rates if entry.stage == stage and (entry.gpus == 0) == (gpus == 0)]
    if not entries:
        raise StageError(f"config/hardware.yaml: no rate of stage {stage} to scale from; add a measured one")

    def more_work(entry: MeasuredRate) -> float:
        # a draft for one target may have any size, so a target's name says nothing about training
        return 1.0 if entry.target == target and stage != "train" else entry.work / work

    def distance(entry: MeasuredRate) -> tuple[float, bool, float, float]:
        far = abs(math.log((entry.concurrency or 1) / concurrency)) if concurrency else 0.0
        return round(abs(math.log(more_work(entry))), 1), entry.hardware != hardware, far, entry.tokens_per_s

    best = min(entries, key=distance)
    other = table.machine(best.hardware)
    bound = "memory_bytes_per_s" if stage == "decode" else "flops"
    factor = more_work(best) * (gpus / best.gpus if gpus else 1) * getattr(machine, bound) / getattr(other, bound)
    if concurrency and best.concurrency:
        factor *= min(1.0, concurrency / best.concurrency)
    near = best.hardware == hardware and abs(math.log(more_work(best))) < 0.05 and (stage != "train" or gpus <= best.gpus)
    if near and best.target == target and 0.95 < factor < 1.05:
        return Rate(best.tokens_per_s * factor, "measured", best.source)
    if not near:
        factor *= table.scaling.safety
    source = f"{best.target} on {best.gpus or ''}{' x ' if best.gpus else ''}{best.hardware}: {best.source}"
    return Rate(best.tokens_per_s * factor, "scaled", source)
