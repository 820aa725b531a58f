#!/usr/bin/env python3
"""Stores the schemas of the operators that are here (see tests/cases/README.md).

    pip install onnxruntime==1.32.0 onnx==1.23.2     (made with Python 3.11)
    python3 tests/make_schemas.py            write tests/cases/schemas.json anew
    python3 tests/make_schemas.py --check    compare with what is stored

What is stored, crates/gqa-onnx compares its operators with; tests/ort.py compares the operators of libgqa_ort.so with what is
installed, and that with what is stored. Values that an attribute may have, and rules between inputs, are in the schemas' texts
only: a digest of these is stored, so that a changed text is seen and read.
"""

import hashlib
import json
import os
import sys

import onnx
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as pybind

STORED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases", "schemas.json")
OPERATORS = [("", "Attention"), ("", "RotaryEmbedding"), ("", "TensorScatter"),
             ("com.microsoft", "GroupQueryAttention"), ("com.microsoft", "PagedAttention")]
# What the schemas have and our operators refuse by name, with the reason.
REFUSED = []


def attribute(found, proto):
    """Type, and "required", null, or [the default]."""
    kind = found.type.name
    if found.required:
        return [kind, "required"]
    if proto.type == onnx.AttributeProto.UNDEFINED:
        return [kind, None]
    value = helper.get_attribute_value(proto)
    return [kind, [value.decode() if isinstance(value, bytes) else value]]


def digest(found):
    """Of all that a schema says in words, without its line breaks."""
    described = [*found.inputs, *found.outputs, *(value for _, value in sorted(found.attributes.items()))]
    words = " ".join([found.doc or "", *(value.description for value in described)]).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def schema(found, default):
    values = lambda kind: [[value.name, value.option.name == "Single"] for value in getattr(found, kind)]
    return {"domain": found.domain, "operator": found.name, "since": found.since_version, "inputs": values("inputs"), "outputs": values("outputs"),
            "attributes": {name: attribute(value, default(value)) for name, value in sorted(found.attributes.items())},
            "types": {types.type_param_str: sorted(types.allowed_type_strs) for types in found.type_constraints},
            "text": digest(found)}


def schemas():
    """Those of the installed packages: every version of an operator of ONNX, and ONNX Runtime's own."""
    own = [schema(found, lambda value: onnx.AttributeProto.FromString(value._default_value))
           for found in pybind.get_all_operator_schema() if found.domain == "com.microsoft"]
    all_of_them = [schema(found, lambda value: value.default_value) for found in onnx.defs.get_all_schemas_with_history()] + own
    wanted = [found for found in all_of_them if (found["domain"], found["operator"]) in OPERATORS]
    return sorted(wanted, key=lambda found: (OPERATORS.index((found["domain"], found["operator"])), found["since"]))


def text():
    lines = lambda values: ",\n".join("  " + json.dumps(value) for value in values)
    return '{\n "schemas": [\n' + lines(schemas()) + '\n ],\n "refused": [\n' + lines(REFUSED) + "\n ]\n}\n"


def stored():
    with open(STORED, encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if text() == stored() else f"{STORED} differs")
    with open(STORED, "w", encoding="utf-8") as file:
        file.write(text())
