"""The supervisor process: lifecycle, children, topology, listening socket, run directory."""
