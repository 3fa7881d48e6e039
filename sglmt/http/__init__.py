"""The HTTP side of a tokenizer worker: parsing and checking requests, writing answers, in each API's shape."""
