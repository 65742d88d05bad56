"""The rules of the house, executable. Each rule is also shown to fail on a bad snippet."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LEVEL = {"kernels": 0, "model": 1, "engine": 2, "scripts": 3}  # imports point to lower levels only
FOLDERS = (*LEVEL, "benchmarks", "tests")
MAX_LINES = 500
VAGUE_NAMES = {"utils.py", "common.py", "misc.py", "helpers.py"}
LOOP = {"hymoe.engine.train", "hymoe.engine.optim", "hymoe.engine.parallel"}
# Package -> the files of the rooms and scripts that may import it.
ONLY_IN = {
    "transformers": r"(tests|benchmarks)/.*|engine/eval/reward\.py|engine/verify\.py|engine/bundle/verify\.py",
    "tokenizers": r"(tests|benchmarks)/.*|engine/data/tokenizer\.py|engine/demo\.py",
    "safetensors": r"(tests|benchmarks)/.*|engine/hf_checkpoint\w*\.py|engine/verify\.py",
}

Rule = Callable[[str, str], Iterator[str]]  # (path in the repository, text) -> complaints


def python_files() -> list[str]:
    files = [path for folder in FOLDERS for path in (REPO / folder).rglob("*.py")]
    return sorted(path.relative_to(REPO).as_posix() for path in [*files, REPO / "setup.py"])


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, as an absolute dotted name, with its line."""
    package = "hymoe." + path.rpartition("/")[0].replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def starts_with(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def import_direction(path: str, text: str) -> Iterator[str]:
    room = path.split("/")[0]
    if room not in LEVEL:
        return
    for line, name in imports(path, ast.parse(text)):
        parts = name.split(".")
        target = parts[1] if parts[0] == "hymoe" and len(parts) > 1 else None
        if target == "scripts" or parts[0] == "scripts":
            yield f"{path}:{line} imports {name}: scripts are never imported"
        elif LEVEL.get(target, -1) > LEVEL[room]:
            yield f"{path}:{line} imports {name}: {room} must not know {target}"
        elif parts[0] in ("tests", "benchmarks") or target in ("tests", "benchmarks"):
            yield f"{path}:{line} imports {name}: no room imports tests or benchmarks"
        elif parts[0] in ("engine", "model"):
            yield f"{path}:{line} imports {name}: rooms are imported as hymoe.{parts[0]}"


def data_and_eval_know_no_loop(path: str, text: str) -> Iterator[str]:
    if not path.startswith(("engine/data/", "engine/eval/")):
        return
    for line, name in imports(path, ast.parse(text)):
        if any(starts_with(name, module) for module in LOOP):
            yield f"{path}:{line} imports {name}: data and eval know nothing of the loop"


def packages_in_their_place(path: str, text: str) -> Iterator[str]:
    for line, name in imports(path, ast.parse(text)):
        allowed = ONLY_IN.get(name.split(".")[0])
        if allowed and not re.fullmatch(allowed, path):
            yield f"{path}:{line} imports {name}; allowed only in {allowed}"


def print_only_where_people_look(path: str, text: str) -> Iterator[str]:
    if path.startswith(("scripts/", "benchmarks/", "tests/")):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
            yield f"{path}:{node.lineno} prints; only scripts and benchmarks do"


def environment_only_in_run(path: str, text: str) -> Iterator[str]:
    if path == "engine/run.py" or path.startswith("tests/"):
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield f"{path}:{node.lineno} reads the environment; only engine/run.py does"
    for line, name in imports(path, tree):
        if name in ("os.environ", "os.getenv"):
            yield f"{path}:{line} reads the environment; only engine/run.py does"


def no_swallowed_errors(path: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"{path}:{node.lineno} bare except"
        if all(_says_nothing(statement) for statement in node.body):
            yield f"{path}:{node.lineno} except that does nothing"


def _says_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or constant


def no_optional_imports(path: str, text: str) -> Iterator[str]:
    """An import under `try` may only end in an error or a process's end, never in a stand-in."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try):
            continue
        body = [inner for statement in node.body for inner in ast.walk(statement)]
        if not any(isinstance(inner, ast.Import | ast.ImportFrom) for inner in body):
            continue
        for handler in node.handlers:
            inner = [x for statement in handler.body for x in ast.walk(statement)]
            if not any(isinstance(x, ast.Raise) for x in inner):
                yield f"{path}:{handler.lineno} an import that fails must raise, naming the install"


def short_files(path: str, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MAX_LINES:
        yield f"{path} has {lines} lines, more than {MAX_LINES}"


def nothing_left_to_do(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", line):
            yield f"{path}:{number} leaves something to do"


def nothing_timed_in_tests(path: str, text: str) -> Iterator[str]:
    if not path.startswith("tests/"):
        return
    clocks = ("time.time", "time.perf_counter", "time.monotonic", "time.process_time", "timeit")
    tree = ast.parse(text)
    named = list(imports(path, tree))
    named += [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    for line, name in named:
        if any(starts_with(name.removesuffix("_ns"), clock) for clock in clocks):
            yield f"{path}:{line} uses {name}: nothing is timed in a test"


def ascii_only(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            yield f"{path}:{number} is not ASCII: {line!a}"


def names_say_what(path: str, text: str) -> Iterator[str]:
    name = path.rpartition("/")[2]
    if name in VAGUE_NAMES:
        yield f"{path}: a name that says nothing"
    if name == "__init__.py":
        yield f"{path}: no room has an __init__.py (it would shadow PyPI's kernels package)"


RULES: list[Rule] = [
    import_direction,
    data_and_eval_know_no_loop,
    packages_in_their_place,
    print_only_where_people_look,
    environment_only_in_run,
    no_swallowed_errors,
    no_optional_imports,
    short_files,
    nothing_left_to_do,
    nothing_timed_in_tests,
    ascii_only,
    names_say_what,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_everywhere(rule):
    complaints = [x for path in python_files() for x in rule(path, (REPO / path).read_text())]
    assert not complaints, "\n" + "\n".join(complaints)


BAD = [
    (import_direction, "kernels/x.py", "import hymoe.model.net"),
    (import_direction, "kernels/x.py", "from hymoe import model"),
    (import_direction, "kernels/ssd/x.py", "from ...engine import run"),
    (import_direction, "model/x.py", "def f():\n    from hymoe.engine.run import main"),
    (import_direction, "engine/x.py", "from scripts.train import main"),
    (import_direction, "engine/x.py", "from tests.close import relative_error"),
    (import_direction, "scripts/x.py", "from engine.run import main"),
    (data_and_eval_know_no_loop, "engine/data/x.py", "from hymoe.engine import parallel"),
    (data_and_eval_know_no_loop, "engine/eval/x.py", "from ..optim import step"),
    (packages_in_their_place, "engine/x.py", "import transformers.models"),
    (packages_in_their_place, "scripts/x.py", "from tokenizers import Tokenizer"),
    (packages_in_their_place, "model/x.py", "from safetensors.torch import load_file"),
    (print_only_where_people_look, "engine/x.py", "if 1:\n    print('x')"),
    (environment_only_in_run, "kernels/x.py", "import os\nos.environ['A'] = '1'"),
    (environment_only_in_run, "scripts/x.py", "from os import getenv"),
    (no_swallowed_errors, "engine/x.py", "try:\n    f()\nexcept:\n    g()"),
    (no_swallowed_errors, "engine/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (no_swallowed_errors, "engine/x.py", "try:\n    f()\nexcept OSError:\n    ..."),
    (no_optional_imports, "kernels/x.py", "try:\n    import a\nexcept ImportError:\n    a = None"),
    (short_files, "engine/x.py", "\n" * (MAX_LINES + 1)),
    (nothing_left_to_do, "engine/x.py", "x = 1  # TO" + "DO: later"),
    (nothing_timed_in_tests, "tests/x.py", "import time\nstart = time.perf_counter()"),
    (nothing_timed_in_tests, "tests/x.py", "from time import monotonic_ns"),
    (ascii_only, "engine/x.py", "x = '\u2192'"),
    (names_say_what, "engine/utils.py", ""),
    (names_say_what, "kernels/__init__.py", ""),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_can_fail(rule, path, text):
    assert list(rule(path, text))


GOOD = [
    (import_direction, "scripts/x.py", "import hymoe.kernels.norm\nfrom hymoe.engine import run"),
    (import_direction, "model/x.py", "import torch\nfrom hymoe.kernels.ssd import op"),
    (import_direction, "kernels/ssd/x.py", "from . import ref"),
    (data_and_eval_know_no_loop, "engine/eval/x.py", "from hymoe.engine.generate import generate"),
    (packages_in_their_place, "engine/hf_checkpoint_write.py", "import safetensors"),
    (no_swallowed_errors, "engine/x.py", "try:\n    f()\nexcept OSError as e:\n    raise X from e"),
    (
        no_optional_imports,
        "k/x.py",
        "try:\n    import a\nexcept ImportError as e:\n    raise X from e",
    ),
    (nothing_timed_in_tests, "tests/x.py", "x.time_step = 1\nimport time\ntime.sleep(1)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_accepts(rule, path, text):
    assert not list(rule(path, text))


def test_there_is_something_to_check():
    assert {"setup.py", "tests/test_house.py"} <= set(python_files())


def missing_rooms(rooms: set[str], files: list[str]) -> set[str]:
    """Folders of the three rooms that hold Python files but that setup.py does not install."""
    folders = {path.rpartition("/")[0] for path in files}
    return {f for f in folders if f.split("/")[0] in ("kernels", "model", "engine")} - rooms


def declared_rooms() -> set[str]:
    for node in ast.parse((REPO / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "ROOMS":
            return set(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no list ROOMS")


def test_setup_installs_every_room():
    assert not missing_rooms(declared_rooms(), python_files())
    assert missing_rooms({"kernels"}, ["kernels/a.py", "kernels/b/c.py"]) == {"kernels/b"}


def test_every_declared_room_is_there():
    absent = [room for room in declared_rooms() if not list((REPO / room).glob("*.py"))]
    assert not absent, f"git keeps no empty folder and an install would fail: {absent}"


def test_rooms_are_importable_from_any_folder(tmp_path):
    """Through the installed mapping, not by luck of the current folder."""
    modules = [
        f"hymoe.{path.removesuffix('.py').replace('/', '.')}"
        for room in sorted(declared_rooms())
        for path in [min((REPO / room).glob("*.py")).relative_to(REPO).as_posix()]
    ]
    code = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m) is None])"
    assert _python(code, tmp_path) == "[]"


def test_peers_are_not_shadowed():
    """From the repository, where a top folder `kernels` lies, PyPI's packages must still win."""
    assert _python("import transformers; print(transformers.__name__)", REPO) == "transformers"
    code = "import kernels, hymoe.kernels; print(getattr(kernels, '__file__', None))"
    file = _python(code, REPO)
    if importlib.util.find_spec("kernels").origin is None:  # the package is not installed here
        assert file == "None", f"{file}: our folder must stay a namespace"
    else:
        assert "site-packages" in file


def test_an_installed_kernels_package_wins(tmp_path):
    """The same with a stand-in of PyPI's package, so that it is checked on every machine."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("def get_kernel(): return 'theirs'\n")
    code = (
        f"import sys; sys.path.insert(1, {str(tmp_path)!r}); from kernels import get_kernel; "
        f"import hymoe.kernels; print(get_kernel(), hymoe.kernels.__name__)"
    )
    assert _python(code, REPO) == "theirs hymoe.kernels"


def _python(code: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_pyproject_holds_tool_settings_only():
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert set(settings) == {"build-system", "tool"}


def test_constraints_pin_every_requirement():
    pins = dict(
        line.split("==")
        for line in (REPO / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert not [name for name, version in pins.items() if "+" in version]
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    lists = re.findall(
        r'"([a-zA-Z][\w-]*)[^"]*"', (REPO / "setup.py").read_text().split("install_requires")[1]
    )
    cuda = {"mamba-ssm", "causal-conv1d"}  # built against the machine's own torch, never pinned
    wanted = {name.lower() for name in lists} - cuda - {"cuda", "test", "eval"}
    assert {"torch", "ruff", "transformers"} <= wanted
    assert not wanted - normal
