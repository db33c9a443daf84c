"""A head under another tool's names in the real engine: it counts what our own export of the same weights counts."""

from pathlib import Path
from typing import Any

import pytest

from scripts import evaluate_method
from scripts.eagle3.acceptance import Counters
from scripts.eagle3.config import Draft, Evaluation, Method, Target
from scripts.eagle3.files import read_json
from tests.contract.test_export_serves import reference_rows, train_and_export
from tests.draft_case import TTT_STEPS
from tests.foreign_case import IDS, as_foreign
from tests.generation_case import HARDWARE, conversation, write_conversations

SUITE = "suite"
INDICES = [1, 3, 4]  # of states 2, 4, 5


class Run:
    """One suite, and heads of the same weights in several forms."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        rows = [conversation(f"s{i}", [f"say {i} and stop"]) for i in range(6)]
        write_conversations(folder / f"conversations/{SUITE}.parquet", rows)

    def evaluate(self, name: str, head: Path | None = None, ids: list[int] | None = None) -> dict[str, Any]:
        methods = {"baseline": Method(kind="baseline"), "eagle3": Method(kind="eagle3")}
        if head is not None:
            methods[name] = Method(kind="eagle3", model=str(head), aux_layer_ids=ids)
        evaluation = Evaluation(methods=methods, max_tokens=48, max_num_seqs=3)
        results, store = self.folder / "evaluation", self.folder / "store"
        baseline = None if name == "baseline" else results / "baseline"
        conversations, export = self.folder / "conversations", self.folder / "export"
        evaluate_method.run(
            self.target, evaluation, name, export, baseline, conversations, [SUITE], store, results / name, HARDWARE
        )
        return read_json(results / f"{name}/{SUITE}.json")


@pytest.mark.slow
def test_imported_head_counts_what_our_export_of_the_same_weights_counts(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path)
    answered = run.evaluate("baseline")["requests"]
    rows = reference_rows(tiny_llama, [entry["prompt_ids"] for entry in answered], [entry["output_ids"] for entry in answered])
    export = train_and_export(tmp_path, tiny_llama, Draft(norm_before_residual=False), rows)
    theirs = as_foreign(export, tmp_path / "theirs", tiny_llama, INDICES)
    own, imported = run.evaluate("eagle3"), run.evaluate("theirs", theirs)
    assert Counters.from_record(imported) == Counters.from_record(own)
    accepted = 1 + sum(own["accepted_by_position"]) / own["drafts"]
    assert 1.2 < accepted < 1 + TTT_STEPS - 0.2  # else the comparison would show little
    assert imported["requests"] == own["requests"] and imported["differences"] == []
    assert imported["provenance"]["draft"]["layer_ids"] == [2, 4, 5]
    served = read_json(tmp_path / "store/heads/theirs/config.json")
    assert (served["speculators_model_type"], served[IDS]) == ("eagle3", [2, 4, 5])

    # what vLLM makes of it unconverted: it takes the indices for states, and the draft reads one layer too early
    misread = run.evaluate("misread", theirs, INDICES)
    assert not (tmp_path / "store/heads/misread").exists()
    assert sum(misread["accepted_by_position"]) < sum(own["accepted_by_position"])
