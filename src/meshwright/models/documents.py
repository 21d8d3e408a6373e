"""Several documents in one row: positions that begin anew tell where one begins, and attention stays inside of it.

Rule: a token whose position is not one more than that of the token before begins a document. Hugging Face's models read `position_ids` so.
"""

from __future__ import annotations

import torch


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """(B, 1, T, T): which keys each query sees, those of its own document up to itself.

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    documents = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)
