"""Tiny random models, prompts for them, a tokenizer, and what generate() says without lade."""

from __future__ import annotations

import string
from collections import OrderedDict, deque

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

torch.set_num_threads(1)  # tiny models gain nothing from more
VOCAB = 61


def tiny(model_class, config_class, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 48,
        "pad_token_id": 0,
    }
    model = model_class(config_class(**sizes | settings)).to(dtype).eval()
    model.generation_config.eos_token_id = None  # random models would stop anywhere; tests that need an end say so
    return model


def tiny_llama(dtype: torch.dtype = torch.float64, attention: str = "sdpa", **changes) -> LlamaForCausalLM:
    """A random Llama; hidden size, layers and heads of Llama-2-7B are 4096, 32 and 32."""
    settings = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1}
    settings |= {"eos_token_id": 2, "attn_implementation": attention}
    return tiny(LlamaForCausalLM, LlamaConfig, dtype, **settings | changes)


def prompt(length: int = 24, batch_size: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids without special ones, and the mask that generate() would otherwise guess."""
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_prompt():
    inputs = prompt(24, batch_size=3)
    inputs["attention_mask"][0, :9] = 0
    inputs["attention_mask"][2, :2] = 0
    inputs["input_ids"][inputs["attention_mask"] == 0] = 0
    return inputs


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the streamers and stop strings of transformers need one that decodes to text."""
    characters = [*string.ascii_letters, *string.digits[:5], "\u0120"]  # the last one stands for a space
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    assert len(vocab) == VOCAB
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


TOKENIZER = tokenizer()


def generate_plain(model, inputs, **arguments):
    """generate() with lade switched off; lade's own switch, so the patch stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("USE_LADE", "0")
        return model.generate(**inputs, **arguments)


def seeded(generate, *args, **arguments):
    """Its result, always from the same seed, and the states of torch's generators afterwards."""
    torch.manual_seed(3)
    result = generate(*args, **arguments)
    return result, [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def is_patched() -> bool:
    """Whether lade is behind generate()."""
    return hasattr(getattr(GenerationMixin, "_sample", None), "__wrapped__")


def inference_tensors(model) -> list[str]:
    """What a model or a part of it holds that was made in torch's inference mode, and could not be trained with."""
    return [
        f"{part}.{name}"
        for part, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "_modules"
        and any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in tree_leaves(value))
    ]


def assert_same_state(model, twin):
    """All buffers and attributes of all modules are equal, as are configurations; hooks are counted."""
    assert model.config.to_dict() == twin.config.to_dict()
    assert model.generation_config.to_dict() == twin.generation_config.to_dict()
    for (name, part), other in zip(model.named_modules(), twin.modules(), strict=True):
        one, two = vars(part), vars(other)
        assert one.keys() == two.keys(), name
        for key in one.keys() - {"_modules"}:
            assert _is_same(one[key], two[key]), f"{name}.{key}"


def _is_same(one, two) -> bool:
    if isinstance(one, torch.Tensor):
        kinds = [(type(x), x.dtype, x.shape, x.is_inference()) for x in (one, two)]
        return kinds[0] == kinds[1] and torch.equal(one.nan_to_num(), two.nan_to_num())
    if type(one) is not type(two):
        return False
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(_is_same, one, two))
    if isinstance(one, OrderedDict):  # of hooks, whose keys are numbers of the process
        return len(one) == len(two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_is_same(one[key], two[key]) for key in one)
    return one == two if isinstance(one, (bool, int, float, str, set, type(None))) else True


class Recorder(BaseStreamer):
    """Remembers what it is given, shapes included."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


class CountingBias(LogitsProcessor):
    """Depends on how often it was called, and remembers with what."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, len(self.prefixes) * 7 % scores.shape[1]] += 0.05
        return scores


class Choose(LogitsProcessor):
    """Whatever the model says, the text goes on as told: token_at(length)."""

    def __init__(self, token_at):
        self.token_at = token_at

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -100.0)
        forced[:, self.token_at(input_ids.shape[1])] = 0.0
        return forced
