"""GroupQueryAttention for ONNX Runtime, in unmodified models.

>>> import gqa_onnxruntime, onnxruntime
>>> options = onnxruntime.SessionOptions()
>>> gqa_onnxruntime.register(options)
>>> session = onnxruntime.InferenceSession("model.onnx", options)
"""

import os

__all__ = ["library_path", "register"]


def library_path():
    """The library's path, for `SessionOptions.register_custom_ops_library` and `custom_ops_library` in other programs' settings."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgqa_ort.so")


def register(session_options):
    """Lets sessions with these options run GroupQueryAttention with the library's kernels."""
    session_options.register_custom_ops_library(library_path())
