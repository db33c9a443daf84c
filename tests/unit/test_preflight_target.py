"""Preflight's lines about the target's files, tokenizer and draft: each with its fault planted."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scripts.eagle3.checks_gpus import Asked
from scripts.eagle3.checks_target import INDEX, SINGLE, read_header, target_lines
from scripts.eagle3.checks_tokenizer import check_special_tokens, tokenizer_lines
from scripts.eagle3.config import Target
from scripts.eagle3.target import load_tokenizer
from scripts.preflight import draft_lines, run, small_files_line
from tests.preflight_case import assert_red, config_for, copy_target, edit_json, line

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def copy(tiny_llama: Target, tmp_path: Path) -> Target:
    return copy_target(tiny_llama, tmp_path / "target")


@pytest.fixture
def sharded(copy: Target) -> Target:
    """The same weights as two files with an index."""
    folder = Path(copy.path)
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return copy


def files(target: Target):
    return target_lines(config_for(target))[1]


def tokens(target: Target, **sections):
    return tokenizer_lines(target, config_for(target, **sections))


# -- files ------------------------------------------------------------------------------------------------------------


def test_whole_target_is_green(sharded):
    lines = [*files(sharded), *tokens(sharded), *draft_lines(sharded, config_for(sharded), 2)]
    assert [each for each in lines if each.state != "green"] == []
    assert line(lines, "weights").found.startswith("2 files of the index")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def cut_off_in_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garble_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(bytes(content))


def fill_with_text(path: Path) -> None:
    path.write_text("<html>Not found</html>" * 10)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "1 of 2 weight files are missing"),
        (lambda path: path.write_bytes(b""), "is no safetensors file"),
        (fill_with_text, "is no safetensors file"),
        (cut_off, "is cut off: "),
        (cut_off_in_header, "is cut off in its header"),
        (lengthen, "is too long"),
        (garble_header, "has a header that cannot be read"),
    ],
)
def test_damaged_shard_is_named(sharded, damage, words):
    damage(Path(sharded.path) / SHARDS[1])
    assert_red(line(files(sharded), "weights"), SHARDS[1], words, "fetch the target again")


def test_damaged_single_file_is_named(copy):
    cut_off(Path(copy.path) / SINGLE)
    assert_red(line(files(copy), "weights"), SINGLE, "is cut off")


def test_tensor_that_is_not_where_the_index_says_is_named(sharded):
    edit_json(Path(sharded.path) / INDEX, lambda index: index["weight_map"].update({"model.extra.weight": SHARDS[0]}))
    assert_red(line(files(sharded), "weights"), SHARDS[0], "model.extra.weight")


def test_folder_without_weights_is_red(copy):
    (Path(copy.path) / SINGLE).unlink()
    assert_red(line(files(copy), "weights"), SINGLE, INDEX)


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_git_lfs_pointer_is_recognised(sharded, name):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9400000000\n"
    (Path(sharded.path) / name).write_text(pointer)
    assert_red(line(files(sharded), "weights"), name, "Git LFS", "git lfs pull")


def test_only_headers_are_read(sharded):
    # a hole of 50 GB in the file: reading it would take minutes
    path = Path(sharded.path) / SHARDS[0]
    header = json.dumps({"big": {"dtype": "U8", "shape": [50_000_000_000], "data_offsets": [0, 50_000_000_000]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 50_000_000_000)
    assert list(read_header(path)) == ["big"]


def test_missing_folder_is_red_and_the_rest_is_not_asked(copy):
    shutil.rmtree(copy.path)
    target, lines = target_lines(config_for(copy))
    assert target is None
    (only,) = lines
    assert_red(only, "no such folder", "target.path")


def test_other_number_of_layers_is_red(copy):
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(num_hidden_layers=9))
    assert_red(line(files(copy), "folder"), "num_hidden_layers", "9", "8")


def test_target_that_the_run_makes_is_skipped(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = copy.model_copy(update={"path": "results/targets/not-yet"})
    found, lines = target_lines(config_for(target))
    assert found is None
    assert [(each.state, each.found) for each in lines] == [("skipped", "made by this run")]


def test_half_made_target_is_skipped_and_a_finished_one_is_asked(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = copy_target(copy, tmp_path / "results/targets/mine").model_copy(update={"path": "results/targets/mine"})
    assert files(target)[0].state == "skipped"
    Path("results/targets/mine/manifest.json").touch()
    assert files(target)[0].state == "green"


def test_hub_id_is_asked_where_the_cache_has_it(copy, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    target = copy.model_copy(update={"path": "somebody/some-model"})
    found, lines = target_lines(config_for(target))
    assert found is None
    assert lines[0].state == "skipped" and "not in the cache" in lines[0].found
    repository = tmp_path / "hub/models--somebody--some-model"
    shutil.copytree(copy.path, repository / "snapshots/abc123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc123")
    found, lines = target_lines(config_for(target))
    assert found is not None and found.path.endswith("snapshots/abc123")
    assert {each.state for each in lines} == {"green"}


def test_head_under_another_name_is_red(copy):
    path = Path(copy.path) / SINGLE
    tensors = load_file(path)
    tensors["output.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path)
    assert_red(line(files(copy), "embedding, norm, head"), "no head among the tensors")


def test_family_without_whole_states_is_red(copy):
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(model_type="deepseek_v32"))
    assert_red(line(files(copy), "captured states"), "DeepSeek-V3.2")


def test_rows_beyond_the_context_are_red(copy):
    found = target_lines(config_for(copy, rows={"max_length": 4096}))[1]
    assert_red(line(found, "captured states"), "rows.max_length")


# -- form of the small files -------------------------------------------------------------------------------------------


def test_small_files_in_order_are_green(sharded, tiny_kimi):
    for target in (sharded, tiny_kimi):
        found = small_files_line(target)
        assert found.state == "green" and found.found.startswith("config.json, generation_config.json")


def test_a_missing_folder_is_left_to_its_own_line(copy):
    shutil.rmtree(copy.path)
    assert small_files_line(copy).state == "skipped"


@pytest.mark.parametrize("value", ["[]", "null", "1", "{", "\udc80"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_small_file_that_is_no_object_is_named(sharded, name, value):
    path = Path(sharded.path) / name
    path.write_bytes(value.encode(errors="surrogateescape"))
    assert_red(small_files_line(sharded), str(path), "fetch the target again")


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("config.json", "num_attention_heads", None, "expected a valid integer, found null"),
        ("config.json", "num_attention_heads", "x", 'found "x"'),
        ("config.json", "num_attention_heads", -4, "found -4"),
        ("config.json", "num_attention_heads", 10**6, "num_attention_heads is 1000000, hidden_size"),
        ("config.json", "num_key_value_heads", 0, "expected greater than 0, found 0"),
        ("config.json", "hidden_size", "64", 'found "64"'),
        ("config.json", "kv_lora_rank", 512, "qk_nope_head_dim is missing"),
        ("config.json", "rope_parameters", {"rope_type": "zz"}, "found zz"),
        ("config.json", "rope_scaling", {"type": "zz", "factor": 2}, "found zz"),
        ("config.json", "rope_parameters", {"full_attention": {"rope_type": "zz"}}, "found zz"),
        ("config.json", "text_config", None, "expected an object, found null"),
        ("config.json", "text_config", {}, "hidden_size: is missing"),
        ("config.json", "architectures", "LlamaForCausalLM", "architectures: "),
        ("generation_config.json", "eos_token_id", "x", "expected a token id or a list of them"),
        ("generation_config.json", "eos_token_id", 1.5, "found 1.5"),
        ("generation_config.json", "eos_token_id", [], "found []"),
        ("generation_config.json", "temperature", "hot", "temperature: expected a valid number"),
        (INDEX, "weight_map", [], "weight_map: "),
        (INDEX, "weight_map", {}, "weight_map: "),
        (INDEX, "weight_map", {"a": 1}, "weight_map.a: "),
    ],
)
def test_value_of_another_kind_is_named(sharded, name, key, value, words):
    path = Path(sharded.path) / name
    edit_json(path, lambda values: values.update({key: value}))
    assert_red(small_files_line(sharded), f"{path}: {key}", words, "mend the file, or fetch the target again")


def test_index_without_weights_is_named(sharded):
    edit_json(Path(sharded.path) / INDEX, lambda values: values.pop("weight_map"))
    assert_red(small_files_line(sharded), f"{INDEX}: weight_map: is missing")


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("Hello!", "never mentions `messages`"), (None, "expected a file, found a folder")]
)
def test_template_that_renders_nothing_is_named(copy, text, words):
    path = Path(copy.path) / "chat_template.jinja"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    assert_red(small_files_line(copy), str(path), words, "mend the chat template")


def test_a_small_file_without_its_form_is_the_only_red_line_about_the_target(copy, tmp_path):
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(num_attention_heads=None))
    lines = run(config_for(copy), tmp_path / "run", tmp_path / "store", Asked(0))
    red = [each for each in lines if each.state == "red"]
    assert [each.name for each in red] == ["small files"]
    assert {each.state for each in lines if each.section in ("tokenizer", "draft")} == {"skipped"}


# -- tokenizer --------------------------------------------------------------------------------------------------------


def test_tokenizer_that_does_not_load_is_red(copy):
    (Path(copy.path) / "tokenizer.json").write_text("{")
    (only,) = tokens(copy)
    assert_red(only, "does not load")


def test_token_beyond_the_embedding_is_red(copy):
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(vocab_size=1020))
    assert_red(line(tokens(copy), "vocabulary"), "1023", "1020")


def declare_tokens(folder: Path, shift: int) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token["id"] + shift): {key: token[key] for key in ("content", "special")} for token in added}
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=decoder))


def test_declared_tokens_with_their_own_ids_are_green(copy):
    declare_tokens(Path(copy.path), 0)
    assert line(tokens(copy), "special tokens").state == "green"


@pytest.mark.parametrize("shift", [-1, 1, 3])
def test_special_tokens_that_the_files_number_differently_are_red(copy, shift):
    loaded = load_tokenizer(copy)  # before: newer versions of transformers would follow the file
    declare_tokens(Path(copy.path), shift)
    (Path(copy.path) / "tokenizer.json").unlink()  # as in Kimi-K2.5, whose tokenizer is Python code
    with pytest.raises(Exception, match=r"8 of 8 tokens have other ids: <\|endoftext\|> is 1016, declared"):
        check_special_tokens(loaded, Path(copy.path))


def test_files_that_contradict_each_other_are_red(copy):
    declare_tokens(Path(copy.path), 1)
    assert_red(line(tokens(copy), "special tokens"), "tokenizer.json has")


def test_special_token_that_is_split_is_red(copy):
    class Splitting:
        """A tokenizer whose text is not searched for special tokens."""

        def __init__(self, tokenizer):
            self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [60, 124]}

    with pytest.raises(Exception, match="declared 1016"):
        check_special_tokens(Splitting(load_tokenizer(copy)), Path(copy.path))


@pytest.mark.parametrize("name", ["eos", "pad"])
def test_named_token_that_the_configs_number_differently_is_red(copy, name):
    for file in ("config.json", "generation_config.json"):
        edit_json(Path(copy.path) / file, lambda config: config.update({f"{name}_token_id": 1017}))
    assert_red(line(tokens(copy), "bos, eos, pad"), name, "1017")


def test_stop_id_of_a_plain_token_is_red(copy):
    edit_json(Path(copy.path) / "generation_config.json", lambda config: config.update(eos_token_id=[1018, 65]))
    assert_red(line(tokens(copy), "stop tokens"), "65", "generation_config.json")


def test_stop_id_beyond_the_vocabulary_is_red(copy):
    edit_json(Path(copy.path) / "generation_config.json", lambda config: config.update(eos_token_id=5000))
    assert_red(line(tokens(copy), "stop tokens"), "5000")


def with_template(target: Target, template: str | None) -> Target:
    edit_json(Path(target.path) / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    return target


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for message in messages %}", ""),  # never ends
    ],
)
def test_template_that_does_not_render_is_red(copy, template, words):
    assert_red(line(tokens(with_template(copy, template)), "chat template"), words)


def test_template_whose_answers_have_no_stop_id_is_red(copy):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert_red(line(tokens(with_template(copy, template)), "chat template"), "stop ids", "1018")


OPENS_WITH_THOUGHT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_answer_that_does_not_continue_its_prompt_is_red_where_answers_are_given(copy):
    found = line(tokens(with_template(copy, OPENS_WITH_THOUGHT), responses="given"), "chat template")
    assert_red(found, "changes the prompt", "regenerate the answers")


def test_answer_that_does_not_continue_its_prompt_is_noted_where_the_target_answers(copy):
    found = line(tokens(with_template(copy, OPENS_WITH_THOUGHT)), "chat template")
    assert found.state == "green" and "only the target's own answers fit" in found.found


# -- draft ------------------------------------------------------------------------------------------------------------


def test_draft_vocabulary_larger_than_the_targets_is_red(copy):
    lines = draft_lines(copy, config_for(copy, vocabulary={"draft_vocab_size": 5000}), 1)
    assert_red(line(lines, "vocabulary"), "5000", "1024", "vocabulary.draft_vocab_size")


def test_heads_that_cannot_share_are_red(copy):
    lines = draft_lines(copy, config_for(copy, draft={"num_attention_heads": 4, "num_key_value_heads": 3}), 1)
    assert_red(line(lines, "architecture"), "draft.num_key_value_heads")


def test_target_without_what_the_draft_copies_is_red(copy):
    edit_json(Path(copy.path) / "config.json", lambda config: config.pop("max_position_embeddings"))
    assert_red(line(draft_lines(copy, config_for(copy), 1), "architecture"), "max_position_embeddings")


def test_other_logits_than_a_linear_head_are_red(copy):
    edit_json(Path(copy.path) / "config.json", lambda config: config.update(final_logit_softcapping=30.0))
    assert_red(line(draft_lines(copy, config_for(copy), 1), "logits"), "final_logit_softcapping")


@pytest.mark.parametrize(("draft", "whose"), [({}, "target"), ({"num_attention_heads": 6, "num_key_value_heads": 6}, "draft")])
def test_heads_that_the_gpus_cannot_divide_are_red(copy, draft, whose):
    if whose == "draft":
        edit_json(Path(copy.path) / "config.json", lambda config: config.update(num_attention_heads=8))
    lines = draft_lines(copy, config_for(copy, draft=draft), 8)
    assert_red(line(lines, "tensor parallel"), f"heads of the {whose} cannot be divided over 8 GPUs")
