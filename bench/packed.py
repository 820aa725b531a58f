"""PTX as this repository ships it, crates/gqa-host/ptx/: a file for each kernel, described in crates/gqa-ptx/src/packed.rs."""
import collections
import json
import lzma
import pathlib
import re

SHIPPED = pathlib.Path(__file__).parent.parent / "crates/gqa-host/ptx"


def modules(folder):
    """What the folder's list says of the kernels that were compiled together."""
    return json.loads((folder / "manifest.json").read_text())["modules"]


def ptx(folder, module, kernel):
    """The text of a kernel alone."""
    packed = (folder / module["arch"] / f"{kernel}.ptx.packed").read_bytes()
    return absolute(lzma.decompress(packed, lzma.FORMAT_ALONE).decode())


def absolute(text):
    """The text with numbers of registers in place of their distances."""
    last = collections.Counter()

    def number(match):
        name, distance = match.groups()
        if distance in (None, "="):
            return name
        last[name] += int(distance)
        return f"{name}{last[name]}"

    return re.sub(r"([%$]\w*)(=|[+-]\d+)?", number, text)
