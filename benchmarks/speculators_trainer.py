"""`speculators train` on our rows: the same packs, start, optimiser and supervised positions as our own training.

In: training rows, the files of a draft. Out: its data set, hidden states and start checkpoint in its own formats; then one
`step` call for each optimiser step of its own trainer (speculators 0.9.0), run in this process by its own command.

What is made equal, and how:
- packs: rows have the same numbers in both, and `batches` asks its sampler for the order that it will use;
- supervised positions: its loss mask is one token longer than ours (`draft_loss_mask`) and is written so that it supervises
  the same ones. Rows do not look into each other there either: its attention mask knows documents, and what its later steps
  read beyond a row's end meets a prompt, which is not supervised;
- start: our initial weights as a checkpoint, float32 values that bfloat16 holds, as DeepSpeed's masters begin with;
- learning rate: our schedule in its scheduler's place, which begins its warm-up with a step at 0.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.eagle3.config import Target, Training
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import on_cpu
from scripts.eagle3.files import write_json

if TYPE_CHECKING:
    import numpy as np

    from scripts.eagle3.packing import TrainingRows

# its trainer wants validation rows; these are the first training rows again
VALIDATION_ROWS = 1
WRITERS = 8
# beyond the last pass: a checkpoint after the first one only, which it always writes
CHECKPOINT_FREQUENCY = 10**6


def write_data(rows: "TrainingRows", folder: Path) -> None:
    """Data set and hidden states as `prepare-data` and `generate-offline-data` leave them, one file a row."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file

    from scripts.eagle3.draft import draft_loss_mask

    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    numbers = [*range(len(rows)), *range(VALIDATION_ROWS)]

    def write(index: int) -> dict[str, Any]:
        row = rows.row(numbers[index])
        ids = row.token_ids.long()
        save_file({"hidden_states": row.hidden_states.contiguous(), "token_ids": ids}, states / f"hs_{index}.safetensors")
        mask = torch.cat([row.loss_mask.new_zeros(1), draft_loss_mask(row.loss_mask)])
        return {"input_ids": ids.tolist(), "loss_mask": mask.long().tolist(), "seq_len": len(ids)}

    with ThreadPoolExecutor(WRITERS) as pool:
        written = list(pool.map(write, range(len(numbers))))
    data = Dataset.from_list(written)
    data.set_format("torch")
    data.save_to_disk(str(folder))


def write_start(target: Target, files: DraftFiles, settings: Training, folder: Path) -> None:
    """Our initial weights as one of its checkpoints, in float32."""
    import torch
    from safetensors.torch import save_file

    from scripts.eagle3.draft import build_draft, save_trainable, trainable_state
    from scripts.eagle3.draft_files import WEIGHTS
    from scripts.eagle3.export import export_config, export_tensors
    from scripts.eagle3.zero import DTYPES

    initial = folder.with_name("initial.safetensors")
    draft = build_draft(*files, attention="sdpa", dtype=DTYPES[settings.dtype], seed=settings.seed)
    save_trainable(trainable_state(draft), initial)
    tensors = export_tensors(initial, files)
    for name, tensor in trainable_state(draft).items():
        tensors[name] = tensor  # export_tensors may have rounded them
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    config = export_config(target, files)
    config["dtype"] = config["transformer_layer_config"]["dtype"] = "float32"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    del draft
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def batches(rows: "TrainingRows", settings: Training, passes: int) -> "list[list[np.ndarray[Any, Any]]]":
    """The numbers of the rows of each batch of each pass, by its own sampler."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    # it packs tokens, of which each row has one more than positions
    sampler = MultipackDistributedBatchSamplerV2(settings.batch_tokens, rows.positions + 1, 1, 0, seed=settings.seed)
    return [sampler._generate_batches(number) for number in range(passes)]


def train(
    target: Target,
    files: DraftFiles,
    settings: Training,
    folder: Path,
    rows: int,
    workers: int,
    step: Callable[[float, int], None],
) -> dict[str, Any]:
    """Runs `speculators train` on `folder`; `step` gets loss and positions after each optimiser step.

    rows: how many are for training. Returns what its model turned out to be.
    """
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig
    from torch.optim.lr_scheduler import LambdaLR

    from scripts.eagle3.training import learning_rate

    found: dict[str, Any] = {}
    build = cli.build_draft_model

    def building(*arguments: Any) -> Any:
        model = build(*arguments)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found["trained_parameters"] = sum(parameter.numel() for parameter in trained)
        found["parameter_dtypes"] = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
        return model

    def schedule(optimizer: Any, num_training_steps: int, **_: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda done: learning_rate(done, num_training_steps, settings) / settings.learning_rate)

    class Metrics:
        """In place of its logger of metrics, which gets a record after each step."""

        def info(self, record: dict[str, Any], **_: Any) -> None:
            if "train" in record:
                profile = record["profile"]
                step(record["train"]["loss"], round(profile["tokens_per_s"] * profile["step_ms"] / 1000))

    setattr(cli, "build_draft_model", building)  # noqa: B010 - a type checker would refuse the plain form
    setattr(trainer, "metric_logger", Metrics())  # noqa: B010
    setattr(trainer, "get_linear_schedule_with_warmup", schedule)  # noqa: B010
    attention = use_cpu() if on_cpu() else "simple_flex_attention"
    options = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": target.path,
        "from-pretrained": folder / "start",
        "d2t-path": files.d2t,
        "t2d-path": files.t2d,
        "draft-attn-impl": attention,
        "data-path": folder / "data",
        "hidden-states-dtype": settings.dtype,
        "total-seq-len": settings.batch_tokens,
        # between the last row for training and the first for validation
        "train-data-ratio": (rows + 0.5) / (rows + VALIDATION_ROWS),
        "on-missing": "raise",
        "num-workers": workers,
        "prefetch-factor": 2,
        # its fused loss fails on torch 2.11: dynamo cannot trace it inside its compiled forward
        "loss-implementation": "eager",
        "loss-fn": settings.loss,
        "ttt-steps": settings.ttt_steps,
        "ttt-step-loss-decay": settings.step_loss_decay,
        "optimizer": "adamw",
        "lr": settings.learning_rate,
        "weight-decay": settings.weight_decay,
        "scheduler-type": "linear",
        "epochs": settings.segments,
        "checkpoint-freq": CHECKPOINT_FREQUENCY,
        "seed": settings.seed,
        "save-path": folder / "checkpoints",
        "log-dir": folder / "logs",
    }
    command = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    print(json.dumps(command), flush=True)
    cli.main(TrainConfig.resolve(command))
    return found


def use_cpu() -> str:
    """Lets its trainer run without a GPU, for tests; returns the attention that works there."""
    import torch
    from speculators.train import trainer

    setup = trainer.Trainer.setup_trainer

    def setup_trainer(self: Any) -> None:
        self.device_type = "cpu"
        setup(self)

    setattr(trainer, "get_local_rank", lambda: torch.device("cpu"))  # noqa: B010
    setattr(trainer.Trainer, "setup_trainer", setup_trainer)  # noqa: B010
    setattr(torch.accelerator, "synchronize", lambda *_: None)  # noqa: B010
    return "sdpa"
