"""For the tests of plan: configurations, places, and a run's folder filled as the stages leave it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from scripts import collect_conversations, plan, tokenize_conversations
from scripts.eagle3.config import Config, Regeneration, Target, load_config
from scripts.eagle3.engine import engine_version
from scripts.eagle3.estimate import Place
from scripts.eagle3.files import write_json
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, TOKENS, read_provenance, read_rows, write_rows
from scripts.eagle3.shards import StateRow, write_shard
from scripts.eagle3.target import fingerprint, resolve_sampling

ROOT = Path(__file__).parents[1]
HARDWARE = ROOT / "config/hardware.yaml"
ANSWER = 10


def make_config(target: Target, **changes: Any) -> Config:
    return load_config(
        {
            "run": "planned",
            "target": target.model_dump(exclude_none=True),
            "conversations": {
                "train": [{"path": str(ROOT / "config/data/train/questions.jsonl"), "limit": 30}],
                "evaluation": {"everyday": {"path": str(ROOT / "config/data/eval/everyday.jsonl"), "limit": 4}},
                "validation_fraction": 0.2,
            },
            "responses": {"max_tokens": 32},
            "rows": {"max_length": 512},
            "scatter": {"parts": 2, "shards_per_part": 1},
            "vocabulary": {"draft_vocab_size": 512},
            "training": {"segments": 2, "dtype": "float32"},
            **changes,
        }
    )


def kimi_config(**changes: Any) -> Config:
    target = Target(path="/models/Kimi-K2.5", num_hidden_layers=61)
    train = [{"path": "some/dataset", "limit": changes.pop("limit", 2000)}]
    suites = {"everyday": {"path": str(ROOT / "config/data/eval/everyday.jsonl")}}
    return make_config(target, conversations={"train": train, "evaluation": suites}, **changes)


def cpu(run: Path) -> Place:
    return Place(run, run / "store", "cpu", 0, 1, 128, 0)


def gpus(run: Path, model: str, nodes: int = 1) -> Place:
    return Place(run, run / "store", model, 8, nodes, 128, 8)


class FinishedParts:
    """Fills a run's folder as the stages leave it; answers and states are made up, their files are not."""

    def __init__(self, config: Config, run: Path) -> None:
        self.config, self.run = config, run

    def collect(self) -> None:
        collect_conversations.run(self.config.conversations, self.config.scatter, self.run / "conversations")

    def answer(self, part: str, responses: Regeneration | None = None) -> None:
        """Answers of ANSWER tokens to prompts of 20."""
        responses = resolve_sampling(self.config.target, responses or self.config.responses)
        source = self.run / f"conversations/{part}/shard-0.parquet"
        rows = read_rows(source, CONVERSATIONS)
        turn = {"prompt_ids": list(range(20)), "finish_reason": "length"}
        answered = [
            {
                **{name: row[name] for name in ("conversation_id", "source", "split")},
                # another first token in each, or the rows would be duplicates
                "turns": [{**turn, "response_ids": [100 + number] * ANSWER}],
            }
            for number, row in enumerate(rows)
        ]
        origin = {"target": fingerprint(self.config.target), "engine": engine_version()}
        provenance = {**origin, "responses": responses.model_dump(), "rows": self.config.rows.model_dump()}
        counts = {"turns_out": len(rows), "response_tokens": ANSWER * len(rows)}
        output = self.run / f"responses/{part}/shard-0.parquet"
        write_rows(output, answered, RESPONSES, {**provenance, **read_provenance(source)[0]}, counts)

    def tokenize(self, part: str) -> None:
        folders = self.run / "responses" / part, self.run / "tokens" / part
        config = self.config
        tokenize_conversations.run(config.target, config.rows, config.responses, folders[0], 1, folders[1], 0.0)

    def extract(self, part: str, hidden_size: int) -> None:
        rows = read_rows(self.run / f"tokens/{part}/shard-0.parquet", TOKENS)
        layers = [*self.config.target.aux_layer_ids, self.config.target.num_hidden_layers]
        states = [
            StateRow(
                row["row_key"],
                torch.tensor(row["input_ids"], dtype=torch.int32),
                torch.tensor(row["loss_mask"]),
                torch.zeros(len(row["input_ids"]), len(layers), hidden_size, dtype=torch.bfloat16),
            )
            for row in rows
        ]
        path = self.run / f"hidden/{part}/shard-0.pt"
        provenance = {"layer_ids": layers, "dtype": "bfloat16", "final_states": self.config.extraction.final_states}
        write_shard(path, states, layers, provenance)
        write_json(path.parent / "manifest.json", {"provenance": provenance, "shards": [{"rows_in": len(rows)}]})

    def benchmark(self, stage: str, name: str, seconds: float) -> None:
        path = self.run / f"benchmarks/{stage}/{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\n{seconds}\t0:00:00\n")

    def attempt(self, stage: str, part: str) -> None:
        """One opening of the part's store, as it is recorded."""
        path = self.run / f"store/{stage}/0123/{part}/attempts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write('{"pid": 1, "started": ""}\n{"pid": 1, "started": "", "ended": "", "outcome": "finished"}\n')


def make(config: Config, place: Place) -> dict[str, Any]:
    return plan.as_record(plan.make_plan(config, place, HARDWARE))


def run_command(config: Config, run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    place = ["--run", str(run), "--storage", str(run / "store"), "--hardware", str(HARDWARE)]
    command = [sys.executable, "-m", "scripts.plan", "--config", config.model_dump_json(), *place, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
