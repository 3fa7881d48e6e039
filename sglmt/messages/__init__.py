"""Every message that crosses a process, filed by who receives it.

`to_scheduler`, `to_detokenizer`, `to_worker`, `control`: the types. `frame`: the fixed prefix and the send door.
`registry`: kind numbers. `columns`: how a batch's fields follow its rows. Imports nothing of ours but `errors`.
"""
