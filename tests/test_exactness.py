"""Token for token the output of plain generate(), with proof that lookahead ran and that its mask matters."""

import pytest
import torch
from support import VOCAB, compare, generate_plain, prompt, tiny_llama

import lade
from lade.block.layout import BlockLayout

SETTINGS = [(2, 1, 7), (2, 7, 0), (3, 2, -1), (3, 7, 7), (5, 2, 1), (5, 7, 7), (8, 1, 7), (8, 7, 0)]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("level", "window", "guesses"), SETTINGS)
def test_settings(lade_on, level, window, guesses, sampling):
    lade.config_lade(MODE="lookahead", LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guesses)
    stats = compare(tiny_llama(torch.float32), prompt(20, seed=level), max_new_tokens=48, **sampling)
    assert stats.block_tokens[0] >= (level - 1) * window
    # This random model falls into a loop, which the pool must find.
    assert stats.steps < (48 if guesses and not sampling else 49)


def test_pool_from_prompt_hits_on_the_first_step(lade_on, model):
    """A prompt that already holds the answer is verified at once: the pool begins with its n-grams."""
    inputs = prompt(20)
    answer = generate_plain(model, inputs, max_new_tokens=60)
    repeated = {"input_ids": torch.cat([answer, answer[:, :61]], dim=1)}
    repeated["attention_mask"] = torch.ones_like(repeated["input_ids"])
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)
    model.generate(**repeated, max_new_tokens=4)
    assert lade.last_stats().block_tokens[0] > 3 * 3


MODES = {
    "window": {"MODE": "lookahead", "LEVEL": 6, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 5},
    "tree": {"MODE": "tree", "MAX_BLOCK": 16, "SHARE": 0},
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def mode(request, lade_on):
    lade.config_lade(**request.param)


def test_length_cuts_inside_accepted_guesses(mode, model):
    full = generate_plain(model, prompt(30, seed=5), max_new_tokens=40)
    looping = {"input_ids": full, "attention_mask": torch.ones_like(full)}
    for max_new_tokens in range(1, 14):
        compare(model, looping, max_new_tokens=max_new_tokens)


def test_end_of_sequence_inside_accepted_guesses(mode, model):
    inputs = prompt(30, seed=5)
    full = generate_plain(model, inputs, max_new_tokens=60)[0, 30:].tolist()
    for cut in range(2, 12):
        ends = [full[cut], full[cut + 3], VOCAB - 1]  # several ids, of which whichever comes first counts
        assert compare(model, inputs, max_new_tokens=60, eos_token_id=ends).generated_tokens < 60


def test_negative_control(mode, monkeypatch):
    """With a plain causal mask over the same block the output changes: the mask is what makes lookahead exact."""
    model = tiny_llama(num_hidden_layers=1)

    def causal(self, tree, original=BlockLayout.offsets_and_visibility):
        offsets, visible = original(self, tree)
        return offsets, torch.ones_like(visible).tril()

    different = 0
    monkeypatch.setattr(BlockLayout, "offsets_and_visibility", causal)
    for seed in range(4):
        inputs = prompt(20, seed=seed)
        expected = generate_plain(model, inputs, max_new_tokens=60)
        different += not torch.equal(model.generate(**inputs, max_new_tokens=60), expected)
    assert different > 0


def test_bfloat16_follows_the_models_own_argmax(mode):
    """In 16 bits near-ties may fall differently than in plain generate(), but each token is an argmax within a tie."""
    model = tiny_llama(torch.bfloat16)
    inputs = prompt(20)
    result = model.generate(**inputs, max_new_tokens=60)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps < 60
    logits = model(input_ids=result).logits[0, 19:-1].float()
    chosen = logits.gather(1, result[0, 20:, None])[:, 0]
    # Two roundings of a bfloat16 value of this size.
    assert (logits.max(1).values - chosen <= 2 * 2**-7 * logits.abs().max()).all()
