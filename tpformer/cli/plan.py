"""`tpformer plan`: which layout for a model on so many GPUs, and the planner's model beside published runs."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from tpformer.config import FP8, RunConfig, check_choice, read_toml, to_toml
from tpformer.processes.files import replace_file

from .options import new_file, number, parsed
from .plan_budgets import budgets
from .plan_config import planned_config
from .plan_sites import check_sites, sites

if TYPE_CHECKING:
    from tpformer.planner.candidates import Question
    from tpformer.planner.search import Choice

FILES = ("out", "json", "csv", "html")
SAME = ("gpus", "link_gb_s", "network_gb_s", "memory_gb")  # what a sweep of these leaves to be said once
SWEPT = ("preset", "gpus", "batch", "link_gb_s", "network_gb_s", "gemm_tflops", "memory_gb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Find the fastest layout that fits, by models of time and memory. Everything that it prints is a prediction.
    Needs no GPU and no data. Layouts are written as in its table: tp=8,pp=4,dp=2,zero=1,microbatch=1."""

    file: tyro.conf.Positional[str] = ""
    """A run's TOML file: its model, batch and other settings."""
    preset: str | None = None
    """In place of a file: an architecture of `tpformer presets`."""
    parameters: str | None = None
    """In place of a file: a size such as 1.5B; the preset that is nearest to it is taken."""
    gpus: int = 8
    """How many GPUs."""
    device: str = "h100"
    """a100-40, a100-80, h100, h200, b200, cpu, or the path of a TOML file that describes another one."""
    nodes_of: int | None = None
    """GPUs of a node. Unset: the device's."""
    batch: int | None = None
    """Samples of a step. Unset: the file's, or about 4M tokens."""
    seq_length: int | None = None
    """Tokens of a sample. Unset: the file's; with a preset or a size 4,096, or less where the model takes less."""
    precision: str | None = None
    """16 or fp8: of the layers' linears. Unset: the file's, or 16."""
    tokens: str = "auto"
    """Tokens of the training, such as 300B, for days and price. auto: 20 for each parameter."""
    price: float | None = None
    """Price of one GPU for an hour."""
    top: int = 10
    """How many layouts to show."""
    all_reduce: str = "library"
    """How data-parallel reductions are priced: library, or an all-reduce of docs/data_parallel.md, such as ring."""
    explain: str | None = None
    """A layout: its items and memory, or why it cannot work and the nearest that does."""
    within: str | None = None
    """Search only layouts of a kind, such as zero=3,pp=1 or pp=2|4|8. Several kinds, with semicolons between them, are
    compared: the best of each."""
    sweep: str | None = None
    """KEY=VALUE,VALUE,...: the best layout for each value of preset, gpus, batch, link_gb_s, network_gb_s, gemm_tflops
    or memory_gb; with several kinds, the best of each, and from where on which is the fastest."""
    out: str = ""
    """A file for the best layout, as a run's TOML. Empty: none."""
    json: str = ""
    """A file for all figures."""
    csv: str = ""
    """A file with a row for each layout."""
    html: str = ""
    """A file for a report with pictures, which needs no network."""
    memory_budget: str = ""
    """Budgets such as "48GiB,40GiB" or "80%": what layers keep in each, in the layout of --explain, or of the file."""
    sites: int | None = None
    """Sites that share GPUs and batch, each with a copy of the model: a step over --between, and in rounds (DiLoCo)."""
    between: str = "1Gb/s,10Gb/s"
    """With --sites: the rates of each site's link in one direction, in bits."""
    between_ms: float = 30.0
    """With --sites: milliseconds of a message between sites."""
    calibrate: str = ""
    """A folder of results of `python -m bench` on the device, such as bench/results/NAME, which correct its rates."""
    validate: bool = False
    """Compare the model of time with published runs, and leave terms out of it. Exit code 1 if a gate is missed."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of layouts in `within`."""
        return [] if self.within is None else [kind.strip() for kind in self.within.split(";")]


def plan_command(arguments: Sequence[str]) -> None:
    """`tpformer plan`: search, explain, sweep or validate. ValueError, in one sentence, for what cannot be planned."""
    options = parsed(Plan, "plan", arguments)
    if options.validate:
        sys.exit(0 if _validate() else 1)
    _check(options)
    if options.sites is not None:
        sites(options.sites, options.between, options.between_ms, _question(options), _print)
    elif options.memory_budget:
        budgets(options.memory_budget, options.explain, bool(options.file), _question(options), _print)
    elif len(options.kinds) > 1 or (options.kinds and options.sweep is not None):
        _compare(options)
    elif options.sweep is not None:
        _sweep(options)
    elif options.explain is not None:
        _explain(options, _question(options))
    else:
        _search(options, _question(options))


def _check(options: Plan) -> None:
    """ValueError for options that exclude each other, and files that could not be made."""
    files = {name: new_file(f"--{name}", path) for name in FILES if (path := getattr(options, name))}
    for name, given in (("--sweep", options.sweep is not None), ("--within with several kinds", options.kinds[1:])):
        if given and (files or options.explain is not None):
            raise ValueError(f"{name} only prints: leave out --explain, --out, --json, --csv and --html")
    if options.memory_budget and (files or options.sweep is not None or options.kinds):
        raise ValueError("--memory-budget only prints: leave out --within, --sweep, --out, --json, --csv and --html")
    if options.sites is not None:
        check_sites(options, files)
    if options.tokens != "auto":
        number("--tokens", options.tokens)
    if len({*map(Path.absolute, files.values())}) < len(files):
        raise ValueError(f"--{', --'.join(files)} name the same file: give each its own")


def _question(options: Plan) -> "Question":
    """The model, batch and device of the options."""
    from tpformer.parallel import exchange_named
    from tpformer.planner.calibration import calibrated
    from tpformer.planner.candidates import Question
    from tpformer.planner.comparison import within
    from tpformer.planner.devices import load_device
    from tpformer.planner.software import ours

    exchange = exchange_named(options.all_reduce)
    if exchange.changes_losses:
        raise ValueError(f"--all-reduce {options.all_reduce} has no model of its time: choose another")
    device = load_device(options.device, options.nodes_of)
    if options.calibrate:
        device = calibrated(device, Path(options.calibrate))
    device = device.scaled(device.factor)
    config = planned_config(options, device)
    question = Question(config, options.gpus, device, ours(config.parallel, device), exchange=exchange)
    return within(question, options.kinds[0]) if len(options.kinds) == 1 else question


def _tokens(options: Plan, config: RunConfig) -> float:
    if options.tokens == "auto":
        from tpformer.planner.advice import chinchilla_tokens

        return float(chinchilla_tokens(config.model.n_active_parameters).value)
    return number("--tokens", options.tokens)


def _given(options: Plan, tokens: float) -> tuple[float | None, float | None]:
    """Tokens and price for a table, which shows days and money only of a training that is asked for."""
    return tokens if options.tokens != "auto" or options.price is not None else None, options.price


def _print(*parts: Any) -> None:
    """Print tables as wide as the terminal, or 160 columns into a file."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def _parts(parts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Headings, each with its lines below it."""
    for heading, lines in parts.items():
        yield f"{heading}:"
        yield from (f"  {line}" for line in lines)


def _search(options: Plan, question: "Question") -> None:
    from tpformer.planner import plan_report
    from tpformer.planner.search import search

    found = search(question, options.top)
    if not found.choices:
        _check_alone(question)
        _print("no layout works; what was dropped:", *plan_report.dropped_lines(found))
        remedy = "take more GPUs, or larger ones" if found.dropped["does not fit"] else "change --gpus or --batch"
        remedy += ", or leave out --within" if options.kinds else ""
        remedy += ", or plan with --precision 16" if question.config.train.precision == FP8 else ""
        raise ValueError(f"no layout works on {question.gpus} x {question.device.name}: {remedy}")
    tokens = _tokens(options, question.config)
    written = _write(options, question, found.choices, tokens)
    _print(
        plan_report.table(found.choices, question, *_given(options, tokens)),
        plan_report.memory_table(found.choices[0], question),
        plan_report.why(found.choices),
        *_parts(plan_report.parts(found.choices[0], question, tokens, options.price)),
        "not shown:",
        *plan_report.dropped_lines(found),
        "All figures are predictions. Check the first layout: tpformer dry-run FILE.toml",
        *written,
    )


def _check_alone(question: "Question") -> None:
    """ValueError for settings that contradict each other on one rank, too, so that no layout can work."""
    from tpformer.planner.layouts import with_layout
    from tpformer.planner.search import check

    check(with_layout(question.config, {}))


def _write(options: Plan, question: "Question", choices: Sequence["Choice"], tokens: float) -> list[str]:
    """Write the files that were asked for, before the output, whose reader may go. A line for each."""
    from tpformer.planner.plan_page import page
    from tpformer.planner.plan_report import plain_values

    records = [plain_values(choice, question, tokens, options.price) for choice in choices]
    rows = io.StringIO(newline="")
    writer = csv.DictWriter(rows, list(dict.fromkeys(key for each in records for key in each)), restval=0)
    writer.writeheader()
    writer.writerows(records)
    texts: dict[str, Callable[[], str]] = {
        "out": lambda: run_file(options, choices[0]),
        "json": lambda: json.dumps({"predictions": records}, indent=1) + "\n",
        "csv": rows.getvalue,
        "html": lambda: page(question, choices, tokens, options.price),
    }
    paths = {name: path for name in FILES if (path := getattr(options, name))}
    for name, path in paths.items():
        replace_file(Path(path), texts[name]())
    return [f"written: {path}" for path in paths.values()]


def run_file(options: Plan, choice: "Choice") -> str:
    """The layout as a run's TOML file. Device and dtype are left to the machine where the given file leaves them, and
    a pipeline's step is recorded where it asks for that."""
    given = read_toml(options.file) if options.file else {}
    unset: dict[str, Any] = {key: None for key in ("device", "dtype") if key not in given.get("train", {})}
    recorded = given.get("log", {}).get("timeline_step", 0) if choice.config.parallel.pipeline_parallel > 1 else 0
    config = dataclasses.replace(
        choice.config,
        train=dataclasses.replace(choice.config.train, **unset),
        log=dataclasses.replace(choice.config.log, timeline_step=recorded),
    )
    head = "# Written by `tpformer plan`. Predictions: " + f"{choice.tokens:,.0f} tokens/s, "
    return f"{head}{choice.memory.total / 1e9:.1f} GB of a device.\n\n{to_toml(config)}"


def _explain(options: Plan, question: "Question") -> None:
    from tpformer.planner import plan_report
    from tpformer.planner.layouts import layout_text, parse_layout, with_layout
    from tpformer.planner.search import evaluate, nearest, refusal_of

    values = parse_layout(options.explain or "")
    config = with_layout(question.config, values)
    tokens = _tokens(options, question.config)
    if (reason := refusal_of(question, config)) is None:
        choice = evaluate(question, config)
        written = _write(options, question, [choice], tokens)
        _print(
            plan_report.table([choice], question, *_given(options, tokens)),
            plan_report.memory_table(choice, question),
            *_parts(plan_report.parts(choice, question, tokens, options.price)),
            *written,
        )
        return
    _print(f"{layout_text(config)} cannot work: {reason}.")
    if (other := nearest(question, values)) is None:
        raise ValueError(
            f"no layout works on {question.gpus} x {question.device.name}: leave out --explain to see what was dropped"
        )
    _print("The nearest layout that works:", plan_report.table([other], question, *_given(options, tokens)))
    if any(getattr(options, name) for name in FILES):
        raise ValueError("nothing was written, because the layout cannot work: explain the one that does")


def swept(question: "Question", key: str, text: str) -> "Question":
    """The question with one value changed. ValueError for an unknown key or a value out of range."""
    from tpformer.planner.devices import RATES, check_number, check_rates

    check_choice("--sweep", key, SWEPT)
    value = number(f"--sweep {key}", text)
    if key in ("gpus", "batch"):
        if value != int(value):
            raise ValueError(f"--sweep {key} {text}: write a whole number")
        if key == "gpus":
            return question._replace(gpus=int(value))
        train = dataclasses.replace(question.config.train, global_batch_size=int(value))
        return question._replace(config=dataclasses.replace(question.config, train=train))
    factor = question.device.factor
    device = question.device.scaled(1 / factor)  # as its file has it
    check_number("--sweep", key, value)
    if key in RATES:
        name, unit = RATES[key]
        rate: dict[str, Any] = {name: unit * value}
        device = dataclasses.replace(device, machine=device.machine._replace(**rate))
    else:
        size: dict[str, Any] = {key.split("_")[0]: 1e9 * value}
        device = dataclasses.replace(device, **size)
    check_rates(device, "--sweep")
    return question._replace(device=device.scaled(factor))


def _values(options: Plan) -> tuple[str, list[tuple[str, "Question"]]]:
    """The key of --sweep, and each value with its question. ValueError comes before anything is searched."""
    if options.sweep is None:
        return "", [("", _question(options))]
    key, equals, values = options.sweep.partition("=")
    if not equals or not values:
        raise ValueError(f"--sweep {options.sweep}: write KEY=VALUE,VALUE,...")
    if key != "preset":
        question = _question(options)
        return key, [(text, swept(question, key, text)) for text in values.split(",")]
    if options.file or options.preset or options.parameters:
        raise ValueError("--sweep preset= names the models: leave out FILE.toml, --preset and --parameters")
    return key, [(text, _question(dataclasses.replace(options, preset=text))) for text in values.split(",")]


def _compare(options: Plan) -> None:
    from tpformer.planner.comparison import compare, crossovers, table
    from tpformer.planner.plan_report import assumed

    key, values = _values(options)
    rows = [compare(question, text, options.kinds) for text, question in values]
    same = f"{options.device}, {assumed(values[0][1])}" if key in ("", *SAME) else options.device
    _print(table(key, rows, same), *crossovers(key, rows), "All figures are predictions.")


def _sweep(options: Plan) -> None:
    from tpformer.planner import plan_report
    from tpformer.planner.search import search

    key, values = _values(options)
    for text, changed in values:
        tokens = _tokens(options, changed.config)
        found = search(changed, 1)
        if found.choices:
            cost = plan_report.cost_part(found.choices[0], changed, tokens, options.price)
            _print(
                f"{key} = {text}", plan_report.table(found.choices, changed, *_given(options, tokens)), *_parts(cost)
            )
        else:
            _print(f"{key} = {text}: no layout works")


def _validate() -> bool:
    """Print every table with its gates and what each term is worth. Whether all gates are met."""
    from tpformer.planner.plan_report import validation_lines, validation_table
    from tpformer.planner.published import TABLES, TEETH, outcome_of

    met = True
    for name in TABLES:
        found = outcome_of(name)
        teeth = {term: outcome_of(name, frozenset({term})).failures for term in TEETH.get(name, ())}
        _print(validation_table(found), *validation_lines(found, teeth))
        met = met and not found.failures and all(teeth.values())
    return met
