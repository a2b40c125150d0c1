"""Paths of files that tests read and start."""

from pathlib import Path

HELPERS = Path(__file__).resolve().parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SCRIPTS = TESTS / "scripts"
BENCHMARKS = TESTS / "benchmarks"
DOCS = ROOT / "docs"
RECIPES = ROOT / "recipes"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
