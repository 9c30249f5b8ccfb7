"""Models that people run, by the attentions in them: a table of facts with sources (`models.toml`) and the look-up by name."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from flashtune.core.problems.band import Band, diagonal_of
from flashtune.core.problems.config import Direction
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError, did_you_mean

TOKENS = 16384
"""Batch times queries of a problem without a batch: enough to fill the largest GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAttention:
    """One kind of attention of a model.

    `n` are usual numbers of keys; there are as many queries unless `n_q` says otherwise, as in cross-attention. `window` counts the
    query's own key.
    """

    what: str
    heads: int
    kv_heads: int
    d: int
    n: tuple[int, ...]
    d_v: int | None = None
    n_q: int | None = None
    causal: bool = False
    window: int | None = None
    softcap: bool = False
    sinks: bool = False

    def problem(self, *, n: int, dtype: DType, batch: int | None = None, n_q: int | None = None, direction: Direction = "fwd") -> Problem:
        """The problem of `n` keys as dispatch sees it: the diagonal ends at the last key, without sides that hide nothing."""
        n_q = n_q or self.n_q or n
        left, right = (None if self.window is None else self.window - 1), (0 if self.causal else None)
        band = Band(left=left, right=right, diagonal=diagonal_of("bottom_right", n_q, n)).trimmed(n_q, n)
        return Problem(
            batch=batch or max(1, TOKENS // n_q),
            heads=self.heads,
            kv_heads=self.kv_heads,
            n_q=n_q,
            n_kv=n,
            d=self.d,
            d_v=self.d_v or self.d,
            dtype=dtype,
            features=Features.within(band, softcap=self.softcap, sinks=self.sinks),
            direction=direction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model; `--model` takes its slug. `sources` name the files that describe its attentions."""

    slug: str
    name: str
    attentions: tuple[ModelAttention, ...]
    sources: tuple[str, ...]


@cache
def models() -> dict[str, Model]:
    """Every model of the table, by slug."""
    text = resources.files("flashtune.core.records").joinpath("models.toml").read_text()
    return {
        slug: Model(
            slug=slug,
            name=row["name"],
            attentions=tuple(ModelAttention(**{**kind, "n": tuple(kind["n"])}) for kind in row["attentions"]),
            sources=tuple(row["sources"]),
        )
        for slug, row in tomllib.loads(text).items()
    }


def find_model(name: str) -> Model:
    """The model of this slug or name (case and punctuation don't matter); raises InputError with the nearest names."""
    slugs = {_plain(word): model.slug for model in models().values() for word in (model.slug, model.name)}
    slug = slugs.get(_plain(name))
    if slug is None:
        hint = did_you_mean(_plain(name), slugs, cutoff=0.5) or "flashtune show --models lists them"
        raise InputError(f"unknown model {name!r}: {hint}")
    return models()[slug]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
