"""A finished run's records with known figures: for the tests of summary, gate and report."""

import json
from pathlib import Path
from typing import Any

from scripts.eagle3.acceptance import acceptance
from scripts.eagle3.config import Config

SUITES = ["everyday", "technical"]
REQUESTS, TOKENS = 10, 20
ACCEPTED = {"baseline": [], "eagle3": [50, 20, 10], "ngram": [8, 6, 2]}
DRAFTS = {"baseline": 0, "eagle3": 100, "ngram": 10}
WALL_S = {"baseline": 10.0, "eagle3": 8.0, "ngram": 20.0}
SIMULATED = {"drafts": 101, "accepted_by_position": [50, 20, 10]}
TARGET = {"config": "c" * 64, "weights": "w" * 64, "revision": None}
CONFIG = Config.model_validate(
    {
        "run": "sample",
        "target": {"path": "results/targets/tiny", "num_hidden_layers": 30},
        "conversations": {
            "train": [{"path": "train.jsonl"}],
            "evaluation": {suite: {"path": f"{suite}.jsonl"} for suite in SUITES},
        },
        "training": {"segments": 2},
    }
)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def edit(path: Path, **changes: Any) -> None:
    """Replaces top-level keys of a JSON file."""
    write(path, {**json.loads(path.read_text()), **changes})


def make_result(method: str, suite: str) -> dict[str, Any]:
    """What evaluate_method writes."""
    requests = [
        {
            "id": f"{suite}-{number}",
            "turn": 0,
            "prompt_ids": [1, 2],
            "output_ids": [7] * TOKENS,
            "finish_reason": "length",
        }
        for number in range(REQUESTS)
    ]
    texts = [f" word{index}" for index in range(TOKENS)]
    requests[0] |= {
        "steps": [1, 3, 2, *[1] * (TOKENS - 6)],
        "texts": texts,
        "question": "Who <script>asks</script> & why?",
    }
    kind: dict[str, Any] = {"kind": method}
    if method != "baseline":
        kind["num_speculative_tokens"] = 3
    settings = {"max_tokens": 20, "temperature": 0.0, "max_num_seqs": 4, "method": kind}
    conversations = {"conversations": {"format": 1}}
    return {
        **{"method": method, "suite": suite, "requests": requests, "settings": settings, "device": "CPU, 2 cores"},
        **{"drafts": DRAFTS[method], "drafted_tokens": 3 * DRAFTS[method], "accepted_tokens": sum(ACCEPTED[method])},
        **{"accepted_by_position": ACCEPTED[method], "wall_s": WALL_S[method], "output_tokens": REQUESTS * TOKENS},
        **({} if method == "baseline" else {"differences": []}),
        "provenance": {
            **{"target": TARGET, "engine": "vllm 0.32.0", "settings": settings, "conversations": conversations},
            "draft": {"config.json": "d" * 64, "weights": "e" * 64} if method == "eagle3" else None,
        },
    }


def make_run(folder: Path) -> Path:
    """Everything that compare_methods and report read."""
    for suite in SUITES:
        for method in DRAFTS:
            write(folder / "evaluation" / method / f"{suite}.json", make_result(method, suite))
        walked = {**SIMULATED, **acceptance(SIMULATED["drafts"], SIMULATED["accepted_by_position"])}
        walked |= {"num_speculative_tokens": 3, "provenance": {"target": TARGET, "weights": "e" * 64}}
        write(folder / "evaluation" / "simulated" / f"{suite}.json", walked)
    candidates = []
    for segment in range(2):
        metrics = {"loss": 9.0 - segment, "accuracy": [0.3, 0.2, 0.1], "acceptance_length": 1.5}
        record = {"segment": segment, "step": 10 * (segment + 1), "metrics": {"train": metrics, "validation": metrics}}
        write(folder / "checkpoints" / f"{segment}.json", record)
        candidates.append({**record, "simulated": {"acceptance_length": 1.4 + segment / 10, "drafts": 50}})
    write(folder / "selected.json", {"selected": candidates[1], "candidates": candidates})
    sizes = [{"size": 512, "train": 0.8, "val": 0.7}, {"size": 1024, "train": 1.0, "val": 0.9}]
    coverage = {"draft_vocab_size": 512, "target_vocab_size": 1024, "coverage": {"train": 0.8, "val": 0.7}}
    write(folder / "vocab" / "coverage.json", {**coverage, "by_size": sizes})
    return folder
