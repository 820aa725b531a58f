"""The code of docs/python.md and of the package's README runs as it is printed, in an interpreter
of its own, and so do the examples. What needs a package or a GPU is skipped where it is missing."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent.parent
PAGES = ROOT / "docs/python.md", PACKAGE / "README.md"
EXAMPLES = sorted((PACKAGE / "examples").glob("*.py"))
# A process group of one process, as torchrun would make it.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}


def fences(language):
    """Code in that language, by page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for fence in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, fence.start()) + 1
            found.append(pytest.param(fence[1], id=f"{page.name}:{line}"))
    return found


def run(code, *arguments):
    """Runs code whose modules and GPU are there, and gives what it prints."""
    for module in sorted({*re.findall(r"^(?:import|from) (\w+)", code, re.M)}):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}")
    if "gqa.transformers" in code and importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers")
    if '"device": "cuda"' in code:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
    command = [sys.executable, *arguments]
    environment = {**os.environ, **ALONE}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("code", fences("python"))
def test_code_runs_as_it_is_printed(code):
    printed = run(code, "-c", code)
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert printed.splitlines() == said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example):
    assert run(example.read_text(), str(example)) != ""


def test_the_page_names_the_examples():
    page = PAGES[0].read_text()
    for example in EXAMPLES:
        assert f"`{example.name}`" in page


@pytest.mark.parametrize("code", fences("sh"))
def test_commands_name_files_that_are_there(code):
    """Whether these are run is the part of others: of xtask, or of a GPU."""
    for name in re.findall(r"(?<!\S)(?:\./)?((?:crates|bench)/\S+)", code):
        assert (ROOT / name).exists(), name
