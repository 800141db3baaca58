"""Processes for tests/test_parallel.py: `launch` starts K ranks, and the functions below are what they run."""

from __future__ import annotations

import atexit
import datetime
import hashlib
import itertools
import os
import socket
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import run
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import lade
from lade.models.self_check import checking_at_once
from lade.parallel import communicator as link
from lade.parallel import partition as shares
from lade.parallel.group import ProcessGroup
from lade.verification.nan_guard import NanGuard
from support.models import CountingBias, Recorder, generate_plain, prompt, seeded, tiny_llama
from support.processes import SERVER

PATIENCE = 300  # seconds that nothing takes unless it hangs, however busy the machine is


def reserved_port() -> int:
    """A port that no other process is given by chance: for a minute it belongs to a connection that has just ended."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()  # the side that closes first keeps the port, which only a server may take over
        return server.getsockname()[1]


class Ranks:
    """Processes that run function(rank, *arguments), each with its rank."""

    def __init__(self, function, size, *arguments, patience=PATIENCE):
        self._patience = patience
        self._pipes, self._processes, port = [], [], reserved_port()
        for rank in range(size):
            receiver, sender = SERVER.Pipe(duplex=False)
            process = SERVER.Process(target=_rank_main, args=(sender, function, rank, size, port, arguments))
            process.start()
            sender.close()
            self._pipes.append(receiver)
            self._processes.append(process)

    def results(self):
        """What each returned, or None for one that died."""
        found, end = {}, time.monotonic() + self._patience
        try:
            while missing := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}:
                ready = wait(list(missing), max(0, end - time.monotonic()))
                assert ready, f"ranks {sorted(missing.values())} did not end within {self._patience} s"
                for pipe in ready:
                    try:
                        found[missing[pipe]] = pipe.recv()
                    except EOFError:
                        found[missing[pipe]] = None
            for process in self._processes:
                process.join(max(0, end - time.monotonic()))
                assert process.exitcode is not None, f"a rank has returned but did not exit within {self._patience} s"
        finally:
            self.kill()
        for result in found.values():
            if isinstance(result, str) and result.startswith("Traceback"):
                raise AssertionError(result)
        return [found[rank] for rank in range(len(found))]

    def kill(self):
        for process in self._processes:
            process.kill()


def launch(function, size, *arguments, patience=PATIENCE):
    """Run function(rank, *arguments) in `size` processes. Returns what each returned, or None for one that died."""
    return Ranks(function, size, *arguments, patience=patience).results()


def torchrun(log, *arguments):
    """`torchrun` with these arguments, in a process of its own that need not import torch. Returns its exit status."""
    process = SERVER.Process(target=_torchrun_main, args=(log, arguments))
    process.start()
    process.join(PATIENCE)
    process.kill()
    return process.exitcode


def _torchrun_main(log, arguments):
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"DIST_WORKERS": "2", "USE_LADE": "1", "OMP_NUM_THREADS": "1"}
    run.main(list(arguments))


def _rank_main(sender, function, rank, size, port, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "USE_LADE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    lade.augment_all()
    try:
        sender.send(function(rank, *arguments))
    except Exception:
        sender.send(traceback.format_exc())


def own_group(seconds=PATIENCE):
    """A process group that the program has made before lade needs one. seconds: that it waits once all ranks are
    there."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    torch.distributed.barrier()
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))


def digest(tensors):
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


# What a case needs beside its name is made in each process anew.
class Countdown(StoppingCriteria):
    """Ends after a number of calls, as a clock would: it says nothing about the text."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


CASES = {
    "greedy": {},
    "ends": {"eos_token_id": [17, 23, 40], "pad_token_id": 0},
    "sampled": {"do_sample": True, "temperature": 0.3, "top_k": 20},
    "recorded": {"return_dict_in_generate": True, "prefill_chunk_size": 6},
    "stateful": {"do_sample": True, "temperature": 0.3, "stateful": True},
    "countdown": {"countdown": 17},
}


def arguments_of(case):
    """Arguments of generate(), and the objects among them that can be looked at afterwards."""
    arguments = {"max_new_tokens": 20, **CASES[case]}
    processor = CountingBias() if arguments.pop("stateful", False) else None
    countdown = arguments.pop("countdown", None)
    if processor is not None:
        arguments["logits_processor"] = LogitsProcessorList([processor])
    if countdown is not None:
        arguments["stopping_criteria"] = StoppingCriteriaList([Countdown(countdown)])
    return arguments, processor


def inputs_of(batch_size, seed):
    """A prompt, or several of which one is padded."""
    inputs = prompt(20, batch_size, seed)
    if batch_size > 1:
        inputs["attention_mask"][0, :4] = 0
    return inputs


def deal_backwards():
    """The likeliest guesses go to the last rank instead of the leader."""
    original = shares.split_row
    shares.split_row = lambda parents, costs: original(parents, costs)[::-1]


def run_cases(rank, settings, batches, workers, backwards):
    """Every case under every setting. Returns (settings, case, batch size, seed) -> what came out.

    Under the first settings each case gets all batches, under the others the cases take turns with them. Three ranks
    run their blocks by lade's own attention.
    """
    if backwards:
        deal_backwards()
    model, found = tiny_llama(), {}
    for level, window, guesses in settings:
        sizes = {"LEVEL": level, "WINDOW_SIZE": window, "GUESS_SET_SIZE": guesses}
        lade.config_lade(MODE="lookahead", **sizes, DIST_WORKERS=workers, USE_FLASH=int(workers == 3))
        is_first = (level, window, guesses) == settings[0]
        for index, case in enumerate(CASES):
            for batch_size, seed in batches if is_first else [batches[index % len(batches)]]:
                arguments, processor = arguments_of(case)
                torch.manual_seed(seed + rank)  # the leader's counts
                output = model.generate(**inputs_of(batch_size, seed), **arguments)
                stats = lade.last_stats()
                found[(level, window, guesses), case, batch_size, seed] = {
                    "tokens": getattr(output, "sequences", output).tolist(),
                    "generator": digest([torch.get_rng_state()]) if arguments.get("do_sample") else None,
                    "steps": stats.steps,
                    "generated": stats.generated_tokens,
                    "blocks": stats.block_tokens,
                    "sent": dict(stats.sent_bytes),
                    "reason": stats.fallback_reason,
                    "prefixes": processor and processor.prefixes,
                }
    return found


def look_at_caches(rank, share_paths):
    """Keys/values that calls leave behind; with share_paths=False each rank keeps what it has."""
    deal_backwards()
    if not share_paths:
        ProcessGroup._broadcast_data = lambda self, what, values, source: values
    model, found = tiny_llama(torch.float32), []
    lade.config_lade(MODE="lookahead", LEVEL=5, WINDOW_SIZE=4, GUESS_SET_SIZE=8, DIST_WORKERS=2)
    for seed in range(4):
        output = model.generate(**prompt(20, seed=seed), max_new_tokens=40, return_dict_in_generate=True)
        layers = output.past_key_values.layers
        states = [states for layer in layers for states in (layer.keys, layer.values)]
        sent = lade.last_stats().sent_bytes["keys/values"]
        found.append((output.sequences.tolist(), digest(states), states[0][0, 0, :, 0].tolist(), sent))
    return found


def stream(rank):
    """A streamer on every rank, a processor on the leader alone, and what each of them got."""
    own_group()
    model, streamer = tiny_llama(), Recorder()
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=2)
    processors = LogitsProcessorList([CountingBias()] if rank == 0 else [])
    output = model.generate(**prompt(20), max_new_tokens=24, streamer=streamer, logits_processor=processors)
    # The program's own group was neither replaced nor used up.
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return output.tolist(), streamer.calls, lade.last_stats().fallback_reason, int(ones)


def run_families(rank, names):
    """Models of other families: their own caches, masks and positions. Returns (name, case) -> equal to plain,
    reason."""
    from support.families import FAMILIES

    found = {}
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3, DIST_WORKERS=2)
    deal_backwards()
    for family in FAMILIES:
        if not family.exists or (names and family.name not in names):
            continue
        model = family.build()
        for batch_size in (3,) if names else (1, 3):
            ids = prompt(12, batch_size, seed=batch_size)["input_ids"].repeat(1, 2)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}):
                plain, states = seeded(generate_plain, model, inputs, max_new_tokens=20, **sampling)
                shared, after = seeded(model.generate, **inputs, max_new_tokens=20, **sampling)
                is_same = torch.equal(plain, shared) and (
                    not sampling["do_sample"] or all(map(torch.equal, after, states))
                )
                found[family.name, batch_size, sampling["do_sample"]] = is_same, lade.last_stats().fallback_reason
    return found


def threads():
    """Names of this process's threads by their numbers; a new thread has none of its own yet."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that has just ended
            found[task.name] = (task / "comm").read_text()
    return found


def leave(rank):
    """What runs at the end of a program, in its middle. Returns the numbers of lade's threads of gloo, during and
    after; all tokens."""
    model = tiny_llama()
    own_group()
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=2)
    before = threads()

    def added():
        return sorted(number for number, name in threads().items() if "gloo" in name and number not in before)

    first = model.generate(**prompt(20), max_new_tokens=8).tolist()
    during = added()
    atexit._run_exitfuncs()
    end = time.monotonic() + PATIENCE
    while added() and time.monotonic() < end:  # a thread that was joined is listed for a moment
        time.sleep(0.01)
    return (during, added()), first, model.generate(**prompt(20), max_new_tokens=8).tolist()


class Adviser(LogitsProcessor):
    """Asks the model itself, with a generate() call of its own, and prefers what it says."""

    def __init__(self, model):
        self.model, self.workers = model, []

    def __call__(self, input_ids, scores):
        said = self.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=3)
        self.workers.append(lade.last_stats().num_workers)
        scores = scores.clone()
        scores[:, said[0, -1]] += 1
        return scores


def nest(rank, folder):
    """A call inside of another one, on the leader; and a process group that is replaced between two calls."""
    model, found = tiny_llama(), []
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=2)
    for name in ("first", "second"):
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
        adviser = Adviser(model)
        output = model.generate(**prompt(20), max_new_tokens=8, logits_processor=LogitsProcessorList([adviser]))
        found.append((output.tolist(), lade.last_stats().num_workers, adviser.workers))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return found


def fall_back(rank):
    """Requests that several processes do not share; the last one only because of rank 1."""
    model, found = tiny_llama(), []
    lade.config_lade(DIST_WORKERS=2)
    for arguments in ({"num_beams": 2}, {"return_dict_in_generate": True, "output_scores": True}, {}):
        if not arguments and rank == 1:
            model.register_forward_hook(lambda *_: None)
        output = model.generate(**prompt(12), max_new_tokens=8, **arguments)
        found.append((getattr(output, "sequences", output).tolist(), lade.last_stats().fallback_reason))
    return found


def split_layers(rank, folder):
    """A model whose layers transformers itself has split over two processes."""
    own_group()
    if rank == 0:
        tiny_llama(torch.float32, vocab_size=64).save_pretrained(folder)
    torch.distributed.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32, attn_implementation="sdpa")
    assert model._tp_size == 2
    found = []
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=1)
    for arguments in ({}, {"do_sample": True, "temperature": 0.4}):
        plain, _ = seeded(generate_plain, model, prompt(20), max_new_tokens=24, **arguments)
        output, _ = seeded(model.generate, **prompt(20), max_new_tokens=24, **arguments)
        found.append((plain.tolist(), output.tolist(), lade.last_stats().steps))
    lade.config_lade(DIST_WORKERS=2)
    output = model.generate(**prompt(20), max_new_tokens=24)
    return *found, (output.tolist(), lade.last_stats().fallback_reason)


def two_pairs(rank):
    """Four processes, two by two, each pair with a prompt of its own."""
    own_group()
    model = tiny_llama()
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=2)
    output = model.generate(**prompt(20, seed=rank // 2), max_new_tokens=24)
    return output.tolist(), lade.last_stats().num_workers, lade.last_stats().fallback_reason


def differ(rank, *whats):
    """Rank 1 calls with something else. Returns the error of each call."""
    own_group(seconds=5 if "workers" in whats else PATIENCE)
    return [error_of_other(what if rank == 1 else None) for what in whats]


def error_of_other(what):
    """What a call raises that differs in `what`, or None."""
    model, inputs, arguments = tiny_llama(), prompt(20), {"max_new_tokens": 8}
    sizes = {"LEVEL": 4, "WINDOW_SIZE": 2 if what == "settings" else 3, "GUESS_SET_SIZE": 4}
    lade.config_lade(MODE="lookahead", **sizes, DIST_WORKERS=1 if what == "workers" else 2)
    if what == "model":
        with torch.no_grad():
            model.model.embed_tokens.weight *= 1.01
    elif what == "prompt":
        inputs = prompt(20, seed=1)
    elif what == "generation settings":
        arguments["max_new_tokens"] = 9
    try:
        model.generate(**inputs, **arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def wait_for_reasons_of(living):
    """The time in which ranks can say that they are still there begins when they have said so, however busy the machine
    is."""
    heard, seconds = set(), itertools.count()

    def reasons(self, original=link.Communicator._reasons):
        found = original(self)
        heard.update(found)
        return found

    link.Communicator._reasons = reasons
    link.time = SimpleNamespace(sleep=time.sleep, monotonic=lambda: next(seconds) if heard >= living else 0)


def fail(rank, culprit, how):
    """One rank stops in the middle of a call. Returns how it ended, and after how long; then what the next call
    gives."""
    model, steps = tiny_llama(), []
    own_group(seconds=10 if how == "hangs" else PATIENCE)
    store = torch.distributed.distributed_c10d._get_default_store()
    link.POLL = datetime.timedelta(seconds=0.2)
    wait_for_reasons_of(set(range(3)) - {rank, culprit})
    is_armed = False

    def before_forward(*_):
        if not is_armed:
            return
        steps.append(time.monotonic())
        if rank == culprit and len(steps) == 5:
            if how == "dies":
                os._exit(1)
            if how == "hangs":
                store.wait([f"ended/{other}" for other in range(3) if other != culprit])
            raise RuntimeError("no memory left")

    hook = model.model.register_forward_pre_hook(lade.allow_hook(before_forward))
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=4, DIST_WORKERS=1)
    with checking_at_once(1):
        model.generate(**prompt(20), max_new_tokens=40)  # the hook's trial
    lade.config_lade(DIST_WORKERS=3)
    is_armed, began = True, time.monotonic()
    try:
        model.generate(**prompt(20), max_new_tokens=40)
        ended = None
    except RuntimeError as error:
        ended = type(error).__name__, str(error), time.monotonic() - began
    if how == "hangs":
        store.set(f"ended/{rank}", "")
        if rank == 0:  # which keeps the store
            store.wait([f"ended/{other}" for other in range(1, 3)])
    if how != "raises":
        return ended
    hook.remove()
    return *ended, model.generate(**prompt(20), max_new_tokens=8).tolist()


def run_poisoned(rank, tokens, cases, workers):
    """Guesses that are not numbers. tokens: by case, those with such embeddings. Returns by case the text, the reason,
    and how often logits were NaN."""
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=4, GUESS_SET_SIZE=4, DIST_WORKERS=workers)
    found, clear = {}, NanGuard.clear
    for name, batch_size in cases:
        trips = set()

        def watched(self, cache, trips=trips):
            trips.update({self} if self.has_tripped else ())
            clear(self, cache)

        NanGuard.clear = watched
        model = tiny_llama()
        with torch.no_grad():
            model.get_input_embeddings().weight[tokens[name, batch_size]] = torch.nan
        torch.manual_seed(0)
        result = model.generate(**prompt(20, batch_size), **arguments_of(name)[0])
        found[name, batch_size] = result.tolist(), lade.last_stats().fallback_reason, len(trips)
    NanGuard.clear = clear
    return found
