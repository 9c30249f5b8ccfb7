"""Source text of transformers' models by the modules of their configurations."""

import functools
import inspect
import re
import sys


@functools.cache
def source_of(configuration: str) -> str:
    """Source text of the model of a configuration's module; empty where it isn't imported or has no file."""
    module = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    try:
        return inspect.getsource(module) if module is not None else ""
    except OSError:
        return ""


def attends_itself(configuration: str) -> bool:
    """True for a model that computes its attention in code of its own, which no registered implementation takes the place of."""
    source = source_of(configuration)
    return bool(source) and "ALL_ATTENTION_FUNCTIONS" not in source and "attention_interface" not in source


# As torch.compiler.assume_constant_result sets it, whose import brings the compiler, which can't trace the reading of files.
attends_itself._dynamo_marked_constant = True  # type: ignore[attr-defined]


def arguments_of_attention(configuration: str) -> list[str]:
    """Texts of the arguments with which the model of a configuration's module calls its attention."""
    return re.findall(r"attention_interface\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", source_of(configuration))
