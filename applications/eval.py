"""Speed and quality of generate() on a published task, with lookahead decoding and without.

python applications/eval.py --task humaneval --data HumanEval.jsonl --limit 20                    # plain and lade
python applications/eval.py --task gsm8k --data test.jsonl --compare-with prompt-lookup,static      # other methods too
python applications/eval.py --task humaneval --data HumanEval.jsonl --run_code      # pass@1: runs what the model wrote

It takes the bundled checkpoint, which is no good at any of these; --model_path takes any hub name or folder. A stopped
run is gone on with by the same command. `lade eval` is the same.
"""

import sys

from lade.commands.eval import evaluate

if __name__ == "__main__":
    sys.exit(evaluate(sys.argv[1:], "eval.py"))
