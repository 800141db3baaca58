"""Which settings are faster than lade's default, found in four rounds.

1. What a step costs against the tokens in its block (`lade.commands.forward_costs`). Candidates whose window alone
   costs more than a step can ever yield are left out.
2. Tokens per step of each candidate on some prompts, the better half going on from one to the next. Divided by the
   cost of the blocks they predict the ratio to plain generate(). A prediction leaves out the drafter's own work, so it
   is corrected by the ratio of measured to predicted time of the same drafter's candidates.
3. The best by corrected prediction, the default and MODE=tree run on these prompts, taking turns. The fastest is the
   winner.
4. The winner, the default and plain generate() run on other prompts. Only this decides what is recommended: the winner
   was chosen because it was fast on the first prompts, so its figures there are too good. The default runs twice: what
   its second run gains over its first is what the machine's noise makes, and a recommendation has to gain more. One
   that takes the same steps gains nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lade.commands.forward_costs import BLOCK_SIZES, cost_at, step_costs
from lade.commands.measure import (
    Inputs,
    Method,
    Run,
    environment,
    run_methods,
    run_once,
    settle,
    share_identical,
    spread,
)
from lade.commands.tune.candidates import ANCHORS, DEFAULT, Settings, candidates, mode_of
from lade.models import adapter_for

Progress = Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]]  # a label -> what to wrap a list in
CONTROL = "default, again"
FEW_STEPS = 64  # of a candidate's warm-up
MIN_GAIN = 1.02  # over the default, from which a change of settings is worth recommending


@dataclass(frozen=True)
class Plan:
    """How much is tried. candidates: besides the default and MODE=tree."""

    candidates: tuple[Settings, ...]
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    max_new_tokens: int = 96
    num_screened: int = 4  # prompts of round 2
    num_finalists: int = 4  # candidates of round 3
    choosing_trials: int = 3
    trials: int = 5  # of round 4


PLAN = Plan(candidates(is_quick=False))
QUICK_PLAN = Plan(
    candidates(is_quick=True),
    block_sizes=(1, 4, 16, 64),
    max_new_tokens=48,
    num_screened=2,
    num_finalists=2,
    choosing_trials=2,
)


@dataclass
class Row:
    """Figures of one candidate. ratio, gain: its speed relative to plain generate() and the default."""

    settings: Settings
    mean_block: float  # query tokens of a step
    tokens_per_step: float
    predicted: float  # of `predict`
    corrected: float  # the same, times what its drafter's predictions were off by
    ratio: dict[str, float] | None = None
    gain: dict[str, float] | None = None
    identical: float | None = None  # share of prompts with plain generate()'s output
    is_judged: bool = False  # whether these are of the prompts that nothing was chosen by
    is_same_work: bool = False  # whether it took the default's steps, with blocks of the same sizes

    def is_worth_it(self, noise: float = 1.0) -> bool:
        """Whether it beat both the default and plain generate() in four of five trials, and the default by enough.

        noise: what the default gains over itself.
        """
        if not self.is_judged or self.is_same_work or self.ratio is None or self.gain is None:
            return False
        return self.gain["p20"] > noise and self.gain["median"] >= MIN_GAIN and self.ratio["p20"] > 1


@dataclass
class Findings:
    """The result of `tune`, as far as it got. rows: the judged ones first, then the timed ones, the fastest first."""

    environment: dict[str, Any]
    context: int  # committed tokens before the blocks of round 1
    prompts: tuple[int, int]  # how many chose, how many judged
    seconds: dict[int, float] = field(default_factory=dict)  # of a step, by tokens in its block
    hopeless: list[Settings] = field(default_factory=list)  # candidates that round 1 took out
    rows: list[Row] = field(default_factory=list)
    corrections: dict[str, float] = field(default_factory=dict)  # by mode
    trials: int = 0  # of round 4
    noise: float = 1.0  # what the default gained over itself in round 4, or lost, as a factor of 1 or more
    is_stopped: bool = False  # by Ctrl-C

    @property
    def default(self) -> Row | None:
        return next((row for row in self.rows if row.settings == DEFAULT), None)

    @property
    def best(self) -> Row | None:
        """What to recommend in place of the default; None where nothing is faster."""
        worth = [row for row in self.rows if row.is_worth_it(self.noise) and row.settings != DEFAULT]
        return max(worth, key=gain_of, default=None)

    def sort(self) -> None:
        self.rows.sort(key=lambda row: (not row.is_judged, row.gain is None, -gain_of(row), -row.corrected))


def gain_of(row: Row) -> float:
    return row.gain["median"] if row.gain else 0.0


def tune(model: Any, prompts: list[Inputs], common: dict[str, Any], plan: Plan, progress: Progress) -> Findings:
    """All rounds. common: arguments of `generate_timed`, max_new_tokens among them.

    After Ctrl-C it returns what it has found so far. Raises RuntimeError, with the reason, when lookahead cannot run on
    the model, and ValueError for fewer than two prompts.
    """
    if len(prompts) < 2:
        raise ValueError(f"prompts must be two or more, some to choose by and some to judge by, got {len(prompts)}")
    choosing, judging = prompts[::2], prompts[1::2]
    lengths = [inputs["input_ids"].shape[1] for inputs in prompts]
    context = int(statistics.median(lengths)) + common["max_new_tokens"] // 2
    findings = Findings(environment(model), context, (len(choosing), len(judging)))
    try:
        settle(model, choosing[0], Method(settings=DEFAULT), common)
        adapter = adapter_for(model)
        findings.seconds = step_costs(adapter, plan.block_sizes, context, progress=progress("cost of a step"))
        hopeful = [settings for settings in plan.candidates if may_pay(settings, findings.seconds)]
        findings.hopeless = [settings for settings in plan.candidates if settings not in hopeful]
        screen(model, choosing[: plan.num_screened], hopeful, common, plan, findings, progress)
        winner = choose(model, choosing, common, plan, findings, progress("choosing"))
        judged = [row for row in findings.rows if row.settings in ANCHORS or row is winner]
        time_rows(model, judging, judged, common, plan.trials, findings, progress("judging"), is_judging=True)
    except KeyboardInterrupt:
        findings.is_stopped = True
    findings.sort()
    return findings


def may_pay(settings: Settings, seconds: dict[int, float]) -> bool:
    """Whether a step of at most N tokens can be worth the window's (N-1)*W; True without LEVEL or WINDOW_SIZE."""
    level, width = settings.get("LEVEL"), settings.get("WINDOW_SIZE")
    if level is None or width is None:
        return True
    return level > cost_at(seconds, (level - 1) * width)


def screen(
    model: Any,
    prompts: list[Inputs],
    hopeful: list[Settings],
    common: dict[str, Any],
    plan: Plan,
    findings: Findings,
    progress: Progress,
) -> None:
    """Round 2: fills in findings.rows, those that got farthest first, by corrected prediction.

    After each prompt the better half of the candidates goes on to the next; the anchors always do.
    """
    plain, runs = Run(), [(settings, Run()) for settings in (*ANCHORS, *hopeful)]
    still_in = runs
    lookahead = [settings for settings in hopeful if mode_of(settings) == "lookahead"]
    for settings in (*ANCHORS, *(other for other in hopeful if other not in lookahead), *lookahead[:1]):
        # Done once: for a drafter, and for each largest block whose costs are measured first.
        settle(model, prompts[0], Method(settings=as_screened(settings)), common, FEW_STEPS)
    for number, inputs in enumerate(prompts, 1):
        run_once(model, inputs, Method(), plain, common)
        for settings, run in progress(f"screening, prompt {number} of {len(prompts)}")(still_in):
            run_once(model, inputs, Method(settings=as_screened(settings)), run, common)
        findings.rows = rows_of(runs, plain, findings)
        corrected = {str(row.settings): row.corrected for row in findings.rows}
        still_in = sorted(still_in, key=lambda pair: -corrected[str(pair[0])])
        kept = still_in[: max(2 * plan.num_finalists, (len(still_in) + 1) // 2)]
        still_in = [pair for pair in still_in if pair in kept or pair[0] in ANCHORS]
    in_reach = [settings for settings, _ in still_in]
    findings.rows.sort(key=lambda row: (row.settings not in in_reach, -row.corrected))


def as_screened(settings: Settings) -> Settings:
    """The window's blocks whole, whatever they cost here; the tree's size follows from what blocks cost."""
    return settings | {"ADAPTIVE": 0} if mode_of(settings) == "lookahead" else settings


def rows_of(runs: list[tuple[Settings, Run]], plain: Run, findings: Findings) -> list[Row]:
    """A row for each candidate, with corrected predictions. plain: over the same prompts, or more."""
    rows: list[Row] = []
    errors: dict[str, list[float]] = {}
    for settings, run in runs:
        if not run.outputs:
            continue
        block, tokens_per_step = run.mean_block(), run.tokens_per_step() or 0.0
        predicted = predict(tokens_per_step, block, findings.seconds)
        later = list(range(1, len(run.outputs)))  # the first prompt also pays for the first use of each shape of block
        if later:
            measured = run.speed(later) / plain.speed(later)
            found = predict(run.tokens_per_step(later) or 0.0, block, findings.seconds)
            errors.setdefault(mode_of(settings), []).append(measured / found)
        rows.append(Row(settings, round(block, 2), tokens_per_step, predicted, predicted))
    # One run of one candidate is noise; that of all of a drafter's together is its own work.
    findings.corrections = {mode: round(statistics.median(found), 4) for mode, found in errors.items()}
    for row in rows:
        row.corrected = round(row.predicted * findings.corrections.get(mode_of(row.settings), 1.0), 4)
    return rows


def predict(tokens_per_step: float, mean_block: float, seconds: dict[int, float]) -> float:
    """The speed relative to plain generate() if only the model's forward took time."""
    return round(tokens_per_step / cost_at(seconds, mean_block), 4)


def choose(
    model: Any,
    prompts: list[Inputs],
    common: dict[str, Any],
    plan: Plan,
    findings: Findings,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> Row | None:
    """Round 3: the fastest of the finalists; None where that is the default."""
    anchors = [row for row in findings.rows if row.settings in ANCHORS]
    others = [row for row in findings.rows if row.settings not in ANCHORS][: plan.num_finalists]
    time_rows(model, prompts, anchors + others, common, plan.choosing_trials, findings, progress)
    winner = max(anchors + others, key=gain_of)
    return None if winner.settings == DEFAULT else winner


def time_rows(
    model: Any,
    prompts: list[Inputs],
    rows: list[Row],
    common: dict[str, Any],
    trials: int,
    findings: Findings,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    is_judging: bool = False,
) -> None:
    """Rounds 3 and 4: fill in the timed fields of `rows` from the complete trials, also after an interrupt."""
    methods = {"plain": Method()} | {str(row.settings): Method(settings=row.settings) for row in rows}
    if is_judging:
        methods[CONTROL] = Method(settings=DEFAULT)
    runs: dict[str, list[Run]] = {}
    try:
        run_methods(model, prompts, methods, trials, common, progress, runs)
    finally:
        whole = [run for run in zip(*runs.values(), strict=True) if all(len(r.outputs) == len(prompts) for r in run)]
        if whole:
            by_name = dict(zip(runs, zip(*whole, strict=True), strict=True))
            plain, default = by_name["plain"], by_name[str(DEFAULT)]
            findings.trials = len(whole) if is_judging else 0
            if is_judging:
                findings.noise = noise_of(spread(ratios_of(by_name[CONTROL], default)))
            for row in rows:
                own = by_name[str(row.settings)]
                row.ratio = spread(ratios_of(own, plain))
                row.gain = spread(ratios_of(own, default))
                row.identical = share_identical(own[0], plain[0])
                row.mean_block, row.tokens_per_step = round(own[0].mean_block(), 2), own[0].tokens_per_step() or 0.0
                row.is_judged = is_judging
                row.is_same_work = [work_of(run) for run in own] == [work_of(run) for run in default]


def ratios_of(runs: Iterable[Run], base: Iterable[Run]) -> list[float]:
    return [run.speed() / other.speed() for run, other in zip(runs, base, strict=True)]


def work_of(run: Run) -> tuple[list[int], int]:
    return run.steps, run.block_tokens


def noise_of(gain: dict[str, float]) -> float:
    """gain: of a method over itself."""
    return max(gain["p80"], 1 / gain["p20"])
