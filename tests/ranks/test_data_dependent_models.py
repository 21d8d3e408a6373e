"""Models whose own code goes other ways for other data, or does what blocks seldom do: one device's losses and
gradients, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS, WIDTH, ROWS, LENGTH = 39, 16, 8, 6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chosen(nn.Module):
    """Experts in a list, of which only those run that a token is for; what a token is decides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(Plain() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, y = (x[..., 0] > 1).long() + (x[..., 0] > 2).long(), self.norm(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (mine := kind == number).any():
                out[mine] = expert(y[mine])
        return x + out


class Twice(Plain):
    """The same weights twice in one forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Mean(Plain):
    """Takes the mean over the rows away, as batch norm does, by its own means."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True) if self.training else x)


class Noisy(Plain):
    """Draws while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Capacity(Plain):
    """Tokens beyond the first `room` of one kind are left out."""

    room = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        kind = (flat[:, 0] > 1).long()
        place = F.one_hot(kind, 2).cumsum(0).gather(1, kind.unsqueeze(1))
        return torch.where((place <= self.room).view(*x.shape[:2], 1), super().forward(x), x)


class Roomy(Capacity):
    room = ROWS * LENGTH


class Favourites(Plain):
    """Takes the tokens that it likes best of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        best = flat[:, 0].topk(len(flat) // 2, dim=0).indices
        return flat.index_add(0, best, super().forward(flat[best])).view(x.shape)


class Routed(Plain):
    """As many features to choose from as tokens pass together where rows have eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = x.topk(1, dim=-1).values + x.reshape(-1, WIDTH).topk(1, dim=1).values.view(*x.shape[:2], 1)
        return super().forward(x) * (best > 0)


class Counter(Plain):
    """Counts its calls in a buffer, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Running(Plain):
    """Takes a running mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x - self.mean)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return y


class Spectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, output: output * 1.5)


class Softer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient * 0.5)


class Sloped(Plain):
    """Takes gradients of its own weights inside of its forward, whoever calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            slope = torch.autograd.grad(self.up.weight.square().sum(), self.up.weight, create_graph=self.training)[0]
        return super().forward(x) * (1 + 0.1 * slope.mean())


KINDS: dict[str, Any] = {
    "sloped": Sloped,
    "counter": Counter,
    "running": Running,
    "spectral": Spectral,
    "hooked": Hooked,
    "softer": Softer,
    "plain": Plain,
    "chosen": Chosen,
    "twice": Twice,
    "mean": Mean,
    "noisy": Noisy,
    "capacity": Capacity,
    "roomy": Roomy,
    "favourites": Favourites,
    "routed": Routed,
}
LOSSES: dict[str, Any] = {
    "contrast": lambda output, batch: F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output))),
    "labels": lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()),
    "rows": lambda output, batch: (
        F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none").mean(1).mean()
    ),
}


class Net(nn.Module):
    shift_labels = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Across(Net):
    """The last block is given the first one's output too."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        first = self.layers[0](self.table(input_ids))
        logits: torch.Tensor = self.head(self.layers[2](self.layers[1](first) + first))
        return logits


class Dropping(Net):
    """Leaves its second block out by chance, as random depth does."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.table(input_ids)
        for number, layer in enumerate(self.layers):
            if number != 1 or not self.training or torch.rand(()) < 0.5:
                x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Asking(Net):
    """Asks for numbers of its data as XLM and LED do: how long the longest row is, whether any place is special."""

    def forward(self, input_ids: torch.Tensor, special: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        assert int((input_ids >= 0).sum(1).max()) <= input_ids.shape[1]
        special = torch.zeros_like(input_ids, dtype=torch.bool) if special is None else special
        return super().forward(input_ids) * (2.0 if special.any().item() else 1.0)


class Rescaling(Net):
    """Writes to its own weights when it begins to train or to be looked at, as RWKV does."""

    halved = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.training == self.halved:
            with torch.no_grad():
                for layer in self.layers:
                    layer.down.weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        return super().forward(input_ids)


WHOLE: dict[str, Any] = {"across": Across, "dropping": Dropping, "asking": Asking, "rescaling": Rescaling}


def made(kind: str) -> nn.Module:
    model = (WHOLE[kind]("plain") if kind in WHOLE else Net(kind)).double()
    if kind == "chosen":  # words of the first rows are for one expert, of the last ones for all
        with torch.no_grad():
            model.table.weight[:, 0] = torch.arange(WORDS).double().remainder(4)
            model.table.weight[: WORDS // 2, 0] = 0
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.cat(
        [
            torch.randint(0, WORDS // 2, (ROWS // 2, LENGTH), generator=random),
            torch.randint(0, WORDS, (ROWS // 2, LENGTH), generator=random),
        ]
    )
    labels = ids.roll(-1, 1)
    labels[: ROWS // 4, 3:] = -100
    return {"input_ids": ids, "labels": labels}


def under(kind: str, plan: str, loss: str | None = None) -> Any:
    own = {"loss": LOSSES[loss]} if loss is not None else {}
    try:
        trainer = parallelize(
            made(kind), lambda given: torch.optim.AdamW(given, lr=1e-2), plan, precision="fp64", **own
        )
        loss, _, gradients = trainer.gradients(batch_of(0))
        first = {name: gradient.clone() for name, gradient in (gradients or {}).items()}
        losses = [trainer.step(batch_of(step)).loss for step in range(2)]
    except InputError as error:
        return str(error)
    state = trainer.full_state_dict()
    return [loss, *losses], first, None if state is None else {name: tensor.clone() for name, tensor in state.items()}


def alone(kind: str) -> Any:
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(step: int) -> float:
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        return loss.item()

    losses = [backward(0)]
    first = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in model.named_parameters()
    }
    for step in range(2):
        losses.append(backward(step))
        optimizer.step()
    return losses, first, model.state_dict()


def equal(ranks: Any, kind: str, plan: str, world: int) -> None:
    found, expected = ranks.run(world, under, kind, plan)[0], alone(kind)
    assert not isinstance(found, str), found
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    for name, gradient in expected[1].items():
        assert torch.allclose(found[1][name], gradient, rtol=1e-9, atol=1e-13), name
    assert found[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        assert torch.allclose(found[2][name].to(tensor), tensor, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("plan", ["dp2.z3.mb4", "dp2.z3.mb1.rc-full", "dp2.z2.mb2"])
@pytest.mark.covering(1)
def test_experts_that_only_some_ranks_choose_are_reduced_in_one_order_on_all(ranks: Any, plan: str) -> None:
    equal(ranks, "chosen", plan, 2)


def test_weights_that_run_twice_in_a_forward_are_reduced_when_both_are_through(ranks: Any) -> None:
    equal(ranks, "twice", "dp2.z3.mb2", 2)


def test_a_sum_with_an_earlier_block_of_the_same_stage_is_made_by_the_stage_before(ranks: Any) -> None:
    equal(ranks, "across", "pp2.mb4", 2)


@pytest.mark.parametrize("plan", ["dp1.mb4", "dp2.mb2", "pp2.mb4"])
@pytest.mark.covering(1)
def test_a_block_that_takes_weight_gradients_in_its_forward_is_analysed(ranks: Any, plan: str) -> None:
    equal(ranks, "sloped", plan, 1 if plan == "dp1.mb4" else 2)


@pytest.mark.parametrize("length", [2, 7, 8, 64])
@pytest.mark.covering(2)
def test_a_place_among_all_tokens_is_seen_with_an_example_of_any_length(length: int) -> None:
    example = {"input_ids": torch.zeros(3, length, dtype=torch.long)}
    for kind in ("capacity", "favourites"):
        assert analyze_model(made(kind), example=example).unsupported["rows"].startswith("layers.0")
    assert "rows" not in analyze_model(made("routed"), example=example).unsupported


@pytest.mark.parametrize(
    ("kind", "plan"), [("mean", "dp2.mb4"), ("mean", "pp2.mb2"), ("capacity", "dp2.mb4"), ("favourites", "dp2.z3.mb4")]
)
def test_rows_that_see_each_other_are_not_taken_apart(ranks: Any, kind: str, plan: str) -> None:
    said = ranks.run(2, under, kind, plan)
    assert (
        said[0] == said[1]
        and "rows of a batch depend on each other" in said[0]
        and "use dp1 with the batch as one micro-batch" in said[0]
    )
    assert "\n" not in said[0]


@pytest.mark.parametrize("kind", ["mean", "capacity", "favourites"])
def test_rows_that_see_each_other_pass_together(ranks: Any, kind: str) -> None:
    equal(ranks, kind, f"tp2.mb{ROWS}", 2)


def test_a_capacity_with_room_for_all_tokens_may_be_divided(ranks: Any) -> None:
    equal(ranks, "roomy", "dp2.mb2", 2)


@pytest.mark.parametrize("loss", ["contrast", "labels"])
def test_a_loss_that_is_no_mean_over_rows_is_not_taken_apart(ranks: Any, loss: str) -> None:
    assert "rows of a batch depend on each other" in ranks.run(2, under, "plain", "dp2.mb1", loss)[0]


def test_a_mean_loss_over_rows_is_separable_in_spite_of_noise(ranks: Any) -> None:
    assert not isinstance(ranks.run(2, under, "plain", "dp2.mb1", "rows")[0], str)
    assert not isinstance(ranks.run(2, under, "noisy", "dp2.mb2")[0], str)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("counter", "dp1.mb4"),
        ("counter", f"dp1.mb{ROWS}.rc-full"),
        ("running", "dp2.mb4"),
        ("spectral", "pp2.mb4"),
        ("spectral", f"dp1.mb{ROWS}.rc-full"),
    ],
)
def test_what_a_forward_keeps_for_the_next_is_not_moved_oftener_than_on_one_device(
    ranks: Any, kind: str, plan: str
) -> None:
    said = ranks.run(2 if "2" in plan else 1, under, kind, plan)[0]
    expected = ("changes a state that the next one reads", "depends on the rows of each pass")
    assert any(text in said for text in expected) and "\n" not in said


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("counter", "dp2.z3.mb4"),
        ("running", f"tp2.mb{ROWS}"),
        ("spectral", "dp2.z1.mb4"),
        ("hooked", "dp2.z3.mb4"),
        ("softer", "pp2.mb4"),
    ],
)
@pytest.mark.covering(3)
def test_where_one_forward_is_one_step_what_it_keeps_is_that_of_one_device(ranks: Any, kind: str, plan: str) -> None:
    equal(ranks, kind, plan, 2)


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        ("hooked", "pp2.mb4", "layers.0 has a hook"),
        ("softer", "tp2.mb8", "layers.0.up.weight has a gradient hook"),
    ],
)
def test_what_would_be_left_out_is_refused_in_one_line(ranks: Any, kind: str, plan: str, said: str) -> None:
    assert said in ranks.run(2, under, kind, plan)[0]


def test_a_block_that_stands_twice_in_a_list_is_refused_in_one_line() -> None:
    model = Net("plain")
    model.layers[2] = model.layers[0]
    with pytest.raises(InputError, match=r"layers.2 and layers.0 are the same module"):
        analyze_model(model)


def test_blocks_that_run_in_some_passes_only_are_refused_where_ranks_would_hang(ranks: Any) -> None:
    assert "layers.1 runs in some forwards and not in others" in ranks.run(1, under, "dropping", "z3.mb1")[0]
    assert not isinstance(ranks.run(1, under, "dropping", "dp1.mb1")[0], str)


def with_running_statistics(plan: str, kept: bool) -> str:
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=kept), nn.Flatten(), nn.Linear(16, 3)
    )
    try:
        trainer = parallelize(
            model,
            lambda given: torch.optim.SGD(given, lr=0.1),
            plan,
            loss=lambda output, batch: output.square().mean(1).mean(),
        )
        trainer.step({"input": torch.ones(4, 1, 6) * torch.arange(6)})
    except InputError as error:
        return str(error)
    return "it ran"


def test_instance_norm_with_running_statistics_is_refused_for_split_batches(ranks: Any) -> None:
    for said in ranks.run(2, with_running_statistics, "dp2.mb2", True):
        assert "1 is a norm with batch statistics" in said
    assert "1 is a norm with batch statistics" in ranks.run(1, with_running_statistics, "dp1.mb2", True)[0]
    assert ranks.run(2, with_running_statistics, "dp2.mb2", False) == ["it ran"] * 2
    assert ranks.run(1, with_running_statistics, "dp1.mb4", True) == ["it ran"]


@pytest.mark.parametrize("plan", [f"tp2.mb{ROWS}", "pp2.mb4", "dp2.z3.mb2"])
@pytest.mark.covering(1)
def test_a_model_that_asks_for_numbers_of_its_data_is_understood(ranks: Any, plan: str) -> None:
    assert len(analyze_model(made("asking")).regions) == 3
    equal(ranks, "asking", plan, 2)


@pytest.mark.parametrize("plan", [f"tp2.mb{ROWS}", "dp2.z1.mb4"])
@pytest.mark.covering(1)
def test_a_model_that_writes_to_its_own_weights_is_read_without_being_changed(ranks: Any, plan: str) -> None:
    model = made("rescaling")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert len(analyze_model(model).regions) == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    equal(ranks, "rescaling", plan, 2)


def test_weights_that_the_forward_writes_to_are_not_gathered_anew_for_each(ranks: Any) -> None:
    said = ranks.run(2, under, "rescaling", "dp2.z3.mb2")[0]
    assert "the forward writes to layers.0.down.weight" in said and "use z2 at most" in said
