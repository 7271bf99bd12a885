"""The ``.metadata`` of a checkpoint: torch.distributed.checkpoint's own index, made from the indexes of all shards.

It is a pickle of torch's classes. It is written out here by hand, so that the process that commits a checkpoint needs
no torch (it costs seconds and hundreds of megabytes); slurmft itself never reads it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slurmft.checkpoint.shard_index import Item, ShardIndex, image_file

METADATA_FILE = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""Of torch's format; since then, lists and dicts inside of a state are spread out."""

Part = tuple[int, Item]
"""A shard's number, and one of its items."""


def metadata_bytes(indexes: Sequence[ShardIndex]) -> bytes:
    """What belongs into ``.metadata`` beside the images of these shards, which are all of one checkpoint."""
    stored: dict[str, list[Part]] = {}
    for index in indexes:
        for item in index.items:
            stored.setdefault(item.key, []).append((index.shard, item))
    out = _Pickle()
    with out.instance(_CLASSES, "Metadata"):
        with out.entry("state_dict_metadata"), out.mapping():
            for key, parts in stored.items():
                out.value(key)
                _put_kind(out, parts)
        with out.entry("planner_data"), out.mapping():
            for key, parts in stored.items():
                out.value(key)
                out.row(parts[0][1].path or (key,))
        with out.entry("storage_data"), out.mapping():
            for parts in stored.values():
                _put_places(out, parts)
        for name, value in (("storage_meta", None), ("version", _VERSION)):
            out.value(name)
            out.value(value)
    return out.done()


def _put_kind(out: _Pickle, parts: Sequence[Part]) -> None:
    first = parts[0][1]
    if first.kind == "object":
        out.blank(_CLASSES, "BytesStorageMetadata")
        return
    with out.instance(_CLASSES, "TensorStorageMetadata"):
        out.value("properties")
        out.properties(first.dtype)
        out.value("size")
        out.size(first.shape)
        with out.entry("chunks"), out.sequence():
            for _, item in parts:
                with out.instance(_CLASSES, "ChunkStorageMetadata"):
                    out.value("offsets")
                    out.size(item.starts)
                    out.value("sizes")
                    out.size(item.sizes)


def _put_places(out: _Pickle, parts: Sequence[Part]) -> None:
    for place, (shard, item) in enumerate(parts):
        is_tensor = item.kind == "tensor"
        with out.instance(_CLASSES, "MetadataIndex"):
            out.value("fqn")
            out.value(item.key)
            out.value("index")
            out.value(place if is_tensor else None)
            out.value("offset")
            if is_tensor:
                out.size(item.starts)
            else:
                out.value(None)
        with out.instance(_FILES, "_StorageInfo"):
            for name, value in (("relative_path", image_file(shard)), ("offset", item.offset), ("length", item.length)):
                out.value(name)
                out.value(value)


class _Pickle:
    """Writes a pickle of protocol 2, value by value; classes by their names alone."""

    def __init__(self) -> None:
        self._parts: list[bytes] = [pickle.PROTO + b"\x02"]
        self._memo: dict[tuple[str, object], bytes] = {}

    def done(self) -> bytes:
        return b"".join([*self._parts, pickle.STOP])

    def value(self, value: str | int | None) -> None:
        if value is None:
            self._parts.append(pickle.NONE)
        elif isinstance(value, str):
            self._once(("text", value), lambda: self._text(value))
        elif -(2**31) <= value < 2**31:
            self._parts.append(pickle.BININT + struct.pack("<i", value))
        else:
            data = pickle.encode_long(value)
            self._parts.append(pickle.LONG1 + bytes([len(data)]) + data)

    def row(self, values: Sequence[str | int]) -> None:
        """A tuple."""
        self._parts.append(pickle.MARK)
        for value in values:
            self.value(value)
        self._parts.append(pickle.TUPLE)

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """A list of what is written meanwhile."""
        self._parts.append(pickle.EMPTY_LIST + pickle.MARK)
        yield
        self._parts.append(pickle.APPENDS)

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """A dict of what is written meanwhile: a key, its value, the next key."""
        self._parts.append(pickle.EMPTY_DICT + pickle.MARK)
        yield
        self._parts.append(pickle.SETITEMS)

    @contextmanager
    def entry(self, key: str) -> Iterator[None]:
        """What is written meanwhile is the value of ``key``."""
        self.value(key)
        yield

    @contextmanager
    def instance(self, module: str, name: str) -> Iterator[None]:
        """An instance of a class, its attributes what is written meanwhile."""
        self.blank(module, name)
        with self.mapping():
            yield
        self._parts.append(pickle.BUILD)

    def blank(self, module: str, name: str) -> None:
        """An instance without attributes."""
        self._name(module, name)
        self._parts.append(pickle.EMPTY_TUPLE + pickle.NEWOBJ)

    def size(self, sizes: tuple[int, ...]) -> None:
        """A torch.Size."""
        self._once(("size", sizes), lambda: self._call("torch", "Size", lambda: self.row(sizes)))

    def properties(self, dtype: str) -> None:
        """A TensorProperties: dense, row by row, on the host."""

        def write() -> None:
            self.blank(_CLASSES, "TensorProperties")
            self._parts.append(pickle.MARK)
            self._name("torch", dtype)
            self._call("torch.serialization", "_get_layout", lambda: self.value("torch.strided"))
            self._parts.append(pickle.NEWFALSE)
            self._call(_CLASSES, "_MEM_FORMAT_ENCODING", lambda: self.value(0))
            self._parts.append(pickle.NEWFALSE + pickle.TUPLE + pickle.BUILD)

        self._once(("properties", dtype), write)

    def _call(self, module: str, name: str, argument: Callable[[], None]) -> None:
        self._name(module, name)
        argument()
        self._parts.append(pickle.TUPLE1 + pickle.REDUCE)

    def _name(self, module: str, name: str) -> None:
        line = f"{module}\n{name}\n".encode()
        self._once(("name", line), lambda: self._parts.append(pickle.GLOBAL + line))

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._parts.append(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)

    def _once(self, what: tuple[str, object], write: Callable[[], None]) -> None:
        """The first time written and numbered, from then on the number."""
        if (known := self._memo.get(what)) is not None:
            self._parts.append(known)
            return
        write()
        number = struct.pack("<I", len(self._memo))
        self._memo[what] = pickle.LONG_BINGET + number
        self._parts.append(pickle.LONG_BINPUT + number)
