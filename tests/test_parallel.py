"""Several processes share each step: the tokens of one process's plain generate(), on all of them, or a named error."""

import json
import os
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from support import beside, generate_plain, prompt, ranks, tiny_llama

import lade
from lade import models
from lade.models.chains import ChainAdapter
from lade.parallel.group import pack, unpack

SETTINGS = {2: [(5, 7, 7), (2, 3, 0)], 3: [(5, 7, 7), (4, 1, 4)]}
BATCHES = [(1, 0), (3, 1)]  # rows, seed


@cache
def alone(settings, case, batch_size, seed):
    """What plain generate() and lookahead in one process say, both in this one."""
    model, inputs = tiny_llama(), ranks.inputs_of(batch_size, seed)
    arguments, processor = ranks.arguments_of(case)
    torch.manual_seed(seed)
    plain = generate_plain(model, inputs, **arguments)
    state = ranks.digest([torch.get_rng_state()])
    level, window, guesses = settings
    lade.config_lade(MODE="lookahead", LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guesses, DIST_WORKERS=1)
    torch.manual_seed(seed)
    model.generate(**inputs, **ranks.arguments_of(case)[0])
    return getattr(plain, "sequences", plain).tolist(), state, lade.last_stats(), processor and processor.prefixes


@beside
def server():
    """The process that ranks are forked from takes its seconds to import what they need."""
    forkserver.ensure_running()


@pytest.fixture(scope="module", autouse=True)
def failing(server):
    """Ranks that fail, by how they do. Most of their time is waiting, so they run beside the first tests."""
    ways = {
        "stays away": ranks.Ranks(ranks.differ, 2, "workers"),
        "hangs": ranks.Ranks(ranks.fail, 3, 1, "hangs"),
        "dies": ranks.Ranks(ranks.fail, 3, 1, "dies"),
        "takes the store along": ranks.Ranks(ranks.fail, 3, 0, "dies"),
        "raises": ranks.Ranks(ranks.fail, 3, 2, "raises"),
    }
    yield ways
    for processes in ways.values():
        processes.kill()


@pytest.mark.parametrize(("workers", "backwards"), [(2, False), (2, True), (3, False)])
def test_same_tokens_on_all_ranks(lade_on, workers, backwards):
    settings = SETTINGS[workers][: 1 if backwards else None]
    found = ranks.launch(ranks.run_cases, workers, settings, BATCHES, workers, backwards)
    num_ahead = num_balanced = 0
    for key, first in found[0].items():
        level, window, guesses = key[0]
        tokens, state, stats, prefixes = alone(*key)
        for rank in range(workers):
            result = found[rank][key]
            assert result["reason"] is None
            assert result["tokens"] == tokens, (rank, key)
            assert result["steps"] == stats.steps, (rank, key)
            assert result["generated"] == stats.generated_tokens
            assert result["generator"] in (None, state)
            # Processors are asked once, as in plain, and on the leader alone.
            assert result["prefixes"] == (prefixes if rank == 0 else prefixes and [])
        num_ahead += first["steps"] < first["generated"] / key[2]
        blocks = [found[rank][key]["blocks"] for rank in range(workers)]
        assert all(max(parts) <= whole for *parts, whole in zip(*blocks, stats.block_tokens, strict=True))
        if window >= workers and guesses >= workers and not backwards:
            # The first level is needed by all, and nodes that several paths share are computed by several ranks.
            assert max(map(max, blocks)) <= (level - 1) * (window + guesses) / workers + window + level
            num_balanced += max(map(max, blocks)) < max(stats.block_tokens)
    assert num_ahead >= len(found[0]) / 4
    assert num_balanced > 0 or backwards
    if backwards:
        sent = [found[1][key]["sent"] for key in found[1]]
        assert any(part.get("keys/values") for part in sent)
        assert any(part.get("logits") for part in sent)
    else:
        check_bytes(found)


def check_bytes(found):
    """A step sends one table of integers and the keys/values of what it committed; logits only where rules need
    them."""
    config = tiny_llama().config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 8
    workers = len(found)
    for key, first in found[0].items():
        (level, window, guesses), case, batch_size, _ = key
        sent = [found[rank][key]["sent"] for rank in range(workers)]
        if case == "greedy" and batch_size == 1:
            table = 4 * (1 + (level - 1) * max(1, guesses) + window + workers)
            assert sent[1]["integers"] == first["steps"] * table + 5 * 8  # and once per call five numbers to compare
            assert "logits" not in sent[0] | sent[1]
            num_kept = sum(part.get("keys/values", 0) for part in sent) // per_token
            # The last token's own are never needed; where a text ends inside a path, the rest of it may go along.
            assert first["generated"] - 1 <= num_kept < first["generated"] + level


FEW_FAMILIES = ["bloom", "gemma3_text", "deepseek_v2"]


@pytest.mark.parametrize("names", [FEW_FAMILIES, pytest.param(None, marks=pytest.mark.long)], ids=["few", "all"])
def test_other_families(lade_on, names):
    first, second = ranks.launch(ranks.run_families, 2, names, patience=ranks.PATIENCE if names else 1800)
    assert first == second
    assert len(first) >= 2 * len(names or range(200))
    falls_back = ("phi3-longrope-across", "doge", "doge-window")
    for (name, *case), (is_same, reason) in first.items():
        assert is_same, (name, case)
        if models._adapters.get(name.partition("-")[0]) is ChainAdapter:
            assert reason == "processes cannot share chains of guesses", name
        else:
            assert reason is None or name in falls_back, (name, reason)


def test_keys_of_any_type_travel_as_bytes():
    numbers = torch.Generator().manual_seed(0)
    shapes = [((2, 3, 4, 5), torch.float32), ((1, 1, 4, 3), torch.bfloat16), ((1, 2, 4, 0), torch.float64)]
    shapes.append(shapes[0])
    rows = [[torch.randn(shape, generator=numbers).to(dtype) for shape, dtype in shapes] for _ in range(2)]
    for row, other in zip(rows, unpack(pack(rows), rows), strict=True):
        for part, copy in zip(row, other, strict=True):
            assert copy.dtype == part.dtype
            assert torch.equal(copy, part)


def test_caches_are_the_same_to_the_bit(lade_on):
    first, second = ranks.launch(ranks.look_at_caches, 2, True)
    assert [found[:3] for found in first] == [found[:3] for found in second]
    assert sum(found[3] for found in second) > 0  # paths came from the other rank too
    model = tiny_llama(torch.float32)
    plain = [generate_plain(model, prompt(20, seed=seed), max_new_tokens=40).tolist() for seed in range(4)]
    assert [found[0] for found in first] == plain
    # Negative control: without the exchange of keys/values something is different.
    alone = ranks.launch(ranks.look_at_caches, 2, False)
    assert [found[:2] for found in alone[0]] != [found[:2] for found in alone[1]]


def test_the_leader_streams(lade_on):
    first, second = ranks.launch(ranks.stream, 2)
    model, streamer = tiny_llama(), ranks.Recorder()
    processors = ranks.LogitsProcessorList([ranks.CountingBias()])
    plain = generate_plain(model, prompt(20), max_new_tokens=24, streamer=streamer, logits_processor=processors)
    assert first == (plain.tolist(), streamer.calls, None, 2)
    assert second == (plain.tolist(), ["end"], None, 2)


def test_calls_inside_of_a_call_and_another_group(lade_on, tmp_path):
    first, second = ranks.launch(ranks.nest, 2, str(tmp_path))
    model = tiny_llama()
    processors = ranks.LogitsProcessorList([ranks.Adviser(model)])
    plain = generate_plain(model, prompt(20), max_new_tokens=8, logits_processor=processors).tolist()
    assert first == [(plain, 2, [1] * 8)] * 2
    assert second == [(plain, 2, [])] * 2


def test_fall_back_together(lade_on):
    first, second = ranks.launch(ranks.fall_back, 2)
    model = tiny_llama()
    beams = generate_plain(model, prompt(12), max_new_tokens=8, num_beams=2).tolist()
    plain = generate_plain(model, prompt(12), max_new_tokens=8).tolist()
    for found in (first, second):
        assert [tokens for tokens, _ in found] == [beams, plain, plain]
        assert "beam search" in found[0][1]
        assert "output_scores" in found[1][1]
    assert "rank 1 cannot take part" in first[2][1]
    assert "hook" in second[2][1]


def test_tensor_parallel_models(lade_on, tmp_path):
    """lade's decisions are the same on all ranks of such a model, but its steps are not shared on top of that."""
    first, second = ranks.launch(ranks.split_layers, 2, str(tmp_path))
    assert first == second
    greedy, sampled, shared = first
    assert greedy[0] == greedy[1]
    assert sampled[0] == sampled[1]
    assert greedy[2] < 24
    assert shared[0] == greedy[0]
    assert "tp_plan" in shared[1]


def test_pairs_of_a_larger_group(lade_on):
    found = ranks.launch(ranks.two_pairs, 4)
    model = tiny_llama()
    plain = [generate_plain(model, prompt(20, seed=seed), max_new_tokens=24).tolist() for seed in (0, 0, 1, 1)]
    assert found == [(tokens, 2, None) for tokens in plain]


def test_what_differs_is_named(lade_on):
    whats = ["settings", "model", "prompt", "generation settings"]
    for errors in ranks.launch(ranks.differ, 2, *whats):
        for what, (kind, message) in zip(whats, errors, strict=True):
            assert kind == "ValueError"
            assert all(part in message for part in ("not as on rank 0", what, "of rank 1"))


def assert_told(found, *parts):
    for kind, message, *_ in found:
        assert kind == "WorkerError"
        assert all(part in message for part in parts)


def test_a_rank_that_stays_away_is_named(failing):
    (first,), (other,) = failing["stays away"].results()
    assert_told([first], "rank 1 has not come to a generate() call of several processes in 0:00:05")
    assert other is None


def test_a_rank_that_dies_is_named(failing):
    first, dead, third = failing["dies"].results()
    assert dead is None
    assert_told([first, third], "rank 1 is gone")
    for _, message, seconds in (first, third):
        assert "rank 0 " not in message
        assert "rank 2 " not in message
        assert seconds < ranks.PATIENCE / 2  # nobody has waited as long as the group would


def test_the_death_of_the_store_is_told(failing):
    dead, second, third = failing["takes the store along"].results()
    assert dead is None
    assert_told([second, third], "rank 0", "is gone")


def test_a_rank_that_raises_is_named_and_the_next_call_works(failing, lade_on):
    found = failing["raises"].results()
    plain = generate_plain(tiny_llama(), prompt(20), max_new_tokens=8).tolist()
    assert [tokens for *_, tokens in found] == [plain] * 3
    assert_told(found[:2], "rank 2 raised RuntimeError: no memory left")
    assert all(seconds < ranks.PATIENCE / 2 for _, _, seconds, _ in found[:2])
    assert found[2][:2] == ("RuntimeError", "no memory left")


def test_a_rank_that_hangs_is_named(failing):
    """It hangs until the others have ended: they ended without it."""
    first, _, third = failing["hangs"].results()
    assert_told([first, third], "rank 1 is gone, or has not answered for 0:00:10")


SCRIPT = """
import json, os, sys
folder, tests = sys.argv[1:]
sys.path.insert(0, tests)
from support import prompt, tiny_llama
import lade
out = tiny_llama().generate(**prompt(20), max_new_tokens=24)
stats = lade.last_stats()
with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
    json.dump([stats.num_workers, stats.fallback_reason, stats.steps, out.tolist()], file)
"""


OPTIONS = "--standalone --nproc_per_node=2 -m lade --level 4 --window 3 --guess 4 --debug"


@beside
def torchrun():
    """An unmodified program under torchrun, with settings from the environment: its status, what is printed, what ranks
    found."""
    with TemporaryDirectory() as folder:
        script, log = Path(folder, "script.py"), Path(folder, "log")
        script.write_text(SCRIPT)
        status = ranks.torchrun(log, *OPTIONS.split(), str(script), folder, os.path.dirname(__file__))
        # From files: torchrun's processes write unbuffered to one pipe, piece by piece.
        found = [json.loads(file.read_text()) for rank in range(2) if (file := Path(folder, str(rank))).exists()]
        return status, log.read_text(), found


def test_torchrun(torchrun, lade_on):
    """DEBUG is printed once."""
    status, printed, found = torchrun
    assert status == 0, printed
    plain = generate_plain(tiny_llama(), prompt(20), max_new_tokens=24).tolist()
    assert len(found) == 2
    for workers, reason, steps, tokens in found:
        assert (workers, reason, tokens) == (2, None, plain)
        assert steps < 24
    assert printed.count("Compression ratio") == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux")
def test_no_thread_outlives_the_interpreter(lade_on):
    """One that does now and then aborts the process (pytorch/pytorch#179291)."""
    plain = generate_plain(tiny_llama(), prompt(20), max_new_tokens=8).tolist()
    for (during, after), first, second in ranks.launch(ranks.leave, 2):
        assert during
        assert not after
        assert first == second == plain


def test_without_a_launcher(lade_on, model, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    lade.config_lade(DIST_WORKERS=2)
    with pytest.raises(ValueError, match="torchrun --nproc_per_node=2"):
        model.generate(**prompt(8), max_new_tokens=4)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="must divide the number of processes, 3, got 2"):
        model.generate(**prompt(8), max_new_tokens=4)
    lade.config_lade(DIST_WORKERS=2, backend="nccl")
    with pytest.raises(ValueError, match="backend must be 'gloo' for prompts on cpu, got 'nccl'"):
        model.generate(**prompt(8), max_new_tokens=4)
    lade.config_lade(DIST_WORKERS=1)
    model.generate(**prompt(8), max_new_tokens=4)
    assert lade.last_stats().fallback_reason is None


def test_a_guess_that_is_no_number(lade_on):
    """It spoils the block of the rank that has it; all ranks go on with plain generate()'s tokens."""
    cases = [("greedy", 3), ("sampled", 1), ("stateful", 1)]
    model, expected, unused = tiny_llama(), {}, {}
    for name, batch_size in cases:
        torch.manual_seed(0)
        text = generate_plain(model, prompt(20, batch_size), **ranks.arguments_of(name)[0])
        expected[name, batch_size] = text.tolist()
        unused[name, batch_size] = sorted(set(range(61)) - set(text.flatten().tolist()))
    found = ranks.launch(ranks.run_poisoned, 2, unused, cases, 2)
    for key, tokens in expected.items():
        for rank in range(2):
            assert found[rank][key][:2] == (tokens, None), (rank, key)
    assert any(found[0][key][2] for key in expected)
