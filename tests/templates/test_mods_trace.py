"""Traces of functions: their dependencies, and the values that are constant in their gradients."""

import collections
import dataclasses
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flashtune import dispatch
from flashtune.core.system.errors import InputError
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.templates.mods import bounds
from flashtune.templates.mods.capture import Dependencies
from flashtune.templates.mods.graph import INDICES, ordered
from flashtune.templates.mods.reader import Unsupported
from flashtune.templates.mods.scores import _evaluated, as_function, known_structure
from flashtune.templates.mods.trace import gradients, traced

CPU = torch.device("cpu")
TABLE = torch.arange(60.0).view(15, 4)
WIDTH = torch.tensor(4)
factor = 1.0

Mod = Callable[..., Tensor]


def functions_of(score: Mod) -> Any:
    return flex_functions._traced(score, None, CPU)[0]


def scaled(number: Any) -> Mod:
    return lambda s, b, h, q, k: s + number * torch.sin(s)


def test_numbers_that_are_equal_and_differ_have_traces_of_their_own() -> None:
    numbers = (0.0, -0.0, 1.0, -1.0, 1, True, float("nan"), np.float32(1.0), np.float64(1.0))
    assert len({id(functions_of(scaled(number))) for number in numbers}) == len(numbers)
    assert all(functions_of(scaled(number)) is functions_of(scaled(number)) for number in numbers)


class Slotted:
    __slots__ = ("factor",)


class Base:
    def inherited(self) -> float:
        return factor


class Held(dict[str, float]):
    pass


class Callee(Base):
    factor = 1.0

    def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.scaled(s)

    @staticmethod
    def static() -> float:
        return factor

    @property
    def inherited_twice(self) -> float:
        return 1.0 * super().inherited()

    def __getitem__(self, place: int) -> float:
        return factor

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.scaled(torch.sin(s))

    def scaled(self, s: Tensor) -> Tensor:
        return s * self.factor


def of_slots() -> Iterator[Mod]:
    holder = Slotted()
    for holder.factor in (1.0, 3.0):
        yield lambda s, b, h, q, k: s * holder.factor


def of_a_class() -> Iterator[Mod]:
    called = Callee()
    for Callee.factor in (1.0, 3.0):
        yield called


def of_a_helpers_class() -> Iterator[Mod]:
    helper = Callee()
    for Callee.factor in (1.0, 3.0):
        yield lambda s, b, h, q, k: helper.scaled(s)


def of_an_array() -> Iterator[Mod]:
    array = np.ones(2)
    for array[0] in (1.0, 3.0):
        yield lambda s, b, h, q, k: s * float(array[0])


def of_a_deque() -> Iterator[Mod]:
    queue = collections.deque([0.0])
    for queue[0] in (1.0, 3.0):
        yield lambda s, b, h, q, k: s * queue[0]


def of_a_name() -> Iterator[Mod]:
    for number in (1.0, 3.0):
        globals()["factor"] = number
        yield lambda s, b, h, q, k: s * globals()["factor"]


def scaled_by(x: Any, s: Tensor) -> Tensor:
    return s * x.factor


def of_class(score: Mod) -> Callable[[], Iterator[Mod]]:
    def made() -> Iterator[Mod]:
        for Callee.factor in (1.0, 3.0):
            yield score

    return made


def of_module(score: Mod) -> Callable[[], Iterator[Mod]]:
    def made() -> Iterator[Mod]:
        for number in (1.0, 3.0):
            globals()["factor"] = number
            yield score

    return made


def of_attributes() -> Iterator[Mod]:
    held, table = Held(), torch.ones(4)
    for number in (1.0, 3.0):
        held.factor = table.factor = number  # type: ignore[attr-defined]
        yield lambda s, b, h, q, k: s * held.factor if held.factor == table.factor else s  # type: ignore[attr-defined]


def of_a_bound_look_up() -> Iterator[Mod]:
    held = {"factor": 0.0}
    look_up = held.get
    for held["factor"] in (1.0, 3.0):
        yield lambda s, b, h, q, k: s * look_up("factor")


class Window:
    factor = 1.0


class Layer(torch.nn.Module):
    """A model's layer: what its score reads is little of what it has, and its forward reads what nothing follows."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config, self.own, self.inner = types.SimpleNamespace(factor=1.0, window=Window()), 1.0, Slotted()
        self.inner.factor = 1.0
        self.projection, self.table = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
        self.queue = collections.deque([1.0])

    def of_own(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.own + self.table[h]

    def of_config(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.config.factor

    def of_window(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.config.window.factor

    def of_slots(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.inner.factor

    def of_property(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.helped(s) * self.doubled

    def of_shared(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.shared

    def of_nested(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (lambda: s * self.own)()

    def of_itself(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return of_another(self, s)

    def of_the_queue(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.queue[0]

    def helped(self, s: Tensor) -> Tensor:
        return s if self.own else self.helped(s)

    @property
    def doubled(self) -> float:
        return 1.0 * self.own

    def closing(self) -> Mod:
        return lambda s, b, h, q, k: s * self.config.factor + self.table[h]

    def forward(self, x: Tensor) -> Any:
        return dispatch.flex_attention(*self.projection(x), self.of_own, globals()["factor"])


def of_another(layer: Any, s: Tensor) -> Tensor:
    return s * layer.own  # type: ignore[no-any-return]


LAYER = Layer()


class Settings:
    """Names that no code has."""

    width_1 = 1.0


def of_settings(score: Mod) -> Callable[[], Iterator[Mod]]:
    def made() -> Iterator[Mod]:
        for number in (1.0, 3.0):
            setattr(Settings, "width_" + str(LEVELS[0]), number)
            yield score

    return made


LEVELS = [1]


def of_layer(score: Mod, *path: str) -> Callable[[], Iterator[Mod]]:
    def made() -> Iterator[Mod]:
        owner = functools.reduce(getattr, path[:-1], LAYER)
        for number in (1.0, 3.0):
            setattr(owner, path[-1], number)
            yield score

    return made


def of_an_attribute_in_place_of_the_class() -> Iterator[Mod]:
    yield LAYER.of_shared
    LAYER.shared = 3.0
    yield LAYER.of_shared
    del LAYER.shared


CALLEE = Callee()
SEEN_BEFORE = (lambda: CALLEE.mod), CALLEE
HELD, ASK, THIS, SETTINGS = "".join(("width", "_1")), getattr, sys.modules[__name__], Settings()


def built(x: Any) -> Any:
    return getattr(x, f"width_{LEVELS[0]}")


CHANGED: dict[str, Callable[[], Iterator[Mod]]] = {
    "slots": of_slots, "a class": of_a_class, "a helper's class": of_a_helpers_class, "an array": of_an_array, "a deque": of_a_deque,
    "a name": of_a_name, "attributes of containers and tensors": of_attributes, "a bound look-up": of_a_bound_look_up,
    "a bound method": of_class(CALLEE.mod),
    "an argument": of_class(lambda s, b, h, q, k: scaled_by(CALLEE, s)),
    "a class as argument": of_class(lambda s, b, h, q, k: scaled_by(Callee, s)),
    "a partial function's argument": of_class(functools.partial(lambda x, s, b, h, q, k: scaled_by(x, s), CALLEE)),
    "what another function reads, too": of_class(lambda s, b, h, q, k: s * SEEN_BEFORE[1].factor if SEEN_BEFORE[0]() else s),
    "a name in a text": of_class(lambda s, b, h, q, k: s * getattr(Callee, "factor")),  # noqa: B009
    "a static method": of_module(lambda s, b, h, q, k: s * Callee.static()),
    "a method above": of_module(lambda s, b, h, q, k: s * CALLEE.inherited_twice),
    "own": of_layer(LAYER.of_own, "own"), "of a config": of_layer(LAYER.of_config, "config", "factor"),
    "of a config's object": of_layer(LAYER.of_window, "config", "window", "factor"),
    "slots of an attribute": of_layer(LAYER.of_slots, "inner", "factor"),
    "a property and a method": of_layer(LAYER.of_property, "own"), "within": of_layer(LAYER.of_nested, "own"),
    "handed on": of_layer(LAYER.of_itself, "own"), "of self in a closure": of_layer(LAYER.closing(), "config", "factor"),
    "of a module's variable": of_layer(lambda s, b, h, q, k: s * LAYER.config.factor, "config", "factor"),
    "an attribute that hides the class'": of_an_attribute_in_place_of_the_class,
    "a built name": of_settings(lambda s, b, h, q, k: s * getattr(Settings, f"width_{LEVELS[0]}")),
    "a held name": of_settings(lambda s, b, h, q, k: s * getattr(Settings, HELD)),
    "a chosen name": of_settings(lambda s, b, h, q, k: s * getattr(Settings, HELD if LEVELS else "", 2.0)),
    "another name of getattr": of_settings(lambda s, b, h, q, k: s * ASK(Settings, HELD)),
    "a getter": of_settings(lambda s, b, h, q, k: s * operator.attrgetter(HELD)(Settings)),
    "an object's built name": of_settings(lambda s, b, h, q, k: s * getattr(SETTINGS, f"width_{LEVELS[0]}")),
    "a helper's built name": of_settings(lambda s, b, h, q, k: s * built(Settings)),
    "a module's built name": of_module(lambda s, b, h, q, k: s * getattr(THIS, f"fac{'tor'}")),
    "an index": of_module(lambda s, b, h, q, k: s * CALLEE[0]),
}  # fmt: skip


@pytest.mark.parametrize("made", CHANGED.values(), ids=CHANGED)
def test_what_changes_in_place_is_traced_anew(made: Callable[[], Iterator[Mod]]) -> None:
    numbers = []
    for function in made():
        seen = flex_functions.Snapshot.make(function)
        assert seen is None or numbers == [] or not seen.same(function)
        operations = [node.arguments for node in ordered([functions_of(function).score])]
        numbers.append([x for arguments in operations for x in arguments if isinstance(x, float)])
    assert numbers == [[1.0], [3.0]]


def test_objects_that_stay_the_same_have_one_trace() -> None:
    layer = torch.nn.Linear(4, 4)

    @dataclasses.dataclass
    class Options:
        width: int = 3

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.options = torch.nn.Parameter(torch.randn(4)), Options()

        def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s * self.options.width + self.table[h] + layer.weight[h, 0]

    method = Layer().score
    assert functions_of(method) is functions_of(method)


SCORES = ("of_own", "of_config", "of_window", "of_slots", "of_property", "of_shared", "of_nested")


@pytest.mark.parametrize("name", SCORES)
def test_methods_depend_on_the_attributes_that_they_read_alone(name: str) -> None:
    """So do those of another object that is like it in these."""
    first, second = Layer(), Layer()
    second.queue.append(2.0)
    score = getattr(first, name)
    assert functions_of(score) is functions_of(score) is functions_of(getattr(second, name))
    assert functions_of(first.closing()) is functions_of(second.closing())


def test_another_tensor_in_an_attribute_is_that_of_the_next_call() -> None:
    layer = Layer()
    for _ in range(2):
        layer.table = torch.nn.Parameter(torch.randn(4))
        functions, captured = flex_functions._traced(layer.of_own, None, CPU)
        assert captured[0] is layer.table and not functions.fresh


@pytest.mark.parametrize("kind", ["method", "closure", "object", "handed on", "object in a container", "class", "too much"])
def test_nothing_that_is_kept_of_a_function_holds_what_it_reads(kind: str) -> None:
    class Doc:
        def __init__(self) -> None:
            self.table, self.own = torch.randn(4), 1.0

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.table[h]

    def made() -> tuple[Mod, Tensor]:
        if kind in ("object", "object in a container"):
            doc, docs = Doc(), [Doc()]
            return (doc, doc.table) if kind == "object" else (lambda s, b, h, q, k: docs[0](s, b, h, q, k), docs[0].table)
        if kind == "class":
            table = torch.randn(4)

            class Holder:
                own = None

                @staticmethod
                def at(h: Tensor) -> Tensor:
                    return table[h]

            holder = Holder()
            return lambda s, b, h, q, k: s + (Holder.at(h) if holder is holder.own else holder.at(h)), table
        layer = Layer()
        found = {"method": layer.of_own, "closure": layer.closing(), "handed on": layer.of_itself, "too much": layer.of_the_queue}
        return found[kind], layer.table

    left = []
    # What other tests left needn't be looked at.
    gc.freeze()
    for _ in range(3):
        function, table = made()
        flex_functions.functions_of(function, None, CPU, [("h", 4)])
        left.append(weakref.ref(table))
    del function, table
    gc.collect()
    assert [one() for one in left] == [None] * 3


def test_objects_that_cannot_be_looked_at_have_no_key() -> None:
    nested: Any = None
    for _ in range(2500):
        nested = types.SimpleNamespace(nested=nested, factor=1.0)

    class Broken:
        __slots__ = ("absent",)

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    broken = Broken()
    assert Dependencies(lambda s, b, h, q, k: s * nested.factor).key is None
    assert Dependencies(lambda s, b, h, q, k: s if broken is None else 2 * s).key is None


def test_captured_tensors_that_are_lazily_negated_are_left_to_pytorch() -> None:
    table = torch.view_as_complex(torch.randn(4, 4, 2)).conj().imag
    found = flex_functions.functions_of(lambda s, b, h, q, k: s + table[h, b], None, CPU, [("h", 4), ("b", 4)])
    assert found == "a captured tensor is lazily negated"


def test_the_default_dtype_is_that_of_numbers_and_not_of_the_score() -> None:
    def thirds(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + q / 3

    wide = functions_of(thirds)
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = functions_of(thirds)
    finally:
        torch.set_default_dtype(torch.float32)
    assert functions_of(thirds) is wide is not narrow
    for functions, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        score, quotient = functions.score.arguments
        assert (functions.score.dtype, score.dtype, quotient.dtype) == (torch.float32, torch.float32, dtype)


@pytest.mark.parametrize("convert", [int, float, bool, Tensor.item, Tensor.tolist, range(9).__getitem__], ids=lambda f: f.__name__)
def test_values_of_captured_tensors_stay_tensors(convert: Callable[[Tensor], Any]) -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < convert(WIDTH)

    with pytest.raises(InputError, match=r"near converts a captured tensor's value \(line \d+: return q - k < convert"):
        traced(near, score=False, device=CPU)


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:  # pyright: ignore
        return s * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return 5 * grad


class Unchanged(Fivefold):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        return s


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(s: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        return s + other, s - other

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore
        return 5 * grads[0], grads[1]


class Summing(Fivefold):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.stack([grad, grad]).sum()


class Tanh(torch.autograd.Function):
    """As a soft cap by the GPU's own tanh has it."""

    @staticmethod
    def forward(s: Tensor) -> Tensor:  # pyright: ignore
        found: Tensor = torch.ops.approx.tanh(s)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        [result] = ctx.saved_tensors
        return grad * (1 - result * result)


LEARNED = torch.randn(4, 15, requires_grad=True)


def in_c(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's `apply` without a frame of Python, as PyTorch 2.15 has it."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    assert isinstance(found, types.BuiltinFunctionType)
    return found


LACKING: dict[str, tuple[Mod, str]] = {
    "view": (lambda s, b, h, q, k: s + TABLE.view(4, 15)[h, q], "reshapes a captured tensor"),
    "expand": (lambda s, b, h, q, k: s + TABLE[:1].expand(15, 4)[q, h], "indexes with slice"),
    "expanded": (lambda s, b, h, q, k: s + TABLE.view(1, 60).expand(4, 60)[h, q], "reshapes a captured tensor"),
    "none": (lambda s, b, h, q, k: s + TABLE[None, q, h], "indexes with"),
    "few": (lambda s, b, h, q, k: s + TABLE[..., h], "indexes with"),
    "derivative": (lambda s, b, h, q, k: torch.func.grad(torch.sin)(s), "uses a transform of torch.func"),
    "own derivative of a tensor": (lambda s, b, h, q, k: s * in_c(Fivefold)(LEARNED[h, q]), "applies an autograd.Function"),
    "own derivative that sums": (lambda s, b, h, q, k: Summing.apply(s), "whose result is no scalar"),
    "hook": (lambda s, b, h, q, k: (s := s * 2, s.register_hook(lambda g: 5 * g))[0], "has gradients of its own by register_hook"),
    "derivative by autograd": (lambda s, b, h, q, k: torch.autograd.grad(s * s, s)[0], "has gradients of its own by grad"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_trace_would_lose_is_left_to_pytorch(name: str) -> None:
    function, why = LACKING[name]
    with pytest.raises(Unsupported, match=why):
        traced(function, score=True, device=CPU)


OWN: dict[str, Mod] = {
    "own derivative": lambda s, b, h, q, k: Fivefold.apply(s) * q,
    "in C": lambda s, b, h, q, k: in_c(Fivefold)(s).sin(),
    "of a score left as it is": lambda s, b, h, q, k: in_c(Unchanged)(s) + q,
    "of two": lambda s, b, h, q, k: in_c(Pair)(s, 0.5 * s)[1] + TABLE[q, h],
    "twice": lambda s, b, h, q, k: Fivefold.apply(Fivefold.apply(s) + s.detach()),
}


@pytest.mark.parametrize("name", OWN)
def test_an_own_derivative_is_kept_and_no_known_score_has_it(name: str) -> None:
    found = traced(OWN[name], score=True, device=CPU)
    of_score, of_loads = gradients(found.output)
    score = torch.tensor(0.7, requires_grad=True)
    places = [torch.tensor(place) for place in (1, 2, 3, 4)]
    wanted = OWN[name](score, *places)
    inputs = dict(zip(("score", *INDICES, "grad"), (score.detach(), *places, torch.tensor(2.0)), strict=True))
    for output, value in ((found.output, wanted), (of_score, 2 * torch.autograd.grad(wanted, score)[0])):
        torch.testing.assert_close(torch.as_tensor(_evaluated(output, found.captured, inputs)).float().reshape(()), value.detach())
    assert not of_loads and known_structure(found.output, None) is None
    # As PyTorch computes it where no kernel does, of one pair and of many.
    scores = torch.tensor([0.7, -0.4, 2.5], requires_grad=True)
    again = torch.vmap(as_function(found.output, found.captured), in_dims=(0, *[None] * 4))(scores, *places)
    of_all = [OWN[name](one, *places) for one in scores]
    torch.testing.assert_close(again, torch.stack(of_all).float())
    weights = torch.tensor([1.0, 2.0, -3.0])
    torch.testing.assert_close(*(torch.autograd.grad(x, scores, weights, retain_graph=True)[0] for x in (again, torch.stack(of_all))))


def test_a_soft_cap_by_the_gpus_own_tanh_is_one() -> None:
    library = torch.library.Library("approx", "DEF")
    library.define("tanh(Tensor x) -> Tensor")
    library.impl("tanh", torch.tanh, "CompositeExplicitAutograd")
    library.impl("tanh", torch.tanh, "Meta")
    found = traced(lambda s, b, h, q, k: 20.0 * Tanh.apply(s / 20.0), score=True, device=CPU)
    known = known_structure(found.output, None)
    assert known is not None and known[1].softcap == 20.0 and found.output.own_gradient is None


def test_functions_of_autograd_whose_derivative_nobody_asks_for_are_traced() -> None:
    assert traced(lambda b, h, q, k: in_c(Fivefold)(q / 2) > k, score=False, device=CPU).output.dtype is torch.bool
    for unasked in (lambda s: in_c(Fivefold)(s.detach()), lambda s: in_c(Fivefold)(s) > 0):
        traced(lambda s, b, h, q, k, unasked=unasked: torch.where(unasked(s) > 0, s, 2 * s), score=True, device=CPU)


def test_a_score_changed_in_place_is_traced_as_one_that_is_not() -> None:
    def changed(s: Tensor, *_: Tensor) -> Tensor:
        s *= 2
        return torch.exp(s).add_(1).sqrt_()

    output = traced(changed, score=True, device=CPU).output
    assert [str(node.target) for node in ordered([output]) if node.kind == "operation"] == [
        "aten.mul.Tensor", "aten.exp.default", "aten.add.Tensor", "aten.sqrt.default",
    ]  # fmt: skip


def test_dots_that_stand_for_nothing_are_left_out_and_compiled_functions_are_those_they_compile() -> None:
    assert traced(lambda s, b, h, q, k: s + TABLE[..., q, h], score=True, device=CPU).captured[0] is TABLE
    assert traced(torch.compile(lambda s, b, h, q, k: s + TABLE[q, h]), score=True, device=CPU).captured[0] is TABLE


def test_indices_that_other_types_round_or_wrap_are_not_taken_for_certain() -> None:
    sizes = {"q_idx": 50, "kv_idx": 50, "h": 4, "b": 2}
    for index in (
        lambda q: q.bool().long(), lambda q: (q + 100).to(torch.int8).int(), lambda q: (q / 1.9).int() // 2,
        lambda q: torch.minimum(torch.full((), float("inf")), q / 2.0).int() // 4, lambda q: (q * 0.3).int(),
    ):  # fmt: skip
        output = traced(lambda s, b, h, q, k, index=index: s + TABLE[index(q), h], score=True, device=CPU).output  # type: ignore[misc]
        bounds.check("score", output, (TABLE,), sizes)
    for index in (lambda q: q // 3, lambda q: (q / 3).int(), lambda q: q.float().int() - 35):
        output = traced(lambda s, b, h, q, k, index=index: s + TABLE[index(q), h], score=True, device=CPU).output  # type: ignore[misc]
        with pytest.raises(InputError, match=r"reads index (16|-35) of dimension 0 of a captured tensor, whose size is 15"):
            bounds.check("score", output, (TABLE,), sizes)


def test_threads_trace_one_after_the_other() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for more in range(5):
                functions_of(scaled(number + more / 8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_block_mask_of_other_batches_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) | ((q + k + b) % 3 == 0), 2, 2, 40, 40, device="cpu")
    query = torch.randn(4, 2, 40, 16)
    assert dispatch.explain_flex(query, query, query, None, mask).reason.startswith("PyTorch's flex_attention: the BlockMask is for (2, 2)")


def test_pytorch_names_a_wrong_number_of_dimensions_itself() -> None:
    query = torch.randn(2, 40, 16)
    with pytest.raises(NotImplementedError, match="4D"):
        dispatch.flex_attention(query, query, query, lambda s, b, h, q, k: s + TABLE[q - k + 20, h])


KINKS: list[tuple[Any, float]] = [
    (functional.relu6, 0.0), (functional.relu6, 6.0), (functional.hardtanh, -1.0), (functional.hardtanh, 1.0), (torch.relu, 0.0),
    (functional.hardsigmoid, 3.0), (functional.hardsigmoid, -3.0), (functional.hardswish, 3.0), (torch.sinc, 0.0), (torch.sinc, 1e-20),
    (lambda x: torch.clamp(x, -1, 1), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("function", "at"), KINKS)
def test_derivatives_at_kinks_are_those_of_pytorch(function: Any, at: float) -> None:
    score = functions_of(lambda s, b, h, q, k: function(s)).score
    assert score is not None
    of_score, _ = gradients(score)
    point = torch.tensor(at, requires_grad=True)
    inputs = {"score": point.detach(), "grad": torch.tensor(1.0), **{name: torch.tensor(0) for name in INDICES}}
    found = torch.as_tensor(_evaluated(of_score, (), inputs)).float().reshape(())
    torch.testing.assert_close(found, torch.autograd.grad(function(point), point)[0])
