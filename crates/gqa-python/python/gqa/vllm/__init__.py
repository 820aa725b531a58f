"""An attention backend of vLLM: ``attention_backend="CUSTOM"``, or ``"GQA"`` where a release
lets packages name their own.

vLLM finds :func:`register` by this package's entry point, in each of its processes.
"""

from typing import Any

# Releases whose interface was tried.
SUPPORTED = ("0.26",)
BACKEND = "gqa.vllm._choice.Choice"
_NAME = "GQA"


def register() -> None:
    """Makes the backend known to vLLM; does nothing where vLLM knows it, or has another package's
    by that name.

    Whether the release is supported is only asked when the backend is chosen: who uses vLLM
    without it is not disturbed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name() != "CUSTOM":
        return
    if hasattr(AttentionBackendEnum, "register"):
        AttentionBackendEnum.register(_NAME, BACKEND)
    elif not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def name() -> str:
    """What vLLM calls the backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    members: Any = AttentionBackendEnum.__members__
    return _NAME if _NAME in members else "CUSTOM"


def check_release() -> None:
    """Errs unless the installed release of vLLM is supported."""
    from vllm import __version__ as found

    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise RuntimeError(f"vllm: got {found}; allowed: {', '.join(SUPPORTED)} for gqa's backend")
