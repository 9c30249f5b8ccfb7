"""Options that several commands share, and their conversion to core types."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from flashtune.core.calls import read
from flashtune.core.config import Direction
from flashtune.core.dtypes import DTYPES, DType, parse_dtype
from flashtune.core.errors import InputError
from flashtune.core.models import TOKENS, find_model, models
from flashtune.core.problem import ASKED, DIRECTIONS, MASK_KINDS, MAX_HEAD_DIM, Features, MaskKind, Problem
from flashtune.core.target import Target, find_target, targets

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter

LONGEST = 1 << 24
"""Longest sequence that options accept, in tokens."""

WIDTH = 2048
"""H * D of a problem without --heads: the width of a small language model."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of a table.")


SWITCHES = {
    "alibi": "ALiBi: a bias by distance with a slope per head; one tuning serves all slopes.",
    "sinks": "Attention sinks: a logit per head in each softmax's denominator; one tuning serves all logits.",
    "dbias": "A backward whose bias (--mask bias) gets its gradient, too.",
    "dslopes": "A backward whose ALiBi slopes (--alibi) get their gradient, too.",
    "tf32": "Allow TF32 products for fp32 inputs (IEEE otherwise).",
}
"""Features that an option of the same name switches on, and its help."""

MOST = 2**31 - 1
"""Largest size that databases hold."""


SIZE = click.IntRange(1, LONGEST)


class Known(click.ParamType[str]):
    """Text with shell completion of known words, which commas may separate; commands check it themselves."""

    def __init__(self, name: str, known: Callable[[], Iterable[str]]) -> None:
        self.name, self._known = name, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Known words that begin with the typed ones."""
        before, comma, begun = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{word}") for word in self._known() if word.startswith(begun)]


def _templates() -> Iterable[str]:
    from flashtune.templates import families

    return families()


GPU = Known("gpu", targets)
DTYPE = Known("dtype", lambda: DTYPES)
TEMPLATE = Known("template", _templates)
MODEL = Known("model", models)

db_option = click.option("--db", "location", metavar="PATH|URL", help="Only this database, in place of your own and the shipped one.")


class Numbers(click.ParamType[tuple[int, ...]]):
    """Parameter type of `512` or `512,1024,2048`."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Numbers of one occurrence of the option."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a number, nor numbers with commas between them.", param, ctx)


class ListCommand(click.Command):
    """Command whose repeatable options also take several values at once: `--n 512 1024` is `--n 512 --n 1024`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option's name before each further value."""
        repeatable = {name for param in self.params if isinstance(param, click.Option) and param.multiple for name in param.opts}
        spelled: list[str] = []
        current, fresh = None, True
        for word in args:
            if word.startswith("-") and not word.lstrip("-").replace(",", "").isdigit():
                current = word if word in repeatable else None
                fresh = True
            elif current is not None:
                spelled += [] if fresh else [current]
                fresh = False
            spelled.append(word)
        return super().parse_args(ctx, spelled)


def flat(values: tuple[tuple[int, ...], ...]) -> list[int]:
    """Distinct numbers of all groups, in order."""
    return list(dict.fromkeys(number for group in values for number in group))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """Values of the options that describe problems; `d`, `n` and `dtype` hold every value."""

    d: tuple[int, ...]
    n: tuple[int, ...]
    dtype: tuple[str, ...]
    d_v: int | None
    n_q: int | None
    direction: Direction
    mask: MaskKind | None
    dropout: float
    window: int | None
    alignment: str
    softcap: float
    switches: tuple[str, ...]
    heads: int | None
    kv_heads: int | None
    batch: int | None
    model: str | None = None
    calls: Path | None = None

    @classmethod
    def taken(cls, kwargs: dict[str, Any]) -> "ProblemOptions":
        """Remove these options from all keyword arguments of a command."""
        found = {field.name: kwargs.pop(field.name, None) for field in fields(cls) if field.name != "switches"}
        found["switches"] = tuple(name for name in SWITCHES if kwargs.pop(name))
        for name in ("d", "n"):
            found[name] = tuple(flat(found[name])) if isinstance(found[name], tuple) else (found[name],)
        names = found["dtype"] or ()
        return cls(**{**found, "dtype": (names,) if isinstance(names, str) else names})

    def dtypes(self, default: list[DType]) -> list[DType]:
        """Distinct parsed element types; commas separate several."""
        found: list[DType] = [parse_dtype(name) for text in self.dtype for name in text.split(",")]
        return list(dict.fromkeys(found)) if found else default

    def features(self, *, causal: bool) -> Features:
        """The features; raises InputError for values out of range."""
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout {self.dropout:g} is out of range: give a rate from 0 up to, but not including, 1")
        if not 0 <= self.softcap < float("inf"):
            raise InputError(f"--softcap {self.softcap:g} is out of range: give a positive cap, or leave it out")
        if self.window is not None and self.window < 0:
            raise InputError(f"--window {self.window} is out of range: give a size of at least 0")
        if "dbias" in self.switches and self.mask != "bias":
            given = f"--mask is {self.mask}" if self.mask else "no --mask was given"
            raise InputError(f"--dbias requests the gradient of a bias, and {given}: give --mask bias, or leave --dbias out")
        if "dslopes" in self.switches and "alibi" not in self.switches:
            raise InputError("--dslopes requests the gradient of ALiBi slopes, and there are none: give --alibi, or leave --dslopes out")
        if self.direction == "fwd" and (gradient := next((name for name in ASKED if name in self.switches), None)):
            raise InputError(f"--{gradient} requests a gradient, and a forward has none: give --direction bwd, or leave --{gradient} out")
        return Features(
            causal=causal,
            alignment="bottom_right" if self.alignment == "bottom-right" else "top_left",
            mask=self.mask or "none",
            dropout=self.dropout > 0,
            window=None if self.window is None else (self.window, self.window),
            softcap=self.softcap > 0,
            **dict.fromkeys(self.switches, True),
        )

    def problem(self, *, n: int, d: int, dtype: DType, causal: bool) -> Problem:
        """The problem of these sizes, with defaults for missing options; raises InputError for values out of range."""
        self._check_sizes(n, d)
        features = self.features(causal=causal)
        if features.tf32 and dtype != "fp32":
            raise InputError(f"--tf32 needs fp32 inputs, not {dtype}: give --dtype fp32, or leave --tf32 out")
        if n > LONGEST:
            raise InputError(f"--n {n} is out of range: give at most {LONGEST}")
        heads = self.heads if self.heads is not None else max(1, WIDTH // d)
        if self.kv_heads is not None and heads % self.kv_heads:
            raise InputError(f"{heads} query heads can't share {self.kv_heads} key heads: make --heads a multiple of --kv-heads")
        batch = self.batch if self.batch is not None else max(1, TOKENS // n)
        if batch * heads > MOST // 2:
            raise InputError(f"--batch {batch} times --heads {heads} is out of range: give sizes whose product is at most {MOST // 2}")
        return Problem(
            batch=batch,
            heads=heads,
            kv_heads=self.kv_heads if self.kv_heads is not None else heads,
            n_q=self.n_q if self.n_q is not None else n,
            n_kv=n,
            d=d,
            d_v=self.d_v if self.d_v is not None else d,
            dtype=dtype,
            features=features,
            direction=self.direction,
        )

    def of_model(self) -> list[Problem]:
        """Distinct problems of `model`'s attentions; raises InputError for an option that the model determines."""
        model = find_model(self.model or "")
        others: dict[str, object] = {
            "--d": self.d,
            "--d-v": self.d_v,
            "--heads": self.heads,
            "--kv-heads": self.kv_heads,
            "--mask": self.mask,
        }
        others |= {"--window": self.window is not None, "--softcap": self.softcap, "--alignment": self.alignment != "top-left"}
        others |= {"--dropout": self.dropout} | {f"--{name}": True for name in self.switches}
        refuse_beside(f"--model {model.slug}", others)
        # A step of decoding has one query, of the last token: encoders have no such step.
        kinds = [kind for kind in model.attentions if self.n_q is None or kind.causal or kind.n_q is not None]
        if not kinds:
            raise InputError(f"--n-q {self.n_q} was given for {model.slug}, which writes no text: leave --n-q out")
        for name, size in {"--n": max(self.n, default=1), "--n-q": self.n_q or 1, "--batch": self.batch or 1}.items():
            if size > LONGEST:
                raise InputError(f"{name} {size} is out of range: give at most {LONGEST}")
        found = [
            # Cross-attention has a key length of its own.
            kind.problem(n=n, dtype=dtype, batch=self.batch, n_q=self.n_q, direction=self.direction)
            for dtype in self.dtypes(["bf16"])
            for kind in kinds
            for n in (self.n if self.n and kind.n_q is None else kind.n)
        ]
        return list(dict.fromkeys(found))

    def of_calls(self) -> list[Problem]:
        """Distinct problems in the file `calls`; raises InputError for any other option that describes problems, for sizes that no database
        holds, for an empty file, and as `flashtune.core.calls.read` does."""
        path = self.calls or Path()
        # Values of options that weren't given.
        absent = {"direction": "fwd", "alignment": "top-left", "dropout": 0.0, "softcap": 0.0, "d": (), "n": (), "dtype": (), "calls": path}
        given = {field.name: getattr(self, field.name) != absent.get(field.name) for field in fields(self) if field.name != "switches"}
        others = {f"--{name.replace('_', '-')}": value for name, value in (given | dict.fromkeys(self.switches, True)).items()}
        refuse_beside(f"--calls {path}", others)
        found = list(dict.fromkeys(problem.seen() for problem in read(path)))
        if not found:
            raise InputError(f"{path} holds no calls: run the model before dispatch.save_calls, or name another file")
        for problem in found:
            lengths = max(problem.n_q, problem.n_kv, *(side or 0 for side in problem.features.window or ()))
            if lengths > LONGEST or problem.batch * problem.heads > MOST // 2:
                sizes = f"batch {problem.batch}, heads {problem.heads}"
                raise InputError(f"{path} has a call of sizes that are out of range ({problem.label()}, {sizes}): remove it from the file")
        return found

    def _check_sizes(self, n: int, d: int) -> None:
        """Raise InputError for a size below 1, above the largest head size, or above the largest of databases."""
        sizes = {"--n": n, "--d": d, "--n-q": self.n_q, "--d-v": self.d_v, "--window": self.window}
        sizes |= {"--batch": self.batch, "--heads": self.heads, "--kv-heads": self.kv_heads}
        for name, size in sizes.items():
            if size is not None and size > MOST:
                raise InputError(f"{name} {size} is out of range: give at most {MOST}")
            if size is not None and size < 1 and name != "--window":
                raise InputError(f"{name} {size} is out of range: give at least 1")
            if size is not None and size > MAX_HEAD_DIM and name in ("--d", "--d-v"):
                raise InputError(f"{name} {size} is out of range: kernels take head sizes up to {MAX_HEAD_DIM}")


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Raise InputError where one of the `others` was given beside an `option` that determines it."""
    if given := [name for name, value in others.items() if value]:
        raise InputError(f"{given[0]} was given together with {option}, which already describes the attention: leave one of them out")


def problem_options(*, many: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator with the options that describe a problem, passed as `requested`; with `many`, --n, --d and --dtype may be repeated."""
    words = "; several with commas or by repeating" if many else ""
    of_models = "The attentions of this model, in place of --d and the like (flashtune show --models)."
    of_calls = "Recorded calls of a model, in place of --d and the like: a file of dispatch.save_calls, or of FLASHTUNE_CALLS."
    number: Any = Numbers() if many else int
    in_place = [
        click.option("--model", type=MODEL, metavar="NAME", help=of_models),
        click.option("--calls", type=click.Path(path_type=Path), metavar="FILE", help=of_calls),
    ]
    options = [
        *(in_place if many else []),
        click.option("--d", "d", type=number, required=not many, multiple=many, help=f"Head size of q and k, up to 256{words}."),
        click.option("--d-v", "d_v", type=int, help="Head size of v, when it differs from --d."),
        click.option("--n", "n", type=number, multiple=many, required=not many, help=f"Sequence length{words}."),
        click.option("--n-q", "n_q", type=int, help="Number of queries, when it differs from --n."),
        click.option("--dtype", "dtype", type=DTYPE, multiple=many, help=f"Element type: {', '.join(DTYPES)}{words}."),
        click.option("--direction", type=click.Choice(DIRECTIONS), default="fwd", show_default=True, help="Forward or backward pass."),
        click.option("--mask", type=click.Choice([m for m in MASK_KINDS if m != "none"]), help="A boolean mask or an additive bias."),
        click.option("--dropout", type=float, default=0.0, metavar="P", help="Dropout rate; any rate above 0 tunes for all rates."),
        click.option("--window", type=int, metavar="W", help="Sliding window: W keys to each side (to the left when causal)."),
        click.option(
            "--alignment",
            type=click.Choice(["top-left", "bottom-right"]),
            default="top-left",
            show_default=True,
            help="Position of the diagonal when --n-q differs from --n: first query on first key, as in torch, or last query on last key.",
        ),
        click.option("--softcap", type=float, default=0.0, metavar="C", help="Soft cap of the scores; any cap tunes for all caps."),
        *(click.option(f"--{name.replace('_', '-')}", is_flag=True, help=text) for name, text in SWITCHES.items()),
        click.option("--heads", type=int, help=f"Query heads (default {WIDTH} / D)."),
        click.option("--kv-heads", type=int, help="Key and value heads (default: as many as query heads)."),
        click.option("--batch", type=int, help=f"Batch (default {TOKENS} / N)."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def gathered(**kwargs: Any) -> None:
            command(requested=ProblemOptions.taken(kwargs), **kwargs)

        for option in reversed(options):
            gathered = option(gathered)
        return gathered

    return decorate


def gpu_of(name: str | None) -> Target:
    """The GPU of this name, or without a name the one in this machine; raises InputError where there is none."""
    if name is not None:
        return find_target(name)
    from flashtune.tuner.machine import local_gpu

    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise InputError("this machine has no GPU that flashtune knows: name one with --gpu-name")
    return gpu.target


def filters_of(*, gpu_name: str | None = None, d: int | None = None, n: int | None = None, dtype: str | None = None) -> "KeyFilter":
    """Database filter for these options."""
    slug = None if gpu_name is None else find_target(gpu_name).slug
    return {"gpu": slug, "d": d, "n": n, "dtype": None if dtype is None else parse_dtype(dtype)}


def share_of(option: str, text: str) -> float:
    """Share in [0, 1) written as `0.5%` or `0.005`; raises InputError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 1.0
    if not share < 1:
        raise InputError(f"{option} {text!r} is no share of a time: write 0.5% or 0.005")
    return share


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h` or a plain number; raises InputError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise InputError(f"--budget {text!r} is no time: write 90s, 10m or 1h")
    return float(found[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[found[2]]
