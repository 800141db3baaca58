"""The chatbot: what it shows and when, what it remembers and recomputes, and that Ctrl-C leaves both in order."""

import os
import random
import re
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import generate_plain, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.commands.chat import chatbot
from lade.commands.chat.conversation import FALLBACK_STOP, Conversation, DoesNotFit, keeps_keys_only
from lade.commands.chat.streaming import GUESSED, ORDINARY, AnswerStreamer, overlap
from lade.commands.chat.terminal import Terminal, summary
from lade.models import foreign

ROOT = Path(lade.__file__).parent.parent
BUNDLED = ROOT / "models" / "stdlib-9m"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def bundled():
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def random_model():
    """Writes nonsense that is split into other tokens when it is read as text."""
    return tiny_llama(vocab_size=4096)


@pytest.fixture(params=["1", "0"], ids=["lade", "plain"])
def either(request, monkeypatch, lade_on):
    monkeypatch.setenv("USE_LADE", request.param)
    return request.param == "1"


def fresh_answer(conversation: Conversation, question: str) -> str:
    """What plain generate() says without any cache from before."""
    ids = conversation._ids_of([*conversation.messages, {"role": "user", "content": question}])
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    arguments = {"stop_strings": conversation.stop_string, "tokenizer": conversation.tokenizer}
    output = generate_plain(conversation.model, inputs, max_new_tokens=conversation.max_new_tokens, **arguments)
    return conversation._text_of(output[0, len(ids) :].tolist())


@pytest.fixture
def fed(request, monkeypatch):
    """Tokens in each forward of the models under test."""
    monkeypatch.setattr(foreign, "AUTHORS", foreign.AUTHORS | {__name__})  # no trials, whose tokens would count
    counts = []
    hooks = [
        request.getfixturevalue(name)
        .get_input_embeddings()
        .register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[1]))
        for name in ("bundled", "random_model")
    ]
    yield counts
    for hook in hooks:
        hook.remove()


def test_later_turns_feed_only_what_is_new(bundled, tokenizer, either, fed):
    conversation = Conversation(bundled, tokenizer, max_new_tokens=30)
    conversation.ask("What does os.path.join do?")
    for question in ("What are the arguments of shutil.copytree?", "And of os.walk?"):
        expected = fresh_answer(conversation, question)
        cached = len(conversation._cached_ids)
        fed.clear()
        answer = conversation.ask(question)
        assert (answer.fallback_reason is None) == either
        assert answer.text == expected
        assert answer.reused_tokens == cached
        assert fed[0] == answer.prompt_tokens - cached < answer.prompt_tokens / 2
    assert conversation.num_turns == 3
    assert max(fed[1:]) > 1 if either else fed[1:] == [1] * (answer.new_tokens - 1)


def test_what_is_read_as_other_tokens_is_recomputed(random_model, tokenizer, either, fed):
    conversation = Conversation(random_model, tokenizer, max_new_tokens=20)
    first = conversation.ask("one")
    for question in ("two", "three"):
        expected = fresh_answer(conversation, question)
        fed.clear()
        answer = conversation.ask(question)
        assert answer.text == expected
        assert first.prompt_tokens <= answer.reused_tokens == answer.prompt_tokens - fed[0]
    assert answer.reused_tokens < answer.prompt_tokens - 20


def test_an_edited_history_is_noticed(random_model, tokenizer, either):
    conversation = Conversation(random_model, tokenizer, max_new_tokens=10, system="Be brief.")
    conversation.ask("one")
    conversation.messages[1]["content"] = "other"
    expected = fresh_answer(conversation, "two")
    answer = conversation.ask("two")
    assert answer.text == expected
    assert 0 < answer.reused_tokens < 20  # the system message
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.ask("one").reused_tokens == 0


def test_long_conversations_lose_their_oldest_turns(tokenizer, lade_on):
    model = tiny_llama(vocab_size=4096, max_position_embeddings=128)
    notes = []
    conversation = Conversation(model, tokenizer, max_new_tokens=40, system="Be brief.", note=notes.append)
    for number in range(4):
        conversation.ask(f"question {number}")
        assert len(conversation._cached_ids) < 128
    assert notes
    assert all("oldest" in note for note in notes)
    kept = [message["content"] for message in conversation.messages]
    assert kept[0] == "Be brief."
    assert "question 3" in kept
    assert "question 0" not in kept
    before = list(conversation.messages)
    with pytest.raises(DoesNotFit, match="room for 88"):
        conversation.ask("why " * 100)
    assert conversation.messages == before
    with pytest.raises(ValueError, match="max_new_tokens must be below the model's 128 positions, got 128"):
        Conversation(model, tokenizer, max_new_tokens=128)


class Stopper:
    """Writes like a terminal, and presses Ctrl-C at the n-th piece of text, once or more."""

    def __init__(self, at: int, times: int = 1):
        self.pieces, self.at, self.times = [], at, times

    def __call__(self, text):
        self.pieces.append(text)
        if len(self.pieces) == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    @property
    def text(self):
        return "".join(self.pieces)


def test_ctrl_c_ends_the_answer(bundled, tokenizer, either):
    question = "What does os.path.join do?"
    write = Stopper(at=5)
    terminal = Terminal(Conversation(bundled, tokenizer, max_new_tokens=30), write)
    handler = signal.getsignal(signal.SIGINT)
    full = fresh_answer(terminal.conversation, question)
    answer = terminal.answer(question)
    assert (answer.fallback_reason is None) == either
    assert "[stopped]" in write.text
    assert 5 <= answer.new_tokens < 10
    assert full.startswith(answer.text)
    assert len(answer.text) > 0
    assert signal.getsignal(signal.SIGINT) is handler
    # The half answer is part of the conversation, and what comes next is what plain generate() makes of that.
    assert terminal.conversation.messages[-1]["content"] == answer.text
    expected = fresh_answer(terminal.conversation, "And then?")
    following = terminal.answer("And then?")
    assert following.text == expected
    assert following.reused_tokens > 15


def test_second_ctrl_c_takes_the_question_back(bundled, tokenizer, either):
    terminal = Terminal(Conversation(bundled, tokenizer, max_new_tokens=30), lambda text: None)
    terminal.answer("What does os.path.join do?")
    messages, cached = list(terminal.conversation.messages), len(terminal.conversation._cached_ids)
    terminal.write = Stopper(at=3, times=2)
    assert terminal.answer("What are the arguments of shutil.copytree?") is None
    assert "the question is forgotten" in terminal.write.text
    assert terminal.conversation.messages == messages
    assert len(terminal.conversation._cached_ids) == cached
    expected = fresh_answer(terminal.conversation, "And of os.walk?")
    answer = terminal.answer("And of os.walk?")
    assert (answer.text, answer.reused_tokens) == (expected, cached)


def test_figures_of_a_repeated_question_say_so(random_model, tokenizer, lade_on, monkeypatch):
    said = "remembers an answer to the same question"
    conversation = Conversation(random_model, tokenizer, max_new_tokens=8)

    def ask(question):
        conversation.reset()
        return said in summary(conversation.ask(question))

    assert [ask(question) for question in ("Hello", "Hi", "Hello", "Hi")] == [False, False, True, True]
    monkeypatch.setenv("USE_LADE", "0")  # neither learns nor knows
    assert [ask(question) for question in ("Hello", "New", "New")] == [False] * 3
    monkeypatch.setenv("USE_LADE", "1")
    assert [ask("New"), ask("New")] == [False, True]
    lade.config_lade(SHARE=0)
    assert not ask("Hello")


def test_fallback_template(random_model, bundled, lade_on):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = None
    conversation = Conversation(random_model, tokenizer, max_new_tokens=10)
    ids = conversation._ids_of([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(ids) == "<s>User: Hello\nAssistant:"
    assert conversation._text_of(tokenizer(" fine\nUser: and you?")["input_ids"]) == "fine"
    first = conversation.ask("Hello")
    assert first.fallback_reason is None
    assert conversation.ask("Again").reused_tokens >= first.prompt_tokens


def stream(tokenizer, tokens, stop_string=None, guessed=()):
    pieces = []
    streamer = AnswerStreamer(tokenizer, pieces.append, color=bool(guessed), stop_string=stop_string)
    streamer.put(torch.tensor([[1, 5, 9]]))  # the prompt
    counts = []
    for index, token in enumerate(tokens):
        (streamer.put_guess if index in guessed else streamer.put)(torch.tensor([token]))
        counts.append(len(pieces))
    streamer.end()
    return pieces, counts


def test_every_token_is_shown_when_it_comes(tokenizer):
    tokens = tokenizer("def main(): return [os.path.join(a, b) for a in 'xyz']")["input_ids"]
    pieces, counts = stream(tokenizer, tokens)
    assert counts == list(range(1, len(tokens) + 1))
    assert pieces == [tokenizer.decode([token]) for token in tokens]


def test_the_stream_is_the_text(tokenizer):
    texts = [
        "naïve Überraschung \u65e5\u672c\u8a9e",
        "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467!",
        "a\n\n  b\tc",
        "x" * 50,
    ]
    draw = random.Random(0)
    cases = [tokenizer(text)["input_ids"] for text in texts]
    cases += [[draw.randrange(4096) for _ in range(30)] for _ in range(200)]  # broken bytes and special tokens, too
    for tokens in cases:
        pieces, _ = stream(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True).lstrip()


def test_guesses_are_coloured(tokenizer):
    tokens = tokenizer("one two three")["input_ids"]
    pieces, _ = stream(tokenizer, tokens, guessed={1})
    assert pieces[1] == GUESSED + tokenizer.decode([tokens[1]]) + ORDINARY
    assert GUESSED not in "".join(pieces[:1] + pieces[2:])


@pytest.mark.parametrize("text", ["Yes.\nUser: more", "Yes.\nUse it", "Yes.\n", "\nUser:", "a\nUser\nUser:b"])
def test_the_stop_string_is_not_shown(tokenizer, text):
    pieces, _ = stream(tokenizer, tokenizer(text)["input_ids"], FALLBACK_STOP)
    assert "".join(pieces) == text.split(FALLBACK_STOP)[0].lstrip()
    assert overlap("abc\nUs", FALLBACK_STOP) == 3
    assert overlap(FALLBACK_STOP, FALLBACK_STOP) == 0


def test_models_that_remember_more_than_keys():
    def model(stateful=False, **settings):
        config = SimpleNamespace(**settings)
        return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config), _is_stateful=stateful)

    assert keeps_keys_only(model())
    assert keeps_keys_only(model(layer_types=["full_attention", "sliding_attention"]))
    assert not keeps_keys_only(model(layer_types=["full_attention", "linear_attention"]))
    assert not keeps_keys_only(model(stateful=True))


def test_one_question_without_chat(capsys, lade_on, monkeypatch):
    monkeypatch.setenv("COLOR_PRINT", "1")
    assert chatbot(["--dtype", "float32", "--debug", "--temperature", "0", "--window", "3"], "chatbot.py") == 0
    out = capsys.readouterr().out
    assert "shutil.copytree" in out.replace(GUESSED, "").replace(ORDINARY, "")
    assert GUESSED in out
    assert float(re.search(r"([\d.]+) tokens per step \(lookahead\)", out)[1]) > 1
    assert lade.current_config().window_size == 3


def test_arguments_are_checked(capsys, lade_on):
    with pytest.raises(SystemExit):
        chatbot(["--level", "1"], "chatbot.py")
    assert "LEVEL must be an integer from 2 to 64, got 1" in capsys.readouterr().err
    assert chatbot(["--max_new_tokens", "5000"], "chatbot.py") == 2
    assert "2048 positions" in capsys.readouterr().err


class Child:
    """A program behind a pseudo-terminal, read until something has appeared."""

    def __init__(self, *command: str, **environment: str):
        import pty

        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what it runs in the background ignore it
            os.execvpe(command[0], command, {**os.environ, **environment})
        self.seen, self.is_running = "", True

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def press_until(self, key: str, pattern: str) -> str:
        """Press a key until the pattern appears: Ctrl-C is lost where it comes just before readline listens."""
        for _ in range(300):
            self.type(key)
            try:
                return self.read_until(pattern, seconds=1)
            except AssertionError:
                self.type(" ")  # wakes a readline that waits for a key and not for signals
                time.sleep(0.1)
        return self.read_until(pattern, seconds=1)

    def read_until(self, pattern: str, seconds: float = 300) -> str:
        """Everything up to the end of what matches, which is then taken as read."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not appear in {self.seen!r}"
            try:
                data = os.read(self.terminal, 4096)
            except OSError:  # Linux says so at the end
                data = b""
            assert data, f"the program ended before {pattern!r} appeared: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.terminal)
        self.is_running = False
        return os.waitstatus_to_exitcode(status)


# Runs a program whose first answer does not go on after 200 tokens until it is stopped.
ENDLESS = """
import runpy, sys, time
from lade.commands.chat.interrupt import StopOnInterrupt

calls, is_over = [], StopOnInterrupt.__call__

def held(self, *arguments, **named):
    calls.append(len(calls))
    while len(calls) == 200 and not self.is_set:
        time.sleep(0.01)
    return is_over(self, *arguments, **named)

StopOnInterrupt.__call__ = held
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_at_a_terminal(tmp_path):
    """One process: commands, streaming, Ctrl-C in an answer and at the prompt, a second turn, leaving."""
    # On a busy machine plain steps may be what pays, and no guess be seen.
    settings = tmp_path / "settings.json"
    settings.write_text('{"ADAPTIVE": 0, "MAX_BLOCK": 4}')
    script = str(ROOT / "applications" / "chatbot.py")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Child(
        *(sys.executable, "-c", ENDLESS, script, "--chat", "--debug", "--color"),
        *("--max_new_tokens=1800", "--quant=8", "--use_ds"),
        USE_LADE="1",
        LADE_CONFIG=str(settings),
        PYTHONPATH=paths,
        TERM="dumb",
    ) as child:
        intro = child.read_until("You: ")
        assert "--quant is ignored" in intro
        assert "--use_ds is ignored" in intro
        assert "lookahead decoding is on (a tree, up to 4 tokens a step)" in intro

        child.type("/help\n")
        assert "/reset" in child.read_until("You: ")

        # This answer does not end by itself: what is seen of it has been streamed.
        child.type("What are the arguments of shutil.copytree?\n")
        child.read_until(re.escape(GUESSED) + r"[^\033]+")
        child.type("\x03")
        stopped = child.read_until("You: ")
        assert "[stopped]" in stopped
        assert int(re.search(r"\[(\d+) tokens in", stopped)[1]) <= 200

        child.type("half a line")
        # Ctrl-C throws away what the terminal holds: readline, told of input that is then gone, would wait for a key.
        child.read_until("half a line")
        child.press_until("\x03", "You: ")
        child.type("What does json.loads do?\n")
        second = child.read_until(r"tokens per step \(lookahead\).*You: ")
        prompt, reused = map(int, re.search(r"prompt of (\d+) tokens, (\d+) of them", second).groups())
        first_prompt = int(re.search(r"prompt of (\d+) tokens", stopped)[1])
        assert first_prompt <= reused
        assert prompt - reused < 40

        child.type("/lade off\n")
        assert "off" in child.read_until("You: ")
        child.type("What does os.path.join do?\n")
        assert "1.00 tokens per step (plain: " in child.read_until("from the cache.*You: ")
        child.type("/stats\n")
        assert "all 3 answers" in child.read_until("You: ")
        child.type("/nonsense\n")
        assert "unknown command /nonsense" in child.read_until("You: ")
        child.type("/reset\n")
        assert "a new conversation" in child.read_until("You: ")
        child.type("/quit\n")
        assert child.wait() == 0
