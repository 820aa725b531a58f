#!/usr/bin/env python3
"""Stores the node cases of the `onnx` package for the operators that are here (see tests/cases/README.md).

    pip install onnx==1.23.2 ml_dtypes==0.6.0 numpy==2.4.6     (made with Python 3.11)
    python3 tests/make_onnx_cases.py            write tests/cases/attention and the others anew
    python3 tests/make_onnx_cases.py --check    make them again in a temporary folder and compare with what is stored
    python3 tests/make_onnx_cases.py --list     one line per case

The models, inputs and expected outputs are the package's own; its function-expanded twins, which compute the same with other
operators, are left out. The expected outputs come from the package's reference implementation, which computes float16 and
bfloat16 cases in these types.
"""

import argparse
import filecmp
import json
import os
import shutil
import sys
import tempfile
import warnings

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

ONNX = "1.23.2"
CASES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases")
# Operator and the folder of its cases.
FOLDERS = {"Attention": "attention", "RotaryEmbedding": "rotary_embedding", "TensorScatter": "tensor_scatter"}


def cases():
    """(folder, name, test case) of every single-node case, in order."""
    warnings.simplefilter("ignore")  # overflow in the package's float16 arithmetic
    for case in collect_testcases(None):
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in FOLDERS and not case.name.endswith("_expanded"):
            folder = FOLDERS[nodes[0].op_type]
            yield folder, case.name.removeprefix("test_").removeprefix(folder + "_"), case


def write(root, folder, name, case):
    """One case in ONNX backend-test layout."""
    path = os.path.join(root, folder, name)
    os.makedirs(path)
    model = case.model
    with open(os.path.join(path, "model.onnx"), "wb") as file:
        file.write(model.SerializeToString())
    for number, (inputs, outputs) in enumerate(case.data_sets):
        data = os.path.join(path, f"test_data_set_{number}")
        os.makedirs(data)
        for kind, values, infos in [("input", inputs, model.graph.input), ("output", outputs, model.graph.output)]:
            for index, (value, info) in enumerate(zip(values, infos, strict=True)):
                with open(os.path.join(data, f"{kind}_{index}.pb"), "wb") as file:
                    file.write(numpy_helper.from_array(np.asarray(value), info.name).SerializeToString())
    with open(os.path.join(path, "meta.json"), "w", encoding="utf-8") as file:
        json.dump({"source": f"onnx {ONNX}, {case.name}"}, file)
        file.write("\n")


def differences(made, stored):
    """Paths that are on one side only or differ."""
    found = [os.path.join(stored, name) for name in made.left_only + made.right_only + made.funny_files]
    _, differ, errors = filecmp.cmpfiles(made.left, made.right, made.common_files, shallow=False)
    found += [os.path.join(stored, name) for name in differ + errors]
    for name, sub in made.subdirs.items():
        found += differences(sub, os.path.join(stored, name))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if onnx.__version__ != ONNX:
        sys.exit(f"onnx {onnx.__version__} is installed; the stored cases are those of {ONNX}")
    if arguments.list:
        for folder, name, case in cases():
            node = case.model.graph.node[0]
            attributes = " ".join(f"{a.name}={onnx.helper.get_attribute_value(a)}" for a in node.attribute)
            print(f"{folder}/{name}: opset {case.model.opset_import[0].version} {attributes}")
        return
    with tempfile.TemporaryDirectory() as root:
        count = 0
        for folder, name, case in cases():
            write(root, folder, name, case)
            count += 1
        wrong = []
        for folder in FOLDERS.values():
            made, stored = os.path.join(root, folder), os.path.join(CASES, folder)
            if not arguments.check:
                shutil.rmtree(stored, ignore_errors=True)
                shutil.copytree(made, stored)
            elif os.path.isdir(stored):
                wrong += differences(filecmp.dircmp(made, stored), stored)
            else:
                wrong.append(stored)
    if wrong:
        sys.exit("stored cases differ:\n" + "\n".join(wrong))
    print(f"{count} cases")


if __name__ == "__main__":
    main()
