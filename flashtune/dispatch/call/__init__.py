"""Arguments of `attention`, parsed into a checked `Call`."""

from flashtune.dispatch.call.arguments import Arguments, Options, parse, seed_bits, signed, unwrapped
from flashtune.dispatch.call.checked import Call, Outputs, PerHead

__all__ = ["Arguments", "Call", "Options", "Outputs", "PerHead", "parse", "seed_bits", "signed", "unwrapped"]
