"""Names in the documentation that the code must have: events, messages, causes, exit codes, weights, packages."""

import ast
import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml
from docs_pages import DOCS, PAGES, REPOSITORY
from extras import needs

import slurmft
from slurmft import errors
from slurmft.cli import main
from slurmft.policy.suspicion import HALF_LIFE_HOURS, WEIGHTS
from slurmft.policy.verdict import BUDGETED, FREE
from slurmft.storage.journal import EventName

PACKAGE = Path(slurmft.__file__).parent


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@functools.cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py")))


@functools.cache
def strings() -> frozenset[str]:
    """Every text that slurmft's code holds, parts of f-strings as well; what explains the code is none."""
    explaining = {id(node.value) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return frozenset(
        node.value for tree in trees() for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explaining
    )  # fmt: skip


def test_the_events_of_the_journal_are_described_and_exist():
    described = {name for row in re.findall(r"^\| (`[^|]+) \|", text_of("reference/events.md"), re.MULTILINE)
                 for name in re.findall(r"`([^`]+)`", row)}  # fmt: skip
    assert described == {event.value for event in EventName}


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    messages = re.findall(r"^\*\*(.+?)\*\*", text_of("troubleshooting.md"), re.MULTILINE)
    fragments = [part.strip() for message in messages for code in re.findall(r"`([^`]+)`", message)
                 for part in re.split(r"\.\.\.|\b[NMXn]\b|\[1\]", code)]  # fmt: skip
    assert [part for part in fragments if len(part) > 3 and not any(part in known for known in strings())] == []
    assert len(messages) > 40


def test_lines_that_other_packages_users_search_for_are_logged_here_too():
    lines = re.findall(r"^\| `(.+)` \| (?:nvidia|Mega)", text_of("how-to/coming-from.md"), re.MULTILINE)
    # the device in a warning, signals and seconds are filled in
    parts = [part for line in lines for part in re.split(
             r"GPUs |\. (?=Affected)" if "WARNING" in line else r"\b(?:15|N|SIGTERM)\b", line)]  # fmt: skip
    assert len(lines) > 3 and [part for part in parts if not any(part in known for known in strings())] == []


def test_every_cause_stands_in_the_table_of_budgets():
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", text_of("concepts/verdicts-and-exclusions.md"), re.MULTILINE)
    budgets = {cause: not budget.startswith("none") for causes, budget in rows if budget.startswith(("none", "`fault"))
               for cause in re.findall(r"`([^`]+)`", causes)}  # fmt: skip
    assert budgets == {str(cause): cause in BUDGETED for cause in (*FREE, *BUDGETED)}


def test_weights_and_half_lives_are_the_codes():
    text = text_of("concepts/verdicts-and-exclusions.md")
    hours = {"half an hour": 0.5, "1 hour": 1.0, "1 day": 24.0, "2 days": 48.0, "3 days": 72.0, "7 days": 168.0,
             "30 days": 720.0}  # fmt: skip
    told: dict[str, tuple[float, float | None]] = {}
    for names, weights, fades in re.findall(r"^\| (`.+?) \| (-?[\d.].*?) \| (.+?) \|$", text, re.MULTILINE):
        kinds, numbers, times = re.findall(r"`([^`]+)`", names), weights.split(", "), fades.split(", ")
        for index, kind in enumerate(kinds):
            number = numbers[index] if len(numbers) > 1 else numbers[0]
            time = times[index] if len(times) == len(kinds) else times[0]
            told[kind] = (float(number), hours.get(time))
    code = {str(kind): (weight, HALF_LIFE_HOURS.get(kind)) for kind, weight in WEIGHTS.items() if kind != "forgiven"}
    assert told == code


def test_exit_codes_are_the_command_lines_and_the_errors():
    table = text_of("reference/exit-codes.md")
    codes = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in cell.split(",")}
    of_errors = {value.exit_code for value in vars(errors).values() if isinstance(value, type)
                 and issubclass(value, errors.SlurmftError)}  # fmt: skip
    of_help = {int(code) for code in re.findall(r"^  (\d+) ", main._EXIT_CODES, re.MULTILINE)}
    assert (of_errors | of_help) - codes == set()


def test_every_package_is_on_the_map():
    named = set(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text_of("reference/code-map.md"), re.MULTILINE))
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} | {"errors"}
    assert named == packages


def test_each_package_is_on_the_map_once_and_its_modules_exist():
    text = text_of("reference/code-map.md")
    rows = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    assert sorted(set(rows)) == sorted(rows)
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert {path for path in named if not (PACKAGE / path).exists() and not list(PACKAGE.rglob(path))} == set()
    assert len(named) > 40


def test_names_behind_a_module_of_the_map_are_in_it():
    """As in "`worker/saves.py` (`SaveInterval`)"."""
    found = re.findall(r"`((?:\w+/)+\w+\.py)`:?\s\(?((?:`\w+`(?:, )?)+)\)?", text_of("reference/code-map.md"))
    named = {(path, name) for path, names in found for name in re.findall(r"\w+", names)}
    assert len(named) > 25
    texts = {path: (PACKAGE / path).read_text() for path, _ in named}
    assert [
        (path, name)
        for path, name in named
        if not re.search(rf"\b(?:class|def) {name}\b|^{name} =", texts[path], re.MULTILINE)
    ] == []


def test_files_that_the_pages_name_exist():
    path = re.compile(r"`((?:slurmft|tests|bench|configs|sbatch|bin|docs)/[\w./-]+)`")
    named = {(page.name, found) for page in DOCS.rglob("*.md") for found in path.findall(page.read_text())}
    assert {(page, found) for page, found in named if not (REPOSITORY / found).exists()} == set()
    assert len(named) > 15


def test_the_changelog_has_this_version_below_what_is_not_released():
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(slurmft.__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_modules_that_contributors_are_pointed_to_exist():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+/\w+\.(?:py|yaml|json|md))`", text))
    assert {path for path in named if not ((PACKAGE / path).exists() or (REPOSITORY / path).exists())} == set()
    assert len(named) > 8


def is_defined(dotted: str) -> bool:
    """Whether ``slurmft.a.b.Name`` is a module, or a name that one holds."""
    *above, last = dotted.split(".")
    places = [PACKAGE.parent.joinpath(*above, last), PACKAGE.parent.joinpath(*above)]
    if any(place.with_suffix(".py").exists() for place in places[:1]) or (places[0] / "__init__.py").exists():
        return True
    sources = (places[1].with_suffix(".py"), places[1] / "__init__.py")
    found = [source.read_text(encoding="utf-8") for source in sources if source.exists()]
    return any(re.search(rf"\b{re.escape(last)}\b", text) for text in found)


def test_dotted_names_and_imports_exist():
    pages = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    named = {(name, dotted) for name, text in texts.items() for dotted in re.findall(r"`(slurmft(?:\.\w+)+)`", text)}
    named |= {
        (name, f"{module}.{each.strip()}") for name, text in texts.items()
        for module, names in re.findall(r"^from (slurmft[\w.]*) import (.+)$", text, re.MULTILINE)
        for each in names.split(",")
    }  # fmt: skip
    assert {(name, dotted) for name, dotted in named if not is_defined(dotted)} == set()
    assert len(named) > 6
    assert not is_defined("slurmft.worker.session.Nonsense") and not is_defined("slurmft.nonsense.Session")


def test_no_page_installs_by_name_before_there_is_a_release():
    """docs/release.md: what lies on a package index under this name is not ours yet."""
    by_name = re.compile(r"pip install (?:-\S+ )*['\"]?slurmft\b(?!/)")
    assert by_name.search("pip install 'slurmft[train]'") and not by_name.search("pip install slurmft/dist/x.whl")
    assert [page.name for page in PAGES if page.name != "CHANGELOG.md" and by_name.search(page.read_text())] == []


def test_the_citation_names_this_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert cited["version"] == slurmft.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def lost(given: Any, understood: Any, path: str = "") -> list[str]:
    """Places of ``given`` that are not in ``understood``, or other there."""
    if isinstance(given, dict) and isinstance(understood, dict):
        return [each for key in given for each in lost(given[key], understood.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        return [
            each for at, pair in enumerate(zip(given, understood, strict=True)) for each in lost(*pair, f"{path}[{at}]")
        ]
    return [] if given == understood else [path]


@needs("grafana_foundation_sdk")
def test_grafana_knows_every_key_of_the_dashboards() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    boards = {
        path.stem: json.loads(path.read_text()) for path in sorted((REPOSITORY / "configs/grafana").glob("*.json"))
    }
    assert list(boards) == ["cluster", "run"]
    for name, board in boards.items():
        assert lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))) == [], name
        variables = {each["name"] for each in board["templating"]["list"]}
        assert variables >= set(re.findall(r"\$(?!\{?__)\{?(\w+)", json.dumps(board["panels"]))), name
        for panel in board["panels"]:
            shown = panel["fieldConfig"]["defaults"]
            values = [step["value"] for step in shown.get("thresholds", {"steps": []})["steps"]]
            assert shown["unit"] and values[:1] in ([], [None]) and values[1:] == sorted(values[1:]), panel["title"]
        other = next(each for each in boards.values() if each is not board)
        assert [link["url"] for link in board["links"]] == [f"/d/{other['uid']}"]
