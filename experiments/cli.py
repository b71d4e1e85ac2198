"""The front door: ``whybn <study>`` plans, computes what is missing, draws, and says where everything is.

Exit codes: 0 fine, 1 a run or a check failed, 2 bad input (one line: what was given, what is allowed), 130 interrupted.
Everything heavier than the standard library and pydantic is loaded where it is used, so that help answers at once and a
study that is complete is drawn without loading torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, ValidationError

from experiments.config import Count, Frozen
from experiments.environment import cores, pick_device
from experiments.study import Job, Study, discover, standing

if TYPE_CHECKING:
    import pandas as pd
    from pydantic_core import ErrorDetails

__all__ = ["BadInputError", "explain", "main"]


class BadInputError(ValueError):
    """What was asked for cannot be done; the message says what was given and what is allowed."""


class Common(Frozen):
    """Options of every study."""

    preset: str = Field("laptop", description="size of the study; other options override its values")
    seeds: Count = Field(3, description="runs an arm, with seeds 0 to N - 1; more later computes only the new ones")
    out: Path = Field(Path("runs"), description="folder for all studies; this one's is <out>/<study>")
    jobs: Count = Field(1, description="runs beside each other")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where there is one")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. ``arguments`` defaults to the command line's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("whybn: interrupted; the same command goes on from where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on: not our input's fault
        raise
    except (ValueError, OSError) as error:
        print(f"whybn: {explain(error)}", file=sys.stderr)
        return 2


def explain(error: Exception | str) -> str:
    """One line for what went wrong with the input: an error of pydantic's, the system's, tyro's (its text), or ours."""
    if isinstance(error, ValidationError):
        return "; ".join(map(_explain_field, error.errors(include_url=False)))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, str):
        return _explain_box(error)
    return " ".join(str(error).split())


def _dispatch(words: list[str]) -> int:
    studies = discover()
    match words:
        case []:
            raise BadInputError(f"which study? There is {', '.join(studies)}; whybn --help says more")
        case ["-h" | "--help", *_]:
            print(_help(studies))
            return 0
        case ["--version"]:
            print(f"whybn {_version()}")
            return 0
        case ["list"]:
            print(_list(studies))
            return 0
        case ["list" | "--version", stray, *_]:
            raise BadInputError(f"unexpected argument {stray!r} after {words[0]}")
        case [name, *rest] if name in studies:
            return _study(studies[name], rest)
    known = [*studies, "list", "--help", "--version"]
    raise BadInputError(f"{words[0]!r} is no study or command: {_closest(words[0], known)}")


def _study(study: Study[Any], words: list[str]) -> int:
    options = _parse(study, words)
    if options is None:
        return 0
    common, fields, drawing = options
    study.refuse(fields, drawing)
    folder = common.out / study.name
    jobs = study.jobs(fields, range(common.seeds), device=pick_device(common.device), folder=folder)
    _refuse_unwritable(common.out)
    missing = [job for job in jobs if standing(job) not in ("complete", "diverged")]
    study.state(folder, preset=common.preset, fields=fields, seeds=range(common.seeds), jobs=jobs)
    if missing and (code := _compute(missing, common.jobs)) != 0:
        return code
    written = [folder / "study.json"]
    failed: list[str] = []
    for figure in study.figures:
        draw = importlib.import_module(f"analysis.figures.{figure.name}").draw
        drawn = draw(folder, **{name: getattr(drawing, name) for name in figure.options})
        _print_table(drawn.title, drawn.table)
        written += drawn.paths
        failed += drawn.failed
    print(*written, sep="\n")
    for line in failed:
        print(f"whybn: {line}", file=sys.stderr)
    return 1 if failed else 0


def _compute(jobs: Sequence[Job], workers: int) -> int:
    from experiments.sweep import sweep

    outcomes = sweep(jobs, workers=workers)
    bad = {job.name: outcome for job, outcome in zip(jobs, outcomes, strict=True) if outcome.error is not None}
    if not bad:
        return 0
    refused = all(outcome.status == "refused" for outcome in bad.values())
    messages: dict[str, list[str]] = {}  # what stops one run often stops all: say it once
    for name, outcome in bad.items():
        messages.setdefault(explain(ValueError(outcome.error)), []).append(name)
    for message, names in messages.items():
        who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        print(f"whybn: {who} {'refused' if refused else 'failed'}: {message}", file=sys.stderr)
    return 2 if refused else 1


# Options. tyro finds the words that belong to each and writes the help; what they mean is pydantic's to say, so that
# every wrong value is refused in the same way.


def _parse(study: Study[Any], words: list[str]) -> tuple[Common, Any, Any] | None:
    """The values of a study's options; None if help was asked for and given."""
    import tyro

    preset = _preset(study, words)
    sized = study.presets[preset]
    usual = {"preset": preset, "seeds": sized.seeds, "jobs": cores()}
    sections = {
        "common": _section(Common, usual, presets=tuple(study.presets)),
        study.name: _section(study.fields, sized.fields),
        "drawing": _section(study.drawing, {}),
    }
    form: Any = dataclasses.make_dataclass(
        "Options", [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in sections.items()]
    )
    flags = [flag for kind in sections.values() for flag in _flags(kind)]
    _refuse_missing_values(words, flags)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values, unknown = tyro.cli(
                form,
                args=words,
                prog=f"whybn {study.name}",
                description=study.question,
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise BadInputError(explain(said.getvalue())) from None
    if unknown:
        raise BadInputError(_explain_unknown(unknown, [flag.name for flag in flags]))
    given = [dataclasses.asdict(getattr(values, name)) for name in sections]
    _drop_what_does_not_apply(study.fields, sections[study.name], given[1])
    return Common(**given[0]), study.fields(**given[1]), study.drawing(**given[2])


def _drop_what_does_not_apply(model: type[Frozen], section: type[Any], given: dict[str, Any]) -> None:
    """Take out of ``given`` what the preset says and the user's own choices leave without a meaning.

    What the user typed stays, to be refused by name.
    """
    usual = dataclasses.asdict(section())
    for name in model.model_construct(**given).unused():
        if given[name] == usual[name]:
            del given[name]


def _section(model: type[Frozen], defaults: Mapping[str, Any], presets: tuple[str, ...] = ()) -> type[Any]:
    """A dataclass with the fields of ``model`` as words, their descriptions, and these defaults in place of its own."""
    import tyro

    fields = []
    for name, field in model.model_fields.items():
        default = defaults.get(name, field.default)
        meant: Any = Literal[presets] if name == "preset" and presets else field.annotation
        kind: Any = str if default is not None else str | None
        if isinstance(default, bool):
            kind = bool
        elif isinstance(default, tuple):
            kind, default = tuple[str, ...], tuple(f"{x:g}" if isinstance(x, float) else str(x) for x in default)
        elif default is not None:
            default = str(default)
        metavar = None if kind is bool else _spelled(meant)
        described = Annotated[kind, tyro.conf.arg(help=field.description, metavar=metavar)]
        fields.append((name, described, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(model.__name__, fields, frozen=True)


def _spelled(kind: Any) -> str:
    """A type as help shows it: INT, {auto,cpu,cuda}, FLOAT [FLOAT ...]."""
    if (origin := get_origin(kind)) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if origin is Annotated:
        return _spelled(get_args(kind)[0])
    if origin is tuple:
        return f"{_spelled(get_args(kind)[0])} [{_spelled(get_args(kind)[0])} ...]"
    if origin in (Union, UnionType):
        return "|".join(_spelled(one) for one in get_args(kind) if one is not NoneType)
    return str(kind.__name__).upper()


def _preset(study: Study[Any], words: Sequence[str]) -> str:
    """The preset that is asked for: needed before the others, whose defaults it sets."""
    chosen = "laptop"
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--preset":
            chosen = following
        elif word.startswith("--preset="):
            chosen = word.partition("=")[2]
    if chosen not in study.presets:
        raise BadInputError(f"--preset is one of {', '.join(study.presets)}, got {chosen!r}")
    return chosen


@dataclasses.dataclass(frozen=True)
class _Flag:
    name: str
    takes_one: bool  # value, and no fewer


def _flags(section: type[Any]) -> Iterable[_Flag]:
    for field in dataclasses.fields(section):
        name = field.name.replace("_", "-")
        yield _Flag(f"--{name}", takes_one=not isinstance(field.default, bool | tuple))
        if isinstance(field.default, bool):
            yield _Flag(f"--no-{name}", takes_one=False)


def _refuse_missing_values(words: Sequence[str], flags: Sequence[_Flag]) -> None:
    takes_one = {flag.name for flag in flags if flag.takes_one}
    for word, following in itertools.pairwise([*words, "--"]):
        if word.replace("_", "-") in takes_one and following.startswith("--"):
            raise BadInputError(f"{word} takes a value")


# Explaining.


def _explain_field(error: ErrorDetails) -> str:
    path = ".".join(part for part in error["loc"] if isinstance(part, str))
    option = f"--{path.replace('_', '-')}: " if path else ""
    if error["type"] == "value_error":
        return option + error["msg"].removeprefix("Value error, ")
    return f"{option}{error['msg'].replace('Input should', 'must')}, got {error['input']!r}"


def _explain_box(text: str) -> str:
    """What one of tyro's boxes says, without the box."""
    return " ".join(re.sub(r"[^\w\s.,:;'\"()\[\]{}<>=/?!-]|--{3,}", " ", text).split())


def _explain_unknown(words: Sequence[str], flags: Sequence[str]) -> str:
    options = [word for word in words if word.startswith("-")]
    if not options:
        return f"unexpected argument {words[0]!r}"
    option = options[0].partition("=")[0]
    return f"unknown option {option}: {_closest(option, flags)}"


def _closest(word: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there is {', '.join(names)}"


# Saying.


def _help(studies: Mapping[str, Study[Any]]) -> str:
    width = max(map(len, studies))
    listed = "\n".join(f"  {name:{width}}  {study.question}" for name, study in studies.items())
    return (
        "usage: whybn <study> [options]     run what is missing, draw, and say where it is\n"
        "       whybn <study> --help        its options\n"
        "       whybn list                  every study with its arms and presets\n"
        "       whybn --version\n\n"
        f"studies:\n{listed}"
    )


def _list(studies: Mapping[str, Study[Any]]) -> str:
    blocks = []
    for name, study in studies.items():
        usual = study.fields(**study.presets["laptop"].fields)
        arms = ", ".join(f"{arm.name} ({arm.label})" for arm in study.conditions(usual))
        presets = ", ".join(f"{key} ({preset.seeds} seeds)" for key, preset in study.presets.items())
        blocks.append(f"{name}: {study.question}\n  arms: {arms}\n  presets: {presets}\n  rule: {study.rule}")
    return "\n\n".join(blocks)


def _print_table(title: str, table: pd.DataFrame) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold")
    for name in table.columns:
        shown.add_column(str(name), justify="left" if table[name].dtype.kind in "OUT" else "right")
    for row in table.itertuples(index=False):
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def _version() -> str:
    try:
        return metadata.version("whybn")
    except metadata.PackageNotFoundError:
        return "(a copy that was not installed)"


def _refuse_unwritable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise BadInputError(f"--out {out} cannot be written: {error.strerror or error}") from None
