"""Tokens per step of any drafter by exact replay: plain texts are recorded once, then every drafter guesses at the same
ones.

    python benchmarks/replay.py --model_path MODEL --set code=HumanEval.jsonl --temperatures 0,0.7 --sizes 8,16,64
    python benchmarks/replay.py --modes tree,token-recycling,sam-decoding,logitspec,lookahead --sizes 8,16,64
    python benchmarks/replay.py --records /tmp/records --out new.json --against old.json
    python benchmarks/replay.py --records /tmp/records --without suffix --against all.json

The text of a call does not depend on its guesses, so plain `generate()` gives it once, in float32. A replay hands the
drafter what the loop would: the same requests, committed tokens, and of the model's own logits after every node of its
tree, rejected ones included, the likeliest tokens with their probabilities and the context. They are computed when a
drafter asks for them first, and kept (`--records`), so that later replays need no forward. A drafter is anything
`lade.drafting.register_drafter` knows (`--modes`), among them those of `field.py`. Every step has the whole block
(ADAPTIVE=0): what is compared are guesses, not sizes.

"Cold" begins each prompt with an empty memory, "warm" takes a set's prompts in their order with one. S is tokens over
forward passes, the prompt's included. Ratios are means over prompts, with standard errors, of those whose text is no
loop (`harness.is_looping`). Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

import field
import harness
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import lade
from lade.block.kv_cache import cache_arguments
from lade.block.layout import block_layout
from lade.block.token_tree import TokenTree
from lade.config import LookaheadConfig
from lade.drafting import DraftRequest, Outcome, make_drafter
from lade.drafting import tree as tree_module
from lade.drafting.base import Explanation
from lade.drafting.contexts import ContextTable, projected, projection
from lade.drafting.growth import Growth
from lade.drafting.likeliest import likeliest_on_host
from lade.drafting.memory import Memory
from lade.drafting.text import DraftedText
from lade.drafting.top_k_table import TopKTable
from lade.drafting.tree import TreeDrafter
from lade.switch import current_config
from lade.verification.logits import LogitsSummary
from lade.verification.sequences import TokenSequences
from lade.verification.walk import children_of

NUM_LIKELIEST = 64  # tokens of a row that drafters of the field can see

LEARN_ROWS = TreeDrafter._learn_rows


def learn_accepted(drafter: TreeDrafter, text: DraftedText, path: list[int], rows: Any, projections: Any) -> None:
    """Learn the rows of accepted guesses alone."""
    drawn, kept = text.growth, [0, *(node + 1 for node in path)]
    text.growth = Growth([drawn.tokens[node] for node in path], list(range(-1, len(path) - 1)))
    LEARN_ROWS(drafter, text, list(range(len(path))), rows[kept], projections[kept])
    text.growth = drawn


# Parts of the tree drafter -> class or module, function, and what stands in its place.
PARTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "suffix": (DraftedText, "copies", lambda *_: []),
    "token": (TopKTable, "row", lambda *_: None),
    "context": (ContextTable, "find", lambda *_: None),
    "root-row": (tree_module, "without", lambda *_: None),
    "rejected": (TreeDrafter, "_learn_rows", learn_accepted),
}

Node = tuple[int, tuple[int, ...]]  # tokens of the text that it follows, and guesses after them


class Row(NamedTuple):
    """What is known of the logits after a node.

    likeliest: the NUM_LIKELIEST ids, or all. ids, probabilities: as the tree drafter reads them, at the temperature of
    the recording. projection: of the context.
    """

    likeliest: np.ndarray
    ids: np.ndarray
    probabilities: np.ndarray
    projection: np.ndarray


@dataclass
class Recording:
    """One plain text and what is known of the model around it.

    prompt, tokens: ids. temperature: None for greedy. rows: by node.
    """

    prompt: list[int]
    tokens: list[int]
    temperature: float | None
    arguments: dict[str, Any]
    seed: int = 0
    rows: dict[Node, Row] = dataclass_field(default_factory=dict)

    @property
    def is_looping(self) -> bool:
        return harness.is_looping(self.tokens)


def record(
    model: Any,
    inputs: dict[str, Tensor],
    temperature: float | None,
    max_new_tokens: int,
    seed: int = 0,
    **arguments: Any,
) -> Recording:
    """Plain `generate()` on one prompt. arguments: more of generate()'s, such as top_k."""
    arguments |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with lade.enabled(False):
        tokens, _ = harness.generate_timed(model, inputs, seed, max_new_tokens=max_new_tokens, **arguments)
    return Recording(inputs["input_ids"][0].tolist(), tokens, temperature, arguments, seed)


class Oracle:
    """The model's logits behind any guess at a recorded text."""

    def __init__(self, model: Any, recording: Recording) -> None:
        self.model, self.recording = model, recording
        self.text = recording.prompt + recording.tokens
        self._num_tokens = model.config.get_text_config().vocab_size
        self._head = model.get_output_embeddings()
        self._cache: DynamicCache | None = None
        self.num_forwards = 0

    def rows(self, length: int, tree: TokenTree) -> list[Row]:
        """After the root, the text's token number `length`, and after each node."""
        nodes = self._nodes(length, tree)
        known = self.recording.rows
        missing = [node for node in dict.fromkeys(nodes) if node not in known]
        if missing:
            self._ask(missing)
        return [known[node] for node in nodes]

    def logits(self, rows: list[Row]) -> Tensor:
        """Numbers in the order of the likeliest tokens of some rows, -inf for all other tokens. Returns [1, R, V]."""
        found = torch.full((len(rows), self._num_tokens), -torch.inf)
        ids = torch.from_numpy(np.stack([row.likeliest for row in rows]))
        return found.scatter_(1, ids, -torch.arange(ids.shape[1]).float().expand_as(ids))[None]

    def choices(self, length: int, shape: tuple[int, int], cells: Tensor) -> Tensor:
        """The likeliest tokens behind the last level of a window whose root is the text's token number `length`.

        shape: (N, W). cells: [1, (N-1)*W - 1] ids. Returns [1, W]. Nothing is kept: windows hardly ever occur twice.
        """
        layout = block_layout(*shape, 0, cells.device)
        tokens = torch.cat([torch.tensor([[self.text[length - 1]]]), cells], dim=1)
        visible = torch.cat(
            [torch.arange(len(self.text)).expand(len(layout.visible), -1) < length - 1, layout.visible], 1
        )
        states = self._forward(tokens, layout.offsets[None] + length - 1, visible)
        return self._head(states[layout.logit_rows[1:]]).argmax(-1)[None]

    def _nodes(self, length: int, tree: TokenTree) -> list[Node]:
        nodes: list[Node] = [(length, ())]
        for token, parent in zip(tree.tokens[0], tree.parents[0], strict=True):
            place, guesses = nodes[parent + 1]
            is_text = not guesses and place < len(self.text) and self.text[place] == token
            nodes.append((place + 1, ()) if is_text else (place, (*guesses, token)))
        return nodes

    def _ask(self, missing: list[Node]) -> None:
        """One forward over the nodes, and the guesses before them, behind the whole text; each sees its own past
        only."""
        if self._cache is None:
            self._read_text()
            missing = [node for node in missing if node not in self.recording.rows]
            if not missing:
                return
        length = len(self.text)
        block = dict.fromkeys((place, guesses[: k + 1]) for place, guesses in missing for k in range(len(guesses)))
        index = {node: i for i, node in enumerate(block)}
        visible = torch.zeros(len(block), length + len(block), dtype=torch.bool)
        for (place, guesses), i in index.items():
            visible[i, :place] = True
            visible[i, [length + index[place, guesses[: k + 1]] for k in range(len(guesses))]] = True
        tokens = torch.tensor([[guesses[-1] for _, guesses in block]])
        positions = torch.tensor([[place + len(guesses) - 1 for place, guesses in block]])
        self._keep(list(block), self._forward(tokens, positions, visible))

    @torch.inference_mode()
    def _read_text(self) -> None:
        self._cache = DynamicCache()
        states = self._states(input_ids=torch.tensor([self.text]), **cache_arguments(self._cache))
        first = len(self.recording.prompt) - 1
        self._keep([(place + 1, ()) for place in range(first, len(self.text))], states[first:])

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Behind the whole text. tokens, positions: [1, M]. visible: [M, text + M] bool. Returns [M, d]."""
        if self._cache is None:
            self._read_text()
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        states = self._states(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[None, None],
            **cache_arguments(self._cache),
        )
        self._cache.crop(-tokens.shape[1])
        self.num_forwards += 1
        return states

    def _states(self, **inputs: Any) -> Tensor:
        """What the head is given in a forward over one text, [M, d]."""
        found: list[Tensor] = []
        hook = self.model.base_model.register_forward_hook(lambda module, inputs, out: found.append(out[0][0]))
        try:
            logits = self.model(**inputs, logits_to_keep=1).logits[0]  # `_keep` runs the head over the others
        finally:
            hook.remove()
        if not torch.allclose(self._head(found[0][-1:]), logits, atol=1e-3):
            raise SystemExit(f"the head of {type(self.model).__name__} does more than a product")
        return found[0]

    @torch.inference_mode()
    def _keep(self, nodes: list[Node], states: Tensor) -> None:
        """states: [M, d]."""
        for start in range(0, len(nodes), 64):
            logits = self._head(states[start : start + 64]).float()
            likeliest = logits.topk(min(NUM_LIKELIEST, logits.shape[1])).indices.numpy()
            ids, probabilities = likeliest_on_host(logits, self.recording.temperature or 1.0)
            columns = likeliest, ids, probabilities, projected(logits, projection(logits.device)).numpy()
            for node, *row in zip(nodes[start : start + 64], *columns, strict=True):
                self.recording.rows.setdefault(node, Row(*(numbers.copy() for numbers in row)))


@dataclass
class Replay:
    """What one drafter made of one recording."""

    num_tokens: int
    num_steps: int
    sources: dict[str, list[int]]
    seconds: float  # of propose and learn, of this thread's processor time
    # Source, predicted acceptance after its accepted parent, and whether right.
    guesses: list[tuple[str, float, bool]] = dataclass_field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


def replay(model: Any, recording: Recording, config: LookaheadConfig, memory: Memory | None = None) -> Replay:
    """The steps that the loop would take with the drafter of `config`, with its own (N, W, G) or MAX_BLOCK. ADAPTIVE
    must be 0.
    """
    oracle = Oracle(model, recording)
    prompt, tokens = recording.prompt, recording.tokens
    sequences = TokenSequences(torch.tensor([prompt]))
    with memory.active() if memory is not None else nullcontext():
        drafter = make_drafter(
            DraftRequest(
                config=config,
                model=model,
                num_tokens=oracle._num_tokens,
                prompt_ids=torch.tensor([prompt]),
                key_mask=None,
                temperature=recording.temperature,
            )
        )
    reads_wrong_guesses = getattr(field.FIELD.get(config.mode), "reads_wrong_guesses", True)
    tree, choices, num_steps, num_done, seconds = TokenTree.empty(1), None, 0, 0, 0.0
    guesses: list[tuple[str, float, bool]] = []
    while num_done < len(tokens):
        if num_steps:
            began = time.thread_time()
            draft = drafter.propose(sequences, [False], None)
            seconds += time.thread_time() - began
            tree, explanation = draft.tree, draft.explain(0) if draft.explain else Explanation()
            choices = None
            if draft.has_window:
                choices = oracle.choices(len(prompt) + num_done, draft.window_shape, draft.window_cells)
        children, path, node, before = children_of(tree.tokens[0], tree.parents[0]), [], -1, num_done
        while True:
            token = tokens[num_done]
            sequences.append([token], 0)
            num_done += 1
            node = children.get((node, token), -1)
            if node < 0 or num_done == len(tokens):
                break
            path.append(node)
        if num_steps:
            guesses += guesses_after(explanation, tree.parents[0], path, node)
        if reads_wrong_guesses:
            rows = oracle.rows(len(prompt) + before, tree)
        else:  # those of wrong guesses are not asked for: the root's stands in their place
            kept = [0, *(node + 1 for node in path)]
            found = oracle.rows(len(prompt) + before, tree.part([path]))
            rows = [found[kept.index(node)] if node in kept else found[0] for node in range(1 + tree.num_nodes)]
        began = time.thread_time()
        drafter.learn(Outcome(tree, oracle.logits(rows), [path], choices, sequences, summary_of(rows)))
        seconds += time.thread_time() - began
        num_steps += 1
    drafter.finish()
    return Replay(len(tokens), num_steps, drafter.sources(), seconds, guesses)


def guesses_after(
    explanation: Explanation, parents: list[int], path: list[int], last: int
) -> Iterator[tuple[str, float, bool]]:
    """Entries of `Replay.guesses` of one step. path: accepted nodes. last: one more that was right at the end."""
    accepted = {-1: 1.0} | {node: explanation.chances[node] for node in path if explanation.chances}
    # The window's drafter has sources alone.
    for node, (source, chance) in enumerate(zip(explanation.sources, explanation.chances, strict=False)):
        if accepted.get(parents[node]):  # after one that counted as impossible nothing is predicted
            yield source, chance / accepted[parents[node]], node in accepted or node == last


def summary_of(rows: list[Row]) -> LogitsSummary:
    """What the tree drafter reads of logits."""
    _, ids, probabilities, projections = (np.stack(column)[None] for column in zip(*rows, strict=True))
    shape = ids.shape[:2]
    return LogitsSummary(ids[..., 0], np.zeros(shape, bool), ids, probabilities, projections)


def steps_of_loop(model: Any, recording: Recording, config: dict[str, Any]) -> int:
    """Forward passes that `generate()` itself takes with an empty memory. config: for `config_lade`."""
    ids = torch.tensor([recording.prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with lade.enabled(**config), Memory().active():
        tokens, _ = harness.generate_timed(
            model, inputs, recording.seed, max_new_tokens=len(recording.tokens), **recording.arguments
        )
    stats = lade.last_stats()
    if tokens != recording.tokens or stats is None or stats.fallback_reason is not None:
        raise SystemExit(f"the loop's text is not the recorded one: {stats and stats.fallback_reason}")
    return stats.steps


def replay_all(
    model: Any,
    recordings: list[Recording],
    config: LookaheadConfig,
    is_warm: bool,
    without: str | None = None,
) -> list[Replay]:
    """All texts of a set in their order. is_warm: with one memory. without: a part of the tree drafter."""
    memory, found = Memory(), []
    with patch.object(*PARTS[without]) if without else nullcontext():
        for recording in recordings:
            memory = memory if is_warm else Memory()
            found.append(replay(model, recording, config, memory))
    return found


def ratio(new: list[float], old: list[float]) -> tuple[float, float]:
    """Geometric mean over prompts of new / old, and its standard error."""
    logs = [log(a / b) for a, b in zip(new, old, strict=True)]
    error = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    return exp(mean(logs)), exp(mean(logs)) * error


def summary(replays: list[Replay], recordings: list[Recording]) -> dict[str, Any]:
    varied = [r for r, text in zip(replays, recordings, strict=True) if not text.is_looping]
    each = [r.tokens_per_step for r in varied]
    steps = sum(r.num_steps for r in replays)
    sources: dict[str, list[int]] = {}
    for r in varied:
        for name, (proposed, accepted) in r.sources.items():
            counts = sources.setdefault(name, [0, 0])
            counts[0] += proposed
            counts[1] += accepted
    acceptance: dict[str, list[float]] = {}
    for source, chance, is_right in (guess for r in varied for guess in r.guesses):
        counts = acceptance.setdefault(source, [0, 0.0, 0])
        counts[:] = counts[0] + 1, round(counts[1] + chance, 4), counts[2] + is_right
    return {
        "S": round(sum(r.num_tokens for r in replays) / steps, 4),
        "S_without_loops": round(sum(r.num_tokens for r in varied) / max(1, sum(r.num_steps for r in varied)), 4),
        "standard_error": round(stdev(each) / sqrt(len(each)), 4) if len(each) > 1 else None,
        "prompts": len(replays),
        "loops": len(replays) - len(varied),
        "microseconds_per_step": round(sum(r.seconds for r in replays) / steps * 1e6),
        "each": [round(r.tokens_per_step, 4) for r in replays],
        "is_loop": [text.is_looping for text in recordings],
        "sources": sources,
        "acceptance": acceptance,  # by source: guesses whose parent was accepted, expected to be right, right
    }


def compared(figures: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """Ratio of S to that of another run on the same texts, without loops, and its standard error."""
    pairs = [(a, b) for a, b, loop in zip(figures["each"], base["each"], figures["is_loop"], strict=True) if not loop]
    return [round(x, 4) for x in ratio([a for a, _ in pairs], [b for _, b in pairs])] if pairs else [1.0, 0.0]


def recordings_of(
    args: argparse.Namespace, model: Any, tokenizer: Any, name: str, path: Path, temperature: float
) -> tuple[list[Recording], Path | None]:
    """Of one set and temperature, from the folder of records where they are there; and the file that keeps them."""
    file = args.records and args.records / f"{name}-{temperature:g}-{args.limit}-{args.max_new_tokens}.pickle"
    if file and file.exists():
        with file.open("rb") as stream:
            return pickle.load(stream), file
    args.prompts = path
    prompts = harness.load_prompts(args, tokenizer)
    return [record(model, inputs, temperature or None, args.max_new_tokens) for inputs in prompts], file


def keep(recordings: list[Recording], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        pickle.dump(recordings, stream)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.set_defaults(dtype="float32", limit=40, device="cpu")
    parser.add_argument("--set", action="append", help="NAME=FILE of prompts; by default functions and chat")
    parser.add_argument(
        "--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0, 0.4, 0.7, 1]
    )
    parser.add_argument("--sizes", type=lambda text: [int(q) for q in text.split(",")], default=[16, 64])
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=["tree"], help="of the drafters' registry"
    )
    parser.add_argument("--memories", type=lambda text: text.split(","), default=["cold", "warm"])
    parser.add_argument("--without", choices=list(PARTS), help="leave out a part of the tree drafter")
    parser.add_argument("--varied", type=int, help="of each set the first so many texts that are no loops, alone")
    parser.add_argument("--loop", type=int, default=0, help="generate() takes so many of the texts as well, to compare")
    parser.add_argument("--records", type=Path, help="a folder of your own that keeps what the model has said (pickle)")
    parser.add_argument("--against", type=Path, help="a JSON of an earlier run to compare with")
    parser.add_argument("--out", type=Path, help="write the JSON there as well, to what it has of other sets")
    args = parser.parse_args()
    if args.without and (args.loop or args.modes != ["tree"]):
        parser.error("--without is for replays of --modes tree alone, without --loop")
    return args


def main() -> None:
    args = parse()
    model, tokenizer = harness.load_model(args)
    lade.augment_all()
    field.register()
    sets = dict(item.split("=", 1) for item in args.set or ()) or {
        "functions": harness.PROMPTS,
        "chat": harness.PROMPTS.parent / "chat.jsonl",
    }
    base = json.loads(args.against.read_text())["replays"] if args.against else {}
    figures: dict[str, Any] = {}
    if args.out and args.out.exists():
        figures = json.loads(args.out.read_text())["replays"]
    for name, path in sets.items():
        for temperature in args.temperatures:
            recorded, file = recordings_of(args, model, tokenizer, name, Path(path), temperature)
            recordings = [text for text in recorded if not text.is_looping][: args.varied] if args.varied else recorded
            if not recordings:
                print(f"{name} T={temperature:g}: no text without a loop")
                continue
            for mode in args.modes:
                for q in args.sizes:
                    for memory in args.memories:
                        if memory == "warm" and mode in field.KEEP_NOTHING:
                            continue
                        settings = field.settings_of(mode, q)
                        with lade.enabled(**settings):
                            config = current_config()
                        found = replay_all(model, recordings, config, memory == "warm", args.without)
                        full = key = f"{name} T={temperature:g} {mode} q={q} {memory}"
                        if args.without:
                            key = f"{name} T={temperature:g} {mode}-without-{args.without} q={q} {memory}"
                        figures[key] = one = summary(found, recordings) | {"max_new_tokens": args.max_new_tokens}
                        line = f"{key:<36} S {one['S']:6.3f}  no loops {one['S_without_loops']:6.3f} +- {one['standard_error']}"
                        line += f"  loops {one['loops']}/{one['prompts']}  {one['microseconds_per_step']:5d} us"
                        if args.loop and memory == "cold":
                            looped = [steps_of_loop(model, text, settings) for text in recordings[: args.loop]]
                            one["steps_of_loop"], one["steps"] = (
                                sum(looped),
                                sum(r.num_steps for r in found[: args.loop]),
                            )
                            line += f"  steps of {len(looped)} texts {one['steps']}, by the loop {one['steps_of_loop']}"
                        if full in base and len(base[full]["each"]) != len(one["each"]):
                            line += f"  --against has {len(base[full]['each'])} texts, so there is no ratio"
                        elif full in base:
                            one["ratio"] = compared(one, base[full])
                            line += "  ratio {:.3f} +- {:.3f}".format(*one["ratio"])
                        print(line, flush=True)
            if file:
                keep(recorded, file)
    harness.finish({"benchmark": "replay", "environment": harness.environment(model), "replays": figures}, args.out)


if __name__ == "__main__":
    main()
