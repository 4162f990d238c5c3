"""What adapters are, without torch: for checks of a configuration, and for the names in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "adapters.layers."
# Where each layer is, and over which side the tensor-parallel ranks share it.
_HOMES: Final = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}
TARGETS: Final = tuple(_HOMES)
BY_COLUMNS: Final = ("linear_proj", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What the adapters are.

    Args:
        rank: of the product.
        alpha: the product counts alpha / rank.
        dropout: share of the adapters' inputs that is dropped in training.
        target_modules: the layers that get adapters.
        seed: of their initial weights, which do not depend on the parallel layout.

    Example:
        >>> LoraSettings(rank=8, alpha=16).scale
        2.0
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS
    seed: int = 1234

    @property
    def scale(self) -> float:
        """How much the product counts."""
        return self.alpha / self.rank


def num_sections(name: str) -> int:
    """Return into how many parts the rows of a layer's B are divided: gate and up are two.

    Example:
        >>> num_sections("linear_fc1"), num_sections("linear_qkv")
        (2, 1)
    """
    return 2 if name == "linear_fc1" else 1


def home_of(name: str) -> str:
    """Return where a layer is within a transformer layer.

    Example:
        >>> home_of("linear_fc2")
        'mlp.linear_fc2'
    """
    return _HOMES[name]
