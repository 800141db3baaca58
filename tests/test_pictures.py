"""The committed pictures of README and how-it-works.md are what docs/pictures.py draws, and they show real runs; so
does a recording of the chat."""

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from support import ROOT, generate_plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade import config as lade_config


def load(name):
    """A program in docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures():
    yield load("pictures")
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


def test_a_recording_holds_what_is_typed_and_answered():
    recording = load("recording")
    # It answers with one write, at which the next line may be typed; a second is enough on a busy machine, too.
    program = "print(input('one? ')[::-1], 'two? ', sep='\\n', end='', flush=True); print(input().upper())"
    cast = recording.as_cast(recording.record([sys.executable, "-c", program], ("abc", "def"), quiet=1.0))
    head, *events = map(json.loads, cast.splitlines())
    assert head["version"] == 2
    text = "".join(text for _, kind, text in events if kind == "o")
    assert text.replace("\r", "") == "one? abc\ncba\ntwo? def\nDEF\n"
    seconds = [second for second, *_ in events]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2  # two pauses
