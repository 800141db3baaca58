"""The committed pictures of README and how-it-works.md are what docs/pictures.py draws, and they show real runs."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from support import ROOT, generate_plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade import config as lade_config


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = sys.modules["pictures"] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pictures"]
    lade_config.MODES.pop("traced tree", None)


@pytest.fixture(scope="module")
def drawn(pictures):
    return pictures.draw()


def test_committed(drawn):
    for name, content in drawn.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, f"run python docs/pictures.py: {name}"
        ElementTree.fromstring(content)


def test_the_moving_picture_shows_what_plain_generate_writes(pictures, drawn, lade_on):
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "stdlib-9m", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "stdlib-9m")
    inputs = tokenizer(pictures.DECODED, return_tensors="pt")
    plain = generate_plain(model, inputs, max_new_tokens=pictures.DECODED_TOKENS, do_sample=False)
    new, steps = pictures.trace(model, tokenizer, pictures.DECODED, pictures.DECODED_TOKENS, pictures.DECODED_BLOCK)
    assert new == plain[0, inputs["input_ids"].shape[1] :].tolist()
    assert f"lade {len(steps) + 1};" in drawn["img/decoding.svg"]
    assert len(steps) + 1 < len(new)

    def letters(text):
        return re.sub(r"\s", "", text)

    texts = ElementTree.fromstring(drawn["img/decoding.svg"]).iter("{http://www.w3.org/2000/svg}text")
    shown = [text for text in texts if text.get("textLength")]
    assert letters("".join(text.text for text in shown)) == letters(tokenizer.decode(new))
    guessed = [token for step in steps for token in step.committed[: len(step.accepted)]]
    green = "".join(text.text for text in shown if "green" in text.get("class"))
    assert letters(green) == letters("".join(tokenizer.decode([token]) for token in guessed))
