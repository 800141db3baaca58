"""What a new user runs first: minimal.py on the bundled checkpoint, and the README's lines on a folder of one's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("USE_LADE", "LOAD_LADE")}
    command = [sys.executable, str(ROOT / "minimal.py"), "--max_new_tokens", "24", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean | environment, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_and_lookahead_print_the_same_text():
    plain = run("--dtype", "float32")
    ahead = run("--dtype", "float32", USE_LADE="1", LOAD_LADE="1")
    for mode in ("greedy", "sampled"):
        assert re.search(rf"{mode}: \d+ tokens, [\d.]+ tokens/s -----", plain)
        assert re.search(rf"{mode}: \d+ tokens, [\d.]+ tokens/s, [\d.]+ tokens/step -----", ahead)
    heading = re.compile(r"^-----.*$", re.MULTILINE)
    assert heading.sub("", plain) == heading.sub("", ahead)


def test_compare(tmp_path):
    settings = tmp_path / "lade.json"
    settings.write_text('{"ADAPTIVE": 0, "MAX_BLOCK": 16}')  # on a busy machine plain steps may be what pays
    out = run("--compare", "--dtype", "float32", LADE_CONFIG=str(settings))
    assert len(re.findall(r"outputs identical: +yes", out)) == 2
    assert float(re.search(r"tokens per step: +([\d.]+)", out)[1]) > 1
    assert "did not run" not in out


def test_any_model_folder(tmp_path):
    tiny_llama(torch.float32, vocab_size=4096).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "models" / "stdlib-9m").save_pretrained(tmp_path)
    assert "sampled: " in run("--model_path", str(tmp_path), "--prompt", "import os")


def test_three_lines_of_the_readme(monkeypatch):
    block = re.search(r"```python\n(import lade\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[
        1
    ]
    monkeypatch.setenv("USE_LADE", "1")
    before = lade.current_config()
    try:
        exec(block, {})
        model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "stdlib-9m", dtype=torch.float32)
        inputs = AutoTokenizer.from_pretrained(ROOT / "models" / "stdlib-9m")("def main():\n", return_tensors="pt")
        model.generate(**inputs, max_new_tokens=16)
        assert lade.last_stats().fallback_reason is None
    finally:
        lade.restore_all()
        lade.config._default = before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float32_on_the_bundled_checkpoint(lade_on, attention):
    folder = ROOT / "models" / "stdlib-9m"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What are the arguments of shutil.copytree?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ahead = model.generate(**inputs, max_new_tokens=40)
    assert lade.last_stats().fallback_reason is None
    lade.restore_all()
    assert torch.equal(ahead, model.generate(**inputs, max_new_tokens=40))
    assert "copytree" in tokenizer.decode(ahead[0, inputs["input_ids"].shape[1] :])
