"""Launches the kernels that `gqa explain --json` lists on PyTorch's tensors, so that they are timed
in one process with other libraries' kernels.

Kernels come from crates/gqa-cuda/ptx/ or from a folder of the same form.
"""
import ctypes
import functools
import json
import os
import pathlib
import subprocess

import torch

import packed

SHIPPED = packed.SHIPPED
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CU_FUNC_ATTRIBUTE_*
CLUSTER, PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_*
PORTABLE_CLUSTER = 8


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with {code}")


@functools.cache
def function(folder, entry, shared_bytes, cluster, sm, constants):
    """Loads an entry of the newest module for the compute capability `sm`, times ten. Its text is
    assembled by itself, because a whole family takes long. `constants` are (parameter, offset,
    byte)."""
    modules = [
        m for m in packed.modules(folder) if any(kernel["name"] == entry for kernel in m["kernels"])
    ]
    usable = [m for m in modules if packed.runs_on(m["arch"], sm)]
    if not usable:
        raise RuntimeError(f"{entry}: {folder} has no module for compute capability {sm / 10}")
    module = max(usable, key=lambda m: packed.number(m["arch"]))
    text = packed.folded(packed.ptx(folder, module, entry), entry, constants).encode() + b"\0"
    loaded, found = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(loaded), text)
    call("cuModuleGetFunction", ctypes.byref(found), loaded, entry.encode())
    call("cuFuncSetAttribute", found, MAX_DYNAMIC_SHARED, shared_bytes)
    if cluster > PORTABLE_CLUSTER and sm >= 90:
        call("cuFuncSetAttribute", found, NON_PORTABLE_CLUSTER, 1)
    return found


def tensor_map(address, value):
    storage = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(storage) % 64
    aligned = (ctypes.c_char * 128).from_buffer(storage, start)
    sizes, strides = (ctypes.c_uint64 * 4)(*value["size"]), (ctypes.c_uint64 * 3)(*value["stride"])
    box, ones = (ctypes.c_uint32 * 4)(*value["box"]), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    # 16-bit elements, rank 4, no interleaving, 128-byte swizzle, 128-byte promotion, zeros outside.
    shape = ctypes.c_void_p(address), sizes, strides, box, ones
    call("cuTensorMapEncodeTiled", aligned, 1, 4, *shape, 0, 3, 2, 0)
    return aligned


@functools.cache
def side_stream():
    """The stream of launches that run concurrently with the following ones."""
    return torch.cuda.Stream(priority=-5)


class Launches:
    """A plan's launches on tensors, contiguous ones on the GPU by role. `run` enqueues them into
    PyTorch's current stream."""

    def __init__(self, plan, tensors, folder=SHIPPED):
        if not plan["launches"]:
            raise RuntimeError("the plan has no launch, so there is nothing to be timed")
        self.plan, self.tensors = plan, tensors
        self.workspace = torch.empty(
            max(plan["workspace_bytes"], 1), dtype=torch.uint8, device="cuda"
        )
        self.counters = torch.zeros(max(plan["counters"], 1), dtype=torch.int32, device="cuda")
        self.launches = [self.prepared(launch, pathlib.Path(folder)) for launch in plan["launches"]]

    def prepared(self, launch, folder):
        found = function(
            folder,
            launch["entry"],
            launch["shared_bytes"],
            launch["max_cluster"],
            self.plan["sm"],
            tuple(map(tuple, launch.get("constants", ()))),
        )
        params = (ctypes.c_ubyte * len(launch["params"]))(*launch["params"])
        values = [self.value(value) for value in launch["values"]] + [params]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        has_clusters = launch["max_cluster"] > 1 and self.plan["sm"] >= 90
        wanted = [(CLUSTER, [launch["cluster"], 1, 1])] if has_clusters else []
        wanted += [(PROGRAMMATIC, [1])] if launch["programmatic"] else []
        attributes = (Attribute * 2)(
            *[Attribute(id, 0, (ctypes.c_uint * 16)(*value)) for id, value in wanted]
        )
        config = Config(
            (ctypes.c_uint * 3)(*launch["grid"]),
            (ctypes.c_uint * 3)(launch["threads"], 1, 1),
            launch["shared_bytes"],
            None,
            attributes,
            len(wanted),
        )
        return config, found, pointers, values

    def value(self, value):
        if value is None:
            return ctypes.c_uint64(0)
        if "counters" in value:
            return ctypes.c_uint64(self.counters.data_ptr())
        memory = self.workspace if value["tensor"] is None else self.tensors[value["tensor"]]
        address = memory.data_ptr() + value["offset"]
        return tensor_map(address, value) if "box" in value else ctypes.c_uint64(address)

    def only(self, *wanted):
        """Keeps the launches whose entry contains one of these names. A name without a launch is an
        error: nothing would be timed."""
        entries = [launch["entry"] for launch in self.plan["launches"]]
        for text in wanted:
            if not any(text in entry for entry in entries):
                raise RuntimeError(
                    f"no launch of {text} to be timed; the plan has {', '.join(entries)}"
                )
        kept = [
            number for number, entry in enumerate(entries) if any(text in entry for text in wanted)
        ]
        self.plan = {**self.plan, "launches": [self.plan["launches"][number] for number in kept]}
        self.launches = [self.launches[number] for number in kept]

    def run(self):
        stream, side = torch.cuda.current_stream(), None
        for described, (config, found, pointers, _) in zip(self.plan["launches"], self.launches):
            if described["concurrent"]:
                side = side_stream()
                side.wait_stream(stream)
            config.stream = (side if described["concurrent"] else stream).cuda_stream
            call("cuLaunchKernelEx", ctypes.byref(config), found, pointers, None)
        if side:
            stream.wait_stream(side)


def options(**values):
    """Command-line options with those names and values; `kv_heads` becomes `--kv-heads`."""
    named = ((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items())
    return [text for pair in named for text in pair]


def explain(program, *options, switches=()):
    """The plan that `gqa explain --json` prints, with environment variables NAME=VALUE. Without
    `--device` it is an H200's."""
    environment = os.environ | dict(switch.split("=", 1) for switch in switches)
    done = subprocess.run(
        [program, "explain", "--json", *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return json.loads(done.stdout)
