"""The result of a load as a mapping, for scripts that know a checkpoint as the dict that ``torch.load`` returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any


class ReadsAsMapping(Mapping[str, Any]):
    """A mapping of what ``as_mapping`` returns. Empty, and false, where nothing was found."""

    __slots__ = ()

    @abstractmethod
    def as_mapping(self) -> Mapping[str, Any]:
        """Its keys and values; none where nothing was found."""

    def __getitem__(self, key: str) -> Any:
        return self.as_mapping()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_mapping())

    def __len__(self) -> int:
        return len(self.as_mapping())
