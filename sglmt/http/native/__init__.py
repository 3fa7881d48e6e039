"""The SGLang-native API: generate, tokenize, detokenize, abort, info."""
