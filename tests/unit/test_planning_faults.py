"""What plan says of a wrong table, of impossible numbers and of a run's damaged files: one line each, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Draft, Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.estimate_facts import active_parameters, draft_size, rate, read_table, target_facts
from tests.planning_case import HARDWARE, FinishedParts, cpu, gpus, kimi_config, make, make_config, run_command
from tests.preflight_case import copy_target, edit_json


def table_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    values = yaml.safe_load(HARDWARE.read_text())
    change(values)
    (folder / "hardware.yaml").write_text(yaml.safe_dump(values))
    return folder / "hardware.yaml"


def put(values: dict[str, Any], key: str, value: object) -> None:
    *above, last = key.split(".")
    for name in above:
        values = values[int(name)] if isinstance(values, list) else values[name]
    values[last] = value


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, float("nan")])
@pytest.mark.parametrize(
    "key",
    [
        "hardware.b300.flops",
        "hardware.cpu.weight_bytes_per_s",
        "rates.0.tokens_per_s",
        "rates.0.work",
        "capture.bytes_per_s",
        "targets.smollm2-135m.text.characters_per_token",
        "scaling.safety",
        "scaling.validation_speedup",
        "cpu_work.collect_rows_per_s",
    ],
)
def test_a_divisor_that_is_no_number_above_zero_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = table_with(tmp_path, lambda values: put(values, key, value))
    with pytest.raises(StageError, match=rf"{path}: {key}: .*expected .*found.*; mend this entry") as raised:
        read_table(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["disk.row", "disk.job", "hardware.b300.engine_start_s", "hardware.b300.price_per_gpu_hour"])
@pytest.mark.parametrize("value", [-1, float("inf")])
def test_an_amount_below_zero_is_named(tmp_path: Path, key: str, value: float) -> None:
    path = table_with(tmp_path, lambda values: put(values, key, value))
    with pytest.raises(StageError, match=rf"{key}: expected "):
        read_table(path)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("scaling", {}, "scaling.safety: is missing"),
        ("scaling.safety", 2, "scaling.safety: expected less than or equal to 1, found 2"),
        ("rates.0.hardware", "h100", r"rates\.0: no hardware named h100, there are .*b300, cpu"),
        ("rates.0.work", "many", 'rates.0.work: expected a valid number.*found "many"'),
        ("targets.smollm2-135m.config.num_attention_heads", 0, "smollm2-135m.config: num_attention_heads: expected greater"),
        ("rates.0.gpus", -1, "rates.0.gpus: "),
        ("hardware.b300.flop", 1, "hardware.b300.flop: unknown key"),
        ("hardware", [], "hardware: "),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, key: str, value: object, line: str) -> None:
    path = table_with(tmp_path, lambda values: put(values, key, value))
    with pytest.raises(StageError, match=line):
        read_table(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\x80\xff\x00", "not valid YAML"),
        (b"a: [", "not valid YAML"),
        (b"", "expected an object, found null"),
        (b"- 1", "expected an object"),
        (None, "Is a directory"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None, line: str) -> None:
    path = tmp_path / "hardware.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StageError, match=line) as raised:
        read_table(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_names_are_found_whatever_their_case(tmp_path: Path) -> None:
    def shout(values: dict[str, Any]) -> None:
        values["hardware"]["B300"] = values["hardware"].pop("b300")
        values["targets"]["Kimi-K2.5"] = values["targets"].pop("kimi-k2.5")
        values["rates"][0]["hardware"] = "CPU"

    table = read_table(table_with(tmp_path, shout))
    assert table.machine("b300") == table.machine("B300") == read_table(HARDWARE).machine("b300")
    assert target_facts(Target(path="/models/Kimi-K2.5", num_hidden_layers=61), table).hidden_size == 7168


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu-model", "cpu", "--gpus", "8"], "cpu has 0 GPUs"),
        (["--gpu-model", "b300", "--gpus", "-1"], "--gpus is -1: expected at least 0"),
        (["--gpu-model", "b300", "--gpus", "8", "--nodes", "0"], "--nodes is 0: expected at least 1"),
        (["--gpu-model", "b300", "--gpus", "8", "--max-num-seqs", "0"], "--max-num-seqs is 0: expected at least 1"),
        (["--gpu-model", "b300", "--gpus", "8", "--training-gpus", "9"], "--training-gpus is 9: a node has 8"),
        (["--gpu-model", "", "--gpus", "8"], "--gpu-model is empty: expected one of cpu, rtx_pro_6000"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(tmp_path: Path, options: list[str], line: str) -> None:
    done = run_command(kimi_config(), tmp_path / "run", *options)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert line in done.stderr
    assert not (tmp_path / "run").exists()


# -- the target's files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, -4, "x"])
def test_sizes_of_a_target_that_cannot_be_are_named(tmp_path: Path, tiny_llama: Target, value: object) -> None:
    target = copy_target(tiny_llama, tmp_path / "target")
    edit_json(tmp_path / "target/config.json", lambda config: config.update(num_attention_heads=value))
    with pytest.raises(StageError, match=rf"{tmp_path}/target/config.json: num_attention_heads: expected .*; mend the file"):
        make(make_config(target), cpu(tmp_path / "run"))


# -- the run's files --------------------------------------------------------------------------------------------------


@pytest.fixture
def whole_run(tmp_path: Path, tiny_llama: Target) -> FinishedParts:
    finished = FinishedParts(make_config(tiny_llama), tmp_path / "planned")
    finished.collect()
    for part in ("part-0", "part-1", "val"):
        finished.answer(part)
        finished.tokenize(part)
        finished.extract(part, 64)
    finished.benchmark("regenerate_responses", "part-0", 1000)
    finished.attempt("regenerate_responses", "part-0")
    return finished


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def strip(path: Path) -> None:
    path.write_text("{}")


def garble(path: Path) -> None:
    path.write_bytes(b"\x80\xff\n\x81\xfe\t1\n")


SHARD, STATES = "conversations/part-0/shard-0.parquet", "hidden/part-0"
BENCHMARK, ATTEMPTS = "benchmarks/regenerate_responses/part-0.tsv", "store/regenerate_responses/0123/part-0/attempts.jsonl"


def test_damaged_files_of_a_run_are_named_and_to_be_deleted(whole_run: FinishedParts) -> None:
    faults: list[tuple[str, Callable[[Path], None]]] = [
        *((SHARD, damage) for damage in (cut, empty, garble)),
        *((f"responses/{name}", damage) for name in ("part-0/shard-0.parquet",) for damage in (cut, empty)),
        *(("tokens/part-1/shard-0.parquet", damage) for damage in (cut, empty)),
        *(("conversations/ledger.json", damage) for damage in (cut, strip, garble)),
        *(("tokens/part-0/counts.json", damage) for damage in (cut, strip, garble)),
        *((f"{STATES}/manifest.json", damage) for damage in (cut, strip, garble)),
        *((f"{STATES}/shard-0.pt", damage) for damage in (cut, empty)),
        (BENCHMARK, garble),
        (ATTEMPTS, garble),
    ]
    place = cpu(whole_run.run)
    assert make(whole_run.config, place)["stages"]["extract_hidden_states"]["jobs_left"] == 0
    for name, damage in faults:
        path = whole_run.run / name
        content = path.read_bytes()
        damage(path)
        with pytest.raises(StageError) as raised:
            make(whole_run.config, place)
        line = str(raised.value)
        assert line.startswith(f"{path}: not as its stage writes it (") and line.endswith("; delete it, then run again"), line
        assert "\n" not in line
        path.unlink()
        make(whole_run.config, place)  # as it says
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["checkpoints/0.json", "evaluation/eagle3/everyday.json", "evaluation/baseline/everyday.json"])
def test_records_without_their_keys_are_named(whole_run: FinishedParts, name: str) -> None:
    path = whole_run.run / name
    path.parent.mkdir(parents=True)
    strip(path)
    with pytest.raises(StageError, match=rf"{path}: not as its stage writes it \(no '\w+'\): damaged; delete it, then run"):
        make(whole_run.config, cpu(whole_run.run))


# -- the writer of states ---------------------------------------------------------------------------------------------


def test_the_writer_of_states_bounds_an_engine_that_is_faster(tmp_path: Path) -> None:
    target = Target(path="nowhere/smollm2-135m", num_hidden_layers=30, aux_layer_ids=[2, 15, 27])
    extraction = make(make_config(target), gpus(tmp_path, "b300"))["stages"]["extract_hidden_states"]["tokens_per_s"]
    assert extraction["tokens_per_s"] == pytest.approx(2.79e9 / 4608)
    assert extraction["source"].startswith("the writers of states: 2.79 GB/s, 4,608 bytes a token; benchmarks.")


def test_an_engine_that_is_slower_than_the_writer_is_its_own_bound(tmp_path: Path) -> None:
    target = Target(path="nowhere/smollm2-135m", num_hidden_layers=30, aux_layer_ids=[2, 15, 27], dtype="float32")
    extraction = make(make_config(target), cpu(tmp_path))["stages"]["extract_hidden_states"]["tokens_per_s"]
    assert (extraction["tokens_per_s"], extraction["how"]) == (407, "measured")
    assert extraction["source"].startswith("the engine: 506 rows")


def test_speeds_of_the_benchmark_are_measured_for_its_shape_and_chosen_for_the_same_draft() -> None:
    table = read_table(HARDWARE)
    kimi = table.targets["kimi-k2.5"].config
    shape = active_parameters({**kimi, "num_hidden_layers": 8})
    own = rate(table, "prefill", "h200", 1, "kimi-k2.5-8layer", shape)
    assert (own.tokens_per_s, own.how) == (pytest.approx(38589, rel=0.02), "measured")
    # the whole model is nearer to the same shape on other hardware than to eight of its layers
    assert rate(table, "prefill", "b300", 8, "kimi-k2.5", active_parameters(kimi)).source.startswith("kimi-k2.6 on 8 x rtx")
    facts = target_facts(Target(path="/models/Kimi-K2.5", num_hidden_layers=61), table)
    passed = 4 * draft_size(facts, Draft(preset="kimi-k2.5-llama"), 32000, 3).passed
    train = rate(table, "train", "b300", 1, "kimi-k2.5", passed)
    assert train.source.startswith("kimi-k2.5 on 1 x h200: benchmarks.kimi_k25_shape")
    assert train.tokens_per_s == pytest.approx(13634 * 2.25e15 / 9.89e14 * table.scaling.safety, rel=0.02)
