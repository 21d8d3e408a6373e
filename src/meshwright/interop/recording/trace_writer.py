"""Collects the digests, numbers and tensors of one rank, and writes its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.interop.recording.digest import DIGEST_SIZE, Digester
from meshwright.interop.recording.layout import local_tensor
from meshwright.interop.recording.trace_format import HEADER_KEY, TraceHeader, trace_name


class TraceWriter:
    """The tensors of a recording. Digests and numbers stay on their device until the file is written."""

    def __init__(self) -> None:
        self.digest = Digester()
        self.rows: list[torch.Tensor] = []
        self.numbers: list[torch.Tensor] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def store(self, name: str, tensor: torch.Tensor) -> str:
        """Copies a tensor to host memory. Returns its name."""
        self.tensors[name] = local_tensor(tensor).to("cpu", copy=True).contiguous()
        return name

    def row(self, tensor: torch.Tensor) -> int:
        """Adds the digest of a tensor. Returns its row."""
        self.rows.append(self.digest(tensor))
        return len(self.rows) - 1

    def number(self, value: torch.Tensor) -> int:
        """Adds a number. Returns its index."""
        self.numbers.append(value.detach().clone())
        return len(self.numbers) - 1

    def write(self, folder: Path, header: TraceHeader) -> None:
        """Writes the file of a rank. A file of this name is replaced when the new one is complete."""
        empty = torch.zeros(0, DIGEST_SIZE, dtype=torch.float64)
        self.tensors["digests"] = torch.stack([row.cpu() for row in self.rows]) if self.rows else empty
        numbers = [number.double().reshape(()).cpu() for number in self.numbers]
        self.tensors["values"] = torch.stack(numbers) if numbers else empty[:, 0]
        path = folder / trace_name(header.rank)
        temporary = path.with_name(f".{path.name}.part")
        save_file(self.tensors, str(temporary), {HEADER_KEY: json.dumps(header.model_dump(mode="json"))})
        os.replace(temporary, path)
        self.rows, self.tensors = [], {}
