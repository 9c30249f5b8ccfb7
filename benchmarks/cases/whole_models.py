"""Whole models by `flashtune model`: twelve configs of people's models with few layers, what each gains on this GPU, and in how long.

Each model is a config of its public sizes, with `--layers` of its layers and random weights. Runs the command for each one, prints its
whole-model lines, and writes whole_models.json after each. Searches go to the user's own database; `--budget` limits each.
"""

import json
import math
import subprocess
import sys
import time
from typing import Any

from benchmarks.shared.environment import argument_parser, made_by, names_of, output_folder, this_gpu

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 32000,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 32000,
    },
    "mistral-7b-window": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 1024, "vocab_size": 32000,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "vocab_size": 32000,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 1024, "vocab_size": 32000,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "vocab_size": 32000,
    },
    "bert-base": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "vit-base": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    "whisper-small": {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 768, "encoder_layers": 12,
        "decoder_layers": 12, "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },
    "sdxl-unet": {
        "_class_name": "UNet2DConditionModel", "sample_size": 128, "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048, "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20], "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816, "use_linear_projection": True,
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel", "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    },
}  # fmt: skip
"""Sizes from the configs that their makers publish; vocabularies and experts are smaller, which changes no attention."""

ALLOWED = 0.02
"""Share by which no whole model may be slower than with the best single backend of PyTorch."""


def tuned(name: str, *, layers: int, budget: str, workloads: list[str], limit_s: float) -> dict[str, Any]:
    """Report of the command on a model, with its seconds; or the reason of its failure."""
    folder = output_folder() / "whole_models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in MODELS[name].items() if value is not None}))
    command = [sys.executable, "-m", "flashtune", "model", str(folder), "--layers", str(layers), "--budget", budget, "--json"]
    command += [word for workload in workloads for word in ("--workload", workload)]
    started = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end within {limit_s:.0f} s"}
    seconds = round(time.perf_counter() - started, 1)
    try:
        return {"seconds": seconds, "status": ended.returncode, **json.loads(ended.stdout)}
    except ValueError:
        return {"seconds": seconds, "failed": (ended.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def main() -> None:
    """Run the models that are named."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", type=lambda text: names_of(text, MODELS, "models"), default=",".join(MODELS), help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of each model at most (default: %(default)s)")
    parser.add_argument("--budget", default="3m", help="of each model's search (default: %(default)s)")
    parser.add_argument("--workload", action="append", default=[], help="in place of each model's own workloads; repeatable")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a model is given up (default: %(default)s)")
    options = parser.parse_args()
    this_gpu()
    results: dict[str, Any] = {"provenance": made_by(None), "models": {}}
    gains: list[float] = []
    slower: list[str] = []
    for name in options.models:
        found = tuned(name, layers=options.layers, budget=options.budget, workloads=options.workload, limit_s=options.limit)
        results["models"][name] = found
        for one in found.get("workloads", ()):
            gains += [] if one["speedup"] is None else [one["speedup"]]
            times = f"ours {one['tuned_ms']} ms, torch {one['torch_ms']}, {one['best_backend']} as the best single backend"
            gain = f"speedup {one['speedup']}, over the best {one['against_best']}"
            print(f"{name:18s} {one['workload']:16s} {gain} ({times})  right {one['right']}  {one['left_out'] or ''}", flush=True)
            slower += [f"{name} {one['workload']}"] if (one["against_best"] or 1.0) < 1 / (1 + ALLOWED) else []
        print(f"{name:18s} {found.get('seconds')} s {found.get('failed', '')}", flush=True)
        (output_folder() / "whole_models.json").write_text(json.dumps(results, indent=1))
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        print(f"geometric mean {mean:.3f} of {len(gains)} workloads, minimum {min(gains):.3f}")
    print(f"more than {ALLOWED:.0%} slower than with the best single backend: {', '.join(slower) or 'none'}")
    if any("failed" in found or found["status"] for found in results["models"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
