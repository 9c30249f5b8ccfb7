"""Options that describe problems, and the problems that they describe."""

from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from flashtune.cli.functions import FUNCTIONS, Decorator, register_functions, with_functions
from flashtune.cli.options import DTYPE, HEAD_SIZE, LONGEST, MODEL, SIZE, grouped
from flashtune.core.problems.config import Direction
from flashtune.core.problems.dtypes import DTYPES, DType, parse_dtype
from flashtune.core.problems.lengths import LAWS, Law, Lengths
from flashtune.core.problems.problem import DIRECTIONS, MASK_KINDS, Features, Problem
from flashtune.core.records.calls import read
from flashtune.core.records.models import TOKENS, Model, find_model
from flashtune.core.system.errors import InputError

GRID = (512, 1024, 2048, 4096, 8192, 16384)
"""Default sequence lengths; calls of lengths between them use the nearest record."""

WIDTH = 2048
"""H * D of a problem without --heads: the width of a small language model."""

MOST = 2**30
"""Most heads of all batches, a size that databases hold."""

SWITCHES: dict[str, str] = {field.name: field.metadata["help"] for field in fields(Features) if "help" in field.metadata}
"""Features that an option of the same name switches on, and its help."""

Bands = Literal["causal", "full"]


class Range(click.FloatRange):
    """A number of a range; click lets NaN through, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{found} is not in the range {self._describe_range()}.", param, ctx)
        return found


class Numbers(click.ParamType[tuple[int, ...]]):
    """Parameter type of numbers with commas between them, each in a range: `512` or `512,1024,2048`."""

    name = "integers"

    def __init__(self, each: click.ParamType[int]) -> None:
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Numbers of one occurrence of the option."""
        return value if isinstance(value, tuple) else tuple(self._each.convert(part, param, ctx) for part in str(value).split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """Values of the options that describe problems; `d`, `n`, `dtypes` and `causal` hold every value, `features` those beside `causal`.

    `given` are the names of all of these options that were on the command line.
    """

    d: tuple[int, ...]
    n: tuple[int, ...]
    dtypes: tuple[DType, ...]
    causal: tuple[bool, ...]
    features: dict[str, Any]
    direction: Direction
    d_v: int | None
    n_q: int | None
    heads: int | None
    kv_heads: int | None
    batch: int | None
    model: str | None
    calls: Path | None
    packed: Law | None
    paged: int | None
    score_mod: str | None
    mask_mod: str | None
    given: tuple[str, ...]

    @classmethod
    def of(cls, ctx: click.Context, values: dict[str, Any]) -> "ProblemOptions":
        """Remove these options from all `values` of the command with this context."""
        on_line = {name for name in values if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        bands: Bands | None = values.pop("bands")
        mask, window = values.pop("mask") or "none", values.pop("window")
        # Calls over pages count from the last key unless they say otherwise.
        usual = "top-left" if values.get("paged") is None else "bottom-right"
        features = {
            "alignment": (values.pop("alignment") or usual).replace("-", "_"),
            "mask": mask,
            "dropout": values.pop("dropout") > 0,
            "window": None if window is None else (window, window),
            "softcap": values.pop("softcap") > 0,
            **{name: values.pop(name) for name in SWITCHES},
        }
        dtypes: tuple[DType, ...] = tuple(dict.fromkeys(parse_dtype(name) for text in values.pop("dtype") for name in text.split(",")))
        own = {
            name: values.pop(name, None)
            for name in (
                *("direction", "d_v", "n_q", "heads", "kv_heads", "batch", "model", "calls", "packed", "paged"),
                *("score_mod", "mask_mod"),
            )
        }
        names = [*features, *own, "n", "d", "dtype", "bands"]
        given = tuple(f"--{bands if name == 'bands' else name.replace('_', '-')}" for name in names if name in on_line)
        both = (False,) if own["score_mod"] or own["mask_mod"] else (False, True)
        causal = {"causal": (True,), "full": (False,), None: both}[bands]
        d, n = (tuple(dict.fromkeys(chain.from_iterable(values.pop(name)))) for name in ("d", "n"))
        return cls(d=d, n=n, dtypes=dtypes, causal=causal, features=features, given=given, **own)

    def problems(self) -> list[Problem]:
        """Distinct problems: recorded calls, a model's, or dtypes x bands x head sizes x lengths, grouped so that compiled variants are
        shared. Raises InputError for options that contradict each other."""
        if self.calls is not None:
            return self._of_calls(self.calls)
        if self.model is not None:
            return self._of_model(find_model(self.model))
        if not self.d:
            raise InputError(
                "neither --d nor --model was given, nor --calls: name a head size, a model (flashtune show --models), or a file of calls"
            )
        return [
            self.problem(n=n, d=d, dtype=dtype, causal=causal)
            for d in self.d
            for dtype in self.dtypes or ("bf16", "fp16")
            for causal in self.causal
            for n in self.n or GRID
        ]

    def problem(self, *, n: int, d: int, dtype: DType, causal: bool) -> Problem:
        """The problem of these sizes, with defaults for missing options; raises InputError for those that contradict each other."""
        heads, batch = self.heads or max(1, WIDTH // d), self.batch or max(1, TOKENS // n)
        if batch * heads > MOST:
            raise InputError(f"--batch {batch} times --heads {heads} is out of range: give sizes whose product is at most {MOST}")
        law = self.packed or (None if self.paged is None else "equal")
        found = Problem(
            batch=batch,
            heads=heads,
            kv_heads=self.kv_heads or heads,
            n_q=self.n_q or (n if self.paged is None else 1),
            n_kv=n,
            d=d,
            d_v=self.d_v or d,
            dtype=dtype,
            features=Features(causal=causal, packed=law is not None, page=self.paged or 0, **self.features),
            direction=self.direction,
            lengths=None if law is None else Lengths.of(law, batch, batch * n),
        )
        return with_functions(found, self.score_mod, self.mask_mod)

    def _of_model(self, model: Model) -> list[Problem]:
        self._refuse_beside(f"--model {model.slug}", "--model", "--n", "--n-q", "--batch", "--dtype", "--direction")
        # A step of decoding has one query, of the last token: encoders have no such step.
        kinds = [kind for kind in model.attentions if self.n_q is None or kind.causal or kind.n_q is not None]
        if not kinds:
            raise InputError(f"--n-q {self.n_q} was given for {model.slug}, which writes no text: leave --n-q out")
        found = [
            # Cross-attention has a key length of its own.
            kind.problem(n=n, dtype=dtype, batch=self.batch, n_q=self.n_q, direction=self.direction)
            for dtype in self.dtypes or ("bf16",)
            for kind in kinds
            for n in (self.n if self.n and kind.n_q is None else kind.n)
        ]
        return list(dict.fromkeys(found))

    def _of_calls(self, path: Path) -> list[Problem]:
        self._refuse_beside(f"--calls {path}", "--calls", "--score-mod", "--mask-mod")
        register_functions(self.score_mod, self.mask_mod)
        found = list(dict.fromkeys(problem.seen() for problem in read(path)))
        if not found:
            raise InputError(f"{path} holds no calls: run the model before dispatch.save_calls, or name another file")
        for problem in found:
            lengths = max(problem.n_q, problem.n_kv, *(side or 0 for side in problem.features.window or ()))
            if lengths > LONGEST or problem.batch * problem.heads > MOST:
                sizes = f"batch {problem.batch}, heads {problem.heads}"
                raise InputError(f"{path} has a call of sizes that are out of range ({problem.label()}, {sizes}): remove it from the file")
        return found

    def _refuse_beside(self, option: str, *allowed: str) -> None:
        """Raise InputError where an option was given beside one that determines it."""
        if others := [name for name in self.given if name not in allowed]:
            raise InputError(f"{others[0]} was given together with {option}, which already describes the attention: leave one of them out")


_IN_PLACE = "in place of --d and the like"
_SOURCES: tuple[Decorator, ...] = (
    click.option("--full", "bands", flag_value="full", help="Full attention only."),
    click.option("--model", type=MODEL, metavar="NAME", help=f"The attentions of this model, {_IN_PLACE} (flashtune show --models)."),
    click.option(
        "--calls",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"Recorded calls of a model, {_IN_PLACE}: a file of dispatch.save_calls, or of FLASHTUNE_CALLS.",
    ),
)
_SIZES: tuple[Decorator, ...] = (
    click.option("--d-v", "d_v", type=SIZE, help="Head size of v, when it differs from --d."),
    click.option(
        "--n-q", "n_q", type=SIZE, help="Number of queries, when it differs from --n; with --paged those of each sequence (default 1)."
    ),
    click.option("--heads", type=SIZE, help=f"Query heads (default {WIDTH} / D)."),
    click.option("--kv-heads", type=SIZE, help="Key and value heads (default: as many as query heads)."),
    click.option("--batch", type=SIZE, help=f"Batch (default {TOKENS} / N)."),
    click.option(
        "--packed",
        type=click.Choice(LAWS),
        help="Packed sequences, as many as --batch says, whose lengths follow this law and have the mean --n.",
    ),
    click.option(
        "--paged",
        type=SIZE,
        metavar="PAGE",
        help="Sequences, as many as --batch says, with --n keys each in pages of PAGE keys: --n-q 1 decodes, more are chunks of prompts. "
        "--packed gives the law of the numbers of keys (default: equal), and --causal counts from the last key.",
    ),
)
_FEATURES: tuple[Decorator, ...] = (
    click.option("--direction", type=click.Choice(DIRECTIONS), default="fwd", show_default=True, help="Forward or backward pass."),
    click.option("--mask", type=click.Choice([m for m in MASK_KINDS if m != "none"]), help="A boolean mask or an additive bias."),
    click.option(
        "--dropout",
        type=Range(0, 1, max_open=True),
        default=0.0,
        metavar="P",
        help="Dropout rate; one record is used for all rates above 0.",
    ),
    click.option(
        "--window", type=click.IntRange(0, LONGEST), metavar="W", help="Sliding window: W keys to each side (to the left when causal)."
    ),
    click.option(
        "--alignment",
        type=click.Choice(["top-left", "bottom-right"]),
        help="Position of the diagonal when --n-q differs from --n: first query on first key, as in torch (default), or last query on last "
        "key (default with --paged).",
    ),
    click.option(
        "--softcap",
        type=Range(0, float("inf"), max_open=True),
        default=0.0,
        metavar="C",
        help="Soft cap of the scores; one record is used for all caps.",
    ),
    *(click.option(f"--{name.replace('_', '-')}", is_flag=True, help=text) for name, text in SWITCHES.items()),
    *FUNCTIONS,
)


def problem_options(*, many: bool) -> Decorator:
    """Decorator with the options that describe problems, passed as `requested`: `many`, or one of required sizes."""

    def given(each: click.ParamType[Any], *, listed: click.ParamType[Any] | None = None, **settings: Any) -> dict[str, Any]:
        """Settings of an option that may be repeated, of `listed` values, or of one that gives a value like one of its repetitions."""
        if many:
            return {"type": listed or each, "multiple": True}
        return {"type": each, "callback": lambda ctx, param, value: ((value,),) if listed else (value,), **settings}

    several = "; several with commas, blanks or by repeating" if many else ""
    d, n = (given(each, listed=Numbers(each), required=True) for each in (HEAD_SIZE if many else SIZE, SIZE))
    dtype = given(DTYPE, default="bf16", show_default=True)
    causal: dict[str, Any] = {"help": "Causal attention only (default: causal and full)."}
    if not many:
        causal = {"help": "Causal attention.", "default": "full"}
    options: list[Decorator] = [
        click.option("--d", "d", **d, help=f"Head size of q and k{several}."),
        click.option("--n", "n", **n, help=f"Sequence length{several}."),
        click.option("--dtype", "dtype", **dtype, help=f"Element type: {', '.join(DTYPES)}{several}."),
        click.option("--causal", "bands", flag_value="causal", **causal),
        *(_SOURCES if many else ()),
        *_SIZES,
        *_FEATURES,
    ]
    return grouped(options, lambda kwargs: {"requested": ProblemOptions.of(click.get_current_context(), kwargs)})
