"""What a command line means before it is read: numbers below 0."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


def joined(tokens: Sequence[str]) -> Iterator[str]:
    """A number below 0 is the value of the option before it, not an option.

    >>> [*joined(["plan", "--budget", "-1GiB", "--json", "--", "--budget", "-1"])]
    ['plan', '--budget=-1GiB', '--json', '--', '--budget', '-1']
    """
    ours, at = tokens.index("--") if "--" in tokens else len(tokens), 0
    while at < len(tokens):
        takes = at + 1 < ours and tokens[at].startswith("--") and "=" not in tokens[at] and re.match(r"-[\d.]", tokens[at + 1])
        yield f"{tokens[at]}={tokens[at + 1]}" if takes else tokens[at]
        at += 2 if takes else 1
