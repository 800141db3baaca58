"""How well the bundled checkpoint answers questions it was trained on: python models/ask.py

Greedy answers to 24 random questions of each kind, compared with the trained answer: how many begin alike (40
characters), and the mean similarity of the first 120 characters (difflib's ratio; two unrelated docstrings have about
0.3).
"""

import random
from difflib import SequenceMatcher
from pathlib import Path

from corpus import functions_of, is_held_out, questions, source_files
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent / "stdlib-9m"
KINDS = ("What does", "What are the arguments", "Write a docstring", "Write a Python function")


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    files = [
        file for file in source_files() if not is_held_out(file[0]) and file[0].split(".")[0] not in ("test", "idlelib")
    ]
    pairs = [pair for file in files for function in functions_of(*file) for pair in questions(function)]
    random.Random(0).shuffle(pairs)
    for kind in KINDS:
        chosen = [pair for pair in pairs if pair[0].startswith(kind) and len(pair[1]) < 400][:24]
        alike, similarity = 0, 0.0
        for question, expected in chosen:
            chat = [{"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            output = model.generate(**inputs, max_new_tokens=60)[0, inputs["input_ids"].shape[1] :]
            answer = tokenizer.decode(output, skip_special_tokens=True)
            alike += answer[:40] == expected[:40]
            similarity += SequenceMatcher(None, answer[:120], expected[:120]).ratio() / len(chosen)
        print(f"{kind:<24} begins alike: {alike:>2} of {len(chosen)}   mean similarity: {similarity:.2f}")


if __name__ == "__main__":
    main()
