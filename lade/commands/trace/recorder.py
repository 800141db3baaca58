"""Records what one `generate()` call did, step by step, as plain data. Knows nothing about pages and terminals.

For every drafter: the tree of guesses, what was accepted, the attention mask, the times, and the window where one ran.
For a drafter that explains its drafts also the source of each guess and the reason for the block's size
(`lade.drafting.Explanation`).
"""

from __future__ import annotations

import time
from typing import Any

import torch

import lade
from lade.commands.detokenize import Detokenizer
from lade.commands.measure import Method, Run, is_looping, run_once, settle
from lade.decoding import Step
from lade.drafting import Explanation, Outcome
from lade.stats import open_stats, tracing


class StepRecorder:
    """Collects the steps of one call with one prompt: `tracing` calls `on_step`. The times are the call's own
    statistics: a hook on the model would keep packed weights and graphs away, and another forward would be traced.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        # Distinct ones: per query its keys as hexadecimal, the first key is the highest bit.
        self.masks: list[list[str]] = []
        self.first_step_began: float | None = None
        self._spent = (0.0, 0.0)  # seconds of all steps so far: forwards, the rest

    def on_step(self, step: Step, outcome: Outcome) -> None:
        """See `lade.stats.tracing`. Only the first row of a batch is looked at."""
        now, stats = time.perf_counter(), open_stats()
        spent = (stats.forward_seconds, stats.draft_seconds + stats.verify_seconds)
        forward, rest = (total - before for total, before in zip(spent, self._spent, strict=True))
        self._spent = spent
        if self.first_step_began is None:
            self.first_step_began = now - forward - rest
        draft, tree = step.draft, step.tree
        path, committed = outcome.accepted[0] or [], outcome.num_committed[0]
        explained = Explanation() if draft.explain is None else draft.explain(0)
        num_nodes = len(tree.tokens[0])
        has_sources = len(explained.sources) == num_nodes  # not where the loop has put another tree in its place
        self.steps.append(
            {
                "root": step.roots[0],
                "window": window_levels(step.roots, draft) if draft.has_window else [],
                "guesses": [] if outcome.choices is None else outcome.choices[0].tolist(),
                "tokens": list(tree.tokens[0]),
                "parents": list(tree.parents[0]),
                "sources": list(explained.sources) if has_sources else [],
                "chances": [round(chance, 4) for chance in explained.chances] if has_sources else [],
                "reason": explained.reason,
                "offers": [[size, round(tokens, 3), round(cost, 3)] for size, tokens, cost in explained.offers],
                "accepted": list(path),
                "committed": outcome.sequences.row(0)[0, -committed:].tolist() if committed else [],
                "mask": self._mask_index(step.layout.offsets_and_visibility(tree)[1][0]),
                "forward": forward,
                "rest": rest,
            }
        )

    def _mask_index(self, visible: torch.Tensor) -> int:
        """visible: [q, q] bool."""
        rows = [f"{int(''.join('01'[cell] for cell in row), 2):x}" for row in visible.tolist()]
        if rows not in self.masks:
            self.masks.append(rows)
        return self.masks.index(rows)


def window_levels(roots: list[int], draft: Any) -> list[list[int]]:
    """The window of the first row by level, the root in its first cell."""
    num_levels, num_columns = draft.window_shape[0] - 1, draft.window_shape[1]
    cells = [roots[0], *draft.window_cells[0].tolist()]
    return [cells[level * num_columns : (level + 1) * num_columns] for level in range(num_levels)]


def warm_up(model: Any, prompt_ids: list[int], **arguments: Any) -> None:
    """Run plain generate() once, and lade until all is prepared, without remembering any text.

    Raises RuntimeError when lookahead did not run.
    """
    ids = torch.tensor([prompt_ids], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # A memory of its own, which is then forgotten; and the traced call draws what it would have drawn without this.
    with lade.Memory().active(), torch.random.fork_rng():
        run_once(model, inputs, Method(), Run(), arguments)
        settle(model, inputs, Method(settings={}), arguments)


def record(model: Any, tokenizer: Any, prompt_ids: list[int], **arguments: Any) -> dict[str, Any]:
    """Run one generation and return its trace as plain data for JSON.

    Raises RuntimeError when lookahead did not run.
    """
    inputs, plain = torch.tensor([prompt_ids], device=model.device), Run()
    mask = torch.ones_like(inputs)
    with torch.random.fork_rng():
        run_once(model, {"input_ids": inputs, "attention_mask": mask}, Method(), plain, arguments)
    recorder = StepRecorder()
    started = time.perf_counter()
    with tracing(recorder.on_step):
        output = model.generate(inputs, attention_mask=mask, **arguments)[0].tolist()
    ended = time.perf_counter()
    found, config = lade.last_stats(), lade.current_config()
    if found is None or found.fallback_reason is not None:
        raise RuntimeError(f"lookahead did not run: {found and found.fallback_reason}")
    new = output[len(prompt_ids) :]
    prefill = (recorder.first_step_began or ended) - started
    seconds = prefill + sum(step["forward"] + step["rest"] for step in recorder.steps)  # without the recorder's own
    pieces = pieces_of(tokenizer, output)
    named = {token for step in recorder.steps for row in step["window"] for token in row} | {*output}
    named |= {token for step in recorder.steps for token in (*step["tokens"], *step["guesses"])}
    return {
        "headline": headline(len(new), len(recorder.steps) + 1),
        "model": str(model.config.name_or_path).rstrip("/").rsplit("/", 1)[-1],
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "version": lade.__version__,
        "mode": config.mode,
        "settings": config.description,
        "speed": speed_line(seconds, plain.seconds[0] * len(new) / len(plain.outputs[0])),
        "seconds": ended - started,
        "prefill": prefill,  # the prompt, and setting the call up
        "tokens_per_step": found.tokens_per_step,
        "looping": is_looping(new),
        "prompt": pieces[: len(prompt_ids)],
        "text": pieces[len(prompt_ids) :],
        "ids": new,
        "names": {str(token): tokenizer.decode([token]) for token in sorted(named)},
        "masks": recorder.masks,
        "steps": recorder.steps,
    }


def headline(num_tokens: int, num_steps: int) -> str:
    """The result in a line; plain generate() takes one forward pass per token, the prompt's included."""
    return f"{num_steps} forward pass{'' if num_steps == 1 else 'es'} instead of {num_tokens}"


def speed_line(seconds: float, plain: float) -> str:
    """A sentence that compares the time with plain generate()'s. plain: its seconds for as many tokens."""
    ratio = plain / seconds
    how = f"{ratio:.2f} times as fast" if ratio >= 1 else f"slower, {ratio:.2f} times its speed"
    return f"It took {seconds:.2f} s, plain generate() {plain:.2f} s: {how} (one run of each)."


def pieces_of(tokenizer: Any, tokens: list[int]) -> list[str]:
    """Each token's part of the text, special tokens included."""
    text = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [text.add(token) for token in tokens]
    if pieces:
        pieces[-1] += text.rest()
    return pieces
