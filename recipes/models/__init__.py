"""Which model does a recipe name, and which builders does it train with? One folder per architecture of torchtitan."""
