"""The page: small, self-contained, and text of others stays text."""

import json
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from generated_journals import write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.errors import UsageError
from slurmft.reporting.accounting import FAILURES, Account, AttemptRow, Category, End, Interval, Loss, Mark
from slurmft.reporting.report import Report, page_of, report_of
from slurmft.storage.history import METRICS_FILE, append_lines
from slurmft.storage.run_folder import RunFolder

TAGS = {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "dl", "div", "dt", "dd",
        "small", "svg", "line", "rect", "span", "table", "thead", "tbody", "tr", "th", "td", "br", "strong", "ul",
        "li", "code", "polyline"}  # fmt: skip
MOST_BYTES = 300_000


class Outline(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = list[str](), list[tuple[str, str]](), "", list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text += data


def odd_report(name: str) -> Report:
    """Everything in it that comes from others is ``name``."""
    account = Account(begin_s=1e9, end_s=1e9 + 60, attempts=1, failures=1, exposed_s=50.0, saves=1, nodes=1)
    account.seconds[Category.TRAINING], account.seconds[Category.SAVES] = 50.0, 10.0
    account.intervals.append(Interval(1e9, 1e9 + 60, Category.TRAINING))
    account.marks.append(Mark(1e9 + 5, "fault", name))
    account.by_cause[name] = account.by_node[name] = Loss(1, 5.0, 5.0)
    account.ends.append(End(name, 1e9 + 50, name, name, is_failure=True, nodes=(name,)))
    account.rows.append(AttemptRow(name, 1e9, 1e9 + 60, cause=name, reason=name))
    account.hosts, account.nodes = (name,), 2
    return Report(name=name, account=account, curves={name: [(0, 2.0), (9, 1.0)]}, settings=[("command", name)])


_PLAIN = [page_of([odd_report("x")], [("x", "x")], now_s=1e9, is_fleet=is_fleet) for is_fleet in (False, True)]


@settings(max_examples=10, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40) | st.text("<>&\"'/=-!script ", min_size=1))
def test_names_with_markup_in_them_are_text(name: str) -> None:
    for is_fleet in (False, True):
        page = page_of([odd_report(name)], [(name, name)], now_s=1e9, is_fleet=is_fleet)
        outline = Outline(page)
        assert set(outline.tags) <= TAGS and outline.open == []
        plain = Outline(_PLAIN[is_fleet])
        assert sorted(set(outline.tags)) == sorted(set(plain.tags))
        assert {key for key, _ in outline.attributes} == {key for key, _ in plain.attributes}


def test_a_script_as_a_name_is_shown_as_it_is() -> None:
    name = "<script>alert('x')</script>\x1b[31m"
    page = page_of([odd_report(name)], [], now_s=1e9, is_fleet=False)
    assert "<script" not in page and "\x1b" not in page
    assert "<script>alert('x')</script>" in Outline(page).text


def test_the_page_of_a_thousand_attempts_is_small_and_made_at_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=1000, chatter=3)
    began_s = time.process_time()
    report = report_of(RunFolder(tmp_path / "run"), now_s=time.time())
    page = page_of([report], [], now_s=time.time(), is_fleet=False)
    assert time.process_time() - began_s < 2.0, "a second on a machine that does nothing else"
    assert len(page.encode()) < MOST_BYTES
    assert "The newest 200 of 1000" in page
    assert Outline(page).open == []


def test_a_page_begins_with_what_happened_and_draws_what_was_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=4)
    (tmp_path / "run" / "config.yaml").write_text(
        "command: [python, train.py]\nslurm: {partition: gpu}\nenvironment: {K: s3cret}\n"
    )
    append_lines(tmp_path / "run" / METRICS_FILE, [json.dumps({"step": n, "loss": 1 / (n + 1)}) for n in range(50)])
    found = report_of(RunFolder(tmp_path / "run"), now_s=2e9)
    text = Outline(page := page_of([found], [], now_s=2e9, is_fleet=False)).text
    account = found.account
    assert f"the run came to step {account.step} and" in found.sentence and "was new work." in found.sentence
    assert all(
        f"{loss.ends} x {cause}" in found.sentence for cause, loss in account.by_cause.items() if cause in FAILURES
    )
    assert found.sentence in text and page.count("<polyline") == 1 and "newest: 0.02" in text
    assert "python train.py" in text and "slurm.partition" in text and "s3cret" not in text
    assert "polyline" not in page_of([report_of(RunFolder(tmp_path / "run"), now_s=2e9, is_one_of_many=True)], [],
                                     now_s=2e9, is_fleet=False)  # fmt: skip


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=3)
    page = page_of([report_of(RunFolder(tmp_path / "run"), now_s=2e9)], [], now_s=2e9, is_fleet=False)
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in outline.attributes}
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert "default-src 'none'" in page
    assert ("lang", "en") in outline.attributes and "img" in [
        value for key, value in outline.attributes if key == "role"
    ]


def test_without_jinja2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"needs Jinja2[\s\S]*pip install jinja2"):
        page_of([odd_report("x")], [], now_s=1e9, is_fleet=False)
