"""The child processes: tokenizer worker, router, scheduler, detokenizer, and their one entry point."""
