from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="lade",
    version="0.1.0",
    description="Lookahead decoding: faster Hugging Face generate() with the same output",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["lade", "lade.*"]),
    package_data={"lade.commands": ["prompts.jsonl"], "lade.commands.trace": ["page.html"]},
    entry_points={"console_scripts": ["lade = lade.commands:main"]},
    install_requires=["torch>=2.6", "transformers>=5.8,<6", "accelerate>=1.0", "packaging"],
    extras_require={
        "triton": ["triton"],
        "eval": ["datasets", "rouge_score"],
        "dev": ["pytest", "ruff", "mypy", "hypothesis"],
    },
)
