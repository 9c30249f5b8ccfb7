"""How torch sees `attention`: as operators under torch.compile, and as a function with gradients."""
