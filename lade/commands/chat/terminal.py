"""The conversation at a terminal: reads lines, shows answers as they come, and knows a few commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lade.commands.chat.conversation import Answer, Conversation, DoesNotFit
from lade.commands.chat.interrupt import StopOnInterrupt
from lade.commands.chat.streaming import AnswerStreamer
from lade.config import current_config, is_enabled

PROMPT = "You: "


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
        """write: shows text at once. choice: arguments of generate() that say how tokens are chosen."""
        self.conversation, self.write = conversation, write
        self.choice, self.color, self.debug = choice or {}, color, debug
        self.answers: list[Answer] = []
        conversation.note = self.note
        self._interrupt = StopOnInterrupt()
        # Command -> what it does with the word behind it, and what /help says. None ends the program.
        self._commands: dict[str, tuple[Callable[[str], None] | None, str]] = {
            "/reset": (self._reset, "forget the conversation and begin a new one"),
            "/stats": (self._stats, "tokens, time and tokens per step of the latest answer and of all"),
            "/lade": (self._lade, "'/lade on' and '/lade off' switch lookahead decoding"),
            "/help": (self._help, "show this list"),
            "/quit": (None, "leave; so does Ctrl-D"),
        }

    def note(self, text: str) -> None:
        self.write(f"[{text}]\n")

    def run(self) -> None:
        """Read and answer lines until /quit or the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and remembers them
        self.note(f"lookahead decoding is {state()}; /help lists the commands, Ctrl-C stops an answer")
        while True:
            try:
                line = input(PROMPT).strip()
            except KeyboardInterrupt:
                self.write("\n")
                continue
            except EOFError:
                self.write("\n")
                return
            if line.startswith("/"):
                if self.obey(line):
                    return
            elif line:
                self.answer(line)

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
        name, _, word = line.partition(" ")
        if name not in self._commands:
            self.note(f"unknown command {name}; there are {', '.join(self._commands)}")
            return False
        action, _ = self._commands[name]
        if action is not None:
            action(word.strip())
        return action is None

    def _reset(self, word: str) -> None:
        self.conversation.reset()
        self.note("a new conversation")

    def _stats(self, word: str) -> None:
        if not self.answers:
            self.note("no answer yet")
            return
        self.note(f"latest answer: {summary(self.answers[-1])}")
        tokens, seconds = sum(a.new_tokens for a in self.answers), sum(a.seconds for a in self.answers)
        self.note(
            f"all {len(self.answers)} answers: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        )
        self.note(f"in the conversation: {self.conversation.num_turns} turns; lookahead decoding is {state()}")

    def _lade(self, word: str) -> None:
        if word in ("on", "off"):
            os.environ["USE_LADE"] = "1" if word == "on" else "0"
        elif word:
            self.note(f"/lade must be followed by on or off, got {word!r}")
            return
        self.note(f"lookahead decoding is {state()}")

    def _help(self, word: str) -> None:
        self.write("".join(f"  {name:<8}{text}\n" for name, (_, text) in self._commands.items()))


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
