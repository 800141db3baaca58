"""Every family of support/families.py: lookahead runs and changes nothing, in text and model, or says why it does not.

With LADE_MODELS_TABLE=docs/models.md the results of the run are written to that file.
"""

import copy
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support import assert_same_state, generate_plain, inference_tensors, prompt, seeded
from support.families import CHAINS, COMPOSITE, FAMILIES, OTHERS, RECURRENT

import lade
from lade import models
from lade.models import adapter_for
from lade.models.self_check import trial_errors

PROMPT, NEW, FEW, TURN = 24, 20, 8, 5
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.6}
TABLE = os.environ.get("LADE_MODELS_TABLE")
FALLS_BACK = {"phi3-longrope-across": "whole cache change"} | dict.fromkeys(("doge", "doge-window"), "selects its keys")
CHAIN = "chains of guesses"
REGISTERED = set(models._adapters)
rows: list[tuple[str, ...]] = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if TABLE and rows:
        write_table(Path(TABLE))


def prompts(batch_size, length=PROMPT):
    """The second half repeats the first, so that the pool has guesses from the first step on."""
    half = prompt(length // 2, batch_size, seed=batch_size)
    return {name: tensor.repeat(1, 2) for name, tensor in half.items()}


def both(model, inputs, max_new_tokens=NEW, **arguments):
    """The output without and with lade, sampled ones from the same seed. Both leave the model in the same state."""
    arguments["max_new_tokens"] = max_new_tokens
    twin = copy.deepcopy(model)
    expected, _ = seeded(generate_plain, twin, inputs, **arguments)
    found, _ = seeded(model.generate, **inputs, **arguments)
    assert_same_state(model, twin)
    return expected, found


def built(family):
    if not family.exists:
        pytest.skip(f"transformers {transformers.__version__} runs no {family.model_class}")
    return family.build()


def is_served(model):
    return model.config.model_type in REGISTERED


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS], ids=lambda family: family.name)
def test_family(small_block, family):
    model = built(family)
    expected, found = both(model, prompts(1), **GREEDY)
    assert torch.equal(found, expected)
    stats = lade.last_stats()
    reason = stats.fallback_reason
    rows.append((family.name, family.note, family.attention, reason or "lookahead"))
    if family.name in FALLS_BACK:
        assert FALLS_BACK[family.name] in reason
        return
    if not is_served(model):
        assert reason is None or len(reason) > 20  # an unregistered family: tried out, then served or refused
        return
    assert reason is None
    assert (max if adapter_for(model).takes_chains else min)(stats.block_tokens) > 1

    expected, found = both(model, prompts(1), FEW, **SAMPLED)
    assert torch.equal(found, expected)
    # The negative control: a block whose mask is ignored would give clearly other logits.
    (error, effect), *_ = trial_errors(adapter_for(model), 44)
    assert error < (1e-5 if model.dtype == torch.float64 else 1e-3)  # some compute a softmax or a router in float32
    assert effect > 1e-2

    assert_masks_count(model)
    assert not inference_tensors(model)


def assert_masks_count(model):
    """Tokens and logits of two turns whose masks have zeros on the left, on the right, in between and not at all."""
    ids = prompts(4)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, -5:], mask[3, [3, 4, 11, 17, 18]] = 0, 0, 0
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if model.config._attn_implementation == "eager":  # in float64 it gives nan where all is padding
        model = model.float()
    tolerance = 1e-5 if model.dtype == torch.float64 else 2e-3
    returned = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain, found = both(model, batch, TURN, **returned)
    assert lade.last_stats().fallback_reason is None
    assert torch.equal(model.generate(**batch, max_new_tokens=TURN), plain.sequences)  # rows of different lengths
    assert lade.last_stats().fallback_reason is None
    more = prompts(4, length=6)["input_ids"]
    mask = torch.nn.functional.pad(mask, (0, TURN + more.shape[1]), value=1)
    mask[2, -4:-2] = 0  # the second turn brings its own
    turns = []
    runs = partial(generate_plain, model), lambda batch, **named: model.generate(**batch, **named)
    for turn, run in zip((plain, found), runs, strict=True):
        text = torch.cat([turn.sequences, more], dim=1)
        batch = {"input_ids": text, "attention_mask": mask}
        turns.append(run(batch, past_key_values=turn.past_key_values, max_new_tokens=TURN, **returned))
    reason = lade.last_stats().fallback_reason
    assert reason is None or "does not keep every key" in reason or "the model computes it anew" in reason
    for expected, result in ((plain, found), turns):
        assert torch.equal(result.sequences, expected.sequences)
        difference = torch.stack(result.logits) - torch.stack(expected.logits)
        assert float(difference.abs().max()) < tolerance * float(torch.stack(expected.logits).abs().max())


@pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
def test_recurrent(small_block, family):
    model = built(family)
    padded = prompts(2)
    padded["attention_mask"][0, :5] = 0
    must_run = family.name in CHAINS and Version(transformers.__version__) >= Version("5.23")  # else tried out
    calls = [(prompts(1), GREEDY), (prompts(2), SAMPLED)]
    if family.name in CHAINS:  # others may draw from NaN where a row is padded
        calls.append((padded, GREEDY))
    for inputs, arguments in calls:
        expected, found = both(model, inputs, NEW, **arguments)
        assert torch.equal(found, expected)
        stats = lade.last_stats()
        reason = stats.fallback_reason
        assert not must_run or (reason is None and max(stats.block_tokens) > 1)
        assert must_run or reason is not None or family.name in CHAINS
    rows.append((family.name, family.note or (reason is None) * CHAIN, family.attention, reason or "lookahead"))
    assert not inference_tensors(model)


@pytest.mark.parametrize("with_image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("family", COMPOSITE, ids=lambda family: family.name)
def test_composite(small_block, family, with_image):
    model = built(family)
    inputs = family.inputs(with_image)
    for arguments in (GREEDY, SAMPLED):
        expected, found = both(model, inputs, FEW, **arguments)
        assert torch.equal(found, expected)
    assert not inference_tensors(model)
    reason = lade.last_stats().fallback_reason
    if with_image:  # the same as for text alone
        note = "; ".join(filter(None, [family.note, "images"]))
        rows.append((family.name, note, family.attention, reason or "lookahead"))
    # Older versions drop images in a prepare_inputs_for_generation of each model, or name their arguments otherwise.
    must_run = (is_served(model) or CHAIN in family.note) and Version(transformers.__version__) >= Version("5.23")
    assert reason is None or not must_run


def test_every_registered_family_is_in_the_table():
    classes = [getattr(transformers, family.model_class, None) for family in [*FAMILIES, *COMPOSITE]]
    if not all(classes):
        pytest.skip(f"transformers {transformers.__version__} lacks some of the families")
    tested = {kind.config_class.model_type for kind in classes if kind}
    assert tested >= REGISTERED


def write_table(path):
    """Put the results of this run into the page: the families that run with lookahead, and the others by reason."""
    served = {(name, note): attention for name, note, attention, what in rows if what == "lookahead"}
    plain, noted, refused = [], {}, {}
    for (name, note), attention in served.items():
        if note:
            noted.setdefault(note, []).append(f"`{name}`")
        else:
            plain.append(f"`{name}`" + " (eager)" * (attention == "eager"))
    for name, note, _, what in rows:
        if what != "lookahead":
            reason = re.sub(r"this '\w+' model|\w+(?= has a prepare_)", "this model", what)
            reason = re.sub(r"\w+\.forward", "its forward", reason)
            refused.setdefault(reason, []).append(f"`{name}`" + (f" ({note})" if note else ""))
    tables = [
        "".join(f"| {note} | {', '.join(names)} |\n" for note, names in noted.items()),
        "".join(f"| {reason} | {', '.join(names)} |\n" for reason, names in refused.items()),
    ]
    text = path.read_text(encoding="utf-8")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    text = re.sub(r"(?<=\()transformers .*(?=, CPU)", versions, text)
    text = re.sub(r"(?<=^Lookahead: ).*(?=\.$)", ", ".join(plain), text, flags=re.MULTILINE)
    path.write_text(re.sub(r"(?<=---\|\n)(\|.*\n)*", lambda _: tables.pop(0), text), encoding="utf-8")
