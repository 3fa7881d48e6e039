"""The control socket: commands and replies, its server in the supervisor, its client in the command line."""
