"""The rule of `nn.Embedding`: rows are split by ids, columns by features."""

from __future__ import annotations

from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class EmbeddingRule(LayerRule):
    """A table (ids, features)."""

    output_dim = 1

    def matches(self, module: nn.Module) -> bool:
        """Whether it is an embedding."""
        return isinstance(module, nn.Embedding)

    def size_attributes(self, module: nn.Module) -> tuple[str, str]:
        """Returns the attributes for rows and features."""
        return "num_embeddings", "embedding_dim"


RULE = EmbeddingRule()
