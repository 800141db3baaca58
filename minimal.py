"""The smallest script that uses lade, and a comparison with plain generate().

python minimal.py                              # plain generate()
USE_LADE=1 LOAD_LADE=1 python minimal.py       # lookahead decoding
python minimal.py --compare                    # both, in one process
"""

import argparse
import math
import os
import statistics
import time
from pathlib import Path

if __name__ == "__main__":
    print("Importing torch and transformers, which takes some seconds ...", flush=True)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade

BUNDLED = Path(__file__).parent / "models" / "stdlib-9m"
PROMPT = '''import os


def find_files(root, pattern="*", recursive=True):
    """Return a sorted list of the files below root whose names match pattern.

    If recursive is false, only the files of root itself are searched.
    """
'''
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95},
}
TRIALS = 5


def load_lade():
    lade.augment_all()
    # The same prompt is run repeatedly: no call may profit from an earlier one. Your own program needs no such line.
    lade.config_lade(SHARE=0)


def timed_generate(model, inputs, arguments):
    """Returns new tokens [T] and seconds."""
    torch.manual_seed(0)
    synchronize(model)
    started = time.perf_counter()
    output = model.generate(**inputs, **arguments)
    synchronize(model)
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - started


def synchronize(model):
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def run(model, tokenizer, inputs, arguments):
    for mode, choice in MODES.items():
        say(f"Running {mode}: a warm-up, then the timed call ...")
        timed_generate(model, inputs, arguments | choice)
        tokens, seconds = timed_generate(model, inputs, arguments | choice)
        print(f"\n----- {mode}: {len(tokens)} tokens, {len(tokens) / seconds:.1f} tokens/s{how()} -----")
        print(tokenizer.decode(tokens, skip_special_tokens=True))


def say(text):
    print(f"\n{text}", flush=True)


def how():
    """Report of lade on the latest call; empty if it is not loaded."""
    stats = lade.last_stats()
    if stats is None:
        return ""
    return (
        f", plain: {stats.fallback_reason}" if stats.fallback_reason else f", {stats.tokens_per_step:.2f} tokens/step"
    )


def compare(model, tokenizer, inputs, arguments):
    """Alternate plain and lookahead, so that a busy machine slows both; medians of TRIALS after a warm-up."""
    load_lade()
    for mode, choice in MODES.items():
        speeds = {"0": [], "1": []}
        outputs = {}
        say(f"Running {mode}: a warm-up, then {TRIALS} times plain generate() and lookahead in turn ...")
        for trial in range(TRIALS + 1):
            for use_lade, speed in speeds.items():
                os.environ["USE_LADE"] = use_lade
                outputs[use_lade], seconds = timed_generate(model, inputs, arguments | choice)
                if trial > 0:
                    speed.append(len(outputs[use_lade]) / seconds)
        stats = lade.last_stats()
        plain, ahead = statistics.median(speeds["0"]), statistics.median(speeds["1"])
        print(f"\n----- {mode}: {len(outputs['1'])} tokens -----")
        print(tokenizer.decode(outputs["1"], skip_special_tokens=True))
        print(f"plain generate():    {plain:8.1f} tokens/s")
        print(f"lookahead decoding:  {ahead:8.1f} tokens/s")
        print(f"ratio:               {ahead / plain:8.2f}")
        print(f"tokens per step:     {stats.tokens_per_step:8.2f}")
        is_same = torch.equal(outputs["0"], outputs["1"])
        print(f"outputs identical:   {'yes' if is_same else 'no':>8}")
        if not is_same:
            print(difference(model, tokenizer, inputs, outputs["0"], outputs["1"], choice["do_sample"]))
        if stats.fallback_reason:
            print(f"lookahead did not run: {stats.fallback_reason}")


def difference(model, tokenizer, inputs, plain, ahead, is_sampled):
    """A sentence on the place and cause of the divergence of two outputs. plain, ahead: new tokens [T]."""
    dtype = str(model.dtype).removeprefix("torch.")
    place = next((i for i, (one, other) in enumerate(zip(plain, ahead, strict=False)) if one != other), None)
    if dtype not in ("bfloat16", "float16") or place is None:
        return f"This must not happen in {dtype}: please report it, with the output of `lade env`."
    words = " and ".join(repr(tokenizer.decode([int(tokens[place])])) for tokens in (plain, ahead))
    if is_sampled:
        tie = "a near tie between what the same random numbers make of both"
    else:
        with torch.no_grad():
            logits = model(torch.cat([inputs["input_ids"][0], plain[:place]])[None]).logits[0, -1].float()
        one, other = (float(logits[tokens[place]]) for tokens in (plain, ahead))
        unit = torch.finfo(model.dtype).eps * 2 ** math.floor(math.log2(max(abs(one), abs(other), 1e-6)))
        tie = f"logits {one:.3f} and {other:.3f}, {abs(one - other) / unit:.0f} units of rounding apart in {dtype}"
    return (
        f"They part at token {place + 1}, {words}: {tie}.\n"
        "A block of tokens is rounded differently from a single one, so so close a choice may fall either way; each "
        "choice is the model's own, and the same in every run."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default=str(BUNDLED), help="a hub name or a folder; default: the bundled model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: float32 for the bundled model, else auto, which is the checkpoint's")
    parser.add_argument("--max_new_tokens", type=int, default=192)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--compare", action="store_true", help="plain and lookahead in one process")
    args = parser.parse_args()
    # In float32 the outputs must be identical; half the bytes matter to large models alone.
    dtype = args.dtype or ("float32" if Path(args.model_path).resolve() == BUNDLED.resolve() else "auto")

    say(f"Loading {args.model_path} in {dtype} to {args.device} ...")
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=dtype).to(args.device)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(args.device)
    arguments = {"max_new_tokens": args.max_new_tokens}
    if os.environ.get("LOAD_LADE", "0").lower() in ("1", "true", "yes", "on"):
        load_lade()

    say("The prompt (each call starts with an empty memory):\n\n" + args.prompt)
    (compare if args.compare else run)(model, tokenizer, inputs, arguments)


if __name__ == "__main__":
    main()
