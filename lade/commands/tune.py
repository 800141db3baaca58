"""`lade bench --tune`: whether other settings are faster than lade's default, on this machine and these prompts.

1. The default and all candidates run on every other prompt, taking turns. The fastest candidate is the winner.
2. The winner, the default and plain generate() run on the other prompts. Only this decides: the winner was chosen
   because it was fast on the first prompts, so its figures there are too good. The default runs twice: what its second
   run gains over its first is the machine's noise, and a recommendation has to gain more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lade.commands.measure import Inputs, Method, Run, environment, run_methods, share_identical, spread

Settings = dict[str, Any]  # keywords of config_lade, on top of its defaults
Progress = Callable[[str], Callable[[Iterable[Any]], Iterable[Any]]]  # a label -> what to wrap a list in

CANDIDATES: tuple[Settings, ...] = (
    {"MODE": "tree"},
    *(
        {"MODE": "lookahead", "LEVEL": n, "WINDOW_SIZE": w, "GUESS_SET_SIZE": g}
        for n, w, g in ((3, 2, 4), (5, 2, 4), (5, 7, 7), (5, 15, 15))
    ),
)
CHOOSING_TRIALS = 2
MIN_GAIN = 1.02  # over the default, from which a change of settings is worth recommending
NOTHING_PAYS = "nothing was faster than plain generate() on this device and these prompts: leave lade off"
KEEP_DEFAULT = "keep the default: no other settings were clearly faster on this device and these prompts"


def tune(
    model: Any,
    prompts: list[Inputs],
    common: dict[str, Any],
    trials: int,
    progress: Progress,
    candidates: Iterable[Settings] = CANDIDATES,
) -> dict[str, Any]:
    """Content for `config_lade(CONFIG=...)`: the recommended settings, or a note in their place, and the measurements.

    common: arguments of `generate_timed`. trials: of the second round. Raises RuntimeError, with the reason, when
    lookahead cannot run on the model, and ValueError for fewer than two prompts.
    """
    check_prompts(prompts)
    choosing, judging = prompts[::2], prompts[1::2]
    default = Method(settings={})
    named = {describe(settings): settings for settings in candidates}
    methods = {"default": default} | {name: Method(settings=settings) for name, settings in named.items()}
    chosen_by = run_methods(model, choosing, methods, CHOOSING_TRIALS, common, progress("choosing"))
    choice = {name: spread(ratios(chosen_by[name], chosen_by["default"])) for name in named}
    winner = max(named, key=lambda name: (not is_same(chosen_by[name], chosen_by["default"]), choice[name]["median"]))

    methods = {"plain": Method(), "default": default, "again": default, winner: Method(settings=named[winner])}
    runs = run_methods(model, judging, methods, trials, common, progress("judging"))
    again = spread(ratios(runs["again"], runs["default"]))
    measured: dict[str, Any] = {
        "environment": environment(model),
        "prompts": {"choosing": len(choosing), "judging": len(judging)},
        "trials": trials,
        "ratio_to_default_when_choosing": choice,
        "winner": winner,
        "noise": round(max(again["p80"], 1 / again["p20"]), 4),  # the default over itself, a factor of 1 or more
        "ratio_to_default": spread(ratios(runs[winner], runs["default"])),
        "ratio_to_plain": {name: spread(ratios(runs[name], runs["plain"])) for name in ("default", winner)},
        "identical_outputs": share_identical(runs[winner][0], runs["plain"][0]),
        "same_steps": is_same(runs[winner], runs["default"]),
    }
    if is_worth_it(measured):
        return named[winner] | {"measured": measured}
    pays = measured["ratio_to_plain"]["default"]["median"] >= 1
    return {"note": KEEP_DEFAULT if pays else NOTHING_PAYS, "measured": measured}


def check_prompts(prompts: list[Any]) -> None:
    if len(prompts) < 2:
        raise ValueError(f"--prompts must be two or more, some to choose by and some to judge by, got {len(prompts)}")


def is_worth_it(measured: dict[str, Any]) -> bool:
    """True if the winner beat plain generate() and the default in four of five trials, the default by enough.

    One that takes the default's steps gains nothing, however much luck it has with the clock.
    """
    gain, to_plain = measured["ratio_to_default"], measured["ratio_to_plain"][measured["winner"]]
    is_faster = gain["p20"] > measured["noise"] and gain["median"] >= MIN_GAIN and to_plain["p20"] > 1
    return is_faster and not measured["same_steps"]


def ratios(runs: list[Run], base: list[Run]) -> list[float]:
    return [run.speed() / other.speed() for run, other in zip(runs, base, strict=True)]


def is_same(runs: list[Run], others: list[Run]) -> bool:
    """True if both took the same steps, with blocks of the same sizes."""
    return [(run.steps, run.block_tokens) for run in runs] == [(run.steps, run.block_tokens) for run in others]


def describe(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def report(found: dict[str, Any], path: str) -> str:
    """`tune`'s result as text. path: the file that it is written to."""
    measured = found["measured"]
    winner = measured["winner"]
    lines = ["on the prompts that the winner is chosen by, relative to the default: median (20th to 80th percentile)"]
    lines += [f"  {name}: {_spread(figures)}" for name, figures in measured["ratio_to_default_when_choosing"].items()]
    lines.append(f"on {measured['prompts']['judging']} other prompts")
    for name, figures in measured["ratio_to_plain"].items():
        lines.append(f"  {name}: {_spread(figures)} times plain generate()")
    how = "takes the same steps as" if measured["same_steps"] else f"{_spread(measured['ratio_to_default'])} times"
    lines.append(f"  {winner}: {how} the default, which differs from itself by up to {measured['noise'] - 1:.0%}")
    if "note" in found:
        lines.append(f"{found['note'][0].upper()}{found['note'][1:]}. {path} says so, and sets nothing.")
    else:
        lines.append(
            f"{path} has these settings: config_lade(CONFIG={path!r}), LADE_CONFIG={path}, lade --config {path}."
        )
    return "\n".join(lines) + "\n"


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['p20']:.2f} to {found['p80']:.2f})"
