"""Training against `speculators train`, side by side: tokens a second, MFU, peak memory, loss.

In: for the width of a small target what benchmarks/recipe.py takes (and the same `work`, where its rows are kept); for
Kimi-K2.5's draft width random states. Out: a JSON line per measurement and per comparison in `{output}/results.jsonl`.
Both train the same draft from the same weights on the same packs in the same order (benchmarks/speculators_trainer.py says
how), each in a process of its own: AdamW, linear schedule, norm 1 clipping, bfloat16 with float32 masters.

    python -m benchmarks.training_speed --target FOLDER --prompts a.jsonl b.jsonl.gz --ids ids.txt \\
        --suites eval_mt_bench.jsonl eval_humaneval.jsonl --work /dev/shm/recipe --output results

Tokens are draft positions without padding. Their seconds run from the end of one optimiser step to the end of the next, waits
for data included; the first WARM_STEPS, and the first step of each pass, before which one of the two validates, do not count.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import answered_prompts, speculators_trainer
from benchmarks.answered_prompts import done_file, shards_of, unfinished
from benchmarks.extraction_speed import target_of
from benchmarks.harness import Step, make_parser, run_one, run_steps
from scripts.eagle3.config import Draft, Target, Training, Vocabulary
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import on_cpu
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, sha256_file, write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.training_cost import DraftShape, peak_flops, step_flops

if TYPE_CHECKING:
    from scripts.eagle3.packing import TrainingRows

REAL, WIDE = "real", "kimi-k2.5"
MEASURED = ("ours", "theirs")
WARM_STEPS = 20
WINDOW, FIRST_COMPARED = 50, 100
DRAFT_VOCAB = 8192
# Kimi-K2.5's draft (config/draft/kimi-k2.5-llama.json) on a target of which only the tensors that it shares exist
WIDTHS = {
    **{"hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128},
    **{"intermediate_size": 18432, "draft_vocab_size": 32000, "row_tokens": 2048, "packs": 6, "passes": 4},
}
# where there is no GPU: shows that everything runs, and measures nothing
SMALL_WIDTHS = {
    **{"hidden_size": 256, "vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    **{"intermediate_size": 512, "draft_vocab_size": 512, "row_tokens": 128, "packs": 6, "passes": 4},
}
MASKED = 0.6
# shown side by side, ours first
COMPARED = ("tokens_per_s", "mfu", "peak_gb", "peak_warm_gb", "loss", "first_losses", "last_losses")


class Place(NamedTuple):
    """What one width is trained from."""

    target: Target
    files: DraftFiles
    shards: list[Path]
    folder: Path

    def rows(self, settings: Training) -> "TrainingRows":
        """The rows of the shards."""
        from scripts.eagle3.packing import TrainingRows, open_shards

        layer_ids = captured_layer_ids(self.target.aux_layer_ids, self.target.num_hidden_layers)
        return TrainingRows(open_shards(self.shards, layer_ids), settings.ttt_steps, settings.batch_tokens)


def widths() -> dict[str, int]:
    """Of the wide draft."""
    return SMALL_WIDTHS if on_cpu() else WIDTHS


def settings_of(width: str, passes: int) -> Training:
    """The same for both trainers."""
    wide = width == WIDE
    return Training(
        segments=passes,
        ttt_steps=3,
        learning_rate=1e-4 if wide else 1e-3,
        schedule="linear",
        warmup_fraction=0.01,
        batch_tokens=4 * widths()["row_tokens"] if wide else 1024 if on_cpu() else 8192,
        dtype="float32" if on_cpu() else "bfloat16",
        zero_stage=1,
        loggers=[],
    )


def place_of(work: Path, width: str) -> Place:
    """Where `prepare` has put everything."""
    folder = work / f"speed-{width}"
    head = work / "head.safetensors" if width == REAL else folder / "head.safetensors"
    files = DraftFiles(folder / "config.json", head, folder / "vocab/d2t.npy", folder / "vocab/t2d.npy")
    if width == REAL:
        return Place(target_of(work), files, shards_of(work, "train"), folder)
    target = Target(path=str(folder / "target"), num_hidden_layers=8, aux_layer_ids=[2, 4, 5], dtype=target_dtype())
    return Place(target, files, [folder / "rows.pt"], folder)


def target_dtype() -> Any:
    """Of a target that no engine loads."""
    return "float32" if on_cpu() else "bfloat16"


def prepare(work: Path, width: str, passes: int) -> dict[str, Any]:
    """Draft files and rows of one width, and what speculators trains from."""
    from benchmarks import recipe
    from scripts.eagle3.target import text_config

    place, settings = place_of(work, width), settings_of(width, passes)
    shutil.rmtree(place.folder / "speculators", ignore_errors=True)
    if width == REAL:
        size = min(DRAFT_VOCAB, int(text_config(place.target)["vocab_size"]) // 2)
        vocabulary = Vocabulary(draft_vocab_size=size, min_coverage=0.0)
        recipe.make_files(work, place.folder, place.target, Draft(), vocabulary, settings.ttt_steps)
    else:
        make_wide(place, settings)
    rows = place.rows(settings)
    speculators_trainer.write_data(rows, place.folder / "speculators/data")
    speculators_trainer.write_start(place.target, place.files, settings, place.folder / "speculators/start")
    return rows.counts()


def make_wide(place: Place, settings: Training) -> None:
    """A target that is only embedding, norm and head; its draft's files; a shard of rows of random states."""
    import torch
    from safetensors.torch import save_file

    from scripts import draft_config, extract_target_head, make_tiny_target
    from scripts.eagle3.rows import row_key
    from scripts.eagle3.shards import StateRow, write_shard
    from scripts.eagle3.target import EMBEDDING_NAMES, HEAD_NAMES, NORM_NAMES, fingerprint

    sizes, folder = widths(), Path(place.target.path)
    hidden, vocabulary, device = sizes["hidden_size"], sizes["vocab_size"], "cpu" if on_cpu() else "cuda"
    make_tiny_target.run("tiny-llama", folder)
    shape = {name: sizes[name] for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")}
    shape |= {name: sizes[name] for name in ("head_dim", "intermediate_size")}
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **shape, "tie_word_embeddings": False})
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).bfloat16().cpu()

    tensors = {
        EMBEDDING_NAMES[0]: draw(vocabulary, hidden),
        NORM_NAMES[0]: torch.ones(hidden, dtype=torch.bfloat16),
        HEAD_NAMES[0]: draw(vocabulary, hidden, std=3 / hidden**0.5),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    extract_target_head.run(place.target, place.files.head)
    size = sizes["draft_vocab_size"]
    draft_config.run(place.target, Draft(), Vocabulary(draft_vocab_size=size), settings.ttt_steps, place.files.config)
    place.files.d2t.parent.mkdir(parents=True, exist_ok=True)
    np.save(place.files.d2t, np.zeros(size, dtype=np.int64))
    np.save(place.files.t2d, np.arange(vocabulary) < size)
    identity = {name: fingerprint(place.target)[name] for name in ("tokenizer", "chat_template")}
    hashes = {path.name: sha256_file(path) for path in (place.files.d2t, place.files.t2d)}
    write_json(place.files.d2t.parent / "coverage.json", {"provenance": {"target": identity}, "sha256": hashes})
    length, rows = sizes["row_tokens"], []
    for _ in range(sizes["packs"] * settings.batch_tokens // length):
        ids = torch.randint(0, size, (length,), generator=generator, dtype=torch.int32, device=device).cpu()
        states = draw(length, len(place.target.aux_layer_ids) + 1, hidden)
        rows.append(StateRow(row_key(ids.numpy()), ids, torch.arange(length) >= (1 - MASKED) * length, states))
    layer_ids = captured_layer_ids(place.target.aux_layer_ids, place.target.num_hidden_layers)
    write_shard(place.shards[0], rows, layer_ids, {})


class Watch:
    """The steps of a training run: when each ended, its loss and its positions, and the peak of the device's memory."""

    def __init__(self, packs: list[list[Any]], flops: list[float]) -> None:
        """packs: the batches of each pass; flops: of each step."""
        self.first = set(np.cumsum([0, *(len(batches) for batches in packs)]).tolist())
        self.flops, self.total = flops, sum(map(len, packs))
        self.warm = min(WARM_STEPS, self.total // 4)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.peaks: list[float] = []

    def step(self, loss: float, tokens: int) -> None:
        """After each optimiser step."""
        import torch

        self.times.append(time.perf_counter())
        self.losses.append(loss)
        self.tokens.append(tokens)
        if torch.cuda.is_available():
            self.peaks.append(torch.cuda.max_memory_allocated() / 1e9)
            if len(self.times) == self.warm:
                torch.cuda.reset_peak_memory_stats()

    def record(self, device: str) -> dict[str, Any]:
        """For the result. peak_gb: of the whole process, peak_warm_gb: without the first steps, which compile."""
        counted = [number for number in range(self.warm, len(self.times)) if number not in self.first]
        seconds = [self.times[number] - self.times[number - 1] for number in counted]
        tokens, flops = (sum(values[number] for number in counted) for values in (self.tokens, self.flops))
        peak = peak_flops(device, "bfloat16")
        losses = np.array(self.losses)
        return {
            **{"steps": len(self.times), "counted_steps": len(counted), "tokens": sum(self.tokens)},
            **{"tokens_per_s": tokens / sum(seconds), "flops_per_token": flops / tokens},
            "tokens_per_s_median": float(np.median([self.tokens[n] / s for n, s in zip(counted, seconds, strict=True)])),
            "mfu": flops / sum(seconds) / peak if peak else None,
            **{"peak_gb": max(self.peaks, default=None), "peak_warm_gb": max(self.peaks[self.warm :], default=None)},
            "first_losses": self.losses[:3],
            "last_losses": self.losses[-3:],
            # means of WINDOW steps each
            "loss": [float(losses[start : start + WINDOW].mean()) for start in range(0, len(losses) - WINDOW + 1, WINDOW)],
            "step_tokens": self.tokens,
        }


def watch_of(place: Place, rows: "TrainingRows", settings: Training) -> tuple[Watch, list[list[Any]]]:
    """The watch for a run over the batches of speculators' sampler, and these."""
    packs = speculators_trainer.batches(rows, settings, settings.segments)
    shape = DraftShape.of(read_json(place.files.config))
    flops = [step_flops(shape, rows.positions[pack], rows.supervised[pack]) for batches in packs for pack in batches]
    return Watch(packs, flops), packs


def ours(work: Path, width: str, passes: int) -> dict[str, Any]:
    """Our training loop, pass after pass, on the packs of speculators' sampler."""
    import torch

    from scripts.eagle3 import training, zero
    from scripts.train_draft import start_draft

    place, settings = place_of(work, width), settings_of(width, passes)
    rows = place.rows(settings)
    watch, packs = watch_of(place, rows, settings)
    engine = start_draft(place.files, settings, zero.start_process_group())

    class Log:
        """In place of MetricsLog."""

        def write(self, record: dict[str, Any], *_: Any) -> None:
            watch.step(record["loss"], record["tokens"])

    first, total = 0, sum(map(len, packs))
    for number, batches in enumerate(packs):
        steps = [[pack.tolist()] for pack in batches]
        training.train_segment(engine, rows, training.Segment(number, steps, first, total), settings, Log())  # type: ignore[arg-type]
        first += len(steps)
    trained = sum(parameter.numel() for parameter in engine.module.parameters())
    return {"trained_parameters": trained, **watch.record(torch.cuda.get_device_name() if torch.cuda.is_available() else "")}


def theirs(work: Path, width: str, passes: int) -> dict[str, Any]:
    """`speculators train` on the same rows, compiled as it comes, with the eager loss."""
    import torch

    place, settings = place_of(work, width), settings_of(width, passes)
    rows = place.rows(settings)
    watch, _ = watch_of(place, rows, settings)
    # as many as come by default, fewer of those that hold 470 MB a batch
    workers = 0 if on_cpu() else 4 if width == WIDE else 12
    folder = place.folder / "speculators"
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    found = speculators_trainer.train(place.target, place.files, settings, folder, len(rows), workers, watch.step)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {**found, **watch.record(torch.cuda.get_device_name() if torch.cuda.is_available() else "")}


def compare(width: str, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Ratios, ours to theirs; loss_difference: of WINDOW steps' mean losses from step FIRST_COMPARED on, the largest.

    StageError where the two did not train on the same packs.
    """
    expect(theirs["step_tokens"], ours["step_tokens"], f"{width}: positions of each step", "the packs differ: prepare anew")
    expect(theirs["trained_parameters"], ours["trained_parameters"], f"{width}: trained parameters", "prepare anew")
    pairs = [*zip(ours["loss"], theirs["loss"], strict=True)][FIRST_COMPARED // WINDOW :]

    def ratio(name: str) -> float | None:
        return ours[name] / theirs[name] if ours[name] and theirs[name] else None

    return {
        **{"comparison": width, "speed_ratio": ratio("tokens_per_s"), "speed_ratio_median": ratio("tokens_per_s_median")},
        **{"memory_ratio": ratio("peak_gb"), "memory_ratio_warm": ratio("peak_warm_gb")},
        "loss_difference": max((abs(one / other - 1) for one, other in pairs), default=None),
        "windows_compared": len(pairs),
        **{name: [one[name] for one in (ours, theirs)] for name in COMPARED},
    }


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    **answered_prompts.FUNCTIONS,
    **{"prepare": prepare, "theirs": theirs, "ours": ours},
}


def plan(options: argparse.Namespace) -> list[Step]:
    """The measurements in order."""
    steps: list[Step] = []
    if REAL in options.widths:
        steps += answered_prompts.steps(options)
    for width in options.widths:
        arguments = {"width": width, "passes": options.passes if width == REAL else widths()["passes"]}
        steps += [Step("prepare", arguments, 200), Step("theirs", arguments, 420), Step("ours", arguments, 300)]
    return steps


def report(steps: list[Step], width: str, work: Path, output: Path) -> None:
    """Writes and prints the comparison; StageError where one of the two failed."""
    paths = [
        done_file(work, step.name, step.arguments)
        for name in MEASURED
        for step in steps
        if step.name == name and step.arguments["width"] == width
    ]
    line = json.dumps(compare(width, *map(read_json, paths)))
    with open(output / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def main() -> None:
    """Command line: see the top of the file."""
    parser = make_parser(__doc__)
    answered_prompts.add_options(parser)
    parser.add_argument("--widths", nargs="+", default=[REAL, WIDE], choices=[REAL, WIDE])
    parser.add_argument("--passes", type=int, default=3, help="over the rows of the real target")
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.work, answered_prompts.keeping(FUNCTIONS))
        return
    try:
        steps = plan(options)
        for path in (done_file(options.work, step.name, step.arguments) for step in steps if step.name in MEASURED):
            path.unlink(missing_ok=True)  # both in one run, or they do not compare
        waiting = unfinished(options.work, steps)
        run_steps("benchmarks.training_speed", waiting, options.work, options.output, options.keep_going)
        for width in options.widths:
            report(steps, width, options.work, options.output)
    except StageError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
