"""The conversation at a terminal: reads messages, shows answers as they come, and knows some commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

import lade
from lade.commands.chat.conversation import Answer, Conversation, DoesNotFit
from lade.commands.chat.streaming import AnswerStreamer
from lade.commands.detokenize import for_terminal
from lade.common.notices import logger
from lade.switch import current_config, is_enabled

PROMPT = "You: "
ALIASES = {"/clear": "/reset", "/bye": "/quit", "/exit": "/quit"}  # of ollama and llama.cpp
# What /set changes -> its type, the rule, and the check.
SETTINGS: dict[str, tuple[type, str, Callable[[float], bool]]] = {
    "temperature": (float, "0, which is greedy, or above", lambda value: 0 <= value < float("inf")),
    "top_p": (float, "above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": (int, "an integer of 1 or more", lambda value: value >= 1),
    "seed": (int, "an integer of 0 or more", lambda value: 0 <= value < 2**63),
    "max_new_tokens": (int, "an integer of 1 or more", lambda value: value >= 1),
}


def line_reader(note: Callable[[str], None], no_history: bool = False) -> Callable[[str], str]:
    """Reads a message: prompt_toolkit's line editor at a terminal where it is installed, else input()."""
    if not sys.stdin.isatty():
        return input
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        note("pip install prompt_toolkit for a history, pasted lines and messages of several lines")
        return input
    keys, history = KeyBindings(), None
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    if not no_history:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "lade", "chat_history")
        with suppress(OSError):  # the chat works without a history
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            history = FileHistory(path)
    note("Enter sends, Alt-Enter begins a new line")
    reader: Callable[[str], str] = PromptSession(history=history, key_bindings=keys, multiline=True).prompt
    return reader


class Terminal:
    """Runs a conversation until the user leaves it."""

    def __init__(
        self,
        conversation: Conversation,
        write: Callable[[str], Any],
        choice: dict[str, Any] | None = None,
        color: bool = False,
        debug: bool = False,
    ) -> None:
        """write: shows text at once. choice: arguments of generate() that say how tokens are chosen.

        color: guesses in green, for a terminal only. debug: figures after each answer.
        """
        self.conversation, self.write = conversation, write
        self.choice, self.color, self.debug = choice or {}, color, debug
        conversation.note = self.note
        # Command -> what it does with the words after it, and what /help says. None ends the program.
        self._commands: dict[str, tuple[Callable[[str], None] | None, str]] = {
            "/retry": (self._retry, "answer the latest question once more"),
            "/undo": (self._undo, "take back the latest question and its answer"),
            "/reset": (self._reset, "forget the conversation and begin a new one"),
            "/system": (self._system, "'/system TEXT' sets the system message, '/system -' removes it"),
            "/set": (self._set, f"'/set NAME VALUE' changes one of {', '.join(SETTINGS)}"),
            "/save": (self._save, "'/save FILE' writes the conversation to a file"),
            "/load": (self._load, "'/load FILE' goes on with one that was saved"),
            "/help": (self._help, "show this list"),
            "/quit": (None, "leave, as Ctrl-D does; Ctrl-C stops an answer"),
        }

    def note(self, text: str) -> None:
        self.write(f"[{text}]\n")

    def run(self, read: Callable[[str], str]) -> None:
        """Read and answer messages until /quit or the end of the input."""
        state = f"on ({current_config().description})" if is_enabled() else "off (USE_LADE is not 1)"
        self.note(f"lookahead decoding is {state}; /help lists the commands, Ctrl-C stops an answer")
        while True:
            try:
                message = read(PROMPT).strip()
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
        name, *rest = message.split(maxsplit=1)
        command = ALIASES.get(name, name)
        if command in self._commands:
            action, _ = self._commands[command]
            if action is not None:
                action(rest[0].strip() if rest else "")
            return action is None
        if message.startswith("/") and "\n" not in message:
            self.note(f"unknown command {for_terminal(name)}; there are {', '.join(self._commands)}")
        else:
            self.answer(message)
        return False

    def answer(self, question: str) -> Answer | None:
        """Show the model's answer as it is generated, then what lade has logged meanwhile; None when there is none."""
        held = BufferingHandler(1000)
        logger.addHandler(held)
        try:
            return self._answer(question)
        finally:
            logger.removeHandler(held)
            for record in held.buffer:
                self.note(record.getMessage())

    def _answer(self, question: str) -> Answer | None:
        conversation = self.conversation
        streamer = AnswerStreamer(conversation.tokenizer, self.write, self.color)
        try:
            answer = conversation.ask(question, streamer, **self.choice)
        except DoesNotFit as error:
            self.note(f"not asked: {error}")
            return None
        except KeyboardInterrupt:
            text = streamer.text.strip()
            self.write("\n")
            self.note("stopped" if text else "stopped; the question is forgotten")
            if text:
                turn = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
                conversation.messages = [*conversation.messages, *turn]
            return None
        self.write("\n")
        if answer.is_cut:
            self.note(f"cut off after {answer.new_tokens} tokens; /set max_new_tokens allows more")
        if self.debug:
            self.note(summary(answer))
        return answer

    def _retry(self, words: str) -> None:
        before, num_turns = self.conversation.messages, self.conversation.num_turns
        question = self.conversation.undo()
        if question is None:
            self.note("nothing was asked yet")
            return
        self.answer(question)
        if self.conversation.num_turns < num_turns:  # not answered
            self.conversation.messages = before

    def _undo(self, words: str) -> None:
        question = self.conversation.undo()
        self.note("nothing was asked yet" if question is None else f"taken back: {for_terminal(question)[:60]}")

    def _reset(self, words: str) -> None:
        self.conversation.undo(everything=True)
        self.note("a new conversation")

    def _system(self, words: str) -> None:
        if words:
            self.conversation.set_system(None if words == "-" else words)
        system = self.conversation.system
        self.note(f"system message: {for_terminal(system)}" if system else "no system message")

    def _set(self, words: str) -> None:
        name, _, text = words.partition(" ")
        try:
            if words:
                self._change(name, text.strip())
        except ValueError as error:
            self.note(str(error))
            return
        shown = {"max_new_tokens": self.conversation.max_new_tokens, "seed": torch.initial_seed()} | self.choice
        self.note(", ".join(f"{key} {value}" for key, value in shown.items()))

    def _change(self, name: str, text: str) -> None:
        """Raises ValueError naming the setting, the rule and the text."""
        if name not in SETTINGS:
            raise ValueError(f"/set must be followed by one of {', '.join(SETTINGS)}, got {name!r}")
        kind, rule, is_allowed = SETTINGS[name]
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_allowed(value):
            raise ValueError(f"{name} must be {rule}, got {text!r}")
        if name == "seed":
            torch.manual_seed(value)
        elif name == "max_new_tokens":
            self.conversation.set_max_new_tokens(value)
        elif name == "temperature" and not value:
            self.choice = {"do_sample": False}  # transformers warns of top_p and top_k where nothing is sampled
        else:
            self.choice |= {"do_sample": True, name: value}

    def _save(self, words: str) -> None:
        content = {"model": str(self.conversation.model.config.name_or_path), "messages": self.conversation.messages}
        try:
            Path(words).expanduser().write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.note(f"{words or '/save FILE'} cannot be written: {error.strerror}")
            return
        self.note(f"{turns(self.conversation)} saved in {words}")

    def _load(self, words: str) -> None:
        try:
            self.conversation.restore(json.loads(Path(words).expanduser().read_text(encoding="utf-8"))["messages"])
        except OSError as error:
            self.note(f"{words or '/load FILE'} cannot be read: {error.strerror}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.note(f"{words} holds no conversation: {error}")
        else:
            self.note(f"{turns(self.conversation)} loaded from {words}")

    def _help(self, words: str) -> None:
        self.write("".join(f"  {name:<8} {text}\n" for name, (_, text) in self._commands.items()))


def turns(conversation: Conversation) -> str:
    return f"{conversation.num_turns} turn{'' if conversation.num_turns == 1 else 's'}"


def summary(answer: Answer) -> str:
    """The figures of one answer in a line."""
    return (
        f"{answer.seconds:.2f} s, {answer.new_tokens / answer.seconds:.1f} tokens/s; {lade.last_stats()}; "
        f"prompt of {answer.prompt_tokens} tokens, {answer.reused_tokens} of them from the cache"
    )
