"""Training-time test (TTT): the draft's loss over packed rows, step by step on its own states, without waste.

In: an `Eagle3DraftModel` and one packed batch. Out: the loss and gradients of speculators' own forward (a test compares
them), but rows never look into each other, the vocabulary-wide heads see supervised positions only and one chunk of
logits at a time, later steps run only where a loss follows (dense masks), and the caller gives the normalisation.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from scripts.eagle3.draft import ATTENTION_NAMES, FROZEN, target_ids

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

# logits that exist at once: 64 MiB in float32
CHUNK_LOGITS = 1 << 24
COMPILED_FLEX = "compiled_flex_attention"


class TrainingDraft(torch.nn.Module):
    """The trained modules of a draft, with the training forward.

    The frozen tensors (embedding, heads, target norm, rotary frequencies) are used but not registered: DeepSpeed
    neither shards nor casts nor saves them, and every rank holds them whole.
    """

    def __init__(self, draft: "Eagle3DraftModel", ttt_steps: int, step_loss_decay: float, loss: str) -> None:
        super().__init__()
        from speculators.losses import resolve_loss_config

        self._frozen = (draft,)  # in a tuple: not registered as a submodule
        for name, module in draft.named_children():
            if not f"{name}.".startswith(FROZEN) and next(module.parameters(), None) is not None:
                self.add_module(name, module)
        self.ttt_steps, self.step_loss_decay = ttt_steps, step_loss_decay
        cuda = draft.fc.weight.is_cuda
        ((self.loss_function, _),) = resolve_loss_config(loss, "fused" if cuda else "eager").values()
        # on a GPU memory is short: the backward pass computes each TTT step again
        self.recompute = cuda
        self.flex = draft._attn_impl == ATTENTION_NAMES["flex"]
        if self.flex and cuda:
            compile_flex_attention(draft)

    def d2t(self) -> torch.Tensor:
        """[draft vocabulary] offsets to target ids, on the CPU."""
        (draft,) = self._frozen
        return torch.zeros(draft.draft_vocab_size, dtype=torch.long) if draft.d2t is None else draft.d2t.cpu()

    def config(self) -> dict[str, Any]:
        """The draft's configuration, keys as in draft/config.json."""
        (draft,) = self._frozen
        return draft.config.to_dict()

    def own_head(self) -> dict[str, torch.Tensor]:
        """`lm_head.weight` where an initial head brought rows that are not the target's; else nothing."""
        (draft,) = self._frozen
        head = draft.lm_head.weight
        return {} if torch.equal(head, draft.verifier_lm_head.weight) else {"lm_head.weight": head}

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        verifier_last_hidden_states: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
        masked_tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One packed batch [1, T, ...] of `packing.load_pack`; `masked_tokens` [K] divides the loss sum of each step.

        Returns the loss, the sums [5, K] of `step_sums`, and the draft ids [K, T], -1 where no loss is taken.
        """
        (draft,) = self._frozen
        supervised = supervised_positions(loss_mask[0], document_ids[0], self.ttt_steps)
        targets, target_row = self._targets(verifier_last_hidden_states[0], loss_mask[0])
        proposed = target_ids(self.d2t()).to(input_ids.device)
        states = self._project(hidden_states)
        length = states.shape[1]
        first_mask = draft._build_attn_mask(document_ids[0], length, states.device)
        kept = torch.arange(length, device=states.device)
        past: list[torch.Tensor] = []
        drafted = input_ids.new_full((self.ttt_steps, length), -1)
        correct = torch.zeros_like(supervised)
        loss, step_losses = states.new_zeros((), dtype=torch.float32), []
        for step in range(self.ttt_steps):
            if step == 1 and not self.flex:
                # a later step's keys are seen from their own position only: drop those that no loss depends on
                kept = supervised[1:].any(0).nonzero().flatten()
                states = states[:, kept]
            embeds = draft.embed_tokens(_shifted(input_ids, step)[:, kept])
            rotary = draft.rotary_emb(states, position_ids[:, kept] + step)
            states, *new = self._run_layers(states, embeds, rotary, self._mask(first_mask, kept, step), past)
            past += new
            here = supervised[step, kept].nonzero().flatten()
            if draft.config.norm_output:
                states = self.norm(states)
                outputs = states[0, here]
            else:
                outputs = self.norm(states[0, here])
            positions = kept[here]
            rows = target_row[positions + step]
            step_loss, ids = HeadLoss.apply(outputs, draft.lm_head.weight, targets, rows, self.loss_function)
            loss = loss + self.step_loss_decay**step * step_loss / masked_tokens[step]
            step_losses.append(step_loss.detach())
            drafted[step, positions] = ids
            # what the walk accepts: the row's own next token, so one outside the draft vocabulary is always missed
            correct[step, positions] = proposed[ids] == input_ids[0, positions + step + 1]
        return loss, step_sums(torch.stack(step_losses), supervised, correct), drafted

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if getattr(self, "input_norm", None) is not None:
            hidden_states = self.input_norm(hidden_states)
        return self.fc(hidden_states)

    @torch.no_grad()
    def _targets(self, final_states: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Target logits [masked, draft vocabulary] of the masked positions, and [T] the row of each of them in it."""
        (draft,) = self._frozen
        logits = draft.verifier_lm_head(draft.verifier_norm(final_states[loss_mask]))
        return logits, loss_mask.cumsum(0) - 1

    def _mask(self, first_mask: Any, kept: torch.Tensor, step: int) -> Any:
        """Attention at one step: to the row's first-step keys up to here, and to the own position in later steps."""
        if not self.flex:
            own = torch.eye(len(kept), dtype=torch.bool, device=kept.device)[None, None]
            return torch.cat([first_mask[:, :, kept], *([own] * step)], -1)
        from speculators.models.eagle3.attention import extend_mask_for_draft_tokens

        for _ in range(step):
            first_mask = extend_mask_for_draft_tokens(first_mask)
        return first_mask

    def _run_layers(
        self, states: torch.Tensor, embeds: torch.Tensor, rotary: Any, mask: Any, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The new states, then the new keys and values of each layer; `past`: those of earlier steps, step by step."""

        def layers(states: torch.Tensor, embeds: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache = StepCache(past, len(self.layers))
            states = torch.cat([embeds, states], -1)
            for layer in self.layers:
                states = layer(states, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
            return states, *cache.new

        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layers, states, embeds, *past, use_reentrant=False)
        return layers(states, embeds, *past)


class StepCache:
    """Keys and values of earlier TTT steps, given from outside: a step computed again sees what it saw before."""

    def __init__(self, past: tuple[torch.Tensor, ...], layers: int) -> None:
        self.past, self.stride = past, 2 * layers
        self.new: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of `layer` so far, as a transformers cache gives them."""
        self.new += [keys, values]
        past_keys, past_values = self.past[2 * layer :: self.stride], self.past[2 * layer + 1 :: self.stride]
        return torch.cat([*past_keys, keys], 2), torch.cat([*past_values, values], 2)


class HeadLoss(torch.autograd.Function):
    """Sum of the loss over N states, and the tokens that they predict.

    The head is frozen, so the gradient at the states is all that the backward pass needs. It is made here, chunk by
    chunk, and no [N, vocabulary] tensor of the draft outlives its chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor,
        loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [N, hidden], head [vocabulary, hidden], targets [M, vocabulary] logits, rows [N]: state -> target."""
        chunk = max(1, CHUNK_LOGITS // len(head))
        wanted = ctx.needs_input_grad[0]
        total, gradient = states.new_zeros((), dtype=torch.float32), torch.zeros_like(states)
        ids = torch.empty_like(rows)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(wanted):
                leaf = states[part].detach().requires_grad_(wanted)
                logits = torch.nn.functional.linear(leaf, head)
                loss = loss_function(logits[None], targets[rows[part]][None]).sum()
            if wanted:
                (gradient[part],) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
            ids[part] = logits.detach().argmax(-1)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient at the states, scaled by that of the sum."""
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(gradient.dtype), None, None, None, None


def supervised_positions(loss_mask: torch.Tensor, document_ids: torch.Tensor, ttt_steps: int) -> torch.Tensor:
    """[K, T] bool: position t takes a loss at step k where t + k is masked and belongs to the same row."""
    result = loss_mask.new_zeros(ttt_steps, len(loss_mask))
    for step in range(ttt_steps):
        end = len(loss_mask) - step
        result[step, :end] = loss_mask[step:] & (document_ids[step:] == document_ids[:end])
    return result


def step_sums(losses: torch.Tensor, supervised: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """[5, K] float64 from losses [K], supervised and correct [K, T].

    Loss; supervised positions; correct ones; supervised ones that were correct at all earlier steps; those of them that
    are correct again.
    """
    reached = supervised.clone()
    reached[1:] &= correct.to(torch.int8).cumprod(0).bool()[:-1]
    counts = [mask.sum(1).double() for mask in (supervised, correct, reached, reached & correct)]
    return torch.stack([losses.double(), *counts])


def compile_flex_attention(draft: "Eagle3DraftModel") -> None:
    """Makes the draft's layers use a compiled flex attention: the plain one would hold all scores at once.

    speculators compiles its whole forward instead, which `TrainingDraft` replaces.
    """
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.modeling_utils import AttentionInterface

    # one variant per TTT step (the keys get longer), each with and without gradients
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        grouped = query.shape[1] != key.shape[1]
        output = compiled(query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(COMPILED_FLEX, attention)
    for layer in draft.layers:
        layer.self_attn.config._attn_implementation = COMPILED_FLEX


def _shifted(input_ids: torch.Tensor, step: int) -> torch.Tensor:
    """input_ids [1, T] moved `step` places to the left; zeros at the end, where no loss is taken."""
    return torch.nn.functional.pad(input_ids[:, step:], (0, step))
