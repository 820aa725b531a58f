"""Times how long this GPU's driver takes to assemble the shipped kernels, by family.

    python3 bench/assembly.py [--every N] [--folder crates/gqa-cuda/ptx]

Each kernel is loaded by itself, as `Device::load` does, without folded constants and with the
driver's cache off. Prints for each family the number of kernels for this GPU, and the least, the
median, the largest and the sum of their times. Needs torch with a GPU.
"""
import argparse
import collections
import ctypes
import os
import pathlib
import statistics
import time

os.environ["CUDA_CACHE_DISABLE"] = "1"

import launches
import packed
import torch


def newest(folder, sm):
    """(family, kernel, module) for every kernel, from the newest module that the GPU runs."""
    found = {}
    for module in packed.modules(folder):
        number = packed.number(module["arch"])
        if not packed.runs_on(module["arch"], sm):
            continue
        for kernel in module["kernels"]:
            best = found.get(kernel["name"])
            if best is None or number > best[0]:
                found[kernel["name"]] = number, module
    return [(module["family"], name, module) for name, (_, module) in sorted(found.items())]


def seconds(text):
    """Time to assemble and load a PTX text."""
    loaded = ctypes.c_void_p()
    begun = time.perf_counter()
    launches.call("cuModuleLoadData", ctypes.byref(loaded), text)
    taken = time.perf_counter() - begun
    launches.call("cuModuleUnload", loaded)
    return taken


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--folder", type=pathlib.Path, default=packed.SHIPPED)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one kernel of N only")
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    times = collections.defaultdict(list)
    for family, name, module in newest(options.folder, 10 * major + minor)[:: options.every]:
        text = packed.ptx(options.folder, module, name).encode() + b"\0"
        times[family].append((seconds(text), name))
    print(f"{torch.cuda.get_device_name()}; milliseconds, the driver's cache off")
    columns = "".join(f" {name:>7}" for name in ("kernels", "least", "median", "largest"))
    print(f"{'family':26}{columns} {'sum':>9}  slowest")
    for family, found in sorted(times.items()):
        all_ms = sorted(1e3 * taken for taken, _ in found)
        row = len(found), all_ms[0], statistics.median(all_ms), all_ms[-1]
        columns = "".join(f" {value:7.0f}" for value in row)
        print(f"{family:26}{columns} {sum(all_ms):9.0f}  {max(found)[1]}")


if __name__ == "__main__":
    main()
