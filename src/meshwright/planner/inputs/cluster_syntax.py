"""Parses clusters in words: node groups `NODESxDEVICES:device[@LINK]`, and nested blocks of nodes. Groups of different
nodes are joined by `+`.

Examples: `8x8:a100-80gb`, `2x8:a100-80gb+4x8:v100-32gb`, `4x8:h100@ib-ndr`. LINK is the network between nodes. LINK may
follow any group and applies to all groups. LINK is a catalog name, the bandwidth of one device (`@25GB/s`, `@200Gb`,
`@100Mb`), or the number and rate of a node's ports (`@4x200Gb`). Heterogeneous nodes communicate at the speed of the
slowest network.

`COUNTx(NODES)[@LINK]` is a tier of the network: LINK connects COUNT equal blocks of nodes, such as racks, pods or
sites. Blocks may be nested: `2x(4x(8x8:h100)@ib)@wan` is 2 sites of 4 pods of 8 nodes. Ports (`@4x200Gb`) are then the
ports of a block. Without LINK, the network inside the blocks also connects them.
"""

from __future__ import annotations

import re

from meshwright.catalog import read as catalog
from meshwright.core.codec import validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.core.quantities import parse_quantity
from meshwright.spec.cluster import Cluster, Device, Link, NodeGroup

_GROUP_PATTERN = re.compile(r"(?:([0-9]{1,9})x)?([0-9]{1,9}):([A-Za-z0-9_.+-]+)")
_GROUP_START_PATTERN = re.compile(r"\s*(?:[0-9]{1,9}(?:x(?:[0-9]{1,9}(?::[A-Za-z0-9_.-]*)?)?|:[A-Za-z0-9_.-]*)?)?")
"""Matches the beginning of a group, as far as it is right."""
_BLOCK_PATTERN = re.compile(r"\s*([0-9]{1,9})\s*x\s*\(")
_PORTS_PATTERN = re.compile(r"([0-9]{1,9})x(.+)")
_DEFAULT_LATENCY = "6 us"
DEVICE_FIELDS = (
    "name",
    "power_watts",
    "memory",
    "bandwidth",
    "peak",
    "efficiency",
    "sustained",
    "attention",
    "processors",
    "context",
    "source",
)


class _WrongGroup(InputError):
    """Raised for node groups that cannot be parsed. The message does not name the cluster."""


def parse_cluster(text: str) -> Cluster:
    """Parses groups of nodes joined by `+`, with an optional `@LINK`, or nested blocks of nodes (module docstring).

    Raises: InputError if a part is not NODESxDEVICES:device, or if brackets are wrong; a caret is then under the wrong
    character.

    >>> cluster = parse_cluster("2x(4x(8x8:h100)@ib)@1GB/s")
    >>> cluster.devices, [(link.name, link.span) for link in (cluster.network, *cluster.tiers)]
    (512, [('400 Gbit/s a device', 64), ('ib-ndr', 256), ('1GB/s', 0)])
    """
    groups, (network, *tiers) = _parse_blocks(text, 0, len(text))
    data = {"name": text, "groups": groups, "network": network, "tiers": tuple(tiers)}
    return validate_data(Cluster, data, f"cluster {text!r}")


def _parse_blocks(text: str, start: int, end: int) -> tuple[tuple[NodeGroup, ...], list[Link]]:
    """Parses `text[start:end]`, a tier of blocks or groups of nodes. Returns the groups, and the networks outside of
    nodes, innermost first."""
    match = _BLOCK_PATTERN.match(text, start, end)
    if match is None:
        if (wrong := re.search(r"[()]", text[start:end])) is not None:
            raise _syntax_error(
                text,
                start + wrong.start(),
                Message("a bracket must follow a number of blocks and x, such as 4x(8x8:h100)@ib")
                if wrong[0] == "("
                else Message("this bracket closes nothing: remove it"),
            )
        try:
            return _parse_groups(text[start:end])
        except InputError as error:
            if end - start == len(text) and not isinstance(error, _WrongGroup):
                raise
            if end - start == len(text):
                raise InputError(Message("cluster {text!r}: {why}", text=text, why=error.args[0])) from None
            raise _syntax_error(text, start + _first_wrong(text[start:end]), error.args[0]) from None
    copies, close = int(match[1]), _closing_bracket(text, match.end() - 1, end)
    if copies < 1:
        raise _syntax_error(text, match.start(1), Message("there must be at least 1 block"))
    groups, links = _parse_blocks(text, match.end(), close)
    at = close + 1 + len(text[close + 1 : end]) - len(text[close + 1 : end].lstrip())
    if at < end and text[at] != "@":
        raise _syntax_error(
            text, at, Message("only @LINK may follow a block, such as )@25GB/s: describe unequal blocks in a file")
        )
    if (extra := text.find(")", at, end)) > 0:
        raise _syntax_error(text, extra, Message("this bracket closes nothing: remove it"))
    if at < end:
        devices = sum(group.nodes * group.devices for group in groups)
        try:
            link = parse_link(text[at + 1 : end].strip(), devices)
        except InputError as error:
            raise _syntax_error(text, at + 1, error.args[0]) from None
        links = [*links[:-1], links[-1].but(span=devices), link]
    same = len(groups) == 1
    return (groups[0].but(nodes=groups[0].nodes * copies),) if same else groups * copies, links


def _closing_bracket(text: str, at: int, end: int) -> int:
    """Returns the position of the bracket that closes the one at `at`."""
    depth = 0
    for position in range(at, end):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
    raise _syntax_error(text, at, Message("this bracket is not closed: add )"))


def _first_wrong(text: str) -> int:
    """Returns the position of the first wrong character of `text`, which `_parse_groups` refuses.

    >>> [_first_wrong(text) for text in ("8x8", "8x8h100", "8x8:h10", "8x8:h100+0x8:h100", "8x8:h100@fast")]
    [3, 3, 4, 9, 8]
    """
    for part in re.finditer(r"[^+@]+", text.partition("@")[0]):
        match = _GROUP_PATTERN.fullmatch(part[0].strip())
        if match is None:
            return part.start() + _GROUP_START_PATTERN.match(part[0]).end()  # type: ignore[union-attr]
        if catalog.find_entry(catalog.devices(), match[3]) is None:
            return part.start() + part[0].index(match[3])
        if "0" in (match[1], match[2]):
            return part.start()
    return max(text.find("@"), 0)


def _syntax_error(text: str, at: int, why: str) -> InputError:
    """Returns the error `why` with `text` and a caret under the character at `at`."""
    return InputError(Message("cluster: {why}\n  {text}\n  {caret}", why=why, text=text, caret=" " * at + "^"))


def _parse_groups(text: str) -> tuple[tuple[NodeGroup, ...], list[Link]]:
    """Parses groups of nodes joined by `+`, with an optional `@LINK`. Returns the groups and the network."""
    body, link = _split_network(text)
    groups, networks = [], []
    for part in re.split(r"\+(?=\d+[x:])", body):
        match = _GROUP_PATTERN.fullmatch(part.strip())
        if match is None:
            raise _WrongGroup(
                Message(
                    "{part!r} is not NODESxDEVICES:device; write it like '8x8:a100-80gb', or 'local', or a file",
                    part=part,
                )
            )
        nodes, devices = int(match[1] or 1), int(match[2])
        if nodes < 1 or devices < 1:
            raise _WrongGroup(
                Message(
                    "{part!r} has {nodes} nodes of {devices} devices; both must be at least 1",
                    part=part,
                    nodes=nodes,
                    devices=devices,
                )
            )
        row = device_entry(match[3])
        groups.append(node_group(row, nodes, devices))
        networks.append(validate_data(Link, row["network"], f"device {row['name']}.network"))
    network = (
        parse_link(link, min(group.devices for group in groups))
        if link
        else min(networks, key=lambda network: network.bandwidth)
    )
    return tuple(groups), [network]


def _split_network(text: str) -> tuple[str, str]:
    """Splits `text` into the node groups and LINK, which is '' if `text` has none. Raises InputError if `text` has two
    different links."""
    found = re.findall(r"@([^+]+)", text)
    if len(set(found)) > 1:
        raise _WrongGroup(
            Message(
                "two networks, {found!r} and {found_2!r}, but all nodes use one network",
                found=found[0],
                found_2=found[1],
            )
        )
    return re.sub(r"@[^+]+", "", text), found[0].strip() if found else ""


def parse_link(text: str, devices: int) -> Link:
    """Parses LINK. The bandwidth of the result is that of one device; the `devices` devices of a node share the node's
    ports. Raises InputError if `text` is neither a name of the catalog nor a rate above 0.

    >>> [round(parse_link(text, 8).bandwidth / 1e9, 3) for text in ("25GB/s", "25", "200Gb", "4x200Gb", "800 Mb/s")]
    [25.0, 25.0, 25.0, 12.5, 0.1]
    """
    row = catalog.find_entry(catalog.links(), text)
    if row is not None:
        return validate_data(
            Link, {key: value for key, value in row.items() if key not in ("source", "aliases")}, f"link {text}"
        )
    match = _PORTS_PATTERN.fullmatch(text)
    part, speed = (float(match[1]) / devices, match[2]) if match else (1.0, text)
    try:
        rate = float(speed) * 1e9 if speed.replace(".", "", 1).isdecimal() else parse_quantity(speed, "B/s")
    except ValueError:
        known = list(catalog.links())
        raise InputError(
            Message(
                "link {text!r} is neither a rate such as '200Gb' or '25GB/s' nor one of {known}{hint}",
                text=text,
                known=", ".join(known),
                hint=did_you_mean(text, known),
            )
        ) from None
    if rate * part <= 0:
        raise InputError(Message("link {text!r} carries nothing: its rate must be above 0", text=text))
    return validate_data(Link, {"name": text, "bandwidth": rate * part, "latency": _DEFAULT_LATENCY}, f"link {text!r}")


def device_entry(name: str) -> catalog.CatalogEntry:
    """Returns the catalog entry of the device `name`. Raises InputError for an unknown name; the message suggests
    similar names."""
    rows = catalog.devices()
    row = catalog.find_entry(rows, name)
    if row is None:
        hint = did_you_mean(name.lower(), catalog.all_names(rows)) or Message(
            "; `meshwright catalog devices` lists the known ones"
        )
        raise InputError(Message("device {name!r} is not in the catalog{hint}", name=name, hint=hint))
    return row


def device_spec(row: catalog.CatalogEntry) -> Device:
    """Returns the device of a catalog entry."""
    return validate_data(
        Device, {key: row[key] for key in DEVICE_FIELDS if key in row}, Message("device {name}", name=row["name"])
    )


def node_group(row: catalog.CatalogEntry, nodes: int, devices: int) -> NodeGroup:
    """Returns `nodes` nodes of `devices` devices of a catalog entry, with its links and host."""
    sharing = min(1.0, row.get("host_links", devices) / devices)
    fields = {
        "nodes": nodes,
        "devices": devices,
        "device": device_spec(row),
        "link": validate_data(Link, row["link"], f"device {row['name']}.link"),
        "host_memory": parse_quantity(row["host_memory"], "B") * devices,
        "host_bandwidth": parse_quantity(row["host_bandwidth"], "B/s") * sharing,
        "storage_bandwidth": parse_quantity(row.get("storage_bandwidth", 0), "B/s"),
    }
    return validate_data(NodeGroup, fields, f"nodes of {row['name']}")
