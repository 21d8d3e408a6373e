"""A run folder on a file system that does not answer for a while."""

from __future__ import annotations

import os
import threading
from typing import Any

GIVE_UP_SECONDS = 120.0
CALLS = {"close", "fsync", "listdir", "lstat", "mkdir", "open", "pread", "rename", "stat", "unlink", "write"}


class HangingDisk:
    """In place of the module `os` in core/storage.py: while `answers` is not set, its operations do not return. If one
    has waited for GIVE_UP_SECONDS, all return, and `has_stalled` says that the test waited for the disk."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.has_stalled = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.answers.wait(GIVE_UP_SECONDS):
                self.has_stalled = True
                self.answers.set()
            return real(*arguments, **options)

        return call
