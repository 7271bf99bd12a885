"""The ``.metadata`` of a checkpoint: torch.distributed.checkpoint's own index, made from the indexes of all shards.

It is a pickle of torch's classes. It is written out here by hand, so that the process that commits a checkpoint needs
no torch (it costs seconds and hundreds of megabytes); slurmft itself never reads it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from functools import cache

from slurmft.checkpoint.image_file import Item, ShardIndex, image_file

METADATA_FILE = ".metadata"

_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""Of torch's format; since then, lists and dicts inside of a state are spread out."""

Part = tuple[int, Item]
"""A shard's number, and one of its items."""


def metadata_bytes(indexes: Sequence[ShardIndex]) -> bytes:
    """The content of ``.metadata`` beside the images of these shards, which are all of one checkpoint."""
    stored: dict[str, list[Part]] = {}
    for index in indexes:
        for item in index.items:
            stored.setdefault(item.key, []).append((index.shard, item))
    out = _Pickle()
    kinds = _dict([(out.text(key), _kind(out, parts)) for key, parts in stored.items()])
    paths = _dict([(out.text(key), out.path(parts[0][1].path or (key,))) for key, parts in stored.items()])
    places = _dict([place for parts in stored.values() for place in _places(out, parts)])
    return out.done(
        out.instance(
            _CLASSES, "Metadata", state_dict_metadata=kinds, planner_data=paths, storage_data=places,
            storage_meta=pickle.NONE, version=out.text(_VERSION),
        )
    )  # fmt: skip


def _kind(out: _Pickle, parts: Sequence[Part]) -> bytes:
    first = parts[0][1]
    if first.kind == "object":
        return out.instance(_CLASSES, "BytesStorageMetadata")
    chunks = [
        out.instance(_CLASSES, "ChunkStorageMetadata", offsets=out.size(item.starts), sizes=out.size(item.sizes))
        for _, item in parts
    ]
    return out.instance(
        _CLASSES, "TensorStorageMetadata", properties=out.properties(first.dtype), size=out.size(first.shape),
        chunks=_list(chunks),
    )  # fmt: skip


def _places(out: _Pickle, parts: Sequence[Part]) -> list[tuple[bytes, bytes]]:
    """For each part where it begins in the whole, and where its bytes lie."""
    places = []
    for number, (shard, item) in enumerate(parts):
        is_tensor = item.kind == "tensor"
        address = out.instance(
            _CLASSES, "MetadataIndex", fqn=out.text(item.key), index=_number(number) if is_tensor else pickle.NONE,
            offset=out.size(item.starts) if is_tensor else pickle.NONE,
        )  # fmt: skip
        name = out.text(image_file(shard))
        where = out.instance(
            _FILES, "_StorageInfo", relative_path=name, offset=_number(item.offset), length=_number(item.length)
        )
        places.append((address, where))
    return places


def _number(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data


def _dict(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join([key + value for key, value in entries]) + pickle.SETITEMS


def _list(values: Iterable[bytes]) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS


def _tuple(values: Iterable[bytes]) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


class _Pickle:
    """Pieces of a pickle of protocol 2. Frequent values are written once, in front, and then named by a number."""

    def __init__(self) -> None:
        self._front: list[bytes] = []
        self.text = cache(self._text)
        self.size = cache(self._size)
        self.properties = cache(self._properties)
        self._class = cache(self._find_class)

    def done(self, value: bytes) -> bytes:
        """The whole pickle of ``value``."""
        return b"".join([pickle.PROTO, b"\x02", *self._front, value, pickle.STOP])

    def path(self, pieces: Iterable[str | int]) -> bytes:
        return _tuple([self.text(piece) if isinstance(piece, str) else _number(piece) for piece in pieces])

    def instance(self, module: str, name: str, **attributes: bytes) -> bytes:
        """An object of one of torch's classes, made without its ``__init__``."""
        made = self._class(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if not attributes:
            return made
        return made + _dict([(self.text(key), value) for key, value in attributes.items()]) + pickle.BUILD

    def _once(self, value: bytes) -> bytes:
        number = struct.pack("<I", len(self._front))
        self._front.append(value + pickle.LONG_BINPUT + number + pickle.POP)
        return pickle.LONG_BINGET + number

    def _text(self, value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return self._once(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)

    def _find_class(self, module: str, name: str) -> bytes:
        return self._once(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def _call(self, module: str, name: str, argument: bytes) -> bytes:
        return self._class(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        return self._once(self._call("torch", "Size", _tuple(map(_number, sizes))))

    def _properties(self, dtype: str) -> bytes:
        """A TensorProperties: dense, row by row, on the host."""
        state = [
            self._class("torch", dtype),
            self._call("torch.serialization", "_get_layout", self.text("torch.strided")),
            pickle.NEWFALSE,
            self._call(_CLASSES, "_MEM_FORMAT_ENCODING", _number(0)),
            pickle.NEWFALSE,
        ]
        made = self._class(_CLASSES, "TensorProperties") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        return self._once(made + _tuple(state) + pickle.BUILD)
