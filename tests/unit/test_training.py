"""The training forward against speculators' own, rows that stay apart, normalisation, schedule, and overfitting."""

import itertools

import pytest
import torch

from scripts.eagle3 import ttt, zero
from scripts.eagle3.config import Draft
from scripts.eagle3.draft import FLEX_BLOCK, build_draft, forward, target_ids
from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.packing import TrainingRows, load_pack, open_shards
from scripts.eagle3.training import Segment, learning_rate, share, train_segment, validate
from scripts.eagle3.ttt import TrainingDraft
from tests.draft_case import TTT_STEPS, make_draft_files, random_row
from tests.training_case import learnable_rows, synthetic_rows, training, write_states

DRAFTS = {
    "default": Draft(),
    "two_layers": Draft(num_hidden_layers=2),
    "norms": Draft(norm_before_residual=False, norm_before_fc=True, norm_output=True),
}


@pytest.fixture(scope="module", params=DRAFTS)
def files(request, tmp_path_factory, tiny_llama):
    return make_draft_files(tmp_path_factory.mktemp("draft"), tiny_llama, DRAFTS[request.param])


@pytest.fixture(scope="module")
def default_files(tmp_path_factory, tiny_llama):
    return make_draft_files(tmp_path_factory.mktemp("draft"), tiny_llama)


def open_rows(folder, target, rows, batch_tokens=1024):
    path = write_states(folder / "shard-0.pt", target, rows)
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    return TrainingRows(open_shards([path], layer_ids), TTT_STEPS, batch_tokens)


@pytest.fixture
def rows(tmp_path, tiny_llama):
    """Three rows with prompts, and one that is all answer."""
    return open_rows(tmp_path, tiny_llama, [*synthetic_rows(tiny_llama, 3), random_row(tiny_llama, 12, 0, seed=3)])


def train_forward(model, batch, normaliser):
    """(loss, sums, drafted, gradients) of one batch."""
    model.zero_grad()
    loss, sums, drafted = model(**batch.inputs, masked_tokens=normaliser)
    loss.backward()
    return loss.detach(), sums, drafted, {name: p.grad.clone() for name, p in model.named_parameters()}


def largest_relative_difference(left, right):
    assert left.keys() == right.keys()
    return max(((left[name] - right[name]).abs().max() / right[name].abs().max()).item() for name in left)


def counts_of(rows, pack):
    return torch.tensor(rows.supervised[pack].sum(0))


@pytest.mark.parametrize("loss", ["kl_div", "ce", "lk_hybrid"])
def test_training_forward_equals_speculators_own(files, rows, loss):
    draft = build_draft(*files)
    pack = [0, 1, 2]  # prompts: speculators' shifted masks do not reach over the rows' borders then
    batch = load_pack(rows, pack)
    ids, expected, figures = forward(draft, batch.inputs, TTT_STEPS, loss=loss, step_loss_decay=0.7)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    found, sums, drafted, own = train_forward(TrainingDraft(draft, TTT_STEPS, 0.7, loss), batch, counts_of(rows, pack))
    assert torch.allclose(found, expected, rtol=1e-5)
    assert largest_relative_difference(own, gradients) < 1e-5
    for step in range(TTT_STEPS):
        assert sums[1, step] == figures[f"full_acc_{step}_total"]
        taken = drafted[step] >= 0
        assert int(taken.sum()) == sums[1, step] and torch.equal(drafted[step][taken], ids[step][0][taken])


def test_small_chunks_of_logits_train_the_same(default_files, rows, monkeypatch):
    model = TrainingDraft(build_draft(*default_files), TTT_STEPS, 1.0, "kl_div")
    batch, normaliser = load_pack(rows, [0, 1, 2, 3]), counts_of(rows, [0, 1, 2, 3])
    whole = train_forward(model, batch, normaliser)
    monkeypatch.setattr(ttt, "CHUNK_LOGITS", 512 * 5)
    chunked = train_forward(model, batch, normaliser)
    assert torch.allclose(chunked[0], whole[0]) and torch.equal(chunked[2], whole[2])
    assert largest_relative_difference(chunked[3], whole[3]) < 1e-5


def test_recomputed_steps_train_the_same(files, rows):
    model = TrainingDraft(build_draft(*files), TTT_STEPS, 1.0, "kl_div")
    batch, normaliser = load_pack(rows, [0, 1]), counts_of(rows, [0, 1])
    kept = train_forward(model, batch, normaliser)
    model.recompute = True
    again = train_forward(model, batch, normaliser)
    assert torch.equal(again[0], kept[0])
    assert all(torch.equal(again[3][name], kept[3][name]) for name in kept[3])


def test_packed_rows_train_as_each_row_alone(files, rows):
    model = TrainingDraft(build_draft(*files), TTT_STEPS, 1.0, "kl_div")
    ones = torch.ones(TTT_STEPS)
    _, packed, drafted, gradients = train_forward(model, load_pack(rows, [3, 0, 3, 2]), ones)
    alone = [train_forward(model, load_pack(rows, [number]), ones) for number in (3, 0, 3, 2)]
    assert torch.allclose(packed, sum(single[1] for single in alone), rtol=1e-5)
    assert torch.equal(drafted, torch.cat([single[2] for single in alone], 1))
    summed = {name: sum(single[3][name] for single in alone) for name in gradients}
    assert largest_relative_difference(gradients, summed) < 1e-5


def test_content_of_one_row_changes_nothing_for_another(default_files, rows):
    model = TrainingDraft(build_draft(*default_files), TTT_STEPS, 1.0, "kl_div")
    batch, other = load_pack(rows, [0, 1]), load_pack(rows, [0, 2])
    # the second row teaches nothing here, but could be looked at
    length = min(len(batch.inputs["input_ids"][0]), len(other.inputs["input_ids"][0]))
    results = []
    for inputs in (batch.inputs, other.inputs):
        cut = {name: tensor[:, :length] for name, tensor in inputs.items()}
        cut["loss_mask"] = cut["loss_mask"] & (cut["document_ids"] == 0)
        results.append(model(**cut, masked_tokens=torch.ones(TTT_STEPS))[1])
    assert not torch.equal(batch.inputs["input_ids"][:, length - 5 : length], other.inputs["input_ids"][:, length - 5 : length])
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_padded_flex_mask_gives_the_dense_masks_loss(files, rows):
    dense = TrainingDraft(build_draft(*files, attention="sdpa"), TTT_STEPS, 1.0, "kl_div")
    flex = TrainingDraft(build_draft(*files, attention="flex"), TTT_STEPS, 1.0, "kl_div")
    pack, ones = [0, 3, 1], torch.ones(TTT_STEPS)
    with torch.no_grad():
        expected = dense(**load_pack(rows, pack).inputs, masked_tokens=ones)
        found = flex(**load_pack(rows, pack, FLEX_BLOCK).inputs, masked_tokens=ones)
    assert torch.allclose(found[0], expected[0], rtol=1e-5) and torch.allclose(found[1], expected[1], rtol=1e-5)
    assert torch.equal(found[2][:, : expected[2].shape[1]], expected[2])


def test_accumulated_micro_batches_give_the_gradient_of_one_large_batch(default_files, rows):
    model = TrainingDraft(build_draft(*default_files), TTT_STEPS, 1.0, "kl_div")
    normaliser = counts_of(rows, [0, 1, 2, 3])
    loss, _, _, expected = train_forward(model, load_pack(rows, [0, 1, 2, 3]), normaliser)
    parts = [train_forward(model, load_pack(rows, pack), normaliser) for pack in ([0], [1, 2], [3])]
    assert torch.allclose(sum(part[0] for part in parts), loss, rtol=1e-5)
    summed = {name: sum(part[3][name] for part in parts) for name in expected}
    assert largest_relative_difference(summed, expected) < 1e-5


def test_only_trained_modules_are_shown_to_the_engine(default_files):
    draft = build_draft(*default_files)
    model = TrainingDraft(draft, TTT_STEPS, 1.0, "kl_div")
    assert {name for name, _ in model.named_parameters()} == {n for n, p in draft.named_parameters() if p.requires_grad}


def test_bfloat16_draft_keeps_its_rotary_frequencies(default_files):
    exact, rounded = build_draft(*default_files), build_draft(*default_files, dtype=torch.bfloat16)
    assert rounded.fc.weight.dtype == torch.bfloat16
    assert torch.equal(rounded.rotary_emb.inv_freq, exact.rotary_emb.inv_freq)


def test_padding_has_no_part_in_the_loss(default_files, rows):
    model = TrainingDraft(build_draft(*default_files), TTT_STEPS, 1.0, "kl_div")
    ones = torch.ones(TTT_STEPS)
    _, plain, _ = model(**load_pack(rows, [0]).inputs, masked_tokens=ones)
    _, padded, _ = model(**load_pack(rows, [0], 64).inputs, masked_tokens=ones)
    assert torch.allclose(plain, padded, rtol=1e-5)


def test_conditional_accuracy_counts_only_unbroken_runs():
    supervised = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    correct = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    sums = ttt.step_sums(torch.tensor([3.0, 2.0]), supervised, correct)
    assert sums.tolist() == [[3, 2], [3, 3], [2, 3], [3, 1], [2, 1]]


def test_learning_rate_of_training_rises_then_falls():
    settings = training(learning_rate=1.0, warmup_fraction=0.1)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(1 / 90)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    cosine = [learning_rate(step, 100, training(learning_rate=1.0, schedule="cosine")) for step in range(100)]
    assert cosine[52] == pytest.approx(0.5) and 0 < cosine[-1] < 0.001
    constant = training(learning_rate=1.0, schedule="constant", warmup_fraction=0)
    assert {learning_rate(step, 100, constant) for step in range(100)} == {1.0}


def test_wsd_learning_rate_of_training_warms_up_stays_and_decays():
    settings = training(learning_rate=1.0, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert set(rates[10:81]) == {1.0}
    assert rates[80:] == pytest.approx([left / 20 for left in range(20, 0, -1)])


@pytest.mark.parametrize(("warmup", "decay"), [(0.6, 0.8), (0.0, 1.0), (0.5, 0.0), (1.0, 0.2)])
def test_wsd_learning_rate_of_training_never_jumps(warmup, decay):
    settings = training(learning_rate=1.0, schedule="wsd", warmup_fraction=warmup, decay_fraction=decay)
    rates = [learning_rate(step, 10, settings) for step in range(10)]
    assert max(rates) == 1.0 and min(rates) > 0
    assert all(abs(later - earlier) < 0.3 for earlier, later in itertools.pairwise(rates))


def test_ranks_train_equally_many_micro_batches_and_each_pack_counts_once():
    packs = [[number] for number in range(5)]
    shares = [share(packs, rank, 3) for rank in range(3)]
    assert [len(own) for own in shares] == [2, 2, 2]
    assert sorted(pack for own in shares for pack, counts in own if counts) == packs
    assert [counts for own in shares for _, counts in own].count(False) == 1


def test_training_refuses_micro_batches_that_its_processes_cannot_share(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(StageError, match=r"training\.gradient_accumulation is 2: expected a multiple of 4"):
        zero.check_settings(training())


MUON = [("float32", 0), ("bfloat16", 1)]


@pytest.mark.parametrize(("dtype", "stage"), MUON)
def test_muon_training_steps_are_those_of_torch(default_files, rows, monkeypatch, dtype, stage):
    """Against torch.optim.Muon and AdamW on float32 masters: updates as large as AdamW's, gradients clipped before."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz)  # torch iterates in bfloat16
    settings = training(
        optimizer="muon", muon_learning_rate=2e-3, weight_decay=0.1, dtype=dtype, zero_stage=stage, gradient_accumulation=1
    )
    zero.start_process_group()
    engine = zero.start_engine(training_draft(default_files, dtype), settings)
    computing = training_draft(default_files, dtype)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in computing.named_parameters()}
    matrices, others = ([p for p in masters.values() if (p.ndim == 2) == wanted] for wanted in (True, False))
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1),
    ]
    start = {name: p.detach().clone() for name, p in masters.items()}
    rounding = 1e-3 if dtype == "float32" else 0.2
    for step in range(3):
        pack, norms = [step, 3], []
        batch, normaliser = load_pack(rows, pack), counts_of(rows, pack)
        inputs = {name: t.to(zero.DTYPES[dtype]) if t.is_floating_point() else t for name, t in batch.inputs.items()}
        zero.set_learning_rate(engine, 1e-3)
        engine.backward(engine(**inputs, masked_tokens=normaliser)[0])
        norms.append(zero.step_optimizer(engine))
        computing.load_state_dict({name: p.detach() for name, p in masters.items()})
        computing.zero_grad()
        computing(**inputs, masked_tokens=normaliser)[0].backward()
        for name, p in computing.named_parameters():
            masters[name].grad = p.grad.float()
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), settings.max_grad_norm).item())
        for optimizer in optimizers:
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=rounding / 10) and norms[0] > settings.max_grad_norm
    found = zero.full_weights(engine)
    engine.destroy()
    for name, master in masters.items():
        moved = (master - start[name]).norm()
        assert (found[name] - master).norm() < rounding * moved, name


def newton_schulz(gradient, coefficients, steps, eps):
    """The iteration of torch.optim.Muon in double precision."""
    a, b, c = coefficients
    tall = len(gradient) > gradient.shape[1]
    result = (gradient.T if tall else gradient).double()
    result = result / (result.norm() + eps)
    for _ in range(steps):
        gram = result @ result.T
        result = a * result + (b * gram + c * gram @ gram) @ result
    return (result.T if tall else result).to(gradient.dtype)


def training_draft(files, dtype="float32"):
    return TrainingDraft(build_draft(*files, dtype=zero.DTYPES[dtype]), TTT_STEPS, 1.0, "kl_div")


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 1), ("float32", 3), ("bfloat16", 2), ("bfloat16", 3)])
def test_muon_training_is_refused_where_its_updates_would_be_clipped(dtype, stage):
    with pytest.raises(
        ValueError, match=f"optimizer muon with dtype {dtype} and zero_stage {stage}: .*; expected dtype bfloat16"
    ):
        training(optimizer="muon", dtype=dtype, zero_stage=stage)


def test_muon_learning_rate_without_muon_is_refused():
    with pytest.raises(ValueError, match=r"muon_learning_rate is for optimizer muon"):
        training(muon_learning_rate=1e-3)


def test_training_accuracy_is_of_the_rows_own_tokens(default_files, rows):
    """As in the walk: where the next token is outside the draft vocabulary nothing that the draft says is right."""
    model, batch = training_draft(default_files), load_pack(rows, [0])
    ids, ones = batch.inputs["input_ids"][0], torch.ones(TTT_STEPS)
    _, _, drafted = model(**batch.inputs, masked_tokens=ones)
    proposed = target_ids(model.d2t())
    last = int((drafted[0] >= 0).nonzero().max())
    outside = min(set(range(1024)) - set(proposed.tolist()))
    right = []
    for token in (int(proposed[drafted[0, last]]), outside):
        ids[last + 1] = token  # no input of a position that takes a loss at the first step
        _, sums, again = model(**batch.inputs, masked_tokens=ones)
        supervised = (again[0] >= 0).nonzero().flatten()
        assert int(sums[2, 0]) == int((proposed[again[0, supervised]] == ids[supervised + 1]).sum())
        assert torch.equal(again[0], drafted[0])
        right.append(int(sums[2, 0]))
    assert right[0] == right[1] + 1


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 3e-3), ("muon", 1e-2)])
def test_training_overfits_and_the_walk_accepts(tmp_path, tiny_llama, default_files, optimizer, rate):
    rows = open_rows(tmp_path, tiny_llama, learnable_rows(tiny_llama, default_files), batch_tokens=64)
    settings = training(optimizer=optimizer, learning_rate=rate, gradient_accumulation=1)
    zero.start_process_group()
    model = TrainingDraft(build_draft(*default_files), TTT_STEPS, 1.0, "kl_div")
    engine = zero.start_engine(model, settings)
    before = validate(engine, rows, settings)
    train_segment(engine, rows, Segment(0, [[[0, 1]], [[2]]] * 40, 0, 80), settings, None)
    after = validate(engine, rows, settings)
    engine.destroy()
    assert before["acceptance_length"] < 1.2 and before["accuracy"][0] < 0.2
    assert after["acceptance_length"] > 3 and min(after["accuracy"]) > 0.9
    assert after["loss"] < 0.2 * before["loss"] and before["drafts"] > after["drafts"]
