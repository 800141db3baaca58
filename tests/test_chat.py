"""The chatbot: what it shows and when, what it remembers and recomputes, and that Ctrl-C leaves both in order."""

import json
import random
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from support import BUNDLED, ROOT, generate_plain, python, tiny_llama
from support.processes import AtTerminal
from transformers import AutoModelForCausalLM

import lade
from lade import commands
from lade.commands.chat import chatbot
from lade.commands.chat.conversation import Conversation, DoesNotFit, keeps_keys_only
from lade.commands.chat.streaming import GUESSED, ORDINARY, AnswerStreamer
from lade.commands.chat.terminal import Terminal, line_reader
from lade.common import notices
from lade.models import foreign


@pytest.fixture(scope="module")
def bundled():
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.fixture(params=["1", "0"], ids=["lade", "plain"])
def either(request, monkeypatch, lade_on):
    monkeypatch.setenv("USE_LADE", request.param)
    return request.param == "1"


def fresh_tokens(conversation: Conversation, question: str) -> list[int]:
    """What plain generate() says without any cache from before."""
    ids = conversation._ids_of([*conversation.messages, {"role": "user", "content": question}])
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    output = generate_plain(conversation.model, inputs, max_new_tokens=conversation.max_new_tokens)
    return output[0, len(ids) :].tolist()


def fresh_answer(conversation: Conversation, question: str) -> str:
    return conversation.tokenizer.decode(fresh_tokens(conversation, question), skip_special_tokens=True).strip()


def check_answer(talk: Conversation | Terminal, question: str, fed: list | None = None):
    """Its answer, which is the fresh one. fed: then begins with this answer's forwards."""
    conversation = talk if isinstance(talk, Conversation) else talk.conversation
    expected = fresh_answer(conversation, question)
    if fed is not None:
        fed.clear()
    answer = talk.ask(question) if talk is conversation else talk.answer(question)
    assert answer.text == expected
    return answer


@pytest.fixture
def fed(request, monkeypatch):
    """Tokens in each forward of the models under test."""
    monkeypatch.setattr(foreign, "AUTHORS", foreign.AUTHORS | {__name__})  # no trials, whose tokens would count
    counts = []
    parts = [request.getfixturevalue(name).get_input_embeddings() for name in ("bundled", "random_model")]
    hooks = [part.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1])) for part in parts]
    yield counts
    for hook in hooks:
        hook.remove()


def test_later_turns_feed_only_what_is_new(bundled, tokenizer, either, fed):
    conversation = Conversation(bundled, tokenizer, max_new_tokens=16)
    conversation.ask("What does os.path.join do?")
    for question in ("What are the arguments of shutil.copytree?", "And of os.walk?"):
        cached = len(conversation._cached_ids)
        answer = check_answer(conversation, question, fed)
        assert (lade.last_stats().fallback_reason is None) == either
        assert answer.reused_tokens == cached
        assert fed[0] == answer.prompt_tokens - cached < answer.prompt_tokens / 2
    assert conversation.num_turns == 3
    assert max(fed[1:]) > 1 if either else fed[1:] == [1] * (answer.new_tokens - 1)


def test_what_is_read_as_other_tokens_is_recomputed(random_model, tokenizer, lade_on, fed):
    conversation = Conversation(random_model, tokenizer, max_new_tokens=20)
    first = conversation.ask("one")
    for question in ("two", "three"):
        answer = check_answer(conversation, question, fed)
        assert first.prompt_tokens <= answer.reused_tokens == answer.prompt_tokens - fed[0]
    assert answer.reused_tokens < answer.prompt_tokens - 20


def test_long_conversations_lose_their_oldest_turns(tokenizer, lade_on):
    model = tiny_llama(vocab_size=4096, max_position_embeddings=128)
    notes = []
    conversation = Conversation(model, tokenizer, max_new_tokens=40, system="Be brief.")
    conversation.note = notes.append
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


def test_ctrl_c_ends_the_answer(bundled, tokenizer, either):
    question, shown = "What does os.path.join do?", []

    def write(text):
        """As a terminal; presses Ctrl-C at the fifth piece of text."""
        shown.append(text)
        if len(shown) == 5:
            signal.raise_signal(signal.SIGINT)

    terminal = Terminal(Conversation(bundled, tokenizer, max_new_tokens=16), write)
    full = fresh_answer(terminal.conversation, question)
    assert terminal.answer(question) is None
    assert (lade.last_stats().fallback_reason is None) == either
    assert shown[-1] == "[stopped]\n"
    # The half answer is part of the conversation, and what comes next is what plain generate() makes of that.
    text = "".join(shown[:5]).strip()
    assert terminal.conversation.messages[-1]["content"] == text
    assert full.startswith(text)
    assert len(full) > len(text) > 0
    check_answer(terminal, "And then?")


def test_ctrl_c_before_the_answer_takes_the_question_back(bundled, tokenizer, lade_on):
    shown = []
    terminal = Terminal(Conversation(bundled, tokenizer, max_new_tokens=16), shown.append)
    terminal.answer("What does os.path.join do?")
    messages, cached = list(terminal.conversation.messages), len(terminal.conversation._cached_ids)

    def press(module, args):
        signal.raise_signal(signal.SIGINT)

    with bundled.get_input_embeddings().register_forward_pre_hook(lade.allow_hook(press)):
        assert terminal.answer("What are the arguments of shutil.copytree?") is None
    assert "the question is forgotten" in shown[-1]
    assert terminal.conversation.messages == messages
    assert len(terminal.conversation._cached_ids) == cached
    assert check_answer(terminal, "And of os.walk?").reused_tokens == cached

    messages = list(terminal.conversation.messages)
    with bundled.get_input_embeddings().register_forward_pre_hook(lade.allow_hook(press)):
        terminal.take("/retry")
    assert terminal.conversation.messages == messages  # the answer that was there


def test_a_tokenizer_without_a_template_is_refused(random_model, tokenizer, lade_on, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        Conversation(random_model, tokenizer)


def stream(tokenizer, tokens, guessed=()):
    pieces = []
    streamer = AnswerStreamer(tokenizer, pieces.append, color=bool(guessed))
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
    texts = ["naïve Überraschung \u65e5\u672c\u8a9e", "a\n\n  b\tc", "x" * 50]
    texts.append("\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467!")
    draw, cases = random.Random(0), [tokenizer(text)["input_ids"] for text in texts]
    cases += [[draw.randrange(4096) for _ in range(30)] for _ in range(200)]  # broken bytes and special tokens, too
    for tokens in cases:
        pieces, _ = stream(tokenizer, tokens)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join(pieces) == re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text).lstrip()


def test_guesses_are_coloured(tokenizer):
    tokens = tokenizer("one two three")["input_ids"]
    pieces, _ = stream(tokenizer, tokens, guessed={1})
    assert pieces[1] == GUESSED + tokenizer.decode([tokens[1]]) + ORDINARY
    assert GUESSED not in "".join(pieces[:1] + pieces[2:])


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
    arguments = ["--dtype", "float32", "--debug", "--temperature", "0", "--window", "3"]
    assert chatbot([*arguments, "--question", "What does os.getcwd do?", "--max_new_tokens", "8"], "chatbot.py") == 0
    out = capsys.readouterr().out
    assert out.startswith("What does os.getcwd do?\n\n")
    assert "\033" not in out  # no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert chatbot(arguments, "chatbot.py") == 0
    out = capsys.readouterr().out
    assert "shutil.copytree" in out.replace(GUESSED, "").replace(ORDINARY, "")
    assert GUESSED in out
    assert float(re.search(r"([\d.]+) tokens per pass", out)[1]) > 1
    assert lade.current_config().window_size == 3


def test_arguments_are_checked(capsys, lade_on):
    with pytest.raises(SystemExit):
        chatbot(["--level", "1"], "chatbot.py")
    assert "LEVEL must be an integer from 2 to 64, got 1" in capsys.readouterr().err
    assert chatbot(["--max_new_tokens", "5000"], "chatbot.py") == 2
    assert "2048 positions" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        chatbot(["--temperature", "0", "--top_p", "0.5"], "chatbot.py")
    assert "--top_p must come with sampling" in capsys.readouterr().err


def test_a_bad_model_path_is_a_sentence(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    (tmp_path / "empty").mkdir()
    for path, reason in (
        ("./not/here", "found no folder './not/here'"),
        (str(tmp_path / "empty"), "found no config.json"),
        (str(tmp_path), "cannot be loaded"),
    ):
        with pytest.raises(SystemExit) as end:
            chatbot(["--model_path", path], "chatbot.py")
        assert end.value.code == 2
        err = capsys.readouterr().err.splitlines()
        assert reason in err[-1]
        assert len(err[-1]) < 300
        assert "Traceback" not in "".join(err)


def test_a_question_without_room_is_answered_by_lade_alone(tokenizer, capfd, lade_on):
    shown = []
    model = tiny_llama(vocab_size=4096, max_position_embeddings=128)
    Terminal(Conversation(model, tokenizer, max_new_tokens=40), shown.append).answer("why " * 2000)
    assert "".join(shown).startswith("[not asked: the question takes")
    assert capfd.readouterr().err == ""
    assert tokenizer.model_max_length < 10_000


# Commands


@pytest.fixture
def terminal(random_model, tokenizer, lade_on):
    """shown: what it has written."""
    shown = []
    found = Terminal(Conversation(random_model, tokenizer, max_new_tokens=6), shown.append)
    found.shown = shown
    return found


def said(terminal, message):
    terminal.shown.clear()
    terminal.take(message)
    return "".join(terminal.shown)


def roles(terminal):
    return [message["role"] for message in terminal.conversation.messages]


def test_undo_and_retry(terminal):
    assert "nothing was asked yet" in said(terminal, "/undo")
    assert "nothing was asked yet" in said(terminal, "/retry")
    terminal.answer("one")
    first = list(terminal.conversation.messages)
    second = terminal.answer("two")
    assert "taken back: two" in said(terminal, "/undo")
    assert terminal.conversation.messages == first
    assert terminal.answer("two").text == second.text
    said(terminal, "/retry")
    assert terminal.conversation.messages[-1]["content"] == second.text  # greedy
    said(terminal, "/set temperature 2")
    texts = {said(terminal, "/retry") for _ in range(3)}
    assert len(texts) > 1
    assert roles(terminal) == ["user", "assistant"] * 2
    assert len(terminal.conversation._cached_ids) > 20  # the cache stays


def test_the_system_message(terminal):
    terminal.answer("one")
    assert "no system message" in said(terminal, "/system")
    assert "system message: Be brief." in said(terminal, "/system Be brief.")
    assert roles(terminal) == ["system", "user", "assistant"]
    check_answer(terminal, "two")
    said(terminal, "/clear")
    assert terminal.conversation.messages == [{"role": "system", "content": "Be brief."}]
    said(terminal, "/system -")
    assert terminal.conversation.messages == []


def test_settings_are_set(terminal):
    said(terminal, "/set temperature 0.5")
    assert terminal.choice == {"do_sample": True, "temperature": 0.5}
    said(terminal, "/set top_p 0.9")
    assert "top_k 7" in said(terminal, "/set top_k 7")
    assert terminal.choice == {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    said(terminal, "/set temperature 0")
    assert terminal.choice == {"do_sample": False}
    said(terminal, "/set max_new_tokens 3")
    assert terminal.answer("one").new_tokens == 3
    said(terminal, "/set seed 11")
    assert torch.initial_seed() == 11
    assert "max_new_tokens 3, seed 11, do_sample False" in said(terminal, "/set")
    for words, message in (
        ("temperature -1", "temperature must be 0, which is greedy, or above, got '-1'"),
        ("top_p 2", "top_p must be above 0 and at most 1, got '2'"),
        ("top_k x", "top_k must be an integer of 1 or more, got 'x'"),
        ("max_new_tokens 9999", "max_new_tokens must be below the model's 512 positions, got 9999"),
        ("weather fine", "/set must be followed by one of temperature, "),
    ):
        assert message in said(terminal, "/set " + words)
    assert terminal.conversation.max_new_tokens == 3


def test_saved_and_loaded(terminal, tmp_path):
    file = tmp_path / "talk.json"
    said(terminal, "/system Be brief.")
    terminal.answer("one")
    messages = list(terminal.conversation.messages)
    assert "1 turn saved" in said(terminal, f"/save {file}")
    assert json.loads(file.read_text())["messages"] == messages
    said(terminal, "/system -")
    said(terminal, "/reset")
    assert "1 turn loaded" in said(terminal, f"/load {file}")
    assert terminal.conversation.messages == messages
    assert terminal.conversation.system == "Be brief."
    check_answer(terminal, "two")
    messages = list(terminal.conversation.messages)
    for content in ("x", "[]", '{"messages": [{"role": "assistant", "content": "a"}]}', '{"messages": [1]}'):
        file.write_text(content)
        assert "holds no conversation" in said(terminal, f"/load {file}")
    assert "cannot be read" in said(terminal, f"/load {tmp_path / 'none'}")
    assert "cannot be written" in said(terminal, f"/save {tmp_path / 'no' / 'folder'}")
    assert "/save FILE cannot be written" in said(terminal, "/save")
    assert "/load FILE cannot be read" in said(terminal, "/load")
    assert terminal.conversation.messages == messages


def test_what_is_a_command(terminal):
    assert "unknown command /usr/bin" in said(terminal, "/usr/bin is what?")
    assert said(terminal, "/usr/bin is what?\nAnd /etc?")  # pasted lines are a message
    assert terminal.conversation.messages[0]["content"] == "/usr/bin is what?\nAnd /etc?"
    assert "/system TEXT" in said(terminal, "/help")
    assert terminal.take("/bye")
    assert terminal.take("/exit")


# Runs a program whose first answer does not go on after 60 pieces of text until it is stopped.
ENDLESS = """
import runpy, sys, time
from lade.commands.chat.streaming import AnswerStreamer

calls, show = [], AnswerStreamer._show

def held(self, *arguments, **named):
    calls.append(len(calls))
    while len(calls) == 60:
        time.sleep(0.01)
    return show(self, *arguments, **named)

AnswerStreamer._show = held
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_at_a_terminal(tmp_path):
    """One process: streaming, Ctrl-C in an answer and at the prompt, leaving."""
    # On a busy machine plain steps may be what pays, and no guess be seen.
    settings = tmp_path / "settings.json"
    settings.write_text('{"ADAPTIVE": 0, "MAX_BLOCK": 4}')
    script = str(ROOT / "applications" / "chatbot.py")
    arguments = [script, "--chat", "--debug", "--color", "--max_new_tokens=1800", "--quant=8", "--use_ds"]
    program = ENDLESS.format(arguments=arguments)
    with AtTerminal(program, USE_LADE="1", LADE_CONFIG=str(settings), TERM="dumb") as child:
        intro = child.read_until("You: ")
        assert "--quant is ignored" in intro
        assert "--use_ds is ignored" in intro
        assert "lookahead decoding is on (a tree, up to 4 tokens a step)" in intro

        # This answer does not end by itself: what is seen of it has been streamed.
        child.type("What are the arguments of shutil.copytree?\n")
        child.read_until(re.escape(GUESSED) + r"[^\033]+")
        child.type("\x03")
        child.read_until(r"\[stopped\].*You: ")

        child.type("half a line")
        # Ctrl-C throws away what the terminal holds: readline, told of input that is then gone, would wait for a key.
        child.read_until("half a line")
        child.press_until("\x03", "You: ")
        child.type("/quit\n")
        assert child.wait() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_messages_of_several_lines(tmp_path):
    """With prompt_toolkit: pasted lines, Alt-Enter, and a message of an earlier start, each of which is one message."""
    pytest.importorskip("prompt_toolkit")
    saved = tmp_path / "saved.json"
    arguments = ["lade", "chat", "--max_new_tokens", "4"]
    program = f"import runpy; sys.argv = {arguments}; runpy.run_module('lade', run_name='__main__')"
    environment = {"USE_LADE": "1", "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    with AtTerminal(program, **environment) as child:
        child.read_until("Alt-Enter.*You:")
        for keys in ("\033[200~pasted\nin two lines\033[201~\r", "typed\033\rin two\r"):
            child.type(keys)
            child.read_until("cut off after 4 tokens.*You:")
        child.type("\x04")
        assert child.wait() == 0
    with AtTerminal(program, **environment) as child:
        child.read_until("You:")
        child.type("\033[A\r")
        child.read_until("cut off.*You:")
        child.type(f"/save {saved}\r")
        child.read_until("1 turn saved.*You:")
        child.type("/quit\r")
        assert child.wait() == 0
    assert json.loads(saved.read_text())["messages"][0]["content"] == "typed\nin two"
    history = tmp_path / "lade" / "chat_history"
    assert "pasted" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_without_a_line_editor(monkeypatch):
    """One line says what would help; where the input is no terminal, nothing is said."""
    notes = []
    assert line_reader(notes.append) is input
    assert notes == []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    assert line_reader(notes.append) is input
    assert len(notes) == 1
    assert "pip install prompt_toolkit" in notes[0]


def test_what_the_token_limit_cuts_is_said(terminal, monkeypatch):
    assert "[cut off after 6 tokens; /set max_new_tokens allows more]" in said(terminal, "one")
    said(terminal, "/undo")
    last = fresh_tokens(terminal.conversation, "one")[-1]  # the same answer, whose last token now ends it
    monkeypatch.setattr(terminal.conversation.model.generation_config, "eos_token_id", [last])
    assert "cut off" not in said(terminal, "one")


def test_notices_come_after_the_answer(terminal, monkeypatch):
    """They would stand in the middle of it."""
    ask = terminal.conversation.ask

    def packs(*arguments, **named):
        notices.notify("packing %d weights", 5)
        return ask(*arguments, **named)

    plain = said(terminal, "why")
    monkeypatch.setattr(terminal.conversation, "ask", packs)
    assert said(terminal, "/retry") == f"{plain}[lade: packing 5 weights]\n"
    assert not notices.logger.handlers


def test_the_command_line_answers_at_once():
    """In what it imports: torch alone takes longer than a second."""
    code = "import sys; from lade import commands\ntry: commands.main([{!r}, '--help'])\nexcept SystemExit: print(*sys.modules)"
    for name in commands.COMMANDS:
        shown = python("-c", code.format(name)).stdout
        assert "usage: lade " + name in shown
        assert not {"torch", "transformers", "numpy"} & set(shown.splitlines()[-1].split())
