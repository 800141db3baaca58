"""The conversation at a terminal: reads messages, shows answers as they come, and knows some commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lade.commands.chat.conversation import Answer, Conversation, DoesNotFit
from lade.commands.chat.interrupt import StopOnInterrupt
from lade.commands.chat.line_reader import EDIT, LineReader, edited
from lade.commands.chat.streaming import AnswerStreamer
from lade.commands.detokenize import for_terminal
from lade.config import ON_VALUES, current_config, is_enabled

PROMPT = "You: "
# Names that ollama and llama.cpp have for a command -> its name here.
ALIASES = {"/clear": "/reset", "/?": "/help", "/regen": "/retry", "/bye": "/quit", "/exit": "/quit"}
KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-X Ctrl-E opens an editor, Ctrl-C stops an answer, Ctrl-D leaves"


class Terminal:
    """Runs a conversation until the user leaves it."""

    def __init__(
        self,
        conversation: Conversation,
        write: Callable[[str], Any],
        choice: dict[str, Any] | None = None,
        color: bool = False,
        debug: bool = False,
        history: Path | None = None,
    ) -> None:
        """write: shows text at once. choice: arguments of generate() that say how tokens are chosen.

        color: guesses in green, for a terminal only. history: a file of earlier messages, None for none.
        """
        self.conversation, self.write = conversation, write
        self.choice, self.color, self.debug = choice or {}, color, debug
        self.answers: list[Answer] = []
        conversation.note = self.note
        self._interrupt, self._history = StopOnInterrupt(), history
        # Command -> what it does with the words after it, and what /help says. None ends the program.
        self._commands: dict[str, tuple[Callable[[str], None] | None, str]] = {
            "/retry": (self._retry, "answer the latest question once more"),
            "/undo": (self._undo, "take back the latest question and its answer"),
            "/reset": (self._reset, "forget the conversation and begin a new one; also /clear"),
            "/system": (self._system, "'/system TEXT' sets the system message, '/system -' removes it"),
            "/set": (self._set, f"'/set NAME VALUE' changes a setting: {', '.join(SETTINGS)}"),
            "/save": (self._save, "'/save FILE' writes the conversation to a file"),
            "/load": (self._load, "'/load FILE' goes on with one that was saved"),
            EDIT: (self._edit, "write a message of several lines in $VISUAL or $EDITOR"),
            "/stats": (self._stats, "tokens, time and tokens per step of the latest answer and of all"),
            "/lade": (self._lade, "'/lade on' and '/lade off' switch lookahead decoding"),
            "/help": (self._help, "show this list"),
            "/quit": (None, "leave; also /bye, /exit and Ctrl-D"),
        }

    def note(self, text: str) -> None:
        self.write(f"[{text}]\n")

    def run(self) -> None:
        """Read and answer messages until /quit or the end of the input."""
        reader = LineReader(self._history)
        self.note(f"lookahead decoding is {state()}; /help lists the commands, Ctrl-C stops an answer")
        while True:
            try:
                message = reader.read(PROMPT)
            except KeyboardInterrupt:
                self.write("\n")
                continue
            except EOFError:
                self.write("\n")
                return
            if message and self.take(message):
                return

    def take(self, message: str) -> bool:
        """Answer a message, or do what a command says. Returns whether it ends the program.

        What begins with a slash is a command, but for pasted lines that begin with a name that is none.
        """
        name = message.split(maxsplit=1)[0]
        is_known = ALIASES.get(name, name) in self._commands
        if message.startswith("/") and (is_known or "\n" not in message):
            return self.obey(message)
        self.answer(message)
        return False

    def answer(self, question: str) -> Answer | None:
        """Show the model's answer while it is generated; None when there is none."""
        streamer = AnswerStreamer(self.conversation.tokenizer, self.write, self.color, self.conversation.stop_string)
        try:
            with self._interrupt:
                answer = self.conversation.ask(question, streamer, [self._interrupt], **self.choice)
        except DoesNotFit as error:
            self.note(f"not asked: {error}")
            return None
        except KeyboardInterrupt:
            self.write("\n")
            self.note("interrupted; the question is forgotten")
            return None
        self.answers.append(answer)
        self.write("\n")
        if self._interrupt.is_set:
            self.note("stopped")
        if self.debug:
            self.note(summary(answer))
        return answer

    def obey(self, line: str) -> bool:
        """Do what a line that begins with a slash says. Returns whether it ends the program."""
        name, *rest = line.split(maxsplit=1)
        name = ALIASES.get(name, name)
        if name not in self._commands:
            self.note(f"unknown command {for_terminal(name)}; there are {', '.join(self._commands)}")
            return False
        action, _ = self._commands[name]
        if action is not None:
            action(rest[0].strip() if rest else "")
        return action is None

    def _retry(self, words: str) -> None:
        if words:
            self.note(f"/retry takes nothing, got {words!r}")
            return
        before = self.conversation.messages
        question = self.conversation.undo()
        if question is None:
            self.note("nothing was asked yet")
        elif self.answer(question) is None:
            self.conversation.messages = before

    def _undo(self, words: str) -> None:
        question = self.conversation.undo()
        self.note("nothing was asked yet" if question is None else f"taken back: {for_terminal(shortened(question))}")

    def _reset(self, words: str) -> None:
        self.conversation.reset()
        self.note("a new conversation")

    def _system(self, words: str) -> None:
        if words:
            self.conversation.set_system(None if words == "-" else words)
        system = self.conversation.system
        self.note(f"system message: {for_terminal(system)}" if system else "no system message")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if name and name not in SETTINGS:
            self.note(f"/set must be followed by one of {', '.join(SETTINGS)}, got {name!r}")
            return
        if value.strip():
            try:
                SETTINGS[name](self, value.strip())
            except ValueError as error:
                self.note(str(error))
                return
        shown = {
            "temperature": self.choice.get(
                "temperature", 0 if self.choice.get("do_sample") is False else "the model's"
            ),
            "top_p": self.choice.get("top_p", "the model's"),
            "top_k": self.choice.get("top_k", "the model's"),
            "seed": torch.initial_seed(),
            "max_new_tokens": self.conversation.max_new_tokens,
            "color": "on" if self.color else "off",
            "debug": "on" if self.debug else "off",
        }
        self.note(", ".join(f"{key} {value}" for key, value in shown.items() if name in ("", key)))

    def _save(self, words: str) -> None:
        if not words:
            self.note("/save must be followed by the name of a file")
            return
        content = {"model": str(self.conversation.model.config.name_or_path), "messages": self.conversation.messages}
        try:
            Path(words).expanduser().write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.note(f"{words} cannot be written: {error.strerror}")
            return
        self.note(f"{turns(self.conversation)} saved in {words}")

    def _load(self, words: str) -> None:
        if not words:
            self.note("/load must be followed by the name of a file")
            return
        try:
            content = json.loads(Path(words).expanduser().read_text(encoding="utf-8"))
            self.conversation.restore(content["messages"])
        except OSError as error:
            self.note(f"{words} cannot be read: {error.strerror}")
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.note(f"{words} holds no conversation: {error}")
            return
        self.note(f"{turns(self.conversation)} loaded from {words}")

    def _edit(self, words: str) -> None:
        try:
            message = edited(words)
        except OSError as error:
            self.note(f"no editor could be started ({error.strerror}); $VISUAL or $EDITOR names one")
            return
        if message:
            self.write(f"{for_terminal(message)}\n\n")
            self.answer(message)

    def _stats(self, words: str) -> None:
        if not self.answers:
            self.note("no answer yet")
            return
        self.note(f"latest answer: {summary(self.answers[-1])}")
        tokens, seconds = sum(a.new_tokens for a in self.answers), sum(a.seconds for a in self.answers)
        self.note(
            f"all {len(self.answers)} answers: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        )
        self.note(f"in the conversation: {turns(self.conversation)}; lookahead decoding is {state()}")

    def _lade(self, words: str) -> None:
        if words in ("on", "off"):
            os.environ["USE_LADE"] = "1" if words == "on" else "0"
        elif words:
            self.note(f"/lade must be followed by on or off, got {words!r}")
            return
        self.note(f"lookahead decoding is {state()}")

    def _help(self, words: str) -> None:
        self.write("".join(f"  {name:<8} {text}\n" for name, (_, text) in self._commands.items()))
        self.write(f"  {KEYS}\n")


def number(name: str, rule: str, text: str, is_allowed: Callable[[float], bool], kind: type = float) -> Any:
    """A number that /set is given. Raises ValueError naming the setting, the rule and the text."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_allowed(value):
        raise ValueError(f"{name} must be {rule}, got {text!r}")
    return value


def set_temperature(terminal: Terminal, text: str) -> None:
    value = number("temperature", "0, which is greedy, or above", text, lambda value: 0 <= value < float("inf"))
    for name in ("temperature", "do_sample"):
        terminal.choice.pop(name, None)
    terminal.choice |= {"do_sample": True, "temperature": value} if value else {"do_sample": False}
    if not value:
        for name in ("top_p", "top_k"):  # which transformers warns of where nothing is sampled
            terminal.choice.pop(name, None)


def set_top_p(terminal: Terminal, text: str) -> None:
    value = number("top_p", "above 0 and at most 1", text, lambda value: 0 < value <= 1)
    terminal.choice |= {"do_sample": True, "top_p": value}


def set_top_k(terminal: Terminal, text: str) -> None:
    value = number("top_k", "an integer of 1 or more", text, lambda value: value >= 1, int)
    terminal.choice |= {"do_sample": True, "top_k": value}


def set_seed(terminal: Terminal, text: str) -> None:
    torch.manual_seed(number("seed", "an integer of 0 or more", text, lambda value: 0 <= value < 2**63, int))


def set_max_new_tokens(terminal: Terminal, text: str) -> None:
    value = number("max_new_tokens", "an integer of 1 or more", text, lambda value: value >= 1, int)
    terminal.conversation.set_max_new_tokens(value)


def set_flag(name: str) -> Callable[[Terminal, str], None]:
    def change(terminal: Terminal, text: str) -> None:
        if text.lower() not in (*ON_VALUES, "off", "0", "no", "false"):
            raise ValueError(f"{name} must be on or off, got {text!r}")
        setattr(terminal, name, text.lower() in ON_VALUES)

    return change


# What /set changes, and how.
SETTINGS: dict[str, Callable[[Terminal, str], None]] = {
    "temperature": set_temperature,
    "top_p": set_top_p,
    "top_k": set_top_k,
    "seed": set_seed,
    "max_new_tokens": set_max_new_tokens,
    "color": set_flag("color"),
    "debug": set_flag("debug"),
}


def turns(conversation: Conversation) -> str:
    return f"{conversation.num_turns} turn{'' if conversation.num_turns == 1 else 's'}"


def shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 2] + " …"


def state() -> str:
    """Whether lookahead decoding is on, and with what settings."""
    return f"on ({current_config().description})" if is_enabled() else "off (USE_LADE is not 1)"


def summary(answer: Answer) -> str:
    """The figures of one answer in a line."""
    how = f"plain: {answer.fallback_reason}" if answer.fallback_reason else "lookahead"
    if answer.is_repeated and not answer.fallback_reason:
        how += ", which remembers an answer to the same question"
    return (
        f"{answer.new_tokens} tokens in {answer.seconds:.2f} s, {answer.new_tokens / answer.seconds:.1f} tokens/s, "
        f"{answer.tokens_per_step:.2f} tokens per step ({how}); "
        f"prompt of {answer.prompt_tokens} tokens, {answer.reused_tokens} of them from the cache"
    )
