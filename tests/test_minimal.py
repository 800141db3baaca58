"""What a new user runs first: minimal.py on the bundled checkpoint, and the README's lines on a folder of one's own."""

import importlib.util
import re
import sys

import pytest
import torch
from support import BUNDLED, ROOT, beside, forked, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade

SHORT = ("--max_new_tokens", "24")


def bundled(dtype=torch.float32, **arguments):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype, **arguments)
    return model, AutoTokenizer.from_pretrained(BUNDLED)


@beside
def plain():
    """The script in a process of its own."""
    arguments = [str(ROOT / "minimal.py"), *SHORT]
    return forked(f"import runpy, sys; sys.argv = {arguments}; runpy.run_path(sys.argv[0], run_name='__main__')")


@pytest.fixture
def run(lade_on, monkeypatch, capsys):
    """Runs main() of the script in this process, lade loaded and on. Returns what it prints."""
    spec = importlib.util.spec_from_file_location("minimal", ROOT / "minimal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TRIALS", 1)
    monkeypatch.setenv("LOAD_LADE", "1")

    def main(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["minimal.py", *SHORT, *arguments])
        lade.restore_all()
        module.main()
        return capsys.readouterr().out

    main.module = module
    return main


def test_plain_and_lookahead_print_the_same_text(plain, run):
    assert plain.returncode == 0, plain.stderr
    first, alone = plain.stdout.split("\n", 1)
    assert first.startswith("Importing torch")
    ahead = run()
    for mode in ("greedy", "sampled"):
        assert re.search(rf"{mode}: \d+ tokens, [\d.]+ tokens/s -----", alone)
        assert re.search(rf"{mode}: \d+ tokens, [\d.]+ tokens/s, [\d.]+ tokens/step -----", ahead)
    assert max(float(rate) for rate in re.findall(r"([\d.]+) tokens/step", ahead)) > 1
    heading = re.compile(r"^-----.*$", re.MULTILINE)
    assert heading.sub("", alone) == heading.sub("", ahead)


def test_the_timed_call_has_not_seen_its_prompt(run):
    """It takes as many steps as a call with a memory of its own, and not as few as one that follows another."""
    out = run()
    assert "each call starts with an empty memory" in out
    shown = [float(figure) for figure in re.findall(r"([\d.]+) tokens/step", out)]
    model, tokenizer = bundled()
    inputs = tokenizer(run.module.PROMPT, return_tensors="pt")
    lade.config_lade(SHARE=1)
    first, second = [], []
    for choice in run.module.MODES.values():
        with lade.Memory().active():
            for found in (first, second):
                torch.manual_seed(0)
                model.generate(**inputs, max_new_tokens=24, **choice)
                found.append(round(lade.last_stats().tokens_per_step, 2))
    assert shown == first
    assert all(later > found for later, found in zip(second, first, strict=True))


def test_compare(run):
    lade.config_lade(MAX_BLOCK=16)
    out = run("--compare")
    assert len(re.findall(r"outputs identical: +yes", out)) == 2
    assert float(re.search(r"tokens per step: +([\d.]+)", out)[1]) > 1
    assert "did not run" not in out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_why_outputs_differ(run, dtype):
    """Two texts that part at the third token, between the two likeliest ones."""
    model, tokenizer = bundled(dtype)
    inputs = tokenizer("import os", return_tensors="pt")
    plain, ahead = torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9])
    with torch.no_grad():
        logits = model(torch.cat([inputs["input_ids"][0], plain[:2]])[None]).logits[0, -1].float()
    text, sampled = (run.module.difference(model, tokenizer, inputs, plain, ahead, flag) for flag in (False, True))
    if dtype == torch.float32:
        assert "must not happen" in text
    else:
        assert "part at token 3" in text
        assert f"logits {logits[7]:.3f} and {logits[9]:.3f}" in text
        assert "part at token 3" in sampled
        assert "logits" not in sampled  # those of two sampled tokens may be far apart
        text = run.module.difference(model, tokenizer, inputs, plain, plain[:2], False)
        assert text.startswith("This must not happen")


def test_any_model_folder(run, tmp_path):
    tiny_llama(torch.float32, vocab_size=4096).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(tmp_path)
    text = run("--model_path", str(tmp_path), "--prompt", "import os")
    assert f"Loading {tmp_path} in auto" in text  # the bundled one runs in float32, where outputs are identical
    assert "sampled: " in text
