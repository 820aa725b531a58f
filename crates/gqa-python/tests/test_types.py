"""py.typed: the package's annotations by mypy --strict, its stubs against what they describe."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent
needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="no mypy")


def checked(*arguments):
    """The output of `python -m module`, which must succeed."""
    command = [sys.executable, "-m", *arguments]
    ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_mypy
def test_the_package_and_calls_of_it():
    assert "Success" in checked("mypy", "--package", "gqa", "--module", "typed")


@needs_mypy
def test_stubs_say_what_there_is(tmp_path):
    """Of the modules that have stubs."""
    others = tmp_path / "others"
    others.write_text("gqa\\._(?!gqa(\\.|$)).*\ngqa\\.(distributed|sglang|transformers|vllm).*\n")
    options = "--mypy-config-file", "pyproject.toml", "--allowlist", str(others)
    assert "Success" in checked("mypy.stubtest", *options, "--ignore-unused-allowlist", "gqa")
