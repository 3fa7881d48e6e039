"""Text to token ids and back: loading, chat templates, incremental detokenization, stop strings.

Used by the tokenizer workers (text to ids) and the detokenizer (ids to text). Everything here is pure but `resolve`
(and the modules it is made of), which runs once in the short-lived resolver child and writes what the others only
read, and `loading`, which reads it. Only the resolver may import transformers.
"""
