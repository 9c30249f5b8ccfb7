"""Padding-free fine-tuning of an LLM of transformers: sequences in one row of a batch, each of which sees itself alone.

`pip install flashtune[transformers]`. With a Trainer: `data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True)`.
"""

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

from flashtune.integrations import transformers as tuned

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
# A real model: AutoModelForCausalLM.from_pretrained(..., attn_implementation=tuned.register())
sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation=tuned.register()).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

texts = [torch.randint(3, 500, (length,)) for length in (60, 9, 31, 4)]
print(f"padded to the longest, {1 - sum(map(len, texts)) / (4 * 60):.0%} of the batch would be empty")

# Bounds of the sequences are among the batch, so that no layer waits for the GPU; position_ids alone would do, too.
collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
batch = collator([{"input_ids": text} for text in texts], return_tensors="pt")
batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}

# Each text by itself, weighted by the tokens that it predicts.
with torch.no_grad():
    losses = [model(input_ids=text[None].to(device), labels=text[None].to(device)).loss.cpu() for text in texts]
alone = sum(loss * (len(text) - 1) for loss, text in zip(losses, texts, strict=True)) / (sum(map(len, texts)) - len(texts))

for step in range(5):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        print("the loss of each text alone:", torch.allclose(loss.detach().cpu(), alone, rtol=1e-4))
    print(f"step {step}: loss {loss.item():.3f}")
