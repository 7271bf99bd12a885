"""Values of modules do not change, but for a few that belong to the whole process; each has its reason here."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import slurmft

ROOT = Path(slurmft.__file__).parent

ALLOWED: Mapping[str, str] = {
    "checkpoint/write_requests.py: _living": "a fork of the process must close the sockets of all its writers",
    "compat/megatron.py: _Process.machine": "get_rerun_state_machine() takes no argument, in Megatron as here",
    "integrations/lightning.py: Process.current": "Trainers of a process share its session, and their numbering",
    "integrations/huggingface.py: SlurmftCallback._in_charge": "two callbacks of one Trainer find each other",
    "integrations/huggingface.py: SlurmftCallback._said_idle": "it is said once, for all Trainers of the process",
    "integrations/huggingface.py: SlurmftCallback._engine": "last_good_checkpoint() knows no callback of its Trainer",
    "integrations/huggingface.py: SlurmftCallback._resumed": "the same: it tells the callback what it has chosen",
    "integrations/huggingface.py: SlurmftCallback._session": "a process has one session, and may have many Trainers",
    "supervisor/guardian.py: _kept": "signals come to the process, also between two listeners",
    "supervisor/guardian.py: _listeners": "a signal handler has no other way to the listener of its process",
    "trainer/savers.py: SAVERS": "session and managers of a process find each other, and neither needs the other",
    "worker/signals.py: StopSignal._installed": "a process has one handler of SIGTERM",
    "worker/signals.py: _Watch.process": "a process has one thread that takes SIGTERM, which a fork has not",
}
"""File and name: why it is the process's own state."""

CONTAINERS = {"dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict", "WeakSet",
              "WeakKeyDictionary", "WeakValueDictionary"}  # fmt: skip
CHANGES = {"append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "sort",
           "reverse", "add", "discard", "update", "setdefault", "__setitem__", "__delitem__"}  # fmt: skip


def parsed() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    }


def changing_classes(trees: dict[str, ast.Module]) -> set[str]:
    """Names of the package's classes whose methods assign to ``self`` outside of ``__init__``, or set attributes."""
    found = set()
    for tree in trees.values():
        for one in ast.walk(tree):
            if isinstance(one, ast.ClassDef) and any(is_on_self(each) for each in assigned(one)):
                found.add(one.name)
    return found


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Every target of an assignment, an augmented one, and a ``del``."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign | ast.Delete):
            for target in one.targets:
                yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)
        elif isinstance(one, ast.AugAssign) or (isinstance(one, ast.AnnAssign) and one.value is not None):
            yield one.target


def is_on_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def values_of(tree: ast.Module, changing: set[str]) -> dict[str, bool]:
    """Names at the module's level that hold a container, or (True) an object whose class changes itself."""
    found = {}
    for one in tree.body:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            called = one.value.func if isinstance(one.value, ast.Call) else None
            name = (
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
            literal = isinstance(one.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            for target in targets:
                if isinstance(target, ast.Name) and (literal or name in CONTAINERS or name in changing):
                    found[target.id] = name in changing
    return found


def changed_names(module: ast.Module) -> Iterator[str]:
    """Names whose containers are changed by functions, ``Class.attribute`` of classes, and those of ``global``."""
    classes = {one.name for one in ast.walk(module) if isinstance(one, ast.ClassDef)}
    functions = [one for one in ast.walk(module) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    tree = ast.Module(body=list(functions), type_ignores=[])
    for one in ast.walk(tree):
        if isinstance(one, ast.Global):
            yield from one.names
        called = one.func if isinstance(one, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CHANGES and isinstance(called.value, ast.Name):
            yield called.value.id
    for target in assigned(tree):
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            yield target.value.id
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in classes:
            yield f"{target.value.id}.{target.attr}"
    for one in ast.walk(module):
        if isinstance(one, ast.ClassDef):
            for target in assigned(one):
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "cls"
                ):
                    yield f"{one.name}.{target.attr}"


def state_in(trees: dict[str, ast.Module]) -> set[str]:
    """File and name of everything of a module that changes."""
    changing = changing_classes(trees)
    found = set()
    values = {file: values_of(tree, changing) for file, tree in trees.items()}
    for file, tree in trees.items():
        changed = set(changed_names(tree))
        found |= {f"{file}: {name}" for name, changes in values[file].items() if changes or name in changed}
        found |= {f"{file}: {name}" for name in changed if "." in name}
        for one in ast.walk(tree):
            if isinstance(one, ast.Global):
                found |= {f"{file}: {name}" for name in one.names}
            elif isinstance(one, ast.ImportFrom) and one.module and one.module.startswith("slurmft."):
                source = one.module.removeprefix("slurmft.").replace(".", "/") + ".py"
                imported = {each.name: each.asname or each.name for each in one.names}
                found |= {
                    f"{source}: {name}"
                    for name, here in imported.items()
                    if name in values.get(source, {}) and here in changed
                }
    return found


def test_only_what_belongs_to_the_whole_process_is_kept_in_a_module():
    found = state_in(parsed())
    assert found - set(ALLOWED) == set(), "give it to an object, or say here why it is the process's own"
    assert set(ALLOWED) - found == set(), "it is gone: take it off the list"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("KNOWN = {}\ndef learn(x): KNOWN[x] = 1", {"KNOWN"}),
        ("KNOWN: list[int] = []\ndef learn(x): KNOWN.append(x)", {"KNOWN"}),
        ("KNOWN = deque()\ndef learn(): del KNOWN[0]", {"KNOWN"}),
        ("COUNT = 0\ndef count():\n  global COUNT\n  COUNT += 1", {"COUNT"}),
        ("class One:\n  def set(self): self.x = 1\nONE = One()", {"ONE"}),
        ("class One:\n  of = 0\n  @classmethod\n  def set(cls): cls.of = 1", {"One.of"}),
        ("class One:\n  of = 0\ndef set(): One.of = 1", {"One.of"}),
        ("KNOWN = {'a': 1}\ndef get(x): return KNOWN[x]", set()),
        ("def get():\n  known = []\n  known.append(1)", set()),
    ],
    ids=["item", "append", "del", "global", "object", "cls", "class", "constant", "local"],
)
def test_what_the_rule_finds(text, names):
    assert state_in({"a.py": ast.parse(text)}) == {f"a.py: {name}" for name in names}


def test_a_change_in_another_module_is_found():
    trees = {
        "a.py": ast.parse("KNOWN = {}"),
        "b.py": ast.parse("from slurmft.a import KNOWN\ndef learn(): KNOWN.clear()"),
    }
    assert state_in(trees) == {"a.py: KNOWN"}
