"""Sections of the trainer's own: what a rank is doing, noted where the node's agent sees it at any time."""

from __future__ import annotations

from slurmft.ipc.pages.section_stack import Section, SectionStack


class Sections:
    """The part of a session that says what the rank is doing."""

    def __init__(self, stack: SectionStack) -> None:
        self._sections = stack

    def section(self, name: str) -> Section:
        """A section of your own: ``with session.section("load data"): ...``.

        Limits come from ``fault_tolerance.rank_section_timeouts``: each open section is held to its own, outer ones as
        well. Sections nest, and other threads may have some. To open and close one takes less than a microsecond.
        """
        return self._sections.section(name)

    def start_section(self, name: str) -> None:
        """Open a section that ``end_section`` closes."""
        self._sections.start(name)

    def end_section(self, name: str) -> None:
        """Close the innermost open section of that name; a warning is logged, once, where none is open."""
        self._sections.end(name)

    def end_all_sections(self) -> None:
        """Close all sections of this thread."""
        self._sections.end_all()

    def heartbeat(self) -> None:
        """Report that this rank lives, where there are no sections: ``fault_tolerance.rank_heartbeat_timeout``."""
        self._sections.beat()
