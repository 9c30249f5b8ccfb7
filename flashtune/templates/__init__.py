"""Template families: Jinja text beside the search space that it declares."""

from flashtune.core.errors import InputError
from flashtune.templates.family import Family


def families() -> dict[str, Family]:
    """Every family by name, in the order in which they are preferred when nothing was tuned."""
    from flashtune.templates import flash_decode, flash_fwd, flash_fwd_hopper, flash_fwd_tma

    found = (flash_decode.FAMILY, flash_fwd_hopper.FAMILY, flash_fwd_tma.FAMILY, flash_fwd.FAMILY)
    return {family.name: family for family in found}


def family(name: str) -> Family:
    """The family `name`; raises InputError for one that this version doesn't have."""
    found = families().get(name)
    if found is None:
        raise InputError(f"unknown template {name!r}: this flashtune has {', '.join(families())}")
    return found
