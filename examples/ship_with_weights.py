"""A model's folder with a database beside its weights: the owner exports what was found, and the model's code uses it."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.problems.problem import Features, Problem
from flashtune.db.library import shipped_path

folder = Path(tempfile.mkdtemp())


# The owner, once. The records are those that ship with flashtune here; yours come from `flashtune search` on your GPU.
class Model(nn.Module):
    """Causal attention of 16 heads of 128 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2048, 3 * 2048, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, N, 2048)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 16, 128)).permute(2, 0, 3, 1, 4)
        # This database is for this call alone: another model in the process may have its own.
        with dispatch.use(folder / "tuned.sqlite"):
            return dispatch.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


torch.save(Model().state_dict(), folder / "weights.pt")
main(["export", str(folder / "tuned.sqlite"), "--db", str(shipped_path()), "--gpu-name", "h200", "--d", "128"], standalone_mode=False)

# The user, on any machine.
model = Model()
model.load_state_dict(torch.load(folder / "weights.pt"))
print("output", tuple(model(torch.randn(1, 64, 2048, dtype=torch.bfloat16)).shape))

# What would run such a call on the GPU of the records can be asked anywhere.
problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
with dispatch.use(folder / "tuned.sqlite", alone=True):
    explanation = dispatch.explain_problem(problem, "h200")
print(explanation.kind, explanation.template, explanation.reason)
