"""Where a compile's stages go: kept for `explain`, written for the ``dump`` option, logged for TORCH_LOGS."""

from __future__ import annotations

import os
from pathlib import Path

from torch import fx

from fp4_compile.errors import DumpError
from fp4_compile.plan import Plan
from fp4_compile.testing import canonical_graph


class Recorder:
    """Keeps the stages of one compiled graph as text, in order."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []

    def graph(self, name: str, graph: fx.Graph | fx.GraphModule) -> None:
        """Record a graph in canonical form."""
        self.text(name, canonical_graph(graph))

    def text(self, name: str, text: str, suffix: str = "txt") -> None:
        """Record a stage."""
        self.stages.append((name, text))

    def plan(self, plan: Plan) -> None:
        """Record the plan, to read and to give back."""
        self.text("plan", plan.render() + "\n")


class FolderRecorder(Recorder):
    """Writes each stage into ``<folder>/graph_NNN/NN_<stage>.txt`` as it comes.

    Raises:
        DumpError: the folder cannot be made or written.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.path = _next_folder(Path(folder))

    def text(self, name: str, text: str, suffix: str = "txt") -> None:
        """Write a stage; its number is its place in the order."""
        self._write(f"{len(self.stages):02d}_{name}.{suffix}", text)
        super().text(name, text, suffix)

    def plan(self, plan: Plan) -> None:
        """Write the plan as a table, and as ``plan.json``, which the ``plan`` option takes."""
        super().plan(plan)
        self._write("plan.json", plan.to_json())

    def _write(self, name: str, text: str) -> None:
        try:
            (self.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise DumpError(f"cannot write the dump {self.path / name}: {error.strerror}") from error


def _next_folder(folder: Path) -> Path:
    """The first unused ``graph_NNN``; made exclusively, so that two processes never share one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(p.name[6:]) for p in folder.glob("graph_*") if p.name[6:].isdigit()), default=-1)
        while True:
            path = folder / f"graph_{number:03d}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        where = os.fspath(folder)
        raise DumpError(
            f"option 'dump': cannot write the folder {where!r} ({error.strerror}); name a folder you may write to"
        ) from error
