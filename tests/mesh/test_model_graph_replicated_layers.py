"""A layer that stays whole and feeds shares alone is entered at its output; where anything else uses what it gives, its
readers stay whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import analysis

torch.set_num_threads(1)


class Latent(nn.Module):
    """Attention with one compressed key for all heads, of which a part is used as it is; `leaks` adds the latent to
    what it gives."""

    def __init__(self, leaks: str) -> None:
        super().__init__()
        self.q, self.narrow, self.norm = nn.Linear(32, 4 * 12), nn.Linear(32, 8 + 4), nn.RMSNorm(8)
        self.wide, self.out, self.leaks = nn.Linear(8, 4 * (8 + 8)), nn.Linear(4 * 8, 32), leaks
        self.other = nn.Linear(12, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        q = self.q(x).view(rows, length, -1, 12).transpose(1, 2)
        given = self.narrow(x)
        latent, shared = given.split([8, 4], dim=-1)
        k, v = self.wide(self.norm(latent)).view(rows, length, -1, 16).transpose(1, 2).split([8, 8], dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], dim=-1)
        y = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, -1))
        if self.leaks == "residual":
            y = y + F.pad(given, (0, 20))
        if self.leaks == "written":
            buffer = torch.zeros(rows, length, 32)
            buffer[..., :12] = given
            y = y + buffer
        if self.leaks == "other layer":
            y = y + self.other(given)
        return x + y


class Model(nn.Module):
    def __init__(self, leaks: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Latent(leaks) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_compressed_key_is_entered_and_its_norm_has_a_partial_gradient() -> None:
    found = analysis.analyze_model(Model(""))
    region = found.regions[1]
    assert (region.columns, region.rows) == (("blocks.1.q", "blocks.1.wide"), ("blocks.1.out",))
    assert (region.mla_inputs, region.inner_columns, region.module) == (
        ("blocks.1.narrow",),
        ("blocks.1.wide",),
        "blocks.1.q",
    )
    assert found.partial == ("blocks.0.norm.weight", "blocks.1.norm.weight")
    assert found.divisible == {"heads": 4, "kv_heads": 4}


@pytest.mark.parametrize("leaks", ["residual", "written", "other layer"])
def test_the_readers_of_a_compressed_key_with_other_uses_stay_whole(leaks: str) -> None:
    found = analysis.analyze_model(Model(leaks))
    assert not found.regions
    assert any("are not sharded" in line for line in found.findings)
