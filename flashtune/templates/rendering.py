"""Rendering of variants to source text in one strict Jinja environment; pure and deterministic to the byte."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateError

from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.problems.problem import padded
from flashtune.templates.columns import key_pieces
from flashtune.templates.family import Family
from flashtune.templates.mods.known import functions_of


@cache
def environment() -> Environment:
    """The strict environment: an undefined name is an error, never an empty string."""
    return Environment(
        loader=PackageLoader("flashtune.templates", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        # A process reads each template once; `sources_hash` keeps what it read, too.
        auto_reload=False,
    )


def add_folder(folder: Path) -> None:
    """Add a folder of templates for families outside the package; flashtune's own names take precedence."""
    loader = environment().loader
    assert loader is not None
    environment().loader = ChoiceLoader([loader, FileSystemLoader(folder)])


@cache
def sources_hash(template_file: str) -> str:
    """16 hex digits over the template and every partial that it includes or imports, directly or not."""
    sources: dict[str, str] = {}
    waiting = [template_file]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = _source(name)
            waiting += re.findall(r"{%-?\s*(?:include|import|from|extends)\s+[\"']([^\"']+)[\"']", sources[name])
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    return digest.hexdigest()[:16]


def _source(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]


def variant_of(family: Family, spec: KernelSpec, config: Config) -> Variant:
    """The variant of this family; raises InputError where the config is outside the declared space."""
    family.validate(config)
    return Variant(template=family.name, spec=spec, config=config)


def render(family: Family, variant: Variant) -> str:
    """The source of `variant`: a module of its kernels.

    The config is validated against the declared space first, so that nothing else can reach the text.
    """
    family.validate(variant.config)
    return _text(family, variant)


@lru_cache(maxsize=4096)
def text_hash(family: Family, variant: Variant) -> str:
    """16 hex digits over the text of a variant: they change with this kernel, not with its template."""
    try:
        return hashlib.sha256(_text(family, variant).encode()).hexdigest()[:16]
    except TemplateError:
        # A variant that can't be rendered still needs a hash for its failed trial.
        return sources_hash(family.template_file)


def _text(family: Family, variant: Variant) -> str:
    layout, mods = family.layout(variant.spec, variant.config), functions_of(variant.spec.mods)
    text = (
        environment()
        .get_template(family.template_file)
        .render(
            variant=variant,
            spec=variant.spec,
            config=variant.config.as_dict(),
            layout=layout,
            mods=mods,
            listed=mods is not None and mods.listed(variant.spec),
            block_d=getattr(layout, "block_d", padded(variant.spec.d)),
            block_dv=getattr(layout, "block_dv", padded(variant.spec.d_v)),
            key_pieces=key_pieces(variant.spec),
        )
    )
    if family.host is not None:
        # `flashtune.templates.loading` finds the host side by this constant.
        kernel = {"template": variant.template, "spec": variant.spec.as_dict(), "config": variant.config.as_dict()}
        text += f"\n\nKERNEL = {_literal(kernel)}"
    return re.sub(r"\n{3,}", "\n\n\n", text).rstrip("\n") + "\n"


def _literal(values: Mapping[str, object], indent: str = "") -> str:
    """A dictionary as formatted Python, an entry to a line."""
    lines = ["{"]
    for name, value in values.items():
        nested = _literal(value, f"{indent}    ") if isinstance(value, Mapping) else None
        lines.append(f'{indent}    "{name}": {nested or (json.dumps(value) if isinstance(value, str) else repr(value))},')
    return "\n".join([*lines, f"{indent}}}"])
