"""Options that commands which read a trace have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Format = Annotated[str | None, typer.Option(help="Format, where the name does not tell it.")]
Columns = Annotated[str | None, typer.Option(help="Columns of a CSV file: id=NAME,size=NAME,cost=NAME.")]
Resize = Annotated[str | None, typer.Option(help="Changing sizes: error, each or last.")]
Speeds = Annotated[Path | None, typer.Option(help="Speeds of tiers, as `tiercache profile` writes them.")]
Figures = Annotated[Path | None, typer.Option("--json", help="Write all figures.")]
