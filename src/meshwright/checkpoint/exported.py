"""A folder of files that come together, for other programs to read: all under temporary names, then renamed in order, so that what stands last says
that the rest is there. Where it cannot be written whole nothing of it stays."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.base import storage
from meshwright.base.errors import InputError, MeshwrightError
from meshwright.base.units import show_bytes
from meshwright.checkpoint.shard import Item, write_shard


def write_folder(folder: Path, files: Mapping[str, bytes | Sequence[Item]]) -> list[Path]:
    """`files`, by name what each holds, in `folder`; their paths."""
    made = not storage.is_there(folder)
    storage.make_folder(folder)
    done: list[Path] = []
    try:
        needs = sum(len(content) if isinstance(content, bytes) else sum(item.size for item in content) for content in files.values())
        if needs > storage.free_bytes(folder):
            raise OSError(errno.ENOSPC, f"the files need {show_bytes(needs)}, {show_bytes(storage.free_bytes(folder))} are free")
        for name, content in files.items():
            done.append(folder / f".{name}.tmp")
            storage.remove(done[-1])
            if isinstance(content, bytes):
                storage.write_file(done[-1], [content])
            else:
                write_shard(done[-1], content, {"format": "pt"})
        for index, name in enumerate(files):
            storage.rename(done[index], folder / name)
            done[index] = folder / name
        storage.sync_folder(folder)
    except BaseException as error:
        for path in done:
            storage.remove_if_possible(path)
        if made:
            storage.remove_if_possible(folder)
        if isinstance(error, OSError):
            kind = MeshwrightError if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
            raise kind(f"folder {str(folder)!r}: {error.strerror}; nothing is exported") from None
        raise
    return done
