"""The training text of the bundled checkpoint: the standard library of the running interpreter.

Four kinds of documents, all made from files below `sysconfig`'s "stdlib" path and nothing else:

    code   the modules' source files (modules in HELD_OUT are left out and measure the held-out loss)
    test   the interpreter's own test-suite, where it is installed
    chat   questions and answers made from docstrings and signatures by the templates below
    quiz   those of them that ask for a fact: what a name is, does, takes, or is for

Knows nothing about tokens or tensors.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Never trained on, their tests neither: the held-out loss and the benchmark prompts come from these.
HELD_OUT = frozenset(
    """bisect calendar cmd colorsys configparser csv difflib fnmatch ftplib graphlib
    heapq ipaddress mailbox queue sched shelve statistics textwrap tomllib wave""".split()  # noqa: SIM905
)
# Tables of characters, third-party trees, and generated files: no prose and no code to learn from.
SKIPPED_FOLDERS = {
    "site-packages",
    "__pycache__",
    "encodings",
    "ensurepip",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "data",
}
LONGEST_BODY = 1200  # characters; longer functions make poor answers
LONGEST_ANSWER = 900  # characters
# What a chat asks for when it wants a fact, not code; see `conversations`.
FACTS = ("What ", "Explain ", "How do I ")

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class Function:
    """One documented function, method or class of the standard library."""

    module: str
    name: str  # dotted inside the module, e.g. "JSONDecoder.decode"
    kind: str  # "function", "method" or "class"
    signature: str  # "def f(a, b=1):"
    arguments: str  # "(a, b=1)"
    doc: str
    body: str  # source after the docstring, dedented; empty for a class


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def module_name(path: Path, root: Path) -> str:
    """`<root>/json/decoder.py` -> `json.decoder`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_held_out(module: str) -> bool:
    parts = module.split(".")
    if parts[0] == "test" and len(parts) > 1:
        return parts[1].removeprefix("test_") in HELD_OUT
    return parts[0] in HELD_OUT  # submodules too


def source_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """(module, source) of every usable file, in a fixed order."""
    root = root or stdlib_root()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(relative[:-1]) or relative[0].startswith("_sysconfigdata"):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue  # some files of the test-suite are broken on purpose
        yield module_name(path, root), source


def functions_of(module: str, source: str) -> Iterator[Function]:
    """Every documented public definition of one module."""
    lines = source.splitlines()

    def visit(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            name = prefix + child.name
            doc = ast.get_docstring(child)
            if doc and not child.name.startswith("_"):
                yield describe(child, name, doc)
            if isinstance(child, ast.ClassDef):
                yield from visit(child, name + ".")

    def describe(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str, doc: str) -> Function:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            return Function(module, name, "class", f"class {node.name}({bases}):" if bases else f"class {node.name}:",
                            "", doc, "")  # fmt: skip
        arguments = f"({ast.unparse(node.args)})"
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        statements = node.body[1:]
        body = ""
        if statements:
            block = lines[statements[0].lineno - 1 : node.end_lineno]
            body = inspect.cleandoc("\n" + "\n".join(block)) if block else ""
        kind = "method" if "." in name else "function"
        return Function(module, name, kind, f"{keyword} {node.name}{arguments}:", arguments, doc, body)

    yield from visit(ast.parse(source), "")


def first_paragraph(doc: str) -> str:
    return doc.split("\n\n", 1)[0].strip()


def indent(text: str) -> str:
    return "\n".join("    " + line if line.strip() else "" for line in text.splitlines())


def questions(function: Function) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs about one definition, in several wordings."""
    full = f"{function.module}.{function.name}"
    short = first_paragraph(function.doc)
    article = {"function": "a function", "method": "a method", "class": "a class"}[function.kind]
    if len(short) <= LONGEST_ANSWER:
        yield f"What does {full} do?", short
        yield f"What is {full}?", f"{full} is {article} of the module {function.module}.\n\n{short}"
        yield f"Explain {function.name.split('.')[-1]} from the module {function.module}.", short
    if function.kind != "class":
        yield f"What are the arguments of {full}?", f"{full}{function.arguments}"
        if len(function.doc) <= LONGEST_ANSWER:
            yield f"Write a docstring for this function:\n\n{function.signature}", f'"""{function.doc}"""'
    if 0 < len(function.body) <= LONGEST_BODY and len(function.doc) <= LONGEST_ANSWER:
        head = function.signature + "\n" + indent(f'"""{function.doc}"""')
        yield f"Complete this function:\n\n{head}", f"{head}\n{indent(function.body)}"
        yield f"Write a Python function {function.name.split('.')[-1]}{function.arguments} that does this: {short}", \
              f"{function.signature}\n{indent(function.body)}"  # fmt: skip


def module_questions(module: str, source: str) -> Iterator[tuple[str, str]]:
    doc = ast.get_docstring(ast.parse(source))
    if doc and len(first_paragraph(doc)) <= LONGEST_ANSWER:
        yield f"What is the module {module} for?", first_paragraph(doc)
        yield f"What does the module {module} do?", first_paragraph(doc)
        yield f"How do I use {module}?", f"import {module}\n\n{first_paragraph(doc)}"


def conversations(files: list[tuple[str, str]], seed: int = 0, only: tuple[str, ...] = ("",)) -> list[list[Turn]]:
    """Chats of one to three question/answer rounds, shuffled; `only` questions that begin with one of these."""
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    for module, source in files:
        if module.split(".")[0] in ("test", "idlelib"):
            continue
        pairs += module_questions(module, source)
        for function in functions_of(module, source):
            pairs += questions(function)
    pairs = [pair for pair in pairs if pair[0].startswith(only)]
    rng.shuffle(pairs)
    chats: list[list[Turn]] = []
    while pairs:
        chat: list[Turn] = []
        for _ in range(min(rng.choice((1, 1, 2, 3)), len(pairs))):
            question, answer = pairs.pop()
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append(chat)
    return chats


def code_prompts(files: list[tuple[str, str]], per_module: int = 2, seed: int = 0) -> list[dict[str, str]]:
    """Unfinished source: up to 25 lines that end with a function's docstring. One of each module first, then the
    rest."""
    rng = random.Random(seed)
    found: list[tuple[int, dict[str, str]]] = []
    for module, source in files:
        lines = source.splitlines()
        nodes = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 2
        ]
        rng.shuffle(nodes)
        for turn, node in enumerate(nodes[:per_module]):
            end = node.body[0].end_lineno or node.lineno
            text = "\n".join(lines[max(0, end - 25) : end]) + "\n"
            found.append((turn, {"id": f"{module}.{node.name}", "prompt": text}))
    return [prompt for _, prompt in sorted(found, key=lambda item: item[0])]


def question_prompts(files: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The questions of `conversations`, each once and alone."""
    asked = [turn["content"] for chat in conversations(files) for turn in chat if turn["role"] == "user"]
    return [{"id": f"question.{number}", "turns": [text]} for number, text in enumerate(dict.fromkeys(asked))]


def main() -> None:
    """Write held-out prompts as JSON lines on stdout: those of the benchmarks, or more of them, or questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--per_module", type=int, default=2, help="unfinished functions of each module, at most")
    parser.add_argument("--questions", action="store_true", help="questions about the modules instead")
    args = parser.parse_args()
    held_out = [(module, source) for module, source in source_files() if is_held_out(module) and "test" not in module]
    for prompt in question_prompts(held_out) if args.questions else code_prompts(held_out, args.per_module):
        print(json.dumps(prompt))


if __name__ == "__main__":
    main()
