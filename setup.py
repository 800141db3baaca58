import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^VERSION = "(.+)"$', (ROOT / "lade/common/version.py").read_text(encoding="utf-8"), re.MULTILINE)[
    1
]

TEST = ["pytest>=8", "pytest-xdist", "hypothesis", "accelerate>=1.0", "prompt_toolkit"]
# What tests/test_clients.py tries; with constraints for torch and transformers, or some of these choose others.
CLIENTS = [
    "accelerate",
    "compressed-tensors",
    "datasets",
    "diffusers",
    "dspy",
    "hqq",
    "inspect-ai",
    "langchain-huggingface",
    "lighteval",
    "lm-eval",
    "lm-format-enforcer",
    "optimum-quanto",
    "outlines",
    "peft",
    "smolagents",
    "torchao",
    "transformers[serving]",
    "trl",
    "xgrammar",
]


def long_description() -> str:
    """README for a package index, where neither pictures nor pages of the repository are at hand: their links become
    plain text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->|<sub>.*?</sub>|!\[[^\]]*\]\((?!https?:)[^)]*\)", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    name="lade",
    version=VERSION,
    description="Faster Hugging Face generate() with the same output: lookahead decoding and recycled guesses, no draft model",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="transformers, generate, speculative decoding, lookahead decoding, LLM inference",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",  # where the tests run each time
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={"Paper": "https://arxiv.org/abs/2402.02057"},
    python_requires=">=3.10",
    packages=find_packages(include=["lade", "lade.*"]),
    package_data={"lade": ["py.typed"], "lade.commands": ["prompts.jsonl"], "lade.commands.trace": ["page.html"]},
    entry_points={"console_scripts": ["lade = lade.commands:main"]},
    install_requires=["torch>=2.6", "transformers>=5.8,<6", "numpy", "packaging", "safetensors"],
    extras_require={
        "chat": ["prompt_toolkit"],
        "triton": ["triton"],
        "plots": ["matplotlib"],
        "test": TEST,
        "clients": [*TEST, *CLIENTS],
        "dev": [*TEST, "ruff", "mypy"],
    },
)
