"""Layout of the forward for Hopper over paged caches."""

from flashtune.templates.hopper.layout import HopperLayout


class PagedLayout(HopperLayout):
    """Layout of a program of `flash_fwd_hopper_paged`, whose producer alone differs: it finds the rows of a tile by a table."""

    __slots__ = ()

    @property
    def paged(self) -> bool:
        """True: keys lie in pages."""
        return True

    @property
    def producer_registers(self) -> int:
        """Registers of the producer's threads, which hold entries of the table."""
        return 40

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer thread, less what the producer takes."""
        found = super().consumer_registers
        return None if found is None else found - 8
