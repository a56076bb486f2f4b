"""`tiercache verify`: the parity ladder of a model, a pass or fail for each rung."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tiercache.runtime.adapters import ModelAdapter
    from tiercache.runtime.codec_parity import CodecParity
    from tiercache.runtime.parity import ParityReport, Rung

app = typer.Typer()
_TEXT_TOKENS = 1024  # four sets of rows


@app.command()
def verify(
    model: Annotated[str | None, typer.Option(metavar="PATH_OR_ID", help="A Transformers causal LM.")] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="FILE", help="A GGUF file with the weights of one.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bfloat16, float16, float32; the checkpoint's own.")
    ] = None,
    twin: Annotated[
        bool, typer.Option("--twin", help="Run a tiny model of the same class, not the weights.")
    ] = False,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Also the gradient's error, layer by layer, with pages by this codec."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured.")
    ] = None,
) -> None:
    """Compare log-probs and gradients with dense training on small trees, in fp64, fp32 and the model's dtype.

    Ends with status 1 when a rung fails.
    """
    if (model is None) == (gguf is None):
        raise typer.BadParameter("name one model, by --model or by --gguf")
    import torch
    from rich.console import Console

    from tiercache import runtime
    from tiercache.cli.language_models import load_causal_lm, text_tokens, twin_of_configuration

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype is not None and dtype not in dtypes:
        raise typer.BadParameter(f"--dtype {dtype}: one of {', '.join(dtypes)}")
    stand_in = None if model is None else twin_of_configuration(model)
    loaded = stand_in.model if stand_in else load_causal_lm(model, gguf, dtypes[dtype] if dtype else None)
    tokens = None if stand_in else text_tokens(model, gguf, _TEXT_TOKENS)
    told = Console(stderr=True, highlight=False).print
    report = runtime.verify(loaded, tokens=tokens, whole_model=False if twin else None, progress=told)
    console = Console(highlight=False)
    console.print(_ladder(report))
    for line in _notes(report, stand_in, random_rows=tokens is None):
        console.print(line)
    result, passed = report.as_dict(), report.passed
    if codec is not None:
        from tiercache.runtime.codec_parity import codec_parity

        cost = codec_parity(loaded, codec, tokens=tokens, progress=told)
        console.print(_layers(cost))
        result["codec"] = cost.as_dict()
        passed = passed and cost.passed
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if not passed:
        raise typer.Exit(1)


def _notes(report: ParityReport, stand_in: ModelAdapter | None, *, random_rows: bool) -> Iterator[str]:
    """What is to be said below the ladder."""
    for rung in report.rungs:
        if rung.missing:
            yield f"{rung.dtype} was not run: {rung.missing}"
    if stand_in is not None:
        yield f"No weights were found: a small random {stand_in.described} was run."
        yield "`tiercache plan` tells the sizes of the whole model."
        return
    yield _sizes(report.pages)
    if random_rows:
        yield "No tokenizer was found: the rows are random tokens, on which rounding is at its largest."


def _sizes(pages: dict[str, int]) -> str:
    return (
        f"A prefix token's pages are {pages['prefix_bytes_per_token']:,} bytes in all layers "
        f"({pages['expanded_bytes_per_token']:,} as keys and values); a node's states {pages['state_bytes']:,}."
    )


def _ladder(report: ParityReport) -> Any:
    """The rungs as a table."""
    from rich.table import Table

    subject = report.rungs[0].subject  # the same for all
    table = Table(title=f"Parity of {subject} with dense training (relative L2)")
    table.add_column("dtype")
    for name in ("log-probs", "dense", "gradient", "dense", "limit"):
        table.add_column(name, justify="right")
    table.add_column("")
    for rung in report.rungs:
        table.add_row(rung.dtype, *_figures(rung))
    return table


def _layers(cost: CodecParity) -> Any:
    """A codec's errors, layer by layer."""
    from rich.table import Table

    table = Table(title=f"Gradient with {cost.codec} against exact pages, {cost.dtype} (relative L2)")
    table.add_column("parameters of")
    table.add_column("gradient", justify="right")
    for name, error in cost.layers.items():
        table.add_row(name, f"{error:.1e}")
    table.add_row("all", f"{cost.gradient_error:.1e}")
    table.add_row("log-probs", f"{cost.logprob_error:.1e}")
    return table


def _figures(rung: Rung) -> list[str]:
    if rung.missing:
        return ["-"] * 5 + ["not run"]
    noise = [f"{e:.1e}" if e else "reference" for e in (rung.dense_logprob_error, rung.dense_gradient_error)]
    verdict = "pass" if rung.passed else "FAIL"
    return [
        f"{rung.logprob_error:.1e}", noise[0], f"{rung.gradient_error:.1e}", noise[1], f"{rung.limit[1]:.1e}", verdict,
    ]  # fmt: skip
