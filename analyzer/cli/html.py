"""`--info-html`: writes a report as a page for a browser."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from analyzer.cli.environment import Environment

if TYPE_CHECKING:
    from analyzer.api import Launch
    from analyzer.inference.offload.estimate import OffloadReport
    from analyzer.inference.reading import InferenceLaunch
    from analyzer.inference.results import InferenceReport
    from analyzer.launch.info_options import InfoOptions
    from analyzer.layout_search.result import SearchResult
    from analyzer.report.against import OldReport
    from analyzer.report.html.head import Head
    from analyzer.results import Report

OPTION: Final = "--info-html"


def write_html(
    report: Report,
    launch: Launch,
    path: str,
    *,
    argv: Sequence[str],
    old: Sequence[OldReport] = (),
    search: SearchResult | None = None,
) -> None:
    """Writes the page of a report, next to the older ones of `--info-against`. `search`: the result of a search from this launch.

    Raises InputError if Jinja2 is not installed, or if the file cannot be written.
    """
    from analyzer.report.html.head import head_of_training
    from analyzer.report.html.page import extra_data, page
    from analyzer.report.json.document import to_json, write_text

    more = {}
    if search is not None:
        from analyzer.report.json.search import search_json

        more["search"] = search_json(search)
    head = head_of_training(report, name=_model(launch.options) or _model_of_tokenizer(launch), search=search)
    names = [head.title, *(Path(each.file).name for each in old)]
    documents = [{**to_json(report), **more}, *(each.document for each in old)]
    inputs = None if launch.time is None or launch.time.flops_share is not None else launch.time
    text = page(head, documents, names, extra=extra_data(report, inputs), command=_command(argv, launch.environ))
    write_text(text, path, option=OPTION)


def write_inference_html(
    report: InferenceReport, launch: InferenceLaunch, path: str, *, argv: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Writes the page of a report about generation. Raises InputError like `write_html`."""
    from analyzer.report.html.head import head_of_inference
    from analyzer.report.json.inference import inference_json

    head = head_of_inference(report, name=_model(launch.options))
    _write_generation(head, inference_json(report), path, command=_command(argv, environ))


def write_offload_html(
    report: OffloadReport, launch: InferenceLaunch, path: str, *, argv: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Writes the page of a report about generation with offloading. Raises InputError like `write_html`."""
    from analyzer.report.html.head import head_of_offload
    from analyzer.report.json.offload import offload_json

    head = head_of_offload(report, name=_model(launch.options))
    _write_generation(head, offload_json(report), path, command=_command(argv, environ))


def _write_generation(head: Head, document: dict[str, Any], path: str, *, command: str) -> None:
    from analyzer.report.html.page import page
    from analyzer.report.json.document import write_text

    write_text(page(head, [document], [head.title], extra={}, command=command), path, option=OPTION)


def _model(options: InfoOptions) -> str:
    """The name of the model of `--info-model`, without the folder of a file; empty without that option."""
    if options.model is None:
        return ""
    path = Path(options.model)
    return path.parent.name or path.stem if path.suffix == ".json" else path.name


def _model_of_tokenizer(launch: Launch) -> str:
    """The name of the model whose tokenizer the launch has, without the organization, if the launch has the size of that model."""
    from analyzer.launch.model_config.published import published_model_of_size

    tokenizer, model = launch.arguments.get("tokenizer_model"), launch.job.model
    if not isinstance(tokenizer, str):
        return ""
    found = published_model_of_size(tokenizer, layers=model.num_layers, hidden_size=model.hidden_size)
    return (found or "").rpartition("/")[2]


def _command(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command that writes the page again, after the environment variables that the analysis has read."""
    variables = environ.used if isinstance(environ, Environment) else {}
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(["get-training-info", *argv])]
    )
