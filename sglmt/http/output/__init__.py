"""What is in a model's text besides prose: its reasoning, and calls of tools."""
