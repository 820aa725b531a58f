"""The class that vLLM registers by this package's name: it chooses the backend for a layer."""

import logging
from typing import Any, ClassVar

from gqa.vllm._backend import Backend

# vLLM's logger has the handlers.
_logger = logging.getLogger("vllm.gqa")


class Choice(Backend):
    """vLLM has one name for backends of other packages, and MLA layers need other classes.

    vLLM validates this class for a layer, and then imports the class that :meth:`full_cls_name`
    names: for MLA layers that of the latent kernels, or where these cannot take the layer the one
    that vLLM chooses if no backend is named.
    """

    _chosen: ClassVar[tuple[str, str]] = Backend.full_cls_name()

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls._chosen

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Reasons why the layer is refused."""
        if asked["use_mla"]:
            cls._chosen = _for_latent(asked)
            return []
        cls._chosen = Backend.full_cls_name()
        reasons: list[str] = super().validate_configuration(**asked)
        return reasons


def _for_latent(asked: dict[str, Any]) -> tuple[str, str]:
    """Module and name of the backend of an MLA layer."""
    from gqa.vllm._latent import LatentBackend

    reasons = LatentBackend.validate_configuration(**asked)
    if not reasons:
        name: tuple[str, str] = LatentBackend.full_cls_name()
        return name
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    layer = {name: x for name, x in asked.items() if name != "device_capability"}
    path: str = current_platform.get_attn_backend_cls(None, AttentionSelectorConfig(**layer))
    said = "gqa does not take this model's MLA layers (%s): vLLM's %s does"
    _logger.warning(said, "; ".join(reasons), path.rpartition(".")[2])
    module, _, qualified = path.rpartition(".")
    return module, qualified
