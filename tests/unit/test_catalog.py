"""The catalog: every row reads, has a source, and counts what was published."""

from __future__ import annotations

import csv

import pytest

from meshwright.catalog import read
from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import sizes_from_catalog
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.inputs.cluster_syntax import device_entry, parse_cluster
from meshwright.spec.cluster import Cluster

MODELS, DEVICES = read.models(), read.devices()
PUBLISHED = {name: row for name, row in MODELS.items() if "formula_params" in row}
ENCODERS = {name for name, row in PUBLISHED.items() if row["kind"] == "bert"}


def test_there_are_103_published_architectures_and_38_devices_beside_our_own() -> None:
    assert (len(PUBLISHED), len(MODELS) - len(PUBLISHED)) == (103, 5)
    assert (len(DEVICES), sum(name == "cpu" for name in DEVICES)) == (39, 1)


@pytest.mark.parametrize(
    "rows", [MODELS, DEVICES, read.clusters(), read.links()], ids=["models", "devices", "clusters", "links"]
)
def test_no_name_or_alias_is_given_twice_and_every_row_has_a_source(rows: dict[str, read.CatalogEntry]) -> None:
    names = read.all_names(rows)
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
    assert all(row["source"] for row in rows.values())


def test_no_row_of_a_table_has_more_or_fewer_cells_than_its_header() -> None:
    for path in (read._CATALOG_FOLDER / "models").glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        assert all(len(row) == len(header) for row in rows), path.name


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - ENCODERS))
def test_a_model_has_exactly_the_parameters_of_its_published_formula(name: str) -> None:
    assert model_spec(name, sizes_from_catalog(MODELS[name])).parameters == int(MODELS[name]["formula_params"])


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_an_encoder_trains_a_transform_and_a_bias_instead_of_the_published_pooler(name: str) -> None:
    """Published with the pooler (h x h + h); trained with dense (h x h + h), norm (2 h) and the bias of the decoder
    (V)."""
    sizes = sizes_from_catalog(MODELS[name])
    assert model_spec(name, sizes).parameters == int(MODELS[name]["formula_params"]) + 2 * sizes.hidden + sizes.vocab


@pytest.mark.parametrize("name", sorted(name for name, row in PUBLISHED.items() if "active_params_formula" in row))
def test_experts_count_the_flops_of_the_parameters_that_a_token_meets(name: str) -> None:
    """Two FLOPs for each active parameter but the embedding, which is looked up, and norms and biases, which are below
    a hundredth."""
    sizes = sizes_from_catalog(MODELS[name])
    spec = model_spec(name, sizes)
    flops = sum(layer.repeat * layer.flops for layer in spec.layers)
    looked_up = 0 if sizes.tied_embeddings else sizes.vocab * sizes.hidden
    assert flops / 2 == pytest.approx(int(MODELS[name]["active_params_formula"]) - looked_up, rel=0.01)


@pytest.mark.parametrize("name", sorted(name for name in PUBLISHED.keys() - ENCODERS if "experts" not in MODELS[name]))
def test_a_dense_model_needs_two_flops_a_token_for_each_weight_but_the_embedding(name: str) -> None:
    spec = model_spec(name, sizes_from_catalog(MODELS[name]))
    weights = sum(
        layer.repeat * parameter.numel
        for layer in spec.layers
        if layer.name in ("block", "head")
        for parameter in layer.parameters
        if len(parameter.shape) == 2
    )
    assert sum(layer.repeat * layer.flops for layer in spec.layers) == pytest.approx(2 * weights)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_device_becomes_a_node_with_links_in_base_units(name: str) -> None:
    cluster = parse_cluster(f"2x4:{name}")
    device = cluster.groups[0].device
    assert device.name == name and cluster.devices == 8
    assert 1e9 <= device.memory <= 400e9 and 1e9 < device.bandwidth < 20e12
    assert device.peak and all(1e9 < rate < 2e16 for rate in device.peak.values())
    assert 0 < cluster.network.bandwidth <= cluster.groups[0].link.bandwidth


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1x4:a100-80gb", 25e9),
        ("1x8:a100-80gb", 12.5e9),
        ("1x16:v100-32gb", 3e9),
        ("1x8:h100", 52e9),
        ("1x8:b200", 26e9),
        ("1x3:b200", 52e9),
    ],
)
def test_the_devices_of_a_node_share_its_links_to_the_host_as_measured(text: str, rate: float) -> None:
    assert parse_cluster(text).groups[0].host_bandwidth == pytest.approx(rate)


@pytest.mark.parametrize("name", sorted(read.clusters()))
def test_a_named_cluster_reads(name: str) -> None:
    assert isinstance(read_cluster(name), Cluster)


def test_measured_shares_of_peak_are_those_of_the_sources() -> None:
    shares = {
        name: DEVICES[name].get("efficiency") for name in ("a100-80gb", "a100-pcie-80gb", "h100", "b200", "mi300x")
    }
    assert shares == {"a100-80gb": 0.869, "a100-pcie-80gb": 0.811, "h100": 0.803, "b200": 0.776, "mi300x": 0.511}


def test_friendly_names_of_devices_lead_to_one() -> None:
    assert {device_entry(name)["name"] for name in ("a100", "A100-80GB", "a100-sxm4-80gb")} == {"a100-80gb"}
    assert device_entry("v100")["name"] == "v100-32gb"
