"""Latent attention: values that are the first columns of keys are recognised by their memory, and kernels read them once."""

from dataclasses import replace

import pytest
import torch
from interpreting import interpreted

from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Features, Problem, padded
from flashtune.core.pytorch.attention import in_columns
from flashtune.core.system.errors import InputError
from flashtune.templates.columns import Piece, key_pieces


def cache_of(d: int = 6, d_v: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.zeros(2, 8, 1, d)
    return cache, cache[..., :d_v]


def test_values_are_known_as_columns_of_keys_by_their_memory() -> None:
    key, value = cache_of()
    assert in_columns(key, value) and in_columns(key, key) and in_columns(key, key[..., :4].detach())
    lookalikes = {
        "a copy": value.clone(),
        "other memory of these strides": cache_of()[1],
        "the last columns": key[..., 2:],
        "other strides": value.as_strided(value.shape, (40, 5, 6, 1)),
        "fewer blocks": key[:1, ..., :4],
        "other bits": key.view(torch.int32)[..., :4],
        "more columns": torch.as_strided(key, (2, 4, 1, 12), key.stride()),
        "no memory": value.to("meta"),
    }
    assert [name for name, other in lookalikes.items() if in_columns(key, other)] == []
    fakes = torch.empty(2, 8, 1, 6, device="meta")
    assert not in_columns(fakes, fakes[..., :4])
    found: list[bool] = []
    torch.func.vmap(lambda x: (found.append(in_columns(x, x[..., :4])), x.sum())[1])(key)
    assert found == [False]


@pytest.mark.parametrize("names", [("sizes",), ()], ids=["the family", "calls"])
def test_kernels_find_values_in_keys(names: tuple[str, ...]) -> None:
    report = interpreted("interpret_latent", *names)
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) >= 3


def test_pieces_cover_every_column_once_with_little_padding() -> None:
    for latent in (False, True):
        for d in range(1, 577):
            for d_v in (1, 24, 64, 257, 512, d):
                if latent and d_v > d:
                    continue
                spec = KernelSpec(
                    direction="fwd", dtype="bf16", d=d, d_v=d_v, causal=False, window=False, softcap=False, mask="none", latent=latent
                )
                pieces = key_pieces(spec)
                ends = [piece.start + piece.width for piece in pieces]
                assert [0, *ends[:-1]] == [piece.start for piece in pieces] and ends[-1] >= d > ends[-1] - pieces[-1].width
                assert all(piece.width & piece.width - 1 == 0 and piece.width >= 16 for piece in pieces)
                assert not latent or pieces[0].width >= d_v
                if max(d, d_v) <= 256 and not latent:
                    assert pieces == (Piece(0, padded(d), "", "BLOCK_D", padded(d) > d),)
                elif not latent:
                    assert ends[-1] - d <= max(64, d // 8)


def test_flag_names_new_kernels_alone() -> None:
    plain = {"direction": "fwd", "dtype": "bf16", "d": 64, "d_v": 64, "causal": False, "window": False, "softcap": False, "mask": "none"}
    assert "latent" not in KernelSpec(**plain).as_dict() and KernelSpec(**plain, latent=True).as_dict()["latent"] is True
    assert "latent" not in Features().as_json()
    with pytest.raises(InputError, match="columns of keys, which have 64, not 128"):
        Problem(batch=1, heads=1, kv_heads=1, n_q=1, n_kv=9, d=64, d_v=128, dtype="bf16", features=Features(latent=True))


def test_values_in_keys_move_no_bytes() -> None:
    plain = Problem(batch=3, heads=16, kv_heads=1, n_q=1, n_kv=100, d=576, d_v=512, dtype="bf16")
    latent = replace(plain, features=Features(latent=True))
    assert plain.io_bytes() - latent.io_bytes() == 3 * 100 * 512 * 2
