"""An attention backend of SGLang: ``--attention-backend gqa --page-size 16``.

SGLang finds :func:`register` by this package's entry point, in each of its processes.
"""

from typing import Any

# Releases whose interface was tried.
SUPPORTED = ("0.5.23",)
NAME = "gqa"


def register() -> None:
    """Makes the backend known to SGLang; does nothing where SGLang has one by that name.

    Whether the release is supported is only asked when the backend is chosen: who uses SGLang
    without it is not disturbed.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        register_attention_backend(NAME)(_made)


def _made(runner: Any) -> Any:
    """The backend of a model's runner."""
    check_release()
    from gqa.sglang._backend import Backend

    return Backend(runner)


def check_release() -> None:
    """Errs unless the installed release of SGLang is supported."""
    from sglang.version import __version__ as found

    if ".".join(found.split(".")[:3]) not in SUPPORTED:
        allowed = f"{', '.join(SUPPORTED)} for gqa's backend"
        raise RuntimeError(f"sglang: got {found}; allowed: {allowed}")
