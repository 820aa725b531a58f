"""PTX as this repository ships it, crates/gqa-host/ptx/: files of kernels, described in
crates/gqa-ptx/src/packed.rs."""
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
    row = next(row for row in module["kernels"] if row["name"] == kernel)
    # Older folders have a file for each kernel and do not name it.
    packed = (folder / row.get("file", f"{module['arch']}/{kernel}.ptx.packed")).read_bytes()
    text = absolute(lzma.decompress(packed, lzma.FORMAT_ALONE).decode())
    header, *entries = re.split(r"(?m)^(?=\.visible \.entry )", text)
    return header + next(text for text in entries if text.startswith(f".visible .entry {kernel}("))


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
