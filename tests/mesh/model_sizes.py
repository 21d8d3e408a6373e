"""Sizes of the smallest models that have every part: grouped heads, tied heads, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TINY: Mapping[str, Mapping[str, Any]] = {
    "llama-tiny": {
        "kind": "llama",
        "layers": 4,
        "hidden": 128,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 384,
        "vocab": 512,
        "seq": 512,
    },
    "gpt2-tiny": {
        "kind": "gpt2",
        "layers": 4,
        "hidden": 128,
        "heads": 8,
        "ffn": 512,
        "vocab": 512,
        "seq": 512,
        "tied": True,
    },
    "bert-tiny": {
        "kind": "bert",
        "layers": 4,
        "hidden": 128,
        "heads": 8,
        "ffn": 512,
        "vocab": 512,
        "seq": 512,
        "tied": True,
    },
    "convnet-tiny": {"kind": "convnet", "layers": 4, "hidden": 32, "classes": 10},
}
