"""Defines the tensor-parallel rule of `nn.Embedding`: the table (ids, features) is split by ids or by features."""

from __future__ import annotations

from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class EmbeddingRule(LayerRule):
    """The rule of an embedding table (ids, features)."""

    output_dim = 1

    def matches(self, module: nn.Module) -> bool:
        """Returns whether `module` is an embedding."""
        return isinstance(module, nn.Embedding)

    def size_attributes(self, module: nn.Module) -> tuple[str, str]:
        """Returns the names of the attributes with the number of ids and the number of features."""
        return "num_embeddings", "embedding_dim"


RULE = EmbeddingRule()
