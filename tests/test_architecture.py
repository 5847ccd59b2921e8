"""The house's rules, held by reading the imports of every file: who may import whom, no cycles, one owner of the
environment."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "model": set(),
    "data": set(),
    "parallel": {"model"},
    "optim": {"model", "parallel"},
    "train": {"model", "data", "parallel", "optim"},
    "configs": {"model", "data", "parallel", "optim", "train"},
    "launch": {"model", "data", "parallel", "optim", "train", "configs"},
}
FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import, including those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the room"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_room_is_there() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_is_below_them(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == room
        for line, module in imports(path)
        if (head := module.split(".")[0]) in MAY_IMPORT | {"tests": set()} and head not in MAY_IMPORT[room] | {room}
    ]
    assert wrong == []


def test_the_model_knows_no_process_group() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if path.is_relative_to(ROOT / "model")
        for line, module in imports(path)
        if module.startswith("torch.distributed")
    ]
    assert wrong == []
    uses = [path for path in FILES if path.is_relative_to(ROOT / "model") and ".distributed" in path.read_text("utf-8")]
    assert uses == []


def file_graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    modules = {module_of(path): path for path in FILES}

    def known(name: str) -> str | None:
        return name if name in modules else name.rpartition(".")[0] if name.rpartition(".")[0] in modules else None

    return {
        name: {target for _, imported in imports(path) if (target := known(imported)) not in (None, name)}
        for name, path in modules.items()
    }


def folder_graph(files: dict[str, set[str]], *, folders: set[str]) -> dict[str, set[str]]:
    """``files`` with the modules of each of ``folders`` (``parallel.pipeline``) as one; others stay themselves."""

    def place(name: str) -> str:
        return next((folder for folder in folders if f"{name}.".startswith(f"{folder}.")), name)

    found: dict[str, set[str]] = {place(name): set() for name in files}
    for name, targets in files.items():
        found[place(name)] |= {place(target) for target in targets} - {place(name)}
    return found


def test_no_import_cycles() -> None:
    graph = file_graph()
    # Raises CycleError, naming the cycle.
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


def test_no_cycles_between_folders() -> None:
    folders = {module_of(path).rpartition(".")[0] for path in FILES if len(path.relative_to(ROOT).parts) == 3}
    folders = {folder for folder in folders if "." in folder}
    assert {"parallel.expert", "parallel.pipeline", "launch.plan", "model.kernels"} <= folders
    graph = folder_graph(file_graph(), folders=folders)
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def test_a_cycle_between_folders_is_found_though_its_files_have_none() -> None:
    files = {"p.pipeline.layout": {"p.cost.flops"}, "p.cost.flops": set(), "p.cost.plan": {"p.pipeline.layout"}}
    assert len(list(TopologicalSorter(files).static_order())) == 3
    graph = folder_graph(files, folders={"p.pipeline", "p.cost"})
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


def test_only_launch_reads_the_environment() -> None:
    words = ("os.environ", "getenv")
    wrong = [
        str(path.relative_to(ROOT))
        for path in FILES
        if not path.is_relative_to(ROOT / "launch") and any(word in path.read_text("utf-8") for word in words)
    ]
    assert wrong == []


def test_no_global_statements() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Global)
    ]
    assert wrong == []


def overwrites(path: Path) -> list[int]:
    """Lines that put something in a method's place on an instance, where what was installed before would vanish.

    A wrapper takes an attribute that the owner has for it. mypy refuses the assignment to a method; what it lets pass
    is what a comment excuses, ``forward`` of modules that it does not know, and names in strings.
    """
    text = path.read_text("utf-8")
    found = [number for number, line in enumerate(text.splitlines(), 1) if "ignore[method-assign" in line]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in METHODS:
            found.append(node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            found += [
                node.lineno for name in node.args[1:2] if isinstance(name, ast.Constant) and name.value in METHODS
            ]
    return found


METHODS = {"forward", "__call__", "__class__"}


def test_no_wrapper_overwrites() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in overwrites(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "layer.forward = wrapped",
        "linear.forward: object = wrapped",
        "first, block.forward = 1, wrapped",
        "setattr(module, 'forward', wrapped)",
        "optimizer.step = record  # type: ignore[method-assign]",
        "core.__class__ = Other",
    ],
)
def test_an_overwrite_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "file.py").write_text(f"{line}\n")
    assert overwrites(tmp_path / "file.py")


FAST_KERNELS = [
    path
    for path in sorted((ROOT / "model" / "kernels").glob("*.py"))
    if path.stem != "__init__" and not path.stem.endswith("_reference")
]


@pytest.mark.parametrize("kernel", FAST_KERNELS, ids=lambda path: path.stem)
def test_every_kernel_has_its_reference(kernel: Path) -> None:
    # The chunked form of KDA lies in several files.
    stem = "kda" if kernel.stem.startswith("kda_") else kernel.stem
    assert (kernel.parent / f"{stem}_reference.py").exists()


# What of `torch.distributed` moves data; everything else of it (groups, stores, barriers) moves none.
MOVES = re.compile(r"dist\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend)")
# A checkpoint is written over a group of its own, while the run goes on.
ELSEWHERE = ("parallel/collectives.py", "train/checkpoint")


def test_every_collective_goes_through_the_file_that_names_and_counts_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if not path.relative_to(ROOT).as_posix().startswith(ELSEWHERE)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and MOVES.match(ast.unparse(node.func))
    ]
    assert wrong == []
