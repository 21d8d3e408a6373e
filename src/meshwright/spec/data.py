"""Where the text of a run comes from, how it becomes tokens, and how much of it is held out. It changes the result: it belongs to the question."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from meshwright.base.codec import Noun


class Data(Noun):
    """The `data` section of a job.

    `source`: `stdlib` (the sources of Python's own standard library), `shapes` (drawn images, for models that classify them), or one or
    several files, folders or patterns of text, JSON lines, Parquet or token arrays.
    """

    source: str | tuple[str, ...] = "stdlib"
    field: str = Field(default="text", min_length=1, description="of a JSON line or a Parquet table: where its text is")
    tokenizer: str = Field(default="auto", min_length=1, description="auto, bytes, bpe, or a folder with a tokenizer.json")
    documents: Literal["joined", "apart"] = Field(
        default="joined", description="of one row: joined, each is read on from the one before; apart, each by itself"
    )
    held_out: float = Field(default=0.01, ge=0, le=0.5, description="share of the tokens that is never trained on; 0: none")

    @field_validator("source")
    @classmethod
    def _named(cls, source: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not source or not all(source):
            raise ValueError("names no file: write 'stdlib', a path, or a list of paths")
        return source

    @property
    def sources(self) -> tuple[str, ...]:
        """Always a list."""
        return (self.source,) if isinstance(self.source, str) else self.source
