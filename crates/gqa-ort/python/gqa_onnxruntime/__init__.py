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
    is_class = isinstance(session_options, type)
    register_library = getattr(session_options, "register_custom_ops_library", None)
    if is_class or register_library is None:
        got = f"the class {session_options.__name__}" if is_class else type(session_options).__name__
        allowed = "an onnxruntime.SessionOptions, which a session is then made with"
        raise TypeError(f"session_options: got {got}; allowed: {allowed}")
    register_library(library_path())
