"""Which candidate settings are faster than plain generate(), found in three rounds.

1. What a step costs against the tokens in its block (`lade.commands.forward_costs`). Candidates whose window alone costs more than
   a step can ever yield are out.
2. Tokens per step of each candidate on some of the prompts, the better half going on from one to the next. Divided by the cost
   of its blocks they predict the ratio to plain.
3. The best by prediction run against plain generate() on all prompts, taking turns. Only this decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lade.commands.forward_costs import BLOCK_SIZES, cost_at, step_costs
from lade.commands.measure import Inputs, Method, Run, environment, run_methods, run_once, share_identical, spread
from lade.models import adapter_for

Settings = dict[str, Any]  # keywords of config_lade
Progress = Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]]  # a label -> what to wrap a list in


def lookahead_settings(levels: Iterable[int], shapes: Iterable[tuple[int, int]]) -> list[Settings]:
    """Every N of `levels` with every (W, G) of `shapes`."""
    shapes = list(shapes)
    return [{"LEVEL": n, "WINDOW_SIZE": w, "GUESS_SET_SIZE": g} for n in levels for w, g in shapes]


@dataclass(frozen=True)
class Plan:
    """How much is tried. Candidates are keywords of `config_lade` on top of its defaults."""

    candidates: tuple[Settings, ...]
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    max_new_tokens: int = 96
    num_screened: int = 4  # prompts of round 2
    num_finalists: int = 4  # candidates of round 3
    trials: int = 5


TREES: list[Settings] = [{"MODE": "tree"}, {"MODE": "tree", "MAX_BLOCK": 16}]
PLAN = Plan(
    (
        *TREES,
        *lookahead_settings(
            (3, 4, 5, 7), ((1, 1), (1, 3), (2, 4), (4, 4), (4, 8), (7, 7), (10, 10), (15, 15), (20, 20))
        ),
    )
)
QUICK_PLAN = Plan(
    (*TREES[:1], *lookahead_settings((3, 5), ((1, 3), (2, 4), (7, 7))), *lookahead_settings((5,), ((15, 15),))),
    block_sizes=(1, 4, 16, 64),
    max_new_tokens=48,
    num_screened=2,
    num_finalists=2,
    trials=3,
)


@dataclass
class Row:
    """What was found about one candidate."""

    settings: Settings
    mean_block: float  # query tokens of a step
    tokens_per_step: float
    predicted: float  # of `predict`
    ratio: dict[str, float] | None = None  # to plain generate(), measured; None for what did not get that far
    identical: float | None = None  # share of prompts with plain generate()'s output

    def is_faster(self) -> bool:
        """Whether it beat plain generate() in four of five trials, or all of three."""
        return self.ratio is not None and self.ratio["p20"] > 1


@dataclass
class Findings:
    """The result of `tune`. rows: the measured ones first, the fastest first of all."""

    environment: dict[str, Any]
    context: int  # committed tokens before the blocks of round 1
    seconds: dict[int, float]  # of a step, by tokens in its block
    hopeless: list[Settings]  # candidates that round 1 took out
    rows: list[Row]
    num_prompts: int
    trials: int

    @property
    def best(self) -> Row | None:
        """What to recommend; None where nothing is faster than plain generate()."""
        return next((row for row in self.rows if row.is_faster()), None)


def tune(model: Any, prompts: list[Inputs], common: dict[str, Any], plan: Plan, progress: Progress) -> Findings:
    """All three rounds. common: arguments of `generate_timed`, max_new_tokens among them.

    Raises RuntimeError, with the reason, when lookahead cannot run on the model.
    """
    run_once(model, prompts[0], Method(settings=plan.candidates[0]), Run(), common)
    lengths = [inputs["input_ids"].shape[1] for inputs in prompts]
    context = int(statistics.median(lengths)) + common["max_new_tokens"] // 2
    seconds = step_costs(adapter_for(model), plan.block_sizes, context, progress=progress("cost of a step"))
    hopeful = [settings for settings in plan.candidates if may_pay(settings, seconds)]
    rows = screen(model, prompts[: plan.num_screened], hopeful, common, plan, seconds, progress)
    finalists = rows[: plan.num_finalists]
    if finalists:
        measure_ratios(model, prompts, finalists, common, plan.trials, progress("tokens per second"))
    for row in finalists:
        row.predicted = predict(row.tokens_per_step, row.mean_block, seconds)  # from all prompts now
    finalists.sort(key=lambda row: (not row.is_faster(), -(row.ratio or {})["median"]))
    return Findings(
        environment=environment(model),
        context=context,
        seconds=seconds,
        hopeless=[settings for settings in plan.candidates if settings not in hopeful],
        rows=finalists + rows[plan.num_finalists :],
        num_prompts=len(prompts),
        trials=plan.trials,
    )


def may_pay(settings: Settings, seconds: dict[int, float]) -> bool:
    """Whether a step of at most N tokens can be worth the window's (N-1)*W. What says nothing of both may."""
    level, width = settings.get("LEVEL"), settings.get("WINDOW_SIZE")
    if level is None or width is None:
        return True
    return level > cost_at(seconds, (level - 1) * width)


def screen(
    model: Any,
    prompts: list[Inputs],
    candidates: list[Settings],
    common: dict[str, Any],
    plan: Plan,
    seconds: dict[int, float],
    progress: Progress,
) -> list[Row]:
    """Round 2. Tokens per step are the same on every machine, so that nothing is timed here.

    After each prompt the better half goes on to the next. Returns the candidates that got farthest first, by prediction.
    """
    runs = [(settings, Run()) for settings in candidates]

    def row(settings: Settings, run: Run) -> Row:
        block, tokens_per_step = run.mean_block(), run.tokens_per_step() or 0.0
        return Row(settings, round(block, 2), tokens_per_step, predict(tokens_per_step, block, seconds))

    still_in = runs
    for number, inputs in enumerate(prompts, 1):
        for settings, run in progress(f"tokens per step, prompt {number} of {len(prompts)}")(still_in):
            # The window's blocks whole, whatever they cost here; the tree's size is a matter of their price.
            whole = settings if "MODE" in settings else settings | {"ADAPTIVE": 0}
            run_once(model, inputs, Method(settings=whole), run, common)
        still_in = sorted(still_in, key=lambda pair: -row(*pair).predicted)
        still_in = still_in[: max(2 * plan.num_finalists, (len(still_in) + 1) // 2)]
    runs.sort(key=lambda pair: (-len(pair[1].steps), -row(*pair).predicted))
    return [row(*pair) for pair in runs]


def predict(tokens_per_step: float, mean_block: float, seconds: dict[int, float]) -> float:
    """The ratio to plain generate() if nothing but the model's forward took time."""
    return round(tokens_per_step / cost_at(seconds, mean_block), 4)


def measure_ratios(
    model: Any,
    prompts: list[Inputs],
    rows: list[Row],
    common: dict[str, Any],
    trials: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> None:
    """Round 3: fills in what the rows lack, and replaces what round 2 found on fewer prompts."""
    methods = {"plain": Method()} | {str(i): Method(settings=row.settings) for i, row in enumerate(rows)}
    runs = run_methods(model, prompts, methods, trials, common, progress)
    plain = runs.pop("plain")
    for row, own in zip(rows, runs.values(), strict=True):
        row.ratio = spread([run.speed() / base.speed() for run, base in zip(own, plain, strict=True)])
        row.identical = share_identical(own[0], plain[0])
        row.mean_block, row.tokens_per_step = round(own[0].mean_block(), 2), own[0].tokens_per_step() or 0.0
