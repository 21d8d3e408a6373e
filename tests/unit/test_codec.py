"""Texts of JSON and YAML become plain data or one line that names the file and the line, whatever they hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.main import run_command
from meshwright.core.codec import MAX_TEXT_CHARACTERS, MAX_TEXT_DEPTH, parse_text
from meshwright.core.errors import InputError

NUMBER = "1" + "0" * 400
SEVEN = {
    "a date that does not exist": (
        "workload:\n  steps: 2001-99-99",
        r"\$.workload.steps: input should be a valid integer",
    ),
    "a tag of a date": (
        "workload:\n  steps: !!timestamp abc",
        "job.yaml:2: YAML tag 'tag:yaml.org,2002:timestamp' is not supported",
    ),
    "a tag of a truth value": (
        "workload:\n  steps: !!bool maybe",
        "job.yaml:2: YAML tag 'tag:yaml.org,2002:bool' is not supported",
    ),
    "a key that is a mapping": ("# one\n? {a: 1} : 2", "job.yaml:2: a key is a list, a mapping"),
    "an integer of 5,000 digits": ("workload:\n  steps: " + "9" * 5000, "job.yaml:2: a number of 5,000 digits"),
    "the same in JSON": (
        json.dumps({"workload": {"batch": 1}}, indent=1).replace("1", "9" * 5000),
        "job.yaml:3: a number of 5,000 digits",
    ),
    "100,000 braces": ('{"a":' * 100_000, "job.yaml: lists or objects are nested more than 100 levels deep"),
    "100,000 brackets": ("a:\n " + "[" * 100_000, "job.yaml:2: lists or objects are nested more than 100 levels deep"),
    "10^400": (f"cluster: {{groups: [{{nodes: {NUMBER}}}]}}", "job.yaml:1: a number of 401 digits"),
}


@pytest.mark.parametrize("name", SEVEN)
def test_what_ended_in_a_fault_of_ours_is_one_line(name: str, tmp_path: Path) -> None:
    text, words = SEVEN[name]
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as error:
        run_command(["plan", str(tmp_path / "job.yaml")])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("number", [NUMBER, "1e400", "9" * 5000])
def test_a_number_of_a_cluster_file_that_is_too_large_is_one_line(number: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"name: x\nnetwork: {{name: a, bandwidth: {number}}}\ngroups: [{{nodes: 2, devices: 8, device: h100}}]"
    )
    with pytest.raises(InputError, match=r"cluster\.yaml:2: (a|the) number") as error:
        run_command(["plan", "--cluster", str(path)])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n--- b", "x:2: the file has a second YAML document"),
        ("a: 1\na: 2", "x:2: key 'a' is written twice"),
        ("a: &b [*b]", "x:1: alias 'b' refers to a value that has not ended"),
        ("a: *b", "x:1: alias 'b'"),
        ("*b : 1", "x:1: "),
        ("a: \x00", r"x:1: not valid YAML: the character U\+0000"),
        ('a:\n  - "\\UFFFFFFFF"', "x:2: not valid YAML"),
        ('a: "\\ud800"', "x:1: a text contains a lone surrogate"),
        ('{"a": "\\ud800"}', "x: a text contains a lone surrogate"),
        ('{"a": 1,\n "a": 2}', "x: key 'a' is written twice"),
        ('{"a":\n 1e999}', "x:2: the number 1e999 is too large"),
        ("a: [1,\n  2", "x:2: not valid YAML"),
        ("a: " + "x" * MAX_TEXT_CHARACTERS, "x: has 16,777,219 characters"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n"
         for a, b in zip("abcdefg", "bcdefgh", strict=True)), "more than 1,000,000 values"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_plain_data_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}" if words.startswith("x") else words) as error:
        parse_text(text, "x")
    assert "\n" not in str(error.value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs", "Cc"))), inner, max_size=4)
    ),
    max_leaves=12,
)


class Dumper(yaml.SafeDumper):
    """Quotes texts such as 1e5, which are text in YAML 1.1 and numbers in 1.2 and in jobs."""


Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@given(PLAIN)
def test_plain_data_is_read_back_as_it_was_written(data: object) -> None:
    for ascii_only in (True, False):
        assert parse_text(json.dumps({"a": data}, ensure_ascii=ascii_only), "x") == {"a": data}
    assert parse_text(yaml.dump(data, Dumper=Dumper), "x") == data


def test_nesting_up_to_the_limit_is_read() -> None:
    for opening, closing in (("[", "]"), ('{"a": ', "}")):
        for depth, fits in ((MAX_TEXT_DEPTH - 1, True), (MAX_TEXT_DEPTH + 1, False)):
            text = opening * depth + "1" + closing * depth
            try:
                assert parse_text(text, "x") is not None and fits
            except InputError:
                assert not fits


def test_words_and_numbers_are_those_of_yaml_and_dates_are_text() -> None:
    read = parse_text(
        "a: 0x1f\nb: 1_000\nc: 1e-4\nd: .inf\ne: off\nf: ~\ng: 2001-01-01\nh: '1'\ni: 0x_\nj: &n {k: 1}\nl: *n\non: 1",
        "x",
    )
    assert read == {
        "a": 31, "b": 1000, "c": 1e-4, "d": float("inf"), "e": False, "f": None, "g": "2001-01-01", "h": "1",
        "i": "0x_", "j": {"k": 1}, "l": {"k": 1}, "on": 1,
    }  # fmt: skip
    assert parse_text("", "x") is None and parse_text("# nothing", "x") is None
