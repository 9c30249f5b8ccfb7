"""An LLM of transformers with tuned attention: one line registers it, one names it. `pip install flashtune[transformers]`."""

import torch
from transformers import AutoModelForCausalLM, MistralConfig

from flashtune.integrations import transformers as tuned

torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(..., attn_implementation=tuned.register())
sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=16)
model = AutoModelForCausalLM.from_config(config).eval()

prompts = torch.randint(3, 500, (2, 24))
padding = torch.ones_like(prompts)
padding[0, :8] = 0  # the first prompt is shorter
words = {"attention_mask": padding, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}

before = model.generate(prompts, **words)
model.set_attn_implementation(tuned.register())
after = model.generate(prompts, **words)

print(after[:, 24:])
print("the same text:", torch.equal(before, after))
