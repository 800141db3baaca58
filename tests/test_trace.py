"""`lade trace`: what is recorded is what happened, tracing changes nothing, and the page shows it in a browser."""

import json
import re
import shutil
import subprocess
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support import generate_plain, prompt, seeded, tiny_llama

import lade
from lade import commands
from lade.block.layout import block_layout
from lade.block.token_tree import TokenTree
from lade.commands.trace import TEMPLATE, page
from lade.commands.trace.recorder import record, warm_up
from lade.commands.trace.replay import FAINT, GUESSED, ORDINARY, OWN, bin_of, replay
from lade.drafting import Draft, register_drafter
from lade.drafting.acceptance import CONTEXT, EARLIER, PREDICTION, ROOT, SUFFIX, TOKEN
from lade.drafting.base import ROOT_ALONE, Drafter
from lade.forward.cpu import packed
from lade.stats import tracing

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
ANSI = re.compile(r"\033\[[\d;]*m")


@pytest.fixture
def trace(random_model, tokenizer, lade_on):
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4)
    ids = tokenizer("a = a + </script> a = a + 1 # a")["input_ids"]
    return record(random_model, tokenizer, ids, max_new_tokens=80)


def test_a_trace_is_what_happened(trace, random_model, tokenizer):
    stats, steps = lade.last_stats(), trace["steps"]
    ids = tokenizer("".join(trace["prompt"]), return_tensors="pt")
    output = generate_plain(random_model, ids, max_new_tokens=80)[0].tolist()
    assert trace["ids"] == output[-80:]
    assert "".join(trace["text"]) == tokenizer.decode(trace["ids"])
    assert stats.fallback_reason is None
    assert len(steps) == stats.steps - 1 < 79
    assert [len(trace["masks"][step["mask"]]) for step in steps] == stats.block_tokens
    committed = trace["ids"][:1]
    for step in steps:
        assert step["root"] == step["window"][0][0] == committed[-1]
        assert step["sources"] == ["pool"] * len(step["tokens"])
        assert [len(row) for row in step["window"]] == [3, 3, 3]
        assert [step["tokens"][node] for node in step["accepted"]] == step["committed"][:-1]
        assert [step["parents"][node] for node in step["accepted"]] == [-1, *step["accepted"]][: len(step["accepted"])]
        committed += step["committed"]
        layout = block_layout(4, 3, len(step["tokens"]), torch.device("cpu"))
        visible = layout.offsets_and_visibility(TokenTree([step["tokens"]], [step["parents"]]))[1][0].tolist()
        rows = trace["masks"][step["mask"]]
        assert [f"{int(row, 16):0{len(rows)}b}" for row in rows] == ["".join("01"[x] for x in row) for row in visible]
        assert min(step["forward"], step["rest"]) > 0
    assert committed == trace["ids"]
    assert sum(step["forward"] + step["rest"] for step in steps) + trace["prefill"] < trace["seconds"]
    # The last row of the window becomes the next step's last level: nothing was overwritten while it was recorded.
    assert all(after["window"][-1] == before["guesses"] for before, after in pairwise(steps))


def test_tracing_is_off_outside_of_it(random_model, lade_on):
    seen = []
    arguments = {**prompt(24), "max_new_tokens": 30, "do_sample": True}
    without, _ = seeded(random_model.generate, **arguments)
    with tracing(lambda *step: seen.append(len(step))):
        assert torch.equal(seeded(random_model.generate, **arguments)[0], without)
    assert seen == [2] * (lade.last_stats().steps - 1)
    random_model.generate(**arguments)
    assert len(seen) < 30


@pytest.mark.skipif(packed.packing_error(torch.float32) is not None, reason="oneDNN packs nothing here")
def test_a_traced_call_runs_as_it_would_untraced(tokenizer, lade_on, monkeypatch):
    """With a hook on the model, for one, nothing would be packed, and block sizes would follow other costs."""
    monkeypatch.setattr(packed, "least_elements", lambda dtype: 1)
    lade.config_lade(MODE="auto", PACK=1)
    model = tiny_llama(torch.float32, vocab_size=4096)
    model.generate(**prompt(24), max_new_tokens=8)
    num_packed = lade.last_stats().packed_weights
    record(model, tokenizer, [5, 6, 7], max_new_tokens=20)
    assert lade.last_stats().packed_weights == num_packed > 0


@pytest.fixture
def tree_trace(tokenizer, lade_on):
    """What generate() does by default."""
    lade.config_lade(MODE="auto", ADAPTIVE=1, DETERMINISTIC=1)
    model, ids = tiny_llama(torch.bfloat16, vocab_size=4096), tokenizer("a = a + 1 # a = a + 1 # a")["input_ids"]
    return record(model, tokenizer, ids, max_new_tokens=80)


def test_the_default_drafter_explains_itself(tree_trace):
    steps, stats = tree_trace["steps"], lade.last_stats()
    assert (tree_trace["mode"], tree_trace["headline"]) == ("auto", f"{stats.steps} forward passes instead of 80")
    assert [step["window"] for step in steps] == [[]] * len(steps)
    guessed = [step for step in steps if step["tokens"]]
    assert guessed
    for step in steps:
        assert step["reason"]
        assert len(step["sources"]) == len(step["chances"]) == len(step["tokens"])
        for parent, chance in zip(step["parents"], step["chances"], strict=True):
            assert 0 <= chance <= (1 if parent < 0 else step["chances"][parent])
        sizes = [size for size, _, _ in step["offers"]]
        assert ("most tokens" if sizes else "a few steps have none") in step["reason"]
        if sizes:
            assert step["offers"][0] == [1, 1, 1]
            rates = {size: tokens / cost for size, tokens, cost in step["offers"]}
            assert rates[1 + len(step["tokens"])] == pytest.approx(max(rates.values()), rel=0.01)  # they are rounded
    guesses = [(source, node in step["accepted"]) for step in guessed for node, source in enumerate(step["sources"])]
    for source, counts in stats.sources.items():
        assert counts == [sum(name == source for name, _ in guesses), guesses.count((source, True))]
    assert {source for source, _ in guesses} == set(stats.sources)


def test_the_page_says_what_each_source_is():
    sources = re.search(r"const SOURCES = {\n(.*?)\n};", TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)[1]
    described = set(re.findall(r"^  (\w+): \[", sources, re.MULTILINE))
    sources = {prior.source for prior in (TOKEN, ROOT, *CONTEXT)}
    sources |= {source for source, _ in SUFFIX + EARLIER + PREDICTION}
    assert described == {source.split()[0] for source in sources} | {"pool"}


def test_the_warm_up_teaches_no_text(random_model, tokenizer, lade_on):
    lade.config_lade(MODE="auto")
    ids = tokenizer("def main(): return")["input_ids"]
    cold = record(random_model, tokenizer, ids, max_new_tokens=24)
    with lade.Memory().active():
        warm_up(random_model, ids, max_new_tokens=24)
        warm = record(random_model, tokenizer, ids, max_new_tokens=24)
        again = record(random_model, tokenizer, ids, max_new_tokens=24)
    assert [step["tokens"] for step in warm["steps"]] == [step["tokens"] for step in cold["steps"]]
    assert len(again["steps"]) < len(warm["steps"])  # a text that was remembered would show


class Echo(Drafter):
    """Says nothing of itself: the root once more."""

    def __init__(self, request):
        self.no_window = request.prompt_ids.new_empty((1, 0))

    def propose(self, sequences, is_finished, max_offset):
        return Draft(TokenTree([sequences.roots()], [[-1]]), 1, ROOT_ALONE, self.no_window)


@pytest.fixture
def echo_trace(random_model, tokenizer, lade_on):
    register_drafter("echo", Echo)
    lade.config_lade(MODE="echo")
    return record(random_model, tokenizer, [5, 6, 7], max_new_tokens=20)


def test_a_new_drafter_has_a_trace(echo_trace):
    for step in echo_trace["steps"]:
        assert step["tokens"] == [step["root"]]
        assert step["sources"] == step["chances"] == step["offers"] == step["window"] == []
    shown = []
    replay(echo_trace, shown.append, speed=0)
    assert "20 tokens in" in "".join(shown)
    assert "plain generate()" in "".join(shown)


def test_what_falls_back_has_no_trace(random_model, tokenizer, lade_on):
    with pytest.raises(RuntimeError, match="beam search"):
        record(random_model, tokenizer, [5, 6, 7], max_new_tokens=5, num_beams=2)
    assert not random_model._forward_hooks


def test_in_the_terminal(trace):
    shown = []
    replay(trace, shown.append, speed=0)
    text = ANSI.sub("", "".join(shown))
    assert text.startswith("".join(trace["prompt"]) + "".join(trace["text"]))
    guessed = sum(piece.startswith("\033[30;42m") for piece in shown)
    assert guessed == sum(len(step["accepted"]) for step in trace["steps"]) > 3
    bars = re.findall(r"(\d+) tokens? +█* (\d+)\n", text)
    assert sum(int(size) * int(count) for size, count in bars) == 80


def test_bins():
    assert [bin_of(size) for size in (1, 8, 9, 16, 17, 33)] == [(1, 1), (8, 8), (9, 16), (9, 16), (17, 32), (33, 64)]


def test_the_terminal_sees_no_escape_sequence_of_the_text(trace):
    """Neither of the prompt nor of what was generated, whole or in pieces."""
    trace["prompt"][0] = "\033]0;title\007a\033[2J"
    own = ["\033[31mred\033[0m", "\033", "[1A\r", "\x9b2K\x08", "tab\t, line\n, caf\u00e9 \u65e5"]
    trace["text"][:5] = own
    shown = []
    replay(trace, shown.append, speed=0)
    for colour in (GUESSED, OWN, FAINT, ORDINARY):  # the replay's own
        shown = [piece.replace(colour, "") for piece in shown]
    text = "".join(shown)
    assert not {character for character in text if unicodedata.category(character) == "Cc"} - {"\t", "\n"}
    assert text.startswith("]0;titlea")
    assert "red[1A2Ktab\t, line\n, caf\u00e9 \u65e5" in text


def test_the_page_is_one_file(trace):
    html = page(trace)
    data = re.search(r"const trace = (.*);\n", html)[1]
    assert json.loads(data) == json.loads(json.dumps(trace))
    assert html.count("</script>") == 1
    links = set(re.findall(r"https?://[^\"'\s]+", html.replace(data, "")))
    assert links == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"src=|@import|url\(|fetch\(", html.replace(data, ""))


def test_the_command(tmp_path, capsys, lade_on, checkpoint):
    out = tmp_path / "t.html"
    question = ["--question", "What does os.path.join do?", "--max_new_tokens", "12", "--dtype", "float32"]
    assert commands.main(["trace", "--out", str(out), *question]) == 0
    assert re.search(r"t\.html: \d+ forward passes instead of 12\. It took", capsys.readouterr().out)
    data = json.loads(re.search(r"const trace = (.*);\n", out.read_text(encoding="utf-8"))[1])
    assert "os.path.join" in "".join(data["prompt"])
    assert data["model"] == "stdlib-9m"
    assert commands.main(["trace", "--terminal", "--speed", "0", "--model_path", checkpoint, *question]) == 0
    assert "per step" in capsys.readouterr().out


def dump(folder: Path, address: str, theme: str = "light") -> str:
    """What a browser has made of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += ["--force-dark-mode"] if theme == "dark" else []
    command = [BROWSER, *options, "--dump-dom", f"file://{folder / address}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_browser(trace, tmp_path, theme):
    (tmp_path / "t.html").write_text(page(trace), encoding="utf-8")
    number = next(index for index, step in enumerate(trace["steps"], 1) if step["accepted"])
    dom = dump(tmp_path, f"t.html#pass={number + 1}", theme)
    assert f'data-theme="{theme}"' in dom
    assert f"pass {number + 1} of {len(trace['steps']) + 1}" in dom
    assert trace["speed"] in dom
    assert f">{trace['headline']}</h1>" in dom
    step = trace["steps"][number - 1]
    assert f"Out: {len(step['committed'])} tokens" in dom
    assert dom.count('class="chip yes"') == len(step["accepted"])
    assert dom.count('class="chip cell"') == 8
    assert len(re.findall(r'class="(?:own|guess) now"', dom)) == len(step["committed"])
    later = sum(len(later["committed"]) for later in trace["steps"][number:])
    assert len(re.findall(r'class="(?:own|guess) later"', dom)) == later
    assert dom.count('class="bar"') == len(trace["steps"]) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "."], "--out must be a file in a folder that exists, got '.'"),
        (["--prompt", " "], "--prompt and --question must not be empty"),
        (["--prompt", "a", "--question", "b"], "argument --question: not allowed with argument --prompt"),
    ],
)
def test_wrong_arguments_end_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["trace", "--model_path", "nothing/loaded", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"lade trace: error: {message}\n")


@in_browser
@pytest.mark.parametrize("name", ["trace", "tree_trace", "echo_trace"])
def test_panels_and_width(name, request, tmp_path):
    """At 390 pixels nothing reaches beyond the page, and panels are there that the trace has something for."""
    trace = request.getfixturevalue(name)
    script = """<script>
      let widest = 0;
      for (let pass = 0; pass <= last; pass++) { show(pass); widest = Math.max(widest, document.documentElement.scrollWidth); }
      const titles = [...document.querySelectorAll("h2")].map(title => title.textContent.replace(/ a block.*/, " this size"));
      parent.postMessage(JSON.stringify([innerWidth, widest, titles, document.querySelectorAll(".chip").length]), "*");
    </script>"""
    (tmp_path / "t.html").write_text(page(trace).replace("</body>", script + "</body>"), encoding="utf-8")
    frame = '<iframe src="t.html" style="width:390px;height:800px;border:0"></iframe><p id="said"></p>'
    frame += '<script>addEventListener("message", event => { document.getElementById("said").textContent = event.data; });</script>'
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    width, widest, titles, num_chips = json.loads(re.search(r'<p id="said">(.+?)</p>', dump(tmp_path, "frame.html"))[1])
    assert widest <= width == 390
    assert num_chips > 1
    assert ("Window" in titles) == (name == "trace")
    assert ("Why this size" in titles) == (name != "echo_trace")
    assert {"Text", "Guesses", "Attention mask", "Tokens per pass"} <= set(titles)
