"""Which stages there are, in the order in which a first run takes them, and how long each should take. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One child process. seconds: what it should take on a GPU. function: `module:name` within this package."""

    name: str
    seconds: int
    function: str
    what: str


PAPER = "lookahead, 5 15 15"  # a row: lookahead with the sizes that the paper takes for 7B
HAZARDS = ["hazard_recording", "hazard_eviction", "hazard_thread", "hazard_memory", "hazard_threads"]

STAGES = (
    # The first ten minutes.
    Stage("environment", 20, "checks:environment", "versions, bandwidth, launch and copy latency"),
    Stage("modes", 40, "checks:modes", "every mode equals plain generate() on a tiny model"),
    Stage("kernel", 60, "checks:kernel", "the kernel against float64, and captured once for all lengths"),
    Stage("hazard_recording", 30, "hazards:recording", "100 replays after a reduce-overhead recording and empty_cache()"),
    Stage("hazard_eviction", 30, "hazards:eviction", "40 captures with eviction: equal texts, bounded memory"),
    Stage("hazard_thread", 20, "hazards:ended_thread", "a graph after the thread that captured it has ended"),
    Stage("hazard_memory", 20, "hazards:out_of_memory", "no memory during a capture: the call goes on, the next one captures"),
    Stage("hazard_threads", 30, "hazards:two_threads", "two threads that decode and capture at once"),
    Stage("tests", 120, "checks:gpu_tests", "pytest -m gpu, a process per file"),
    Stage("costs", 80, "costs:step_costs", "7B: a step of 1 to 128 tokens, eager, captured, with the kernel, beside the bytes floor"),
    Stage("speeds", 100, "costs:speeds", "7B: milliseconds per step of plain, tree, lookahead; device and host"),
    Stage("bundled", 60, "costs:bundled", "the bundled checkpoint: tokens per second of all methods on real text"),
    Stage("static", 100, "costs:static", "7B: generate() with a static cache under compile"),
    Stage("bundled_static", 100, "costs:bundled_static", "the bundled checkpoint: the same"),
    # Then.
    Stage("compile", 150, "costs:compiled", "7B: COMPILE=1 with CUDA_GRAPH=1"),
    Stage("long_contexts", 150, "costs:long_contexts", "7B: steps behind 8k to 32k tokens"),
    Stage("shapes", 120, "costs:other_shapes", "1B and 8B: the table of `costs`"),
    Stage("sampling", 100, "costs:sampling", "7B: milliseconds per step of sampling"),
    Stage("batch", 100, "costs:batch", "7B: milliseconds per step of four rows"),
    Stage("mixed_lengths", 60, "later:mixed_lengths", "24 calls of mixed lengths: captures, seconds"),
    Stage("cold_call", 90, "later:cold_call", "a first call with empty compiler caches, and after lade.warmup()"),
    Stage("memory", 60, "later:memory", "memory after each of 30 calls"),
    Stage("trace", 60, "later:trace", "a profiler trace of some steps, and where the host waits"),
)  # fmt: skip
